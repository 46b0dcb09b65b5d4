//! Owns copies of a store. `cp -a`, a restored backup or a disk image has the ids of the first store at another path,
//! so the objects of both at a service have the same names and labels, except for the label with the path.
//!
//! An object that a copy mentions is never removed, and a container that a copy made is never used. A store that was
//! moved has no copy, because its former path has no store with its id.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use fs_err as fs;

use super::Store;
use crate::engine::docker::{Object, ObjectFilter, Service};
use crate::plan::ids::TreeId;
use crate::sys::error::Result;

impl Store {
    /// Returns the copy of this store that made an object with these labels.
    pub(super) fn copy_with(&self, labels: &HashMap<String, String>) -> Option<Self> {
        self.copy_at(Path::new(labels.get("rockenv.store")?))
    }

    fn copy_at(&self, root: &Path) -> Option<Self> {
        if root == self.root || !root.is_absolute() {
            return None;
        }
        let copy = Self::open_existing(root).ok().flatten()?;
        let id = self.id().ok().filter(|id| !id.is_empty())?;
        // A bind mount shows one store at two paths.
        let place = |store: &Self| {
            let found = fs::metadata(&store.root).ok()?;
            Some((found.dev(), found.ino()))
        };
        (copy.id().ok()? == id && place(&copy) != place(self)).then_some(copy)
    }

    /// Returns the copies of this store that have objects at a service.
    fn copies(&self, service: &Service) -> Result<Vec<Self>> {
        let id = self.id()?;
        if id.is_empty() {
            return Ok(Vec::new());
        }
        let mut found = service.containers("id", &id)?;
        found.extend(service.images("id", &id)?);
        let roots = found
            .into_iter()
            .filter_map(|(_, mut labels)| labels.remove("rockenv.store"));
        let roots: BTreeSet<String> = roots.collect();
        let copies = roots.iter().map(|root| self.copy_at(Path::new(root)));
        Ok(copies.flatten().collect())
    }

    pub(super) fn trees_of_copies(&self, service: &Service) -> Result<BTreeSet<TreeId>> {
        let mut trees = BTreeSet::new();
        for copy in self.copies(service)? {
            trees.extend(copy.known_trees()?);
        }
        Ok(trees)
    }

    /// Removes an object, unless a copy of this store mentions it. The last of them removes it.
    pub(super) fn remove_object(&self, object: &Object) -> Result<()> {
        let service = Service::connect(&object.socket)?;
        for copy in self.copies(&service)? {
            let is_mentioned = match &object.what {
                ObjectFilter::Tree(tree) => copy.known_trees()?.contains(tree),
                ObjectFilter::Image(_) => {
                    let known = copy.objects_in(&copy.root.join("images"))?;
                    known.iter().any(|known| known.is_same(object))
                }
            };
            if is_mentioned {
                return Ok(());
            }
        }
        object.remove(&service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_a_store_with_the_same_id_in_another_directory() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let store = Store::open(&at("store")).unwrap();
        Store::open(&at("other")).unwrap();
        fs::create_dir(at("copy")).unwrap();
        for name in ["format", "id"] {
            fs::copy(at("store").join(name), at("copy").join(name)).unwrap();
        }
        fs_err::os::unix::fs::symlink(at("store"), at("link")).unwrap();
        let copy = |root: &Path| {
            let label = ("rockenv.store".to_owned(), root.display().to_string());
            store
                .copy_with(&HashMap::from([label]))
                .map(|copy| copy.root)
        };
        let real = fs::canonicalize(at("copy")).unwrap();
        assert_eq!(copy(&at("copy")), Some(real));
        for name in ["store", "link", "other", "missing"] {
            assert_eq!(copy(&at(name)), None, "{name}");
        }
        for root in ["", "copy"] {
            assert_eq!(copy(Path::new(root)), None, "{root}");
        }
        assert!(store.copy_with(&HashMap::new()).is_none());
    }
}
