//! Owns the question whether what is built fits together: a library must have code for every target of what links it.
//!
//! Gentoo's `rocm.eclass` demands the same of packages. Without it a build ends well after hours, and what came out fails
//! to load, or runs on one of two GPUs.

use std::collections::BTreeSet;

use crate::rocm::target::Target;

/// A part of what is built, as far as this question goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// Its name.
    pub name: String,
    /// The name by which TheRock leaves it out of targets.
    pub project: String,
    /// Names of what it links.
    pub links: Vec<String>,
    /// Targets that it is built for beside the env's, so that there is a library where there would be none.
    pub extra: Vec<Target>,
    /// Something of the same name that does nothing stands in for it where it is not built.
    pub stub: bool,
}

/// Why a component is not built for a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded {
    /// Upstream's issue, where one is named.
    pub issue: Option<String>,
}

/// A component that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The component.
    pub component: String,
    /// What links it; nothing where it would be built for no target at all.
    pub linked_by: Option<String>,
    /// The targets that it lacks.
    pub missing: Vec<Target>,
    /// Upstream's issues about that.
    pub issues: Vec<String>,
}

/// Returns what does not fit, in the order of `components`; `excluded` says whether a project is left out of a target.
pub fn misfits(
    components: &[Component],
    targets: &[Target],
    excluded: &dyn Fn(&str, &str) -> Option<Excluded>,
) -> Vec<Misfit> {
    let left_out = |component: &Component| {
        let of = |target: &&Target| excluded(target.name(), &component.project).is_some();
        targets.iter().filter(of).copied().collect::<BTreeSet<_>>()
    };
    let mut misfits = Vec::new();
    for component in components {
        let lacks = left_out(component);
        // A throwaway target helps only if the component is built for it.
        let is_built = |target: &Target| excluded(target.name(), &component.project).is_none();
        if lacks.is_empty() || component.stub || component.extra.iter().any(is_built) {
            continue;
        }
        let misfit = |linked_by: Option<&str>, missing: Vec<Target>| {
            let issues = missing.iter().filter_map(|target| {
                excluded(target.name(), &component.project).and_then(|found| found.issue)
            });
            Misfit {
                component: component.name.clone(),
                linked_by: linked_by.map(str::to_owned),
                issues: issues.collect::<BTreeSet<_>>().into_iter().collect(),
                missing,
            }
        };
        let before = misfits.len();
        for user in components
            .iter()
            .filter(|user| user.links.contains(&component.name))
        {
            // What links it is not built for these either, or it is there: both fit.
            let missing: Vec<Target> = lacks.difference(&left_out(user)).copied().collect();
            if !missing.is_empty() {
                misfits.push(misfit(Some(&user.name), missing));
            }
        }
        if misfits.len() == before && lacks.len() == targets.len() {
            misfits.push(misfit(None, lacks.into_iter().collect()));
        }
    }
    misfits
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn component(name: &str, links: &[&str]) -> Component {
        Component {
            name: name.into(),
            project: name.into(),
            links: links.iter().map(|name| (*name).to_owned()).collect(),
            extra: Vec::new(),
            stub: false,
        }
    }

    fn targets(names: &[&str]) -> Vec<Target> {
        names
            .iter()
            .map(|name| Target::parse(name).unwrap())
            .collect()
    }

    fn no_rccl_on_gfx1103(target: &str, project: &str) -> Option<Excluded> {
        (target == "gfx1103" && project == "rccl").then(|| Excluded {
            issue: Some("https://example.org/150".to_owned()),
        })
    }

    fn found(components: &[Component], names: &[&str]) -> Vec<Misfit> {
        misfits(components, &targets(names), &no_rccl_on_gfx1103)
    }

    #[test]
    fn a_library_with_fewer_targets_than_its_user_does_not_fit() {
        let both = [component("rccl", &[]), component("torch", &["rccl"])];
        assert_eq!(found(&both, &["gfx1100", "gfx1201"]), []);
        for names in [&["gfx1103"][..], &["gfx1103", "gfx1201"]] {
            let misfits = found(&both, names);
            assert_eq!(misfits.len(), 1, "{names:?}");
            assert_eq!(misfits[0].linked_by.as_deref(), Some("torch"));
            assert_eq!(misfits[0].missing, targets(&["gfx1103"]));
            assert_eq!(misfits[0].issues, ["https://example.org/150"]);
        }
    }

    #[test]
    fn each_choice_makes_it_fit() {
        let torch = component("torch", &["rccl"]);
        let left_out = [component("torch", &[])];
        let extra = Component {
            extra: targets(&["gfx1250"]),
            ..component("rccl", &[])
        };
        let stub = Component {
            stub: true,
            ..component("rccl", &[])
        };
        assert_eq!(found(&left_out, &["gfx1103"]), []);
        assert_eq!(found(&[extra, torch.clone()], &["gfx1103"]), []);
        assert_eq!(found(&[stub, torch.clone()], &["gfx1103"]), []);
        // One for which it is not built either changes nothing.
        let useless = Component {
            extra: targets(&["gfx1103"]),
            ..component("rccl", &[])
        };
        assert_eq!(found(&[useless, torch], &["gfx1103", "gfx1201"]).len(), 1);
    }

    #[test]
    fn built_for_no_target_at_all_is_said_once() {
        let alone = found(&[component("rccl", &[])], &["gfx1103"]);
        assert_eq!((alone.len(), alone[0].linked_by.as_deref()), (1, None));
        assert_eq!(
            found(&[component("rccl", &[])], &["gfx1103", "gfx1201"]),
            []
        );
        assert_eq!(found(&[component("rccl", &[])], &[]), []);
    }

    #[test]
    fn a_user_with_the_same_gap_fits() {
        let user = Component {
            project: "rccl".into(),
            ..component("rccl-tests", &["rccl"])
        };
        assert_eq!(
            found(&[component("rccl", &[]), user], &["gfx1103", "gfx1201"]),
            []
        );
    }

    proptest! {
        // What fits for a set of targets fits for every part of it that leaves something built.
        #[test]
        fn fewer_targets_bring_no_new_user(gaps in proptest::collection::vec(0usize..4, 0..6), keep in 1usize..4) {
            let all = ["gfx1100", "gfx1101", "gfx1102", "gfx1103"];
            let parts = [component("a", &[]), component("b", &["a"]), component("c", &["b"])];
            let excluded = |target: &str, project: &str| {
                let hit = gaps.iter().enumerate().any(|(index, gap)| {
                    all[*gap] == target && ["a", "b", "c"][index % 3] == project
                });
                hit.then_some(Excluded { issue: None })
            };
            let linked = |names: &[&str]| misfits(&parts, &targets(names), &excluded)
                .into_iter()
                .filter_map(|one| one.linked_by.map(|by| (one.component, by)))
                .collect::<BTreeSet<_>>();
            prop_assert!(linked(&all[..keep]).is_subset(&linked(&all)));
        }
    }
}
