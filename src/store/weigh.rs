//! Owns what removing each layer and each failed tree would give back on the store's file system.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::Store;
use super::stock::{Look, allocated};
use crate::engine::docker::Service;
use crate::error::Result;
use crate::gc::Inventory;
use crate::gc::roots::Roots;
use crate::rootfs::{self, Method};
use crate::usage;

impl Store {
    /// Finds out the bytes of what was never measured or may lie elsewhere, and of the store where a limit needs them.
    pub(super) fn weigh(
        &self,
        stock: &mut Inventory,
        look: &Look<'_>,
        keep_last: usize,
    ) -> Result<()> {
        let roots = Roots::of(stock, keep_last);
        let mut services = Services::of(self)?;
        for (id, item) in &mut stock.layers {
            if !look.everything && roots.layers.contains_key(id) {
                continue;
            }
            let directory = self.layer_dir(id);
            if let Some(kept) = &item.layer.kept {
                // What was recorded is what the service wrote. The store has nothing of it but the build volumes.
                let there = match services.beside(&kept.socket) {
                    Some(_) => item.bytes,
                    None => 0,
                };
                let volumes = directory.join("volumes");
                item.bytes = there
                    + match volumes.exists() {
                        true => self.tree_bytes(&volumes)?,
                        false => 0,
                    };
            } else if item.layer.cost.is_none() {
                item.bytes = self.tree_bytes(&directory)?;
            }
        }
        for env in stock.envs.values_mut().filter(|env| !env.busy) {
            if let (Some(failed), Some(socket)) = (&env.record.failed, &env.record.service) {
                env.failed = services
                    .beside(socket)
                    .map_or(0, |service| written(service, &failed.tree));
            }
        }
        if look.used {
            let report = usage::report::report(self, None, 0)?;
            stock.used = Some(report.total.allocated);
        }
        Ok(())
    }

    /// Returns the bytes on disk that a tree holds and what it stands on does not.
    pub(super) fn tree_bytes(&self, directory: &Path) -> Result<u64> {
        let root = directory.join("root");
        match self.method() {
            Method::Overlay => Ok(allocated(directory)),
            Method::Btrfs if root.exists() => rootfs::btrfs::written(&root),
            // A clone's own blocks are those that nobody shares.
            Method::Btrfs | Method::Reflink => {
                let options = usage::Options {
                    extents: true,
                    ..usage::Options::default()
                };
                let usage = usage::scan(&[usage::Root::new(directory, 0)], &options);
                Ok(usage.total().exclusive)
            }
        }
    }
}

/// Returns the bytes that the containers of a tree wrote; none where the service does not say.
fn written(service: &Service, tree: &str) -> u64 {
    let containers = service.containers("tree", tree).unwrap_or_default();
    let sizes = containers.iter().map(|(id, _)| service.sizes(id));
    sizes.flatten().map(|(own, _)| own).sum()
}

/// The services that were asked where they keep what they have.
struct Services {
    /// Of the store's file system.
    device: u64,
    /// By socket; none where a removal gives nothing back to the store's file system.
    known: BTreeMap<PathBuf, Option<Service>>,
}

impl Services {
    fn of(store: &Store) -> Result<Self> {
        Ok(Self {
            device: fs::metadata(store.root())?.dev(),
            known: BTreeMap::new(),
        })
    }

    /// Returns the service at a socket where all that it keeps is on the store's file system. One that does not answer
    /// gives nothing back: what is removed of it waits in the trash.
    fn beside(&mut self, socket: &Path) -> Option<&Service> {
        if !self.known.contains_key(socket) {
            let service = Service::connect(socket).ok();
            let service = service.filter(|service| self.holds(service));
            self.known.insert(socket.to_owned(), service);
        }
        self.known.get(socket)?.as_ref()
    }

    fn holds(&self, service: &Service) -> bool {
        let here = |place: &PathBuf| fs::metadata(place).is_ok_and(|it| it.dev() == self.device);
        let places = service.places().unwrap_or_default();
        !places.is_empty() && places.iter().all(here)
    }
}
