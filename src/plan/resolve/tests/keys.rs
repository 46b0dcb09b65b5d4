//! What is in a key, and what is not.

use proptest::prelude::*;

use super::*;
use crate::profile::tests::cases;
use crate::rocm::therock::ArtifactFingerprints;

// A change here rebuilds every env in the world: bump `key::FORMAT` and note it in the changelog.
#[test]
fn keys_stay_what_they_are() {
    let keys = keys(TEXT, &inputs());
    let keys: Vec<&str> = keys.iter().map(|key| &key[..12]).collect();
    let known = "4e46817415e5 acb1752b307f 2baeeae9559e 207fac1500fe 30d47c09fe9d 9db5e8bdc4a5";
    assert_eq!(keys.join(" "), known);
}

#[test]
fn targets_share_up_to_the_first_mention() {
    let with = |name: &str| keys(TEXT, &inputs!(targets: targets(&[name])));
    let (a, b) = (with("gfx1103"), with("gfx90a"));
    assert_eq!(shared(&a, &b), 2, "tools and files, but not configure");
    let own = keys(TEXT, &inputs());
    assert_eq!(a, own, "a target from the command line is the profile's");
    let silent = TEXT.replace("GFX = \"${target}\"", "GFX = \"x\"");
    let with = |name: &str| keys(&silent, &inputs!(targets: targets(&[name])));
    let (a, b) = (with("gfx1103"), with("gfx90a"));
    assert_eq!(a, b, "the runtime variables are in no key");
    let early = TEXT.replace(
        "CCACHE_DIR = \"/cache/ccache\"",
        "CCACHE_DIR = \"/cache/${target}\"",
    );
    let with = |name: &str| keys(&early, &inputs!(targets: targets(&[name])));
    assert_eq!(shared(&with("gfx1103"), &with("gfx90a")), 0);
}

#[test]
fn what_is_not_content_is_in_no_key() {
    let before = keys(TEXT, &inputs());
    for (old, new) in cases(
        r#"
        for tests => another description
        timeout = "2h" => timeout = "3h"
        timeout = "2h" => # no limit
        disk = "10G" => disk = "11G"
        memory-per-job = "2G" => memory-per-job = "3G"
        memory-max = "90%" => memory-max = "80%"
        tasks-max = 1000 => tasks-max = 2000
        ["TOKEN"] => ["OTHER"]
        HSA_OVERRIDE_GFX_VERSION => SOMETHING
        path = "~/src" => git = "https://example.org/x"
        max = "5G" => max = "6G"
        name = "configure" => name = "cmake"
        ["test"] => ["test", "test"]
        ["cmake"] => ["cmake"] # a comment
        "#,
    ) {
        let text = TEXT.replace(&old, new);
        assert_ne!(text, TEXT, "{old}");
        assert_eq!(keys(&text, &inputs()), before, "{new}");
    }
    for other in [
        inputs!(engine: Engine::Podman),
        inputs!(host_home: "/root".into()),
        inputs!(env_name: Some("other".to_owned())),
    ] {
        assert_eq!(keys(TEXT, &other), before, "{other:?}");
    }
}

#[test]
fn what_is_content_changes_the_key_from_there_on() {
    let before = keys(TEXT, &inputs());
    // How many steps before the change keep their keys, and the change.
    for (old, new) in cases(
        r#"
        0 "cmake"] => "cmake", "ninja"]
        0 CCACHE_DIR = "/cache/ccache" => CCACHE_DIR = "/other"
        0 target = "/cache/ccache" => target = "/cache/x"
        1 target = "/out" => target = "/result"
        1 to = "/opt/run.sh" => to = "/opt/go.sh"
        2 workdir = "/work/src" => workdir = "/work"
        2 network = false => # with a network
        2 GFX = => GPU =
        2 cmake -DP= => cmake -DQ=
        2 inputs = ["src"]; env => env
        2 prefix = "/opt/x" => prefix = "/opt/y"
        3 incremental = true => # from scratch
        3 -j${jobs} => -j ${jobs}
        3 -j${jobs} => -j8
        4 needed-by = ["test"] => # by no step
        5 export = [{ from = "${prefix}" => export = [{ from = "/opt"
        "#,
    ) {
        let (kept, old) = old.split_once(' ').unwrap();
        let kept: usize = kept.parse().unwrap();
        let text = TEXT.replace(old, new);
        assert_ne!(text, TEXT, "{old}");
        let after = keys(&text, &inputs());
        assert_eq!(shared(&before, &after), kept, "{new}");
        assert!(
            after[kept..].iter().all(|key| !before.contains(key)),
            "{new}"
        );
    }
    // A step with the GPU is in no key but its own.
    for more in ["user = \"root\"", "shell = [\"/bin/bash\", \"-c\"]"] {
        let text = TEXT.replace("run = \"ctest\"", &format!("run = \"ctest\"\n{more}"));
        let after = keys(&text, &inputs());
        let same: Vec<bool> = before.iter().zip(&after).map(|(a, b)| a == b).collect();
        assert_eq!(same, [true, true, true, true, false, true], "{more}");
    }
    let some = |name: &str, value: &str| params(&[(name, value)]);
    for (other, kept) in [
        (inputs!(image: BaseImage::Known("image-2".into())), 0),
        (inputs!(file_digests: some("files:run.sh", "d2")), 1),
        (inputs!(user: BuildUser::new(1001, 1000)), 1),
        (inputs!(user: BuildUser::new(1000, 1001)), 1),
        (
            inputs!(fingerprints: [("src".to_owned(), Some("f2".to_owned()))].into()),
            2,
        ),
        (inputs!(hooks: [("fix".to_owned(), fix("h2"))].into()), 2),
        (inputs!(params: some("prefix", "/usr")), 2),
    ] {
        assert_eq!(shared(&before, &keys(TEXT, &other)), kept, "{other:?}");
    }
}

#[test]
fn copies_of_root_are_the_same_for_every_build_user_and_no_others() {
    let text = TEXT.replace("name = \"files\"", "name = \"files\"\nuser = \"root\"");
    let before = keys(TEXT, &inputs());
    let after = keys(&text, &inputs());
    assert_eq!(shared(&before, &after), 1);
    let other = keys(&text, &inputs!(user: BuildUser::new(1001, 1000)));
    assert_eq!(shared(&after, &other), 2);
    let spec = spec(&text, &inputs());
    // Without the owner, the key would equal that of files of the build user.
    assert!(spec.step("files").unwrap().parts.contains_key("user"));
    assert!(!spec.step("tools").unwrap().parts.contains_key("user"));
}

// A script can see the devices. Keys of profiles without further devices stay the same.
#[test]
fn other_devices_are_in_the_keys_of_steps_with_the_gpu() {
    let without = spec(TEXT, &inputs());
    let text = TEXT.replace("[gpu]", "[gpu]\naccel = true\ndma-heap = false");
    let with = spec(&text, &inputs());
    assert!(with.gpu.accel && !with.gpu.dma_heap);
    assert_eq!(with.step("build"), without.step("build"));
    let key = |spec: &Spec| spec.step("test").unwrap().key.clone();
    assert_ne!(key(&with), key(&without));
    let saved = serde_json::to_string(&without).unwrap();
    assert!(!saved.contains("accel"), "{saved}");
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

const CONFIGURED: &str = r#"
schema = 1
image = "x"
volume = [
  { name = "src", kind = "source", path = "/src", target = "/src" },
  { name = "build", kind = "build", target = "/build" },
]
step = [
  { name = "tools", run = "a", inputs = ["src/requirements.txt"] },
  { name = "sources", run = "b", inputs = ["src"] },
  { name = "configure", run = "c", inputs = ["src"], fingerprints = "/build/therock" },
  { name = "compiler", run = "d", stages = ["compiler"] },
  { name = "math", run = "e" },
  { name = "wheels", run = "f", inputs = ["src"] },
]
"#;

/// Resolves [`CONFIGURED`] for a source, with TheRock's fingerprints of its two artifacts.
fn configured(source: &str, llvm: Option<&str>, blas: Option<&str>) -> Vec<StepKey> {
    let print = |print: Option<&str>| print.map(str::to_owned);
    let mut inputs = inputs!(fingerprints: [
            ("src".to_owned(), Some(source.to_owned())),
            ("src/requirements.txt".to_owned(), Some("r1".to_owned())),
        ]
        .into());
    let spec = resolve(&profile(CONFIGURED), &inputs).unwrap();
    assert_eq!(spec.open.as_deref(), Some("configure"));
    let step = spec.step("configure").unwrap();
    let fingerprints = step.fingerprints.as_ref().unwrap();
    assert_eq!(
        (fingerprints.volume.as_str(), fingerprints.path.to_str()),
        ("build", Some("therock"))
    );
    let prints = ArtifactFingerprints {
        artifacts: [
            ("amd-llvm".to_owned(), print(llvm)),
            ("blas".to_owned(), print(blas)),
        ]
        .into(),
        stages: [("compiler".to_owned(), ["amd-llvm".to_owned()].into())].into(),
    };
    inputs.prints.insert(step.key.clone(), prints);
    let spec = resolve(&profile(CONFIGURED), &inputs).unwrap();
    assert_eq!(spec.open, None);
    spec.steps.into_iter().map(|step| step.key).collect()
}

#[test]
fn therocks_fingerprints_stand_for_the_source_from_where_it_is_configured() {
    let before = configured("f1", Some("l1"), Some("b1"));
    let same = |other: &[StepKey]| {
        let pairs = before.iter().zip(other);
        pairs
            .map(|(a, b)| if a == b { '=' } else { '!' })
            .collect::<String>()
    };
    // tools, sources, configure, compiler, math, wheels
    for ((source, llvm, blas), expected) in [
        // Another commit, which affects nothing that is built.
        (("f2", Some("l1"), Some("b1")), "=!!==!"),
        (("f2", Some("l1"), Some("b2")), "=!!=!!"),
        (("f2", Some("l2"), Some("b1")), "=!!!!!"),
        (("f2", Some("l1"), None), "=!!=!!"),
        // TheRock cannot know about untracked files.
        (("f2?", Some("l1"), Some("b1")), "=!!!!!"),
    ] {
        let found = same(&configured(source, llvm, blas));
        assert_eq!(found, expected, "{source} {llvm:?} {blas:?}");
    }
    // An artifact without a fingerprint has the source's own in its key.
    let own = configured("f1", Some("l1"), None);
    assert_ne!(own[4], configured("f2", Some("l1"), None)[4]);
}
