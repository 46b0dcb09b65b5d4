//! Owns the end of an `up --ephemeral` env: the env goes with its command, and its outputs stay.

use std::path::PathBuf;

use super::stop_and_lock::stop_and_lock;
use crate::plan::ids::EnvName;
use crate::store::ephemeral::OwnerLock;
use crate::store::{Store, results};
use crate::sys::error::Result;

/// Removes the env and empties the trash. Returns the existing directories of its outputs.
pub(crate) fn end(store: &Store, name: &EnvName, claim: OwnerLock) -> Result<Vec<PathBuf>> {
    let mut outputs = Vec::new();
    if let Ok(spec) = store.spec(name) {
        let places = results::outputs(&spec);
        let places = places.filter_map(|volume| store.output_dir(&spec, volume).ok());
        outputs.extend(places.filter(|path| path.exists()));
    }
    // This also ends an `exec` in the env.
    let (env, _) = stop_and_lock(store, name, "up")?;
    if env.is_owned()? {
        env.remove()?;
    } else {
        // The env was removed, and another one may have its name by now.
        drop(env);
    }
    drop(claim);
    // Not in the background: the caller may shut the machine down right after this command. `gc` reports an entry that
    // stays.
    drop(store.await_trash());
    Ok(outputs)
}
