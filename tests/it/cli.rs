//! The program as users see it: results on stdout, exit codes, and a `help:` with every error.

mod check;
mod setup;

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use crate::support::loopfs::bind;
use crate::support::run::{copy_program, finish};
use crate::support::transcript::transcript;
use fs_err as fs;

/// A home directory for a new user.
struct Place(tempfile::TempDir);

/// The outcome of a command.
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rockenv"));
        command
            .env_clear()
            .env("HOME", self.path())
            .env("ROCKENV_HOME", self.path().join("store"))
            .env("ROCKENV_TRUSTED_DIRS", self.path())
            .env("XDG_CONFIG_HOME", self.path().join("config"))
            .current_dir(self.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command().args(arguments))
    }

    /// Runs commands, one on each line, and returns what they print.
    fn shows(&self, commands: &str) -> String {
        let place = self.path().display().to_string();
        transcript(commands, &[(&place, "HOME")], |words| {
            let mut command = self.command();
            command.args(words);
            finish(words.join(" "), command)
        })
    }

    /// Runs a read-only command, and expects success and no store.
    fn look(&self, arguments: &[&str]) -> Ran {
        let ran = self.run(arguments);
        assert_eq!(ran.code, 0, "{arguments:?}: {}", ran.err);
        assert!(
            !self.path().join("store").exists(),
            "{arguments:?} made a store"
        );
        ran
    }
}

impl Ran {
    fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        Self {
            code: output.status.code().unwrap(),
            out: text(&output.stdout),
            err: text(&output.stderr),
        }
    }

    fn fails(&self, code: i32, words: &str) {
        assert_eq!(self.out, "");
        self.fails_after_notes(code, words);
    }

    fn fails_after_notes(&self, code: i32, words: &str) {
        assert_eq!(self.code, code, "{}", self.err);
        assert!(self.err.contains(words), "`{words}` is not in {}", self.err);
        assert!(self.err.contains("help: "), "{}", self.err);
    }

    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap()
    }
}

#[test]
fn profiles_are_listed() {
    let place = Place::new();
    let ran = place.look(&["profile", "ls"]);
    assert!(ran.out.starts_with("profile"), "{}", ran.out);
    assert!(ran.out.contains("hip-smoke"));
    fs::create_dir(place.path().join("profiles")).unwrap();
    fs::write(place.path().join("profiles/broken.toml"), "schema = ").unwrap();
    let rows = place.look(&["profile", "ls", "--json"]).json();
    let row = |name: &str| {
        let rows = rows.as_array().unwrap().iter();
        rows.into_iter()
            .find(|row| row["name"] == name)
            .unwrap()
            .clone()
    };
    assert_eq!(row("hip-smoke")["built_in"], true);
    assert!(row("hip-smoke")["problem"].is_null());
    assert!(row("broken")["problem"].is_string());
}

#[test]
fn a_bad_hook_hides_no_other() {
    let place = Place::new();
    let directory = place.path().join("hooks/bad");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("hook.toml"), "schema = 1\nedits = 1\n").unwrap();
    let ran = place.look(&["hook", "ls"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains("torch-without-rccl"), "{}", ran.out);
    let line = ran.out.lines().find(|line| line.starts_with("bad "));
    let line = line.unwrap();
    assert!(
        line.contains("invalid: ") && line.contains("hooks/bad/hook.toml"),
        "{line}"
    );
    let rows = place.look(&["hook", "ls", "--json"]).json();
    assert_eq!(
        (&rows[0]["name"], &rows[0]["digest"]),
        (&"bad".into(), &().into())
    );
    assert!(
        rows[0]["problem"]
            .as_str()
            .unwrap()
            .contains("unknown field `edits`")
    );
    assert!(rows[1]["problem"].is_null() && rows[1]["digest"].is_string());
}

#[test]
fn a_name_that_no_profile_can_have_is_no_invalid_profile() {
    let place = Place::new();
    let said = place.shows("profile new Bad\nprofile check Bad\nprofile show Bad\nplan Bad");
    insta::assert_snapshot!(said, @"
    $ rockenv profile new Bad
    error: bad profile name `Bad`
    help: up to 64 of a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit
    exit code 2
    $ rockenv profile check Bad
    error: no profile or target `Bad`
    help: `rockenv profile ls` and `rockenv target ls` show them all
    exit code 7
    $ rockenv profile show Bad
    error: no profile or target `Bad`
    help: `rockenv profile ls` and `rockenv target ls` show them all
    exit code 7
    $ rockenv plan Bad
    error: no profile or target `Bad`
    help: `rockenv profile ls` and `rockenv target ls` show them all
    exit code 7
    ");
}

#[test]
fn a_profile_is_shown_as_written_and_as_resolved() {
    let place = Place::new();
    let text = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/profiles/hip-smoke.toml"
    ));
    assert_eq!(
        place.look(&["profile", "show", "hip-smoke"]).out,
        text.unwrap()
    );
    let spec = place
        .look(&["profile", "show", "hip-smoke", "--resolved", "--json"])
        .json();
    assert_eq!(spec["name"], "hip-smoke");
    assert_eq!(spec["targets"], serde_json::json!(["gfx1103"]));
    let other = [
        "profile",
        "show",
        "hip-smoke",
        "--resolved",
        "-t",
        "gfx1100",
    ];
    let toml = place.look(&other).out;
    let spec: toml::Table = toml.parse().unwrap();
    assert_eq!(spec["name"].as_str(), Some("hip-smoke-gfx1100"));
    assert!(
        toml.contains("gfx1100") && !toml.contains("gfx1103"),
        "{toml}"
    );
    insta::assert_snapshot!(place.shows("profile show hip-smoke -t gfx1100"), @"
    error: the following required arguments were not provided:
      --resolved

    Usage: rockenv profile show --resolved --target <GFX> <PROFILE|TARGET|FILE.toml>

    For more information, try '--help'.
    exit code 2
    ");
    // `plan` and `show --resolved` agree on the steps.
    let plan = place
        .look(&["plan", "hip-smoke", "-t", "gfx1100", "--json"])
        .json();
    let keys = |steps: Vec<&str>| {
        let keys = steps.into_iter().filter(|key| !key.is_empty());
        keys.map(str::to_owned).collect::<Vec<_>>()
    };
    let planned = plan["plan"]["steps"].as_array().unwrap().iter();
    let planned = keys(planned.filter_map(|step| step["key"].as_str()).collect());
    let shown = spec["steps"].as_array().unwrap().iter();
    let shown = keys(shown.filter_map(|step| step["key"].as_str()).collect());
    assert_eq!(planned, shown);
}

#[test]
fn a_mistake_is_shown_once() {
    let place = Place::new();
    let text = "schema = 1\nimage = \"debian-forky\"\n[[step]]\nname = \"c\"\ncopy = [{ from = \"../x\", to = \"/opt/x\" }]\n";
    fs::write(place.path().join("p.toml"), text).unwrap();
    insta::assert_snapshot!(place.shows("profile check p.toml"), @r#"
    error: profile `p` is invalid
      × `../x` leaves the profile's directory
       ╭─[HOME/p.toml:5:18]
     4 │ name = "c"
     5 │ copy = [{ from = "../x", to = "/opt/x" }]
       ·                  ───┬──
       ·                     ╰── here
       ╰────
      help: relative to the profile's directory, such as `files/build.sh`
    exit code 3
    "#);
}

#[test]
fn an_extending_profile_is_shown_with_what_it_extends() {
    let place = Place::new();
    let own = "schema = 1\nextends = \"hip-smoke\"\ndescription = \"mine\"\n";
    fs::create_dir(place.path().join("profiles")).unwrap();
    fs::write(place.path().join("profiles/mine.toml"), own).unwrap();
    let text = place.look(&["profile", "show", "mine"]).out;
    let first = text.find("profiles/mine.toml").unwrap();
    let second = text
        .find("# which extends profiles/hip-smoke.toml (built in)")
        .unwrap();
    assert!(first < second);
    let json = place.look(&["profile", "show", "mine", "--json"]).json();
    assert_eq!(json["files"].as_array().unwrap().len(), 2);
    assert_eq!(json["files"][0]["text"], own);
}

#[test]
fn a_new_profile_is_valid_and_nothing_is_overwritten() {
    let place = Place::new();
    let printed = place.look(&["profile", "new", "mine", "--print"]).out;
    assert!(!place.path().join("profiles").exists());
    place.look(&["profile", "new", "mine"]);
    let path = place.path().join("profiles/mine.toml");
    let written = printed.replace(" mine.toml`", " profiles/mine.toml`");
    assert_eq!(fs::read_to_string(&path).unwrap(), written);
    place.look(&["profile", "check", "mine"]);
    fs::write(&path, "precious").unwrap();
    insta::assert_snapshot!(place.shows("profile new mine\nprofile new ../x"), @"
    $ rockenv profile new mine
    error: `profiles/mine.toml` already exists
    help: rockenv profile check profiles/mine.toml
    exit code 2
    $ rockenv profile new ../x
    error: bad profile name `../x`
    help: up to 64 of a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit
    exit code 2
    ");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn schemas_are_json_schemas() {
    let place = Place::new();
    for what in [
        "profile", "image", "hook", "config", "events", "metrics", "record",
    ] {
        let schema = place.look(&["schema", what]).json();
        assert!(
            schema["$schema"].as_str().unwrap().contains("json-schema"),
            "{what}"
        );
        assert_eq!(schema["$id"], format!("urn:rockenv:schema:{what}"));
    }
    assert_eq!(place.look(&["schema"]).json()["title"], "rockenv profile");
    let events = place.look(&["schema", "events"]).json();
    assert_eq!(events["required"], serde_json::json!(["schema", "time"]));
    assert!(events["oneOf"].is_array());
}

#[test]
fn manual_pages_are_written() {
    let place = Place::new();
    let page = place.look(&["man"]).out;
    for part in [".TH rockenv 1", "EXIT STATUS", "ROCKENV_HOME"] {
        assert!(page.contains(part), "{part}");
    }
    place.look(&["man", "--dir", "man1"]);
    for page in ["rockenv.1", "rockenv-up.1", "rockenv-snapshot-diff.1"] {
        assert!(place.path().join("man1").join(page).exists(), "{page}");
    }
}

#[test]
fn shells_get_candidates_and_never_an_error() {
    let place = Place::new();
    let ask = |words: &[&str]| {
        let mut command = place.command();
        let index = (words.len() - 1).to_string();
        command
            .env("COMPLETE", "bash")
            .env("_CLAP_COMPLETE_INDEX", index)
            .env("_CLAP_COMPLETE_COMP_TYPE", "9")
            .env("_CLAP_IFS", "\n")
            .arg("--")
            .args(words);
        let ran = Ran::of(&mut command);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{words:?}");
        ran.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(ask(&["rockenv", "up", "hip"]), ["hip-smoke"]);
    assert_eq!(
        ask(&["rockenv", "up", "-t", "gfx110"]),
        ["gfx1100", "gfx1101", "gfx1102", "gfx1103"]
    );
    assert_eq!(
        ask(&["rockenv", "image", "build", "debian-f"]),
        ["debian-forky"]
    );
    assert_eq!(
        ask(&["rockenv", "hook", "check", "--hook", "to"]),
        ["torch-without-rccl"]
    );
    assert_eq!(ask(&["rockenv", "fsc"]), ["fsck"]);
    let none = ask(&["rockenv", "rollback", "x"]);
    assert!(none.is_empty(), "{none:?}");
    // Completion ignores a broken configuration, which the next command reports.
    fs::write(place.path().join("rockenv.toml"), "nonsense").unwrap();
    assert!(ask(&["rockenv", "rm", "x"]).is_empty());
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let place = Place::new();
        let script = place.look(&["completions", shell]).out;
        assert!(script.contains("rockenv"), "{shell}");
    }
}

#[test]
fn doctor_tells_what_to_type() {
    let place = Place::new();
    let ran = place.run(&["doctor"]);
    assert!([0, 4].contains(&ran.code), "{}", ran.err);
    for section in [
        "engine nspawn",
        "store",
        "images and sources",
        "limits",
        "gpu",
    ] {
        assert!(ran.out.contains(section), "{section}");
    }
    assert!(!place.path().join("store").exists());
    // The suggested commands name the store of `--home`.
    fs::create_dir(place.path().join("bad")).unwrap();
    fs::write(place.path().join("bad/format"), "nonsense").unwrap();
    let bad = place.run(&["--home", "bad", "doctor"]);
    assert!(
        bad.out.contains("  rockenv --home bad fsck\n"),
        "{}",
        bad.out
    );
    let json = place.run(&["doctor", "--json"]).json();
    assert_eq!(json["schema"], "rockenv/doctor/2");
    for section in json["sections"].as_array().unwrap() {
        for check in section["checks"].as_array().unwrap() {
            assert!(
                check["state"] != "missing" || check["command"].is_string(),
                "{check}"
            );
        }
    }
}

#[test]
fn a_user_who_is_not_in_the_file_has_the_home_of_the_variable() {
    let place = Place::new();
    let getent = place.path().join("getent");
    fs::write(&getent, "#!/bin/sh\necho svc:x:61200:61200::/:/bin/sh\n").unwrap();
    for path in [place.path(), getent.as_path()] {
        fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let _getent = bind(&getent, &fs::canonicalize("/usr/bin/getent").unwrap());
    let program = place.path().join("rockenv");
    copy_program(&program);
    let ran = Ran::of(
        Command::new(&program)
            .arg("du")
            .env_clear()
            .env("HOME", place.path())
            .current_dir(place.path())
            .uid(61_200)
            .gid(61_200),
    );
    let store = place.path().join(".local/share/rockenv");
    let missing = format!("no store at `{}`", store.display());
    assert!(ran.err.contains(&missing), "{}", ran.err);
}

#[test]
fn errors_name_what_to_type() {
    let place = Place::new();
    insta::assert_snapshot!(place.shows("status none\nplan gfx110"), @"
    $ rockenv status none
    error: no store at `HOME/store`
    help: rockenv up hip-smoke
    exit code 7
    $ rockenv plan gfx110
    error: no profile or target `gfx110`
    help: did you mean `gfx1100`?
    exit code 7
    ");
    let ran = place.run(&["fsck", "--nonsense"]);
    assert_eq!((ran.code, ran.out.as_str()), (2, ""));
}
