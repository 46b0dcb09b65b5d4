//! A ninja that is a client of jobservers, which Debian has only from forky on: the binary from its Python package, fetched
//! once for each checkout.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use fs_err as fs;

use super::loopfs::run;

const PINNED: &str = "ninja==1.13.0 \
    --hash=sha256:fb46acf6b93b8dd0322adc3a4945452a4e774b75b91293bafcc7b7f8e6517dfa\n";

/// Returns the program.
pub(crate) fn ninja() -> PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(fetch).clone()
}

fn fetch() -> PathBuf {
    let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("ninja-1.13.0");
    fs::create_dir_all(&cache).expect("a cache directory");
    let lock = fs::File::create(cache.join("lock")).expect("a lock file");
    lock.file().lock().expect("the lock");
    let program = cache.join("ninja");
    if !program.exists() {
        let pinned = cache.join("pinned");
        fs::write(&pinned, PINNED).expect("a list of packages");
        let script = r#"
            cd "$1"
            python3 -m pip download -q --no-deps --require-hashes -r pinned -d . \
                --only-binary=:all: --platform manylinux2014_x86_64
            python3 -m zipfile -e ninja-*.whl whole
            install -m 755 whole/ninja-*.data/scripts/ninja part
            mv part ninja"#;
        run(Command::new("sh").args(["-euc", script, "sh"]).arg(&cache));
    }
    program
}
