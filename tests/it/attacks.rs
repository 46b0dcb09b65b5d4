//! Attacks that must fail, one in each file. An ordinary user of the machine attacks root, who runs rockenv by sudo.

mod as_caller;
mod directory;
mod git;
mod planted_links;
mod setuid;
mod store;
mod tree;

use crate::support::loopfs::{Kind, LoopFs};
use crate::support::ordinary::MadeUp;

/// The attacks assume that the user has no privileges, and that sudo makes the user root and sets `SUDO_UID`.
#[test]
fn an_ordinary_user_is_root_by_sudo_only() {
    let disk = LoopFs::new(Kind::Ext4);
    let user = MadeUp::at(disk.path().join("home"));
    let who = "id -u; echo ${SUDO_UID-none}";
    let said = |mut command| crate::support::loopfs::run(&mut command);
    assert_eq!(said(user.command("sh", &["-c", who])), "4321\nnone\n");
    assert_eq!(said(user.sudo("sh", &["-c", who])), "0\n4321\n");
}
