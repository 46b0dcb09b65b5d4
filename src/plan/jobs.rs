//! Owns deciding how much of the machine an env's steps use at once, and forecasting their needs: a pure function of
//! the profile, the machine, and the steps' earlier costs. Each number comes with its reason.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::plan::ids::{EnvName, PathBelow, StepKey};
use crate::plan::record::{Cost, Outcome};
use crate::plan::resolve::Facts;
use crate::profile::{Amount, Resources};
use crate::sys::name::StepName;
use crate::ui::size;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SizingInputs<'a> {
    pub resources: &'a Resources,
    pub cores: u32,
    /// The machine's memory, in bytes.
    pub memory: u64,
    /// Configured maximum of jobs on this machine.
    pub configured: Option<u32>,
    /// Maximum of jobs for this env, from the command line.
    pub asked: Option<u32>,
    /// Earlier costs of the env's steps.
    pub past: &'a [Past],
}

/// One run of a step: a row of an env's `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Past {
    pub time: Timestamp,
    pub env: EnvName,
    pub step: StepName,
    pub key: StepKey,
    pub outcome: Outcome,
    /// Number of jobs that it ran with.
    pub jobs: u32,
    /// Memory that it could use, in bytes: the machine's, or the env's limit if that is lower. 0 if unknown: version
    /// 0.1.0 did not record it.
    #[serde(default)]
    pub memory: u64,
    pub cost: Cost,
    /// Its log, relative to the env's directory.
    pub log: PathBelow,
}

#[cfg(test)]
impl Past {
    /// Makes a run of env `a` with one job and 64 GiB of memory, for tests.
    pub(crate) fn sample(step: &str, outcome: Outcome) -> Self {
        Self {
            time: Timestamp::UNIX_EPOCH,
            env: "a".into(),
            step: step.into(),
            key: step.into(),
            outcome,
            jobs: 1,
            memory: 64 << 30,
            cost: Cost::default(),
            log: "logs/a.log".into(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Figure<T = u32> {
    pub value: T,
    /// The reason, as a clause after "because".
    pub why: String,
}

/// The resources that an env may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sizing {
    /// Job slots of this machine for all envs together.
    pub budget: Figure,
    pub jobs: Figure,
    pub link_jobs: Figure,
    /// Processes of TensileLite at once.
    pub tensile_jobs: Figure,
    /// Memory limit of the env, in bytes.
    pub memory_max: Option<Figure<u64>>,
    /// Number of jobs of this env's size that the machine's memory has room for, in all envs together; `u32::MAX` if
    /// their size is unknown.
    #[serde(skip)]
    pub together: u32,
    #[serde(skip)]
    memory: u64,
}

impl Sizing {
    /// Returns the facts for a step that may run `jobs` at once, which are fewer after it ran out of memory.
    pub(crate) fn facts(&self, jobs: u32) -> Facts {
        Facts {
            jobs,
            link_jobs: part(self.link_jobs.value, jobs, self.jobs.value),
            tensile_jobs: part(self.tensile_jobs.value, jobs, self.jobs.value),
            memory: self.memory,
        }
    }
}

/// Decides how much may run at once.
pub(crate) fn size(given: &SizingInputs<'_>) -> Sizing {
    let limit = given.resources.memory_max;
    let limit = limit.map(|limit| limit.of(given.memory));
    // A limit may be larger than the machine.
    let memory = limit.unwrap_or(u64::MAX).min(given.memory);
    let why = match given.resources.memory_max {
        Some(Amount::Percent(percent)) => format!("{percent} % of {}", size::bytes(given.memory)),
        _ => "set by the profile".to_owned(),
    };
    let memory_max = limit.map(|value| Figure { value, why });
    let (value, why) = match given.configured {
        Some(value) => (value, "configured".to_owned()),
        None => (given.cores, size::count(given.cores, "core")),
    };
    let value = value.max(1);
    let budget = Figure { value, why };
    let most = by_profile(given, &budget, memory);
    let (value, why) = (u32::MAX, String::new());
    let any = Figure { value, why };
    let mut together = by_profile(given, &any, given.memory);
    if given.asked.is_none() {
        together = jobs(given, &together, given.memory);
    }
    let jobs = jobs(given, &most, memory);
    let by = |per: Option<u64>, what: &str| match per.filter(|bytes| *bytes > 0) {
        Some(per) => {
            let mut why = format!("{} at {} a {what}", size::bytes(memory), size::bytes(per));
            if jobs.value < most.value {
                why = format!("{why}, for {} of {} jobs", jobs.value, most.value);
            }
            let fits = fitting(memory, per).min(most.value);
            least(&jobs, part(fits, jobs.value, most.value), why)
        }
        None => Figure {
            value: jobs.value,
            why: "as many as jobs".to_owned(),
        },
    };
    Sizing {
        link_jobs: by(given.resources.memory_per_link_job, "link"),
        tensile_jobs: by(given.resources.memory_per_tensile_job, "process"),
        jobs,
        budget,
        memory_max,
        together: together.value,
        memory,
    }
}

/// Returns how many jobs of the size that the profile states fit into `memory`.
fn by_profile(given: &SizingInputs<'_>, budget: &Figure, memory: u64) -> Figure {
    match given.resources.memory_per_job.filter(|bytes| *bytes > 0) {
        Some(per) => {
            let why = format!("{} at {} a job", size::bytes(memory), size::bytes(per));
            least(budget, fitting(memory, per), why)
        }
        None => budget.clone(),
    }
}

/// Returns how many of `most` jobs may run, as the command line or earlier runs decide.
fn jobs(given: &SizingInputs<'_>, most: &Figure, memory: u64) -> Figure {
    if let Some(asked) = given.asked {
        return least(most, asked.max(1), "asked for".to_owned());
    }
    let mut jobs = most.clone();
    for (step, run) in last_runs(given.past) {
        if let Some(killed) = run.killed {
            let why = format!("step `{step}` ran out of memory with {}", killed.jobs);
            let fine = run.done.map_or(0, |done| done.jobs);
            jobs = least(&jobs, after_out_of_memory(killed, fine, memory), why);
        }
        if let Some(run) = run.done
            && let Some(held) = run.cost.usage.memory_held
            && held > 0
        {
            let per = held / u64::from(run.jobs.max(1));
            let why = format!("step `{step}` used {} a job last time", size::bytes(per));
            jobs = least(&jobs, fitting(memory, per.max(1)), why);
        }
    }
    jobs
}

/// Returns half the jobs of a run that ran out of memory, or, if a later run with `fine` jobs did not, the middle
/// between the jobs of both runs. Scales the number by the growth in memory since.
fn after_out_of_memory(run: &Past, fine: u32, memory: u64) -> u32 {
    let fewer = fine.midpoint(run.jobs).max(1);
    if !(1..memory).contains(&run.memory) {
        return fewer;
    }
    let jobs = u128::from(fewer) * u128::from(memory) / u128::from(run.memory);
    u32::try_from(jobs).unwrap_or(u32::MAX)
}

/// Reduces a number of links or processes of TensileLite in the proportion of `jobs` to `most`, because these may have
/// used up the memory.
fn part(count: u32, jobs: u32, most: u32) -> u32 {
    let part = u64::from(count) * u64::from(jobs) / u64::from(most.max(1));
    u32::try_from(part).unwrap_or(u32::MAX).max(1)
}

fn fitting(memory: u64, per: u64) -> u32 {
    u32::try_from(memory / per).unwrap_or(u32::MAX)
}

fn least(so_far: &Figure, value: u32, why: String) -> Figure {
    let value = value.max(1);
    if value < so_far.value {
        Figure { value, why }
    } else {
        so_far.clone()
    }
}

/// The last runs of a step that show how much memory the step needs.
#[derive(Clone, Copy, Debug, Default)]
struct LastRuns<'a> {
    /// The last run that ran out of memory, unless a run with as many jobs has succeeded since, or two with one job
    /// fewer.
    killed: Option<&'a Past>,
    /// The last run that has succeeded since. It may have built only a little.
    done: Option<&'a Past>,
}

/// Returns the last runs of each step. A run that failed for another reason, perhaps at once, says nothing about
/// memory.
fn last_runs(past: &[Past]) -> BTreeMap<&str, LastRuns<'_>> {
    let mut last: BTreeMap<&str, LastRuns<'_>> = BTreeMap::new();
    for run in past {
        let known = last.entry(run.step.as_str()).or_default();
        if run.outcome == Outcome::Done {
            // A single run may have built only the rest. After two with equal jobs, an earlier failure with one more
            // job no longer counts, because no number is left between them.
            let fine = match known.done {
                Some(done) if done.jobs == run.jobs => run.jobs.saturating_add(1),
                _ => run.jobs,
            };
            known.done = Some(run);
            known.killed = known.killed.filter(|killed| killed.jobs > fine);
        } else if run.cost.usage.oom_kills > 0 {
            (known.killed, known.done) = (Some(run), None);
        }
    }
    last
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Forecast {
    pub step: String,
    /// Wall clock, in milliseconds.
    pub wall_ms: u64,
    /// Peak of memory, in bytes, if known.
    pub memory: Option<u64>,
    /// Peak of disk usage, in bytes.
    pub disk: u64,
    /// Whether the run had this key, not only the step's name.
    pub exact: bool,
}

/// Forecasts the cost of `steps` (name and key) with `jobs` at once, from the last success of each.
pub(crate) fn forecast<'a>(
    steps: impl Iterator<Item = (&'a str, &'a str)>,
    past: &[Past],
    jobs: u32,
) -> Vec<Forecast> {
    let done = || past.iter().filter(|run| run.outcome == Outcome::Done);
    steps
        .filter_map(|(step, key)| {
            let same = done().rfind(|run| run.key == key);
            let run = same.or_else(|| done().rfind(|run| run.step == step))?;
            let cost = &run.cost;
            // Only processor time depends on the number of jobs; the rest takes as long as before.
            let spread = |jobs: u32| cost.usage.cpu_us / 1000 / u64::from(jobs.max(1));
            let rest = cost.wall_ms.saturating_sub(spread(run.jobs));
            Some(Forecast {
                step: step.to_owned(),
                wall_ms: rest + spread(jobs).min(cost.usage.cpu_us / 1000),
                memory: cost.usage.memory_held,
                disk: cost.disk_peak.max(cost.disk_delta.try_into().unwrap_or(0)),
                exact: same.is_some(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn run(step: &str, jobs: u32, outcome: Outcome) -> Past {
        Past {
            jobs,
            ..Past::sample(step, outcome)
        }
    }

    fn jobs_of(sizing: &Sizing) -> (u32, &str) {
        (sizing.jobs.value, sizing.jobs.why.as_str())
    }

    fn given<'a>(resources: &'a Resources, past: &'a [Past]) -> SizingInputs<'a> {
        SizingInputs {
            resources,
            cores: 16,
            memory: 64 * GIB,
            configured: None,
            asked: None,
            past,
        }
    }

    fn sized(resources: &Resources, asked: Option<u32>, past: &[Past]) -> Sizing {
        let given = given(resources, past);
        size(&SizingInputs { asked, ..given })
    }

    #[test]
    fn jobs_are_bounded_by_cores_memory_and_what_is_asked() {
        let none = Resources::default();
        let plain = sized(&none, None, &[]);
        assert_eq!(jobs_of(&plain), (16, "16 cores"));
        assert_eq!((plain.link_jobs.value, plain.memory_max), (16, None));
        assert_eq!(plain.together, u32::MAX);
        assert_eq!(sized(&none, Some(3), &[]).jobs.value, 3);
        assert_eq!(sized(&none, Some(99), &[]).jobs.value, 16);
        let configured = Some(17);
        let given = given(&none, &[]);
        let sizing = size(&SizingInputs {
            configured,
            ..given
        });
        assert_eq!(jobs_of(&sizing), (17, "configured"));
        let large = Resources {
            memory_per_job: Some(8 * GIB),
            memory_max: Some(Amount::Bytes(128 * GIB)),
            ..Resources::default()
        };
        let sizing = sized(&large, None, &[]);
        assert_eq!((sizing.jobs.value, sizing.facts(1).memory), (8, 64 * GIB));
        let some = Resources {
            memory_per_job: Some(8 * GIB),
            memory_per_link_job: Some(30 * GIB),
            memory_per_tensile_job: Some(GIB),
            memory_max: Some(Amount::Percent(50)),
            ..Resources::default()
        };
        let sizing = sized(&some, None, &[]);
        assert_eq!(jobs_of(&sizing), (4, "32.0 GiB at 8.0 GiB a job"));
        // The machine has room for another such env.
        assert_eq!(sizing.together, 8);
        assert_eq!(sized(&some, Some(1), &[]).together, 8);
        assert_eq!((sizing.link_jobs.value, sizing.tensile_jobs.value), (1, 4));
        assert_eq!(sizing.memory_max.as_ref().unwrap().why, "50 % of 64.0 GiB");
        assert_eq!(
            sizing.facts(2),
            Facts {
                jobs: 2,
                link_jobs: 1,
                tensile_jobs: 2,
                memory: 32 * GIB
            }
        );
    }

    #[test]
    fn what_happened_before_lowers_jobs_unless_they_are_asked_for() {
        let none = Resources::default();
        let mut killed = run("math", 16, Outcome::Failed);
        killed.cost.usage.oom_kills = 1;
        let after = |run: &Past, asked| sized(&none, asked, std::slice::from_ref(run));
        let sizing = after(&killed, None);
        let why = "step `math` ran out of memory with 16";
        assert_eq!((jobs_of(&sizing), sizing.together), ((8, why), 8));
        assert_eq!(after(&killed, Some(16)).jobs.value, 16);
        // 64 GiB now: as much as then, unknown, more, and so much more that the earlier run says nothing.
        for (then, jobs) in [(64 * GIB, 8), (0, 8), (48 * GIB, 10), (GIB, 16)] {
            killed.memory = then;
            assert_eq!(after(&killed, None).jobs.value, jobs, "{then}");
        }
        // Fewer jobs mean fewer links: in the second attempt, in the next `up`, and with `--jobs`.
        let links = Resources {
            memory_per_link_job: Some(16 * GIB),
            ..Resources::default()
        };
        let retried = sized(&links, None, &[]).facts(8);
        assert_eq!((retried.jobs, retried.link_jobs), (8, 2));
        killed.memory = 64 * GIB;
        let next = sized(&links, None, std::slice::from_ref(&killed));
        let why_links = "64.0 GiB at 16.0 GiB a link, for 8 of 16 jobs";
        assert_eq!(
            (next.link_jobs.value, next.link_jobs.why.as_str()),
            (2, why_links)
        );
        assert_eq!(sized(&links, Some(4), &[]).link_jobs.value, 1);
        // A failure of another kind says nothing about memory.
        let mut failed = run("math", 1, Outcome::Failed);
        failed.cost.usage.memory_held = Some(48 * GIB);
        let sizing = sized(&none, None, std::slice::from_ref(&failed));
        assert_eq!(sizing.jobs.value, 16);
        assert_eq!(
            jobs_of(&sized(&none, None, &[killed.clone(), failed])),
            (8, why)
        );
        let mut done = run("math", 8, Outcome::Done);
        done.cost.usage.memory_held = Some(48 * GIB);
        let sizing = sized(&none, None, &[killed.clone(), done.clone()]);
        let why_used = "step `math` used 6.0 GiB a job last time";
        assert_eq!(jobs_of(&sizing), (10, why_used));
        // The second attempt built only the rest.
        done.cost.usage.memory_held = Some(GIB);
        let after = |done: &Past| sized(&none, None, &[killed.clone(), done.clone()]);
        assert_eq!(jobs_of(&after(&done)), (12, why));
        done.jobs = 16;
        assert_eq!(after(&done).jobs.value, 16);
        // No number is between 1 and 2: a machine that once lacked memory does not stay at one job.
        (killed.jobs, done.jobs) = (2, 1);
        let after = |past: &[Past]| sized(&none, None, past).jobs.value;
        assert_eq!(after(&[killed.clone(), done.clone()]), 1);
        assert_eq!(after(&[killed, done.clone(), done]), 16);
    }

    #[test]
    fn costs_that_version_0_1_0_recorded_are_read() {
        let key = "0a".repeat(32);
        let row = format!(
            r#"{{"time": "2026-11-23T08:00:00Z", "env": "a", "step": "math", "key": "{key}", "outcome": "done", "jobs": 4,
            "cost": {{"wall_ms": 1000, "usage": {{"cpu_us": 1, "memory_peak": 2, "memory_held": 1, "read_bytes": 0,
            "written_bytes": 0, "oom_kills": 0}}, "disk_delta": 5, "disk_peak": 9}}, "log": "logs/20261123T080000Z/01-math.log"}}"#
        );
        let past: Past = serde_json::from_str(&row).unwrap();
        assert_eq!((past.jobs, past.memory), (4, 0));
    }

    #[test]
    fn time_is_foretold_for_other_jobs() {
        let mut past = run("math", 4, Outcome::Done);
        past.cost.wall_ms = 11_000;
        past.cost.usage.cpu_us = 40_000_000;
        past.cost.disk_delta = 5;
        past.cost.disk_peak = 9;
        let past = [past, run("math", 4, Outcome::Failed)];
        let steps = || [("math", "k-new"), ("other", "k")].into_iter();
        let told = forecast(steps(), &past, 8);
        assert_eq!(told.len(), 1);
        assert_eq!(
            (told[0].wall_ms, told[0].disk, told[0].exact),
            (6_000, 9, false)
        );
        assert_eq!(forecast(steps(), &past, 4)[0].wall_ms, 11_000);
    }
}
