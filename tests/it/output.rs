//! What users see: `plan` and its verdict, commands that only inspect, hints, results and progress.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::loopfs::{Mount, bind, need_root};
use crate::support::run::{copy_program, finish};
use crate::support::terminal::Terminal;

/// A user without subordinate ids.
const UID: u32 = 65533;

/// An ordinary user on a machine without an engine, with a home of their own.
struct Newcomer {
    /// Hides a store of root's, such as `make demo` creates, from the calling thread and its programs.
    _lib: Mount,
    home: tempfile::TempDir,
}

/// Exit code and output of a command.
struct Said {
    code: i32,
    out: String,
    err: String,
}

impl Newcomer {
    fn new() -> Self {
        need_root();
        let home = tempfile::tempdir().unwrap();
        fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).unwrap();
        chown(home.path(), Some(UID), Some(UID)).unwrap();
        copy_program(&home.path().join("program"));
        let lib = home.path().join("lib");
        fs::create_dir(&lib).unwrap();
        let _lib = bind(&lib, Path::new("/var/lib"));
        Self { _lib, home }
    }

    fn path(&self) -> &Path {
        self.home.path()
    }

    fn run(&self, arguments: &[&str]) -> Said {
        let output = Command::new(self.path().join("program"))
            .args(arguments)
            .env_clear()
            .env("HOME", self.path())
            .env("XDG_CONFIG_HOME", self.path().join("config"))
            .env("XDG_DATA_HOME", self.path().join("data"))
            .env("DOCKER_HOST", "unix:///nowhere/docker.sock")
            .env("CONTAINER_HOST", "unix:///nowhere/podman.sock")
            .env("ROCKENV_GPU_ROOT", "/nowhere")
            .env("ROCKENV_JOBS", "2")
            .current_dir(self.path())
            .uid(UID)
            .gid(UID)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said {
            code: output.status.code().unwrap(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    fn profile(&self, body: &str) {
        let text = format!("schema = 1\nimage = 'debian-forky'\n{body}");
        fs::write(self.path().join("p.toml"), text).unwrap();
    }
}

#[test]
fn a_plan_begins_with_the_verdict_and_fits_in_80_columns() {
    let newcomer = Newcomer::new();
    newcomer.profile(
        "variant = 'a'\nresources = { memory = '900G', memory-max = '2G' }\n[variants.a]\n[variants.b]\n\
         [[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/b'\ndisk = '900T'\n\
         [[volume]]\nname = 'shared'\nkind = 'host'\npath = '/srv/shared'\ntarget = '/s'\naccess = 'rw'\n\
         [[step]]\nname = 'one'\nrun = 'true'\n\
         [[step]]\nname = 'two'\nwhen = { variant = ['b'] }\nrun = 'true'\n",
    );
    let said = newcomer.run(&["plan", "p.toml", "--target", "gfx1103"]);
    assert_eq!(said.code, 0, "{}", said.err);
    for line in said.out.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let home = newcomer.path().to_str().unwrap().to_owned();
    let out = said.out.replace(&home, "HOME");
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"this machine has [0-9.]+ .iB", "this machine has SIZE");
    settings.add_filter(r"[0-9.]+ .iB free", "SIZE free");
    settings.add_filter(r"[0-9.]+ TiB more", "SIZE more");
    settings.add_filter(r"(?m)^disk .*(\n .*)*", "disk   DISK");
    settings.add_filter(
        r"  - profile `p` needs 900.0 TiB (?s:.*?) free\n",
        "  - DISK\n",
    );
    settings.bind(|| {
        insta::assert_snapshot!(out, @r"
        p-gfx1103: `up` would refuse
          - no engine available: systemd-nspawn needs root, and neither Docker nor
            Podman answers
          - profile `p` needs 900.0 GiB of memory, this machine has SIZE
          - DISK
        help: run `sudo rockenv up p.toml --target gfx1103`; build on a machine with
              900.0 GiB, and free SIZE more (`rockenv gc --dry-run` shows what
              rockenv can free), or add --force

        image  debian-forky
        engine planned for nspawn, which cannot be used here
        store  none yet
        jobs   2 (configured), of 2 on this machine (configured)
        memory at most 2.0 GiB (set by the profile); needs a machine with 900.0 GiB
        disk   DISK
        time   unknown: none of its steps has run here before
        gpu    none
        writes steps can write to `/srv/shared`; `up` asks before they write to
               `/srv/shared`

        step  plan  why
        one   run   new
        1 step of another variant or starting point is not shown; `-v` shows all
        ");
    });
    assert!(said.err.contains("image `debian-forky` is not built yet"));
    let refused = newcomer.run(&["plan", "p.toml", "--target", "gfx1103", "--check"]);
    assert_eq!(refused.code, 9, "{}", refused.err);
    let first = ["plan", "p.toml", "--target", "gfx1103", "--until", "one"];
    assert!(!newcomer.run(&first).out.contains("\ntwo "), "of variant b");
    let all = newcomer.run(&["-v", "plan", "p.toml", "--target", "gfx1103"]);
    assert!(all.out.contains("only in variant b"), "{}", all.out);
    let json = newcomer.run(&["plan", "p.toml", "--target", "gfx1103", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(json["refused"]["reasons"].as_array().unwrap().len(), 3);
    assert_eq!(json["host_writes"]["asks"][0], "/srv/shared");
}

#[test]
fn inspecting_needs_no_engine_and_no_root() {
    let newcomer = Newcomer::new();
    let absent = "planned for nspawn, which cannot be used here";
    for (command, on_stdout) in [
        (&["plan", "gfx1103"][..], true),
        (&["up", "--dry-run", "gfx1103"], true),
        (
            &["profile", "show", "therock", "--resolved", "-t", "gfx1103"],
            false,
        ),
    ] {
        let said = newcomer.run(command);
        assert_eq!(said.code, 0, "{command:?}: {}", said.err);
        let text = if on_stdout { &said.out } else { &said.err };
        assert!(text.contains(absent), "{command:?}: {text}");
    }
    let said = newcomer.run(&["profile", "check"]);
    assert_eq!(said.code, 0, "{}", said.err);
    // Only the base image has to be built, which needs root but no engine.
    let said = newcomer.run(&["lock", "gfx1103"]);
    assert_eq!(said.code, 4, "{}", said.err);
    assert!(said.err.contains(absent), "{}", said.err);
    for part in [
        "error: locking the packages of image `therock-manylinux",
        "help: sudo rockenv lock gfx1103\n",
    ] {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
    assert!(!newcomer.path().join("data").exists(), "no store was made");
}

/// Creates root's store at its usual place.
fn roots_store() {
    let store = Path::new("/var/lib/rockenv");
    fs::create_dir(store).unwrap();
    fs::set_permissions(store, PermissionsExt::from_mode(0o711)).unwrap();
}

#[test]
fn a_user_of_roots_store_is_told_to_use_sudo() {
    let newcomer = Newcomer::new();
    let none = newcomer.run(&["status", "e"]);
    assert!(!none.err.contains("sudo"), "{}", none.err);
    // Subordinate ids are only suggested to users who chose to work without root.
    let exec = newcomer.run(&["exec", "e", "--", "echo", "a b"]);
    assert_eq!(exec.code, 4, "{}", exec.err);
    assert_eq!(
        exec.err,
        "error: running commands in an env needs root\nhelp: sudo rockenv exec e -- echo 'a b'\n"
    );

    roots_store();
    for command in [
        &["status", "e"][..],
        &["exec", "e", "--", "true"],
        &["shell", "e"],
        &["du"],
        &["gc"],
        &["logs", "e"],
        &["env", "e"],
        &["rm", "e"],
        &["rollback", "e", "one"],
        &["report", "e"],
        &["snapshot", "ls", "e"],
    ] {
        let said = newcomer.run(command);
        assert_eq!(said.code, 7, "{command:?}: {}", said.err);
        assert!(
            said.err.contains("root has one at `/var/lib/rockenv`"),
            "{}",
            said.err
        );
        let help = format!("help: sudo rockenv {}\n", command.join(" "));
        assert!(said.err.ends_with(&help), "{command:?}: {}", said.err);
    }
    let said = newcomer.run(&["ls"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(
        said.err,
        "no envs of your own\nroot has a store, at `/var/lib/rockenv`; to use it: sudo rockenv ls\n"
    );
    let said = newcomer.run(&["image", "ls"]);
    assert!(
        said.err.ends_with("to use it: sudo rockenv image ls\n"),
        "{}",
        said.err
    );
    // Nobody answers there.
    let prune = [
        "cache",
        "prune",
        "--registry",
        "127.0.0.1:9/x",
        "--older-than",
        "1d",
    ];
    let said = newcomer.run(&prune);
    assert_eq!(said.code, 4, "{}", said.err);
    let warning = format!(
        "are not kept; to keep them: sudo rockenv {}\n",
        prune.join(" ")
    );
    assert!(said.err.contains(&warning), "{}", said.err);
}

#[test]
fn a_user_with_a_store_of_their_own_is_told_of_roots_too() {
    let newcomer = Newcomer::new();
    let own = newcomer.path().join("data/rockenv");
    fs::create_dir_all(own.join("envs")).unwrap();
    fs::write(own.join("format"), r#"{"version": 1, "method": "overlay"}"#).unwrap();
    for path in [
        "data",
        "data/rockenv",
        "data/rockenv/envs",
        "data/rockenv/format",
    ] {
        chown(newcomer.path().join(path), Some(UID), Some(UID)).unwrap();
    }
    roots_store();
    for command in [
        &["status", "e"][..],
        &["status"],
        &["exec", "e", "--", "true"],
        &["shell", "e"],
        &["du", "e"],
        &["logs", "e"],
        &["env", "e"],
        &["rm", "e"],
        &["down", "e"],
        &["rollback", "e", "one"],
        &["fork", "e", "f"],
        &["verify", "e"],
        &["report", "e"],
        &["export", "e", "out"],
        &["snapshot", "ls", "e"],
        &["snapshot", "create", "e", "one"],
    ] {
        let said = newcomer.run(command);
        assert!([4, 7].contains(&said.code), "{command:?}: {}", said.err);
        let help = format!("help: sudo rockenv {}\n", command.join(" "));
        assert!(said.err.ends_with(&help), "{command:?}: {}", said.err);
    }
}

/// Runs rockenv as sudo would, and returns what it prints.
fn through_sudo(store: &TestStore, arguments: &[&str]) -> String {
    let mut command = store.command(arguments);
    command.env("SUDO_COMMAND", "/usr/bin/rockenv");
    store.shown(&finish(arguments.join(" "), command))
}

const WHEELS: &str = "runtime-env = { A = 'b' }\n[[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/out'\n\
     [[step]]\nname = 'one'\nrun = 'head -c 1M /dev/zero >/out/a-1.whl'\n[[step]]\nname = 'two'\nrun = 'true'\n";

#[test]
fn results_and_the_next_command_are_shown_with_sudo() {
    let store = TestStore::new();
    store.profile(WHEELS);
    let env = store.env();
    let done = through_sudo(&store, &["up", env]);
    // sudo does not pass `ROCKENV_HOME` on.
    insta::assert_snapshot!(&done[done.find("ENV: done").unwrap()..], @r#"
    ENV: done; to enter it: sudo rockenv --home STORE shell ENV
    results: STORE/outputs/ENV/out (1.0 MiB)
    next: pip install STORE/outputs/ENV/out/*.whl
    next: eval "$(sudo rockenv --home STORE env ENV)"
    "#);
    let results = &done[done.find("results: ").unwrap()..];
    let status = through_sudo(&store, &["status", env]);
    assert!(status.ends_with(results), "{status}");
    let json = store.rockenv(&["status", "--json", env]).ok().json();
    assert_eq!(json["handed_over"]["outputs"][0]["volume"], "out");
    insta::assert_snapshot!(through_sudo(&store, &["status", "other"]), @"
    error: no env `other`
    help: sudo rockenv --home STORE ls
    exit code 7
    ");
}

/// Output for a shell is not escaped for display.
#[test]
fn variables_reach_a_shell_unchanged() {
    let store = TestStore::new();
    store.up_with(
        "runtime-env = { A = \"\\u202Eb\\u001B[1m\" }\n[[step]]\nname = 'one'\nrun = 'true'\n",
    );
    store
        .rockenv(&["env", store.env()])
        .ok()
        .prints("export A='\u{202e}b\u{1b}[1m'");
    // An earlier version accepted variables that make the host run programs.
    let spec = store
        .home()
        .join("envs")
        .join(store.env())
        .join("spec.toml");
    let earlier = fs::read_to_string(&spec).unwrap();
    fs::write(&spec, earlier.replace("\nA = ", "\nRANDOM = ")).unwrap();
    let refused = store.rockenv(&["env", store.env()]).exits(3);
    assert_eq!(refused.text(), "");
    refused.says(&["`RANDOM` cannot be a runtime variable"]);
}

#[test]
fn hints_name_the_store_that_an_option_names() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = 'one'\nrun = 'false'\n");
    let (home, env) = (store.home().to_str().unwrap(), store.env());
    let resume = format!("fix it, then resume with: rockenv --home {home} up {env}\n");
    store
        .rockenv(&["--home", home, "up", env])
        .exits(5)
        .says(&[&resume]);
    // A variable also applies to the suggested command, which needs no `--home` then.
    insta::assert_snapshot!(store.shows("status other --home STORE\nstatus other"), @"
    $ rockenv status other --home STORE
    error: no env `other`
    help: rockenv --home STORE ls
    exit code 7
    $ rockenv status other
    error: no env `other`
    help: rockenv ls
    exit code 7
    ");
}

#[test]
fn a_terminal_shows_progress_of_its_own_and_forgets_it() {
    let store = TestStore::new();
    store.profile(
        "[[step]]\nname = 'one'\nrun = 'sleep 2'\n[[step]]\nname = 'two'\nrun = 'false'\n",
    );
    let mut command = store.command(&["up", store.env()]);
    command.env("TERM_PROGRAM", "WezTerm");
    let mut terminal = Terminal::start(command, 24, 100);
    terminal.expect("\x1b[22;2t");
    terminal.expect(&format!("\x1b]2;rockenv {}: 1/2 one\x1b\\", store.env()));
    // The progress line of the whole run.
    terminal.expect("0/2 steps");
    terminal.expect("\x1b]9;4;1;50\x1b\\");
    terminal.expect("\x1b]9;4;0;\x1b\\");
    terminal.expect("\x1b[23;2t");
    terminal.expect("step `two` failed");
    terminal.wait(5);
}

#[test]
fn status_is_shown_again_in_place() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = 'one'\nrun = 'true'\n");
    let words = ["status", store.env(), "--watch"];
    insta::assert_snapshot!(store.shown(&store.rockenv(&words)), @"
    error: `--watch` needs a terminal
    help: leave out --watch
    exit code 2
    ");
    let mut terminal = Terminal::start(store.command(&words), 40, 200);
    terminal.expect("state    ready");
    terminal.expect("\x1b[8F\x1b[J");
    terminal.expect("state    ready");
    terminal.write("\x03");
    terminal.wait(0);
    // Output that is taller than the screen cannot be redrawn in place.
    let mut terminal = Terminal::start(store.command(&words), 5, 200);
    terminal.expect("state    ready");
    terminal.expect("\x1b[4F\x1b[J");
    terminal.expect("state    ready");
    terminal.write("\x03");
    terminal.wait(0);
}

#[test]
fn what_there_is_not_is_said() {
    let store = TestStore::new();
    let text = "[[step]]\nname = 'quiet'\nrun = 'true'\n[[step]]\nname = 'test'\ngpu = true\nrun = 'true'\n";
    store.profile(text);
    let name = store.env();
    store.rockenv(&["up", name, "--gpu", "none"]).ok();
    let said = store.shows(
        "logs ENV
        verify ENV test
        plan ENV --param x=1
        plan ENV --variant x
        plan ENV --jobs 0",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv logs ENV
    step `quiet` of env `ENV` printed nothing
    $ rockenv verify ENV test
    error: step `test` of env `ENV` has no snapshot: it was skipped
    help: steps with a snapshot: quiet
    exit code 7
    $ rockenv plan ENV --param x=1
    error: profile `ENV` has no parameter `x`
    help: it has none: leave out --param
    exit code 2
    $ rockenv plan ENV --variant x
    error: profile `ENV` has no variant `x`
    help: leave out --variant
    exit code 2
    $ rockenv plan ENV --jobs 0
    error: invalid value '0' for '--jobs <JOBS>': must be at least 1

    For more information, try '--help'.
    exit code 2
    ");
    for verb in ["up", "logs"] {
        store.rockenv(&[verb, name, "--json"]).exits(2);
    }
    // A step that ran counts as skipped once it needs a GPU, and no longer when it does not.
    let anywhere = text.replace("gpu = true\n", "");
    for (profile, is_skipped) in [(&*anywhere, false), (text, true), (&*anywhere, false)] {
        store.profile(profile);
        store.rockenv(&["up", name, "--gpu", "none"]).ok();
        let status = store.rockenv(&["status", name]).ok().text();
        assert_eq!(status.contains("skipped"), is_skipped, "{status}");
        assert!(!status.contains("targets"), "{status}");
    }
    // The second step was left, but another env has built it.
    let other = format!("{name}-other");
    for more in [&["--until", "quiet"][..], &[]] {
        let up = [&["up", name, "--name", other.as_str()], more].concat();
        store.rockenv(&up).ok();
    }
    let status = store.rockenv(&["status", &other]).ok().text();
    assert!(!status.contains("not done"), "{status}");
}

/// A build chooses the names of its files, so they may contain anything.
#[test]
fn names_of_files_are_one_line_and_in_json_they_can_be_read() {
    let store = TestStore::new();
    let env = store.env();
    store.up_with(
        r#"
        [[volume]]
        name = "out"
        kind = "output"
        target = "/out"
        [[step]]
        name = "one"
        run = '''f=$(printf 'r\nhelp: run this'); date > "/out/$f"'''
        "#,
    );
    store.rockenv(&["export", env, "made"]).ok();
    let forged = "r\nhelp: run this";
    fs::remove_file(store.work().join("made/out").join(forged)).unwrap();
    let check = store.rockenv(&["export", "--check", "made"]).exits(8);
    let own = store.home().join("outputs").join(env).join("out");
    fs::remove_file(own.join(forged)).unwrap();
    let status = store.rockenv(&["status", env, "--check"]).exits(8);
    for text in [check.text(), status.text()] {
        assert!(text.contains(r"r\nhelp: run this"), "{text}");
        assert!(
            !text.lines().any(|line| line.starts_with("help:")),
            "{text}"
        );
    }
    store.sh(r#"touch ~/"$(printf 'bad\377name')""#).ok();
    let diff = ["--json", "snapshot", "diff", env, "one"];
    let diff = store.rockenv(&diff).ok().text();
    assert!(diff.contains(r"bad\\xffname"), "{diff}");
}

#[test]
fn a_dry_run_is_refused_with_events() {
    let store = TestStore::new();
    let dry_run = ["up", "hip-smoke", "--dry-run", "--progress"];
    store.rockenv(&[&dry_run[..], &["auto"]].concat()).ok();
    insta::assert_snapshot!(store.shows("up hip-smoke --dry-run --progress json"), @"
    error: `--dry-run` has no events for `--progress json`
    help: `--dry-run --json` writes the plan as JSON
    exit code 2
    ");
}
