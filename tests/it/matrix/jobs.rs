//! Job definitions that `matrix` writes for other systems.

use fs_err as fs;
use serde_json::Value;

use super::{STEPS, remove, steps};
use crate::support::env::TestStore;

#[test]
fn jobs_of_ci_are_one_line_of_json() {
    let store = TestStore::new();
    steps(
        &store,
        &format!("{STEPS}[[step]]\nname = 'test'\ngpu = true\nrun = 'true'\n"),
    );
    let runners = store.work().join("runners.toml");
    fs::write(&runners, "[gpu]\ngfx1103 = ['self-hosted', '780m']\n").unwrap();
    let runners = runners.to_str().unwrap();
    let asked = ["matrix", "json", "-p", store.env(), "gfx1103", "gfx1201"];
    let ran = store.rockenv(&[&asked[..], &["--runners", runners]].concat());
    let text = ran
        .ok()
        .says(&["no job runs the steps with a GPU for gfx1201"])
        .text();
    assert_eq!(text.lines().count(), 1);
    let json: Value = serde_json::from_str(&text).unwrap();
    let jobs = json["include"].as_array().unwrap();
    let env = format!("{}-gfx1103", store.env());
    assert_eq!(jobs.len(), 3);
    assert_eq!(jobs[1]["needs"], env.as_str());
    assert_eq!(
        jobs[1]["runner"],
        serde_json::json!(["self-hosted", "780m"])
    );
    // `up` accepts the job's arguments, and creates the env that the job names.
    let up: Vec<&str> = jobs[0]["up"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one.as_str().unwrap())
        .collect();
    store.rockenv(&[&["up"], &up[..]].concat()).ok();
    assert!(store.home().join("envs").join(&env).exists());
    remove(&store);
    let part = store
        .rockenv(&[&asked[..], &["--shard", "2/2"]].concat())
        .ok()
        .text();
    assert!(
        part.contains("gfx1201") && !part.contains("gfx1103"),
        "{part}"
    );
    let empty = store.rockenv(&[&asked[..], &["--shard", "3/3"]].concat());
    empty.ok().prints("{\"include\":[]}");
    fs::write(runners, "[gpu]\ngfx1104 = ['a']\n").unwrap();
    let said = store.shows(
        "matrix json -p ENV gfx1103 --shard 3/2
        matrix json -p ENV gfx1103 --runners runners.toml",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv matrix json -p ENV gfx1103 --shard 3/2
    error: invalid value '3/2' for '--shard <I/N>': a part is written `1/4`, from 1/4 to 4/4

    For more information, try '--help'.
    exit code 2
    $ rockenv matrix json -p ENV gfx1103 --runners runners.toml
    error: cannot read `runners.toml`
      caused by: no target or family `gfx1104`
    help: did you mean `gfx1100`?
    exit code 3
    ");
}

#[test]
fn jobs_use_the_store_and_the_registry_that_are_named() {
    let store = TestStore::new();
    steps(&store, STEPS);
    let home = store.work().join("my $store");
    let home = home.to_str().unwrap();
    let write = |more: &[&str], form: &[&str]| {
        let which = ["--profile", store.env(), "gfx1103"];
        store.rockenv(&[more, &["matrix"], form, &which].concat())
    };
    let slurm = write(&["--home", home], &["slurm"]).ok().text();
    assert!(
        slurm.contains(&format!("rockenv --home '{home}' -v up ")),
        "{slurm}"
    );
    let setup = format!("export ROCKENV_HOME='{home}'");
    let setup = format!("--setup {} names", shlex::try_quote(&setup).unwrap());
    let kubernetes = ["kubernetes", "--image", "i", "--claim", "c"];
    for form in [&["github"][..], &["gitlab"], &kubernetes] {
        write(&["--home", home], form)
            .exits(2)
            .says(&["`--home`", &setup]);
    }
    let said = ["bad reg", "foo"]
        .map(|registry| write(&[], &["slurm", "--registry", registry]).exits(2).err);
    insta::assert_snapshot!(said.concat(), @"
    error: `bad reg` names no registry
    help: registry.example.org/name, or registry.example.org/name:tag
    error: `foo` names no registry
    help: registry.example.org/name, or registry.example.org/name:tag
    ");
    // The jobs pull from this registry. It may be unreachable from here, and no other one is configured.
    let registry = ["matrix", "gitlab", "--registry", "registry.invalid/r"];
    let which = [
        "--profile",
        store.env(),
        "gfx1103",
        "--",
        "--pull",
        "--push",
    ];
    let pipeline = store.rockenv(&[&registry[..], &which].concat()).ok().text();
    assert!(
        pipeline.contains("rockenv-metrics.jsonl --pull --push"),
        "{pipeline}"
    );
}
