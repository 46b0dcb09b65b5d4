//! What is rebuilt after changed job limits, a touched file and a commit.

use fs_err as fs;

use super::Case;

/// Job limits are in no key. The machine's present limits apply to what is still to be built.
pub(super) fn other_limits_reach_what_is_not_built(case: &Case) {
    let limits = "cd /therock/build
        sed -n 's/^TENSILELITE_BUILD_PARALLEL_LEVEL:[A-Z]*=/hipBLASLt /p' math-libs/hipBLASLt/build/CMakeCache.txt
        for name in LLVM_PARALLEL_COMPILE_JOBS LLVM_PARALLEL_LINK_JOBS; do
          sed -n \"s/^$name:[A-Z]*=/$name /p\" compiler/amd-llvm/build/CMakeCache.txt; done
        stat -c '%n %y' compiler/amd-llvm/stamp/* math-libs/*/stamp/* core/*/stamp/*";
    let lines = || {
        let text = case.sh("b", limits).ok().text();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let env = case.env("b");
    let again = ["up", "--name", &env, "gfx1201", "--jobs", "1", "--until"];
    let again = [&again[..], &["math-libs", "--rerun", "math-libs"]].concat();
    // Everything is built, so nothing is touched.
    let before = lines();
    case.store.rockenv(&again).ok();
    assert_eq!(lines(), before);
    // A part that is not built gets the present limits. The rest keeps its own.
    case.sh("b", "cd /therock/build && ninja hipBLASLt+expunge >&2")
        .ok();
    case.store.rockenv(&again).ok();
    let after = lines();
    assert_eq!(after[0], "hipBLASLt 1");
    let others = |lines: &[String]| {
        let others = lines.iter().filter(|line| !line.contains("hipBLASLt"));
        others.cloned().collect::<Vec<_>>()
    };
    assert_eq!(others(&after), others(&before));
    case.up("b", &["gfx1201"]);
}

/// Goes by TheRock's fingerprints, and by the source's own where TheRock has none.
pub(super) fn a_touched_source_builds_what_uses_it(case: &Case) {
    let env = case.env("b");
    let plan = ["gfx1201", "--name", &env];
    let said = case.plan(&plan)["fingerprints"].clone();
    assert_eq!(
        (said[0]["step"].as_str(), said[1]["step"].as_str()),
        (Some("configure-generic"), Some("configure"))
    );
    // Parts that are split by target have no fingerprint, as upstream.
    assert_eq!(said[0]["own"], serde_json::json!([]), "{said}");
    assert_eq!(
        said[1]["own"],
        serde_json::json!(["blas", "miopen"]),
        "{said}"
    );

    let sources = fs::read_dir(case.store.home().join("sources")).unwrap();
    let file = sources
        .map(|entry| {
            entry
                .unwrap()
                .path()
                .join("rocm-libraries/projects/rocblas/kernels.hip")
        })
        .find(|path| path.exists())
        .unwrap();
    let before = (case.keys(&plan), fs::read_to_string(&file).unwrap());
    let runs = |step: &str| {
        let metrics = case
            .store
            .home()
            .join("envs")
            .join(&env)
            .join("metrics.jsonl");
        let text = fs::read_to_string(metrics).unwrap();
        text.matches(&format!("\"step\":\"{step}\"")).count()
    };
    let built = (runs("compiler-runtime"), runs("math-libs"));
    let until = [&plan[..], &["--until", "math-libs"]].concat();
    case.store
        .rockenv(&[&["up"], &until[..]].concat())
        .ok()
        .says(&["nothing to do"]);

    // The build tree stays as it is, although `sources` runs again.
    let compiler = || {
        case.sh(
            "b",
            "stat -c '%n %y' /therock/build/compiler/amd-llvm/stamp/*",
        )
        .ok()
        .text()
    };
    let was = compiler();
    fs::write(&file, format!("{}// touched\n", before.1)).unwrap();
    let open = case.plan(&plan)["fingerprints"].clone();
    assert_eq!(open[0]["therock"], serde_json::Value::Null, "{open}");
    case.store.rockenv(&[&["up"], &until[..]].concat()).ok();
    assert_eq!(
        (runs("compiler-runtime"), runs("math-libs")),
        (built.0, built.1 + 1)
    );
    assert_eq!(compiler(), was);
    let after = case.keys(&plan);
    let changed = |step: &str| before.0[step] != after[step];
    for step in ["tools", "compiler-runtime", "generic"] {
        assert!(!changed(step), "{step}");
    }
    for step in [
        "configure-generic",
        "configure",
        "math-libs",
        "wheels",
        "torch",
    ] {
        assert!(changed(step), "{step}");
    }
    case.store
        .rockenv(&[&["up"], &until[..]].concat())
        .ok()
        .says(&["nothing to do"]);
    // With the old content, all keys are as before.
    fs::write(&file, &before.1).unwrap();
    assert_eq!(case.keys(&plan), before.0);
    let planned = case.planned(&plan);
    assert!(
        !planned.iter().any(|(_, action)| action == "run"),
        "{planned:?}"
    );
}

/// A commit to the documentation rebuilds no target-independent part. A commit to TheRock's own files may rebuild all
/// of them.
pub(super) fn a_commit_builds_what_it_changes(case: &Case) {
    let env = case.env("b");
    let rev = |commit: &str| format!("therock-rev={commit}");
    let with = |rev: &str, until: &str| {
        let words = ["up", "--name", &env, "gfx1201", "--param", rev, "--until"];
        case.store.rockenv(&[&words[..], &[until]].concat()).ok();
        case.keys(&["gfx1201", "--name", &env, "--param", rev])
    };
    let before = case.keys(&["gfx1201", "--name", &env]);
    let words = rev(&case.upstream.commit_of("docs/development.md"));
    let after = with(&words, "configure");
    for step in ["compiler-runtime", "generic"] {
        assert_eq!(before[step], after[step], "{step}");
    }
    assert_ne!(before["configure-generic"], after["configure-generic"]);
    let own = rev(&case.upstream.commit_of("compiler/pre_hook_amd-llvm.cmake"));
    let after = with(&own, "configure-generic");
    assert_ne!(before["compiler-runtime"], after["compiler-runtime"]);
}
