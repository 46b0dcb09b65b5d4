//! Owns the end of an env of `up --ephemeral`: the env goes with its command, its outputs stay.

use std::path::PathBuf;

use super::seize::seize;
use crate::plan::resolve::{VolumeKind, VolumeSource};
use crate::store::Store;
use crate::store::ephemeral::Claim;
use crate::sys::error::Result;

/// Removes the env and waits until its space is free. Returns the directories of its outputs.
pub(crate) fn end(store: &Store, name: &str, claim: Claim) -> Result<Vec<PathBuf>> {
    let outputs = outputs(store, name);
    // Also ends an `exec` in it.
    let (env, _) = seize(store, name, "up")?;
    if env.is_owned()? {
        env.remove()?;
    } else {
        // The env was removed, and another one may have its name by now.
        drop(env);
    }
    drop(claim);
    // Not in the background: the caller may shut the machine down right after this command.
    store.await_trash()?;
    Ok(outputs)
}

/// Returns the existing directories of the env's outputs.
fn outputs(store: &Store, name: &str) -> Vec<PathBuf> {
    let volumes = store
        .spec(name)
        .map_or_else(|_| Vec::new(), |spec| spec.volumes);
    let outputs = volumes
        .into_iter()
        .filter(|volume| volume.kind == VolumeKind::Output);
    outputs
        .map(|volume| match volume.source {
            VolumeSource::Path(path) => path,
            VolumeSource::Git(_) | VolumeSource::Store => {
                store.root().join("outputs").join(name).join(&volume.name)
            }
        })
        .filter(|path| path.exists())
        .collect()
}
