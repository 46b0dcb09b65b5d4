//! Owns replacing snapshots without a verified signature when a verified one arrives under the same key.

use super::document::SharedStep;
use crate::plan::ids::{EnvName, LayerId};
use crate::store::images::Image;
use crate::store::shared::Shared;
use crate::store::{Layer, Store};
use crate::sys::error::Result;

/// Marks these layers of the store, from the bottom, as verified by the signed steps. Cuts off the first layer that
/// came without a signature and has another description, and all layers above it.
pub(super) fn verify_layers(
    store: &Store,
    layers: &mut Vec<Layer>,
    steps: &[SharedStep],
) -> Result<()> {
    let mut both = layers.iter().zip(steps);
    let other = both.position(|(layer, step)| store.is_unverified(layer) && !step.describes(layer));
    layers.truncate(other.unwrap_or(layers.len()));
    let mut layers = layers.iter();
    layers.try_for_each(|layer| Shared::mark_verified(&store.layer_dir(&layer.id)))
}

/// Does the same for the image. Its key determines its content, so it only gets the signed description.
pub(super) fn verify_image(store: &Store, image: &Image) -> Result<()> {
    if store.image(&image.key)?.is_none() || !store.is_image_unverified(&image.key) {
        return Ok(());
    }
    store.describe_image(image)?;
    Shared::mark_verified(&store.image_dir(&image.key))
}

/// Removes unused layers that have keys of these steps and came without a verified signature, because a step is looked
/// up by its key. The last step's layer must be gone, because the caller asked for that step.
pub(super) fn make_way(store: &Store, steps: &[SharedStep], base: Option<&Layer>) -> Result<()> {
    let mut unverified = Vec::new();
    for step in steps {
        let id = LayerId::from(step.key.clone());
        if let Some(layer) = store.layer(&id)?
            && store.is_unverified(&layer)
        {
            unverified.push(id);
        }
    }
    let left = store.remove_unused_layers_but(&unverified, base.map(|base| &base.id))?;
    let is_left = |step: &&SharedStep| left.iter().any(|id| **id == *step.key);
    let Some(step) = steps.last().filter(is_left) else {
        return Ok(());
    };
    let user = user_of(store, &step.key.clone().into())?;
    let step = &step.name;
    let (of, help) = match user {
        Some((env, up)) => (
            format!(" of env `{env}`"),
            format!("{up} --rerun {step}, or rockenv rm {env}"),
        ),
        None => (
            String::new(),
            "rockenv gc, once nothing is based on it".to_owned(),
        ),
    };
    Err(drift!(
        "snapshot `{step}`{of} came without a verified signature, and differs from the signed one"
    )
    .help(help))
}

/// Returns an env that uses a layer, and the command that brings it up to date.
fn user_of(store: &Store, id: &LayerId) -> Result<Option<(EnvName, String)>> {
    for name in store.envs()? {
        let Some(record) = store.record(&name)? else {
            continue;
        };
        let tops: Vec<LayerId> = record.layers().cloned().collect();
        if store.with_those_below(&tops).contains(id) {
            return Ok(Some((name, record.up_command())));
        }
    }
    Ok(None)
}
