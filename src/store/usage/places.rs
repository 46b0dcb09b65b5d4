//! Owns the list of the store's directories to count: their purpose, their users, and their order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::report::{Class, UsageReport, UsageRow};
use super::service::holdings;
use super::subdirectories;
use crate::plan::ids::{EnvName, LayerId, VolumeId};
use crate::plan::layer::with_parents;
use crate::plan::resolve::{VolumeKind, VolumeSource};
use crate::store::source::Repository;
use crate::store::{Layer, Record, Store};
use crate::sys::error::Result;
use crate::sys::host::{names_in as names, space};
use crate::tree::measure::{MeasureOptions, Root, Usage, scan};
use crate::tree::{Method, mounts_below};

/// The owner of everything that no `rm` deletes.
const KEPT: u32 = 0;
/// The owner of everything that no env needs.
const NOBODY: u32 = u32::MAX;

/// Which content of build volumes, caches, sources and outputs gets rows of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inside {
    /// The parts of TheRock's build trees.
    Parts,
    /// Directories, down to this depth.
    Directories(usize),
}

/// Counts the whole store, or with `only` everything that concerns one env: its own and what it shares.
///
/// Blocks that several directories share count in the first row that has them: images, then layers of several envs,
/// then live build volumes, then the rest of a single env's layers. So the tree that a build works in is shown in
/// full, not an old state of it.
pub(crate) fn count(store: &Store, only: Option<&str>, inside: Inside) -> Result<UsageReport> {
    let mut places = Places {
        store,
        inside,
        elsewhere: mounts_below(store.root()),
        envs: Vec::new(),
        layers: BTreeMap::new(),
        mounted: BTreeMap::new(),
        roots: Vec::new(),
        rows: Vec::new(),
    };
    // The store itself may be a mount.
    places.elsewhere.retain(|mount| mount != store.root());
    for name in store.env_names()? {
        if let Ok(Some(record)) = store.record(&name) {
            places.mounts_of(&name);
            places.envs.push((name.into(), record));
        }
    }
    places.layers = used_layers(store, &places.envs)?;
    places.images();
    let (shared, own) = places.bottom_up();
    places.frozen(shared);
    places.volumes();
    places.frozen(own);
    places.trees();
    // Needed even for one env: what it shares with these is not its own.
    places.shared_directories();
    let extents = store.method() != Method::Overlay;
    let before = space(store.root())?;
    let usage = scan(&places.roots, &MeasureOptions::with_extents(extents));
    let mut report = places.finish(usage, only, extents)?;
    // Another command may have deleted counted files by now.
    report.file_system.used = report.file_system.used.max(before.used);
    Ok(report)
}

/// The directories to count, in the order that decides which row owns shared bytes.
struct Places<'a> {
    store: &'a Store,
    inside: Inside,
    /// Mount points in the store.
    elsewhere: Vec<PathBuf>,
    envs: Vec<(String, Record)>,
    layers: BTreeMap<LayerId, UsedLayer>,
    /// The envs that mount a cache or a source, by its directory.
    mounted: BTreeMap<PathBuf, Vec<String>>,
    roots: Vec<Root>,
    rows: Vec<UsageRow>,
}

/// A layer and the envs that need it.
pub(super) struct UsedLayer {
    /// Its description, if it can be read.
    pub(super) layer: Option<Layer>,
    pub(super) envs: Vec<String>,
}

fn used_layers(store: &Store, envs: &[(String, Record)]) -> Result<BTreeMap<LayerId, UsedLayer>> {
    let mut found = BTreeMap::new();
    for id in store.layer_ids()? {
        let (layer, envs) = (store.layer(&id).ok().flatten(), Vec::new());
        found.insert(id, UsedLayer { layer, envs });
    }
    for (name, record) in envs {
        let needed = with_parents(record.layers(), |id| found.get(id)?.layer.as_ref());
        let needed: Vec<LayerId> = needed.into_iter().cloned().collect();
        for id in needed {
            if let Some(used) = found.get_mut(&id) {
                used.envs.push(name.clone());
            }
        }
    }
    Ok(found)
}

impl Places<'_> {
    fn add(&mut self, path: PathBuf, owner: u32, class: Class, name: String, envs: Vec<String>) {
        // Another disk may be mounted at this path. The walk of the rest reports that this disk is left out.
        if self.elsewhere.iter().any(|mount| path.starts_with(mount)) {
            return;
        }
        let content = match class {
            Class::Cache => self.store.cache_content(&name),
            _ => None,
        };
        let row = UsageRow {
            content,
            ..UsageRow::new(class, name, envs)
        };
        match class {
            Class::Build | Class::Cache | Class::Source | Class::Output => {
                self.content(path, owner, row);
            }
            _ => self.push([path], owner, row),
        }
    }

    /// Adds a directory whose content may get rows.
    fn content(&mut self, path: PathBuf, owner: u32, mut row: UsageRow) {
        let built =
            matches!(row.class, Class::Build | Class::Frozen) && subdirectories::is_therock(&path);
        match self.inside {
            Inside::Parts if built => {
                for (part, directories) in subdirectories::parts(&path) {
                    let row = UsageRow {
                        part: Some(part),
                        content: Some(part.note().to_owned()),
                        ..row.clone()
                    };
                    self.push(directories, owner, row);
                }
            }
            Inside::Parts => {}
            Inside::Directories(depth) => {
                for found in subdirectories::directories(&path, depth) {
                    let known = found.part.filter(|_| built && found.is_part);
                    let row = UsageRow {
                        inside: found.path.strip_prefix(&path).ok().map(Path::to_owned),
                        content: known.map(|part| part.note().to_owned()),
                        ..row.clone()
                    };
                    self.push([found.path], owner, row);
                }
            }
        }
        if built {
            row.content = Some("TheRock's build tree".to_owned());
        }
        self.push([path], owner, row);
    }

    fn push(&mut self, paths: impl IntoIterator<Item = PathBuf>, owner: u32, row: UsageRow) {
        let at = u32::try_from(self.rows.len()).unwrap_or(u32::MAX);
        let roots = paths.into_iter().map(|path| Root::new(path, at));
        self.roots.extend(roots.map(|root| root.owned_by(owner)));
        self.rows.push(row);
    }

    /// Records the store's directories that an env mounts and does not own. An unresolved env mounts none.
    fn mounts_of(&mut self, env: &EnvName) {
        let spec = self.store.spec(env);
        for volume in spec.iter().flat_map(|spec| &spec.volumes) {
            let directory = match (volume.kind, &volume.source) {
                (VolumeKind::Cache, _) => self.store.root().join("caches").join(&volume.name),
                (VolumeKind::Source, VolumeSource::Git(git)) => {
                    Repository::new(&volume.name, git).directory(self.store)
                }
                (VolumeKind::Source, VolumeSource::Path(_) | VolumeSource::Store)
                | (VolumeKind::Build | VolumeKind::Output | VolumeKind::Host, _) => continue,
            };
            let users = self.mounted.entry(directory).or_default();
            if users.last().is_none_or(|last| *env != **last) {
                users.push(env.to_string());
            }
        }
    }

    /// Returns the names of the envs for which `needs` holds.
    fn who(&self, needs: impl Fn(&Record) -> bool) -> Vec<String> {
        let envs = self.envs.iter().filter(|(_, record)| needs(record));
        envs.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the owner of data that these envs need, if `rm` would delete it.
    fn owner(&self, envs: &[String]) -> u32 {
        match envs {
            [] => NOBODY,
            [one] => self
                .envs
                .iter()
                .zip(KEPT + 1..)
                .find(|((name, _), _)| name == one)
                .map_or(KEPT, |(_, number)| number),
            _ => KEPT,
        }
    }

    fn images(&mut self) {
        let directory = self.store.root().join("images");
        for key in names(&directory) {
            if key == "refs" {
                continue;
            }
            let path = directory.join(&key);
            let users = self.who(|record| *record.image_key == *key);
            let known = key.parse().ok();
            match known.and_then(|key| self.store.image(&key).ok()?) {
                Some(image) => self.add(path, KEPT, Class::Image, image.name, users),
                None => self.add(path, NOBODY, Class::Unused, key, Vec::new()),
            }
        }
    }

    /// Returns the layers from the bottom up, those that several envs need apart from the rest. A layer's `flat`
    /// directory consists of hard links to layers below it, which at least as many envs need.
    fn bottom_up(&self) -> (Vec<LayerId>, Vec<LayerId>) {
        let layer = |id: &LayerId| self.layers.get(id)?.layer.as_ref();
        let mut order: Vec<_> = self
            .layers
            .iter()
            .map(|(id, used)| (used.envs.is_empty(), with_parents([id], layer).len(), id))
            .collect();
        order.sort();
        let ids = order.into_iter().map(|(_, _, id)| id.clone());
        ids.partition(|id| self.layers[id].envs.len() > 1)
    }

    fn frozen(&mut self, layers: Vec<LayerId>) {
        for id in layers {
            let UsedLayer { layer, envs } = &self.layers[&id];
            let title = layer.as_ref().map(|layer| layer.title.clone());
            let (title, users) = (title.unwrap_or_else(|| id.to_string()), envs.clone());
            let path = self.store.layer_dir(&id);
            let owner = self.owner(&users);
            if users.is_empty() {
                self.add(path, owner, Class::Unused, title, users);
                continue;
            }
            let volumes = path.join("volumes");
            for name in names(&volumes) {
                let row = UsageRow {
                    snapshot: Some(title.clone()),
                    ..UsageRow::new(Class::Frozen, name.clone(), users.clone())
                };
                self.content(volumes.join(name), owner, row);
            }
            self.add(path, owner, Class::Snapshots, title, users);
        }
    }

    fn trees(&mut self) {
        let directory = self.store.root().join("envs");
        for name in names(&directory) {
            let path = directory.join(&name);
            let found = self.envs.iter().find(|(known, _)| *known == name);
            let Some((_, record)) = found else {
                // Except for its lock, which stays, these are leftovers of a killed command.
                for entry in names(&path).into_iter().filter(|entry| entry != "lock") {
                    let place = format!("{name}/{entry}");
                    self.add(path.join(entry), NOBODY, Class::Unused, place, Vec::new());
                }
                continue;
            };
            let (live, failed) = (record.head.tree.clone(), record.failed.clone());
            let users = vec![name];
            let owner = self.owner(&users);
            for tree in names(&path.join("trees")) {
                let (class, title) = match &failed {
                    _ if live.as_deref() == Some(tree.as_str()) => (Class::Live, String::new()),
                    Some(failed) if *failed.tree == *tree => {
                        (Class::Failed, failed.step.to_string())
                    }
                    // A running step's tree, or garbage: the directory does not show which.
                    _ => (Class::Live, tree.clone()),
                };
                let tree = path.join("trees").join(tree);
                self.add(tree, owner, class, title, users.clone());
            }
            if path.join("logs").exists() {
                let logs = path.join("logs");
                self.add(logs, owner, Class::Logs, String::new(), users.clone());
            }
            self.add(path, owner, Class::Records, String::new(), users);
        }
    }

    fn volumes(&mut self) {
        let mut known: BTreeMap<VolumeId, (String, String)> = BTreeMap::new();
        for (env, record) in &self.envs {
            for (volume, id) in &record.head.volumes {
                known.insert(id.clone(), (env.clone(), volume.to_string()));
            }
        }
        for id in names(&self.store.root().join("volumes")) {
            let path = self.store.root().join("volumes").join(&id);
            match known.remove(id.as_str()) {
                Some((env, volume)) => {
                    let users = vec![env];
                    let owner = self.owner(&users);
                    self.add(path, owner, Class::Build, volume, users);
                }
                None => self.add(path, NOBODY, Class::Unused, id, Vec::new()),
            }
        }
    }

    /// Adds directories that belong to no env, and the rest of the store.
    fn shared_directories(&mut self) {
        let root = self.store.root().to_owned();
        for (directory, class) in [("caches", Class::Cache), ("sources", Class::Source)] {
            for name in names(&root.join(directory)) {
                let path = root.join(directory).join(&name);
                // A source's lock lies beside it.
                if path.is_dir() {
                    let users = self.mounted.remove(&path).unwrap_or_default();
                    self.add(path, KEPT, class, name, users);
                }
            }
        }
        for env in names(&root.join("outputs")) {
            for name in names(&root.join("outputs").join(&env)) {
                let path = root.join("outputs").join(&env).join(&name);
                self.add(path, KEPT, Class::Output, name, vec![env.clone()]);
            }
        }
        for (path, owner, class) in [
            (root.join("blobs"), KEPT, Class::Blobs),
            (root.join("trash"), NOBODY, Class::Trash),
            (root, KEPT, Class::Other),
        ] {
            self.add(path, owner, class, String::new(), Vec::new());
        }
    }

    fn finish(
        mut self,
        mut usage: Usage,
        only: Option<&str>,
        extents: bool,
    ) -> Result<UsageReport> {
        // Ignore directories that another command has deleted meanwhile.
        let known = usage.problems.len();
        usage
            .problems
            .retain(|problem| problem.error.kind() != std::io::ErrorKind::NotFound);
        let gone = known - usage.problems.len();
        usage.unreadable = usage.unreadable.saturating_sub(gone as u64);
        for (row, at) in self.rows.iter_mut().zip(0..) {
            row.size = usage.class(at);
        }
        let mut freed: BTreeMap<String, u64> = BTreeMap::new();
        for row in self.rows.iter().filter(|row| row.class.is_removed()) {
            if let [env] = row.envs.as_slice() {
                *freed.entry(env.clone()).or_default() += row.size.exclusive;
            }
        }
        let (mut at_services, silent_services) = holdings(self.store, &self.envs, &self.layers)?;
        if let Some(env) = only {
            let is_users = |envs: &[String]| envs.iter().any(|user| user == env);
            self.rows.retain(|row| is_users(&row.envs));
            at_services.retain(|held| is_users(&held.envs));
            freed.retain(|name, _| name == env);
        }
        Ok(UsageReport {
            at_services,
            silent_services,
            schema: "rockenv/du/1",
            store: self.store.root().to_owned(),
            env: only.map(str::to_owned),
            method: self.store.method(),
            total: self.rows.iter().map(|row| row.size).sum(),
            rows: self.rows,
            freed,
            file_system: space(self.store.root())?,
            extents,
            unshared: usage.unshared,
            unreadable: usage.unreadable,
            problems: usage
                .problems
                .iter()
                .map(|problem| format!("{}: {}", problem.path.display(), problem.error))
                .collect(),
            mounts_skipped: usage.mounts_skipped,
        })
    }
}
