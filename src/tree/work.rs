//! Owns the queue for several threads that work on one tree, newest first so that few directories are open.

use std::collections::VecDeque;
use std::ops::AddAssign;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::sys::error::Error;

/// Tasks, and the state of the work.
pub(super) struct Queue<T> {
    state: Mutex<State<T>>,
    wake: Condvar,
}

struct State<T> {
    tasks: VecDeque<T>,
    active: usize,
    stop: bool,
    error: Option<Error>,
    failures: usize,
}

impl<T: Send> Queue<T> {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                tasks: VecDeque::new(),
                active: 0,
                stop: false,
                error: None,
                failures: 0,
            }),
            wake: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds tasks to be done next.
    pub(super) fn push(&self, tasks: impl IntoIterator<Item = T>) {
        let mut state = self.lock();
        let before = state.tasks.len();
        state.tasks.extend(tasks);
        let added = state.tasks.len() - before;
        drop(state);
        // The thread that adds tasks continues with one of them itself.
        if added > 1 {
            self.wake.notify_all();
        }
    }

    /// Adds a task to be done when there is nothing else.
    pub(super) fn push_last(&self, task: T) {
        self.lock().tasks.push_front(task);
        self.wake.notify_one();
    }

    /// Records a failure, the first of which is returned at the end; the work continues.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.lock();
        if !state.stop {
            state.failures += 1;
            state.error.get_or_insert(error);
        }
    }

    /// Records the decisive failure, after which no further task is begun.
    pub(super) fn abort(&self, error: Error) {
        let mut state = self.lock();
        if !state.stop {
            state.stop = true;
            state.failures = 1;
            state.error = Some(error);
        }
        drop(state);
        self.wake.notify_all();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.lock().error.is_some()
    }

    /// Returns the error to report and the number of failures.
    pub(super) fn into_failure(self) -> Option<(Error, usize)> {
        let state = self
            .state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        state.error.map(|error| (error, state.failures))
    }

    /// Works until no task is left and none can come any more; returns the sum of the threads' results.
    pub(super) fn run<S>(&self, work: impl Fn(T, &mut S) + Sync) -> S
    where
        S: Default + AddAssign + Send,
    {
        // More than a few threads would only wait for the same journal.
        let threads = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        let mut sum = S::default();
                        while let Some(task) = self.next() {
                            let _busy = Busy(self);
                            work(task, &mut sum);
                        }
                        sum
                    })
                })
                .collect();
            let mut total = S::default();
            for worker in workers {
                match worker.join() {
                    Ok(sum) => total += sum,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            total
        })
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
            state = self
                .wake
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A task in progress. Ends also by a panic, which would otherwise leave the other threads waiting.
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
