//! The messages for invalid profiles.

use super::*;

/// Returns the problems without the profile's text: on each line the place with the number of marked characters, the
/// sentence, the label, and the help.
fn folded(text: &str) -> String {
    let message = message(text);
    let problems = message.split("\n  × ").skip(1).map(|problem| {
        let (sentence, rest) = problem.split_once('\n').unwrap();
        let (_, rest) = rest.split_once("[/p/p.toml:").unwrap();
        let (place, rest) = rest.split_once(']').unwrap();
        let (marked, rest) = rest.split_once("╰── ").unwrap();
        let width = marked.matches(['─', '┬']).count();
        let (label, rest) = rest.split_once('\n').unwrap();
        let (_, help) = rest.split_once("╰────").unwrap();
        let help: Vec<_> = help.split_whitespace().collect();
        let line = format!("{place}+{width} {sentence}: {label}; {}", help.join(" "));
        line.trim_end().to_owned()
    });
    let problems: Vec<_> = problems.collect();
    problems.join("\n")
}

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
copy = { from = "a", to = "/a" }
"#;
    insta::assert_snapshot!(folded(text), @r#"
    3:1+7 unknown key `volumes`: unknown; help: did you mean `volume`?
    4:1+4 unknown key `disk`: unknown; help: it belongs in [resources]
    7:1+14 unknown key `memory_per_job`: unknown; help: did you mean `memory-per-job`?
    8:13+6 `tasks-max` must be a whole number: this is a string;
    12:8+7 `kind` cannot be `sauce`: unknown value; help: did you mean `source`?
    14:1+8 missing key `name` in step entry: here;
    15:7+4 `run` must be a string: this is a boolean; help: write `"true"`
    16:12+7 `packages` must be an array: this is a string; help: write `["hipcc"]`
    17:8+25 `copy` must be an array: this is a table; help: write `copy = [{ ... }]`
    "#);
}

#[test]
fn an_overlong_line_is_not_shown() {
    let text = format!("schema = 1\n# é\nimagee = \"{}\"\n", "x".repeat(5000));
    insta::assert_snapshot!(message(&text), @"
    profile `p` is invalid
      × unknown key `imagee`
       in /p/p.toml, line 3
       help: did you mean `image`?
    ");
}

#[test]
fn values_are_checked_all_at_once() {
    let text = r#"schema = 1
image = "debian"
targets = ["gfx1013", "gfx110X-igpu"]

[resources]
disk = "230 gigs"
memory-max = "110%"

[[volume]]
name = "src"
kind = "source"
target = "therock/src"

[[volume]]
name = "tmp"
kind = "build"
target = "/proc/x"

[gpu]
needed-by = ["tset"]

[[step]]
name = "test"
timeout = "2 hours"
inputs = ["scr"]
run = '''
cmake -DGPU=${traget} \
  -DHOME=${HOME}
'''
"#;
    insta::assert_snapshot!(folded(text), @r#"
    3:12+9 unknown target `gfx1013`: not in the table; help: did you mean `gfx1031`? `rockenv target ls` shows them all, `rockenv target learn --source DIR` imports those of a newer TheRock
    3:23+14 unknown target `gfx110X-igpu`: not in the table; help: `gfx110X-igpu` is a family; name one or more of its targets: gfx1103
    6:8+10 bad size `230 gigs`: here; help: a number and K, M, G or T, such as "230G" or "1.5T"
    7:14+6 bad percentage `110%`: here; help: "1%" to "100%"
    10:8+5 source `src` has neither `path` nor `git`: this one;
    12:10+13 `therock/src` is not an absolute path: here; help: a path in the env starts with `/`
    17:10+9 `/proc/x` belongs to the engine: here; help: not `/`, `/run`, `/tmp`, nor anything in `/proc`, `/sys`, `/dev` or `/run/rockenv`
    20:14+6 there is no step `tset`: not found; help: did you mean `test`?
    24:11+9 bad duration `2 hours`: here; help: numbers with d, h, m or s, such as "2h 30m"
    25:11+5 there is no volume of kind `source` called `scr`: not found; help: did you mean `src`?
    27:13+9 unknown `${traget}`: here; help: did you mean `${target}`? write `$${traget}` for a shell's own
    28:10+7 unknown `${HOME}`: here; help: write `$${HOME}` for a shell's own
    "#);
}

#[test]
fn sentences_about_structure() {
    for (text, want) in cases(
        r#"
        image = "x" => missing key `schema` in the profile
        schema = 2; image = "x" => this version of rockenv supports format version 1, not 2
        schema = 1 => no image
        schema = 1; image = 3 => `image` must be a string
        schema = 1; image = "x"; [volume]; name = "a" => `volume` must be an array
        schema = 1; image = "x"; image = "y" => this is not TOML: duplicate key
        schema = 1; image = "a\u0000b" => `image` contains a NUL byte
        schema = 1; image = "x-${target}" => an image's name takes parameters only, not `${target}`
        schema = 1; image = "x-${jobs}" => an image's name takes parameters only, not `${jobs}`
        schema = 1; image = "../x" => bad image name `../x`
        schema = 1; image = "x"; [params]; jobs = "3" => `${jobs}` has a meaning of its own
        schema = 1; image = "x"; [params]; a = "${b}" => a parameter's value is not expanded
        schema = 1; image = "x"; [params]; a = ""; [from.x.params]; a = "${b}" => a parameter's value is not expanded
        schema = 1; image = "x"; variant = "x"; [params]; a = ""; [variants.x.params]; a = "${a}" => a parameter's value is not expanded
        schema = 1; image = "x"; release-param = "r"; [params]; r = "1"; a = ""; [releases.1.params]; a = "${target}" => a parameter's value is not expanded
        schema = 1; image = "x"; [env]; "A=B" = "1" => bad variable name `A=B`
        schema = 1; image = "x"; [env]; A = 1 => `A` must be a string
        schema = 1; image = "x"; [runtime-notes]; A = "x" => there is no runtime variable `A`
        schema = 1; image = "x"; variant = "b"; [variants.a] => there is no variant `b`
        schema = 1; image = "x"; [variants.a] => there are variants, but no default one
        schema = 1; image = "x"; [from.x.params]; p = "1" => there is no parameter `p`
        schema = 1; image = "x"; [from.source] => `source` is built in: it builds everything
        schema = 1; image = "x"; [[step]]; name = "s"; run = "x"; when = { from = ["source"], variant = ["a"] } => there is no variant `a`
        schema = 1; image = "x"; [runtime-env]; A = "${jobs}" => unknown reference `${jobs}`
        schema = 1; image = "x"; [runtime-env]; LD_PRELOAD = "/x.so" => `LD_PRELOAD` cannot be a runtime variable
        schema = 1; image = "x"; hooks = ["a", "a"] => duplicate hook `a`
        schema = 1; image = "x"; [[component]]; name = "rccl"; links = ["nccl"] => there is no component `nccl`
        schema = 1; image = "x"; [[component]]; name = "rccl"; extra-targets = ["gfx1"] => unknown target `gfx1`
        schema = 1; image = "x"; [[component]]; name = "rccl"; remove = true => there is no component `rccl` to remove
        schema = 1; image = "x"; component = [{ name = "a" }, { name = "a" }] => two components are named `a`
        schema = 1; image = "x"; targets = ["gfx1100", "gfx1100"] => duplicate target `gfx1100`
        schema = 1; image = "x"; [resources]; memory-max = "4M" => `memory-max` of `4M` is too little to start a container: the least is 16 MiB
        schema = 1; image = "x"; [resources]; memory-max = "1B" => `memory-max` of `1B` is too little to start a container: the least is 16 MiB
        schema = 1; image = "x"; [resources]; tasks-max = 1 => `tasks-max` of 1 is too little to start a container
        schema = 1; image = "x"; [resources]; tasks-max = 0 => `tasks-max` is 0
        schema = 1; image = "x"; [resources]; tasks-max = 4194305 => `tasks-max` of 4194305 is more than Linux allows
        "#,
    ) {
        assert_eq!(sentences(&text), [want], "{text}");
    }
}

#[test]
fn sentences_about_volumes_and_inputs() {
    for (body, want) in cases(
        r#"
        kind = "build" => volume `v` has no `target`
        target = "/v" => volume `v` has no `kind`
        kind = "host"; target = "/v" => host volume `v` has no `path`
        kind = "source"; target = "/v" => source `v` has neither `path` nor `git`
        kind = "source"; target = "/v"; path = "/x"; git = "https://x/y" => a source has either `path` or `git`, not both
        kind = "cache"; target = "/v"; path = "/x" => `path` is for volumes of kind `source`, `output` and `host`
        kind = "cache"; target = "/v"; git = "https://x/y" => `git` is for a volume of kind `source`
        kind = "build"; target = "/v"; max = "1G" => `max` is for a volume of kind `cache`
        kind = "host"; target = "/v"; path = "/x"; rev = "a" => `rev` is for a volume with `git`
        kind = "host"; target = "/v"; path = "~joe/x" => another user's home: `~joe/x`
        kind = "source"; target = "/v"; git = "ext::sh -c id" => bad git URL `ext::sh -c id`
        kind = "source"; target = "/v"; git = "https://x/y"; rev = "--upload-pack=id" => bad revision `--upload-pack=id`
        kind = "source"; target = "/v"; git = "https://x/y"; depth = 0 => `depth` is 0
        kind = "build"; target = "/" => `/` belongs to the engine
        kind = "build"; target = "/run/rockenv/x" => `/run/rockenv/x` belongs to the engine
        kind = "build"; target = "/usr" => `/usr` belongs to the image
        kind = "build"; target = "/a/../b" => `/a/../b` is not a normal path
        kind = "build"; target = "/${target}" => `target` must not contain references such as `${...}`
        kind = "source"; target = "/v"; path = "/v"; [[step]]; name = "s"; run = "a"; inputs = ["v/../x"] => `../x` leaves the source
        kind = "source"; target = "/v"; path = "/v"; [[step]]; name = "s"; run = "a"; inputs = ["v//x"] => `/x` is not relative
        kind = "source"; target = "/v"; path = "/v"; [[step]]; name = "s"; run = "a"; inputs = ["v/x/"] => `x/` is not a normal path
        kind = "source"; target = "/v"; path = "/v"; [[step]]; name = "s"; run = "a"; inputs = ["v/"] => `` is not a normal path
        kind = "source"; target = "/v"; path = "/v"; [[step]]; name = "s"; run = "a"; inputs = ["v/${target}"] => `inputs` must not contain references such as `${...}`
        "#,
    ) {
        let text = format!("{HEAD}[[volume]]\nname = \"v\"\n{body}\n");
        assert_eq!(sentences(&text), [want], "{text}");
    }
    let two = |a: &str, b: &str, path: &str| {
        format!(
            "{HEAD}[[volume]]\nname = \"{a}\"\nkind = \"build\"\ntarget = \"/v\"\n\
             [[volume]]\nname = \"{b}\"\nkind = \"build\"\ntarget = \"{path}\"\n"
        )
    };
    for (other, path, want) in [
        ("a", "/w", "two volumes are named `a`"),
        ("b", "/v", "volumes `a` and `b` have the same target"),
    ] {
        assert_eq!(sentences(&two("a", other, path)), [want]);
    }
    from_text("p", &two("a", "b", "/v/w")).unwrap();
}

#[test]
fn sentences_about_steps() {
    for (body, want) in cases(
        r#"
        => step `s` does nothing
        run = " " => step `s` has nothing to do
        packages = [] => step `s` has nothing to do
        run = "a"; packages = ["b"] => a step has one action: `run` or `packages`
        packages = ["-y"] => bad package name `-y`
        packages = ["a"]; user = "builder" => packages are installed by root
        packages = ["a"]; shell = ["/bin/sh"] => `shell` is for a step with `run`
        copy = [{ from = "x", to = "/x" }]; env = { A = "b" } => `env` is for a step with `run` or `packages`
        run = "a"; shell = ["sh"] => a shell starts with the absolute path of a program
        run = "a"; workdir = "src" => `src` is not an absolute path
        run = "a ${b" => `${` without `}`
        run = "a"; after = "b" => `s` cannot come after `b`
        remove = true => there is no step `s` to remove
        remove = true; run = "a" => step `s` is both removed and defined
        copy = [{ from = "../x", to = "/x" }] => `../x` leaves the profile's directory
        copy = [{ from = "/x", to = "/x" }] => `/x` is not relative
        copy = [{ from = "x", to = "x" }] => `x` is not an absolute path
        copy = [{ from = "x", to = "/dev/sda" }] => `/dev/sda` belongs to the engine
        copy = [{ from = "x", to = "/${jobs}" }] => unknown reference `${jobs}`
        copy = [{ from = "x" }] => missing key `to` in copy entry
        export = [{ from = "/", to = "y" }] => `/` has no name to be exported under
        export = [{ from = "/x", to = "y" }] => there is no volume of kind `output` called `y`
        run = "a"; when = { family = ["gfx110x-all"], target = ["gfx1"] } => unknown family `gfx110x-all`
        run = "a"; when = { engine = ["lxc"] } => `engine entry` cannot be `lxc`
        run = "a"; when = { gpu = true } => unknown key `gpu`
        "#,
    ) {
        let text = format!("{HEAD}[[step]]\nname = \"s\"\n{body}\n");
        assert_eq!(sentences(&text)[0], want, "{text}");
    }
    let twice =
        format!("{HEAD}[[step]]\nname = \"s\"\nrun = \"a\"\n[[step]]\nname = \"s\"\nrun = \"a\"\n");
    assert_eq!(sentences(&twice), ["two steps are named `s`"]);
}

#[test]
fn fingerprints_are_in_the_innermost_volume() {
    let text = |kind: &str| {
        format!(
            "{HEAD}[[volume]]\nname = \"b\"\nkind = \"build\"\ntarget = \"/b\"\n\
             [[volume]]\nname = \"in\"\nkind = \"{kind}\"\ntarget = \"/b/in\"\n\
             [[step]]\nname = \"s\"\nrun = \"a\"\nfingerprints = \"/b/in/x\"\n"
        )
    };
    let profile = from_text("p", &text("build")).unwrap();
    let found = profile.steps[0].fingerprints.as_ref().unwrap();
    let place = (found.volume.as_str(), found.path.to_str());
    assert_eq!(place, ("in", Some("x")));
    let want = "`/b/in/x` is in no volume of kind `build`";
    assert_eq!(sentences(&text("cache")), [want]);
    let reference = text("build").replace("/b/in/x", "/b/in/${target}");
    let want = "`fingerprints` must not contain references such as `${...}`";
    assert_eq!(sentences(&reference), [want]);
}

#[test]
fn a_choice_selects_a_release_that_exists() {
    let text = |release: &str| {
        format!(
            "{HEAD}release-param = \"rel\"\nparams = {{ rel = \"1\" }}\nvariant = \"x\"\n[releases.1]\n\
             [variants.x.params]\nrel = \"{release}\"\n[[step]]\nname = \"a\"\nrun = \"true\"\n"
        )
    };
    from_text("p", &text("1")).unwrap();
    let message = message(&text("9"));
    assert_has!(message, "there is no release `9`");
    assert_has!(message, "p.toml:8:7");
}
