//! Owns the repair of a store, under the locks and without losing data. Damaged files are renamed, and unused ones go
//! to the trash. Sources, caches and outputs are never touched.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use jiff::Timestamp;

use super::inventory::{ASIDE, Read, names, read};
use super::{Fix, Inventory, Problem, examine};
use crate::engine::docker::Service;
use crate::plan::ids::{EnvId, EnvName, LayerId, VolumeId, VolumeName};
use crate::plan::layer::with_parents;
use crate::plan::record::{Record, Snapshot};
use crate::plan::resolve::Spec;
use crate::store::access::{self, MODE};
use crate::store::env::lock_alone;
use crate::store::images::Image;
use crate::store::layer::VolumeState;
use crate::store::{
    Format, Layer, Lock, Store, TAG, TAG_TEXT, VERSION, journal, lock, random_id, refuse_newer,
};
use crate::sys::atomic;
use crate::sys::beneath;
use crate::sys::error::{Kind, Result, ResultExt as _};
use crate::tree::{self, Method};
use crate::ui::size;

/// A repair and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub problem: Problem,
    /// A message about the repair, if there is something to say.
    pub done: std::result::Result<Option<String>, String>,
}

/// Repairs a store as far as possible. One repair may reveal the next: an env's record is examined again once its
/// layers are final.
pub(crate) fn repair(store: &Store, services: &[Service]) -> Result<Vec<Attempt>> {
    let mut attempts: Vec<Attempt> = Vec::new();
    let mut tried: BTreeSet<(String, Fix)> = BTreeSet::new();
    loop {
        let inventory = store.inventory_with(services)?;
        let mut problems = examine(&inventory).problems;
        problems.sort_by(|a, b| a.fix.cmp(&b.fix));
        let mut progress = false;
        for problem in problems {
            let known = attempts.iter().any(|one| one.problem == problem);
            if problem.fix == Fix::Nothing || known {
                continue;
            }
            // One repair may fix several problems; the next examination shows whether it did.
            let again = !tried.insert((problem.object.clone(), problem.fix.clone()));
            let done = if again {
                Ok(None)
            } else {
                fix(store, &inventory, &problem.fix).map_err(|error| match error.kind() {
                    Kind::Busy => format!("skipped: {}", error.message()),
                    _ => error.chain().join(": "),
                })
            };
            progress = true;
            attempts.push(Attempt { problem, done });
        }
        if !progress {
            // Trash is no problem, but no later command may come to empty it. If a newer version wrote files,
            // leave the trash alone. `gc` reports why an entry stays.
            if inventory.foreign.is_empty() && inventory.obstacles.is_empty() {
                drop(store.empty_trash());
            }
            return Ok(attempts);
        }
    }
}

fn fix(store: &Store, inventory: &Inventory, fix: &Fix) -> Result<Option<String>> {
    match fix {
        Fix::Nothing => {}
        Fix::Directory(name) => {
            make_private(&store.root().join(name), inventory.owner)?;
        }
        Fix::SetAside(path) => {
            let _lock = store.lock("fsck")?;
            if !is_still_wrong(store, fix)? {
                return Ok(None);
            }
            let to = quarantine(&store.root().join(path))?;
            return Ok(Some(format!("it is now `{}`", to.display())));
        }
        Fix::Cut(id) => {
            let _lock = store.lock("fsck")?;
            if !is_still_wrong(store, fix)? {
                return Ok(None);
            }
            let id: LayerId = id.parse()?;
            if let Some(mut layer) = store.layer(&id)? {
                layer.parent = None;
                atomic::write_json(&store.layer_dir(&id).join("layer.json"), &layer)?;
            }
        }
        Fix::Rebuild(name) => return rebuild(store, name),
        Fix::Journal(name) => {
            {
                let _lock = lock_env_only(store, name)?;
                if journal::read(&store.env_dir(name)).is_err() {
                    quarantine(&store.env_dir(name).join("journal.jsonl"))?;
                }
            }
            drop(store.lock_env(name, "fsck", Duration::ZERO)?);
        }
        Fix::Spec(name) => {
            let mut env = store.lock_env(name, "fsck", Duration::ZERO)?;
            // `up` may have written a new spec meanwhile.
            if store.spec(name).is_ok() {
                return Ok(None);
            }
            // `up` writes a spec only when it has something to do.
            env.update(|record| record.complete = false)?;
            let to = quarantine(&env.directory().join("spec.toml"))?;
            return Ok(Some(format!(
                "it is now `{}`; the next `rockenv up` writes another",
                to.display()
            )));
        }
        Fix::CleanUp(name) => drop(store.lock_env(name, "fsck", Duration::ZERO)?),
        Fix::Forget(name) => return forget(store, name),
        // No command uses this directory again: its name is random, and the command that made it held a lock while it
        // ran.
        Fix::ImageWork(name) => store.discard(&store.root().join("images").join(name))?,
        Fix::Merge(layer, directory) => {
            let _held = every_env(store)?;
            store.discard(&store.root().join("layers").join(layer).join(directory))?;
        }
        Fix::Reference(recipe) => {
            let references = store.root().join("images/refs");
            let path = references.join(format!("{recipe}.lock"));
            let _lock = Lock::exclusive(&path, "an image", "fsck", Duration::ZERO)?;
            store.discard(&references.join(format!("{recipe}.json")))?;
        }
        Fix::Container(socket, id) => Service::connect(socket)?.remove_container(id)?,
    }
    Ok(None)
}

/// Returns whether the problem persists under the lock. Another command may have repaired it.
fn is_still_wrong(store: &Store, fix: &Fix) -> Result<bool> {
    let problems = examine(&store.inventory()?).problems;
    Ok(problems.iter().any(|problem| problem.fix == *fix))
}

/// Creates one of the store's own directories, or takes it over. Refuses a link, whose target is not the store's.
fn make_private(path: &Path, owner: u32) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error.into()),
        _ => {}
    }
    let directory = beneath::open_real_dir(path)?;
    nix::unistd::fchown(directory.file(), Some(owner.into()), None)
        .context(|| format!("cannot take over `{}`", path.display()))?;
    Ok(directory.set_permissions(std::fs::Permissions::from_mode(MODE))?)
}

/// Renames a file so that nothing reads it and nothing is lost; returns the new path.
fn quarantine(path: &Path) -> Result<PathBuf> {
    let to = aside(path);
    fs::rename(path, &to)?;
    Ok(to)
}

/// Returns a free path for a damaged file.
fn aside(path: &Path) -> PathBuf {
    let time = Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let mut number = 0;
    loop {
        let mut name = path.as_os_str().to_owned();
        name.push(format!("{ASIDE}{time}"));
        if number > 0 {
            name.push(format!("-{number}"));
        }
        let to = PathBuf::from(name);
        if fs::symlink_metadata(&to).is_err() {
            return to;
        }
        number += 1;
    }
}

/// Takes only an env's lock: `lock_env` would read the damaged files.
fn lock_env_only(store: &Store, name: &EnvName) -> Result<Lock> {
    lock_alone(&store.env_dir(name), name, "fsck", Duration::ZERO)
}

/// Takes every env's lock, or none, so that no command merges layers meanwhile.
fn every_env(store: &Store) -> Result<Vec<Lock>> {
    let mut held = Vec::new();
    for name in store.env_names()? {
        held.push(lock_env_only(store, &name)?);
    }
    Ok(held)
}

fn forget(store: &Store, name: &EnvName) -> Result<Option<String>> {
    let mut env = store.lock_env(name, "fsck", Duration::ZERO)?;
    // The state may have changed before the lock was taken.
    let inventory = store.inventory()?;
    let (Some(item), Some(record)) = (inventory.envs.get(name), env.record().cloned()) else {
        return Ok(None);
    };
    let (repaired, _) = inventory.without_losses(&record, item);
    let mut done = None;
    // Changes on top of a missing layer are unusable, but they belong to the user.
    if let Some(tree) = &record.head.tree
        && repaired.head.tree.is_none()
        && item.trees.contains(tree.as_str())
    {
        let from = store.env_dir(name).join("trees").join(tree);
        let place = store.env_dir(name).join(format!("tree-{tree}"));
        fs::rename(from, &place)?;
        let to = quarantine(&place)?;
        let to = to.display();
        done = Some(match &record.service {
            None => format!("its changes since then are now `{to}`"),
            Some(_) => format!(
                "its changes since then stay in container `{}` until you remove `{to}`",
                env.container_name(tree)
            ),
        });
    }
    env.commit(repaired)?;
    // The repair tries each clean-up once, and may have done this env's before.
    env.collect_garbage()?;
    Ok(done)
}

/// Rebuilds a record from the last resolved spec and the existing layers.
fn rebuild(store: &Store, name: &EnvName) -> Result<Option<String>> {
    let directory = store.env_dir(name);
    let lock = lock_env_only(store, name)?;
    // Another command may have rebuilt it, and `up` may have changed the env since.
    let inventory = store.inventory()?;
    match inventory.envs.get(name).map(|env| &env.record) {
        Some(Read::Damaged(_)) => {}
        _ => return Ok(None),
    }
    // No record names these trees any more, and cleaning up would delete them.
    if !names(&directory.join("trees"))?.is_empty() {
        quarantine(&directory.join("trees"))?;
    }
    let damaged = directory.join("record.json");
    let record = match store.spec(name).ok() {
        Some(spec) => record_from(&inventory, name, &spec)?,
        None => None,
    };
    let Some(mut record) = record else {
        let aside = quarantine(&damaged)?;
        return Ok(Some(format!(
            "nothing is left to rebuild it from: it is now `{}`; `rockenv up` makes the env again from the remaining layers",
            aside.display()
        )));
    };
    // It only tells which of several volumes was in use, and may be on a bad sector.
    let old = fs::read(&damaged).unwrap_or_default();
    let others = adopt_volumes(store, &inventory, &mut record, &old)?;
    // Until the new record replaces it, the damaged one stays: without any, `gc` would remove the env's layers.
    let aside = aside(&damaged);
    fs::hard_link(&damaged, &aside)?;
    let snapshots = size::count(record.snapshots.len(), "snapshot");
    atomic::write_json(&damaged, &record)?;
    drop(lock);
    drop(store.lock_env(name, "fsck", Duration::ZERO)?);
    let mut done = vec![format!(
        "rebuilt from its spec and its layers with {snapshots}; the damaged one is now `{}`",
        aside.display()
    )];
    let others = others.iter().map(|other| other.display());
    done.extend(others.map(|other| format!("another build volume of that name is now `{other}`")));
    Ok(Some(done.join("; ")))
}

fn record_from(inventory: &Inventory, name: &EnvName, spec: &Spec) -> Result<Option<Record>> {
    let layers = inventory.fine_layers();
    let layers: Vec<&Layer> = layers
        .filter(|layer| inventory.chain_fault(&layer.id).is_none())
        .collect();
    let mut snapshots = Vec::new();
    for step in &spec.steps {
        let made = layers.iter();
        let made = made.filter(|layer| layer.key.as_ref() == Some(&step.key));
        if let Some(layer) = made.max_by_key(|layer| layer.created) {
            snapshots.push((layer, step.name.to_string()));
        }
    }
    let id = match owner(inventory, name, &snapshots) {
        Some(id) => id,
        None => random_id()?.try_into()?,
    };
    // Manual snapshots.
    let own = layers
        .iter()
        .filter(|layer| layer.env.as_ref() == Some(&id) && layer.key.is_none());
    snapshots.extend(own.map(|layer| (layer, layer.title.clone())));
    snapshots.sort_by_key(|(layer, _)| layer.created);
    let image_key = match snapshots.last() {
        Some((layer, _)) => Some(layer.image_key.clone()),
        None => {
            let images = inventory.images.iter();
            let built = images.filter_map(|(key, item)| match &item.image {
                Read::Fine(image) if image.name == spec.image && image.key == **key => {
                    Some((image.built, &image.key))
                }
                _ => None,
            });
            built.max().map(|(_, key)| key.clone())
        }
    };
    let Some(image_key) = image_key else {
        return Ok(None);
    };
    let mut record = Record::new(spec, id, image_key, Timestamp::now());
    // The recorded command must not lead to another env.
    let named = Spec {
        name: name.clone(),
        ..spec.clone()
    };
    let engine = spec.engine.name();
    record.command = Some(format!("{} --engine {engine}", named.up_command()));
    if let Some((first, _)) = snapshots.first() {
        record.created = first.created;
    }
    record.service = snapshots
        .iter()
        .find_map(|(layer, _)| Some(layer.kept.as_ref()?.socket.clone()));
    record.head.layer = snapshots.last().map(|(layer, _)| layer.id.clone());
    for (layer, title) in snapshots {
        let name = record.free_name(&title);
        record.snapshots.push(Snapshot::of(layer, name));
    }
    Ok(Some(record))
}

/// Finds the id of a lost record: from its layers, except those shared with other envs, or else from its volumes and
/// manual snapshots if no other env can own them.
fn owner(inventory: &Inventory, name: &EnvName, snapshots: &[(&&Layer, String)]) -> Option<EnvId> {
    let records = inventory.fine_records();
    let known: BTreeSet<&EnvId> = records.map(|(_, record)| &record.id).collect();
    let snapshots = snapshots.iter().rev();
    let mut made = snapshots.filter_map(|(layer, _)| layer.env.as_ref());
    if let Some(id) = made.find(|id| !known.contains(id)) {
        return Some(id.clone());
    }
    let volumes = inventory.volumes.iter();
    let lost: BTreeSet<EnvId> = volumes
        .filter_map(|volume| volume.split('-').next()?.parse().ok())
        .chain(inventory.nameless().filter_map(|layer| layer.env.clone()))
        .filter(|id| !known.contains(id))
        .collect();
    let mut others = inventory.envs.iter().filter(|(other, _)| *other != name);
    let others = others.any(|(_, env)| env.is_unreliable());
    match lost.len() {
        1 if !others => lost.into_iter().next(),
        _ => None,
    }
}

impl Inventory {
    /// Returns the layers that have no step's key and that no record needs.
    fn nameless(&self) -> impl Iterator<Item = &Layer> {
        let tops = self.fine_records().flat_map(|(_, record)| record.layers());
        let named = with_parents(tops, |id| self.layer(id));
        self.fine_layers()
            .filter(move |layer| layer.key.is_none() && !named.contains(&layer.id))
    }
}

/// Adds the volumes `<id>-<name>-<random>` to a record, including those that the spec no longer names. Of several
/// volumes with the same name, the env gets one. The others get another id, so that nothing discards them. Returns
/// their new paths.
fn adopt_volumes(
    store: &Store,
    inventory: &Inventory,
    record: &mut Record,
    damaged: &[u8],
) -> Result<Vec<PathBuf>> {
    let damaged = String::from_utf8_lossy(damaged);
    let is_in_layer = |id: &VolumeId| {
        let live = VolumeState::Live(id.clone());
        let mut layers = inventory.fine_layers();
        layers.any(|layer| layer.volumes.values().any(|state| *state == live))
    };
    let place = store.root().join("volumes");
    let mut found: BTreeMap<VolumeName, Vec<VolumeId>> = BTreeMap::new();
    let mut others = Vec::new();
    for volume in &inventory.volumes {
        let rest = volume.strip_prefix(record.id.as_str());
        let Some(rest) = rest.and_then(|rest| rest.strip_prefix('-')) else {
            continue;
        };
        let name = rest.rsplit_once('-').map(|(name, _)| name.parse());
        match (name, volume.parse()) {
            (Some(Ok(name)), Ok(id)) => found.entry(name).or_default().push(id),
            _ => others.push(volume.clone()),
        }
    }
    for (name, mut ids) in found {
        // Prefers the volume in the damaged record, then one in a layer, then the newest.
        ids.sort_by_cached_key(|id| {
            let changed = fs::symlink_metadata(place.join(id)).and_then(|found| found.modified());
            (damaged.contains(id.as_str()), is_in_layer(id), changed.ok())
        });
        if let Some(id) = ids.pop() {
            record.head.volumes.insert(name, id);
        }
        others.extend(ids.iter().map(ToString::to_string));
    }
    let mut renamed = Vec::new();
    for other in others {
        let id: EnvId = random_id()?.try_into()?;
        let new = place.join(other.replacen(record.id.as_str(), id.as_str(), 1));
        fs::rename(place.join(&other), &new)?;
        renamed.push(new);
    }
    Ok(renamed)
}

/// Checks whether a store's `format` is damaged or lost; with `write`, rebuilds it from what exists.
///
/// Returns the problem, or `None`.
pub(crate) fn repair_format(root: &Path, write: bool) -> Result<Option<Problem>> {
    if !root.is_dir() {
        return Ok(None);
    }
    // The path that the user named may be a link.
    let root = &fs::canonicalize(root)?;
    access::check_owner(root)?;
    let path = root.join("format");
    let message = match fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let has_all = DATA.iter().all(|name| root.join(name).is_dir());
            // Other commands refuse such a store until its `format` is repaired.
            if !has_all && !has_lost_format(root)? {
                return Ok(None);
            }
            "is missing".to_owned()
        }
        Err(error) => return Err(error.into()),
        Ok(bytes) => match serde_json::from_slice::<Format>(&bytes) {
            Ok(_) => return Ok(None),
            Err(error) => format!("is damaged: {error}"),
        },
    };
    if !is_written_by_rockenv(root)? {
        return Err(not_found!(
            "`{}` is not a rockenv store: rockenv has written nothing in it",
            root.display()
        )
        .help("name the store's directory: rockenv --home DIR fsck"));
    }
    refuse_newer(&path, VERSION, &format!("store `{}`", root.display()))?;
    if write {
        let _lock = Lock::exclusive(&root.join("lock"), "the store", "fsck", lock::STORE_WAIT)?;
        let method = method_of(root)?;
        if path.exists() {
            quarantine(&path)?;
        }
        Format::write(root, method)?;
    }
    Ok(Some(Problem {
        object: format!("`{}`", path.display()),
        message,
        help: super::REPAIR.to_owned(),
        fix: Fix::Nothing,
    }))
}

/// Directories of a store's data.
const DATA: [&str; 3] = ["envs", "layers", "images"];

/// Returns whether a directory has the data of a store, but no `format`. A store that is being created has none yet.
pub(in crate::store) fn has_lost_format(root: &Path) -> Result<bool> {
    let has_data = |place| names(&root.join(place)).is_ok_and(|names| !names.is_empty());
    let has_data = DATA.into_iter().any(has_data) && is_written_by_rockenv(root)?;
    // Looked for last: another command may have created the store, and an env in it, a moment ago.
    Ok(has_data && fs::symlink_metadata(root.join("format")).is_err())
}

/// Returns whether rockenv wrote the content of a directory, which a repair may delete. Directory names prove
/// nothing.
fn is_written_by_rockenv(root: &Path) -> Result<bool> {
    let text = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let id = text("id");
    let is_id = id.trim().len() == 16 && id.trim().bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id && text(TAG) == TAG_TEXT {
        return Ok(true);
    }
    let is_env = |name: &str, directory: &Path| {
        let is_record = |record: Read<Record>| record.fine().is_some();
        name.parse::<EnvName>().is_ok() && is_record(read(&directory.join("record.json")))
    };
    let is_layer = |name: &str, directory: &Path| {
        let layer: Read<Layer> = read(&directory.join("layer.json"));
        layer.fine().is_some_and(|layer| *layer.id == *name)
    };
    let is_image = |name: &str, directory: &Path| {
        let image: Read<Image> = read(&directory.join("image.json"));
        image.fine().is_some_and(|image| *image.key == *name)
    };
    Ok(has_entry(&root.join("envs"), is_env)?
        || has_entry(&root.join("layers"), is_layer)?
        || has_entry(&root.join("images"), is_image)?)
}

/// Returns whether `is_ours` accepts the name and the path of an entry of a directory.
fn has_entry(directory: &Path, is_ours: impl Fn(&str, &Path) -> bool) -> Result<bool> {
    let mut names = names(directory)?.into_iter();
    Ok(names.any(|name| is_ours(&name, &directory.join(&name))))
}

/// Determines the snapshot method from existing trees, or else from the file system's capabilities.
fn method_of(root: &Path) -> Result<Method> {
    for name in names(&root.join("layers"))? {
        if root.join("layers").join(&name).join("diff").is_dir() {
            return Ok(Method::Overlay);
        }
        let tree = root.join("layers").join(&name).join("root");
        if tree.is_dir() {
            return Ok(match tree::btrfs::is_subvolume(&tree)? {
                true => Method::Btrfs,
                false => Method::Reflink,
            });
        }
    }
    Ok(tree::probe(root)?.method)
}
