//! Owns an env under its lock: every change to its data on disk, and the cleanup after a killed command.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use jiff::Timestamp;

use super::ephemeral::{Fate, Reaped};
use super::journal::{self, JournalEntry};
use super::lease::LEASE;
use super::snapshot::push_snapshot;
use super::{Layer, Lock, Store, lock, no_env, removal};
use crate::engine::hold::ContainerRecord;
use crate::engine::session::{self, Retirement};
use crate::engine::{Root, View};
use crate::plan::ids::{EnvName, LayerId, StepKey, TreeId};
use crate::plan::jobs::Past;
use crate::plan::record::Record;
use crate::plan::resolve::Spec;
use crate::sys::atomic::{self, Survives, random_id};
use crate::sys::error::{Kind, Result, ResultExt as _, damaged, encoded, if_exists};
use crate::tree::{self, Method};

/// An env whose lock this process holds.
#[derive(Debug)]
pub struct LockedEnv<'a> {
    pub(super) store: &'a Store,
    name: EnvName,
    pub(super) directory: PathBuf,
    lock: Lock,
    pub(super) record: Option<Record>,
    /// Set if taking the lock removed the env because its owning command is gone.
    pub(super) reaped: Option<Reaped>,
}

/// How long an idle container may take to end.
const RETIREMENT: Duration = Duration::from_secs(30);
/// How often to ask a container whether it is idle.
const ASK: Duration = Duration::from_millis(100);

/// Takes the lock of the env in `directory` for `verb`. Ends an idle container and waits for it. Unless `wait` is
/// zero, also waits for a container that outlived its command.
pub(super) fn lock_alone(
    directory: &Path,
    name: &EnvName,
    verb: &str,
    wait: Duration,
) -> Result<Lock> {
    let (path, what) = (lock::env_lock(directory), env_named(name));
    let begun = Instant::now();
    let mut deadline = begun + wait;
    let mut piece = Duration::ZERO;
    let mut waiting = lock::Wait::begin();
    loop {
        match Lock::exclusive(&path, &what, verb, piece) {
            Err(error) if error.kind() == Kind::Busy => {
                match session::retire(&directory.join("run"))? {
                    Retirement::Ends => deadline = deadline.max(Instant::now() + RETIREMENT),
                    Retirement::Silent if !wait.is_zero() && lock::signer_is_gone(&path) => {
                        deadline = deadline.max(begun + RETIREMENT);
                    }
                    Retirement::Silent | Retirement::Refused => {}
                }
                if Instant::now() >= deadline {
                    return Err(error);
                }
                waiting.tell(&path, &what)?;
            }
            other => return other,
        }
        piece = ASK.min(deadline.saturating_duration_since(Instant::now()));
    }
}

pub(crate) fn env_named(name: &EnvName) -> String {
    format!("env `{name}`")
}

const SPEC: &str = "spec.toml";
/// Size of `metrics.jsonl`, in bytes, from which the older half of its rows goes: some ten thousand rows.
pub(super) const MOST_METRICS: u64 = 4 << 20;

impl Store {
    pub fn spec(&self, name: &EnvName) -> Result<Spec> {
        let path = self.env_dir(name).join(SPEC);
        let text = if_exists(fs::read_to_string(&path))?.ok_or_else(|| {
            let record = self.record(name).ok().flatten();
            let up = record.map(|record| record.up_command());
            not_found!("env `{name}` has no spec yet")
                .help(up.unwrap_or_else(|| format!("rockenv up PROFILE --name {name}")))
        })?;
        toml::from_str(&text).map_err(damaged(&path))
    }

    /// Locks an env for `verb`, finishing or undoing the work of a killed command.
    pub fn lock_env(&self, name: &EnvName, verb: &str, wait: Duration) -> Result<LockedEnv<'_>> {
        let directory = self.env_dir(name);
        fs::create_dir_all(&directory).map_err(|error| lock::read_only(&directory, error))?;
        let lock = lock_alone(&directory, name, verb, wait)?;
        self.with_lock(name, lock)
    }

    fn with_lock(&self, name: &EnvName, lock: Lock) -> Result<LockedEnv<'_>> {
        let mut env = LockedEnv {
            store: self,
            name: name.clone(),
            directory: self.env_dir(name),
            lock,
            record: self.record(name)?,
            reaped: None,
        };
        env.recover()
            .context(|| format!("cannot clean up after the last command on env `{name}`"))?;
        Ok(env)
    }

    /// Locks an existing env, unless another process holds it, even an idle container.
    pub fn lock_unheld(&self, name: &EnvName, verb: &str) -> Result<LockedEnv<'_>> {
        self.known(name)?;
        let path = lock::env_lock(&self.env_dir(name));
        let lock = Lock::exclusive(&path, &env_named(name), verb, Duration::ZERO)?;
        let env = self.with_lock(name, lock)?;
        env.known_record()?;
        Ok(env)
    }

    pub fn lock_known(&self, name: &EnvName, verb: &str, wait: Duration) -> Result<LockedEnv<'_>> {
        self.known(name)?;
        let env = self.lock_env(name, verb, wait)?;
        // Another command may have removed the env before this one took the lock.
        env.known_record()?;
        Ok(env)
    }
}

impl LockedEnv<'_> {
    pub fn name(&self) -> &EnvName {
        &self.name
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the directory for files that exist only while a container runs.
    pub fn run_dir(&self) -> PathBuf {
        self.directory.join("run")
    }

    /// Returns the lock's descriptor, for the container's holder.
    pub fn lock_fd(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Returns the record; fails if the env does not exist.
    pub fn known_record(&self) -> Result<&Record> {
        self.record
            .as_ref()
            .ok_or_else(|| no_env(&self.name).help("rockenv ls"))
    }

    /// Replaces the record on disk and in memory, for a command that uses the env.
    pub fn commit(&mut self, mut record: Record) -> Result<()> {
        record.used = Timestamp::now();
        self.put(record)
    }

    /// Replaces the record with one that adds a step's layer and still names every object of the old one. After a
    /// power failure, the next `up` finds the layer by its key.
    pub(super) fn commit_step(&mut self, mut record: Record) -> Result<()> {
        record.used = Timestamp::now();
        self.replace_record(record, Survives::Either)
    }

    /// Replaces the record during cleanup, which does not count as a use.
    pub(super) fn put(&mut self, record: Record) -> Result<()> {
        self.replace_record(record, Survives::New)
    }

    fn replace_record(&mut self, record: Record, survives: Survives) -> Result<()> {
        let path = self.directory.join("record.json");
        atomic::replace(&path, &atomic::json(&path, &record)?, survives)?;
        removal::clear_removal_marks(&self.directory)?;
        self.record = Some(record);
        Ok(())
    }

    /// Writes the resolved spec, for people and for `exec`.
    pub fn save_spec(&self, spec: &Spec) -> Result<()> {
        let text = encoded(toml::to_string_pretty(spec), "the spec")?;
        atomic::write(&self.directory.join(SPEC), text.as_bytes())
    }

    /// Appends a row to `metrics.jsonl`. Every `up` reads all rows, so a long file loses its older half.
    pub fn add_metrics(&self, row: &Past) -> Result<()> {
        let line = encoded(serde_json::to_vec(row), "metrics")?;
        let path = self.directory.join("metrics.jsonl");
        let file = fs::OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(&path)?;
        atomic::append_line(&file, &line)?;
        if file.metadata()?.len() > MOST_METRICS {
            let rows = fs::read(&path)?;
            let older = rows.len() / 2;
            let end = rows[older..].iter().position(|byte| *byte == b'\n');
            let newer = &rows[end.map_or(0, |end| older + end + 1)..];
            // The row is there. On a full disk, a later run tries again.
            drop(atomic::replace(&path, newer, Survives::Either));
        }
        Ok(())
    }

    /// Copies a file from another env's directory, if it is there.
    pub(super) fn copy_file(&self, from: &Self, name: &str) -> Result<()> {
        match if_exists(fs::read(from.directory.join(name)))? {
            Some(text) => atomic::write(&self.directory.join(name), &text),
            None => Ok(()),
        }
    }

    /// Changes a copy of the record and commits it.
    pub fn update(&mut self, change: impl FnOnce(&mut Record)) -> Result<()> {
        let mut record = self.known_record()?.clone();
        change(&mut record);
        self.commit(record)
    }

    /// Ends running processes, finishes the journal, and discards data that the record does not name. Discards the
    /// whole env if its owning command is gone.
    fn recover(&mut self) -> Result<()> {
        let ended = ContainerRecord::recover(&self.run_dir())?;
        self.apply_journal(ended.is_some())?;
        if let Fate::Left(owner) = self.fate()? {
            self.clear()?;
            self.reaped = Some(Reaped {
                env: self.name.clone(),
                owner,
                ended: ended.unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// Finishes what the journal and the record describe. `ended`: whether a killed command's container was ended.
    fn apply_journal(&mut self, ended: bool) -> Result<()> {
        let run = self.run_dir();
        remove(&self.directory.join(LEASE))?;
        if self.resume_clearing()? {
            return Ok(());
        }
        for entry in journal::read(&self.directory)? {
            match entry {
                JournalEntry::Remove { id, layers } => return self.finish_removal(&id, &layers),
                JournalEntry::Forget { layers } => self.store.remove_unused_layers(&layers)?,
                // A failed move must not block the env: ninja rebuilds a project without its stamps.
                JournalEntry::Expunge { volume, project } => {
                    drop(self.store.take_project(&volume, project.as_ref()));
                }
                JournalEntry::Freeze { tree, snapshot } => {
                    let layer = self.store.layer(&snapshot.layer)?;
                    let published = layer.filter(|layer| layer.tree.as_ref() == Some(&tree));
                    if let Some(mut record) = self.record.clone()
                        && let Some(layer) = published
                        && record.trees().any(|known| *known == tree)
                    {
                        record.used = record.used.max(snapshot.created);
                        let unsaved = snapshot.key.is_none() && !self.store.freezes_volumes();
                        let head = record.head.clone();
                        push_snapshot(&mut record, snapshot, layer.history, unsaved);
                        if head.tree.as_ref() != Some(&tree) {
                            // A snapshot of a failed step's tree leaves the env where it is.
                            (record.head, record.failed) = (head, None);
                        }
                        self.put(record)?;
                    }
                }
            }
        }
        journal::clear(&self.directory)?;
        self.forget_lost_tree()?;
        if ended {
            self.store.discard(&run)?;
        }
        // Temporary directories of a container that outlived its command.
        let is_temporary = |name: &str| name != "root" && name != "control.sock";
        self.store.discard_in(&run, is_temporary)?;
        self.remove_strays()?;
        // Files that a killed command did not finish writing, and those of a running `join_attempt`, which expects it.
        let is_unfinished = |name: &str| name.starts_with(atomic::PREFIX);
        self.store.discard_in(&self.directory, is_unfinished)?;
        self.collect_garbage()
    }

    /// Drops a live tree whose files are gone from the record: no command could use the env with it. If the tree
    /// became a layer that the record does not name, leaves the record to `fsck --repair`, which adds the layer.
    fn forget_lost_tree(&mut self) -> Result<()> {
        let Some(record) = self.record.as_ref().filter(|known| known.service.is_none()) else {
            return Ok(());
        };
        let Some(tree) = &record.head.tree else {
            return Ok(());
        };
        let directory = self.tree_dir(tree);
        let became = |layer: &Layer| layer.tree.as_ref() == Some(tree);
        if tree::is_there(&self.store.tree_files(&directory))?
            || self.store.layers()?.iter().any(became)
        {
            return Ok(());
        }
        let mut record = record.clone();
        record.head.drop_tree();
        self.put(record)
    }

    pub(super) fn collect_garbage(&self) -> Result<()> {
        let trees = self.record.iter().flat_map(Record::trees);
        let trees: BTreeSet<&str> = trees.map(TreeId::as_str).collect();
        let directory = self.directory.join("trees");
        let is_unused = |name: &str| !trees.contains(name);
        self.store.discard_in(&directory, is_unused)?;
        if let Some(record) = &self.record {
            self.discard_volumes(&record.id, &record.head.volumes.values().cloned().collect())?;
        }
        Ok(())
    }

    /// Returns the directory of a live tree, or of that of a failed step.
    pub(super) fn tree_dir(&self, tree: &TreeId) -> PathBuf {
        self.store.tree_dir(&self.name, tree)
    }

    /// Creates a live tree on `layer` without adding it to the record. At a service, it becomes a container once a
    /// command runs on it.
    pub fn checkout_tree(&self, layer: Option<&LayerId>) -> Result<TreeId> {
        let record = self.known_record()?;
        let (store, id) = (self.store, TreeId::try_from(random_id()?)?);
        let directory = self.tree_dir(&id);
        fs::create_dir_all(&directory)?;
        if let Some(socket) = &record.service {
            store.note_tree(&directory, socket, &id)?;
            return Ok(id);
        }
        let below = match layer {
            Some(layer) => store.tree_files(&store.layer_dir(layer)),
            None => store.known_image_root(&record.image_key)?,
        };
        let files = store.tree_files(&directory);
        match store.method() {
            Method::Overlay => {
                let upper = tree::overlay::Upper {
                    diff: &files,
                    work: &directory.join("work"),
                };
                tree::overlay::create_upper(upper, &below)?;
            }
            method @ (Method::Btrfs | Method::Reflink) => {
                tree::clone_tree(method, &below, &files)?;
            }
        }
        Ok(id)
    }

    /// Returns the env's live tree, creating it if necessary.
    pub fn live_tree(&mut self) -> Result<TreeId> {
        let head = self.known_record()?.head.clone();
        if let Some(tree) = head.tree {
            return Ok(tree);
        }
        let tree = self.checkout_tree(head.layer.as_ref())?;
        let made = tree.clone();
        self.update(|record| record.head.tree = Some(made))?;
        Ok(tree)
    }

    /// Returns the root that an engine mounts for `tree` on `layer`. `key` is that of the step that runs on the tree.
    pub fn root(
        &self,
        tree: &TreeId,
        layer: Option<&LayerId>,
        key: Option<&StepKey>,
    ) -> Result<Root> {
        let record = self.known_record()?;
        if let Some(socket) = &record.service {
            return Ok(Root::Service(self.place(socket, tree, layer, key)?));
        }
        let directory = self.tree_dir(tree);
        let files = self.store.tree_files(&directory);
        match self.store.method() {
            Method::Overlay => {
                let work = directory.join("work");
                // Absent if a freeze was interrupted before its rename.
                fs::create_dir_all(&work)?;
                Ok(Root::Overlay(View {
                    layers: self.store.lowers(layer, &record.image_key)?,
                    upper: files,
                    work,
                }))
            }
            Method::Btrfs | Method::Reflink => Ok(Root::Directory(files)),
        }
    }
}

pub(super) fn remove(file: &Path) -> Result<()> {
    if_exists(fs::remove_file(file)).map(drop)
}
