//! An action that repeats while a test works.

use std::sync::atomic::{AtomicBool, Ordering};

/// Repeats `step` on a thread until `work` returns. A panic in `work` ends the thread as well, so the test fails
/// instead of hanging.
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
