//! Steps whose sources change, are missing, or are changed by the steps themselves.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::fcntl::OFlag;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;

use super::on_overlay_and_btrfs;
use crate::support::env::TestStore;
use crate::support::git::{Daemon, git, repository};
use crate::support::run::{Background, Ran, wait_until};

#[test]
fn a_source_directory_that_is_not_there_is_named() {
    let store = TestStore::new();
    store.profile(
        "[[volume]]\nname = 'src'\nkind = 'source'\npath = '/nowhere/src'\ntarget = '/src'\n\
         [[step]]\nname = 'one'\ninputs = ['src']\nrun = 'true'\n",
    );
    for command in ["up ENV", "lock ENV"] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(store.shows(command), @"
            error: source `src` is missing from `/nowhere/src`
              caused by: No such file or directory (os error 2)
            help: correct `path` of the volume in the profile, or put the source there
            exit code 3
            ");
        }
    }
    let plan = store.shows("plan ENV");
    insta::assert_snapshot!(plan.split("\n\n").next().unwrap(), @"
    ENV: `up` would refuse
      - source `src` is missing from `/nowhere/src`
    help: correct `path` of the volume in the profile, or put the source there
    ");
    // A source that goes after its last step is no error: the env is complete.
    let runs = store.runs();
    fs::create_dir(runs.join("src")).unwrap();
    let steps = format!(
        "[[volume]]\nname = 'src'\nkind = 'source'\npath = '{runs}/src'\ntarget = '/src'\n\
         [[volume]]\nname = 'runs'\nkind = 'host'\naccess = 'rw'\npath = '{runs}'\ntarget = '/runs'\n\
         [[step]]\nname = 'one'\ninputs = ['src']\nrun = 'true'\n\
         [[step]]\nname = 'two'\nrun = 'mv /runs/src /runs/gone'\n",
        runs = runs.display()
    );
    let said = "`src` changed after step `one` began: the next `up` builds again from there";
    store.up_with(&steps).says(&[said]);
}

#[test]
fn a_source_that_changed_runs_its_steps_again_and_is_never_written() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("a"), "one").unwrap();
    let steps = format!(
        "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
         [[step]]\nname = \"before\"\nrun = \"true\"\n\
         [[step]]\nname = \"read\"\ninputs = [\"src\", \"src/b\"]\nrun = \"cat /v/src/a > $HOME/a\"\n",
        source.display()
    );
    let absent = "step `read`: input `src/b` does not exist in the source: check its name";
    store.up_with(&steps).says(&[absent]);
    store.up().says(&["nothing to do"]);
    fs::write(source.join("a"), "two").unwrap();
    store.up().says(&["2 steps, 1 done before"]);
    store.sh("cat $HOME/a").ok().prints("two");
    fs::write(source.join("a"), "one").unwrap();
    store.up();
    store.sh("cat $HOME/a").ok().prints("one");
}

/// The files of a clone are as old as the clone. So the files of an earlier clone are older than the objects that were
/// built since.
#[test]
fn objects_of_another_revision_are_built_again() {
    on_overlay_and_btrfs(|store, method| {
        let upstream = store.work().join("upstream");
        let origin = upstream.join("src");
        let one = repository(&origin, "a", "one");
        fs::write(origin.join("a"), "two").unwrap();
        git(&origin, &["commit", "--quiet", "--all", "-m", "second"]);
        let two = git(&origin, &["rev-parse", "HEAD"]);
        let daemon = Daemon::start(&upstream);
        let profile = |rev: &str| {
            format!(
                "[[volume]]\nname = 'src'\nkind = 'source'\ngit = 'git://127.0.0.1:{}/src'\nrev = '{rev}'\n\
                 target = '/v/src'\n[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
                 [[step]]\nname = 'before'\nrun = 'true'\n\
                 [[step]]\nname = 'build'\ninputs = ['src']\nincremental = true\n\
                 run = 'test /v/build/a -nt /v/src/a || cp /v/src/a /v/build'\n",
                daemon.port()
            )
        };
        store.up_with(&profile(&one));
        store.up_with(&profile(&two));
        if method != "overlay" {
            // A rollback restores the objects of the second revision, but the last `up` was of the first one.
            store.profile(&profile(&one).replace("'test", "'false; test"));
            store.rockenv(&["up", store.env()]).exits(5);
            store.rockenv(&["rollback", store.env(), "build"]).ok();
            let mine = ["snapshot", "create", store.env(), "mine"];
            store.rockenv(&mine).ok();
            store.rockenv(&["rollback", store.env(), "mine"]).ok();
        }
        store.profile(&profile(&one));
        let before = ["up", store.env(), "--until", "before"];
        store.rockenv(&before).ok().says(&["nothing to do"]);
        let again = store.up();
        match method {
            "overlay" => drop(again.says(&["`--clean` empties them and runs every step again"])),
            _ => drop(store.sh("cat /v/build/a").ok().prints("one")),
        }
    });
}

#[test]
fn a_step_that_fetches_into_a_source_decides_what_later_steps_are_made_from() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("a"), "a").unwrap();
    fs::set_permissions(&source, std::fs::Permissions::from_mode(0o777)).unwrap();
    let fetching = format!(
        "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
         [[step]]\nname = \"fetch\"\nrun = \"echo new > /v/src/fetched\"\n\
         [[step]]\nname = \"build\"\ninputs = [\"src\"]\nrun = \"cat /v/src/* > $HOME/built\"\n\
         [[step]]\nname = \"last\"\ninputs = [\"src\"]\nrun = \"true\"\n",
        source.display()
    );
    store
        .up_with(&fetching)
        .says(&["step 1/3 fetch", "step 3/3 last"]);
    store.up().says(&["nothing to do"]);
    // What was built with the file does not count without it.
    fs::remove_file(source.join("fetched")).unwrap();
    store.up().says(&["step 2/3 build"]);
    store.sh("cat $HOME/built").ok().prints("a");
}

#[test]
fn a_step_that_changes_what_it_is_made_from_is_named() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::set_permissions(&source, std::fs::Permissions::from_mode(0o777)).unwrap();
    let steps = format!(
        "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
         [[step]]\nname = \"one\"\ninputs = [\"src\"]\nrun = \"echo >> /v/src/log\"\n\
         [[step]]\nname = \"two\"\ninputs = [\"src\", \"src/log\"]\nrun = \"true\"\n",
        source.display()
    );
    // `up` would never end if each change restarted it.
    let said = ["step 2/2 two", "`src` changed after step `one` began"];
    let ended = store.up_with(&steps).says(&said);
    assert!(!ended.err.contains("does not exist"), "{}", ended.err);
    store.up().says(&said);
    // Keys that are computed after a step never settle if each run changes the source.
    let steps = steps.replace("echo >>", "date +%s%N >")
        + "[[volume]]\nname = \"build\"\nkind = \"build\"\ntarget = \"/v/build\"\n\
           [[step]]\nname = \"configure\"\ninputs = [\"src\"]\nfingerprints = \"/v/build\"\nrun = \"true\"\n\
           [[step]]\nname = \"last\"\nrun = \"true\"\n";
    store.profile(&steps);
    let said = "step `configure` ran 5 times, because a step before it changes its own source";
    store.rockenv(&["up", store.env()]).exits(5).says(&[said]);
}

/// Steps that wait while the test edits their source: `zero`, which does not have it among its inputs, and `one`.
struct Waiting {
    store: TestStore,
    source: PathBuf,
    flags: PathBuf,
}

impl Waiting {
    fn new() -> Self {
        let store = TestStore::new();
        let (source, flags) = (store.work().join("source"), store.work().join("flags"));
        fs::create_dir(&source).unwrap();
        fs::write(source.join("f"), "good").unwrap();
        fs::create_dir(&flags).unwrap();
        fs::set_permissions(&flags, std::fs::Permissions::from_mode(0o777)).unwrap();
        let wait = |name: &str| {
            format!("touch /flags/{name}; until test -e /flags/go-{name}; do sleep 0.1; done")
        };
        store.profile(&format!(
            "[[volume]]\nname = 'src'\nkind = 'source'\npath = '{}'\ntarget = '/v/src'\n\
             [[volume]]\nname = 'flags'\nkind = 'host'\naccess = 'rw'\npath = '{}'\ntarget = '/flags'\n\
             [[step]]\nname = 'zero'\nrun = '{}'\n\
             [[step]]\nname = 'one'\ninputs = ['src']\nrun = '{}; cat /v/src/f > $HOME/r'\n\
             [[step]]\nname = 'two'\nrun = 'cp $HOME/r $HOME/two'\n",
            source.display(),
            flags.display(),
            wait("zero"),
            wait("one"),
        ));
        Self {
            store,
            source,
            flags,
        }
    }

    fn go(&self, step: &str) {
        fs::write(self.flags.join(format!("go-{step}")), "").unwrap();
    }

    /// Edits the source as soon as a step runs, and lets the step go on.
    fn edit_during(&self, step: &str, up: Background) -> Ran {
        wait_until("the step does not run", || self.flags.join(step).exists());
        fs::write(self.source.join("f"), "edited").unwrap();
        self.go(step);
        up.wait()
    }
}

#[test]
fn what_was_made_while_its_source_was_edited_is_no_result_of_the_old_source() {
    let case = Waiting::new();
    let (store, env) = (&case.store, case.store.env());
    case.go("zero");
    for more in [&[][..], &["--until", "one"]] {
        let up = store.start(&[&["up", env], more].concat());
        let said = "`src` changed after step `one` began: the next `up` builds again from there";
        case.edit_during("one", up).ok().says(&[said]);
        // Even if the edit is undone.
        fs::write(case.source.join("f"), "good").unwrap();
        store.up().says(&["step 2/3 one", "step 3/3 two"]);
        store.sh("cat $HOME/r $HOME/two").ok().prints("goodgood");
        store.up().says(&["nothing to do"]);
        store.rockenv(&["rm", "--yes", env]).ok();
        fs::remove_file(case.flags.join("go-one")).unwrap();
        fs::remove_file(case.flags.join("one")).unwrap();
    }
    // No other env gets that snapshot either.
    let other = format!("{env}-other");
    let up = store.start(&["up", env]);
    case.edit_during("one", up).ok();
    fs::write(case.source.join("f"), "good").unwrap();
    store.rockenv(&["up", env, "--name", &other]).ok();
    store
        .sh_in(&other, "cat $HOME/r $HOME/two")
        .ok()
        .prints("goodgood");
}

/// As `git checkout OTHER` and back leave the source.
#[test]
fn a_source_that_was_another_one_meanwhile_is_no_result_of_either() {
    let case = Waiting::new();
    let (store, env) = (&case.store, case.store.env());
    let git = |words: &[&str]| crate::support::git::git(&case.source, words);
    git(&["init", "-q"]);
    fs::write(case.source.join(".gitignore"), "*.o\n").unwrap();
    git(&["add", "."]);
    git(&["commit", "-qm", "one"]);
    let edited = |up: Background, file: &str| {
        wait_until("the step does not run", || case.flags.join("one").exists());
        let file = case.source.join(file);
        let before = fs::read(&file).unwrap_or_default();
        fs::write(&file, "other").unwrap();
        fs::write(&file, before).unwrap();
        case.go("one");
        up.wait().ok()
    };
    case.go("zero");
    let up = store.start(&["up", env]);
    edited(up, "f").says(&["`src` changed after step `one` began"]);
    // `up` runs the step again, and a file that git ignores does not count as a source.
    fs::remove_file(case.flags.join("go-one")).unwrap();
    fs::remove_file(case.flags.join("one")).unwrap();
    let up = store.start(&["up", env]);
    let again = edited(up, "x.o").says(&["step 2/3 one", "step 3/3 two"]);
    assert!(!again.err.contains("changed"), "{}", again.err);
    store.up().says(&["nothing to do"]);
}

/// As Ctrl-C after an edit by mistake, and `git checkout` of the file.
#[test]
fn what_a_failed_step_made_of_an_edited_source_is_no_result_of_the_old_one() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("f"), "good").unwrap();
    let mode = std::fs::Permissions::from_mode(0o666);
    fs::set_permissions(source.join("f"), mode).unwrap();
    store.profile(&format!(
        "[[volume]]\nname = 'src'\nkind = 'source'\naccess = 'ro'\npath = '{path}'\ntarget = '/v/src'\n\
         [[volume]]\nname = 'editor'\nkind = 'host'\naccess = 'rw'\npath = '{path}'\ntarget = '/v/editor'\n\
         [[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
         [[step]]\nname = 'one'\ninputs = ['src']\nrun = '''\n\
         test ! -e /v/build/f || exit 0\n\
         printf edited > /v/editor/f; cp /v/src/f /v/build/f; printf good > /v/editor/f; exit 1'''\n",
        path = source.display(),
    ));
    store.rockenv(&["up", store.env()]).exits(5);
    let said = "`src` changed after step `one` began: the next `up` builds again from there";
    store.up().says(&[said]);
}

#[test]
fn what_an_edited_source_left_in_a_view_is_gone_with_the_edit() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    for (name, text) in [("f", "good"), ("g", "one")] {
        fs::write(source.join(name), text).unwrap();
    }
    let git = |words: &[&str]| crate::support::git::git(&source, words);
    git(&["init", "-q"]);
    git(&["add", "."]);
    git(&["commit", "-qm", "one"]);
    let hook = store.work().join("hooks/fix");
    fs::create_dir_all(&hook).unwrap();
    let text = "schema = 1\ndescription = 'd'\nwhy = 'w'\nvolume = 'src'\n\
        [[edit]]\nfile = 'g'\nfind = 'one'\nreplace = 'two'\n";
    fs::write(hook.join("hook.toml"), text).unwrap();
    let steps = format!(
        "hooks = ['fix']\n\
         [[volume]]\nname = 'src'\nkind = 'source'\npath = '{path}'\ntarget = '/v/src'\n\
         [[volume]]\nname = 'editor'\nkind = 'host'\naccess = 'rw'\npath = '{path}'\ntarget = '/v/editor'\n\
         [[volume]]\nname = 'runs'\nkind = 'host'\naccess = 'rw'\npath = '{runs}'\ntarget = '/v/runs'\n\
         [[step]]\nname = 'one'\nuser = 'root'\ninputs = ['src']\nrun = '''\n\
         if test ! -e /v/runs/edited; then\n\
         printf edited > /v/editor/f; chmod u+w /v/src/f; printf good > /v/editor/f; touch /v/runs/edited\n\
         fi\n\
         cat /v/src/f /v/src/g > $HOME/r'''\n\
         [[step]]\nname = 'two'\nrun = '''\n\
         touch /v/runs/two; until test -e /v/runs/go; do sleep 0.1; done'''\n",
        path = source.display(),
        runs = store.runs().display(),
    );
    store.profile(&steps);
    // Even if `up` is killed before it ends.
    let up = store.start(&["up", store.env()]);
    let runs = store.runs();
    wait_until("step `two` does not run", || runs.join("two").exists());
    up.signal(Signal::SIGKILL);
    up.wait().exits(137);
    fs::write(runs.join("go"), "").unwrap();
    store.up().says(&["step 1/2 one"]);
    store.root_sh("cat $HOME/r").ok().prints("goodtwo");
    store.up().says(&["nothing to do"]);
}

#[test]
fn a_locked_source_that_is_edited_during_the_build_is_refused() {
    for step in ["zero", "one"] {
        let case = Waiting::new();
        let (store, env) = (&case.store, case.store.env());
        store.rockenv(&["lock", env]).ok();
        if step == "one" {
            case.go("zero");
        }
        let up = store.start(&["up", env, "--locked"]);
        let said = match step {
            "zero" => "`src` changed before step `one` began, and differs from the lock file",
            _ => "step `one`: `src` changed while it ran, and differs from the lock file",
        };
        case.edit_during(step, up).exits(8).says(&[said]);
        fs::write(case.source.join("f"), "good").unwrap();
        case.go("one");
        store.rockenv(&["up", env, "--locked"]).ok();
        store.sh("cat $HOME/two").ok().prints("good");
    }
}

#[test]
fn a_locked_checkout_that_is_edited_before_the_first_step_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    repository(&directory.path().join("src"), "f", "good\n");
    let daemon = Daemon::start(directory.path());
    let store = TestStore::new();
    let (env, ninja) = (store.env(), store.work().join("ninja"));
    let program = "--jobserver-auth=";
    fs::write(&ninja, program).unwrap();
    store.configure(&format!("ninja = '{}'\n", ninja.display()));
    store.profile(&format!(
        "[resources]\nninja = true\n\
         [[volume]]\nname = 'src'\nkind = 'source'\ngit = 'git://127.0.0.1:{}/src'\ntarget = '/v/src'\n\
         [[step]]\nname = 'one'\ninputs = ['src']\nrun = 'cat /v/src/f > $HOME/r'\n",
        daemon.port()
    ));
    store.rockenv(&["lock", env]).ok();
    // `up` reads the program to compare it with the lock file, and again after it has read the source.
    let pipe = || {
        let new = store.work().join("pipe");
        nix::unistd::mkfifo(&new, Mode::from_bits_truncate(0o644)).unwrap();
        fs::rename(&new, &ninja).unwrap();
    };
    let reader = || {
        let mut reader = None;
        wait_until("nothing reads the program", || {
            let mut options = fs::OpenOptions::new();
            let options = options.write(true).custom_flags(OFlag::O_NONBLOCK.bits());
            reader = options.open(&ninja).ok();
            reader.is_some()
        });
        reader.unwrap()
    };
    pipe();
    let up = store.start(&["up", env, "--locked"]);
    let mut first = reader();
    pipe();
    first.write_all(program.as_bytes()).unwrap();
    drop(first);
    let mut second = reader();
    let sources = fs::read_dir(store.home().join("sources")).unwrap();
    let mut files = sources.map(|entry| entry.unwrap().path().join("f"));
    let file = files.find(|file| file.exists()).unwrap();
    fs::write(file, "edited\n").unwrap();
    second.write_all(program.as_bytes()).unwrap();
    drop(second);
    let said = [
        "source `src` in `",
        "is at the locked commit, but has changes",
    ];
    up.wait().exits(8).says(&said);
}
