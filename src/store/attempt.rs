//! Owns the record of the step that began last in an env and did not succeed, and of commands that joined it.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;

use fs_err as fs;
use jiff::Timestamp;

use super::env::remove;
use super::layer::boot_id;
use super::{LockedEnv, Store, build_logs, source};
use crate::plan::ids::{EnvName, LayerId, StepKey, VolumeId};
use crate::plan::layer::Layer;
use crate::plan::record::Record;
use crate::plan::resolve::Spec;
use crate::sys::atomic::{self, Survives};
use crate::sys::error::{Result, if_exists};

/// File that records a begun step.
pub(super) const ATTEMPT: &str = "attempt";
/// Third line of that file, if the step sees no build volume.
const APART: &str = "apart";
/// Copy of that file, made when a command joins the step.
const JOINED: &str = "joined";
/// File with the id of the boot during which a step ran on build volumes whose files may not be on disk yet.
pub(super) const RUNNING: &str = "running";

/// A step that began and did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub key: StepKey,
    /// The layer that it began on; `None` is the bare image.
    pub on: Option<LayerId>,
    pub sees_volumes: bool,
    /// When its first run began, if known.
    pub began: Option<Timestamp>,
}

/// Returns the first line of the attempt file. Its volumes tell whether the attempt was on the current ones.
fn attempt_line(key: &StepKey, record: &Record) -> String {
    let volumes: Vec<&str> = record.head.volumes.values().map(VolumeId::as_str).collect();
    format!("{key} {}", volumes.join(" "))
}

impl Store {
    /// Returns the step that began on the env's current build volumes and did not succeed.
    pub fn attempt(&self, name: &EnvName, record: &Record) -> Result<Option<Attempt>> {
        let written = self.written_attempt(name, record)?;
        if written.is_some() || !self.freezes_volumes() {
            return Ok(written);
        }
        // A rollback restores partial work with the build volumes.
        let layer = self.layer_if(record.head.volumes_from().layer.as_ref())?;
        Ok(layer.and_then(|layer| {
            Some(Attempt {
                key: layer.begun?,
                on: Some(layer.id),
                sees_volumes: true,
                began: layer.began,
            })
        }))
    }

    /// Returns the origins of the sources that an env's build volumes were built from, by volume, if known: those of
    /// `last`, the spec of the last `up`, if one of its steps has begun on the volumes, or else those of the layer with
    /// the same content, which a rollback may have restored. A pulled layer does not tell them, but its key tells
    /// whether it is of a step of `last`.
    pub(crate) fn origins_in_volumes(
        &self,
        name: &EnvName,
        record: &Record,
        last: &Spec,
    ) -> Result<Option<BTreeMap<String, String>>> {
        let is_last = |key: &StepKey| last.steps.iter().any(|step| step.key == *key);
        let begun = self.attempt(name, record)?;
        let begun = begun.filter(|begun| is_last(&begun.key));
        // A missing layer is reported where it is needed.
        let from = record.head.volumes_from().layer;
        let chain = from.and_then(|from| self.chain(&from).ok());
        // A user's snapshot of an older version has the objects of the step below it.
        let tells = |layer: &Layer| layer.key.is_some() || layer.origins.is_some();
        let layer = chain.and_then(|chain| chain.into_iter().find(tells));
        let Some(layer) = layer.filter(|_| begun.is_none()) else {
            return Ok(Some(source::origins(self, last)));
        };
        let made = layer.key.filter(is_last);
        let of_last = |_| source::origins(self, last);
        Ok(layer.origins.or_else(|| made.map(of_last)))
    }

    /// Returns when the first of the unfinished runs of a step began whose work is in the current build volumes, if
    /// known. With `elsewhere`, also of those whose work is in views or output volumes: a rollback restores neither.
    pub(crate) fn began(
        &self,
        name: &EnvName,
        record: &Record,
        key: &StepKey,
        elsewhere: bool,
    ) -> Result<Option<Timestamp>> {
        let last = self.last_attempt(name, record)?.filter(|_| elsewhere);
        let last = last.map(|(_, begun)| begun);
        let known = self.attempt(name, record)?.into_iter().chain(last);
        let known = known.filter(|begun| begun.key == *key);
        Ok(known.filter_map(|begun| begun.began).min())
    }

    fn written_attempt(&self, name: &EnvName, record: &Record) -> Result<Option<Attempt>> {
        let last = self.last_attempt(name, record)?;
        let current = last.filter(|(line, begun)| *line == attempt_line(&begun.key, record));
        Ok(current.map(|(_, begun)| begun))
    }

    /// Returns the step that began last and did not succeed, with the first line of the attempt file.
    fn last_attempt(&self, name: &EnvName, record: &Record) -> Result<Option<(String, Attempt)>> {
        let bytes = if_exists(fs::read(self.env_dir(name).join(ATTEMPT)))?.unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = text.split('\n');
        let line = lines.next().unwrap_or_default();
        // Older versions wrote one line, then three.
        let on = match lines.next() {
            Some(on) => on.parse().ok(),
            None => record.head.layer.clone(),
        };
        let sees_volumes = lines.next() != Some(APART);
        let began = lines.next().and_then(|began| began.parse().ok());
        let key: Option<StepKey> = line.split_once(' ').and_then(|(key, _)| key.parse().ok());
        Ok(key.map(|key| {
            let attempt = Attempt {
                key,
                on,
                sees_volumes,
                began,
            };
            (line.to_owned(), attempt)
        }))
    }

    /// Records that an `exec` or `shell` command joins the running step, by a copy of the attempt file: the step's
    /// `up` holds the lock. Returns whether the command is the first to join.
    pub fn join_attempt(&self, name: &EnvName) -> Result<bool> {
        let directory = self.env_dir(name);
        let (attempt, joined) = (directory.join(ATTEMPT), directory.join(JOINED));
        let Some(text) = if_exists(fs::read(&attempt))? else {
            // The step just ended.
            return Ok(false);
        };
        if fs::read(&joined).is_ok_and(|known| known == text) {
            return Ok(false);
        }
        let mut new = tempfile::Builder::new()
            .prefix(atomic::PREFIX)
            .tempfile_in(&directory)?;
        new.write_all(&text)?;
        new.as_file().sync_data()?;
        match new.persist(&joined) {
            // The step ended, and the next process that took the lock discarded the file.
            Err(error) if error.error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            other => drop(other.map_err(|error| error.error)?),
        }
        fs::File::open(&directory)?.sync_data()?;
        if !attempt.exists() {
            // The env was removed meanwhile, and only this file is left.
            remove(&joined)?;
        }
        Ok(true)
    }
}

impl LockedEnv<'_> {
    /// Records that a step begins. Until the step succeeds, the build volumes contain its partial work.
    ///
    /// Synced if the env has volumes: after a power failure, they must not pass for those of the layer below.
    pub(super) fn begin_attempt(
        &self,
        key: &StepKey,
        sees_volumes: bool,
        began: Option<Timestamp>,
    ) -> Result<()> {
        remove(&self.directory.join(JOINED))?;
        let record = self.known_record()?;
        let survives = match record.head.volumes.is_empty() {
            true => Survives::Nothing,
            false => Survives::New,
        };
        let on = record.head.layer.as_deref().unwrap_or_default();
        let apart = if sees_volumes { "" } else { APART };
        let began = began.map_or_else(String::new, |began| began.to_string());
        let text = format!("{}\n{on}\n{apart}\n{began}", attempt_line(key, record));
        atomic::replace(&self.directory.join(ATTEMPT), text.as_bytes(), survives)
    }

    /// Records that a step begins, and whether it sees build volumes. If the machine restarted before the files of the
    /// last step with build volumes were known to be on disk, makes ninja run its last commands again: after a
    /// power failure, their outputs may exist without content.
    pub(super) fn begin_run(&self, sees_volumes: bool) -> Result<()> {
        let (running, record) = (self.directory.join(RUNNING), self.known_record()?);
        if record.head.volumes.is_empty() {
            return Ok(());
        }
        let boot = boot_id();
        let last = if_exists(fs::read(&running))?;
        let is_earlier = last.is_some_and(|last| last != boot.as_bytes());
        if is_earlier {
            let volumes = record.head.volumes.values();
            let tops: Vec<PathBuf> = volumes.map(|id| self.store.volume_dir(id)).collect();
            build_logs::cut(&tops);
        }
        match sees_volumes {
            true => atomic::replace(&running, boot.as_bytes(), Survives::Either),
            false if is_earlier => self.end_run(),
            false => Ok(()),
        }
    }

    /// Records that all files of the steps are on disk.
    pub fn end_run(&self) -> Result<()> {
        remove(&self.directory.join(RUNNING))
    }

    pub fn end_attempt(&self) -> Result<()> {
        remove(&self.directory.join(JOINED))?;
        remove(&self.directory.join(ATTEMPT))
    }

    /// Returns whether an `exec` or `shell` command joined the step that began last on the current build volumes.
    pub(super) fn is_joined(&self) -> Result<bool> {
        let record = self.known_record()?;
        let read = |name| if_exists(fs::read(self.directory.join(name)));
        let joined = read(JOINED)?;
        Ok(joined.is_some()
            && joined == read(ATTEMPT)?
            && self.store.written_attempt(self.name(), record)?.is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use super::super::check::names;
    use super::*;

    #[test]
    fn after_a_restart_ninja_runs_its_last_commands_again() {
        let (_root, store) = Store::scratch();
        let mut env = store.lock_env(&"a".into(), "up", Duration::ZERO).unwrap();
        let mut record = Record::sample("e", Timestamp::UNIX_EPOCH);
        record.head.volumes = [("build".into(), "v".into())].into();
        env.commit(record).unwrap();
        let volume = store.volume_dir(&"v".into());
        fs::create_dir_all(&volume).unwrap();
        let log = volume.join(".ninja_log");
        let text = "# ninja log v5\n0\t7\t1\ta\taa\n0\t900000\t1\tb\tbb\n";
        let running = env.directory().join(RUNNING);
        let own = boot_id();
        // A step without build volumes writes no record, and keeps that of a step before it in the same boot.
        for (sees_volumes, before, left, after) in [
            (true, None, 3, Some(own.as_str())),
            (true, Some(own.as_str()), 3, Some(own.as_str())),
            (true, Some("earlier"), 2, Some(own.as_str())),
            (false, None, 3, None),
            (false, Some(own.as_str()), 3, Some(own.as_str())),
            (false, Some("earlier"), 2, None),
        ] {
            fs::write(&log, text).unwrap();
            match before {
                Some(boot) => fs::write(&running, boot).unwrap(),
                None => env.end_run().unwrap(),
            }
            env.begin_run(sees_volumes).unwrap();
            let lines = fs::read_to_string(&log).unwrap().lines().count();
            assert_eq!(lines, left, "{sees_volumes} {before:?}");
            let found = fs::read_to_string(&running).ok();
            assert_eq!(found.as_deref(), after, "{sees_volumes} {before:?}");
        }
    }

    /// A process that takes the env's lock discards unfinished files in its directory.
    #[test]
    fn a_command_that_joins_an_ending_step_gets_no_error() {
        let (_root, store) = Store::scratch();
        let env = store.env_dir(&"a".into());
        fs::create_dir_all(&env).unwrap();
        fs::write(env.join(ATTEMPT), "key").unwrap();
        let ended = AtomicBool::new(false);
        let mut joined = [0, 0];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    for name in names(&env).unwrap() {
                        if name.starts_with(atomic::PREFIX) {
                            drop(fs::remove_file(env.join(name)));
                        }
                    }
                }
            });
            let until = Instant::now() + Duration::from_secs(100);
            let mut outcome = Ok(());
            while Instant::now() < until && joined.contains(&0) && outcome.is_ok() {
                let first = store.join_attempt(&"a".into());
                outcome = first.map(|first| joined[usize::from(first)] += 1);
                drop(fs::remove_file(env.join(JOINED)));
            }
            ended.store(true, Ordering::Relaxed);
            outcome.unwrap();
        });
        assert!(joined[0] > 0, "the racer never won: {joined:?}");
    }
}
