//! Owns decisions about several envs at once: their list, their common steps, their order (`scheduler`), their CI
//! `jobs`, and the `pipeline` of these jobs. Pure.

pub(crate) mod github;
pub(crate) mod gitlab;
pub(crate) mod jobs;
pub(crate) mod kubernetes;
pub(crate) mod pipeline;
pub(crate) mod scheduler;
pub(crate) mod slurm;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::plan::ids::EnvName;
use crate::plan::{Action, PlanStep};
use crate::rocm::target::{self, Target};
use crate::sys::error::Result;
use crate::sys::shell::quoted;

/// One env of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// The env's target. Default: the targets of its profile.
    pub target: Option<Target>,
    /// The env's profile. Default: the profile that `up TARGET` selects.
    pub profile: Option<String>,
    /// Arguments for `up`: a target, a profile, or both.
    pub args: Vec<String>,
}

impl Cell {
    /// Returns the env's targets; `own` are the targets of its profile.
    pub(crate) fn targets(&self, own: &[Target]) -> Result<Vec<Target>> {
        match (self.target, own, &self.profile) {
            (Some(target), _, _) => Ok(vec![target]),
            (None, [], Some(profile)) => Err(usage!(
                "profile `{profile}` names no targets and none are given"
            )
            .help(
                "name a target, such as gfx1103, or add `targets = [\"gfx1103\"]` to the profile",
            )),
            (None, own, _) => Ok(own.to_vec()),
        }
    }
}

/// Returns the envs for targets and families of targets, in the given order and without duplicates: for each profile,
/// or for the profile that `up TARGET` selects. Without targets, returns one env per profile.
pub(crate) fn cells(profiles: &[String], names: &[String]) -> Result<Vec<Cell>> {
    let mut targets: Vec<Target> = Vec::new();
    for name in names {
        match (Target::named(name), target::family(name)) {
            (Ok(target), _) => targets.push(target),
            (Err(_), Some(family)) => targets.extend(family),
            (Err(error), None) if name.starts_with("gfx") || error.names_another() => {
                return Err(error);
            }
            (Err(error), None) => {
                // `up` takes a profile in this place.
                let known = error.help_text().unwrap_or_default();
                let help = format!("{known}; `--profile {}` names a profile", quoted(name));
                return Err(error.help(help));
            }
        }
    }
    if targets.is_empty() && profiles.is_empty() {
        return Err(usage!("no targets given")
            .help("rockenv matrix up gfx1100 gfx1103; `rockenv target ls` shows them all"));
    }
    let mut cells = Vec::new();
    for target in or_none(targets) {
        for profile in or_none(profiles) {
            let profile = profile.cloned();
            let name = target.map(|target| target.to_string());
            let args = match (profile.clone(), name) {
                (Some(profile), Some(name)) => vec![profile, "--target".to_owned(), name],
                (profile, name) => profile.into_iter().chain(name).collect(),
            };
            let cell = Cell {
                target,
                profile,
                args,
            };
            if !cells.contains(&cell) {
                cells.push(cell);
            }
        }
    }
    Ok(cells)
}

/// Returns the items, or `None` once if there are none.
fn or_none<T>(items: impl IntoIterator<Item = T>) -> impl Iterator<Item = Option<T>> {
    let mut items = items.into_iter();
    std::iter::once(items.next()).chain(items.map(Some))
}

/// Refuses two envs with the same name.
pub(crate) fn check_names<'a>(envs: impl IntoIterator<Item = (&'a str, &'a Cell)>) -> Result<()> {
    let mut known = BTreeMap::new();
    for (name, cell) in envs {
        if let Some(other) = known.insert(name, cell) {
            let [one, two] = [other, cell].map(|cell| cell.args.join(" "));
            return Err(usage!("`up {one}` and `up {two}` are both env `{name}`")
                .help("use profiles with different names, and no `--name` for all envs"));
        }
    }
    Ok(())
}

/// Refuses two envs with the same results directory, `outputs`: each would find the other's results there.
pub(crate) fn check_outputs(outputs: &[(PathBuf, EnvName)]) -> Result<()> {
    let mut known = BTreeMap::new();
    for (path, env) in outputs {
        match known.insert(path, env) {
            Some(other) if other != env => {
                return Err(usage!(
                    "envs `{other}` and `{env}` have the same output directory `{}`",
                    path.display()
                )
                .help("use `${target}` in the `path` of the volume, or no `path`"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the number of leading steps whose keys are equal in all plans and that `up` builds once for all; 0 for a
/// single plan.
pub(crate) fn common(plans: &[Vec<PlanStep>]) -> usize {
    let Some(first) = plans.first().filter(|_| plans.len() > 1) else {
        return 0;
    };
    let same = |position: &usize| {
        plans.iter().all(|plan| {
            plan.get(*position).is_some_and(|step| {
                // A step with `again` runs in each env, and a step after `--until` in none.
                let is_built = !step.again && step.action != Action::Later;
                is_built && step.key == first[*position].key
            })
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
        // Profiles may name their own targets.
        let alone = of(&["p.toml", "q", "q"], &[]);
        assert_eq!(names(&alone), ["p.toml", "q"]);
        let own = target::family("gfx110X-all").unwrap();
        assert_eq!(alone[0].targets(&own).unwrap(), own);
        let error = alone[1].targets(&[]).unwrap_err();
        assert!(error.message().contains("profile `q`") && error.help_text().is_some());
        let asked = of(&["q"], &["gfx1201"]).remove(0);
        assert_eq!(asked.targets(&own).unwrap(), [asked.target.unwrap()]);
        let family = own;
        assert!(family.len() > 1);
        assert_eq!(of(&[], &["gfx110X-all", "gfx1103"]).len(), family.len());
        for bad in [&["gfx9999"][..], &[]] {
            let error = cells(&[], &given(bad)).unwrap_err();
            assert!(error.help_text().is_some(), "{error:?}");
        }
    }

    #[test]
    fn two_envs_have_two_output_directories() {
        let at = |path: &str, env: &str| (PathBuf::from(path), EnvName::from(env));
        check_outputs(&[at("/a", "p"), at("/b", "q"), at("/a", "p")]).unwrap();
        let error = check_outputs(&[at("/a", "p"), at("/a", "q")]).unwrap_err();
        assert_has!(error.message(), "`p` and `q`");
        assert_has!(error.help_text().unwrap(), "${target}");
    }

    #[test]
    fn what_all_plans_begin_with_is_common() {
        let plan = |keys: &str| -> Vec<PlanStep> {
            let step = |key: char| PlanStep::sample(&key.to_string(), key, Action::Run);
            keys.chars().map(step).collect()
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
        let mut plans = [plan("abc"), plan("abc")];
        plans.iter_mut().for_each(|steps| steps[2].again = true);
        assert_eq!(common(&plans), 2);
        plans
            .iter_mut()
            .for_each(|steps| steps[1].action = Action::Later);
        assert_eq!(common(&plans), 1);
    }
}
