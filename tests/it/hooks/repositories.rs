//! Hooks and git: for submodules that a step fetches, and over a range of revisions.

use std::path::Path;

use fs_err as fs;

use super::{EDIT, STEPS, hook, source};
use crate::support::env::{TestStore, build_user};
use crate::support::git::git;

/// Before a submodule is fetched, it is an empty directory.
#[test]
fn a_hook_for_a_submodule_waits_for_the_step_that_fetches_it() {
    let store = TestStore::new();
    let src = source(&store);
    fs::create_dir(src.join("sub")).unwrap();
    std::os::unix::fs::chown(src.join("sub"), Some(build_user().0), None).unwrap();
    let steps = "hooks = ['fix']
        [[volume]]\nname = 'src'\nkind = 'source'\npath = '../src'\ntarget = '/v/src'
        [[step]]\nname = 'fetch'\ninputs = ['src/b.txt']\nrun = 'echo one > /v/src/sub/f'
        [[step]]\nname = 'build'\nrun = 'cat /v/src/sub/f > ~/build'\n";
    let edit = EDIT.replace("a.txt", "sub/f");
    hook(&store, "fix", &edit);
    store.profile(steps);
    insta::assert_snapshot!(store.shows("up ENV"), @r#"
    warning: hook `fix` cannot be checked before its source is fetched
    ENV: 2 steps, 0 done before; engine nspawn (root, and systemd-nspawn is installed)
    step 1/2 fetch …
    step 1/2 fetch … failed after TIME
    error: hook `fix`: `sub/f` is in a submodule that is not fetched yet
    help: from-step = "STEP" in its hook.toml names a step after the one that fetches it
    exit code 3
    "#);
    hook(&store, "fix", &format!("from-step = 'build'\n{edit}"));
    store
        .up()
        .says(&["hook `fix` cannot be checked before its source is fetched"]);
    store.sh("cat ~/build").ok().prints("ONE");
    assert_eq!(fs::read_to_string(src.join("sub/f")).unwrap(), "one\n");
    store.up().says(&["nothing to do"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

#[test]
fn check_says_at_which_revision_a_hook_stops_applying() {
    let store = TestStore::new();
    let (outer, inner) = (store.work().join("outer"), store.work().join("inner"));
    for directory in [&outer, &inner] {
        fs::create_dir_all(directory).unwrap();
        git(directory, &["init", "-q"]);
    }
    fs::write(inner.join("f"), "one\n").unwrap();
    git(&inner, &["add", "f"]);
    git(&inner, &["commit", "-qm", "inner"]);
    git(
        &outer,
        &[
            "submodule",
            "--quiet",
            "add",
            inner.to_str().unwrap(),
            "sub",
        ],
    );
    let mut commits = Vec::new();
    for (number, text) in ["one\n", "one\nmore\n", "two\n", "one\n"]
        .iter()
        .enumerate()
    {
        fs::write(outer.join("a.txt"), text).unwrap();
        git(&outer, &["add", "."]);
        git(&outer, &["commit", "-qm", &format!("number {number}")]);
        commits.push(git(&outer, &["rev-parse", "HEAD"]));
        fs::write(outer.join("unrelated"), text).unwrap();
        git(&outer, &["add", "."]);
        git(&outer, &["commit", "-qm", "unrelated"]);
    }
    hook(&store, "fix", EDIT);
    hook(&store, "inside", &EDIT.replace("a.txt", "sub/f"));
    let outer = outer.to_str().unwrap();
    let check = |rest: &[&str]| {
        let mut arguments = vec!["hook", "check", "--source", outer];
        arguments.extend(rest);
        store.rockenv(&arguments)
    };
    let all = format!("{}..main", commits[0]);
    let ran = check(&["--hook", "fix", &all]).ok();
    let text = ran.text();
    let (stops, again) = (&commits[2][..12], &commits[3][..12]);
    for line in [
        format!("fix: applies at {}", &commits[0][..12]),
        format!("fix: stops applying at {stops}"),
        format!("fix: applies again at {again}"),
    ] {
        assert!(text.contains(&line), "{text}");
    }
    let part = format!("{}..{}", commits[0], commits[2]);
    let json = check(&["--hook", "fix", &part, "--json"]).exits(3).json();
    assert_eq!(json[0]["ok"], false);
    assert_eq!(json[0]["revisions"][1]["revision"], commits[2]);
    check(&["--hook", "inside", &all]).ok();
    check(&["--hook", "fix", "nonsense"])
        .exits(7)
        .says(&["no revision `nonsense`"]);
    // Without revisions, it checks the working tree with its changes.
    fs::write(store.work().join("outer/a.txt"), "three\n").unwrap();
    insta::assert_snapshot!(store.shows("hook check --source outer --hook fix\nhook check HEAD --source hooks"), @"
    $ rockenv hook check --source outer --hook fix
    fix: does not apply
      hook `fix`: `one` must occur once in `a.txt`, but is missing: upstream has changed
    exit code 3
    $ rockenv hook check HEAD --source hooks
    error: `WORK/hooks` is not a git repository
    help: to check the files without REVISIONS: rockenv hook check --source WORK/hooks
    exit code 7
    ");
    store.rockenv(&["hook", "check"]).ok();
    let text = store.rockenv(&["hook", "ls"]).ok().text();
    assert!(
        text.contains("torch-without-rccl") && text.contains("hooks/fix/hook.toml"),
        "{text}"
    );

    // A partial clone lacks files of earlier commits.
    let blob = git(
        Path::new(outer),
        &["rev-parse", &format!("{}:a.txt", commits[1])],
    );
    let (begin, end) = blob.split_at(2);
    let object = Path::new(outer).join(".git/objects").join(begin).join(end);
    fs::remove_file(object).unwrap();
    check(&["--hook", "fix", &all])
        .exits(1)
        .says(&["git fetch --refetch --no-filter"]);

    // This hook declares the revisions that it is for.
    git(Path::new(outer), &["checkout", "-q", "."]);
    let applies = format!("[applies]\nuntil = \"{}\"\n", commits[2]);
    hook(&store, "fix", &(EDIT.replace("one", "absent") + &applies));
    store.profile(&STEPS.replace("../src", "../outer").replace(
        "cat /v/src/a.txt /v/src/made-by-step /v/src/b.txt",
        "cat /v/src/a.txt",
    ));
    let plan = store.rockenv(&["plan", store.env()]).ok();
    plan.says(&["hook `fix` skipped: only for sources before commit"]);
}
