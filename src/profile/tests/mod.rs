//! Tests of profiles as a whole: files, lists, hostile input, the schema and the reference.

mod extend;
mod messages;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::load::from_text;
use super::*;
use crate::sys::error::Kind;

fn message(text: &str) -> String {
    let error = from_text("p", text).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    error.message().to_owned()
}

/// Returns the sentences without snippets, for tables.
fn sentences(text: &str) -> Vec<String> {
    let message = message(text);
    let marked = message
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("× "));
    marked.map(str::to_owned).collect()
}

/// Returns the cases of a table: lines of TOML with `; ` between them, and the expected message after `=>`.
pub(crate) fn cases(table: &str) -> impl Iterator<Item = (String, &str)> {
    let rows = table.lines().filter_map(|line| line.split_once("=> "));
    rows.map(|(body, want)| (body.trim().replace("; ", "\n"), want))
}

const HEAD: &str = "schema = 1\nimage = \"debian\"\n";

/// Makes a directory of profiles, each `name` with its text.
fn dir(files: &[(&str, &str)]) -> (tempfile::TempDir, Vec<crate::sys::catalog::Directory>) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, format!("schema = 1\n{text}")).unwrap();
    }
    let dirs = vec![dir.path().to_owned().into()];
    (dir, dirs)
}

#[test]
fn lists_say_what_is_broken() {
    let (_dir, dirs) = dir(&[
        ("good.toml", "description = \"fine\""),
        ("broken.toml", "description = "),
        ("Bad Name.toml", ""),
        ("other.txt", ""),
    ]);
    let dirs = [dirs, vec![PathBuf::from("/nonexistent").into()]].concat();
    let listed = list(&dirs).unwrap();
    let find = |name: &str| listed.iter().find(|listed| listed.name == name);
    assert_eq!(find("good").unwrap().description, "fine");
    assert!(find("broken").unwrap().problem.is_some());
    assert!(find("Bad Name").unwrap().problem.is_some());
    assert!(find("other").is_none());
    let kind = |name: &str| load(&dirs, name).unwrap_err().kind();
    assert_eq!(kind("Bad Name"), Kind::Invalid);
    assert_eq!(kind("Bad"), Kind::NotFound);
}

#[test]
fn hostile_files() {
    let (dir, dirs) = dir(&[("deep.toml", &format!("image = {}", "[".repeat(100_000)))]);
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let message = |name: &str| load(&dirs, name).unwrap_err().message().to_owned();
    let write = |name: &str, bytes: &[u8]| fs_err::write(dir.path().join(name), bytes).unwrap();

    assert_has!(message("deep"), "is invalid");
    write("big.toml", &b"# x\n".repeat(1 << 18));
    assert_has!(message("big"), "big.toml is larger than 256 KiB");
    write("latin.toml", b"schema = 1\n# \xe9\n");
    assert_has!(message("latin"), "latin.toml: line 2 is not UTF-8");
    write("Upper.toml", b"schema = 1\nimage = \"x\"\n");
    assert!(message(&path("Upper.toml")).contains("bad profile name `Upper`"));
    nix::unistd::mkfifo(&dir.path().join("fifo.toml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(message("fifo").ends_with("fifo.toml` is not a regular file"));
    let step =
        "schema = 1\r\nimage = 'x'\r\nstep = [{ name = 'a', run = \"\"\"\r\ntrue\r\n\"\"\" }]\r\n";
    write("windows.toml", step.as_bytes());
    let windows = load(&dirs, "windows").unwrap();
    let action = &windows.steps[0].action;
    assert!(matches!(action, Action::Run { script, .. } if script.value == "true\n"));
    assert!(message("/dev/zero").starts_with("`/dev/zero"));
    let (gone, long) = (path("gone.toml"), "x".repeat(65));
    for name in [
        &*gone,
        "nothing-like-it",
        "",
        "a b",
        "Ä",
        "a\0b",
        "..",
        &long,
    ] {
        let error = load(&dirs, name).unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound, "{name:?}");
    }
    // Many mistakes: the message stays readable.
    let many: String = (0..5000).map(|at| format!("key{at} = 1\n")).collect();
    write("many.toml", format!("schema = 1\n{many}").as_bytes());
    let shown = message("many");
    assert!(shown.starts_with("profile `many` is invalid: 5000 errors\n"));
    assert!(shown.ends_with("and more, not shown"));
    assert!(shown.lines().count() < 200);
}

#[test]
fn escapes_do_not_reach_the_terminal() {
    let text = "schema = 1\nimage = \"\\u001b[31mred\\u009b\"\n\"k\\u001b]0;x\\u0007\" = 1\n";
    let message = message(text);
    let is_odd = |letter: char| letter.is_control() && letter != '\n';
    assert!(!message.contains(is_odd), "{message:?}");
}

#[test]
fn the_host_replaces_no_variable_of_a_key() {
    let text = |names: &str| {
        format!(
            "schema = 1\nimage = \"debian\"\nenv-from-host = [{names}]\n[env]\nFOO = \"fixed\"\n\
             [[step]]\nname = \"one\"\nrun = \"true\"\nenv = {{ BAR = \"step\" }}\n"
        )
    };
    load::from_text("p", &text("\"TOKEN\"")).unwrap();
    let refused = "\"FOO\", \"BAR\", \"PATH\", \"MAKEFLAGS\"";
    let found = message(&text(refused));
    for part in [
        "`FOO` is also set by the profile, in /p/p.toml:5",
        "`BAR` is also set by the profile, in /p/p.toml:9",
        "rockenv sets `PATH` in every step",
        "rockenv sets `MAKEFLAGS` in every step",
    ] {
        assert!(found.contains(part), "{found}");
    }
}

#[test]
fn disk_is_for_volumes_that_rockenv_fills() {
    let text = |kind: &str| {
        format!(
            "schema = 1\nimage = \"debian\"\n[[volume]]\nname = \"v\"\ntarget = \"/v\"\ndisk = \"9G\"\n{kind}\n"
        )
    };
    let step = "[[step]]\nname = \"one\"\nrun = \"true\"\n";
    for (kind, is_right) in [
        ("kind = \"host\"\npath = \"/srv\"", false),
        ("kind = \"source\"\npath = \"/srv\"", false),
        ("kind = \"source\"\ngit = \"https://example.org/x\"", true),
        ("kind = \"output\"\npath = \"/srv\"", true),
        ("kind = \"build\"", true),
    ] {
        let loaded = load::from_text("p", &(text(kind) + step));
        assert_eq!(loaded.is_ok(), is_right, "{kind}: {loaded:?}");
    }
}

#[test]
fn exports_replace_none_of_each_other() {
    let text = |access: &str, rest: &str| {
        format!(
            "schema = 1\nimage = \"debian\"\nvariant = \"a\"\n[variants.a]\n[variants.b]\n\
             [[volume]]\nname = \"d\"\nkind = \"output\"\ntarget = \"/d\"\n{access}\n\
             [[volume]]\nname = \"e\"\nkind = \"output\"\ntarget = \"/e\"\n{rest}"
        )
    };
    let item = |from: &str, to: &str| format!("{{ from = \"{from}\", to = \"{to}\" }}");
    let step = |name: &str, more: &str, items: &[&str]| {
        let items = items.join(", ");
        format!("[[step]]\nname = \"{name}\"\n{more}\nexport = [{items}]\n")
    };
    let (x, y) = (item("/x/f", "d"), item("/y/f", "d"));
    let [of_a, of_b] = ["a", "b"].map(|name| format!("when = {{ variant = [\"{name}\"] }}"));
    for rest in [
        step("one", "", &[&x, &item("/y/g", "d"), &item("/y/f", "e")]),
        step("one", "", &[&x]) + &step("two", "", &[&x]),
        step("one", &of_a, &[&x]) + &step("two", &of_b, &[&y]),
    ] {
        load::from_text("p", &text("", &rest)).unwrap();
    }
    for rest in [
        step("one", "", &[&x, &y]),
        step("one", "", &[&x]) + &step("two", &of_a, &[&y]),
    ] {
        let found = message(&text("", &rest));
        assert_has!(found, "two exports are named `f` in volume `d`");
        assert_has!(found, "the first one is in /p/p.toml:18");
    }
    let both = [item("/x/${target}", "d"), item("/y/${target}", "d")];
    let found = message(&text("", &step("one", "", &[&both[0], &both[1]])));
    assert_has!(found, "two exports are named `${target}` in volume `d`");
    let found = message(&text("access = \"ro\"", &step("one", "", &[&x])));
    assert_has!(found, "volume `d` has `access = \"ro\"`");
}

#[test]
fn builtin_profiles_load() {
    let dirs = [];
    let mut copied = 0;
    for listed in list(&dirs).unwrap() {
        let profile = load(&dirs, &listed.name).unwrap();
        let files = copy_files(&dirs, &profile).unwrap();
        copied += files.items.len();
        // A file's mode is not compiled in, but it is part of the key.
        let path = format!(
            "{}/profiles/{}.toml",
            env!("CARGO_MANIFEST_DIR"),
            profile.name
        );
        let outside = copy_files(&dirs, &load(&dirs, &path).unwrap()).unwrap();
        assert_eq!(files.digests(), outside.digests(), "{path}");
        let advice = advice(&profile);
        assert_eq!(listed.problem, None);
        assert!(!listed.description.is_empty(), "{}", profile.name);
        assert_eq!(advice, Vec::<String>::new(), "{}", profile.name);
        // There is no advice about the variables of a built-in profile.
        let path = profile.env.get("PATH");
        let keeps_slots = path.is_none_or(|value| value.split(':').next() == Some(BIN));
        assert!(keeps_slots, "{}", profile.name);
    }
    assert!(copied > 5, "{copied}");
}

#[test]
fn schema_describes_every_key() {
    fn walk(path: &str, schema: &serde_json::Value) {
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            let is_described = property.get("description").is_some();
            assert!(is_described, "{path} {key} has no description");
            walk(key, property);
        }
        for (key, definition) in schema["$defs"].as_object().into_iter().flatten() {
            walk(key, definition);
        }
    }
    let schema = schema();
    walk("profile", &schema);
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["required"], serde_json::json!(["schema"]));
}

/// A volume may stand in for a component, as `docs/how-to/rocm-libs.md` says. Its files are the user's.
#[test]
fn rocm_libs_unpacks_no_archive_over_a_volume() {
    let directory = tempfile::tempdir().unwrap();
    let at = |path: &str| directory.path().join(path);
    fs_err::create_dir(at("archive")).unwrap();
    fs_err::write(at("archive/file"), "upstream's").unwrap();
    let mut archive = tar::Builder::new(fs_err::File::create(at("archive.tar")).unwrap());
    archive.append_dir_all("rocm", at("archive")).unwrap();
    archive.finish().unwrap();
    fs_err::create_dir_all(at("src/hipcub")).unwrap();
    fs_err::write(at("src/hipcub/file"), "mine").unwrap();
    let private = std::fs::Permissions::from_mode(0o600);
    fs_err::set_permissions(at("src/hipcub/file"), private.clone()).unwrap();

    // The script's paths are those of an env.
    let profiles = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/rocm-libs");
    let script = fs_err::read_to_string(profiles.join("fetch.sh")).unwrap();
    let download = format!("f() {{ cp '{}' \"$3\"; }}\n", at("archive.tar").display());
    let script = script
        .replace("/usr/lib/apt/apt-helper", "f")
        .replace("/tmp/", &format!("{}/", at("").display()))
        .replace("/src", &at("src").display().to_string())
        .replace("/opt/rocm-libs", &profiles.display().to_string());
    let done = std::process::Command::new("/bin/sh")
        .args(["-c", &(download + &script), "fetch", "rocprim", "hipcub"])
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let text = |path: &str| fs_err::read_to_string(at(path)).unwrap();
    assert_eq!(text("src/rocprim/file"), "upstream's");
    assert_eq!(text("src/hipcub/file"), "mine");
    let found = fs_err::metadata(at("src/hipcub/file")).unwrap();
    assert_eq!(found.permissions().mode() & 0o777, private.mode() & 0o777);
}

#[test]
fn wheels_of_an_index_come_with_their_code_for_the_targets() {
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/therock.toml");
    let profile = fs_err::read_to_string(profile).unwrap();
    let (_, step) = profile.split_once("name = \"install-wheels\"").unwrap();
    let script = step.split("'''").nth(1).unwrap();
    let programs = "python3() { echo \"$@\"; }\nsh() { echo INDEX; }\n";
    let script = programs.to_owned() + &script.replace("${targets}", "gfx1103;gfx1201");
    let done = std::process::Command::new("/bin/sh")
        .args(["-c", &script])
        .output()
        .unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    let extras = "device-gfx1103,device-gfx1201";
    let packages = format!(
        "INDEX torch[{extras}] torchvision[{extras}] torchaudio rocm[libraries,devel,{extras}]"
    );
    let rocm = said.lines().next().unwrap();
    assert!(rocm.ends_with(&packages), "{said}");
    assert_has!(rocm, " --no-cache-dir ");
}

proptest! {
    #[test]
    fn no_text_panics(text in "[a-z=\\[\\]{}\"'$#0-9\\n .-]{0,200}") {
        let _result = from_text("p", &text);
    }

    #[test]
    fn no_value_panics(
        key in prop::sample::select(vec!["run", "workdir", "timeout", "after", "packages", "user", "when", "env", "copy"]),
        value in prop::sample::select(vec![
            "1", "true", "\"${\"", "\"${x}\"", "[]", "[1]", "{}", "{ a = 1 }", "\"\"", "\"\\u0000\"", "1.5", "1979-05-27",
            "[[]]", "[{}]", "{ target = [\"gfx1103\"] }", "\"/\"", "[\"${target}\"]", "'''\n${y}\n'''",
        ]),
    ) {
        let _result = from_text("p", &format!("{HEAD}[[step]]\nname = \"s\"\n{key} = {value}\n"));
    }
}
