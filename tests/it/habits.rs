//! What users type out of habit, and what they leave out.

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
    insta::assert_snapshot!(store.shows("help snapshot delete"), @"
    error: no command `snapshot delete`
    help: rockenv snapshot --help
    exit code 2
    ");
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
    store.rockenv(&["plan", "hip-smoke", "-j", "0"]).exits(2);
}

#[test]
fn words_of_other_tools_name_the_command() {
    let store = TestStore::new();
    let words = "build run delete init prune ps stop detect login rename 780m";
    let said = words.split(' ').map(|word| {
        let said = store.rockenv(&[word, "x"]).exits(2).err;
        said.replace("\nhelp:", ":")
    });
    insta::assert_snapshot!(said.collect::<String>(), @"
    error: no command `build`: `rockenv up PROFILE` builds an env, `rockenv image build IMAGE` an image
    error: no command `run`: `rockenv up PROFILE` builds an env, `rockenv exec ENV CMD` runs a command in one
    error: no command `delete`: `rockenv rm ENV` removes an env
    error: no command `init`: `rockenv profile new NAME` writes a profile, `rockenv up NAME` builds it
    error: no command `prune`: `rockenv gc` frees disk space, `rockenv gc -n` shows what it would remove
    error: no command `ps`: `rockenv ls` lists envs and whether something runs in them
    error: no command `stop`: `rockenv down ENV` stops all processes in an env
    error: no command `detect`: `rockenv target detect` shows the GPUs of this machine
    error: no command `login`: `docker login HOST` or `podman login HOST`, whose logins rockenv uses
    error: no command `rename`: an env keeps its name; `rockenv fork ENV NEW` makes a copy under another
    error: no command `780m`: `rockenv up gfx1103` builds for it
    ");
    store
        .rockenv(&["--home", "/of/another", "stop"])
        .exits(2)
        .says(&["no command `stop`"]);
    // rockenv makes no guess inside a group, or for a word without a meaning.
    let said = store.shows(
        "snapshot delete
        nonsense
        frobnicate
        help frobnicate
        satus
        snapshto
        help snapshto",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv snapshot delete
    error: unrecognized subcommand 'delete'

    Usage: rockenv snapshot [OPTIONS] <COMMAND>

    For more information, try '--help'.
    exit code 2
    $ rockenv nonsense
    error: unrecognized subcommand 'nonsense'

    Usage: rockenv [OPTIONS] <COMMAND>

    For more information, try '--help'.
    exit code 2
    $ rockenv frobnicate
    error: unrecognized subcommand 'frobnicate'

    Usage: rockenv [OPTIONS] <COMMAND>

    For more information, try '--help'.
    exit code 2
    $ rockenv help frobnicate
    error: no command `frobnicate`
    help: rockenv --help
    exit code 2
    $ rockenv satus
    error: unrecognized subcommand 'satus'

      tip: a similar subcommand exists: 'status'

    Usage: rockenv [OPTIONS] <COMMAND>

    For more information, try '--help'.
    exit code 2
    $ rockenv snapshto
    error: unrecognized subcommand 'snapshto'

      tip: a similar subcommand exists: 'snapshot'

    Usage: rockenv [OPTIONS] <COMMAND>

    For more information, try '--help'.
    exit code 2
    $ rockenv help snapshto
    error: no command `snapshto`
    help: did you mean `snapshot`?
    exit code 2
    ");
    let table = store.rockenv(&["ls"]).ok().text();
    assert_eq!(store.rockenv(&["list"]).ok().text(), table);
}

#[test]
fn the_only_env_needs_no_name_unless_something_is_lost() {
    let store = TestStore::new();
    insta::assert_snapshot!(store.shows("status\nenv\nlogs\nexec -- true"), @"
    $ rockenv status
    error: no envs yet
    help: rockenv up hip-smoke
    exit code 7
    $ rockenv env
    error: no envs yet
    help: rockenv up hip-smoke
    exit code 7
    $ rockenv logs
    error: no envs yet
    help: rockenv up hip-smoke
    exit code 7
    $ rockenv exec -- true
    error: no envs yet
    help: rockenv up hip-smoke
    exit code 7
    ");
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
    insta::assert_snapshot!(store.shows("status\nremove othr"), @"
    $ rockenv status
    error: name one of the envs: other, ENV
    help: rockenv ls
    exit code 2
    $ rockenv remove othr
    error: no env `othr`
    help: did you mean `other`?
    exit code 7
    ");
    store.rockenv(&["status", "other"]).ok();
    store.rockenv(&["remove", "other"]).ok();
}

#[test]
fn what_is_named_twice_is_done_once_and_a_variable_needs_a_name() {
    let store = TestStore::new();
    store.up_with(TWO);
    store
        .rockenv(&["snapshot", "rm", store.env(), "one", "one", "--yes"])
        .ok();
    let refused = ["=v", "A B=1", "A"].map(|variable| {
        let refused = store.rockenv(&["exec", "-e", variable, store.env(), "--", "env"]);
        refused.exits(2).err
    });
    insta::assert_snapshot!(refused.concat(), @"
    error: `=v` is not NAME=VALUE
    help: rockenv exec --env NAME=VALUE ENV -- CMD
    error: `A B=1` is not NAME=VALUE
    help: rockenv exec --env NAME=VALUE ENV -- CMD
    error: `A` is not NAME=VALUE
    help: rockenv exec --env NAME=VALUE ENV -- CMD
    ");
    let set = [
        "exec",
        "-e",
        "_A1=b=c",
        store.env(),
        "--",
        "printenv",
        "_A1",
    ];
    store.rockenv(&set).ok().prints("b=c");
}

#[test]
fn a_mistyped_name_gets_the_close_one() {
    let store = TestStore::new();
    store.up_with(TWO);
    let said = store.shows(
        "status ENVy
        exec ENVy -- true
        rm ENVy
        logs ENVy
        rollback ENV tow
        snapshot rm ENV tow
        snapshot diff ENV tow
        logs ENV tow
        up ENV --until tow
        verify ENV tow
        image build debian-frky",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv status ENVy
    error: no env `ENVy`
    help: did you mean `ENV`?
    exit code 7
    $ rockenv exec ENVy -- true
    error: no env `ENVy`
    help: did you mean `ENV`?
    exit code 7
    $ rockenv rm ENVy
    error: no env `ENVy`
    help: did you mean `ENV`?
    exit code 7
    $ rockenv logs ENVy
    error: no env `ENVy`
    help: did you mean `ENV`?
    exit code 7
    $ rockenv rollback ENV tow
    error: env `ENV` has no snapshot `tow`
    help: did you mean `two`?
    exit code 7
    $ rockenv snapshot rm ENV tow
    error: env `ENV` has no snapshot `tow`
    help: did you mean `two`?
    exit code 7
    $ rockenv snapshot diff ENV tow
    error: env `ENV` has no snapshot `tow`
    help: did you mean `two`?
    exit code 7
    $ rockenv logs ENV tow
    error: env `ENV` has no log of step `tow`
    help: did you mean `two`?
    exit code 7
    $ rockenv up ENV --until tow
    error: profile `ENV` has no step `tow`
    help: did you mean `two`? its steps are: one, two
    exit code 7
    $ rockenv verify ENV tow
    error: env `ENV` has no step `tow`
    help: did you mean `two`? steps with a snapshot: one, two
    exit code 7
    $ rockenv image build debian-frky
    error: no image `debian-frky`
    help: did you mean `debian-forky`?
    exit code 7
    ");
}

#[test]
fn a_size_needs_a_unit() {
    let store = TestStore::new();
    store.profile(&format!("[resources]\nmemory-per-job = 2\n{TWO}"));
    let check = ["profile", "check", store.env()];
    store.rockenv(&check).exits(3).says(&["write `\"2G\"`"]);
    store.profile(&format!("[resources]\nmemory-per-job = \"2\"\n{TWO}"));
    insta::assert_snapshot!(store.shown(&store.rockenv(&check)), @r#"
    error: profile `ENV` is invalid
      × size `2` has no unit
       ╭─[WORK/profiles/ENV.toml:4:18]
     3 │ [resources]
     4 │ memory-per-job = "2"
       ·                  ─┬─
       ·                   ╰── here
     5 │ [[step]]
       ╰────
      help: write `"2G"`, or K, M, T or B for G
    exit code 3
    "#);
    insta::assert_snapshot!(store.shows("gc -n --free 50"), @"
    error: size `50` has no unit
    help: rockenv gc --free 50G
    exit code 2
    ");
}

#[test]
fn a_profile_that_cannot_run_is_not_ok() {
    let store = TestStore::new();
    let check = ["profile", "check", store.env()];
    store.profile("");
    insta::assert_snapshot!(store.shown(&store.rockenv(&check)), @r#"
    error: profile `ENV` is invalid
      × no steps
       ╭─[WORK/profiles/ENV.toml:1:1]
     1 │ schema = 1
       · ▲
       · ╰── in this file or one it extends
     2 │ image = "base"
       ╰────
      help: add one: [[step]] with a name, and run, packages, copy or export
    exit code 3
    "#);
    store.profile(&format!(
        "[[volume]]\nname = \"data\"\nkind = \"host\"\npath = \"/nowhere/at/all\"\ntarget = \"/v/data\"\n{TWO}"
    ));
    insta::assert_snapshot!(store.shown(&store.rockenv(&check)), @r#"
    error: profile `ENV` is invalid
      × volume `data`: `/nowhere/at/all` does not exist
       ╭─[WORK/profiles/ENV.toml:6:8]
     5 │ kind = "host"
     6 │ path = "/nowhere/at/all"
       ·        ────────┬────────
       ·                ╰── no such directory
     7 │ target = "/v/data"
       ╰────
      help: mkdir -p /nowhere/at/all
    exit code 3
    "#);
}

#[test]
fn a_broken_configuration_is_named_and_does_not_stop_doctor() {
    let store = TestStore::new();
    for (text, words) in [
        ("jobs = 0", &["`jobs`: "][..]),
        ("disk-floor = '2'", &["`disk-floor`: ", "rockenv.toml:1:14"]),
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
        for command in ["schema config", "man gc", "completions bash", "help"] {
            let words: Vec<&str> = command.split(' ').collect();
            assert_eq!(store.rockenv(&words).ok().err, "", "{command}");
        }
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
    let note = format!("the env is at snapshot `one`; to finish it: rockenv up {env}\n");
    for (snapshot, state) in [("two", "ready"), ("one", "unfinished")] {
        store.rockenv(&["rollback", "--yes", env, snapshot]).ok();
        let line = format!("state    {state}");
        let status = store.rockenv(&["status", env]).ok();
        assert!(status.text().contains(&line), "{status:?}");
        assert_eq!(status.err.contains(&note), snapshot == "one", "{status:?}");
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
    insta::assert_snapshot!(store.shows("up ENV-other\nplan ENV-other"), @"
    $ rockenv up ENV-other
    error: `ENV-other` is an env, not a profile or target
    help: rockenv up 'WORK/a place/mine.toml' --name ENV-other
    exit code 7
    $ rockenv plan ENV-other
    error: `ENV-other` is an env, not a profile or target
    help: rockenv up 'WORK/a place/mine.toml' --name ENV-other
    exit code 7
    ");
    let file = directory.join("mine.toml");
    let file = file.to_str().unwrap();
    store
        .rockenv(&["up", file, "--name", &other])
        .ok()
        .says(&["nothing to do"]);
    store.up();
    insta::assert_snapshot!(store.shows("fork ENV-other one\nup one\nfork ENV two\nup two"), @"
    $ rockenv fork ENV-other one
    one: a copy of ENV-other
    $ rockenv up one
    error: `one` is an env, not a profile or target
    help: rockenv up 'WORK/a place/mine.toml' --name one
    exit code 7
    $ rockenv fork ENV two
    two: a copy of ENV
    $ rockenv up two
    error: `two` is an env, not a profile or target
    help: rockenv up ENV --name two
    exit code 7
    ");
}

#[test]
fn an_env_of_a_name_that_means_nothing_here_has_its_profiles_path() {
    let store = TestStore::new();
    store.up_with(TWO);
    for verb in ["plan", "up"] {
        let mut command = store.command(&[verb, store.env()]);
        command.current_dir("/");
        insta::allow_duplicates! {
            insta::assert_snapshot!(store.shown(&finish(verb.to_owned(), command)), @"
            error: `ENV` is an env, not a profile or target
            help: rockenv up WORK/profiles/ENV.toml
            exit code 7
            ");
        }
    }
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
fn a_path_that_is_not_there_is_named_with_what_to_type() {
    let store = TestStore::new();
    fs::write(store.work().join("file"), "").unwrap();
    let said = store.shows(
        "trust none
        target learn --source none
        export --check none
        export --check file
        man --dir file
        matrix json -p hip-smoke --runners profiles
        --home file ls
        --home file/store up hip-smoke
        push x localhost:1/a --sign none
        pull localhost:1/a:b --verify none",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv trust none
    error: `WORK/none` does not exist
    help: rockenv trust DIR
    exit code 7
    $ rockenv target learn --source none
    error: `none` does not exist
    help: git clone https://github.com/ROCm/TheRock
    exit code 7
    $ rockenv export --check none
    error: `none` does not exist
    help: rockenv export --check DIR
    exit code 7
    $ rockenv export --check file
    error: `file` is not a directory
    help: rockenv export --check DIR
    exit code 2
    $ rockenv man --dir file
    error: `file` is not a directory
    help: rockenv man --dir ./man
    exit code 2
    $ rockenv matrix json -p hip-smoke --runners profiles
    error: cannot read `profiles`
      caused by: it is not a regular file
    help: --runners takes a file that names the build machines: `build = [\"self-hosted\"]`
    exit code 2
    $ rockenv --home file ls
    error: `WORK/file` is not a directory
    help: choose another directory with --home or ROCKENV_HOME
    exit code 2
    $ rockenv --home file/store up hip-smoke
    error: `WORK/file/store` is not a directory
    help: choose another directory with --home or ROCKENV_HOME
    exit code 2
    $ rockenv push x localhost:1/a --sign none
    error: cannot read the key `none`
      caused by: `none` does not exist
    help: cosign generate-key-pair makes `cosign.key` and `cosign.pub`
    exit code 7
    $ rockenv pull localhost:1/a:b --verify none
    error: cannot read the key `none`
      caused by: `none` does not exist
    help: cosign generate-key-pair makes `cosign.key` and `cosign.pub`
    exit code 7
    ");
}
