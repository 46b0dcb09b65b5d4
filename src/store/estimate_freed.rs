//! Owns estimating what removing each layer, image and failed tree frees on the store's file system: recorded figures
//! if nothing can have changed them, else measured ones.
//!
//! If trees share blocks, a removal frees only blocks that nothing else holds, and sharing changes with every step.
//! In that case everything removable is measured against the rest of the store, but only if the result matters.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::Store;
use super::check::names;
use super::layer::VolumeState;
use crate::engine::docker::Service;
use crate::plan::gc::roots::Roots;
use crate::plan::gc::{Frozen, Inventory};
use crate::plan::ids::{EnvName, ImageKey, LayerId, TreeId};
use crate::store::inventory::{InventoryOptions, allocated};
use crate::store::usage::report::{Inside, count};
use crate::sys::error::{Result, ResultExt as _};
use crate::tree::measure::{MeasureOptions, Root};
use crate::tree::{self, FileSystem, Method, measure};

/// The class and owner of everything that stays.
const KEPT: u32 = 0;
/// Directories that may share blocks with trees: a step may clone its files into a cache or an output.
const HOLDERS: [&str; 7] = [
    "images", "layers", "volumes", "envs", "caches", "outputs", "sources",
];

impl Store {
    /// Estimates the bytes of items that were never measured or may be elsewhere, and of the whole store if a limit
    /// needs them.
    pub(super) fn estimate_freed(
        &self,
        inventory: &mut Inventory,
        options: &InventoryOptions,
        keep_last: usize,
    ) -> Result<()> {
        let roots = Roots::of(inventory, keep_last);
        let mut services = Services {
            system: FileSystem::of(self.root())?,
            known: BTreeMap::new(),
        };
        for (id, item) in &mut inventory.layers {
            if !options.everything && roots.layers.contains_key(id) {
                continue;
            }
            let directory = self.layer_dir(id);
            let below = self.below(item.layer.parent.as_ref(), &item.layer.image_key);
            // The recorded size is that of the tree, without the copies of results.
            let results = self.results_bytes(id);
            if let Some(kept) = &item.layer.kept {
                // The recorded size is that of the tree at the service. Only build volumes and results are in the
                // store.
                item.at_service = match services.beside(&kept.socket) {
                    Some(_) => item.bytes,
                    None => 0,
                };
                let volumes = directory.join("volumes");
                item.bytes = item.at_service + results;
                if volumes.exists() {
                    item.bytes += self.written(&volumes, &below.join("volumes"))?;
                }
            } else if item.layer.cost.is_none() || item.arrived.is_some() {
                item.bytes = self.written(&directory, &below)?;
            } else {
                item.bytes += results;
            }
        }
        for (key, image) in &mut inventory.images {
            if options.everything || !roots.images.contains_key(key) {
                image.bytes = allocated(&self.image_dir(key));
            }
        }
        for (name, env) in inventory.envs.iter_mut().filter(|(_, env)| !env.busy) {
            let Some(failed) = &env.record.failed else {
                continue;
            };
            env.failed = match &env.record.service {
                Some(socket) => services
                    .beside(socket)
                    .map_or(0, |service| written_at(service, &failed.tree)),
                None => {
                    let below = self.below(failed.parent.as_ref(), &env.record.image_key);
                    self.written(&self.tree_dir(name, &failed.tree), &below)?
                }
            };
        }
        if options.used {
            let report = count(self, None, Inside::Directories(0))?;
            inventory.used = Some(report.total.allocated);
        }
        Ok(())
    }

    /// Measures everything removable against the rest of the store, if recorded figures may be wrong. Returns whether
    /// it did.
    ///
    /// Items are measured from the bottom up: a block that only an item and those based on it share counts for the
    /// lowest of them. The sum over an item and everything based on it is what removing them frees.
    pub fn estimate_shared(
        &self,
        inventory: &mut Inventory,
        options: &InventoryOptions,
        keep_last: usize,
    ) -> Result<bool> {
        let roots = Roots::of(inventory, keep_last);
        let items = removable_items(inventory, &roots, options.everything);
        let unsure = |(item, _): &(RemovableItem, u32)| match item {
            RemovableItem::Layer(id) => self.is_unsure(&inventory.layers[id.as_str()]),
            RemovableItem::Image(_) | RemovableItem::Failed(..) => false,
        };
        if self.method() == Method::Overlay || !items.iter().any(unsure) {
            return Ok(false);
        }
        // Data without allocated blocks would count for every tree that shares it.
        nix::unistd::syncfs(fs::File::open(self.root())?.file())
            .context(|| format!("cannot sync `{}`", self.root().display()))?;
        let mut places = Vec::new();
        for (at, (item, owner)) in (1..).zip(&items) {
            let paths = match item {
                RemovableItem::Image(key) => vec![self.image_dir(key)],
                RemovableItem::Layer(id) if inventory.layers[id.as_str()].layer.kept.is_some() => {
                    vec![self.layer_dir(id).join("volumes"), self.results_dir(id)]
                }
                RemovableItem::Layer(id) => vec![self.layer_dir(id)],
                RemovableItem::Failed(env, tree) => vec![self.tree_dir(env, tree)],
            };
            let roots = paths.into_iter().map(|path| Root::new(path, at));
            places.extend(roots.map(|root| root.owned_by(*owner)));
        }
        places.extend(self.holders());
        let usage = measure::scan(&places, &MeasureOptions::with_extents(true));
        for (at, (item, _)) in (1..).zip(&items) {
            let bytes = usage.class(at).exclusive;
            match item {
                RemovableItem::Image(key) => {
                    if let Some(image) = inventory.images.get_mut(key) {
                        image.bytes = bytes;
                    }
                }
                RemovableItem::Layer(id) => {
                    if let Some(item) = inventory.layers.get_mut(id) {
                        item.bytes = item.at_service + bytes;
                    }
                }
                RemovableItem::Failed(env, _) => {
                    if let Some(env) = inventory.envs.get_mut(env) {
                        env.failed = bytes;
                    }
                }
            }
        }
        Ok(true)
    }

    /// Returns the bytes that emptying the trash frees, which `gc` does first: blocks that nothing else holds.
    pub fn trash_bytes(&self) -> Result<u64> {
        const TRASH: u32 = 1;
        let trash = self.root().join("trash");
        let entries = names(&trash)?;
        if entries.is_empty() {
            return Ok(0);
        }
        let extents = self.method() != Method::Overlay;
        let entries = entries.into_iter();
        let mut places: Vec<Root> = entries
            .map(|name| Root::new(trash.join(name), TRASH))
            .collect();
        if extents {
            places.extend(self.holders());
        }
        let options = MeasureOptions::with_extents(extents);
        Ok(measure::scan(&places, &options).class(TRASH).exclusive)
    }

    /// Returns the directories that stay and may share blocks with removed items.
    fn holders(&self) -> impl Iterator<Item = Root> {
        let others = HOLDERS.iter().map(|name| self.root().join(name));
        others.map(|path| Root::new(path, KEPT))
    }

    /// Returns whether the recorded figure of a layer may differ from what its removal frees.
    fn is_unsure(&self, item: &Frozen) -> bool {
        let mut volumes = item.layer.volumes.values();
        // A clone's growth over its parent is not what was written to it; only btrfs knows that. Live volumes, and
        // those of later steps, may share blocks that were a frozen volume's own when it was measured.
        (self.method() == Method::Reflink && item.layer.kept.is_none())
            || item.layer.cost.is_none()
            // The figure is another machine's, whose store may use another method.
            || item.arrived.is_some()
            // Copies of results may share blocks with the files in output volumes.
            || self.results_dir(&item.layer.id).exists()
            || volumes.any(|state| *state == VolumeState::Frozen)
    }

    pub(super) fn tree_dir(&self, env: &EnvName, tree: &TreeId) -> PathBuf {
        self.env_dir(env).join("trees").join(tree)
    }

    /// Returns the directory of what a tree was made from.
    fn below(&self, parent: Option<&LayerId>, image: &ImageKey) -> PathBuf {
        parent.map_or_else(|| self.image_dir(image), |id| self.layer_dir(id))
    }

    fn results_bytes(&self, layer: &LayerId) -> u64 {
        let results = self.results_dir(layer);
        match results.exists() {
            true => allocated(&results),
            false => 0,
        }
    }

    /// Returns the bytes on disk that a tree holds and its parent does not.
    fn written(&self, directory: &Path, below: &Path) -> Result<u64> {
        let root = directory.join("root");
        match self.method() {
            Method::Overlay => {
                // `flat` consists of hard links to files of the layers below.
                let flat = Root::new(directory.join("flat"), KEPT);
                let places = [Root::new(directory, 1), flat];
                let usage = measure::scan(&places, &MeasureOptions::default());
                Ok(usage.class(1).allocated)
            }
            // A copied store has plain directories instead of subvolumes.
            Method::Btrfs if root.exists() && tree::btrfs::is_subvolume(&root)? => {
                tree::btrfs::written(&root)
            }
            Method::Btrfs | Method::Reflink => {
                let places = [Root::new(directory, 1), Root::new(below, KEPT)];
                let options = MeasureOptions::with_extents(true);
                Ok(measure::scan(&places, &options).class(1).exclusive)
            }
        }
    }
}

/// An item whose blocks others may share.
enum RemovableItem {
    Image(ImageKey),
    Layer(LayerId),
    Failed(EnvName, TreeId),
}

/// Returns the removable items from the bottom up, each with its owner: one owner for all items based on the same
/// removable item. With `everything`, includes those that stay, each with its own owner.
fn removable_items(
    inventory: &Inventory,
    roots: &Roots,
    everything: bool,
) -> Vec<(RemovableItem, u32)> {
    let mut owners: BTreeMap<String, u32> = BTreeMap::new();
    let mut owner = |bottom: &str| {
        let next = u32::try_from(owners.len() + 1).unwrap_or(u32::MAX);
        *owners.entry(bottom.to_owned()).or_insert(next)
    };
    let mut items = Vec::new();
    for key in inventory.images.keys() {
        if everything || !roots.images.contains_key(key) {
            items.push((RemovableItem::Image(key.clone()), owner(key)));
        }
    }
    let mut layers = Vec::new();
    for id in inventory.layers.keys() {
        if everything || !roots.layers.contains_key(id) {
            layers.push((bottom(inventory, roots, id), id));
        }
    }
    layers.sort_by_key(|((depth, _), _)| *depth);
    for ((_, bottom), id) in layers {
        items.push((RemovableItem::Layer(id.clone()), owner(bottom)));
    }
    for (name, env) in &inventory.envs {
        // For an env of a service, the service has the tree.
        if let (Some(failed), None, false) = (&env.record.failed, &env.record.service, env.busy) {
            let own = format!("{name}/");
            let parent = failed.parent.as_ref();
            let below = parent
                .filter(|id| inventory.layers.contains_key(*id) && !roots.layers.contains_key(*id));
            let bottom = below.map_or(own.as_str(), |id| bottom(inventory, roots, id).1);
            let tree = RemovableItem::Failed(name.clone(), failed.tree.clone());
            items.push((tree, owner(bottom)));
        }
    }
    items
}

/// Returns how many removable items are below a layer, and the lowest of them, whose removal requires that of all
/// above.
fn bottom<'a>(inventory: &'a Inventory, roots: &Roots, id: &'a LayerId) -> (usize, &'a str) {
    let (mut depth, mut at) = (0, id);
    if roots.layers.contains_key(id) {
        return (depth, at.as_str());
    }
    // A damaged chain may be circular.
    while depth <= inventory.layers.len() {
        let layer = &inventory.layers[at].layer;
        match &layer.parent {
            Some(parent)
                if inventory.layers.contains_key(parent) && !roots.layers.contains_key(parent) =>
            {
                at = parent;
            }
            None if inventory.images.contains_key(&layer.image_key)
                && !roots.images.contains_key(&layer.image_key) =>
            {
                return (depth + 1, &layer.image_key);
            }
            _ => break,
        }
        depth += 1;
    }
    (depth, at)
}

/// Returns the bytes that the containers of a tree wrote; 0 if the service does not know.
fn written_at(service: &Service, tree: &str) -> u64 {
    let containers = service.containers("tree", tree).unwrap_or_default();
    let sizes = containers.iter().map(|(id, _)| service.sizes(id));
    sizes.flatten().map(|(own, _)| own).sum()
}

/// The services that were asked where they keep their data.
struct Services {
    system: FileSystem,
    /// By socket; `None` if a removal there frees nothing on the store's file system.
    known: BTreeMap<PathBuf, Option<Service>>,
}

impl Services {
    /// Returns the service at a socket if all of its data is on the store's file system. An unresponsive service
    /// frees nothing: its removed objects wait in the trash.
    fn beside(&mut self, socket: &Path) -> Option<&Service> {
        let service = self.known.entry(socket.to_owned()).or_insert_with(|| {
            let service = Service::connect(socket).ok()?;
            let here = |place: &PathBuf| FileSystem::of(place).is_ok_and(|it| it == self.system);
            let places = service.places().unwrap_or_default();
            (!places.is_empty() && places.iter().all(here)).then_some(service)
        });
        service.as_ref()
    }
}
