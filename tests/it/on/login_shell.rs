//! Login shells of other machines that are not Bourne shells.

use std::os::unix::fs::PermissionsExt as _;

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::run::finish;

#[test]
fn any_login_shell_runs_what_is_sent() {
    let store = TestStore::new();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for shell in ["sh", "bash", "zsh", "tcsh", "fish"] {
        // What sshd does: the words of the command, joined, are one argument of the login shell.
        let ssh = store.work().join(format!("ssh-{shell}"));
        let script = "#!/bin/bash\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\n";
        let script = format!("{script}exec {shell} -c \"$*\"\n");
        fs::write(&ssh, script).unwrap();
        fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).unwrap();
        let on = |words: &[&str]| {
            let mut command = store.command(&[&["on", "ssh://there"], words].concat());
            command.env_remove("SUDO_UID").env_remove("SUDO_GID");
            command.env("ROCKENV_SSH", &ssh).env("HOME", home.path());
            finish(format!("{shell}: {}", words.join(" ")), command)
        };
        on(&["ls", "--json"]).ok().prints("[]");
        // A word with all that a shell could take for something else.
        on(&["status", "a!b\n'\\c' $HOME `x`"])
            .exits(2)
            .says(&["a name is up to 64", "$HOME `x`"]);
    }
}
