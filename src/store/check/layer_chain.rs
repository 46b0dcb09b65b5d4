//! Owns judging one layer and the chain of layers below it.

use std::collections::BTreeSet;

use super::inventory::{Inventory, Read};
use super::short;
use crate::store::layer::{Layer, VolumeState};
use crate::tree::Method;

/// Why a layer cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The layer itself is damaged.
    Own(String),
    /// The layer below it is missing.
    Parent(String),
}

impl Inventory {
    pub(super) fn layer_fault(&self, id: &str) -> Option<Fault> {
        let fault = self.single_fault(id);
        let circular = || Fault::Own("is its own ancestor".to_owned());
        fault.or_else(|| self.stands_on_itself(id).then(circular))
    }

    /// Returns a fault of the layer itself, or a missing parent.
    fn single_fault(&self, id: &str) -> Option<Fault> {
        let own = |message: String| Some(Fault::Own(message));
        let Some(item) = self.layers.get(id) else {
            return own("is missing".to_owned());
        };
        let layer = match &item.layer {
            Read::Fine(layer) => layer,
            Read::Absent => return own("has no layer.json".to_owned()),
            Read::Damaged(why) | Read::Foreign(why) => {
                return own(format!("layer.json is damaged: {why}"));
            }
        };
        if layer.id != id {
            let other = short(&layer.id);
            return own(format!("layer.json belongs to layer `{other}`"));
        }
        if !item.tree {
            return own("has no tree".to_owned());
        }
        let unfrozen = layer.volumes.iter().find(|(name, state)| {
            **state == VolumeState::Frozen && !item.volumes.contains(name.as_str())
        });
        if let Some((name, _)) = unfrozen {
            return own(format!("its frozen volume `{name}` is missing"));
        }
        if let Some(fault) = item.results.first() {
            return own(format!("in the results of its step, {fault}"));
        }
        let parent = layer.parent.as_deref()?;
        let missing = || {
            let parent = short(parent);
            Fault::Parent(format!("depends on layer `{parent}`, which is missing"))
        };
        (!self.layers.contains_key(parent)).then(missing)
    }

    /// Returns whether a layer's tree is complete without its parent: a clone, or a service's image.
    pub(super) fn is_whole(&self, id: &str) -> bool {
        let is_kept = |layer: &Layer| layer.kept.is_some();
        self.method != Method::Overlay || self.layer(id).is_some_and(is_kept)
    }

    fn stands_on_itself(&self, id: &str) -> bool {
        let mut seen = BTreeSet::new();
        let mut next = Some(id);
        while let Some(id) = next {
            if !seen.insert(id) {
                return true;
            }
            next = self.layer(id).and_then(|layer| layer.parent.as_deref());
        }
        false
    }

    /// Returns why an env cannot use a layer; `None` if it can.
    pub(super) fn chain_fault(&self, top: &str) -> Option<String> {
        let mut next = Some(top);
        let mut seen = BTreeSet::new();
        while let Some(id) = next {
            if !seen.insert(id) {
                return Some(format!("layer `{}` is its own ancestor", short(id)));
            }
            match self.single_fault(id) {
                None => {}
                Some(Fault::Parent(_)) if self.is_whole(id) => return None,
                Some(Fault::Own(message) | Fault::Parent(message)) => {
                    return Some(format!("layer `{}` {message}", short(id)));
                }
            }
            next = self.layer(id).and_then(|layer| layer.parent.as_deref());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;
    use crate::store::Store;

    #[test]
    fn a_chain_has_the_fault_of_its_first_bad_layer() {
        let (_directory, store) = Store::scratch();
        for (id, parent) in [("a", "b"), ("b", "c"), ("c", "b"), ("d", "e"), ("e", "f")] {
            let layer = store.layer_dir(&id.into());
            for tree in ["diff", "root"] {
                fs::create_dir_all(layer.join(tree)).unwrap();
            }
            store.put_layer(&Layer {
                parent: Some(parent.into()),
                ..Layer::sample(id.into())
            });
        }
        let mut found = store.inventory().unwrap();
        found.method = Method::Overlay;
        for id in ["a", "b", "c"] {
            let fault = Fault::Own("is its own ancestor".to_owned());
            assert_eq!(found.layer_fault(id), Some(fault));
            assert_has!(found.chain_fault(id).unwrap(), "is its own ancestor");
        }
        let missing = "layer `e` depends on layer `f`, which is missing";
        assert_eq!(found.layer_fault("d"), None);
        for id in ["d", "e"] {
            assert_eq!(found.chain_fault(id).unwrap(), missing);
        }
    }
}
