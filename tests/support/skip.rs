//! Reports that a test cannot run here, and why; with `CI=true` that is a failure.

#![allow(dead_code, reason = "each test program uses a part")]

use std::io::Write as _;

/// Reports that the test `name` cannot run; the test returns after it.
///
/// The line reaches the terminal although test output is captured, and `tests/all` repeats it at the end.
pub(crate) fn skip(name: &str, reason: &str) {
    let variable = |wanted: &str| {
        std::env::vars_os()
            .find(|(variable, _)| variable == wanted)
            .map(|(_, value)| value)
    };
    assert!(
        variable("CI").is_none_or(|value| value != "true"),
        "{name} cannot run here, and in CI every test has to: {reason}"
    );
    let line = format!("SKIPPED: {name}: {reason}\n");
    // Not a macro, whose output would be captured.
    std::io::stderr()
        .write_all(line.as_bytes())
        .expect("standard error");
    if let Some(path) = variable("ROCKENV_TEST_SKIPPED") {
        let mut list = fs_err::OpenOptions::new()
            .append(true)
            .create(true)
            .open(std::path::PathBuf::from(path))
            .expect("the list of skipped tests");
        // A single write, because other tests append to the same file.
        list.write_all(line.as_bytes())
            .expect("the list of skipped tests");
    }
}
