//! The output for CI systems while an env is built.

use crate::support::env::TestStore;
use crate::support::run::{Ran, finish};
use fs_err as fs;
use serde_json::Value;

/// Output that GitHub's runner would obey, in every place that a profile controls.
const HOSTILE: &str = "
[[step]]
name = 'one'
run = '''
echo '::error::injected'
echo '  ::add-path::injected' >&2
echo 'x ##[set-env name=A]injected'
echo '::rockenv::' '::endgroup::injected'
printf '::warning::injected'
'''
[[step]]
name = 'two'
run = '''
echo '::error::injected'
echo '##[error]injected'
false
'''
";

/// Runs rockenv as a CI system's job does.
fn job(store: &TestStore, variables: &[(&str, &str)], arguments: &[&str]) -> Ran {
    let mut command = store.command(arguments);
    command.envs(variables.iter().copied());
    finish(arguments.join(" "), command)
}

/// Parses a job's output as GitHub's runner does, and returns its commands. A command begins a line, or in the old form
/// stands anywhere in it. After `stop-commands`, the runner ignores commands up to the given word.
fn heard(output: &str) -> Vec<(String, String)> {
    let mut commands = Vec::new();
    let mut stopped: Option<String> = None;
    for line in output.split(['\n', '\r']) {
        let rest = line
            .trim_start()
            .strip_prefix("::")
            .map(|rest| (rest, "::"));
        let rest = rest.or_else(|| line.split_once("##[").map(|(_, rest)| (rest, "]")));
        let Some((head, data)) = rest.and_then(|(rest, end)| rest.split_once(end)) else {
            continue;
        };
        let name = head.split(' ').next().unwrap();
        match &stopped {
            Some(word) if word == name => stopped = None,
            Some(_) => {}
            None if name == "stop-commands" => stopped = Some(data.to_owned()),
            None => commands.push((name.to_owned(), data.to_owned())),
        }
    }
    assert_eq!(stopped, None, "nothing would be heard any more:\n{output}");
    commands
}

fn names(commands: &[(String, String)]) -> Vec<&str> {
    commands.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn github_folds_steps_and_obeys_nobody_else() {
    let store = TestStore::new();
    let summary = store.work().join("summary");
    fs::write(&summary, "before\n").unwrap();
    // The caller owns the runner's summary file.
    std::os::unix::fs::chown(&summary, Some(1234), Some(1234)).unwrap();
    let github = [
        ("GITHUB_ACTIONS", "true"),
        ("GITHUB_STEP_SUMMARY", summary.to_str().unwrap()),
    ];
    store.profile(HOSTILE);
    for verbose in [&["-v"][..], &[]] {
        let ran = job(&store, &github, &[verbose, &["up", store.env()]].concat());
        let ran = ran.exits(5);
        let said = format!("{}{}", ran.err, ran.text());
        let commands = heard(&said);
        // The second time, only the failed step runs.
        let groups: &[&str] = match verbose {
            [] => &["group", "endgroup", "error"],
            _ => &["group", "endgroup", "group", "endgroup", "error"],
        };
        assert_eq!(names(&commands), groups, "{said}");
        assert!(!commands.iter().any(|(_, data)| data.contains("injected")));
        let (_, error) = commands.last().unwrap();
        assert!(
            error.starts_with("step `two` failed with exit code 1%0Ahelp: "),
            "{error}"
        );
        // The hostile output is still in the log.
        assert!(said.contains("injected"), "{said}");
    }
    let page = fs::read_to_string(&summary).unwrap();
    assert!(page.starts_with("before\n"), "{page}");
    assert!(page.contains("| two | failed |"), "{page}");
    assert!(page.contains("\n## Largest on disk\n"), "{page}");
    // A summary that cannot be written does not fail the build.
    store.profile("[[step]]\nname = 'one'\nrun = 'true'\n");
    let nowhere = store.work().join("none/summary");
    let github = [
        github[0],
        ("GITHUB_STEP_SUMMARY", nowhere.to_str().unwrap()),
    ];
    let ran = job(&store, &github, &["up", store.env()]).ok();
    let commands = heard(&ran.err);
    assert_eq!(names(&commands), ["group", "endgroup", "warning"]);
    assert!(commands[2].1.contains("the job's summary"), "{commands:?}");
    // A failure before the first step is reported too.
    let ran = job(&store, &github, &["up", "no-such-profile"]).exits(7);
    assert_eq!(names(&heard(&ran.err)), ["error"]);
    let up = ["up", "no-such-profile", "--progress", "json"];
    let event = store.rockenv(&up).exits(7).json();
    assert_eq!(event["event"], "finished");
    assert_eq!(event["outcome"], "failed");
}

#[test]
fn github_obeys_no_output_of_steps_that_is_shown_later() {
    let store = TestStore::new();
    store.profile(&format!("description = 'x ##[error]injected'\n{HOSTILE}"));
    let github = [("GITHUB_ACTIONS", "true")];
    let env = store.env();
    let events = job(&store, &github, &["up", env, "--progress", "json"]).exits(5);
    let shown = [
        events,
        job(&store, &github, &["logs", env, "one"]).ok(),
        job(&store, &github, &["logs", env, "two", "--times"]).ok(),
        job(&store, &github, &["report", env, "--markdown", "-o", "-"]).ok(),
        job(&store, &github, &["report", env, "--json"]).ok(),
    ];
    for ran in shown {
        let text = ran.text();
        assert!(text.contains("injected"), "{text}");
        assert_eq!(names(&heard(&text)), [""; 0], "{text}");
    }
    // Machine-readable values and files contain the steps' output unchanged.
    let values = |variables: &[(&str, &str)]| {
        let shown = job(&store, variables, &["profile", "show", env, "--json"]).ok();
        assert_eq!(heard(&shown.text()), []);
        shown.json()
    };
    let value = values(&github);
    assert!(value.to_string().contains("x ##[error]injected"), "{value}");
    assert_eq!(value, values(&[]));
    let mut command = store.command(&["logs", env, "one"]);
    let file = store.work().join("log");
    command.env("GITHUB_ACTIONS", "true");
    command.stdout(fs::File::create(&file).unwrap().into_file());
    assert!(command.status().unwrap().success());
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\n  ::add-path::injected\n"), "{text}");
}

#[test]
fn gitlab_folds_steps() {
    let store = TestStore::new();
    store.profile(HOSTILE);
    let ran = job(&store, &[("GITLAB_CI", "true")], &["-v", "up", store.env()]).exits(5);
    let sections: Vec<&str> = ran
        .err
        .split("\x1b[0Ksection_")
        .skip(1)
        .map(|part| part.split_once("\r\x1b[0K").unwrap().0)
        .collect();
    let kinds: Vec<&str> = sections
        .iter()
        .map(|one| one.split(':').next().unwrap())
        .collect();
    assert_eq!(kinds, ["start", "end", "start", "end"], "{}", ran.err);
    let name = |one: &str| {
        one.split(':')
            .nth(2)
            .unwrap()
            .split('[')
            .next()
            .unwrap()
            .to_owned()
    };
    assert_eq!(name(sections[0]), name(sections[1]));
    assert_ne!(name(sections[1]), name(sections[2]));
    ran.says(&["error: step `two` failed"]);
}

#[test]
fn a_matrix_is_told_as_one() {
    let store = TestStore::new();
    let summary = store.work().join("summary");
    let github = [
        ("GITHUB_ACTIONS", "true"),
        ("GITHUB_STEP_SUMMARY", summary.to_str().unwrap()),
    ];
    let own = "[[step]]\nname = 'own'\nrun = 'echo ::error::injected; test ${target} != gfx1103'\n";
    store.profile(&format!("{}{own}", HOSTILE.replace("\nfalse\n", "\n")));
    let asked = [
        "-v",
        "matrix",
        "up",
        "-p",
        store.env(),
        "gfx1100",
        "gfx1103",
    ];
    let ran = job(&store, &github, &asked).exits(5);
    let mut commands = heard(&ran.err);
    // On a busy machine, a step may have to wait for a job slot, which is a warning.
    commands.retain(|(name, _)| name != "warning");
    assert_eq!(
        names(&commands),
        ["group", "endgroup", "group", "endgroup", "error"],
        "{}",
        ran.err
    );
    let failed = format!(
        "{}-gfx1103: step `own` failed with exit code 1",
        store.env()
    );
    assert_eq!(commands[4].1, failed);
    let page = fs::read_to_string(&summary).unwrap();
    let rows: Vec<&str> = page
        .lines()
        .filter(|line| line.contains("gfx110"))
        .collect();
    assert_eq!(rows.len(), 3, "{page}");
    assert!(rows[2].contains("| failed |"), "{page}");
}

#[test]
fn metrics_have_a_row_for_each_step() {
    let store = TestStore::new();
    let steps = "
[[volume]]
name = 'ccache'
kind = 'cache'
target = '/cache/ccache'
[[step]]
name = 'one'
run = 'head -c 2M /dev/urandom > ~/one'
[[step]]
name = 'cached'
run = '''
mkdir -p /cache/ccache/0 && touch /cache/ccache/ccache.conf
printf '0\\n0\\n0\\n0\\n3\\n0\\n0\\n0\\n0\\n' > /cache/ccache/0/stats
'''
[[step]]
name = 'gpu'
gpu = true
run = 'true'
[[step]]
name = 'bad'
run = 'false'
";
    store.profile(steps);
    let file = store.work().join("rows.jsonl");
    let up = [
        "up",
        store.env(),
        "--gpu",
        "none",
        "--jobs",
        "1",
        "--metrics",
    ];
    let up = [&up[..], &[file.to_str().unwrap()]].concat();
    store.rockenv(&up).exits(5);
    store.profile(&steps.replace("'false'", "'true'"));
    store.rockenv(&up).ok();
    store.rockenv(&up).ok();
    // Nothing is left to do up to the step. Later steps have no row, as in an `up` that runs steps.
    let until = [&up[..], &["--until", "cached"]].concat();
    store.rockenv(&until).ok();
    let text = fs::read_to_string(&file).unwrap();
    let rows: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let told: Vec<String> = rows
        .iter()
        .map(|row| format!("{} {}", row["step"], row["outcome"]).replace('"', ""))
        .collect();
    let runs = [
        ["one done", "cached done", "gpu skipped", "bad failed"],
        ["one hit", "cached hit", "gpu skipped", "bad done"],
        ["one hit", "cached hit", "gpu skipped", "bad hit"],
    ];
    let until = ["one hit", "cached hit"];
    assert_eq!(told, [&runs.concat()[..], &until].concat());
    assert!(rows[0]["disk_delta"].as_i64().unwrap() >= 2 << 20, "{text}");
    assert_eq!(
        (&rows[0]["jobs"], &rows[0]["env"]),
        (&1.into(), &store.env().into())
    );
    assert_eq!(rows[0]["cache_misses"], Value::Null);
    assert_eq!(
        (&rows[1]["cache_misses"], &rows[1]["cache_hits"]),
        (&3.into(), &0.into())
    );
    assert_eq!(rows[4]["wall_ms"], 0);
    let nowhere = store.work().join("none/rows");
    let up = ["up", store.env(), "--metrics", nowhere.to_str().unwrap()];
    insta::assert_snapshot!(store.shown(&store.rockenv(&up)), @"
    error: cannot write to `WORK/none/rows`
      caused by: `WORK/none` does not exist
    help: --metrics FILE, in an existing directory
    exit code 7
    ");
    insta::assert_snapshot!(store.shown(&store.rockenv(&["up", store.env(), "--metrics", "-"])), @"
    error: `-` is not the name of a file
    help: --metrics FILE, in an existing directory
    exit code 2
    ");
}
