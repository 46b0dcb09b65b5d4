//! Owns removing old snapshots from a registry: surveying the tags, deciding which to keep, and removing the rest.
//!
//! Only whole manifests that rockenv made are removed. A tag stays if it cannot be read, if a person chose its name, or
//! if it shares its manifest with a kept tag. Everything below a kept snapshot stays too.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::document::{Document, Manifest};
use super::pull::{PARALLEL, document};
use super::{Repository, SnapshotRef, signature, watched};
use crate::image::oci::{Operation, Registry, sha256};
use crate::store::images::TaskContext;
use crate::sys::error::{Kind, Result, ResultExt as _};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keep {
    /// Keys of steps and images.
    pub(crate) keys: BTreeSet<String>,
    /// Snapshots built since then stay.
    pub(crate) since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Tag {
    name: String,
    /// SHA-256 of its manifest.
    manifest: String,
    content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    /// A snapshot or an image of rockenv.
    Snapshot {
        key: String,
        /// The step's name, or the image's.
        title: String,
        built: Timestamp,
        /// The keys of its steps and its image.
        holds: BTreeSet<String>,
        layers: BTreeMap<String, u64>,
        /// Whether the tag is the name that rockenv gives to this content.
        is_named_by_key: bool,
    },
    Signature(String),
    /// Any other content, with the manifests that it references.
    Other(BTreeSet<String>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Unneeded {
    pub(crate) tag: String,
    /// The step's name, or the image's. `None` for signatures.
    pub(crate) title: Option<String>,
    pub(crate) built: Option<Timestamp>,
    #[serde(skip)]
    manifest: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PrunePlan {
    pub(crate) removed: Vec<Unneeded>,
    /// Number of rockenv's tags that stay.
    pub(crate) kept: usize,
    /// Number of tags that other programs made, or that cannot be read.
    pub(crate) others: usize,
    /// Bytes of layers that only the removed snapshots have.
    pub(crate) bytes: u64,
    /// The surveyed tags and the criteria.
    #[serde(skip)]
    looked_at: (Vec<Tag>, Keep),
}

/// Surveys all tags and decides which to remove.
pub(crate) fn survey(
    repository: &Repository,
    keep: &Keep,
    cx: &mut TaskContext<'_>,
) -> Result<PrunePlan> {
    let registry = repository.open(Operation::Pull, cx)?;
    watched(cx, None, async || {
        let names = futures_util::stream::iter(registry.tags().await?);
        let tags = names.map(async |name| look(&registry, name).await);
        Ok(decide(&all(tags).await?, keep))
    })
    .context(|| format!("cannot look at `{repository}`"))
}

/// Removes what a survey found, except manifests that got a new tag in the meantime and everything below them. Returns
/// the removed tags, and the bytes of layers that only these had.
pub(crate) fn remove(
    repository: &Repository,
    plan: &PrunePlan,
    cx: &mut TaskContext<'_>,
) -> Result<(Vec<Unneeded>, u64)> {
    let registry = repository.open(Operation::Delete, cx)?;
    let before = plan.looked_at.0.iter().map(|tag| (tag.name.as_str(), tag));
    let before: BTreeMap<&str, &Tag> = before.collect();
    watched(cx, None, async || {
        let names = futures_util::stream::iter(registry.tags().await?);
        let tags = names.map(async |name| {
            let before = before.get(name.as_str()).copied();
            look_again(&registry, name, before).await
        });
        let tags = all(tags).await?;
        let (mut gone, mut removed) = (BTreeSet::<&str>::new(), Vec::new());
        for tag in plan.still_unneeded(&tags) {
            // Other tags of the same manifest were removed with it.
            if gone.insert(&tag.manifest) {
                registry.delete(&tag.manifest).await?;
            }
            removed.push(tag.clone());
        }
        Ok((removed, freed(&tags, &gone)))
    })
    .context(|| format!("cannot remove snapshots from `{repository}`"))
}

/// Examines several tags at once. The first error ends the survey.
async fn all(
    tags: impl Stream<Item = impl Future<Output = Result<Option<Tag>>>>,
) -> Result<Vec<Tag>> {
    let tags = tags.buffered(PARALLEL);
    tags.try_filter_map(async |tag| Ok(tag)).try_collect().await
}

/// Examines a tag again after the survey. A tag that is new or has moved is needed.
async fn look_again(
    registry: &Registry,
    name: String,
    before: Option<&Tag>,
) -> Result<Option<Tag>> {
    // A tag whose document is not a manifest is always examined again.
    if let Some(before) = before.filter(|tag| !tag.manifest.is_empty()) {
        let now = registry.find_tag(&name).await;
        if let Ok(Some((_, manifest))) = &now
            && *manifest == before.manifest
        {
            return Ok(Some(before.clone()));
        }
    }
    let found = look(registry, name).await?;
    Ok(found.map(Tag::needed))
}

impl PrunePlan {
    /// Returns the planned tags that may still be removed, given the current tags.
    fn still_unneeded(&self, tags: &[Tag]) -> Vec<&Unneeded> {
        let now = decide(tags, &self.looked_at.1).removed;
        let now: BTreeMap<&str, &Unneeded> = now.iter().map(|tag| (&*tag.tag, tag)).collect();
        let removed = self.removed.iter();
        removed
            .filter(|tag| now.get(&*tag.tag) == Some(tag))
            .collect()
    }
}

impl Tag {
    /// Marks the tag as one to keep, like a name that a person chose. A signature then keeps its subject.
    fn needed(mut self) -> Self {
        match &mut self.content {
            Content::Snapshot {
                is_named_by_key, ..
            } => *is_named_by_key = false,
            Content::Signature(subject) => {
                self.content = Content::Other([std::mem::take(subject)].into());
            }
            Content::Other(_) => {}
        }
        self
    }
}

/// Examines a tag. `None`: the tag was removed in the meantime.
async fn look(registry: &Registry, name: String) -> Result<Option<Tag>> {
    let (bytes, manifest) = match registry.find_tag(&name).await {
        Ok(Some(found)) => found,
        Ok(None) => return Ok(None),
        // The document is not a manifest.
        Err(error) if [Kind::Invalid, Kind::Drift].contains(&error.kind()) => {
            (Vec::new(), String::new())
        }
        Err(error) => return Err(error),
    };
    // Removed with this tag: the configurations of all tags may take gigabytes.
    let aside = tempfile::tempdir()?;
    let content = match signature::subject(&name) {
        Some(subject) => Content::Signature(subject.to_owned()),
        None => match document(registry, &bytes, aside.path()).await {
            Ok(document) => Content::snapshot(&name, &document),
            Err(error) if matches!(error.kind(), Kind::Signal(_) | Kind::OutOfSpace) => {
                return Err(error);
            }
            Err(error) => {
                // A snapshot that is only temporarily unreadable may be based on other snapshots.
                if error.kind() == Kind::Unavailable && has_config(registry, &bytes).await {
                    return Err(error);
                }
                // The configuration is gone, or the tag has other content.
                Content::other(&bytes)
            }
        },
    };
    Ok(Some(Tag {
        name,
        manifest,
        content,
    }))
}

/// Returns whether the registry has, or may have, the configuration that a manifest names.
async fn has_config(registry: &Registry, manifest: &[u8]) -> bool {
    let config = Manifest::parse(manifest).map(|manifest| manifest.config);
    match config.as_ref().map(|config| (config.sha256(), config.size)) {
        Ok((Ok(sha256), size)) => registry.has_blob(sha256, size).await.unwrap_or(true),
        _ => false,
    }
}

impl Content {
    fn snapshot(name: &str, document: &Document) -> Self {
        let snapshot = &document.snapshot;
        let (image, last) = (&snapshot.image, snapshot.steps.last());
        let wanted = SnapshotRef::of(name);
        let steps = snapshot.steps.iter().map(|step| step.key.to_string());
        let blobs = document.blobs.iter();
        Self::Snapshot {
            key: document.key().to_owned(),
            title: last.map_or(&image.name, |step| &step.name).clone(),
            built: last.map_or(image.built, |step| step.created),
            holds: steps.chain([image.key.to_string()]).collect(),
            layers: blobs
                .map(|blob| (blob.sha256.to_string(), blob.size))
                .collect(),
            is_named_by_key: !matches!(wanted, SnapshotRef::Named(_))
                && wanted.check(document).is_ok(),
        }
    }

    fn other(bytes: &[u8]) -> Self {
        let index: Value = serde_json::from_slice(bytes).unwrap_or_default();
        let manifests = index["manifests"].as_array().into_iter().flatten();
        let digests = manifests.filter_map(|manifest| sha256(manifest["digest"].as_str()?));
        Self::Other(digests.map(str::to_owned).collect())
    }
}

fn decide(tags: &[Tag], keep: &Keep) -> PrunePlan {
    let mut needed: BTreeSet<&str> = keep.keys.iter().map(String::as_str).collect();
    let named = tags.iter().filter_map(|tag| match &tag.content {
        Content::Other(named) => Some(named.iter().chain([&tag.manifest])),
        Content::Snapshot { .. } | Content::Signature(_) => None,
    });
    let named: BTreeSet<&str> = named.flatten().map(String::as_str).collect();
    for tag in tags {
        if let Content::Snapshot {
            key,
            built,
            holds,
            is_named_by_key,
            ..
        } = &tag.content
            && (*built >= keep.since
                || !is_named_by_key
                || keep.keys.contains(key)
                || named.contains(&*tag.manifest))
        {
            needed.extend(holds.iter().map(String::as_str));
        }
    }
    let mut manifests = named;
    let mut plan = PrunePlan {
        looked_at: (tags.to_vec(), keep.clone()),
        ..PrunePlan::default()
    };
    let is_needed = |tag: &&Tag| match &tag.content {
        Content::Snapshot {
            key,
            is_named_by_key,
            ..
        } => !is_named_by_key || needed.contains(&**key),
        Content::Signature(_) | Content::Other(_) => false,
    };
    let kept = tags.iter().filter(is_needed);
    manifests.extend(kept.map(|tag| tag.manifest.as_str()));
    let unneeded = |tag: &Tag, title, built| Unneeded {
        tag: tag.name.clone(),
        title,
        built,
        manifest: tag.manifest.clone(),
    };
    let mut removed = BTreeSet::new();
    for tag in tags {
        match &tag.content {
            Content::Signature(_) => {}
            Content::Other(_) => plan.others += 1,
            Content::Snapshot { .. } if manifests.contains(&*tag.manifest) => plan.kept += 1,
            Content::Snapshot { title, built, .. } => {
                removed.insert(tag.manifest.as_str());
                let unneeded = unneeded(tag, Some(title.clone()), Some(*built));
                plan.removed.push(unneeded);
            }
        }
    }
    plan.bytes = freed(tags, &removed);
    plan.removed.sort_by_key(|tag| tag.built);
    // Signatures go first. If they outlived their subject, no later prune would find them.
    let mut signatures = Vec::new();
    for tag in tags {
        if let Content::Signature(subject) = &tag.content {
            let goes = removed.contains(&**subject) && !manifests.contains(&*tag.manifest);
            match goes {
                true => signatures.push(unneeded(tag, None, None)),
                false => plan.kept += 1,
            }
        }
    }
    plan.removed.splice(0..0, signatures);
    plan
}

/// Returns the bytes of layers that only the snapshots with these manifests have.
fn freed(tags: &[Tag], gone: &BTreeSet<&str>) -> u64 {
    let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
    let mut kept: BTreeSet<&str> = BTreeSet::new();
    for tag in tags {
        let Content::Snapshot { layers: own, .. } = &tag.content else {
            continue;
        };
        match gone.contains(tag.manifest.as_str()) {
            true => layers.extend(own.iter().map(|(digest, size)| (digest.as_str(), *size))),
            false => kept.extend(own.keys().map(String::as_str)),
        }
    }
    layers.retain(|digest, _| !kept.contains(digest));
    // A registry may declare any size.
    layers.into_values().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(day: u32) -> Timestamp {
        format!("2026-11-{day:02}T00:00:00Z").parse().unwrap()
    }

    /// Returns a snapshot that was built on a day. The first key is the image's.
    fn snapshot(name: &str, manifest: &str, keys: &[&str], day: u32) -> Tag {
        let key = (*keys.last().unwrap()).to_owned();
        Tag {
            name: name.to_owned(),
            manifest: manifest.to_owned(),
            content: Content::Snapshot {
                is_named_by_key: name == key || name.starts_with("recipe-"),
                title: key.clone(),
                key,
                built: time(day),
                holds: keys.iter().map(|key| (*key).to_owned()).collect(),
                layers: keys.iter().map(|key| (format!("{key}.tar"), 10)).collect(),
            },
        }
    }

    fn signed(manifest: &str) -> Tag {
        Tag {
            name: format!("sha256-{manifest}.sig"),
            manifest: format!("signature-{manifest}"),
            content: Content::Signature(manifest.to_owned()),
        }
    }

    fn other(name: &str, manifest: &str, named: &[&str]) -> Tag {
        Tag {
            name: name.to_owned(),
            manifest: manifest.to_owned(),
            content: Content::Other(named.iter().map(|name| (*name).to_owned()).collect()),
        }
    }

    fn removed(tags: &[Tag], keys: &[&str], since: u32) -> (Vec<String>, PrunePlan) {
        let keep = Keep {
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            since: time(since),
        };
        let plan = decide(tags, &keep);
        let names = plan.removed.iter().map(|tag| tag.tag.clone()).collect();
        (names, plan)
    }

    #[test]
    fn what_a_kept_snapshot_stands_on_is_kept() {
        let tags = [
            snapshot("i", "mi", &["i"], 1),
            snapshot("recipe-r", "mi", &["i"], 1),
            snapshot("a", "ma", &["i", "a"], 2),
            snapshot("b", "mb", &["i", "a", "b"], 20),
            snapshot("c", "mc", &["i", "a", "c"], 3),
            snapshot("old", "mo", &["old"], 1),
            snapshot("recipe-o", "mo", &["old"], 1),
        ];
        let (names, plan) = removed(&tags, &[], 10);
        assert_eq!(names, ["old", "recipe-o", "c"]);
        assert_eq!((plan.kept, plan.others, plan.bytes), (4, 0, 20));
        // A key from a lock file keeps its snapshot and everything below.
        assert_eq!(removed(&tags, &["c"], 10).0, ["old", "recipe-o"]);
        assert_eq!(removed(&tags, &["c"], 25).0, ["old", "recipe-o", "b"]);
        let (names, _) = removed(&tags, &["old"], 25);
        assert_eq!(names, ["i", "recipe-r", "a", "c", "b"]);
        assert_eq!(removed(&tags, &[], 1).0, [""; 0]);
        let mut tags = tags;
        for tag in &mut tags {
            if let Content::Snapshot { layers, .. } = &mut tag.content {
                layers.values_mut().for_each(|size| *size = u64::MAX);
            }
        }
        assert_eq!(removed(&tags, &[], 10).1.bytes, u64::MAX);
    }

    #[test]
    fn only_what_rockenv_made_and_nobody_named_goes() {
        let tags = [
            other("latest", "mx", &[]),
            other("index", "my", &["mb"]),
            snapshot("a", "ma", &["i", "a"], 1),
            snapshot("nightly", "ma", &["i", "a"], 1),
            snapshot("b", "mb", &["i", "b"], 1),
            snapshot("c", "mc", &["i", "c"], 1),
            other("copy", "mc", &[]),
            snapshot("i", "mi", &["i"], 1),
            snapshot("d", "md", &["j", "d"], 1),
        ];
        let (names, plan) = removed(&tags, &[], 10);
        assert_eq!(names, ["d"]);
        assert_eq!((plan.kept, plan.others, plan.bytes), (5, 3, 20));
    }

    #[test]
    fn what_somebody_else_names_stays_with_all_below() {
        let tags = [
            snapshot("i", "mi", &["i"], 1),
            snapshot("a", "ma", &["i", "a"], 1),
            snapshot("b", "mb", &["i", "a", "b"], 1),
            other("index", "my", &["ma"]),
        ];
        assert_eq!(removed(&tags, &[], 10).0, ["b"]);
    }

    #[test]
    fn what_a_tag_was_moved_to_since_stays_with_all_below() {
        let surveyed = [
            snapshot("i", "mi", &["i"], 1),
            snapshot("recipe-r", "mi", &["i"], 1),
            snapshot("a", "ma", &["i", "a"], 1),
            snapshot("b", "mb", &["i", "a", "b"], 1),
            snapshot("c", "mc", &["i", "c"], 1),
            signed("mb"),
            snapshot("nightly", "mn", &["n"], 20),
            other("index", "my", &[]),
        ];
        let plan = removed(&surveyed, &[], 10).1;
        let still = |changed: Vec<Tag>| {
            let is_changed = |tag: &&Tag| changed.iter().all(|new| new.name != tag.name);
            let mut now: Vec<Tag> = surveyed.iter().filter(is_changed).cloned().collect();
            now.extend(changed.into_iter().map(Tag::needed));
            let still = plan.still_unneeded(&now).into_iter();
            still.map(|tag| tag.tag.clone()).collect::<Vec<_>>()
        };
        let all = ["sha256-mb.sig", "i", "recipe-r", "a", "b", "c"];
        assert_eq!(still(Vec::new()), all);
        // Names that a person chose, and a recipe's name.
        for name in ["nightly", "weekly"] {
            let moved = snapshot(name, "mb", &["i", "a", "b"], 1);
            assert_eq!(still(vec![moved]), ["c"]);
        }
        let left = ["sha256-mb.sig", "a", "b"];
        let moved = snapshot("recipe-r", "mc", &["i", "c"], 1);
        assert_eq!(still(vec![moved]), left);
        // A foreign index, and a new signature.
        assert_eq!(still(vec![other("index", "mz", &["mb"])]), ["c"]);
        let mut again = signed("mc");
        again.manifest.push_str("-2");
        assert_eq!(still(vec![again]), left);
        // A key whose snapshot was rebuilt.
        let rebuilt = snapshot("c", "mc-2", &["i", "c"], 20);
        assert_eq!(still(vec![rebuilt]), left);
    }

    #[test]
    fn many_tags_are_compared_in_little_time() {
        let names = (0..50_000).map(|number| format!("{number:064}"));
        let tags: Vec<Tag> = names
            .map(|name| snapshot(&name, &name, &[&name], 1))
            .collect();
        let plan = removed(&tags, &[], 10).1;
        let begun = std::time::Instant::now();
        assert_eq!(plan.still_unneeded(&tags).len(), tags.len());
        assert!(begun.elapsed() < std::time::Duration::from_secs(10));
    }

    #[test]
    fn signatures_go_with_their_subject_and_before_it() {
        let tags = [
            snapshot("a", "ma", &["a"], 1),
            snapshot("b", "mb", &["b"], 20),
            signed("ma"),
            signed("mb"),
            signed("gone"),
        ];
        let (names, plan) = removed(&tags, &[], 10);
        assert_eq!(names, ["sha256-ma.sig", "a"]);
        assert_eq!(plan.kept, 3);
    }

    #[test]
    fn layers_are_freed_with_the_last_snapshot_that_has_them() {
        let tags = [
            snapshot("i", "mi", &["i"], 1),
            snapshot("a", "ma", &["i", "a"], 1),
            snapshot("b", "mb", &["i", "a", "b"], 1),
            other("latest", "mx", &[]),
        ];
        for (gone, bytes) in [
            (&["absent"][..], 0),
            (&["mb"][..], 10),
            // The remaining snapshot has the image, too.
            (&["ma", "mb"][..], 20),
            (&["mi", "ma", "mb"][..], 30),
        ] {
            let gone: BTreeSet<&str> = gone.iter().copied().collect();
            assert_eq!(freed(&tags, &gone), bytes, "{gone:?}");
        }
    }
}
