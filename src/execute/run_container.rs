//! Owns one run of a step: its container, from waiting for a free job to measuring its usage.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::log::Log;
use super::outcome::Ran;
use super::step::{self, PreparedCommand};
use super::view::Views;
use super::{Execution, container, gpu_check, outcome, samples_beside};
use crate::engine::job_slots::SlotClaim;
use crate::engine::jobserver::Gauge;
use crate::engine::session::{End, Running};
use crate::engine::{Container, Usage, hold};
use crate::execute::build_watch::BuildWatch;
use crate::execute::disk_guard::{self, DiskGuard};
use crate::execute::redact::Redactor;
use crate::execute::sampler::Sampler;
use crate::execute::supervise::{self, Ending};
use crate::execute::wait_for_slot::SlotWait;
use crate::plan::ids::{LayerId, PathBelow, TreeId, VolumeName};
use crate::plan::record::Cost;
use crate::plan::resolve::{Action, Step};
use crate::rocm::gpu::{self, Device};
use crate::sys::error::{Result, ResultExt as _};
use crate::tree::{self, Method, measure};
use crate::ui::StepOutput;

/// One run of a step.
pub(super) struct Attempt<'a> {
    /// The step's number, shown with its output.
    pub(super) index: u32,
    pub(super) step: &'a Step,
    pub(super) tree: TreeId,
    /// The layer that the tree is based on.
    pub(super) parent: Option<&'a LayerId>,
    /// Its log, relative to the env's directory.
    pub(super) log: PathBelow,
    pub(super) jobs: u32,
    pub(super) views: &'a Views,
}

impl Execution<'_, '_> {
    /// Returns by how much a step's tree is larger than its parent, in allocated bytes.
    fn tree_growth(&self, tree: &TreeId, parent: Option<&LayerId>) -> Result<i64> {
        if let Some(written) = self.env.written_at_service(tree)? {
            return Ok(i64::try_from(written).unwrap_or(i64::MAX));
        }
        let directory = self.env.directory().join("trees").join(tree);
        if self.store.method() == Method::Overlay {
            return Ok(allocated(&directory.join("diff")));
        }
        if self.store.method() == Method::Btrfs {
            let written = tree::btrfs::written(&directory.join("root"))?;
            return Ok(i64::try_from(written).unwrap_or(i64::MAX));
        }
        // A clone looks as large as its parent; only the difference was written.
        let below = match parent {
            Some(layer) => self.store.layer_dir(layer).join("root"),
            None => self.store.image_root(&self.env.known_record()?.image_key),
        };
        Ok(allocated(&directory.join("root")) - allocated(&below))
    }

    /// Returns the build volumes that a step sees, with their directories.
    fn build_volumes(&self, step: &Step) -> Result<Vec<(VolumeName, PathBuf)>> {
        let volumes = &self.env.known_record()?.head.volumes;
        let seen = volumes
            .iter()
            .filter(|(name, _)| step.volumes.iter().any(|seen| **name == **seen));
        Ok(seen
            .map(|(name, id)| (name.clone(), self.store.volume_dir(id)))
            .collect())
    }

    /// Returns the size of the build volumes that a step sees, in allocated bytes.
    fn volume_bytes(&self, step: &Step) -> Result<i64> {
        let volumes = self.build_volumes(step)?;
        Ok(volumes.iter().map(|(_, top)| allocated(top)).sum())
    }

    /// Returns the current device nodes for a step.
    fn devices(&self, step: &Step) -> Result<Vec<Device>> {
        match (step.gpu, self.gpu) {
            (false, _) => Ok(Vec::new()),
            (true, Some(grant)) => grant.devices(),
            (true, None) => Err(unexpected!(
                "step `{}` needs a GPU, and the plan has none",
                step.name
            )),
        }
    }

    /// Runs the step's command in a container on `tree`, from start to end.
    pub(super) fn run_container(&mut self, attempt: &Attempt<'_>) -> Result<Ran> {
        let step = attempt.step;
        let claim = match self.wait_for_slot(step)? {
            SlotWait::Granted(claim) => claim,
            SlotWait::Interrupted(signal) => return Ok(Ran::interrupted(signal, &attempt.log)),
        };
        let started = Instant::now();
        let before = self.volume_bytes(step)?;
        let (container, command) = self.prepare(attempt)?;
        let mut output = self.reporter.step_output(attempt.index);
        let mut guard = self.disk_guard(step, &container)?;
        let seen =
            self.run_prepared(attempt, container, command, claim, &mut output, &mut guard)?;
        container::clean(self.store, &self.env.run_dir())?;
        let most_memory = seen.most_memory;
        let (mut ending, mut usage) = how_it_ended(step, seen)?;
        if matches!(ending, Ending::Stopped | Ending::Lost)
            && let Some(signal) = self.signals.pending()?
        {
            // The same Ctrl-C ended the container.
            ending = Ending::Interrupted(signal);
        }
        // The report's curve must not exceed this figure, so use the larger one.
        usage.memory_held = usage.memory_held.max(most_memory);
        match ending {
            _ if outcome::lacked_memory(ending, output.tail().all()) => {
                usage.oom_kills = usage.oom_kills.max(1);
            }
            // The step survived the loss of a process, so it did not run out of memory.
            Ending::Stopped | Ending::Interrupted(_) => usage.oom_kills = 0,
            _ => {}
        }
        let written = match (self.tree_growth(&attempt.tree, attempt.parent), &ending) {
            // The engine may be gone too.
            (Err(_), Ending::Stopped | Ending::Lost) => 0,
            (written, _) => written?,
        };
        let grown = written + self.volume_bytes(step)? - before;
        // Build volumes are in the layer if the store can freeze them. A service's data may be on another disk.
        let apart = self.env.known_record()?.service.is_some();
        let frozen = match self.store.freezes_volumes() && !apart {
            true => grown,
            false => written,
        };
        let wall_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(Ran {
            ending,
            cost: Cost {
                wall_ms,
                usage,
                disk_delta: grown,
                disk_peak: guard.taken(),
            },
            frozen: u64::try_from(frozen).unwrap_or(0),
            full: guard.filled(output.tail().last()),
            tail: output.tail().why(),
            log: attempt.log.clone(),
        })
    }

    /// Prepares a step's container, except for its job slots, and its command with its standard input.
    fn prepare(&mut self, attempt: &Attempt<'_>) -> Result<(Container, PreparedCommand)> {
        let step = attempt.step;
        let root = self
            .env
            .root(&attempt.tree, attempt.parent, Some(&step.key))?;
        let devices = self.devices(step)?;
        let command = step::prepare(
            step,
            self.spec,
            self.files,
            self.config,
            &self.sizing.facts(attempt.jobs),
            self.host.root.then(|| gpu::groups(&devices)),
        )?;
        self.provide_locked_files(step)?;
        let context = self.container_context();
        let mut container = context.of_step(step, attempt.views, root, devices)?;
        container.network &= !self.offline;
        Ok((container, command))
    }

    pub(super) fn container_context(&self) -> container::ContainerContext<'_> {
        container::ContainerContext {
            env: self.env,
            store: self.store,
            spec: self.spec,
            sources: self.sources,
            host: self.host,
        }
    }

    fn disk_guard(&self, step: &Step, container: &Container) -> Result<DiskGuard> {
        let written = container.binds.iter().filter(|bind| !bind.read_only);
        let written = written.map(|bind| bind.source.as_path());
        DiskGuard::new(
            &step.name,
            &self.env.run_dir(),
            std::iter::once(self.store.root()).chain(written.filter(|path| path.is_dir())),
            self.config.disk_floor,
        )
    }

    /// Starts the container, waits for the command's end, and ends the container.
    fn run_prepared(
        &self,
        attempt: &Attempt<'_>,
        container: Container,
        PreparedCommand { command, stdin }: PreparedCommand,
        claim: SlotClaim,
        output: &mut StepOutput,
        guard: &mut DiskGuard,
    ) -> Result<Observed> {
        let fifo = self.env.run_dir().join(container::FIFO);
        let gauge = Gauge::open(&self.store.jobs_file(), &fifo, self.env.name());
        let (ticket, claim) = claim.pass(attempt.jobs, fifo);
        let hold = hold::Hold {
            container,
            jobs: ticket,
            tie: hold::OnDisconnect::Kill,
            run: self.env.run_dir(),
            program: self.host.program.clone(),
            systemd: self.host.systemd && self.host.root,
            rootless: !self.host.root,
            made_of: String::new(),
            is_private: false,
        };
        let log_path = self.env.directory().join(&attempt.log);
        let mut log = Log::create(&log_path, self.config.log_max)?;
        let mut running = Running::start(&hold, self.env.lock_fd(), claim)?;
        let handed = self.spec.env_from_host.iter();
        let mut redactor = Redactor::of(
            handed.filter_map(|name| Some((name.as_str(), self.config.host_variable(name)?))),
        );
        let mut sampler = Sampler::start(&samples_beside(&log_path), &self.env.run_dir(), gauge);
        let script = match &attempt.step.action {
            Action::Run { script, .. } => script.clone(),
            Action::Packages(_) | Action::Copy(_) | Action::Export(_) => String::new(),
        };
        let volumes = self.build_volumes(attempt.step)?;
        let mut builds = BuildWatch::start(self.store, volumes, script, attempt.jobs);
        let (name, limit) = (&attempt.step.name, hold.container.limits.memory_max);
        let mut warn = |message: String| self.reporter.warn(message);
        let gpu_failure = gpu_check::step(
            &mut running,
            &hold.container.devices,
            &command,
            self.signals,
            &mut warn,
        );
        let ending = match gpu_failure {
            Err(error) => Err(error),
            Ok(Some(ending)) => Ok(ending),
            Ok(None) => supervise::supervise(
                &mut running,
                self.signals,
                supervise::Supervised {
                    command,
                    stdin: stdin.as_fd(),
                    timeout: attempt.step.timeout,
                    redactor: &mut redactor,
                    log: &mut log,
                    output,
                    builds: &mut builds,
                    guard,
                    sampler: &mut sampler,
                    advice: &|| disk_guard::advice(self.store, self.config),
                    starved: &|share, peak| outcome::starved(name, share, limit, peak),
                    goes_on: &outcome::goes_on(name),
                    warn: &mut warn,
                },
            ),
        };
        guard.measure();
        guard.release();
        // Sampled before the container's end removes its control group.
        sampler.sample(guard.grown());
        let interrupted = matches!(&ending, Ok(Ending::Interrupted(_)));
        Ok(Observed {
            ending,
            ready: running.is_ready(),
            end: running.finish(interrupted),
            most_memory: sampler.most_memory,
        })
    }
}

/// Observations of a container from its start to its end.
struct Observed {
    ending: Result<Ending>,
    /// Whether the container was ready for the command.
    ready: bool,
    end: Result<End>,
    most_memory: Option<u64>,
}

/// Returns how the step ended, and what its container used.
fn how_it_ended(step: &Step, seen: Observed) -> Result<(Ending, Usage)> {
    match (seen.ending, seen.end) {
        // The holder may be gone too, or the service may contradict itself. Neither changes the step's outcome.
        (Ok(ending @ (Ending::Stopped | Ending::Lost)), Err(_)) if seen.ready => {
            Ok((ending, Usage::default()))
        }
        // The first error is the cause; the second is its consequence.
        (Err(error), _) | (Ok(_), Err(error)) => {
            Err(error).context(|| format!("cannot run step `{}`", step.name))
        }
        (Ok(Ending::Lost), Ok(End::Ended(usage))) if usage.oom_kills > 0 => {
            // The kernel killed the container's first process.
            let killed = Ending::Exited {
                code: 137,
                signal: Some(9),
            };
            Ok((killed, usage))
        }
        (Ok(ending), Ok(End::Ended(usage))) => Ok((ending, usage)),
        (Ok(ending), Ok(End::Shared)) => Ok((ending, Usage::default())),
    }
}

fn allocated(path: &Path) -> i64 {
    i64::try_from(measure::scan_one(path).total().allocated).unwrap_or(i64::MAX)
}
