//! Owns snapshots at a service whose records the store has lost. They are found by their step's key, and a step with
//! that key need not run again.
//!
//! A found image must be complete. It is not if its build volumes had content, because those were in the store. No
//! command may be about to publish or remove it: a tree mentioned anywhere in the store is not orphaned. The search
//! follows the order in which a tree moves, from a pull or an env to a layer to the trash, so that it misses none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fs_err as fs;
use jiff::Timestamp;

use super::check::names;
use super::history::History;
use super::layer::{Layer, boot_id};
use super::{LockedEnv, Store};
use crate::engine::docker::{Frozen, ObjectFilter, Service};
use crate::plan::ids::{LayerId, StepKey, TreeId};
use crate::sys::error::Result;

impl Store {
    /// Returns the orphaned images of steps with one of these keys, the newest last.
    pub fn orphan_snapshots(&self, service: &Service, keys: &[&StepKey]) -> Result<Vec<Frozen>> {
        let mut found = service.frozen(&self.root().to_string_lossy(), &self.id()?)?;
        found.retain(|frozen| keys.contains(&&frozen.key));
        if found.is_empty() {
            return Ok(found);
        }
        let mut known = self.known_trees()?;
        known.extend(self.trees_of_copies(service)?);
        found.retain(|frozen| !known.contains(&frozen.tree));
        found.sort_by_key(|frozen| frozen.created);
        let mut left = Vec::new();
        for frozen in found {
            // An image that was just removed has left the trash too.
            if let Some(image) = service.image(&frozen.image)? {
                left.push(Frozen {
                    whole: frozen.whole.filter(|below| {
                        // A user may have given its name to an image based on it.
                        image.layers == *below || image.layers == below + 1
                    }),
                    ..frozen
                });
            }
        }
        Ok(left)
    }

    /// Returns all trees mentioned anywhere in the store.
    pub(super) fn known_trees(&self) -> Result<BTreeSet<TreeId>> {
        let mut known: BTreeSet<TreeId> = self.listed_trees("images")?.collect();
        for env in self.env_names()? {
            known.extend(self.trees_in(&self.env_dir(&env))?);
        }
        known.extend(self.trees_of_layers()?);
        known.extend(self.listed_trees("trash")?);
        Ok(known)
    }

    /// Returns the trees in an env's directory. A repair may have set some aside, with changes that are in no snapshot.
    pub(super) fn trees_in(&self, env: &Path) -> Result<BTreeSet<TreeId>> {
        let trees = names(&env.join("trees"))?.into_iter();
        let mut found: BTreeSet<TreeId> = trees.filter_map(|tree| tree.try_into().ok()).collect();
        found.extend(self.listed_trees(env)?);
        Ok(found)
    }

    /// Returns the trees of all layers. The list of objects names the tree of a layer whose description is damaged.
    pub(super) fn trees_of_layers(&self) -> Result<BTreeSet<TreeId>> {
        let described = self.layers()?.into_iter().filter_map(|layer| layer.tree);
        let mut trees: BTreeSet<TreeId> = described.collect();
        trees.extend(self.listed_trees("layers")?);
        Ok(trees)
    }

    /// Returns the trees in the lists of objects of all entries of a directory of the store.
    fn listed_trees(&self, below: impl AsRef<Path>) -> Result<impl Iterator<Item = TreeId>> {
        let objects = self.objects_in(&self.root.join(below))?.into_iter();
        Ok(objects.filter_map(|object| match object.what {
            ObjectFilter::Tree(tree) => Some(tree),
            ObjectFilter::Image(_) => None,
        }))
    }

    /// Removes orphaned images that have become useless because their steps have layers.
    pub fn remove_orphan_snapshots(&self, service: &Service, keys: &[&StepKey]) -> Result<()> {
        let _lock = self.lock("up")?;
        for frozen in self.orphan_snapshots(service, keys)? {
            service.remove_image(&frozen.image)?;
        }
        Ok(())
    }
}

impl LockedEnv<'_> {
    /// Creates layers from orphaned images; `steps` are names and keys of the steps that need not run, in order.
    /// Returns the number of images found.
    pub fn adopt_orphan_snapshots(
        &self,
        service: &Service,
        steps: &[(&str, &StepKey)],
    ) -> Result<usize> {
        let record = self.known_record()?;
        let _lock = self.store.lock("up")?;
        let keys: Vec<&StepKey> = steps.iter().map(|(_, key)| *key).collect();
        let mut orphans: BTreeMap<StepKey, Frozen> = self
            .store
            .orphan_snapshots(service, &keys)?
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
            let Some(frozen) = orphans.remove(*key) else {
                continue;
            };
            let directory = self.tree_dir(&frozen.tree);
            fs::create_dir_all(&directory)?;
            self.store
                .note_tree(&directory, &service.socket, &frozen.tree)?;
            let created = Timestamp::from_second(frozen.created).unwrap_or_default();
            let image = record.image_key.clone();
            let layer = Layer {
                key: Some((*key).clone()),
                parent: parent.take(),
                env: Some(record.id.clone()),
                tree: Some(frozen.tree.clone()),
                boot: boot_id(),
                kept: Some(super::service::SnapshotImage {
                    socket: service.socket.clone(),
                    image: frozen.image,
                }),
                // The image is complete only if the step's history is clean.
                history: History::Clean,
                ..Layer::new(id, image, (*name).to_owned(), created)
            };
            // Under the lock, no other command can have made this layer.
            self.store.publish(&directory, &layer)?;
            parent = Some(layer.id.clone());
            made.push(layer.id);
        }
        if !made.is_empty() {
            self.store.make_durable(&made)?;
        }
        Ok(made.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_layer_keeps_its_image() {
        let (_directory, store) = Store::scratch();
        // A repair renames the directory.
        for (id, tree) in [("aa", "1111"), ("aa.damaged-1", "2222")] {
            let layer = store.layer_dir(&id.into());
            fs::create_dir(&layer).unwrap();
            fs::write(layer.join("layer.json"), "{").unwrap();
            let socket = Path::new("/nobody-answers");
            store.note_tree(&layer, socket, &tree.into()).unwrap();
        }
        let both: BTreeSet<TreeId> = BTreeSet::from(["1111".into(), "2222".into()]);
        assert_eq!(store.trees_of_layers().unwrap(), both);
        assert!(both.is_subset(&store.known_trees().unwrap()));
        // It renames an env's trees too.
        let env = store.env_dir(&"a".into());
        for (below, tree) in [("tree-a.damaged-1", "3333"), ("trees.damaged-1/b", "4444")] {
            fs::create_dir_all(env.join(below)).unwrap();
            let socket = Path::new("/nobody-answers");
            store
                .note_tree(&env.join(below), socket, &tree.into())
                .unwrap();
        }
        let aside: BTreeSet<TreeId> = BTreeSet::from(["3333".into(), "4444".into()]);
        assert!(aside.is_subset(&store.known_trees().unwrap()));
    }
}
