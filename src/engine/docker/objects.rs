//! Owns images, and finding and removing objects with rockenv's labels.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bollard::errors::Error as Refusal;
use bollard::models::{ContainerConfig, ImageSummary};
use bollard::query_parameters::{
    CommitContainerOptionsBuilder, CreateImageOptionsBuilder, ListContainersOptionsBuilder,
    ListImagesOptionsBuilder, RemoveContainerOptionsBuilder, RemoveImageOptionsBuilder,
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::{AGAIN, Flavour, LATE, PATIENCE, SOON, Service, answered, settled};
use crate::engine::docker::retry::retry;
use crate::plan::ids::{StepKey, TreeId};
use crate::sys::error::{Kind, Result};
use crate::sys::process::Program;
use crate::sys::thread;

/// The label with the key of a store's image, inherited by everything built on the image.
const IMAGE: &str = "rockenv.image";
/// containerd's default directory of images.
const CONTAINERD: &str = "/var/lib/containerd";
/// Maximum number of buffered pieces of a tree's archive.
const PIECES: usize = 16;
/// Size of a piece: some of tar's records of 10 KiB, so that the last piece has at least the last record.
const PIECE: u64 = 60 << 10;
/// Interval for retrying to send the next piece.
const ROOM: Duration = Duration::from_millis(1);

/// A store's object at a service. It is recorded beside the files that belong to it, so that deleting them can remove
/// the object too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Object {
    pub socket: PathBuf,
    #[serde(flatten)]
    pub what: ObjectFilter,
    /// Id of a created image, whose name may be reassigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// How an object is found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ObjectFilter {
    /// Containers and images by the label of their live tree.
    Tree(TreeId),
    Image(String),
}

impl Object {
    /// Returns whether both are the same object at the same service.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (&self.socket, &self.what) == (&other.socket, &other.what)
    }

    /// Removes it from its service; a missing object is no error.
    pub(crate) fn remove(&self, service: &Service) -> Result<()> {
        match &self.what {
            ObjectFilter::Tree(tree) => service.remove_tree(tree),
            ObjectFilter::Image(name) => service.remove_image(self.id.as_ref().unwrap_or(name)),
        }
    }
}

/// Id and labels, with the prefix, of an object.
pub(super) type Labelled = (String, HashMap<String, String>);

/// An image whose labels and name mark it as the snapshot of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    pub image: String,
    /// The live tree that it was frozen from.
    pub tree: TreeId,
    pub key: StepKey,
    /// Creation time, in seconds since 1970.
    pub created: i64,
    /// If it is the complete snapshot: the number of layers below it.
    pub whole: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineImage {
    pub id: String,
    /// Its labels, with the prefix.
    pub labels: HashMap<String, String>,
    /// Its names, as the service writes them: with a tag, and from Podman with a host.
    pub names: Vec<String>,
    /// Bytes of all its layers, including shared ones; see [`Service::listed_sizes`].
    pub size: u64,
    pub layers: usize,
}

impl Service {
    /// Creates an image from the tree at a directory, for image `key` of a store; returns its id. `name` has no tag,
    /// which Podman would ignore.
    pub fn import(&self, tree: &Path, name: &str, key: &str) -> Result<String> {
        let tar = Program::find("tar", "importing images")?
            // tar exits with 1 if a file changed while it was read. Files of an image do not change, but another
            // command may create or remove a hard link to one.
            .allow_exit_code(1)
            .args([
                "--create",
                "--file=-",
                "--numeric-owner",
                "--xattrs",
                "--xattrs-include=*",
                "--one-file-system",
                "--sort=name",
                "--directory",
            ])
            .arg(tree)
            .arg(".");
        let (sender, receiver) = tokio::sync::mpsc::channel(PIECES);
        let archive = futures_util::stream::unfold(receiver, |mut receiver| async {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        // After an interruption the connection, which owns the receiver, is neither used nor closed yet.
        let given_up = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let packing = thread::start_in(scope, move || {
                let packed = tar.stream(given_up, &mut |_| {}, |stdout| {
                    // The receiver has reported why it stopped.
                    pass_on(stdout, |piece| {
                        hand_over(&sender, Ok(piece.into()), given_up)
                    })
                });
                // The service would take an archive that just ends for the whole image, and Docker one that fails after
                // its last record: tar ends an archive that lacks a file like any other.
                let (last, packed) = match packed {
                    Ok(last) => (Ok(Bytes::from(last)), Ok(())),
                    Err(error) => (Err(std::io::Error::other("tar failed")), Err(error)),
                };
                hand_over(&sender, last, given_up);
                packed
            })?;
            let label = format!("{IMAGE}={key}");
            let sent = self.image_from(archive, name, &label, "import an image");
            given_up.store(sent.is_err(), Ordering::Relaxed);
            match thread::joined(packing.join()) {
                // It was stopped, because the service refused the image or the user interrupted.
                Err(error) if matches!(error.kind(), Kind::Signal(_)) => sent.and(Err(error)),
                Err(error) => Err(error),
                Ok(()) => sent,
            }
        })?;
        match self.image(name)? {
            Some(image) => Ok(image.id),
            None => Err(unexpected!("{} lost an image", self.flavour)),
        }
    }

    /// Returns the id of the image that [`Service::import`] created under a name, if the name still refers to it.
    pub fn imported(&self, name: &str, key: &str) -> Result<Option<String>> {
        let image = self.image(name)?;
        // An image built on it inherits its label, but has one more layer or a tree's label.
        let own = |image: &EngineImage| {
            label(&image.labels, IMAGE) == Some(key)
                && label(&image.labels, "rockenv.tree").is_none()
                && image.layers == 1
        };
        Ok(image.filter(own).map(|image| image.id))
    }

    /// Returns the directories of its images and containers, as it reports them.
    pub fn places(&self) -> Result<Vec<PathBuf>> {
        let found = self.ask(SOON, "ask for its directory", self.client.info())?;
        let root = found.docker_root_dir.into_iter();
        let mut places: Vec<PathBuf> = root.map(PathBuf::from).collect();
        // With containerd's image store the layers are elsewhere, in a place that Docker does not report.
        let status = found.driver_status.unwrap_or_default();
        let system = Path::new(CONTAINERD);
        let mut words = status.iter().flatten();
        if words.any(|word| word.starts_with("io.containerd.")) && system.exists() {
            places.push(system.to_owned());
        }
        Ok(places)
    }

    pub fn image(&self, name: &str) -> Result<Option<EngineImage>> {
        let request = settled(|| self.client.inspect_image(name));
        let found = self.found(SOON, "look at an image", request)?;
        Ok(found.map(|image| {
            let layers = image.root_fs.and_then(|tree| tree.layers);
            let labels = image.config.and_then(|config| config.labels);
            EngineImage {
                id: image.id.unwrap_or_default(),
                layers: layers.map_or(0, |layers| layers.len()),
                labels: labels.unwrap_or_default(),
                names: image.repo_tags.unwrap_or_default(),
                size: bytes(image.size),
            }
        }))
    }

    /// Freezes a container, which must not run, as an image with the container's labels; returns its id. `whole` is
    /// given if the image is the complete snapshot of a step: the number of layers below.
    pub fn commit(&self, container: &str, name: &str, whole: Option<usize>) -> Result<String> {
        let mut options = CommitContainerOptionsBuilder::new()
            .container(container)
            .repo(name)
            .pause(false);
        let label = whole.map(|below| format!("LABEL rockenv.whole={below}"));
        if let Some(label) = &label {
            options = options.changes(label);
        }
        let options = options.build();
        let request = self
            .client
            .commit_container(options, ContainerConfig::default());
        Ok(self.ask(LATE, "freeze a container", request)?.id)
    }

    /// Freezes a container, which must not run, as an image of a single layer without a parent. Takes as long as
    /// reading the whole tree.
    pub fn commit_whole(&self, container: &str, name: &str, tree: &TreeId) -> Result<()> {
        let archive = self.client.export_container(container);
        let archive = archive.map(|piece| piece.map_err(std::io::Error::other));
        let label = format!("rockenv.tree={tree}");
        self.image_from(archive, name, &label, "merge an image's layers")
    }

    /// Creates an image with a label from an archive; `what` completes "cannot ...".
    fn image_from(
        &self,
        archive: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
        name: &str,
        label: &str,
        what: &str,
    ) -> Result<()> {
        let body = bollard::body_try_stream(archive);
        let options = CreateImageOptionsBuilder::new()
            .from_src("-")
            .repo(name)
            // Podman takes several labels in one instruction for a single one.
            .changes(vec![format!("LABEL {label}")])
            .build();
        self.ask(LATE, what, async {
            let mut answers = self.client.create_image(Some(options), Some(body), None);
            while let Some(answer) = answers.next().await {
                answer?;
            }
            Ok(())
        })
    }

    /// Returns the ids and labels of the images with a label, whose name is given without the prefix.
    pub fn images(&self, label: &str, value: &str) -> Result<Vec<Labelled>> {
        let found = self.labelled_images(label, value)?.into_iter();
        Ok(found.map(|image| (image.id, image.labels)).collect())
    }

    fn labelled_images(&self, label: &str, value: &str) -> Result<Vec<ImageSummary>> {
        let filters = filters(label, value);
        self.list_images(ListImagesOptionsBuilder::new().filters(&filters))
    }

    /// Returns the sizes of rockenv's images at Docker, by id. With containerd's image store, looking at an image counts
    /// only its compressed layers, and the list its unpacked ones too. Empty for Podman: its list fails if one image is
    /// damaged.
    pub fn listed_sizes(&self) -> Result<HashMap<String, u64>> {
        if self.flavour == Flavour::Podman {
            return Ok(HashMap::new());
        }
        // Docker measures each listed image, and its list fails too if it cannot read one.
        let own = HashMap::from([("reference".to_owned(), vec!["rockenv/*".to_owned()])]);
        let found = self.list_images(ListImagesOptionsBuilder::new().filters(&own))?;
        let size = |image: ImageSummary| Some((image.id, u64::try_from(image.size).ok()?));
        Ok(found.into_iter().filter_map(size).collect())
    }

    fn list_images(&self, options: ListImagesOptionsBuilder) -> Result<Vec<ImageSummary>> {
        let options = options.build();
        let request = settled(|| self.client.list_images(Some(options.clone())));
        self.ask(SOON, "list images", request)
    }

    /// Returns the step snapshots of the store with this path and id. Any user can create an image with a name, a path
    /// and a key, but only the store knows its id.
    pub fn frozen(&self, store: &str, id: &str) -> Result<Vec<Frozen>> {
        if id.is_empty() {
            return Ok(Vec::new());
        }
        let frozen = |image: ImageSummary| {
            let label = |name| label(&image.labels, name);
            label("rockenv.store").filter(|found| *found == store)?;
            let tree: TreeId = label("rockenv.tree")?.parse().ok()?;
            let key = label("rockenv.key")?.parse().ok()?;
            // Images built on it inherit the labels, but not the name.
            let name = format!("rockenv/snapshot-{tree}");
            let mut names = image.repo_tags.iter();
            let named = names.any(|tag| own_name(tag) == Some(&name));
            named.then(|| Frozen {
                tree,
                key,
                created: image.created,
                whole: label("rockenv.whole").and_then(|below| below.parse().ok()),
                image: image.id.clone(),
            })
        };
        let found = self.labelled_images("id", id)?;
        Ok(found.into_iter().filter_map(frozen).collect())
    }

    /// Returns the ids and labels of the containers with a label, whose name is given without the prefix.
    pub fn containers(&self, label: &str, value: &str) -> Result<Vec<Labelled>> {
        let filters = filters(label, value);
        let options = ListContainersOptionsBuilder::new()
            .all(true)
            .filters(&filters)
            .build();
        let request = settled(|| self.client.list_containers(Some(options.clone())));
        let found = self.ask(SOON, "list containers", request)?;
        Ok(found
            .into_iter()
            .filter_map(|container| Some((container.id?, container.labels.unwrap_or_default())))
            .collect())
    }

    /// Removes a container and its changes. The container may be running, or missing.
    pub fn remove_container(&self, name: &str) -> Result<()> {
        let options = RemoveContainerOptionsBuilder::new()
            .force(true)
            .v(true)
            .build();
        let deadline = Instant::now() + SOON;
        let request = async {
            loop {
                let request = || self.client.remove_container(name, Some(options.clone()));
                match retry(PATIENCE, request, is_at_it, async || Ok(None)).await {
                    // Another client is removing it; until then its image cannot be removed.
                    Err(refusal) if is_at_it(&refusal) && Instant::now() < deadline => {
                        tokio::time::sleep(AGAIN).await;
                    }
                    answer => return answer,
                }
            }
        };
        self.found(LATE, "remove a container", request).map(drop)
    }

    /// Removes every container and image with the label of a live tree.
    ///
    /// An image with children only loses its name, and goes with the last of them.
    fn remove_tree(&self, tree: &TreeId) -> Result<()> {
        for (container, _) in self.containers("tree", tree)? {
            self.remove_container(&container)?;
        }
        for (image, _) in self.images("tree", tree)? {
            self.remove_image(&image)?;
        }
        Ok(())
    }

    /// Removes an image by name or id. An image with children only loses its names, and an image that a user has named
    /// stays.
    pub fn remove_image(&self, id: &str) -> Result<()> {
        let Some(found) = self.image(id)? else {
            return Ok(());
        };
        // By its names: by id, the service refuses an image with children.
        let nameless = found.names.is_empty();
        let mut names = found.names;
        names.retain(|name| own_name(name).is_some());
        names.extend(nameless.then_some(found.id));
        for name in names {
            let options = RemoveImageOptionsBuilder::new().build();
            let request = || self.client.remove_image(&name, Some(options.clone()), None);
            let request = retry(PATIENCE, request, |_| false, async || Ok(None));
            match self.found(LATE, "remove an image", request) {
                // It has children.
                Err(_) if nameless => {}
                // Another client removed it meanwhile, for which Docker has no specific error.
                Err(_) if self.image(&name)?.is_none() => {}
                other => drop(other?),
            }
        }
        Ok(())
    }
}

/// Returns whether a container is being removed already.
fn is_at_it(refusal: &Refusal) -> bool {
    answered(refusal).is_some_and(|(status, _)| status == 409)
}

/// Passes an archive on until `pass` returns false, except for its last piece, which it returns.
fn pass_on(mut archive: impl Read, pass: impl Fn(Vec<u8>) -> bool) -> Result<Vec<u8>> {
    let mut last = Vec::new();
    loop {
        let mut piece = Vec::new();
        archive.by_ref().take(PIECE).read_to_end(&mut piece)?;
        match (last.is_empty(), piece.is_empty()) {
            // The tar of BusyBox and that of BSD refuse an option with the same status as GNU's a changed file.
            (true, true) => {
                return Err(unavailable!("`tar` made no archive of the image")
                    .help("install GNU tar (package tar)"));
            }
            (false, true) => return Ok(last),
            (_, false) => {}
        }
        let earlier = std::mem::replace(&mut last, piece);
        if !earlier.is_empty() && !pass(earlier) {
            return Ok(last);
        }
    }
}

/// Sends a piece as soon as there is room for it; returns whether the receiver still wants it.
fn hand_over(
    sender: &Sender<std::io::Result<Bytes>>,
    mut piece: std::io::Result<Bytes>,
    given_up: &AtomicBool,
) -> bool {
    while !given_up.load(Ordering::Relaxed) {
        match sender.try_send(piece) {
            Ok(()) => return true,
            Err(TrySendError::Closed(_)) => return false,
            Err(TrySendError::Full(back)) => piece = back,
        }
        std::thread::sleep(ROOM);
    }
    false
}

/// Returns the value of a label, unless it is empty.
pub(super) fn label<'a>(labels: &'a HashMap<String, String>, name: &str) -> Option<&'a str> {
    let value = labels.get(name).map(String::as_str);
    value.filter(|value| !value.is_empty())
}

/// Returns a size in bytes, which is 0 if the service does not know it.
pub(super) fn bytes(size: Option<i64>) -> u64 {
    size.and_then(|size| u64::try_from(size).ok()).unwrap_or(0)
}

/// Returns a name of the form `rockenv/...`, without the host that Podman prepends; `None` for any other name.
fn own_name(name: &str) -> Option<&str> {
    let hosts = ["docker.io/", "localhost/", ""];
    let name = hosts.iter().find_map(|host| name.strip_prefix(host))?;
    let name = name.strip_suffix(":latest").unwrap_or(name);
    name.starts_with("rockenv/").then_some(name)
}

fn filters(label: &str, value: &str) -> HashMap<String, Vec<String>> {
    HashMap::from([("label".to_owned(), vec![format!("rockenv.{label}={value}")])])
}

#[cfg(test)]
mod tests {
    use super::super::tests::serve;
    use super::*;

    #[test]
    fn dockers_list_has_the_sizes_of_unpacked_images() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        // As Docker 29 lists an image.
        let images = r#"[{"Containers":0,"Created":0,"Id":"sha256:aa","Labels":null,"ParentId":"","RepoDigests":[],
            "RepoTags":["rockenv/image-a:latest"],"SharedSize":-1,"Size":7,"Descriptor":{"digest":"sha256:aa"}}]"#;
        let answers = [("/_ping", "200 OK", ""), ("reference", "200 OK", images)];
        serve(&socket, answers);
        let sizes = Service::connect(&socket).unwrap().listed_sizes().unwrap();
        assert_eq!(sizes, HashMap::from([("sha256:aa".to_owned(), 7)]));
    }

    #[test]
    fn an_archive_that_tar_did_not_make_is_not_an_empty_image() {
        let error = pass_on(std::io::empty(), |_| true).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        let length = usize::try_from(PIECE).unwrap();
        let archive = vec![7; length + 1];
        let passed = std::cell::RefCell::new(Vec::new());
        let last = pass_on(&archive[..], |piece| {
            passed.borrow_mut().push(piece.len());
            true
        });
        assert_eq!(last.unwrap(), [7]);
        assert_eq!(passed.into_inner(), [length]);
    }
}
