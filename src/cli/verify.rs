//! Owns `verify`: builds steps of an env again from clean, in a scratch env that is removed afterwards, and compares.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::exec::{sizing, source_directories};
use crate::execute::verify::{self, Compared, Side, changed, compare};
use crate::execute::{APART, Ended, Execution, Progress};
use crate::plan::ids::{LayerId, StepKey};
use crate::plan::lockfile::{self, Lockfile};
use crate::plan::record::Head;
use crate::plan::resolve::{Action, Spec, Step, VolumeKind, VolumeSource};
use crate::profile::hook::{self, Hook};
use crate::profile::{self, CopyFiles, Origin};
use crate::rocm::gpu::{self, Choice, Selector};
use crate::store::{LockedEnv, Store, lock};
use crate::sys::atomic::random_id;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::Host;
use crate::sys::signals::{Cancel, Signals};
use crate::ui::event::{Event, Outcome};
use crate::ui::{Format, Reporter, text};
use crate::up::claim::new_record;
use crate::up::context::Context;
use crate::up::downloads::Fetching;
use crate::up::segments::{Segment, plan, runs, segments, snapshot_layer};
use crate::up::{ephemeral, hooks};

/// Directory of the scratch env for steps' writes to volumes of these kinds.
/// Maximum length of a name without the scratch env's suffix.
const STEM: usize = 40;
/// Interval at which a comparison checks for Ctrl-C.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The env
    env: String,
    /// The steps [default: all that have a snapshot]
    steps: Vec<String>,
    /// Also compare modification times, and the logs and caches of package managers and ninja
    #[arg(long)]
    strict: bool,
    /// Let the steps use the store's caches, as `up` does [default: they start with empty caches]
    #[arg(long)]
    with_caches: bool,
}

/// The result for a step.
#[derive(Debug, Serialize)]
struct StepReport {
    step: String,
    key: StepKey,
    layer: LayerId,
    same: bool,
    #[serde(flatten)]
    compared: Compared,
}

/// The result for an env.
#[derive(Debug, Serialize)]
struct Report {
    env: String,
    same: bool,
    steps: Vec<StepReport>,
}

/// Builds steps of an env again and compares; returns the exit code.
pub fn verify(cx: &Context, args: &VerifyArgs) -> Result<u8> {
    let store = cx.store_to_change("building steps again")?;
    let env = store.lock_known(&args.env, "verify", lock::WAIT)?;
    env.check_owner()?;
    let spec = store.spec(&args.env)?;
    let segments = segments(&store, &spec, env.known_record()?, &args.steps)?;
    let signals = Signals::take()?;
    let reporter = cx.ui.reporter(Format::Human);
    let name = scratch_name(&args.env)?;
    let with = Fetching {
        cx,
        store: &store,
        offline: false,
        signals: &signals,
        reporter: &reporter,
    };
    let work = Work::prepare(with, args, &env, spec, &name, &segments)?;
    let claim = store.claim(&name, "verify")?;
    let outcome = work.all(&name, &segments);
    let removed = ephemeral::end(&store, &name, claim);
    drop(env);
    cx.tidy(&store)?;
    let steps = match (outcome, signals.pending()?) {
        (Err(_), Some(signal)) => return Err(Error::new(Kind::Signal(signal), "interrupted")),
        (outcome, _) => outcome?,
    };
    removed.map_err(|error| error.help("to remove the rest, run: rockenv gc"))?;
    say(
        cx,
        &reporter,
        Report {
            env: args.env.clone(),
            same: steps.iter().all(|step| step.same),
            steps,
        },
    )
}

/// Returns a name for the scratch env.
fn scratch_name(env: &str) -> Result<String> {
    let stem: String = env.chars().take(STEM).collect();
    Ok(format!(
        "{}-verify-{}",
        stem.trim_end_matches('.'),
        random_id()?
    ))
}

/// Inputs of building again.
struct Work<'a> {
    with: Fetching<'a>,
    args: &'a VerifyArgs,
    env: &'a LockedEnv<'a>,
    /// The env's spec, with the scratch env's outputs and caches.
    spec: Spec,
    files: CopyFiles,
    hooks: BTreeMap<String, Hook>,
    sources: BTreeMap<String, PathBuf>,
    apart: BTreeSet<String>,
    locked: Option<Lockfile>,
    host: Host,
    gpu: Option<gpu::Grant>,
}

impl<'a> Work<'a> {
    fn prepare(
        with: Fetching<'a>,
        args: &'a VerifyArgs,
        env: &'a LockedEnv<'a>,
        mut spec: Spec,
        name: &str,
        segments: &[Segment],
    ) -> Result<Self> {
        let (cx, store) = (with.cx, with.store);
        let runs: BTreeSet<&StepKey> = segments.iter().flat_map(|segment| &segment.runs).collect();
        let steps: Vec<&Step> = spec
            .steps
            .iter()
            .filter(|step| runs.contains(&step.key))
            .collect();
        let files = copy_files(cx, &spec, &steps)?;
        let hooks = read_hooks(&with, &spec, &steps)?;
        let gpu = match steps.iter().find(|step| step.gpu) {
            Some(step) => Some(grant(cx, &spec, step)?),
            None => None,
        };
        let locked = store.locked_text(&spec)?;
        let locked = locked
            .map(|text| lockfile::parse(&text, "the env's lock file"))
            .transpose()?;
        let apart = spec
            .volumes
            .iter()
            .filter(|volume| verify::is_apart(volume, args.with_caches));
        let apart = apart.map(|volume| volume.name.clone()).collect();
        let scratch = store.env_dir(name);
        for volume in &mut spec.volumes {
            if let Some(place) = verify::scratch_place(volume, args.with_caches) {
                volume.source = VolumeSource::Path(scratch.join(place).join(&volume.name));
            }
        }
        Ok(Self {
            sources: sources(store, &spec),
            with,
            args,
            env,
            spec,
            files,
            hooks,
            apart,
            locked,
            host: Host::probe()?,
            gpu,
        })
    }

    /// Builds and compares everything in the scratch env of this name.
    fn all(&self, name: &str, segments: &[Segment]) -> Result<Vec<StepReport>> {
        let mut scratch = self.with.store.lock_env(name, "verify", lock::WAIT)?;
        let mut reports = Vec::new();
        for segment in segments {
            self.build(&mut scratch, segment)?;
            for key in &segment.compared {
                reports.push(self.report(&scratch, key)?);
            }
        }
        Ok(reports)
    }

    /// Makes the scratch env one in which nothing was built yet.
    fn empty(&self, scratch: &mut LockedEnv<'_>, segment: &Segment) -> Result<()> {
        for place in [verify::OUTPUTS, verify::CACHES, APART, "views"] {
            self.with.store.discard(&scratch.directory().join(place))?;
        }
        let service = self.env.known_record()?.service.clone();
        match scratch.record() {
            None => scratch.commit(new_record(&self.spec, &segment.image_key, service)?)?,
            Some(record) if record.head != Head::default() => {
                scratch.reset()?;
                scratch.end_attempt()?;
                scratch.update(|record| record.image_key.clone_from(&segment.image_key))?;
            }
            Some(_) => {}
        }
        self.with.equip(scratch, &self.spec, &segment.image_key)
    }

    fn build<'s>(&self, scratch: &mut LockedEnv<'s>, segment: &Segment) -> Result<()>
    where
        'a: 's,
    {
        self.empty(scratch, segment)?;
        let plan = plan(&self.spec, segment);
        let execution = Execution {
            store: self.with.store,
            env: scratch,
            spec: &self.spec,
            plan: &plan,
            files: &self.files,
            sources: &self.sources,
            fingerprints: &self.spec.fingerprints,
            locked: self.locked.as_ref(),
            hooks: &self.hooks,
            host: &self.host,
            config: &self.with.cx.config,
            gpu: self.gpu.as_ref(),
            offline: false,
            apart: &self.apart,
            sizing: &sizing(self.with.cx, &self.spec, &self.host),
            signals: self.with.signals,
            reporter: self.with.reporter,
        };
        for step in runs(&self.spec, segment) {
            let inputs = execution.changed(&step.inputs)?;
            if !inputs.is_empty() {
                return Err(changed(step, &inputs));
            }
        }
        match execution.run()? {
            Progress::Ended(Ended::Complete) => Ok(()),
            Progress::Ended(Ended::Broke(error)) => Err(error),
            Progress::Ended(Ended::Interrupted(signal)) => {
                Err(Error::new(Kind::Signal(signal), "interrupted"))
            }
            Progress::Ended(Ended::Failed(failure)) => {
                self.with.reporter.emit(&Event::Finished {
                    outcome: Outcome::Failed,
                    message: String::new(),
                });
                for line in &failure.tail {
                    self.with.cx.ui.note(&format!("  {line}"));
                }
                let message = format!("built again, {}", failure.message);
                Err(Error::new(failure.kind, message).help(format!(
                    "the env is unchanged; compare with: rockenv logs {} {}",
                    self.args.env, failure.step
                )))
            }
            Progress::Changed(step) => Err(Error::invalid(format!(
                "a source was changed while step `{step}` was built again"
            ))
            .help(format!("rockenv verify {}", self.args.env))),
        }
    }

    /// Compares a step that was built again.
    fn report(&self, scratch: &LockedEnv<'_>, key: &StepKey) -> Result<StepReport> {
        let store = self.with.store;
        let mut steps = self.spec.steps.iter();
        let step = steps.find(|step| step.key == *key);
        let step = step.ok_or_else(|| Error::unexpected("the rebuilt step is gone"))?;
        let layer_of = |env: &LockedEnv<'_>| {
            let id = snapshot_layer(env.known_record()?, key)?;
            let missing = || Error::not_found(format!("layer `{id}` is missing from the store"));
            store
                .layer(&id)?
                .ok_or_else(|| missing().help("rockenv fsck"))
        };
        let (old, new) = (layer_of(self.env)?, layer_of(scratch)?);
        let cancel = Cancel::new(self.with.signals);
        let flag = cancel.flag();
        let compared = std::thread::scope(|scope| {
            let before = Side {
                env: self.env,
                layer: &old,
            };
            let now = Side {
                env: scratch,
                layer: &new,
            };
            let work =
                move || compare(store, &self.spec, step, before, now, self.args.strict, flag);
            let comparing = scope.spawn(work);
            while !comparing.is_finished() {
                cancel.look();
                std::thread::sleep(LOOK);
            }
            comparing
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        let compared = cancel.outcome(compared)?;
        Ok(StepReport {
            step: step.name.clone(),
            key: key.clone(),
            layer: old.id,
            same: compared.is_same(),
            compared,
        })
    }
}

fn sources(store: &Store, spec: &Spec) -> BTreeMap<String, PathBuf> {
    let mut sources = source_directories(store, spec);
    for volume in &spec.volumes {
        if let (VolumeKind::Source, VolumeSource::Path(path)) = (volume.kind, &volume.source) {
            sources.insert(volume.name.clone(), path.clone());
        }
    }
    sources
}

/// Reads the files of `copy` steps; refuses files that changed since the env was built.
fn copy_files(cx: &Context, spec: &Spec, steps: &[&Step]) -> Result<CopyFiles> {
    let copies = |step: &&&Step| matches!(step.action, Action::Copy(_));
    if !steps.iter().any(|step| copies(&step)) {
        return Ok(CopyFiles::default());
    }
    let profile = match &spec.origin {
        Origin::Builtin(path) => path.trim_end_matches(".toml").to_owned(),
        Origin::File(path) => path.to_string_lossy().into_owned(),
    };
    let files = {
        let dirs = &cx.config.profile_dirs;
        profile::copy_files(dirs, &profile::load(dirs, &profile)?)?
    };
    for step in steps {
        let Action::Copy(items) = &step.action else {
            continue;
        };
        for item in items {
            let found = files.item(&step.name, &item.from);
            if found.is_none_or(|found| found.digest != item.digest) {
                return Err(changed(step, &[&item.from]));
            }
        }
    }
    Ok(files)
}

/// Reads the hooks that steps see; refuses hooks that changed since the env was built.
fn read_hooks(with: &Fetching<'_>, spec: &Spec, steps: &[&Step]) -> Result<BTreeMap<String, Hook>> {
    let mut hooks = BTreeMap::new();
    for step in steps {
        for volume in spec.visible(step) {
            for wanted in spec.hooks_at(step, &volume.name) {
                let hook = hook::load(&with.cx.config.hook_dirs, &wanted.name)?;
                if hook.digest()? != wanted.digest {
                    return Err(changed(step, &[&format!("hook {}", wanted.name)]));
                }
                hooks.insert(wanted.name.clone(), hook);
            }
        }
    }
    let cancel = Cancel::new(with.signals);
    let fetched = hooks::fetch_patches(&mut hooks, with.store, false, cancel.flag(), &|| {
        cancel.look();
    });
    cancel.outcome(fetched)?;
    Ok(hooks)
}

/// Returns the GPU that a step is built again with.
fn grant(cx: &Context, spec: &Spec, step: &Step) -> Result<gpu::Grant> {
    match cx
        .gpus()
        .choose(&Selector::from("auto"), &spec.targets, spec.gpu)?
    {
        Choice::Gpu { grant, .. } => Ok(*grant),
        Choice::Without { why } => Err(Error::unavailable(format!("step `{}` {why}", step.name))
            .help("name the steps that need no GPU: rockenv verify ENV STEP...")),
    }
}

fn say(cx: &Context, reporter: &Reporter, report: Report) -> Result<u8> {
    let differing = report.steps.iter().filter(|step| !step.same).count();
    let (outcome, message) = match differing {
        0 => (Outcome::Done, format!("{}: reproduced", report.env)),
        count => (
            Outcome::Failed,
            format!(
                "{}: {count} of {} steps differ",
                report.env,
                report.steps.len()
            ),
        ),
    };
    reporter.emit(&Event::Finished { outcome, message });
    let code = match report.same {
        true => 0,
        false => Kind::Drift.exit_code(),
    };
    if cx.json {
        cx.ui.json(&report)?;
        return Ok(code);
    }
    for step in &report.steps {
        let StepReport { compared, .. } = step;
        let count = compared.differences.len() + compared.more;
        cx.ui.data(&match count {
            0 => format!("{}: the same\n", step.step),
            1 => format!("{}: 1 path differs\n", step.step),
            _ => format!("{}: {count} paths differ\n", step.step),
        });
        for difference in &compared.differences {
            let path = text::path(&difference.path);
            cx.ui.data(&format!("  {path}: {}\n", difference.what));
        }
        if compared.more > 0 {
            cx.ui.data(&format!("  and {} more\n", compared.more));
        }
        for what in &compared.not_compared {
            cx.ui.data(&format!("  not compared: {what}\n"));
        }
    }
    Ok(code)
}
