//! This repository's action, and the workflows that use it on GitHub's hosted runners.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use rockenv::testing::Store;
use serde_json::Value;

use super::{STEPS, project};
use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::python::{check_schema, check_workflow, yaml};
use crate::support::run::{Ran, finish, surround};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Writes a workflow without a file of runners, validates it, and returns its content.
fn workflow(store: &TestStore, more: &[&str]) -> Value {
    let asked = ["matrix", "github", "--profile", store.env(), "gfx1201"];
    let text = store.rockenv(&[&asked[..], more].concat()).ok().text();
    let file = store.work().join("hosted.yml");
    fs::write(&file, text).unwrap();
    check_schema("vendor.github-workflows", &file);
    check_workflow(&file);
    yaml(&file).remove(0)
}

/// Returns the steps of the only job.
fn steps(workflow: &Value) -> &[Value] {
    let jobs = workflow["jobs"].as_object().unwrap();
    assert_eq!(jobs.len(), 1);
    jobs.values().next().unwrap()["steps"].as_array().unwrap()
}

#[test]
fn this_repository_s_workflows_and_action_are_valid() {
    let root = Path::new(ROOT);
    check_schema("vendor.github-actions", &root.join("action.yml"));
    for file in fs::read_dir(root.join(".github/workflows")).unwrap() {
        let file = file.unwrap().path();
        check_workflow(&file);
        // Compiling runs the code of every crate.
        for (name, job) in yaml(&file)[0]["jobs"].as_object().unwrap() {
            let compiles = job["steps"].to_string().contains("make ");
            let can_write = job["permissions"].to_string().contains("write");
            assert!(!(compiles && can_write), "{name}");
        }
    }
}

#[test]
fn machines_of_one_s_own_keep_their_rockenv() {
    let store = TestStore::new();
    project(&store);
    let runners = store.work().join("mixed.toml");
    let text = "build = ['ubuntu-latest']\n[gpu]\ngfx1201 = ['self-hosted', 'rdna4']\n";
    fs::write(&runners, text).unwrap();
    let mixed = ["--runners", runners.to_str().unwrap()];
    let shared = ["--registry", "registry.example.org/r"];
    for (more, everywhere) in [(&[][..], false), (&["--action", "o/r@0123"], true)] {
        let asked = [&mixed[..], &shared, more].concat();
        let workflow = workflow(&store, &asked);
        let jobs = workflow["jobs"].as_object().unwrap();
        assert_eq!(jobs.len(), 2);
        for job in jobs.values() {
            let hosted = job["runs-on"][0] == "ubuntu-latest";
            let steps = job["steps"].as_array().unwrap();
            let installs = steps.iter().any(|step| {
                let uses = step["uses"].as_str().unwrap_or_default();
                uses.starts_with("rockenv/") || uses.starts_with("o/r@")
            });
            assert_eq!(installs, hosted || everywhere, "{job:#}");
            let lines = steps.iter().filter_map(|step| step["run"].as_str());
            for line in lines
                .flat_map(str::lines)
                .filter(|line| line.contains("rockenv "))
            {
                assert_eq!(line.contains("sudo "), hosted, "{line}");
            }
        }
    }
}

#[test]
fn a_runner_of_github_s_gets_the_program_that_wrote_the_workflow() {
    let store = TestStore::new();
    let steps_of_project = STEPS.replace("OUT", &store.runs().display().to_string());
    store.profile(&format!("env-from-host = ['MY_TOKEN']{steps_of_project}"));
    let hosted = workflow(&store, &["--secret", "TOKEN=GITHUB_TOKEN"]);
    let [_, install, build, clean] = steps(&hosted) else {
        panic!("{hosted:#}");
    };
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(install["uses"], format!("rockenv/rockenv@v{version}"));
    // Root gets the variables that rockenv and the profile read, and no other.
    for (step, call) in [(build, "-v up"), (clean, "--yes gc")] {
        let run = step["run"].as_str().unwrap();
        let (before, _) = run.split_once(&format!(" rockenv {call}")).unwrap();
        let (_, names) = before.rsplit_once("sudo --preserve-env=").unwrap();
        let names: Vec<&str> = names.split(',').collect();
        for name in ["ROCKENV_TRUSTED_DIRS", "GITHUB_STEP_SUMMARY", "MY_TOKEN"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(!names.contains(&"TOKEN"), "{names:?}");
    }
    // With a set-up command, the action is not needed. `--action` selects another one.
    let own = workflow(&store, &["--setup", "./install"]);
    assert_eq!(steps(&own).len(), 3, "{own:#}");
    let asked = ["matrix", "github", "--profile", store.env(), "gfx1201"];
    let said = store.rockenv(&[&asked[..], &["--setup", "./login"]].concat());
    said.ok()
        .says(&["warning: nothing but `--setup` installs rockenv on `ubuntu-latest`"]);
    let named = workflow(&store, &["--action", "o/r@0123", "--rockenv", "rockenv"]);
    assert_eq!(steps(&named)[1]["uses"], "o/r@0123");
    insta::assert_snapshot!(store.shows("matrix github gfx1201 --action o/r"), @"
    error: invalid value 'o/r' for '--action <REPOSITORY@COMMIT>': an action is written `OWNER/REPOSITORY@COMMIT`

    For more information, try '--help'.
    exit code 2
    ");

    // The action fetches a release, compares it with the digest, and installs it.
    let release = store.work().join(format!("releases/v{version}"));
    let tree = store.work().join("tree/bin");
    fs::create_dir_all(&release).unwrap();
    fs::create_dir_all(&tree).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_rockenv"), tree.join("rockenv")).unwrap();
    let name = format!("rockenv-{version}-x86_64-linux");
    run(Command::new("tar")
        .args(["--create", "--use-compress-program=zstd -1", "--file"])
        .arg(release.join(format!("{name}.tar.zst")))
        .arg("--directory")
        .arg(store.work().join("tree"))
        .args([format!("--transform=s,^\\.,{name},"), ".".to_owned()]));
    let releases = format!("file://{}", store.work().join("releases").display());
    // The cache restores a finished download, and a partial one.
    let digest = "0a".repeat(32);
    let restored = store.work().join("rockenv-downloads");
    let restore = || {
        fs::create_dir_all(&restored).unwrap();
        fs::write(restored.join(&digest), "kept").unwrap();
        fs::write(restored.join(format!(".{digest}")), "part").unwrap();
    };
    let with = |sha256: &str| {
        restore();
        let inputs = [
            ("version", version),
            ("sha256", sha256),
            ("releases", &releases),
        ];
        action(&store, &inputs)
    };
    let said = with(install["with"]["sha256"].as_str().unwrap())
        .ok()
        .text();
    assert!(said.contains(&format!("\nrockenv {version}\n")), "{said}");
    // The caller sees what is in the store now, and may not change it.
    assert!(said.ends_with("\nread kept and new; Read-only\n"), "{said}");
    let made = Store::open(&fresh(&store)).unwrap();
    let blobs = made.root().join("blobs/sha256");
    assert_eq!(fs::read_to_string(blobs.join(&digest)).unwrap(), "kept");
    assert!(!blobs.join(format!(".{digest}")).exists());
    let refused = with(&"0".repeat(64)).exits(1);
    assert!(refused.text().contains("rockenv: FAILED"));
    assert!(!refused.text().contains("installed"));
}

/// Returns the store of the machine that the action runs on.
fn fresh(store: &TestStore) -> PathBuf {
    store.work().join("fresh")
}

/// Runs the action's shell steps, with an empty `/usr/local/bin` so that the host stays unchanged.
fn action(store: &TestStore, inputs: &[(&str, &str)]) -> Ran {
    let action = yaml(&Path::new(ROOT).join("action.yml")).remove(0);
    let steps = action["runs"]["steps"].as_array().unwrap();
    // Debian lacks the keys of Ubuntu's archive, and without them rockenv looks for them at the mirrors.
    let mut script = "mount -t tmpfs tmpfs /usr/local/bin
        cp -r /usr/share/keyrings keyrings; touch keyrings/ubuntu-archive-keyring.gpg
        mount --bind keyrings /usr/share/keyrings\n"
        .to_owned();
    let temp = store.work().display().to_string();
    let inputs = inputs
        .iter()
        .map(|(name, value)| (format!("inputs.{name}"), *value));
    let known: Vec<(String, &str)> = inputs.chain([("runner.temp".to_owned(), &*temp)]).collect();
    let [cache, store_them] = ["restore downloads", "put them"].map(|name| {
        let named = |step: &&Value| step["name"].as_str().unwrap().starts_with(name);
        steps.iter().find(named).unwrap()
    });
    assert_eq!(cache["if"], store_them["if"]);
    assert_eq!(cache["with"]["path"], store_them["env"]["DOWNLOADS"]);
    for step in steps {
        if let Some(uses) = step["uses"].as_str() {
            let (action, commit) = uses.split_once('@').unwrap();
            assert_eq!((action, commit.len()), ("actions/cache", 40));
            continue;
        }
        for (variable, value) in step["env"].as_object().into_iter().flatten() {
            let mut value = value.as_str().unwrap().to_owned();
            for (name, known) in &known {
                value = value.replace(&format!("${{{{ {name} }}}}"), known);
            }
            assert!(!value.contains("${{"), "{value}");
            writeln!(script, "export {variable}='{value}'").unwrap();
        }
        let file = store.work().join("step");
        let run = step["run"].as_str().unwrap();
        let file = file.display();
        let shell = "bash --noprofile --norc -eo pipefail";
        writeln!(script, "cat >{file} <<'END'\n{run}\nEND\n{shell} {file}").unwrap();
    }
    script += "echo installed; /usr/local/bin/rockenv --version
        chmod 700 $ROCKENV_HOME/blobs
        echo new >$ROCKENV_HOME/blobs/sha256/$(printf '%064d' 1)
        cd rockenv-downloads
        runner='setpriv --reuid=1234 --regid=1234 --clear-groups'
        echo \"read $($runner cat 0a*) and $($runner cat 00*); $(touch 0b 2>&1 | grep -io read-only)\"\n";
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "bash", "-ec", &script]);
    surround(&mut shell, &store.command::<&str>(&[]))
        .env("RUNNER_TEMP", store.work())
        .env("ROCKENV_HOME", fresh(store));
    finish(script, shell)
}

#[test]
fn what_does_not_fit_is_said_before_it_is_written() {
    let store = TestStore::new();
    let large =
        "[resources]\nmemory = '64G'\ndisk = '230G'\n[[step]]\nname = 'own'\nrun = 'true'\n";
    store.profile(large);
    let asked = "matrix github --profile ENV gfx1201";
    let mut refused = store.shows(asked);
    // Runners that the user names cause only a warning: other machines may have the same label.
    let runners = store.work().join("runners.toml");
    fs::write(&runners, "build = ['ubuntu-latest']\n").unwrap();
    let mut named = vec!["matrix", "github", "--runners", "runners.toml"];
    named.extend(["--profile", store.env(), "gfx1201"]);
    refused += &store.rockenv(&named).ok().err.replace(store.env(), "ENV");
    // A file that names only machines with a GPU leaves the build on GitHub's own.
    fs::write(&runners, "[gpu]\ngfx1201 = ['self-hosted']\n").unwrap();
    store.rockenv(&named).exits(9);
    fs::remove_file(&runners).unwrap();
    nix::unistd::mkfifo(&runners, nix::sys::stat::Mode::S_IRWXU).unwrap();
    refused += &store.shows(&format!("{asked} --runners runners.toml"));
    fs::remove_file(&runners).unwrap();
    insta::assert_snapshot!(refused, @r#"
    error: ENV-gfx1201: needs 64.0 GiB of memory, `ubuntu-latest` has 14.9 GiB; 230.0 GiB of disk, `ubuntu-latest` has 13.0 GiB
    help: list larger machines in a file and pass it with `--runners FILE`: `build = ["self-hosted"]`
    exit code 9
    warning: ENV-gfx1201: needs 64.0 GiB of memory, `ubuntu-latest` has 14.9 GiB; 230.0 GiB of disk, `ubuntu-latest` has 13.0 GiB
    error: cannot read `runners.toml`
      caused by: it is not a regular file
    help: --runners takes a file that names the build machines: `build = ["self-hosted"]`
    exit code 2
    "#);
    fs::write(&runners, "build = ['self-hosted']\n").unwrap();
    let fits = store.rockenv(&named).ok();
    assert!(!fits.err.contains("needs"), "{}", fits.err);
}
