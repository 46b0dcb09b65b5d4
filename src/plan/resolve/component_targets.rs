//! Owns checking that the results of a build fit together: a library must have code for every target of the
//! components that link it.
//!
//! Gentoo's `rocm.eclass` demands the same of packages. Without this check a build succeeds after hours, but its
//! result fails to load, or runs on one of two GPUs only.

use std::collections::BTreeSet;

use crate::profile::Component;
use crate::rocm::target::Target;

/// A component that does not fit the others.
#[derive(Debug)]
pub(crate) struct Incompatibility<'a> {
    pub component: &'a Component,
    /// The component that links it; `None` if it would be built for no target at all.
    pub linked_by: Option<&'a str>,
    pub missing: Vec<Target>,
    /// Upstream's issues about the missing targets.
    pub issues: Vec<String>,
}

/// Returns the components that do not fit, in the order of `components`, which also has the targets that each is built
/// for besides the env's, so that a library exists at all. `excluded` returns a value if a project is not built for a
/// target: upstream's issue, if one is named.
pub(crate) fn incompatibilities<'a>(
    components: &[(&'a Component, Vec<Target>)],
    targets: &[Target],
    excluded: &dyn Fn(&str, &str) -> Option<Option<String>>,
) -> Vec<Incompatibility<'a>> {
    let left_out = |component: &Component| {
        let of = |target: &&Target| excluded(target.name(), &component.project).is_some();
        targets.iter().filter(of).copied().collect::<BTreeSet<_>>()
    };
    let mut incompatibilities = Vec::new();
    for &(component, ref extra) in components {
        let lacks = left_out(component);
        // A throwaway target helps only if TheRock builds the component for it.
        let is_built = |target: &Target| excluded(target.name(), &component.project).is_none();
        if lacks.is_empty() || component.stub || extra.iter().any(is_built) {
            continue;
        }
        let misfit = |linked_by: Option<&'a str>, missing: Vec<Target>| {
            let issues = missing
                .iter()
                .filter_map(|target| excluded(target.name(), &component.project).flatten());
            Incompatibility {
                component,
                linked_by,
                issues: issues.collect::<BTreeSet<_>>().into_iter().collect(),
                missing,
            }
        };
        let before = incompatibilities.len();
        for &(user, _) in components
            .iter()
            .filter(|(user, _)| user.links.contains(&component.name.value))
        {
            // A target that the user is not built for either does no harm.
            let missing: Vec<Target> = lacks.difference(&left_out(user)).copied().collect();
            if !missing.is_empty() {
                incompatibilities.push(misfit(Some(&user.name), missing));
            }
        }
        if incompatibilities.len() == before && lacks.len() == targets.len() {
            incompatibilities.push(misfit(None, lacks.into_iter().collect()));
        }
    }
    incompatibilities
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::profile::When;
    use crate::rocm::target::parsed as targets;
    use crate::sys::span::At;

    fn component(name: &str, links: &[&str]) -> Component {
        Component {
            name: At {
                value: name.to_owned(),
                place: 0..0,
            },
            project: name.to_owned(),
            links: links.iter().map(|name| (*name).to_owned()).collect(),
            extra: Vec::new(),
            stub: false,
            when: When::default(),
        }
    }

    /// Returns each misfit as the component that links it, the missing targets and the issues. RCCL is not built for
    /// gfx1103, and `extra` are the further targets of the first component.
    fn found(components: &[Component], extra: &[&str], names: &[&str]) -> Vec<String> {
        let excluded = |target: &str, project: &str| {
            let issue = Some("issue 150".to_owned());
            (target == "gfx1103" && project == "rccl").then_some(issue)
        };
        let extra = [targets(extra)]
            .into_iter()
            .chain(std::iter::repeat(Vec::new()));
        let components: Vec<_> = components.iter().zip(extra).collect();
        incompatibilities(&components, &targets(names), &excluded)
            .iter()
            .map(|one| format!("{:?} {:?} {:?}", one.linked_by, one.missing, one.issues))
            .collect()
    }

    #[test]
    fn a_library_with_fewer_targets_than_its_user_does_not_fit() {
        let both = [component("rccl", &[]), component("torch", &["rccl"])];
        let none: [&str; 0] = [];
        assert_eq!(found(&both, &[], &["gfx1100", "gfx1201"]), none);
        let missing = targets(&["gfx1103"]);
        let misfit = format!("Some(\"torch\") {missing:?} [\"issue 150\"]");
        for names in [&["gfx1103"][..], &["gfx1103", "gfx1201"]] {
            assert_eq!(found(&both, &[], names), [&*misfit], "{names:?}");
        }
        // Each choice makes it fit.
        let stub = Component {
            stub: true,
            ..component("rccl", &[])
        };
        assert_eq!(found(&[component("torch", &[])], &[], &["gfx1103"]), none);
        assert_eq!(found(&both, &["gfx1250"], &["gfx1103"]), none);
        assert_eq!(found(&[stub, both[1].clone()], &[], &["gfx1103"]), none);
        // An extra target that excludes it as well changes nothing.
        let two = ["gfx1103", "gfx1201"];
        assert_eq!(found(&both, &["gfx1103"], &two), [&*misfit]);
        // A user with the same gap fits.
        let user = Component {
            project: "rccl".into(),
            ..component("rccl-tests", &["rccl"])
        };
        assert_eq!(found(&[component("rccl", &[]), user], &[], &two), none);
    }

    #[test]
    fn built_for_no_target_at_all_is_said_once() {
        let alone = |names: &[&str]| found(&[component("rccl", &[])], &[], names).len();
        assert_eq!(alone(&["gfx1103"]), 1);
        assert!(found(&[component("rccl", &[])], &[], &["gfx1103"])[0].starts_with("None "));
        assert_eq!((alone(&["gfx1103", "gfx1201"]), alone(&[])), (0, 0));
    }

    proptest! {
        // What fits for a set of targets fits for every subset that leaves something built.
        #[test]
        fn fewer_targets_bring_no_new_user(gaps in proptest::collection::vec(0usize..4, 0..6), keep in 1usize..4) {
            let all = ["gfx1100", "gfx1101", "gfx1102", "gfx1103"];
            let parts = [component("a", &[]), component("b", &["a"]), component("c", &["b"])];
            let parts: Vec<_> = parts.iter().map(|part| (part, Vec::new())).collect();
            let excluded = |target: &str, project: &str| {
                let hit = gaps.iter().enumerate().any(|(index, gap)| {
                    all[*gap] == target && ["a", "b", "c"][index % 3] == project
                });
                hit.then_some(None)
            };
            let linked = |names: &[&str]| incompatibilities(&parts, &targets(names), &excluded)
                .into_iter()
                .filter_map(|one| Some((one.component.name.value.as_str(), one.linked_by?)))
                .collect::<BTreeSet<_>>();
            prop_assert!(linked(&all[..keep]).is_subset(&linked(&all)));
        }
    }
}
