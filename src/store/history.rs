//! Owns where the content of build volumes comes from: a build that began clean, or one that went on with what another build left.
//!
//! A key names what a clean build makes. A layer that came about otherwise belongs to the env that made it and to its forks; nobody else
//! gets it by its key, unless the user asks for that.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::layer::{Layer, VolumeState};
use super::{LockedEnv, Store};
use crate::plan::ids::{LayerId, StepKey};
pub use crate::plan::layer::{History, VolumesFrom};
use crate::plan::record::{Head, Record};
use crate::sys::error::Result;
use crate::tree::Method;

/// Which layers serve an env that did not make them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reuse {
    /// Those whose build volumes began clean.
    #[default]
    Clean,
    /// Incremental ones as well.
    Incremental,
}

impl Reuse {
    /// Returns what is asked for on the command line, else what is configured.
    pub fn or_asked(self, allow_incremental: bool) -> Self {
        match allow_incremental {
            true => Self::Incremental,
            false => self,
        }
    }
}

/// Who looks for a step's layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seeker<'a> {
    /// The env's record: its own layers serve it however they came about.
    pub record: Option<&'a Record>,
    /// What serves it of other envs.
    pub reuse: Reuse,
    /// It begins clean: its own incremental layers do not serve it either.
    pub clean: bool,
}

impl Head {
    /// Returns where the content of the live build volumes comes from. Records of an older rockenv do not tell.
    pub fn volumes_from(&self) -> VolumesFrom {
        match &self.volumes_from {
            _ if self.volumes.is_empty() => VolumesFrom::NOTHING,
            Some(known) => known.clone(),
            None => VolumesFrom {
                layer: self.layer.clone(),
                history: History::Incremental {
                    on: self.layer.clone(),
                },
            },
        }
    }
}

impl Layer {
    /// Returns how its build volumes began. Where an older rockenv did not write that down, only a layer without any is clean.
    pub fn history(&self) -> History {
        match &self.history {
            Some(history) => history.clone(),
            None if self.volumes.is_empty() => History::Clean,
            None => History::Incremental {
                on: Some(self.id.clone()),
            },
        }
    }

    /// Returns whether it is what a clean build makes.
    pub fn is_clean(&self) -> bool {
        self.history() == History::Clean
    }
}

impl Store {
    /// Finds the layer of a step that serves an env: its own, else the one that has the key as its id, else any other.
    pub fn step_layer(&self, key: &StepKey, seeker: &Seeker<'_>) -> Result<Option<Layer>> {
        let own = seeker.record.and_then(|record| record.of_step(key));
        if let Some(own) = own
            && let Some(layer) = self.layer(&own.layer)?
            && (!seeker.clean || layer.is_clean())
        {
            return Ok(Some(layer));
        }
        let serves = |layer: &Layer| {
            let made = seeker.record.is_some_and(|record| layer.env == record.id);
            let takes_all = made || seeker.reuse == Reuse::Incremental;
            layer.is_clean() || (takes_all && !seeker.clean)
        };
        let named = self.layer(&key.clone().into())?;
        if let Some(layer) = named.as_ref().filter(|layer| serves(layer)) {
            return Ok(Some(layer.clone()));
        }
        if named.is_none() && seeker.reuse == Reuse::Clean {
            // Of several clean layers of a key, one has it as its id.
            return Ok(None);
        }
        let all = self.layers()?.into_iter();
        let of_key = all.filter(|layer| {
            layer.key.as_ref() == Some(key) && serves(layer) && self.is_sound(layer)
        });
        Ok(of_key.max_by_key(|layer| (layer.is_clean(), layer.created)))
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
    /// Writes down that a step begins on the live build volumes, and what they hold by then.
    pub fn begin_step(&mut self, key: &StepKey) -> Result<()> {
        let mut from = self.known_record()?.head.volumes_from();
        if from.history == History::Clean && !self.begins_clean(&from, key)? {
            let head = &self.known_record()?.head;
            let on = from.layer.clone().or_else(|| head.layer.clone());
            from.history = History::Incremental { on };
        }
        if self.known_record()?.head.volumes_from.as_ref() != Some(&from) {
            self.update(|record| record.head.volumes_from = Some(from))?;
        }
        self.begin_attempt(key)
    }

    /// Returns whether the live build volumes hold nothing but what the layers below left there, and the same step before it failed.
    fn begins_clean(&self, from: &VolumesFrom, key: &StepKey) -> Result<bool> {
        let record = self.known_record()?;
        let head = &record.head;
        let mut volumes = head.volumes.values();
        if volumes.all(|id| self.store.is_volume_empty(id)) {
            return Ok(from.layer == head.layer || self.store.is_bare(head.layer.as_ref())?);
        }
        let attempt = self.store.attempt(self.name(), record);
        // What `exec` runs may write there. Where nothing tells, it has.
        let tells = self.store.method() == Method::Btrfs && attempt.is_none();
        let by_hand = head.tree.is_some() && !tells;
        Ok(from.layer == head.layer && attempt.is_none_or(|begun| begun == *key) && !by_hand)
    }

    /// Returns how a layer began that is made of the env's tree on `parent`.
    pub(super) fn history_on(&self, parent: Option<&LayerId>) -> Result<History> {
        let live = self.known_record()?.head.volumes_from().history;
        let parent = match (&live, parent) {
            (History::Clean, Some(parent)) => self.store.layer(parent)?,
            (History::Clean | History::Incremental { .. }, _) => None,
        };
        Ok(parent.map_or(live, |parent| parent.history()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_written_down_counts_as_clean_only_without_volumes() {
        let text = |more: &str| {
            format!(
                r#"{{"id": "i", "key": null, "parent": null, "env": "e", "image_key": "k", "tree": "t", "title": "one",
                "created": "2026-01-02T03:04:05Z", "boot": "", {more}}}"#
            )
        };
        let read = |more: &str| serde_json::from_str::<Layer>(&text(more)).unwrap();
        assert!(read(r#""volumes": {}"#).is_clean());
        assert!(!read(r#""volumes": {"build": "empty"}"#).is_clean());
        let clean = read(r#""volumes": {"build": "frozen"}, "history": "clean""#);
        assert!(clean.is_clean());
        let other = read(r#""volumes": {}, "history": {"incremental": {"on": "l"}}"#);
        let on = Some("l".into());
        assert_eq!(other.history(), History::Incremental { on });
        // A record from before.
        let head = |volumes: &str| {
            let text = format!(r#"{{"layer": "l", "tree": null, "volumes": {volumes}}}"#);
            let head: Head = serde_json::from_str(&text).unwrap();
            head.volumes_from()
        };
        assert_eq!(head("{}"), VolumesFrom::NOTHING);
        assert_ne!(head(r#"{"build": "v"}"#).history, History::Clean);
    }
}
