//! Owns the history of build volumes: whether a build began clean, or continued with files from an earlier build.
//!
//! A key names the result of a clean build. Any other layer belongs to the env that made it and to its forks; other
//! envs get it by its key only if the user asks for that.

use std::path::Path;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::layer::{Layer, VolumeState};
use super::snapshot::Freeze;
use super::{LockedEnv, Store};
use crate::plan::ids::{LayerId, StepKey};
pub(crate) use crate::plan::layer::{ByHand, History, Moment, VolumesFrom};
use crate::plan::record::{Head, Record};
use crate::sys::error::Result;
use crate::tree::Method;

/// Which layers an env may use that it did not make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reuse {
    /// Those whose build volumes began clean.
    #[default]
    Clean,
    /// Incremental ones too.
    Incremental,
}

impl Reuse {
    /// Returns the command line's choice, or else the configured one.
    pub fn or_incremental(self, allow_incremental: bool) -> Self {
        match allow_incremental {
            true => Self::Incremental,
            false => self,
        }
    }
}

/// The env that looks for a step's layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerSearch<'a> {
    /// Its record: an env may use all of its own layers.
    pub record: Option<&'a Record>,
    /// Which layers of other envs it may use.
    pub reuse: Reuse,
    /// The socket of the service that keeps its trees; `None` if the store does.
    pub service: Option<&'a Path>,
    /// It begins clean, so its own incremental layers are excluded too.
    pub clean: bool,
}

impl Head {
    /// Returns the origin of the live build volumes' content; incremental in records of older versions.
    pub fn volumes_from(&self) -> VolumesFrom {
        match &self.volumes_from {
            _ if self.volumes.is_empty() => VolumesFrom::NOTHING,
            Some(known) => known.clone(),
            None => {
                let (on, by_hand) = (self.layer.clone(), false);
                VolumesFrom::new(on.clone(), History::Incremental { on, by_hand })
            }
        }
    }

    /// Returns the moment since which `exec` and `shell` commands may have written to the live build volumes, if
    /// there were such commands. Records of older versions tell only whether there were any.
    pub fn by_hand(&self) -> Option<Moment> {
        match &self.by_hand {
            Some(ByHand::Nothing) => None,
            Some(ByHand::Since(moment)) => Some(moment.clone()),
            None => self.tree.is_some().then(Moment::default),
        }
    }

    /// Drops the live tree; the live build volumes stay.
    pub fn drop_tree(&mut self) {
        self.by_hand = self.by_hand().map(ByHand::Since);
        self.tree = None;
    }
}

impl Layer {
    /// Returns whether the service at this socket keeps its tree, or else the store.
    pub fn is_kept_at(&self, service: Option<&Path>) -> bool {
        self.kept.as_ref().map(|kept| kept.socket.as_path()) == service
    }

    pub fn is_clean(&self) -> bool {
        self.history == History::Clean
    }
}

impl Store {
    /// Finds a step's layer that the env may use: its own, else the one that has the key as its id, else any other.
    /// Returns another engine's layer only if this env's engine has none.
    pub fn step_layer(&self, key: &StepKey, search: &LayerSearch<'_>) -> Result<Option<Layer>> {
        let own = search.record.and_then(|record| record.of_step(key));
        if let Some(own) = own
            && let Some(layer) = self.layer(&own.layer)?
            && (!search.clean || layer.is_clean())
        {
            return Ok(Some(layer));
        }
        let serves = |layer: &Layer| {
            let is_own = |record: &Record| layer.env.as_ref() == Some(&record.id);
            let made = search.record.is_some_and(is_own);
            let takes_all = made || search.reuse == Reuse::Incremental;
            layer.is_clean() || (takes_all && !search.clean)
        };
        let named = self.layer(&key.clone().into())?.filter(serves);
        if let Some(layer) = named.as_ref()
            && layer.is_kept_at(search.service)
        {
            return Ok(named);
        }
        // Random ids are shorter than keys. These layers are incremental, or another layer had the key as its id.
        let ids = self.layer_ids()?.into_iter();
        let others = ids.filter(|id| id.len() < key.len());
        let others = others.filter_map(|id| self.layer(&id).ok().flatten());
        let of_key = others.filter(|layer| {
            layer.key.as_ref() == Some(key) && serves(layer) && self.is_sound(layer)
        });
        let best = of_key.max_by_key(|layer| {
            let is_here = layer.is_kept_at(search.service);
            (is_here, layer.is_clean(), layer.created)
        });
        Ok(best.or(named))
    }

    /// Returns whether the build volumes of a layer, or of the image, are all empty.
    fn is_bare(&self, layer: Option<&LayerId>) -> Result<bool> {
        let Some(layer) = layer else { return Ok(true) };
        let found = self.layer(layer)?;
        Ok(found.is_some_and(|layer| {
            let mut states = layer.volumes.values();
            states.all(|state| *state == VolumeState::Empty)
        }))
    }
}

impl LockedEnv<'_> {
    /// Records that a step begins on the live build volumes, whether it sees any, and when its first run began.
    pub fn begin_step(
        &mut self,
        key: &StepKey,
        sees_volumes: bool,
        began: Timestamp,
    ) -> Result<()> {
        let head = &self.known_record()?.head;
        let mut from = head.volumes_from();
        if from.history != History::Clean && self.begins_empty()? {
            from = VolumesFrom::new(head.layer.clone(), History::Clean);
        }
        if from.history == History::Clean
            && let Some(by_hand) = self.foreign_files(&from, key)?
        {
            let on = from.layer.clone().or_else(|| head.layer.clone());
            from.history = History::Incremental { on, by_hand };
        }
        if from.history != History::Clean {
            from.layer = self.begun_below(from.layer, key)?;
        }
        let is_recorded = head.volumes.is_empty() || head.volumes_from.as_ref() == Some(&from);
        if !is_recorded || head.by_hand().is_some() {
            // The history now covers what commands wrote. Later changes are the step's.
            self.update(|record| {
                record.head.volumes_from = Some(from);
                record.head.by_hand = Some(ByHand::Nothing);
            })?;
        }
        self.begin_run(sees_volumes)?;
        self.begin_attempt(key, sees_volumes, Some(began))
    }

    /// Returns the layer whose content the live build volumes have: after a failed attempt of another step, the last
    /// layer below both. If volumes are frozen, snapshots have their content, and `from` stays.
    fn begun_below(&self, from: Option<LayerId>, key: &StepKey) -> Result<Option<LayerId>> {
        let begun = self.store.attempt(self.name(), self.known_record()?)?;
        let Some(begun) = begun.filter(|begun| begun.key != *key && begun.sees_volumes) else {
            return Ok(from);
        };
        let (Some(layer), Some(on), false) = (&from, begun.on, self.store.freezes_volumes()) else {
            return Ok(from.filter(|_| self.store.freezes_volumes()));
        };
        let below = self.store.chain(&on).unwrap_or_default();
        let chain = self.store.chain(layer).unwrap_or_default();
        let mut common = chain.into_iter().map(|layer| layer.id);
        Ok(common.find(|id| below.iter().any(|layer| layer.id == *id)))
    }

    /// Returns whether the live build volumes and those of the layer below are empty, and that layer is clean.
    fn begins_empty(&self) -> Result<bool> {
        let head = &self.known_record()?.head;
        let layer = self.store.layer_if(head.layer.as_ref())?;
        Ok(self.store.are_volumes_empty(head)
            && self.store.is_bare(head.layer.as_ref())?
            && layer.is_none_or(|layer| layer.is_clean()))
    }

    /// Returns `None` if the live build volumes contain only files from the layers below and from failed attempts of
    /// the same step, or else whether an `exec` or `shell` command wrote the other files.
    fn foreign_files(&self, from: &VolumesFrom, key: &StepKey) -> Result<Option<bool>> {
        let record = self.known_record()?;
        let head = &record.head;
        if self.store.are_volumes_empty(head) && self.store.is_bare(head.layer.as_ref())? {
            return Ok(None);
        }
        let attempt = self.store.attempt(self.name(), record)?;
        if from.layer != head.layer || attempt.as_ref().is_some_and(|begun| begun.key != *key) {
            return Ok(Some(false));
        }
        if self.is_joined()? {
            return Ok(Some(true));
        }
        // On btrfs, the volumes were already compared with the layer, unless a step changed them.
        let is_compared =
            self.store.method() == Method::Btrfs && attempt.is_none() && head.tree.is_some();
        Ok((!is_compared && self.is_changed_by_hand()?).then_some(true))
    }

    /// Returns the history of the layer that a tree becomes.
    pub(super) fn history_of(&self, freeze: &Freeze<'_>) -> Result<History> {
        if self.is_joined()? {
            // The command's files are indistinguishable from the step's.
            return Ok(History::Incremental {
                on: freeze.parent.cloned(),
                by_hand: true,
            });
        }
        if let Some(history) = &freeze.history {
            return Ok(history.clone());
        }
        let live = self.known_record()?.head.volumes_from().history;
        let parent = freeze.parent.filter(|_| live == History::Clean);
        let parent = self.store.layer_if(parent)?;
        Ok(parent.map_or(live, |parent| parent.history))
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    #[test]
    fn what_is_not_written_down_counts_as_clean_only_without_volumes() {
        let head = |volumes: &str| {
            let text = format!(r#"{{"layer": "l", "tree": null, "volumes": {volumes}}}"#);
            let head: Head = serde_json::from_str(&text).unwrap();
            head.volumes_from()
        };
        assert_eq!(head("{}"), VolumesFrom::NOTHING);
        assert_ne!(head(r#"{"build": "v"}"#).history, History::Clean);
        let tree: Head = serde_json::from_str(r#"{"tree": "t", "volumes": {}}"#).unwrap();
        assert_eq!(tree.by_hand(), Some(Moment::default()));
    }

    /// A killed rollback leaves no file for that.
    #[test]
    fn restored_volumes_bring_the_step_that_had_begun_on_them() {
        let (_directory, mut store) = Store::scratch();
        let key = StepKey::from("step");
        let layer = Layer {
            volumes: [("build".into(), VolumeState::Frozen)].into(),
            begun: Some(key.clone()),
            began: Some("2026-01-02T03:00:00Z".parse().unwrap()),
            ..Layer::sample("l".into())
        };
        store.put_layer(&layer);
        let mut record = Record::sample("e", Timestamp::UNIX_EPOCH);
        // As text: under another name, the origin of the volumes in existing records would be ignored.
        record.head = serde_json::from_str(
            r#"{"layer": "l", "volumes": {"build": "v"}, "volumes_from": {"layer": "l", "history": "clean"}}"#,
        )
        .unwrap();
        for (method, begun) in [(Method::Overlay, None), (Method::Reflink, Some(key))] {
            store.method = method;
            let found = store.attempt(&"a".into(), &record).unwrap();
            assert_eq!(found.map(|found| found.key), begun);
        }
        let began = |key: &str, elsewhere| {
            let began = store.began(&"a".into(), &record, &key.into(), elsewhere);
            began.unwrap().map(|began| began.to_string())
        };
        assert_eq!(began("other", true), None);
        assert_eq!(began("step", true).as_deref(), Some("2026-01-02T03:00:00Z"));
        // The step that began last left work in a view too, on build volumes that the rollback replaced.
        fs::create_dir_all(store.env_dir(&"a".into())).unwrap();
        let attempt = store.env_dir(&"a".into()).join("attempt");
        let text = format!("{} old\nl\n\n2026-01-02T02:00:00Z", StepKey::from("step"));
        fs::write(&attempt, text).unwrap();
        let here = began("step", false);
        assert_eq!(here.as_deref(), Some("2026-01-02T03:00:00Z"));
        assert_eq!(began("step", true).as_deref(), Some("2026-01-02T02:00:00Z"));
        fs::remove_file(&attempt).unwrap();
        // An unreadable file must not pass for a missing one.
        fs::create_dir(&attempt).unwrap();
        store.attempt(&"a".into(), &record).unwrap_err();
        fs::remove_dir(attempt).unwrap();
        let damaged = store.layer_dir(&layer.id).join("layer.json");
        fs::write(damaged, "{").unwrap();
        store.attempt(&"a".into(), &record).unwrap_err();
    }
}
