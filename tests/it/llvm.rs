//! The shipped profile `llvm`: the steps that targets share, and one small library built from the real archive.

use crate::support::env::TestStore;
use fs_err as fs;

/// Overrides the profile as users do. hipcc is left out: only `check` needs it.
const SMALL: &str = r#"
extends = "llvm"
[params]
build = "LLVMDemangle"
[resources]
disk = "2G"
[[step]]
name = "packages"
packages = ["ccache", "clang-21", "cmake", "g++", "lld-21", "ninja-build", "python3", "xz-utils"]
[[step]]
name = "install"
remove = true
[[step]]
name = "check"
remove = true
[[step]]
name = "execute"
remove = true
[[step]]
name = "export"
export = [{ from = "/build/llvm/lib/libLLVMDemangle.a", to = "result" }]
"#;

#[test]
fn the_archive_is_fetched_configured_and_a_library_of_it_built() {
    let store = TestStore::with_image("debian-forky");
    // The machine may be behind a proxy that inspects TLS, with a CA that only the host trusts.
    store.configure("ca-certificates = \"host\"\n");
    let name = store.env();
    let profile = store.work().join(format!("profiles/{name}.toml"));
    fs::write(&profile, format!("schema = 1\n{SMALL}")).unwrap();
    let up = || store.rockenv(&["up", name, "--name", name]).ok();
    let log = |step: &str| store.rockenv(&["logs", name, step]).ok().text();
    up();
    let configured = log("configure");
    for line in [
        "-- clang project is enabled",
        "-- lld project is enabled",
        "-- Targeting X86",
        "-- Targeting AMDGPU",
        "-- Clang version: 21.1.8",
    ] {
        assert!(configured.contains(line), "{line}: {configured}");
    }
    let built = log("build");
    assert!(built.contains("Jobserver mode detected"), "{built}");
    let outputs = store.home().join("outputs").join(name).join("result");
    let library = fs::read(outputs.join("libLLVMDemangle.a")).unwrap();
    assert!(library.starts_with(b"!<arch>"));
    up().says(&["nothing to do"]);
    // Every object of the library is in ccache. `configure` is slow, so the library alone is built again.
    let (hits, misses) = counted(&log("statistics"));
    let again =
        "cd /build/llvm; ninja -t clean LLVMDemangle; ninja LLVMDemangle; ccache --show-log-stats";
    let (hits_again, misses_again) = counted(&store.sh(again).ok().text());
    assert!(hits_again > hits, "{hits} {hits_again}");
    assert_eq!(misses_again, misses);
}

/// Returns the hits and misses that ccache shows.
fn counted(statistics: &str) -> (u32, u32) {
    let count = |label: &str| {
        let mut lines = statistics.lines().map(str::trim_start);
        let line = lines.find_map(|line| line.strip_prefix(label));
        let first = line.and_then(|line| line.split_whitespace().next());
        first
            .and_then(|word| word.parse().ok())
            .unwrap_or_else(|| panic!("{statistics}"))
    };
    (count("Hits:"), count("Misses:"))
}

#[test]
fn targets_share_the_compiler() {
    let store = TestStore::new();
    let keys = |target: &str| store.planned_keys(&["llvm", "--target", target]);
    let (one, other) = (keys("gfx1103"), keys("gfx90a"));
    // Without a GPU, `execute` is skipped and has no key.
    for (step, key) in one.iter().filter(|(step, _)| *step != "execute") {
        let is_same = other[step] == *key;
        let is_common = !["check", "export", "statistics"].contains(&step.as_str());
        assert_eq!(is_same, is_common, "{step}");
    }
}
