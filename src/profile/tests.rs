//! What a person sees of a wrong profile, and how files extend each other.

use std::path::PathBuf;

use proptest::prelude::*;

use super::load::from_text;
use super::*;
use crate::error::Kind;

fn message(text: &str) -> String {
    let error = from_text("p", text).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    error.message().to_owned()
}

/// The sentences without snippets, for tables.
fn sentences(text: &str) -> Vec<String> {
    let message = message(text);
    let marked = message
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("× "));
    marked.map(str::to_owned).collect()
}

const HEAD: &str = "schema = 1\nimage = \"debian\"\n";

#[test]
fn structure_is_checked_all_at_once() {
    let text = r#"schema = 1
image = "debian"
volumes = []
disk = 3

[resources]
memory_per_job = "4G"
tasks-max = "many"

[[volume]]
name = "src"
kind = "sauce"

[[step]]
run = true
packages = "hipcc"
"#;
    insta::assert_snapshot!(message(text), @r#"
    profile `p` is invalid: 8 errors
      × unknown key `volumes`
       ╭─[/p/p.toml:3:1]
     2 │ image = "debian"
     3 │ volumes = []
       · ───┬───
       ·    ╰── unknown
     4 │ disk = 3
       ╰────
      help: did you mean `volume`?
      × unknown key `disk`
       ╭─[/p/p.toml:4:1]
     3 │ volumes = []
     4 │ disk = 3
       · ──┬─
       ·   ╰── unknown
     5 │ 
       ╰────
      help: it belongs into [resources]
      × unknown key `memory_per_job`
       ╭─[/p/p.toml:7:1]
     6 │ [resources]
     7 │ memory_per_job = "4G"
       · ───────┬──────
       ·        ╰── unknown
     8 │ tasks-max = "many"
       ╰────
      help: did you mean `memory-per-job`?
      × `tasks-max` must be a whole number
       ╭─[/p/p.toml:8:13]
     7 │ memory_per_job = "4G"
     8 │ tasks-max = "many"
       ·             ───┬──
       ·                ╰── this is a string
     9 │ 
       ╰────
      × `kind` cannot be `sauce`
        ╭─[/p/p.toml:12:8]
     11 │ name = "src"
     12 │ kind = "sauce"
        ·        ───┬───
        ·           ╰── unknown value
     13 │ 
        ╰────
      help: did you mean `source`?
      × missing key `name` in step entry
        ╭─[/p/p.toml:14:1]
     13 │ 
     14 │ [[step]]
        · ────┬───
        ·     ╰── here
     15 │ run = true
        ╰────
      × `run` must be a string
        ╭─[/p/p.toml:15:7]
     14 │ [[step]]
     15 │ run = true
        ·       ──┬─
        ·         ╰── this is a boolean
     16 │ packages = "hipcc"
        ╰────
      help: write `"true"`
      × `packages` must be an array
        ╭─[/p/p.toml:16:12]
     15 │ run = true
     16 │ packages = "hipcc"
        ·            ───┬───
        ·               ╰── this is a string
        ╰────
      help: write `["hipcc"]`
    "#);
}

#[test]
fn values_are_checked_all_at_once() {
    let text = r#"schema = 1
image = "debian"
targets = ["gfx1013", "gfx110X-igpu"]

[resources]
disk = "230 gigs"
memory-max = "110%"

[gpu]
needed-by = ["tset"]

[[volume]]
name = "src"
kind = "source"
target = "therock/src"

[[volume]]
name = "tmp"
kind = "build"
target = "/proc/x"

[[step]]
name = "test"
timeout = "2 hours"
inputs = ["scr"]
run = '''
cmake -DGPU=${traget} \
  -DHOME=${HOME}
'''
"#;
    insta::assert_snapshot!(message(text), @r#"
    profile `p` is invalid: 12 errors
      × unknown target `gfx1013`
       ╭─[/p/p.toml:3:12]
     2 │ image = "debian"
     3 │ targets = ["gfx1013", "gfx110X-igpu"]
       ·            ────┬────
       ·                ╰── not in the table
     4 │ 
       ╰────
      help: did you mean `gfx1010`? `rockenv target ls` shows them all
      × unknown target `gfx110X-igpu`
       ╭─[/p/p.toml:3:23]
     2 │ image = "debian"
     3 │ targets = ["gfx1013", "gfx110X-igpu"]
       ·                       ───────┬──────
       ·                              ╰── not in the table
     4 │ 
       ╰────
      help: `gfx110X-igpu` is a family, name one or more of its targets: gfx1103
      × bad size `230 gigs`
       ╭─[/p/p.toml:6:8]
     5 │ [resources]
     6 │ disk = "230 gigs"
       ·        ─────┬────
       ·             ╰── here
     7 │ memory-max = "110%"
       ╰────
      help: a number and K, M, G or T, such as "230G" or "1.5T"
      × bad percentage `110%`
       ╭─[/p/p.toml:7:14]
     6 │ disk = "230 gigs"
     7 │ memory-max = "110%"
       ·              ───┬──
       ·                 ╰── here
     8 │ 
       ╰────
      help: "1%" to "100%"
      × there is no step `tset`
        ╭─[/p/p.toml:10:14]
      9 │ [gpu]
     10 │ needed-by = ["tset"]
        ·              ───┬──
        ·                 ╰── not found
     11 │ 
        ╰────
      help: did you mean `test`?
      × source `src` has neither `path` nor `git`
        ╭─[/p/p.toml:13:8]
     12 │ [[volume]]
     13 │ name = "src"
        ·        ──┬──
        ·          ╰── this one
     14 │ kind = "source"
        ╰────
      × `therock/src` is not an absolute path
        ╭─[/p/p.toml:15:10]
     14 │ kind = "source"
     15 │ target = "therock/src"
        ·          ──────┬──────
        ·                ╰── here
     16 │ 
        ╰────
      help: a path in the env starts with `/`
      × `/proc/x` belongs to the engine
        ╭─[/p/p.toml:20:10]
     19 │ kind = "build"
     20 │ target = "/proc/x"
        ·          ────┬────
        ·              ╰── here
     21 │ 
        ╰────
      help: not `/`, `/run`, `/tmp`, nor anything in `/proc`, `/sys`, `/dev` or `/run/rockenv`
      × bad duration `2 hours`
        ╭─[/p/p.toml:24:11]
     23 │ name = "test"
     24 │ timeout = "2 hours"
        ·           ────┬────
        ·               ╰── here
     25 │ inputs = ["scr"]
        ╰────
      help: numbers with d, h, m or s, such as "2h 30m"
      × there is no volume of kind `source` called `scr`
        ╭─[/p/p.toml:25:11]
     24 │ timeout = "2 hours"
     25 │ inputs = ["scr"]
        ·           ──┬──
        ·             ╰── not found
     26 │ run = '''
        ╰────
      help: did you mean `src`?
      × unknown `${traget}`
        ╭─[/p/p.toml:27:13]
     26 │ run = '''
     27 │ cmake -DGPU=${traget} \
        ·             ────┬────
        ·                 ╰── here
     28 │   -DHOME=${HOME}
        ╰────
      help: did you mean `${target}`? write `$${traget}` for a shell's own
      × unknown `${HOME}`
        ╭─[/p/p.toml:28:10]
     27 │ cmake -DGPU=${traget} \
     28 │   -DHOME=${HOME}
        ·          ───┬───
        ·             ╰── here
     29 │ '''
        ╰────
      help: write `$${HOME}` for a shell's own, or add `HOME` to [params]
    "#);
}

#[test]
fn sentences_about_structure() {
    for (text, want) in [
        ("image = \"x\"", "missing key `schema` in the profile"),
        (
            "schema = 2\nimage = \"x\"",
            "this rockenv reads version 1 of the format, not 2",
        ),
        ("schema = 1", "no image"),
        ("schema = 1\nimage = 3", "`image` must be a string"),
        (
            "schema = 1\nimage = \"x\"\n[volume]\nname = \"a\"",
            "`volume` must be an array",
        ),
        (
            "schema = 1\nimage = \"x\"\nimage = \"y\"",
            "this is not TOML: duplicate key",
        ),
        (
            "schema = 1\nimage = \"a\\u0000b\"",
            "`image` contains a NUL byte",
        ),
        ("schema = 1\nimage = \"../x\"", "bad image name `../x`"),
        (
            "schema = 1\nimage = \"x\"\n[params]\njobs = \"3\"",
            "`${jobs}` has a meaning of its own",
        ),
        (
            "schema = 1\nimage = \"x\"\n[params]\na = \"${b}\"",
            "a parameter's value is not expanded",
        ),
        (
            "schema = 1\nimage = \"x\"\n[env]\n\"A=B\" = \"1\"",
            "bad variable name `A=B`",
        ),
        (
            "schema = 1\nimage = \"x\"\n[env]\nA = 1",
            "`A` must be a string",
        ),
        (
            "schema = 1\nimage = \"x\"\n[runtime-env]\nA = \"${jobs}\"",
            "`${jobs}` is not known here",
        ),
        (
            "schema = 1\nimage = \"x\"\nhooks = [\"a\", \"a\"]",
            "hook `a` is there twice",
        ),
        (
            "schema = 1\nimage = \"x\"\ntargets = [\"gfx1100\", \"gfx1100\"]",
            "target `gfx1100` is there twice",
        ),
    ] {
        assert_eq!(sentences(text), [want], "{text}");
    }
}

#[test]
fn sentences_about_volumes() {
    for (body, want) in [
        ("kind = \"build\"", "volume `v` has no `target`"),
        ("target = \"/v\"", "volume `v` has no `kind`"),
        (
            "kind = \"host\"\ntarget = \"/v\"",
            "host volume `v` has no `path`",
        ),
        (
            "kind = \"source\"\ntarget = \"/v\"",
            "source `v` has neither `path` nor `git`",
        ),
        (
            "kind = \"source\"\ntarget = \"/v\"\npath = \"/x\"\ngit = \"https://x/y\"",
            "a source has a `path` or a `git`, not both",
        ),
        (
            "kind = \"cache\"\ntarget = \"/v\"\npath = \"/x\"",
            "`path` is for volumes of kind `source`, `output` and `host`",
        ),
        (
            "kind = \"cache\"\ntarget = \"/v\"\ngit = \"https://x/y\"",
            "`git` is for a volume of kind `source`",
        ),
        (
            "kind = \"build\"\ntarget = \"/v\"\nmax = \"1G\"",
            "`max` is for a volume of kind `cache`",
        ),
        (
            "kind = \"host\"\ntarget = \"/v\"\npath = \"/x\"\nrev = \"a\"",
            "`rev` is for a volume with `git`",
        ),
        (
            "kind = \"host\"\ntarget = \"/v\"\npath = \"~joe/x\"",
            "another user's home: `~joe/x`",
        ),
        (
            "kind = \"source\"\ntarget = \"/v\"\ngit = \"ext::sh -c id\"",
            "bad git URL `ext::sh -c id`",
        ),
        (
            "kind = \"source\"\ntarget = \"/v\"\ngit = \"https://x/y\"\nrev = \"--upload-pack=id\"",
            "bad revision `--upload-pack=id`",
        ),
        (
            "kind = \"source\"\ntarget = \"/v\"\ngit = \"https://x/y\"\ndepth = 0",
            "`depth` is 0",
        ),
        (
            "kind = \"build\"\ntarget = \"/\"",
            "`/` belongs to the engine",
        ),
        (
            "kind = \"build\"\ntarget = \"/run/rockenv/x\"",
            "`/run/rockenv/x` belongs to the engine",
        ),
        (
            "kind = \"build\"\ntarget = \"/a/../b\"",
            "`/a/../b` is not a normal path",
        ),
        (
            "kind = \"build\"\ntarget = \"/${target}\"",
            "`target` is fixed: `${...}` means nothing in it",
        ),
    ] {
        let text = format!("{HEAD}[[volume]]\nname = \"v\"\n{body}\n");
        assert_eq!(sentences(&text), [want], "{text}");
    }
    let two = |a: &str, b: &str, path: &str| {
        format!(
            "{HEAD}[[volume]]\nname = \"{a}\"\nkind = \"build\"\ntarget = \"/v\"\n\
             [[volume]]\nname = \"{b}\"\nkind = \"build\"\ntarget = \"{path}\"\n"
        )
    };
    assert_eq!(
        sentences(&two("a", "a", "/w")),
        ["two volumes are called `a`"]
    );
    assert_eq!(
        sentences(&two("a", "b", "/v")),
        ["volumes `a` and `b` have one target"]
    );
    from_text("p", &two("a", "b", "/v/w")).unwrap();
}

#[test]
fn sentences_about_steps() {
    for (body, want) in [
        ("", "step `s` does nothing"),
        ("run = \" \"", "step `s` has nothing to do"),
        ("packages = []", "step `s` has nothing to do"),
        (
            "run = \"a\"\npackages = [\"b\"]",
            "a step does one thing: `run` or `packages`",
        ),
        ("packages = [\"-y\"]", "bad package name `-y`"),
        (
            "packages = [\"a\"]\nuser = \"builder\"",
            "packages are installed by root",
        ),
        (
            "packages = [\"a\"]\nshell = [\"/bin/sh\"]",
            "`shell` is for a step with `run`",
        ),
        (
            "run = \"a\"\nshell = [\"sh\"]",
            "a shell starts with the absolute path of a program",
        ),
        (
            "run = \"a\"\nworkdir = \"src\"",
            "`src` is not an absolute path",
        ),
        ("run = \"a ${b\"", "`${` without `}`"),
        ("run = \"a\"\nafter = \"b\"", "`s` cannot come after `b`"),
        ("remove = true", "there is no step `s` to remove"),
        (
            "remove = true\nrun = \"a\"",
            "step `s` is removed and defined at once",
        ),
        (
            "copy = [{ from = \"../x\", to = \"/x\" }]",
            "`../x` leaves the profile's directory",
        ),
        (
            "copy = [{ from = \"/x\", to = \"/x\" }]",
            "`/x` is not relative",
        ),
        (
            "copy = [{ from = \"x\", to = \"x\" }]",
            "`x` is not an absolute path",
        ),
        (
            "copy = [{ from = \"x\", to = \"/dev/sda\" }]",
            "`/dev/sda` belongs to the engine",
        ),
        (
            "copy = [{ from = \"x\", to = \"/${jobs}\" }]",
            "`${jobs}` is not known here",
        ),
        (
            "copy = [{ from = \"x\" }]",
            "missing key `to` in copy entry",
        ),
        (
            "export = [{ from = \"/x\", to = \"y\" }]",
            "there is no volume of kind `output` called `y`",
        ),
        (
            "run = \"a\"\nwhen = { family = [\"gfx110x-all\"], target = [\"gfx1\"] }",
            "unknown family `gfx110x-all`",
        ),
        (
            "run = \"a\"\nwhen = { engine = [\"lxc\"] }",
            "`engine entry` cannot be `lxc`",
        ),
        ("run = \"a\"\nwhen = { gpu = true }", "unknown key `gpu`"),
    ] {
        let text = format!("{HEAD}[[step]]\nname = \"s\"\n{body}\n");
        assert_eq!(
            sentences(&text).first().map(String::as_str),
            Some(want),
            "{text}"
        );
    }
    let twice =
        format!("{HEAD}[[step]]\nname = \"s\"\nrun = \"a\"\n[[step]]\nname = \"s\"\nrun = \"a\"\n");
    assert_eq!(sentences(&twice), ["two steps are called `s`"]);
}

/// A directory of profiles, each `name` with its text.
fn dir(files: &[(&str, &str)]) -> (tempfile::TempDir, Vec<PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, format!("schema = 1\n{text}")).unwrap();
    }
    let dirs = vec![dir.path().to_owned()];
    (dir, dirs)
}

const BASE: &str = r#"
image = "debian"
targets = ["gfx1100"]
hooks = ["one"]
params = { suite = "trixie", arch = "x" }
[resources]
disk = "10G"
memory-max = "90%"
[env]
A = "1"
B = "1"
[[volume]]
name = "src"
kind = "source"
git = "https://example.org/x"
rev = "main"
target = "/src"
[[step]]
name = "tools"
packages = ["cmake"]
[[step]]
name = "build"
timeout = "1h"
inputs = ["src"]
env = { X = "1", Y = "1" }
run = "make"
[[step]]
name = "test"
run = "make test"
"#;

#[test]
fn extending_merges_by_key_and_name() {
    let child = r#"
extends = "base"
targets = ["gfx1103"]
params = { suite = "forky" }
[resources]
disk = "20G"
[env]
B = "2"
[[volume]]
name = "src"
path = "/srv/x"
[[volume]]
name = "out"
kind = "output"
target = "/out"
[[step]]
name = "patch"
after = "tools"
run = "patch"
[[step]]
name = "build"
env = { Y = "2" }
run = "ninja"
[[step]]
name = "test"
remove = true
[[step]]
name = "export"
export = [{ from = "/x", to = "out" }]
"#;
    let (_dir, dirs) = dir(&[("base.toml", BASE), ("child.toml", child)]);
    let profile = load(&dirs, "child").unwrap();
    assert_eq!(profile.image.as_str(), "debian");
    assert_eq!(format!("{:?}", profile.targets), "[gfx1103]");
    assert_eq!(profile.hooks, ["one"]);
    assert_eq!(profile.params["suite"], "forky");
    assert_eq!(profile.params["arch"], "x");
    assert_eq!(profile.resources.disk, Some(20 << 30));
    assert_eq!(profile.resources.memory_max, Some(MemoryMax::Percent(90)));
    assert_eq!(
        (profile.env["A"].as_str(), profile.env["B"].as_str()),
        ("1", "2")
    );
    assert_eq!(profile.volumes[0].target, "/src");
    assert!(
        matches!(&profile.volumes[0].source, VolumeSource::Path(path) if path.as_str() == "/srv/x")
    );
    let names: Vec<_> = profile
        .steps
        .iter()
        .map(|step| step.name.as_str())
        .collect();
    assert_eq!(names, ["tools", "patch", "build", "export"]);
    let build = &profile.steps[2];
    assert!(matches!(&build.action, Action::Run { script, .. } if script.as_str() == "ninja"));
    assert_eq!(build.timeout, Some(Duration::from_secs(3600)));
    assert_eq!(build.inputs, ["src"]);
    assert_eq!(
        (build.env["X"].as_str(), build.env["Y"].as_str()),
        ("1", "2")
    );
    assert_eq!(profile.files().count(), 2);
}

#[test]
fn another_action_replaces_the_inherited_one() {
    let child = "extends = \"base\"\n[[step]]\nname = \"build\"\npackages = [\"x\"]\n";
    let (_dir, dirs) = dir(&[("base.toml", BASE), ("child.toml", child)]);
    let profile = load(&dirs, "child").unwrap();
    assert!(matches!(profile.steps[1].action, Action::Packages(_)));
    assert_eq!(profile.steps[1].user, User::Root);
}

#[test]
fn errors_name_the_file_they_are_in() {
    let base = BASE.replace("10G", "10 gigs");
    let child = "extends = \"sub/base.toml\"\n[gpu]\nneeded-by = [\"biuld\"]\n";
    let (dir, dirs) = dir(&[("sub/base.toml", &base), ("child.toml", child)]);
    let error = load(&dirs, "child").unwrap_err();
    let root = fs_err::canonicalize(dir.path()).unwrap();
    let message = error.message().replace(root.to_str().unwrap(), "/profiles");
    insta::assert_snapshot!(message, @r#"
    profile `child` is invalid: 2 errors
      × there is no step `biuld`
       ╭─[/profiles/child.toml:4:14]
     3 │ [gpu]
     4 │ needed-by = ["biuld"]
       ·              ───┬───
       ·                 ╰── not found
       ╰────
      help: did you mean `build`?
      × bad size `10 gigs`
       ╭─[/profiles/sub/base.toml:8:8]
     7 │ [resources]
     8 │ disk = "10 gigs"
       ·        ────┬────
       ·            ╰── here
     9 │ memory-max = "90%"
       ╰────
      help: a number and K, M, G or T, such as "230G" or "1.5T"
    "#);
}

#[test]
fn chains_end() {
    let minimal = "image = \"debian\"\n";
    let (_dir, dirs) = dir(&[
        ("a.toml", "extends = \"b\""),
        ("b.toml", "extends = \"./c.toml\""),
        ("c.toml", "extends = \"a\""),
        ("me.toml", "extends = \"me\""),
        ("path.toml", "extends = \"path.toml\""),
        ("abs.toml", "extends = \"/etc/x.toml\""),
        ("up.toml", "extends = \"../../x\""),
        ("gone.toml", "extends = \"minmial\""),
        ("minimal.toml", minimal),
        ("sub/down.toml", "extends = \"../minimal.toml\""),
    ]);
    let message = |name: &str| {
        let error = load(&dirs, name).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        error.message().to_owned()
    };
    for name in ["a", "b", "c"] {
        assert!(
            message(name).contains("× `extends` goes in a circle"),
            "{}",
            message(name)
        );
    }
    assert!(
        message("me").contains("`me` extends itself"),
        "{}",
        message("me")
    );
    assert!(
        message("path").contains("goes in a circle"),
        "{}",
        message("path")
    );
    assert!(
        message("abs").contains("is not relative to this file"),
        "{}",
        message("abs")
    );
    assert!(
        message("up").contains("bad profile name `../../x`"),
        "{}",
        message("up")
    );
    assert!(
        message("gone").contains("did you mean `minimal`"),
        "{}",
        message("gone")
    );
    let path = dirs[0].join("sub/down.toml");
    assert_eq!(load(&dirs, path.to_str().unwrap()).unwrap().name, "down");

    let names: Vec<String> = (0..20).map(|number| format!("n{number}.toml")).collect();
    let texts: Vec<String> = (1..21)
        .map(|number| format!("extends = \"n{number}\""))
        .collect();
    let files: Vec<_> = names
        .iter()
        .map(String::as_str)
        .zip(texts.iter().map(String::as_str))
        .collect();
    let (_dir, dirs) = self::dir(&files);
    let error = load(&dirs, "n0").unwrap_err();
    assert!(
        error.message().contains("more than 16 profiles"),
        "{}",
        error.message()
    );
}

#[test]
fn a_profile_can_extend_the_one_it_shadows() {
    let (_low, low) = dir(&[("x.toml", "image = \"debian\"\ndescription = \"low\"")]);
    let (_high, high) = dir(&[("x.toml", "extends = \"x\"\nimage = \"arch\"")]);
    let dirs = [high, low].concat();
    let profile = load(&dirs, "x").unwrap();
    assert_eq!(
        (profile.image.as_str(), profile.description.as_str()),
        ("arch", "low")
    );
    let listed: Vec<_> = list(&dirs)
        .unwrap()
        .into_iter()
        .filter(|listed| listed.name == "x")
        .collect();
    assert_eq!(listed.len(), 1);
}

#[test]
fn lists_say_what_is_broken() {
    let (_dir, dirs) = dir(&[
        ("good.toml", "description = \"fine\""),
        ("broken.toml", "description = "),
        ("Bad Name.toml", ""),
        ("other.txt", ""),
    ]);
    let dirs = [dirs, vec![PathBuf::from("/nonexistent")]].concat();
    let listed = list(&dirs).unwrap();
    let find = |name: &str| listed.iter().find(|listed| listed.name == name);
    assert_eq!(find("good").unwrap().description, "fine");
    assert!(find("broken").unwrap().problem.is_some());
    assert!(find("Bad Name").unwrap().problem.is_some());
    assert!(find("other").is_none());
}

#[test]
fn hostile_files() {
    let (dir, dirs) = dir(&[("deep.toml", &format!("image = {}", "[".repeat(100_000)))]);
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let message = |name: &str| load(&dirs, name).unwrap_err().message().to_owned();
    let write = |name: &str, bytes: &[u8]| fs_err::write(dir.path().join(name), bytes).unwrap();

    assert!(
        message("deep").contains("is invalid"),
        "{}",
        message("deep")
    );
    write("big.toml", &b"# x\n".repeat(1 << 18));
    assert!(
        message("big").ends_with("big.toml is larger than 256 KiB"),
        "{}",
        message("big")
    );
    write("latin.toml", b"schema = 1\n# \xe9\n");
    assert!(
        message("latin").ends_with("latin.toml: line 2 is not UTF-8"),
        "{}",
        message("latin")
    );
    write("Upper.toml", b"schema = 1\nimage = \"x\"\n");
    assert!(message(&path("Upper.toml")).contains("bad profile name `Upper`"));
    nix::unistd::mkfifo(&dir.path().join("fifo.toml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(message("fifo").ends_with("fifo.toml is not a regular file"));
    assert!(message("/dev/zero").starts_with("/dev/zero"));
    assert_eq!(
        load(&dirs, &path("gone.toml")).unwrap_err().kind(),
        Kind::NotFound
    );
    assert_eq!(
        load(&dirs, "nothing-like-it").unwrap_err().kind(),
        Kind::NotFound
    );
    for name in ["", "a b", "Ä", "a\0b", "..", &"x".repeat(65)] {
        assert_eq!(
            load(&dirs, name).unwrap_err().kind(),
            Kind::Invalid,
            "{name:?}"
        );
    }
    // Many mistakes: the message stays readable.
    let many: String = (0..5000)
        .map(|number| format!("key{number} = 1\n"))
        .collect();
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
    assert!(
        !message
            .chars()
            .any(|letter| letter.is_control() && letter != '\n'),
        "{message:?}"
    );
}

#[test]
fn builtin_profiles_load() {
    let dirs = [];
    for listed in list(&dirs).unwrap() {
        let (profile, advice) = check(&dirs, &listed.name).unwrap();
        assert_eq!(listed.problem, None);
        assert!(!listed.description.is_empty(), "{}", profile.name);
        assert_eq!(advice, Vec::<String>::new(), "{}", profile.name);
    }
}

#[test]
fn schema_describes_every_key() {
    fn walk(path: &str, schema: &serde_json::Value) {
        if let Some(properties) = schema
            .get("properties")
            .and_then(serde_json::Value::as_object)
        {
            for (key, property) in properties {
                assert!(
                    property.get("description").is_some(),
                    "{path} {key} has no description"
                );
                walk(key, property);
            }
        }
        for definition in schema
            .get("$defs")
            .and_then(serde_json::Value::as_object)
            .into_iter()
            .flatten()
        {
            walk(definition.0, definition.1);
        }
    }
    let schema = schema();
    walk("profile", &schema);
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(schema["required"], serde_json::json!(["schema"]));
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
