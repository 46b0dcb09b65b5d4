//! Owns `logs`: shows a step's output, finished or as it comes.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fs_err as fs;

use crate::execute::log::{Reader, text_of};
use crate::store::Store;
use crate::sys::error::{Error, Result};
use crate::up::context::Context;
use crate::up::seize::holder;

/// Polling interval for a growing log.
const PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub struct LogsArgs {
    /// The env
    name: String,
    /// The step [default: the last one that ran]
    step: Option<String>,
    /// Follow the output while the step runs
    #[arg(short, long)]
    follow: bool,
    /// Show the time and stream of each line
    #[arg(short, long)]
    times: bool,
    /// Show every byte as the step wrote it, control sequences of terminals too
    #[arg(long)]
    raw: bool,
}

/// Shows a log, and with `--follow` the logs of later steps.
pub fn logs(cx: &Context, args: &LogsArgs) -> Result<()> {
    let store = cx.existing_store()?;
    store.known(&args.name)?;
    let mut path = all(&store, args)?.pop_last().ok_or_else(|| none(args))?;
    let mut log = Reader::open(&path)?;
    loop {
        // Asked before reading, in this order: everything written before the end is then certain to be read.
        let running =
            args.follow && holder(&store, &args.name).is_some_and(|holder| holder.verb == "up");
        let next = match args.follow {
            true => all(&store, args)?.into_iter().find(|other| *other > path),
            false => None,
        };
        while let Some(lines) = log.lines()? {
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
            show(cx, &rest, args);
        }
        let Some(next) = next else {
            return Ok(());
        };
        log = Reader::open(&next)?;
        path = next;
    }
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

/// Returns the logs in the order in which they began; only those of the step if one is named. Each name contains the
/// time of its `up` and the number of its step.
fn all(store: &Store, args: &LogsArgs) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let runs = match fs::read_dir(store.env_dir(&args.name).join("logs")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        other => other?,
    };
    for run in runs {
        for entry in fs::read_dir(run?.path())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // NN-step.log
            let step = name.get(3..).and_then(|rest| rest.strip_suffix(".log"));
            if step.is_some() && (args.step.is_none() || step == args.step.as_deref()) {
                found.insert(entry.path());
            }
        }
    }
    Ok(found)
}

fn none(args: &LogsArgs) -> Error {
    let what = args
        .step
        .as_ref()
        .map_or_else(|| "any step".to_owned(), |step| format!("step `{step}`"));
    Error::not_found(format!("env `{}` has no log of {what}", args.name))
        .help(format!("rockenv status {}", args.name))
}
