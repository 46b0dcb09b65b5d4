//! The whole output of the commands that only read a store.

use std::process::Command;

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::run::{finish, surround, wait_until};
use crate::support::transcript::measured;

const STEPS: &str = "[[volume]]
name = 'build'
kind = 'build'
target = '/b'
[[volume]]
name = 'out'
kind = 'output'
target = '/out'
[[volume]]
name = 'cache'
kind = 'cache'
target = '/cache'
[[step]]
name = 'compile'
run = 'echo compiled; echo a > /b/a; echo c > /cache/c'
[[step]]
name = 'install'
run = 'cp /b/a /out/a; cp /b/a ~/a'
";

/// Returns what commands print, without differences between machines and test images.
fn shows(store: &TestStore, commands: &str) -> String {
    let text = measured(store.shows(commands));
    // Lines wrap at 80 columns, and the store's path is long.
    let text = text.replace("at\n       STORE", "at STORE");
    // All tests share the image, so its age and number of packages vary.
    let text = text.replace("; built within the last hour", "");
    let Some((before, after)) = text.split_once("base  directory  AGE  ") else {
        return text;
    };
    let after = after.trim_start_matches(|digit: char| digit.is_ascii_digit());
    format!("{before}base  directory  AGE  N{after}")
}

#[test]
fn a_store_is_read_in_many_ways() {
    let store = TestStore::new();
    store.configure("jobs = 2\n");
    insta::assert_snapshot!(shows(&store, "ls\nimage ls\ncache ls\nplan ENV"), @"
    $ rockenv ls
    no envs yet; begin with: rockenv up hip-smoke
    $ rockenv image ls
    image  provider  built  packages  size  digest
    arch  pacstrap
    base  directory  AGE  N  SIZE  ID
    debian-bookworm  mmdebstrap
    debian-forky  mmdebstrap
    debian-trixie  mmdebstrap
    fedora  oci
    therock-manylinux  oci
    therock-manylinux-7.10  oci
    therock-manylinux-7.11  oci
    therock-manylinux-7.12  oci
    therock-manylinux-7.13  oci
    therock-manylinux-7.14  oci
    therock-manylinux-7.9  oci
    ubuntu-24.04  mmdebstrap
    $ rockenv cache ls
    cache  content  on disk  max  mounted by
    $ rockenv plan ENV
    error: no profile or target `ENV`
    help: `rockenv profile ls` and `rockenv target ls` show them all
    exit code 7
    ");
    store.profile(STEPS);
    let said = shows(&store, "profile check ENV\nplan ENV\nup ENV\nup ENV");
    insta::assert_snapshot!(said, @"
    $ rockenv profile check ENV
    ENV: ok, 2 steps
    $ rockenv plan ENV
    ENV: `up` would run 2 steps

    image  base
    engine nspawn (root, and systemd-nspawn is installed)
    store  overlay at STORE
    jobs  2 (configured), of 2 on this machine (configured)
    memory no limit
    disk  not declared; SIZE free at STORE
    time  unknown: none of its steps has run here before
    gpu  none

    step  plan  why
    compile  run  new
    install  run  a step before it runs
    build volumes are kept
    $ rockenv up ENV
    ENV: 2 steps, 0 done before; engine nspawn (root, and systemd-nspawn is installed)
    step 1/2 compile …
    step 1/2 compile … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    step 2/2 install …
    step 2/2 install … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    ENV: done; to enter it: rockenv shell ENV
    results: STORE/outputs/ENV/out (SIZE)
    $ rockenv up ENV
    ENV: nothing to do
    results: STORE/outputs/ENV/out (SIZE)
    ");
    store.sh("echo mine > ~/mine; rm ~/a").ok();
    let create = store.command(&["snapshot", "create", store.env(), "mine"]);
    let trace = store.work().join("trace");
    let mut traced = Command::new("strace");
    traced
        .args(["-f", "-qq", "-y", "-e", "trace=fdatasync", "-o"])
        .arg(&trace)
        .arg(create.get_program())
        .args(create.get_args());
    surround(&mut traced, &create);
    finish("snapshot create".to_owned(), traced).ok();
    // After a power failure, the description of the layer tells that the rest was not on disk.
    let synced = fs::read_to_string(&trace).unwrap();
    assert!(synced.contains("/layer.json>"), "{synced}");
    store.rockenv(&["down", store.env()]).ok();
    let trash = store.home().join("trash");
    wait_until("the trash is empty", || {
        fs::read_dir(&trash).unwrap().next().is_none()
    });
    let said = shows(
        &store,
        "ls
        status ENV
        logs ENV compile
        env ENV
        snapshot ls ENV
        snapshot diff ENV compile mine
        cache ls
        fsck
        du
        du ENV",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv ls
    env  state  profile  targets  image  snapshots  used
    ENV  ready  ENV  base  3  AGE
    $ rockenv status ENV
    env  ENV
    state  ready
    profile  ENV
    image  base (debian 13, built AGE)
    store  overlay
    created  DATE UTC
    step  state  wall  cpu  memory  with page cache  read  written  disk
    compile  done  TIME  TIME  SIZE  SIZE  SIZE  SIZE  +SIZE
    install  done  TIME  TIME  SIZE  SIZE  SIZE  SIZE  +SIZE
    results: STORE/outputs/ENV/out (SIZE)
    $ rockenv logs ENV compile
    compiled
    $ rockenv env ENV
    profile `ENV` sets no runtime variables
    $ rockenv snapshot ls ENV
       snapshot  origin  created  layer
       compile  step  AGE  ID
       install  step  AGE  ID
    *  mine  user  AGE  ID
    $ rockenv snapshot diff ENV compile mine
    A /home/builder/mine
    $ rockenv cache ls
    cache  content  on disk  max  mounted by
    cache  -  SIZE  -  ENV
    $ rockenv fsck
    STORE: no problems
    $ rockenv du
    what  on disk  apparent
    env ENV  SIZE  SIZE  `rockenv rm ENV` frees SIZE
      snapshots  SIZE  SIZE
      build volumes  SIZE  SIZE
        build  SIZE  SIZE
      logs  SIZE  SIZE
      records  SIZE  SIZE
    image base  SIZE  SIZE  needed by ENV
    cache cache  SIZE  SIZE
    output ENV/out  SIZE  SIZE
    store metadata  SIZE  SIZE
    total  SIZE  SIZE

    file system: SIZE used, SIZE free of SIZE
    $ rockenv du ENV
    what  on disk  apparent
    image base  SIZE  SIZE
    build volume build  SIZE  SIZE
    snapshot compile  SIZE  SIZE
    snapshot install  SIZE  SIZE
    snapshot mine  SIZE  SIZE
    logs  SIZE  SIZE
    records  SIZE  SIZE
    cache cache  SIZE  SIZE  kept by `rm`
    output out  SIZE  SIZE  kept by `rm`
    total  SIZE  SIZE
    only here  SIZE  freed by `rockenv rm ENV`

    file system: SIZE used, SIZE free of SIZE
    ");
    let roots = shows(&store, "gc --roots");
    let mut roots: Vec<_> = roots.lines().skip(1).collect();
    roots.sort_unstable();
    insta::assert_snapshot!(roots.join("\n"), @"
    image base  SIZE  env ENV depends on it
    layer ID (compile)  SIZE  env ENV depends on it; `keep-last`: snapshot compile of env ENV
    layer ID (install)  SIZE  env ENV depends on it; newest snapshot of env ENV: install
    layer ID (mine)  SIZE  env ENV depends on it; snapshot mine of env ENV: you took it
    ");
    for (line, schema) in [
        ("plan ENV", "plan"),
        ("status ENV", "status"),
        ("env ENV", "env"),
        ("report ENV", "report"),
        ("du", "du"),
        ("gc -n", "gc"),
        ("gc --roots", "gc-roots"),
        ("fsck", "fsck"),
        ("profile show ENV", "profile"),
        ("target show gfx1103", "target"),
        ("target detect", "gpus"),
        ("setup -n", "setup"),
    ] {
        let line = line.replace("ENV", store.env());
        let words: Vec<&str> = line.split(' ').chain(["--json"]).collect();
        let json = store.rockenv(&words).ok().json();
        assert_eq!(json["schema"], format!("rockenv/{schema}/1"));
    }
    // The output after a change to a step.
    store.profile(&STEPS.replace("cp /b/a ~/a", "cp /b/a ~/b"));
    let said = shows(&store, "plan ENV\nup ENV\nsnapshot ls ENV\nrm ENV\nls");
    insta::assert_snapshot!(said, @"
    $ rockenv plan ENV
    ENV: `up` would run 1 step, in about TIME

    image  base
    engine nspawn (the env was created with it)
    store  overlay at STORE
    jobs  2 (configured), of 2 on this machine (configured)
    memory no limit; step `install` held SIZE before
    disk  not declared; SIZE free at STORE
    time  about TIME for 1 of 1 step, by earlier runs
    gpu  none

    step  plan  why
    compile  have  snapshot is there
    install  run  changed: script
    this store cannot restore build volumes (overlay): the step continues with the current ones; `--clean` empties them and runs every step again
    `up` replaces the snapshot install
    build volumes are kept
    $ rockenv up ENV
    ENV: 2 steps, 1 done before
    warning: this store cannot restore build volumes (overlay): the step continues with the current ones; `--clean` empties them and runs every step again
    step 2/2 install …
    step 2/2 install … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    ENV: done; to enter it: rockenv shell ENV
    results: STORE/outputs/ENV/out (SIZE)
    $ rockenv snapshot ls ENV
       snapshot  origin  created  layer
       mine  user  AGE  ID
       compile  step  AGE  ID
    *  install  step, incremental  AGE  ID
    $ rockenv rm ENV
    ENV: removed
    $ rockenv ls
    no envs yet; begin with: rockenv up hip-smoke
    ");
}

#[test]
fn a_lock_file_is_made_compared_and_kept() {
    let store = TestStore::new();
    store.profile(STEPS);
    store.rockenv(&["lock", store.env()]).ok();
    let lock = store.work().join(format!("profiles/{}.lock", store.env()));
    fs::copy(&lock, store.work().join("old.lock")).unwrap();
    store.profile(&STEPS.replace("echo compiled", "echo built"));
    let said = store.shows(
        "up ENV --locked
        lock ENV
        lock diff old.lock profiles/ENV.lock
        lock diff old.lock old.lock",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv up ENV --locked
    error: `WORK/profiles/ENV.lock` does not match: step `compile` differs from the lock file: its script has changed
    help: rockenv lock ENV
    exit code 8
    $ rockenv lock ENV
    step compile: its script changed
    and the step after `compile`: `install`
    wrote WORK/profiles/ENV.lock: 1 change
    $ rockenv lock diff old.lock profiles/ENV.lock
    step compile: its script changed
    and the step after `compile`: `install`
    $ rockenv lock diff old.lock old.lock
    nothing changed
    ");
}
