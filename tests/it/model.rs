//! Random commands on envs, checked against a model of what they must leave: root, build volumes, outputs and
//! snapshots. Commands are killed, steps fail, the profile changes, and users change files by hand.
//!
//! A step writes one line, with the profile's version and the time, above its parent's lines. So the file of a step
//! tells what the step was built on. The same file in root, build volume and output tells whether they belong together.
//!
//! `ROCKENV_TEST_SEED` repeats a failure, `ROCKENV_TEST_COMMANDS` sets the number of commands.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, UNIX_EPOCH};

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::random::{self, Random};
use crate::support::run::{Ran, wait_until};
use fs_err as fs;

const STEPS: [&str; 3] = ["s1", "s2", "s3"];
/// Takes less than twenty seconds.
const COMMANDS: u64 = 20;

/// Contents by file name. `hand` is the file that users change by hand.
type Files = BTreeMap<String, String>;

#[derive(Clone, Debug, Default)]
struct Env {
    root: Files,
    volume: Files,
    /// All steps of the profile are done, and nothing has started since.
    settled: bool,
    /// For each step, the start of the last `up` that reran it, in ns. The step's line cannot be older.
    floor: [u128; 3],
    /// The output has files of an earlier env or of a killed command, and `up` has reported them.
    stale: bool,
    /// Root and build volume in each of the user's snapshots.
    kept: BTreeMap<String, (Files, Files)>,
}

struct World {
    store: TestStore,
    random: Random,
    /// Whether snapshots include build volumes.
    freezes: bool,
    versions: [u64; 3],
    /// The step that is made to fail, if any.
    failing: Option<usize>,
    envs: BTreeMap<String, Env>,
    number: u64,
}

fn now() -> u128 {
    UNIX_EPOCH.elapsed().unwrap().as_nanos()
}

/// Returns the version and the time in a step's own line.
fn line(file: &str) -> (u64, u128) {
    let mut words = file.lines().next().unwrap().split(' ').skip(1);
    let mut word = || words.next().unwrap_or_default();
    (word().parse().unwrap(), word().parse().unwrap())
}

impl World {
    fn new(disk: &LoopFs, kind: Kind, seed: u64) -> Self {
        let mut world = Self {
            store: TestStore::on(disk),
            random: Random::new(seed),
            freezes: kind != Kind::Ext4,
            versions: [1; 3],
            failing: None,
            envs: BTreeMap::new(),
            number: 0,
        };
        world.write_profile();
        world
    }

    fn write_profile(&mut self) {
        let mut text = format!(
            "volume = [{{ name = 'b', kind = 'build', target = '/b' }}, {{ name = 'out', kind = 'output', target = '/out' }},\n\
             {{ name = 'flags', kind = 'host', path = '{}', target = '/flags' }}]\n",
            self.store.runs().display()
        );
        for (index, name) in STEPS.iter().enumerate() {
            let version = self.versions[index];
            let parent = index
                .checked_sub(1)
                .map_or("/dev/null".to_owned(), |below| {
                    format!("$HOME/{}", STEPS[below])
                });
            let step = format!(
                "[[step]]\nname = '{name}'\nrun = '''echo begun > /b/{name}; sleep 0.05; test ! -e /flags/{name}\n\
                 {{ echo \"{name} {version} $(date +%s%N)\"; cat {parent}; }} > $HOME/{name}\n\
                 cp $HOME/{name} /b/{name}; cp $HOME/{name} /out/{name}'''\n"
            );
            text.push_str(&step);
        }
        self.store.profile(&text);
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random.below(limit as u64) as usize
    }

    fn any_env(&mut self) -> String {
        let letter = ["a", "b", "c"][self.below(3)];
        format!("{}-{letter}", self.store.env())
    }

    /// Runs a command to its end. On a busy machine, the holder of a killed command may have the env for longer than
    /// the command waits.
    fn finish(&self, arguments: &[&str]) -> Ran {
        let mut ran = self.store.rockenv(arguments);
        wait_until("the env is free", || {
            if ran.code == 6 {
                ran = self.store.rockenv(arguments);
            }
            ran.code != 6
        });
        ran
    }

    /// Runs a command to its end, or kills it and returns `None`.
    fn run(&mut self, arguments: &[&str], killed: bool) -> Option<Ran> {
        eprintln!(
            "rockenv {}{}",
            arguments.join(" "),
            if killed { " # killed" } else { "" }
        );
        if !killed {
            return Some(self.finish(arguments));
        }
        let mut command = self.store.command(arguments);
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(self.random.below(700)));
        child.kill().unwrap();
        child.wait().unwrap();
        None
    }

    /// Reads an env's files with `exec`, which also cleans up after a killed command.
    fn read(&self, env: &str) -> (Files, Files) {
        let script = "for d in $HOME /b; do cd $d; for f in s1 s2 s3 hand; do [ ! -e $f ] || \
            { echo \"== $d $f\"; cat $f; }; done; done";
        let ran = self.finish(&["exec", env, "--", "sh", "-c", script]);
        // `up` was killed before it resolved the profile, so there is nothing to read yet.
        if ran.code == 7 {
            drop(ran.says(&["has no spec yet"]));
            return Default::default();
        }
        let text = ran.ok().text();
        let (mut root, mut volume) = (Files::new(), Files::new());
        for part in text.split("== ").skip(1) {
            let (head, content) = part.split_once('\n').unwrap();
            let (place, name) = head.split_once(' ').unwrap();
            let files = if place == "/b" {
                &mut volume
            } else {
                &mut root
            };
            files.insert(name.to_owned(), content.to_owned());
        }
        (root, volume)
    }

    fn outputs(&self, env: &str) -> PathBuf {
        self.store.home().join("outputs").join(env).join("out")
    }

    fn snapshots(&self, env: &str) -> Vec<String> {
        let ran = self.store.rockenv(&["snapshot", "ls", env, "--json"]);
        let found = ran.ok().json();
        let names = found.as_array().unwrap().iter();
        names
            .map(|snapshot| snapshot["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Fails unless each step was built on the one before it and the user's snapshots are there.
    fn coherent(&self, env: &str, root: &Files) {
        let mut below = String::new();
        let mut ended = false;
        for step in STEPS {
            match root.get(step) {
                Some(content) => {
                    assert!(!ended, "{env}: {step} without what it stands on: {root:#?}");
                    let (_, rest) = content.split_once('\n').unwrap();
                    assert_eq!(rest, below, "{env}: {step} was built on something else");
                    below.clone_from(content);
                }
                None => ended = true,
            }
        }
        let there = self.snapshots(env);
        for name in self.envs[env].kept.keys() {
            assert!(
                there.contains(name),
                "{env}: snapshot {name} is lost: {there:?}"
            );
        }
    }

    /// Copies an env's state into the model after a killed command.
    fn adopt(&mut self, env: &str) {
        let listed = self.store.rockenv(&["ls", "--json"]).ok().text();
        if !listed.contains(&format!("\"{env}\"")) {
            self.envs.remove(env);
            return;
        }
        self.envs.entry(env.to_owned()).or_default();
        let (root, volume) = self.read(env);
        self.coherent(env, &root);
        let known = self.envs.get_mut(env).unwrap();
        (known.root, known.volume, known.settled) = (root, volume, false);
    }

    /// Fails unless an env still matches the model.
    fn unchanged(&self, env: &str) {
        let known = &self.envs[env];
        let (root, volume) = self.read(env);
        assert_eq!(root, known.root, "{env}: root");
        assert_eq!(volume, known.volume, "{env}: build volume");
        self.coherent(env, &root);
    }

    fn up(&mut self, env: &str, killed: bool) {
        let profile = self.store.env().to_owned();
        let mut arguments = vec!["up", profile.as_str(), "--name", env];
        let rerun = (self.below(4) == 0).then(|| self.below(3));
        let until = match self.below(4) {
            0 => rerun.unwrap_or(0) + self.below(3 - rerun.unwrap_or(0)),
            _ => 2,
        };
        if let Some(rerun) = rerun {
            arguments.extend(["--rerun", STEPS[rerun]]);
        }
        if until < 2 {
            arguments.extend(["--until", STEPS[until]]);
        }
        let started = now();
        let before = self.envs.get(env).cloned();
        let Some(ran) = self.run(&arguments, killed) else {
            return self.adopt(env);
        };
        // Output files of a killed command or an earlier env count as the user's: `up` replaces none unasked.
        if ran.code == 8 {
            drop(ran.says(&["in output volume"]));
            fs::remove_dir_all(self.outputs(env)).unwrap();
            return self.adopt(env);
        }
        let failed = ran.code == 5;
        let ran = match self.failing {
            Some(step) if failed => ran.says(&[&format!("step `{}`", STEPS[step])]),
            _ => ran.ok(),
        };
        let before = before.unwrap_or_else(|| {
            self.envs.insert(env.to_owned(), Env::default());
            Env::default()
        });
        let (root, volume) = self.read(env);
        self.coherent(env, &root);
        let depth = STEPS
            .iter()
            .filter(|step| root.contains_key(**step))
            .count();
        if let (true, Some(failing)) = (failed, self.failing) {
            assert_eq!(
                depth, failing,
                "{env}: the step before the failed one: {root:#?}"
            );
        } else {
            assert!(depth > until, "{env}: {root:#?}");
        }
        let known = self.envs.get_mut(env).unwrap();
        for (index, step) in STEPS.iter().enumerate().take(depth) {
            let (version, time) = line(&root[*step]);
            if index <= until {
                assert_eq!(version, self.versions[index], "{env}: {step}");
            }
            if rerun.is_some_and(|rerun| (rerun..=until).contains(&index)) {
                known.floor[index] = started;
            }
            assert!(
                time >= known.floor[index],
                "{env}: {step} is older than what --rerun made: {root:#?}"
            );
            if time >= started || self.freezes && !failed && until == 2 {
                assert_eq!(volume.get(*step), root.get(*step), "{env}: build volume");
            }
        }
        let mut stale = false;
        for (index, step) in STEPS.iter().enumerate().take(depth) {
            let output = fs::read_to_string(self.outputs(env).join(step)).ok();
            if !failed && index <= until && output.as_ref() != root.get(*step) {
                let said = format!("`{step}` in output volume `out` is not as");
                stale = true;
                assert!(
                    before.stale || ran.err.contains(&said),
                    "{env}: output {output:?}, not {root:#?}: {}",
                    ran.err
                );
            }
        }
        if before.settled && rerun.is_none() {
            assert_eq!(root, before.root, "{env}: there was nothing to do");
        } else if let Some(hand) = before.root.get("hand")
            && root.get("hand") != Some(hand)
        {
            let names = self.snapshots(env);
            let kept = names.iter().any(|name| name.starts_with("before-up"));
            assert!(kept, "{env}: changes by hand are lost: {names:?}");
        }
        let known = self.envs.get_mut(env).unwrap();
        known.stale = stale;
        known.settled = !failed && until == 2 || before.settled && rerun.is_none();
        (known.root, known.volume) = (root, volume);
    }

    fn exec(&mut self, env: &str, killed: bool) {
        self.number += 1;
        let script = format!("echo {} > $HOME/hand", self.number);
        match self.run(&["exec", env, "--", "sh", "-c", &script], killed) {
            Some(ran) => {
                ran.ok();
                let root = &mut self.envs.get_mut(env).unwrap().root;
                root.insert("hand".to_owned(), format!("{}\n", self.number));
                self.unchanged(env);
            }
            None => self.adopt(env),
        }
    }

    fn snapshot(&mut self, env: &str, killed: bool) {
        self.number += 1;
        let name = format!("u{}", self.number);
        let ran = self.run(&["snapshot", "create", env, &name], killed);
        let known = self.envs.get_mut(env).unwrap();
        if let Some(ran) = ran {
            ran.ok();
            known
                .kept
                .insert(name, (known.root.clone(), known.volume.clone()));
        }
        self.unchanged(env);
    }

    fn rollback(&mut self, env: &str, killed: bool) {
        let mut names: Vec<String> = self.envs[env].kept.keys().cloned().collect();
        names.extend(STEPS.map(str::to_owned));
        let at = self.below(names.len());
        let name = names.swap_remove(at);
        let there = self.snapshots(env).contains(&name);
        let ran = self.run(&["rollback", "--yes", env, &name], killed);
        if ran.is_none() {
            self.envs.get_mut(env).unwrap().floor = [0; 3];
            return self.adopt(env);
        }
        if !there {
            drop(ran.map(|ran| ran.exits(7)));
            return self.unchanged(env);
        }
        drop(ran.map(Ran::ok));
        let (root, volume) = self.read(env);
        self.coherent(env, &root);
        let known = self.envs.get_mut(env).unwrap();
        if let Some((kept, kept_volume)) = known.kept.get(&name) {
            assert_eq!(&root, kept, "{env}: {name}");
            if self.freezes {
                assert_eq!(&volume, kept_volume, "{env}: {name}: build volume");
            }
        } else {
            let depth = 1 + STEPS.iter().position(|step| **step == *name).unwrap();
            assert_eq!(root.len(), depth, "{env}: {name}: {root:#?}");
            if self.freezes {
                assert_eq!(volume, root, "{env}: {name}: build volume");
            }
        }
        (known.root, known.volume, known.settled, known.floor) = (root, volume, false, [0; 3]);
    }

    fn fork(&mut self, env: &str, killed: bool) {
        let new = self.any_env();
        if self.envs.contains_key(&new) {
            return;
        }
        match self.run(&["fork", env, &new], killed) {
            Some(ran) => {
                ran.ok();
                let mut copy = Env {
                    kept: BTreeMap::new(),
                    settled: false,
                    floor: [0; 3],
                    ..self.envs[env].clone()
                };
                if !self.freezes {
                    copy.volume.clear();
                }
                self.envs.insert(new.clone(), copy);
                self.unchanged(&new);
            }
            None => self.adopt(&new),
        }
        self.unchanged(env);
    }

    fn remove(&mut self, env: &str, killed: bool) {
        match self.run(&["rm", "--yes", env], killed) {
            Some(ran) => {
                ran.ok();
                self.envs.remove(env);
            }
            None => {
                let listed = self.store.rockenv(&["ls", "--json"]).ok().text();
                if listed.contains(&format!("\"{env}\"")) {
                    self.unchanged(env);
                } else {
                    self.envs.remove(env);
                }
            }
        }
    }

    /// Makes a step fail, lets all steps pass again, or changes a step in the profile.
    fn edit(&mut self) {
        let step = self.below(3);
        let flag = |step: usize| self.store.runs().join(STEPS[step]);
        match self.failing {
            Some(failing) => {
                fs::remove_file(flag(failing)).unwrap();
                self.failing = None;
            }
            None if self.number.is_multiple_of(2) => {
                fs::write(flag(step), "").unwrap();
                self.failing = Some(step);
            }
            None => {
                self.versions[step] = 1 + self.random.below(3);
                self.write_profile();
                for known in self.envs.values_mut() {
                    known.settled = false;
                    known.floor[step..].fill(0);
                }
            }
        }
        self.number += 1;
        eprintln!("versions {:?}, {:?} fails", self.versions, self.failing);
    }

    fn command(&mut self) {
        let env = self.any_env();
        let killed = self.below(4) == 0;
        let what = self.below(16);
        if what < 2 {
            return self.edit();
        }
        if what == 2 {
            drop(
                self.run(&["gc", "--yes", "--preset", "ci"], killed)
                    .map(Ran::ok),
            );
            let envs: Vec<String> = self.envs.keys().cloned().collect();
            return envs.iter().for_each(|env| self.unchanged(env));
        }
        let stands = self
            .envs
            .get(&env)
            .is_some_and(|known| known.root.contains_key(STEPS[0]));
        match what {
            _ if !stands => self.up(&env, killed),
            3 | 4 => self.exec(&env, killed),
            5 | 6 => self.snapshot(&env, killed),
            7 | 8 => self.rollback(&env, killed),
            9 | 10 => self.fork(&env, killed),
            11 => self.remove(&env, killed),
            _ => self.up(&env, killed),
        }
    }
}

fn commands(kind: Kind, seed: u64) {
    let disk = LoopFs::with_base(kind);
    let seed = random::number("ROCKENV_TEST_SEED").unwrap_or(seed);
    eprintln!("{}, seed {seed}", kind.name());
    let mut world = World::new(&disk, kind, seed);
    for _ in 0..random::number("ROCKENV_TEST_COMMANDS").unwrap_or(COMMANDS) {
        world.command();
    }
    // Whatever came before, `up` succeeds once no step fails, and then has nothing to do.
    if let Some(failing) = world.failing.take() {
        fs::remove_file(world.store.runs().join(STEPS[failing])).unwrap();
    }
    let profile = world.store.env().to_owned();
    for env in world.envs.keys().cloned().collect::<Vec<_>>() {
        world.store.rockenv(&["up", &profile, "--name", &env]).ok();
        let (root, _) = world.read(&env);
        world.coherent(&env, &root);
        assert!(root.contains_key(STEPS[2]));
        let plan = world.store.rockenv(&["up", &profile, "--name", &env]).ok();
        drop(plan.says(&["nothing to do"]));
        world.store.rockenv(&["rm", "--yes", &env]).ok();
    }
    world.store.rockenv(&["fsck"]).ok();
}

#[test]
fn overlay_does_what_the_model_says() {
    commands(Kind::Ext4, 11);
}

#[test]
fn btrfs_does_what_the_model_says() {
    commands(Kind::Btrfs, 12);
}

#[test]
fn reflink_does_what_the_model_says() {
    commands(Kind::Xfs, 13);
}
