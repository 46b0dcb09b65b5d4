//! Owns frames on Unix stream sockets between rockenv's processes: a length, a JSON body, and file descriptors sent
//! with the length.

use std::io::{IoSlice, IoSliceMut, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recv, recvmsg, sendmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::sys::error::{Error, Result, encoded};
use crate::sys::readable::readable;

/// Maximum size of a body in bytes, many times that of a step's script and environment.
const MAX_BODY: u32 = 16 << 20;
const MAX_FDS: usize = 4;
/// Time for the rest of a frame after its first bytes. Root in a container can write to the agent's sockets, and could
/// otherwise keep their readers busy forever.
const REST: Duration = Duration::from_secs(20);

pub(crate) fn send(socket: &UnixStream, body: &impl Serialize, fds: &[RawFd]) -> Result<()> {
    let body = encoded(serde_json::to_vec(body), "a frame")?;
    let length = u32::try_from(body.len())
        .ok()
        .filter(|length| *length <= MAX_BODY)
        .ok_or_else(|| {
            invalid!(
                "a command of {} bytes, with its environment, is too long",
                body.len()
            )
            .help("put it into a file")
        })?
        .to_le_bytes();
    let slices = [IoSlice::new(&length)];
    let rights = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    // A stream socket's buffer takes four bytes completely or not at all.
    let flags = MsgFlags::MSG_NOSIGNAL;
    let sent = sendmsg::<()>(socket.as_raw_fd(), &slices, control, flags, None);
    sent.map_err(|error| not_sent(error.into()))?;
    (&mut &*socket).write_all(&body).map_err(not_sent)
}

/// Makes the error for a failed send: a killed peer is not a bug.
fn not_sent(error: std::io::Error) -> Error {
    if is_gone(&error) {
        unavailable!("the container ended").source(error)
    } else if error.kind() == std::io::ErrorKind::WouldBlock {
        unavailable!("the container does not answer")
    } else {
        error.into()
    }
}

/// Returns whether the peer has closed its end or was killed, even in the middle of a frame.
fn is_gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, UnexpectedEof};
    matches!(
        error.kind(),
        BrokenPipe | ConnectionReset | NotConnected | UnexpectedEof
    )
}

/// Receives one frame and its descriptors; `None` at the end of the stream.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: &UnixStream,
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    receive_within(socket, REST)
}

fn receive_within<T: DeserializeOwned>(
    socket: &UnixStream,
    rest: Duration,
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    let mut length = [0u8; 4];
    let mut space = nix::cmsg_space!([RawFd; MAX_FDS]);
    let mut fds = Vec::new();
    let read = {
        let mut slices = [IoSliceMut::new(&mut length)];
        let message = loop {
            match recvmsg::<()>(
                socket.as_raw_fd(),
                &mut slices,
                Some(&mut space),
                MsgFlags::MSG_CMSG_CLOEXEC,
            ) {
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::ECONNRESET) => return Ok(None),
                other => break other?,
            }
        };
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(received) = control {
                fds.extend(received.into_iter().map(own));
            }
        }
        message.bytes
    };
    if read == 0 {
        return Ok(None);
    }
    let until = Instant::now() + rest;
    if !fill(socket, &mut length[read..], until)? {
        return Ok(None);
    }
    let length = u32::from_le_bytes(length);
    if length > MAX_BODY {
        return Err(unexpected!(
            "a frame of {length} bytes is longer than {MAX_BODY}"
        ));
    }
    let mut body = vec![0; length as usize];
    if !fill(socket, &mut body, until)? {
        return Ok(None);
    }
    let body = serde_json::from_slice(&body).map_err(|error| {
        // An upgrade replaces the program of a command while it runs, so its next holder is of another version.
        unavailable!("cannot decode a message of another process of rockenv")
            .source(error)
            .help("if rockenv was upgraded meanwhile, run the command again")
    })?;
    Ok(Some((body, fds)))
}

/// Reads the rest of a frame; returns whether it arrived.
fn fill(socket: &UnixStream, mut buffer: &mut [u8], until: Instant) -> Result<bool> {
    while !buffer.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(unavailable!(
                "the container sent a part of a message and then stopped"
            ));
        }
        readable([Some(socket.as_fd())], Some(left))?;
        match recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
            Ok(0) | Err(nix::Error::ECONNRESET) => return Ok(false),
            Ok(count) => buffer = &mut buffer[count..],
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
            Err(error) => return Err(not_sent(error.into())),
        }
    }
    Ok(true)
}

#[expect(
    unsafe_code,
    reason = "descriptors received by SCM_RIGHTS arrive as bare numbers"
)]
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just created this descriptor for this process, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_arrives_with_its_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        send(&a, &15, &[file.as_fd().as_raw_fd()]).unwrap();
        let (body, fds) = receive::<i32>(&b).unwrap().unwrap();
        assert_eq!(body, 15);
        assert_eq!(fds.len(), 1);
        // The peer is killed in the middle of a frame.
        (&a).write_all(&[9, 0, 0, 0, b'{']).unwrap();
        drop(a);
        assert!(receive::<i32>(&b).unwrap().is_none());
        let error = send(&b, &15, &[]).unwrap_err();
        assert_eq!(error.kind(), crate::sys::error::Kind::Unavailable);
    }

    #[test]
    fn a_frame_that_does_not_end_is_given_up() {
        let (a, b) = UnixStream::pair().unwrap();
        for part in [&[9, 0][..], &[9, 0, 0, 0, b'{']] {
            (&a).write_all(part).unwrap();
            let rest = Duration::from_millis(50);
            let error = receive_within::<i32>(&b, rest).unwrap_err();
            assert_has!(error.message(), "then stopped");
        }
        // The peer sends one byte at a time.
        let (a, b) = UnixStream::pair().unwrap();
        (&a).write_all(&10_000_u32.to_le_bytes()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while (&a).write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let rest = Duration::from_millis(100);
            assert!(receive_within::<Vec<i32>>(&b, rest).is_err());
            drop(b);
        });
    }

    #[test]
    fn a_long_body_is_refused() {
        let (a, b) = UnixStream::pair().unwrap();
        (&a).write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert_has!(receive::<i32>(&b).unwrap_err().message(), "longer than");
    }
}
