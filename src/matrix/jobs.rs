//! Owns the jobs for a CI system: one per env, and a second one on a machine with a GPU if the profile has GPU steps.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Cell;
use super::pipeline::Size;
use crate::rocm::target::{self, Target};
use crate::sys::error::Result;
use crate::sys::suggest;
use crate::ui::size::{bytes, count};

/// GitHub's maximum number of jobs in a matrix.
pub(crate) const MOST: usize = 256;

/// Labels of GitHub's own machines. Memory and disk are the documented values for public repositories.
const HOSTED: [&str; 4] = [
    "ubuntu-latest",
    "ubuntu-26.04",
    "ubuntu-24.04",
    "ubuntu-22.04",
];
const HOSTED_MEMORY: u64 = 16_000_000_000;
const HOSTED_DISK: u64 = 14_000_000_000;

/// Returns the label that identifies one of GitHub's own machines: fresh for each job, with sudo, without rockenv. A
/// runner with the label `self-hosted` is not one of these, even if it has such a label too.
pub(crate) fn hosted(labels: &[String]) -> Option<&str> {
    let is_own = |label: &String| label.eq_ignore_ascii_case("self-hosted");
    let mut all = labels.iter().map(String::as_str);
    let found = all.find(|label| HOSTED.contains(label));
    found.filter(|_| !labels.iter().any(is_own))
}

/// Returns why a job does not fit on the machine with these labels; `None` if it fits or the machine's size is unknown.
pub(crate) fn shortage(labels: &[String], size: Size) -> Option<String> {
    let label = hosted(labels)?;
    let parts = [
        ("memory", size.memory, HOSTED_MEMORY),
        ("disk", size.disk, HOSTED_DISK),
    ];
    let short = parts.iter().filter_map(|(what, needed, there)| {
        let needed = needed.filter(|needed| needed > there)?;
        Some(format!(
            "{} of {what}, `{label}` has {}",
            bytes(needed),
            bytes(*there)
        ))
    });
    let short: Vec<String> = short.collect();
    (!short.is_empty()).then(|| short.join("; "))
}

/// Machines for each kind of job, as labels of the CI system.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runners {
    /// Machines that build. Default: GitHub's own.
    build: Option<Vec<String>>,
    /// Machines with a GPU, by target or family.
    gpu: BTreeMap<String, Vec<String>>,
    /// Machines that serve every target.
    #[serde(skip)]
    any_gpu: Option<Vec<String>>,
}

impl Runners {
    /// Returns runners without labels: any machine builds, and no machine is known to have a GPU.
    pub fn any() -> Self {
        Self {
            build: Some(Vec::new()),
            ..Self::default()
        }
    }

    /// Returns the runners of a scheduler that finds a machine for each request, GPUs included.
    pub fn scheduled() -> Self {
        Self {
            any_gpu: Some(Vec::new()),
            ..Self::any()
        }
    }

    fn build(&self) -> Vec<String> {
        let hosted = || vec![HOSTED[0].to_owned()];
        self.build.clone().unwrap_or_else(hosted)
    }

    /// Returns whether the user named the machines with these labels.
    pub(crate) fn names(&self, labels: &[String]) -> bool {
        let mut lists = self.build.iter().chain(self.gpu.values());
        lists.any(|named| named == labels)
    }

    /// Parses the text of a runners file. Errors name the invalid entry.
    pub fn parse(text: &str) -> Result<Self> {
        let runners: Self = toml::from_str(text)
            .map_err(|error| invalid!("this is not a list of runners").source(error))?;
        for (name, labels) in &runners.gpu {
            if Target::parse(name).is_err() && target::family(name).is_none() {
                let known = target::all()
                    .map(|target| target.name())
                    .chain(target::families());
                let help = suggest::help(name, known, "`rockenv target ls` shows them all");
                return Err(invalid!("no target or family `{name}`").help(help));
            }
            if labels.is_empty() {
                return Err(invalid!("`{name}` has no labels")
                    .help(format!("{name} = [\"self-hosted\", \"{name}\"]")));
            }
        }
        if runners.build.as_ref().is_some_and(Vec::is_empty) {
            return Err(invalid!("`build` has no labels").help("build = [\"self-hosted\"]"));
        }
        let mut lists = runners.gpu.values().chain(&runners.build);
        if lists.any(|labels| labels.iter().any(|label| label.trim().is_empty())) {
            return Err(invalid!("a label is empty").help("build = [\"self-hosted\"]"));
        }
        Ok(runners)
    }

    /// Returns the target whose GPU the env's steps use: the first target with a machine, else the first target.
    pub fn choose(&self, targets: &[Target]) -> Option<Target> {
        let mut all = targets.iter();
        let found = all.find(|target| self.with_gpu(**target).is_some());
        found.or(targets.first()).copied()
    }

    /// Returns the labels of a machine with a GPU for the target: the target's own entry, else its family's.
    fn with_gpu(&self, target: Target) -> Option<&Vec<String>> {
        let families = self.gpu.iter().filter(|(name, _)| target.is_in(name));
        // The smallest family is the most specific.
        let size = |name: &str| target::family(name).map_or(usize::MAX, |list| list.len());
        self.gpu.get(target.name()).or_else(|| {
            families
                .min_by_key(|(name, _)| size(name))
                .map(|(_, labels)| labels)
                .or(self.any_gpu.as_ref())
        })
    }
}

/// One part of the envs: `2/4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    index: usize,
    of: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(index, of)| {
            Some(Self {
                index: index.parse().ok()?,
                of: of.parse().ok()?,
            })
        });
        numbers
            .filter(|shard| (1..=shard.of).contains(&shard.index))
            .ok_or_else(|| "a part is written `1/4`, from 1/4 to 4/4".to_owned())
    }
}

impl Shard {
    /// Returns the items of this shard. The shards together contain each item once.
    pub(crate) fn of<T>(self, all: Vec<T>) -> Vec<T> {
        let own = all.into_iter().skip(self.index - 1);
        own.step_by(self.of).collect()
    }

    /// Refuses an empty shard, which would write nothing.
    pub(crate) fn check(self, envs: usize) -> Result<()> {
        if self.index <= envs {
            return Ok(());
        }
        let Self { index, of } = self;
        let empty = usage!("part {index}/{of} of {} is empty", count(envs, "env"));
        Err(empty.help(format!("--shard {}/{envs}", index.min(envs))))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Job {
    /// Name of the env, with `-gpu` appended for GPU steps; `common steps` for the job that builds these.
    pub name: String,
    pub env: String,
    /// The env's target; with several, the target whose GPU the job uses.
    pub target: &'static str,
    /// Arguments of `rockenv up`.
    pub up: Vec<String>,
    /// Labels of the machines that may run it.
    pub runner: Vec<String>,
    /// Whether it runs only the steps that need a GPU.
    pub needs_gpu: bool,
    /// Name of the job that must finish first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needs: Option<String>,
    /// Name of the last step that is common to all envs, for the job that builds only these.
    #[serde(skip)]
    pub until: Option<String>,
}

/// An env, and whether its profile has GPU steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Env {
    pub name: String,
    /// The arguments for `up`.
    pub cell: Cell,
    /// The env's target; with several, the target whose GPU its steps use.
    pub target: Target,
    /// Whether steps use a GPU.
    pub gpu: bool,
}

/// Value of `--gpu` for jobs on GPU machines, which must fail without a GPU.
pub(crate) const NEEDED: &str = "required";

/// Removes an option of `up` that takes a value. Returns the other options, and the value if given.
pub(crate) fn take_option(options: &[String], name: &str) -> (Vec<String>, Option<String>) {
    let mut rest = Vec::new();
    let mut value = None;
    let mut options = options.iter().cloned();
    while let Some(option) = options.next() {
        match option.strip_prefix(name) {
            Some("") => match options.next() {
                Some(next) => value = Some(next),
                // `up` reports the missing value.
                None => rest.push(option),
            },
            Some(after) if after.starts_with('=') => value = Some(after[1..].to_owned()),
            _ => rest.push(option),
        }
    }
    (rest, value)
}

/// Returns the jobs, and the targets whose GPU steps have no machine. `gpu` is the `--gpu` value for GPU jobs; `none`
/// disables those jobs.
pub(crate) fn jobs(
    envs: &[Env],
    runners: &Runners,
    gpu: &str,
) -> Result<(Vec<Job>, Vec<&'static str>)> {
    let with = |gpu: &str| ["--gpu".to_owned(), gpu.to_owned()];
    let mut jobs = Vec::new();
    let mut homeless = Vec::new();
    for env in envs {
        let target = env.target;
        let job = Job {
            name: env.name.clone(),
            env: env.name.clone(),
            target: target.name(),
            up: env.cell.args.clone(),
            runner: runners.build(),
            needs_gpu: false,
            needs: None,
            until: None,
        };
        if !env.gpu {
            jobs.push(job);
            continue;
        }
        let labels = runners.with_gpu(target);
        if labels.is_none() && gpu != "none" {
            homeless.push(target.name());
        }
        let tested = labels.filter(|_| gpu != "none").map(|labels| Job {
            name: format!("{}-gpu", env.name),
            up: [&job.up[..], &with(gpu)].concat(),
            runner: labels.clone(),
            needs_gpu: true,
            needs: Some(env.name.clone()),
            ..job.clone()
        });
        let mut built = job;
        // The build machine may have a GPU too, but not the one to test on.
        built.up.extend(with("none"));
        jobs.push(built);
        jobs.extend(tested);
    }
    if jobs.len() > MOST {
        return Err(
            usage!("{} jobs exceed the limit of a matrix, {MOST}", jobs.len())
                .help(format!("--shard 1/{}", jobs.len().div_ceil(MOST) + 1)),
        );
    }
    let mut names = BTreeSet::new();
    if let Some(job) = jobs.iter().find(|job| !names.insert(job.name.as_str())) {
        return Err(usage!(
            "two jobs would be called `{}`: an env, and the job for the steps with a GPU of another env",
            job.name
        )
        .help("give profiles names that do not end in `-gpu`"));
    }
    Ok((jobs, homeless))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::cells;

    fn env(target: &str, gpu: bool) -> Env {
        Env {
            name: target.to_owned(),
            cell: cells(&[], &[target.to_owned()]).unwrap().remove(0),
            target: Target::parse(target).unwrap(),
            gpu,
        }
    }

    #[test]
    fn steps_with_a_gpu_are_a_job_of_their_own() {
        let runners = Runners::parse(
            "build = ['big']\n[gpu]\ngfx110X-all = ['rdna3']\ngfx1103 = ['self-hosted', '780m']\n",
        )
        .unwrap();
        let envs = [
            env("gfx1103", true),
            env("gfx1100", true),
            env("gfx1201", true),
            env("gfx90a", false),
        ];
        let (found, homeless) = jobs(&envs, &runners, NEEDED).unwrap();
        let shown: Vec<String> = found
            .iter()
            .map(|job| {
                let needs = job.needs.as_deref().unwrap_or("-");
                format!(
                    "{} [{}] on {} after {needs}",
                    job.name,
                    job.up.join(" "),
                    job.runner.join("+")
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                "gfx1103 [gfx1103 --gpu none] on big after -",
                "gfx1103-gpu [gfx1103 --gpu required] on self-hosted+780m after gfx1103",
                "gfx1100 [gfx1100 --gpu none] on big after -",
                "gfx1100-gpu [gfx1100 --gpu required] on rdna3 after gfx1100",
                "gfx1201 [gfx1201 --gpu none] on big after -",
                "gfx90a [gfx90a] on big after -",
            ]
        );
        assert_eq!(homeless, ["gfx1201"]);
        // With `--gpu none` no target lacks a machine.
        let (found, homeless) = jobs(&envs, &runners, "none").unwrap();
        assert!(found.iter().all(|job| !job.needs_gpu) && homeless.is_empty());
        // Job names are unique.
        let mut envs = [env("gfx1103", true), env("gfx1100", false)];
        envs[1].name = "gfx1103-gpu".to_owned();
        let error = jobs(&envs, &runners, NEEDED).unwrap_err();
        assert_has!(error.message(), "two jobs would be called `gfx1103-gpu`");
        jobs(&envs, &runners, "none").unwrap();
        // Picks the first target that has a machine.
        let several = ["gfx1201", "gfx1103"].map(|name| Target::parse(name).unwrap());
        assert_eq!(runners.choose(&several), Some(several[1]));
        assert_eq!(Runners::default().choose(&several), Some(several[0]));
    }

    #[test]
    fn what_does_not_fit_on_a_machine_of_github_is_known_before() {
        let size = |memory, disk| Size {
            memory,
            disk,
            ..Size::default()
        };
        let hosted = Runners::default().build();
        let own = vec!["Self-Hosted".to_owned(), "ubuntu-24.04".to_owned()];
        let large = size(Some(32 << 30), Some(230 << 30));
        assert_eq!(
            shortage(&hosted, large).unwrap(),
            "32.0 GiB of memory, `ubuntu-latest` has 14.9 GiB; 230.0 GiB of disk, `ubuntu-latest` has 13.0 GiB"
        );
        assert!(shortage(&["ubuntu-26.04".to_owned()], large).is_some());
        let small = size(Some(HOSTED_MEMORY), Some(HOSTED_DISK));
        for (labels, size) in [(&own, large), (&hosted, small), (&hosted, size(None, None))] {
            assert_eq!(shortage(labels, size), None);
        }
    }

    #[test]
    fn which_gpu_is_said_to_the_jobs_that_have_one() {
        let given = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
            let (rest, gpu) = take_option(&words, "--gpu");
            (rest.join(" "), gpu)
        };
        let some = |which: &str| Some(which.to_owned());
        assert_eq!(given(&["-j", "2"]), ("-j 2".to_owned(), None));
        assert_eq!(given(&["--gpu", "1", "-c"]), ("-c".to_owned(), some("1")));
        assert_eq!(
            given(&["-c", "--gpu=c1:00.0"]),
            ("-c".to_owned(), some("c1:00.0"))
        );
        assert_eq!(given(&["--gpu"]), ("--gpu".to_owned(), None));
        assert_eq!(given(&["--gpus=1"]), ("--gpus=1".to_owned(), None));
    }

    #[test]
    fn a_matrix_has_a_limit() {
        let named = |number: usize| Env {
            name: number.to_string(),
            ..env("gfx1103", false)
        };
        let envs: Vec<Env> = (0..=MOST).map(named).collect();
        let error = jobs(&envs, &Runners::default(), NEEDED).unwrap_err();
        assert_has!(error.help_text().unwrap(), "--shard 1/3");
        assert!(jobs(&envs[1..], &Runners::default(), NEEDED).is_ok());
    }

    #[test]
    fn parts_have_each_once() {
        let part = |text: &str| text.parse::<Shard>().unwrap().of(vec![1, 2, 3, 4, 5]);
        assert_eq!(part("1/2"), [1, 3, 5]);
        assert_eq!(part("2/2"), [2, 4]);
        assert_eq!(part("1/1"), [1, 2, 3, 4, 5]);
        assert_eq!(part("7/7"), [0; 0]);
        let shard: Shard = "2/2".parse().unwrap();
        assert!(shard.check(2).is_ok());
        let error = shard.check(1).unwrap_err();
        assert_eq!(error.message(), "part 2/2 of 1 env is empty");
        assert_eq!(error.help_text(), Some("--shard 1/1"));
        for bad in ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", ""] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named() {
        for (text, part) in [
            ("[gpu]\ngfx9999 = ['a']", "gfx9999"),
            ("[gpu]\ngfx1103 = []", "gfx1103"),
            ("build = []", "build"),
            ("biuld = ['a']", "biuld"),
            ("build = 'a'", "expected a sequence"),
            ("build = ['a', ' ']", "a label is empty"),
            ("[gpu]\ngfx1103 = ['']", "a label is empty"),
        ] {
            let error = Runners::parse(text).unwrap_err();
            let said = error.chain().join(": ");
            assert_has!(said, part);
        }
        assert_eq!(Runners::parse("").unwrap(), Runners::default());
    }
}
