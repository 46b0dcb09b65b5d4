//! A step puts a link in place of a directory that another volume names: rockenv does not follow it.

use fs_err as fs;

use crate::support::env::TestStore;

const PROFILE: &str = "[[volume]]\nname = 'src'\nkind = 'source'\ntarget = '/v/src'\npath = 'SOURCE'\n\
    [[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\npath = 'SOURCE/dist'\n\
    [[step]]\nname = 'plant'\nrun = 'rm -rf /v/src/dist; ln -s SECRET /v/src/dist'\n\
    [[step]]\nname = 'use'\nuser = 'root'\nrun = 'cat /v/out/key; echo changed > /v/out/key'\n";

#[test]
fn an_output_directory_that_became_a_link_is_neither_mounted_nor_read() {
    let store = TestStore::new();
    let (source, secret) = (store.work().join("project"), store.work().join("secret"));
    for directory in [&source, &secret] {
        fs::create_dir(directory).unwrap();
    }
    std::os::unix::fs::chown(&source, Some(1234), Some(1234)).unwrap();
    fs::write(secret.join("key"), "of somebody else\n").unwrap();
    let place = |text: &str| {
        let text = text.replace("SOURCE", source.to_str().unwrap());
        text.replace("SECRET", secret.to_str().unwrap())
    };
    store.profile(&place(PROFILE));
    let refused = "project/dist` is a link in a directory that steps of env";
    for _ in 0..2 {
        let up = store.rockenv(&["up", store.env()]).exits(3);
        let text = up.text();
        assert!(!text.contains("of somebody else"), "{text}");
        up.says(&[refused]);
    }
    for command in [
        &["exec", store.env(), "--", "cat", "/v/out/key"][..],
        &["export", store.env(), "elsewhere"],
    ] {
        let ran = store.rockenv(command);
        assert_ne!(ran.code, 0, "{command:?}");
        assert!(!ran.text().contains("of somebody else"), "{command:?}");
    }
    let key = fs::read_to_string(secret.join("key")).unwrap();
    assert_eq!(key, "of somebody else\n");
    // A link that no step can have made is the user's own, and rockenv follows it.
    let (real, link) = (store.work().join("real"), store.work().join("link"));
    fs::create_dir(&real).unwrap();
    std::os::unix::fs::chown(&real, Some(1234), Some(1234)).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    fs::remove_file(source.join("dist")).unwrap();
    let steps = "[[step]]\nname = 'make'\nrun = 'echo made > /v/out/made'\n";
    let volumes = PROFILE.split("[[step]]").next().unwrap();
    let volumes = volumes.replace("SOURCE/dist", link.to_str().unwrap());
    store.profile(&place(&format!("{volumes}{steps}")));
    store.rockenv(&["up", store.env()]).ok();
    assert_eq!(fs::read_to_string(real.join("made")).unwrap(), "made\n");
}
