//! The options of `up` after `--` in jobs, and which workflows wait for each other.

use std::process::Stdio;

use fs_err as fs;
use serde_json::Value;

use super::{TARGETS, endings, github, gitlab, left, project, script, shell, text, texts, written};
use crate::support::env::TestStore;
use crate::support::run::{Background, finish, wait_for_process};

#[test]
fn the_job_for_common_steps_builds_no_others() {
    let store = TestStore::new();
    project(&store);
    // The step that is not common fails for one env only.
    fs::write(store.runs().join("no-gfx1103"), "").unwrap();
    let more = ["--one-store", "--", "--until", "own"];
    let workflow = written(&store, "github", "vendor.github-workflows", &more);
    let all = [
        "clean: success",
        "common: success",
        "env-E-gfx1103: 5 step `own` failed with exit code 1",
        "env-E-gfx1103-gpu: skipped",
        "env-E-gfx1201: success",
    ];
    assert_eq!(endings(&store, &github(&store, &workflow)), all);
    let pipeline = written(&store, "gitlab", "vendor.gitlab-ci", &more);
    let ended = endings(&store, &gitlab(&store, &pipeline));
    assert_eq!(ended.last().unwrap(), "what is common: success");
    assert_eq!(left(&store), [""; 0]);
    // A runner without root ends the shell of a cancelled job, but not the `up` that `sudo` started in this shell.
    let jobs = &workflow["jobs"];
    let build = &jobs[&format!("env-{}-gfx1201", store.env())]["steps"][1];
    let clean = &jobs["clean"]["steps"][0];
    let status = "${{ contains(needs.*.result, 'cancelled') && 'cancelled' || 'success' }}";
    assert_eq!(clean["env"]["CI_JOB_STATUS"], status);
    let sleeper = store.sleeper();
    fs::write(store.runs().join("wait"), &sleeper).unwrap();
    let mut building = shell(&store, text(build, "run"), store.home());
    building.stdin(Stdio::null()).stdout(Stdio::null());
    building.stderr(Stdio::null());
    let building = Background::start(building);
    wait_for_process(&sleeper);
    let clean = format!("export CI_JOB_STATUS=cancelled\n{}", text(clean, "run"));
    script(&store, &clean).ok();
    assert_ne!(building.wait().code, 0);
    assert_eq!(left(&store), [""; 0]);
    for (options, until) in [
        (&["--until", "own"][..], "two"),
        (&["--until=one"], "one"),
        // A step that runs again does so in each env.
        (&["--rerun", "two"], "one"),
        (&["--rerun=own"], "two"),
    ] {
        let image = ["--image", "i", "--claim", "c"];
        for (system, more) in [
            ("github", &["--one-store", "--runners", "runners.toml"][..]),
            ("gitlab", &["--one-store"]),
            ("slurm", &[]),
            ("kubernetes", &image),
        ] {
            let asked = ["matrix", system, "--profile", store.env()];
            let asked = [&asked[..], &TARGETS, more, &["--"], options].concat();
            let text = store.rockenv(&asked).ok().text();
            let lines = text.lines().filter(|line| line.contains(" -v up "));
            let common = lines.map(str::trim_end).next().unwrap();
            let end = format!("--until {until}");
            assert!(common.ends_with(&end), "{system} {options:?}: {common}");
            assert!(!common.contains("--rerun"), "{common}");
        }
    }
}

#[test]
fn an_option_that_is_given_is_not_written_twice() {
    let store = TestStore::new();
    project(&store);
    let measured = ["--", "--metrics", "m.jsonl"];
    let pipeline = written(&store, "gitlab", "vendor.gitlab-ci", &measured);
    let build = format!("build {}-gfx1201", store.env());
    assert_eq!(texts(&pipeline[&build]["artifacts"]["paths"]), ["m.jsonl"]);
    let ended = endings(&store, &gitlab(&store, &pipeline));
    assert!(
        ended.contains(&"build E-gfx1201: success".to_owned()),
        "{ended:?}"
    );
    assert!(store.work().join("m.jsonl").exists());
    let said = store.shows(
        "matrix gitlab --profile ENV gfx1103 -- --metrics /m.jsonl
        matrix gitlab --profile ENV gfx1103 -- --metrics ../m.jsonl
        matrix github --profile ENV gfx1201 --one-store",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv matrix gitlab --profile ENV gfx1103 -- --metrics /m.jsonl
    no job runs the steps with a GPU for gfx1103: no runner has such a GPU
    error: `--metrics /m.jsonl`: GitLab keeps only files of the checkout
    help: --metrics rockenv-metrics.jsonl
    exit code 2
    $ rockenv matrix gitlab --profile ENV gfx1103 -- --metrics ../m.jsonl
    no job runs the steps with a GPU for gfx1103: no runner has such a GPU
    error: `--metrics ../m.jsonl`: GitLab keeps only files of the checkout
    help: --metrics rockenv-metrics.jsonl
    exit code 2
    $ rockenv matrix github --profile ENV gfx1201 --one-store
    no job runs the steps with a GPU for gfx1201: no runner has such a GPU
    error: `--one-store`: each job on `ubuntu-latest` gets a new machine
    help: list machines of your own in a file for `--runners FILE`, or use `--registry`
    exit code 2
    ");
    for (system, more) in [
        ("github", &[][..]),
        ("gitlab", &[]),
        ("kubernetes", &["--image", "i", "--claim", "c"]),
    ] {
        for home in [&["--home", "/s"][..], &["--home=/s"]] {
            let asked = ["matrix", system, "--profile", store.env(), "gfx1103"];
            let asked = [&asked[..], more, &["--"], home].concat();
            insta::allow_duplicates! {
                insta::assert_snapshot!(store.rockenv(&asked).shown(), @"
                error: `--home` names the store of this machine, which these jobs do not see
                help: --setup 'export ROCKENV_HOME=/s' names the jobs' store
                exit code 2
                ");
            }
        }
    }
}

#[test]
fn two_workflows_of_one_repository_do_not_cancel_each_other() {
    let store = TestStore::new();
    project(&store);
    for (more, group) in [
        (&[][..], "rockenv-${{ github.workflow }}-${{ github.ref }}"),
        // The envs of one store have the same names on every ref.
        (&["--one-store"], "rockenv-${{ github.workflow }}"),
    ] {
        let workflow = written(&store, "github", "vendor.github-workflows", more);
        assert_eq!(workflow["concurrency"]["group"], group);
        // Without a `name`, GitHub uses the file's path.
        assert_eq!(workflow["name"], Value::Null);
    }
}

#[test]
fn jobs_see_only_profiles_of_their_checkout() {
    let store = TestStore::new();
    project(&store);
    let name = format!("{}.toml", store.env());
    let inside = store.work().join("profiles").join(&name);
    let user = store.user_config().join("profiles");
    fs::create_dir(&user).unwrap();
    fs::copy(&inside, user.join("others.toml")).unwrap();
    let below = store.work().join("below");
    fs::create_dir(&below).unwrap();
    let write = |system: &str, profile: &str| {
        let mut command = store.command(&["matrix", system, "--profile", profile, "gfx1201"]);
        command.current_dir(&below);
        finish(system.to_owned(), command)
    };
    let outside = [
        inside.to_str().unwrap(),
        &format!("../profiles/{name}"),
        "others",
    ];
    for system in ["github", "gitlab"] {
        for profile in outside {
            write(system, profile)
                .exits(2)
                .prints("")
                .says(&["which the jobs do not see", "help: copy it into ./profiles"]);
        }
    }
    // The jobs cannot read a profile that extends such a profile either.
    let extending = "schema = 1\nextends = \"others\"\n";
    fs::write(below.join("extending.toml"), extending).unwrap();
    let refused = write("gitlab", "./extending.toml");
    insta::assert_snapshot!(store.shown(&refused), @"
    error: profile `others` is at `WORK/.config/rockenv/profiles/others.toml`, which the jobs do not see
    help: copy it into ./profiles, or name it relative to the repository
    exit code 2
    ");
}
