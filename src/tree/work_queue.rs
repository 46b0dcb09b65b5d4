//! Owns the task queue of several threads that work on one tree, newest first, so that few directories are open.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::sys::error::{Error, Result};
use crate::sys::thread;

#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    wake: Condvar,
    waiting: AtomicUsize,
}

#[derive(Debug)]
struct State<T> {
    tasks: VecDeque<T>,
    active: usize,
    stop: bool,
    error: Option<Error>,
    failures: usize,
}

impl<T: Send> Queue<T> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                tasks: VecDeque::new(),
                active: 0,
                stop: false,
                error: None,
                failures: 0,
            }),
            wake: Condvar::new(),
            waiting: AtomicUsize::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a thread is waiting for tasks. The answer may be stale, which costs only time.
    pub(crate) fn has_idle_thread(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn push(&self, tasks: impl IntoIterator<Item = T>) {
        let mut state = self.lock();
        let before = state.tasks.len();
        state.tasks.extend(tasks);
        let added = state.tasks.len() - before;
        drop(state);
        match added {
            0 => {}
            1 => self.wake.notify_one(),
            _ => self.wake.notify_all(),
        }
    }

    /// Adds a task to be done when no other is left.
    pub(crate) fn push_last(&self, task: T) {
        self.lock().tasks.push_front(task);
        self.wake.notify_one();
    }

    /// Records a failure and lets the work continue; the first failure is returned at the end.
    pub(crate) fn fail(&self, error: Error) {
        let mut state = self.lock();
        if !state.stop {
            state.failures += 1;
            state.error.get_or_insert(error);
        }
    }

    /// Records the decisive failure; no further task starts.
    pub(crate) fn abort(&self, error: Error) {
        let mut state = self.lock();
        if !state.stop {
            state.stop = true;
            state.failures = 1;
            state.error = Some(error);
        }
        drop(state);
        self.wake.notify_all();
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.lock().error.is_some()
    }

    /// Returns the error to report and the number of failures.
    pub(crate) fn into_failure(self) -> Option<(Error, usize)> {
        let state = self
            .state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        state.error.map(|error| (error, state.failures))
    }

    /// Fails with the decisive failure, or else with the first.
    pub(crate) fn into_result(self) -> Result<()> {
        self.into_failure().map_or(Ok(()), |(error, _)| Err(error))
    }

    /// Runs until no task is left and none can be added; each thread has its own state, which `end` receives.
    pub(crate) fn run<S: Default + Send>(
        &self,
        work: impl Fn(T, &mut S) + Sync,
        end: impl FnMut(S),
    ) {
        // More threads would only wait for the same journal.
        let threads = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
        self.run_on(threads, S::default, work, end);
    }

    /// Like [`run`](Self::run), on at most this many threads, of which the calling one is the first: it does all of the
    /// work if no other can be started.
    pub(crate) fn run_on<S: Send>(
        &self,
        threads: usize,
        start: impl Fn() -> S + Sync,
        work: impl Fn(T, &mut S) + Sync,
        mut end: impl FnMut(S),
    ) {
        let take_tasks = || {
            let mut state = start();
            while let Some(task) = self.next() {
                let _busy = Busy(self);
                work(task, &mut state);
            }
            state
        };
        std::thread::scope(|scope| {
            let new = |_| std::thread::Builder::new().spawn_scoped(scope, take_tasks);
            let others: Vec<_> = (1..threads).map_while(|at| new(at).ok()).collect();
            end(take_tasks());
            for other in others {
                end(thread::joined(other.join()));
            }
        });
    }

    fn next(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.stop || (state.tasks.is_empty() && state.active == 0) {
                drop(state);
                self.wake.notify_all();
                return None;
            }
            if let Some(task) = state.tasks.pop_back() {
                state.active += 1;
                return Some(task);
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
            state = self
                .wake
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A task in progress. Its drop also covers a panic, which would otherwise leave the other threads waiting forever.
struct Busy<'a, T: Send>(&'a Queue<T>);

impl<T: Send> Drop for Busy<'_, T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.active -= 1;
        if std::thread::panicking() {
            state.stop = true;
        }
        let idle = state.active == 0;
        drop(state);
        if idle {
            self.0.wake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calling_thread_does_the_work_without_others() {
        let (queue, mut done) = (Queue::new(), Vec::new());
        queue.push([3]);
        let work = |task: usize, seen: &mut Vec<_>| {
            queue.push((0..task).map(|_| 0));
            seen.push((task, std::thread::current().id()));
        };
        queue.run_on(1, Vec::new, work, |seen| done.extend(seen));
        let this = std::thread::current().id();
        assert_eq!(done, [(3, this), (0, this), (0, this), (0, this)]);
    }
}
