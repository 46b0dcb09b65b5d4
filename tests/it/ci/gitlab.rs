//! Runs GitLab pipelines with a real program: the jobs run in parallel, each on what rockenv takes for its own machine.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use fs_err as fs;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::{left, project, without_gpu};
use crate::support::env::TestStore;
use crate::support::git::git;
use crate::support::python::{check_schema, gitlab_ci_local};
use crate::support::registry::Registry;
use crate::support::run::{
    Background, Ran, finish, processes_called, wait_for_process, wait_until,
};

/// The jobs' names without the env's name.
const JOBS: [&str; 4] = [
    "what is common",
    "build gfx1103",
    "build gfx1201",
    "test gfx1103",
];

/// The stores of new machines, one for each job.
struct Machines(Vec<TestStore>);

impl Machines {
    /// Makes the machines on which the project's next pipelines run.
    fn new(project: &TestStore) -> Self {
        let all: Vec<TestStore> = JOBS.iter().map(|_| TestStore::new()).collect();
        let cases = JOBS.iter().zip(&all).map(|(job, store)| {
            let job = job.replace(" gfx", &format!(" {}-gfx", project.env()));
            format!(
                "'{job}') export ROCKENV_HOME='{}' ;;\n",
                store.home().display()
            )
        });
        let text = format!("case $CI_JOB_NAME in\n{}esac\n", cases.collect::<String>());
        fs::write(project.work().join("machine"), text).unwrap();
        Self(all)
    }

    fn left(&self) -> Vec<String> {
        self.0.iter().flat_map(left).collect()
    }
}

/// Writes the pipeline into the project's repository.
fn repository(store: &TestStore, registry: &Registry) {
    let runners = store.work().join("runners.toml");
    let repository = format!("{}/team/rocm", registry.host);
    let asked = [
        "matrix",
        "gitlab",
        "--profile",
        store.env(),
        "gfx1103",
        "gfx1201",
    ];
    let how = [
        "--runners",
        runners.to_str().unwrap(),
        "--registry",
        &repository,
    ];
    let text = store
        .rockenv(&[&asked[..], &how, &["--setup", ". ./machine"]].concat())
        .ok()
        .text();
    let file = store.work().join(".gitlab-ci.yml");
    fs::write(&file, text).unwrap();
    check_schema("vendor.gitlab-ci", &file);
    let git = |arguments: &[&str]| git(store.work(), arguments);
    git(&["init", "--quiet"]);
    git(&[
        "remote",
        "add",
        "origin",
        "git@gitlab.example.org:team/rocm.git",
    ]);
    git(&["add", ".gitlab-ci.yml", "profiles"]);
    git(&["commit", "--quiet", "--message", "pipeline"]);
}

/// Returns the command that runs the pipeline, in its own process group.
fn pipeline(store: &TestStore) -> Command {
    let programs = store.work().join("bin");
    if !programs.exists() {
        fs::create_dir(&programs).unwrap();
        symlink(env!("CARGO_BIN_EXE_rockenv"), programs.join("rockenv")).unwrap();
    }
    let own = store.command::<&str>(&[]);
    let mut command = gitlab_ci_local();
    command
        .envs(
            own.get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .env_remove("ROCKENV_HOME")
        .env_remove("ROCKENV_TRUSTED_DIRS")
        .env(
            "PATH",
            format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display()),
        )
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", "safe.directory")
        .env("GIT_CONFIG_VALUE_0", "*")
        .args(["--no-color", "--concurrency", "4"])
        .current_dir(store.work())
        .stdin(Stdio::null())
        .process_group(0);
    without_gpu(store, &mut command);
    command
}

/// Returns how each job ended, from the program's summary.
fn ended(store: &TestStore, ran: &Ran) -> BTreeMap<String, String> {
    let text = ran.text();
    let lines = text.lines().filter_map(|line| {
        let (how, job) = line.trim().split_once("  ")?;
        let known = matches!(how, "PASS" | "FAIL");
        known.then(|| {
            let job = job.trim().replace(&format!("{}-", store.env()), "");
            (job, how.to_owned())
        })
    });
    lines.collect()
}

fn all(how: [&str; 4]) -> BTreeMap<String, String> {
    let each = JOBS.iter().zip(how).filter(|(_, how)| !how.is_empty());
    each.map(|(job, how)| ((*job).to_owned(), how.to_owned()))
        .collect()
}

#[test]
fn a_second_pipeline_pulls_what_the_first_one_built_failed_or_cancelled() {
    let store = TestStore::new();
    project(&store);
    let registry = Registry::start(false);
    repository(&store, &registry);
    let run = |machines: &Machines| {
        let ran = finish("pipeline".to_owned(), pipeline(&store));
        assert_eq!(machines.left(), [""; 0], "{}", ran.text());
        ran
    };
    // One env fails. The other one is built, and the jobs that depend on the first one do not run.
    let machines = Machines::new(&store);
    fs::write(store.runs().join("no-gfx1103"), "").unwrap();
    let ran = run(&machines).exits(1);
    assert_eq!(
        ended(&store, &ran),
        all(["PASS", "FAIL", "PASS", ""]),
        "{}",
        ran.text()
    );
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);

    // The pipeline is cancelled during a step, and the step ends. The next pipeline on the same machines resumes and
    // cleans up.
    fs::remove_file(store.runs().join("no-gfx1103")).unwrap();
    let sleeper = store.sleeper();
    fs::write(store.runs().join("wait"), &sleeper).unwrap();
    let mut cancelled = pipeline(&store);
    cancelled.stdout(Stdio::null()).stderr(Stdio::null());
    let running = Background::start(cancelled);
    wait_for_process(&sleeper);
    killpg(Pid::from_raw(running.pid()), Signal::SIGTERM).unwrap();
    assert_ne!(running.wait().code, 0);
    wait_until("the step ends", || processes_called(&sleeper).is_empty());
    assert_eq!(
        store.ran(),
        ["gfx1103"],
        "all others came from the registry"
    );
    fs::remove_file(store.runs().join("wait")).unwrap();
    let ran = run(&machines).exits(1);
    // This machine has no GPU, so the test job must fail.
    let tested = all(["PASS", "PASS", "PASS", "FAIL"]);
    assert_eq!(ended(&store, &ran), tested, "{}", ran.text());
    assert_eq!(store.ran(), ["gfx1103"]);

    // New machines build nothing.
    let ran = run(&Machines::new(&store)).exits(1);
    assert_eq!(ended(&store, &ran), tested, "{}", ran.text());
    assert_eq!(store.ran(), [""; 0]);
}
