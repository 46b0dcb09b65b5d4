//! Owns waiting for a container to end: messages from its agent, its starter's disconnect, and signals.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::{FromHolder, OnDisconnect};
use crate::engine::wire::{FromAgent, ToAgent};
use crate::sys::error::Result;
use crate::sys::frames;
use crate::sys::readable::readable;
use crate::sys::signals::Signals;

/// How long the engine may take to exit by itself, removing its own files, after the agent has exited.
const GRACE: Duration = Duration::from_secs(3);

/// An engine's callbacks while its container is waited for.
pub(in crate::engine) struct Watch<'a> {
    /// What happens when the starter disconnects.
    pub tie: OnDisconnect,
    /// Called when the agent is gone (then with true), and after every signal.
    pub has_ended: &'a mut dyn FnMut(bool) -> Result<bool>,
    /// Called before the agent is told to exit, and when it exits by itself: the container's figures must be read
    /// before they are removed.
    pub dismiss: &'a mut dyn FnMut(),
    /// Called with a number when the container begins to wait for another command, and with `None` when one arrives.
    pub idle: &'a mut dyn FnMut(Option<u64>),
}

/// Waits until the container has ended. Returns whether the agent ever answered.
pub(in crate::engine) fn supervise(
    agent: UnixStream,
    signals: &Signals,
    starter: &UnixStream,
    mut missing: Vec<String>,
    watch: Watch<'_>,
) -> Result<bool> {
    let mut agent = Some(agent);
    let mut starter_open = true;
    let mut ready = false;
    loop {
        if agent.is_none() && (watch.has_ended)(true)? {
            return Ok(ready);
        }
        let given = [
            Some(signals.as_fd()),
            agent.as_ref().map(AsFd::as_fd),
            starter_open.then(|| starter.as_fd()),
        ];
        let happened = readable(given, agent.is_none().then_some(GRACE))?;
        if happened == [false; 3] {
            return Ok(ready);
        }
        let [signalled, from_agent, from_starter] = happened;
        if from_agent && let Some(socket) = &agent {
            match frames::receive::<FromAgent>(socket) {
                Ok(Some((FromAgent::Ready, _))) if !ready => {
                    ready = true;
                    if starter_open {
                        let message = FromHolder::Ready(std::mem::take(&mut missing));
                        drop(frames::send(starter, &message, &[]));
                    }
                }
                Ok(Some((FromAgent::Remaining(count), _))) if !starter_open => {
                    (watch.idle)(None);
                    if count > 0 {
                        drop(frames::send(starter, &FromHolder::Shared, &[]));
                    }
                }
                Ok(Some((FromAgent::Idle(waits), _))) if !starter_open => {
                    (watch.idle)(Some(waits));
                    drop(frames::send(starter, &FromHolder::Shared, &[]));
                }
                // Root of the container can write to the agent's sockets. A forged message must not make a step's
                // starter take the tree while processes use it.
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => {
                    (watch.dismiss)();
                    agent = None;
                }
            }
        }
        if from_starter {
            // The starter only ever closes its end.
            starter_open = false;
            match (watch.tie, &agent) {
                (OnDisconnect::Drain(idle), Some(socket)) => {
                    drop(frames::send(socket, &ToAgent::Drain(idle), &[]));
                }
                (OnDisconnect::Kill, Some(_)) => {
                    (watch.dismiss)();
                    agent = None;
                }
                // The figures were read, and are gone by now.
                (_, None) => {}
            }
        }
        if signalled {
            while let Some(number) = signals.pending()? {
                if number != Signal::SIGCHLD as i32 && agent.is_some() {
                    (watch.dismiss)();
                    agent = None;
                }
            }
            // Checked even without a message from the agent, which may have been killed.
            if (watch.has_ended)(agent.is_none())? {
                return Ok(ready);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::signals;

    /// Supervises a step's container until its agent is gone. Returns whether the agent answered, how many times the
    /// figures were read, and how many times a wait was reported.
    fn supervised(agent: UnixStream, starter: &UnixStream) -> (bool, u32, u32) {
        let signals = signals::block(&[]).unwrap();
        let (mut dismissed, mut rested) = (0, 0);
        let ready = supervise(
            agent,
            &signals,
            starter,
            Vec::new(),
            Watch {
                tie: OnDisconnect::Kill,
                has_ended: &mut |is_gone| Ok(is_gone),
                dismiss: &mut || dismissed += 1,
                idle: &mut |_| rested += 1,
            },
        );
        (ready.unwrap(), dismissed, rested)
    }

    #[test]
    fn a_step_s_container_is_never_shared() {
        let (agent, theirs) = UnixStream::pair().unwrap();
        for said in [
            FromAgent::Ready,
            FromAgent::Remaining(1),
            FromAgent::Idle(1),
            FromAgent::Ready,
        ] {
            frames::send(&theirs, &said, &[]).unwrap();
        }
        drop(theirs);
        let (holder, starter) = UnixStream::pair().unwrap();
        assert_eq!(supervised(agent, &holder), (true, 1, 0));
        drop(holder);
        let heard = || frames::receive::<FromHolder>(&starter).unwrap();
        assert!(matches!(heard(), Some((FromHolder::Ready(_), _))));
        assert!(heard().is_none());
    }

    #[test]
    fn figures_are_read_once() {
        let (agent, theirs) = UnixStream::pair().unwrap();
        let (holder, starter) = UnixStream::pair().unwrap();
        drop((theirs, starter));
        assert_eq!(supervised(agent, &holder), (false, 1, 0));
    }
}
