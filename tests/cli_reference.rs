//! `docs/reference/cli.md` is what the program says of itself; `ROCKENV_UPDATE=1 cargo test --test cli_reference` writes it anew.

use rockenv::sys::error::{EXIT_CODES, Kind};

#[test]
fn docs_cli_md_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/cli.md");
    let text = rockenv::cli::reference::markdown();
    #[expect(
        clippy::disallowed_methods,
        reason = "a switch of the test, not of the program"
    )]
    if std::env::var_os("ROCKENV_UPDATE").is_some() {
        fs_err::write(path, &text).unwrap();
    }
    let on_disk = fs_err::read_to_string(path).unwrap_or_default();
    assert!(
        on_disk == text,
        "docs/reference/cli.md is stale: ROCKENV_UPDATE=1 cargo test --test cli_reference"
    );
}

#[test]
fn every_exit_code_is_documented() {
    for kind in [
        Kind::Unexpected,
        Kind::Usage,
        Kind::Invalid,
        Kind::Unavailable,
        Kind::StepFailed,
        Kind::Busy,
        Kind::NotFound,
        Kind::Drift,
        Kind::Preflight,
        Kind::OutOfSpace,
        Kind::Signal(2),
        Kind::Signal(15),
        Kind::Command(127),
    ] {
        let code = kind.exit_code().to_string();
        assert!(
            EXIT_CODES
                .iter()
                .any(|(codes, _)| codes.split(", ").any(|one| one == code)),
            "{kind:?} has no line in EXIT_CODES"
        );
    }
}
