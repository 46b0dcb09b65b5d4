//! From profiles to specs; other files test keys, choices, hooks and refusals.

/// Makes the tests' inputs, with some values replaced.
macro_rules! inputs {
    ($($field:ident $(: $value:expr)?),+) => { Inputs { $($field $(: $value)?,)+ ..inputs() } };
}

mod choices;
mod hooks;
mod keys;
mod refused;

use super::*;
use crate::profile::hook::Applies;
use crate::profile::{Profile, from_text};
use crate::rocm::target::parsed as targets;

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
        image: BaseImage::Known("image-1".into()),
        image_env: BTreeMap::new(),
        file_digests: [("files:run.sh".to_owned(), "d1".to_owned())].into(),
        fingerprints: [("src".to_owned(), Some("f1".to_owned()))].into(),
        prints: BTreeMap::new(),
        checkout: None,
        declared: Vec::new(),
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

const TEXT: &str = r#"
schema = 1
description = "for tests"
image = "debian"
targets = ["gfx1103"]
hooks = ["fix"]
env-from-host = ["TOKEN"]
params = { prefix = "/opt/x" }
volume = [
  { name = "src", kind = "source", path = "~/src", target = "/work/src" },
  { name = "work", kind = "build", target = "/work" },
  { name = "ccache", kind = "cache", max = "5G", target = "/cache/ccache" },
  { name = "out", kind = "output", target = "/out" },
]
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
    let steps = spec(text, inputs).steps.into_iter();
    steps.map(|step| step.key).collect()
}

/// Returns the script of a step that runs one.
fn script(step: &Step) -> &str {
    match &step.action {
        Action::Run { script, .. } => script,
        other => panic!("{other:?}"),
    }
}

fn params(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
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
    let mounts = spec.volumes.iter().map(|volume| volume.target.as_str());
    let parents_first = ["/cache/ccache", "/out", "/work", "/work/src"];
    assert_eq!(mounts.collect::<Vec<_>>(), parents_first);
    let source = VolumeSource::Path("/home/me/src".into());
    assert_eq!(spec.volume("src").unwrap().source, source);
    assert_eq!(spec.volume("ccache").unwrap().max, Some(5 << 30));
    let tools = spec.step("tools").unwrap();
    assert_eq!((tools.user, tools.workdir.as_str()), (User::Root, "/"));
    assert_eq!(tools.volumes, ["ccache"], "packages see caches only");
    let configure = spec.step("configure").unwrap();
    assert_eq!(configure.env["GFX"], "gfx1103");
    assert_eq!(configure.env["CCACHE_DIR"], "/cache/ccache");
    assert_eq!(configure.volumes.len(), 4);
    let Action::Run {
        script: of_configure,
        shell,
    } = &configure.action
    else {
        panic!("{configure:?}");
    };
    assert_eq!(shell, &["/bin/sh", "-eu", "-c"]);
    assert_eq!(
        finish(of_configure, &facts(1, 1)),
        "cmake -DP=/opt/x ${HOME}"
    );
    let build = spec.step("build").unwrap();
    assert_eq!(build.workdir, "/home/builder");
    assert_eq!(build.timeout, Some(Duration::from_secs(7200)));
    assert_eq!(script(build), "ninja -j${jobs} -m ${memory}");
    let finished = finish(script(build), &facts(16, 1 << 30));
    assert_eq!(finished, "ninja -j16 -m 1073741824");
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
