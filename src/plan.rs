//! Owns the decision what `up` does: a pure function of the wanted steps and what was observed.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

/// A step of the spec, as far as planning needs it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Name in the profile.
    pub name: String,
    /// Its key.
    pub key: String,
    /// Keeps build volumes live when its key changed.
    pub incremental: bool,
    /// Why it is not run here, for a step that is skipped; such a step is in nobody's key.
    pub skip: Option<String>,
    /// It is in no later step's key.
    pub aside: bool,
}

/// A layer found for a step's key.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its id.
    pub layer: String,
    /// Why this env cannot use it, where it cannot.
    pub unusable: Option<String>,
    /// It holds the build volumes, though the store does not freeze them itself.
    pub holds_volumes: bool,
    /// What its step left in output volumes is not in this env's.
    pub lacks_results: bool,
}

/// What there is.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Whether the env has a record.
    pub exists: bool,
    /// Layers the env's head stands on, topmost first; empty on the bare image.
    pub head: Vec<String>,
    /// Layers by step key.
    pub layers: BTreeMap<String, Found>,
    /// Keys of steps whose snapshots a service has although the store forgot them; those among `layers` can be used.
    pub forgotten: BTreeSet<String>,
    /// The last step's key for which a registry has a layer, and the registry.
    pub remote: Option<(String, String)>,
    /// Key of the step that was begun last and did not end well.
    pub attempt: Option<String>,
    /// Whether the live tree holds changes since its snapshot.
    pub touched: bool,
    /// Whether the env has build volumes with something in them.
    pub has_volumes: bool,
    /// Whether the store freezes build volumes.
    pub freezes_volumes: bool,
}

/// What the user asked for beyond the profile.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Last step to run.
    pub until: Option<String>,
    /// Step to run again, with all after it.
    pub rerun: Option<String>,
    /// Start each step from its parent's state, volumes included.
    pub clean: bool,
}

/// What happens to one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Its layer is there.
    Hit,
    /// Its layer comes from a registry.
    Pull,
    /// It runs.
    Run,
    /// It is not run, and not passed.
    Skip,
    /// It comes after `--until`.
    Later,
}

/// One step of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// Name.
    pub name: String,
    /// Key.
    pub key: String,
    /// What happens.
    pub action: Action,
    /// Why, in a few words.
    pub why: String,
    /// It runs whether or not its snapshot is there, so that another env's is of no use.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub again: bool,
}

/// Where the build volumes come from when the first step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Volumes {
    /// They stay as they are.
    Live,
    /// They are restored from the snapshot that the step starts on.
    Restored,
    /// They are emptied.
    Fresh,
}

/// What `up` does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The steps in order.
    pub steps: Vec<Planned>,
    /// Layer on which the env stands when the first step runs, or in the end; `None` is the image.
    pub start: Option<String>,
    /// Whether the env must first be moved to `start`.
    pub moves: bool,
    /// What happens to the build volumes.
    pub volumes: Volumes,
    /// Whether changes in the live tree are kept as a snapshot first.
    pub keep_changes: bool,
    /// Steps whose snapshots are there, and whose results are to be put into the env's output.
    pub brings: Vec<String>,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl Plan {
    /// Says whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        let work = [Action::Run, Action::Pull];
        !self.moves
            && self.brings.is_empty()
            && !self.steps.iter().any(|step| work.contains(&step.action))
    }

    /// Returns how many steps run.
    pub fn runs(&self) -> usize {
        self.steps
            .iter()
            .filter(|step| step.action == Action::Run)
            .count()
    }
}

/// Decides what to do. `options` name steps that exist.
pub fn plan(wanted: &[Wanted], observed: &Observed, options: &Options) -> Plan {
    let mut notes = Vec::new();
    let last = options
        .until
        .as_ref()
        .and_then(|until| wanted.iter().position(|step| step.name == *until))
        .unwrap_or_else(|| wanted.len().saturating_sub(1));
    let rerun = options
        .rerun
        .as_ref()
        .and_then(|name| wanted.iter().position(|step| step.name == *name));
    // Live volumes that cannot be restored can only be clean when they are made again from the first step on.
    let afresh = options.clean && !observed.freezes_volumes && observed.has_volumes;

    // A layer holds everything below it: the last usable one decides, gaps before it do not matter.
    let usable = |index: usize| {
        let found = observed.layers.get(&wanted[index].key)?;
        (found.unusable.is_none() && rerun.is_none_or(|rerun| index < rerun) && !afresh)
            .then_some(&found.layer)
    };
    let reached =
        || (0..wanted.len()).filter(|&index| index <= last && wanted[index].skip.is_none());
    // Later layers say nothing of a step that is in no key of theirs: it runs, and they are made again on it.
    let first_lacking = reached().find(|&index| wanted[index].aside && usable(index).is_none());
    let base = reached()
        .filter(|&index| first_lacking.is_none_or(|lacking| index < lacking))
        .filter_map(|index| Some((index, usable(index)?.clone())))
        .next_back();
    let start = base.as_ref().map(|(_, layer)| layer.clone());
    let restores = observed.freezes_volumes
        || base.as_ref().is_some_and(|(index, _)| {
            let found = observed.layers.get(&wanted[*index].key);
            found.is_some_and(|found| found.holds_volumes)
        });

    let remote = observed.remote.as_ref();
    let pulled = remote.and_then(|(key, _)| {
        reached().find(|index| wanted[*index].key == *key && rerun.is_none_or(|at| *index < at))
    });

    let mut steps = Vec::new();
    let mut brings = Vec::new();
    let mut first_run: Option<&Wanted> = None;
    for (index, step) in wanted.iter().enumerate() {
        let (action, why) = if index > last {
            (
                Action::Later,
                format!("after `--until {}`", wanted[last].name),
            )
        } else if let Some(reason) = &step.skip {
            (Action::Skip, reason.clone())
        } else if base.as_ref().is_some_and(|(base, _)| index <= *base) {
            let found = observed.layers.get(&step.key);
            if found.is_some_and(|found| found.lacks_results) {
                brings.push(step.name.clone());
                let why = "snapshot is there; its results go to this env's output";
                (Action::Hit, why.to_owned())
            } else {
                (Action::Hit, "snapshot is there".to_owned())
            }
        } else if let (Some((_, registry)), true) = (remote, pulled >= Some(index)) {
            (Action::Pull, format!("pulled from {registry}"))
        } else {
            let why = match observed.layers.get(&step.key) {
                _ if first_run.is_some() => "a step before it runs".to_owned(),
                _ if rerun == Some(index) => "asked for by `--rerun`".to_owned(),
                _ if afresh => "asked for by `--clean`".to_owned(),
                Some(Found {
                    unusable: Some(why),
                    ..
                }) => why.clone(),
                _ if observed.attempt.as_ref() == Some(&step.key) => {
                    "did not finish last time".to_owned()
                }
                _ if !observed.exists => "new".to_owned(),
                _ => "no snapshot with its key: it, or something before it, changed".to_owned(),
            };
            first_run.get_or_insert(step);
            (Action::Run, why)
        };
        steps.push(Planned {
            name: step.name.clone(),
            key: step.key.clone(),
            again: action == Action::Run && (afresh || rerun.is_some_and(|rerun| index >= rerun)),
            action,
            why,
        });
    }

    let on_start = match &start {
        Some(layer) => observed.head.contains(layer),
        None => observed.exists && observed.head.is_empty(),
    };
    let (moves, volumes) = match first_run {
        // Everything is there: an env that went on from its last step (by `exec` or a snapshot) stays where it is,
        // unless a step that is not wanted any more was at its volumes.
        None => {
            let dirty = observed.attempt.is_some() && restores;
            let stays = on_start && !dirty;
            (
                start.is_some() && !stays,
                if stays {
                    Volumes::Live
                } else {
                    Volumes::Restored
                },
            )
        }
        Some(step) => {
            let at_start = observed.head.first() == start.as_ref();
            let resumes = observed.attempt.as_ref() == Some(&step.key);
            let volumes = if afresh {
                Volumes::Fresh
            } else if !options.clean && (resumes || step.incremental && observed.has_volumes)
                || (at_start && observed.attempt.is_none())
            {
                Volumes::Live
            } else if start.is_some() {
                Volumes::Restored
            } else {
                Volumes::Fresh
            };
            (
                !at_start || volumes != Volumes::Live || !observed.exists,
                volumes,
            )
        }
    };
    let volumes = if restores || afresh || volumes == Volumes::Live {
        volumes
    } else {
        if observed.has_volumes && first_run.is_some() {
            notes.push(
                "this store cannot restore build volumes (overlay): the step goes on with them as they are; \
                 `--clean` empties them and runs every step again"
                    .to_owned(),
            );
        }
        Volumes::Live
    };
    let moves = moves
        && (first_run.is_none()
            || observed.head.first() != start.as_ref()
            || volumes != Volumes::Live);
    let keep_changes = observed.touched && (moves || first_run.is_some());
    Plan {
        steps,
        start,
        moves,
        volumes,
        keep_changes,
        brings,
        notes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wanted(names: &[&str]) -> Vec<Wanted> {
        names
            .iter()
            .map(|name| Wanted {
                name: (*name).to_owned(),
                key: format!("k-{name}"),
                incremental: false,
                skip: None,
                aside: false,
            })
            .collect()
    }

    fn layers(names: &[&str]) -> BTreeMap<String, Found> {
        names
            .iter()
            .map(|name| {
                (
                    format!("k-{name}"),
                    Found {
                        layer: format!("l-{name}"),
                        unusable: None,
                        holds_volumes: false,
                        lacks_results: false,
                    },
                )
            })
            .collect()
    }

    fn actions(plan: &Plan) -> String {
        plan.steps
            .iter()
            .map(|step| match step.action {
                Action::Hit => 'h',
                Action::Pull => 'p',
                Action::Run => 'r',
                Action::Skip => 's',
                Action::Later => '-',
            })
            .collect()
    }

    fn built(names: &[&str]) -> Observed {
        let head = names.iter().rev().map(|name| format!("l-{name}")).collect();
        Observed {
            exists: true,
            head,
            layers: layers(names),
            freezes_volumes: true,
            has_volumes: true,
            ..Observed::default()
        }
    }

    #[test]
    fn what_a_registry_has_is_pulled_up_to_the_step_that_runs_again() {
        let steps = wanted(&["a", "b", "c", "d"]);
        let mut observed = built(&["a"]);
        let mut shown = |key: &str, options: &Options| {
            observed.remote = Some((key.to_owned(), "r".to_owned()));
            actions(&plan(&steps, &observed, options))
        };
        let all = Options::default();
        assert_eq!(shown("k-c", &all), "hppr");
        assert_eq!(shown("k-a", &all), "hrrr");
        assert_eq!(shown("k-d", &all), "hppp");
        let again = Options {
            rerun: Some("c".into()),
            ..Options::default()
        };
        assert_eq!(shown("k-d", &again), "hrrr");
        assert_eq!(shown("k-b", &again), "hprr");
    }

    #[test]
    fn a_new_env_runs_everything_and_a_finished_one_nothing() {
        let steps = wanted(&["a", "b"]);
        let fresh = plan(&steps, &Observed::default(), &Options::default());
        assert_eq!(
            (actions(&fresh).as_str(), fresh.volumes),
            ("rr", Volumes::Live)
        );
        assert!(plan(&steps, &built(&["a", "b"]), &Options::default()).is_empty());
    }

    #[test]
    fn a_layer_of_another_env_is_adopted() {
        let observed = Observed {
            layers: layers(&["a"]),
            freezes_volumes: true,
            ..Observed::default()
        };
        let plan = plan(&wanted(&["a", "b"]), &observed, &Options::default());
        assert_eq!(
            (actions(&plan).as_str(), plan.start.as_deref(), plan.moves),
            ("hr", Some("l-a"), true)
        );
    }

    #[test]
    fn a_gap_in_the_layers_does_not_matter() {
        let plan = plan(
            &wanted(&["a", "b", "c"]),
            &Observed {
                layers: layers(&["b"]),
                ..Observed::default()
            },
            &Options::default(),
        );
        assert_eq!(
            (actions(&plan).as_str(), plan.start.as_deref()),
            ("hhr", Some("l-b"))
        );
    }

    #[test]
    fn a_failed_step_goes_on_with_its_volumes_and_a_changed_one_does_not() {
        let mut observed = built(&["a"]);
        observed.attempt = Some("k-b".into());
        let resumed = plan(&wanted(&["a", "b"]), &observed, &Options::default());
        assert_eq!(
            (actions(&resumed).as_str(), resumed.volumes, resumed.moves),
            ("hr", Volumes::Live, false)
        );
        assert_eq!(resumed.steps[1].why, "did not finish last time");
        observed.attempt = Some("k-old".into());
        let changed = plan(&wanted(&["a", "b"]), &observed, &Options::default());
        assert_eq!((changed.volumes, changed.moves), (Volumes::Restored, true));
        let mut steps = wanted(&["a", "b"]);
        steps[1].incremental = true;
        assert_eq!(
            plan(&steps, &observed, &Options::default()).volumes,
            Volumes::Live
        );
        let clean = Options {
            clean: true,
            ..Options::default()
        };
        assert_eq!(plan(&steps, &observed, &clean).volumes, Volumes::Restored);
    }

    #[test]
    fn an_incremental_step_on_another_envs_layer_starts_with_that_layers_volumes() {
        let mut steps = wanted(&["a", "b"]);
        steps[1].incremental = true;
        let observed = Observed {
            layers: layers(&["a"]),
            freezes_volumes: true,
            ..Observed::default()
        };
        let first = plan(&steps, &observed, &Options::default());
        assert_eq!(
            (first.start.as_deref(), first.volumes, first.moves),
            (Some("l-a"), Volumes::Restored, true)
        );
    }

    #[test]
    fn an_attempt_that_is_not_wanted_any_more_is_undone() {
        let mut observed = built(&["a", "b"]);
        observed.attempt = Some("k-edited".into());
        let undone = plan(&wanted(&["a", "b"]), &observed, &Options::default());
        assert_eq!(
            (actions(&undone).as_str(), undone.volumes, undone.moves),
            ("hh", Volumes::Restored, true)
        );
        observed.freezes_volumes = false;
        assert!(plan(&wanted(&["a", "b"]), &observed, &Options::default()).is_empty());
    }

    #[test]
    fn volumes_that_cannot_be_restored_stay_and_the_plan_says_so() {
        let mut observed = built(&["a", "b", "c"]);
        observed.freezes_volumes = false;
        observed.layers.remove("k-b");
        observed.layers.remove("k-c");
        let stays = plan(&wanted(&["a", "b", "c"]), &observed, &Options::default());
        assert_eq!(
            (actions(&stays).as_str(), stays.volumes),
            ("hrr", Volumes::Live)
        );
        assert_eq!(stays.notes.len(), 1);
        let clean = plan(
            &wanted(&["a", "b", "c"]),
            &observed,
            &Options {
                clean: true,
                ..Options::default()
            },
        );
        assert_eq!(
            (actions(&clean).as_str(), clean.volumes, clean.start),
            ("rrr", Volumes::Fresh, None)
        );
    }

    #[test]
    fn a_step_in_no_later_key_runs_although_later_layers_are_there() {
        let mut steps = wanted(&["a", "gpu", "b"]);
        steps[1].aside = true;
        let go = |steps: &[Wanted], observed: &Observed| {
            actions(&plan(steps, observed, &Options::default()))
        };
        // As another machine made them, or the same one before it had a GPU.
        let without = built(&["a", "b"]);
        assert_eq!(go(&steps, &without), "hrr");
        assert_eq!(go(&steps, &built(&["a", "gpu", "b"])), "hhh");
        steps[1].skip = Some("no GPU".to_owned());
        assert_eq!(go(&steps, &without), "hsh");
    }

    #[test]
    fn rerun_and_until_cut_the_list() {
        let options = Options {
            rerun: Some("b".into()),
            until: Some("b".into()),
            ..Options::default()
        };
        let plan = plan(
            &wanted(&["a", "b", "c"]),
            &built(&["a", "b", "c"]),
            &options,
        );
        assert_eq!(
            (actions(&plan).as_str(), plan.start.as_deref()),
            ("hr-", Some("l-a"))
        );
        let again: Vec<bool> = plan.steps.iter().map(|step| step.again).collect();
        assert_eq!(again, [false, true, false]);
    }

    #[test]
    fn until_goes_back_only_when_the_env_does_not_stand_there() {
        let options = Options {
            until: Some("a".into()),
            ..Options::default()
        };
        assert!(plan(&wanted(&["a", "b"]), &built(&["a", "b"]), &options).is_empty());
    }

    #[test]
    fn an_unusable_layer_says_why() {
        let mut observed = Observed {
            layers: layers(&["a"]),
            ..Observed::default()
        };
        observed.layers.get_mut("k-a").unwrap().unusable =
            Some("its volume is another env's".into());
        let plan = plan(&wanted(&["a"]), &observed, &Options::default());
        assert_eq!(plan.steps[0].why, "its volume is another env's");
    }

    #[test]
    fn changes_are_kept_before_they_would_be_dropped() {
        let mut observed = built(&["a"]);
        observed.touched = true;
        assert!(!plan(&wanted(&["a"]), &observed, &Options::default()).keep_changes);
        assert!(plan(&wanted(&["a", "b"]), &observed, &Options::default()).keep_changes);
    }

    proptest! {
        #[test]
        fn what_a_plan_builds_needs_no_second_plan(present in proptest::collection::vec(any::<bool>(), 1..7), freezes: bool, skip in 0usize..7, aside in 0usize..7) {
            let names: Vec<String> = (0..present.len()).map(|index| format!("s{index}")).collect();
            let mut steps = wanted(&names.iter().map(String::as_str).collect::<Vec<_>>());
            if let Some(step) = steps.get_mut(skip) {
                step.skip = Some("no GPU".into());
            }
            if let Some(step) = steps.get_mut(aside) {
                step.aside = true;
            }
            let have: Vec<&str> = names.iter().zip(&present).filter(|(_, there)| **there).map(|(name, _)| name.as_str()).collect();
            let observed = Observed { layers: layers(&have), freezes_volumes: freezes, ..Observed::default() };
            let first = plan(&steps, &observed, &Options::default());
            // Execute: every step that ran or hit has a layer, the head is the last of them.
            let done: Vec<&str> = first.steps.iter().filter(|step| matches!(step.action, Action::Hit | Action::Run)).map(|step| step.name.as_str()).collect();
            prop_assert!(plan(&steps, &built(&done), &Options::default()).is_empty());
        }
    }
}
