//! Owns the order of builds: which env builds next, so that common leading steps, which have the same keys, are built
//! once by one env. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::plan::{Action, PlanStep};
use crate::sys::name::StepName;

/// The progress of several envs.
///
/// The steps form a forest in which envs share a path as long as their keys are equal. An env waits at a step that
/// another env is building, and finds the result as a cache hit.
#[derive(Debug)]
pub(crate) struct Scheduler {
    envs: Vec<Env>,
    /// Places in the forest whose steps have a snapshot.
    built: BTreeSet<Place>,
}

/// A step in the forest. All envs at a place have the same steps before it.
type Place = usize;

#[derive(Debug)]
struct Env {
    steps: Vec<(Place, StepName)>,
    /// Number of steps that the env itself has snapshots of.
    has: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waits,
    Builds,
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScheduledUp {
    pub env: usize,
    /// The steps to build for several envs; `None` builds everything that the env lacks.
    pub shared: Option<Shared>,
}

/// Steps that several envs share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    /// Indices of the envs, including the env that builds.
    pub envs: Vec<usize>,
    /// Name of the last shared step.
    pub until: StepName,
    /// Number of steps to build.
    pub steps: usize,
}

impl Scheduler {
    /// Creates a scheduler for the envs of these plans. An env without a plan is never scheduled.
    pub(crate) fn new(plans: &[Option<Vec<PlanStep>>]) -> Self {
        let mut places = BTreeMap::new();
        let mut built = BTreeSet::new();
        let mut env = |(index, plan): (usize, &Option<Vec<PlanStep>>)| {
            let (mut steps, mut has, mut before) = (Vec::new(), 0, None);
            let asked = plan.iter().flatten();
            let asked = asked.take_while(|step| step.action != Action::Later);
            // A skipped step is part of no key.
            for step in asked.filter(|step| step.action != Action::Skip) {
                // A step with `again` runs in each env, so it is never shared.
                let own = step.again.then_some(index);
                let next = places.len();
                let place = places.entry((before, step.key.clone(), own));
                let place = *place.or_insert(next);
                if step.action == Action::Hit {
                    has += 1;
                    built.insert(place);
                }
                steps.push((place, step.name.clone()));
                before = Some(place);
            }
            let state = match plan {
                Some(_) => State::Waits,
                None => State::Over,
            };
            Env { steps, has, state }
        };
        let envs = plans.iter().enumerate().map(&mut env).collect();
        Self { envs, built }
    }

    /// Returns the best `up` that can run beside the running ones, and marks it as running. Prefers the step that most
    /// envs wait for.
    pub(crate) fn start_next(&mut self) -> Option<ScheduledUp> {
        let waits = |index: &usize| self.envs[*index].state == State::Waits;
        let builds = |index: &usize| self.envs[*index].state == State::Builds;
        let ready = (0..self.envs.len())
            .filter(waits)
            .map(|index| (index, self.sharers(index, self.there(index))))
            .filter(|(_, sharers)| !sharers.iter().any(builds));
        let (index, sharers) = ready.max_by_key(|(index, all)| (all.len(), Reverse(*index)))?;
        let up = match sharers.len() {
            0 | 1 => ScheduledUp {
                env: index,
                shared: None,
            },
            _ => self.together(index, sharers),
        };
        self.envs[up.env].state = State::Builds;
        Some(up)
    }

    /// Returns the `up` for envs that share the next step. The env with the most existing steps builds up to the step
    /// where their paths diverge.
    fn together(&self, index: usize, envs: Vec<usize>) -> ScheduledUp {
        let (steps, there) = (&self.envs[index].steps, self.there(index));
        let same = (there..steps.len()).take_while(|at| self.sharers(index, *at) == envs);
        let count = same.count();
        let most = envs
            .iter()
            .max_by_key(|env| (self.envs[**env].has, Reverse(**env)));
        ScheduledUp {
            env: most.copied().unwrap_or(index),
            shared: Some(Shared {
                until: steps[there + count - 1].1.clone(),
                steps: count,
                envs,
            }),
        }
    }

    pub(crate) fn succeeded(&mut self, up: &ScheduledUp) {
        let env = &mut self.envs[up.env];
        env.state = match &up.shared {
            None => State::Over,
            Some(shared) => {
                let until = env.steps.iter().position(|(_, name)| *name == shared.until);
                let steps = env.steps.iter().take(until.map_or(0, |at| at + 1));
                self.built.extend(steps.map(|(place, _)| *place));
                State::Waits
            }
        };
    }

    /// Records that an `up`'s env could not be built. The other envs continue without it.
    pub(crate) fn dropped(&mut self, up: &ScheduledUp) {
        self.envs[up.env].state = State::Over;
    }

    /// Records a failed step of an `up`, which would fail in every env that shares it. Returns the other envs that this
    /// stops.
    pub(crate) fn failed(&mut self, up: &ScheduledUp) -> Vec<usize> {
        self.dropped(up);
        let shared = up.shared.iter().flat_map(|shared| &shared.envs);
        let others: Vec<usize> = shared.copied().filter(|env| *env != up.env).collect();
        for env in &others {
            self.envs[*env].state = State::Over;
        }
        others
    }

    /// Returns the number of leading steps that are already built.
    fn there(&self, index: usize) -> usize {
        let steps = self.envs[index].steps.iter();
        steps
            .take_while(|(place, _)| self.built.contains(place))
            .count()
    }

    /// Returns the active envs whose step at position `at` is at the same place as that of `index`; empty past the last
    /// step.
    fn sharers(&self, index: usize, at: usize) -> Vec<usize> {
        let place = |index: usize| self.envs[index].steps.get(at).map(|(place, _)| *place);
        let wanted = place(index);
        (0..self.envs.len())
            .filter(|other| self.envs[*other].state != State::Over)
            .filter(|other| wanted.is_some() && place(*other) == wanted)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Parses a plan: an upper case key exists, `-` is skipped, `!` marks a step that runs again, and keys after `.`
    /// come later.
    fn plan(keys: &str) -> Vec<PlanStep> {
        let (mut later, mut again) = (false, false);
        let mut steps = Vec::new();
        for (position, key) in keys.chars().enumerate() {
            later |= key == '.';
            again |= key == '!';
            let action = match key {
                '.' | '!' => continue,
                _ if later => Action::Later,
                '-' => Action::Skip,
                'A'..='Z' => Action::Hit,
                _ => Action::Run,
            };
            let name = format!("step{position}");
            steps.push(PlanStep {
                again,
                ..PlanStep::sample(&name, key.to_ascii_lowercase(), action)
            });
        }
        steps
    }

    fn scheduler(plans: &[&str]) -> Scheduler {
        let plans = plans.iter().map(|keys| Some(plan(keys)));
        Scheduler::new(&plans.collect::<Vec<_>>())
    }

    /// Formats an `up`: `0+1:step2(3)` means that env 0 builds three steps up to `step2` for itself and env 1.
    fn shown(up: &ScheduledUp) -> String {
        let Some(shared) = &up.shared else {
            return up.env.to_string();
        };
        let others = shared.envs.iter().filter(|env| **env != up.env);
        let others: String = others.map(|env| format!("+{env}")).collect();
        let (until, steps) = (&shared.until, shared.steps);
        format!("{}{others}:{until}({steps})", up.env)
    }

    /// Runs a schedule with `parallel` builds at once, where each group ends before the next begins. Returns the groups
    /// with `|` between them.
    fn all(plans: &str, parallel: usize) -> String {
        let mut scheduler = scheduler(&plans.split(' ').collect::<Vec<_>>());
        let mut taken: Vec<String> = Vec::new();
        loop {
            let now: Vec<ScheduledUp> = std::iter::from_fn(|| scheduler.start_next())
                .take(parallel)
                .collect();
            if now.is_empty() {
                return taken.join(" | ");
            }
            taken.push(now.iter().map(shown).collect::<Vec<_>>().join(" "));
            for up in &now {
                scheduler.succeeded(up);
            }
        }
    }

    #[test]
    fn what_envs_share_and_lack_is_built_by_one_of_them() {
        for (plans, parallel, ups) in [
            // All envs share two steps.
            ("abx aby abz", 2, "0+1+2:step1(2) | 0 1 | 2"),
            // Two envs share steps. The third shares none and runs beside them.
            ("xyz abc abd", 3, "1+2:step1(2) 0 | 1 2"),
            // All envs share one step, two of them share two more.
            ("abcx abcy az", 3, "0+1+2:step0(1) | 0+1:step2(2) 2 | 0 1"),
            // Nothing is shared.
            ("ax by", 2, "0 1"),
            ("abc", 2, "0"),
            // The same key after different steps is another step.
            ("axc bxc", 2, "0 1"),
            // One plan is a prefix of the other, or equal to it.
            ("ab a", 2, "0+1:step0(1) | 0 1"),
            ("ab ab", 1, "0+1:step1(2) | 0 | 1"),
            // Two empty plans.
            (" ", 2, "0 1"),
            // The env with the most existing steps builds.
            ("abx Aby", 2, "1+0:step1(1) | 0 1"),
            // A step that exists in one env exists for all.
            ("abx ABy", 2, "0 1"),
            ("AB AB", 2, "0 1"),
            // A step that is skipped or not asked for is not built for others.
            ("a-bx a-by", 2, "0+1:step2(2) | 0 1"),
            ("a-bx aby", 1, "0+1:step2(2) | 0 | 1"),
            ("a.bx a.by", 2, "0+1:step0(1) | 0 1"),
            ("A- A-", 2, "0 1"),
            // A step that runs again in each env cannot be shared.
            ("A!bx A!by", 2, "0 1"),
            ("a!b a!b", 2, "0+1:step0(1) | 0 1"),
        ] {
            assert_eq!(all(plans, parallel), ups, "{plans}");
        }
        assert_eq!(Scheduler::new(&[]).start_next(), None);
    }

    #[test]
    fn a_step_that_fails_stops_only_those_who_share_it() {
        let mut forest = scheduler(&["abcx", "abcy", "az"]);
        let first = forest.start_next().unwrap();
        assert_eq!(forest.start_next(), None, "all wait for it");
        forest.succeeded(&first);
        let (two, alone) = (forest.start_next().unwrap(), forest.start_next().unwrap());
        assert_eq!(
            (shown(&two), shown(&alone)),
            ("0+1:step2(2)".into(), "2".into())
        );
        assert_eq!(forest.failed(&two), [1]);
        assert!(forest.failed(&alone).is_empty());
        assert_eq!(forest.start_next(), None);
    }

    #[test]
    fn the_others_go_on_without_an_env_that_could_not_be_built() {
        let mut forest = scheduler(&["abx", "aby", "abz"]);
        let mut drop_next = |want: &str| {
            let up = forest.start_next().unwrap();
            assert_eq!(shown(&up), want);
            forest.dropped(&up);
        };
        drop_next("0+1+2:step1(2)");
        drop_next("1+2:step1(2)");
        drop_next("2");
        assert_eq!(forest.start_next(), None);
        // An env without a plan takes no part.
        let mut forest = Scheduler::new(&[None, Some(plan("ab")), Some(plan("ab"))]);
        assert_eq!(shown(&forest.start_next().unwrap()), "1+2:step1(2)");
    }

    /// How an `up` ends.
    #[derive(Clone, Copy, Debug)]
    enum End {
        Done,
        Dropped,
        Failed,
    }

    /// Returns the steps that an `up` builds, each with its prefix, by the plans and the existing snapshots.
    fn builds(plans: &[String], there: &BTreeSet<String>, up: &ScheduledUp) -> Vec<String> {
        let keys = &plans[up.env];
        let last = match &up.shared {
            None => keys.len(),
            Some(shared) => shared.until["step".len()..].parse::<usize>().unwrap() + 1,
        };
        let steps = (1..=last).map(|count| keys[..count].to_owned());
        steps.filter(|step| !there.contains(step)).collect()
    }

    proptest! {
        #[test]
        fn each_step_is_built_once_and_each_env_comes_to_an_end(
            plans in proptest::collection::vec("[ab]{0,5}", 0..7),
            parallel in 1usize..4,
            ends in proptest::collection::vec((prop_oneof![6 => Just(End::Done), 1 => Just(End::Dropped), 1 => Just(End::Failed)], any::<usize>()), 64),
        ) {
            let refs: Vec<&str> = plans.iter().map(String::as_str).collect();
            let mut scheduler = scheduler(&refs);
            let mut there = BTreeSet::new();
            let mut running: Vec<ScheduledUp> = Vec::new();
            let mut over = BTreeMap::new();
            for (end, which) in ends {
                while running.len() < parallel && let Some(up) = scheduler.start_next() {
                    prop_assert!(!over.contains_key(&up.env));
                    // No env builds a step that another env is building.
                    let new = builds(&plans, &there, &up);
                    for other in &running {
                        prop_assert!(other.env != up.env);
                        prop_assert!(builds(&plans, &there, other).iter().all(|step| !new.contains(step)));
                    }
                    // Exactly the envs that share the `up` have the steps that it builds.
                    for (env, keys) in plans.iter().enumerate().filter(|(env, _)| !over.contains_key(env)) {
                        let shares = up.shared.as_ref().map_or(env == up.env, |shared| shared.envs.contains(&env));
                        for step in &new {
                            prop_assert_eq!(keys.starts_with(step), shares, "{} of {}", step, env);
                        }
                    }
                    running.push(up);
                }
                if running.is_empty() {
                    break;
                }
                let up = running.remove(which % running.len());
                match end {
                    End::Done => {
                        there.extend(builds(&plans, &there, &up));
                        scheduler.succeeded(&up);
                        if up.shared.is_none() {
                            over.insert(up.env, true);
                        }
                    }
                    End::Dropped => {
                        scheduler.dropped(&up);
                        over.insert(up.env, false);
                    }
                    End::Failed => {
                        let shares = up.shared.as_ref().map_or(1, |shared| shared.envs.len());
                        let stopped = scheduler.failed(&up);
                        prop_assert_eq!(stopped.len() + 1, shares);
                        over.extend(stopped.into_iter().map(|env| (env, false)));
                        over.insert(up.env, false);
                    }
                }
            }
            prop_assert_eq!(over.len(), plans.len(), "somebody waits for nothing");
            for (env, _) in over.iter().filter(|(_, done)| **done) {
                let keys = &plans[*env];
                prop_assert!((1..=keys.len()).all(|count| there.contains(&keys[..count])));
            }
        }
    }
}
