//! Owns distributing work among the walker's threads.
//!
//! Every worker keeps its own stack and shares only when another one has run dry, so that the usual case takes no
//! lock. The stack makes the walk depth first, which keeps the number of waiting directories small.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Tasks from busy workers, and the workers waiting for them.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    wake: Condvar,
    hungry: AtomicUsize,
    workers: usize,
}

#[derive(Debug)]
struct State<T> {
    tasks: Vec<T>,
    waiting: usize,
}

impl<T> Queue<T> {
    /// Makes a queue for exactly `workers` threads: the walk is over when all of them wait.
    pub(crate) fn new(tasks: Vec<T>, workers: usize) -> Self {
        Self {
            state: Mutex::new(State { tasks, waiting: 0 }),
            wake: Condvar::new(),
            hungry: AtomicUsize::new(0),
            workers,
        }
    }

    /// Returns whether some worker waits for tasks; may be out of date, which costs only time.
    pub(crate) fn hungry(&self) -> bool {
        self.hungry.load(Ordering::Relaxed) > 0
    }

    /// Gives tasks to waiting workers.
    pub(crate) fn give(&self, tasks: impl IntoIterator<Item = T>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.tasks.extend(tasks);
        self.hungry.store(
            state.waiting.saturating_sub(state.tasks.len()),
            Ordering::Relaxed,
        );
        drop(state);
        self.wake.notify_all();
    }

    /// Waits for a task; `None` when every worker waits, which means that the walk is over.
    pub(crate) fn take(&self) -> Option<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        loop {
            if let Some(task) = state.tasks.pop() {
                state.waiting -= 1;
                return Some(task);
            }
            if state.waiting == self.workers {
                self.wake.notify_all();
                return None;
            }
            self.hungry.store(state.waiting, Ordering::Relaxed);
            state = self
                .wake
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Counts a panicking worker as waiting for ever, so that the others end and the panic is seen.
#[derive(Debug)]
pub(crate) struct Leave<'q, T>(pub(crate) &'q Queue<T>);

impl<T> Drop for Leave<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.waiting += 1;
            drop(state);
            self.0.wake.notify_all();
        }
    }
}
