//! Owns comparing the results of a step with those of a rebuild, for `verify`: its root file system, the build volumes
//! that it sees, and its exported results.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fs_err as fs;
use serde::Serialize;

use crate::engine::docker::Service;
use crate::image::normalise;
use crate::plan::layer::{Layer, VolumeState};
use crate::plan::resolve::{Access, Spec, Step, Volume, VolumeKind};
use crate::store::results::StepResults;
use crate::store::{LockedEnv, Store};
use crate::sys::error::{Error, Result};
use crate::tree::digest::{self, Comparing};
use crate::tree::{Method, listing, overlay};

/// Maximum number of differences of a step that are named.
const NAMED: usize = 20;
/// Files of ninja and CMake that each build makes differently: they contain times, or names of random directories.
const BUILD_TOOLS: [&str; 6] = [
    ".ninja_log",
    ".ninja_deps",
    "CMakeConfigureLog.yaml",
    // Before CMake 3.26.
    "CMakeOutput.log",
    "CMakeError.log",
    // clang names its symbols by the path of the source, which is in a random directory.
    "CMakeDetermineCompilerABI_HIP.bin",
];
/// Labels of the two sides.
const NAMES: [&str; 2] = ["the snapshot", "the new build"];

/// The directories of an env that take the place of its outputs and caches while it is verified.
pub(crate) const OUTPUTS: &str = "outputs";
pub(crate) const CACHES: &str = "caches";

/// Returns the directory of the env that takes the place of a volume.
pub(crate) fn scratch_place(volume: &Volume, with_caches: bool) -> Option<&'static str> {
    match volume.kind {
        VolumeKind::Output => Some(OUTPUTS),
        VolumeKind::Cache => (!volume.locked && !with_caches).then_some(CACHES),
        VolumeKind::Build | VolumeKind::Source | VolumeKind::Host => None,
    }
}

/// Returns whether a volume keeps a user's data, and steps could write to it.
pub(crate) fn is_apart(volume: &Volume, with_caches: bool) -> bool {
    volume.access != Access::Ro
        && match volume.kind {
            VolumeKind::Source | VolumeKind::Host => true,
            VolumeKind::Cache => volume.locked && !with_caches,
            VolumeKind::Build | VolumeKind::Output => false,
        }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Difference {
    /// Absolute path in the env.
    #[serde(with = "listing::path")]
    pub path: PathBuf,
    /// The volume that it is in; `None` for the root file system.
    pub volume: Option<String>,
    /// The difference, as a phrase, with the snapshot's side first.
    pub what: String,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Compared {
    /// The first paths that differ.
    pub differences: Vec<Difference>,
    /// The number of further differences.
    pub more: usize,
    /// What could not be compared, and why.
    pub not_compared: Vec<String>,
}

impl Compared {
    pub(crate) fn is_same(&self) -> bool {
        self.differences.is_empty()
    }

    fn add(&mut self, inside: &Path, volume: Option<&str>, found: digest::Differences) {
        let room = NAMED.saturating_sub(self.differences.len());
        let named = found.first.into_iter().take(room).map(|one| Difference {
            path: match one.path.to_str() {
                Some(".") => inside.to_owned(),
                _ => inside.join(one.path),
            },
            volume: volume.map(str::to_owned),
            what: one.what,
        });
        let before = self.differences.len();
        self.differences.extend(named);
        self.more += found.count - (self.differences.len() - before);
    }
}

/// A step's layer, and its env.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side<'a> {
    pub env: &'a LockedEnv<'a>,
    pub layer: &'a Layer,
}

/// A layer's tree of a volume.
enum Tree {
    At(PathBuf),
    Empty,
    /// No longer available.
    Lost,
}

/// A comparison of a step's old results with its new results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepComparison<'a> {
    pub store: &'a Store,
    pub before: Side<'a>,
    pub now: Side<'a>,
    /// Also compares modification times, and files that only record the time of the build.
    pub strict: bool,
    pub cancel: &'a AtomicBool,
}

impl StepComparison<'_> {
    pub(crate) fn compare(&self, spec: &Spec, step: &Step) -> Result<Compared> {
        let (before, now) = (self.before, self.now);
        let mut compared = Compared::default();
        compared.add(Path::new("/"), None, self.roots()?);
        for volume in spec.visible(step) {
            let inside = Path::new(&volume.target);
            let name = volume.name.as_str();
            match volume.kind {
                VolumeKind::Build => {
                    let (old, new) = (self.built(before, name)?, self.built(now, name)?);
                    match (old, new) {
                        (Tree::Lost, _) | (_, Tree::Lost) => compared.not_compared.push(format!(
                            "build volume `{name}`: not in snapshots of an overlay store"
                        )),
                        (old, new) => compared.add(inside, Some(name), self.trees(&old, &new)?),
                    }
                }
                VolumeKind::Output => {
                    let (old, new) = (self.results(before, name), self.results(now, name));
                    compared.add(inside, Some(name), self.trees(&old, &new)?);
                    compared.add(inside, Some(name), self.removed(name)?);
                }
                VolumeKind::Source | VolumeKind::Cache | VolumeKind::Host => {}
            }
        }
        Ok(compared)
    }

    /// Compares two directories, except paths for which `except` is true.
    fn directories(
        &self,
        old: &Path,
        new: &Path,
        except: &(dyn Fn(&Path) -> bool + Sync),
    ) -> Result<digest::Differences> {
        let how = Comparing {
            limit: NAMED,
            times: self.strict,
            except,
            names: NAMES,
        };
        digest::compare_as(old, new, &how, self.cancel)
    }

    fn roots(&self) -> Result<digest::Differences> {
        let (before, now) = (self.before, self.now);
        if let Some(service) = before.env.service()? {
            return self.roots_at(&service);
        }
        let except = |path: &Path| !self.strict && is_nondeterministic(path);
        if self.store.method() != Method::Overlay {
            let root = |layer: &Layer| self.store.layer_dir(&layer.id).join("root");
            return self.directories(&root(before.layer), &root(now.layer), &except);
        }
        let lowers = |layer: &Layer| self.store.lowers(Some(&layer.id), &layer.image_key);
        let (old, new) = (lowers(before.layer)?, lowers(now.layer)?);
        // The env itself is not touched.
        let places = ["before", "now"].map(|name| now.env.run_dir().join(name));
        for place in &places {
            fs::create_dir_all(place)?;
        }
        overlay::in_throw_away_namespace(|| {
            overlay::mount(&old, None, &places[0])?;
            overlay::mount(&new, None, &places[1])?;
            self.directories(&places[0], &places[1], &except)
        })?
    }

    /// Compares trees that a service stores.
    fn roots_at(&self, service: &Service) -> Result<digest::Differences> {
        let list = |side: Side<'_>| side.env.list_image(service, Some(&side.layer.id));
        let (old, new) = (list(self.before)?, list(self.now)?);
        let paths: BTreeSet<&PathBuf> = old.keys().chain(new.keys()).collect();
        let mut first = Vec::new();
        for path in paths {
            let below = path.strip_prefix("/").unwrap_or(path);
            let what = match (old.get(path), new.get(path)) {
                (Some(old), Some(new)) => old.differs(new, self.strict),
                (Some(_), None) => Some(format!("only in {}", NAMES[0])),
                (None, _) => Some(format!("only in {}", NAMES[1])),
            };
            if let Some(what) = what
                && (self.strict || !is_nondeterministic(below))
            {
                let path = below.to_owned();
                first.push(digest::Difference { path, what });
            }
        }
        let count = first.len();
        first.truncate(NAMED);
        Ok(digest::Differences { first, count })
    }

    /// Returns a layer's tree of a build volume.
    fn built(&self, side: Side<'_>, name: &str) -> Result<Tree> {
        let (store, layer) = (self.store, side.layer);
        Ok(match layer.volumes.get(name) {
            None | Some(VolumeState::Empty) => Tree::Empty,
            Some(VolumeState::Frozen) => {
                Tree::At(store.layer_dir(&layer.id).join("volumes").join(name))
            }
            Some(VolumeState::Absent) => Tree::Lost,
            Some(VolumeState::Live(id)) => {
                let record = side.env.known_record()?;
                let head = &record.head;
                let from = head.volumes_from();
                // If a command or a failed step may have written to it since, it is no longer the layer's.
                let is_whole = head.volumes.get(name) == Some(id)
                    && from.layer.as_ref() == Some(&layer.id)
                    && !side.env.is_changed_by_hand()?
                    && store.attempt(side.env.name(), record)?.is_none();
                match is_whole {
                    true => Tree::At(store.volume_dir(id)),
                    false => Tree::Lost,
                }
            }
        })
    }

    /// Returns a layer's results in an output volume.
    fn results(&self, side: Side<'_>, name: &str) -> Tree {
        let place = self.store.results_dir(&side.layer.id).join(name);
        match place.is_dir() {
            true => Tree::At(place),
            false => Tree::Empty,
        }
    }

    /// Compares the content of a volume, but not its own directory, which rockenv makes.
    fn trees(&self, old: &Tree, new: &Tree) -> Result<digest::Differences> {
        let nothing = self.now.env.run_dir().join("nothing");
        let place = |tree: &Tree| match tree {
            Tree::At(place) => place.clone(),
            Tree::Empty | Tree::Lost => nothing.clone(),
        };
        if !matches!((old, new), (Tree::At(_), Tree::At(_))) {
            fs::create_dir_all(&nothing)?;
        }
        self.directories(&place(old), &place(new), &|path| {
            path.as_os_str().is_empty() || !self.strict && is_of_build_tool(path)
        })
    }

    /// Compares which results of earlier steps the step removed.
    fn removed(&self, volume: &str) -> Result<digest::Differences> {
        let removed = |side: Side<'_>| -> Result<BTreeSet<PathBuf>> {
            let left = StepResults::read(&self.store.results_dir(&side.layer.id))?.take(volume);
            Ok(left.removed.0.into_iter().collect())
        };
        let (old, new) = (removed(self.before)?, removed(self.now)?);
        let difference = |path: &PathBuf| {
            let by = NAMES[usize::from(!old.contains(path))];
            digest::Difference {
                path: path.clone(),
                what: format!("removed in {by} only"),
            }
        };
        let first: Vec<_> = old.symmetric_difference(&new).map(difference).collect();
        Ok(digest::Differences {
            count: first.len(),
            first,
        })
    }
}

fn is_of_build_tool(path: &Path) -> bool {
    BUILD_TOOLS.iter().any(|name| path.ends_with(name))
}

/// Returns whether a file of the root file system differs although the same was built.
fn is_nondeterministic(path: &Path) -> bool {
    normalise::is_nondeterministic(path) || is_of_build_tool(path)
}

/// Returns the error for a step whose sources changed since it was built; `up` is the env's own command.
pub(crate) fn changed(step: &Step, inputs: &[&str], up: &str) -> Error {
    invalid!(
        "step `{}` cannot be built again: its inputs have changed since: {}",
        step.name,
        inputs.join(", ")
    )
    .help(format!("to build with the current inputs, run: {up}"))
}
