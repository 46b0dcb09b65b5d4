//! Owns the containers at services that carry a store's labels, and the search for those that no longer belong to an
//! env.

use std::path::PathBuf;

use super::{EnvItem, Examination, Fix, Inventory};
use crate::engine::docker::{Flavour, Service};
use crate::plan::ids::{EnvId, TreeId};
use crate::store::Store;
use crate::sys::error::Result;

#[derive(Clone, Debug)]
pub struct ContainerItem {
    pub flavour: Flavour,
    pub socket: PathBuf,
    pub id: String,
    /// Id of the env that it was made for.
    pub env: Option<EnvId>,
    /// Its live tree, if it has one.
    pub tree: Option<TreeId>,
}

impl Store {
    /// Reads everything, including the store's containers at services. A service that does not answer counts as
    /// empty.
    pub fn inventory_with(&self, services: &[Service]) -> Result<Inventory> {
        // List containers before the envs: by then, the command that made a container has recorded its env and tree.
        let mut containers = Vec::new();
        let id = self.id()?;
        let asked = services.iter().filter(|_| !id.is_empty());
        for (service, found) in asked.filter_map(|one| Some((one, one.containers("id", &id).ok()?)))
        {
            for (container, mut labels) in found {
                let mut label = |name: &str| labels.remove(name).unwrap_or_default();
                if label("rockenv.store") == self.root().to_string_lossy() {
                    containers.push(ContainerItem {
                        flavour: service.flavour,
                        socket: service.socket.clone(),
                        id: container,
                        env: label("rockenv.env").parse().ok(),
                        tree: label("rockenv.tree").parse().ok(),
                    });
                }
            }
        }
        let mut inventory = self.inventory()?;
        if !containers.is_empty() {
            inventory.trees = self.known_trees()?;
            for service in services {
                let is_there = |one: &ContainerItem| one.socket == service.socket;
                if containers.iter().any(is_there) {
                    match self.trees_of_copies(service) {
                        Ok(trees) => inventory.trees.extend(trees),
                        // A copy that cannot be read may mention any of them, and must not block the repair.
                        Err(_) => containers.retain(|one| !is_there(one)),
                    }
                }
            }
            inventory.containers = containers;
        }
        Ok(inventory)
    }
}

impl Examination<'_> {
    pub(super) fn containers(&mut self) {
        for container in &self.store.containers {
            let mut records = self.store.fine_records();
            let known = records.any(|(_, record)| Some(&record.id) == container.env.as_ref());
            let tree = container.tree.as_ref();
            if known || tree.is_some_and(|tree| self.store.trees.contains(tree)) {
                continue;
            }
            let name = &container.id[..container.id.len().min(12)];
            if self.store.envs.values().any(EnvItem::is_unreliable) {
                self.note(
                    format!("container `{name}` at {} belongs to no known env; it may belong to one with a damaged record", container.flavour),
                    "rockenv fsck --repair, once no record is damaged or set aside",
                );
                continue;
            }
            let object = format!("container `{name}` at {}", container.flavour);
            let fix = Fix::Container(container.socket.clone(), container.id.clone());
            self.problem(object, "belongs to an env that was removed", fix);
        }
    }
}
