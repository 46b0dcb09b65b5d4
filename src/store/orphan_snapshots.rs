//! Owns snapshots that a service has and the store knows nothing of: its records were lost, in part or as a whole. They are
//! found again by their step's key, and a step with that key need not run again.
//!
//! What is found must be all that the step left: an image whose build volumes held something is not, since these were
//! the store's. And nobody may be about to publish it or to remove it: a tree of which anything in the store speaks is not
//! forgotten. It is looked for in the order in which a tree moves, from envs, or from a pull, to layers to the trash, so that none slips by.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fs_err as fs;
use jiff::Timestamp;

use super::check::names;
use super::history::History;
use super::layer::{Layer, boot_id};
use super::service::objects_below;
use super::shared::ARRIVING;
use super::{LockedEnv, Store};
use crate::engine::docker::{Frozen, Service, What};
use crate::plan::ids::{LayerId, StepKey};
use crate::sys::error::Result;

impl Store {
    /// Returns the forgotten images of steps with one of these keys, the newest last.
    pub fn forgotten(&self, service: &Service, keys: &[&StepKey]) -> Result<Vec<Frozen>> {
        let mut found = service.frozen(&self.root().to_string_lossy())?;
        found.retain(|frozen| keys.contains(&&frozen.key));
        if found.is_empty() {
            return Ok(found);
        }
        let known = self.known_trees()?;
        found.retain(|frozen| !known.contains(&frozen.tree));
        found.sort_by_key(|frozen| frozen.created);
        let mut left = Vec::new();
        for frozen in found {
            // One that was just removed has left the trash too.
            if let Some(image) = service.image(&frozen.image)? {
                left.push(Frozen {
                    whole: frozen.whole.filter(|below| {
                        // Somebody may have given its name to what he built upon it.
                        image.layers == *below || image.layers == below + 1
                    }),
                    ..frozen
                });
            }
        }
        Ok(left)
    }

    /// Returns every tree of which anything in the store speaks.
    pub(super) fn known_trees(&self) -> Result<BTreeSet<String>> {
        let mut known = BTreeSet::new();
        let listed = |directory: &Path, known: &mut BTreeSet<String>| {
            for object in objects_below(directory) {
                if let What::Tree(tree) = object.what {
                    known.insert(tree);
                }
            }
        };
        let images = self.root().join("images");
        for arriving in names(&images)? {
            if arriving.starts_with(ARRIVING) {
                listed(&images.join(arriving), &mut known);
            }
        }
        for env in names(&self.root().join("envs"))? {
            known.extend(names(&self.env_dir(&env).join("trees"))?);
        }
        known.extend(self.layers()?.into_iter().map(|layer| layer.tree));
        let trash = self.root().join("trash");
        for entry in names(&trash)? {
            listed(&trash.join(entry), &mut known);
        }
        Ok(known)
    }

    /// Removes forgotten images that have become useless: their steps have layers.
    pub fn remove_forgotten(&self, service: &Service, keys: &[&StepKey]) -> Result<()> {
        let _lock = self.lock("up")?;
        for frozen in self.forgotten(service, keys)? {
            service.remove_image(&frozen.image)?;
        }
        Ok(())
    }
}

impl LockedEnv<'_> {
    /// Makes layers of forgotten images; `steps` are names and keys of those that need not run, in order. Returns how
    /// many there were.
    pub fn remember(&self, service: &Service, steps: &[(&str, &StepKey)]) -> Result<usize> {
        let record = self.known_record()?;
        let _lock = self.store.lock("up")?;
        let keys: Vec<&StepKey> = steps.iter().map(|(_, key)| *key).collect();
        let mut forgotten: BTreeMap<StepKey, Frozen> = self
            .store
            .forgotten(service, &keys)?
            .into_iter()
            .filter(|frozen| frozen.whole.is_some())
            .map(|frozen| (frozen.key.clone(), frozen))
            .collect();
        let mut parent: Option<LayerId> = None;
        let mut made = Vec::new();
        for (name, key) in steps {
            let id = LayerId::from((*key).clone());
            if let Some(layer) = self.store.layer(&id)? {
                parent = Some(layer.id);
                continue;
            }
            let Some(frozen) = forgotten.remove(*key) else {
                continue;
            };
            let directory = self.directory().join("trees").join(&frozen.tree);
            fs::create_dir_all(&directory)?;
            self.store
                .note_tree(&directory, &service.socket, &frozen.tree)?;
            let layer = Layer {
                id,
                key: Some((*key).clone()),
                parent: parent.take(),
                env: record.id.clone(),
                image_key: record.image_key.clone(),
                tree: frozen.tree,
                title: (*name).to_owned(),
                created: Timestamp::from_second(frozen.created).unwrap_or_default(),
                boot: boot_id(),
                volumes: BTreeMap::new(),
                // Of no other one its image is all there is.
                history: Some(History::Clean),
                cost: None,
                prints: None,
                pins: crate::plan::pins::Pins::new(),
                kept: Some(super::service::Kept {
                    socket: service.socket.clone(),
                    image: frozen.image,
                }),
            };
            // Under the lock nobody else has made one.
            self.store.publish(self.directory(), &layer)?;
            parent = Some(layer.id.clone());
            made.push(layer.id);
        }
        if !made.is_empty() {
            self.store.make_durable(&made)?;
        }
        Ok(made.len())
    }
}
