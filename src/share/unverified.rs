//! Owns what becomes of snapshots without a verified signature where a verified one arrives under the same key.

use super::document::SharedStep;
use crate::plan::ids::{EnvName, LayerId};
use crate::store::{Layer, Store};
use crate::sys::error::{Error, Kind, Result};

/// Removes unused layers that have keys of these steps and came without a verified signature: by its key, a step would
/// be found there. The last step's must be gone, because that is what was asked for.
pub(super) fn make_way(store: &Store, steps: &[SharedStep], base: Option<&Layer>) -> Result<()> {
    let mut unverified = Vec::new();
    for step in steps {
        let id = LayerId::from(step.key.clone());
        if store
            .shared_layer(&id)?
            .is_some_and(|shared| shared.unverified)
        {
            unverified.push(id);
        }
    }
    let left = store.remove_unused_layers_but(&unverified, base.map(|base| &base.id))?;
    let Some(step) = steps
        .last()
        .filter(|step| left.iter().any(|id| **id == *step.key))
    else {
        return Ok(());
    };
    let user = user_of(store, &step.key.clone().into())?;
    let step = &step.name;
    let (of, help) = match user {
        Some(env) => (
            format!(" of env `{env}`"),
            format!("rockenv up {env} --rerun {step}, or rockenv rm {env}"),
        ),
        None => (
            String::new(),
            "rockenv gc, once nothing is based on it".to_owned(),
        ),
    };
    Err(Error::new(
        Kind::Drift,
        format!("snapshot `{step}`{of} came without a verified signature, and differs from the signed one"),
    )
    .help(help))
}

/// Returns an env that is based on a layer.
fn user_of(store: &Store, id: &LayerId) -> Result<Option<EnvName>> {
    for name in store.envs()? {
        let Some(record) = store.record(&name)? else {
            continue;
        };
        for top in record.layers() {
            if store.chain(top)?.iter().any(|layer| layer.id == *id) {
                return Ok(Some(name));
            }
        }
    }
    Ok(None)
}
