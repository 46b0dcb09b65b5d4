//! How files extend each other.

use super::*;

const BASE: &str = r#"image = "debian"
targets = ["gfx1100"]
hooks = ["one"]
params = { suite = "trixie", arch = "x" }
env = { A = "1", B = "1" }
step = [
  { name = "tools", packages = ["cmake"] },
  { name = "build", timeout = "1h", inputs = ["src"], env = { X = "1", Y = "1" }, run = "make" },
  { name = "test", run = "make test" },
]
[resources]
disk = "10G"
memory-max = "90%"
[[volume]]
name = "src"
kind = "source"
git = "https://example.org/x"
rev = "main"
target = "/src"
"#;

/// Loads `child`, which can extend `base`.
fn extended(base: &str, child: &str) -> Profile {
    let (_dir, dirs) = dir(&[("base.toml", base), ("child.toml", child)]);
    load(&dirs, "child").unwrap()
}

#[test]
fn extending_merges_by_key_and_name() {
    let child = r#"
extends = "base"
targets = ["gfx1103"]
params = { suite = "forky", archs = "y" }
resources.disk = "20G"
env.B = "2"
volume = [
  { name = "src", path = "/srv/x" },
  { name = "out", kind = "output", target = "/out" },
]
step = [
  { name = "patch", after = "tools", run = "patch" },
  { name = "build", env = { Y = "2" }, run = "ninja" },
  { name = "test", remove = true },
  { name = "export", export = [{ from = "/x", to = "out" }] },
]
"#;
    let profile = extended(BASE, child);
    assert_eq!(profile.image.as_str(), "debian");
    assert_eq!(format!("{:?}", profile.targets), "[gfx1103]");
    let hooks: Vec<&str> = profile.hooks.iter().map(|hook| hook.as_str()).collect();
    assert_eq!(hooks, ["one"]);
    assert_eq!(profile.params["suite"], "forky");
    assert_eq!(profile.params["arch"], "x");
    // The other parameters may be for other profiles that extend the base.
    let mut advice = advice(&profile);
    advice.retain(|advice| advice.starts_with("parameter"));
    assert_eq!(advice.len(), 1, "{advice:#?}");
    assert_has!(advice[0], "parameter `archs` is not used");
    assert_eq!(profile.resources.disk, Some(20 << 30));
    assert_eq!(profile.resources.memory_max, Some(Amount::Percent(90)));
    let env = [&profile.env["A"], &profile.env["B"]].map(|value| value.as_str());
    assert_eq!(env, ["1", "2"]);
    assert_eq!(profile.volumes[0].target, "/src");
    assert!(
        matches!(&profile.volumes[0].source, VolumeSource::Path(path) if path.as_str() == "/srv/x")
    );
    let names = profile.steps.iter().map(|step| step.name.as_str());
    let expected = ["tools", "patch", "build", "export"];
    assert_eq!(names.collect::<Vec<_>>(), expected);
    let build = &profile.steps[2];
    assert!(matches!(&build.action, Action::Run { script, .. } if script.as_str() == "ninja"));
    assert_eq!(build.timeout, Some(Duration::from_secs(3600)));
    assert_eq!(build.inputs, ["src"]);
    let env = [&build.env["X"], &build.env["Y"]].map(|value| value.as_str());
    assert_eq!(env, ["1", "2"]);
    assert_eq!(profile.files().count(), 2);
}

#[test]
fn another_repository_keeps_the_other_fields() {
    let base = BASE.replace("rev = \"main\"", "rev = \"v1\"\ndepth = 1");
    let child =
        "extends = \"base\"\n[[volume]]\nname = \"src\"\ngit = \"https://example.org/fork\"\n";
    let profile = extended(&base, child);
    let VolumeSource::Git {
        url, rev, depth, ..
    } = &profile.volumes[0].source
    else {
        panic!("{:?}", profile.volumes[0]);
    };
    let rev = rev.as_ref().map(|rev| rev.as_str());
    assert_eq!(
        (url.as_str(), rev, *depth),
        ("https://example.org/fork", Some("v1"), Some(1))
    );
}

#[test]
fn another_action_replaces_the_inherited_one() {
    let child = "extends = \"base\"\n[[step]]\nname = \"build\"\npackages = [\"x\"]\n";
    let profile = extended(BASE, child);
    assert!(matches!(profile.steps[1].action, Action::Packages(_)));
    assert_eq!(profile.steps[1].user, User::Root);
}

#[test]
fn what_belongs_to_a_replaced_kind_goes_with_it() {
    let base = "image = \"debian\"\n\
        [[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/src\"\npath = \"/srv/x\"\n\
        [[volume]]\nname = \"git\"\nkind = \"source\"\ntarget = \"/git\"\ngit = \"https://example.org/x\"\nrev = \"a\"\n\
        [[volume]]\nname = \"cache\"\nkind = \"cache\"\ntarget = \"/cache\"\nmax = \"1G\"\nlocked = true\n\
        [[volume]]\nname = \"out\"\nkind = \"output\"\ntarget = \"/out\"\npath = \"/srv/out\"\ndisk = \"1G\"\n\
        [[step]]\nname = \"one\"\nrun = \"true\"\nworkdir = \"/w\"\nshell = [\"/bin/sh\", \"-c\"]\nuser = \"builder\"\n\
        [[step]]\nname = \"two\"\nrun = \"true\"\nworkdir = \"/w\"\n\
        [[step]]\nname = \"three\"\nrun = \"true\"\nenv = { A = \"1\" }\nuser = \"root\"\n";
    let child = "extends = \"base\"\n\
        volume = [{ name = \"src\", kind = \"build\" }, { name = \"git\", kind = \"output\" }, { name = \"cache\", kind = \"build\" }, \
        { name = \"out\", kind = \"host\" }]\n\
        step = [{ name = \"one\", packages = [\"x\"] }, { name = \"two\", run = \"false\" }, \
        { name = \"three\", copy = [{ from = \"x\", to = \"/x\" }] }]\n";
    let profile = extended(base, child);
    assert_eq!(profile.volumes[3].disk, None);
    for volume in &profile.volumes[..3] {
        let is_in_store = matches!(volume.source, VolumeSource::Store);
        assert!(is_in_store, "{}", volume.name);
        assert_eq!((volume.max, volume.locked), (None, false));
    }
    assert_eq!(profile.steps[0].workdir, None);
    assert_eq!(profile.steps[1].workdir.as_ref().unwrap().as_str(), "/w");
    assert!(profile.steps[2].env.is_empty());
    assert_eq!(profile.steps[2].user, User::Root);
}

#[test]
fn the_extending_file_decides_which_steps_get_the_gpu() {
    let step = |gpu: &str| format!("[[step]]\nname = \"one\"\nrun = \"true\"\n{gpu}");
    let (needed, without) = ("[gpu]\nneeded-by = [\"one\"]\n", "gpu = false\n");
    let head = "image = \"debian\"\n";
    for (base, child, expected) in [
        (format!("{needed}{}", step("")), step(without), false),
        (step(without), needed.to_owned(), true),
        (step("gpu = true\n"), step(without), false),
    ] {
        let base = format!("{head}{base}");
        let child = format!("extends = \"base\"\n{child}");
        let profile = extended(&base, &child);
        assert_eq!(profile.steps[0].gpu, expected, "{base}{child}");
    }
    let both = format!("schema = 1\n{head}{needed}{}", step(without));
    let message = message(&both);
    let wanted = "step `one` is in `needed-by`, but has `gpu = false` in /p/p.toml:8";
    assert_has!(message, wanted);
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
        ╭─[/profiles/sub/base.toml:13:8]
     12 │ [resources]
     13 │ disk = "10 gigs"
        ·        ────┬────
        ·            ╰── here
     14 │ memory-max = "90%"
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
        assert_has!(message(name), "× `extends` forms a cycle");
    }
    assert_has!(message("me"), "`me` extends itself");
    assert_has!(message("path"), "forms a cycle");
    assert_has!(message("abs"), "is not relative to this file");
    assert_has!(message("up"), "bad profile name `../../x`");
    assert_has!(message("gone"), "did you mean `minimal`");
    let path = dirs[0].path.join("sub/down.toml");
    assert_eq!(load(&dirs, path.to_str().unwrap()).unwrap().name, "down");

    let file = |at| (format!("n{at}.toml"), format!("extends = \"n{}\"", at + 1));
    let files: Vec<(String, String)> = (0..20).map(file).collect();
    let files = files
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()));
    let (_dir, dirs) = self::dir(&files.collect::<Vec<_>>());
    let error = load(&dirs, "n0").unwrap_err();
    assert_has!(error.message(), "more than 16 profiles");
}

#[test]
fn a_profile_can_extend_the_one_it_shadows() {
    let (_low, low) = dir(&[("x.toml", "image = \"debian\"\ndescription = \"low\"")]);
    let (_high, high) = dir(&[("x.toml", "extends = \"x\"\nimage = \"arch\"")]);
    let dirs = [high, low].concat();
    let profile = load(&dirs, "x").unwrap();
    let found = (profile.image.as_str(), profile.description.as_str());
    assert_eq!(found, ("arch", "low"));
    let listed = list(&dirs).unwrap().into_iter();
    assert_eq!(listed.filter(|listed| listed.name == "x").count(), 1);
}

#[test]
fn a_component_is_replaced_or_removed_as_a_whole() {
    let base = format!(
        "{BASE}\n[[component]]\nname = \"rccl\"\nextra-targets = [\"gfx1250\"]\n[[component]]\nname = \"torch\"\nlinks = [\"rccl\"]\n"
    );
    let child = "extends = \"base\"\n[[component]]\nname = \"rccl\"\nremove = true\n[[component]]\nname = \"torch\"\nproject = \"pytorch\"\n";
    let (_dir, dirs) = dir(&[("base.toml", &base), ("child.toml", child)]);
    let base = load(&dirs, "base").unwrap();
    assert_eq!(base.components[0].extra[0].as_str(), "gfx1250");
    assert_eq!(base.components[0].project, "rccl");
    let child = load(&dirs, "child").unwrap();
    assert_eq!(child.components.len(), 1);
    assert_eq!(child.components[0].project, "pytorch");
    assert!(child.components[0].links.is_empty());
}

#[test]
fn what_is_removed_leaves_the_inherited_lists() {
    let base = format!(
        "{BASE}\n[gpu]\nneeded-by = [\"test\", \"build\"]\n\
         [[volume]]\nname = \"cache\"\nkind = \"cache\"\ntarget = \"/cache\"\ndownloads = \"src\"\n\
         needed-by = [\"build\", \"test\"]\n\
         [[component]]\nname = \"rccl\"\n[[component]]\nname = \"torch\"\nlinks = [\"rccl\"]\n"
    );
    let child = "extends = \"base\"\n[[step]]\nname = \"test\"\nremove = true\n\
        [[component]]\nname = \"rccl\"\nremove = true\n";
    let own = format!(
        "{child}[[component]]\nname = \"vision\"\nlinks = [\"rccl\"]\n\
         [[volume]]\nname = \"cache\"\nneeded-by = [\"test\"]\n"
    );
    let (_dir, dirs) = dir(&[
        ("base.toml", &base),
        ("child.toml", child),
        ("own.toml", &own),
    ]);
    let profile = load(&dirs, "child").unwrap();
    assert!(profile.steps.iter().any(|step| step.gpu));
    let downloads = profile.volumes[1].downloads.as_ref().unwrap();
    assert_eq!(downloads.needed_by, Some(vec!["build".to_owned()]));
    assert_eq!(profile.components.len(), 1);
    assert!(profile.components[0].links.is_empty());
    let error = load(&dirs, "own").unwrap_err();
    assert_has!(error.message(), "there is no component `rccl`");
    assert_has!(error.message(), "there is no step `test`");
}

#[test]
fn what_built_in_profiles_list_can_be_removed() {
    let child = "extends = \"therock\"\n\
        step = [{ name = \"torch-test\", remove = true }, { name = \"configure-generic\", remove = true }]\n\
        component = [{ name = \"rccl\", remove = true }]\n";
    extended("", child);
}
