//! Owns `logs`: shows a step's output, complete or as it grows.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use fs_err as fs;

use crate::execute::log::{Reader, text_of};
use crate::plan::ids::EnvName;
use crate::plan::record::Outcome;
use crate::plan::step_log::{StepLog, run_name};
use crate::store::{Store, check_name};
use crate::sys::error::{Error, Result, if_exists};
use crate::sys::suggest;
use crate::up::context::Context;
use crate::up::stop_and_lock::holder;

/// Polling interval for a growing log.
const PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub struct LogsArgs {
    /// The env [default: the only one]
    #[arg(value_name = "ENV")]
    name: Option<String>,
    /// The step [default: the last one that ran]
    step: Option<String>,
    /// Follow the output while the step runs
    #[arg(short, long)]
    follow: bool,
    /// Show the time and stream of each line
    #[arg(short, long)]
    times: bool,
    /// Show every byte as the step wrote it, including terminal control sequences
    #[arg(long)]
    raw: bool,
}

/// Shows a log; with `--follow` also the logs of later steps.
pub(crate) fn logs(cx: &Context, args: &LogsArgs) -> Result<()> {
    if cx.json {
        return Err(usage!("`logs` has no `--json`")
            .help("`--times` shows the time and stream of each line"));
    }
    let store = cx.existing_store()?;
    let (name, step) = chosen(&store, args)?;
    let (name, step) = (&name, step.as_deref());
    let path_of = |log: &StepLog| store.env_dir(name).join(log.to_string());
    let mut shown = loop {
        // The order matters: a step that begins in between is found.
        let begins = args.follow && is_awaited(&store, name, step, None)?;
        if let Some(newest) = all(&store, name, step, "")?.pop_last() {
            break newest;
        }
        if !begins {
            return Err(none(&store, name, step));
        }
        std::thread::sleep(PERIOD);
    };
    let mut log = Reader::open(&path_of(&shown))?;
    let mut is_silent = true;
    loop {
        // The order matters: after these two queries, a read sees everything written before the end.
        let running = args.follow && is_awaited(&store, name, step, Some(&shown))?;
        let next = match args.follow {
            true => all(&store, name, step, &shown.run)?
                .into_iter()
                .find(|other| *other > shown),
            false => None,
        };
        while let Some(lines) = log.lines()? {
            is_silent = false;
            show(cx, &lines, args);
        }
        cx.ui.flush();
        if cx.ui.closed() {
            return Ok(());
        }
        if next.is_none() && running {
            std::thread::sleep(PERIOD);
            continue;
        }
        if let Some(rest) = log.rest() {
            is_silent = false;
            show(cx, &rest, args);
        }
        let Some(next) = next else {
            if is_silent {
                let step = &shown.step;
                cx.ui
                    .note(&format!("step `{step}` of env `{name}` printed nothing"));
            }
            return Ok(());
        };
        log = Reader::open(&path_of(&next))?;
        shown = next;
    }
}

/// Returns whether an `up` may still append to the log or begin a later one to follow. With `step`, only that step
/// counts. `shown` is `None` if no step has a log yet that could be shown.
fn is_awaited(
    store: &Store,
    env: &EnvName,
    step: Option<&str>,
    shown: Option<&StepLog>,
) -> Result<bool> {
    let Some(up) = holder(store, env).filter(|holder| holder.verb == "up") else {
        return Ok(false);
    };
    let Some(step) = step else {
        return Ok(true);
    };
    let record = store.record(env)?;
    let mut steps = record.iter().flat_map(|record| &record.steps);
    let outcome = steps
        .find(|known| known.name == *step)
        .map(|known| known.outcome);
    let Some(shown) = shown else {
        return Ok(outcome == Some(Outcome::Pending));
    };
    let mut logs = all(store, env, None, &run_name(up.since))?.into_iter();
    if logs.any(|log| log.is_since(up.since) && log.place() > shown.place()) {
        return Ok(false);
    }
    // Until the step has a log of this run, its outcome in the record may be from an earlier run.
    Ok(!shown.is_since(up.since) || outcome.is_none_or(|outcome| outcome == Outcome::Pending))
}

fn show(cx: &Context, lines: &[u8], args: &LogsArgs) {
    let mut out = Vec::with_capacity(lines.len() + 1);
    for line in lines.split(|byte| *byte == b'\n') {
        out.extend_from_slice(if args.times { line } else { text_of(line) });
        out.push(b'\n');
    }
    match args.raw {
        true => cx.ui.bytes(&out),
        false => cx.ui.lines(&out),
    }
}

/// Returns the env and the step. A single word is a step if no env has that name and there is only one env.
fn chosen(store: &Store, args: &LogsArgs) -> Result<(EnvName, Option<String>)> {
    if let (Some(word), None) = (&args.name, &args.step) {
        let envs = store.envs()?;
        if let [only] = envs.as_slice()
            && *only != **word
            && let Some(record) = store.record(only)?
            && record.steps.iter().any(|step| step.name == **word)
        {
            return Ok((only.clone(), Some(word.clone())));
        }
    }
    let name = args.name.as_deref().map(check_name).transpose()?;
    let name = store.named_or_only(name.as_ref())?;
    store.known(&name)?;
    Ok((name, args.step.clone()))
}

/// Returns the logs in the order of their start, limited to the step `wanted` and to runs from `since` on. Earlier runs
/// are not read: there may be thousands of them, and `--follow` calls this function ten times a second.
pub(super) fn all(
    store: &Store,
    env: &EnvName,
    wanted: Option<&str>,
    since: &str,
) -> Result<BTreeSet<StepLog>> {
    let mut found = BTreeSet::new();
    let Some(runs) = if_exists(fs::read_dir(store.env_dir(env).join("logs")))? else {
        return Ok(found);
    };
    for run in runs {
        let run = run?;
        let name = run.file_name();
        if *name < *since {
            continue;
        }
        // `gc` may have removed it since.
        for entry in if_exists(fs::read_dir(run.path()))?.into_iter().flatten() {
            let file = entry?.file_name();
            let log = StepLog::parse(&name.to_string_lossy(), &file.to_string_lossy());
            found.extend(log.filter(|log| wanted.is_none_or(|step| log.step == step)));
        }
    }
    Ok(found)
}

fn none(store: &Store, env: &EnvName, step: Option<&str>) -> Error {
    let what = step.map_or_else(|| "any step".to_owned(), |step| format!("step `{step}`"));
    let record = store.record(env).ok().flatten();
    let steps = record.iter().flat_map(|record| &record.steps);
    let status = format!("rockenv status {env}");
    let known = step.map(|name| (name, steps.clone().find(|step| step.name == name)));
    let help = match known {
        Some((_, Some(step))) => match &step.reason {
            Some(reason) => format!("it has not run: {reason}"),
            None => status,
        },
        Some((name, None)) => suggest::help(name, steps.map(|known| known.name.as_str()), &status),
        None => status,
    };
    not_found!("env `{env}` has no log of {what}").help(help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_runs_are_not_read() {
        let (_directory, store) = Store::scratch();
        let env = EnvName::from("a");
        let logs = store.env_dir(&env).join("logs");
        let runs = [
            "20260102T030405.678Z",
            "20260102T030406.000Z",
            "20270101T000000.000Z",
        ];
        for run in &runs[1..] {
            fs::create_dir_all(logs.join(run)).unwrap();
            fs::write(logs.join(run).join("01-s.log"), "").unwrap();
        }
        // A link to itself cannot be read, so reading this earlier run fails.
        let earlier = logs.join(runs[0]);
        fs::os::unix::fs::symlink(&earlier, &earlier).unwrap();
        assert!(all(&store, &env, None, "").is_err());
        for (since, count) in [(runs[1], 2), (runs[2], 1)] {
            let found = all(&store, &env, Some("s"), since).unwrap();
            assert_eq!(found.len(), count, "{since}");
        }
    }
}
