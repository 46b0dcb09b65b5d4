//! Owns the long run of `make soak`: thousands of kills on each kind of store, one round at a time. Its progress is in
//! `soak.json` in cargo's directory for tests, where the next run continues. `ROCKENV_SOAK_KILLS` sets the goal.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that shows its figures"
)]

#[path = "it/safety/hammer.rs"]
mod hammer;
mod support;

use std::collections::BTreeMap;
use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Serialize};
use support::loopfs::Kind;
use support::random;

const STORES: [(Kind, &str); 3] = [
    (Kind::Ext4, "overlay"),
    (Kind::Btrfs, "btrfs"),
    (Kind::Xfs, "reflink"),
];
const KILLS: u64 = 10_000;
/// The run ends after this many failed rounds.
const FAILURES: usize = 10;
/// Commands per round.
const COMMANDS: u64 = 200;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Tally {
    rounds: usize,
    /// How commands ended, by method, verb and exit code.
    ends: BTreeMap<String, u64>,
    /// Rounds that ended with errors or leftovers, with their seeds.
    failed: Vec<String>,
}

impl Tally {
    fn kills(&self) -> u64 {
        let ends = self.ends.iter();
        let kills = ends.filter(|(end, _)| end.ends_with(" killed"));
        kills.map(|(_, count)| count).sum()
    }

    fn round(&mut self) {
        let (kind, method) = STORES[self.rounds % STORES.len()];
        let seed = random::seed();
        // A thread of its own, with which its mounts end.
        let round = std::thread::spawn(move || hammer::hammer(kind, method, COMMANDS, seed)).join();
        match round {
            Ok(ends) => {
                for (end, count) in ends {
                    *self.ends.entry(format!("{method} {end}")).or_default() += u64::from(count);
                }
            }
            Err(panic) => {
                let why = panic.downcast_ref::<String>();
                self.failed.push(format!(
                    "{method}, seed {seed}: {}",
                    why.map_or("", String::as_str)
                ));
            }
        }
        self.rounds += 1;
    }
}

#[test]
fn ten_thousand_kills() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("soak.json");
    let mut tally: Tally = match fs::read(&file) {
        Ok(text) => serde_json::from_slice(&text).unwrap(),
        Err(_) => Tally::default(),
    };
    let goal = random::number("ROCKENV_SOAK_KILLS").unwrap_or(KILLS);
    while tally.kills() < goal && tally.failed.len() < FAILURES {
        tally.round();
        let new = file.with_extension("new");
        fs::write(&new, serde_json::to_vec_pretty(&tally).unwrap()).unwrap();
        fs::rename(&new, &file).unwrap();
        eprintln!(
            "soak: {} kills in {} rounds, {} rounds failed",
            tally.kills(),
            tally.rounds,
            tally.failed.len()
        );
    }
    eprintln!("{:#?}", tally.ends);
    fs::remove_file(&file).unwrap();
    assert!(tally.failed.is_empty(), "{:#?}", tally.failed);
}
