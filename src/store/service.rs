//! Owns what the store keeps at a Docker or Podman service: the trees of envs of these engines are containers there,
//! their snapshots images. The store keeps the description of each, and their build volumes, as for every other env.
//!
//! Beside the files that belong to an object lies a list of it, `objects.json`: whoever deletes those files for
//! good has the object removed first. While the service is down they stay in the trash.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::env::Freeze;
use super::{LockedEnv, Store, atomic};
use crate::engine::docker::{Image, Object, Place, Service, What};
use crate::error::{Error, Result};

/// Name of the list of objects.
const OBJECTS: &str = "objects.json";
/// Layers of an image from which on the next is merged into one: Docker's overlays take 125.
const MAX_LAYERS: usize = 100;
/// How deep below an entry of the trash a list can be: an env's directory holds `trees/<id>/`.
const DEPTH: usize = 2;

/// A snapshot's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The service's socket.
    pub socket: PathBuf,
    /// The image's id.
    pub image: String,
}

impl Store {
    /// Returns the name that an image of the store has at a service.
    fn imported(key: &str) -> String {
        format!("rockenv/image-{}", &key[..key.len().min(32)])
    }

    /// Makes sure that an image of the store is there at a service; `say` is told before a long copy.
    pub fn import_image(
        &self,
        service: &Service,
        key: &str,
        say: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let name = Self::imported(key);
        if service.image(&name)?.is_some() {
            return Ok(());
        }
        say(&format!("copying the image into {}", service.flavour));
        // Before it is there: a list may name what is not, but nothing may be there that no list names.
        let directory = self.root().join("images").join(key);
        let mut objects = read_objects(&directory)?;
        let object = Object {
            socket: service.socket.clone(),
            what: What::Image(name.clone()),
        };
        if !objects.contains(&object) {
            objects.push(object);
            write_objects(&directory, &objects)?;
        }
        service.import(&self.image_root(key), &name)
    }

    /// Removes what the lists in a directory name, before its files are deleted for good. Says whether all of it
    /// could be.
    pub(super) fn remove_objects(&self, directory: &Path) -> bool {
        let mut clean = true;
        let mut left = vec![(directory.to_owned(), 0)];
        while let Some((directory, depth)) = left.pop() {
            // An unreadable list is as good as none: `fsck` looks for objects that nothing names.
            for object in read_objects(&directory).unwrap_or_default() {
                clean &= object.remove().is_ok();
            }
            if depth < DEPTH {
                let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
                let directories =
                    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
                left.extend(directories.map(|entry| (entry.path(), depth + 1)));
            }
        }
        clean
    }
}

impl LockedEnv<'_> {
    /// Connects to the service that the env lives at; `None` for an env of systemd-nspawn.
    pub fn service(&self) -> Result<Option<Service>> {
        let socket = self.record().and_then(|record| record.service.as_ref());
        socket.map(|socket| Service::connect(socket)).transpose()
    }

    /// Makes a live tree on `layer` that is a container, as soon as something runs on it.
    pub(super) fn thaw_service(&self, socket: &Path) -> Result<String> {
        let tree = super::random_id()?;
        let directory = self.directory().join("trees").join(&tree);
        fs::create_dir_all(&directory)?;
        write_objects(
            &directory,
            &[Object {
                socket: socket.to_owned(),
                what: What::Tree(tree.clone()),
            }],
        )?;
        Ok(tree)
    }

    /// Returns the container that the live tree `tree` on `layer` is.
    pub fn place(
        &self,
        socket: &Path,
        tree: &str,
        layer: Option<&str>,
        key: Option<&str>,
    ) -> Result<Place> {
        let record = self.known_record()?;
        let image = match layer {
            None => Store::imported(&record.image_key),
            Some(id) => {
                let layer = self.store.layer(id)?;
                layer
                    .and_then(|layer| layer.kept)
                    .ok_or_else(|| {
                        Error::not_found(format!("snapshot `{id}` has no image at the service"))
                            .help("rockenv fsck")
                    })?
                    .image
            }
        };
        let readable: String = self
            .name()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        Ok(Place {
            socket: socket.to_owned(),
            image,
            name: format!("rockenv-{}-{tree}", readable.trim_matches('-')),
            store: self.store.root().to_string_lossy().into_owned(),
            env: record.id.clone(),
            tree: tree.to_owned(),
            key: key.unwrap_or_default().to_owned(),
        })
    }

    /// Removes containers and images of the env that nothing names: what a killed command left. While the service
    /// is down there is nothing to do, and they are found the next time.
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
        for (container, labels) in service.containers("env", &record.id)? {
            if !record.trees().any(|known| *known == tree(&labels)) {
                service.remove_container(&container)?;
            }
        }
        let images = service.images("env", &record.id)?;
        if images.is_empty() {
            return Ok(());
        }
        // A service may finish freezing an image long after the command that wanted it was killed.
        let mut known: BTreeSet<String> = record.trees().map(str::to_owned).collect();
        for id in self.store.layers_of(&record.id)? {
            known.extend(self.store.layer(&id)?.map(|layer| layer.tree));
        }
        for (image, labels) in images {
            if !known.contains(&tree(&labels)) {
                service.remove_image(&image)?;
            }
        }
        Ok(())
    }

    /// Freezes a live tree as an image.
    pub(super) fn commit_tree(&self, socket: &Path, freeze: &Freeze<'_>) -> Result<Kept> {
        let service = Service::connect(socket)?;
        let place = self.place(socket, freeze.tree, freeze.parent, freeze.key)?;
        let image = match service.state(&place.name)? {
            Some(state) => {
                if state.running {
                    service.stop(&place.name)?;
                }
                let name = format!("rockenv/snapshot-{}", place.tree);
                let below = lost_or(service.image(&place.image)?, &place.image)?;
                let image = if below.layers < MAX_LAYERS {
                    service.commit(&place.name, &name)?
                } else {
                    service.commit_whole(&place.name, &name, &place.tree)?;
                    lost_or(service.image(&name)?, &name)?.id
                };
                service.remove_container(&place.name)?;
                image
            }
            // Nothing ever ran on it, or its container is gone.
            None => {
                let below = service.below(&place)?;
                lost_or(service.image(&below)?, &below)?.id
            }
        };
        Ok(Kept {
            socket: socket.to_owned(),
            image,
        })
    }

    /// Returns by how much a live tree is larger than what it stands on, in bytes.
    pub fn written_at_service(&self, tree: &str, parent: Option<&str>) -> Result<Option<u64>> {
        let Some(service) = self.service()? else {
            return Ok(None);
        };
        let place = self.place(&service.socket, tree, parent, None)?;
        service.written(&place.name).map(Some)
    }
}

fn lost_or(image: Option<Image>, name: &str) -> Result<Image> {
    image.ok_or_else(|| {
        Error::not_found(format!("image `{name}` was deleted behind rockenv's back"))
            .help("rockenv up ...: what stood on it is built again")
    })
}

fn read_objects(directory: &Path) -> Result<Vec<Object>> {
    Ok(atomic::read_json(&directory.join(OBJECTS))?.unwrap_or_default())
}

fn write_objects(directory: &Path, objects: &[Object]) -> Result<()> {
    atomic::write_json(&directory.join(OBJECTS), &objects)
}
