//! Owns the store's objects at a Docker or Podman service. For these engines, live trees are containers there, and
//! snapshots are images. The store keeps their descriptions, and their build volumes, as for every other env.
//!
//! The files of each object include a list, `objects.json`. A process that deletes the files for good must remove the
//! listed objects first. While the service is down, the files stay in the trash, whose names tell where lists are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::check::names;
use super::lock::Lock;
use super::shared::ARRIVING;
use super::snapshot::Freeze;
use super::{LockedEnv, Store};
use crate::engine::docker::{
    ArchiveEntry, ContainerTree, EngineImage, Flavour, Labels, Object, ObjectFilter, Service,
};
use crate::plan::ids::{ImageKey, LayerId, StepKey, TreeId};
pub(crate) use crate::plan::layer::SnapshotImage;
use crate::sys::atomic::{self, random_id};
use crate::sys::error::Result;
use crate::sys::signals::stop_if_pending;

const OBJECTS: &str = "objects.json";
/// Once an image has this many layers, the next snapshot is merged into one: Docker's overlays allow 125.
const MAX_LAYERS: usize = 100;
/// Part of the names of trash entries that have lists. The number of directories above the lists follows.
const LISTS: &str = "-lists";

impl Store {
    /// Returns the name of an image at a service. It includes the store's id, which other users do not know.
    /// Otherwise any user could make an image with this name and key, and `docker load` would bring it here.
    fn imported(&self, key: &ImageKey) -> Result<String> {
        let name = format!("rockenv/image-{}", &key[..key.len().min(32)]);
        Ok(match self.id()?.as_str() {
            "" => name,
            id => format!("{name}-{id}"),
        })
    }

    /// Copies an image of the store to a service, unless it is there already. Calls `say` before a long copy.
    pub fn import_image(
        &self,
        service: &Service,
        key: &ImageKey,
        say: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let directory = self.image_dir(key);
        let name = self.imported(key)?;
        if self.has_copy(service, key)? {
            return Ok(());
        }
        // If two commands copied at once, the service would keep both copies, one without its name.
        let mut is_told = false;
        let lock = directory.join("copy.lock");
        let _lock = Lock::exclusive_waiting(&lock, "up", &mut |waits| {
            if !std::mem::replace(&mut is_told, true) {
                say(&format!("the image's copy {waits}"));
            }
            stop_if_pending()
        })?;
        if self.has_copy(service, key)? {
            return Ok(());
        }
        let mut objects = read_objects(&directory)?;
        let mut object = object(&service.socket, ObjectFilter::Image(name.clone()));
        objects.retain(|known| !known.is_same(&object));
        if !self.id()?.is_empty() {
            object.id = service.imported(&name, key)?;
        }
        objects.insert(0, object);
        // Written before the object exists: a list may name a missing object, but every object must be in a list.
        write_objects(&directory, &objects)?;
        if let Some(object) = objects.first_mut()
            && object.id.is_none()
        {
            say(&format!("copying the image into {}", service.flavour));
            object.id = Some(service.import(&self.image_root(key), &name, key)?);
            write_objects(&directory, &objects)?;
        }
        Ok(())
    }

    /// Returns whether an image that was copied to a service is still there.
    fn has_copy(&self, service: &Service, key: &ImageKey) -> Result<bool> {
        match self.imported_id(&service.socket, key)? {
            Some(id) => Ok(service.image(&id)?.is_some()),
            None => Ok(false),
        }
    }

    /// Returns the id of a store's image at a service, if it was copied there. Version 0.1.0 recorded images by a name
    /// that other users know, and took theirs for copies.
    pub fn imported_id(&self, socket: &Path, key: &ImageKey) -> Result<Option<String>> {
        let own = object(socket, ObjectFilter::Image(self.imported(key)?));
        let objects = read_objects(&self.image_dir(key))?;
        let found = objects.into_iter().find(|object| object.is_same(&own));
        Ok(found.and_then(|object| object.id))
    }

    /// Returns the sockets of the services that images of the store were copied to.
    pub fn services_of_images(&self) -> Result<BTreeSet<PathBuf>> {
        let mut sockets = BTreeSet::new();
        for image in self.images()? {
            let objects = read_objects(&self.image_dir(&image.key))?;
            sockets.extend(objects.into_iter().map(|object| object.socket));
        }
        Ok(sockets)
    }

    /// Records beside a tree's files that its containers and images are at a service.
    pub fn note_tree(&self, directory: &Path, socket: &Path, tree: &TreeId) -> Result<()> {
        let object = object(socket, ObjectFilter::Tree(tree.clone()));
        write_objects(directory, &[object])
    }

    /// Freezes a container, which must not run; `bare` means that the image is the complete snapshot of a step. The
    /// container stays: no command looks for the changes in an image that the store has not recorded.
    pub fn freeze_container(
        &self,
        service: &Service,
        place: &ContainerTree,
        bare: bool,
    ) -> Result<SnapshotImage> {
        let name = format!("rockenv/snapshot-{}", place.tree);
        let below = known_image(service, &place.image)?;
        let image = if below.layers < MAX_LAYERS {
            let whole = bare.then_some(below.layers);
            service.commit(&place.name, &name, whole)?
        } else {
            service.commit_whole(&place.name, &name, &place.tree)?;
            known_image(service, &name)?.id
        };
        Ok(SnapshotImage {
            socket: service.socket.clone(),
            image,
        })
    }

    /// Removes the objects in the lists of a directory, before its files go. Returns whether all could be removed.
    pub(super) fn remove_objects(&self, directory: &Path) -> bool {
        let mut clean = true;
        for object in self.objects_below(directory) {
            clean &= self.remove_object(&object).is_ok();
        }
        clean
    }

    /// Returns the objects in the lists of a directory of the store. An unreadable list counts as empty.
    pub(super) fn objects_below(&self, directory: &Path) -> Vec<Object> {
        let directories = match self.depth_of_lists(directory) {
            None => Vec::new(),
            Some(0) => vec![directory.to_owned()],
            Some(_) => {
                let names = names(directory).unwrap_or_default();
                names.iter().map(|name| directory.join(name)).collect()
            }
        };
        let lists = directories.iter().map(|place| read_objects(place));
        lists.flat_map(Result::unwrap_or_default).collect()
    }

    /// Returns the objects in the lists of all entries of a directory of the store.
    pub(super) fn objects_in(&self, above: &Path) -> Result<Vec<Object>> {
        let entries = names(above)?.into_iter();
        let objects = entries.flat_map(|name| self.objects_below(&above.join(name)));
        Ok(objects.collect())
    }

    /// Returns how many directories below a directory of the store its lists are; `None` if rockenv writes none there.
    /// Files of steps, images and sources are in the other places, and a list of theirs may name anything.
    fn depth_of_lists(&self, directory: &Path) -> Option<usize> {
        let below = directory.strip_prefix(&self.root).ok()?;
        let parts: Vec<&str> = below.iter().map(OsStr::to_str).collect::<Option<_>>()?;
        match parts[..] {
            ["images", name] if name.starts_with(ARRIVING) => Some(1),
            ["images" | "layers", _] | ["envs", _, "trees", _] => Some(0),
            // A repair may have set one tree or all of them aside.
            ["envs", _, name] if name.starts_with("tree-") => Some(0),
            ["envs", _, name] if name.starts_with("trees") => Some(1),
            ["trash", name] => name.rsplit_once(LISTS)?.1.parse().ok(),
            _ => None,
        }
    }

    /// Returns a name in the trash for a directory of the store.
    pub(super) fn name_in_trash(&self, directory: &Path) -> Result<String> {
        let id = random_id()?;
        Ok(match self.depth_of_lists(directory) {
            Some(depth) => format!("{id}{LISTS}{depth}"),
            None => id,
        })
    }
}

impl LockedEnv<'_> {
    /// Connects to the env's service; `None` for an env of systemd-nspawn.
    pub fn service(&self) -> Result<Option<Service>> {
        let socket = self.record().and_then(|record| record.service.as_ref());
        socket.map(|socket| Service::connect(socket)).transpose()
    }

    /// Describes the container of a live tree. Refuses one that a copy of the store made: both would change it.
    pub fn place(
        &self,
        socket: &Path,
        tree: &TreeId,
        layer: Option<&LayerId>,
        key: Option<&StepKey>,
    ) -> Result<ContainerTree> {
        for (_, labels) in Service::connect(socket)?.containers("tree", tree)? {
            if let Some(copy) = self.store.copy_with(&labels) {
                let (name, root) = (self.name(), copy.root.display());
                return Err(unavailable!(
                    "the container of env `{name}` belongs to the store at `{root}`, which this store is a copy of"
                )
                .help(format!("use that store, or here: rockenv rm {name}")));
            }
        }
        Ok(ContainerTree {
            socket: socket.to_owned(),
            image: self.image_at(socket, layer)?,
            name: self.container_name(tree),
            store: self.store.root().to_string_lossy().into_owned(),
            id: self.store.id()?,
            env: Some(self.known_record()?.id.clone()),
            tree: tree.clone(),
            key: key.cloned(),
        })
    }

    /// Returns the service's id of the image with a layer, or else of the env's base image.
    fn image_at(&self, socket: &Path, layer: Option<&LayerId>) -> Result<String> {
        let Some(id) = layer else {
            let image = &self.known_record()?.image_key;
            return self.store.imported_id(socket, image)?.ok_or_else(|| {
                not_found!(
                    "the image of env `{}` is missing from its container service",
                    self.name()
                )
                .help("`rockenv up ...` copies it there again")
            });
        };
        let kept = self.store.layer(id)?.and_then(|layer| layer.kept);
        let kept = kept.ok_or_else(|| {
            not_found!("snapshot `{id}` has no image in the container service").help("rockenv fsck")
        })?;
        Ok(kept.image)
    }

    /// Lists the tree of a layer, or else of the base image, through a container that never runs.
    pub fn list_image(
        &self,
        service: &Service,
        layer: Option<&LayerId>,
    ) -> Result<BTreeMap<PathBuf, ArchiveEntry>> {
        let labels = Labels {
            store: self.store.root().to_string_lossy().into_owned(),
            id: self.store.id()?,
            env: Some(self.known_record()?.id.clone()),
            ..Labels::default()
        };
        let image = self.image_at(&service.socket, layer)?;
        let name = self.container_name(layer.map_or("image", LayerId::as_str));
        service.list_image(&image, &format!("{name}-look"), &labels)
    }

    /// Lists the live tree. If no command has run on it, lists the tree below it.
    pub fn list_live(&self, service: &Service) -> Result<BTreeMap<PathBuf, ArchiveEntry>> {
        let head = &self.known_record()?.head;
        let name = head.tree.as_ref().map(|tree| self.container_name(tree));
        match name {
            Some(name) if service.state(&name)?.is_some() => service.list_container(&name),
            _ => self.list_image(service, head.layer.as_ref()),
        }
    }

    /// Returns the name of the container of a live tree, or for listing a layer.
    pub(super) fn container_name(&self, tree: &str) -> String {
        let readable = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let name: String = self.name().chars().map(readable).collect();
        format!("rockenv-{}-{tree}", name.trim_matches('-'))
    }

    /// Returns whether a live tree at a service was changed since its snapshot.
    pub(super) fn is_changed_at(&self, service: &Service, tree: &TreeId) -> Result<bool> {
        let name = self.container_name(tree);
        // A container does not report changes that were carried over into it.
        Ok(service.carried(tree)?.is_some()
            || service.state(&name)?.is_some() && service.is_changed(&name)?)
    }

    /// Returns the service that lacks the container of a live or failed tree. It was removed outside rockenv, or the
    /// first command on the tree failed before it was made.
    pub fn without_container(&self, tree: &TreeId) -> Result<Option<Flavour>> {
        let Some(service) = self.service()? else {
            return Ok(None);
        };
        let state = service.state(&self.container_name(tree))?;
        let is_lost = state.is_none() && service.carried(tree)?.is_none();
        Ok(is_lost.then_some(service.flavour))
    }

    /// Removes the env's containers and images that no record or layer names, left by a killed command. Does nothing
    /// while the service is down; a later command finds them.
    pub(super) fn remove_strays(&self) -> Result<()> {
        let Some(record) = self.record() else {
            return Ok(());
        };
        let Ok(Some(service)) = self.service() else {
            return Ok(());
        };
        let tree = |labels: &HashMap<String, String>| {
            labels.get("rockenv.tree").cloned().unwrap_or_default()
        };
        let mut known: BTreeSet<TreeId> = record.trees().cloned().collect();
        known.extend(self.store.trees_in(&self.directory)?);
        let is_stray = |known: &BTreeSet<TreeId>, labels: &HashMap<String, String>| {
            !known.contains(tree(labels).as_str()) && self.store.copy_with(labels).is_none()
        };
        let mut containers = service.containers("env", &record.id)?;
        containers.retain(|(_, labels)| is_stray(&known, labels));
        let mut images = service.images("env", &record.id)?;
        if !images.is_empty() {
            // A service may finish freezing an image long after the requesting command was killed.
            known.extend(self.store.trees_of_layers()?);
            images.retain(|(_, labels)| is_stray(&known, labels));
        }
        if containers.is_empty() && images.is_empty() {
            return Ok(());
        }
        // A copy that cannot be read may mention any of them, and must not block this env.
        let Ok(copied) = self.store.trees_of_copies(&service) else {
            return Ok(());
        };
        let stays = |labels: &HashMap<String, String>| copied.contains(tree(labels).as_str());
        containers.retain(|(_, labels)| !stays(labels));
        images.retain(|(_, labels)| !stays(labels));
        for (container, _) in containers {
            service.remove_container(&container)?;
        }
        for (image, _) in images {
            service.remove_image(&image)?;
        }
        Ok(())
    }

    /// Freezes a live tree as an image; `bare` means that its content is not in any build volume.
    pub(super) fn commit_tree(
        &self,
        socket: &Path,
        freeze: &Freeze<'_>,
        bare: bool,
    ) -> Result<SnapshotImage> {
        let service = Service::connect(socket)?;
        let place = self.place(socket, freeze.tree, freeze.parent, freeze.key)?;
        match service.state(&place.name)? {
            Some(state) => {
                if state.running {
                    service.stop(&place.name)?;
                }
                let bare = bare && freeze.key.is_some();
                self.store.freeze_container(&service, &place, bare)
            }
            // The image below it is not the step's result.
            None if freeze.key.is_some() => Err(unavailable!(
                "the container of step `{}` was removed outside rockenv before its snapshot was made",
                freeze.name
            )
            .help("`rockenv up ...` runs the step again")),
            // No command ran on it, or its container is gone.
            None => Ok(SnapshotImage {
                socket: socket.to_owned(),
                image: known_image(&service, &service.below(&place)?)?.id,
            }),
        }
    }

    /// Removes the container of a tree whose image is recorded. If that fails, the env's next command removes it.
    pub(super) fn remove_frozen(&self, tree: &TreeId) {
        if let Ok(Some(service)) = self.service() {
            drop(service.remove_container(&self.container_name(tree)));
        }
    }

    /// Returns by how much a live tree is larger than its parent, in bytes. The tree's container must not be running.
    pub fn written_at_service(&self, tree: &TreeId) -> Result<Option<u64>> {
        let sizes = |service: Service| service.sizes(&self.container_name(tree));
        let sizes = self.service()?.map(sizes).transpose()?;
        Ok(sizes.map(|(written, _)| written))
    }
}

fn known_image(service: &Service, name: &str) -> Result<EngineImage> {
    service.image(name)?.ok_or_else(|| {
        not_found!("image `{name}` was deleted outside rockenv")
            .help("`rockenv up ...` builds the layers above it again")
    })
}

fn object(socket: &Path, what: ObjectFilter) -> Object {
    Object {
        socket: socket.to_owned(),
        what,
        id: None,
    }
}

fn read_objects(directory: &Path) -> Result<Vec<Object>> {
    Ok(atomic::read_json(&directory.join(OBJECTS))?.unwrap_or_default())
}

fn write_objects(directory: &Path, objects: &[Object]) -> Result<()> {
    atomic::write_json(&directory.join(OBJECTS), &objects)
}
