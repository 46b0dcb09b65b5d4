//! Workflows and pipelines: whether they fit their schemas, and what their scripts do.

mod options;

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::{left, project, without_gpu};
use crate::support::env::TestStore;
use crate::support::python::{check_schema, check_workflow, yaml};
use crate::support::registry::Registry;
use crate::support::run::{Ran, finish, surround};

const TARGETS: [&str; 2] = ["gfx1103", "gfx1201"];

/// Writes a pipeline to a file, validates it against its schema, and returns its content.
fn written(store: &TestStore, system: &str, schema: &str, more: &[&str]) -> Value {
    let runners = store.work().join("runners.toml");
    let asked = ["matrix", system, "--profile", store.env(), "--runners"];
    let asked = [&asked[..], &[runners.to_str().unwrap()], &TARGETS, more].concat();
    let text = store.rockenv(&asked).ok().text();
    let file = store.work().join(format!("{system}.yml"));
    fs::write(&file, &text).unwrap();
    check_schema(schema, &file);
    if system == "github" {
        check_workflow(&file);
    }
    yaml(&file).remove(0)
}

/// Runs a script as a CI system does, with rockenv in `PATH`, on a machine without a GPU.
fn script(store: &TestStore, text: &str) -> Ran {
    script_with(store, text, store.home())
}

/// Runs a script with `home` as the shell's store.
fn script_with(store: &TestStore, text: &str, home: &Path) -> Ran {
    let ran = finish(text.to_owned(), shell(store, text, home));
    assert!(!ran.err.contains("command not found"), "{}", ran.err);
    ran
}

fn shell(store: &TestStore, text: &str, home: &Path) -> Command {
    let programs = store.work().join("bin");
    if !programs.exists() {
        fs::create_dir(&programs).unwrap();
        symlink(env!("CARGO_BIN_EXE_rockenv"), programs.join("rockenv")).unwrap();
    }
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
    let mut shell = Command::new("bash");
    shell.args(["--noprofile", "--norc", "-eo", "pipefail", "-c", text]);
    surround(&mut shell, &store.command::<&str>(&[]))
        // The script itself trusts its checkout.
        .env_remove("ROCKENV_TRUSTED_DIRS")
        .env("PATH", path)
        .env("ROCKENV_HOME", home);
    without_gpu(store, &mut shell);
    shell
}

/// Returns `success`, or the exit code and the error of the first script that failed.
fn ending(scripts: &[Ran]) -> String {
    let Some(failed) = scripts.iter().find(|ran| ran.code != 0) else {
        return "success".to_owned();
    };
    let mut lines = failed.err.lines();
    let error = lines.find_map(|line| line.strip_prefix("error: "));
    format!("{} {}", failed.code, error.unwrap_or_default())
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

fn texts(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Returns shell lines that set a job's secrets, whose names stand between `open` and `close`. Skips the settings of
/// GitLab's runner.
fn exports(variables: &Value, open: &str, close: &str) -> String {
    let variables = variables.as_object().into_iter().flatten();
    let variables = variables.filter(|(variable, _)| !variable.contains("SCRIPT_"));
    let lines = variables.map(|(variable, value)| {
        let name = value.as_str().unwrap().strip_prefix(open).unwrap();
        assert_eq!(name.strip_suffix(close), Some("REGISTRY_TOKEN"));
        // The password of the tests' registry.
        format!("export {variable}=se:cret\n")
    });
    lines.collect()
}

/// Does what GitHub does with a workflow, on one machine for all jobs.
fn github(store: &TestStore, workflow: &Value) -> BTreeMap<String, String> {
    github_on(workflow, &mut |_, text| script(store, text))
}

/// Does what GitHub does with a workflow, one job at a time. Returns how each job ended, with `skipped` for jobs that
/// did not run. `script` runs one script of a job.
fn github_on(
    workflow: &Value,
    script: &mut dyn FnMut(&str, &str) -> Ran,
) -> BTreeMap<String, String> {
    let jobs = workflow["jobs"].as_object().unwrap();
    let mut ended: BTreeMap<String, String> = BTreeMap::new();
    while ended.len() < jobs.len() {
        let ready = jobs.iter().find(|(id, job)| {
            let needs = texts(&job["needs"]);
            !ended.contains_key(*id) && needs.iter().all(|need| ended.contains_key(*need))
        });
        let (id, job) = ready.expect("no job waits for itself");
        let needs = texts(&job["needs"]);
        let ok = needs.iter().all(|need| ended[*need] == "success");
        if !ok && text(job, "if") != "always()" {
            ended.insert(id.clone(), "skipped".to_owned());
            continue;
        }
        let environment = exports(&job["env"], "${{ secrets.", " }}");
        let mut scripts: Vec<Ran> = Vec::new();
        for step in job["steps"].as_array().unwrap() {
            if let Some(run) = step["run"].as_str()
                && (scripts.iter().all(|ran| ran.code == 0) || text(step, "if") == "always()")
            {
                scripts.push(script(id, &format!("{environment}{run}")));
            }
        }
        ended.insert(id.clone(), ending(&scripts));
    }
    ended
}

/// Does what GitLab does with a pipeline, on one machine for all jobs.
fn gitlab(store: &TestStore, pipeline: &Value) -> BTreeMap<String, String> {
    gitlab_on(pipeline, &mut |_, text| script(store, text))
}

/// Does what GitLab does with a pipeline. `script` runs one script of a job.
fn gitlab_on(
    pipeline: &Value,
    script: &mut dyn FnMut(&str, &str) -> Ran,
) -> BTreeMap<String, String> {
    let mut gitlab = GitLab {
        pipeline,
        groups: Vec::new(),
        script: &mut |_, job, text| script(job, text),
    };
    gitlab.run("push")
}

/// Runs a script. The first argument names the resource groups that are held meanwhile.
type Script<'a> = dyn FnMut(&[String], &str, &str) -> Ran + 'a;

/// Runs a pipeline. A job that triggers a child pipeline runs the same file again.
struct GitLab<'a> {
    pipeline: &'a Value,
    /// The resource groups that are held now.
    groups: Vec<String>,
    script: &'a mut Script<'a>,
}

impl GitLab<'_> {
    fn run(&mut self, source: &str) -> BTreeMap<String, String> {
        let pipeline = self.pipeline;
        let mut ended: BTreeMap<String, String> = BTreeMap::new();
        for stage in texts(&pipeline["stages"]) {
            for (name, job, when) in jobs_of(pipeline, source, stage) {
                let mut needs = job["needs"].as_array().into_iter().flatten();
                let failed = |need: &Value| {
                    // The metrics of another job would be counted twice.
                    assert_eq!(need["artifacts"], false);
                    ended[text(need, "job")] != "success"
                };
                if when != "always" && needs.any(failed) {
                    ended.insert(name.clone(), "skipped".to_owned());
                    continue;
                }
                let group = job["resource_group"].as_str().map(str::to_owned);
                self.groups.extend(group.clone());
                if job["trigger"].is_object() {
                    assert_eq!(job["trigger"]["strategy"], "depend");
                    assert_eq!(job["trigger"]["include"][0]["local"], ".gitlab-ci.yml");
                    ended.extend(self.run("parent_pipeline"));
                } else {
                    let environment = exports(&job["variables"], "$", "");
                    let run = texts(&job["script"]).join("\n");
                    let done = (self.script)(&self.groups, name, &(environment.clone() + &run));
                    let mut scripts = vec![done];
                    if let Some(after) = job["after_script"].as_array() {
                        assert_eq!(job["variables"]["AFTER_SCRIPT_IGNORE_ERRORS"], "false");
                        let after: Vec<&str> = after.iter().filter_map(Value::as_str).collect();
                        let after = environment + &after.join("\n");
                        scripts.push((self.script)(&self.groups, name, &after));
                    }
                    ended.insert(name.clone(), ending(&scripts));
                }
                if group.is_some() {
                    self.groups.pop();
                }
            }
        }
        ended
    }
}

/// Returns the jobs of a stage in a pipeline on a branch with this source, and when each job runs.
fn jobs_of<'a>(
    pipeline: &'a Value,
    source: &str,
    stage: &str,
) -> Vec<(&'a String, &'a Value, String)> {
    let holds = |rule: &Value| match rule["if"].as_str().unwrap() {
        "$CI_PIPELINE_SOURCE == \"parent_pipeline\"" => source == "parent_pipeline",
        // A merge request's pipeline has neither a branch nor a tag.
        "$CI_COMMIT_BRANCH" => source != "merge_request_event",
        "$CI_COMMIT_TAG" => false,
        other => panic!("{other}"),
    };
    let mut jobs = Vec::new();
    for (name, job) in pipeline.as_object().unwrap() {
        if text(job, "stage") != stage {
            continue;
        }
        let when = match job["rules"].as_array() {
            None if source == "merge_request_event" => "never",
            None => "on_success",
            Some(rules) => match rules.iter().find(|rule| holds(rule)) {
                Some(rule) => rule["when"].as_str().unwrap_or("on_success"),
                None => "never",
            },
        };
        if when != "never" {
            jobs.push((name, job, when.to_owned()));
        }
    }
    jobs
}

/// Returns the jobs' endings, with `E` for the env's name.
fn endings(store: &TestStore, ended: &BTreeMap<String, String>) -> Vec<String> {
    let one =
        |(name, how): (&String, &String)| format!("{}: {how}", name.replace(store.env(), "E"));
    ended.iter().map(one).collect()
}

#[test]
fn github_builds_what_is_common_once_and_leaves_nothing() {
    let store = TestStore::new();
    project(&store);
    let schema = "vendor.github-workflows";
    let workflow = written(
        &store,
        "github",
        schema,
        &["--one-store", "--timeout", "90"],
    );
    assert_eq!(
        workflow["permissions"],
        serde_json::json!({"contents": "read"})
    );
    let env = format!("env-{}-gfx1103", store.env());
    let job = &workflow["jobs"][&format!("{env}-gpu")];
    assert_eq!(texts(&job["needs"]), [env]);
    assert_eq!(texts(&job["runs-on"]), ["self-hosted", "780m"]);
    assert_eq!(job["timeout-minutes"], 90);
    // Every action is pinned to a commit.
    for job in workflow["jobs"].as_object().unwrap().values() {
        for step in job["steps"].as_array().unwrap() {
            if let Some(action) = step["uses"].as_str() {
                let (_, commit) = action.split_once('@').unwrap();
                assert_eq!(commit.len(), 40, "{action}");
            }
        }
    }
    let ended = github(&store, &workflow);
    let all = [
        "clean: success",
        "common: success",
        "env-E-gfx1103: success",
        "env-E-gfx1103-gpu: 4 steps with a GPU cannot run: this machine has no GPU",
        "env-E-gfx1201: success",
    ];
    assert_eq!(endings(&store, &ended), all);
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    assert_eq!(left(&store), [""; 0]);
    // A failed job takes only the jobs along that depend on it.
    fs::write(store.runs().join("no-gfx1103"), "").unwrap();
    let ended = github(&store, &workflow);
    let all = [
        "clean: success",
        "common: success",
        "env-E-gfx1103: 5 step `own` failed with exit code 1",
        "env-E-gfx1103-gpu: skipped",
        "env-E-gfx1201: success",
    ];
    assert_eq!(endings(&store, &ended), all);
    assert_eq!(left(&store), [""; 0]);
}

#[test]
fn machines_that_share_nothing_get_whole_envs() {
    let store = TestStore::new();
    project(&store);
    let schema = "vendor.github-workflows";
    let odd = [
        "--setup",
        "type -P rockenv > 'a b'",
        "--",
        "--param",
        "x=${{ 1 }}: #",
    ];
    let workflow = written(&store, "github", schema, &odd);
    let script = text(
        &workflow["jobs"][&format!("env-{}-gfx1201", store.env())]["steps"][1],
        "run",
    );
    assert!(
        script.contains("--param 'x=${{ '${{' }} 1 }}: #'"),
        "{script}"
    );
    // Only gfx1103 has a runner for steps with a GPU. Without a GPU, its job fails before it builds anything.
    let workflow = written(&store, "github", schema, &[]);
    let ended = github(&store, &workflow);
    let all = [
        "env-E-gfx1103: 4 steps with a GPU cannot run: this machine has no GPU",
        "env-E-gfx1201: success",
    ];
    assert_eq!(endings(&store, &ended), all);
    assert_eq!(store.ran(), ["gfx1201", "one", "two"]);
    assert_eq!(left(&store), [""; 0]);
    // `--gpu` after `--` applies to the jobs that have steps with a GPU.
    fs::write(store.runs().join("no-gfx1103"), "").unwrap();
    let workflow = written(
        &store,
        "github",
        schema,
        &["--setup", "type -P rockenv > 'a b'", "--", "--gpu", "auto"],
    );
    let ended = github(&store, &workflow);
    let all = [
        "env-E-gfx1103: 5 step `own` failed with exit code 1",
        "env-E-gfx1201: success",
    ];
    assert_eq!(endings(&store, &ended), all);
    assert!(store.work().join("a b").exists());
    // Each job built everything, because the one before left nothing.
    let twice = ["gfx1103", "gfx1201", "one", "one", "two", "two"];
    assert_eq!(store.ran(), twice);
    assert_eq!(left(&store), [""; 0]);
    // With a registry, each job still removes its own env.
    let registry = ["--registry", "registry.example.org/rockenv"];
    let registry = [&registry[..], &["--secret", "TOKEN=REGISTRY_TOKEN"]].concat();
    for (system, schema) in [("github", schema), ("gitlab", "vendor.gitlab-ci")] {
        let shared = written(&store, system, schema, &registry).to_string();
        assert_eq!(shared.matches(" --pull --push").count(), 4, "{shared}");
        assert_eq!(shared.matches("--yes rm").count(), 4, "{shared}");
        assert_eq!(shared.matches("\"TOKEN\":").count(), 4, "{shared}");
    }
    let bad = ["matrix", "github", "gfx1103", "--setup", "a\nb"];
    store
        .rockenv(&bad)
        .exits(2)
        .says(&["cannot be written into a script"]);
    // The command that removes an env uses the name that `up` gets.
    let named = ["--shard", "2/2", "--", "--name", "other"];
    let workflow = written(&store, "github", schema, &named);
    assert!(
        workflow.to_string().contains("for env in other; do"),
        "{workflow}"
    );
    // A part without envs writes no file.
    for system in ["github", "gitlab", "slurm", "kubernetes"] {
        let more: &[&str] = match system {
            "slurm" => &["--submit"],
            "kubernetes" => &["--image", "i", "--claim", "c"],
            _ => &[],
        };
        let empty = ["matrix", system, "gfx1103", "--shard", "2/2"];
        let said = store.rockenv(&[&empty[..], more].concat()).exits(2);
        said.prints("")
            .says(&["part 2/2 of 1 env is empty", "help: --shard 1/1"]);
        let json = ["--json", "matrix", system, "gfx1103"];
        let said = store.rockenv(&[&json[..], more].concat()).exits(2);
        said.prints("").says(&["this command writes no JSON"]);
    }
    for (system, empty) in [
        ("github", "--setup="),
        ("github", "--rockenv="),
        ("slurm", "--sbatch="),
    ] {
        let bad = ["matrix", system, "gfx1103", empty];
        store.rockenv(&bad).exits(2).says(&["a value is required"]);
    }
    let said = store.shows(
        "matrix github gfx1103 gfx1201 -- -n other
        matrix github gfx1103 --secret 'A=${{ x }}'
        matrix slurm gfx1103 --secret A=B",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv matrix github gfx1103 gfx1201 -- -n other
    error: `up gfx1103` and `up gfx1201` are both env `other`
    help: use profiles with different names, and no `--name` for all envs
    exit code 2
    $ rockenv matrix github gfx1103 --secret 'A=${{ x }}'
    error: invalid value 'A=${{ x }}' for '--secret <ENV=NAME>': a secret is written `TOKEN=REGISTRY_TOKEN`: the variable, and the system's name of the secret, of letters, digits and `_`

    For more information, try '--help'.
    exit code 2
    $ rockenv matrix slurm gfx1103 --secret A=B
    error: `--secret A=B`: these jobs get no secrets
    help: export the variable before you submit: `sbatch` passes its environment on
    exit code 2
    ");
}

#[test]
fn every_shell_of_a_job_begins_with_what_sets_it_up() {
    let store = TestStore::new();
    project(&store);
    let elsewhere = store.work().join("elsewhere");
    let setup = format!("export ROCKENV_HOME='{}'", store.home().display());
    for shared in [&[][..], &["--one-store"]] {
        let more = [&["--shard", "2/2", "--setup", &setup], shared].concat();
        let mut shell = |_: &str, text: &str| script_with(&store, text, &elsewhere);
        let workflow = written(&store, "github", "vendor.github-workflows", &more);
        let mut ended = github_on(&workflow, &mut shell);
        let pipeline = written(&store, "gitlab", "vendor.gitlab-ci", &more);
        ended.extend(gitlab_on(&pipeline, &mut shell));
        assert!(ended.values().all(|how| how == "success"), "{ended:?}");
        assert_eq!(
            store.ran(),
            ["gfx1201", "gfx1201", "one", "one", "two", "two"]
        );
        assert_eq!(left(&store), [""; 0]);
        assert!(!elsewhere.exists());
    }
}

#[test]
fn of_two_pipelines_of_one_store_one_ends_before_the_other_begins() {
    let store = TestStore::new();
    project(&store);
    let pipeline = written(&store, "gitlab", "vendor.gitlab-ci", &["--one-store"]);
    let first = |source| -> Vec<Option<&str>> {
        let jobs = jobs_of(&pipeline, source, "common").into_iter();
        jobs.map(|(_, job, _)| job["resource_group"].as_str())
            .collect()
    };
    assert_eq!(first("merge_request_event"), []);
    // Starts the second pipeline as soon as GitLab would, at any point of the first one.
    let mut second = None;
    let mut at_once = |held: &[String], _: &str, text: &str| {
        let ran = script(&store, text);
        let free =
            |group: &Option<&str>| group.is_none_or(|group| !held.iter().any(|one| one == group));
        if second.is_none() && first("push").iter().all(free) {
            second = Some(gitlab(&store, &pipeline));
        }
        ran
    };
    let ended = GitLab {
        pipeline: &pipeline,
        groups: Vec::new(),
        script: &mut at_once,
    }
    .run("push");
    assert_eq!(ended.len(), 5, "{ended:?}");
    let once = ["gfx1103", "gfx1201", "one", "two"];
    assert!(second.is_none(), "it did not wait: {second:?}");
    assert_eq!(store.ran(), once);
    // The second pipeline then finds nothing of the first one.
    assert_eq!(gitlab(&store, &pipeline), ended);
    assert_eq!(store.ran(), once);
    assert_eq!(left(&store), [""; 0]);
}

#[test]
fn gitlab_does_the_same() {
    let store = TestStore::new();
    project(&store);
    let pipeline = written(&store, "gitlab", "vendor.gitlab-ci", &["--one-store"]);
    let test = format!("test {}-gfx1103", store.env());
    assert_eq!(texts(&pipeline[&test]["tags"]), ["self-hosted", "780m"]);
    let ended = gitlab(&store, &pipeline);
    let all = [
        "build E-gfx1103: success",
        "build E-gfx1201: success",
        "leave nothing: success",
        "test E-gfx1103: 4 steps with a GPU cannot run: this machine has no GPU",
        "what is common: success",
    ];
    assert_eq!(endings(&store, &ended), all);
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    assert_eq!(left(&store), [""; 0]);
    // The artifact of the jobs.
    let rows = fs::read_to_string(store.work().join("rockenv-metrics.jsonl")).unwrap();
    assert!(rows.lines().count() > 4, "{rows}");
    fs::write(store.runs().join("no-gfx1201"), "").unwrap();
    let pipeline = written(&store, "gitlab", "vendor.gitlab-ci", &["--shard", "2/2"]);
    let ended = gitlab(&store, &pipeline);
    assert_eq!(
        endings(&store, &ended),
        ["build E-gfx1201: 5 step `own` failed with exit code 1"]
    );
    assert_eq!(left(&store), [""; 0]);
}

/// A machine for each job, with the checkout, the image, and nothing that other jobs built.
struct Machines<'a> {
    checkout: &'a TestStore,
    profile: String,
    stores: BTreeMap<String, TestStore>,
}

impl<'a> Machines<'a> {
    fn new(checkout: &'a TestStore) -> Self {
        let name = format!("profiles/{}.toml", checkout.env());
        Self {
            checkout,
            profile: fs::read_to_string(checkout.work().join(name)).unwrap(),
            stores: BTreeMap::new(),
        }
    }

    fn script(&mut self, job: &str, text: &str) -> Ran {
        let name = format!("profiles/{}.toml", self.checkout.env());
        let store = self.stores.entry(job.to_owned()).or_insert_with(|| {
            let store = TestStore::new();
            fs::write(store.work().join(name), &self.profile).unwrap();
            store
        });
        script(store, text)
    }
}

#[test]
fn by_a_registry_each_machine_builds_its_own_part_only() {
    let store = TestStore::new();
    project(&store);
    let registry = Registry::start(true);
    let repository = format!("{}/team/rocm", registry.host);
    let setup = format!(
        "export REGISTRY_AUTH_FILE=$PWD/auth.json; \
         echo \"$TOKEN\" | skopeo login --tls-verify=false -u user --password-stdin {}",
        registry.host
    );
    let asked = ["--registry", &repository];
    // A job that cannot log in hands nothing on, and fails with the reason.
    let workflow = written(&store, "github", "vendor.github-workflows", &asked);
    let mut strangers = Machines::new(&store);
    let ended = github_on(&workflow, &mut |job, text| strangers.script(job, text));
    let ended = endings(&store, &ended);
    assert!(ended[0].starts_with("common: 4 "), "{ended:?}");
    assert!(
        ended[1..].iter().all(|how| how.ends_with(": skipped")),
        "{ended:?}"
    );
    assert_eq!(store.ran(), ["one", "two"]);
    let secret = ["--secret", "TOKEN=REGISTRY_TOKEN", "--setup", &setup];
    let asked = [&asked[..], &secret].concat();
    let workflow = written(&store, "github", "vendor.github-workflows", &asked);
    let pipeline = written(&store, "gitlab", "vendor.gitlab-ci", &asked);
    let mut machines = Machines::new(&store);
    let ended = github_on(&workflow, &mut |job, text| machines.script(job, text));
    let all = [
        "common: success",
        "env-E-gfx1103: success",
        "env-E-gfx1103-gpu: 4 steps with a GPU cannot run: this machine has no GPU",
        "env-E-gfx1201: success",
    ];
    assert_eq!(endings(&store, &ended), all);
    assert_eq!(machines.stores.len(), 4);
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    // GitLab's jobs on new machines find everything in the same registry.
    let mut others = Machines::new(&store);
    let ended = gitlab_on(&pipeline, &mut |job, text| others.script(job, text));
    let all = [
        "build E-gfx1103: success",
        "build E-gfx1201: success",
        "test E-gfx1103: 4 steps with a GPU cannot run: this machine has no GPU",
        "what is common: success",
    ];
    assert_eq!(endings(&store, &ended), all);
    assert_eq!(store.ran(), [""; 0]);
    for store in [machines, others, strangers]
        .iter()
        .flat_map(|all| all.stores.values())
    {
        assert_eq!(left(store), [""; 0]);
    }
}
