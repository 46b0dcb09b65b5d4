//! Owns the end of an env that `up --ephemeral` made: it goes with its command, and its outputs stay.

use std::path::PathBuf;

use super::seize::seize;
use crate::plan::resolve::{VolumeKind, VolumeSource};
use crate::store::Store;
use crate::store::ephemeral::Claim;
use crate::sys::error::Result;

/// Removes the env and waits until its space is free. Returns where its outputs are.
pub(crate) fn end(store: &Store, name: &str, claim: Claim) -> Result<Vec<PathBuf>> {
    let outputs = outputs(store, name);
    // An `exec` in it ends too.
    let (env, _) = seize(store, name, "up")?;
    if env.is_owned()? {
        env.remove()?;
    } else {
        // Somebody removed it, and it may be another one by now.
        drop(env);
    }
    drop(claim);
    // Not in the background: who runs this may take the machine away when it has ended.
    store.await_trash()?;
    Ok(outputs)
}

/// Returns the directories of the env's outputs that are there.
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
            _ => store.root().join("outputs").join(name).join(&volume.name),
        })
        .filter(|path| path.exists())
        .collect()
}
