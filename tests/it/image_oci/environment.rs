//! The variables of a container image: defaults below the profile's, in the keys, and nowhere outside the container. On
//! every engine: `tests/service docker|podman cargo test --test it environment::`.

use fs_err as fs;
use serde_json::{Value, json};

use super::inside::base;
use super::make::{Image, Registry, Tar};
use crate::support::env::TestStore;
use crate::support::run::{Ran, finish, processes, wait_until};
use crate::support::transcript::measured;

/// Returns an image with these variables and almost nothing else.
fn small(env: &Value) -> Image {
    let archive = Tar::default().file("file", "").end();
    let run = json!({ "Env": env });
    Image::of(vec![(archive.clone(), archive)], "amd64", &run, false)
}

/// Returns an image on which steps can run, with these variables.
fn image(env: &Value) -> Image {
    let archive = base(
        Tar::default()
            .dir("opt/tool")
            .file("opt/tool/data", "from the image"),
    );
    let run = json!({ "Env": env });
    Image::of(vec![(archive.clone(), archive)], "amd64", &run, false)
}

/// Gives the store the image as a layout, in place of the tests' base image.
fn give(store: &TestStore, image: &Image) {
    let layout = store.work().join("layout");
    drop(fs::remove_dir_all(&layout));
    fs::create_dir(&layout).unwrap();
    image.layout(&layout);
    let recipe = "schema = 1\nprovider = \"oci\"\n[oci]\npath = \"../layout\"\n";
    fs::write(store.work().join("images/base.toml"), recipe).unwrap();
}

const PATH: &str = "PATH=/opt/tool:/usr/bin:/bin";

const LOOK: &str = r#"
[env]
BOTH = "the profile's"
[[step]]
name = "look"
run = '''env -0 > $HOME/env; env -0 | tr '\n\0' '~\n' '''
[[step]]
name = "own"
env = { RUSTUP_HOME = "/step" }
run = 'echo $RUSTUP_HOME > $HOME/own'
"#;

/// Returns the image's variables from `image ls`.
fn variables(store: &TestStore) -> Value {
    let images = store.rockenv(&["image", "ls", "--json"]).ok().json();
    let mut rows = images.as_array().unwrap().iter();
    let row = rows.find(|row| row["name"] == "base").unwrap();
    row["env"].clone()
}

fn resolved(store: &TestStore) -> Value {
    let words = ["profile", "show", store.env(), "--resolved", "--json"];
    store.rockenv(&words).ok().json()
}

/// Returns a variable that only this test's image has.
fn evil() -> String {
    format!("IMAGE_EVIL={}", std::process::id())
}

#[test]
fn variables_of_an_image_are_defaults_below_the_profile_s() {
    let store = TestStore::new();
    let env = json!([
        PATH,
        "RUSTUP_HOME=/opt/rustup",
        "BOTH=the image's",
        "DOLLAR=${jobs} $${memory} $HOME $",
        "TWO=one\ntwo=2",
        "EMPTY=",
        "LANG=C",
        "RUSTUP_HOME=/opt/rust",
        "LD_PRELOAD=/evil.so",
        "LD_LIBRARY_PATH=/evil",
        "SYSTEMD_NSPAWN_TMPFS_TMP=1",
        evil(),
    ]);
    give(&store, &image(&env));
    store.up_with(LOOK);
    let log = store.rockenv(&["logs", store.env(), "look"]).ok().text();
    let expected = [
        "PATH=/run/rockenv/bin:/opt/tool:/usr/bin:/bin",
        "RUSTUP_HOME=/opt/rust",
        "BOTH=the profile's",
        "DOLLAR=${jobs} $${memory} $HOME $",
        "TWO=one~two=2",
        "EMPTY=",
        "LANG=C",
        "HOME=/home/builder",
    ];
    for line in expected {
        assert!(log.lines().any(|found| found == line), "{line}: {log}");
    }
    store.sh("cat $HOME/own").ok().prints("/step");
    // `exec` and `shell` get the same variables.
    let ran = store.sh("env -0 | tr '\\n\\0' '~\\n'").ok().text();
    for line in expected {
        assert!(ran.lines().any(|found| found == line), "{line}: {ran}");
    }
    let mut shell = store.command(&["shell", store.env()]);
    shell.stdin(script(&store, "echo got $RUSTUP_HOME of $BOTH\n"));
    finish("shell".to_owned(), shell)
        .ok()
        .prints("got /opt/rust of the profile's");
    // `rockenv env`, for using the results, prints only the profile's variables.
    assert!(!store.rockenv(&["env", store.env()]).text().contains("RUST"));
    let spec = resolved(&store);
    assert_eq!(spec["env"]["RUSTUP_HOME"], "/opt/rust");
    assert_eq!(spec["env"]["BOTH"], "the profile's");
    assert_eq!(spec["image_env"]["BOTH"], "the image's");
    assert_eq!(variables(&store)["TWO"], "one\ntwo=2");
    // The profile's own `PATH` wins.
    store
        .up_with("[env]\nPATH = '/usr/bin:/bin'\n[[step]]\nname = 'look'\nrun = 'echo is $PATH'\n");
    let log = store.rockenv(&["logs", store.env(), "look"]).ok().text();
    assert!(log.contains("is /usr/bin:/bin\n"), "{log}");
    reaches_no_program_of_the_host_s(&store);
    store.rockenv(&["--yes", "rm", store.env()]).ok();
    store.assert_clean();
}

/// Opens a file with this script for reading.
fn script(store: &TestStore, text: &str) -> std::process::Stdio {
    let path = store.work().join("script");
    fs::write(&path, text).unwrap();
    fs::File::open(path).unwrap().into_file().into()
}

/// Expects that no process outside the container has a variable of the image while a step runs.
fn reaches_no_program_of_the_host_s(store: &TestStore) {
    // rockenv's own program copies files into the container, without these variables.
    fs::write(store.work().join("profiles/file"), "copied").unwrap();
    let wait = store.sleeper();
    store.profile(&format!(
        "[[step]]\nname = 'file'\ncopy = [{{ from = 'file', to = '/opt/file' }}]\n[[step]]\nname = 'wait'\nrun = '{wait}'\n"
    ));
    let up = store.start(&["up", store.env()]);
    let inside = || {
        let all = processes().into_iter();
        let mut all = all.filter(|(_, line)| *line == wait);
        all.next().map(|(pid, _)| pid)
    };
    wait_until("the step runs", || inside().is_some());
    let has = |pid: i32| {
        let text = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&text).contains(&evil())
    };
    let inner = inside().unwrap();
    assert!(has(inner));
    let space = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    for (pid, line) in processes() {
        let outside = space(pid) != space(inner);
        assert!(!(outside && has(pid)), "{pid}: {line}");
    }
    up.signal(nix::sys::signal::Signal::SIGINT);
    drop(up.wait());
    store.root_sh("cat /opt/file").ok().prints("copied");
}

#[test]
fn variables_of_an_image_are_in_the_keys() {
    let store = TestStore::new();
    let body = "[[step]]\nname = 'one'\nrun = 'true'\n";
    let keys = |env: Value| {
        give(&store, &small(&env));
        store.rockenv(&["image", "build", "base", "--refresh"]).ok();
        store.profile(body);
        let spec = resolved(&store);
        spec["steps"][0]["key"].as_str().unwrap().to_owned()
    };
    let [one, other, again] = ["A=1", "A=2", "A=1"].map(|env| keys(json!([env])));
    assert_ne!(one, other);
    assert_eq!(one, again);
}

#[test]
fn a_lock_file_and_a_pulled_image_have_the_variables() {
    let [one, other] = [TestStore::new(), TestStore::new()];
    let image = image(&json!(["RUSTUP_HOME=/opt/rust"]));
    let name = one.env();
    let body = "[[step]]\nname = 'one'\nrun = 'echo $RUSTUP_HOME > $HOME/one'\n";
    for store in [&one, &other] {
        give(store, &image);
        store.profile_named(name, body);
    }
    let recipe = |store: &TestStore, path: &str| {
        let recipe = format!("schema = 1\nprovider = \"oci\"\n[oci]\npath = \"{path}\"\n");
        fs::write(store.work().join("images/base.toml"), recipe).unwrap();
    };
    // Both stores use the same path, because it is part of the recipe's digest.
    let layout = one.work().join("layout").display().to_string();
    recipe(&one, &layout);
    recipe(&other, &layout);
    one.rockenv(&["up", name]).ok();
    one.rockenv(&["lock", name]).ok();
    let lock = fs::read_to_string(one.work().join(format!("profiles/{name}.lock"))).unwrap();
    assert!(lock.contains("RUSTUP_HOME = \"/opt/rust\""), "{lock}");
    one.rockenv(&["up", name, "--locked"]).ok();
    let registry = Registry::start(false);
    let with = |store: &TestStore, words: &[&str]| -> Ran {
        let mut command = store.command(words);
        command.env("ROCKENV_REGISTRY", format!("{}/team/rocm", registry.host));
        finish(words.join(" "), command)
    };
    with(&one, &["push", name]).ok();
    // The image and the step come from the registry, so nothing is built.
    fs::rename(&layout, one.work().join("moved")).unwrap();
    with(&other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled the image and one"]);
    let words = [
        "exec",
        name,
        "--",
        "sh",
        "-c",
        "cat $HOME/one; echo $RUSTUP_HOME",
    ];
    with(&other, &words).ok().prints("/opt/rust\n/opt/rust");
    // Other programs find the variables in the usual place.
    let files = one.work().join("snapshots.oci");
    one.rockenv(&["export", name, "--snapshots", files.to_str().unwrap()])
        .ok();
    let found = std::process::Command::new("sh")
        .args([
            "-c",
            "grep -rlF '\"Env\":[\"RUSTUP_HOME=/opt/rust\"]' \"$0\"/blobs",
        ])
        .arg(&files)
        .output()
        .unwrap();
    assert!(found.status.success(), "{found:?}");
}

#[test]
fn names_that_are_none_are_left_out_and_a_huge_environment_is_refused() {
    let store = TestStore::new();
    let env = json!(["1A=x", "A-B=x", "=x", "plain", "NUL=a\u{0}b", "GOOD=x"]);
    give(&store, &small(&env));
    insta::assert_snapshot!(measured(store.shows("image build base")), @"
    image base … SIZE
    image base … skipped: variable `1A` of the image: not a variable name
    image base … skipped: variable `A-B` of the image: not a variable name
    image base … skipped: variable `` of the image: not a variable name
    image base … skipped: variable `plain` of the image: not a variable name
    image base … skipped: variable `NUL` of the image: its value contains a NUL byte
    image base … done in TIME
    base: built, 0 packages, digest ID, from sha256:ID
    ");
    let images = store.rockenv(&["image", "ls", "--json"]).ok().text();
    assert!(
        images.contains("\"GOOD\"") && !images.contains("A-B"),
        "{images}"
    );
    give(
        &store,
        &small(&json!([format!("A={}", "x".repeat(100_000))])),
    );
    let huge = store.shows("image build base --refresh");
    give(&store, &small(&json!({ "A": "x" })));
    let refused = huge + &store.shows("image build base --refresh");
    insta::assert_snapshot!(refused, @"
    error: cannot build image `base`
      caused by: refused image: its environment has 100002 bytes (limit 65536)
    help: the image is damaged or was tampered with; use another
    exit code 3
    error: cannot build image `base`
      caused by: refused image: its configuration is invalid
      caused by: invalid type: map, expected a sequence at line 1 column 40
    help: the image is damaged or was tampered with; use another
    exit code 3
    ");
}

#[test]
fn what_docker_save_writes_has_variables_too() {
    let store = TestStore::new();
    let archive = Tar::default().file("file", "").end();
    let run = json!({ "Env": ["RUSTUP_HOME=/opt/rust"] });
    let saved = Image::of(vec![(archive.clone(), archive)], "amd64", &run, true);
    fs::write(store.work().join("saved.tar"), saved.docker_save("base:1")).unwrap();
    let recipe = "schema = 1\nprovider = \"oci\"\n[oci]\npath = \"../saved.tar\"\n";
    fs::write(store.work().join("images/base.toml"), recipe).unwrap();
    store.rockenv(&["image", "build", "base"]).ok();
    assert_eq!(variables(&store)["RUSTUP_HOME"], "/opt/rust");
}
