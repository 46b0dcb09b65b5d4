//! Owns rebuilding steps of an env in a scratch env, and comparing the results.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::execute::verify::{self, Compared, Side, StepComparison, changed};
use crate::execute::{APART, Ended, Execution, ExecutionProgress};
use crate::plan::Plan;
use crate::plan::ids::{EnvName, LayerId, StepKey};
use crate::plan::jobs::Sizing;
use crate::plan::lockfile::{self, Lockfile};
use crate::plan::record::Head;
use crate::plan::resolve::{Action, Spec, Step, VolumeKind, VolumeSource};
use crate::profile::hook::{self, Hook};
use crate::profile::{self, CopyFiles};
use crate::rocm::gpu::{self, Choice, Selector};
use crate::store::{LockedEnv, lock, source};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::Host;
use crate::sys::name::StepName;
use crate::sys::signals::Cancel;
use crate::tree;
use crate::ui::event::Outcome;
use crate::up::context::Context;
use crate::up::downloads::Fetching;
use crate::up::hooks;
use crate::up::lock_env::new_record;
use crate::up::segments::{Segment, plan, runs, snapshot_layer};

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct VerifyOptions {
    /// Also compare modification times, and the logs and caches of package managers, CMake and ninja
    #[arg(long)]
    strict: bool,
    /// Let the steps use the store's caches, as `up` does [default: they start with empty caches]
    #[arg(long)]
    with_caches: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct StepReport {
    pub(crate) step: StepName,
    pub(crate) key: StepKey,
    pub(crate) layer: LayerId,
    pub(crate) same: bool,
    #[serde(flatten)]
    pub(crate) compared: Compared,
}

pub(crate) struct Rebuild<'a> {
    with: Fetching<'a>,
    options: VerifyOptions,
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

impl<'a> Rebuild<'a> {
    pub(crate) fn prepare(
        with: Fetching<'a>,
        options: VerifyOptions,
        env: &'a LockedEnv<'a>,
        mut spec: Spec,
        name: &EnvName,
        segments: &[Segment],
    ) -> Result<Self> {
        let (cx, store) = (with.task.cx, with.store);
        let runs: BTreeSet<&StepKey> = segments.iter().flat_map(|segment| &segment.runs).collect();
        let steps = spec.steps.iter();
        let steps: Vec<&Step> = steps.filter(|step| runs.contains(&step.key)).collect();
        let up = env.known_record()?.up_command();
        let files = copy_files(cx, &spec, &steps, &up)?;
        let hooks = read_hooks(&with, &spec, &steps, &up)?;
        let gpu = steps.iter().find(|step| step.gpu);
        let gpu = gpu.map(|step| grant(cx, &spec, step)).transpose()?;
        let locked = store.locked_text(&spec)?;
        let locked = locked.map(|text| lockfile::parse(&text, "the env's lock file"));
        let locked = locked.transpose()?;
        let volumes = spec.volumes.iter();
        let apart = volumes.filter(|volume| verify::is_apart(volume, options.with_caches));
        let apart = apart.map(|volume| volume.name.clone()).collect();
        let scratch = store.env_dir(name);
        for volume in &mut spec.volumes {
            if let Some(place) = verify::scratch_place(volume, options.with_caches) {
                volume.source = VolumeSource::Path(scratch.join(place).join(&volume.name));
            }
        }
        let mut sources = source::directories(store, &spec);
        for volume in &spec.volumes {
            if let (VolumeKind::Source, VolumeSource::Path(path)) = (volume.kind, &volume.source) {
                sources.insert(volume.name.clone(), path.clone());
            }
        }
        Ok(Self {
            sources,
            with,
            options,
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
    pub(crate) fn all(&self, name: &EnvName, segments: &[Segment]) -> Result<Vec<StepReport>> {
        let mut scratch = self.with.store.lock_env(name, "verify", lock::WAIT)?;
        let mut reports = Vec::new();
        self.check_inputs(&mut scratch, segments)?;
        for segment in segments {
            self.build(&mut scratch, segment)?;
            for key in &segment.compared {
                reports.push(self.report(&scratch, key)?);
            }
        }
        Ok(reports)
    }

    /// Resets the scratch env to one without built steps.
    fn empty(&self, scratch: &mut LockedEnv<'_>, segment: &Segment) -> Result<()> {
        for place in [verify::OUTPUTS, verify::CACHES, APART, "views"] {
            self.with.store.discard(&scratch.directory().join(place))?;
        }
        // Elsewhere, directories for volumes with a path are made with the rights of the caller, who may not enter the
        // store.
        for volume in &self.spec.volumes {
            if let VolumeSource::Path(path) = &volume.source
                && verify::scratch_place(volume, self.options.with_caches).is_some()
            {
                tree::create_directory_for(path, self.spec.user.uid, self.spec.user.gid)?;
            }
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
        self.with
            .prepare_containers(scratch, &self.spec, &segment.image_key)
    }

    fn build(&self, scratch: &mut LockedEnv<'a>, segment: &Segment) -> Result<()> {
        self.empty(scratch, segment)?;
        let plan = plan(&self.spec, segment);
        let sizing = self.with.task.cx.sizing(&self.spec, &self.host);
        let execution = self.execution(scratch, &plan, &sizing);
        let disturbed = |step: &str| {
            invalid!("a source was changed while step `{step}` was built again")
                .help(format!("rockenv verify {}", self.env.name()))
        };
        match execution.run()? {
            ExecutionProgress::Ended(Ended::Complete) => {
                let built = scratch.known_record()?;
                match runs(&self.spec, segment).find(|step| built.of_step(&step.key).is_none()) {
                    Some(step) => Err(disturbed(&step.name)),
                    None => Ok(()),
                }
            }
            ExecutionProgress::Ended(Ended::Broke(error)) => Err(error),
            ExecutionProgress::Ended(Ended::Interrupted(signal)) => {
                Err(Error::new(Kind::Signal(signal), "interrupted"))
            }
            ExecutionProgress::Ended(Ended::Failed(failure)) => {
                self.with.task.reporter.finish(Outcome::Failed, "");
                for line in &failure.tail {
                    self.with.task.cx.ui.note(&format!("  {line}"));
                }
                let message = format!("built again, {}", failure.message);
                Err(Error::new(failure.kind, message).help(format!(
                    "the env is unchanged; compare with: rockenv logs {} {}",
                    self.env.name(),
                    failure.step
                )))
            }
            ExecutionProgress::Changed(last) => {
                let first = runs(&self.spec, segment).next();
                let step = last.or_else(|| first.map(|step| step.name.clone()));
                Err(disturbed(step.as_deref().unwrap_or_default()))
            }
        }
    }

    /// Refuses steps whose sources have changed since, before the first one runs.
    fn check_inputs(&self, scratch: &mut LockedEnv<'a>, segments: &[Segment]) -> Result<()> {
        let up = self.env.known_record()?.up_command();
        let sizing = self.with.task.cx.sizing(&self.spec, &self.host);
        for segment in segments {
            let plan = plan(&self.spec, segment);
            let execution = self.execution(scratch, &plan, &sizing);
            for step in runs(&self.spec, segment) {
                let inputs = execution.changed(&step.inputs)?;
                if !inputs.is_empty() {
                    return Err(changed(step, &inputs, &up));
                }
            }
        }
        Ok(())
    }

    fn execution<'e>(
        &'e self,
        scratch: &'e mut LockedEnv<'a>,
        plan: &'e Plan,
        sizing: &'e Sizing,
    ) -> Execution<'e, 'a> {
        Execution {
            store: self.with.store,
            env: scratch,
            spec: &self.spec,
            plan,
            files: &self.files,
            sources: &self.sources,
            locked: self.locked.as_ref(),
            hooks: &self.hooks,
            host: &self.host,
            config: &self.with.task.cx.config,
            gpu: self.gpu.as_ref(),
            offline: false,
            apart: &self.apart,
            clean: false,
            stale: None,
            recorded: None,
            sizing,
            signals: &self.with.task.signals,
            reporter: &self.with.task.reporter,
        }
    }

    /// Compares a rebuilt step with the original.
    fn report(&self, scratch: &LockedEnv<'_>, key: &StepKey) -> Result<StepReport> {
        let store = self.with.store;
        let mut steps = self.spec.steps.iter();
        let step = steps.find(|step| step.key == *key);
        let step = step.ok_or_else(|| unexpected!("the rebuilt step is gone"))?;
        let layer_of = |env: &LockedEnv<'_>| {
            let id = snapshot_layer(env.known_record()?, key)?;
            let missing = || not_found!("layer `{id}` is missing from the store");
            store
                .layer(&id)?
                .ok_or_else(|| missing().help("rockenv fsck"))
        };
        let (old, new) = (layer_of(self.env)?, layer_of(scratch)?);
        let cancel = Cancel::new(&self.with.task.signals);
        let comparison = StepComparison {
            store,
            before: Side {
                env: self.env,
                layer: &old,
            },
            now: Side {
                env: scratch,
                layer: &new,
            },
            strict: self.options.strict,
            cancel: cancel.flag(),
        };
        let compared = cancel.watch(|| comparison.compare(&self.spec, step));
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

/// Reads the files of `copy` steps; refuses files that changed since the env was built.
fn copy_files(cx: &Context, spec: &Spec, steps: &[&Step], up: &str) -> Result<CopyFiles> {
    let copies = |step: &&&Step| matches!(step.action, Action::Copy(_));
    if !steps.iter().any(|step| copies(&step)) {
        return Ok(CopyFiles::default());
    }
    let dirs = &cx.config.profile_dirs;
    let profile = profile::load(dirs, &spec.origin.argument())?;
    let files = profile::copy_files(dirs, &profile)?;
    for step in steps {
        let Action::Copy(items) = &step.action else {
            continue;
        };
        for item in items {
            let found = files.item(&step.name, &item.from);
            if found.is_none_or(|found| found.digest != item.digest) {
                return Err(changed(step, &[&item.from], up));
            }
        }
    }
    Ok(files)
}

/// Reads the hooks that steps see; refuses hooks that changed since the env was built.
fn read_hooks(
    with: &Fetching<'_>,
    spec: &Spec,
    steps: &[&Step],
    up: &str,
) -> Result<BTreeMap<String, Hook>> {
    let mut hooks = BTreeMap::new();
    for step in steps {
        for volume in spec.visible(step) {
            for wanted in spec.hooks_at(step, &volume.name) {
                let hook = hook::load(&with.task.cx.config.hook_dirs, &wanted.name)?;
                if hook.digest()? != wanted.digest {
                    return Err(changed(step, &[&format!("hook {}", wanted.name)], up));
                }
                hooks.insert(wanted.name.clone(), hook);
            }
        }
    }
    let cancel = Cancel::new(&with.task.signals);
    let fetched = hooks::fetch_patches(&mut hooks, with.store, false, &cancel);
    cancel.outcome(fetched)?;
    Ok(hooks)
}

/// Returns the GPU for rebuilding a step.
fn grant(cx: &Context, spec: &Spec, step: &Step) -> Result<gpu::Grant> {
    match cx
        .gpus()
        .choose(&Selector::from("auto"), &spec.targets, spec.gpu)?
    {
        Choice::Gpu { grant, .. } => Ok(*grant),
        Choice::Without { why } => {
            Err(unavailable!("step `{}` cannot use a GPU: {why}", step.name)
                .help("name the steps that need no GPU: rockenv verify ENV STEP..."))
        }
    }
}
