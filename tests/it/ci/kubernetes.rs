//! Manifests for Kubernetes: what its own schemas say of them, what their scripts do, and in which order the conductor starts them.

use fs_err as fs;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::cluster::{Cluster, Failure, command, text};
use super::{NO_GPU, project, without_gpu};
use crate::support::env::TestStore;
use crate::support::python::{check_kubernetes, yaml};
use crate::support::run::{finish, wait_until};

const ALL_JOBS: [&str; 5] = [
    "rockenv.common-E-gfx1103",
    "rockenv-E-gfx1103",
    "rockenv-E-gfx1103-gpu",
    "rockenv-E-gfx1201",
    "rockenv-E-gfx1201-gpu",
];

/// Writes a manifest, checks it, and returns the objects in it; their names have `E` for the profile's.
fn manifest(store: &TestStore, more: &[&str]) -> Vec<Value> {
    let asked = ["matrix", "kubernetes", "--profile", store.env()];
    let how = [
        "gfx1103",
        "gfx1201",
        "--image",
        "registry.example.org/rockenv:1",
    ];
    let manifest = store
        .rockenv(&[&asked[..], &how, more].concat())
        .ok()
        .text();
    let file = store.work().join("jobs.yaml");
    fs::write(&file, &manifest).unwrap();
    check_kubernetes(&file);
    let names = ["rockenv", "common", "conductor"].map(|what| format!("{what}-"));
    let with = |env: &str| names.each_ref().map(|name| format!("{name}{env}-gfx"));
    let mut text = manifest;
    for (own, short) in with(store.env()).iter().zip(with("E")) {
        text = text.replace(own, &short);
    }
    fs::write(&file, &text).unwrap();
    yaml(&file)
}

fn jobs(documents: &[Value]) -> Vec<&Value> {
    let documents = documents.iter();
    documents.filter(|one| one["kind"] == "Job").collect()
}

#[test]
fn jobs_wait_for_each_other_and_only_tests_ask_for_a_gpu() {
    let store = TestStore::new();
    project(&store);
    let program = env!("CARGO_BIN_EXE_rockenv");
    let documents = manifest(&store, &["--rockenv", program, "--claim", "store"]);
    let all = jobs(&documents);
    let (conductor, works) = all.split_last().unwrap();
    let names: Vec<&str> = works
        .iter()
        .map(|job| text(job, "/metadata/name"))
        .collect();
    assert_eq!(names, ALL_JOBS);
    for job in works {
        let name = text(job, "/metadata/name");
        let pod = &job["spec"]["template"]["spec"];
        let limits = &pod["containers"][0]["resources"]["limits"];
        assert_eq!(limits["memory"], 104_857_600, "{job:#}");
        assert_eq!(
            limits["amd.com/gpu"] == 1,
            name.ends_with("-gpu"),
            "{job:#}"
        );
        // What stands on another one has no pod at first, so that it holds nothing.
        let first = name.starts_with("rockenv.common");
        assert_eq!(job["spec"]["suspend"] == true, !first, "{job:#}");
        assert!(pod["initContainers"].is_null() && pod["serviceAccountName"].is_null());
    }
    let small = serde_json::json!({
        "requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}
    });
    let container = &conductor["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["resources"], small, "nothing else waits");

    let mut cluster = Cluster::create(store.work(), &documents);
    let mut pod = |name: &str, job: &Value| -> Failure {
        let container = &job["spec"]["template"]["spec"]["containers"][0];
        let own = store.command::<&str>(&[]);
        let mut shell = command(container);
        shell
            .envs(
                own.get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .current_dir(store.work());
        without_gpu(&store, &mut shell);
        let done = finish(name.to_owned(), shell);
        match name.ends_with("-gpu") {
            true => {
                done.exits(4).says(&[NO_GPU]);
                Some("BackoffLimitExceeded")
            }
            false => {
                done.ok();
                None
            }
        }
    };
    let said = cluster.conduct(&mut pod).exits(5).text();
    assert!(said.ends_with("\n3 done, 2 failed, 0 not run\n"), "{said}");
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    for target in ["gfx1103", "gfx1201"] {
        store
            .rockenv(&["--yes", "rm", &format!("{}-{target}", store.env())])
            .ok();
    }
}

#[test]
fn where_a_registry_has_what_others_built_no_volume_has_to() {
    let store = TestStore::new();
    project(&store);
    let registry = ["--registry", "registry.example.org/rockenv"];
    let logins = [
        "--registry-secret",
        "logins",
        "--secret",
        "TOKEN=REGISTRY_TOKEN",
        "--kubectl-image",
        "registry.example.org/kubectl:1",
    ];
    let documents = manifest(
        &store,
        &[registry, logins[..2].try_into().unwrap()].concat(),
    );
    let documents_with_all = manifest(&store, &[&registry[..], &logins].concat());
    for documents in [documents, documents_with_all] {
        let all = jobs(&documents);
        let (conductor, works) = all.split_last().unwrap();
        for job in works {
            let pod = &job["spec"]["template"]["spec"];
            let script = text(pod, "/containers/0/args/0");
            assert!(script.contains(" --pull --push"), "{script}");
            // The file that its variable names is the secret's.
            let variable = &pod["containers"][0]["env"][0];
            let [mount, volume] = ["/containers/0/volumeMounts/1", "/volumes/1"]
                .map(|path| pod.pointer(path).unwrap());
            assert_eq!(variable["name"], "REGISTRY_AUTH_FILE");
            let file = text(volume, "/secret/items/0/path");
            assert_eq!(
                text(variable, "/value"),
                format!("{}/{file}", text(mount, "/mountPath"))
            );
            assert_eq!(mount["name"], volume["name"]);
            assert_eq!(volume["secret"]["secretName"], "logins");
            assert_eq!(pod["imagePullSecrets"][0]["name"], "logins");
            assert!(pod["volumes"][0]["emptyDir"].is_object(), "{pod:#}");
        }
        let given = &works[0]["spec"]["template"]["spec"]["containers"][0]["env"][1];
        if let Some(reference) = given.pointer("/valueFrom/secretKeyRef") {
            let wanted = serde_json::json!({"name": "rockenv", "key": "REGISTRY_TOKEN"});
            assert_eq!((reference, &given["name"]), (&wanted, &"TOKEN".into()));
            let image = "/spec/template/spec/containers/0/image";
            assert_eq!(text(conductor, image), logins[5]);
        }
        assert!(!conductor.to_string().contains("logins"), "{conductor:#}");
    }
    let asked = ["matrix", "kubernetes", "gfx1103"];
    store.rockenv(&asked).exits(2).says(&["--image", "--claim"]);
}

#[test]
fn the_conductor_starts_what_can_run_and_says_what_is_not_run() {
    let store = TestStore::new();
    project(&store);
    let documents = manifest(&store, &["--claim", "store"]);
    let [common, first, first_gpu, second, second_gpu] = ALL_JOBS;
    let conductor = "rockenv.conductor-E-gfx1103";
    let create = || Cluster::create(store.work(), &documents);

    // Killed after each job, and started again on another node, it goes on; no job is run twice.
    let mut cluster = create();
    let mut well = |_: &str, _: &Value| -> Failure { None };
    for _ in ALL_JOBS {
        let process = cluster.start();
        wait_until("no job is started", || cluster.run_one(&mut well).is_some());
        process.signal(Signal::SIGKILL);
        process.wait().exits(137);
    }
    let said = cluster.conduct(&mut well).ok().text();
    assert!(said.ends_with("\n5 done, 0 failed, 0 not run\n"), "{said}");
    let mut order = cluster.ran.clone();
    assert_eq!(order[0], common);
    order.sort();
    assert_eq!(order, [first, first_gpu, second, second_gpu, common]);
    assert_eq!(cluster.at(conductor, "/spec/backoffLimit"), 10);

    // Where the first one fails, all others stay as they are: without pods.
    let mut cluster = create();
    let said = cluster.conduct(&mut |_, _| Some("DeadlineExceeded"));
    let said = said.exits(5).text();
    assert_eq!(cluster.ran, [common]);
    // Whether it looks while the pod runs is up to the machine.
    let runs = format!("{common}: runs\n");
    assert_eq!(
        said.strip_prefix(&runs).unwrap_or(&said),
        format!(
            "{common}: failed (DeadlineExceeded); kubectl logs job/{common}
{first}: not run, for {common} is not done
{first_gpu}: not run, for {first} is not done
{second}: not run, for {common} is not done
{second_gpu}: not run, for {second} is not done
0 done, 1 failed, 4 not run
"
        )
    );
    assert_eq!(cluster.at(first, "/spec/suspend"), true);
    // It has failed for good.
    assert_eq!(cluster.at(conductor, "/spec/backoffLimit"), 0);

    // One env that fails does not stop the others, and neither does a cluster that has trouble.
    let mut cluster = create();
    cluster.trouble(3);
    let said = cluster.conduct(&mut |name, _| (name == first).then_some("BackoffLimitExceeded"));
    let said = said.exits(5).says(&["other things to do"]).text();
    assert_eq!(cluster.ran, [common, first, second, second_gpu]);
    for line in [
        format!("{second}: started, for {common} is done"),
        format!("{second_gpu}: started, for {second} is done"),
        format!("{first_gpu}: not run, for {first} is not done"),
        "3 done, 1 failed, 1 not run".to_owned(),
    ] {
        assert!(said.lines().any(|said| said == line), "{line}\n{said}");
    }

    // What somebody deleted is not waited for.
    let mut cluster = create();
    cluster.delete(second);
    let said = cluster.conduct(&mut well).exits(5).text();
    assert_eq!(cluster.ran, [common, first, first_gpu]);
    assert!(said.contains(&format!("{second}: deleted\n")), "{said}");
    assert!(said.ends_with("\n3 done, 1 failed, 1 not run\n"), "{said}");

    // A cluster that never answers is given up, which is no verdict on the jobs: it is tried again.
    let cluster = create();
    cluster.trouble(1000);
    cluster.start().wait().exits(4);
    assert_eq!(cluster.at(conductor, "/spec/backoffLimit"), 10);
}
