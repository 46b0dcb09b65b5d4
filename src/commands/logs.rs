//! Owns `logs`: a step's output as it was, or as it comes.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fs_err as fs;

use super::exec::holder;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::execute::log::text_of;
use crate::store::Store;

/// How often a log that grows is looked at.
const PERIOD: Duration = Duration::from_millis(100);

/// Arguments of `logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// The env
    name: String,
    /// The step [default: the last one that ran]
    step: Option<String>,
    /// Go on as long as the step runs
    #[arg(short, long)]
    follow: bool,
    /// Show the time and stream of each line
    #[arg(short, long)]
    times: bool,
}

/// Shows a log, and with `--follow` those of the steps after it.
pub fn logs(cx: &Context, args: &LogsArgs) -> Result<()> {
    let store = cx.existing_store()?;
    store.known(&args.name)?;
    let mut path = all(&store, args)?.pop_last().ok_or_else(|| none(args))?;
    let mut file = fs::File::open(&path)?;
    let mut pending = Vec::new();
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        // Asked before reading, and in this order: what was written before the end is then read for certain.
        let running =
            args.follow && holder(&store, &args.name).is_some_and(|holder| holder.verb == "up");
        let next = match args.follow {
            true => all(&store, args)?.into_iter().find(|other| *other > path),
            false => None,
        };
        loop {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            pending.extend_from_slice(&buffer[..count]);
            let Some(end) = pending.iter().rposition(|byte| *byte == b'\n') else {
                continue;
            };
            show(cx, &pending[..end], args.times);
            pending.drain(..=end);
        }
        cx.ui.flush();
        if cx.ui.closed() {
            return Ok(());
        }
        if let Some(next) = next {
            if !pending.is_empty() {
                show(cx, &std::mem::take(&mut pending), args.times);
            }
            file = fs::File::open(&next)?;
            path = next;
        } else if running {
            std::thread::sleep(PERIOD);
        } else {
            break;
        }
    }
    if !pending.is_empty() {
        show(cx, &pending, args.times);
    }
    Ok(())
}

fn show(cx: &Context, lines: &[u8], times: bool) {
    let mut out = Vec::with_capacity(lines.len() + 1);
    for line in lines.split(|byte| *byte == b'\n') {
        out.extend_from_slice(if times { line } else { text_of(line) });
        out.push(b'\n');
    }
    cx.ui.raw(&out);
}

/// Returns the logs, of the step if one is named, in the order in which they were begun: each is named by the time
/// of its `up` and the number of its step.
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
