//! Attacks that have to fail: each as an ordinary user of the machine, beside root who comes by sudo. One file an attack.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "attacks/directory.rs"]
mod directory;
#[path = "attacks/git.rs"]
mod git;
#[path = "attacks/setuid.rs"]
mod setuid;
#[path = "attacks/store.rs"]
mod store;
mod support;

#[path = "attacks/as_caller.rs"]
mod as_caller;
#[path = "attacks/tree.rs"]
mod tree;

use support::loopfs::{Kind, LoopFs};
use support::ordinary::MadeUp;

/// What the attacks count on: the user is nobody special, and sudo makes them root and says who called.
#[test]
fn an_ordinary_user_is_root_by_sudo_only() {
    let disk = LoopFs::new(Kind::Ext4);
    let user = MadeUp::at(disk.path().join("home"));
    let who = "id -u; echo ${SUDO_UID-none}";
    let said = |mut command| support::loopfs::run(&mut command);
    assert_eq!(said(user.command("sh", &["-c", who])), "4321\nnone\n");
    assert_eq!(said(user.sudo("sh", &["-c", who])), "0\n4321\n");
}
