//! Owns the decisions about several envs at once: which there are, what they have in common, whose turn it is (`turns`), what `jobs` they
//! are in CI, and the `pipeline` of these that is written for a system that runs jobs. Pure.

pub mod github;
pub mod gitlab;
pub mod jobs;
pub mod kubernetes;
pub mod pipeline;
pub mod slurm;
pub mod turns;

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
    /// Whether it runs in any case.
    #[serde(default)]
    pub again: bool,
}

impl Foreseen {
    fn is_there(&self) -> bool {
        self.action == "hit"
    }
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

    #[test]
    fn what_all_plans_begin_with_is_common() {
        let plan = |keys: &str| -> Vec<Foreseen> {
            keys.chars()
                .map(|key| Foreseen {
                    name: key.to_string(),
                    key: key.to_string(),
                    action: "run".to_owned(),
                    again: false,
                })
                .collect()
        };
        for (plans, count) in [
            (&["abx", "aby", "abz"][..], 2),
            (&["ab", "ab", "a"], 1),
            (&["axc", "bxc"], 0),
            (&["abc"], 0),
            (&["", ""], 0),
            (&[], 0),
        ] {
            let plans: Vec<_> = plans.iter().map(|keys| plan(keys)).collect();
            assert_eq!(common(&plans), count, "{plans:?}");
        }
    }
}
