//! What is built again, and what is not: after a file was touched.

use fs_err as fs;

use super::Case;

/// By TheRock's fingerprints, and by the source's own where TheRock has none.
pub(super) fn a_touched_source_builds_what_uses_it(case: &Case) {
    let env = case.env("b");
    let plan = ["gfx1201", "--name", &env];
    let said = case.plan(&plan)["fingerprints"].clone();
    assert_eq!(
        (said[0]["step"].as_str(), said[1]["step"].as_str()),
        (Some("configure-generic"), Some("configure"))
    );
    // Those that are split by target have none, as upstream.
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

    fs::write(&file, format!("{}// touched\n", before.1)).unwrap();
    let open = case.plan(&plan)["fingerprints"].clone();
    assert_eq!(open[0]["therock"], serde_json::Value::Null, "{open}");
    case.store.rockenv(&[&["up"], &until[..]].concat()).ok();
    assert_eq!(
        (runs("compiler-runtime"), runs("math-libs")),
        (built.0, built.1 + 1)
    );
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
    // As it was, everything is as it was.
    fs::write(&file, &before.1).unwrap();
    assert_eq!(case.keys(&plan), before.0);
    let planned = case.planned(&plan);
    assert!(
        !planned.iter().any(|(_, action)| action == "run"),
        "{planned:?}"
    );
}
