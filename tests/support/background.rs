//! Something that goes on while a test works.

use std::sync::atomic::{AtomicBool, Ordering};

/// Repeats `step` in a thread until `work` has returned. A `work` that panics ends the thread as well, so that the test fails at once
/// instead of waiting for ever.
pub(crate) fn while_repeating<T>(step: impl Fn() + Sync, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = SetOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                step();
            }
        });
        work()
    })
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
