//! The current directory belongs to a stranger: rockenv ignores its configuration, profiles, images and hooks until the
//! user trusts them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use fs_err as fs;

use crate::on::OpenGuard;
use crate::support::loopfs::{Kind, LoopFs, run};
use crate::support::ordinary::MadeUp;
use crate::support::rootfs;
use crate::support::template::write_recipe;
use crate::support::terminal::Terminal;

/// A user whose current directory was prepared by a stranger.
struct Place {
    user: MadeUp,
    work: PathBuf,
    mark: PathBuf,
    _disk: LoopFs,
}

impl Place {
    fn new() -> Self {
        let disk = LoopFs::new(Kind::Ext4);
        let above = disk.path().parent().unwrap();
        fs::set_permissions(above, std::fs::Permissions::from_mode(0o755)).unwrap();
        let user = MadeUp::at(disk.join("home"));
        // Sets the user's home, so that rockenv by sudo finds what the user trusts.
        let (id, home) = (MadeUp::UID, user.home.display());
        let line = format!("rockenv-made-up:x:{id}:{id}::");
        let users = fs::read_to_string("/etc/passwd").unwrap();
        fs::write(
            "/etc/passwd",
            users.replace(&format!("{line}/:"), &format!("{line}{home}:")),
        )
        .unwrap();
        let (work, mark) = (disk.join("work"), disk.join("mark"));
        for name in ["profiles", "images", "hooks/evil", "store"] {
            fs::create_dir_all(work.join(name)).unwrap();
        }
        let program = work.join("program");
        fs::write(
            &program,
            format!("#!/bin/sh\nid -u >> {}\necho 1.13.0\n", mark.display()),
        )
        .unwrap();
        fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let evil = work.join("store").display().to_string();
        let configuration = format!(
            "home = '{evil}'\nninja = '{}'\nbuild-user = '0:0'\nregistry = 'evil.invalid/x'\npull = true\n\
             profile-dirs = ['{evil}']\njobs = 3\n[mirror]\ndebian = 'http://evil.invalid/'\n",
            program.display()
        );
        fs::write(work.join("rockenv.toml"), configuration).unwrap();
        let profile = "schema = 1\nimage = 'debian-trixie'\ndescription = 'evil'\n[[step]]\nname = 'a'\nrun = 'true'\n";
        for name in ["own", "hip-smoke"] {
            fs::write(work.join(format!("profiles/{name}.toml")), profile).unwrap();
        }
        let recipe = "schema = 1\nprovider = 'directory'\n[directory]\npath = '/'\n";
        for name in ["own", "debian-trixie"] {
            fs::write(work.join(format!("images/{name}.toml")), recipe).unwrap();
        }
        fs::write(work.join("hooks/evil/hook.toml"), "schema = 1\n").unwrap();
        Self {
            user,
            work,
            mark,
            _disk: disk,
        }
    }

    fn command(&self, sudo: bool, arguments: &[&str]) -> Command {
        let mut command = match sudo {
            true => self.user.sudo(self.user.program(), arguments),
            false => self.user.command(self.user.program(), arguments),
        };
        command.current_dir(&self.work).env_remove("ROCKENV_HOME");
        command
    }

    fn look(&self, sudo: bool, arguments: &[&str]) -> (i32, String, String) {
        let Output {
            status,
            stdout,
            stderr,
        } = self.command(sudo, arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (status.code().unwrap(), text(stdout), text(stderr))
    }
}

#[test]
fn what_nobody_trusted_is_not_read_and_said() {
    let place = Place::new();
    // These paths are relative to the user's configuration, not to the stranger's directory.
    let own = place.user.home.join(".config/rockenv");
    fs::create_dir_all(&own).unwrap();
    let configuration = "profile-dirs = ['profiles']\nimage-dirs = ['images']\n";
    fs::write(own.join("config.toml"), configuration).unwrap();
    for sudo in [true, false] {
        let (code, listed, said) = place.look(sudo, &["profile", "ls"]);
        assert_eq!(code, 0, "{said}");
        assert!(
            !listed.contains("own") && !listed.contains("evil"),
            "{listed}"
        );
        let said = said.replace(place.work.to_str().unwrap(), "WORK");
        let said = said.replace("`sudo rockenv trust`", "`rockenv trust`");
        insta::allow_duplicates! {
            insta::assert_snapshot!(said, @"warning: ignored because `WORK` is not trusted: profiles/, images/, hooks/, `build-user`, `home`, `mirror`, `ninja`, `profile-dirs`, `pull`, `registry` of rockenv.toml; `rockenv trust` trusts it");
        }
        let (_, images, _) = place.look(sudo, &["image", "ls"]);
        assert!(!images.contains(place.work.to_str().unwrap()), "{images}");
        let (code, _, said) = place.look(sudo, &["up", "own"]);
        assert_eq!(code, 7, "{said}");
        // Completion does not offer the stranger's profiles either.
        let mut shell = place.command(sudo, &["--", "rockenv", "up", ""]);
        let offered = shell.env("COMPLETE", "fish").output().unwrap();
        let offered = String::from_utf8_lossy(&offered.stdout).into_owned();
        let is_theirs = |line: &str| line.split_whitespace().next() == Some("own");
        assert!(!offered.lines().any(is_theirs), "{offered}");
    }
    assert_eq!(fs::read_dir(place.work.join("store")).unwrap().count(), 0);
    assert!(!place.mark.exists());
}

#[test]
fn trust_is_the_callers_for_files_as_they_are_and_never_for_programs_or_hosts() {
    let place = Place::new();
    let (code, _, said) = place.look(true, &["trust"]);
    assert_eq!(code, 0, "{said}");
    // The record of trust is in the home of the user behind sudo, who owns it.
    let kept = place.user.home.join(".config/rockenv/trusted");
    let file = fs::read_dir(&kept).unwrap().next().unwrap().unwrap().path();
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&file).unwrap());
    assert_eq!(owner, MadeUp::UID);
    for sudo in [true, false] {
        let (_, listed, said) = place.look(sudo, &["profile", "ls"]);
        assert!(listed.contains("own"), "{said}");
        assert!(
            said.contains("`home`") && said.contains("`mirror`"),
            "{said}"
        );
        // A built-in profile keeps its name.
        let (_, shown, _) = place.look(sudo, &["profile", "show", "hip-smoke"]);
        assert!(!shown.contains("evil"), "{shown}");
        let (_, shown, said) = place.look(sudo, &["profile", "show", "./profiles/hip-smoke.toml"]);
        assert!(shown.contains("evil"), "{said}");
        let (_, images, _) = place.look(sudo, &["image", "ls", "--json"]);
        let images: serde_json::Value = serde_json::from_str(&images).unwrap();
        let of = |name: &str| {
            let mut rows = images.as_array().unwrap().iter();
            rows.find(|row| row["name"] == name).unwrap()["provider"].clone()
        };
        assert_eq!(
            (of("own"), of("debian-trixie")),
            ("directory".into(), "mmdebstrap".into())
        );
    }
    assert_eq!(fs::read_dir(place.work.join("store")).unwrap().count(), 0);
    let (_, listed, _) = place.look(false, &["trust", "--show", "--json"]);
    assert!(listed.contains("\"trusted\""), "{listed}");
    // A changed file has to be trusted again.
    fs::write(
        place.work.join("profiles/own.toml"),
        "schema = 1\nimage = 'x'\n",
    )
    .unwrap();
    let (_, listed, said) = place.look(true, &["profile", "ls"]);
    assert!(
        !listed.contains("own") && said.contains("has changed"),
        "{said}"
    );
    let (_, listed, _) = place.look(false, &["trust", "--show"]);
    assert!(listed.contains("changed"), "{listed}");
    assert_eq!(place.look(true, &["trust", "--revoke"]).0, 0);
    assert_eq!(place.look(true, &["trust", "--revoke"]).0, 7);
    assert_eq!(fs::read_dir(&kept).unwrap().count(), 0);
    // A service without a terminal names its trusted directories in the environment.
    let mut listed = place.command(false, &["profile", "ls"]);
    let listed = run(listed.env("ROCKENV_TRUSTED_DIRS", &place.work));
    assert!(listed.contains("own"), "{listed}");
    assert!(!place.mark.exists());
}

/// On a terminal, rockenv asks, and only a yes trusts the directory.
#[test]
fn a_person_is_asked_and_only_yes_trusts() {
    let place = Place::new();
    let kept = place.user.home.join(".config/rockenv/trusted");
    let question = "trust profiles/, images/, hooks/, rockenv.toml of";
    let ask = |arguments: &[&str], answer: &str, code: i32, said: &str| {
        let mut terminal = Terminal::start(place.command(true, arguments), 40, 200);
        terminal.expect(question.split(' ').next().unwrap());
        terminal.expect("[y/N]");
        terminal.write(answer);
        terminal.expect(said);
        terminal.wait(code);
        fs::read_dir(&kept).map_or(0, Iterator::count)
    };
    // No, an empty answer, and the end of the input.
    for answer in ["n\r", "\r", "\x04"] {
        assert_eq!(ask(&["profile", "ls"], answer, 0, "is not trusted"), 0);
        assert_eq!(ask(&["trust"], answer, 2, "nothing changed"), 0);
        assert_eq!(ask(&["up", "own"], answer, 7, "own"), 0);
    }
    assert_eq!(ask(&["trust"], "y\r", 0, "is trusted"), 1);
    assert_eq!(place.look(true, &["trust", "--revoke"]).0, 0);
    assert_eq!(ask(&["profile", "ls"], "y\r", 0, "own"), 1);
    // The user owns the record of trust, and the next command does not ask.
    let file = fs::read_dir(&kept).unwrap().next().unwrap().unwrap().path();
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&file).unwrap());
    assert_eq!(owner, MadeUp::UID);
    let (_, listed, said) = place.look(true, &["profile", "ls"]);
    assert!(
        listed.contains("own") && !said.contains("is not trusted"),
        "{said}"
    );
    // What changes during the question does not apply, and rockenv says so.
    assert_eq!(place.look(true, &["trust", "--revoke"]).0, 0);
    let mut terminal = Terminal::start(place.command(true, &["profile", "ls"]), 40, 200);
    terminal.expect("[y/N]");
    fs::write(place.work.join("profiles/more.toml"), "").unwrap();
    terminal.write("y\r");
    terminal.expect("has changed");
    terminal.wait(0);
    assert!(!place.mark.exists());
}

/// Root writes nothing through a link that the user put in place of the directory.
#[test]
fn what_is_trusted_is_written_with_the_persons_rights() {
    let place = Place::new();
    let victim = place.work.parent().unwrap().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o700)).unwrap();
    let configuration = place.user.home.join(".config/rockenv");
    fs::create_dir_all(&configuration).unwrap();
    std::os::unix::fs::symlink(&victim, configuration.join("trusted")).unwrap();
    let (code, _, said) = place.look(true, &["trust"]);
    assert_ne!(code, 0, "{said}");
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

impl Place {
    /// Removes everything that would need trust in the directory, and gives the user an image `base`.
    fn with_base_only(&self) {
        for name in ["profiles", "images", "hooks"] {
            fs::remove_dir_all(self.work.join(name)).unwrap();
        }
        fs::remove_file(self.work.join("rockenv.toml")).unwrap();
        let mut images = self.user.home.clone();
        for name in [".config", "rockenv", "images"] {
            images.push(name);
            fs::create_dir(&images).unwrap();
            std::os::unix::fs::chown(&images, Some(MadeUp::UID), Some(MadeUp::UID)).unwrap();
        }
        write_recipe(&images.join("base.toml"), &rootfs());
    }
}

/// A profile file on the command line needs no trust for its steps. If they can write outside its directory and the
/// user's home, rockenv asks first.
#[test]
fn a_file_says_what_its_steps_can_write_to() {
    let place = Place::new();
    let victim = place.work.parent().unwrap().join("victim");
    fs::create_dir(&victim).unwrap();
    std::os::unix::fs::symlink(&victim, place.work.join("link")).unwrap();
    for path in [victim.clone(), place.work.join("link")] {
        let profile = format!(
            "schema = 1\nimage = 'debian-trixie'\n[[volume]]\nname = 'v'\nkind = 'host'\naccess = 'rw'\ntarget = '/v'\npath = '{}'\n\
             [[step]]\nname = 'a'\nrun = 'touch /v/it'\n",
            path.display()
        );
        fs::write(place.work.join("x.toml"), profile).unwrap();
        let (code, _, said) = place.look(true, &["up", "./x.toml"]);
        assert_eq!(code, 2, "{said}");
        for part in [
            "can write to",
            "outside its directory",
            victim.to_str().unwrap(),
            "--yes",
        ] {
            assert!(said.contains(part), "{said}");
        }
    }
    assert!(!place.user.home.join(".config/rockenv/trusted").exists());
    // Trust in a directory covers its `profiles`, not a file beside them that may be put there later.
    assert_eq!(place.look(true, &["trust"]).0, 0);
    // Nor does it cover a file that a trusted profile extends.
    let far = "schema = 1\nextends = '../x.toml'\n";
    fs::write(place.work.join("profiles/far.toml"), far).unwrap();
    assert_eq!(place.look(true, &["trust"]).0, 0);
    for named in ["./x.toml", "far", "./profiles/far.toml"] {
        let (code, _, said) = place.look(true, &["up", named]);
        assert!(code == 2 && said.contains("can write to"), "{said}");
        assert!(said.contains("/x.toml` can write to"), "{said}");
    }
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

/// After a yes, the steps run, and the next `up` of the file does not ask until the file names another directory.
#[test]
fn who_agrees_to_what_a_file_writes_to_is_asked_once() {
    let place = Place::new();
    place.with_base_only();
    let above = place.work.parent().unwrap();
    let victims = ["one", "two"].map(|name| above.join(name));
    for victim in &victims {
        fs::create_dir(victim).unwrap();
        std::os::unix::fs::chown(victim, Some(MadeUp::UID), Some(MadeUp::UID)).unwrap();
    }
    let profile = |victim: &std::path::Path| {
        let text = format!(
            "schema = 1\nimage = 'base'\n[[volume]]\nname = 'v'\nkind = 'host'\naccess = 'rw'\ntarget = '/v'\npath = '{}'\n\
             [[step]]\nname = 'a'\nrun = 'touch /v/it'\n",
            victim.display()
        );
        fs::write(place.work.join("x.toml"), text).unwrap();
    };
    let home = above.join("roots").display().to_string();
    let up = ["--home", &home, "up", "./x.toml"];
    let asked = |answer: &str, code: i32, said: &str| {
        let mut terminal = Terminal::start(place.command(true, &up), 40, 300);
        terminal.expect("can write to");
        terminal.expect("outside its directory and your home");
        terminal.expect("[y/N]");
        terminal.write(answer);
        terminal.expect(said);
        terminal.wait(code);
    };
    let kept = place.user.home.join(".config/rockenv/trusted");
    profile(&victims[0]);
    for answer in ["n\r", "\r"] {
        asked(answer, 2, "nothing changed");
        assert!(!kept.exists() && !victims[0].join("it").exists());
    }
    asked("y\r", 0, "done");
    assert!(victims[0].join("it").exists());
    let file = fs::read_dir(&kept).unwrap().next().unwrap().unwrap().path();
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&file).unwrap());
    assert_eq!(owner, MadeUp::UID);
    let (code, _, said) = place.look(true, &up);
    assert!(code == 0 && !said.contains("can write to"), "{said}");
    // Another directory needs another answer, also where no terminal can give it.
    profile(&victims[1]);
    let (code, _, said) = place.look(true, &up);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains(victims[1].to_str().unwrap()), "{said}");
    asked("y\r", 0, "nothing to do");
    let (code, _, said) = place.look(true, &["--home", &home, "rm", "--yes", "x"]);
    assert_eq!(code, 0, "{said}");
}

/// A step may write to the directory that contains its profile's file, and so change the file.
#[test]
fn what_a_step_adds_to_its_own_file_is_asked_about() {
    let place = Place::new();
    place.with_base_only();
    for name in ["out", ".ssh"] {
        let directory = place.user.home.join(name);
        fs::create_dir(&directory).unwrap();
        std::os::unix::fs::chown(&directory, Some(MadeUp::UID), Some(MadeUp::UID)).unwrap();
    }
    let volume = |name: &str, kind: &str, path: &str| {
        format!(
            "[[volume]]\nname = '{name}'\nkind = '{kind}'\naccess = 'rw'\ntarget = '/{name}'\npath = '{path}'\n"
        )
    };
    let step = |name: &str, run: &str| format!("[[step]]\nname = '{name}'\nrun = '''{run}'''\n");
    let head = format!(
        "schema = 1\nimage = 'base'\n{}",
        volume("src", "source", ".")
    );
    let file = place.work.join("x.toml");
    let home = place.work.parent().unwrap().join("roots");
    let home = home.display().to_string();
    let up = ["--home", &home, "up", "./x.toml"];
    let add = |path: &str| {
        let more = format!(
            "{}{}",
            volume("h", "host", path),
            step("two", "touch /h/it")
        );
        let one = step(
            "one",
            &format!(
                "cat >> /src/x.toml <<\"E\"\n{}E\n",
                more.replace('\'', "\"")
            ),
        );
        fs::write(&file, format!("{head}{one}")).unwrap();
        for path in [&place.work, &file] {
            std::os::unix::fs::chown(path, Some(MadeUp::UID), Some(MadeUp::UID)).unwrap();
        }
        let (code, _, said) = place.look(true, &up);
        assert_eq!(code, 0, "{said}");
        assert!(
            fs::read_to_string(&file)
                .unwrap()
                .ends_with(&more.replace('\'', "\""))
        );
    };
    for (path, why) in [
        ("~/out", "(new in the file, and outside its directory)"),
        ("~/.ssh", "(hidden in your home)"),
        ("~", "(contains your home)"),
        (
            "absent/../../home/out",
            "(new in the file, and outside its directory)",
        ),
    ] {
        add(path);
        let (code, _, said) = place.look(true, &up);
        assert_eq!(code, 2, "{said}");
        for part in ["steps would write to", why, "--yes"] {
            assert!(said.contains(part), "{said}");
        }
    }
    for place in ["out/it", ".ssh/it", "it"].map(|name| place.user.home.join(name)) {
        assert!(!place.exists());
    }
    let (code, _, said) = place.look(true, &["--home", &home, "rm", "--yes", "x"]);
    assert_eq!(code, 0, "{said}");
}

/// Another user who may write to a trusted directory swaps files while they are read: rockenv runs exactly what it
/// checked.
#[test]
fn what_was_trusted_is_what_is_read() {
    let place = Place::new();
    let profiles = place.work.join("profiles");
    let own = profiles.join("own.toml");
    let good = fs::read_to_string(&own).unwrap();
    let evil = good.replace("description = 'evil'", "description = 'swapped'");
    assert_ne!(good, evil);
    // rockenv reads this file after the profile.
    let last = profiles.join("zzz");
    fs::write(&last, "").unwrap();
    let (code, _, said) = place.look(true, &["trust"]);
    assert_eq!(code, 0, "{said}");
    let show = ["profile", "show", "own"];
    let aside = place.work.join("aside");
    fs::write(&aside, &evil).unwrap();
    let guard = OpenGuard::new(&last);
    let mut showing = place.command(true, &show);
    let showing = showing
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    guard.meanwhile(|| fs::rename(&aside, &own).unwrap());
    let shown = showing.unwrap().wait_with_output().unwrap();
    let both = [shown.stdout, shown.stderr].concat();
    let said = String::from_utf8_lossy(&both);
    assert!(!said.contains("swapped"), "{said}");
    assert_eq!(shown.status.code(), Some(3), "{said}");
    // The files are also swapped at arbitrary moments.
    fs::write(&own, &good).unwrap();
    let ends = std::sync::atomic::AtomicBool::new(false);
    let mut read = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(std::sync::atomic::Ordering::Relaxed) {
                for (text, millis) in [(&evil, 1), (&good, 3)] {
                    fs::write(&aside, text).unwrap();
                    fs::rename(&aside, &own).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(millis));
                }
            }
        });
        for _ in 0..30 {
            let (code, shown, said) = place.look(true, &show);
            assert!(!shown.contains("swapped"), "{shown} {said}");
            read += usize::from(code == 0);
        }
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(read > 0);
}

/// rockenv once ran it as root to ask for its version.
#[test]
fn a_ninja_of_the_users_own_is_not_run_on_the_host() {
    let place = Place::new();
    let configuration = place.user.home.join(".config/rockenv");
    for name in ["images", "profiles"] {
        fs::create_dir_all(configuration.join(name)).unwrap();
    }
    write_recipe(&configuration.join("images/base.toml"), &rootfs());
    let profile = "schema = 1\nimage = 'base'\nresources = { ninja = true }\n[[step]]\nname = 'a'\nrun = 'true'\n";
    fs::write(configuration.join("profiles/p.toml"), profile).unwrap();
    let ninja = format!("ninja = '{}'\n", place.work.join("program").display());
    fs::write(configuration.join("config.toml"), ninja).unwrap();
    let home = place
        .work
        .parent()
        .unwrap()
        .join("roots")
        .display()
        .to_string();
    let (code, _, said) = place.look(true, &["--home", &home, "up", "p"]);
    assert_eq!(code, 3, "{said}");
    assert!(
        said.contains("cannot join the machine's job slots"),
        "{said}"
    );
    assert!(!place.mark.exists());
}
