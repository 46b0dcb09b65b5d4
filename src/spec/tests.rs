//! What is in a key and what is not, and what a profile becomes.

use proptest::prelude::*;

use super::*;
use crate::error::Kind;
use crate::hook::Applies;
use crate::profile::{Profile, from_text};

fn facts(jobs: u32, memory: u64) -> Facts {
    Facts {
        jobs,
        memory,
        ..Facts::default()
    }
}

pub(crate) fn inputs() -> Inputs {
    Inputs {
        env_name: None,
        stem: None,
        targets: Vec::new(),
        machine_targets: Vec::new(),
        variant: None,
        from: None,
        params: BTreeMap::new(),
        engine: Engine::Nspawn,
        without_gpu: None,
        user: BuildUser::new(1000, 1000),
        host_home: PathBuf::from("/home/me"),
        image_key: "image-1".to_owned(),
        file_digests: [("files:run.sh".to_owned(), "d1".to_owned())].into(),
        fingerprints: [("src".to_owned(), "f1".to_owned())].into(),
        excluded: None,
        hooks: [("fix".to_owned(), fix("h1"))].into(),
    }
}

fn fix(digest: &str) -> HookFacts {
    HookFacts {
        digest: digest.to_owned(),
        volume: "src".to_owned(),
        from_step: None,
        applies: Applies::default(),
        not_now: None,
    }
}

fn targets(names: &[&str]) -> Vec<Target> {
    names
        .iter()
        .map(|name| Target::parse(name).unwrap())
        .collect()
}

const TEXT: &str = r#"
schema = 1
description = "for tests"
image = "debian"
targets = ["gfx1103"]
hooks = ["fix"]
env-from-host = ["TOKEN"]
params = { prefix = "/opt/x" }
[resources]
disk = "10G"
memory-per-job = "2G"
memory-max = "90%"
tasks-max = 1000
[gpu]
needed-by = ["test"]
[env]
CCACHE_DIR = "/cache/ccache"
[runtime-env]
HSA_OVERRIDE_GFX_VERSION = "${target.override}"
[[volume]]
name = "src"
kind = "source"
path = "~/src"
target = "/work/src"
[[volume]]
name = "work"
kind = "build"
target = "/work"
[[volume]]
name = "ccache"
kind = "cache"
max = "5G"
target = "/cache/ccache"
[[volume]]
name = "out"
kind = "output"
target = "/out"
[[step]]
name = "tools"
packages = ["cmake"]
[[step]]
name = "files"
copy = [{ from = "run.sh", to = "/opt/run.sh" }]
[[step]]
name = "configure"
workdir = "/work/src"
network = false
inputs = ["src"]
env = { GFX = "${target}" }
run = "cmake -DP=${prefix} $${HOME}"
[[step]]
name = "build"
timeout = "2h"
incremental = true
inputs = ["src"]
run = "ninja -j${jobs} -m ${memory}"
[[step]]
name = "test"
run = "ctest"
[[step]]
name = "export"
export = [{ from = "${prefix}", to = "out" }]
"#;

fn profile(text: &str) -> Profile {
    match from_text("p", text) {
        Ok(profile) => profile,
        Err(error) => panic!("{}", error.message()),
    }
}

fn spec(text: &str, inputs: &Inputs) -> Spec {
    match resolve(&profile(text), inputs) {
        Ok(spec) => spec,
        Err(error) => panic!("{}", error.message()),
    }
}

fn keys(text: &str, inputs: &Inputs) -> Vec<StepKey> {
    spec(text, inputs)
        .steps
        .into_iter()
        .map(|step| step.key)
        .collect()
}

/// Returns how many leading steps two envs share.
fn shared(a: &[StepKey], b: &[StepKey]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn everything_is_decided() {
    let spec = spec(TEXT, &inputs());
    assert_eq!(spec.name, "p");
    assert_eq!(spec.targets, targets(&["gfx1103"]));
    assert_eq!(spec.runtime_env["HSA_OVERRIDE_GFX_VERSION"], "11.0.3");
    let mounts: Vec<_> = spec
        .volumes
        .iter()
        .map(|volume| volume.target.as_str())
        .collect();
    assert_eq!(
        mounts,
        ["/cache/ccache", "/out", "/work", "/work/src"],
        "parents first"
    );
    assert_eq!(
        spec.volume("src").unwrap().source,
        VolumeSource::Path("/home/me/src".into())
    );
    assert_eq!(spec.volume("ccache").unwrap().max, Some(5 << 30));
    let tools = spec.step("tools").unwrap();
    assert_eq!((tools.user, tools.workdir.as_str()), (User::Root, "/"));
    assert_eq!(tools.volumes, ["ccache"], "packages see caches only");
    let configure = spec.step("configure").unwrap();
    assert_eq!(configure.env["GFX"], "gfx1103");
    assert_eq!(configure.env["CCACHE_DIR"], "/cache/ccache");
    assert_eq!(configure.volumes.len(), 4);
    let Action::Run { script, shell } = &configure.action else {
        panic!("{configure:?}");
    };
    assert_eq!(shell, &["/bin/sh", "-eu", "-c"]);
    assert_eq!(finish(script, &facts(1, 1)), "cmake -DP=/opt/x ${HOME}");
    let build = spec.step("build").unwrap();
    assert_eq!(build.workdir, "/home/builder");
    assert_eq!(build.timeout, Some(Duration::from_secs(7200)));
    let Action::Run { script, .. } = &build.action else {
        panic!("{build:?}");
    };
    assert_eq!(script, "ninja -j${jobs} -m ${memory}");
    assert_eq!(
        finish(script, &facts(16, 1 << 30)),
        "ninja -j16 -m 1073741824"
    );
    assert!(spec.step("test").unwrap().gpu);
}

#[test]
fn it_survives_being_saved() {
    let spec = spec(TEXT, &inputs());
    let text = toml::to_string(&spec).unwrap();
    assert_eq!(toml::from_str::<Spec>(&text).unwrap(), spec, "{text}");
    let text = serde_json::to_string(&spec).unwrap();
    assert_eq!(serde_json::from_str::<Spec>(&text).unwrap(), spec);
    let bad = text.replace(spec.base_key.as_str(), "../../etc");
    assert!(serde_json::from_str::<Spec>(&bad).is_err());
}

// A change here means that every env in the world is built again: bump `key::FORMAT` and say so in the changelog.
#[test]
fn keys_stay_what_they_are() {
    let keys: Vec<_> = keys(TEXT, &inputs())
        .iter()
        .map(|key| key.short().to_owned())
        .collect();
    assert_eq!(
        keys,
        [
            "4e46817415e5",
            "acb1752b307f",
            "2baeeae9559e",
            "207fac1500fe",
            "30d47c09fe9d",
            "6ade8ca5a45a"
        ]
    );
}

#[test]
fn targets_share_up_to_the_first_mention() {
    let with = |name: &str| {
        keys(
            TEXT,
            &Inputs {
                targets: targets(&[name]),
                ..inputs()
            },
        )
    };
    let (a, b) = (with("gfx1103"), with("gfx90a"));
    assert_eq!(shared(&a, &b), 2, "tools and files, but not configure");
    assert_eq!(
        a,
        keys(TEXT, &inputs()),
        "a target from the command line is the profile's"
    );
    let silent = TEXT.replace("GFX = \"${target}\"", "GFX = \"x\"");
    let with = |name: &str| {
        keys(
            &silent,
            &Inputs {
                targets: targets(&[name]),
                ..inputs()
            },
        )
    };
    assert_eq!(
        with("gfx1103"),
        with("gfx90a"),
        "the runtime variables are in no key"
    );
    let early = TEXT.replace(
        "CCACHE_DIR = \"/cache/ccache\"",
        "CCACHE_DIR = \"/cache/${target}\"",
    );
    let with = |name: &str| {
        keys(
            &early,
            &Inputs {
                targets: targets(&[name]),
                ..inputs()
            },
        )
    };
    assert_eq!(shared(&with("gfx1103"), &with("gfx90a")), 0);
}

#[test]
fn what_is_not_content_is_in_no_key() {
    let before = keys(TEXT, &inputs());
    for (old, new) in [
        ("for tests", "another description"),
        ("timeout = \"2h\"", "timeout = \"3h\""),
        ("timeout = \"2h\"\n", ""),
        ("disk = \"10G\"", "disk = \"11G\""),
        ("memory-per-job = \"2G\"", "memory-per-job = \"3G\""),
        ("memory-max = \"90%\"", "memory-max = \"80%\""),
        ("tasks-max = 1000", "tasks-max = 2000"),
        ("[\"TOKEN\"]", "[\"OTHER\"]"),
        ("HSA_OVERRIDE_GFX_VERSION", "SOMETHING"),
        ("path = \"~/src\"", "git = \"https://example.org/x\""),
        ("max = \"5G\"", "max = \"6G\""),
        ("name = \"configure\"", "name = \"cmake\""),
        ("[\"test\"]", "[\"test\", \"test\"]"),
        (
            "[[step]]\nname = \"tools\"",
            "# a comment\n[[step]]\nname = \"tools\"",
        ),
    ] {
        let text = TEXT.replace(old, new);
        assert_ne!(text, TEXT, "{old}");
        assert_eq!(keys(&text, &inputs()), before, "{new}");
    }
    for other in [
        Inputs {
            engine: Engine::Podman,
            ..inputs()
        },
        Inputs {
            host_home: "/root".into(),
            ..inputs()
        },
        Inputs {
            env_name: Some("other".to_owned()),
            ..inputs()
        },
    ] {
        assert_eq!(keys(TEXT, &other), before, "{other:?}");
    }
}

const CHOICES: &str = r#"
variant = "lean"
params = { flags = "" }
[resources]
disk = "10G"
[variants.lean]
params = { flags = "-l" }
[variants.full]
disk = "20G"
[from.rocm]
params = { flags = "-r" }
disk = "2G"
[[step]]
name = "generic"
when = { from = ["source"] }
run = "make ${machine.targets}"
[[step]]
name = "own"
run = "make ${flags}"
[[step]]
name = "tests"
when = { variant = ["full"] }
run = "make test"
"#;

/// Resolves [`CHOICES`] into its name, its steps with their scripts, and the disk it asks for.
fn chosen(
    variant: Option<&str>,
    from: Option<&str>,
) -> crate::error::Result<(String, String, Option<u64>)> {
    let text = format!("schema = 1\nimage = \"x\"\ntargets = [\"gfx1103\"]\n{CHOICES}");
    let inputs = Inputs {
        variant: variant.map(str::to_owned),
        from: from.map(str::to_owned),
        ..inputs()
    };
    let spec = resolve(&profile(&text), &inputs)?;
    let steps = spec.steps.iter().map(|step| match &step.action {
        Action::Run { script, .. } => format!("{}: {script}", step.name),
        _ => unreachable!("they all run"),
    });
    let steps = steps.collect::<Vec<_>>().join(", ");
    Ok((spec.name, steps, spec.resources.disk.map(|disk| disk >> 30)))
}

#[test]
fn a_variant_and_a_way_choose_steps_parameters_and_disk() {
    for (variant, from, name, steps, disk) in [
        (None, None, "p", "generic: make gfx1103, own: make -l", 10),
        (
            Some("lean"),
            Some("source"),
            "p",
            "generic: make gfx1103, own: make -l",
            10,
        ),
        (
            Some("full"),
            None,
            "p-full",
            "generic: make gfx1103, own: make , tests: make test",
            20,
        ),
        (
            Some("full"),
            Some("rocm"),
            "p-full-from-rocm",
            "own: make -r, tests: make test",
            2,
        ),
    ] {
        let got = chosen(variant, from).unwrap();
        assert_eq!(got, (name.to_owned(), steps.to_owned(), Some(disk)));
    }
    for (variant, from, message, help) in [
        (
            Some("ful"),
            None,
            "profile `p` has no variant `ful`",
            "did you mean `full`?",
        ),
        (
            None,
            Some("wheels"),
            "profile `p` has no way `wheels`",
            "there is source, rocm",
        ),
    ] {
        let error = chosen(variant, from).unwrap_err();
        assert_eq!(
            (error.message(), error.help_text()),
            (message, Some(help)),
            "{variant:?} {from:?}"
        );
    }
}

#[test]
fn targets_of_one_machine_share_what_is_built_for_all_of_them() {
    let text = format!("schema = 1\nimage = \"x\"\n{CHOICES}")
        .replace("run = \"make ${flags}\"", "run = \"make ${target}\"");
    let of = |target: &str, machine: &[&str]| {
        let inputs = Inputs {
            targets: targets(&[target]),
            machine_targets: targets(machine),
            ..inputs()
        };
        keys(&text, &inputs)
    };
    let both = ["gfx1201", "gfx1103"];
    assert_eq!(shared(&of("gfx1103", &both), &of("gfx1201", &both)), 1);
    assert_eq!(shared(&of("gfx1103", &[]), &of("gfx1201", &[])), 0);
    // The env's own target is one of the machine's, listed or not.
    assert_eq!(of("gfx1103", &["gfx1201"]), of("gfx1103", &both));
}

#[test]
fn what_is_content_changes_the_key_from_there_on() {
    let before = keys(TEXT, &inputs());
    // What is changed, and how many steps before it keep their keys.
    for (old, new, kept) in [
        ("\"cmake\"]", "\"cmake\", \"ninja\"]", 0),
        (
            "CCACHE_DIR = \"/cache/ccache\"",
            "CCACHE_DIR = \"/other\"",
            0,
        ),
        ("target = \"/cache/ccache\"", "target = \"/cache/x\"", 0),
        ("target = \"/out\"", "target = \"/result\"", 1),
        ("to = \"/opt/run.sh\"", "to = \"/opt/go.sh\"", 1),
        ("workdir = \"/work/src\"", "workdir = \"/work\"", 2),
        ("network = false\n", "", 2),
        ("GFX =", "GPU =", 2),
        ("cmake -DP=", "cmake -DQ=", 2),
        ("inputs = [\"src\"]\nenv", "env", 2),
        ("prefix = \"/opt/x\"", "prefix = \"/opt/y\"", 2),
        ("incremental = true\n", "", 3),
        ("-j${jobs}", "-j ${jobs}", 3),
        ("-j${jobs}", "-j8", 3),
        ("run = \"ctest\"", "run = \"ctest\"\nuser = \"root\"", 4),
        (
            "run = \"ctest\"",
            "run = \"ctest\"\nshell = [\"/bin/bash\", \"-c\"]",
            4,
        ),
        ("needed-by = [\"test\"]", "", 4),
        (
            "export = [{ from = \"${prefix}\"",
            "export = [{ from = \"/opt\"",
            5,
        ),
    ] {
        let text = TEXT.replace(old, new);
        assert_ne!(text, TEXT, "{old}");
        let after = keys(&text, &inputs());
        assert_eq!(shared(&before, &after), kept, "{new}");
        assert!(
            after[kept..].iter().all(|key| !before.contains(key)),
            "{new}"
        );
    }
    let some = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
    for (other, kept) in [
        (
            Inputs {
                image_key: "image-2".to_owned(),
                ..inputs()
            },
            0,
        ),
        (
            Inputs {
                file_digests: some("files:run.sh", "d2"),
                ..inputs()
            },
            1,
        ),
        (
            Inputs {
                user: BuildUser::new(1001, 1000),
                ..inputs()
            },
            1,
        ),
        (
            Inputs {
                user: BuildUser::new(1000, 1001),
                ..inputs()
            },
            1,
        ),
        (
            Inputs {
                fingerprints: some("src", "f2"),
                ..inputs()
            },
            2,
        ),
        (
            Inputs {
                hooks: [("fix".to_owned(), fix("h2"))].into(),
                ..inputs()
            },
            2,
        ),
        (
            Inputs {
                params: some("prefix", "/usr"),
                ..inputs()
            },
            2,
        ),
    ] {
        assert_eq!(shared(&before, &keys(TEXT, &other)), kept, "{other:?}");
    }
}

#[test]
fn conditions() {
    let text = r#"
schema = 1
image = "debian"
[[step]]
name = "all"
run = "a"
[[step]]
name = "igpu"
when = { family = ["igpu-all"] }
run = "b"
[[step]]
name = "one"
when = { target = ["gfx1100"], engine = ["nspawn"] }
run = "c"
[[step]]
name = "docker"
when = { engine = ["docker", "podman"] }
run = "d"
"#;
    let run = |names: &[&str], engine| {
        let spec = spec(
            text,
            &Inputs {
                targets: targets(names),
                engine,
                ..inputs()
            },
        );
        let steps: Vec<_> = spec.steps.into_iter().map(|step| step.name).collect();
        let skipped: Vec<_> = spec
            .skipped
            .into_iter()
            .map(|skipped| format!("{}: {}", skipped.name, skipped.reason))
            .collect();
        (steps.join(" "), skipped)
    };
    let (steps, skipped) = run(&["gfx1103"], Engine::Nspawn);
    assert_eq!(steps, "all igpu");
    assert_eq!(
        skipped,
        [
            "one: only for gfx1100, not for gfx1103",
            "docker: only with docker, podman, not with nspawn"
        ]
    );
    assert_eq!(
        run(&["gfx1103", "gfx1100"], Engine::Nspawn).0,
        "all igpu one"
    );
    assert_eq!(run(&["gfx1100"], Engine::Docker).0, "all docker");
    let (steps, skipped) = run(&[], Engine::Nspawn);
    assert_eq!(steps, "all");
    assert_eq!(skipped[0], "igpu: only for igpu-all, not for no target");
    // A step that is left out leaves no trace in the keys of the others.
    let without = text.replace(
        "[[step]]\nname = \"igpu\"\nwhen = { family = [\"igpu-all\"] }\nrun = \"b\"\n",
        "",
    );
    let docker = Inputs {
        targets: targets(&["gfx1100"]),
        engine: Engine::Docker,
        ..inputs()
    };
    assert_eq!(keys(text, &docker), keys(&without, &docker));
}

// Or an env that was made without a GPU would count as tested when one is there.
#[test]
fn without_a_gpu_its_steps_are_left_out() {
    let with = spec(TEXT, &inputs());
    let without = spec(
        TEXT,
        &Inputs {
            without_gpu: Some("needs a GPU, and there is none".to_owned()),
            ..inputs()
        },
    );
    assert_eq!(without.skipped.len(), 1);
    assert_eq!(without.skipped[0].reason, "needs a GPU, and there is none");
    assert!(without.step("test").is_none());
    assert_eq!(without.step("build"), with.step("build"));
    assert_ne!(
        without.step("export").unwrap().key,
        with.step("export").unwrap().key
    );
}

// They can be seen by a script; and keys of profiles that ask for none are what they were.
#[test]
fn other_devices_are_in_the_keys_of_steps_with_the_gpu() {
    let without = spec(TEXT, &inputs());
    let with = spec(
        &TEXT.replace("[gpu]", "[gpu]\naccel = true\ndma-heap = false"),
        &inputs(),
    );
    assert!(with.gpu.accel && !with.gpu.dma_heap);
    assert_eq!(with.step("build"), without.step("build"));
    assert_ne!(
        with.step("test").unwrap().key,
        without.step("test").unwrap().key
    );
    let saved = serde_json::to_string(&without).unwrap();
    assert!(!saved.contains("accel"), "{saved}");
}

#[test]
fn errors_point_into_the_profile() {
    let many = Inputs {
        targets: targets(&["gfx1100", "gfx1103"]),
        ..inputs()
    };
    let error = resolve(&profile(TEXT), &many).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    insta::assert_snapshot!(error.message(), @r#"
    profile `p` is invalid: 2 errors
      × `${target.override}` stands for one target, and there are gfx1100, gfx1103
        ╭─[/p/p.toml:19:29]
     18 │ [runtime-env]
     19 │ HSA_OVERRIDE_GFX_VERSION = "${target.override}"
        ·                             ─────────┬────────
        ·                                      ╰── here
     20 │ [[volume]]
        ╰────
      help: `${targets}` is all of them, separated by `;`
      × `${target}` stands for one target, and there are gfx1100, gfx1103
        ╭─[/p/p.toml:49:16]
     48 │ inputs = ["src"]
     49 │ env = { GFX = "${target}" }
        ·                ────┬────
        ·                    ╰── here
     50 │ run = "cmake -DP=${prefix} $${HOME}"
        ╰────
      help: `${targets}` is all of them, separated by `;`
    "#);

    let some = |value: &str| BTreeMap::from([("prefix".to_owned(), value.to_owned())]);
    let error = resolve(
        &profile(TEXT),
        &Inputs {
            params: some("opt/../x"),
            ..inputs()
        },
    )
    .unwrap_err();
    assert!(
        error
            .message()
            .contains("`opt/../x` is not an absolute path"),
        "{}",
        error.message()
    );
    let error = resolve(
        &profile(TEXT),
        &Inputs {
            params: [("perfix".to_owned(), String::new())].into(),
            ..inputs()
        },
    );
    let error = error.unwrap_err();
    assert_eq!(error.message(), "profile `p` has no parameter `perfix`");
    assert_eq!(error.help_text(), Some("did you mean `prefix`?"));
    assert_eq!(error.kind(), Kind::Usage);

    for other in [
        Inputs {
            fingerprints: BTreeMap::new(),
            ..inputs()
        },
        Inputs {
            hooks: BTreeMap::new(),
            ..inputs()
        },
        Inputs {
            file_digests: BTreeMap::new(),
            ..inputs()
        },
    ] {
        assert_eq!(
            resolve(&profile(TEXT), &other).unwrap_err().kind(),
            Kind::Unexpected
        );
    }
    // Volumes are known before the fingerprints that depend on them.
    assert_eq!(
        volumes(
            &profile(TEXT),
            &Inputs {
                fingerprints: BTreeMap::new(),
                ..inputs()
            }
        )
        .unwrap()
        .len(),
        4
    );
}

#[test]
fn params_cannot_smuggle() {
    let text = r#"
schema = 1
image = "debian"
params = { url = "https://example.org/x", rev = "main", pkg = "cmake" }
[[volume]]
name = "v"
kind = "source"
git = "${url}"
rev = "${rev}"
target = "/v"
[[step]]
name = "s"
packages = ["${pkg}"]
"#;
    for (name, value) in [
        ("url", "ext::sh -c id"),
        ("url", "--upload-pack=id"),
        ("rev", "--orphan"),
        ("pkg", "-o=Dpkg::Pre-Invoke::=id"),
        ("pkg", "a b"),
        ("pkg", ""),
        ("rev", "a\0b"),
    ] {
        let params = BTreeMap::from([(name.to_owned(), value.to_owned())]);
        assert!(
            resolve(&profile(text), &Inputs { params, ..inputs() }).is_err(),
            "{name} {value}"
        );
    }
    // A value that looks like a reference stays text.
    let params = BTreeMap::from([("prefix".to_owned(), "/${jobs}$".to_owned())]);
    let spec = spec(TEXT, &Inputs { params, ..inputs() });
    let Action::Run { script, .. } = &spec.step("configure").unwrap().action else {
        panic!();
    };
    assert_eq!(finish(script, &facts(4, 4)), "cmake -DP=/${jobs}$ ${HOME}");
}

#[test]
fn host_paths() {
    let at = |path: &str| {
        let text = TEXT.replace("~/src", path);
        let volumes = volumes(&profile(&text), &inputs());
        volumes.map(|volumes| {
            match &volumes
                .iter()
                .find(|volume| volume.name == "src")
                .unwrap()
                .source
            {
                VolumeSource::Path(path) => path.to_str().unwrap().to_owned(),
                other => panic!("{other:?}"),
            }
        })
    };
    assert_eq!(at("~").unwrap(), "/home/me");
    assert_eq!(at("~/a b").unwrap(), "/home/me/a b");
    assert_eq!(at("~//etc").unwrap(), "/home/me/etc");
    assert_eq!(at("/srv").unwrap(), "/srv");
    // Beside the file, wherever rockenv was started.
    assert_eq!(at("./a").unwrap(), "/p/a");
    assert_eq!(at("../a").unwrap(), "/p/../a");
    assert_eq!(at("/srv/${target}").unwrap(), "/srv/gfx1103");
}

proptest! {
    #[test]
    fn keys_depend_on_the_script_only_through_its_meaning(script in "[a-z $]{1,20}", other in "[a-z $]{1,20}") {
        let with = |script: &str| {
            let text = format!("schema = 1\nimage = \"d\"\nparams = {{ p = '{script}' }}\n[[step]]\nname = \"s\"\nrun = \"x${{p}}\"\n");
            keys(&text, &inputs())
        };
        let plain = |script: &str| {
            keys(&format!("schema = 1\nimage = \"d\"\n[[step]]\nname = \"s\"\nrun = 'x{script}'\n"), &inputs())
        };
        prop_assert_eq!(with(&script), plain(&script));
        prop_assert_eq!(with(&script) == with(&other), script == other);
    }

    #[test]
    fn neighbours_are_not_confused(a in "[a-z]{1,4}", b in "[a-z]{1,4}", c in "[a-z]{1,4}", d in "[a-z]{1,4}") {
        let with = |a: &str, b: &str| {
            keys(&format!("schema = 1\nimage = \"d\"\n[[step]]\nname = \"s\"\npackages = [\"{a}\", \"{b}\"]\n"), &inputs())
        };
        prop_assert_eq!(with(&a, &b) == with(&c, &d), (&a, &b) == (&c, &d));
    }
}

#[test]
fn a_copy_does_not_write_over_the_users_files() {
    for (to, fine) in [
        ("/work/src/run.sh", false),
        ("/work/src", false),
        ("/work/srcs/run.sh", true),
        ("/work/run.sh", true),
    ] {
        let text = TEXT.replace("to = \"/opt/run.sh\"", &format!("to = \"{to}\""));
        let result = resolve(&profile(&text), &inputs());
        assert_eq!(result.is_ok(), fine, "{to}: {result:?}");
        if let Err(error) = result {
            let said = error.chain().join("\n");
            assert!(said.contains("does not write into volume `src`"), "{said}");
        }
    }
}

const HOOKED: &str = r#"
schema = 1
image = "debian"
targets = ["gfx1103"]
hooks = ["one", "two"]
volume = [{ name = "src", kind = "source", path = "/src", target = "/src" }]
step = [
  { name = "tools", run = "a" },
  { name = "configure", run = "b", inputs = ["src"] },
  { name = "extra", run = "c", when = { target = ["gfx900"] } },
  { name = "build", run = "d" },
]
"#;

fn hooked(one: HookFacts, two: HookFacts) -> crate::error::Result<Spec> {
    let inputs = Inputs {
        hooks: [("one".to_owned(), one), ("two".to_owned(), two)].into(),
        ..inputs()
    };
    resolve(&profile(HOOKED), &inputs)
}

#[test]
fn a_hook_counts_from_the_first_step_that_sees_it() {
    let late = |digest: &str| HookFacts {
        from_step: Some("extra".to_owned()),
        ..fix(digest)
    };
    let spec = hooked(fix("h1"), late("h2")).unwrap();
    let from: Vec<_> = spec.hooks.iter().map(|hook| hook.from.as_str()).collect();
    // The second one's own step is left out: the next one is the first to see it.
    assert_eq!(from, ["configure", "build"]);
    let at = |step: usize| {
        let names = spec
            .hooks_at(&spec.steps[step], "src")
            .map(|hook| hook.name.as_str());
        names.collect::<Vec<_>>()
    };
    assert_eq!(
        (at(0), at(1), at(2)),
        (vec![], vec!["one"], vec!["one", "two"])
    );
    assert_eq!(spec.hooks_at(&spec.steps[2], "other").count(), 0);

    let keys = |spec: &Spec| {
        spec.steps
            .iter()
            .map(|step| step.key.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        shared(&keys(&spec), &keys(&hooked(fix("x"), late("h2")).unwrap())),
        1
    );
    assert_eq!(
        shared(&keys(&spec), &keys(&hooked(fix("h1"), late("x")).unwrap())),
        2
    );
}

#[test]
fn hooks_are_left_out_or_refused() {
    let only = |targets: &[&str]| HookFacts {
        applies: Applies {
            targets: targets.iter().map(|name| (*name).to_owned()).collect(),
            ..Applies::default()
        },
        ..fix("h")
    };
    let spec = hooked(only(&["igpu-all"]), only(&["gfx1201", "dcgpu-all"])).unwrap();
    assert_eq!(spec.hooks.len(), 1);
    assert_eq!(spec.hooks_left_out[0].name, "two");
    assert_eq!(
        spec.hooks_left_out[0].reason,
        "only for gfx1201, dcgpu-all, not for gfx1103"
    );

    let with = |change: fn(&mut HookFacts)| {
        let mut facts = fix("h");
        change(&mut facts);
        hooked(facts, fix("h")).unwrap_err().message().to_owned()
    };
    let error = with(|facts| "elsewhere".clone_into(&mut facts.volume));
    assert!(
        error.contains("changes `elsewhere`, which is no volume of kind `source`"),
        "{error}"
    );
    let error = with(|facts| facts.from_step = Some("elsewhere".to_owned()));
    assert!(
        error.contains("from step `elsewhere` on, which there is not"),
        "{error}"
    );
    let error = with(|facts| facts.applies.profiles = vec!["therock".to_owned()]);
    assert!(error.contains("is only for therock"), "{error}");
    let unread = HOOKED.replace(", inputs = [\"src\"]", "");
    let inputs = Inputs {
        hooks: [("one".to_owned(), fix("h")), ("two".to_owned(), fix("h"))].into(),
        ..inputs()
    };
    let error = resolve(&profile(&unread), &inputs).unwrap_err();
    assert!(
        error.message().contains("would never be applied"),
        "{error}"
    );
}
