//! Owns sharing snapshots between machines, through any container registry or through files in the same format.
//!
//! A shared snapshot is an image named by its step's key. Its lowest layer is the base image's tree, and the changes of
//! each step up to this one lie above it. So snapshots share their common layers, and "is it built?" becomes "does the
//! tag exist?".

mod document;
mod import_layers;
mod key_file;
mod layout;
mod place;
mod prune;
mod pull;
mod push;
mod service_image;
mod shareable;
mod signature;
mod unverified;
mod upload;

pub(crate) use crate::share::import_layers::Import;
pub(crate) use crate::share::service_image::ServiceImage;
pub(crate) use key_file::{SigningKey, VerifyingKey};
pub(crate) use prune::{Keep, PrunePlan, remove, survey};
pub(crate) use pull::examine;
pub(crate) use pull::{Pulled, SnapshotRef, WantedChain, available, image, import, pull};
pub(crate) use push::{Pushed, export, push};
pub(crate) use shareable::Shareable;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::image::oci::{Operation, Reference, Registry};
use crate::image::{BuildProgress, fetch};
use crate::store::images::TaskContext;
use crate::sys::error::Result;

/// A repository of a registry, in which tags identify snapshots.
#[derive(Clone, Debug)]
pub(crate) struct Repository {
    reference: Reference,
    /// The key that signs pushed snapshots.
    pub(crate) signs: Option<Arc<SigningKey>>,
    /// Also signs snapshots that came from elsewhere without a verified signature.
    pub(crate) signs_unverified: bool,
    /// The key that must have signed pulled snapshots.
    pub(crate) verifies: Option<Arc<VerifyingKey>>,
    /// Tags that this command has pushed, each with its manifest's digest. Registries count requests for tags.
    pushed: Arc<Mutex<BTreeSet<(String, String)>>>,
}

impl Repository {
    /// Parses `host/name`, `host/name:tag` or `host/name@digest`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match Reference::parse(text) {
            Ok(reference) => Ok(Self {
                reference,
                signs: None,
                signs_unverified: false,
                verifies: None,
                pushed: Arc::default(),
            }),
            // The default help text is about image recipes.
            Err((message, _)) => Err(usage!("{message}")
                .help("registry.example.org/name, or registry.example.org/name:tag")),
        }
    }

    pub(crate) fn tag(&self) -> Option<&str> {
        self.reference.tag.as_deref()
    }

    /// Returns the repository without the tag for the last snapshot.
    pub(crate) fn untagged(mut self) -> Self {
        self.reference.tag = None;
        self
    }

    fn digest(&self) -> Option<&str> {
        self.reference.sha256.as_deref()
    }

    pub(crate) fn single_snapshot(&self) -> Option<String> {
        let digest = self.digest().map(|digest| format!("sha256:{digest}"));
        digest.or_else(|| self.reference.tag.clone())
    }

    fn has_pushed(&self, tag: &str, manifest: &str) -> bool {
        let wanted = (tag.to_owned(), manifest.to_owned());
        self.pushed.lock().is_ok_and(|all| all.contains(&wanted))
    }

    fn remember(&self, tag: &str, manifest: &str) {
        if let Ok(mut all) = self.pushed.lock() {
            all.insert((tag.to_owned(), manifest.to_owned()));
        }
    }

    fn open(&self, operation: Operation, cx: &mut TaskContext<'_>) -> Result<Registry> {
        Registry::new(&self.reference, operation, cx)
    }
}

impl std::fmt::Display for Repository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.reference.host, self.reference.repository)
    }
}

const RECIPE: &str = "recipe-";

fn recipe_tag(recipe: &str) -> String {
    format!("{RECIPE}{recipe}")
}

/// Runs network work in a separate thread and shows its progress, counted in `bytes`.
fn watched<T: Send>(
    cx: &mut TaskContext<'_>,
    bytes: Option<&AtomicU64>,
    work: impl AsyncFnOnce() -> Result<T> + Send,
) -> Result<T> {
    let cancel = cx.cancel;
    fetch::in_thread(
        || fetch::run(cancel, work()),
        || {
            let done = bytes.map_or(0, |bytes| bytes.load(Ordering::Relaxed));
            (cx.progress)(BuildProgress::Bytes { done, total: None });
        },
    )
}
