//! Owns where the store's space went: which directories there are, what each is for, and who needs it.
//!
//! Every byte is in exactly one row. A row belongs to an env where that env alone needs it; a layer that several envs
//! stand on is in a row of its own that names them. What `rm` would free is told beside, since blocks may be shared
//! between rows too, by hard links and clones: they are in the row of the oldest.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use super::service::{Held, holdings};
use super::{Options, Root, Sums, Usage, inside, scan};
use crate::error::{Result, ResultExt as _};
use crate::rootfs::Method;
use crate::store::{Layer, Record, Store};

/// What a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Frozen layers.
    Snapshots,
    /// The tree that `exec` and `shell` write to.
    Live,
    /// Live build volumes.
    Build,
    /// The tree of a failed step.
    Failed,
    /// Logs of steps.
    Logs,
    /// An env's record and what else is in its directory.
    Records,
    /// Base images.
    Image,
    /// Caches.
    Cache,
    /// Sources.
    Source,
    /// What envs exported.
    Output,
    /// Downloads.
    Blobs,
    /// What waits to be unlinked.
    Trash,
    /// Trees, layers and volumes that no record names.
    Unused,
    /// Everything else below the store's root.
    Other,
}

/// The bytes of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Size {
    /// Length of the files.
    pub apparent: u64,
    /// Space on disk.
    pub allocated: u64,
    /// Space on disk that nothing outside this row's owner holds.
    pub exclusive: u64,
    /// Space on disk that this row uses and another one has counted.
    pub counted_elsewhere: u64,
    /// Files, directories and everything else.
    pub entries: u64,
}

impl From<Sums> for Size {
    fn from(sums: Sums) -> Self {
        Self {
            apparent: sums.apparent,
            allocated: sums.allocated,
            exclusive: sums.exclusive,
            counted_elsewhere: sums.counted_elsewhere,
            entries: sums.entries,
        }
    }
}

impl std::ops::AddAssign for Size {
    fn add_assign(&mut self, other: Self) {
        self.apparent += other.apparent;
        self.allocated += other.allocated;
        self.exclusive += other.exclusive;
        self.counted_elsewhere += other.counted_elsewhere;
        self.entries += other.entries;
    }
}

impl std::iter::Sum for Size {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), |mut sum, size| {
            sum += size;
            sum
        })
    }
}

/// One thing that takes space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// What it is.
    pub class: Class,
    /// Its name: of the snapshot, volume, image, cache or source; empty where there is only one.
    pub name: String,
    /// The directory in it, for a row of a part of it; the row of the whole then holds what is in none of those.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<PathBuf>,
    /// What it is, where names in it tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// The envs that need it; for an output, the env that made it.
    pub envs: Vec<String>,
    /// Its bytes.
    pub size: Size,
}

/// Where the space went.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of this description.
    pub schema: &'static str,
    /// The store's root.
    pub store: PathBuf,
    /// The env, where only one was asked for.
    pub env: Option<String>,
    /// How snapshots are made here.
    pub method: Method,
    /// What was counted, in the order that decides who has shared bytes.
    pub rows: Vec<Row>,
    /// What `rm` would free in the store, by env.
    pub freed: BTreeMap<String, u64>,
    /// What services of containers hold, which is not in the store.
    pub at_services: Vec<Held>,
    /// Services that did not answer, and why.
    pub silent_services: Vec<String>,
    /// The sum of the rows.
    pub total: Size,
    /// The file system.
    pub file_system: FileSystem,
    /// Whether blocks shared by clones were looked for.
    pub extents: bool,
    /// Files that would not say what they share: sizes are then at most what is said.
    pub unshared: u64,
    /// Paths that could not be read: sizes are then at least what is said.
    pub unreadable: u64,
    /// The first of those.
    pub problems: Vec<String>,
    /// Mounts below the store that were left out.
    pub mounts_skipped: u64,
}

/// What the file system says of itself.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FileSystem {
    /// Its size in bytes.
    pub size: u64,
    /// What is in use, by the store and others, its own bookkeeping included.
    pub used: u64,
    /// What an ordinary user could still write.
    pub free: u64,
}

impl FileSystem {
    fn of(path: &Path) -> Result<Self> {
        let found = nix::sys::statvfs::statvfs(path)
            .context(|| format!("cannot ask for free space at `{}`", path.display()))?;
        let unit = found.fragment_size();
        Ok(Self {
            size: found.blocks() * unit,
            used: found.blocks().saturating_sub(found.blocks_free()) * unit,
            free: found.blocks_available() * unit,
        })
    }
}

impl Report {
    /// Sums what services hold for exactly these envs: own bytes.
    pub fn held(&self, class: Class, envs: &[String]) -> u64 {
        let held = self.at_services.iter();
        held.filter(|held| held.class == class && held.envs == envs)
            .map(|held| held.own)
            .sum()
    }

    /// Sums the rows of one class that `env` alone needs.
    pub fn own(&self, env: &str, class: Class) -> Size {
        self.rows
            .iter()
            .filter(|row| row.class == class && row.envs == [env])
            .map(|row| row.size)
            .sum()
    }
}

/// The owner of what no `rm` deletes.
const KEPT: u32 = 0;
/// The owner of what nobody needs.
const NOBODY: u32 = u32::MAX;

/// Counts the whole store, or with `only` what concerns one env: its own and what it shares. Directories in build volumes,
/// caches, sources and outputs get rows of their own down to `depth`.
pub fn report(store: &Store, only: Option<&str>, depth: usize) -> Result<Report> {
    let mut places = Places {
        store,
        depth,
        envs: Vec::new(),
        roots: Vec::new(),
        rows: Vec::new(),
    };
    for name in names(&store.root().join("envs")) {
        if let Some(record) = store.record(&name)? {
            places.envs.push((name, record));
        }
    }
    places.images();
    places.layers()?;
    places.trees();
    places.volumes();
    if only.is_none() {
        places.shelves();
    }
    let extents = store.method() != Method::Overlay;
    let before = FileSystem::of(store.root())?;
    let usage = scan(
        &places.roots,
        &Options {
            extents,
            ..Options::default()
        },
    );
    let mut report = places.finish(usage, only, extents)?;
    // What was counted may be gone by now: somebody else deletes meanwhile.
    report.file_system.used = report.file_system.used.max(before.used);
    Ok(report)
}

/// The directories to count, oldest content first.
struct Places<'a> {
    store: &'a Store,
    depth: usize,
    envs: Vec<(String, Record)>,
    roots: Vec<Root>,
    rows: Vec<Row>,
}

impl Places<'_> {
    fn add(&mut self, path: PathBuf, owner: u32, class: Class, name: String, envs: Vec<String>) {
        let parts = match class {
            Class::Build | Class::Cache | Class::Source | Class::Output => {
                inside::directories(&path, self.depth)
            }
            _ => Vec::new(),
        };
        let content = match class {
            Class::Cache => self.store.cache_content(&name),
            _ => None,
        };
        let row = Row {
            class,
            name,
            inside: None,
            content,
            envs,
            size: Size::default(),
        };
        for part in parts {
            let content = match class {
                Class::Build => inside::in_build(&part).map(str::to_owned),
                _ => None,
            };
            let inside = part.strip_prefix(&path).ok().map(Path::to_owned);
            let row = Row {
                inside,
                content,
                ..row.clone()
            };
            self.push(part, owner, row);
        }
        self.push(path, owner, row);
    }

    fn push(&mut self, path: PathBuf, owner: u32, row: Row) {
        let at = u32::try_from(self.rows.len()).unwrap_or(u32::MAX);
        self.roots.push(Root::new(path, at).owned_by(owner));
        self.rows.push(row);
    }

    /// Returns the names of the envs for which `needs` holds.
    fn who(&self, needs: impl Fn(&Record) -> bool) -> Vec<String> {
        self.envs
            .iter()
            .filter(|(_, record)| needs(record))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Returns the owner of what these envs need, where `rm` would delete it.
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
            let users = self.who(|record| record.image_key == key);
            match self.store.image(&key).ok().flatten() {
                Some(image) => self.add(path, KEPT, Class::Image, image.name, users),
                None => self.add(path, NOBODY, Class::Unused, key, Vec::new()),
            }
        }
    }

    /// Layers from the bottom up: a layer's `flat` directory is made of links to what is below it.
    fn layers(&mut self) -> Result<()> {
        let mut layers: BTreeMap<String, Option<Layer>> = BTreeMap::new();
        for id in names(&self.store.root().join("layers")) {
            let layer = self.store.layer(&id).ok().flatten();
            layers.insert(id, layer);
        }
        let parent = |id: &str| layers.get(id)?.as_ref()?.parent.as_deref();
        let mut needed: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for (at, (_, record)) in self.envs.iter().enumerate() {
            for top in record.layers() {
                let mut next = layers.get_key_value(top).map(|(id, _)| id.as_str());
                while let Some(id) = next
                    && needed.entry(id).or_default().insert(at)
                {
                    next = parent(id);
                }
            }
        }
        let depth = |id: &str| {
            let mut depth = 0;
            let mut next = parent(id);
            // A damaged chain may stand on itself.
            while let Some(id) = next
                && depth <= layers.len()
            {
                depth += 1;
                next = parent(id);
            }
            depth
        };
        let mut order: Vec<_> = layers.keys().map(|id| (depth(id), id)).collect();
        order.sort();
        for (_, id) in order {
            let users: Vec<String> = needed
                .get(id.as_str())
                .into_iter()
                .flatten()
                .map(|at| self.envs[*at].0.clone())
                .collect();
            let class = if users.is_empty() {
                Class::Unused
            } else {
                Class::Snapshots
            };
            let title = layers[id]
                .as_ref()
                .map_or_else(|| id.clone(), |layer| layer.title.clone());
            let path = self.store.layer_dir(id);
            let owner = self.owner(&users);
            self.add(path, owner, class, title, users);
        }
        Ok(())
    }

    fn trees(&mut self) {
        let directory = self.store.root().join("envs");
        for name in names(&directory) {
            let path = directory.join(&name);
            let found = self.envs.iter().find(|(known, _)| *known == name);
            let Some((_, record)) = found else {
                // Beyond its lock, which stays for good, this is what a killed command left.
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
                    _ if live.as_ref() == Some(&tree) => (Class::Live, String::new()),
                    Some(failed) if failed.tree == tree => (Class::Failed, failed.step.clone()),
                    // A step that runs, or garbage: its directory does not tell.
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
        let mut known: BTreeMap<String, (String, String)> = BTreeMap::new();
        for (env, record) in &self.envs {
            for (volume, id) in &record.head.volumes {
                known.insert(id.clone(), (env.clone(), volume.clone()));
            }
        }
        for id in names(&self.store.root().join("volumes")) {
            let path = self.store.volume_dir(&id);
            match known.remove(&id) {
                Some((env, volume)) => {
                    let users = vec![env];
                    let owner = self.owner(&users);
                    self.add(path, owner, Class::Build, volume, users);
                }
                None => self.add(path, NOBODY, Class::Unused, id, Vec::new()),
            }
        }
    }

    /// What belongs to no env, and the rest of the store.
    fn shelves(&mut self) {
        let root = self.store.root().to_owned();
        for (directory, class) in [("caches", Class::Cache), ("sources", Class::Source)] {
            for name in names(&root.join(directory)) {
                let path = root.join(directory).join(&name);
                // A source's lock lies beside it.
                if path.is_dir() {
                    self.add(path, KEPT, class, name, Vec::new());
                }
            }
        }
        for env in names(&root.join("outputs")) {
            for name in names(&root.join("outputs").join(&env)) {
                let path = root.join("outputs").join(&env).join(&name);
                self.add(path, KEPT, Class::Output, name, vec![env.clone()]);
            }
        }
        self.add(
            root.join("blobs"),
            KEPT,
            Class::Blobs,
            String::new(),
            Vec::new(),
        );
        self.add(
            root.join("trash"),
            NOBODY,
            Class::Trash,
            String::new(),
            Vec::new(),
        );
        self.add(root, KEPT, Class::Other, String::new(), Vec::new());
    }

    fn finish(mut self, mut usage: Usage, only: Option<&str>, extents: bool) -> Result<Report> {
        // A directory that was there a moment ago: another command has deleted it.
        let known = usage.problems.len();
        usage
            .problems
            .retain(|problem| problem.error.kind() != std::io::ErrorKind::NotFound);
        usage.unreadable -= (known - usage.problems.len()) as u64;
        for (row, at) in self.rows.iter_mut().zip(0..) {
            row.size = usage.class(at).into();
        }
        let mut freed: BTreeMap<String, u64> = BTreeMap::new();
        for (row, root) in self.rows.iter().zip(&self.roots) {
            if root.owner != KEPT
                && root.owner != NOBODY
                && let [env] = row.envs.as_slice()
            {
                *freed.entry(env.clone()).or_default() += row.size.exclusive;
            }
        }
        if let Some(env) = only {
            self.rows
                .retain(|row| row.envs.iter().any(|user| user == env));
            freed.retain(|name, _| name == env);
        }
        let mut holdings = holdings(self.store, &self.envs)?;
        if let Some(env) = only {
            holdings
                .held
                .retain(|held| held.envs.iter().any(|user| user == env));
        }
        Ok(Report {
            at_services: holdings.held,
            silent_services: holdings.problems,
            schema: "rockenv/du/1",
            store: self.store.root().to_owned(),
            env: only.map(str::to_owned),
            method: self.store.method(),
            total: self.rows.iter().map(|row| row.size).sum(),
            rows: self.rows,
            freed,
            file_system: FileSystem::of(self.store.root())?,
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

/// Returns the names in a directory, sorted; none where it cannot be read, which the scan reports.
fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}
