//! The output of `profile check` for profiles with mistakes.

use fs_err as fs;

use super::{Place, Ran};

#[test]
fn check_names_every_mistake_with_its_place() {
    let place = Place::new();
    place.look(&["profile", "check"]);
    let bad = "schema = 1\nimage = \"debian-forky\"\nimaeg = 1\n[[step]]\nname = \"s\"\nrun = \"echo ${nothing}\"\n";
    fs::write(place.path().join("bad.toml"), bad).unwrap();
    let said = place.shows("profile check hip-smok\nprofile check bad.toml hip-smoke nope.toml");
    insta::assert_snapshot!(said, @r#"
    $ rockenv profile check hip-smok
    error: no profile or target `hip-smok`
    help: did you mean `hip-smoke`?
    exit code 7
    $ rockenv profile check bad.toml hip-smoke nope.toml
    hip-smoke: ok, 6 steps, for gfx1103
    error: profile `bad` is invalid: 2 errors
      × unknown key `imaeg`
       ╭─[HOME/bad.toml:3:1]
     2 │ image = "debian-forky"
     3 │ imaeg = 1
       · ──┬──
       ·   ╰── unknown
     4 │ [[step]]
       ╰────
      help: did you mean `image`?
      × unknown `${nothing}`
       ╭─[HOME/bad.toml:6:13]
     5 │ name = "s"
     6 │ run = "echo ${nothing}"
       ·             ─────┬────
       ·                  ╰── here
       ╰────
      help: write `$${nothing}` for a shell's own, or add `nothing` to [params]
    error: no profile file `nope.toml`
    help: `rockenv profile ls` lists the profiles that have names
    exit code 3
    "#);
    let json =
        Ran::of(
            place
                .command()
                .args(["profile", "check", "bad.toml", "hip-smoke", "--json"]),
        )
        .json();
    assert_eq!(
        (&json[0]["ok"], &json[1]["ok"]),
        (&false.into(), &true.into())
    );
    // This mistake shows only for a target.
    let wants =
        "schema = 1\nimage = \"debian-forky\"\n[[step]]\nname = \"s\"\nrun = \"echo ${target}\"\n";
    fs::write(place.path().join("wants.toml"), wants).unwrap();
    insta::assert_snapshot!(place.shows("profile check wants.toml"), @"
    wants.toml: ok, 1 step, for gfx1103
      advice: it names no targets: checked for gfx1103; `up` needs `--target`
    ");
}

#[test]
fn check_reports_the_problems_of_all_stages_at_once() {
    let place = Place::new();
    let text = r#"schema = 1
image = "debian-frky"
hooks = ["torch-without-rcl"]
descriptoin = "a mistyped key"
targets = ["gfx1103"]

[[volume]]
name = "data"
kind = "host"
path = "/nowhere/at/all"
target = "/data"

[[step]]
name = "files"
copy = [{ from = "nowhere.txt", to = "/etc/nowhere.txt" }]

[[step]]
name = "make"
timeout = "soon"
run = "echo ${nothing}"
inputs = ["nowhere"]

[[step]]
name = "empty"
scirpt = "true"
"#;
    fs::write(place.path().join("bad.toml"), text).unwrap();
    // No error mentions the volume `nowhere` or the step without a script: these may follow from other mistakes.
    insta::assert_snapshot!(place.shows("profile check bad.toml"), @r#"
    error: profile `bad` is invalid: 8 errors
      × no image `debian-frky`
       ╭─[HOME/bad.toml:2:9]
     1 │ schema = 1
     2 │ image = "debian-frky"
       ·         ──────┬──────
       ·               ╰── not found
     3 │ hooks = ["torch-without-rcl"]
       ╰────
      help: did you mean `debian-forky`?
      × no hook `torch-without-rcl`
       ╭─[HOME/bad.toml:3:10]
     2 │ image = "debian-frky"
     3 │ hooks = ["torch-without-rcl"]
       ·          ─────────┬─────────
       ·                   ╰── not found
     4 │ descriptoin = "a mistyped key"
       ╰────
      help: did you mean `torch-without-rccl`?
      × unknown key `descriptoin`
       ╭─[HOME/bad.toml:4:1]
     3 │ hooks = ["torch-without-rcl"]
     4 │ descriptoin = "a mistyped key"
       · ─────┬─────
       ·      ╰── unknown
     5 │ targets = ["gfx1103"]
       ╰────
      help: did you mean `description`?
      × volume `data`: `/nowhere/at/all` does not exist
        ╭─[HOME/bad.toml:10:8]
      9 │ kind = "host"
     10 │ path = "/nowhere/at/all"
        ·        ────────┬────────
        ·                ╰── no such directory
     11 │ target = "/data"
        ╰────
      help: mkdir -p /nowhere/at/all
      × cannot copy `nowhere.txt`: there is no such file
        ╭─[HOME/bad.toml:15:18]
     14 │ name = "files"
     15 │ copy = [{ from = "nowhere.txt", to = "/etc/nowhere.txt" }]
        ·                  ──────┬──────
        ·                        ╰── here
     16 │
        ╰────
      × bad duration `soon`
        ╭─[HOME/bad.toml:19:11]
     18 │ name = "make"
     19 │ timeout = "soon"
        ·           ───┬──
        ·              ╰── here
     20 │ run = "echo ${nothing}"
        ╰────
      help: numbers with d, h, m or s, such as "2h 30m"
      × unknown `${nothing}`
        ╭─[HOME/bad.toml:20:13]
     19 │ timeout = "soon"
     20 │ run = "echo ${nothing}"
        ·             ─────┬────
        ·                  ╰── here
     21 │ inputs = ["nowhere"]
        ╰────
      help: write `$${nothing}` for a shell's own, or add `nothing` to [params]
      × unknown key `scirpt`
        ╭─[HOME/bad.toml:25:1]
     24 │ name = "empty"
     25 │ scirpt = "true"
        · ───┬──
        ·    ╰── unknown
        ╰────
      help: step entry has the keys `after`, `copy`, `env`, `export`, `fingerprints`, `gpu`, `incremental`,
            `inputs`, `memory`, `name`, `network`, `packages`, `published`, `remove`, `run`, `shell`, `stages`,
            `timeout`, `user`, `when`, `workdir`
    exit code 3
    "#);
    let place = Place::new();
    let text = "schema = 1\nextends = \"gone\"\n[[step]]\nname = \"a\"\nrun = \"${x}\"\ntimeout = \"soon\"\n";
    fs::write(place.path().join("bad.toml"), text).unwrap();
    insta::assert_snapshot!(place.shows("profile check bad.toml"), @r#"
    error: profile `bad` is invalid: 2 errors
      × no profile `gone`
       ╭─[HOME/bad.toml:2:11]
     1 │ schema = 1
     2 │ extends = "gone"
       ·           ───┬──
       ·              ╰── not found
     3 │ [[step]]
       ╰────
      help: `rockenv profile ls` shows them all
      × bad duration `soon`
       ╭─[HOME/bad.toml:6:11]
     5 │ run = "${x}"
     6 │ timeout = "soon"
       ·           ───┬──
       ·              ╰── here
       ╰────
      help: numbers with d, h, m or s, such as "2h 30m"
    exit code 3
    "#);
}

#[test]
fn an_input_that_is_not_there_is_said() {
    let place = Place::new();
    fs::create_dir(place.path().join("src")).unwrap();
    fs::write(place.path().join("src/there"), "").unwrap();
    std::os::unix::fs::symlink("nowhere", place.path().join("src/link")).unwrap();
    let text = "schema = 1\nimage = \"debian-forky\"\n\
         [[volume]]\nname = \"src\"\nkind = \"source\"\npath = \"src\"\ntarget = \"/src\"\n\
         [[step]]\nname = \"s\"\ninputs = [\"src\", \"src/there\", \"src/link\", \"src/gone\"]\nrun = \"true\"\n";
    fs::write(place.path().join("p.toml"), text).unwrap();
    let ran = place.run(&["profile", "check", "p.toml"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let advice = ran.out.lines().filter(|line| line.contains("advice: "));
    let advice: Vec<_> = advice.collect();
    assert_eq!(advice.len(), 1, "{advice:?}");
    assert!(advice[0].contains("step `s`: input `src/gone` does not exist"));
}

#[test]
fn a_patch_that_is_none_is_found_without_a_source() {
    let place = Place::new();
    let hook = place.path().join("hooks/fix");
    fs::create_dir_all(&hook).unwrap();
    fs::create_dir(place.path().join("src")).unwrap();
    for (path, text) in [
        (
            hook.join("hook.toml"),
            "schema = 1\ndescription = \"d\"\nwhy = \"w\"\nvolume = \"src\"\n[[patch]]\nfile = \"p.patch\"\n",
        ),
        (hook.join("p.patch"), "only words\n"),
        (
            place.path().join("p.toml"),
            "schema = 1\nimage = \"debian-forky\"\nhooks = [\"fix\"]\n\
             [[volume]]\nname = \"src\"\nkind = \"source\"\npath = \"src\"\ntarget = \"/src\"\n\
             [[step]]\nname = \"s\"\ninputs = [\"src\"]\nrun = \"true\"\n",
        ),
    ] {
        fs::write(path, text).unwrap();
    }
    for words in [
        &["hook", "check", "--hook", "fix"][..],
        &["profile", "check", "p.toml"],
    ] {
        let ran = place.run(words);
        let said = ran.out + &ran.err;
        assert_eq!(ran.code, 3, "{said}");
        let wanted = "`p.patch`: no patch in unified format";
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn check_takes_a_target_as_up_does() {
    let place = Place::new();
    let said = place.shows("profile check gfx1150\nprofile check 780m\nprofile check gfx110X-all");
    insta::assert_snapshot!(said, @"
    $ rockenv profile check gfx1150
    gfx1150: ok, 23 steps, for gfx1150
    $ rockenv profile check 780m
    780m: ok, 23 steps, for gfx1103
    $ rockenv profile check gfx110X-all
    error: unknown target `gfx110X-all`
    help: `gfx110X-all` is a family; name one or more of its targets: gfx1100, gfx1101, gfx1102, gfx1103
    exit code 7
    ");
}

#[test]
fn a_file_in_place_of_a_directory_is_refused() {
    let place = Place::new();
    fs::write(place.path().join("file"), "mine").unwrap();
    for (kind, code) in [("source", 3), ("output", 3), ("host", 0)] {
        let text = format!(
            "schema = 1\nimage = \"debian-forky\"\n[[volume]]\nname = \"v\"\nkind = \"{kind}\"\npath = \"file\"\n\
             target = \"/v\"\n[[step]]\nname = \"s\"\nrun = \"true\"\n"
        );
        fs::write(place.path().join("p.toml"), text).unwrap();
        let ran = place.run(&["profile", "check", "p.toml"]);
        assert_eq!(ran.code, code, "{kind}: {}", ran.err);
        assert_eq!(
            ran.err.contains("file` is not a directory"),
            code == 3,
            "{kind}"
        );
    }
}

#[test]
fn a_file_without_its_ending_is_suggested() {
    let place = Place::new();
    let text = "schema = 1\nimage = 'debian-forky'\n[[step]]\nname = 's'\nrun = 'true'\n";
    fs::write(place.path().join("lib.toml"), text).unwrap();
    let said = place.shows("plan lib\nplan ./lib\nprofile check lib");
    insta::assert_snapshot!(said, @"
    $ rockenv plan lib
    error: no profile or target `lib`
    help: did you mean `lib.toml`?
    exit code 7
    $ rockenv plan ./lib
    error: no profile file `./lib`
    help: did you mean `./lib.toml`?
    exit code 7
    $ rockenv profile check lib
    error: no profile or target `lib`
    help: did you mean `lib.toml`?
    exit code 7
    ");
}
