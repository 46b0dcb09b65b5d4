//! `rockenv report` on real builds: it shows what the steps used, Chromium renders it without a complaint, and it
//! replaces nothing but another report.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::env::TestStore;
use crate::support::loopfs::run;
use fs_err as fs;
use serde_json::Value;

/// Two steps that use resources, one that is skipped, and one that fails with output that a page must escape.
const PROFILE: &str = r#"
[[volume]]
name = "build"
kind = "build"
target = "/build"
[[step]]
name = "hungry"
run = """
head -c 48M /dev/urandom > $HOME/large
perl -e 'my $held = "x" x (96 << 20); while (1) { my ($user, $system) = times; last if $user + $system > 1.7 }'
"""
[[step]]
name = "gpu"
gpu = true
run = "true"
[[step]]
name = "broken"
run = "echo '<script>alert(1)</script>'; echo '</pre><b>bold</b>' >&2; exit 3"
"#;

fn failed_build() -> TestStore {
    let store = TestStore::new();
    store.profile(PROFILE);
    store
        .rockenv(&["up", store.env(), "--gpu", "none"])
        .exits(5);
    store
}

/// Runs a real ninja in the build volume, with a target name that a page must escape.
fn build_with_ninja(store: &TestStore) {
    let volumes = fs::read_dir(store.home().join("volumes")).unwrap();
    let volume = volumes.flatten().next().unwrap().path();
    let directory = volume.join("math-libs/rocBLAS/build");
    fs::create_dir_all(&directory).unwrap();
    let build = "rule slow\n  command = sleep 0.2; touch $out\nbuild a.o: slow\nbuild <script>alert(2)</script>.o: slow\n";
    fs::write(directory.join("build.ninja"), build).unwrap();
    run(Command::new("ninja").arg("-C").arg(&directory));
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("not a number: {value}"))
}

/// Renders a page in Chromium and returns the DOM after its script has run. Fails on any console message.
fn show(page: &Path) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            "--dump-dom",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("file://{}", page.display()))
        .env("HOME", profile.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let console: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("CONSOLE"))
        .collect();
    assert!(console.is_empty(), "{console:#?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_failed_build_is_told_as_it_was() {
    let store = failed_build();
    build_with_ninja(&store);
    let report: Value = serde_json::from_str(
        &store
            .rockenv(&["report", store.env(), "--json"])
            .ok()
            .text(),
    )
    .unwrap();
    assert_eq!(report["verdict"], "failed");
    let outcomes: Vec<&Value> = report["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| &step["outcome"])
        .collect();
    assert_eq!(outcomes, ["done", "skipped", "failed"]);

    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    let samples = runs[0]["samples"].as_array().unwrap();
    let most = |field: &str| {
        samples
            .iter()
            .filter_map(|sample| sample[field].as_u64())
            .max()
            .unwrap()
    };
    assert!(samples.len() >= 6, "{samples:#?}");
    assert!(
        (96 << 20..256 << 20).contains(&most("memory")),
        "{samples:#?}"
    );
    assert!(most("cpu_ms") > 200 && most("jobs") >= 1, "{samples:#?}");
    // Other processes write and delete on this disk too.
    assert!(
        samples.iter().any(|sample| sample["disk"] != 0),
        "{samples:#?}"
    );
    assert!(most("at_ms") <= number(&runs[0]["wall_ms"]));
    assert!(number(&report["steps"][0]["cost"]["disk_delta"]) >= 48 << 20);

    assert_eq!(
        report["builds"][0]["directory"],
        "build/math-libs/rocBLAS/build"
    );
    assert_eq!(number(&report["builds"][0]["edges"]), 2);
    assert!(number(&report["slowest"][1]["took_ms"]) >= 200);
    let space = report["space"].as_array().unwrap();
    assert!(space.iter().any(|row| row["name"] == "snapshot hungry"));

    let said = store.rockenv(&["report", store.env()]).ok().text();
    let name = format!("{}-report.html", store.env());
    assert_eq!(said.trim(), name);

    // One memory figure everywhere: the one from the samples, beside the peak with page cache.
    let usage = &report["steps"][0]["cost"]["usage"];
    let memory = number(&usage["memory_held"]);
    assert!(memory >= most("memory") && memory < number(&usage["memory_peak"]));
    let status = store.rockenv(&["status", store.env()]).ok().text();
    let [titles, row] = ["step ", "hungry "].map(|begin| {
        let line = status.lines().find(|line| line.starts_with(begin)).unwrap();
        let cells = line.split("  ").map(str::trim);
        let cells = cells.filter(|cell| !cell.is_empty());
        cells.map(str::to_owned).collect::<Vec<_>>()
    });
    assert_eq!(titles[4..6], ["memory", "with page cache"], "{status}");
    let page = fs::read_to_string(store.work().join(&name)).unwrap();
    for cell in &row[4..6] {
        assert!(page.contains(&format!(">{cell}<")), "{cell}: {status}");
    }
    let page = store.work().join(&name);
    let shown = show(&page);
    for id in [
        "timeline",
        "failure",
        "steps",
        "builds",
        "slowest",
        "space",
        "environment",
    ] {
        assert!(shown.contains(&format!("<h2 id=\"{id}\">")), "{id}");
    }
    assert_eq!(shown.matches("<svg class=\"lane\"").count(), 3);
    assert_eq!(shown.matches("<svg class=\"chart\"").count(), 4);
    assert_eq!(shown.matches("<rect class=\"failed\"").count(), 1);
    assert_eq!(shown.matches("<script").count(), 1);
    assert!(
        shown
            .contains("&lt;script&gt;alert(1)&lt;/script&gt;\n&lt;/pre&gt;&lt;b&gt;bold&lt;/b&gt;")
    );
    assert!(shown.contains("&lt;script&gt;alert(2)&lt;/script&gt;.o"));

    let text = store
        .rockenv(&["report", store.env(), "--markdown", "-o", "-"])
        .ok()
        .text();
    assert!(text.contains("| hungry | done |"), "{text}");
    assert!(text.contains("\n    <script>alert(1)</script>\n"), "{text}");
    // The samples lie beside the log, and `logs` still shows the log.
    assert!(
        store
            .rockenv(&["logs", store.env()])
            .ok()
            .text()
            .contains("bold")
    );
}

#[test]
fn a_repository_of_this_machine_is_not_named() {
    let store = TestStore::new();
    let origin = store.work().join("origin");
    crate::support::git::repository(&origin, "file", "text");
    let (uid, gid) = crate::support::env::build_user();
    run(Command::new("chown")
        .args(["-R", &format!("{uid}:{gid}")])
        .arg(&origin));
    store.up_with(&format!(
        "[[volume]]\nname = 'own'\nkind = 'source'\ntarget = '/own'\ngit = 'file://{}'\nrev = 'main'\n\
         [[step]]\nname = 'one'\nrun = 'true'\n",
        origin.display()
    ));
    for form in [&["--json"][..], &["--markdown", "-o", "-"], &["-o", "-"]] {
        let asked = [&["report", store.env()], form].concat();
        let text = store.rockenv(&asked).ok().text();
        assert!(text.contains("a local repository"), "{text}");
        assert!(!text.contains(origin.to_str().unwrap()), "{text}");
    }
    // A global option may precede the command.
    for more in [&["--markdown"][..], &["-o", "page"], &["--force"]] {
        let asked = [&["--json", "report", store.env()][..], more].concat();
        insta::allow_duplicates! {
            insta::assert_snapshot!(store.rockenv(&asked).shown(), @"
            error: `--json` cannot be combined with `--markdown`, `--output` or `--force`
            help: leave out --json
            exit code 2
            ");
        }
    }
    // A command inside names a clone that is gone.
    fs::remove_dir_all(store.home().join("sources")).unwrap();
    insta::assert_snapshot!(store.shows("exec ENV -- true"), @"
    error: source `own` is missing from the store
    help: rockenv up ENV
    exit code 7
    ");
}

/// Returns the values of one name in the report's part on the lock file, in order.
fn locked(store: &TestStore, name: &str) -> Vec<String> {
    let ran = store.rockenv(&["report", store.env(), "--json"]);
    let report = ran.ok().json();
    let rows = report["lock"].as_array().unwrap().iter();
    rows.filter(|row| row["name"] == name)
        .map(|row| row["value"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn the_lock_file_is_told_with_what_is_not_as_it_says() {
    let store = TestStore::new();
    let env = store.env();
    let profile = |second: &str| {
        let step = |name: &str, run: &str| format!("[[step]]\nname = '{name}'\nrun = '{run}'\n");
        store.profile(&format!("{}{}", step("one", "true"), step("two", second)));
    };
    profile("true");
    store.up();
    assert!(locked(&store, "lock file").is_empty());
    store.rockenv(&["lock", env]).ok();
    let lock = store.work().join(format!("profiles/{env}.lock"));
    let digest = run(Command::new("sha256sum").arg(&lock));
    let digest = format!("sha256:{}", digest.split(' ').next().unwrap());
    // The lock file lies beside the profile, but the build did not follow it.
    assert_eq!(locked(&store, "lock file"), [digest.as_str()]);
    assert!(locked(&store, "built from it")[0].starts_with("no: "));
    store.rockenv(&["up", env, "--locked"]).ok();
    assert_eq!(locked(&store, "built from it"), ["yes"]);
    let same = "nothing: the env matches it";
    assert_eq!(locked(&store, "drifted"), [same]);
    let fork = format!("{env}-fork");
    store.rockenv(&["fork", env, &fork]).ok();
    let forked = store.rockenv(&["report", &fork, "--json"]).ok().text();
    assert!(forked.contains(&digest), "{forked}");

    profile("echo other");
    store.rockenv(&["lock", env]).ok();
    let newer = "the lock file was rewritten after the env was built from it";
    assert_eq!(locked(&store, "drifted"), [newer]);
    assert_eq!(locked(&store, "lock file"), [digest.as_str()]);
    let copy = store.home().join("envs").join(env).join("locked.toml");
    fs::write(copy, "version = 1\n").unwrap();
    assert!(locked(&store, "lock file")[0].contains("lost or damaged"));
    profile("echo another");
    store.up();
    assert!(locked(&store, "built from it")[0].starts_with("no: "));
    let other = "step `two` differs from the lock file";
    assert_eq!(locked(&store, "drifted"), [other]);
    let page = store.rockenv(&["report", env, "-o", "-"]).ok().text();
    assert!(
        page.contains("<h2 id=\"lock\">") && page.contains("step `two`"),
        "{page}"
    );
    // The report ignores a file that is no lock file.
    fs::write(&lock, "version = 1\n").unwrap();
    assert!(locked(&store, "lock file").is_empty());
}

#[test]
fn nothing_but_a_report_is_replaced() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = \"one\"\nrun = \"true\"\n");
    store.up();
    let (env, work) = (store.env(), store.work());
    let first = work.join("first.html");
    for _ in 0..2 {
        store
            .rockenv(&["report", env, "--output", "first.html"])
            .ok();
    }
    let before = fs::read_to_string(&first).unwrap();
    // A report in Markdown may replace one in HTML.
    store
        .rockenv(&["report", env, "--markdown", "-o", "first.html"])
        .ok();
    assert_ne!(fs::read_to_string(&first).unwrap(), before);

    fs::write(work.join("thesis.html"), "years of work").unwrap();
    let said = store.shows(
        "report ENV --output thesis.html
        report ENV --output absent/page.html
        report nobody",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv report ENV --output thesis.html
    error: `thesis.html` already exists and is not a report
    help: `--force` replaces it; `--output FILE` writes elsewhere
    exit code 2
    $ rockenv report ENV --output absent/page.html
    error: cannot write to `absent/page.html`
      caused by: `absent` does not exist
    help: name a file in an existing directory
    exit code 7
    $ rockenv report nobody
    error: no env `nobody`
    help: rockenv ls
    exit code 7
    ");
    assert_eq!(
        fs::read_to_string(work.join("thesis.html")).unwrap(),
        "years of work"
    );
    store
        .rockenv(&["report", env, "--force", "-o", "thesis.html"])
        .ok();
    assert!(
        fs::read_to_string(work.join("thesis.html"))
            .unwrap()
            .starts_with("<!DOCTYPE html>")
    );

    // `--force` neither writes through a link nor replaces a directory.
    fs_err::os::unix::fs::symlink("first.html", work.join("link.html")).unwrap();
    fs::create_dir(work.join("directory.html")).unwrap();
    for place in ["link.html", "directory.html"] {
        store
            .rockenv(&["report", env, "--force", "-o", place])
            .exits(2);
    }
    // No partial page is left.
    let left = fs::read_dir(work).unwrap().flatten();
    let mut names = left.map(|entry| entry.file_name().into_string().unwrap());
    assert!(!names.any(|name| name.starts_with('.')));
}
