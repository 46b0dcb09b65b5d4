//! Owns the decisions about several envs at once: which there are, what they have in common, what `jobs` they are in CI, and the
//! `pipeline` of these that is written for a system that runs jobs. Pure.

pub mod github;
pub mod gitlab;
pub mod jobs;
pub mod kubernetes;
pub mod pipeline;
pub mod slurm;

use serde::Deserialize;

use crate::error::{Error, Kind, Result};
use crate::target::{self, Target};

/// One env of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// What it is built for.
    pub target: Target,
    /// Its profile; without, the one that `up TARGET` means.
    pub profile: Option<String>,
    /// What to give to `up`: a target, or a profile with one.
    pub args: Vec<String>,
}

/// Returns the envs for targets and families of targets, each once and in the order given; of each profile, or of the one that
/// `up TARGET` means.
pub fn cells(profiles: &[String], names: &[String]) -> Result<Vec<Cell>> {
    let mut targets: Vec<Target> = Vec::new();
    for name in names {
        let named = match (Target::parse(name), target::family(name)) {
            (Ok(target), _) => vec![target],
            (Err(_), Some(family)) => family,
            (Err(error), None) => return Err(error),
        };
        for target in named {
            if !targets.contains(&target) {
                targets.push(target);
            }
        }
    }
    if targets.is_empty() {
        return Err(Error::new(Kind::Usage, "no targets given")
            .help("rockenv matrix up gfx1100 gfx1103; `rockenv target ls` shows them all"));
    }
    let cell = |profile: Option<&String>, target: Target| Cell {
        target,
        profile: profile.cloned(),
        args: match profile {
            None => vec![target.to_string()],
            Some(profile) => vec![profile.clone(), "--target".to_owned(), target.to_string()],
        },
    };
    let mut cells = Vec::new();
    for target in targets {
        if profiles.is_empty() {
            cells.push(cell(None, target));
        }
        cells.extend(profiles.iter().map(|profile| cell(Some(profile), target)));
    }
    Ok(cells)
}

/// What `plan --json` says of a step.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Foreseen {
    /// Its name.
    pub name: String,
    /// Its key.
    pub key: String,
    /// Whether its snapshot is there (`hit`), or what happens else.
    pub action: String,
}

impl Foreseen {
    fn is_there(&self) -> bool {
        self.action == "hit"
    }
}

/// The steps that several envs share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The env that builds them, by its position: the one that lacks the fewest.
    pub by: usize,
    /// The last of them.
    pub until: String,
    /// How many there are.
    pub steps: usize,
}

/// Returns how many steps at the beginning of all plans have the same keys; of one plan alone none.
pub fn common(plans: &[Vec<Foreseen>]) -> usize {
    let Some(first) = plans.first().filter(|_| plans.len() > 1) else {
        return 0;
    };
    let same = |position: &usize| {
        plans.iter().all(|plan| {
            plan.get(*position)
                .is_some_and(|step| step.key == first[*position].key)
        })
    };
    (0..first.len()).take_while(same).count()
}

/// Returns what is to be built before the envs go separate ways: the steps at the beginning of all plans whose keys are equal,
/// where none of the envs has them all. Whatever one env builds of these, the others find.
pub fn prefix(plans: &[Vec<Foreseen>]) -> Option<Prefix> {
    let first = plans.first()?;
    let steps = common(plans);
    let lacking = |plan: &[Foreseen]| {
        let common = plan[..steps].iter();
        common.filter(|step| !step.is_there()).count()
    };
    let (by, count) = plans
        .iter()
        .map(|plan| lacking(plan))
        .enumerate()
        .min_by_key(|(_, count)| *count)?;
    (count > 0).then(|| Prefix {
        by,
        until: first[steps - 1].name.clone(),
        steps,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(cells: &[Cell]) -> Vec<String> {
        cells.iter().map(|cell| cell.args.join(" ")).collect()
    }

    fn given(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn targets_and_families_become_envs() {
        let of = |profiles: &[&str], list: &[&str]| cells(&given(profiles), &given(list)).unwrap();
        assert_eq!(
            names(&of(&[], &["gfx1103", "gfx1100", "gfx1103"])),
            ["gfx1103", "gfx1100"]
        );
        assert_eq!(
            names(&of(&["p.toml", "q"], &["gfx1201"])),
            ["p.toml --target gfx1201", "q --target gfx1201"]
        );
        let family = target::family("gfx110X-all").unwrap();
        assert!(family.len() > 1);
        assert_eq!(of(&[], &["gfx110X-all", "gfx1103"]).len(), family.len());
        for bad in [&["gfx9999"][..], &[]] {
            let error = cells(&[], &given(bad)).unwrap_err();
            assert!(error.help_text().is_some(), "{error:?}");
        }
    }

    /// Makes a plan of keys; an upper-case one is there.
    fn plan(keys: &str) -> Vec<Foreseen> {
        keys.chars()
            .enumerate()
            .map(|(position, key)| Foreseen {
                name: format!("step{position}"),
                key: key.to_ascii_lowercase().to_string(),
                action: if key.is_ascii_uppercase() {
                    "hit"
                } else {
                    "run"
                }
                .to_owned(),
            })
            .collect()
    }

    #[test]
    fn what_is_common_is_built_by_the_env_that_lacks_least() {
        let of = |keys: &[&str]| prefix(&keys.iter().map(|keys| plan(keys)).collect::<Vec<_>>());
        let found = |by, until: &str, steps| {
            Some(Prefix {
                by,
                until: until.to_owned(),
                steps,
            })
        };
        assert_eq!(of(&["abx", "aby", "abz"]), found(0, "step1", 2));
        assert_eq!(of(&["abx", "Aby"]), found(1, "step1", 2));
        // One has it, and so have all.
        assert_eq!(of(&["abx", "ABy"]), None);
        assert_eq!(of(&["ax", "by"]), None);
        assert_eq!(of(&["abc"]), None, "alone there is nothing in common");
        assert_eq!(of(&["ab", "ab", "a"]), found(0, "step0", 1));
        assert_eq!(of(&["", ""]), None);
        assert_eq!(of(&[]), None);
    }
}
