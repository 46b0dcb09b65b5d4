//! Owns reading the items that `gc` decides about: the store's envs, layers, images, downloads and limited caches,
//! with their bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use jiff::Timestamp;

use super::check::{self, Read, is_busy, names};
use super::unreadable::Users;
use super::{Store, lock, source};
use crate::engine::hold::ContainerRecord;
use crate::plan::gc::{Base, CachedFile, Env, FINGERPRINTS, Frozen, Inventory};
use crate::plan::ids::EnvName;
use crate::sys::checksum::{Checksum, is_sha256};
use crate::sys::error::Result;
use crate::sys::host::free_space;
use crate::sys::shell::quoted_path;
use crate::tree::measure::{self, scan_one};
use crate::ui::size;

/// Which parts of a store to examine closely.
#[derive(Clone, Debug, Default)]
pub struct InventoryOptions {
    /// Look for caches that exceed their limit.
    pub caches: bool,
    /// Maximum bytes by cache, from the configuration.
    pub cache_max: BTreeMap<String, u64>,
    /// Measure the whole store.
    pub used: bool,
    /// Look for removable sub-projects of TheRock.
    pub projects: bool,
    /// Also measure objects that stay.
    pub everything: bool,
}

impl Store {
    /// Reads the store. Unreadable objects may need any layer or image.
    pub fn gc_inventory(&self, options: &InventoryOptions, keep_last: usize) -> Result<Inventory> {
        let found = self.inventory()?;
        self.readable(&found)?;
        let Users {
            leases, unreadable, ..
        } = self.users()?;
        let free = free_space(&self.root)?;
        let locked = self.locked()?;
        let mut inventory = Inventory {
            now: Timestamp::now(),
            free,
            leases,
            locked: locked.names,
            unreadable: unreadable.iter().map(|one| one.object.clone()).collect(),
            notes: locked.notes,
            ..Inventory::default()
        };
        inventory
            .notes
            .extend(unreadable.iter().map(ToString::to_string));
        let damaged = found.has_damaged_records();
        let busy = self.add_envs(&mut inventory, found.envs)?;
        let work = found.image_work.iter().filter(|(_, busy)| !busy);
        let work = work.map(|(name, _)| (format!("images/{name}"), "image build"));
        let rest = found.rest.iter().map(|path| (path.clone(), "removal"));
        for (path, what) in work.chain(rest) {
            let bytes = allocated(&self.root.join(&path));
            let why = format!("left by an interrupted {what}");
            inventory.strays.insert(path, (why, bytes));
        }
        for (id, item) in found.layers {
            if let (Read::Fine(layer), Ok(id)) = (item.layer, id.try_into()) {
                let arrived = match &layer.env {
                    None => self.arrival_of(&id),
                    Some(_) => None,
                };
                let frozen = Frozen {
                    arrived,
                    bytes: layer.cost.map_or(0, |cost| cost.bytes),
                    layer,
                    at_service: 0,
                };
                inventory.layers.insert(id, frozen);
            }
        }
        self.add_images(&mut inventory, found.images, &found.references);
        let partial = found.partial_sources.iter().filter(|(_, busy)| !busy);
        let partial = partial.map(|(path, _)| (path, "is an interrupted clone"));
        // Only directories are listed, because files are small. `fsck` lists both.
        let aside = found.set_aside.iter().filter(|path| path.is_dir());
        let aside = aside.map(|path| (path, "was set aside by a repair"));
        for (path, what) in partial.chain(aside) {
            let bytes = size::bytes(allocated(path));
            let found = format!("`{}` ({bytes}) {what} and is kept", path.display());
            let help = format!("to remove it: rm -r {}", quoted_path(path));
            inventory.notes.push(format!("{found}; {help}"));
        }
        // A running command may be creating one.
        if !busy {
            self.note_lost_volumes(&mut inventory, &found.volumes, damaged);
            self.note_unneeded_sources(&mut inventory)?;
        }
        self.add_blobs(&mut inventory)?;
        if options.caches {
            self.add_caches(&mut inventory, &options.cache_max)?;
        }
        if options.projects {
            self.add_projects(&mut inventory)?;
        }
        self.estimate_freed(&mut inventory, options, keep_last)?;
        Ok(inventory)
    }

    /// Reads the envs. Returns whether a command runs in one.
    fn add_envs(
        &self,
        inventory: &mut Inventory,
        envs: BTreeMap<EnvName, check::EnvItem>,
    ) -> Result<bool> {
        let mut any_busy = false;
        for (name, item) in envs {
            if let Some(path) = item.lost_record() {
                inventory
                    .unreadable
                    .push(format!("the lost record of env `{name}`"));
                let up = match self.spec(&name) {
                    Ok(spec) => spec.up_command(),
                    Err(_) => format!("rockenv up PROFILE --name {name}"),
                };
                inventory.notes.push(format!(
                    "env `{name}` has lost its record, so all layers are kept: {up} rebuilds it from its layers; or discard them: rm {}",
                    quoted_path(path)
                ));
            }
            let busy = item.busy;
            any_busy |= busy;
            let unsettled = !matches!(item.journal, Read::Fine(0));
            if let Read::Fine(record) = item.record {
                let failed_edited = self.is_failed_edited(&name, &record);
                if let (Some(failed), true) = (&record.failed, failed_edited) {
                    inventory.notes.push(format!(
                        "tree of failed step {name}/{} stays: `shell --failed` changed it; to keep it as a snapshot: {}",
                        failed.step,
                        record.up_command()
                    ));
                }
                let env = Env {
                    used: self.last_use(&name, &record),
                    record,
                    busy,
                    unsettled,
                    failed: 0,
                    failed_edited,
                    logs: self.log_bytes(&name)?,
                };
                inventory.envs.insert(name, env);
            }
        }
        Ok(any_busy)
    }

    fn add_images(
        &self,
        inventory: &mut Inventory,
        images: BTreeMap<String, check::ImageItem>,
        references: &BTreeMap<String, Read<String>>,
    ) {
        for (key, item) in images {
            if let Read::Fine(image) = item.image
                && image.key == *key
            {
                let base = Base {
                    name: image.name.clone(),
                    built: image.built,
                    used: self.last_use_of_image(&image),
                    current: references.values().any(|reference| match reference {
                        Read::Fine(known) => *known == *image.key,
                        // It may name the image.
                        Read::Damaged(_) | Read::Foreign(_) => true,
                        Read::Absent => false,
                    }),
                    bytes: image.bytes,
                    took_ms: image.took_ms,
                };
                inventory.images.insert(image.key, base);
            }
        }
    }

    /// Notes build volumes of no known env. If there are `damaged` records, each may be the live volume of an env.
    fn note_lost_volumes(
        &self,
        inventory: &mut Inventory,
        volumes: &BTreeSet<String>,
        damaged: bool,
    ) {
        for volume in volumes {
            let id = volume.split('-').next().unwrap_or_default();
            if !inventory.envs.values().any(|env| *env.record.id == *id) {
                let path = self.root().join("volumes").join(volume);
                let bytes = size::bytes(allocated(&path));
                inventory.notes.push(match damaged {
                    true => format!(
                        "`{}` ({bytes}) may belong to an env whose record is damaged, and is kept: rockenv fsck --repair",
                        path.display()
                    ),
                    false => format!(
                        "`{}` ({bytes}) belongs to no known env and is kept; to remove it: rm -r {}",
                        path.display(),
                        quoted_path(&path)
                    ),
                });
            }
        }
    }

    /// Notes clones that no env's spec names. They may hold a user's work, so only the user may remove them.
    fn note_unneeded_sources(&self, inventory: &mut Inventory) -> Result<()> {
        let mut needed = BTreeSet::new();
        for name in inventory.envs.keys() {
            let Ok(spec) = self.spec(name) else {
                return Ok(());
            };
            needed.extend(source::directories(self, &spec).into_values());
        }
        let sources = self.root.join("sources");
        for name in names(&sources)? {
            let path = sources.join(&name);
            if name.ends_with(".part") || needed.contains(&path) || !path.join(".git").is_dir() {
                continue;
            }
            let bytes = size::bytes(allocated(&path));
            inventory.notes.push(format!(
                "source `{}` ({bytes}) is needed by no env and is kept; to remove it, if it holds no work of yours: rm -r {}",
                path.display(),
                quoted_path(&path)
            ));
        }
        Ok(())
    }

    /// Refuses a store that a newer version of rockenv wrote to.
    fn readable(&self, found: &check::Inventory) -> Result<()> {
        if let Some(obstacle) = found.obstacles.first() {
            return Err(obstacle.clone().error());
        }
        if let Some((path, why)) = found.foreign.first() {
            let path = path.display();
            let error = invalid!("`{path}` was written by another version of rockenv: {why}");
            return Err(error.help("use the version that wrote it"));
        }
        Ok(())
    }

    /// Returns the bytes of each run's logs, by its time.
    fn log_bytes(&self, env: &EnvName) -> Result<BTreeMap<String, u64>> {
        let directory = self.env_dir(env).join("logs");
        // A run has few files: starting threads would take longer.
        let options = measure::MeasureOptions {
            threads: Some(NonZero::<usize>::MIN),
            ..measure::MeasureOptions::default()
        };
        let bytes = |run: String| {
            let root = measure::Root::new(directory.join(&run), 0);
            (run, measure::scan(&[root], &options).total().allocated)
        };
        Ok(names(&directory)?.into_iter().map(bytes).collect())
    }

    fn add_blobs(&self, inventory: &mut Inventory) -> Result<()> {
        // A command is building an image or pulling.
        if is_busy(&self.blobs_lock()) {
            return Ok(());
        }
        let blobs = self.root.join("blobs");
        let mut found = names(&blobs.join("sha256"))?;
        found.retain(|name| is_download(name));
        for below in ["sha512/", FINGERPRINTS] {
            let others = names(&blobs.join(below))?.into_iter();
            let others = others.map(|name| format!("{below}{name}"));
            found.extend(others.filter(|path| is_partial_sha512(path) || is_fingerprint(path)));
        }
        for name in found {
            let Ok(data) = fs::symlink_metadata(self.blob(&name)) else {
                continue;
            };
            let bytes = data.blocks() * 512;
            let used = Timestamp::from_second(data.atime().max(data.mtime())).unwrap_or_default();
            inventory.blobs.insert(name, CachedFile { bytes, used });
        }
        Ok(())
    }

    /// Returns the path of a download, or of another file below `blobs`.
    pub(super) fn blob(&self, name: &str) -> PathBuf {
        let blobs = self.root.join("blobs");
        match name.contains('/') {
            true => blobs.join(name),
            false => blobs.join("sha256").join(name),
        }
    }

    /// Returns whether a command holds an env, or runs in it.
    pub fn is_env_busy(&self, name: &EnvName) -> bool {
        is_busy(&lock::env_lock(&self.env_dir(name))) && !self.has_idle_container(name)
    }

    /// Returns whether only an idle container holds an env. Taking the lock ends the container.
    pub fn has_idle_container(&self, name: &EnvName) -> bool {
        ContainerRecord::read(&self.env_dir(name).join("run")).is_some_and(|state| state.idle)
    }

    /// Returns whether a step of an env is paused until more disk space is free.
    pub(crate) fn is_paused(&self, name: &EnvName) -> bool {
        let state = ContainerRecord::read(&self.env_dir(name).join("run"));
        state.is_some_and(|state| state.cgroup.is_frozen())
    }
}

/// Returns whether a file of this name is a complete or partial download. Other files are not rockenv's.
fn is_download(name: &str) -> bool {
    let partial = name.strip_prefix('.');
    let partial = partial.and_then(|name| name.strip_suffix(".partial"));
    // Left by a killed command.
    let random = name.strip_prefix(".tmp");
    let random = random.map(|random| random.trim_start_matches('-').as_bytes());
    is_sha256(partial.unwrap_or(name))
        || random.is_some_and(|name| name.len() == 6 && name.iter().all(u8::is_ascii_alphanumeric))
}

/// Returns whether a path is that of a partial download of a file with a SHA-512. Complete ones are in `sha256`.
fn is_partial_sha512(path: &str) -> bool {
    let digits = path.strip_prefix("sha512/.");
    let digits = digits.and_then(|name| name.strip_suffix(".partial"));
    digits.is_some_and(|digits| Checksum::new("SHA512", digits).is_some())
}

fn is_fingerprint(path: &str) -> bool {
    let name = path.strip_prefix(FINGERPRINTS);
    name.is_some_and(|name| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

pub(super) fn allocated(path: &Path) -> u64 {
    scan_one(path).total().allocated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_rockenv_gives_are_downloads() {
        let digest = "0123456789abcdef".repeat(4);
        for (name, is) in [
            (digest.clone(), true),
            (format!(".{digest}.partial"), true),
            (".tmpa1B2c3".to_owned(), true),
            (".tmp-a1B2c3".to_owned(), true),
            (".tmp-notes of mine".to_owned(), false),
            (".tmpl.txt".to_owned(), false),
            (format!("{digest}.partial"), false),
            (format!(".{digest}"), false),
            (".notes".to_owned(), false),
            (".notes.partial".to_owned(), false),
            ("notes".to_owned(), false),
        ] {
            assert_eq!(is_download(&name), is, "{name}");
        }
    }
}
