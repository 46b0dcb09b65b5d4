//! Owns the record of a view: its layers, and which of them still fit.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::STACK;
use crate::engine::View;
use crate::plan::ids::{self, StepKey, ViewLayerId};
use crate::sys::atomic;
use crate::sys::error::Result;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stack {
    /// Fingerprint of the source below the layers.
    pub(super) base: String,
    /// From the bottom up.
    pub(super) layers: Vec<StackLayer>,
    /// The layer that steps write to; always the topmost.
    #[serde(default)]
    pub(super) upper: Option<ViewLayerId>,
    /// When files first got the content that hooks gave them. Recreated files get the same times, so that nothing built
    /// from them is built again.
    pub(super) times: Times,
    /// The state of the files that steps wrote to the view.
    #[serde(default)]
    pub(super) written: Written,
    /// A step was built from other sources than its key states, and hooks and steps may have copied files of those into
    /// the view: the next command makes it anew.
    #[serde(default)]
    pub(super) is_stale: bool,
}

/// The origin of the files that steps wrote to a view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    /// The layer of the last step that wrote them, empty for the image; `None` if an older version made the view.
    pub(super) from: Option<String>,
    /// The step that has begun on the view since.
    pub(super) begun: Option<StepKey>,
    /// The number of recorded lines about `exec` and `shell` commands when that step began.
    pub(super) commands: usize,
    /// Creation time of the copy that steps write to, in nanoseconds since 1970.
    pub(super) copied: Option<i64>,
}

impl Written {
    /// Returns whether the files are those that a clean build leaves before the step `key` on the layer `parent`.
    pub(super) fn is_before(&self, parent: &str, key: &StepKey) -> bool {
        let begun = self.begun.as_ref();
        self.from.as_deref() == Some(parent) && begun.is_none_or(|begun| begun == key)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StackLayer {
    /// Its directory; `None` between two hooks of one step, if a copy has the changes of both.
    #[serde(with = "ids::or_empty")]
    pub(super) id: Option<ViewLayerId>,
    /// Digest of the hook that made the layer; `None` if steps wrote it.
    pub(super) hook: Option<String>,
}

/// Times of files, by path below the source.
pub(super) type Times = BTreeMap<PathBuf, Time>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Time {
    pub(super) sha256: String,
    pub(super) seconds: i64,
    pub(super) nanoseconds: i64,
}

impl Time {
    /// Returns the modification time, in seconds and nanoseconds.
    pub(super) fn modified(&self) -> (i64, i64) {
        (self.seconds, self.nanoseconds)
    }
}

impl Stack {
    /// Reads the stack in the directory of a view, if any.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>> {
        atomic::read_json(&directory.join(STACK))
    }

    pub(super) fn write(&self, directory: &Path) -> Result<()> {
        atomic::write_json(&directory.join(STACK), self)
    }

    /// Drops layers that do not belong to these hooks on this source.
    ///
    /// Steps' writes stay as long as nothing below them changes.
    pub(super) fn fit(&mut self, base: &str, hooks: &[&str]) {
        if self.base != base {
            base.clone_into(&mut self.base);
            self.layers.clear();
            self.upper = None;
        }
        let mut there = 0;
        for position in 0..self.layers.len() {
            match &self.layers[position].hook {
                Some(hook) if hooks.get(there) == Some(&hook.as_str()) => there += 1,
                Some(_) => {
                    self.layers.truncate(position);
                    self.upper = None;
                    break;
                }
                None => {}
            }
        }
    }

    /// Freezes the copy that steps write to, if there is one, and returns the topmost frozen copy. Files of steps in it
    /// are a layer of their own, which stays if the hooks above it change.
    pub(super) fn freeze_copy(&mut self, is_written: bool) -> Option<ViewLayerId> {
        let upper = self.upper.take();
        let last = self.layers.last_mut()?;
        if upper.is_some() {
            last.id = upper;
            if is_written && last.hook.is_some() {
                let id = last.id.take();
                self.layers.push(StackLayer { id, hook: None });
            }
        }
        self.layers.last()?.id.clone()
    }

    /// Returns how many hooks the layers contain.
    pub(super) fn hooks(&self) -> usize {
        let made = self.layers.iter().filter(|layer| layer.hook.is_some());
        made.count()
    }

    /// Returns the layers below the upper one, topmost first.
    pub(super) fn lowers(&self, directory: &Path) -> Vec<PathBuf> {
        let layers = self.layers.iter().rev();
        let ids = layers.filter_map(|layer| layer.id.as_ref());
        ids.map(|id| directory.join(id)).collect()
    }

    /// Returns the view of the layers, with the writable directory `upper` above them.
    pub(super) fn view(&self, directory: &Path, upper: &str) -> View {
        View {
            layers: self.lowers(directory),
            upper: directory.join(upper),
            work: super::work(directory),
        }
    }

    pub(super) fn names(&self) -> BTreeSet<&str> {
        let layers = self.layers.iter().filter_map(|layer| layer.id.as_ref());
        layers.chain(&self.upper).map(ViewLayerId::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(layers: &[(&str, Option<&str>)]) -> Stack {
        Stack {
            base: "f1".into(),
            layers: layers
                .iter()
                .map(|(id, hook)| StackLayer {
                    id: Some(id.parse().unwrap()),
                    hook: hook.map(str::to_owned),
                })
                .collect(),
            upper: Some("u".parse().unwrap()),
            ..Stack::default()
        }
    }

    fn fitted(layers: &[(&str, Option<&str>)], base: &str, hooks: &[&str]) -> (usize, String) {
        let mut stack = stack(layers);
        stack.fit(base, hooks);
        let ids = stack.layers.iter().filter_map(|layer| layer.id.as_deref());
        let ids = ids.collect::<Vec<_>>().join(" ");
        let upper = stack.upper.as_deref().unwrap_or_default();
        (stack.hooks(), format!("{ids}|{upper}"))
    }

    #[test]
    fn a_layer_without_a_directory_can_be_read_again() {
        let mut written = stack(&[("1", Some("a")), ("2", Some("b"))]);
        written.layers[0].id = None;
        let text = serde_json::to_string(&written).unwrap();
        assert!(text.contains(r#"{"id":"","hook":"a"}"#), "{text}");
        assert_eq!(serde_json::from_str::<Stack>(&text).unwrap(), written);
        assert_eq!(written.names(), ["2", "u"].into());
    }

    #[test]
    fn what_fits_stays() {
        let all = [("1", Some("a")), ("w", None), ("2", Some("b"))];
        assert_eq!(fitted(&all, "f1", &["a", "b"]), (2, "1 w 2|u".into()));
        assert_eq!(fitted(&all, "f1", &["a", "b", "c"]), (2, "1 w 2|u".into()));
        // Back before the second hook: later writes are gone, earlier writes stay.
        assert_eq!(fitted(&all, "f1", &["a"]), (1, "1 w|".into()));
        assert_eq!(fitted(&all, "f1", &["a", "x"]), (1, "1 w|".into()));
        assert_eq!(fitted(&all, "f1", &["b"]), (0, "|".into()));
        assert_eq!(fitted(&all, "f2", &["a", "b"]), (0, "|".into()));
        assert_eq!(fitted(&[], "f1", &["a"]), (0, "|u".into()));
    }

    #[test]
    fn a_frozen_copy_shows_whether_steps_wrote_to_it() {
        for (is_written, layers) in [(false, 1), (true, 2)] {
            let mut stack = stack(&[("1", Some("a"))]);
            for upper in ["u", "v"] {
                stack.upper = Some(upper.parse().unwrap());
                assert_eq!(stack.freeze_copy(is_written).as_deref(), Some(upper));
                assert_eq!((stack.names(), stack.hooks()), ([upper].into(), 1));
                assert_eq!(stack.layers.len(), layers);
            }
            // A later hook was removed, or its command was killed.
            stack.fit("f1", &["a"]);
            assert_eq!(stack.freeze_copy(false).as_deref(), Some("v"));
            assert_eq!(stack.layers.len(), layers);
            stack.layers.clear();
            assert_eq!(stack.freeze_copy(is_written), None);
        }
    }
}
