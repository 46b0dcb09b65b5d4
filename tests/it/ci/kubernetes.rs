//! Manifests for Kubernetes: whether typed models of JobSet, Argo Workflows and Kubernetes accept them, and what their
//! scripts do, in which order.

use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::{NO_GPU, project, without_gpu};
use crate::support::env::TestStore;
use crate::support::python::{check_kubernetes, yaml};
use crate::support::run::{finish, surround};

/// Writes a manifest, validates it, and returns its object.
fn manifest(store: &TestStore, more: &[&str]) -> Value {
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
    fs::write(&file, manifest).unwrap();
    check_kubernetes(&file);
    yaml(&file).remove(0)
}

/// Returns the string at a JSON pointer.
fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value
        .pointer(path)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn list<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    let list = value.pointer(path).and_then(Value::as_array);
    list.map_or(&[], Vec::as_slice)
}

/// Runs a container as the kubelet does, which replaces `$(NAME)` in its script and in later variables, and reads `$$`
/// as `$`. Returns whether the pod succeeds. A test pod must fail without a GPU.
fn pod(store: &TestStore, container: &Value, index: &str) -> bool {
    let mut script = text(container, "/args/0").to_owned();
    let mut shell = Command::new(text(container, "/command/0"));
    surround(&mut shell, &store.command::<&str>(&[])).env("JOB_COMPLETION_INDEX", index);
    for variable in list(container, "/env") {
        let (name, value) = (text(variable, "/name"), text(variable, "/value"));
        let value = value.replace("{{inputs.parameters.index}}", index);
        script = script.replace(&format!("$({name})"), &value);
        shell.env(name, value);
    }
    let script = script.replace("$$", "$");
    shell.args([text(container, "/command/1"), &script]);
    without_gpu(store, &mut shell);
    let done = finish(script, shell);
    let gpu = container["resources"]["limits"]["amd.com/gpu"] == "1";
    match done.code {
        4 if gpu => {
            done.says(&[NO_GPU]);
        }
        5 => {
            done.says(&["step `own` failed"]);
        }
        _ => {
            done.ok();
            return true;
        }
    }
    false
}

/// Does what the JobSet controllers do. Returns the pods that ran, and how they ended.
fn jobset(store: &TestStore, set: &Value) -> Vec<String> {
    let mut ran = Vec::new();
    let mut complete = Vec::new();
    for job in list(set, "/spec/replicatedJobs") {
        // The webhook checks that a job depends on one job at most, and that this one precedes it.
        let needs = list(job, "/dependsOn");
        assert!(needs.len() <= 1 && needs.iter().all(|need| need["status"] == "Complete"));
        let name = text(job, "/name");
        if !needs
            .iter()
            .all(|need| complete.contains(&text(need, "/name")))
        {
            break;
        }
        let spec = &job["template"]["spec"];
        assert_eq!(spec["backoffLimitPerIndex"], 2);
        // The first rule that matches counts: a lost pod is tried again, a failed one is not and stops no other.
        let lost = serde_json::json!([{"type": "DisruptionTarget", "status": "True"}]);
        let failed = serde_json::json!({"operator": "NotIn", "values": [0]});
        let rules = serde_json::json!([
            {"action": "Count", "onPodConditions": lost},
            {"action": "FailIndex", "onExitCodes": failed},
        ]);
        assert_eq!(spec["podFailurePolicy"]["rules"], rules);
        let container = &spec["template"]["spec"]["containers"][0];
        let mut all = true;
        for index in 0..spec["completions"].as_u64().unwrap() {
            let ok = pod(store, container, &index.to_string());
            all &= ok;
            ran.push(format!("{name} {index}: {ok}"));
        }
        // A failed job fails the set.
        if !all {
            break;
        }
        complete.push(name);
    }
    ran
}

/// Does what Argo does with a workflow. Returns the pods that ran, and how they ended.
fn argo(store: &TestStore, workflow: &Value) -> Vec<String> {
    let templates = list(workflow, "/spec/templates");
    let template = |name: &str| templates.iter().find(|one| text(one, "/name") == name);
    let dag = &template(text(workflow, "/spec/entrypoint")).unwrap()["dag"];
    assert_eq!(dag["failFast"], false, "one does not stop the others");
    let mut ran = Vec::new();
    let mut done = Vec::new();
    for task in list(dag, "/tasks") {
        let name = text(task, "/name");
        if task["depends"].is_string() && !done.contains(&text(task, "/depends")) {
            continue;
        }
        let template = template(text(task, "/template")).unwrap();
        let again = &template["retryStrategy"];
        assert_eq!(again["retryPolicy"], "Always");
        // An evicted pod has the same phase as a pod with a failed step.
        assert_eq!(
            again["expression"],
            "lastRetry.status == 'Error' || \
             lastRetry.message matches 'node was low on|node had condition|node shutdown|admit critical pod'"
        );
        let index = text(task, "/arguments/parameters/0/value");
        let ok = pod(store, &template["container"], index);
        ran.push(format!("{}: {ok}", name.replace(store.env(), "E")));
        if ok {
            done.push(name);
        }
    }
    ran
}

/// Returns the containers of a manifest, each with its pod.
fn containers(manifest: &Value) -> Vec<(&Value, &Value)> {
    let templates = list(manifest, "/spec/templates").iter();
    let argo = templates.map(|one| (&one["container"], &manifest["spec"]));
    let jobs = list(manifest, "/spec/replicatedJobs").iter();
    let pods = jobs.map(|job| &job["template"]["spec"]["template"]["spec"]);
    let all = pods.map(|pod| (&pod["containers"][0], pod)).chain(argo);
    all.filter(|(container, _)| container.is_object()).collect()
}

#[test]
fn each_phase_waits_for_the_one_before_and_only_tests_ask_for_a_gpu() {
    let store = TestStore::new();
    project(&store);
    let program = env!("CARGO_BIN_EXE_rockenv");
    let with = [
        "--rockenv",
        program,
        "--claim",
        "store",
        "--queue",
        "builds",
    ];
    let set = manifest(&store, &with);
    let queue = "/metadata/labels/kueue.x-k8s.io~1queue-name";
    assert_eq!(text(&set, queue), "builds");
    let workflow = manifest(&store, &[&with[..], &["--orchestrator", "argo"]].concat());
    assert_eq!(text(&workflow, queue), "builds");
    for template in &list(&workflow, "/spec/templates")[1..] {
        assert_eq!(text(template, queue), "builds", "{template:#}");
    }
    for manifest in [&set, &workflow] {
        let all = containers(manifest);
        let gpu = |(container, _): &(&Value, &Value)| {
            let limits = &container["resources"]["limits"];
            assert_eq!(limits["memory"], "104857600", "{container:#}");
            limits["amd.com/gpu"] == "1"
        };
        let gpus: Vec<bool> = all.iter().map(gpu).collect();
        assert_eq!(gpus, [false, false, true], "{manifest:#}");
    }
    let remove = |store: &TestStore| {
        for target in ["gfx1103", "gfx1201"] {
            let env = format!("{}-{target}", store.env());
            store.rockenv(&["--yes", "rm", &env]).ok();
        }
    };
    // The test pods fail, because there is no GPU.
    let all = ["common 0: true", "build 0: true", "build 1: true"];
    let tests = ["test 0: false", "test 1: false"];
    assert_eq!(jobset(&store, &set), [&all[..], &tests].concat());
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    remove(&store);
    // A failed env does not stop the builds of other envs. With Argo, it does not even stop their tests.
    fs::write(store.runs().join("no-gfx1103"), "").unwrap();
    let all = ["common 0: true", "build 0: false", "build 1: true"];
    assert_eq!(jobset(&store, &set), all);
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    remove(&store);
    let all = [
        "common: true",
        "build-E-gfx1103: false",
        "build-E-gfx1201: true",
        "test-E-gfx1201: false",
    ];
    assert_eq!(argo(&store, &workflow), all);
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    remove(&store);
}

#[test]
fn where_a_registry_has_what_others_built_no_volume_has_to() {
    let store = TestStore::new();
    project(&store);
    let with = [
        "--registry",
        "registry.example.org/rockenv",
        "--registry-secret",
        "logins",
        "--secret",
        "TOKEN=REGISTRY_TOKEN",
        "--orchestrator",
    ];
    for orchestrator in ["jobset", "argo"] {
        let manifest = manifest(&store, &[&with[..], &[orchestrator]].concat());
        let all = containers(&manifest);
        assert_eq!(all.len(), 3, "{manifest:#}");
        for (container, pod) in all {
            let script = text(container, "/args/0");
            assert!(script.contains(" --pull --push"), "{script}");
            let variable = |wanted: &str| {
                let mut all = list(container, "/env").iter();
                all.find(|one| text(one, "/name") == wanted).unwrap()
            };
            // The variable names the file that the secret provides.
            let mount = &container["volumeMounts"][1];
            let volume = &pod["volumes"][1];
            let file = text(volume, "/secret/items/0/path");
            assert_eq!(
                text(variable("REGISTRY_AUTH_FILE"), "/value"),
                format!("{}/{file}", text(mount, "/mountPath"))
            );
            assert_eq!(mount["name"], volume["name"]);
            assert_eq!(volume["secret"]["secretName"], "logins");
            assert_eq!(pod["imagePullSecrets"][0]["name"], "logins");
            assert_eq!(pod["nodeSelector"]["kubernetes.io/arch"], "amd64");
            assert!(pod["volumes"][0]["emptyDir"].is_object(), "{pod:#}");
            let wanted = serde_json::json!({"name": "rockenv", "key": "REGISTRY_TOKEN"});
            assert_eq!(variable("TOKEN")["valueFrom"]["secretKeyRef"], wanted);
        }
    }
    let asked = ["matrix", "kubernetes", "gfx1103"];
    insta::assert_snapshot!(store.shown(&store.rockenv(&asked)), @"
    error: the following required arguments were not provided:
      --image <IMAGE>
      --claim <NAME>

    Usage: rockenv matrix kubernetes --image <IMAGE> --claim <NAME> <TARGET|FAMILY>... [-- <OPTION>...]

    For more information, try '--help'.
    exit code 2
    ");
}
