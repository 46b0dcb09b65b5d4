//! What people type out of habit, and what they leave out.

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::run::finish;

const TWO: &str = "[[step]]\nname = \"one\"\nrun = \"echo in-one\"\n[[step]]\nname = \"two\"\nrun = \"echo in-two\"\n";

#[test]
fn help_has_groups_and_every_command_has_examples() {
    let store = TestStore::new();
    let help = store.rockenv(&["help"]).ok().text();
    for part in [
        "Environments:\n  up ",
        "Snapshots:\n",
        "Profiles, images, hooks, targets:\n",
        "Several builds and machines:\n",
        "The machine:\n",
        "Global options:",
        "Examples:\n",
    ] {
        assert!(help.contains(part), "`{part}` is not in {help}");
    }
    assert_eq!(store.rockenv(&["--help"]).ok().text(), help);
    let up = store.rockenv(&["help", "up"]).ok().text();
    for part in ["Steps:\n", "Machine:\n", "rockenv up hip-smoke"] {
        assert!(up.contains(part), "`{part}` is not in {up}");
    }
    let diff = store.rockenv(&["help", "snapshot", "diff"]).ok().text();
    assert!(diff.contains("Usage: rockenv snapshot diff"), "{diff}");
    assert_eq!(
        store.rockenv(&["snapshot", "diff", "--help"]).ok().text(),
        diff
    );
    let short = store.rockenv(&["up", "-h"]).ok().text();
    assert!(short.lines().count() * 2 < up.lines().count(), "{short}");
    assert!(
        short.contains("`rockenv help up` shows all options"),
        "{short}"
    );
    let gc = store.rockenv(&["man", "gc"]).ok().text();
    assert!(
        gc.contains(".TH rockenv-gc 1") && gc.contains(".SH EXAMPLES"),
        "{gc}"
    );
    store
        .rockenv(&["help", "snapshot", "delete"])
        .exits(2)
        .says(&["no command `snapshot delete`", "rockenv snapshot --help"]);
}

#[test]
fn plan_has_only_what_decides_a_plan() {
    let store = TestStore::new();
    for option in [
        "--ephemeral",
        "--force",
        "--setup",
        "--dry-run",
        "--metrics=x",
        "--push",
    ] {
        store
            .rockenv(&["plan", "hip-smoke", option])
            .exits(2)
            .says(&["unexpected argument"]);
    }
    store
        .rockenv(&["plan", "hip-smoke", "--jobs", "2", "--until", "compile"])
        .ok();
    store
        .rockenv(&["plan", "hip-smoke", "-j", "0"])
        .exits(2)
        .says(&["0"]);
}

#[test]
fn words_of_other_tools_name_the_command() {
    let store = TestStore::new();
    for (word, command) in [
        ("build", "rockenv up PROFILE"),
        ("run", "rockenv exec ENV CMD"),
        ("delete", "rockenv rm ENV"),
        ("init", "rockenv profile new NAME"),
        ("prune", "rockenv gc"),
        ("ps", "rockenv ls"),
        ("stop", "rockenv down ENV"),
        ("detect", "rockenv target detect"),
        ("login", "podman login HOST"),
        ("780m", "rockenv up gfx1103"),
    ] {
        let text = format!("no command `{word}`");
        store
            .rockenv(&[word, "x"])
            .exits(2)
            .says(&[&text, "help: ", command]);
    }
    // Nothing is guessed inside a group, or for a word that means nothing.
    store
        .rockenv(&["snapshot", "delete"])
        .exits(2)
        .says(&["unrecognized subcommand"]);
    for far in ["nonsense", "frobnicate"] {
        let said = store.rockenv(&[far]).exits(2).err.clone();
        assert!(
            said.contains("unrecognized subcommand") && !said.contains("similar"),
            "{said}"
        );
        store
            .rockenv(&["help", far])
            .exits(2)
            .says(&["rockenv --help"]);
    }
    for (close, command) in [("satus", "status"), ("snapshto", "snapshot")] {
        let similar = format!("a similar subcommand exists: '{command}'");
        store.rockenv(&[close]).exits(2).says(&[&similar]);
        let help = format!("did you mean `{command}`?");
        store.rockenv(&["help", close]).exits(2).says(&[&help]);
    }
    let table = store.rockenv(&["ls"]).ok().text();
    assert_eq!(store.rockenv(&["list"]).ok().text(), table);
}

#[test]
fn the_only_env_needs_no_name_unless_something_is_lost() {
    let store = TestStore::new();
    for command in [
        &["status"][..],
        &["env"],
        &["logs"],
        &["exec", "--", "true"],
    ] {
        store.rockenv(command).exits(7).says(&["no envs yet"]);
    }
    store.up_with(TWO);
    let status = store.rockenv(&["status"]).ok().text();
    assert!(status.contains(store.env()), "{status}");
    store
        .rockenv(&["exec", "--", "echo", "-n", "a"])
        .ok()
        .prints("a");
    store
        .rockenv(&["exec", store.env(), "echo", "-n", "--", "a"])
        .ok()
        .prints("-- a");
    store
        .rockenv(&["exec", store.env(), "--root", "--", "id", "-u"])
        .ok()
        .prints("0");
    store.rockenv(&["exec", store.env()]).exits(2);
    store.rockenv(&["enter"]).ok();
    store.rockenv(&["logs"]).ok().prints("in-two");
    store.rockenv(&["logs", "one"]).ok().prints("in-one");
    store.rockenv(&["snapshot", "list"]).ok();
    store.rockenv(&["env"]).ok();
    for command in [
        &["rm"][..],
        &["remove"],
        &["down"],
        &["rollback"],
        &["snapshot", "rm"],
        &["fork"],
    ] {
        store.rockenv(command).exits(2);
    }
    store.rockenv(&["fork", store.env(), "other"]).ok();
    store
        .rockenv(&["status"])
        .exits(2)
        .says(&["name one of the envs: ", "other", store.env()]);
    store
        .rockenv(&["remove", "othr"])
        .exits(7)
        .says(&["did you mean `other`?"]);
    store.rockenv(&["status", "other"]).ok();
    store.rockenv(&["remove", "other"]).ok();
}

#[test]
fn a_mistyped_name_gets_the_close_one() {
    let store = TestStore::new();
    store.up_with(TWO);
    let typo = format!("{}y", store.env());
    let meant = format!("did you mean `{}`?", store.env());
    for command in [
        &["status", &typo][..],
        &["exec", &typo, "--", "true"],
        &["rm", &typo],
        &["logs", &typo],
    ] {
        store.rockenv(command).exits(7).says(&[&meant]);
    }
    for command in [
        &["rollback", store.env(), "tow"][..],
        &["snapshot", "rm", store.env(), "tow"],
        &["snapshot", "diff", store.env(), "tow"],
        &["logs", store.env(), "tow"],
        &["up", store.env(), "--until", "tow"],
        &["verify", store.env(), "tow"],
    ] {
        store
            .rockenv(command)
            .exits(7)
            .says(&["did you mean `two`?"]);
    }
    store
        .rockenv(&["image", "build", "debian-frky"])
        .exits(7)
        .says(&["did you mean `debian-forky`?"]);
}

#[test]
fn gc_has_the_short_option_of_make_and_rsync() {
    let store = TestStore::new();
    let long = store.rockenv(&["gc", "--dry-run"]).ok().text();
    assert_eq!(store.rockenv(&["gc", "-n"]).ok().text(), long);
    assert_eq!(store.rockenv(&["gc", "-d"]).ok().text(), long);
}

#[test]
fn a_size_needs_a_unit() {
    let store = TestStore::new();
    store.profile(&format!("[resources]\nmemory-per-job = 2\n{TWO}"));
    let check = ["profile", "check", store.env()];
    store.rockenv(&check).exits(3).says(&["write `\"2G\"`"]);
    store.profile(&format!("[resources]\nmemory-per-job = \"2\"\n{TWO}"));
    store
        .rockenv(&check)
        .exits(3)
        .says(&["size `2` has no unit", "write `\"2G\"`"]);
    store
        .rockenv(&["gc", "-n", "--free", "50"])
        .exits(2)
        .says(&["50"]);
}

#[test]
fn a_profile_that_cannot_run_is_not_ok() {
    let store = TestStore::new();
    let check = ["profile", "check", store.env()];
    store.profile("");
    store
        .rockenv(&check)
        .exits(3)
        .says(&["no steps", ".toml:1:1"]);
    store.profile(&format!(
        "[[volume]]\nname = \"data\"\nkind = \"host\"\npath = \"/nowhere/at/all\"\ntarget = \"/v/data\"\n{TWO}"
    ));
    store.rockenv(&check).exits(3).says(&[
        "volume `data`: `/nowhere/at/all` does not exist",
        "path = \"/nowhere/at/all\"",
        "help: mkdir -p /nowhere/at/all",
    ]);
}

#[test]
fn a_broken_configuration_is_named_and_does_not_stop_doctor() {
    let store = TestStore::new();
    for (text, words) in [
        (
            "disk-floor = \"2\"",
            &["`disk-floor`: ", "rockenv.toml:1:14"][..],
        ),
        ("jobs = 0", &["`jobs`: "]),
        ("\ntargets = [\"gfx1130\"]", &["rockenv.toml:2:11"]),
        ("jobs = \"many\"", &["rockenv.toml:1:8"]),
        ("nonsense = 1", &["unknown key `nonsense`"]),
        (
            "jobs = 0\nnonsense = 1",
            &["`jobs`: ", "`nonsense`", "2 errors"],
        ),
        ("not toml", &["this is not TOML"]),
    ] {
        fs::write(store.work().join("rockenv.toml"), text).unwrap();
        store.rockenv(&["ls"]).exits(3).says(words);
        let doctor = store.rockenv(&["doctor"]).exits(3).says(words);
        assert!(doctor.text().contains("nspawn"), "{}", doctor.text());
    }
    fs::remove_file(store.work().join("rockenv.toml")).unwrap();
    for (command, part) in [("ls", ""), ("doctor", "nspawn")] {
        let mut process = store.command(&[command]);
        process.env("ROCKENV_JOBS", "0");
        let ran = finish(command.to_owned(), process).exits(3);
        assert!(ran.says(&["ROCKENV_JOBS"]).text().contains(part));
    }
}

#[test]
fn an_env_at_its_last_snapshot_is_ready() {
    let store = TestStore::new();
    let env = store.env();
    store.profile(TWO);
    store.up();
    store
        .rockenv(&["exec", "--root", env, "touch", "/etc/changed"])
        .ok();
    for (snapshot, state) in [("two", "ready"), ("one", "unfinished")] {
        store.rockenv(&["rollback", "--yes", env, snapshot]).ok();
        let line = format!("state    {state}");
        let status = store.rockenv(&["status", env]).ok().text();
        assert!(status.contains(&line), "{status}");
    }
}

#[test]
fn an_env_is_brought_up_to_date_by_the_command_that_made_it() {
    let store = TestStore::new();
    store.profile(TWO);
    let other = format!("{}-other", store.env());
    let directory = store.work().join("a place");
    fs::create_dir(&directory).unwrap();
    let profile = store.work().join(format!("profiles/{}.toml", store.env()));
    fs::copy(profile, directory.join("mine.toml")).unwrap();
    let up = ["up", "./a place/mine.toml", "--name", &other];
    store.rockenv(&up).ok();
    let file = directory.join("mine.toml");
    let command = format!("rockenv up '{}' --name {other}", file.display());
    for verb in ["up", "plan"] {
        let said = format!("`{other}` is an env, not a profile or target");
        store
            .rockenv(&[verb, &other])
            .exits(7)
            .says(&[said.as_str(), &command]);
    }
    let file = file.to_str().unwrap();
    store
        .rockenv(&["up", file, "--name", &other])
        .ok()
        .says(&["nothing to do"]);
}

#[test]
fn reading_makes_no_store() {
    let directory = tempfile::tempdir().unwrap();
    let store = TestStore::at(&directory.path().join("store"));
    for command in [
        &["ls"][..],
        &["status"],
        &["status", "x"],
        &["env", "x"],
        &["logs", "x"],
        &["du"],
        &["gc", "-n"],
        &["gc", "--roots"],
        &["fsck"],
        &["cache", "ls"],
        &["image", "ls"],
        &["profile", "ls"],
        &["profile", "check"],
        &["hook", "ls"],
        &["target", "detect"],
        &["plan", "hip-smoke"],
        &["up", "hip-smoke", "--dry-run"],
        &["matrix", "json", "gfx1103"],
        &["report", "x"],
        &["snapshot", "ls", "x"],
        &["trust", "--show"],
        &["doctor"],
    ] {
        store.rockenv(command);
        assert!(
            !directory.path().join("store").exists(),
            "{command:?} made a store"
        );
    }
}

#[test]
fn schemas_have_ids() {
    let store = TestStore::new();
    for what in [
        "profile", "image", "hook", "config", "events", "metrics", "record",
    ] {
        let schema = store.rockenv(&["schema", what]).ok().out;
        let schema: serde_json::Value = serde_json::from_slice(&schema).unwrap();
        assert_eq!(schema["$id"], format!("urn:rockenv:schema:{what}"));
    }
}
