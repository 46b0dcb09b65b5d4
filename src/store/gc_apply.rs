//! Owns applying a decision of `gc`: under the locks, checked again, and in steps that each leave the store intact. A
//! killed `gc` leaves less to do for the next one, and nothing to repair.
//!
//! A check reads all layers and records, so items of one kind are checked and removed together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;

use super::check::names;
use super::layer::missing;
use super::lock_files::Locked;
use super::trash::is_rest;
use super::unreadable::{Unreadable, Users};
use super::{Lock, LockedEnv, Store, journal};
use crate::plan::gc::GcTarget;
use crate::plan::gc::roots::{Why, tops};
use crate::plan::ids::{EnvName, ImageKey, LayerId, TreeId};
use crate::plan::layer::with_parents;
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

impl Removal {
    /// Returns the outcome of a removal that may have failed. Then the item stays.
    pub(crate) fn of(removal: Result<Self>) -> Self {
        removal.unwrap_or_else(|error| Self::failed(&error))
    }

    fn failed(error: &Error) -> Self {
        Self::Stays(error.chain().join(": "))
    }

    fn needed_by_now() -> Self {
        Self::Stays("a layer or env now depends on it".to_owned())
    }

    fn unknown(unreadable: &Unreadable) -> Self {
        Self::Stays(format!("{} may need it", unreadable.object))
    }
}

/// Maximum number of envs to lock at a time: each lock is an open file.
const MOST_LOCKED: usize = 64;

/// Returns the group of an item. The items of a group are removed together, and after items that are based on them.
fn group(what: &GcTarget) -> (u8, &str) {
    match what {
        GcTarget::Failed { env, .. }
        | GcTarget::Logs { env, .. }
        | GcTarget::Project { env, .. } => (0, env.as_str()),
        GcTarget::Snapshot { .. } | GcTarget::Layer { .. } | GcTarget::Pulled { .. } => (1, ""),
        GcTarget::Image { .. } => (2, ""),
        GcTarget::Download { .. } => (3, ""),
        GcTarget::Stray { path } => (4, path.as_str()),
        GcTarget::Cache { cache, .. } => (5, cache.as_str()),
    }
}

/// Returns why an object stays if a lock file names it.
fn stays_locked(locked: &Locked, name: &str) -> Option<Removal> {
    let file = locked.names.get(name)?;
    Some(Removal::Stays(format!("lock file {file} names it")))
}

/// Returns the image that a reference names; `None` for other files.
fn named_image(path: &Path) -> Result<Option<String>> {
    if path.extension().is_none_or(|end| end != "json") {
        return Ok(None);
    }
    let reference: Option<serde_json::Value> = atomic::read_json(path)?;
    Ok(reference.and_then(|reference| Some(reference["key"].as_str()?.to_owned())))
}

impl Store {
    /// Removes those of the items that may still be removed. Returns the outcome of each. Caches are handled elsewhere.
    pub fn gc_apply<'t>(
        &self,
        items: impl IntoIterator<Item = &'t GcTarget>,
        keep_last: usize,
    ) -> Vec<Removal> {
        let items: Vec<&GcTarget> = items.into_iter().collect();
        let mut groups: BTreeMap<(u8, &str), Vec<&GcTarget>> = BTreeMap::new();
        for what in &items {
            groups.entry(group(what)).or_default().push(what);
        }
        let mut outcomes: BTreeMap<&GcTarget, Removal> = BTreeMap::new();
        for group in groups.into_values() {
            let removals = match group[0] {
                GcTarget::Snapshot { .. } | GcTarget::Layer { .. } | GcTarget::Pulled { .. } => {
                    self.remove_frozen(&group, keep_last)
                }
                GcTarget::Failed { env, .. }
                | GcTarget::Logs { env, .. }
                | GcTarget::Project { env, .. } => Ok(self.remove_of_env(env, &group)),
                GcTarget::Image { .. } => self.remove_images(&group),
                GcTarget::Download { .. } => self.remove_downloads(&group),
                GcTarget::Stray { path } => self.remove_stray(path).map(|removal| vec![removal]),
                GcTarget::Cache { cache, .. } => {
                    Err(unexpected!("cache `{cache}` is for its own tool"))
                }
            };
            let removals =
                removals.unwrap_or_else(|error| vec![Removal::failed(&error); group.len()]);
            outcomes.extend(group.into_iter().zip(removals));
        }
        items.iter().map(|what| outcomes[what].clone()).collect()
    }

    /// Locks an env that no process holds, or returns the outcome for its items.
    fn lock_idle(&self, name: &EnvName) -> std::result::Result<LockedEnv<'_>, Removal> {
        let locked = self.lock_known(name, "gc", Duration::ZERO);
        locked.map_err(|error| match error.kind() {
            Kind::Busy => Removal::Stays(format!("in use by a command in env {name}")),
            Kind::NoEnv => Removal::Gone,
            _ => Removal::failed(&error),
        })
    }

    fn remove_of_env(&self, name: &EnvName, items: &[&GcTarget]) -> Vec<Removal> {
        match self.lock_idle(name) {
            Ok(mut env) => {
                let removals = items.iter().map(|what| env.drop_item(what));
                removals.map(Removal::of).collect()
            }
            Err(removal) => vec![removal; items.len()],
        }
    }

    /// Removes layers, and the snapshots of steps with them.
    fn remove_frozen(&self, items: &[&GcTarget], keep_last: usize) -> Result<Vec<Removal>> {
        let users = self.users()?;
        if let Some(unreadable) = users.unreadable.first() {
            return Ok(vec![Removal::unknown(unreadable); items.len()]);
        }
        let mut layers: Vec<&LayerId> = Vec::new();
        // The envs that forget each layer.
        let mut envs: BTreeMap<&LayerId, BTreeSet<&EnvName>> = BTreeMap::new();
        for what in items {
            let layer = what.layer().ok_or_else(|| unexpected!("no layer"))?;
            layers.push(layer);
            if let GcTarget::Snapshot { .. } = what {
                envs.insert(layer, BTreeSet::new());
            }
        }
        for (name, record) in &users.records {
            for snapshot in &record.snapshots {
                if let Some(own) = envs.get_mut(&snapshot.layer) {
                    own.insert(name);
                }
            }
        }
        let mut removals = Vec::new();
        let mut rest = layers.as_slice();
        while !rest.is_empty() {
            let mut locked: BTreeSet<&EnvName> = BTreeSet::new();
            let few = rest.iter().take_while(|layer| {
                locked.extend(envs.get(**layer).into_iter().flatten());
                locked.len() <= MOST_LOCKED
            });
            let (now, later) = rest.split_at(few.count().max(1));
            let done = self.forget_and_remove(now, &users, &envs, keep_last);
            removals.extend(done.unwrap_or_else(|error| vec![Removal::failed(&error); now.len()]));
            rest = later;
        }
        Ok(removals)
    }

    /// Removes layers that these `envs` have forgotten, unless one of them needs the layer by now.
    fn forget_and_remove(
        &self,
        layers: &[&LayerId],
        users: &Users,
        envs: &BTreeMap<&LayerId, BTreeSet<&EnvName>>,
        keep_last: usize,
    ) -> Result<Vec<Removal>> {
        let mut named: BTreeMap<&EnvName, BTreeSet<&LayerId>> = BTreeMap::new();
        for layer in layers {
            for env in envs.get(*layer).into_iter().flatten() {
                named.entry(*env).or_default().insert(*layer);
            }
        }
        let mut stays: BTreeMap<&LayerId, Removal> = BTreeMap::new();
        // All envs stay locked until the layers are gone, and none forgets a layer that another one keeps.
        let mut locked = Vec::new();
        for (name, own) in &named {
            match self.lock_idle(name) {
                Ok(env) => locked.push((env, own)),
                Err(Removal::Gone) => {}
                Err(why) => stays.extend(own.iter().map(|layer| (*layer, why.clone()))),
            }
        }
        for (env, own) in &locked {
            match env.kept(keep_last) {
                Ok(kept) => stays.extend(layers.iter().filter_map(|layer| {
                    let why = kept.get(*layer)?.to_string();
                    Some((*layer, Removal::Stays(why)))
                })),
                Err(error) => {
                    let failed = Removal::failed(&error);
                    stays.extend(own.iter().map(|layer| (*layer, failed.clone())));
                }
            }
        }
        let files = self.locked()?;
        stays.extend(layers.iter().filter_map(|layer| {
            let name = users.layers.get(*layer)?.locked_name();
            Some((*layer, stays_locked(&files, name)?))
        }));
        let mut going: BTreeSet<&LayerId> = layers.iter().copied().collect();
        going.retain(|layer| !stays.contains_key(layer));
        let ours: BTreeSet<&EnvName> = locked.iter().map(|(env, _)| env.name()).collect();
        let needed = self.take_needed(&mut going, users, &ours)?;
        let needed = needed.into_iter();
        stays.extend(needed.map(|layer| (layer, Removal::needed_by_now())));
        let mut candidates: BTreeSet<LayerId> = going.into_iter().cloned().collect();
        let mut changed = Vec::new();
        for (mut env, own) in locked {
            let forgotten = env.forget(|known| {
                let layer = &known.layer;
                known.origin == Origin::Step && own.contains(layer) && !stays.contains_key(layer)
            });
            match forgotten {
                Ok(below) => {
                    candidates.extend(below);
                    changed.push(env);
                }
                Err(error) => {
                    let failed = Removal::failed(&error);
                    stays.extend(own.iter().map(|layer| (*layer, failed.clone())));
                }
            }
        }
        let candidates: Vec<LayerId> = candidates.into_iter().collect();
        let done = self.remove_unused_layers(&candidates);
        // After a failure, the next command tries again.
        if done.is_ok() {
            for env in &changed {
                journal::clear(&env.directory)?;
            }
        }
        let removals = layers.iter().map(|layer| match stays.remove(*layer) {
            Some(stays) => stays,
            None if !self.layer_dir(layer).exists() => Removal::Gone,
            None => match &done {
                Ok(()) => Removal::needed_by_now(),
                Err(error) => Removal::failed(error),
            },
        });
        Ok(removals.collect())
    }

    /// Takes the layers out of `going` that running commands or other envs than `ours` need, and those below a layer
    /// that stays. Returns them.
    fn take_needed<'a>(
        &self,
        going: &mut BTreeSet<&'a LayerId>,
        users: &Users,
        ours: &BTreeSet<&EnvName>,
    ) -> Result<Vec<&'a LayerId>> {
        let records = users.records.iter();
        let others = records.filter(|(name, _)| !ours.contains(*name));
        let recorded = others.flat_map(|(_, record)| record.layers());
        let leased = users.leases.values().flat_map(|lease| &lease.layers);
        let needed: BTreeSet<&LayerId> = recorded.chain(leased).collect();
        let mut staying = self.layer_ids()?;
        staying.retain(|id| !going.contains(id) || needed.contains(id));
        let staying = with_parents(&staying, |id| users.layers.get(id));
        let taken = going.iter().copied().filter(|id| staying.contains(*id));
        let taken: Vec<&LayerId> = taken.collect();
        going.retain(|id| !staying.contains(*id));
        Ok(taken)
    }

    fn remove_images(&self, items: &[&GcTarget]) -> Result<Vec<Removal>> {
        let locked = self.locked()?;
        let _lock = self.lock("gc")?;
        let users = self.users()?;
        let layers = users.layers.values().map(|layer| &layer.image_key);
        let records = users.records.values().map(|record| &record.image_key);
        let leases = users.leases.values().map(|lease| &lease.image);
        let used: BTreeSet<&ImageKey> = layers.chain(records).chain(leases).collect();
        let mut references: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for name in names(&self.root.join("images/refs"))? {
            let path = self.root.join("images/refs").join(&name);
            if let Some(key) = named_image(&path)? {
                references.entry(key).or_default().push(path);
            }
        }
        let remove = |what: &GcTarget| -> Result<Removal> {
            let GcTarget::Image { image: key } = what else {
                return Err(unexpected!("no image"));
            };
            if let Some(stays) = stays_locked(&locked, key) {
                return Ok(stays);
            }
            if let Some(unreadable) = users.unreadable.first() {
                return Ok(Removal::unknown(unreadable));
            }
            if used.contains(key) {
                return Ok(Removal::needed_by_now());
            }
            // References go first: they must not name a missing image.
            for path in references.get(key.as_str()).into_iter().flatten() {
                if named_image(path)?.as_deref() == Some(key.as_str()) {
                    fs::remove_file(path)?;
                }
            }
            self.discard(&self.image_dir(key))?;
            Ok(Removal::Gone)
        };
        let removals = items.iter().map(|what| Removal::of(remove(what)));
        Ok(removals.collect())
    }

    fn remove_downloads(&self, items: &[&GcTarget]) -> Result<Vec<Removal>> {
        let Some(_alone) = Lock::try_exclusive(&self.blobs_lock())? else {
            let stays = Removal::Stays("a command needs downloads".to_owned());
            return Ok(vec![stays; items.len()]);
        };
        let locked = self.locked()?;
        let remove = |what: &GcTarget| -> Result<Removal> {
            let GcTarget::Download { blob } = what else {
                return Err(unexpected!("no download"));
            };
            if let Some(stays) = stays_locked(&locked, blob) {
                return Ok(stays);
            }
            self.discard(&self.blob(blob))?;
            Ok(Removal::Gone)
        };
        let removals = items.iter().map(|what| Removal::of(remove(what)));
        Ok(removals.collect())
    }

    fn remove_stray(&self, path: &str) -> Result<Removal> {
        let _lock = self.lock("gc")?;
        let place = self.root.join(path);
        // A new image may have replaced the rest of an old one.
        if place.exists() && !path.starts_with("images/tmp-") && !is_rest(&place) {
            return Ok(Removal::needed_by_now());
        }
        self.discard(&place)?;
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
    /// Returns the layers that the env keeps, with the reasons. Fails if one of them cannot be read.
    fn kept(&self, keep_last: usize) -> Result<BTreeMap<LayerId, Why>> {
        let mut kept: BTreeMap<LayerId, Why> = BTreeMap::new();
        for (top, why) in tops(self.name(), self.known_record()?, keep_last) {
            let mut next = Some(top);
            while let Some(id) = next.filter(|id| !kept.contains_key(id)) {
                let layer = self.store.layer(&id)?;
                next = layer.ok_or_else(|| missing(&id))?.parent;
                kept.insert(id, why.clone());
            }
        }
        Ok(kept)
    }

    /// Removes a part of the env, if it still may be removed.
    fn drop_item(&mut self, what: &GcTarget) -> Result<Removal> {
        match what {
            GcTarget::Failed { tree, .. } => self.drop_failed(tree),
            GcTarget::Logs { run, .. } => self.drop_logs(run),
            GcTarget::Project { volume, path, .. } => self.prune_build_tree(volume, path),
            _ => Err(unexpected!("no part of an env")),
        }
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
mod tests;
