//! The shipped profile `rocm-libs`: the steps that targets share, and a real header-only library, built with the real
//! GPU compiler.

use crate::support::env::TestStore;
use fs_err as fs;

/// Only rocPRIM: the steps of the other components report that they are left out.
const SMALL: &str = r#"
extends = "rocm-libs"
[params]
components = "rocprim"
[resources]
disk = "2G"
[[step]]
name = "packages"
packages = ["ccache", "cmake", "hipcc", "ninja-build", "rocm-cmake"]
[[step]]
name = "rocprim-test"
remove = true
"#;

#[test]
fn a_header_only_library_is_fetched_installed_and_used_by_a_hip_program() {
    let store = TestStore::with_image("debian-forky");
    // The machine may be behind a proxy that inspects TLS, with a CA that only the host trusts.
    store.configure("ca-certificates = \"host\"\n");
    let name = store.env();
    let profile = store.work().join(format!("profiles/{name}.toml"));
    fs::write(&profile, format!("schema = 1\n{SMALL}")).unwrap();
    store.rockenv(&["up", name, "--name", name]).ok();
    let log = |step: &str| store.rockenv(&["logs", name, step]).ok().text();
    for step in ["rocrand", "rocfft", "rocblas", "rocsparse", "hipsolver"] {
        let expected = format!("left out: {step} is not among the components");
        assert!(log(step).contains(&expected), "{step}: {}", log(step));
    }
    // The consumer found the library in the prefix, and its code is for the target.
    let built = log("consumer");
    for line in [
        "with rocprim 3.4.1",
        "entry gfx1103, ELF machine gfx1103, note gfx1103",
    ] {
        assert!(built.contains(line), "{built}");
    }
    assert!(!built.contains("with rocrand"), "{built}");
    let result = store.home().join("outputs").join(name).join("result/rocm");
    for file in [
        "include/rocprim/rocprim.hpp",
        "lib/cmake/rocprim/rocprim-config.cmake",
    ] {
        assert!(result.join(file).is_file(), "{file}");
    }
    store
        .rockenv(&["up", name, "--name", name])
        .ok()
        .says(&["nothing to do"]);
}

#[test]
fn three_targets_fetch_and_install_the_headers_once() {
    let store = TestStore::new();
    let keys = |target: &str| store.planned_keys(&["rocm-libs", "--target", target]);
    let [one, two, three] = ["gfx1103", "gfx1201", "gfx90a"].map(keys);
    let common = [
        "packages",
        "sources",
        "fetch",
        "scripts",
        "hipblas-common",
        "rocprim",
        "hipcub",
        "rocthrust",
    ];
    // Without a GPU, `gpu-test` is skipped and has no key.
    for (step, key) in one.iter().filter(|(step, _)| *step != "gpu-test") {
        let is_same = two[step] == *key && three[step] == *key;
        assert_eq!(is_same, common.contains(&step.as_str()), "{step}");
    }
}
