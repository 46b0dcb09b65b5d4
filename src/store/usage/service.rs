//! Owns the disk usage of envs at Docker and Podman services: images and containers, whose bytes are not in the
//! store.
//!
//! An image's own bytes are those of layers that the image below lacks. A container's own bytes are those written in
//! it. Both figures come from the service.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::places::UsedLayer;
use super::report::Class;
use crate::engine::docker::Service;
use crate::plan::ids::LayerId;
use crate::store::{Layer, Record, Store};
use crate::sys::error::Result;

/// An image or a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Held {
    pub engine: String,
    pub class: Class,
    /// Name of the snapshot, failed step or image; empty for a live tree.
    pub name: String,
    pub envs: Vec<String>,
    /// Bytes that nothing below it has.
    pub own: u64,
    /// Bytes including everything below it.
    pub total: u64,
}

/// Asks the services of a store's envs, layers and images. Also returns those that do not answer, and why.
pub(super) fn holdings(
    store: &Store,
    envs: &[(String, Record)],
    layers: &BTreeMap<LayerId, UsedLayer>,
) -> Result<(Vec<Held>, Vec<String>)> {
    let kept = layers
        .values()
        .filter_map(|used| used.layer.as_ref()?.kept.as_ref());
    // An image stays at a service after its last env is gone.
    let mut sockets = store.services_of_images()?;
    sockets.extend(kept.map(|kept| kept.socket.clone()));
    sockets.extend(envs.iter().filter_map(|(_, record)| record.service.clone()));
    let (mut held, mut problems) = (Vec::new(), Vec::new());
    for socket in sockets {
        let asked = Service::connect(&socket)
            .and_then(|service| ask(store, &service, &socket, envs, layers));
        match asked {
            Ok(found) => held.extend(found),
            Err(error) => problems.push(error.chain().join(": ")),
        }
    }
    Ok((held, problems))
}

fn ask(
    store: &Store,
    service: &Service,
    socket: &Path,
    envs: &[(String, Record)],
    layers: &BTreeMap<LayerId, UsedLayer>,
) -> Result<Vec<Held>> {
    let engine = service.flavour.to_string();
    let mut held = Vec::new();
    let listed = service.listed_sizes()?;
    let measure = |id: &str| -> Result<Option<(u64, usize)>> {
        let Some(found) = service.image(id)? else {
            return Ok(None);
        };
        let size = listed.get(id).copied().unwrap_or(found.size);
        Ok(Some((size, found.layers)))
    };
    let mut sizes: BTreeMap<String, (u64, usize)> = BTreeMap::new();
    for image in store.images()? {
        let Some(id) = store.imported_id(socket, &image.key)? else {
            continue;
        };
        let Some((size, depth)) = measure(&id)? else {
            continue;
        };
        let users = envs.iter().filter(|(_, record)| {
            record.image_key == image.key && record.service.as_deref() == Some(socket)
        });
        sizes.insert(id, (size, depth));
        held.push(Held {
            engine: engine.clone(),
            class: Class::Image,
            name: image.name,
            envs: users.map(|(name, _)| name.clone()).collect(),
            own: size,
            total: size,
        });
    }
    let at_socket = |layer: &Layer| {
        let kept = layer.kept.as_ref().filter(|kept| kept.socket == socket);
        kept.map(|kept| kept.image.clone())
    };
    for used in layers.values() {
        if let Some(id) = used.layer.as_ref().and_then(at_socket)
            && let Some(found) = measure(&id)?
        {
            sizes.insert(id, found);
        }
    }
    for UsedLayer { layer, envs } in layers.values() {
        let Some(layer) = layer else { continue };
        let Some((size, depth)) = at_socket(layer).and_then(|id| sizes.get(&id).copied()) else {
            continue;
        };
        let below = match &layer.parent {
            Some(parent) => (layers.get(parent)).and_then(|used| at_socket(used.layer.as_ref()?)),
            None => store.imported_id(socket, &layer.image_key)?,
        };
        let below = below.and_then(|id| sizes.get(&id).copied());
        held.push(Held {
            engine: engine.clone(),
            class: if envs.is_empty() {
                Class::Unused
            } else {
                Class::Snapshots
            },
            name: layer.title.clone(),
            envs: envs.clone(),
            own: match below {
                // An image that was merged into a single layer is based on nothing.
                Some((_, layers)) if depth < layers => size,
                Some((below, _)) => size.saturating_sub(below),
                None => size,
            },
            total: size,
        });
    }
    for (name, record) in envs {
        if record.service.as_deref() == Some(socket) {
            held.extend(containers(service, name, record)?);
        }
    }
    Ok(held)
}

/// Returns the containers of an env's live tree and of its failed tree.
fn containers(service: &Service, env: &str, record: &Record) -> Result<Vec<Held>> {
    let live = record.head.tree.as_deref();
    let live = live.map(|tree| (tree, Class::Live, ""));
    let failed = record.failed.as_ref();
    let failed = failed.map(|failed| (failed.tree.as_str(), Class::Failed, failed.step.as_str()));
    let mut held = Vec::new();
    for (tree, class, title) in live.into_iter().chain(failed) {
        for (container, _) in service.containers("tree", tree)? {
            let (own, total) = service.sizes(&container)?;
            held.push(Held {
                engine: service.flavour.to_string(),
                class,
                name: title.to_owned(),
                envs: vec![env.to_owned()],
                own,
                total,
            });
        }
    }
    Ok(held)
}
