//! Owns `up`: from the command line to an env that matches its profile.

use super::{plan, push};
use crate::cli::job_summary;
use crate::execute::Ended;
use crate::plan::resolve::Engine;
use crate::store::Store;
use crate::store::history::Reuse;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::signals::Signals;
use crate::ui::Format;
use crate::ui::metrics::Rows;
use crate::up::context::Context;
use crate::up::gpu_code;
use crate::up::options::{Progress, UpOptions};
use crate::up::registry;
use crate::up::results::HandedOver;
use crate::up::summary as verdict;
use crate::up::summary::Fate;
use crate::up::task::Task;
use crate::up::{Finished, run_up};
use crate::up::{ephemeral, locked, offline};

/// Brings an env up; returns the exit code.
pub(crate) fn up(cx: &Context, args: UpOptions) -> Result<u8> {
    if args.dry_run {
        return plan::show_plan(cx, &args.plan, args.force, false);
    }
    if args.setup {
        crate::cli::setup::command::install_missing(cx)?;
    }
    let selection = args.plan.select(cx, "up")?;
    crate::up::host_writes::agree(cx, &selection)?;
    if selection.choice.engine == Engine::Nspawn && !selection.host.root {
        return Err(
            Error::unavailable("building an env with systemd-nspawn needs root")
                .help(&cx.config.sudo_command),
        );
    }
    // An ordinary user's only engine is their own Podman.
    cx.host_as_rootless("building an env")?;
    if args.pushes(&cx.config) {
        registry::repository(cx, None)?;
    }
    let format = if args.progress == Progress::Json {
        Format::Json
    } else {
        Format::Human
    };
    let store = cx.store()?;
    let rows = args.metrics.as_deref().map(Rows::open).transpose()?;
    if args.plan.offline {
        offline::check(cx, &store, &selection)?;
    }
    locked::check_files(&selection, &store)?;
    if let Some(locked) = &selection.locked {
        store.remember_lock(&locked.path, &locked.lock)?;
    }
    let signals = Signals::take()?;
    let reporter = cx.ui.reporter(format).with_metrics(rows);
    selection.notes.iter().for_each(|note| reporter.warn(note));
    let task = Task::new(cx, &signals, &reporter);
    let name = selection.name.clone();
    let claim = args
        .ephemeral
        .then(|| store.claim(&name, "up --ephemeral"))
        .transpose()?;
    let mut outcome = run_up(task, &args, &store, &selection);
    if let Ok(Finished {
        ended, env: name, ..
    }) = &outcome
    {
        job_summary::of_env(cx, &store, name);
        let is_done = matches!(ended, None | Some(Ended::Complete));
        // After Ctrl-C nothing is pushed.
        if args.pushes(&cx.config) && !matches!(ended, Some(Ended::Interrupted(_))) {
            let reuse = args.plan.reuse(&cx.config);
            let handed_on = hand_on(task, &store, name, reuse);
            // The reason why a step failed comes first.
            if is_done && let Err(error) = handed_on {
                outcome = Err(error);
            }
        }
    }
    // Finished steps are pushed by now, so an unfinished one is an error like any other.
    let outcome = match outcome {
        Ok(Finished {
            ended: Some(Ended::Broke(error)),
            ..
        }) => Err(error),
        other => other,
    };
    let removed = claim.map(|claim| ephemeral::end(&store, &name, claim));
    cx.tidy(&store)?;
    let fate = match removed {
        None => Fate::Stays,
        Some(Ok(outputs)) => Fate::Removed(outputs),
        // The reason for the failure comes first; the next command removes the env.
        Some(Err(error)) if outcome.is_err() => {
            cx.ui.warn(&error.chain().join(": "));
            Fate::Stays
        }
        Some(Err(error)) => return Err(error.help("to remove the rest, run: rockenv gc")),
    };
    let finished = match (outcome, signals.pending()?) {
        // The same Ctrl-C ended the tool that failed.
        (Err(_), Some(signal)) => {
            return Err(Error::new(Kind::Signal(signal), "interrupted").help(args.resume_command()));
        }
        (outcome, _) => outcome?,
    };
    let is_done = matches!(finished.ended, None | Some(Ended::Complete));
    let has_run = finished.ended.is_some();
    let code = verdict::say(cx, &reporter, finished, &fate, &args.resume_command())?;
    if let (Fate::Stays, true, Ok(spec)) = (&fate, is_done, store.spec(&name)) {
        HandedOver::of(&store, &spec).note(&cx.ui);
        let head = store.record(&name)?.and_then(|record| record.head.layer);
        if let (true, Some(layer)) = (has_run, head) {
            let notes = gpu_code::notes(&store, &spec, &layer);
            notes.iter().for_each(|note| cx.ui.note(note));
        }
    }
    Ok(code)
}

/// Pushes the finished steps. A registry's refusal undoes nothing; only a signal is an error.
fn hand_on(task: Task<'_>, store: &Store, name: &str, reuse: Reuse) -> Result<()> {
    let Task { cx, reporter, .. } = task;
    let send = || {
        let record = store.record(name)?;
        if record.as_ref().and_then(push::last_step).is_none() {
            return Ok(None);
        }
        let repository = registry::repository(cx, None)?;
        let what = push::Chosen::of(store, name, None, reuse, reporter)?;
        push::send(task, store, name, &repository, what).map(Some)
    };
    match send() {
        Ok(sent) => sent.iter().for_each(|(_, message)| cx.ui.note(message)),
        Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
        Err(error) => reporter.warn(error.chain().join(": ")),
    }
    Ok(())
}
