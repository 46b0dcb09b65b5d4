//! Owns applying a decision of `gc`, one item at a time: under the locks, checked again, and in steps that each leave
//! the store intact. A killed `gc` leaves less to do for the next one, and nothing to repair.

use std::time::{Duration, Instant};

use fs_err as fs;

use super::check::names;
use super::{Lock, LockedEnv, Store};
use crate::plan::gc::GcTarget;
use crate::plan::gc::roots::tops;
use crate::plan::ids::{EnvName, ImageKey, LayerId, TreeId};
use crate::plan::record::Origin;
use crate::sys::atomic;
use crate::sys::error::{Error, Kind, Result};
use crate::tree::{self, Method};

/// How long to wait for another process to empty the trash. After that, freed bytes are counted without it.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removal {
    /// It is in the trash.
    Gone,
    /// It stays, for a reason that arose after the decision.
    Stays(String),
}

impl Store {
    /// Removes one item, if it may still be removed. Caches are handled elsewhere.
    pub fn gc_apply(&self, what: &GcTarget, keep_last: usize) -> Result<Removal> {
        match what {
            GcTarget::Snapshot { layer } => self.remove_snapshot(layer, keep_last),
            GcTarget::Layer { layer } | GcTarget::Pulled { layer } => {
                self.remove_unused_layers(std::slice::from_ref(layer))?;
                Ok(self.left(layer))
            }
            GcTarget::Failed { env, tree } => self.with_idle(env, |env| env.drop_failed(tree)),
            GcTarget::Logs { env, run } => self.with_idle(env, |env| env.drop_logs(run)),
            GcTarget::Project { env, volume, path } => {
                self.with_idle(env, |env| env.prune_build_tree(volume, path))
            }
            GcTarget::Image { image } => self.remove_image(image),
            GcTarget::Download { blob } => {
                let Some(_alone) = Lock::try_exclusive(&self.blobs_lock())? else {
                    return Ok(Removal::Stays("a command needs downloads".to_owned()));
                };
                if let Some(stays) = self.locked_by_now(blob)? {
                    return Ok(stays);
                }
                self.discard(&self.root.join("blobs/sha256").join(blob))?;
                Ok(Removal::Gone)
            }
            GcTarget::Stray { path } => self.remove_stray(path),
            GcTarget::Cache { cache, .. } => {
                Err(unexpected!("cache `{cache}` is for its own tool"))
            }
        }
    }

    /// Returns why an image or a download stays if a lock file names it. For layers, `remove_unused_layers` checks that.
    fn locked_by_now(&self, name: &str) -> Result<Option<Removal>> {
        let file = self.locked()?.names.remove(name);
        Ok(file.map(|file| Removal::Stays(format!("lock file {file} names it"))))
    }

    /// Calls `then` with an env that no process holds.
    fn with_idle(
        &self,
        name: &EnvName,
        then: impl FnOnce(&mut LockedEnv<'_>) -> Result<Removal>,
    ) -> Result<Removal> {
        match self.lock_known(name, "gc", Duration::ZERO) {
            Ok(mut env) => then(&mut env),
            Err(error) if error.kind() == Kind::Busy => {
                Ok(Removal::Stays(format!("in use by a command in env {name}")))
            }
            Err(error) if error.kind() == Kind::NoEnv => Ok(Removal::Gone),
            Err(error) => Err(error),
        }
    }

    fn remove_snapshot(&self, layer: &LayerId, keep_last: usize) -> Result<Removal> {
        if let Some(unreadable) = self.unreadable()?.first() {
            return Ok(Removal::Stays(format!("{} may need it", unreadable.object)));
        }
        let mut envs = self.records()?;
        envs.retain(|(_, record)| record.snapshots.iter().any(|known| known.layer == *layer));
        // Check all envs before the first one forgets it: a busy env would keep the layer.
        if let Some((busy, _)) = envs.iter().find(|(name, _)| self.is_env_busy(name)) {
            return Ok(Removal::Stays(format!("in use by a command in env {busy}")));
        }
        for (name, _) in envs {
            let removal = self.with_idle(&name, |env| env.drop_layer(layer, keep_last))?;
            if removal != Removal::Gone {
                return Ok(removal);
            }
        }
        Ok(self.left(layer))
    }

    fn left(&self, layer: &LayerId) -> Removal {
        if self.layer_dir(layer).exists() {
            Removal::Stays("a layer or env now depends on it".to_owned())
        } else {
            Removal::Gone
        }
    }

    fn remove_image(&self, key: &ImageKey) -> Result<Removal> {
        if let Some(stays) = self.locked_by_now(key)? {
            return Ok(stays);
        }
        let _lock = self.lock("gc")?;
        if let Some(unreadable) = self.unreadable()?.first() {
            return Ok(Removal::Stays(format!("{} may need it", unreadable.object)));
        }
        let mut used = self.leases()?.values().any(|lease| lease.image == *key);
        let mut records = self.records()?.into_iter();
        used |= records.any(|(_, record)| record.image_key == *key);
        for id in self.layer_ids()? {
            used |= self
                .layer(&id)?
                .is_some_and(|layer| layer.image_key == *key);
        }
        if used {
            return Ok(Removal::Stays(
                "a layer or env now depends on it".to_owned(),
            ));
        }
        let images = self.root.join("images");
        // References go first: they must not name a missing image.
        for name in names(&images.join("refs"))? {
            let path = images.join("refs").join(&name);
            let reference: Option<serde_json::Value> = match name.ends_with(".json") {
                true => atomic::read_json(&path)?,
                false => None,
            };
            if reference.is_some_and(|reference| reference["key"] == key.as_str()) {
                fs::remove_file(path)?;
            }
        }
        self.discard(&images.join(key))?;
        Ok(Removal::Gone)
    }

    fn remove_stray(&self, path: &str) -> Result<Removal> {
        let _lock = self.lock("gc")?;
        if !path.starts_with("images/tmp-") {
            return Err(unexpected!("`gc` does not manage `{path}`"));
        }
        self.discard(&self.root.join(path))?;
        Ok(Removal::Gone)
    }

    /// Cleans up after killed commands in envs that no process holds. Returns the errors.
    pub fn recover_envs(&self) -> Result<Vec<Error>> {
        let mut wrong = Vec::new();
        for name in self.env_names()? {
            match self.lock_env(&name, "gc", Duration::ZERO) {
                Err(error) if error.kind() != Kind::Busy => wrong.push(error),
                _ => {}
            }
        }
        Ok(wrong)
    }

    /// Empties the trash, or waits for the process that does.
    pub fn await_trash(&self) -> Result<()> {
        let started = Instant::now();
        while !self.empty_trash()? && started.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Empties the trash and waits until the file system has the space back, even if an entry cannot be removed.
    pub fn reclaim(&self) -> Result<()> {
        let emptied = self.await_trash();
        self.wait_for_free_space()?;
        emptied
    }

    /// Waits until the file system reports the free space: btrfs frees deleted data with its next commit, XFS in the
    /// background.
    pub fn wait_for_free_space(&self) -> Result<()> {
        let directory = fs::File::open(&self.root)?;
        nix::unistd::syncfs(directory.file())?;
        if self.method() == Method::Btrfs {
            tree::btrfs::wait_for_deleted(directory.file(), PATIENCE)?;
        }
        tree::xfs::wait_for_deleted(directory.file());
        Ok(())
    }
}

impl LockedEnv<'_> {
    /// Forgets the steps' snapshots on a layer, unless the env needs it by now.
    fn drop_layer(&mut self, layer: &LayerId, keep_last: usize) -> Result<Removal> {
        let record = self.known_record()?;
        for (top, why) in tops(self.name(), record, keep_last) {
            if self.store.descends(Some(&top), layer)? {
                return Ok(Removal::Stays(why.to_string()));
            }
        }
        self.forget(layer, |known| {
            known.layer == *layer && known.origin == Origin::Step
        })?;
        Ok(Removal::Gone)
    }

    fn drop_failed(&mut self, tree: &TreeId) -> Result<Removal> {
        let mut record = self.known_record()?.clone();
        let is_edited = self.store.is_failed_edited(self.name(), &record);
        // Another tree is of a step that failed since the decision.
        let Some(failed) = record.failed.take_if(|failed| failed.tree == *tree) else {
            return Ok(Removal::Gone);
        };
        if is_edited {
            return Ok(Removal::Stays("`shell --failed` changed it".to_owned()));
        }
        let tree = self.directory.join("trees").join(failed.tree);
        match self.put(record.clone()) {
            // The record has room once the tree is gone.
            Err(error) if error.kind() == Kind::OutOfSpace => {
                self.store.discard(&tree)?;
                drop(self.store.reclaim());
                self.put(record)?;
            }
            other => {
                other?;
                self.store.discard(&tree)?;
            }
        }
        Ok(Removal::Gone)
    }

    fn drop_logs(&mut self, run: &str) -> Result<Removal> {
        let prefix = format!("logs/{run}/");
        let record = self.known_record()?;
        let mut logs = record.steps.iter().filter_map(|step| step.log.as_ref());
        if logs.any(|log| log.starts_with(&prefix)) {
            return Ok(Removal::Stays("`rockenv logs` shows them".to_owned()));
        }
        self.store.discard(&self.directory.join("logs").join(run))?;
        Ok(Removal::Gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A question to the user may stand between the decision and this.
    #[test]
    fn what_a_lock_file_names_since_the_decision_stays() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        let key = "5".repeat(64);
        let [image, blob, locks] =
            ["images", "blobs/sha256", "locks"].map(|name| store.root().join(name));
        fs::create_dir(image.join(&key)).unwrap();
        fs::write(blob.join(&key), "").unwrap();
        fs::create_dir(&locks).unwrap();
        // A lock file on a disk that is not mounted counts too.
        let known = format!(r#"{{"file": "/nowhere/p.lock", "names": ["{key}"]}}"#);
        fs::write(locks.join("p.json"), known).unwrap();
        let targets = [
            GcTarget::Image {
                image: key.parse().unwrap(),
            },
            GcTarget::Download { blob: key.clone() },
        ];
        for what in &targets {
            let removal = store.gc_apply(what, 0).unwrap();
            assert!(
                matches!(&removal, Removal::Stays(why) if why.contains("/nowhere/p.lock")),
                "{what:?}: {removal:?}"
            );
        }
        fs::remove_file(locks.join("p.json")).unwrap();
        for what in &targets {
            assert_eq!(store.gc_apply(what, 0).unwrap(), Removal::Gone);
        }
    }

    #[test]
    fn the_tree_of_a_step_that_failed_since_the_decision_stays() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        let env = EnvName::from("a");
        let tree = store.env_dir(&env).join("trees/new");
        fs::create_dir_all(&tree).unwrap();
        let record = r#"{"version": 1, "id": "e", "created": "2026-01-02T03:04:05Z", "used": "2026-01-02T03:04:05Z",
            "profile": "p", "targets": [], "image": "i", "image_key": "k", "engine": "nspawn",
            "head": {"layer": null, "volumes": {}}, "snapshots": [], "steps": [],
            "failed": {"step": "s", "tree": "new", "parent": null, "log": "log", "code": 1}, "complete": false}"#;
        fs::write(store.env_dir(&env).join("record.json"), record).unwrap();
        for (decided, stays) in [("old", true), ("new", false)] {
            let what = GcTarget::Failed {
                env: env.clone(),
                tree: decided.into(),
            };
            assert_eq!(store.gc_apply(&what, 0).unwrap(), Removal::Gone);
            assert_eq!(store.known(&env).unwrap().failed.is_some(), stays);
            assert_eq!(tree.exists(), stays);
        }
    }
}
