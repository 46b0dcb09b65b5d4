//! Owns the choice of an env's shareable snapshots: those, from the lowest, that are complete without this store.

use crate::engine::docker::Service;
use crate::plan::ids::EnvName;
use crate::plan::record::Record;
use crate::share::ServiceImage;
use crate::store::history::Reuse;
use crate::store::images::Image;
use crate::store::layer::VolumeState;
use crate::store::{Layer, Store};
use crate::sys::error::Result;

pub(crate) struct Shareable {
    pub env: EnvName,
    /// The profile's name, for people who browse the registry.
    pub profile: String,
    pub image: Image,
    /// Snapshots of steps, lowest first, each based on the previous one.
    pub layers: Vec<Layer>,
    /// The service's images, if a service keeps the trees.
    pub kept: Option<ServiceImage>,
}

impl Shareable {
    /// Chooses the shareable part; `warn` is told which snapshots cannot be shared, and why.
    pub(crate) fn of(
        store: &Store,
        env: &EnvName,
        until: Option<&str>,
        reuse: Reuse,
        warn: &dyn Fn(String),
    ) -> Result<Self> {
        let record = store.known(env)?;
        let up = record.up_command();
        let mut layers = chain(store, env, &record, until, warn)?;
        layers.reverse();
        let (kept, limit) = match &record.service {
            None => (None, None),
            Some(socket) => {
                let (kept, why) = ServiceImage::of(&Service::connect(socket)?, &layers)?;
                let limit = why.map(|why| (kept.len(), why));
                (Some(kept), limit)
            }
        };
        let first_incremental = match reuse {
            Reuse::Clean => layers.iter().position(|layer| !layer.is_clean()),
            Reuse::Incremental => None,
        };
        let end = limit.as_ref().map_or(layers.len(), |(limit, _)| *limit);
        let count = complete(&layers[..first_incremental.map_or(end, |first| end.min(first))]);
        if count < layers.len() {
            let layer = &layers[count].title;
            let (why, help) = match limit {
                _ if first_incremental == Some(count) => (
                    format!("it is incremental: {}", layers[count].history.why()),
                    format!(
                        "{up} --clean makes a clean one; to share it anyway: --allow-incremental"
                    ),
                ),
                Some((limit, why)) if limit == count => (why, format!("{up} --rerun {layer}")),
                _ => (
                    reason(&layers[count]),
                    "rockenv setup --store-image SIZE makes a store that freezes them".to_owned(),
                ),
            };
            if count == 0 {
                return Err(usage!("no snapshot of env `{env}` can be shared: {why}").help(help));
            }
            warn(format!(
                "snapshot `{layer}` and those after it cannot be shared: {why}; {help}"
            ));
            layers.truncate(count);
        }
        let image = &record.image_key;
        let image = layers.first().map_or(image, |layer| &layer.image_key);
        let image = store.image(image)?.ok_or_else(|| {
            not_found!("the description of the image of env `{env}` is gone").help("rockenv fsck")
        })?;
        Ok(Self {
            env: env.to_owned(),
            profile: record.profile,
            image,
            layers,
            kept,
        })
    }

    pub(crate) fn steps(&self) -> Vec<&str> {
        self.layers.iter().map(|layer| &*layer.title).collect()
    }
}

/// Returns the layers of the steps to share, the last step's first.
fn chain(
    store: &Store,
    env: &EnvName,
    record: &Record,
    until: Option<&str>,
    warn: &dyn Fn(String),
) -> Result<Vec<Layer>> {
    let up = record.up_command();
    let (snapshot, step) = match until {
        Some(until) => (
            record.step_snapshots().rfind(|known| known.name == until),
            record.steps.iter().find(|step| step.name == until),
        ),
        None => (record.last_step(), record.last_done()),
    };
    let removed = step.filter(|step| {
        let key = step.key.as_ref();
        key.is_some_and(|key| record.of_step(key).is_none())
    });
    if let (Some(step), Some(head)) = (removed, &record.head.layer) {
        // The env still stands on it, so `up` would not bring the snapshot back.
        let chain = store.chain(head)?;
        if let Some(at) = chain.iter().position(|layer| layer.key == step.key) {
            return Ok(chain[at..].to_vec());
        }
    }
    let snapshot = snapshot.ok_or_else(|| match until {
        Some(until) => not_found!("env `{env}` has no snapshot of a step `{until}`")
            .help(format!("rockenv snapshot ls {env}")),
        None => not_found!("no step of env `{env}` has a snapshot yet").help(&up),
    })?;
    if let (None, Some(step)) = (until, removed) {
        warn(format!(
            "step `{}` has no snapshot any more: only the steps before it are shared; `{up}` brings it back",
            step.name
        ));
    }
    store.chain(&snapshot.layer)
}

/// Returns how many layers, counted from the lowest, are complete without this store.
fn complete(layers: &[Layer]) -> usize {
    let made_by_hand = layers.iter().position(|layer| layer.key.is_none());
    let mut layers = layers[..made_by_hand.unwrap_or(layers.len())].iter();
    // Another store has no use for a layer whose build volume was not kept. A later layer that has the volume again
    // contains all of it.
    let last = layers.rposition(|layer| layer.volumes.values().all(VolumeState::is_kept));
    last.map_or(0, |last| last + 1)
}

fn reason(layer: &Layer) -> String {
    let mut volumes = layer.volumes.iter();
    match volumes.find(|(_, state)| !state.is_kept()) {
        Some((name, _)) => {
            format!("its build volume `{name}` is not part of it, because this is an overlay store")
        }
        None => "it was created manually and has no key".to_owned(),
    }
}
