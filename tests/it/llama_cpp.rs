//! The shipped profile `llama-cpp`: the steps that targets share, and the affordable steps on the real archive, without
//! the GPU compiler.

use crate::support::env::TestStore;
use fs_err as fs;

/// Overrides the profile as users do. The image has all packages of the profile but these two, and its `/etc/pip.conf`
/// turns the index off until step `index` removes it.
const SMALL: &str = r#"
extends = "llama-cpp"
[params]
options = "-DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF"
build = "ggml-base"
[resources]
disk = "1G"
[[step]]
name = "packages"
packages = ["python3-pip", "python3-scikit-build-core"]
[[step]]
name = "index"
after = "packages"
user = "root"
run = "rm /etc/pip.conf"
[[step]]
name = "isa"
remove = true
[[step]]
name = "test"
remove = true
[[step]]
name = "install"
remove = true
[[step]]
name = "wheel"
remove = true
[[step]]
name = "gpu-test"
remove = true
[[step]]
name = "export"
export = [{ from = "/build/llama/bin", to = "result" }]
"#;

#[test]
fn the_archive_is_fetched_configured_and_compiled_through_ccache() {
    let store = TestStore::with_builder();
    // The machine may be behind a proxy that inspects TLS, with a CA that only the host trusts.
    store.configure("ca-certificates = \"host\"\n");
    let name = store.env();
    let profile = store.work().join(format!("profiles/{name}.toml"));
    fs::write(
        &profile,
        format!("schema = 1\nimage = \"builder\"\n{SMALL}"),
    )
    .unwrap();
    let up = |words: &[&str]| {
        let common = ["up", name, "--name", name, "--from", "pypi"];
        store.rockenv(&[&common[..], words].concat()).ok()
    };
    up(&[]);
    // The archive stands for the same commit and version as the profile's git repository.
    let profile = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/profiles/llama-cpp.toml"
    ));
    let profile: toml::Table = profile.unwrap().parse().unwrap();
    let script = "git -C llama-cpp-python rev-parse HEAD; cat llama-cpp-python/PKG-INFO | sed -n 's/^Version: //p'";
    let [rev, version] = ["rev", "version"].map(|param| profile["params"][param].as_str().unwrap());
    store.sh(script).ok().prints(&format!("{rev}\n{version}"));
    let outputs = store.home().join("outputs").join(name).join("result");
    let library = fs::canonicalize(outputs.join("bin/libggml-base.so")).unwrap();
    assert!(fs::read(library).unwrap().starts_with(b"\x7fELF"));
    let log = |step: &str| store.rockenv(&["logs", name, step]).ok().text();
    let first = ["configure", "build", "statistics"].map(log);
    let [.., counted] = &first;
    assert!(
        counted.contains("Misses:") && !counted.contains("100.0%) Hits"),
        "{counted}"
    );
    up(&[]).says(&["nothing to do"]);
    // `--clean` starts with an empty build volume.
    up(&["--rerun", "build", "--clean"]);
    let again = ["configure", "build", "statistics"].map(log);
    let [.., counted] = &again;
    let hits = counted
        .lines()
        .find(|line| line.trim_start().starts_with("Hits:"));
    assert!(
        hits.is_some_and(|line| line.contains("(100.0%)")),
        "first:\n{}\nagain:\n{}",
        first.join("\n"),
        again.join("\n")
    );
}

#[test]
fn targets_share_what_comes_before_the_configuration() {
    let store = TestStore::new();
    let keys = |target: &str| store.planned_keys(&["llama-cpp", "--target", target]);
    let (one, other) = (keys("gfx1103"), keys("gfx1201"));
    let same = |step: &&str| one[*step] == other[*step];
    assert!(["packages", "fetch", "checker"].iter().all(same));
    assert!(!["configure", "build", "wheel", "export"].iter().any(same));
}
