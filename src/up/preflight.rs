//! Owns the requirements of an env on the machine: `plan` shows them, and `up` checks them before it starts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::plan::jobs::{Figure, Forecast, Sizing, forecast};
use crate::plan::record::Record;
use crate::plan::resolve::{Spec, VolumeKind, VolumeSource};
use crate::plan::savings::{self, StartingPoint};
use crate::plan::{Action, Plan, PlanStep};
use crate::profile::{FROM_SOURCE, Profile};
use crate::store::results::outputs;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::space;
use crate::sys::name::StepName;
use crate::tree::FileSystem;
use crate::ui::size::{self, bytes};
use crate::up::select::Selection;

/// Space needed on one file system.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Disk {
    /// A directory on it.
    path: PathBuf,
    /// Total bytes still needed.
    pub(crate) needed: u64,
    free: u64,
    /// Bytes needed by volume, if the profile declares them.
    volumes: BTreeMap<String, u64>,
}

/// What an env needs of a machine. `plan --json` has it, which `matrix` reads.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Needs {
    pub(crate) sizing: Sizing,
    /// Memory that the machine must have, in bytes.
    pub(crate) memory: Option<u64>,
    /// The step that needs that much, unless the profile as a whole does.
    memory_for: Option<StepName>,
    /// Disk, the store's file system first.
    pub(crate) disk: Vec<Disk>,
    /// Earlier cost of the steps that will run.
    forecast: Vec<Forecast>,
    /// Published times for steps that have not run here yet.
    published: Vec<Published>,
    /// Directories of output volumes with `path`, which other envs may have too.
    pub(crate) outputs: Vec<PathBuf>,
    runs: usize,
    /// Starting points with less to do, by name.
    #[serde(skip)]
    points: Vec<StartingPoint>,
    /// The last step before those that need more memory than the machine has.
    #[serde(skip)]
    stop: Option<StepName>,
    #[serde(skip)]
    machine: u64,
    #[serde(skip)]
    profile: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Published {
    step: StepName,
    seconds: u64,
    /// Whether the time is a limit, not a measurement.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    limit: bool,
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
        let steps = plan.running();
        let steps = steps.filter_map(|step| Some((step.name.as_str(), step.key.as_deref()?)));
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
        let (profile, sizing) = (&selection.profile, selection.sizing.clone());
        let machine = selection.host.memory;
        Ok(Self::from_sizing(
            profile, spec, plan, sizing, machine, disk, forecast,
        ))
    }

    /// Takes the profile's figures, for a machine with `machine` bytes of memory.
    fn from_sizing(
        profile: &Profile,
        spec: &Spec,
        plan: &Plan,
        sizing: Sizing,
        machine: u64,
        disk: Vec<Disk>,
        forecast: Vec<Forecast>,
    ) -> Self {
        let runs: Vec<&PlanStep> = plan.running().collect();
        let step_of = |planned: &PlanStep| {
            let mut steps = profile.steps.iter();
            steps.find(|step| step.name == planned.name)
        };
        let needed = |planned: &PlanStep| step_of(planned).and_then(|step| step.memory);
        // This machine's figures are better than published ones.
        let unknown =
            |planned: &&&PlanStep| forecast.iter().all(|known| known.step != *planned.name);
        let published = |planned: &&PlanStep| {
            let published = step_of(planned)?.published.as_ref()?;
            Some(Published {
                step: planned.name.clone(),
                seconds: published.time?.as_secs(),
                limit: published.limit,
                source: published.source.clone(),
            })
        };
        let (mut memory, mut memory_for) = (spec.resources.memory, None);
        for planned in &runs {
            if needed(planned) > memory {
                (memory, memory_for) = (needed(planned), Some(planned.name.clone()));
            }
        }
        let large = |planned: &&PlanStep| needed(planned).is_some_and(|needed| needed > machine);
        let first = runs.iter().position(large);
        let stop = first.and_then(|first| first.checked_sub(1));
        Self {
            sizing,
            memory,
            memory_for,
            disk,
            published: runs.iter().filter(unknown).filter_map(published).collect(),
            forecast,
            stop: stop.map(|last| runs[last].name.clone()),
            outputs: outputs(spec)
                .filter_map(|volume| match &volume.source {
                    VolumeSource::Path(path) => Some(path.clone()),
                    VolumeSource::Git(_) | VolumeSource::Store => None,
                })
                .collect(),
            runs: runs.len(),
            points: match spec.from == FROM_SOURCE {
                true => savings::starting_points(profile, spec, &[]),
                false => Vec::new(),
            },
            machine,
            profile: spec.profile.clone(),
        }
    }

    /// Refuses a build that cannot work here.
    pub(crate) fn preflight(&self) -> Result<()> {
        match self.refused() {
            None => Ok(()),
            Some(Refused { reasons, help }) => {
                Err(Error::new(Kind::Preflight, reasons.join("; ")).help(help))
            }
        }
    }

    /// Returns every reason why the build cannot work here.
    pub(crate) fn refused(&self) -> Option<Refused> {
        let memory = self.memory.filter(|memory| *memory > self.machine);
        let full = |disk: &&Disk| disk.needed > disk.free;
        let disks: Vec<&Disk> = self.disk.iter().filter(full).collect();
        let mut reasons = Vec::new();
        if let Some(memory) = memory {
            let what = match &self.memory_for {
                Some(step) => format!("step `{step}`"),
                None => format!("profile `{}`", self.profile),
            };
            let (needed, there) = (bytes(memory), bytes(self.machine));
            let needs = format!("{what} needs {needed} of memory");
            reasons.push(format!("{needs}, this machine has {there}"));
        }
        for disk in &disks {
            reasons.push(format!(
                "profile `{}` needs {} of disk, `{}` has {} free",
                self.profile,
                bytes(disk.needed),
                disk.path.display(),
                bytes(disk.free)
            ));
        }
        // A step's earlier usage is the better figure, but the declared total includes it.
        if disks.is_empty()
            && let Some(store) = self.disk.first()
            && let Some(step) = self.forecast.iter().find(|step| step.disk > store.free)
        {
            reasons.push(format!(
                "step `{}` used {} of disk last time, `{}` has {} free",
                step.step,
                bytes(step.disk),
                store.path.display(),
                bytes(store.free)
            ));
        }
        let full_before = reasons.len() > usize::from(memory.is_some()) && disks.is_empty();
        (!reasons.is_empty()).then(|| Refused {
            help: self.instead(memory, &disks, full_before),
            reasons,
        })
    }

    /// Returns what to do instead.
    fn instead(&self, memory: Option<u64>, disks: &[&Disk], full_before: bool) -> String {
        // `gc` frees nothing on other file systems.
        let store = self.disk.first();
        let lacks_store = full_before || disks.iter().any(|disk| Some(*disk) == store);
        let gc = match lacks_store {
            true => " (`rockenv gc --dry-run` shows what rockenv can free)",
            false => "",
        };
        let mut choices = Vec::new();
        choices.extend(memory.map(|memory| format!("build on a machine with {}", bytes(memory))));
        let lacking: u64 = disks.iter().map(|disk| disk.needed - disk.free).sum();
        if lacking > 0 {
            let and = if memory.is_some() { "and " } else { "" };
            choices.push(format!("{and}free {} more{gc}", bytes(lacking)));
        } else if full_before {
            choices.push(format!("free some{gc}"));
        }
        let fits_memory = |point: &StartingPoint| {
            memory.is_none() || point.memory <= Some(self.machine) && self.memory_for.is_some()
        };
        let fits_disk = |point: &StartingPoint| {
            disks
                .iter()
                .all(|disk| point.disk.is_some_and(|needed| needed <= disk.free))
        };
        let fitting = self.points.iter().filter(|point| {
            (memory.is_some() || !disks.is_empty()) && fits_memory(point) && fits_disk(point)
        });
        let points: Vec<String> = fitting
            .map(|point| match point.disk.filter(|_| !disks.is_empty()) {
                Some(needed) => format!("--from {} ({})", point.name, bytes(needed)),
                None => format!("--from {}", point.name),
            })
            .collect();
        if !points.is_empty() {
            let points = points.join(" or ");
            choices.push(format!("start from prebuilt parts with {points}"));
        }
        if lacking > 0 || full_before {
            if memory.is_none() && lacks_store {
                choices.push("put the store elsewhere with `home` in config.toml".to_owned());
            }
        } else if let Some(stop) = &self.stop {
            choices.push(format!("stop before it with `--until {stop}`"));
        }
        format!("{}, or add --force", choices.join(", "))
    }

    /// Returns the requirements with reasons, each with its name.
    pub(crate) fn rows(&self) -> Vec<(&'static str, String)> {
        let sizing = &self.sizing;
        let why = |figure: &Figure| format!("{} ({})", figure.value, figure.why);
        let mut rows = vec![(
            "jobs",
            format!(
                "{}, of {} on this machine ({})",
                why(&sizing.jobs),
                sizing.budget.value,
                sizing.budget.why
            ),
        )];
        let (links, tensile) = (&sizing.link_jobs, &sizing.tensile_jobs);
        if links.value.min(tensile.value) < sizing.jobs.value {
            let text = format!("{}; TensileLite {}", why(links), why(tensile));
            rows.push(("links", text));
        }
        rows.push(("memory", self.memory_text()));
        for disk in &self.disk {
            let needs = match disk.needed {
                0 => "not declared".to_owned(),
                needed => format!("needs {}", bytes(needed)),
            };
            let (free, place) = (bytes(disk.free), disk.path.display());
            let mut text = format!("{needs}; {free} free at {place}");
            if !disk.volumes.is_empty() {
                let volumes = disk.volumes.iter();
                let volumes: Vec<String> = volumes
                    .map(|(name, needed)| format!("{name} {}", bytes(*needed)))
                    .collect();
                text = format!("{text} ({})", volumes.join(", "));
            }
            rows.push(("disk", text));
        }
        if self.runs > 0 {
            rows.push(("time", self.time()));
        }
        rows
    }

    fn memory_text(&self) -> String {
        let mut text = self.sizing.memory_max.as_ref().map_or_else(
            || "no limit".to_owned(),
            |limit| format!("at most {} ({})", bytes(limit.value), limit.why),
        );
        if let Some(needed) = self.memory {
            text = format!("{text}; needs a machine with {}", bytes(needed));
            if let Some(step) = &self.memory_for {
                text = format!("{text} (step `{step}`)");
            }
        }
        let steps = self.forecast.iter();
        let held = steps.filter_map(|step| Some((step.memory?, &step.step)));
        if let Some((held, step)) = held.max() {
            text = format!("{text}; step `{step}` held {} before", bytes(held));
        }
        text
    }

    /// Returns how long the steps with earlier runs take, if there are any.
    pub(crate) fn forecast_time(&self) -> Option<Duration> {
        let wall = self.forecast.iter().map(|step| step.wall_ms).sum();
        (!self.forecast.is_empty()).then(|| Duration::from_millis(wall))
    }

    /// Returns the known time of the steps that will run, in milliseconds.
    pub(crate) fn known_ms(&self) -> u64 {
        let recorded = self.forecast.iter().map(|step| step.wall_ms);
        let published = self.published.iter().map(|step| step.seconds * 1000);
        recorded.chain(published).sum()
    }

    /// Formats how long the remaining steps take, as far as known.
    fn time(&self) -> String {
        let mut text = match self.forecast_time() {
            None => "unknown: none of its steps has run here before".to_owned(),
            Some(wall) => format!(
                "about {} for {} of {}, by earlier runs",
                size::duration(wall),
                self.forecast.len(),
                size::count(self.runs, "step")
            ),
        };
        for (limit, word) in [(false, "published elsewhere"), (true, "limits upstream")] {
            let steps = self.published.iter().filter(|step| step.limit == limit);
            let steps: Vec<String> = steps
                .map(|step| {
                    let time = size::duration(Duration::from_secs(step.seconds));
                    format!("{} {time}", step.step)
                })
                .collect();
            if !steps.is_empty() {
                text = format!("{text}; {word}: {}", steps.join(", "));
            }
        }
        text
    }
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Refused {
    pub(crate) reasons: Vec<String>,
    /// What to do instead.
    pub(crate) help: String,
}

/// Returns the space needed on each file system, minus `spent` on the store's.
fn disks(spec: &Spec, root: &Path, spent: u64) -> Result<Vec<Disk>> {
    let mut disks: Vec<(FileSystem, Disk)> = Vec::new();
    let mut place = |path: &Path| -> Result<usize> {
        let existing = path.ancestors().find(|path| path.exists());
        let path = existing.unwrap_or(Path::new("/")).to_owned();
        let system = FileSystem::of(&path)?;
        if let Some(at) = disks.iter().position(|(other, _)| *other == system) {
            return Ok(at);
        }
        let disk = Disk {
            free: space(&path)?.free,
            path,
            needed: 0,
            volumes: BTreeMap::new(),
        };
        disks.push((system, disk));
        Ok(disks.len() - 1)
    };
    let store = place(root)?;
    let (mut wanted, mut beside) = (Vec::new(), 0);
    for volume in &spec.volumes {
        let Some(needed) = volume.disk else { continue };
        let at = match (&volume.source, volume.kind) {
            (VolumeSource::Path(path), VolumeKind::Output) => place(path)?,
            // A user's directory, which rockenv does not fill.
            (VolumeSource::Path(_), _) => continue,
            (VolumeSource::Git(_) | VolumeSource::Store, _) => store,
        };
        if at == store && matches!(volume.source, VolumeSource::Path(_)) {
            beside += needed;
        }
        wanted.push((at, volume.name.clone(), needed));
    }
    for (at, name, needed) in wanted {
        disks[at].1.needed += needed;
        disks[at].1.volumes.insert(name, needed);
    }
    let first = &mut disks[store].1;
    // The profile's total includes the volumes in the store.
    let total = spec.resources.disk.map(|disk| disk + beside);
    first.needed = total.unwrap_or(first.needed).saturating_sub(spent);
    Ok(disks.into_iter().map(|(_, disk)| disk).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::resolve::{self, Chosen, Inputs};
    use crate::plan::{Observed, StepOptions, jobs, plan};
    use crate::profile::{self, hook};
    use crate::rocm::target::Target;
    use crate::up::observe::wanted;

    const GIB: u64 = 1 << 30;

    /// Returns the needs of the shipped TheRock profile, on a machine with this much memory and disk.
    fn needs(memory: u64, free: u64, from: Option<&str>, until: Option<&str>) -> Needs {
        let profile = profile::load(&[], "therock").unwrap();
        let names = Chosen::new(&profile, None, from, &BTreeMap::new())
            .unwrap()
            .hooks();
        let hooks = names.iter().map(|name| {
            let hook = hook::load(&[], name).unwrap();
            (name.value.clone(), hook)
        });
        let inputs = Inputs {
            targets: vec![Target::parse("gfx1103").unwrap()],
            from: from.map(str::to_owned),
            file_digests: profile::copy_files(&[], &profile).unwrap().digests(),
            fingerprints: profile
                .steps
                .iter()
                .flat_map(|step| step.inputs.clone())
                .map(|input| (input, Some("f".to_owned())))
                .collect(),
            hooks: super::super::hooks::facts(&hooks.collect()).unwrap(),
            ..resolve::tests_inputs()
        };
        let spec = resolve::resolve(&profile, &inputs).unwrap();
        let options = StepOptions {
            until: until.map(str::to_owned),
            ..StepOptions::default()
        };
        let plan = plan(&wanted(&profile, &spec), &Observed::default(), &options);
        let sizing = jobs::size(&jobs::SizingInputs {
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
        Needs::from_sizing(&profile, &spec, &plan, sizing, memory, disks, Vec::new())
    }

    #[test]
    fn what_others_took_is_told_where_nothing_ran_here() {
        let told = needs(64 * GIB, 300 * GIB, None, None).time();
        assert_eq!(
            told,
            "unknown: none of its steps has run here before; published elsewhere: torch 1 h 00 min; \
             limits upstream: compiler-runtime 8 h 00 min, math-libs 8 h 00 min"
        );
        let told = needs(64 * GIB, 300 * GIB, Some("wheels"), None).time();
        assert_eq!(told, "unknown: none of its steps has run here before");
    }

    #[test]
    fn what_cannot_build_therock_is_refused_with_what_can() {
        // Linux sees 58 of 64 GB if the integrated graphics takes some.
        assert_eq!(needs(58 * GIB, 300 * GIB, None, None).refused(), None);
        let refused = |free, from| needs(31 * GIB, free, from, None).refused();
        let Refused { reasons, help } = refused(300 * GIB, None).unwrap();
        let wanted = "step `math-libs` needs 40.0 GiB of memory, this machine has 31.0 GiB";
        assert_eq!(reasons, [wanted]);
        assert_eq!(
            help,
            "build on a machine with 40.0 GiB, start from prebuilt parts with --from rocm or --from wheels, stop before it with \
             `--until configure`, or add --force"
        );
        let configured = needs(31 * GIB, 300 * GIB, None, Some("configure"));
        assert_eq!(configured.refused(), None);
        assert_eq!(refused(119 * GIB, Some("rocm")), None);

        let Refused { reasons, help } = needs(64 * GIB, 119 * GIB, None, None).refused().unwrap();
        let [reason] = &reasons[..] else {
            panic!("{reasons:?}");
        };
        assert!(
            reason.starts_with("profile `therock` needs 230.0 GiB of disk, `/")
                && reason.ends_with("has 119.0 GiB free"),
            "{reason}"
        );
        assert!(
            help.starts_with("free 111.0 GiB more (`rockenv gc --dry-run`")
                && help.contains(
                    "--from rocm (60.0 GiB) or --from wheels (20.0 GiB), put the store elsewhere with `home`"
                ),
            "{help}"
        );
        // Every reason is named at once.
        let needs = needs(31 * GIB, 119 * GIB, None, None);
        let error = needs.preflight().unwrap_err();
        assert_has!(error.message(), "40.0 GiB of memory");
        assert_has!(error.message(), "230.0 GiB of disk");
        assert_eq!(
            error.help_text(),
            Some(
                "build on a machine with 40.0 GiB, and free 111.0 GiB more (`rockenv gc --dry-run` shows what rockenv can free), \
                 start from prebuilt parts with --from rocm (60.0 GiB) or --from wheels (20.0 GiB), or add --force"
            )
        );
    }

    #[test]
    fn space_on_another_disk_is_not_for_gc_to_free() {
        let mut needs = needs(64 * GIB, 300 * GIB, None, None);
        needs.disk.push(Disk {
            path: "/other".into(),
            needed: 2 * GIB,
            free: GIB,
            volumes: BTreeMap::new(),
        });
        let help = needs.refused().unwrap().help;
        assert_eq!(help, "free 1.0 GiB more, or add --force");
    }

    #[test]
    fn a_user_s_directory_beside_the_store_is_no_part_of_the_whole() {
        let root = tempfile::tempdir().unwrap();
        let text = format!(
            "schema = 1\nimage = 'debian-trixie'\nresources = {{ disk = '10G' }}\n\
             [[volume]]\nname = 'b'\nkind = 'build'\ntarget = '/b'\ndisk = '4G'\n\
             [[volume]]\nname = 'o'\nkind = 'output'\ntarget = '/o'\ndisk = '2G'\npath = '{}/o'\n\
             [[step]]\nname = 's'\nrun = 'x'\n",
            root.path().display()
        );
        let profile = profile::from_text("p", &text).unwrap();
        let spec = resolve::resolve(&profile, &resolve::tests_inputs()).unwrap();
        let disks = disks(&spec, root.path(), GIB).unwrap();
        assert_eq!((disks.len(), disks[0].needed), (1, 11 * GIB));
    }

    #[test]
    fn what_the_volumes_take_is_part_of_the_whole() {
        let profile = profile::load(&[], "therock").unwrap();
        let volumes = profile.volumes.iter();
        let parts: u64 = volumes.filter_map(|volume| volume.disk).sum();
        assert!(parts > 0 && Some(parts) <= profile.resources.disk);
    }
}
