//! Tests for what a checkout of TheRock says about targets, and for sets of targets that do not fit together.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::support::env::TestStore;
use crate::support::template::write_recipe;
use crate::support::transcript::measured;
use fs_err as fs;

const TABLE: &str = r#"
therock_add_amdgpu_target(gfx1103 "A laptop" FAMILY igpu-all gfx110X-all gfx110X-igpu
  EXCLUDE_TARGET_PROJECTS
    rccl # https://github.com/ROCm/TheRock/issues/150
)
therock_add_amdgpu_target(gfx1201 "AMD RX 9070 / XT" FAMILY dgpu-all gfx120X-all
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
    rocWMMA
)
"#;

const STEPS: &str = r#"
[[component]]
name = "rocWMMA"
[[component]]
name = "rccl"
[[component]]
name = "torch"
links = ["rccl"]
[[volume]]
name = "therock"
kind = "source"
path = "../checkout"
target = "/v/therock"
[[step]]
name = "same"
run = "echo same > $HOME/same"
[[step]]
name = "configure"
inputs = ["therock"]
env = { TARGETS = "${targets}" }
run = "echo $TARGETS > $HOME/targets"
"#;

fn checkout(store: &TestStore, table: &str) -> PathBuf {
    let directory = store.work().join("checkout");
    fs::create_dir_all(directory.join("cmake")).unwrap();
    fs::write(directory.join("cmake/therock_amdgpu_targets.cmake"), table).unwrap();
    directory
}

/// Returns the env that `plan` is about.
fn planned(store: &TestStore, arguments: &[&str]) -> String {
    let ran = store.rockenv(&[&["plan", "--json"], arguments].concat());
    ran.ok().json()["env"].as_str().unwrap().to_owned()
}

#[test]
fn a_product_stands_for_its_target() {
    let store = TestStore::new();
    for (what, env) in [
        ("780m", "gfx1103"),
        ("RX 7900 XTX", "gfx1100"),
        ("MI210", "gfx90a"),
    ] {
        assert_eq!(planned(&store, &[what]), env, "{what}");
    }
    let other = planned(&store, &["hip-smoke", "--target", "rx7600"]);
    assert_eq!(other, "hip-smoke-gfx1102");
    let shown = store.rockenv(&["target", "show", "740M"]).exits(0).text();
    assert!(shown.contains("target    gfx1103\n"), "{shown}");
    insta::assert_snapshot!(store.shows("plan strix\nplan gfx1130"), @"
    $ rockenv plan strix
    error: `strix` fits several targets: gfx1150 (Strix Point), gfx1151 (Strix Halo)
    help: name one of them, such as `gfx1150`
    exit code 2
    $ rockenv plan gfx1130
    error: no profile or target `gfx1130`
    help: did you mean `gfx1103`?
    exit code 7
    ");
}

#[test]
fn another_target_than_the_profile_is_named_after_is_refused() {
    let store = TestStore::new();
    insta::assert_snapshot!(store.shows("plan gfx1103 --target gfx1100"), @"
    error: profile `gfx1103` is for gfx1103, not for `--target gfx1100`
    help: rockenv up therock --target gfx1100
    exit code 2
    ");
    assert_eq!(planned(&store, &["gfx1103", "--target", "780m"]), "gfx1103");
    // A profile with any other name is for any target.
    let other = planned(&store, &["hip-smoke", "--target", "gfx1100"]);
    assert_eq!(other, "hip-smoke-gfx1100");
}

#[test]
fn a_checkout_is_compared_and_believed() {
    let store = TestStore::new();
    let directory = checkout(&store, TABLE);
    let path = directory.to_str().unwrap();
    insta::assert_snapshot!(store.shows("target check --source WORK/checkout"), @"
    gfx900: not there
    gfx90c: not there
    gfx906: not there
    gfx908: not there
    gfx90a: not there
    gfx942: not there
    gfx950: not there
    gfx1010: not there
    gfx1011: not there
    gfx1012: not there
    gfx1030: not there
    gfx1031: not there
    gfx1032: not there
    gfx1033: not there
    gfx1034: not there
    gfx1035: not there
    gfx1036: not there
    gfx1100: not there
    gfx1101: not there
    gfx1102: not there
    gfx1103: product `A laptop`, previously `AMD Radeon 780M Laptop iGPU`
    gfx1103: hipSPARSELt is now built
    gfx1103: rccl-tests is now built
    gfx1103: rocprofiler-compute is now built
    gfx1150: not there
    gfx1151: not there
    gfx1152: not there
    gfx1153: not there
    gfx1200: not there
    gfx1201: rocWMMA is now excluded (no issue named)
    gfx1250: not there
    2 targets, no topology: 31 differences (from TheRock ID)
    exit code 8
    ");
    let ran = store.rockenv(&["target", "check", "--source", path, "--json"]);
    let json = ran.exits(8).json();
    assert_eq!(json["targets"][0]["name"], "gfx1103");
    assert_eq!(json["drift"][0]["what"], "no-target");

    // Only the checkout's table leaves rocWMMA out for gfx1201, and it overrides rockenv's own.
    store.profile(STEPS);
    let env = store.env();
    let both = "up ENV --target gfx1201\nup ENV --target gfx90a";
    insta::assert_snapshot!(store.shows(both), @r#"
    $ rockenv up ENV --target gfx1201
    warning: source `therock` differs from the built-in table of TheRock; using the checkout's: gfx900: not there, and 30 more; `rockenv target check --source WORK/profiles/../checkout` shows all
    error: profile `ENV` is invalid
      × `rocWMMA` would be built for no target: TheRock excludes it for gfx1201
       ╭─[WORK/profiles/ENV.toml:5:8]
     4 │ [[component]]
     5 │ name = "rocWMMA"
       ·        ────┬────
       ·            ╰── too few targets
     6 │ [[component]]
       ╰────
      help: leave it out (take it out of `links`, or `remove = true`, and build without it), let a stub stand in
            (`stub = true`), or build it for a throwaway target too (`extra-targets = ["gfx1250"]`)
    exit code 3
    $ rockenv up ENV --target gfx90a
    error: source `therock` has no target `gfx90a`: this version of TheRock cannot build for it
    help: rockenv target check --source WORK/profiles/../checkout
    exit code 3
    "#);

    fs::write(
        directory.join("cmake/therock_amdgpu_targets.cmake"),
        "therock_add_amdgpu_target(\n  gfx1103 \"A\" NEW b)\n",
    )
    .unwrap();
    insta::assert_snapshot!(store.shown(&store.rockenv(&["target", "check", "--source", path])), @r#"
    error: cmake/therock_amdgpu_targets.cmake:2:15: unknown keyword
      caused by:   gfx1103 "A" NEW b)
                      ^^^
    exit code 3
    "#);
    store
        .rockenv(&["plan", env, "--target", "gfx1201"])
        .ok()
        .says(&["using the built-in one"]);
}

#[test]
fn drift_is_told_once_however_often_the_checkout_is_looked_at() {
    let store = TestStore::new();
    let directory = checkout(&store, TABLE.replace("    rocWMMA\n", "").as_str());
    fs::set_permissions(directory, PermissionsExt::from_mode(0o777)).unwrap();
    // A step that fetches into the source changes the keys of later steps.
    store.profile(&STEPS.replace("echo same > $HOME/same", "date +%N > /v/therock/fetched"));
    let ran = store.rockenv(&["up", store.env(), "--target", "gfx1201"]);
    let told = ran.ok().err;
    let count = told.matches("differs from the built-in table of TheRock");
    assert_eq!(count.count(), 1, "{told}");
}

#[test]
fn several_targets_have_to_fit_and_share_an_env() {
    let store = TestStore::new();
    checkout(&store, TABLE.replace("    rocWMMA\n", "").as_str());
    let env = store.env();
    let both = ["--target", "gfx1201", "--target", "gfx1103"];
    let with = |verb: &[&str]| {
        let mut arguments = verb.to_vec();
        arguments.extend(both);
        store.rockenv(&arguments)
    };
    store.profile(STEPS);
    for verb in [&["profile", "check", env][..], &["plan", env], &["up", env]] {
        // `up` has warned before that the tables differ.
        let said = store.shown(&with(verb).exits(3));
        let said = said.split_once("error: ").unwrap().1;
        insta::allow_duplicates! {
            insta::assert_snapshot!(said, @r#"
            profile `ENV` is invalid
              × `rccl` is not built for gfx1103, and `torch`, which links it, is
               ╭─[WORK/profiles/ENV.toml:7:8]
             6 │ [[component]]
             7 │ name = "rccl"
               ·        ───┬──
               ·           ╰── too few targets
             8 │ [[component]]
               ╰────
              help: https://github.com/ROCm/TheRock/issues/150
                    leave it out (take it out of `links`, or `remove = true`, and build without it), let a stub stand in
                    (`stub = true`), or build it for a throwaway target too (`extra-targets = ["gfx1250"]`)
            exit code 3
            "#);
        }
    }
    for choice in [
        STEPS.replace("links = [\"rccl\"]", ""),
        STEPS.replace("name = \"rccl\"", "name = \"rccl\"\nstub = true"),
        STEPS.replace(
            "name = \"rccl\"",
            "name = \"rccl\"\nextra-targets = [\"gfx1250\"]",
        ),
    ] {
        store.profile(&choice);
        with(&["profile", "check", env]).ok();
    }
    // Both targets share an env, which is named after both in the order of the table.
    with(&["up", env]).ok();
    let name = format!("{env}-gfx1103-gfx1201");
    store
        .sh_in(&name, "cat $HOME/targets")
        .ok()
        .prints("gfx1103;gfx1201");
    with(&["up", env]).ok().says(&["nothing to do"]);
    let plan = store
        .rockenv(&["plan", env, "--target", "gfx1201"])
        .ok()
        .text();
    assert_eq!(
        plan.matches("have").count(),
        1,
        "the step without a target is shared\n{plan}"
    );
    store.rockenv(&["rm", "--yes", &name]).ok();
}

#[test]
fn therock_with_rccl_needs_a_target_that_can_have_it() {
    let store = TestStore::new();
    let with = ["plan", "gfx1103", "--variant", "full-torch"];
    store.rockenv(&with).ok();
    let alone = [&with[..], &["--param", "test-targets="]].concat();
    insta::assert_snapshot!(store.shown(&store.rockenv(&alone)), @r#"
    error: profile `gfx1103` is invalid
      × `rccl` is not built for gfx1103, and `torch`, which links it, is
         ╭─[profiles/therock.toml (built in):183:8]
     182 │ [[component]]
     183 │ name = "rccl"
         ·        ───┬──
         ·           ╰── too few targets
     184 │ extra-targets = ["${test-targets}"]
         ╰────
      help: https://github.com/ROCm/TheRock/issues/150
            build variant `lean`, which does not need it, leave it out (take it out of `links`, or `remove =
            true`, and build without it), let a stub stand in (`stub = true`), or build it for a throwaway
            target too (`extra-targets = ["gfx1250"]`)
    exit code 3
    "#);
    // A target that RCCL supports needs no other target.
    let other: Vec<&str> = alone
        .iter()
        .map(|word| if *word == "gfx1103" { "gfx1201" } else { word })
        .collect();
    store.rockenv(&other).ok();
}

/// A target and a family that are not compiled in, as a future TheRock may declare them.
const NEWER: &str = r#"
therock_add_amdgpu_target(gfx1103 "A laptop" FAMILY igpu-all gfx110X-all gfx110X-igpu)
therock_add_amdgpu_target(gfx1310 "A card to come" FAMILY dgpu-all gfx131X-all)
"#;

#[test]
fn a_target_that_only_a_newer_checkout_has_is_learned() {
    let store = TestStore::new();
    let directory = checkout(&store, NEWER);
    let path = directory.to_str().unwrap();
    let env = store.env();
    let steps = format!(
        "{STEPS}[[step]]\nname = 'other'\nwhen = {{ family = ['gfx131X-all'] }}\nrun = 'echo other > $HOME/other'\n"
    );
    store.profile(STEPS);
    let up = || store.rockenv(&["up", env, "--target", "gfx1310"]);
    let said = store.shows(
        "up ENV --target gfx1310
        target learn --source WORK/checkout
        target show gfx1310",
    );
    let is_there = |line: &&str| !line.ends_with(": not there");
    let said = said.lines().filter(is_there).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(said, @"
    $ rockenv up ENV --target gfx1310
    error: unknown target `gfx1310`
    help: did you mean `gfx1010`? `rockenv target ls` shows them all, `rockenv target learn --source DIR` imports those of a newer TheRock
    exit code 7
    $ rockenv target learn --source WORK/checkout
    gfx1103: product `A laptop`, previously `AMD Radeon 780M Laptop iGPU`
    gfx1103: hipSPARSELt is now built
    gfx1103: rccl is now built
    gfx1103: rccl-tests is now built
    gfx1103: rocprofiler-compute is now built
    gfx1310: new, A card to come
    the store at `STORE` now uses the 2 targets of `WORK/checkout`; to undo: rockenv target forget
    $ rockenv target show gfx1310
    target    gfx1310
    product   A card to come
    kind      graphics card
    families  gfx1310, dgpu-all, gfx131X-all
    override  13.1.0
    support   not documented upstream
    variant   lean: RCCL is for several cards; with these: `--variant full-torch`
    ");
    // A family that was unknown before can be named as well.
    store.profile(&steps);
    up().ok();
    let env = &format!("{env}-gfx1310");
    let made = "cat $HOME/targets $HOME/other";
    let made = store.sh_in(env, made);
    made.ok().prints("gfx1310\nother");
    let check = store.rockenv(&["target", "check", "--source", path]);
    let check = check.exits(8).says(&[&format!("(from `{path}`)")]);
    assert!(
        check.text().contains("gfx1201: not there\n"),
        "{}",
        check.text()
    );

    // With a damaged target table, the env is still listed, and `target forget` still works.
    fs::write(store.home().join("targets.json"), "{").unwrap();
    let said = measured(store.shows("ls\ntarget forget\ntarget forget"));
    insta::assert_snapshot!(said, @"
    $ rockenv ls
    env  state  profile  targets  image  snapshots  used
    ENV-gfx1310  ready  ENV  gfx1310  base  3  AGE
    warning: cannot read `STORE/targets.json`: `STORE/targets.json` is damaged: EOF while parsing an object at line 1 column 1; using the built-in targets only; write the file again with `rockenv target learn --source DIR`
    $ rockenv target forget
    warning: cannot read `STORE/targets.json`: `STORE/targets.json` is damaged: EOF while parsing an object at line 1 column 1; using the built-in targets only; write the file again with `rockenv target learn --source DIR`
    now uses the built-in targets of TheRock ID
    $ rockenv target forget
    no learned targets to forget
    ");
    let list = store.rockenv(&["ls"]).ok().text();
    assert!(list.contains(env), "{list}");
    store.rockenv(&["status", env]).ok();
    store.rockenv(&["fsck"]).ok();
    store.rockenv(&["rm", env, "--yes"]).ok();
    store
        .rockenv(&["target", "show", "gfx1310"])
        .exits(7)
        .says(&["unknown target"]);
}

/// The package database belongs to the steps, so it may hold anything.
#[test]
fn a_package_database_that_is_none_is_no_reason_to_fail_or_to_wait() {
    let store = TestStore::new();
    let target = ["--target", "gfx1201"];
    let status =
        "Package: librocblas4\\nStatus: install ok installed\\nX-Rocm-Gpu-Architecture: gfx803\\n";
    for (make, is_noted) in [
        (format!("printf '{status}' > status"), true),
        ("mkfifo status".to_owned(), false),
        ("mkdir status".to_owned(), false),
        ("ln -s /proc/kmsg status".to_owned(), false),
        ("ln -s status status".to_owned(), false),
        ("truncate -s 10G status".to_owned(), false),
        ("head -c 1000000 /dev/urandom > status".to_owned(), false),
        (
            format!("printf '{status}' > status; truncate -s 200M status; chmod 0 status"),
            true,
        ),
    ] {
        // A readable database is also found below the last step's layer.
        let two = match is_noted {
            true => "[[step]]\nname = 'two'\nrun = 'true'\n",
            false => "",
        };
        store.profile(&format!(
            "[[step]]\nname = 'one'\nuser = 'root'\n\
             run = '''mkdir -p /var/lib/dpkg; cd /var/lib/dpkg; rm -rf status; {make}'''\n{two}"
        ));
        for verb in ["up", "plan"] {
            let text = store
                .rockenv(&[&[verb, store.env()], &target[..]].concat())
                .ok();
            let text = format!("{}{}", text.err, text.text());
            let noted = text.contains("libraries without code for gfx1201: librocblas4");
            assert_eq!(noted, is_noted, "{verb}: {make}: {text}");
        }
    }
}

/// Files are known by their names: `up` opens and runs none of them.
#[test]
fn libraries_whose_kernels_are_for_other_targets_are_named() {
    let store = TestStore::new();
    let env = store.env();
    let library = "/opt/rocm-7.0.0/lib/rocblas";
    let noted = format!(
        "libraries without code for gfx1103: {library}; their code for gfx1100 runs in a build with \
         `--target gfx1100` and HSA_OVERRIDE_GFX_VERSION=11.0.0"
    );
    let make = format!(
        "mkdir -p {library}/library; cd {library}/library; mkfifo Kernels.so-000-gfx1100.hsaco; \
         ln -s /proc/kmsg TensileLibrary_lazy_gfx90a.dat"
    );
    let step = |name: &str, run: &str| {
        format!("[[step]]\nname = '{name}'\nuser = 'root'\nrun = '''{run}'''\n")
    };
    let both = |target: &str| {
        ["up", "plan"].map(|verb| {
            let ran = store.rockenv(&[verb, env, "--name", env, "--target", target]);
            let ran = ran.ok();
            format!("{}{}", ran.err, ran.text())
        })
    };
    store.profile(&step("one", &make));
    for text in both("gfx1103") {
        assert!(text.contains(&noted), "{text}");
    }
    for target in ["gfx1100", "gfx90a"] {
        for text in both(target) {
            assert!(!text.contains("without code"), "{target}: {text}");
        }
    }
    for (last, is_noted) in [
        (format!("rm -r {library}"), false),
        // The new directory hides the old one's content.
        (format!("rm -r {library}; mkdir {library}"), false),
        (
            "rm -r /opt/rocm-7.0.0; ln -s / /opt/rocm-7.0.0".to_owned(),
            false,
        ),
        (format!("rm {library}/library/K*"), true),
    ] {
        store.profile(&(step("one", &make) + &step("two", &last)));
        for text in both("gfx1103") {
            let found = text.contains("without code for gfx1103");
            assert_eq!(found, is_noted, "{last}: {text}");
        }
    }
}

#[test]
fn an_image_is_looked_into_before_any_step_has_run() {
    let store = TestStore::new();
    let tree = store.work().join("tree");
    let library = tree.join("opt/rocm-7.0.0/lib/hipblaslt/library");
    fs::create_dir_all(&library).unwrap();
    fs::write(library.join("extop_gfx942.co"), "").unwrap();
    fs::create_dir(tree.join("etc")).unwrap();
    fs::write(tree.join("etc/os-release"), "ID=small\n").unwrap();
    write_recipe(&store.work().join("images/small.toml"), &tree);
    let profile = store.work().join(format!("profiles/{}.toml", store.env()));
    let steps = "[[step]]\nname = 'one'\nrun = 'true'\n";
    fs::write(profile, format!("schema = 1\nimage = 'small'\n{steps}")).unwrap();
    store.rockenv(&["image", "build", "small"]).ok();
    let plan = |target: &str| {
        let words = ["plan", store.env(), "--target", target];
        store.rockenv(&words).ok()
    };
    plan("gfx90a").says(&["libraries without code for gfx90a: /opt/rocm-7.0.0/lib/hipblaslt"]);
    let ran = plan("gfx942");
    assert!(!ran.err.contains("without code"), "{}", ran.err);
}
