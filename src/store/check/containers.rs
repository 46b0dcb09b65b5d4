//! Owns containers at services that carry a store's labels: which there are, and which of them are of no env any more.

use std::path::PathBuf;

use super::{Inventory, Judge, Mend, Read};
use crate::engine::docker::{Flavour, Service};
use crate::store::Store;
use crate::sys::error::Result;

/// A container at a service.
#[derive(Clone, Debug)]
pub struct ContainerItem {
    /// What answers at the service.
    pub flavour: Flavour,
    /// The service's socket.
    pub socket: PathBuf,
    /// Its id.
    pub id: String,
    /// Id of the env that it was made for.
    pub env: String,
    /// The tree that it is; empty where it is none.
    pub tree: String,
}

impl Store {
    /// Reads everything, and what services have of it. A service that does not answer has nothing.
    pub fn inventory_with(&self, services: &[Service]) -> Result<Inventory> {
        // Before the envs: whoever makes a container has written down its env and tree by then.
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
                        env: label("rockenv.env"),
                        tree: label("rockenv.tree"),
                    });
                }
            }
        }
        let mut inventory = self.inventory()?;
        if !containers.is_empty() {
            inventory.trees = self.known_trees()?;
            inventory.containers = containers;
        }
        Ok(inventory)
    }
}

impl Judge<'_> {
    pub(super) fn containers(&mut self) {
        for container in &self.store.containers {
            let known =
                self.store.envs.values().any(
                    |env| matches!(&env.record, Read::Fine(record) if record.id == container.env),
                );
            if known || self.store.trees.contains(&container.tree) {
                continue;
            }
            let name = &container.id[..container.id.len().min(12)];
            if self.store.lost_records() {
                self.note(
                    format!("container `{name}` at {} belongs to no known env; it may belong to one with a damaged record", container.flavour),
                    "rockenv rm ENV, once its damaged record is not needed any more",
                );
                continue;
            }
            self.problem(
                format!("container `{name}` at {}", container.flavour),
                "is of an env that was removed",
                Mend::Container(container.socket.clone(), container.id.clone()),
            );
        }
    }
}
