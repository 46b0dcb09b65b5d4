//! Tests of hooks: what steps see, what is built again, and that the user's source stays unchanged. On every engine:
//! `tests/service docker|podman|rootless cargo test --test it hooks::`.

mod by_hand;
mod repositories;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::env::{TestStore, build_user, is_service};
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::{processes_called, wait_for_process, wait_until};
use fs_err as fs;
use nix::sys::signal::Signal;

const STEPS: &str = r#"
hooks = ["fix"]
[[volume]]
name = "src"
kind = "source"
path = "../src"
target = "/v/src"
[[volume]]
name = "build"
kind = "build"
target = "/v/build"
[[step]]
name = "tools"
run = "cat /v/src/a.txt > $HOME/tools"
[[step]]
name = "configure"
inputs = ["src"]
run = "cat /v/src/a.txt > $HOME/configure; echo generated > /v/src/made-by-step; echo more >> /v/src/b.txt"
[[step]]
name = "build"
run = "cat /v/src/a.txt /v/src/made-by-step /v/src/b.txt > $HOME/build"
"#;

const EDIT: &str = r#"
[[edit]]
file = "a.txt"
find = "one"
replace = "ONE"
"#;

/// Makes a source that the user owns, and returns its directory.
fn source(store: &TestStore) -> PathBuf {
    let src = store.work().join("src");
    fs::create_dir_all(src.join("d")).unwrap();
    for (name, text) in [
        ("a.txt", "one\n"),
        ("b.txt", "two\n"),
        ("d/c.txt", "x\ny\nz\n"),
    ] {
        fs::write(src.join(name), text).unwrap();
    }
    fs::set_permissions(src.join("d/c.txt"), std::fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["", "d", "a.txt", "b.txt", "d/c.txt"] {
        let user = build_user().0;
        std::os::unix::fs::chown(src.join(name), Some(user), Some(user)).unwrap();
    }
    src
}

fn hook(store: &TestStore, name: &str, rest: &str) {
    let directory = store.work().join("hooks").join(name);
    fs::create_dir_all(&directory).unwrap();
    let head = "schema = 1\ndescription = \"a test\"\nwhy = \"to see\"\nvolume = \"src\"\n";
    fs::write(directory.join("hook.toml"), format!("{head}{rest}")).unwrap();
}

/// Returns everything observable in a tree except access times.
fn seen(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let found = fs::symlink_metadata(&path).unwrap();
        let content = match found.is_file() {
            true => String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned(),
            false => String::new(),
        };
        lines.push(format!(
            "{} {} {:o} {}:{} {}.{} {}.{} {content}",
            path.display(),
            found.ino(),
            found.mode(),
            found.uid(),
            found.gid(),
            found.mtime(),
            found.mtime_nsec(),
            found.ctime(),
            found.ctime_nsec(),
        ));
        if found.is_dir() {
            left.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    lines.sort();
    lines
}

#[test]
fn steps_see_the_hook_and_the_source_stays_as_it_is() {
    // A service does not see a test's mounts.
    let other = (!is_service()).then_some(Some(Kind::Btrfs));
    for kind in std::iter::once(None).chain(other) {
        let disk = kind.map(LoopFs::with_base);
        let store = disk.as_ref().map_or_else(TestStore::new, TestStore::on);
        let src = source(&store);
        hook(&store, "fix", EDIT);
        let before = seen(&src);
        store.up_with(STEPS);
        assert_eq!(seen(&src), before);
        store
            .sh("cat $HOME/tools $HOME/configure $HOME/build /v/src/a.txt; stat -c %u /v/src/a.txt")
            .ok()
            .prints(&format!(
                "one\nONE\nONE\ngenerated\ntwo\nmore\nONE\n{}",
                build_user().1
            ));
        store.up().says(&["nothing to do"]);
        // A background process deletes the trash, and no command waits for it.
        wait_until("fsck finds something", || {
            store.rockenv(&["fsck"]).code == 0
        });

        // A fork has its own view, with the files that steps wrote in it.
        let fork = format!("{}-fork", store.env());
        store.rockenv(&["fork", store.env(), &fork]).ok();
        let cat = "cat /v/src/a.txt /v/src/made-by-step; echo x > /v/src/made-by-step";
        store.sh_in(&fork, cat).ok().prints("ONE\ngenerated");
        store.sh("cat /v/src/made-by-step").ok().prints("generated");
        store.rockenv(&["rm", "--yes", &fork]).ok();
        assert_eq!(seen(&src), before);
        // A waiting container shows files that were replaced, made and removed meanwhile. A service has a copy.
        if !is_service() {
            let seen_inside = "cd /v/src/d; cat c.txt new old; true";
            let state = || fs::read_to_string(store.env_dir().join("run/state.json")).unwrap();
            let id = || state().split('"').nth(3).map(str::to_owned);
            fs::write(src.join("d/old"), "old\n").unwrap();
            store.sh(seen_inside).ok().prints("x\ny\nz\nold");
            let first = id();
            fs::write(src.join("new"), "replaced\n").unwrap();
            fs::rename(src.join("new"), src.join("d/c.txt")).unwrap();
            fs::write(src.join("d/new"), "new\n").unwrap();
            fs::remove_file(src.join("d/old")).unwrap();
            store.sh(seen_inside).ok().prints("replaced\nnew");
            assert_eq!(id(), first);
        }
        let before = seen(&src);
        store.rockenv(&["rm", "--yes", store.env()]).ok();
        assert_eq!(seen(&src), before);
    }
}

#[test]
fn what_a_clean_build_has_not_in_a_view_is_in_no_clean_snapshot() {
    let store = TestStore::new();
    let src = source(&store);
    hook(&store, "fix", EDIT);
    let steps = |two: &str, three: &str| {
        let head = STEPS.split("[[step]]").next().unwrap();
        store.profile(&format!(
            "{head}[[step]]\nname = \"two\"\ninputs = [\"src\"]\nrun = \"\"\"{two}\"\"\"\n\
             [[step]]\nname = \"three\"\nrun = \"\"\"{three}; cat /v/src/a.txt /v/src/b.txt /v/src/gen > $HOME/r || true\"\"\"\n"
        ));
    };
    let (env, other) = (store.env(), format!("{}-other", store.env()));
    let read = |name: &str| {
        store
            .sh_in(name, "cat $HOME/r")
            .ok()
            .text()
            .trim_end()
            .replace('\n', " ")
    };
    let is_clean = || {
        !store
            .rockenv(&["snapshot", "ls", env])
            .ok()
            .text()
            .contains("incremental")
    };
    let new = |expected: &str| {
        store.rockenv(&["up", env, "--name", &other]).ok();
        assert_eq!(read(&other), expected);
        store.rockenv(&["rm", "--yes", &other]).ok();
    };
    // Files that a step of the same build wrote keep the build clean, also after a command that only reads.
    steps("echo gen > /v/src/gen", "true");
    store.up();
    assert_eq!(read(env), "ONE two gen");
    assert!(is_clean());
    store.rockenv(&["up", env, "--rerun", "two"]).ok();
    assert!(!is_clean());
    store
        .rockenv(&["up", env, "--clean", "--rerun", "two"])
        .ok();
    assert!(is_clean());

    // A file that a step no longer writes stays in the view of this env only.
    steps("true", "true");
    store.up();
    assert_eq!(read(env), "ONE two gen");
    assert!(!is_clean());
    new("ONE two");

    // Manual changes stay too, until the env begins clean.
    store.rockenv(&["up", env, "--clean"]).ok();
    assert_eq!(read(env), "ONE two");
    assert!(is_clean());
    store.sh("echo handmade > /v/src/b.txt").ok();
    steps("true", ":");
    store.up();
    assert_eq!(read(env), "ONE handmade");
    assert!(!is_clean());
    new("ONE two");
    let kept = "manually edited files of the view were moved to";
    store
        .rockenv(&["up", env, "--clean", "--rerun", "three"])
        .ok()
        .says(&[kept]);
    assert_eq!(read(env), "ONE two");
    assert!(is_clean());
    assert_eq!(fs::read_to_string(src.join("b.txt")).unwrap(), "two\n");
}

#[test]
fn a_changed_hook_or_source_is_built_again_and_an_unchanged_file_is_not() {
    let store = TestStore::new();
    let src = source(&store);
    hook(&store, "fix", EDIT);
    let steps = STEPS.replace("hooks = [\"fix\"]", "hooks = [\"fix\", \"late\"]");
    let late = "from-step = \"build\"\n[[edit]]\nfile = \"made-by-step\"\nfind = \"generated\"\nreplace = \"CHANGED\"\n\
        [script]\nrun = \"echo script > s.txt\"\nchanges = [\"s.txt\"]\n";
    hook(&store, "late", late);
    // A hook for the source cannot change a file that only a step makes.
    store.profile(&steps);
    insta::assert_snapshot!(store.shows("up ENV"), @"
    error: hook `late`: there is no `made-by-step`
    help: correct `WORK/hooks/late/hook.toml`, build a variant without it, or build a revision that it applies to: `rockenv hook check --hook late --source DIR REVISIONS` finds the one that broke it
    exit code 3
    ");
    hook(
        &store,
        "late",
        &late
            .replace("made-by-step", "b.txt")
            .replace("generated", "two"),
    );
    store.up();
    if !is_service() {
        // As after an `up` that was killed while it made a layer.
        fs::remove_dir_all(store.env_dir().join("views/src/work")).unwrap();
    }
    // The step's own line stays below the hook's change.
    store
        .sh("cat $HOME/build")
        .ok()
        .prints("ONE\ngenerated\nCHANGED\nmore");
    let time = "stat -c %Y.%y /v/src/a.txt /v/src/s.txt";
    let old = store.sh(time).ok().text();

    hook(
        &store,
        "late",
        &late
            .replace("made-by-step", "b.txt")
            .replace("generated", "two")
            .replace("CHANGED", "other"),
    );
    let plan = store.rockenv(&["plan", store.env()]).ok().text();
    assert_eq!(plan.matches("have").count(), 2, "{plan}");
    store.up();
    store
        .sh("cat $HOME/build")
        .ok()
        .prints("ONE\ngenerated\nother\nmore");

    // With another source, all hooks are applied again, and the files of earlier steps are gone.
    fs::write(src.join("d/c.txt"), "changed").unwrap();
    let before = seen(&src);
    store.up();
    store
        .sh("cat $HOME/build /v/src/d/c.txt")
        .ok()
        .prints("ONE\ngenerated\nother\nmore\nchanged");
    assert_eq!(
        store.sh(time).ok().text(),
        old,
        "the same content looks as old"
    );
    assert_eq!(seen(&src), before);

    // The table `applies` is in no key.
    let words = EDIT.to_owned() + "\n[applies]\ntargets = []\n";
    hook(&store, "fix", &words);
    store.up().says(&["nothing to do"]);

    // Objects that are built without a hook must be older than the hook's files.
    store.up_with(STEPS);
    store.up_with(&steps);
    let new = store.sh(time).ok().text();
    let same = old.lines().zip(new.lines()).map(|(old, new)| old == new);
    assert_eq!(same.collect::<Vec<_>>(), [true, false]);
    let volumes = STEPS.split("[[step]]").next().unwrap();
    let volumes = volumes.replace("hooks = [\"fix\"]", "");
    store.up_with(&format!(
        "{volumes}[[step]]\nname = \"configure\"\nrun = \"true\"\n\
         [[step]]\nname = \"build\"\nrun = \"true\"\n"
    ));
    store.up_with(STEPS);
    let time = "stat -c %Y.%y /v/src/a.txt";
    assert_ne!(
        store.sh(time).ok().text().trim(),
        old.lines().next().unwrap()
    );

    // A file that a hook no longer changes is newer than the objects that were built from the changed file, also for a
    // step before the last hook.
    let another = EDIT.replace("a.txt", "d/c.txt").replace("one", "changed");
    hook(&store, "fix", &another);
    let configure = "cat /v/src/a.txt > $HOME/configure";
    let timed = format!("{configure}; stat -c %y /v/src/a.txt >> $HOME/configure");
    store.up_with(&steps.replace(configure, &timed));
    let own = fs::metadata(src.join("a.txt")).unwrap().mtime_nsec();
    let shown = store.sh("cat $HOME/configure").ok().text();
    assert!(shown.starts_with("one\n"), "{shown}");
    assert!(!shown.contains(&format!(".{own:09} ")), "{shown}");
}

#[test]
fn what_does_not_fit_fails_before_anything_runs() {
    let store = TestStore::new();
    let src = source(&store);
    let before = seen(&src);
    let refused = || {
        let [plan, up] = ["plan ENV", "up ENV"].map(|command| store.shows(command));
        assert_eq!(plan, up);
        up
    };
    let mut said = String::new();
    for text in [
        EDIT.replace("\"one\"", "\"absent\""),
        EDIT.replace("a.txt", "d/none"),
        EDIT.to_owned() + "count = 2\n",
        "[[patch]]\nfile = \"p.patch\"\n".to_owned(),
    ] {
        hook(&store, "fix", &text);
        fs::write(
            store.work().join("hooks/fix/p.patch"),
            "--- a/d/c.txt\n+++ b/d/c.txt\n@@ -1 +1 @@\n-q\n+r\n",
        )
        .unwrap();
        store.profile(STEPS);
        said += &refused();
        assert!(!store.env_dir().join("record.json").exists(), "begun");
    }
    // Steps before the first one that sees the hook do not need it.
    for verb in ["plan", "up"] {
        store.rockenv(&[verb, store.env(), "--until", "tools"]).ok();
        let ran = store.rockenv(&[verb, store.env(), "--until", "configure"]);
        ran.exits(3).says(&["hook `fix`"]);
    }
    store.sh("cat $HOME/tools").ok().prints("one");
    fs::remove_file(store.work().join("hooks/fix/p.patch")).unwrap();
    said += &refused();
    fs::remove_dir_all(store.work().join("hooks/fix")).unwrap();
    said += &refused();
    insta::assert_snapshot!(said, @"
    error: hook `fix`: `absent` must occur once in `a.txt`, but is missing: upstream has changed
    help: correct `WORK/hooks/fix/hook.toml`, build a variant without it, or build a revision that it applies to: `rockenv hook check --hook fix --source DIR REVISIONS` finds the one that broke it
    exit code 3
    error: hook `fix`: there is no `d/none`
    help: correct `WORK/hooks/fix/hook.toml`, build a variant without it, or build a revision that it applies to: `rockenv hook check --hook fix --source DIR REVISIONS` finds the one that broke it
    exit code 3
    error: hook `fix`: `one` must occur 2 times in `a.txt`, but occurs once: upstream has changed
    help: correct `WORK/hooks/fix/hook.toml`, build a variant without it, or build a revision that it applies to: `rockenv hook check --hook fix --source DIR REVISIONS` finds the one that broke it
    exit code 3
    error: hook `fix`: `p.patch`: `d/c.txt`: hunk 1 does not apply
    help: correct `WORK/hooks/fix/hook.toml`, build a variant without it, or build a revision that it applies to: `rockenv hook check --hook fix --source DIR REVISIONS` finds the one that broke it
    exit code 3
    error: profile `ENV` names hook `fix`
      caused by: WORK/hooks/fix/hook.toml:6: cannot read patch `p.patch`
      caused by: `WORK/hooks/fix/p.patch` does not exist
    help: rockenv schema hook
    exit code 3
    error: profile `ENV` names hook `fix`
      caused by: no hook `fix`
    help: rockenv hook ls
    exit code 7
    ");
    assert_eq!(seen(&src), before);
}

#[test]
fn patches_and_scripts() {
    let store = TestStore::new();
    let src = source(&store);
    let patch = "diff --git a/d/c.txt b/d/c.txt\n--- a/d/c.txt\n+++ b/d/c.txt\n@@ -2,2 +2,2 @@\n y\n-z\n+Z\n\
        diff --git a/new/tool b/new/tool\nnew file mode 100755\n--- /dev/null\n+++ b/new/tool\n@@ -0,0 +1 @@\n+#!/bin/sh\n\
        diff --git a/b.txt b/b.txt\ndeleted file mode 100644\n--- a/b.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-two\n";
    let sha256 = String::from_utf8(
        Command::new("sh")
            .args([
                "-c",
                "printf %s \"$1\" | sha256sum | cut -d' ' -f1",
                "sh",
                patch,
            ])
            .output()
            .unwrap()
            .stdout,
    )
    .unwrap();
    let sha256 = sha256.trim();
    let text = format!(
        "[[patch]]\nurl = \"https://me:TOKEN@example.org/fix.patch\"\nsha256 = \"{sha256}\"\n{EDIT}\n[script]\nrun = \"echo $(id -u) >> a.txt; rm d/c.txt\"\nchanges = [\"d/c.txt\", \"a.txt\"]\n"
    );
    hook(&store, "fix", &text);
    let steps = STEPS
        .replace("echo more >> /v/src/b.txt", "true")
        .replace(" /v/src/b.txt", "");
    store.profile(&steps);
    // rockenv looks for a patch in the store before it uses the network.
    insta::assert_snapshot!(store.shows("up ENV --offline"), @"
    error: `--offline` is set, but these are missing: `fix/fix.patch` from `https://example.org/fix.patch`
    help: run once without --offline
    exit code 4
    ");
    fs::create_dir_all(store.home().join("blobs/sha256")).unwrap();
    fs::write(store.home().join("blobs/sha256").join(sha256), patch).unwrap();
    let before = seen(&src);
    store.rockenv(&["up", store.env(), "--offline"]).ok();
    store
        .sh("cat /v/src/a.txt; cd /v/src; stat -c '%a %u %n' new/tool; ls; ls d")
        .ok()
        .prints(&format!(
            "ONE\n{0}\n755 {0} new/tool\na.txt\nd\nmade-by-step\nnew",
            build_user().1
        ));
    assert_eq!(seen(&src), before);
    let locked = store.rockenv(&["lock", store.env()]).ok();
    let locked = locked.says(&[".lock` contains the login of example.org: keep it out of git"]);
    assert!(!locked.err.contains("TOKEN"), "{}", locked.err);

    // The script changes other files than it declares.
    let lies = text.replace("rm d/c.txt", "touch d/other");
    hook(&store, "fix", &lies);
    // A service copies the source for hooks, and says so.
    store
        .rockenv(&["up", store.env(), "--offline"])
        .exits(3)
        .says(&["its script should change a.txt, d/c.txt, but changed a.txt, d/other"]);
    hook(&store, "fix", &text.replace("rm d/c.txt", "exit 9"));
    store
        .rockenv(&["up", store.env(), "--offline"])
        .exits(5)
        .says(&[
            "the script of hook `fix` failed with exit code 9",
            &format!("help: rockenv logs {} hook-fix", store.env()),
        ]);
    store.rockenv(&["logs", store.env(), "hook-fix"]).ok();

    // A patch that the source already has is no error and changes nothing.
    hook(
        &store,
        "fix",
        &format!("[[patch]]\nurl = \"https://example.org/fix.patch\"\nsha256 = \"{sha256}\"\n"),
    );
    fs::write(src.join("d/c.txt"), "x\ny\nZ\n").unwrap();
    fs::create_dir(src.join("new")).unwrap();
    fs::write(src.join("new/tool"), "#!/bin/sh\n").unwrap();
    fs::remove_file(src.join("b.txt")).unwrap();
    store
        .rockenv(&["up", store.env()])
        .ok()
        .says(&["the source already has `https://example.org/fix.patch`"]);
    assert_eq!(seen(&src).len(), before.len() + 1);
}

/// A script that removes or replaces a directory changes the files in it.
#[test]
fn a_script_that_removes_a_directory_changes_its_files() {
    let store = TestStore::new();
    let src = source(&store);
    fs::create_dir(src.join("d/e")).unwrap();
    fs::write(src.join("d/e/f.txt"), "f\n").unwrap();
    for path in [src.join("d/e"), src.join("d/e/f.txt")] {
        std::os::unix::fs::chown(path, Some(build_user().0), None).unwrap();
    }
    let before = seen(&src);
    store.profile(&STEPS.replace(" /v/src/b.txt", " /v/src/a.txt"));
    let script = |run: &str, changes: &str| {
        hook(
            &store,
            "fix",
            &format!("{EDIT}\n[script]\nrun = \"{run}\"\nchanges = [{changes}]\n"),
        );
        store.rockenv(&["up", store.env()])
    };
    for run in ["rm -r d", "rm -r d; mkdir -p d/e", "chmod 700 d; rm -r d/*"] {
        let ran = script(run, "'d'").exits(3);
        ran.says(&["its script should change d, but changed d/c.txt, d/e/f.txt"]);
    }
    script(
        "rm -r d; mkdir d; echo new > d/new",
        "'d/c.txt', 'd/e/f.txt'",
    )
    .exits(3)
    .says(&["should change d/c.txt, d/e/f.txt, but changed d/c.txt, d/e/f.txt, d/new"]);
    script(
        "rm -r d; mkdir d; echo new > d/new; touch b.txt",
        "'d/c.txt', 'd/e/f.txt', 'd/new', 'b.txt'",
    )
    .ok();
    store
        .sh("cd /v/src; find d; cat d/new a.txt")
        .ok()
        .prints("d\nd/new\nnew\nONE\nmore");
    // A script that reads files, and writes again what the hook's edits wrote.
    script(
        "find . -type f -exec cat {} +; mkdir empty; cat a.txt > /tmp/a; cat /tmp/a > a.txt; rm b.txt",
        "'b.txt'",
    )
    .ok();
    store
        .sh("cd /v/src; ls; cat a.txt")
        .ok()
        .prints("a.txt\nd\nempty\nmade-by-step\nONE\nmore");
    // A script that was stopped leaves nothing that a later command would take for finished. Its step has not begun, so
    // the whole command is to be repeated.
    let sleeper = store.sleeper();
    hook(
        &store,
        "fix",
        &format!("{EDIT}\n[script]\nrun = \"echo half > b.txt; {sleeper}\"\nchanges = ['b.txt']\n"),
    );
    let rerun = ["up", store.env(), "--rerun", "configure"];
    for (signal, said) in [(Signal::SIGINT, &*rerun.join(" ")), (Signal::SIGKILL, "")] {
        let up = store.start(&rerun);
        wait_for_process(&sleeper);
        up.signal(signal);
        up.wait().exits(128 + signal as i32).says(&[said]);
        wait_until("the script has ended", || {
            processes_called(&sleeper).is_empty()
        });
    }
    script("echo whole >> b.txt", "'b.txt'").ok();
    store.sh("cat /v/src/b.txt").ok().prints("two\nwhole");
    assert_eq!(seen(&src), before);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

#[test]
fn what_a_step_fetches_into_a_source_gets_the_hooks() {
    let store = TestStore::new();
    let src = source(&store);
    let upstream = store.work().join("upstream");
    fs::create_dir(&upstream).unwrap();
    let fetched = |text: &str| fs::write(upstream.join("a.txt"), text).unwrap();
    let steps = "hooks = ['fix']
        [[volume]]\nname = 'src'\nkind = 'source'\npath = '../src'\ntarget = '/v/src'
        [[volume]]\nname = 'up'\nkind = 'host'\npath = '../upstream'\ntarget = '/v/up'
        [[step]]\nname = 'fetch'\nrun = 'cp -r /v/up/. /v/src; cat /v/src/a.txt > ~/fetch'
        [[step]]\nname = 'build'\nrun = 'cat /v/src/a.txt > ~/build; echo made > /v/src/made'\n";
    hook(&store, "fix", &format!("from-step = 'build'\n{EDIT}"));
    fetched("one 1\n");
    store.up_with(steps);
    store.sh("cat ~/fetch ~/build").ok().prints("one 1\nONE 1");
    // The previous run itself changed the source, so the file that `build` wrote in the view is still there.
    let more =
        format!("{steps}[[step]]\nname = 'more'\nrun = 'cat /v/src/a.txt /v/src/made > ~/more'\n");
    store.up_with(&more).says(&["3 steps, 2 done before"]);
    store.sh("cat ~/more").ok().prints("ONE 1\nmade");
    // A run that began with the old source below the view fetches the new one.
    fetched("one 2\n");
    store.rockenv(&["up", store.env(), "--rerun", "fetch"]).ok();
    store
        .sh("cat ~/fetch ~/build ~/more /v/src/a.txt")
        .ok()
        .prints("one 2\nONE 2\nONE 2\nmade\nONE 2");
    assert_eq!(fs::read_to_string(src.join("a.txt")).unwrap(), "one 2\n");
    assert!(!src.join("made").exists());
    // A hook that does not fit the fetched source fails, and nothing is built from it.
    fetched("another\n");
    store
        .rockenv(&["up", store.env(), "--rerun", "fetch"])
        .exits(3)
        .says(&["hook `fix`", "`one` must occur once in `a.txt`"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}
