//! Owns the tests of what `up` decides to do.

use super::*;
use proptest::prelude::*;

/// Makes the default options, with some values replaced.
macro_rules! options {
    ($($field:ident: $value:expr),+) => { StepOptions { $($field: $value,)+ ..StepOptions::default() } };
}

fn key(name: &str) -> StepKey {
    format!("k-{name}").as_str().into()
}

fn layer(name: &str) -> LayerId {
    format!("l-{name}").as_str().into()
}

fn wanted(names: &[&str]) -> Vec<StepInput> {
    let step = |name: &&str| StepInput {
        name: (*name).into(),
        key: Some(key(name)),
        incremental: false,
        skip: None,
        uncached_downstream: false,
    };
    names.iter().map(step).collect()
}

fn layers(names: &[&str]) -> BTreeMap<StepKey, CachedLayer> {
    let layer = |name: &&str| (key(name), CachedLayer::usable(layer(name)));
    names.iter().map(layer).collect()
}

/// Plans with the default options.
fn decided(names: &[&str], observed: &Observed) -> Plan {
    plan(&wanted(names), observed, &StepOptions::default())
}

fn actions(plan: &Plan) -> String {
    let letter = |step: &PlanStep| match step.action {
        Action::Hit => 'h',
        Action::Pull => 'p',
        Action::Run => 'r',
        Action::Skip => 's',
        Action::Later => '-',
    };
    plan.steps.iter().map(letter).collect()
}

/// Returns the actions, the volumes, the layer to start from, and whether the env first moves there.
fn shown(plan: &Plan) -> String {
    let start = plan.start.as_deref().unwrap_or("image");
    let moves = if plan.moves { " moves" } else { "" };
    format!("{} {:?} {start}{moves}", actions(plan), plan.volumes)
}

fn built(names: &[&str]) -> Observed {
    let head = names.iter().rev().map(|name| layer(name)).collect();
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
    let mut pulled = |key: &str, options: &StepOptions| {
        observed.remote = Some((key.into(), "r".to_owned()));
        actions(&plan(&steps, &observed, options))
    };
    let all = StepOptions::default();
    assert_eq!(pulled("k-c", &all), "hppr");
    assert_eq!(pulled("k-a", &all), "hrrr");
    assert_eq!(pulled("k-d", &all), "hppp");
    let again = options!(rerun: Some("c".into()));
    assert_eq!(pulled("k-d", &again), "hrrr");
    assert_eq!(pulled("k-b", &again), "hprr");
}

#[test]
fn a_new_env_runs_everything_and_a_finished_one_nothing() {
    let fresh = decided(&["a", "b"], &Observed::default());
    assert_eq!(shown(&fresh), "rr Live image");
    assert!(decided(&["a", "b"], &built(&["a", "b"])).is_empty());
}

#[test]
fn a_step_that_never_ran_has_not_lost_its_snapshot() {
    let mut observed = built(&["a"]);
    let why = |observed: &Observed| decided(&["a", "b"], observed).steps[1].why.clone();
    assert_eq!(why(&observed), "not built yet");
    observed.ran.insert("b".to_owned());
    assert_eq!(
        why(&observed),
        "no snapshot with its key: it was removed, or something changed"
    );
}

#[test]
fn a_layer_of_another_env_is_adopted() {
    let observed = Observed {
        layers: layers(&["a"]),
        freezes_volumes: true,
        ..Observed::default()
    };
    let adopted = "hr Restored l-a moves";
    assert_eq!(shown(&decided(&["a", "b"], &observed)), adopted);
    // So does an incremental step: it starts with that layer's volumes.
    let mut steps = wanted(&["a", "b"]);
    steps[1].incremental = true;
    let first = plan(&steps, &observed, &StepOptions::default());
    assert_eq!(shown(&first), adopted);
}

#[test]
fn an_incremental_step_continues_only_with_volumes_that_fit_its_sources_and_its_layer() {
    let mut steps = wanted(&["a", "b", "c"]);
    (steps[1].incremental, steps[2].incremental) = (true, true);
    let go = |observed: &Observed| shown(&plan(&steps, observed, &StepOptions::default()));
    let mut observed = built(&["a", "b"]);
    observed.head = vec![layer("a")];
    assert_eq!(go(&observed), "hhr Live l-b moves");
    // Another env made `b`, and this one had only `a`.
    observed.lacking = ["b", "c"].map(str::to_owned).into();
    assert_eq!(go(&observed), "hhr Live l-b moves");
    let found = observed.layers.get_mut(&key("b")).unwrap();
    found.holds_volumes = true;
    assert_eq!(go(&observed), "hhr Restored l-b moves");
    observed.attempt = Some(key("c"));
    assert_eq!(go(&observed), "hhr Live l-b moves");
    observed.attempt = None;
    observed.lacking.clear();
    assert_eq!(go(&observed), "hhr Live l-b moves");
    observed.layers.get_mut(&key("b")).unwrap().has_older_files = true;
    assert_eq!(go(&observed), "hhr Restored l-b moves");
    observed.layers.get_mut(&key("b")).unwrap().has_older_files = false;
    observed.has_older_sources = true;
    assert_eq!(go(&observed), "hhr Restored l-b moves");
    let told = plan(&steps, &observed, &StepOptions::default()).notes;
    let note = "step `c` starts with the build volumes of its parent instead of this env's: \
                their objects may be newer than the files of another source or hook";
    assert_eq!(told, [note]);
    observed.freezes_volumes = false;
    observed.layers = layers(&["a"]);
    observed.head = vec![layer("b"), layer("a")];
    let stays = plan(&steps, &observed, &StepOptions::default());
    assert_eq!((stays.volumes, stays.notes.len()), (Volumes::Live, 1));
}

#[test]
fn a_gap_in_the_layers_does_not_matter() {
    let observed = Observed {
        layers: layers(&["b"]),
        ..Observed::default()
    };
    let plan = decided(&["a", "b", "c"], &observed);
    assert_eq!(shown(&plan), "hhr Live l-b moves");
}

#[test]
fn a_failed_step_goes_on_with_its_volumes_and_a_changed_one_does_not() {
    let mut observed = built(&["a"]);
    observed.attempt = Some("k-b".into());
    let resumed = decided(&["a", "b"], &observed);
    assert_eq!(shown(&resumed), "hr Live l-a");
    assert_eq!(resumed.steps[1].why, "did not finish last time");
    // It starts from its parent all the same, not from files that were changed by hand.
    observed.is_modified = true;
    let resumed = decided(&["a", "b"], &observed);
    assert_eq!(shown(&resumed), "hr Live l-a moves");
    assert!(resumed.keep_changes);
    observed.is_modified = false;
    observed.attempt = Some("k-old".into());
    let changed = decided(&["a", "b"], &observed);
    assert_eq!(shown(&changed), "hr Restored l-a moves");
    let mut steps = wanted(&["a", "b"]);
    steps[1].incremental = true;
    assert_eq!(
        plan(&steps, &observed, &StepOptions::default()).volumes,
        Volumes::Live
    );
    let clean = options!(clean: true);
    assert_eq!(plan(&steps, &observed, &clean).volumes, Volumes::Restored);
}

#[test]
fn an_attempt_that_is_not_wanted_any_more_is_undone() {
    let mut observed = built(&["a", "b"]);
    observed.attempt = Some("k-edited".into());
    let undone = decided(&["a", "b"], &observed);
    assert_eq!(shown(&undone), "hh Restored l-b moves");
    observed.freezes_volumes = false;
    assert!(decided(&["a", "b"], &observed).is_empty());
}

#[test]
fn volumes_that_cannot_be_restored_stay_and_the_plan_says_so() {
    let mut observed = built(&["a", "b", "c"]);
    observed.freezes_volumes = false;
    observed.layers.remove(&key("b"));
    observed.layers.remove(&key("c"));
    let stays = decided(&["a", "b", "c"], &observed);
    assert_eq!(shown(&stays), "hrr Live l-a moves");
    assert_eq!(stays.notes.len(), 1);
    let options = options!(clean: true);
    let clean = plan(&wanted(&["a", "b", "c"]), &observed, &options);
    assert_eq!(shown(&clean), "rrr Fresh image moves");
}

#[test]
fn a_step_in_no_later_key_runs_although_later_layers_are_there() {
    let mut steps = wanted(&["a", "gpu", "b"]);
    steps[1].uncached_downstream = true;
    let go = |steps: &[StepInput], observed: &Observed| {
        actions(&plan(steps, observed, &StepOptions::default()))
    };
    // Made by another machine, or by this one before it had a GPU.
    let without = built(&["a", "b"]);
    assert_eq!(go(&steps, &without), "hrr");
    assert_eq!(go(&steps, &built(&["a", "gpu", "b"])), "hhh");
    steps[1].skip = Some("no GPU".to_owned());
    assert_eq!(go(&steps, &without), "hsh");
}

#[test]
fn a_clean_env_has_nothing_that_was_changed_by_hand() {
    let (steps, mut observed) = (wanted(&["a"]), built(&["a"]));
    let clean = options!(clean: true);
    assert!(plan(&steps, &observed, &clean).is_empty());
    observed.is_modified = true;
    assert!(plan(&steps, &observed, &StepOptions::default()).is_empty());
    let plan = plan(&steps, &observed, &clean);
    assert_eq!(shown(&plan), "h Restored l-a moves");
    assert!(plan.keep_changes);
}

#[test]
fn a_last_step_that_is_not_wanted_any_more_is_undone() {
    let mut observed = built(&["a", "b"]);
    observed.head.insert(0, "l-mine".into());
    let steps = wanted(&["a"]);
    let all = StepOptions::default();
    assert!(plan(&steps, &observed, &all).is_empty());
    observed.outlived.push("l-b".into());
    let undone = plan(&steps, &observed, &all);
    assert_eq!(shown(&undone), "h Restored l-a moves");
    // The step has changed, and is not requested yet.
    let until = options!(until: Some("a".into()));
    let mut steps = wanted(&["a", "c"]);
    steps[1].key = Some(key("other"));
    assert!(plan(&steps, &observed, &until).is_empty());
}

#[test]
fn volumes_that_commands_changed_stay_if_there_is_no_other_copy() {
    let mut observed = built(&["a"]);
    observed.freezes_volumes = false;
    observed.is_modified = true;
    let found = observed.layers.get_mut(&key("a")).unwrap();
    found.holds_volumes = true;
    let restored = decided(&["a", "b"], &observed);
    assert_eq!(
        (restored.volumes, restored.notes.len()),
        (Volumes::Restored, 0)
    );
    observed.keeps_volumes = true;
    let stays = decided(&["a", "b"], &observed);
    assert_eq!((stays.volumes, stays.notes.len()), (Volumes::Live, 1));
}

#[test]
fn an_unusable_layer_says_why() {
    let mut observed = Observed {
        layers: layers(&["a"]),
        ..Observed::default()
    };
    observed.layers.get_mut(&key("a")).unwrap().unusable =
        Some("its volume is another env's".into());
    let plan = decided(&["a"], &observed);
    assert_eq!(plan.steps[0].why, "its volume is another env's");
}

proptest! {
    #[test]
    fn what_a_plan_builds_needs_no_second_plan(present in proptest::collection::vec(any::<bool>(), 1..7), freezes: bool, skip in 0usize..7, uncached_downstream in 0usize..7) {
        let names: Vec<String> = (0..present.len()).map(|index| format!("s{index}")).collect();
        let mut steps = wanted(&names.iter().map(String::as_str).collect::<Vec<_>>());
        if let Some(step) = steps.get_mut(skip) {
            (step.key, step.skip) = (None, Some("no GPU".into()));
        }
        if let Some(step) = steps.get_mut(uncached_downstream) {
            step.uncached_downstream = true;
        }
        let have: Vec<&str> = names.iter().zip(&present).filter(|(_, there)| **there).map(|(name, _)| name.as_str()).collect();
        let observed = Observed { layers: layers(&have), freezes_volumes: freezes, ..Observed::default() };
        let first = plan(&steps, &observed, &StepOptions::default());
        // Execute: every step that ran or hit has a layer, the head is the last of them.
        let done: Vec<&str> = first.steps.iter().filter(|step| matches!(step.action, Action::Hit | Action::Run)).map(|step| step.name.as_str()).collect();
        prop_assert!(plan(&steps, &built(&done), &StepOptions::default()).is_empty());
    }
}
