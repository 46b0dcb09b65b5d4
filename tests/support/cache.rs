//! Files that tests fetch or build once per checkout.

use std::path::{Path, PathBuf};

use fs_err as fs;

/// Returns the path `made` in the cache directory `name`. The first caller runs `make`, and other callers wait. `make`
/// gets the cache directory, creates `made` under another name, and renames it when it is complete.
pub(crate) fn made_once(name: &str, made: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&cache).expect("a cache directory");
    let lock = fs::File::create(cache.join("lock")).expect("a lock file");
    lock.file().lock().expect("the lock");
    let made = cache.join(made);
    if !made.exists() {
        make(&cache);
    }
    made
}
