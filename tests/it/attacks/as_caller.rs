//! Root writes to a path that the caller named, and the path leads elsewhere from the start or is swapped during the
//! write. Root must not reach anything that the caller cannot reach.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use fs_err as fs;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};

use crate::support::background::while_repeating;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::ordinary::MadeUp;

/// Before the fix, the racers won within seconds.
const TRIES: usize = 25;

/// The expected content of the directory that only root may enter.
const NOTHING: [PathBuf; 0] = [];

/// A profile whose step writes one file to an output.
const PROFILE: &str = r#"
[[volume]]
name = "out"
kind = "output"
target = "/v/out"
[[step]]
name = "build"
run = "echo result > /v/out/result"
"#;

/// A user, an env in a store that root owns, and a directory that only root may enter.
struct Stage {
    store: TestStore,
    user: MadeUp,
    secret: PathBuf,
    /// Two directories that the user exchanges.
    here: PathBuf,
    there: PathBuf,
    _disk: LoopFs,
}

impl Stage {
    fn new() -> Self {
        let disk = LoopFs::with_base(Kind::Ext4);
        let user = MadeUp::at(disk.join("home"));
        fs::rename(disk.join("store"), user.store()).expect("the store's place");
        let store = TestStore::at(&user.store());
        store.profile(PROFILE);
        store.up();
        let secret = disk.path().join("secret");
        fs::create_dir(&secret).expect("a directory");
        fs::set_permissions(&secret, PermissionsExt::from_mode(0o700)).expect("a mode");
        let [here, there] = ["here", "there"].map(|name| user.home.join(name));
        Self {
            store,
            user,
            secret,
            here,
            there,
            _disk: disk,
        }
    }

    fn make_own(&self, path: &Path) {
        fs::create_dir(path).expect("a directory");
        chown(path, Some(MadeUp::UID), Some(MadeUp::UID)).expect("an owner");
    }

    fn sudo(&self, arguments: &[&str]) -> Output {
        output(self.user.sudo(self.user.program(), arguments))
    }

    /// Calls `work` repeatedly while another thread repeats `step` with the user's rights.
    fn race(&self, step: impl Fn() + Sync, mut work: impl FnMut()) {
        let step = || {
            // These calls change the current thread only.
            setfsgid(Gid::from_raw(MadeUp::UID));
            setfsuid(Uid::from_raw(MadeUp::UID));
            step();
        };
        while_repeating(step, || (0..TRIES).for_each(|_| work()));
    }

    fn exchange(&self) {
        let flags = RenameFlags::RENAME_EXCHANGE;
        renameat2(AT_FDCWD, &self.here, AT_FDCWD, &self.there, flags).ok();
    }

    /// Copies the store's image recipes to the user's directory, and removes the env whose name the user's profile
    /// takes.
    fn bring_images(&self) {
        self.store.rockenv(&["--yes", "rm", self.store.env()]).ok();
        let images = self.here.join("images");
        fs::create_dir(&images).expect("a directory");
        for entry in fs::read_dir(self.store.work().join("images")).expect("images") {
            let path = entry.expect("an image").path();
            let to = images.join(path.file_name().expect("a name"));
            fs::copy(path, to).expect("a copy");
        }
    }

    /// Writes a profile to the user's directory, with its output at `place`.
    fn write_profile(&self, place: &Path) {
        let text = PROFILE.replace("kind =", &format!("path = {place:?}\nkind ="));
        let text = format!("schema = 1\nimage = \"base\"\n{text}");
        let file = format!("{}.toml", self.store.env());
        fs::write(self.here.join(file), text).expect("a profile");
    }

    /// Makes a command that runs in the directory for the user, who trusts the directory.
    fn command_here(&self, arguments: &[&str]) -> Command {
        let mut command = self.store.command(arguments);
        command.env("SUDO_UID", "4321").env("SUDO_GID", "4321");
        command.current_dir(&self.here);
        command.env("ROCKENV_TRUSTED_DIRS", &self.here);
        command
    }

    fn run_here(&self, arguments: &[&str]) -> Output {
        output(self.command_here(arguments))
    }

    fn secrets(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.secret).expect("a directory");
        entries
            .map(|entry| entry.expect("an entry").path())
            .collect()
    }
}

fn output(mut command: Command) -> Output {
    command.output().expect("a command")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn files_for_the_caller_are_never_written_where_the_caller_may_not() {
    let stage = Stage::new();
    let env = stage.store.env();
    stage.make_own(&stage.here);
    symlink(&stage.secret, &stage.there).expect("a link");
    let [here, link] = [&stage.here, &stage.there].map(|path| path.to_str().expect("a path"));
    // No race here: the link is in a checkout, and the command names it like a directory.
    let page = format!("{link}/page.html");
    let file = format!("{link}/rows");
    let image = format!("{link}/image.tar");
    for arguments in [
        vec!["report", env, "--output", &page],
        vec!["export", env, "--snapshots", &image],
        vec!["export", env, link],
        vec!["up", env, "--metrics", &file],
    ] {
        let output = stage.sudo(&arguments);
        assert_eq!(stage.secrets(), NOTHING, "{arguments:?}");
        assert!(!output.status.success(), "{arguments:?}");
        if arguments[0] != "up" {
            assert!(said(&output).contains(link), "{}", said(&output));
            assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        }
    }
    for arguments in [
        [
            "report",
            env,
            "--output",
            &format!("{here}/page.html"),
            "--force",
        ]
        .as_slice(),
        &["export", env, "--snapshots", &format!("{here}/image")],
        &["export", env, &format!("{here}/results")],
    ] {
        let race = || stage.exchange();
        stage.race(race, || {
            drop(stage.sudo(arguments));
            assert_eq!(stage.secrets(), NOTHING, "{arguments:?}");
        });
    }
    stage.store.assert_clean();
}

/// Proves that the races can be won: code that checks a path and then writes to it loses.
#[test]
fn the_racer_wins_against_a_check_before_a_write() {
    let stage = Stage::new();
    stage.make_own(&stage.here);
    symlink(&stage.secret, &stage.there).expect("a link");
    let deadline = Instant::now() + crate::support::run::HANGS;
    let race = || stage.exchange();
    stage.race(race, || {
        while stage.secrets().is_empty() && Instant::now() < deadline {
            let is_own = fs::symlink_metadata(&stage.here)
                .is_ok_and(|found| found.is_dir() && found.uid() == MadeUp::UID);
            if is_own {
                fs::write(stage.here.join("page.html"), "page").ok();
            }
        }
    });
    assert_ne!(stage.secrets(), NOTHING, "the racer never won");
    stage.store.assert_clean();
}

#[test]
fn a_file_of_root_s_never_becomes_the_caller_s() {
    let stage = Stage::new();
    let victim = stage.secret.join("victim");
    fs::write(&victim, "root's\n").expect("a file");
    stage.make_own(&stage.here);
    stage.make_own(&stage.there);
    let page = stage.here.join("page.html");
    let arguments = [
        "report",
        stage.store.env(),
        "--output",
        page.to_str().expect("a path"),
    ];
    // Once the temporary file of the page exists, the other directory has a link of that name.
    let race = || {
        for entry in fs::read_dir(&stage.here).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_string_lossy().starts_with(".rockenv") {
                symlink(&victim, stage.there.join(name)).ok();
                stage.exchange();
            }
        }
    };
    stage.race(race, || {
        drop(stage.sudo(&arguments));
        let found = fs::metadata(&victim).expect("root's file");
        assert_eq!(found.uid(), 0);
        // The directories may be exchanged, and links may appear, during this loop.
        for directory in [&stage.here, &stage.there] {
            for entry in fs::read_dir(directory).expect("a directory").flatten() {
                fs::remove_file(entry.path()).ok();
            }
        }
    });
    assert_eq!(
        fs::read_to_string(&victim).expect("root's file"),
        "root's\n"
    );
    stage.store.assert_clean();
}

/// A new file has the mode that the caller's umask leaves, and a replaced one keeps its own.
fn check_modes(stage: &Stage, page: &str) {
    let program = stage.user.program();
    let program = program.to_str().expect("a path");
    let script = "umask 077; exec \"$0\" report \"$1\" --output \"$2\"";
    for mode in [0o600, 0o640] {
        let words = ["-c", script, program, stage.store.env(), page];
        let written = output(stage.user.sudo("sh", &words));
        assert!(written.status.success(), "{}", said(&written));
        let found = fs::metadata(page).expect("a page");
        assert_eq!((found.uid(), found.mode() & 0o777), (MadeUp::UID, mode));
        fs::set_permissions(page, PermissionsExt::from_mode(0o640)).expect("a mode");
    }
    // A default access control list counts instead of the umask.
    let team = stage.user.home.join("team");
    fs::create_dir(&team).expect("a directory");
    chown(&team, Some(MadeUp::UID), Some(MadeUp::UID)).expect("an owner");
    output_of(
        Command::new("setfacl")
            .args(["-d", "-m", "g:4321:rwX"])
            .arg(&team),
    );
    let page = team.join("page.html");
    let path = page.to_str().expect("a path");
    let words = ["-c", script, program, stage.store.env(), path];
    let written = output(stage.user.sudo("sh", &words));
    assert!(written.status.success(), "{}", said(&written));
    let found = fs::metadata(page).expect("a page");
    assert_eq!(found.mode() & 0o777, 0o664);
}

/// In a directory with the sticky bit, a user cannot replace another user's file.
fn check_sticky(stage: &Stage) {
    let shared = stage.user.home.join("shared");
    fs::create_dir(&shared).expect("a directory");
    fs::set_permissions(&shared, PermissionsExt::from_mode(0o1777)).expect("a mode");
    let page = shared.join("page.html");
    fs::write(&page, "").expect("a file");
    let page = page.to_str().expect("a path");
    let output = stage.sudo(&["report", stage.store.env(), "--force", "--output", page]);
    let told = said(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains(&format!("cannot write `{page}`")), "{told}");
}

/// A home on NFS may be closed to root: the configuration and trust in it are read with the user's rights.
fn check_closed_home(stage: &Stage) {
    let home = stage.user.home.join("closed");
    let config = home.join(".config/rockenv/config.toml");
    fs::create_dir_all(config.parent().expect("a directory")).expect("a home");
    fs::write(&config, "engine = 'dokcer'\n").expect("a configuration");
    chown(&home, Some(1234), Some(1234)).expect("an owner");
    fs::set_permissions(&home, PermissionsExt::from_mode(0o700)).expect("a mode");
    let project = stage.user.home.join("project");
    fs::create_dir_all(project.join("profiles")).expect("a directory");
    let profile = format!("schema = 1\nimage = \"base\"\n{PROFILE}");
    fs::write(project.join("profiles/own.toml"), profile).expect("a profile");
    let run = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command
            .args(["--bounding-set=-dac_override,-dac_read_search", "--"])
            .arg(stage.user.program())
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", &home)
            .env("ROCKENV_HOME", stage.store.home())
            .envs([("SUDO_UID", "1234"), ("SUDO_GID", "1234")])
            .current_dir(&project);
        output(command)
    };
    let told = said(&run(&["profile", "ls"]));
    assert!(told.contains("dokcer"), "{told}");
    fs::remove_dir_all(home.join(".config")).expect("no configuration");
    let trusted = run(&["--yes", "trust"]);
    assert!(trusted.status.success(), "{}", said(&trusted));
    let listed = run(&["profile", "ls"]);
    let rows = String::from_utf8_lossy(&listed.stdout).into_owned();
    let is_own = |row: &str| row.split_whitespace().next() == Some("own");
    assert!(rows.lines().any(is_own), "{rows}{}", said(&listed));
}

#[test]
fn what_is_written_for_the_caller_is_the_caller_s_and_no_link_or_fifo_is_opened() {
    let stage = Stage::new();
    let env = stage.store.env();
    stage.make_own(&stage.here);
    let at = |name: &str| stage.here.join(name);
    let path = |name: &str| at(name).to_str().expect("a path").to_owned();
    for arguments in [
        vec!["report", env, "--output", &path("page.html")],
        vec!["export", env, "--snapshots", &path("image.tar")],
        vec!["export", env, "--snapshots", &path("image")],
        vec!["export", env, &path("results/of")],
        vec!["man", "--dir", &path("man")],
        // The store is below a directory of the user, who may not enter the env.
        vec!["verify", env],
    ] {
        let output = stage.sudo(&arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    }
    let stranger = "find \"$1\" ! -user 4321 -o ! -group 4321";
    let found = output_of(
        Command::new("sh")
            .args(["-c", stranger, "sh"])
            .arg(&stage.here),
    );
    assert_eq!(found, "");
    let written = output_of(Command::new("find").arg(&stage.here).args(["-type", "f"]));
    for name in [
        "page.html",
        "image.tar",
        "image/index.json",
        "results/of/out/result",
        "man/rockenv.1",
    ] {
        assert!(written.contains(&path(name)), "{name}: {written}");
    }
    check_modes(&stage, &path("private.html"));
    // `--metrics` appends to regular files and refuses everything else.
    let victim = stage.secret.join("rows");
    fs::write(&victim, "").expect("a file");
    symlink(&victim, at("link")).expect("a link");
    nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).expect("a fifo");
    fs::create_dir(at("directory")).expect("a directory");
    for name in ["fifo", "directory"] {
        chown(at(name), Some(MadeUp::UID), Some(MadeUp::UID)).expect("an owner");
    }
    fs::write(at("own"), "").expect("a file");
    fs::set_permissions(at("own"), PermissionsExt::from_mode(0o600)).expect("a mode");
    for (arguments, place) in [
        (["up", env, "--metrics"], at("own")),
        (["up", env, "--metrics"], stage.secret.join("rows")),
        (["up", env, "--metrics"], stage.secret.join("none")),
        (["report", env, "--output"], stage.secret.join("page.html")),
        (["man", "--dir", ""], stage.secret.join("man")),
    ] {
        let place = place.to_str().expect("a path");
        let arguments = [&arguments[..], &[place]].concat();
        let arguments: Vec<&str> = arguments
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect();
        let mut command = stage.store.command(&arguments);
        command.env("SUDO_UID", "4321").env("SUDO_GID", "4321");
        let output = output(command);
        let told = said(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(
            told.contains("Permission denied") || told.contains("permission denied"),
            "{arguments:?}: {told}"
        );
        assert!(told.contains("help: "), "{arguments:?}: {told}");
    }
    check_sticky(&stage);
    check_closed_home(&stage);
    for name in ["link", "fifo", "directory"] {
        let begun = Instant::now();
        let mut up = stage.store.command(&["up", env, "--metrics", &path(name)]);
        up.env("SUDO_UID", "4321").env("SUDO_GID", "4321");
        let output = output(up);
        assert_eq!(output.status.code(), Some(2), "{name}: {}", said(&output));
        assert!(
            said(&output).contains("not a regular file"),
            "{}",
            said(&output)
        );
        assert!(begun.elapsed() < crate::support::run::HANGS);
    }
    assert_eq!(fs::metadata(&victim).expect("a file").len(), 0);
    let mut up = stage
        .store
        .command(&["up", env, "--metrics", &path("rows")]);
    up.env("SUDO_UID", "4321").env("SUDO_GID", "4321");
    drop(output(up));
    assert_eq!(fs::metadata(at("rows")).expect("rows").uid(), MadeUp::UID);
    stage.store.assert_clean();
}

/// Covers lock files, new profiles and output directories: where the user may write, and behind a link that leads out.
#[test]
fn what_is_made_beside_a_profile_is_made_with_the_callers_rights() {
    let stage = Stage::new();
    let env = stage.store.env();
    stage.make_own(&stage.here);
    // New files in a directory of a team belong to the team.
    let team = 4444;
    chown(&stage.here, None, Some(team)).expect("a group");
    fs::set_permissions(&stage.here, PermissionsExt::from_mode(0o2775)).expect("a mode");
    symlink(&stage.secret, &stage.there).expect("a link");
    stage.bring_images();
    let run = |arguments: &[&str]| stage.run_here(arguments);
    let profiles = stage.here.join("profiles");
    let file = format!("./{env}.toml");
    for (there, fails) in [(&stage.there, true), (&stage.here, false)] {
        stage.write_profile(&there.join("made/out"));
        let lock = there.join(format!("{env}.lock"));
        let lock = ["lock", &file, "--file", lock.to_str().expect("a path")];
        if fails {
            symlink(&stage.secret, &profiles).expect("a link");
        }
        for arguments in [&["profile", "new", "fresh"][..], &["up", &file], &lock] {
            let output = run(arguments);
            let told = said(&output);
            assert_eq!(!output.status.success(), fails, "{arguments:?}: {told}");
            assert_eq!(stage.secrets(), NOTHING, "{arguments:?}: {told}");
        }
        if fails {
            fs::remove_file(&profiles).expect("a link");
        }
    }
    for made in [
        "profiles/fresh.toml",
        "made/out/result",
        &format!("{env}.lock"),
    ] {
        let path = stage.here.join(made);
        for path in path.ancestors().take_while(|path| **path != stage.here) {
            let found = fs::metadata(path).expect("what was made");
            let owner = (found.uid(), found.gid());
            assert_eq!(owner, (MadeUp::UID, team), "{}", path.display());
        }
    }
    // The build user may not be the person behind sudo.
    let built = stage.here.join("built");
    stage.write_profile(&built);
    let mut up = stage.command_here(&["up", &file]);
    up.env("ROCKENV_BUILD_USER", "1234:1234");
    let up = output(up);
    assert!(up.status.success(), "{}", said(&up));
    let found = fs::metadata(&built).expect("what was made");
    assert_eq!((found.uid(), found.gid()), (1234, team));
    stage.store.assert_clean();
}

/// The path of an output leads through the store and out of it again.
#[test]
fn results_are_the_callers_however_their_path_is_written() {
    let stage = Stage::new();
    stage.make_own(&stage.here);
    stage.bring_images();
    let out = stage.here.join("out");
    let mut roundabout = stage.store.home().to_path_buf();
    roundabout.extend(stage.store.home().components().skip(1).map(|_| ".."));
    roundabout.extend(out.components().skip(1));
    stage.write_profile(&roundabout);
    let file = format!("./{}.toml", stage.store.env());
    let output = stage.run_here(&["up", &file]);
    assert!(output.status.success(), "{}", said(&output));
    let result = fs::metadata(out.join("result")).expect("a result");
    assert_eq!(result.uid(), MadeUp::UID);
    // The mount points of volumes in the user's source, which an `up` of a matrix makes.
    let source = stage.here.join("source");
    stage.make_own(&source);
    let nested = format!(
        "schema = 1\nimage = \"base\"\ntargets = [\"gfx1103\"]\n\
         [[volume]]\nname = \"src\"\nkind = \"source\"\npath = {source:?}\ntarget = \"/v/src\"\n\
         [[volume]]\nname = \"build\"\nkind = \"build\"\ntarget = \"/v/src/a/build\"\n\
         [[volume]]\nname = \"file\"\nkind = \"host\"\npath = \"./nested.toml\"\ntarget = \"/v/src/a/b/c\"\n\
         [[step]]\nname = \"one\"\nrun = \"touch /v/src/a/build/${{target}}\"\n"
    );
    fs::write(stage.here.join("nested.toml"), nested).expect("a profile");
    let up = "umask 077; cd here && \
        ROCKENV_TRUSTED_DIRS=$PWD exec \"$0\" matrix up --profile ./nested.toml";
    let program = stage.user.program();
    let program = program.to_str().expect("a path");
    let output = stage.user.sudo("sh", &["-c", up, program]).output();
    let output = output.expect("a command");
    assert!(output.status.success(), "{}", said(&output));
    for (made, mode) in [("a", 0o700), ("a/build", 0o700), ("a/b/c", 0o600)] {
        let made = fs::metadata(source.join(made)).expect("a mount point");
        assert_eq!((made.uid(), made.mode() & 0o777), (MadeUp::UID, mode));
    }
    fs::remove_dir_all(&out).expect("the results");
    symlink(&stage.secret, &out).expect("a link");
    let output = stage.run_here(&["up", &file]);
    assert_eq!(stage.secrets(), NOTHING, "{}", said(&output));
    stage.store.assert_clean();
}

/// Does the same while the directory and the link are exchanged.
#[test]
fn what_is_made_beside_a_profile_never_lands_where_the_caller_may_not_write() {
    let stage = Stage::new();
    let env = stage.store.env();
    stage.make_own(&stage.here);
    stage.bring_images();
    // `profile new` writes to `profiles/`.
    let (place, link) = (stage.here.join("profiles"), stage.here.join("link"));
    stage.make_own(&place);
    symlink(&stage.secret, &link).expect("a link");
    stage.write_profile(&place.join("made/out"));
    let race = || {
        let flags = RenameFlags::RENAME_EXCHANGE;
        renameat2(AT_FDCWD, &place, AT_FDCWD, &link, flags).ok();
    };
    let file = format!("./{env}.toml");
    let mut number = 0;
    stage.race(race, || {
        number += 1;
        let fresh = format!("fresh-{number}");
        let lock = format!("profiles/{number}.lock");
        // `up` starts a container, which takes longer than both of the others, so it runs in every second round.
        for arguments in [
            &["profile", "new", &fresh][..],
            &["lock", &file, "--file", &lock],
            &["up", &file, "--rerun", "build"],
        ]
        .into_iter()
        .take(2 + number % 2)
        {
            let told = said(&stage.run_here(arguments));
            assert_eq!(stage.secrets(), NOTHING, "{arguments:?}: {told}");
            let found = fs::metadata(&stage.secret).expect("root's directory");
            let found = (found.uid(), found.mode() & 0o7777);
            assert_eq!(found, (0, 0o700), "{arguments:?}: {told}");
        }
    });
    stage.store.assert_clean();
}

fn output_of(command: &mut Command) -> String {
    let output = command.output().expect("a command");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
