//! Owns the look at what there is, between resolving a spec and planning: which steps have snapshots that this env
//! can stand on, and where the env stands now. Reads the store, changes nothing.

use std::path::Path;

use crate::engine::docker::Service;
use crate::error::Result;
use crate::plan::{Found, Observed, Wanted};
use crate::profile::Profile;
use crate::spec::Spec;
use crate::store::layer::VolumeState;
use crate::store::{Layer, LockedEnv, Record, Store};

/// Returns the profile's steps in order, those that this env leaves out with the reason.
pub fn wanted(profile: &Profile, spec: &Spec) -> Vec<Wanted> {
    let mut wanted = Vec::new();
    for step in &profile.steps {
        if let Some(found) = spec.step(&step.name) {
            wanted.push(Wanted {
                name: step.name.clone(),
                key: found.key.to_string(),
                incremental: found.incremental,
                skip: None,
                aside: found.is_aside(),
            });
        } else if let Some(skipped) = spec
            .skipped
            .iter()
            .find(|skipped| skipped.name == step.name)
        {
            wanted.push(Wanted {
                name: step.name.clone(),
                key: String::new(),
                incremental: false,
                skip: Some(skipped.reason.clone()),
                aside: false,
            });
        }
    }
    wanted
}

/// Reads what there is of an env and of its steps' layers.
pub fn observe(
    store: &Store,
    env: Option<&LockedEnv<'_>>,
    record: Option<&Record>,
    spec: &Spec,
    wanted: &[Wanted],
    image_key: &str,
    service: Option<&Path>,
) -> Result<Observed> {
    let service = service.map(Service::connect).transpose()?;
    let mut observed = Observed {
        freezes_volumes: store.freezes_volumes(),
        ..Observed::default()
    };
    for step in wanted.iter().filter(|step| step.skip.is_none()) {
        let own = record.and_then(|record| {
            record
                .snapshots
                .iter()
                .rev()
                .find(|snapshot| snapshot.key.as_ref() == Some(&step.key))
        });
        let id = own.map_or(step.key.as_str(), |snapshot| snapshot.layer.as_str());
        if let Some(layer) = store.layer(id)? {
            let unusable = match elsewhere(&layer, service.as_ref())? {
                None => unusable(store, &layer, record, spec, &step.name),
                why => why,
            };
            let frozen = |state| matches!(state, &VolumeState::Frozen);
            observed.layers.insert(
                step.key.clone(),
                Found {
                    holds_volumes: layer.volumes.values().any(frozen),
                    lacks_results: store.lacks_results(&layer.id, spec)?,
                    layer: layer.id,
                    unusable,
                },
            );
        }
    }
    if let Some(service) = &service {
        let missing = wanted
            .iter()
            .filter(|step| step.skip.is_none() && !observed.layers.contains_key(&step.key));
        let missing: Vec<&str> = missing.map(|step| step.key.as_str()).collect();
        if !missing.is_empty() {
            for frozen in store.forgotten(service, &missing)? {
                if frozen.whole.is_some() {
                    let found = Found {
                        layer: frozen.key.clone(),
                        unusable: None,
                        holds_volumes: false,
                        lacks_results: false,
                    };
                    observed.layers.insert(frozen.key.clone(), found);
                }
                observed.forgotten.insert(frozen.key);
            }
        }
    }
    let Some(record) = record.filter(|record| record.image_key == image_key) else {
        return Ok(observed);
    };
    observed.exists = true;
    if let Some(head) = &record.head.layer {
        observed.head = store
            .chain(head)?
            .into_iter()
            .map(|layer| layer.id)
            .collect();
    }
    observed.attempt = store.attempt(&spec.name, record);
    observed.touched = match env {
        Some(env) => env.is_touched()?,
        None => record.head.tree.is_some(),
    };
    observed.has_volumes = record.head.volumes.values().any(|id| {
        fs_err::read_dir(store.volume_dir(id)).is_ok_and(|mut entries| entries.next().is_some())
    });
    Ok(observed)
}

/// Says why a layer's tree cannot be had where the env lives, where it cannot.
fn elsewhere(layer: &Layer, service: Option<&Service>) -> Result<Option<String>> {
    Ok(match (&layer.kept, service) {
        (None, None) => None,
        (Some(kept), Some(service)) if kept.socket == service.socket => {
            match service.image(&kept.image)? {
                Some(_) => None,
                None => Some(format!(
                    "its image was deleted from {} behind rockenv's back",
                    service.flavour
                )),
            }
        }
        _ => Some("its snapshot was made by another engine".to_owned()),
    })
}

/// Says why this env cannot stand on a layer, where it cannot.
fn unusable(
    store: &Store,
    layer: &Layer,
    record: Option<&Record>,
    spec: &Spec,
    step: &str,
) -> Option<String> {
    if !store.is_sound(layer) {
        return Some("its snapshot was not safely on disk when the machine stopped".to_owned());
    }
    let sees = |name: &str| {
        spec.step(step)
            .is_none_or(|step| step.volumes.iter().any(|volume| volume == name))
    };
    layer.volumes.iter().find_map(|(name, state)| match state {
        VolumeState::Live(id)
            if sees(name)
                && record.and_then(|record| record.head.volumes.get(name)) != Some(id) =>
        {
            Some(format!(
                "its build volume `{name}` was not frozen with it: this is an overlay store"
            ))
        }
        _ => None,
    })
}
