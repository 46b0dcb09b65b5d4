//! Owns the decision whose turn it is: which env of several builds what next, so that the steps at the beginning of some of them which
//! have the same keys are built once, by one of these. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::PlannedStep;

/// How far several envs are.
///
/// Their steps make a forest, in which envs go together as far as their keys are equal. Who comes to a step that somebody else
/// builds waits for it; what one has built the others find.
#[derive(Debug)]
pub struct Turns {
    envs: Vec<Env>,
    /// Places in the forest whose steps have a snapshot.
    built: BTreeSet<Place>,
}

/// A step in the forest: whoever has it there has the same steps before it.
type Place = usize;

#[derive(Debug)]
struct Env {
    steps: Vec<(Place, String)>,
    /// How many of them it has itself.
    has: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waits,
    Builds,
    Over,
}

/// One `up`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Whose, by position.
    pub env: usize,
    /// What it builds for others too; without, it builds all that it still lacks.
    pub shared: Option<Shared>,
}

/// Steps that several envs share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Those envs, by position.
    pub envs: Vec<usize>,
    /// The last of the steps.
    pub until: String,
    /// How many of them there are to build.
    pub steps: usize,
}

impl Turns {
    /// Begins with the envs of these plans; one without takes no part.
    pub fn new(plans: &[Option<Vec<PlannedStep>>]) -> Self {
        let mut places = BTreeMap::new();
        let mut built = BTreeSet::new();
        let mut env = |(index, plan): (usize, &Option<Vec<PlannedStep>>)| {
            let (mut steps, mut has, mut before) = (Vec::new(), 0, None);
            let asked = plan.iter().flatten();
            let asked = asked.take_while(|step| step.action != "later");
            // What is skipped is in no key, and stands between no two steps.
            for step in asked.filter(|step| step.action != "skip") {
                // What runs in any case runs in each of them.
                let own = step.again.then_some(index);
                let next = places.len();
                let place = places.entry((before, step.key.clone(), own));
                let place = *place.or_insert(next);
                if step.is_there() {
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

    /// Returns what can be built beside all that is being built, and counts it among that: what most envs wait for.
    pub fn take(&mut self) -> Option<Turn> {
        let waits = |index: &usize| self.envs[*index].state == State::Waits;
        let builds = |index: &usize| self.envs[*index].state == State::Builds;
        let ready = (0..self.envs.len())
            .filter(waits)
            .map(|index| (index, self.sharers(index, self.there(index))))
            .filter(|(_, sharers)| !sharers.iter().any(builds));
        let (index, sharers) = ready.max_by_key(|(index, all)| (all.len(), Reverse(*index)))?;
        let turn = match sharers.len() {
            0 | 1 => Turn {
                env: index,
                shared: None,
            },
            _ => self.together(index, sharers),
        };
        self.envs[turn.env].state = State::Builds;
        Some(turn)
    }

    /// Returns the turn of envs that share the next step: up to where they part, by the one that has most.
    fn together(&self, index: usize, envs: Vec<usize>) -> Turn {
        let (steps, there) = (&self.envs[index].steps, self.there(index));
        let same = (there..steps.len()).take_while(|at| self.sharers(index, *at) == envs);
        let count = same.count();
        let most = envs
            .iter()
            .max_by_key(|env| (self.envs[**env].has, Reverse(**env)));
        Turn {
            env: most.copied().unwrap_or(index),
            shared: Some(Shared {
                until: steps[there + count - 1].1.clone(),
                steps: count,
                envs,
            }),
        }
    }

    /// Notes that a turn ended well.
    pub fn done(&mut self, turn: &Turn) {
        let env = &mut self.envs[turn.env];
        env.state = match &turn.shared {
            None => State::Over,
            Some(shared) => {
                let until = env.steps.iter().position(|(_, name)| *name == shared.until);
                let steps = env.steps.iter().take(until.map_or(0, |at| at + 1));
                self.built.extend(steps.map(|(place, _)| *place));
                State::Waits
            }
        };
    }

    /// Notes that a turn's env could not be built: the others go on without it.
    pub fn dropped(&mut self, turn: &Turn) {
        self.envs[turn.env].state = State::Over;
    }

    /// Notes that a step failed in a turn, as it would in each env that shares it; returns those that it stops besides the
    /// turn's own.
    pub fn failed(&mut self, turn: &Turn) -> Vec<usize> {
        self.dropped(turn);
        let shared = turn.shared.iter().flat_map(|shared| &shared.envs);
        let others: Vec<usize> = shared.copied().filter(|env| *env != turn.env).collect();
        for env in &others {
            self.envs[*env].state = State::Over;
        }
        others
    }

    /// Returns how many of its steps an env would find.
    fn there(&self, index: usize) -> usize {
        let steps = self.envs[index].steps.iter();
        steps
            .take_while(|(place, _)| self.built.contains(place))
            .count()
    }

    /// Returns the envs that have the same step at that position, after the same ones, and are not over; none at the end.
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

    /// Makes a plan of keys: an upper-case one is there, `-` is skipped, what follows `.` comes later.
    fn plan(keys: &str) -> Vec<PlannedStep> {
        let (mut later, mut again) = (false, false);
        let mut steps = Vec::new();
        for (position, key) in keys.chars().enumerate() {
            later |= key == '.';
            again |= key == '!';
            let action = match key {
                '.' | '!' => continue,
                _ if later => "later",
                '-' => "skip",
                'A'..='Z' => "hit",
                _ => "run",
            };
            steps.push(PlannedStep {
                name: format!("step{position}"),
                key: key.to_ascii_lowercase().to_string(),
                action: action.to_owned(),
                again,
            });
        }
        steps
    }

    fn turns(plans: &[&str]) -> Turns {
        let plans = plans.iter().map(|keys| Some(plan(keys)));
        Turns::new(&plans.collect::<Vec<_>>())
    }

    /// Writes a turn down: `0+1:step2(3)` is env 0 that builds three steps up to `step2` for itself and env 1.
    fn shown(turn: &Turn) -> String {
        let Some(shared) = &turn.shared else {
            return turn.env.to_string();
        };
        let others = shared.envs.iter().filter(|env| **env != turn.env);
        let others: String = others.map(|env| format!("+{env}")).collect();
        let (until, steps) = (&shared.until, shared.steps);
        format!("{}{others}:{until}({steps})", turn.env)
    }

    /// Takes all turns, so many at once, each group of which ends before the next begins.
    fn all(plans: &[&str], parallel: usize) -> Vec<Vec<String>> {
        let mut turns = turns(plans);
        let mut taken = Vec::new();
        loop {
            let now: Vec<Turn> = std::iter::from_fn(|| turns.take()).take(parallel).collect();
            if now.is_empty() {
                return taken;
            }
            taken.push(now.iter().map(shown).collect());
            for turn in &now {
                turns.done(turn);
            }
        }
    }

    #[test]
    fn what_envs_share_is_built_by_one_of_them() {
        // All of them share two steps.
        assert_eq!(
            all(&["abx", "aby", "abz"], 2),
            [vec!["0+1+2:step1(2)"], vec!["0", "1"], vec!["2"]]
        );
        // Two do, the third none: it goes on beside them.
        assert_eq!(
            all(&["xyz", "abc", "abd"], 3),
            [vec!["1+2:step1(2)", "0"], vec!["1", "2"]]
        );
        // All share one, two of them two more.
        assert_eq!(
            all(&["abcx", "abcy", "az"], 3),
            [
                vec!["0+1+2:step0(1)"],
                vec!["0+1:step2(2)", "2"],
                vec!["0", "1"]
            ]
        );
        // Nothing is shared.
        assert_eq!(all(&["ax", "by"], 2), [["0", "1"]]);
        assert_eq!(all(&["abc"], 2), [["0"]]);
        // The same after other steps is not the same.
        assert_eq!(all(&["axc", "bxc"], 2), [["0", "1"]]);
        // One is a part of the other, or the whole.
        assert_eq!(all(&["ab", "a"], 2), [vec!["0+1:step0(1)"], vec!["0", "1"]]);
        assert_eq!(all(&["ab", "ab"], 1), [["0+1:step1(2)"], ["0"], ["1"]]);
        assert_eq!(all(&["", ""], 2), [["0", "1"]]);
        assert_eq!(all(&[], 2), Vec::<Vec<String>>::new());
    }

    #[test]
    fn what_is_there_is_built_by_nobody() {
        // Whoever has most goes on.
        assert_eq!(
            all(&["abx", "Aby"], 2),
            [vec!["1+0:step1(1)"], vec!["0", "1"]]
        );
        // One has it, and so have all.
        assert_eq!(all(&["abx", "ABy"], 2), [["0", "1"]]);
        assert_eq!(all(&["AB", "AB"], 2), [["0", "1"]]);
    }

    #[test]
    fn what_is_skipped_or_not_asked_for_is_not_built_for_others() {
        assert_eq!(
            all(&["a-bx", "a-by"], 2),
            [vec!["0+1:step2(2)"], vec!["0", "1"]]
        );
        assert_eq!(all(&["a-bx", "aby"], 1)[0], ["0+1:step2(2)"]);
        assert_eq!(
            all(&["a.bx", "a.by"], 2),
            [vec!["0+1:step0(1)"], vec!["0", "1"]]
        );
        assert_eq!(all(&["A-", "A-"], 2), [["0", "1"]]);
        // What runs again in each of them is of no use to another.
        assert_eq!(all(&["A!bx", "A!by"], 2), [["0", "1"]]);
        assert_eq!(
            all(&["a!b", "a!b"], 2),
            [vec!["0+1:step0(1)"], vec!["0", "1"]]
        );
    }

    #[test]
    fn a_step_that_fails_stops_only_those_who_share_it() {
        let mut forest = turns(&["abcx", "abcy", "az"]);
        let first = forest.take().unwrap();
        assert_eq!(forest.take(), None, "all wait for it");
        forest.done(&first);
        let (two, alone) = (forest.take().unwrap(), forest.take().unwrap());
        assert_eq!(
            (shown(&two), shown(&alone)),
            ("0+1:step2(2)".into(), "2".into())
        );
        assert_eq!(forest.failed(&two), [1]);
        assert!(forest.failed(&alone).is_empty());
        assert_eq!(forest.take(), None);
    }

    #[test]
    fn the_others_go_on_without_an_env_that_could_not_be_built() {
        let mut forest = turns(&["abx", "aby", "abz"]);
        let mut take = |want: &str| {
            let turn = forest.take().unwrap();
            assert_eq!(shown(&turn), want);
            forest.dropped(&turn);
        };
        take("0+1+2:step1(2)");
        take("1+2:step1(2)");
        take("2");
        assert_eq!(forest.take(), None);
        // One without a plan takes no part.
        let mut forest = Turns::new(&[None, Some(plan("ab")), Some(plan("ab"))]);
        assert_eq!(shown(&forest.take().unwrap()), "1+2:step1(2)");
    }

    /// How a turn ends.
    #[derive(Clone, Copy, Debug)]
    enum End {
        Done,
        Dropped,
        Failed,
    }

    /// The steps that a turn builds, each with all before it, by the plans and what is there.
    fn builds(plans: &[String], there: &BTreeSet<String>, turn: &Turn) -> Vec<String> {
        let keys = &plans[turn.env];
        let last = match &turn.shared {
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
            let mut turns = turns(&refs);
            let mut there = BTreeSet::new();
            let mut running: Vec<Turn> = Vec::new();
            let mut over = BTreeMap::new();
            for (end, which) in ends {
                while running.len() < parallel && let Some(turn) = turns.take() {
                    prop_assert!(!over.contains_key(&turn.env));
                    // Nobody builds what another one builds.
                    let new = builds(&plans, &there, &turn);
                    for other in &running {
                        prop_assert!(other.env != turn.env);
                        prop_assert!(builds(&plans, &there, other).iter().all(|step| !new.contains(step)));
                    }
                    // What it builds for others is theirs; what it builds alone is nobody else's.
                    for (env, keys) in plans.iter().enumerate().filter(|(env, _)| !over.contains_key(env)) {
                        let shares = turn.shared.as_ref().map_or(env == turn.env, |shared| shared.envs.contains(&env));
                        for step in &new {
                            prop_assert_eq!(keys.starts_with(step), shares, "{} of {}", step, env);
                        }
                    }
                    running.push(turn);
                }
                if running.is_empty() {
                    break;
                }
                let turn = running.remove(which % running.len());
                match end {
                    End::Done => {
                        there.extend(builds(&plans, &there, &turn));
                        turns.done(&turn);
                        if turn.shared.is_none() {
                            over.insert(turn.env, true);
                        }
                    }
                    End::Dropped => {
                        turns.dropped(&turn);
                        over.insert(turn.env, false);
                    }
                    End::Failed => {
                        let shares = turn.shared.as_ref().map_or(1, |shared| shared.envs.len());
                        let stopped = turns.failed(&turn);
                        prop_assert_eq!(stopped.len() + 1, shares);
                        over.extend(stopped.into_iter().map(|env| (env, false)));
                        over.insert(turn.env, false);
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
