//! Tools in Python that Debian does not have: fetched once for each checkout.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use fs_err as fs;
use serde_json::Value;

use super::loopfs::run;

const PINNED: [&str; 4] = [
    "check-jsonschema==0.39.0",
    "hera-workflows==7.1.0",
    "kubeflow-trainer-api==2.3.0",
    "kubernetes-validate==1.37.0",
];

/// Prepares Debian's own Python, with the tools.
fn python() -> Command {
    static MODULES: OnceLock<PathBuf> = OnceLock::new();
    let mut python = Command::new("/usr/bin/python3");
    python.env("PYTHONPATH", MODULES.get_or_init(fetch));
    python
}

fn fetch() -> PathBuf {
    let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("python-tools");
    fs::create_dir_all(&cache).expect("a cache directory");
    let lock = fs::File::create(cache.join("lock")).expect("a lock file");
    lock.file().lock().expect("the lock");
    let modules = cache.join(PINNED.join(","));
    if !modules.exists() {
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
        fs::rename(&part, &modules).expect("the tools");
    }
    modules
}

/// Fails unless the file is what this schema of check-jsonschema's own says.
pub(crate) fn check_schema(schema: &str, file: &Path) {
    run(python()
        .args(["-m", "check_jsonschema", "--builtin-schema", schema])
        .arg(file));
}

/// Fails unless the file is one that JobSet or Argo Workflows accepts, with pods that Kubernetes does.
pub(crate) fn check_kubernetes(file: &Path) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/kubernetes.py");
    run(python().arg(script).arg(file));
}

/// Reads the documents of a file of YAML.
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
