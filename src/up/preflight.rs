//! Owns the requirements of an env on the machine: `plan` shows them, and `up` checks them before it starts.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use serde::Serialize;

use crate::plan::jobs::{Forecast, Sizing, forecast};
use crate::plan::record::Record;
use crate::plan::resolve::{Spec, VolumeKind, VolumeSource};
use crate::plan::savings::{self, Way};
use crate::plan::{Action, Plan, Planned};
use crate::profile::{FROM_SOURCE, Profile};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::space;
use crate::ui::size::{self, bytes};
use crate::up::select::Selection;

/// Space needed on one file system.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Disk {
    /// A directory on it.
    path: PathBuf,
    /// Total bytes still needed.
    needed: u64,
    free: u64,
    /// Bytes needed by volume, if the profile declares them.
    volumes: BTreeMap<String, u64>,
}

/// The requirements of an env.
#[derive(Debug, Serialize)]
pub(crate) struct Needs {
    pub(crate) sizing: Sizing,
    /// Memory that the machine must have, in bytes.
    memory: Option<u64>,
    /// The step that needs that much, unless the profile as a whole does.
    memory_for: Option<String>,
    /// Disk, the store's file system first.
    disk: Vec<Disk>,
    /// Earlier cost of the steps that will run.
    forecast: Vec<Forecast>,
    /// Published times for steps that have not run here yet.
    published: Vec<Published>,
    /// How many steps run.
    runs: usize,
    /// Starting points with less to do, by name.
    #[serde(skip)]
    ways: Vec<Way>,
    /// The last step before those that need more memory than the machine has.
    #[serde(skip)]
    stop: Option<String>,
    #[serde(skip)]
    machine: u64,
    #[serde(skip)]
    profile: String,
}

/// The published time of a step.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Published {
    step: String,
    seconds: u64,
    /// The publisher.
    source: String,
}

impl Needs {
    /// Gathers what `plan` for `spec` needs, in a store at `root`.
    pub(crate) fn of(
        selection: &Selection,
        spec: &Spec,
        plan: &Plan,
        root: &Path,
        record: Option<&Record>,
    ) -> Result<Self> {
        let runs = || plan.steps.iter().filter(|step| step.action == Action::Run);
        let steps = runs().filter_map(|step| Some((step.name.as_str(), step.key.as_deref()?)));
        // The space that this env's finished steps took is not needed again.
        let spent: i64 = record.map_or(0, |record| {
            let done = record.steps.iter().filter(|step| {
                plan.steps.iter().any(|planned| {
                    planned.key == step.key && matches!(planned.action, Action::Hit | Action::Pull)
                })
            });
            done.filter_map(|step| step.cost)
                .map(|cost| cost.disk_delta)
                .sum()
        });
        let disk = disks(spec, root, u64::try_from(spent).unwrap_or(0))?;
        let forecast = forecast(steps, &selection.past, selection.sizing.jobs.value);
        let mut needs = Self::told(
            &selection.profile,
            spec,
            plan,
            selection.sizing.clone(),
            selection.host.memory,
            disk,
        );
        // Figures of this machine are better.
        let is_known = |name: &str| forecast.iter().any(|step| step.step == name);
        needs
            .published
            .retain(|published| !is_known(&published.step));
        Ok(Self { forecast, ..needs })
    }

    /// Takes the profile's figures, for a machine with `machine` bytes of memory.
    fn told(
        profile: &Profile,
        spec: &Spec,
        plan: &Plan,
        sizing: Sizing,
        machine: u64,
        disk: Vec<Disk>,
    ) -> Self {
        let runs: Vec<&Planned> = plan
            .steps
            .iter()
            .filter(|step| step.action == Action::Run)
            .collect();
        let step_of = |planned: &Planned| {
            let mut steps = profile.steps.iter();
            steps.find(|step| step.name == planned.name)
        };
        let needed = |planned: &Planned| step_of(planned).and_then(|step| step.memory);
        let published = |planned: &&Planned| {
            let published = step_of(planned)?.published.as_ref()?;
            Some(Published {
                step: planned.name.clone(),
                seconds: published.time?.as_secs(),
                source: published.source.clone(),
            })
        };
        let (mut memory, mut memory_for) = (spec.resources.memory, None);
        for planned in &runs {
            if needed(planned) > memory {
                (memory, memory_for) = (needed(planned), Some(planned.name.clone()));
            }
        }
        let large = |planned: &&Planned| needed(planned).is_some_and(|needed| needed > machine);
        let stop = runs
            .iter()
            .position(large)
            .and_then(|first| first.checked_sub(1));
        Self {
            sizing,
            memory,
            memory_for,
            disk,
            forecast: Vec::new(),
            published: runs.iter().filter_map(published).collect(),
            stop: stop.map(|last| runs[last].name.clone()),
            runs: runs.len(),
            ways: match spec.from == FROM_SOURCE {
                true => savings::ways(profile, spec, &BTreeMap::new()),
                false => Vec::new(),
            },
            machine,
            profile: spec.profile.clone(),
        }
    }

    /// Refuses what cannot work.
    pub(crate) fn preflight(&self) -> Result<()> {
        let refuse =
            |message: String, help: String| Err(Error::new(Kind::Preflight, message).help(help));
        if let Some(memory) = self.memory.filter(|memory| *memory > self.machine) {
            let what = match &self.memory_for {
                Some(step) => format!("step `{step}`"),
                None => format!("profile `{}`", self.profile),
            };
            let fitting = self
                .ways
                .iter()
                .filter(|way| way.memory <= Some(self.machine) && self.memory_for.is_some());
            let ways = begin(fitting.map(|way| format!("--from {}", way.name)));
            let stop = self.stop.as_ref().map_or_else(String::new, |stop| {
                format!("stop before it with `--until {stop}`, ")
            });
            let help = format!(
                "build on a machine with {}, {ways}{stop}or add --force",
                bytes(memory)
            );
            return refuse(
                format!(
                    "{what} needs {} of memory, this machine has {}",
                    bytes(memory),
                    bytes(self.machine)
                ),
                help,
            );
        }
        for disk in &self.disk {
            let path = disk.path.display();
            if disk.needed > disk.free {
                let fitting = self.ways.iter().filter_map(|way| {
                    let needed = way.disk.filter(|needed| *needed <= disk.free)?;
                    Some(format!("--from {} ({})", way.name, bytes(needed)))
                });
                return refuse(
                    format!(
                        "profile `{}` needs {} of disk, `{path}` has {} free",
                        self.profile,
                        bytes(disk.needed),
                        bytes(disk.free)
                    ),
                    format!(
                        "free {} more (`rockenv gc --dry-run` shows what rockenv can free), {}put the store elsewhere with \
                         ROCKENV_HOME, or add --force",
                        bytes(disk.needed - disk.free),
                        begin(fitting)
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
                    "step `{}` used {} of disk last time, `{}` has {} free",
                    step.step,
                    bytes(step.disk),
                    store.path.display(),
                    bytes(store.free)
                ),
                "free some (`rockenv gc --dry-run` shows what rockenv can free), put the store elsewhere with ROCKENV_HOME, or add --force"
                    .to_owned(),
            ),
            None => Ok(()),
        }
    }

    /// Returns the requirements with reasons, one line each.
    pub(crate) fn lines(&self) -> String {
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
            if let Some(step) = &self.memory_for {
                memory = format!("{memory} (step `{step}`)");
            }
        }
        let held = self
            .forecast
            .iter()
            .filter_map(|step| Some((step.memory?, &step.step)));
        if let Some((held, step)) = held.max() {
            memory = format!("{memory}; step `{step}` held {} before", bytes(held));
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
            line("time   ", self.time());
        }
        lines
    }

    /// Formats how long the remaining steps take, as far as known.
    fn time(&self) -> String {
        let duration = |seconds| size::duration(Duration::from_secs(seconds));
        let wall: u64 = self.forecast.iter().map(|step| step.wall_ms).sum();
        let mut text = match self.forecast.len() {
            0 => "unknown: no step of it has run here before".to_owned(),
            known => format!(
                "about {} for {known} of {} steps, by their earlier runs",
                size::duration(Duration::from_millis(wall)),
                self.runs
            ),
        };
        if !self.published.is_empty() {
            let all = self.published.iter().map(|step| step.seconds).sum();
            let each = self.published.iter();
            let each = each.map(|step| format!("{} {}", step.step, duration(step.seconds)));
            text = format!(
                "{text}; {} published for {} of {} ({})",
                duration(all),
                self.published.len(),
                self.runs,
                each.collect::<Vec<_>>().join(", ")
            );
        }
        text
    }
}

/// Returns the advice to start from prebuilt parts; empty if there are none.
fn begin(ways: impl Iterator<Item = String>) -> String {
    match ways.collect::<Vec<_>>().join(" or ") {
        none if none.is_empty() => none,
        ways => format!("start from prebuilt parts with {ways}, "),
    }
}

/// Returns the space needed on each file system, minus `spent` on the store's.
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
            // A user's directory, which rockenv does not fill.
            (VolumeSource::Path(_), _) => continue,
            (VolumeSource::Git(_) | VolumeSource::Store, _) => store,
        };
        wanted.push((at, volume.name.clone(), needed));
    }
    for (at, name, needed) in wanted {
        disks[at].1.needed += needed;
        disks[at].1.volumes.insert(name, needed);
    }
    let first = &mut disks[store].1;
    // The figure for the whole includes the parts.
    first.needed = spec
        .resources
        .disk
        .unwrap_or(first.needed)
        .saturating_sub(spent);
    Ok(disks.into_iter().map(|(_, disk)| disk).collect())
}

/// Returns the path or its nearest existing parent.
fn existing(path: &Path) -> PathBuf {
    path.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"))
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::jobs;
    use crate::plan::resolve::{self, Chosen, Inputs};
    use crate::plan::{Observed, Options, plan};
    use crate::profile::{self, hook};
    use crate::rocm::target::Target;
    use crate::up::observe::wanted;

    const GIB: u64 = 1 << 30;

    /// Returns what the shipped profile of TheRock needs, on a machine with so much memory and disk.
    fn needs(memory: u64, free: u64, from: Option<&str>, until: Option<&str>) -> Needs {
        let profile = profile::load(&[], "therock").unwrap();
        let names = Chosen::new(&profile, None, from, &BTreeMap::new())
            .unwrap()
            .hooks();
        let hooks = names.iter().map(|name| {
            let hook = hook::load(&[], name).unwrap();
            (name.clone(), hook)
        });
        let inputs = Inputs {
            targets: vec![Target::parse("gfx1103").unwrap()],
            from: from.map(str::to_owned),
            file_digests: profile::copy_files(&[], &profile).unwrap().digests(),
            fingerprints: profile
                .steps
                .iter()
                .flat_map(|step| step.inputs.clone())
                .map(|input| (input, "f".to_owned()))
                .collect(),
            hooks: super::super::hooks::facts(&hooks.collect()).unwrap(),
            ..resolve::tests_inputs()
        };
        let spec = resolve::resolve(&profile, &inputs).unwrap();
        let options = Options {
            until: until.map(str::to_owned),
            ..Options::default()
        };
        let plan = plan(&wanted(&profile, &spec), &Observed::default(), &options);
        let sizing = jobs::size(&jobs::Given {
            resources: &spec.resources,
            cores: 16,
            memory,
            configured: None,
            asked: None,
            past: &[],
        });
        let root = tempfile::tempdir().unwrap();
        let mut disks = disks(&spec, root.path(), 0).unwrap();
        disks[0].free = free;
        Needs::told(&profile, &spec, &plan, sizing, memory, disks)
    }

    fn therock(
        memory: u64,
        free: u64,
        from: Option<&str>,
        until: Option<&str>,
    ) -> std::result::Result<(), (String, String)> {
        needs(memory, free, from, until)
            .preflight()
            .map_err(|error| {
                let help = error.help_text().unwrap_or_default().to_owned();
                (error.message().to_owned(), help)
            })
    }

    #[test]
    fn what_others_took_is_told_where_nothing_ran_here() {
        let told = needs(64 * GIB, 300 * GIB, None, None).time();
        let start = "unknown: no step of it has run here before; 17 h 00 min published for 3 of ";
        assert!(told.starts_with(start), "{told}");
        let end = "(compiler-runtime 8 h 00 min, math-libs 8 h 00 min, torch 1 h 00 min)";
        assert!(told.ends_with(end), "{told}");
        let told = needs(64 * GIB, 300 * GIB, Some("wheels"), None).time();
        assert_eq!(told, "unknown: no step of it has run here before");
    }

    #[test]
    fn what_cannot_build_therock_is_refused_with_what_can() {
        // Linux has 58 of 64 GB if the integrated graphics takes some.
        assert_eq!(therock(58 * GIB, 300 * GIB, None, None), Ok(()));
        let (message, help) = therock(31 * GIB, 300 * GIB, None, None).unwrap_err();
        assert_eq!(
            message,
            "step `math-libs` needs 40.0 GiB of memory, this machine has 31.0 GiB"
        );
        assert_eq!(
            help,
            "build on a machine with 40.0 GiB, start from prebuilt parts with --from rocm or --from wheels, stop before it with \
             `--until configure`, or add --force"
        );
        assert_eq!(
            therock(31 * GIB, 300 * GIB, None, Some("configure")),
            Ok(())
        );
        assert_eq!(therock(31 * GIB, 119 * GIB, Some("rocm"), None), Ok(()));

        let (message, help) = therock(64 * GIB, 119 * GIB, None, None).unwrap_err();
        assert!(
            message.starts_with("profile `therock` needs 230.0 GiB of disk, `/")
                && message.ends_with("has 119.0 GiB free"),
            "{message}"
        );
        assert!(
            help.starts_with("free 111.0 GiB more (`rockenv gc --dry-run`")
                && help
                    .contains("--from rocm (60.0 GiB) or --from wheels (20.0 GiB), put the store"),
            "{help}"
        );
    }

    #[test]
    fn what_the_volumes_take_is_part_of_the_whole() {
        let profile = profile::load(&[], "therock").unwrap();
        let parts: u64 = profile
            .volumes
            .iter()
            .filter_map(|volume| volume.disk)
            .sum();
        assert!(parts > 0 && Some(parts) <= profile.resources.disk);
    }
}
