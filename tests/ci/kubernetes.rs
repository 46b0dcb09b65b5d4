//! Manifests for Kubernetes: what its own schemas say of them, and what their scripts do.

use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::{NO_GPU, project, ran, without_gpu};
use crate::support::env::TestStore;
use crate::support::python::{check_kubernetes, yaml};
use crate::support::run::finish;

/// Returns the text at a path of names.
fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value
        .pointer(path)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

#[test]
fn jobs_wait_for_each_other_and_only_tests_ask_for_a_gpu() {
    let store = TestStore::new();
    let (out, _) = project(&store);
    let program = env!("CARGO_BIN_EXE_rockenv");
    let asked = [
        "matrix",
        "kubernetes",
        "--profile",
        store.env(),
        "gfx1103",
        "gfx1201",
    ];
    let how = [
        "--rockenv",
        program,
        "--image",
        "registry.example.org/rockenv:1",
        "--claim",
        "store",
    ];
    let manifest = store.rockenv(&[&asked[..], &how].concat()).ok().text();
    let file = store.work().join("jobs.yaml");
    fs::write(&file, &manifest).unwrap();
    check_kubernetes(&file);
    let documents = yaml(&file);
    let jobs: Vec<&Value> = documents
        .iter()
        .filter(|one| one["kind"] == "Job")
        .collect();
    let names: Vec<String> = jobs
        .iter()
        .map(|job| text(job, "/metadata/name").replace(store.env(), "E"))
        .collect();
    assert_eq!(
        names,
        [
            "rockenv.common",
            "rockenv-E-gfx1103",
            "rockenv-E-gfx1103-gpu",
            "rockenv-E-gfx1201",
            "rockenv-E-gfx1201-gpu"
        ]
    );
    for job in jobs {
        let name = text(job, "/metadata/name");
        let pod = &job["spec"]["template"]["spec"];
        let limits = &pod["containers"][0]["resources"]["limits"];
        assert_eq!(limits["memory"], 104_857_600, "{job:#}");
        assert_eq!(
            limits["amd.com/gpu"] == 1,
            name.ends_with("-gpu"),
            "{job:#}"
        );
        // What it waits for has been before it.
        let waits = text(pod, "/initContainers/0/args/3").replace("job/", "");
        let stands_on = match name {
            "rockenv.common" => String::new(),
            name => name
                .strip_suffix("-gpu")
                .unwrap_or("rockenv.common")
                .to_owned(),
        };
        assert_eq!(waits, stands_on);
        let mut shell = store.command::<&str>(&[]);
        let environment: Vec<_> = shell
            .get_envs()
            .map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned)))
            .collect();
        shell = Command::new(text(pod, "/containers/0/command/0"));
        shell
            .args([
                text(pod, "/containers/0/command/1"),
                text(pod, "/containers/0/args/0"),
            ])
            .env_clear()
            .envs(
                environment
                    .into_iter()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .current_dir(store.work());
        without_gpu(&store, &mut shell);
        let done = finish(name.to_owned(), shell);
        match name.ends_with("-gpu") {
            true => done.exits(4).says(&[NO_GPU]),
            false => done.ok(),
        };
    }
    assert_eq!(ran(&out), ["gfx1103", "gfx1201", "one", "two"]);
    for target in ["gfx1103", "gfx1201"] {
        store
            .rockenv(&["--yes", "rm", &format!("{}-{target}", store.env())])
            .ok();
    }
    // Where a registry has what others built, no volume has to.
    let how = [
        "--image",
        "registry.example.org/rockenv:1",
        "--registry",
        "registry.example.org/rockenv",
    ];
    let manifest = store.rockenv(&[&asked[..], &how].concat()).ok().text();
    assert!(manifest.contains(" --pull --push") && !manifest.contains("claimName"));
    fs::write(&file, &manifest).unwrap();
    check_kubernetes(&file);
    store.rockenv(&asked).exits(2).says(&["--image", "--claim"]);
}
