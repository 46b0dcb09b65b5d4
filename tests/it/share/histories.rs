//! Builds on files of an earlier build are shared only on request, and are marked as such.

use fs_err as fs;
use serde_json::Value;

use super::Two;
use super::files::text;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::transcript::measured;

fn profile(line: &str) -> String {
    format!(
        "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
         [[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\n\
         [[step]]\nname = 'base'\nrun = 'true'\n\
         [[step]]\nname = 'one'\nincremental = true\nrun = 'echo {line} >> /v/build/log; cp /v/build/log /v/out/log'\n"
    )
}

#[test]
fn only_what_a_clean_build_makes_is_shared_unless_asked() {
    let disks = [Kind::Btrfs; 2].map(LoopFs::with_base);
    let two = Two::new(TestStore::on(&disks[0]), TestStore::on(&disks[1]));
    let (one, other) = (&two.one, &two.other);
    let name = two.pushed(&profile("1"));
    for store in [one, other] {
        store.profile_named(name, &profile("2"));
    }
    let ran = |words: &[&str]| one.rockenv(words);
    ran(&["up", name]).ok();
    let log = |store: &TestStore, env: &str| {
        let words = ["exec", env, "--", "cat", "/v/build/log"];
        store.rockenv(&words).ok().text().replace('\n', "")
    };
    assert_eq!(log(one, name), "12");
    // Leftover results of another build would end `up` with 8.
    let forget = || {
        other.rockenv(&["rm", "--yes", name]).ok();
        other.rockenv(&["gc", "--yes"]).ok();
        fs::remove_dir_all(other.home().join("outputs").join(name)).unwrap();
    };

    // Results.
    let exported = one.work().join("exported");
    insta::assert_snapshot!(one.shows("export ENV exported"), @"
    error: env `ENV` is incremental: step `one` was not a clean build: built on files from an earlier build
    help: rockenv up ENV --clean makes a clean one; to export it anyway: --allow-incremental
    exit code 8
    ");
    assert!(!exported.exists());
    ran(&["export", name, text(&exported), "--allow-incremental"]).ok();
    let manifest = fs::read(exported.join(format!("{name}.provenance.json"))).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let steps = &manifest["predicate"]["buildDefinition"]["internalParameters"]["steps"];
    assert_eq!(steps[0]["history"], Value::Null);
    assert_eq!(steps[1]["history"], "incremental");

    // Snapshots as files.
    let said = one.shows(
        "export ENV --snapshots clean.oci.tar
        export ENV --snapshots whole.oci.tar --allow-incremental",
    );
    insta::assert_snapshot!(measured(said), @"
    $ rockenv export ENV --snapshots clean.oci.tar
    warning: snapshot `one` and those after it cannot be shared: it is incremental: built on files from an earlier build; rockenv up ENV --clean makes a clean one; to share it anyway: --allow-incremental
    export to clean.oci.tar … SIZE
    ENV: wrote the image and base to clean.oci.tar (SIZE) in TIME; read them with `rockenv import`
    $ rockenv export ENV --snapshots whole.oci.tar --allow-incremental
    export to whole.oci.tar … SIZE
    ENV: wrote the image and base, one to whole.oci.tar (SIZE) in TIME; read them with `rockenv import`
    ");
    let whole = one.work().join("whole.oci.tar");
    let import = ["import", text(&whole)];
    other
        .rockenv(&import)
        .ok()
        .says(&["skipped incremental snapshots", "one"]);
    other.rockenv(&["up", name]).ok();
    assert_eq!(log(other, name), "2");
    forget();

    // At a registry: only `--allow-incremental` pulls an incremental snapshot.
    two.run(one, &["push", name])
        .ok()
        .says(&["cannot be shared"]);
    two.run(one, &["push", name, "--allow-incremental"]).ok();
    two.run(other, &["up", name, "--pull"]).ok();
    assert_eq!(log(other, name), "2");
    forget();
    two.run(other, &["up", name, "--pull", "--allow-incremental"])
        .ok()
        .says(&["2 steps, 2 done before"]);
    assert_eq!(log(other, name), "12");
    let clean = ["up", name, "--pull", "--allow-incremental", "--clean"];
    two.run(other, &clean).ok().says(&["1 done before"]);
    assert_eq!(log(other, name), "2");
    forget();
    // A clean snapshot replaces the incremental one.
    ran(&["up", name, "--clean"]).ok();
    assert_eq!(log(one, name), "2");
    two.run(one, &["push", name]).ok();
    two.run(other, &["up", name, "--pull"])
        .ok()
        .says(&["2 steps, 2 done before"]);
    assert_eq!(log(other, name), "2");
}

#[test]
fn the_configuration_says_what_serves_a_new_env() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    for line in ["1", "2"] {
        store.profile(&profile(line));
        store.up();
    }
    let second = format!("{}-b", store.env());
    let config = store.work().join(".config/rockenv");
    fs::create_dir_all(&config).unwrap();
    fs::write(config.join("config.toml"), "reuse = \"incremental\"\n").unwrap();
    let words = ["up", store.env(), "--name", &second];
    store.rockenv(&words).ok().says(&["2 steps, 2 done before"]);
    let list = store.rockenv(&["snapshot", "ls", &second]).ok().text();
    assert!(list.contains("step, incremental"), "{list}");
}

#[test]
fn a_lock_file_tells_what_a_clean_build_did_not_make() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    let pins = "; echo \"tool 1 sha256:$(printf %064d 1)\" > /run/rockenv/pins/installed";
    for line in ["1", "2"] {
        let text = profile(line).replace("/v/out/log'", &format!("/v/out/log{pins}'"));
        store.profile(&text);
        store.up();
    }
    let path = store.work().join(format!("profiles/{}.lock", store.env()));
    let lock = |words: &[&str]| {
        let ran = store
            .rockenv(&[&["lock", store.env()], words].concat())
            .ok();
        let text = fs::read_to_string(&path).unwrap();
        (measured(store.shown(&ran)), text)
    };
    let (said, text) = lock(&[]);
    insta::assert_snapshot!(said, @"
    warning: the files fetched by one are not locked, because those steps were not clean builds; rebuild with `up --clean`, or lock them with `--allow-incremental`
    wrote WORK/profiles/ENV.lock: image base with N packages, 0 sources, 0 hooks, 2 steps
    ");
    assert!(
        !text.contains("tool") && !text.contains("incremental"),
        "{text}"
    );
    let (said, text) = lock(&["--allow-incremental"]);
    insta::assert_snapshot!(said, @"
    installed one/tool added: 1 sha256:ID
    step one: clean -> incremental
    wrote WORK/profiles/ENV.lock: 2 changes
    ");
    assert!(
        text.contains("tool") && text.contains("incremental = true"),
        "{text}"
    );
    store.rockenv(&["up", store.env(), "--clean"]).ok();
    let (said, text) = lock(&["--update", "all"]);
    insta::assert_snapshot!(said, @"
    step one: incremental -> clean
    image base … SIZE
    image base … done in TIME
    wrote WORK/profiles/ENV.lock: 1 change
    ");
    assert!(
        text.contains("tool") && !text.contains("incremental"),
        "{text}"
    );
}
