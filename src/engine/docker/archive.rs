//! Owns reading an image's layers from a service: their digests, and their archives inside the service's archive of the
//! image.
//!
//! The archive's structure varies: Podman, and Docker since 25, name a layer by its digest, older versions by an id of
//! their own, and containerd's image store compresses it. All of them list the layers in `manifest.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use futures_util::StreamExt as _;
use serde::Deserialize;

use super::{SOON, Service, settled};
use crate::sys::error::{Result, ResultExt as _};

const MANIFEST: &str = "manifest.json";
const MAX_MANIFEST: u64 = 16 << 20;

#[derive(Deserialize)]
struct Manifest {
    #[serde(rename = "Layers")]
    layers: Vec<PathBuf>,
}

/// The contents of the archive besides the layers.
#[derive(Default)]
struct Contents {
    manifest: Option<Manifest>,
    /// Layers that are links to other layers.
    links: BTreeMap<PathBuf, PathBuf>,
}

/// Receives a layer's digest and archive; returns false if it wants no more.
type Take<'a> = dyn FnMut(&str, &mut dyn Read) -> Result<bool> + Send + 'a;

impl Service {
    /// Returns the digests of an image's layers, lowest first, of the uncompressed content.
    pub fn layers(&self, image: &str) -> Result<Option<Vec<String>>> {
        let request = settled(|| self.client.inspect_image(image));
        let found = self.found(SOON, "look at an image", request)?;
        let layers = found.and_then(|found| found.root_fs?.layers);
        let digest = |layer: String| layer.strip_prefix("sha256:").map(str::to_owned);
        Ok(layers.map(|layers| layers.into_iter().filter_map(digest).collect()))
    }

    /// Reads the `wanted` layers of an image, in any order. Takes as long as reading the whole image.
    pub fn read_layers(&self, image: &str, wanted: &[String], take: &mut Take<'_>) -> Result<()> {
        let all = self.layers(image)?.unwrap_or_default();
        let mut left: BTreeSet<&str> = wanted.iter().map(String::as_str).collect();
        let named = |path: &Path| {
            let last = path.file_name()?.to_str()?;
            let name = last.strip_suffix(".tar").unwrap_or(last);
            all.iter().find(|layer| *layer == name).map(String::as_str)
        };
        let contents = self.read_archive(image, &named, &mut left, take)?;
        if left.is_empty() {
            return Ok(());
        }
        // The missing layers have other names, which the manifest at the archive's end reveals, so read the archive
        // again.
        let names: BTreeMap<PathBuf, &str> = match contents.manifest {
            Some(manifest) if manifest.layers.len() == all.len() => manifest
                .layers
                .into_iter()
                .map(|path| contents.links.get(&path).cloned().unwrap_or(path))
                .zip(all.iter().map(String::as_str))
                .collect(),
            _ => BTreeMap::new(),
        };
        let named = |path: &Path| names.get(path).copied();
        self.read_archive(image, &named, &mut left, take)?;
        match left.first() {
            None => Ok(()),
            Some(layer) => Err(unexpected!(
                "layer `{layer}` is missing from the image archive made by {}",
                self.flavour
            )),
        }
    }

    fn read_archive<'a>(
        &self,
        image: &str,
        named: &(dyn Fn(&Path) -> Option<&'a str> + Sync),
        left: &mut BTreeSet<&str>,
        take: &mut Take<'_>,
    ) -> Result<Contents> {
        let cannot = || "cannot read an image".to_owned();
        let stream = self.client.export_image(image).boxed();
        self.reading("read an image", stream, |pieces| {
            let mut contents = Contents::default();
            let mut archive = tar::Archive::new(pieces);
            for entry in archive.entries().context(cannot)? {
                let mut entry = entry.context(cannot)?;
                let path = plain(&entry.path().context(cannot)?);
                let kind = entry.header().entry_type();
                if kind.is_symlink() || kind.is_hard_link() {
                    let target = entry.link_name().context(cannot)?.unwrap_or_default();
                    let from = match (kind.is_symlink(), path.parent()) {
                        (true, Some(parent)) => parent.join(target),
                        _ => target.into_owned(),
                    };
                    contents.links.insert(path, plain(&from));
                } else if path == Path::new(MANIFEST) {
                    let mut text = Vec::new();
                    let mut manifest = entry.by_ref().take(MAX_MANIFEST);
                    manifest.read_to_end(&mut text).context(cannot)?;
                    let manifests: Vec<Manifest> =
                        serde_json::from_slice(&text).map_err(|error| {
                            unexpected!("the archive of an image is invalid").source(error)
                        })?;
                    contents.manifest = manifests.into_iter().next();
                } else if kind.is_file()
                    && let Some(layer) = named(&path)
                    && left.remove(layer)
                    && !take(layer, &mut entry)?
                {
                    left.clear();
                    break;
                }
            }
            Ok(contents)
        })
    }
}

/// Returns a path within the archive, reduced to normal components.
fn plain(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => found.push(name),
            Component::ParentDir => drop(found.pop()),
            _ => {}
        }
    }
    found
}
