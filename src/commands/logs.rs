//! Owns `logs`: a step's output as it was, or as it comes.

use std::io::{Read as _, Seek as _, SeekFrom};
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

/// Shows a log.
pub fn logs(cx: &Context, args: &LogsArgs) -> Result<()> {
    let store = cx.existing_store()?;
    store.known(&args.name)?;
    let path = find(&store, args)?;
    let mut file = fs::File::open(&path)?;
    let mut pending = Vec::new();
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        // Asked before reading: what was written before the end is then read for certain.
        let running =
            args.follow && holder(&store, &args.name).is_some_and(|holder| holder.verb == "up");
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
        if cx.ui.closed() || !running {
            break;
        }
        // A newer step has its own file.
        let newest = find(&store, args)?;
        if newest != path && args.step.is_none() {
            return logs(cx, args);
        }
        std::thread::sleep(PERIOD);
        let position = file.stream_position()?;
        file.seek(SeekFrom::Start(position))?;
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

/// Finds the newest log, of the step if one is named.
fn find(store: &Store, args: &LogsArgs) -> Result<PathBuf> {
    let mut newest: Option<(std::time::SystemTime, PathBuf)> = None;
    let logs = store.env_dir(&args.name).join("logs");
    let runs = match fs::read_dir(&logs) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(none(args)),
        other => other?,
    };
    for run in runs {
        for entry in fs::read_dir(run?.path())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // NN-step.log
            let step = name.get(3..).and_then(|rest| rest.strip_suffix(".log"));
            if args.step.is_some() && step != args.step.as_deref() {
                continue;
            }
            let modified = entry.metadata()?.modified()?;
            if newest.as_ref().is_none_or(|(time, _)| *time < modified) {
                newest = Some((modified, entry.path()));
            }
        }
    }
    newest.map(|(_, path)| path).ok_or_else(|| none(args))
}

fn none(args: &LogsArgs) -> Error {
    let what = args
        .step
        .as_ref()
        .map_or_else(|| "any step".to_owned(), |step| format!("step `{step}`"));
    Error::not_found(format!("env `{}` has no log of {what}", args.name))
        .help(format!("rockenv status {}", args.name))
}
