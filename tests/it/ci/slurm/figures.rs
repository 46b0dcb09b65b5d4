//! Slurm's figures of the jobs, and arrays of many envs.

use super::*;

/// A profile with a step that holds more than 200 MB for some seconds.
const LARGE: &str = r#"
[resources]
memory = '400M'
[[step]]
name = 'one'
run = 'true'
[[step]]
name = 'own'
run = '''perl -e '$text = "${target}" x 30_000_000; sleep 3' '''
"#;

/// Returns the command from the documentation that shows what Slurm measured.
fn documented_sacct() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/how-to/clusters.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, command) = page.split_once("\n$ sacct ").unwrap();
    let mut lines = Vec::new();
    for line in command.lines() {
        lines.push(line);
        if !line.ends_with('\\') {
            break;
        }
    }
    format!("sacct {}", lines.join("\n"))
}

/// Parses the table of `sacct` into rows with named fields.
fn table(text: &str) -> Vec<BTreeMap<String, String>> {
    let [names, rules, rows @ ..] = &text.lines().collect::<Vec<_>>()[..] else {
        return Vec::new();
    };
    let mut at = 0;
    let columns: Vec<_> = rules
        .split(' ')
        .map(|rule| {
            let column = at..at + rule.len();
            at = column.end + 1;
            column
        })
        .filter(|column| !column.is_empty())
        .collect();
    let cell = |line: &str, column: &Range<usize>| line[column.clone()].trim().to_owned();
    let fields = |row: &&str| {
        let fields = columns.iter();
        fields
            .map(|column| (cell(names, column), cell(row, column)))
            .collect()
    };
    rows.iter().map(fields).collect()
}

#[test]
fn sacct_has_the_figures_of_the_job_of_each_row() {
    let store = TestStore::new();
    store.profile(LARGE);
    let slurm = Slurm::with_accounts();
    let rows = store.work().join("rows.jsonl");
    submit(&store, &slurm, &["--", "--metrics", rows.to_str().unwrap()]).ok();
    assert!(slurm.ended().iter().all(|job| job.ends_with(" COMPLETED")));
    let rows = fs::read_to_string(rows).unwrap();
    let rows: Vec<Value> = rows
        .lines()
        .map(|row| serde_json::from_str(row).unwrap())
        .collect();
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let jobs: BTreeSet<String> = rows.iter().map(|row| text(row, "slurm_job")).collect();
    assert_eq!(jobs.len(), 3, "{rows:?}");

    // Runs the documented command until the database has the last job.
    let command = documented_sacct();
    let mut known = Vec::new();
    wait_for("the database does not know how the jobs ended", || {
        let mut shell = slurm.tool("bash");
        shell.args(["-ec", &command]).current_dir(store.work());
        let printed = run(&mut shell);
        known = table(&printed);
        let ended = known.iter().filter(|row| row["State"] == "COMPLETED");
        match ended.count() {
            6 => Ok(()),
            _ => Err(printed + &slurm.log("slurmdbd")),
        }
    });
    for job in jobs {
        let find = |id: &str| known.iter().find(|row| row["JobIDRaw"] == id).unwrap();
        let (own, batch) = (find(&job), find(&format!("{job}.batch")));
        let times = ["Eligible", "Start"].map(|name| own[name].parse::<DateTime>().unwrap());
        assert!(times.is_sorted(), "{own:?}");
        assert_eq!(own["ReqMem"], "400M");
        // A job may end before Slurm's first sample.
        let used = batch["MaxRSS"].trim_end_matches('M');
        let used: f64 = used.parse().unwrap_or_default();
        let large = rows.iter().filter(|row| text(row, "slurm_job") == job);
        let large = large.filter(|row| row["step"] == "own").count();
        // With systemd-nspawn and without systemd, a container's processes belong to the job.
        assert!(used >= [0., 200.][large], "{batch:?}");
        assert!(own["Elapsed"].as_str() >= ["00:00:00", "00:00:03"][large]);
        assert_ne!(own["TotalCPU"], "00:00:00");
    }
    for target in ["gfx1103", "gfx1201"] {
        store
            .rockenv(&["--yes", "rm", &format!("{}-{target}", store.env())])
            .ok();
    }
}

#[test]
fn an_array_of_twelve_runs_each_env_once() {
    let store = TestStore::new();
    let text = "[resources]\nmemory = '100M'\n[[volume]]\nname = 'runs'\nkind = 'host'\naccess = 'rw'\npath = 'OUT'
target = '/runs'\n[[step]]\nname = 'one'\nrun = 'echo one >> /runs/log'\n[[step]]\nname = 'own'
run = 'echo ENV-${target} >> /runs/log'\n"
        .replace("OUT", &store.runs().display().to_string());
    let profiles = ["a", "b", "c"].map(|name| format!("{}{name}", store.env()));
    let targets = store.rockenv(&["target", "ls", "--json"]).ok().text();
    let targets: Vec<Value> = serde_json::from_str(&targets).unwrap();
    let targets = targets.iter().take(4);
    let targets: Vec<&str> = targets.map(|row| row["target"].as_str().unwrap()).collect();
    let mut asked = targets.clone();
    let mut expected = vec!["one".to_owned()];
    for profile in &profiles {
        store.profile_named(profile, &text.replace("ENV", profile));
        asked.extend(["--profile", profile]);
        expected.extend(targets.iter().map(|target| format!("{profile}-{target}")));
    }
    expected.sort();
    assert_eq!(expected.len(), 13);
    let slurm = Slurm::start();
    // The node has 1024 processors, so eight jobs run at once.
    let options = ["--sbatch=--hold", "--sbatch=--cpus-per-task=128"];
    let submitted = submit_all(&store, &slurm, &asked, &options).ok().text();
    assert_eq!(submitted.lines().count(), 13, "{submitted}");
    let queue = run(slurm.tool("squeue").args(["--noheader", "--array"]));
    assert_eq!(queue.lines().count(), 13, "{queue}");
    let held = run(slurm.tool("squeue").args(["--noheader", "--format=%A"]));
    let mut held: Vec<&str> = held.lines().collect();
    held.dedup();
    run(slurm.tool("scontrol").args(["release", &held.join(",")]));
    let mut ended = slurm.ended();
    ended.dedup();
    let array = format!("envs-{}", expected[1]);
    let expected_jobs = ["common".to_owned(), array].map(|name| format!("{name} COMPLETED"));
    assert_eq!(ended, expected_jobs);
    assert_eq!(store.ran(), expected);
}

#[test]
fn the_env_that_took_longest_is_the_first_task() {
    let store = TestStore::new();
    let profiles = ["a", "b"].map(|name| format!("{}{name}", store.env()));
    for (profile, run) in profiles.iter().zip(["true", "sleep 5; :"]) {
        let text = format!("[[step]]\nname = 'own'\nrun = '{run} ${{target}}'\n");
        store.profile_named(profile, &text);
    }
    let [quick, slow] = profiles.each_ref().map(String::as_str);
    let tasks = || {
        let asked = ["matrix", "slurm", "gfx1201", "--profile", quick];
        let script = store.rockenv(&[&asked[..], &["--profile", slow]].concat());
        let script = script.ok().text();
        let lines = script.lines().filter(|line| line.starts_with("echo "));
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        let queued = script.lines().find(|line| line.starts_with("queued="));
        (lines, queued.unwrap().to_owned())
    };
    let task =
        |number: usize, profile: &str| format!("echo {profile}-gfx1201\" ${{array0}}_{number}\"");
    let (before, queued) = tasks();
    assert_eq!(before, [task(0, quick), task(1, slow)]);
    // The other target's steps have not run. Their expected time is that of the last step with the same name.
    for profile in [quick, slow] {
        store.rockenv(&["up", profile, "--target", "gfx1103"]).ok();
    }
    assert_eq!(tasks(), (vec![task(0, slow), task(1, quick)], queued));
}
