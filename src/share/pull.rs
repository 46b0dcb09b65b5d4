//! Owns pulling and importing: a registry is asked for tags, a layout lists its content. Interrupted downloads resume.

use std::path::Path;

use futures_util::StreamExt as _;
use serde::Serialize;

use super::document::{Document, MAX_CONFIG, Manifest, foreign};
use super::layout::Layout;
use super::place::SnapshotSource;
use super::{RECIPE, Repository, VerifyingKey, recipe_tag, signature, watched};
use crate::image::fetch::ByteCounter;
use crate::image::oci::{Operation, Registry, RequestSubject};
use crate::plan::ids::{ImageKey, StepKey};
use crate::plan::resolve::Spec;
use crate::share::import_layers::Import;
use crate::store::history::Reuse;
use crate::store::images::{Image, TaskContext};
use crate::sys::checksum::is_lower_sha256;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::name::StepName;

pub(super) const PARALLEL: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotRef {
    /// The snapshot of a step, or the image, with this key.
    Key(String),
    /// The snapshot of the last of these steps; without steps, the image.
    Chain(WantedChain),
    /// The current image of a recipe, by the recipe's digest.
    Recipe(String),
    Named(String),
}

impl SnapshotRef {
    pub(crate) fn of(name: &str) -> Self {
        match name.strip_prefix(RECIPE) {
            Some(recipe) if is_lower_sha256(recipe) => Self::Recipe(recipe.to_owned()),
            _ if is_lower_sha256(name) => Self::Key(name.to_owned()),
            _ => Self::Named(name.to_owned()),
        }
    }

    fn tag(&self) -> String {
        match self {
            Self::Key(key) => key.clone(),
            Self::Chain(chain) => match chain.steps.last() {
                Some((last, _)) => last.to_string(),
                None => chain.image.to_string(),
            },
            Self::Recipe(recipe) => recipe_tag(recipe),
            Self::Named(name) => name.clone(),
        }
    }

    /// Refuses a document with other content, or with more than the caller looks for.
    pub(super) fn check(&self, document: &Document) -> Result<()> {
        let snapshot = &document.snapshot;
        let tag = self.tag();
        let (wanted, found) = match self {
            Self::Key(_) | Self::Chain(..) => (tag.as_str(), document.key()),
            Self::Recipe(recipe) => (recipe.as_str(), snapshot.image.recipe.as_str()),
            Self::Named(_) => return Ok(()),
        };
        if wanted != found {
            return Err(drift!("tag `{tag}` has unexpected content: {found}")
                .help("the tag was moved; push or export the right snapshot again on the machine that built it"));
        }
        let image = &snapshot.image.key;
        let steps = snapshot.steps.iter();
        let mut steps = steps.map(|step| (step.name.as_str(), &step.key));
        let unexpected = match self {
            Self::Chain(chain) if chain.image != *image => {
                return Err(foreign(format!(
                    "snapshot `{tag}` has an unexpected image: {image}"
                )));
            }
            Self::Chain(chain) => chain.unexpected(steps),
            Self::Recipe(_) => steps.next(),
            Self::Key(_) | Self::Named(_) => None,
        };
        match unexpected {
            None => Ok(()),
            Some((name, key)) => Err(foreign(format!(
                "snapshot `{tag}` contains a step with an unexpected key: `{name}`, {key}"
            ))),
        }
    }

    /// Gives new keys, which no step looks for, to steps that were accepted by name alone because this machine skips
    /// them. The keys that they claim may belong to steps of another profile.
    fn disown_skipped(&self, document: &mut Document) {
        let Self::Chain(chain) = self else { return };
        for step in &mut document.snapshot.steps {
            if !chain.steps.iter().any(|(key, _)| *key == step.key) {
                step.key = step.key.of_no_step();
            }
        }
    }
}

/// A profile's steps up to the wanted one, and their image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedChain {
    image: ImageKey,
    /// Step keys. `true`: other machines may skip the step (it needs a GPU, and no later key includes it).
    steps: Vec<(StepKey, bool)>,
    /// Names of the steps that this machine skips. Their keys on other machines are unknown here.
    skipped: Vec<StepName>,
}

impl WantedChain {
    pub(crate) fn image(image: ImageKey) -> Self {
        Self {
            image,
            steps: Vec::new(),
            skipped: Vec::new(),
        }
    }

    /// Returns the steps up to the step with the key `last`; `None` if no step has that key.
    pub(crate) fn of(spec: &Spec, image: ImageKey, last: &StepKey) -> Option<Self> {
        let at = spec.steps.iter().position(|step| step.key == *last)?;
        let steps = spec.steps[..=at].iter();
        let skipped = spec.skipped.iter();
        Some(Self {
            image,
            steps: steps
                .map(|step| (step.key.clone(), step.is_in_no_later_key()))
                .collect(),
            skipped: skipped.map(|step| step.name.clone()).collect(),
        })
    }

    /// Returns the first step that does not belong to the chain. Each key must follow from the key before it.
    fn unexpected<'s>(
        &self,
        steps: impl Iterator<Item = (&'s str, &'s StepKey)>,
    ) -> Option<(&'s str, &'s StepKey)> {
        let mut wanted = self.steps.iter();
        let mut steps = steps.filter(|(name, _)| !self.skipped.iter().any(|known| known == name));
        steps.find(|(_, key)| {
            let next = wanted.find(|(wanted, may_lack)| wanted == *key || !may_lack);
            next.is_none_or(|(wanted, _)| wanted != *key)
        })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Pulled {
    /// Key of the base image.
    pub image: String,
    pub image_pulled: bool,
    /// Names of the steps whose snapshots were pulled.
    pub steps: Vec<String>,
    /// Names of the steps whose snapshots were skipped because they are incremental.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub incremental: Vec<String>,
    /// Compressed size of the needed layers.
    pub bytes: u64,
}

/// Returns the first of these keys that has a usable snapshot in the registry.
pub(crate) fn available(
    repository: &Repository,
    keys: &[StepKey],
    reuse: Reuse,
    cx: &mut TaskContext<'_>,
) -> Result<Option<StepKey>> {
    let registry = repository.open(Operation::Pull, cx)?;
    watched(cx, None, async || {
        // Requested in parallel, because latency dominates.
        let mut found = futures_util::stream::iter(keys)
            .map(async |key| (key, registry.has(key).await))
            .buffered(PARALLEL);
        while let Some((key, has)) = found.next().await {
            if !has? {
                continue;
            }
            let serves = match reuse {
                Reuse::Incremental => true,
                // A malformed manifest is reported when it is pulled.
                Reuse::Clean => registry.find_tag(key).await?.is_none_or(|(manifest, _)| {
                    Manifest::parse(&manifest).map_or(true, |manifest| manifest.is_clean())
                }),
            };
            if serves {
                return Ok(Some(key.clone()));
            }
        }
        Ok(None)
    })
    .context(|| format!("cannot ask `{repository}`"))
}

/// Returns the description of the wanted image from the registry, without its tree.
pub(crate) fn image(
    repository: &Repository,
    wanted: &SnapshotRef,
    cx: &mut TaskContext<'_>,
) -> Result<Option<Image>> {
    let (tag, aside) = (wanted.tag(), tempfile::tempdir()?);
    let registry = repository.open(Operation::Pull, cx)?;
    let verifies = repository.verifies.as_deref();
    let document = watched(cx, None, async || {
        find(&registry, &tag, aside.path(), verifies).await
    })
    .context(|| format!("cannot ask `{repository}`"))?;
    let Some(document) = document else {
        return Ok(None);
    };
    wanted.check(&document)?;
    Ok(Some(document.snapshot.image))
}

/// Pulls a snapshot and its missing parents; `None` if the registry has none.
pub(crate) fn pull(
    to: Import<'_>,
    repository: &Repository,
    wanted: &SnapshotRef,
    cx: &mut TaskContext<'_>,
) -> Result<Option<Pulled>> {
    let store = to.store;
    let tag = wanted.tag();
    let registry = repository.open(Operation::Pull, cx)?;
    let verifies = repository.verifies.as_deref();
    let cannot = || format!("cannot pull `{tag}` from `{repository}`");
    // Held from the start, because hours may pass between a download and its unpacking.
    let _downloads = store.keep_downloads()?;
    let blobs = store.root().join("blobs");
    let document = watched(cx, None, async || {
        find(&registry, &tag, &blobs, verifies).await
    })
    .context(cannot)?;
    let Some(mut document) = document else {
        return Ok(None);
    };
    wanted.check(&document).context(cannot)?;
    if verifies.is_none() {
        wanted.disown_skipped(&mut document);
    }
    let source = SnapshotSource::Registry(&registry, &blobs);
    to.run(source, document, verifies.is_some(), cx)
        .context(cannot)
        .map(Some)
}

/// Imports the missing layers of all snapshots in a file or directory made by [`super::export`].
pub(crate) fn import(to: Import<'_>, path: &Path, cx: &mut TaskContext<'_>) -> Result<Vec<Pulled>> {
    let mut all = || -> Result<_> {
        // An invalid document must be reported before the first import.
        examine(path)?;
        let layout = Layout::open(path)?;
        let entries = layout.entries()?;
        let source = SnapshotSource::Layout(&layout);
        let mut one = |entry| to.run(source, layout.document(entry)?, false, cx);
        entries.iter().map(&mut one).collect()
    };
    all().context(|| format!("cannot import `{}`", path.display()))
}

/// Reads all documents of the snapshots in a file or directory.
pub(crate) fn examine(path: &Path) -> Result<()> {
    let layout = Layout::open(path)?;
    for entry in layout.entries()? {
        layout.document(&entry)?.chains();
    }
    Ok(())
}

/// Resolves a tag. If a signature is required, it is verified before anything else is read.
pub(super) async fn find(
    registry: &Registry,
    tag: &str,
    blobs: &Path,
    verifies: Option<&VerifyingKey>,
) -> Result<Option<Document>> {
    let Some((bytes, sha256)) = registry.find_tag(tag).await? else {
        return Ok(None);
    };
    if let Some(key) = verifies {
        signature::verify(registry, key, &sha256, blobs).await?;
    }
    document(registry, &bytes, blobs).await.map(Some)
}

pub(super) async fn document(registry: &Registry, bytes: &[u8], blobs: &Path) -> Result<Document> {
    let manifest = Manifest::parse(bytes)?;
    let (blob, aside) = (RequestSubject::Blob, ByteCounter::default());
    let config = registry.obtain(blob, &manifest.config, MAX_CONFIG, blobs, &aside);
    let config = fs_err::read(config.await?)?;
    manifest.with(&config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_promises_something_is_held_to_it() {
        let digits = "0123456789abcdef".repeat(4);
        assert_eq!(SnapshotRef::of(&digits), SnapshotRef::Key(digits.clone()));
        let recipe = SnapshotRef::Recipe(digits.clone());
        assert_eq!(SnapshotRef::of(&recipe_tag(&digits)), recipe);
        for name in [
            "nightly",
            "recipe-1",
            "localhost/demo:two",
            "",
            &digits[1..],
        ] {
            assert_eq!(SnapshotRef::of(name), SnapshotRef::Named(name.to_owned()));
            assert_eq!(SnapshotRef::of(name).tag(), name);
        }
    }

    #[test]
    fn machines_with_and_without_a_gpu_have_the_same_steps_otherwise() {
        let chain = |steps: &[(&str, bool)], skipped: &[&str]| WantedChain {
            image: "image".into(),
            steps: steps
                .iter()
                .map(|(key, may_lack)| ((*key).into(), *may_lack))
                .collect(),
            skipped: skipped.iter().map(|name| (*name).into()).collect(),
        };
        let with = chain(&[("a", false), ("g", true), ("c", false)], &[]);
        let without = chain(&[("a", false), ("c", false)], &["gpu"]);
        for (chain, steps, unexpected) in [
            (&with, "one=a gpu=g three=c", None),
            (&with, "one=a three=c", None),
            (&without, "one=a gpu=g three=c", None),
            (&without, "one=a three=c", None),
            (&with, "one=a gpu=other three=c", Some("gpu")),
            (&with, "one=a bank=b three=c", Some("bank")),
            (&with, "bank=b one=a", Some("bank")),
            (&with, "three=c", Some("three")),
            (&without, "gpu=g three=c", Some("three")),
            (&without, "one=a three=c bank=b", Some("bank")),
        ] {
            let steps = steps.split(' ').map(|step| step.split_once('=').unwrap());
            let steps: Vec<(&str, StepKey)> = steps.map(|(name, key)| (name, key.into())).collect();
            let found = chain.unexpected(steps.iter().map(|(name, key)| (*name, key)));
            assert_eq!(found.map(|(name, _)| name), unexpected, "{steps:?}");
        }
    }
}
