//! Owns reading a whole store in any state, without changing a byte of it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::de::DeserializeOwned;

use super::ContainerItem;
use crate::engine::hold::ContainerRecord;
use crate::plan::ids::{EnvName, TreeId};
use crate::plan::record;
use crate::plan::resolve::{Spec, VolumeSource};
use crate::store::access::{Obstacle, PRIVATE, SHARED};
use crate::store::images::Image;
use crate::store::removal::{REMOVED, leave_out_removed};
use crate::store::results::{ResultState, StepResults};
use crate::store::trash::is_rest;
use crate::store::{Layer, Lock, Record, Store, Versioned, journal, lock};
use crate::sys::error::{Kind, Result, if_exists};
use crate::tree::{self, Method};

/// Part of the names of files that a repair sets aside.
pub(in crate::store) const ASIDE: &str = ".damaged-";

/// A file's state and content.
#[derive(Clone, Debug)]
pub enum Read<T> {
    Absent,
    /// No version writes such content.
    Damaged(String),
    /// A newer version wrote it.
    Foreign(String),
    Fine(T),
}

impl Inventory {
    /// Returns a layer that can be read.
    pub(super) fn layer(&self, id: &str) -> Option<&Layer> {
        self.layers.get(id)?.layer.fine()
    }

    /// Notes the file at `path` if a newer version wrote it.
    fn note_foreign<T>(&mut self, read: &Read<T>, path: PathBuf) {
        if let Read::Foreign(why) = read {
            self.foreign.push((path, why.clone()));
        }
    }

    pub(super) fn fine_layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.values().filter_map(|item| item.layer.fine())
    }

    pub(super) fn fine_records(&self) -> impl Iterator<Item = (&EnvName, &Record)> {
        let envs = self.envs.iter();
        envs.filter_map(|(name, env)| Some((name, env.record.fine()?)))
    }
}

impl<T> Read<T> {
    pub(super) fn fine(&self) -> Option<&T> {
        match self {
            Self::Fine(content) => Some(content),
            Self::Absent | Self::Damaged(_) | Self::Foreign(_) => None,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Inventory {
    pub root: PathBuf,
    pub method: Method,
    /// The user who should own the store.
    pub owner: u32,
    pub directories: Vec<Directory>,
    /// Obstacles in place of some of them. If there are any, nothing else was read.
    pub obstacles: Vec<Obstacle>,
    pub envs: BTreeMap<EnvName, EnvItem>,
    pub layers: BTreeMap<String, LayerItem>,
    pub images: BTreeMap<String, ImageItem>,
    /// Image keys by recipe.
    pub references: BTreeMap<String, Read<String>>,
    /// Directories of image builds, and whether a build is running there.
    pub image_work: Vec<(String, bool)>,
    pub volumes: BTreeSet<String>,
    /// Unfinished clones, and whether a clone is running there.
    pub partial_sources: Vec<(PathBuf, bool)>,
    /// Entries of the trash; `None` while another process empties it.
    pub trash: Option<usize>,
    /// Intact files that this version does not understand, and why.
    pub foreign: Vec<(PathBuf, String)>,
    pub set_aside: Vec<PathBuf>,
    /// Paths, in the store, of layers and images whose removal was interrupted.
    pub rest: Vec<String>,
    /// Containers with this store's labels, if services were asked.
    pub containers: Vec<ContainerItem>,
    /// All trees mentioned anywhere in the store, if there are containers.
    pub trees: BTreeSet<TreeId>,
}

/// One of the store's own directories.
#[derive(Clone, Debug)]
pub struct Directory {
    pub name: &'static str,
    /// Owner and mode.
    pub found: Option<(u32, u32)>,
    /// Permissions that it must not grant.
    pub forbidden: u32,
}

/// An env's directory.
#[derive(Clone, Debug)]
pub struct EnvItem {
    pub record: Read<Record>,
    /// A command holds its lock.
    pub busy: bool,
    /// It is ephemeral, and its owning command is gone.
    pub left: bool,
    /// A container's state exists.
    pub state: bool,
    pub journal: Read<usize>,
    /// Trees on disk, except for a live tree whose files are gone.
    pub trees: BTreeSet<String>,
    /// Why its spec cannot be read.
    pub damaged_spec: Option<String>,
    /// The record that a repair set aside last.
    pub old_record: Option<PathBuf>,
    /// Step results that its output volumes lack, as phrases.
    pub lost_results: Vec<String>,
}

impl EnvItem {
    /// Returns the record that a repair set aside and could not rebuild: nothing else names the env's other data.
    pub fn lost_record(&self) -> Option<&Path> {
        self.old_record
            .as_deref()
            .filter(|_| matches!(self.record, Read::Absent))
    }

    /// Returns whether it has no reliable record. A rebuilt record may have another id.
    pub(super) fn is_unreliable(&self) -> bool {
        self.old_record.is_some() || matches!(self.record, Read::Damaged(_))
    }
}

/// A layer's directory.
#[derive(Clone, Debug)]
pub struct LayerItem {
    pub layer: Read<Layer>,
    pub tree: bool,
    /// It may be used as a parent.
    pub sound: bool,
    /// Names of its frozen volumes.
    pub volumes: BTreeSet<String>,
    /// Unfinished merges.
    pub merges: Vec<String>,
    /// Faults in the results of its step.
    pub results: Vec<String>,
}

/// An image's directory.
#[derive(Clone, Debug)]
pub struct ImageItem {
    pub image: Read<Box<Image>>,
    /// It has a tree.
    pub root: bool,
}

impl Store {
    pub fn inventory(&self) -> Result<Inventory> {
        let root = self.root();
        let mut inventory = Inventory {
            root: root.to_owned(),
            method: self.method(),
            owner: nix::unistd::geteuid().as_raw(),
            directories: directories(root),
            obstacles: Obstacle::all(root)?,
            ..Inventory::default()
        };
        if !inventory.obstacles.is_empty() {
            return Ok(inventory);
        }
        inventory.volumes = trees(&root.join("volumes"))?;
        for name in names(&root.join("envs"))? {
            let directory = root.join("envs").join(&name);
            let Ok(name) = EnvName::try_from(name) else {
                if directory.join("record.json").exists() {
                    let why =
                        "no env has such a name; if you renamed it, rename it back".to_owned();
                    inventory.foreign.push((directory, why));
                }
                continue;
            };
            if directory.is_dir() {
                let item = env(self, &name, &mut inventory.set_aside)?;
                inventory.note_foreign(&item.record, directory.join("record.json"));
                inventory.envs.insert(name, item);
            }
        }
        for name in names(&root.join("layers"))? {
            let directory = root.join("layers").join(&name);
            if name.contains(ASIDE) {
                inventory.set_aside.push(directory);
            } else if is_rest(&directory) {
                inventory.rest.push(format!("layers/{name}"));
            } else {
                let item = self.layer_item(&directory)?;
                inventory.note_foreign(&item.layer, directory.join("layer.json"));
                inventory.layers.insert(name, item);
            }
        }
        self.read_images(&mut inventory)?;
        for name in names(&root.join("sources"))? {
            if let Some(stem) = name.strip_suffix(".part") {
                let busy = is_busy(&root.join("sources").join(format!("{stem}.lock")));
                let path = root.join("sources").join(&name);
                inventory.partial_sources.push((path, busy));
            }
        }
        let trash = root.join("trash");
        // The directory is its own lock.
        if !matches!(Lock::try_directory(&trash), Ok(None)) {
            inventory.trash = Some(names(&trash)?.len());
        }
        Ok(inventory)
    }

    fn layer_item(&self, directory: &Path) -> Result<LayerItem> {
        let layer: Read<Layer> = read(&directory.join("layer.json"));
        let mut merges = names(directory)?;
        merges.retain(|name| name.starts_with("flat-"));
        let results = directory.join("results");
        let faults = StepResults::read(&results).and_then(|left| left.check(&results));
        Ok(LayerItem {
            sound: layer.fine().is_none_or(|layer| self.is_sound(layer)),
            tree: layer.fine().is_some_and(|layer| layer.kept.is_some())
                || is_directory(&self.tree_files(directory)),
            layer,
            results: faults.unwrap_or_else(|error| vec![error.chain().join(": ")]),
            volumes: trees(&directory.join("volumes"))?,
            merges,
        })
    }

    fn read_images(&self, inventory: &mut Inventory) -> Result<()> {
        let images = self.root().join("images");
        let found = names(&images)?;
        // Listed after the images: a build takes its lock before it creates its directory.
        let references = names(&images.join("refs"))?;
        for name in found {
            let directory = images.join(&name);
            if name == "refs" || !is_directory(&directory) {
                continue;
            }
            if name.contains(ASIDE) {
                inventory.set_aside.push(directory);
            } else if let Some(rest) = name.strip_prefix("tmp-") {
                let recipe = rest.split('-').next().unwrap_or_default();
                let is_lock = |file: &&String| file.starts_with(recipe) && file.ends_with(".lock");
                let mut locks = references.iter().filter(is_lock);
                let busy = locks.any(|file| is_busy(&images.join("refs").join(file)));
                inventory.image_work.push((name, busy));
            } else if is_rest(&directory) {
                inventory.rest.push(format!("images/{name}"));
            } else {
                note_aside(&directory, &mut inventory.set_aside)?;
                let item = ImageItem {
                    image: read(&directory.join("image.json")),
                    root: is_directory(&directory.join("root")),
                };
                inventory.note_foreign(&item.image, directory.join("image.json"));
                inventory.images.insert(name, item);
            }
        }
        note_aside(&images.join("refs"), &mut inventory.set_aside)?;
        for name in references {
            if let Some(recipe) = name.strip_suffix(".json") {
                let reference: Read<serde_json::Value> = read(&images.join("refs").join(&name));
                let key = match reference {
                    Read::Fine(value) => match value["key"].as_str() {
                        Some(key) => Read::Fine(key.to_owned()),
                        None => Read::Damaged("it names no image".to_owned()),
                    },
                    Read::Damaged(why) | Read::Foreign(why) => Read::Damaged(why),
                    Read::Absent => Read::Absent,
                };
                inventory.references.insert(recipe.to_owned(), key);
            }
        }
        Ok(())
    }
}

fn directories(root: &Path) -> Vec<Directory> {
    let private = PRIVATE.iter().map(|name| (name, 0o077));
    let all = private.chain(SHARED.iter().map(|name| (name, 0o027)));
    let directory = |(name, forbidden): (&&'static str, u32)| {
        let found = fs::symlink_metadata(root.join(name)).ok();
        let found = found.filter(std::fs::Metadata::is_dir);
        Directory {
            name,
            found: found.map(|found| (found.uid(), found.mode() & 0o7777)),
            forbidden,
        }
    };
    all.map(directory).collect()
}

fn env(store: &Store, name: &EnvName, aside: &mut Vec<PathBuf>) -> Result<EnvItem> {
    let directory = &store.env_dir(name);
    let mut own = Vec::new();
    note_aside(directory, &mut own)?;
    // Before its record is read: the data of a command that ends in between would seem to belong to no env.
    let is_held = is_busy(&lock::env_lock(directory));
    let record = match read::<Record>(&directory.join("record.json")) {
        Read::Fine(record) if record.version > record::VERSION => {
            Read::Foreign(format!("its version is {}", record.version))
        }
        Read::Fine(mut record) => {
            leave_out_removed(directory, &mut record)?;
            Read::Fine(record)
        }
        other => other,
    };
    // An idle container ends as soon as a command needs the env.
    let waits = is_held && store.has_idle_container(name);
    let busy = is_held && !waits;
    let mut trees: BTreeSet<String> = names(&directory.join("trees"))?.into_iter().collect();
    let known = record.fine().filter(|record| record.service.is_none());
    for tree in known.into_iter().flat_map(Record::trees) {
        if let Ok(false) = tree::is_there(&store.tree_files(&store.tree_dir(name, tree))) {
            trees.remove(tree.as_str());
        }
    }
    let spec = store.spec(name);
    let item = EnvItem {
        lost_results: match (record.fine(), &spec) {
            (Some(record), Ok(spec)) => lost_results(store, record, spec),
            _ => Vec::new(),
        },
        record,
        busy,
        left: store.is_abandoned(name),
        state: ContainerRecord::path(&directory.join("run")).exists() && !waits,
        journal: match journal::read(directory) {
            Ok(entries) => {
                let removed = directory.join(REMOVED).exists();
                Read::Fine(entries.len() + usize::from(removed))
            }
            Err(error) => Read::Damaged(error.chain().join(": ")),
        },
        trees,
        damaged_spec: match spec {
            Err(error) if error.kind() != Kind::NotFound => Some(error.chain().join(": ")),
            _ => None,
        },
        old_record: own.iter().rfind(|path| is_record(path)).cloned(),
    };
    aside.extend(own);
    Ok(item)
}

/// Returns the step results that an env has lost. Skips users' directories, which another env may use by now, and
/// files that the user changed.
fn lost_results(store: &Store, record: &Record, spec: &Spec) -> Vec<String> {
    let Some(head) = record.head.layer.as_ref().filter(|_| record.complete) else {
        return Vec::new();
    };
    // The layers' own faults are reported with the layers.
    let differences = store.differences(head, spec, false).unwrap_or_default();
    let is_ours = |name: &str| {
        let volume = spec.volume(name);
        volume.is_some_and(|volume| volume.source == VolumeSource::Store)
    };
    let lost = differences.into_iter().filter(|one| {
        is_ours(&one.volume) && matches!(one.state, ResultState::Missing | ResultState::Unlinked)
    });
    lost.filter_map(|one| {
        let what = one.state.words()?;
        let (path, volume) = (one.path.display(), &one.volume);
        Some(format!("`{path}` {what} in its output volume `{volume}`"))
    })
    .collect()
}

/// Returns whether a file that was set aside is a record.
fn is_record(aside: &Path) -> bool {
    let name = aside.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("record.json"))
}

fn note_aside(directory: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    let aside = names(directory)?.into_iter();
    let aside = aside.filter(|name| name.contains(ASIDE));
    into.extend(aside.map(|name| directory.join(name)));
    Ok(())
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
        && tree::is_there(path).unwrap_or(true)
}

fn trees(directory: &Path) -> Result<BTreeSet<String>> {
    let mut found = names(directory)?;
    found.retain(|name| tree::is_there(&directory.join(name)).unwrap_or(true));
    Ok(found.into_iter().collect())
}

/// Returns whether a lock is held, or may be held, without creating the lock file.
pub(in crate::store) fn is_busy(path: &Path) -> bool {
    !matches!(path.try_exists(), Ok(false))
        && match Lock::try_exclusive(path) {
            Ok(lock) => lock.is_none(),
            // On a read-only file system, no command changes anything.
            Err(error) => error.kind() != Kind::Unavailable,
        }
}

pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Read<T> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Read::Absent,
        Err(error) => return Read::Damaged(error.to_string()),
        Ok(bytes) => bytes,
    };
    match serde_json::from_slice(&bytes) {
        Ok(value) => Read::Fine(value),
        Err(error) => match serde_json::from_slice::<Versioned>(&bytes) {
            Ok(newer) if newer.version > record::VERSION => {
                Read::Foreign(format!("its version is {}", newer.version))
            }
            _ => Read::Damaged(error.to_string()),
        },
    }
}

/// Returns the sorted names in a directory; empty if the directory is missing.
pub(in crate::store) fn names(directory: &Path) -> Result<Vec<String>> {
    let Some(entries) = if_exists(fs::read_dir(directory))? else {
        return Ok(Vec::new());
    };
    let mut names = Vec::new();
    for entry in entries {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
