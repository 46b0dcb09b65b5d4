//! The shipped profiles for TheRock, unchanged, on a superproject of its shape: `tests/therock/`. Overrides are those
//! of a user: a profile of the same name that extends the built-in one, and the configuration file.

mod again;
mod locked;
mod mirrors;
mod scripts;
mod upstream;

use std::collections::BTreeMap;
use std::process::Command;

use crate::support::env::{TestStore, is_service};
use crate::support::loopfs::{Kind, LoopFs, run};
use crate::support::run::Ran;
use again::{
    a_commit_builds_what_it_changes, a_touched_source_builds_what_uses_it,
    other_limits_reach_what_is_not_built,
};
use fs_err as fs;
use locked::{
    fetched_once, tarballs_are_locked_before_anything_is_built, what_was_built_is_locked,
    wheels_of_an_index_are_locked,
};
use mirrors::Mirrors;
use upstream::Upstream;

/// A store and a user who builds from that superproject, for two targets.
struct Case {
    // Dropped before the disk.
    store: TestStore,
    upstream: Upstream,
    _disk: Option<LoopFs>,
}

impl Case {
    fn new(freezes: bool) -> Self {
        // A service does not see the test's mounts, and its store does not freeze build trees.
        let disk = (freezes && !is_service()).then(|| LoopFs::new(Kind::Btrfs));
        let store = match &disk {
            Some(disk) => TestStore::on(disk),
            None => TestStore::with_builder(),
        };
        let work = store.work();
        let wheels = work.join("out");
        let upstream = Upstream::start(&work.join("upstream"), wheels.clone());
        crate::support::template::lay_out_builder(work);
        fs::create_dir(work.join("ci")).unwrap();
        let profile = format!(
            "schema = 1\nextends = \"therock\"\nimage = \"builder\"\n\
             [params]\ntherock-url = \"git://127.0.0.1:{}/TheRock\"\ntherock-rev = \"{}\"\n\
             [resources]\ndisk = \"1G\"\n\
             [from]\ncompiler.disk = \"1G\"\nrocm.disk = \"1G\"\nwheels.disk = \"1G\"\n\
             [[volume]]\nname = \"ci\"\nkind = \"host\"\npath = \"{}\"\naccess = \"rw\"\ntarget = \"/therock/ci\"\n\
             [[step]]\nname = \"math-libs\"\nmemory = \"1G\"\n\
             [[step]]\nname = \"prebuilt\"\nenv = {{ THEROCK_LOCAL_STAGING_DIR = \"/therock/ci\" }}\n",
            upstream.git.port(),
            upstream.commit,
            work.join("ci").display()
        );
        // A user's profile may shadow a built-in one, and a profile in the current directory may not.
        let profiles = store.user_config().join("profiles");
        fs::create_dir_all(&profiles).unwrap();
        fs::write(profiles.join("therock.toml"), profile).unwrap();
        let machine = format!(
            "targets = [\"gfx1103\", \"gfx1201\"]\nninja = \"{}\"\n",
            crate::support::wheels::ninja().display()
        );
        store.configure(&machine);
        run(Command::new("chown").arg("1234:1234").arg(work.join("ci")));
        Self {
            store,
            upstream,
            _disk: disk,
        }
    }

    fn env(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.store.env())
    }

    #[track_caller]
    fn up(&self, suffix: &str, arguments: &[&str]) -> Ran {
        let env = self.env(suffix);
        let words = [&["up", "--name", &env], arguments].concat();
        self.store.rockenv(&words).ok()
    }

    fn sh(&self, suffix: &str, script: &str) -> Ran {
        let env = self.env(suffix);
        self.store
            .rockenv(&["exec", &env, "--", "bash", "-euc", script])
    }

    fn plan(&self, arguments: &[&str]) -> serde_json::Value {
        let words = [&["plan", "--json"], arguments].concat();
        self.store.rockenv(&words).ok().json()
    }

    /// Returns the steps' keys by name.
    fn keys(&self, arguments: &[&str]) -> BTreeMap<String, String> {
        self.store.planned_keys(arguments)
    }

    /// Returns each step's name with its planned action.
    fn planned(&self, arguments: &[&str]) -> Vec<(String, String)> {
        let plan = self.plan(arguments);
        let steps = plan["plan"]["steps"].as_array().unwrap();
        let word = |step: &serde_json::Value, key: &str| step[key].as_str().unwrap().to_owned();
        steps
            .iter()
            .map(|step| (word(step, "name"), word(step, "action")))
            .collect()
    }
}

/// Prints checksums of the fingerprints that TheRock's configure wrote for target-independent parts.
const PRINTS: &str = "cd /therock/build/artifacts; ls *_generic.fprint | grep -v -e ^blas -e ^miopen | xargs sha256sum";

#[test]
fn two_targets_from_source_to_wheels() {
    let case = Case::new(true);
    tarballs_are_locked_before_anything_is_built(&case);
    let mirrors = Mirrors::fill(&case);
    let done = case.up("a", &["gfx1103"]);
    mirrors.are_needed_no_more(&case);
    done.says(&["2 steps skipped because this machine has no GPU: rocm-test, torch-test"]);

    // Code for the env's target, or for all targets of the machine where a part is built once.
    let targets = "for lib in rccl rocprofiler-sdk rocblas; do
          grep -aoh \"$lib for: [a-z0-9 ]*\" ~/venv/lib/python3*/site-packages/_rocm_sdk_*/lib/lib$lib.so || echo no $lib
        done; ls ~/venv/lib/python3*/site-packages/_rocm_sdk_libraries/lib/rocblas/library
        ~/venv/bin/rocm-sdk targets
        ~/venv/bin/python -c 'import torch; print(torch.targets(), torch._rocm_init.USE_NCCL)'";
    case.sh("a", targets).ok().prints(
        "no rccl\nrocprofiler-sdk for: gfx1103 gfx1201\nrocblas for: gfx1103\nrocblas_gfx1103.co\ngfx1103 gfx1201\n\
         torch for: gfx1103 False",
    );
    // `rocm-sdk test` may only lack what the variant leaves out.
    case.sh(
        "a",
        "~/venv/bin/python /opt/rockenv/rocm_test.py 'rocdecode rocjpeg rpp rccl' | tail -1",
    )
    .ok()
    .prints("passed, without rccl, rocdecode, rocjpeg, rpp");
    case.sh(
        "a",
        "~/venv/bin/python /opt/rockenv/rocm_test.py 'rocdecode rocjpeg rpp'",
    )
    .exits(1)
    .says(&["rocm-sdk test failed", "shortname='rccl'"]);
    case.sh(
        "a",
        "cd /therock/out && sha256sum --check --quiet SHA256SUMS && wc -l <SHA256SUMS",
    )
    .ok()
    .prints("10");
    // What `torch-test` runs, with a GPU that answers and without one.
    let smoke =
        "cd /therock/src/external-builds/pytorch; ~/venv/bin/python run_pytorch_smoke_tests.py";
    let there = case.sh("a", &format!("export DOUBLE_GPUS=1; {smoke}"));
    assert!(there.ok().text().contains("1 passed"));
    case.sh("a", smoke)
        .exits(1)
        .says(&["ROCm is not available"]);
    // Another env of this target builds nothing and has the same wheels.
    if !is_service() {
        case.up("e", &["gfx1103"]);
        let sums = "cd /therock/out && sha256sum --check --quiet SHA256SUMS && wc -l <SHA256SUMS";
        case.sh("e", sums).ok().prints("10");
        remove(&case, &["e"]);
    }
    // `stage`, `dist` and `artifacts-unsplit` share one file. `artifacts` has its own.
    case.sh("a", "cd /therock/build; stat -c %h math-libs/rocBLAS/stage/lib/librocblas.so artifacts/blas_lib_generic/math-libs/rocBLAS/stage/lib/librocblas.so")
        .ok()
        .prints("4\n1");

    // The other target finds target-independent steps done, as far as the store can freeze build trees.
    let shared: &[&str] = if is_service() {
        &["scripts", "tools", "sources", "ccache"]
    } else {
        &[
            "scripts",
            "tools",
            "sources",
            "ccache",
            "configure-generic",
            "compiler-runtime",
            "generic",
        ]
    };
    let plan = case.planned(&["gfx1201", "--name", &case.env("b")]);
    let have: Vec<&str> = plan
        .iter()
        .filter(|(_, action)| action == "hit")
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(have, shared);
    if is_service() {
        // The rest does not depend on the engine.
        return remove(&case, &["a"]);
    }
    case.up("b", &["gfx1201"]);
    case.sh("b", targets).ok().prints(
        "no rccl\nrocprofiler-sdk for: gfx1103 gfx1201\nrocblas for: gfx1201\nrocblas_gfx1201.co\ngfx1103 gfx1201\n\
         torch for: gfx1201 False",
    );
    let prints = |env: &str| case.sh(env, PRINTS).ok().text();
    assert_eq!(prints("a"), prints("b"));
    case.sh("b", "command -v ninja")
        .ok()
        .prints("/run/rockenv/bin/ninja");
    // The second half of the configuration left nothing of the first half to rebuild.
    case.sh(
        "b",
        "cd /therock/build && ninja -n stage-compiler-runtime | tail -1",
    )
    .ok()
    .prints("ninja: no work to do.");
    fetched_once(&case);
    // What `--from` would save, by the builds on this machine where there are any.
    let plan = case.plan(&["gfx1201", "--rerun", "scripts"]);
    let ways = plan["ways"].as_array().unwrap();
    let names: Vec<_> = ways
        .iter()
        .map(|way| way["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["compiler", "rocm", "wheels"]);
    let figures = ways[1]["figures"].as_array().unwrap();
    let math = figures
        .iter()
        .find(|figure| figure["step"] == "math-libs")
        .unwrap();
    let source = format!("env {}, on this machine", case.env("b"));
    assert_eq!(math["source"], source.as_str());
    // Variables for programs that use the wheels, in shell syntax.
    let exports = case.store.rockenv(&["env", &case.env("b")]).ok().text();
    assert!(
        exports.contains("export PYTORCH_ROCM_ARCH='gfx1201'\n"),
        "{exports}"
    );
    assert!(exports.contains("# MIOpen takes the first"), "{exports}");
    // The hook's change is in the env's view, and not in the shared checkout.
    let preloads = "external-builds/pytorch/build_prod_wheels.py";
    case.sh("b", "git -C /therock/src diff --name-only")
        .ok()
        .prints(preloads);
    let shared = fs::read_dir(case.store.home().join("sources")).unwrap();
    let shared = shared.map(|entry| entry.unwrap().path().join(preloads));
    let text = shared
        .filter_map(|path| fs::read_to_string(path).ok())
        .next();
    assert!(text.unwrap().contains("    \"rccl\",\n"));
    case.store
        .rockenv(&["up", "--name", &case.env("a"), "gfx1103"])
        .ok()
        .says(&["nothing to do"]);
    what_was_built_is_locked(&case);
    symbols_of_one_part(&case);
    other_limits_reach_what_is_not_built(&case);
    a_touched_source_builds_what_uses_it(&case);
    a_commit_builds_what_it_changes(&case);
    remove(&case, &["a", "b"]);
}

/// On a store that freezes build trees: one part is rebuilt beside the build, and nothing else.
fn symbols_of_one_part(case: &Case) {
    let env = case.env("d");
    let with = [
        "gfx1103",
        "--variant",
        "debug-symbols",
        "--param",
        "component=rocBLAS",
    ];
    let plan = case.planned(&[&with[..], &["--name", &env]].concat());
    let runs = plan.iter().filter(|(_, action)| action == "run");
    assert_eq!(
        runs.map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["debug-symbols"]
    );
    case.up("d", &with);
    let symbols = "for lib in rocblas rocprofiler-sdk; do
        readelf -S ~/venv/lib/python3*/site-packages/_rocm_sdk_*/lib/lib$lib.so | grep -c '[.]debug_info' || true; done
        grep -aoh 'rocblas for: [a-z0-9 ]*' ~/venv/lib/python3*/site-packages/_rocm_sdk_*/lib/librocblas.so";
    case.sh("d", symbols)
        .ok()
        .prints("1\n0\nrocblas for: gfx1103");
    case.sh("a", symbols)
        .ok()
        .prints("0\n0\nrocblas for: gfx1103");
    remove(case, &["d"]);
}

#[test]
fn a_build_that_begins_with_what_others_built() {
    // No snapshot here holds build trees: only then may `gc` remove parts of one.
    let case = Case::new(false);
    // RCCL cannot be built for gfx1103. Its code is for the machine's other target and the one that its own build
    // requires.
    case.up("a", &["gfx1103", "--variant", "full-torch"]);
    let rccl = "grep -aoh 'rccl for: [a-z0-9 ]*' ~/venv/lib/python3*/site-packages/_rocm_sdk_libraries/lib/librccl.so
        ~/venv/bin/python -c 'import torch; print(torch.targets(), torch._rocm_init.USE_NCCL)'";
    case.sh("a", rccl)
        .ok()
        .prints("rccl for: gfx1201 gfx1250\ntorch for: gfx1103 True");
    let out = case
        .store
        .home()
        .join("outputs")
        .join(case.env("a"))
        .join("out");
    run(Command::new("cp")
        .arg("-r")
        .arg(&out)
        .arg(case.store.work().join("out")));

    // First TheRock's CI has built this commit, and afterwards only another one.
    let commit = &case.upstream.commit;
    let push = format!(
        "cd /therock/src && python3 build_tools/artifact_manager.py push --stage compiler-runtime --run-id {commit} \
         --build-dir /therock/build --local-staging-dir /therock/ci && cp -r /therock/ci/{commit} /therock/ci/run-of-{}",
        "0".repeat(40)
    );
    case.sh("a", &push).ok();
    case.up("c", &["gfx1103", "--from", "compiler", "--until", "wheels"]);
    case.sh(
        "c",
        "test ! -e /therock/build/compiler/amd-llvm/build && ls /therock/out/rocm/dist | wc -l",
    )
    .ok()
    .prints("6");
    let wheels = case.store.work().join("wheels");
    let export = ["export", &case.env("c"), wheels.to_str().unwrap()];
    // The wheels, and the mark of a directory that `wheels` made.
    case.store.rockenv(&export).ok().says(&["exported 7 files"]);
    let other = "0".repeat(40);
    // The second run built this commit, and has no artifacts any more.
    for (built, words) in [(&other, "and the checkout is"), (commit, "has no compiler")] {
        case.store
            .rockenv(&[
                "up",
                "--name",
                &case.env("c"),
                "gfx1103",
                "--from",
                "compiler",
                "--until",
                "prebuilt",
                "--param",
                &format!("ci-run=run-of-{built}"),
            ])
            .exits(5)
            .says(&[words]);
    }

    // Takes ROCm's wheels from an index, and then all wheels.
    case.up("r", &["gfx1103", "--from", "rocm"]);
    let log = ["logs", &case.env("r"), "install-index"];
    let log = case.store.rockenv(&log).ok().text();
    assert!(log.contains("==10.1.*"), "{log}");
    case.sh("r", "test ! -e /therock/build/build.ninja; ~/venv/bin/python -c 'import torch; print(torch.targets())'")
        .ok()
        .prints("torch for: gfx1103");
    case.sh(
        "r",
        "test ! -e ~/.cache/ccache && ccache --get-config cache_dir",
    )
    .ok()
    .prints("/cache/ccache");
    case.up("w", &["gfx1103", "--from", "wheels"]);
    case.sh("w", "test ! -e /therock/torch/pytorch; ~/venv/bin/python -c 'import torch; print(torch.targets())'")
        .ok()
        .prints("torch for: gfx1103");
    assert_eq!(case.upstream.requests("/whl-multi-arch/torch/"), 1);
    fetched_once(&case);
    what_artifacts_hold_is_given_up(&case);
    wheels_of_an_index_are_locked(&case);
    remove(&case, &["a", "c", "r", "w"]);
}

/// `gc --expunge` removes what TheRock's own `+expunge` does. Finished steps stay done, and a requested part is
/// rebuilt.
fn what_artifacts_hold_is_given_up(case: &Case) {
    let gc = [
        "--yes",
        "--json",
        "gc",
        "--expunge",
        "--preset",
        "ci",
        "--free",
        "900T",
    ];
    let projects = |list: &str, dry: &[&str], code: i32| {
        let report = case.store.rockenv(&[&gc, dry].concat()).exits(code).json();
        let items = report[list].as_array().unwrap().iter();
        let prefix = format!("sub-project {}/build/", case.env("a"));
        let names = items.filter_map(|item| {
            let name = item["name"].as_str().unwrap().strip_prefix(&prefix)?;
            Some((name.to_owned(), item["bytes"].as_u64().unwrap()))
        });
        names.collect::<BTreeMap<_, _>>()
    };
    let planned = projects("items", &["--dry-run"], 0);
    for name in ["compiler/amd-llvm", "core/hip-clr", "math-libs/rocBLAS"] {
        assert!(
            planned.get(name).is_some_and(|bytes| *bytes > 0),
            "{planned:?}"
        );
    }
    assert_eq!(projects("removed", &[], 10), planned);
    let library = "math-libs/rocBLAS/stage/lib/librocblas.so";
    let holds = format!("cd /therock/build; test -s artifacts/blas_lib_generic/{library}");
    let left = "cd math-libs/rocBLAS; for d in build stage dist stamp; do test ! -e $d; done";
    let gone = format!("{holds}; {left}");
    case.sh("a", &gone).ok();
    assert!(projects("items", &["--dry-run"], 0).is_empty());
    let again = ["--variant", "full-torch", "gfx1103"];
    case.up("a", &again).says(&["nothing to do"]);
    let back = format!("cd /therock/build; ninja rocBLAS >&2; test -s {library}");
    case.sh("a", &back).ok();
}

fn remove(case: &Case, suffixes: &[&str]) {
    let names: Vec<String> = suffixes.iter().map(|suffix| case.env(suffix)).collect();
    let mut words = vec!["rm", "--yes"];
    words.extend(names.iter().map(String::as_str));
    case.store.rockenv(&words).ok();
    // Background deletion needs no wait, except that a service takes long over a build's images.
    case.store.settle();
}
