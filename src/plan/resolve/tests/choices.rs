//! Variants, starting points, conditions.

use super::*;

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
"#;

const STEPS: &str = r#"
schema = 1
image = "x"
targets = ["gfx1103"]
step = [
  { name = "generic", run = "make ${machine.targets}", when = { from = ["source"] } },
  { name = "own", run = "make ${flags}" },
  { name = "tests", run = "make test", when = { variant = ["full"] } },
]
"#;

/// Resolves [`STEPS`] with [`CHOICES`]; returns the name, the steps with their scripts, and the disk.
fn chosen(
    variant: Option<&str>,
    from: Option<&str>,
) -> crate::sys::error::Result<(String, String, Option<u64>)> {
    let text = STEPS.to_owned() + CHOICES;
    let inputs = inputs!(variant: variant.map(str::to_owned),
        from: from.map(str::to_owned));
    let spec = resolve(&profile(&text), &inputs)?;
    let steps = spec.steps.iter();
    let steps = steps.map(|step| format!("{}: {}", step.name, script(step)));
    let (steps, disk) = (steps.collect::<Vec<_>>().join(", "), spec.resources.disk);
    Ok((spec.name.to_string(), steps, disk.map(|disk| disk >> 30)))
}

#[test]
fn a_variant_and_a_way_choose_steps_parameters_and_disk() {
    let lean = "generic: make gfx1103, own: make -l";
    let full = "generic: make gfx1103, own: make , tests: make test";
    let rocm = "own: make -r, tests: make test";
    for (variant, from, name, steps, disk) in [
        (None, None, "p", lean, 10),
        (Some("lean"), Some("source"), "p", lean, 10),
        (Some("full"), None, "p-full", full, 20),
        (Some("full"), Some("rocm"), "p-full-from-rocm", rocm, 2),
    ] {
        let got = chosen(variant, from).unwrap();
        assert_eq!(got, (name.to_owned(), steps.to_owned(), Some(disk)));
    }
    let error = chosen(Some("ful"), None).unwrap_err();
    assert_eq!(error.message(), "profile `p` has no variant `ful`");
    assert_eq!(error.help_text(), Some("did you mean `full`?"));
    for (from, help) in [
        ("wheels", "choose source or rocm"),
        ("sorce", "did you mean `source`?"),
    ] {
        let error = chosen(None, Some(from)).unwrap_err();
        let message = format!("`--from {from}` is not available in profile `p`");
        assert_eq!(
            (error.message(), error.help_text()),
            (&*message, Some(help))
        );
    }
}

#[test]
fn targets_of_one_machine_share_what_is_built_for_all_of_them() {
    let text = STEPS.replace("make ${flags}", "make ${target}") + CHOICES;
    let of = |target: &str, machine: &[&str]| {
        let inputs = inputs!(targets: targets(&[target]),
            machine_targets: targets(machine));
        keys(&text, &inputs)
    };
    let both = ["gfx1201", "gfx1103"];
    assert_eq!(shared(&of("gfx1103", &both), &of("gfx1201", &both)), 1);
    assert_eq!(shared(&of("gfx1103", &[]), &of("gfx1201", &[])), 0);
    // The env's own target counts as one of the machine's, listed or not.
    assert_eq!(of("gfx1103", &["gfx1201"]), of("gfx1103", &both));
}

#[test]
fn conditions() {
    let text = r#"
schema = 1
image = "debian"
step = [
  { name = "all", run = "a" },
  { name = "igpu", run = "b", when = { family = ["igpu-all"] } },
  { name = "one", run = "c", when = { target = ["gfx1100"], engine = ["nspawn"] } },
  { name = "docker", run = "d", when = { engine = ["docker", "podman"] } },
]
"#;
    let run = |names: &[&str], engine| {
        let spec = spec(text, &inputs!(targets: targets(names), engine));
        let steps: Vec<_> = spec.steps.into_iter().map(|step| step.name).collect();
        let skipped = spec.skipped.into_iter();
        let skipped = skipped.map(|skipped| format!("{}: {}", skipped.name, skipped.reason));
        (steps.join(" "), skipped.collect::<Vec<_>>())
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
    // A skipped step leaves no trace in the other keys.
    let lines = text.lines().filter(|line| !line.contains("igpu"));
    let without = lines.collect::<Vec<_>>().join("\n");
    let docker = inputs!(targets: targets(&["gfx1100"]),
        engine: Engine::Docker);
    assert_eq!(keys(text, &docker), keys(&without, &docker));
}

// One lock file has the keys of every machine. The plan makes sure that an env made without a GPU does not count as
// tested once the machine has one.

#[test]
fn without_a_gpu_its_steps_are_left_out_and_later_keys_are_the_same() {
    let with = spec(TEXT, &inputs());
    let none = inputs!(without_gpu: Some("this machine has no GPU".to_owned()));
    let without = spec(TEXT, &none);
    assert_eq!(without.skipped.len(), 1);
    assert_eq!(without.skipped[0].reason, "this machine has no GPU");
    assert!(without.step("test").is_none());
    assert_eq!(without.step("build"), with.step("build"));
    assert_eq!(without.step("export"), with.step("export"));
    // A hook that begins at a step with the GPU is in the key of the next step, with and without a GPU.
    let at_test = |fix: &str, without_gpu: Option<&str>| {
        let mut facts = super::fix(fix);
        facts.from_step = Some("test".into());
        let inputs = inputs!(hooks: [("fix".to_owned(), facts)].into(),
            without_gpu: without_gpu.map(str::to_owned));
        spec(TEXT, &inputs).step("export").unwrap().key.clone()
    };
    assert_eq!(at_test("h1", None), at_test("h1", Some("none here")));
    assert_ne!(at_test("h1", None), at_test("h2", None));
}

const PARTS: &str = r#"
schema = 1
image = "x"
variant = "lean"
params = { more = "" }
hooks = ["fix"]
component = [
  { name = "rccl", extra-targets = ["${more}"], when = { variant = ["full"], from = ["source"] } },
  { name = "torch", links = ["rccl"] },
]
volume = [
  { name = "src", kind = "source", path = "/src", target = "/src" },
  { name = "out", kind = "output", path = "/out", target = "/out", disk = "1G" },
  { name = "build", kind = "build", target = "/build", disk = "9G" },
]
step = [{ name = "build", inputs = ["src"], run = "make" }]
[variants.also]
[variants.lean]
hooks = ["two", "fix"]
[variants.full]
params = { more = ";gfx1250" }
disk = "20G"
[from.wheels]
"#;

#[test]
fn a_variant_brings_hooks_parts_and_an_amount_of_disk() {
    let of = |variant: &str, from: Option<&str>, more: Option<&str>| {
        let given = more.map(|more| ("more".to_owned(), more.to_owned()));
        let inputs = inputs!(targets: targets(&["gfx1103"]),
            variant: Some(variant.to_owned()),
            from: from.map(str::to_owned),
            params: given.into_iter().collect(),
            hooks: [("fix".to_owned(), fix("h1")), ("two".to_owned(), fix("h2"))].into());
        resolve(&profile(PARTS), &inputs)
    };
    let hooks = |spec: &Spec| {
        let names = spec.hooks.iter().map(|hook| hook.name.clone());
        names.collect::<Vec<_>>()
    };
    let disk = |spec: &Spec| spec.volume("build").unwrap().disk.map(|disk| disk >> 30);
    let lean = of("lean", None, None).unwrap();
    assert_eq!(
        (hooks(&lean), disk(&lean)),
        (vec!["fix".into(), "two".into()], Some(9))
    );
    // The total is known, so the build volume's size does not count. Sizes of the user's directories still do.
    let full = of("full", None, None).unwrap();
    assert_eq!((hooks(&full), disk(&full)), (vec!["fix".into()], None));
    assert!(full.volume("out").unwrap().disk.is_some());
    // RCCL is not built for gfx1103, and has no stub.
    assert!(of("full", None, Some("")).is_err());
    assert!(of("full", Some("wheels"), Some("")).is_ok());
    assert!(of("full", None, Some("gfx12500")).is_err());
}

const RELEASES: &str = r#"
schema = 1
image = "base-${kind}"
release-param = "version"
variant = "a"
params = { version = "1.9", kind = "", rev = "" }
step = [{ name = "build", run = "make ${rev}" }]
[variants.a]
[variants.b]
params = { rev = "x" }
[releases."1.9"]
params = { rev = "nine", kind = "old" }
[releases."1.10"]
disk = "3G"
params = { rev = "ten", kind = "new" }
"#;

#[test]
fn a_release_fills_in_what_is_empty() {
    for (variant, given, name, image, run) in [
        (None, "", "p", "base-old", "make nine"),
        (None, "version=1.10", "p-1.10", "base-new", "make ten"),
        (None, "rev=mine", "p", "base-old", "make mine"),
        (Some("b"), "version=1.10", "p-b-1.10", "base-new", "make x"),
        (None, "version=1.9 rev=", "p", "base-old", "make nine"),
    ] {
        let pairs = given.split(' ').filter_map(|one| one.split_once('='));
        let inputs = inputs!(variant: variant.map(str::to_owned),
            params: params(&pairs.collect::<Vec<_>>()));
        let spec = resolve(&profile(RELEASES), &inputs).unwrap();
        let found = (&*spec.name, &*spec.image, script(&spec.steps[0]));
        assert_eq!(found, (name, image, run), "{given:?}");
    }
    let unknown = inputs!(params: params(&[("version", "2")]));
    let error = resolve(&profile(RELEASES), &unknown).unwrap_err();
    assert_eq!(error.message(), "profile `p` has no release `2`");
    assert_eq!(error.help_text(), Some("choose 1.9 or 1.10"));
    let bad = inputs!(params: params(&[("kind", "A B")]));
    let error = resolve(&profile(RELEASES), &bad).unwrap_err();
    assert_has!(error.message(), "parameter `kind=A B`");
    assert_has!(error.message(), "bad image name `base-A B`");
    assert_eq!(error.kind(), crate::sys::error::Kind::Usage);
}

#[test]
fn a_saved_spec_tells_the_parameters_that_it_was_made_with() {
    let text = STEPS.to_owned() + CHOICES;
    let made = spec(&text, &inputs!(params: params(&[("flags", "-a -b")])));
    let saved: Spec = toml::from_str(&toml::to_string_pretty(&made).unwrap()).unwrap();
    assert_eq!(saved, made);
    let command = saved.up_command();
    assert!(command.contains(" --param 'flags=-a -b' "), "{command}");
    assert!(!spec(&text, &inputs()).up_command().contains("--param"));
}
