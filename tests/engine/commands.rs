//! What a command inside sees, and what comes back from it.

use crate::support::env::TestStore;

#[test]
fn exit_codes_pass_through() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = 'one'\nrun = 'true'\n");
    for code in [0, 1, 7, 126, 127, 200, 255] {
        store.sh(&format!("exit {code}")).exits(code);
    }
    for signal in [1, 2, 9, 15] {
        store.sh(&format!("kill -{signal} $$")).exits(128 + signal);
    }
    store
        .rockenv(&["exec", store.env(), "--", "no-such-program"])
        .exits(127)
        .says(&["cannot run `no-such-program`: no such file"]);
    store
        .rockenv(&["exec", store.env(), "--", "/etc/passwd"])
        .exits(126)
        .says(&["cannot run `/etc/passwd`: permission denied"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}
