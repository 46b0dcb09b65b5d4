//! Owns checking that the results of a build fit together: a library must have code for every target of the
//! components that link it.
//!
//! Gentoo's `rocm.eclass` demands the same of packages. Without this check a build succeeds after hours, but its
//! result fails to load, or runs on one of two GPUs only.

use std::collections::BTreeSet;

use crate::rocm::target::Target;

/// The properties of a component that this check needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Component {
    pub name: String,
    /// TheRock's project name, for exclusions.
    pub project: String,
    /// Names of the components that it links.
    pub links: Vec<String>,
    /// Targets that it is built for besides the env's, so that a library exists at all.
    pub extra: Vec<Target>,
    /// Whether a stub of the same name replaces it where it is not built.
    pub stub: bool,
}

/// Why a component is not built for a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Excluded {
    /// Upstream's issue, if one is named.
    pub issue: Option<String>,
}

/// A component that does not fit the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Incompatibility {
    pub component: String,
    /// The component that links it; `None` if it would be built for no target at all.
    pub linked_by: Option<String>,
    pub missing: Vec<Target>,
    /// Upstream's issues about the missing targets.
    pub issues: Vec<String>,
}

/// Returns the components that do not fit, in the order of `components`. `excluded` returns why a project is not built
/// for a target, if it is not.
pub(crate) fn incompatibilities(
    components: &[Component],
    targets: &[Target],
    excluded: &dyn Fn(&str, &str) -> Option<Excluded>,
) -> Vec<Incompatibility> {
    let left_out = |component: &Component| {
        let of = |target: &&Target| excluded(target.name(), &component.project).is_some();
        targets.iter().filter(of).copied().collect::<BTreeSet<_>>()
    };
    let mut incompatibilities = Vec::new();
    for component in components {
        let lacks = left_out(component);
        // A throwaway target helps only if TheRock builds the component for it.
        let is_built = |target: &Target| excluded(target.name(), &component.project).is_none();
        if lacks.is_empty() || component.stub || component.extra.iter().any(is_built) {
            continue;
        }
        let misfit = |linked_by: Option<&str>, missing: Vec<Target>| {
            let issues = missing.iter().filter_map(|target| {
                excluded(target.name(), &component.project).and_then(|found| found.issue)
            });
            Incompatibility {
                component: component.name.clone(),
                linked_by: linked_by.map(str::to_owned),
                issues: issues.collect::<BTreeSet<_>>().into_iter().collect(),
                missing,
            }
        };
        let before = incompatibilities.len();
        for user in components
            .iter()
            .filter(|user| user.links.contains(&component.name))
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
    use crate::rocm::target::parsed as targets;

    fn component(name: &str, links: &[&str]) -> Component {
        Component {
            name: name.into(),
            project: name.into(),
            links: links.iter().map(|name| (*name).to_owned()).collect(),
            extra: Vec::new(),
            stub: false,
        }
    }

    fn no_rccl_on_gfx1103(target: &str, project: &str) -> Option<Excluded> {
        (target == "gfx1103" && project == "rccl").then(|| Excluded {
            issue: Some("https://example.org/150".to_owned()),
        })
    }

    fn found(components: &[Component], names: &[&str]) -> Vec<Incompatibility> {
        incompatibilities(components, &targets(names), &no_rccl_on_gfx1103)
    }

    #[test]
    fn a_library_with_fewer_targets_than_its_user_does_not_fit() {
        let both = [component("rccl", &[]), component("torch", &["rccl"])];
        assert_eq!(found(&both, &["gfx1100", "gfx1201"]), []);
        for names in [&["gfx1103"][..], &["gfx1103", "gfx1201"]] {
            let incompatibilities = found(&both, names);
            assert_eq!(incompatibilities.len(), 1, "{names:?}");
            assert_eq!(incompatibilities[0].linked_by.as_deref(), Some("torch"));
            assert_eq!(incompatibilities[0].missing, targets(&["gfx1103"]));
            assert_eq!(incompatibilities[0].issues, ["https://example.org/150"]);
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
        // An extra target that excludes it as well changes nothing.
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
        // What fits for a set of targets fits for every subset that leaves something built.
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
            let linked = |names: &[&str]| incompatibilities(&parts, &targets(names), &excluded)
                .into_iter()
                .filter_map(|one| one.linked_by.map(|by| (one.component, by)))
                .collect::<BTreeSet<_>>();
            prop_assert!(linked(&all[..keep]).is_subset(&linked(&all)));
        }
    }
}
