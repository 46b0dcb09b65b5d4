//! `verify` on each engine: the inputs of steps, and the files that they leave.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use fs_err as fs;
use nix::mount::{MsFlags, mount, umount};

use crate::support::env::{TestStore, build_user};
use crate::support::git::{Daemon, repository};
use crate::support::loopfs::private_mounts;
use crate::support::run::Ran;

fn verify(store: &TestStore, more: &[&str]) -> Ran {
    store.rockenv(&[&["verify", store.env()], more].concat())
}

/// Fails unless the store has only the test's env, and that env has no trace of the command.
#[track_caller]
fn nothing_else(store: &TestStore) {
    let envs = fs::read_dir(store.home().join("envs")).unwrap().flatten();
    for env in envs.filter(|env| env.file_name().to_str() != Some(store.env())) {
        let left = fs::read_dir(env.path()).unwrap().flatten();
        let left: Vec<PathBuf> = left.map(|entry| entry.path()).collect();
        assert!(left.iter().all(|path| path.ends_with("lock")), "{left:?}");
    }
    store.rockenv(&["fsck"]).ok();
}

/// Makes a directory that the user owns.
fn directory(store: &TestStore, name: &str, files: &[(&str, &str)]) -> PathBuf {
    let directory = store.work().join(name);
    fs::create_dir_all(&directory).unwrap();
    let (user, _) = build_user();
    for (name, text) in files {
        fs::write(directory.join(name), text).unwrap();
        std::os::unix::fs::chown(directory.join(name), Some(user), Some(user)).unwrap();
    }
    std::os::unix::fs::chown(&directory, Some(user), Some(user)).unwrap();
    directory
}

/// Covers every input of a step: packages, copied files, sources from git and of the user with hooks, a cache, and the
/// files of earlier steps.
#[test]
fn what_steps_begin_with_is_there_when_they_are_built_again() {
    let store = TestStore::new();
    let served = tempfile::tempdir().unwrap();
    let commit = repository(&served.path().join("lib"), "lib.txt", "lib\n");
    let daemon = Daemon::start(served.path());
    let own = directory(&store, "own", &[("a.txt", "one\n"), ("b.txt", "two\n")]);
    let hook = store.work().join("hooks/fix");
    fs::create_dir_all(&hook).unwrap();
    let patch = "--- a/b.txt\n+++ b/b.txt\n@@ -1 +1 @@\n-two\n+TWO\n";
    fs::write(hook.join("fix.patch"), patch).unwrap();
    fs::write(
        hook.join("hook.toml"),
        "schema = 1\ndescription = 'a test'\nwhy = 'to see'\nvolume = 'own'\n[[patch]]\nfile = 'fix.patch'\n\
         [[edit]]\nfile = 'a.txt'\nfind = 'one'\nreplace = 'ONE'\n\
         [script]\nrun = 'echo script >> a.txt'\nchanges = ['a.txt']\n",
    )
    .unwrap();
    let files = store.work().join("profiles/files");
    fs::create_dir_all(files.join("sub")).unwrap();
    fs::write(files.join("tool"), "#!/bin/sh\necho tool\n").unwrap();
    fs::set_permissions(files.join("tool"), std::fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(files.join("sub/text"), "text\n").unwrap();
    let profile = format!(
        "hooks = ['fix']\n\
         [[volume]]\nname = 'lib'\nkind = 'source'\ngit = 'git://127.0.0.1:{}/lib'\nrev = '{commit}'\ntarget = '/v/lib'\n\
         [[volume]]\nname = 'own'\nkind = 'source'\npath = '../own'\ntarget = '/v/own'\n\
         [[volume]]\nname = 'b'\nkind = 'build'\ntarget = '/v/b'\n\
         [[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\n\
         [[volume]]\nname = 'c'\nkind = 'cache'\ntarget = '/v/c'\n\
         [[step]]\nname = 'tools'\npackages = ['make']\n\
         [[step]]\nname = 'copied'\ncopy = [{{ from = 'files', to = '/opt/files' }}]\n\
         [[step]]\nname = 'build'\ninputs = ['lib', 'own']\nrun = '''\n\
         cat /v/lib/lib.txt /v/own/a.txt /v/own/b.txt > ~/sources; /opt/files/tool > ~/tool; make --version > ~/version\n\
         test ! -e /v/c/full || echo full > ~/full; touch /v/c/full; mkdir -p ~/empty /v/b/d /v/out/lib\n\
         cp ~/sources /v/b/d/; cp ~/sources /v/out/lib/lib.so.1; ln -s lib.so.1 /v/out/lib/lib.so; echo made > /v/own/made'''\n\
         [[step]]\nname = 'install'\nrun = 'cp /v/b/d/sources ~/installed; cp /v/out/lib/lib.so ~/lib; cat /v/own/made > ~/made'\n",
        daemon.port()
    );
    store.up_with(&profile);
    drop(daemon);
    let outputs = store.home().join("outputs").join(store.env());
    let marked = outputs.join("out/mine");
    fs::write(&marked, "mine").unwrap();
    store.sh("echo mine > ~/mine").ok();
    let ran = verify(&store, &[]);
    let text = ran.text();
    for step in ["tools", "copied", "build", "install"] {
        assert!(text.contains(&format!("{step}: the same\n")), "{ran:?}");
    }
    ran.ok().says(&["reproduced"]);
    verify(&store, &["--with-caches"])
        .exits(8)
        .says(&[" of 4 steps differ"]);
    store
        .sh("cat ~/mine ~/sources ~/tool; ls /v/out; ls /v/c; cat /v/own/made")
        .ok()
        .prints("mine\nlib\nONE\nscript\nTWO\ntool\nlib\nmine\nfull\nmade");
    assert_eq!(fs::read_to_string(own.join("a.txt")).unwrap(), "one\n");
    assert!(!own.join("made").exists());
    nothing_else(&store);
    store.up().says(&["nothing to do"]);
    // An input of the step has changed since.
    fs::write(files.join("sub/text"), "other\n").unwrap();
    verify(&store, &["copied"])
        .exits(3)
        .says(&["its inputs have changed since: files"]);
    fs::write(files.join("sub/text"), "text\n").unwrap();
    fs::write(hook.join("fix.patch"), patch.replace("+TWO", "+zwei")).unwrap();
    verify(&store, &["build"])
        .exits(3)
        .says(&["its inputs have changed since: hook fix"]);
    nothing_else(&store);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

#[test]
fn what_comes_out_differently_has_its_paths() {
    let store = TestStore::new();
    let now = "date +%s.%N";
    store.up_with(&format!(
        "volume = [{{ name = 'b', kind = 'build', target = '/b' }}, {{ name = 'out', kind = 'output', target = '/out' }}]\n\
         [[step]]\nname = 'one'\nrun = 'mkdir -p ~/d /b/d /out/d; for p in ~/d /b/d /out/d; do {now} > $p/when; ln -s $({now}) $p/link; done'\n\
         [[step]]\nname = 'two'\nrun = 'echo two > ~/two'\n\
         [[step]]\nname = 'three'\nuser = 'root'\nrun = '{now} > /etc/when'\n"
    ));
    let text = verify(&store, &["one"]).exits(8).text();
    for line in ["/home/builder/d/when: content", "/out/d/when: content"] {
        assert!(text.contains(line), "{text}");
    }
    for line in [
        "/home/builder/d/link: links to `",
        "/out/d/link: links to `",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let text = verify(&store, &["three"]).exits(8).text();
    assert!(text.contains("/etc/when: content"), "{text}");
    nothing_else(&store);
    store.up().says(&["nothing to do"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

/// With a service, a step writes to a copy of a user's directory.
#[test]
fn what_is_the_users_is_not_written_to() {
    let store = TestStore::new();
    let own = directory(&store, "own", &[("input", "1")]);
    let host = store.runs();
    std::os::unix::fs::chown(&host, Some(build_user().0), None).unwrap();
    // A file has its time in the copy too.
    let file = directory(&store, "conf", &[("file", "1")]).join("file");
    let out = directory(&store, "out", &[]);
    let past = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    let conf = fs::OpenOptions::new().append(true).open(&file).unwrap();
    conf.set_modified(past).unwrap();
    store.up_with(&format!(
        "[[volume]]\nname = 'own'\nkind = 'source'\npath = '../own'\ntarget = '/own'\n\
         [[volume]]\nname = 'host'\nkind = 'host'\naccess = 'rw'\npath = '{}'\ntarget = '/host'\n\
         [[volume]]\nname = 'conf'\nkind = 'host'\naccess = 'rw'\npath = '{}'\ntarget = '/conf'\n\
         [[volume]]\nname = 'out'\nkind = 'output'\npath = '../out'\ntarget = '/out'\n\
         [[step]]\nname = 'one'\ninputs = ['own/input']\nrun = '''\n\
         cat /own/input > ~/input; stat -c %Y /conf > ~/time; echo ran >> /host/log; echo made > /own/made\n\
         echo result > /out/result'''\n",
        host.display(),
        file.display()
    ));
    fs::write(out.join("result"), "mine").unwrap();
    fs::remove_file(own.join("made")).unwrap();
    verify(&store, &[]).ok().prints("one: the same");
    assert_eq!(fs::read_to_string(host.join("log")).unwrap(), "ran\n");
    assert_eq!(fs::read_to_string(out.join("result")).unwrap(), "mine");
    assert!(!own.join("made").exists());
    // Neither an overlay nor a copy would show a mount inside.
    private_mounts();
    let inner = own.join("inner");
    fs::create_dir(&inner).unwrap();
    let (none, tmpfs) = (Some("none"), Some("tmpfs"));
    mount(none, &inner, tmpfs, MsFlags::empty(), None::<&str>).unwrap();
    verify(&store, &[])
        .exits(3)
        .says(&["another file system is mounted in volume `own`"]);
    umount(&inner).unwrap();
    // A `verify` that fails reports the reason, and leaves nothing either.
    fs::write(own.join("input"), "2").unwrap();
    verify(&store, &[])
        .exits(3)
        .says(&["its inputs have changed since: own/input"]);
    nothing_else(&store);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}
