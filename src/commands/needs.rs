//! Owns what an env needs of the machine: what `plan` shows of it, and what `up` refuses before it starts.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use serde::Serialize;

use super::prepare::Prepared;
use crate::error::{Error, Kind, Result};
use crate::host::space;
use crate::jobs::{Forecast, Sizing, forecast};
use crate::plan::{Action, Plan};
use crate::spec::{Spec, VolumeKind, VolumeSource};
use crate::store::record::Record;
use crate::ui::size::{self, bytes};

/// What is needed on one file system.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Disk {
    /// A directory on it.
    path: PathBuf,
    /// Bytes still needed, in all.
    needed: u64,
    /// Bytes free.
    free: u64,
    /// Bytes needed by volume, where the profile says so.
    volumes: BTreeMap<String, u64>,
}

/// What an env needs.
#[derive(Debug, Serialize)]
pub(super) struct Needs {
    /// Jobs and memory.
    pub(super) sizing: Sizing,
    /// Memory that the machine must have, in bytes.
    memory: Option<u64>,
    /// Disk, the store's file system first.
    disk: Vec<Disk>,
    /// What the steps that run took before.
    forecast: Vec<Forecast>,
    /// How many steps run.
    runs: usize,
    #[serde(skip)]
    machine: u64,
    #[serde(skip)]
    profile: String,
}

impl Needs {
    /// Gathers what `plan` for `spec` needs, in a store at `root`.
    pub(super) fn of(
        prepared: &Prepared,
        spec: &Spec,
        plan: &Plan,
        root: &Path,
        record: Option<&Record>,
    ) -> Result<Self> {
        let runs = || plan.steps.iter().filter(|step| step.action == Action::Run);
        let steps = runs().map(|step| (step.name.as_str(), step.key.as_str()));
        // What earlier steps of this env took is there already, and not needed again.
        let spent: i64 = record.map_or(0, |record| {
            let done = record.steps.iter().filter(|step| {
                plan.steps
                    .iter()
                    .any(|planned| planned.key == step.key && planned.action == Action::Hit)
            });
            done.filter_map(|step| step.cost)
                .map(|cost| cost.disk_delta)
                .sum()
        });
        Ok(Self {
            sizing: prepared.sizing.clone(),
            memory: spec.resources.memory,
            disk: disks(spec, root, u64::try_from(spent).unwrap_or(0))?,
            forecast: forecast(steps, &prepared.past, prepared.sizing.jobs.value),
            runs: runs().count(),
            machine: prepared.host.memory,
            profile: spec.profile.clone(),
        })
    }

    /// Refuses what cannot work.
    pub(super) fn preflight(&self) -> Result<()> {
        let refuse =
            |message: String, help: String| Err(Error::new(Kind::Preflight, message).help(help));
        if let Some(memory) = self.memory.filter(|memory| *memory > self.machine) {
            return refuse(
                format!(
                    "profile `{}` needs {} of memory, this machine has {}",
                    self.profile,
                    bytes(memory),
                    bytes(self.machine)
                ),
                format!(
                    "build on a machine with {}, leave out the steps that need it with --until, or add --force",
                    bytes(memory)
                ),
            );
        }
        for disk in &self.disk {
            let path = disk.path.display();
            if disk.needed > disk.free {
                return refuse(
                    format!(
                        "profile `{}` needs {} of disk, `{path}` has {} free",
                        self.profile,
                        bytes(disk.needed),
                        bytes(disk.free)
                    ),
                    format!(
                        "free {} more (`rockenv du` shows what rockenv holds), put the store elsewhere with ROCKENV_HOME, or add --force",
                        bytes(disk.needed - disk.free)
                    ),
                );
            }
        }
        let Some(store) = self.disk.first() else {
            return Ok(());
        };
        match self.forecast.iter().find(|step| step.disk > store.free) {
            Some(step) => refuse(
                format!(
                    "step `{}` took {} of disk the last time, `{}` has {} free",
                    step.step,
                    bytes(step.disk),
                    store.path.display(),
                    bytes(store.free)
                ),
                "free some (`rockenv du` shows what rockenv holds), put the store elsewhere with ROCKENV_HOME, or add --force"
                    .to_owned(),
            ),
            None => Ok(()),
        }
    }

    /// Returns lines of what and why, for people.
    pub(super) fn lines(&self) -> String {
        let Sizing {
            budget,
            jobs,
            link_jobs,
            tensile_jobs,
            memory_max,
            ..
        } = &self.sizing;
        let mut lines = format!(
            "jobs   {} ({}), of {} on this machine ({})\n",
            jobs.value, jobs.why, budget.value, budget.why
        );
        let mut line = |name: &str, text: String| {
            lines.push_str(name);
            lines.push_str(&text);
            lines.push('\n');
        };
        line(
            "links  ",
            format!("{} ({})", link_jobs.value, link_jobs.why),
        );
        line(
            "tensile ",
            format!("{} ({})", tensile_jobs.value, tensile_jobs.why),
        );
        let mut memory = memory_max.as_ref().map_or_else(
            || "no limit".to_owned(),
            |limit| format!("at most {} ({})", bytes(limit.value), limit.why),
        );
        if let Some(needed) = self.memory {
            memory = format!("{memory}; needs a machine with {}", bytes(needed));
        }
        line("memory ", memory);
        for disk in &self.disk {
            let mut text = match disk.needed {
                0 => "not said".to_owned(),
                needed => format!("needs {}", bytes(needed)),
            };
            if !disk.volumes.is_empty() {
                let volumes: Vec<String> = disk
                    .volumes
                    .iter()
                    .map(|(name, needed)| format!("{name} {}", bytes(*needed)))
                    .collect();
                text = format!("{text} ({})", volumes.join(", "));
            }
            line(
                "disk   ",
                format!(
                    "{text}; {} free at {}",
                    bytes(disk.free),
                    disk.path.display()
                ),
            );
        }
        line(
            "tmp    ",
            "/tmp and /var/tmp on disk, in the store".to_owned(),
        );
        if self.runs > 0 {
            let wall = self.forecast.iter().map(|step| step.wall_ms).sum();
            let text = match self.forecast.len() {
                0 => "not known: no step of it ran here before".to_owned(),
                known => format!(
                    "about {} for {known} of {} steps, from what they took before",
                    size::duration(Duration::from_millis(wall)),
                    self.runs
                ),
            };
            line("time   ", text);
        }
        lines
    }
}

/// Returns what is needed on each file system, less `spent` on the store's.
fn disks(spec: &Spec, root: &Path, spent: u64) -> Result<Vec<Disk>> {
    let mut disks: Vec<(u64, Disk)> = Vec::new();
    let mut place = |path: &Path| -> Result<usize> {
        let path = existing(path);
        let device = fs::metadata(&path)?.dev();
        if let Some(at) = disks.iter().position(|(other, _)| *other == device) {
            return Ok(at);
        }
        let disk = Disk {
            free: space(&path)?.free,
            path,
            needed: 0,
            volumes: BTreeMap::new(),
        };
        disks.push((device, disk));
        Ok(disks.len() - 1)
    };
    let store = place(root)?;
    let mut wanted = Vec::new();
    for volume in &spec.volumes {
        let Some(needed) = volume.disk else { continue };
        let at = match (&volume.source, volume.kind) {
            (VolumeSource::Path(path), VolumeKind::Output) => place(path)?,
            // A directory of the user's, which is as large as it is.
            (VolumeSource::Path(_), _) => continue,
            _ => store,
        };
        wanted.push((at, volume.name.clone(), needed));
    }
    for (at, name, needed) in wanted {
        disks[at].1.needed += needed;
        disks[at].1.volumes.insert(name, needed);
    }
    let first = &mut disks[store].1;
    first.needed = first
        .needed
        .max(spec.resources.disk.unwrap_or(0))
        .saturating_sub(spent);
    Ok(disks.into_iter().map(|(_, disk)| disk).collect())
}

/// Returns the path, or what there is of it.
fn existing(path: &Path) -> PathBuf {
    path.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"))
        .to_owned()
}
