//! Owns `up`: from the command line to an env that is as the profile says.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{plan, push};
use crate::cli::job_summary;
use crate::execute::Ended;
use crate::plan::Options;
use crate::plan::resolve::Engine;
use crate::profile::Profile;
use crate::store::Store;
use crate::store::config::Config;
use crate::store::history::Reuse;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::signals::Signals;
use crate::ui::event::Event;
use crate::ui::metrics::Rows;
use crate::ui::{Format, Reporter};
use crate::up::context::Context;
use crate::up::converge;
use crate::up::registry;
use crate::up::resolve::Prepared;
use crate::up::select::{SelectArgs, Wish, quoted};
use crate::up::summary as verdict;
use crate::up::summary::Fate;
use crate::up::{ephemeral, locked, offline};

/// Arguments of `up` and `plan`.
#[derive(Debug, Args)]
pub struct UpArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// Name of the env [default: the profile's, with the target]
    #[arg(short, long)]
    name: Option<String>,
    /// Last step to run
    // `matrix up` adds its own to what it was given for each `up`.
    #[arg(long, value_name = "STEP", overrides_with = "until")]
    pub(crate) until: Option<String>,
    /// Run a step again, and all after it
    #[arg(long, value_name = "STEP")]
    rerun: Option<String>,
    /// Begin at the last clean snapshot, and reset build volumes to it
    #[arg(long)]
    clean: bool,
    /// Start from snapshots of other envs too that were built on what another build had left [default: `reuse` in the configuration]
    #[arg(long)]
    allow_incremental: bool,
    /// Most jobs a step may use, of those that the machine has
    #[arg(short, long)]
    jobs: Option<u32>,
    /// GPU that steps with `gpu` get: a PCI address, render node or index; where there is none `auto` skips these steps and `required` refuses; `none` always skips them
    #[arg(
        long,
        default_value = "auto",
        value_name = "auto|required|none|PCI|renderDN|INDEX"
    )]
    gpu: String,
    /// Remove the env when this command ends, in whatever way; outputs, caches and sources stay
    #[arg(long)]
    pub(crate) ephemeral: bool,
    /// Build exactly what the lock file names, and refuse what differs from it
    #[arg(long)]
    locked: bool,
    /// The lock file [default: where `lock` writes it]
    #[arg(long, value_name = "FILE", requires = "locked")]
    lock_file: Option<PathBuf>,
    /// Fetch nothing: images and sources must be there, and steps get no network
    #[arg(long)]
    pub(crate) offline: bool,
    /// Pull what the store lacks from the registry, and build the rest [default: `pull` in the configuration]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pull: Option<bool>,
    /// Push the snapshots to the registry in the end, also where a step failed [default: `push` in the configuration]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    push: Option<bool>,
    /// Go on although the machine has too little disk or memory
    #[arg(long)]
    pub(crate) force: bool,
    /// Show the plan and change nothing
    #[arg(short = 'd', long)]
    dry_run: bool,
    /// Install what is missing on the host first
    #[arg(long)]
    setup: bool,
    /// Add a row of JSON to this file for each step, with what it took
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// How progress is shown
    #[arg(long, default_value = "auto", value_name = "auto|json")]
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Progress {
    Auto,
    Json,
}

impl UpArgs {
    fn wish(&self, verb: &'static str) -> Wish<'_> {
        Wish {
            name: self.name.as_deref(),
            jobs: self.jobs,
            gpu: &self.gpu,
            ..self.select.wish(verb)
        }
    }

    /// Returns the command that goes on where this one ended.
    pub(crate) fn again(&self) -> String {
        let gpu = (self.gpu != "auto").then_some(self.gpu.as_str());
        let flags = [("--name", self.name.as_deref()), ("--gpu", gpu)];
        let mut text = self.wish("up").command("up", &flags);
        for (flag, given) in [("--ephemeral", self.ephemeral), ("--locked", self.locked)] {
            if given {
                text.extend([" ", flag]);
            }
        }
        if let Some(file) = &self.lock_file {
            let file = file.to_string_lossy();
            text.extend([" --lock-file ", &quoted(&file)]);
        }
        text
    }

    /// Returns whether a registry is asked for what the store lacks.
    pub(crate) fn pulls(&self, config: &Config) -> bool {
        self.pull.unwrap_or(config.pull) && !self.offline
    }

    /// Says which snapshots of others serve, and which others get.
    pub(crate) fn reuse(&self, config: &Config) -> Reuse {
        config.reuse.or_asked(self.allow_incremental)
    }

    /// Returns whether a registry gets what was made.
    fn pushes(&self, config: &Config) -> bool {
        self.push.unwrap_or(config.push)
    }

    /// Reads profile and machine, and lets the lock file decide where one is asked for.
    pub(crate) fn prepare(&self, cx: &Context, verb: &'static str) -> Result<Prepared> {
        let wish = self.wish(verb);
        let mut prepared = Prepared::new(cx, &wish)?;
        check_names(&prepared.profile, self)?;
        prepared.reuse = self.reuse(&cx.config);
        prepared.clean = self.clean;
        if self.locked {
            locked::follow(cx, &mut prepared, &wish, self.lock_file.as_deref())?;
        }
        Ok(prepared)
    }
}

/// Brings an env up; returns the exit code.
pub fn up(cx: &Context, args: UpArgs) -> Result<u8> {
    if args.dry_run {
        return plan::plan(cx, args).map(|()| 0);
    }
    if args.setup {
        crate::cli::setup::command::install_missing(cx)?;
    }
    let mut prepared = args.prepare(cx, "up")?;
    crate::up::host_writes::agree(cx, &prepared)?;
    if prepared.choice.engine == Engine::Nspawn && !prepared.host.root {
        return Err(
            Error::unavailable("building an env with systemd-nspawn needs root")
                .help("sudo rockenv up ..."),
        );
    }
    cx.host_as_root("building an env")?;
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
    if args.offline {
        offline::check(cx, &store, &prepared)?;
    }
    locked::check_files(&prepared, &store)?;
    if let Some(pinned) = &prepared.pinned {
        store.remember_lock(&pinned.path, &pinned.lock)?;
    }
    let signals = Signals::take()?;
    let reporter = cx.ui.reporter(format).with_metrics(rows);
    for message in std::mem::take(&mut prepared.notes) {
        reporter.emit(&Event::Warning { message });
    }
    let name = prepared.name.clone();
    let claim = args.ephemeral.then(|| store.claim(&name)).transpose()?;
    let mut outcome = converge(cx, &args, &store, prepared, &signals, &reporter);
    if let Ok((ended, name, _)) = &outcome {
        job_summary::of_env(cx, &store, name);
        let is_done = matches!(ended, None | Some(Ended::Complete));
        // Whoever says stop waits for nothing more.
        if args.pushes(&cx.config) && !matches!(ended, Some(Ended::Interrupted(_))) {
            let reuse = args.reuse(&cx.config);
            let handed_on = hand_on(cx, &store, name, reuse, &signals, &reporter);
            // Why a step failed is what the user must know first.
            if is_done && let Err(error) = handed_on {
                outcome = Err(error);
            }
        }
    }
    // What could not go on is an error like any other, now that what was finished is handed on.
    let outcome = match outcome {
        Ok((Some(Ended::Broke(error)), ..)) => Err(error),
        other => other,
    };
    let removed = claim.map(|claim| ephemeral::end(&store, &name, claim));
    cx.tidy(&store)?;
    let fate = match removed {
        None => Fate::Stays,
        Some(Ok(outputs)) => Fate::Removed(outputs),
        // Why it failed is what the user must know first; the next command removes it.
        Some(Err(error)) if outcome.is_err() => {
            cx.ui.warn(&error.chain().join(": "));
            Fate::Stays
        }
        Some(Err(error)) => return Err(error.help("rockenv gc removes what is left")),
    };
    let (ended, name, lacking) = match (outcome, signals.pending()?) {
        // What failed was a tool that the same Ctrl-C had ended.
        (Err(_), Some(signal)) => {
            return Err(Error::new(Kind::Signal(signal), "interrupted").help(args.again()));
        }
        (outcome, _) => outcome?,
    };
    verdict::say(cx, &reporter, ended, &name, &fate, &lacking, &args.again())
}

/// Pushes the steps that are finished. That a registry does not take them undoes nothing; only a signal is an error.
fn hand_on(
    cx: &Context,
    store: &Store,
    name: &str,
    reuse: Reuse,
    signals: &Signals,
    reporter: &Reporter,
) -> Result<()> {
    let send = || {
        let record = store.record(name)?;
        if record.as_ref().and_then(push::last_step).is_none() {
            return Ok(None);
        }
        let repository = registry::repository(cx, None)?;
        let what = push::Chosen::of(store, name, None, reuse, reporter)?;
        push::send(cx, store, name, &repository, what, signals, reporter).map(Some)
    };
    match send() {
        Ok(sent) => sent.iter().for_each(|(_, message)| cx.ui.note(message)),
        Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
        Err(error) => reporter.emit(&Event::Warning {
            message: error.chain().join(": "),
        }),
    }
    Ok(())
}

/// Refuses `--until` and `--rerun` of steps that are not in the profile.
fn check_names(profile: &Profile, args: &UpArgs) -> Result<()> {
    for name in args.until.iter().chain(&args.rerun) {
        if !profile.steps.iter().any(|step| step.name == *name) {
            let names: Vec<&str> = profile
                .steps
                .iter()
                .map(|step| step.name.as_str())
                .collect();
            return Err(Error::not_found(format!(
                "profile `{}` has no step `{name}`",
                profile.name
            ))
            .help(format!("its steps are: {}", names.join(", "))));
        }
    }
    Ok(())
}

pub(crate) fn options(args: &UpArgs) -> Options {
    Options {
        until: args.until.clone(),
        rerun: args.rerun.clone(),
        clean: args.clean,
    }
}
