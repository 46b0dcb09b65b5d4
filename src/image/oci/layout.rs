//! Owns images in files: an OCI layout, as a directory or an archive, and the output of `docker save`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::layout_files::{INDEX, LayoutFiles, Part, blob};
use super::manifest::{
    self, Configuration, Descriptor, Document, MAX_CONFIG, MAX_MANIFEST, MAX_NESTING, Manifest,
    damaged, refused,
};
use super::reference::{Platform, sha256};
use crate::image::fetch::sha256_of;
use crate::image::tar::unpack::{self, unpack};
use crate::sys::checksum::is_lower_sha256;
use crate::sys::error::{Error, Result, ResultExt as _};

#[derive(Debug)]
pub(super) struct Layout {
    files: LayoutFiles,
    /// SHA-256 of the manifest, or of the configuration if the image has no manifest.
    pub(super) sha256: String,
    pub(super) config: Configuration,
    pub(super) layers: Vec<LayoutLayer>,
    _unpacked: Option<tempfile::TempDir>,
}

#[derive(Debug)]
pub(super) struct LayoutLayer {
    path: String,
    /// SHA-256 of the file. `docker save` records only the content's digest.
    sha256: Option<String>,
    size: Option<u64>,
    pub(super) diff_id: String,
}

impl Layout {
    /// Opens the image in a directory or archive. An archive is unpacked below `scratch`.
    ///
    /// `wanted` selects one of several images: a reference, or only a tag.
    pub(super) fn open(
        path: &Path,
        wanted: Option<&str>,
        platform: &Platform,
        scratch: &Path,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self> {
        let is_directory = fs_err::metadata(path)?.is_dir();
        let (files, unpacked) = if is_directory {
            (LayoutFiles::with_links(path)?, None)
        } else {
            let directory = tempfile::Builder::new()
                .prefix(".unpacked-")
                .tempdir_in(scratch)
                .context(|| format!("cannot make a directory in `{}`", scratch.display()))?;
            let options = unpack::UnpackOptions {
                ownership: false,
                ..unpack::UnpackOptions::default()
            };
            let file = fs_err::File::open(path)?.into_file();
            unpack(file, directory.path(), &options, cancel, progress)
                .context(|| format!("cannot unpack `{}`", path.display()))?;
            (LayoutFiles::with_links(directory.path())?, Some(directory))
        };
        let (sha256, config, layers) = if let Some(index) = files.read(INDEX, MAX_MANIFEST)? {
            from_index(&files, &index, wanted, platform)?
        } else if let Some(list) = files.read("manifest.json", MAX_MANIFEST)? {
            from_docker(&files, &list, wanted, platform)?
        } else {
            return Err(invalid!(
                "`{}` is neither an OCI layout nor what `docker save` writes",
                path.display()
            )
            .help("skopeo copy FROM oci:DIR, or docker save -o FILE.tar NAME"));
        };
        Ok(Self {
            files,
            sha256,
            config,
            layers,
            _unpacked: unpacked,
        })
    }

    /// Opens a layer's file and verifies it if its digest is known.
    pub(super) fn layer(&self, layer: &LayoutLayer, cancel: &AtomicBool) -> Result<Part> {
        let (mut part, piece) = self.files.part(&layer.path, layer.size)?;
        let Some(sha256) = &layer.sha256 else {
            return Ok(part);
        };
        let found = sha256_of(&mut part, cancel)?;
        match found == *sha256 {
            true => piece.part(part.into_inner()),
            false => Err(damaged(&format!("layer `{}`", layer.path), &found, sha256)),
        }
    }
}

type Found = (String, Configuration, Vec<LayoutLayer>);

fn from_index(
    files: &LayoutFiles,
    index: &[u8],
    wanted: Option<&str>,
    platform: &Platform,
) -> Result<Found> {
    let Document::Index(entries) = Document::parse(index)? else {
        return Err(refused("its `index.json` is not an index".into()));
    };
    let candidates = entries.into_iter().map(|entry| Candidate {
        names: entry.names().map(str::to_owned).collect(),
        digest: entry.digest.clone(),
        fits: entry.fits(platform),
        image: entry,
    });
    let selected = select(candidates.collect(), wanted)?;
    let mut entries: Vec<Descriptor> = selected.into_iter().map(|found| found.image).collect();
    for _ in 0..MAX_NESTING {
        let chosen = manifest::choose(&entries, platform)?;
        let bytes = files.verified(chosen, MAX_MANIFEST)?;
        let parsed = Document::parse(&bytes)?;
        parsed.check_type(&chosen.media_type)?;
        match parsed {
            Document::Index(inner) => entries = inner,
            Document::Manifest(Manifest { config, layers }) => {
                let config = files.verified(&config, MAX_CONFIG)?;
                let config = Configuration::parse(&config, layers.len(), platform)?;
                let layers = layers.iter().zip(&config.diff_ids);
                let layers = layers.map(|(layer, diff_id)| {
                    let sha256 = layer.sha256()?.to_owned();
                    Ok(LayoutLayer {
                        path: blob(&sha256),
                        sha256: Some(sha256),
                        size: Some(layer.size),
                        diff_id: diff_id.clone(),
                    })
                });
                let layers = layers.collect::<Result<_>>()?;
                return Ok((chosen.sha256()?.to_owned(), config, layers));
            }
        }
    }
    Err(refused("its index leads to indexes only".into()))
}

struct Candidate<T> {
    names: Vec<String>,
    /// Digest with the prefix `sha256:`.
    digest: String,
    /// Whether the image is for the wanted platform, as far as known.
    fits: bool,
    image: T,
}

/// Returns the candidates with a name, a tag or a digest. Refuses to choose between different images.
fn select<T>(mut candidates: Vec<Candidate<T>>, wanted: Option<&str>) -> Result<Vec<Candidate<T>>> {
    if let Some(wanted) = wanted {
        let digest = wanted.split_once('@').map_or(wanted, |(_, digest)| digest);
        let digest = sha256(digest).is_some().then_some(digest);
        let tag = wanted.rsplit_once(':').map(|(_, tag)| tag);
        let is_named = |image: &Candidate<T>| {
            let mut names = image.names.iter();
            names.any(|name| short(name) == short(wanted))
        };
        // A tag alone does not select an image that also has a full name.
        let is_tagged = |image: &Candidate<T>| {
            !image.names.is_empty() && image.names.iter().all(|name| Some(name.as_str()) == tag)
        };
        let help = absent_help(&candidates, digest.is_some());
        let by_name = candidates.iter().any(is_named);
        candidates.retain(|image| match (digest, by_name) {
            (Some(digest), _) => image.digest == digest,
            (None, true) => is_named(image),
            (None, false) => is_tagged(image),
        });
        if candidates.is_empty() {
            let wanted = wanted.escape_debug();
            return Err(not_found!("it contains no image named `{wanted}`").help(help));
        }
    }
    several(&candidates)?;
    Ok(candidates)
}

/// Returns a name without the prefixes that Docker adds to short names.
fn short(name: &str) -> &str {
    let name = name.strip_prefix("docker.io/").unwrap_or(name);
    name.strip_prefix("library/").unwrap_or(name)
}

fn absent_help<T>(candidates: &[Candidate<T>], by_digest: bool) -> String {
    let all = candidates.iter().filter_map(|image| {
        let name = image.names.first();
        match (name, by_digest) {
            (Some(name), true) => Some(format!("{name}@{}", image.digest)),
            (None, true) => Some(image.digest.clone()),
            (name, false) => name.cloned(),
        }
    });
    match all.collect::<Vec<_>>().as_slice() {
        [] => "remove `ref`: its images have no names".into(),
        all => reference_help(all),
    }
}

/// Refuses to choose between images with different digests.
fn several<T>(candidates: &[Candidate<T>]) -> Result<()> {
    let fitting = || candidates.iter().filter(|image| image.fits);
    let images: BTreeMap<&str, &Candidate<T>> = fitting()
        .map(|image| (image.digest.as_str(), image))
        .collect();
    if images.len() < 2 {
        return Ok(());
    }
    let mut all: Vec<String> = images
        .values()
        .map(|image| image.label(fitting()))
        .collect();
    all.sort_unstable();
    let help = reference_help(&all);
    Err(invalid!("it contains {} images", all.len()).help(help))
}

fn reference_help(all: &[String]) -> String {
    let first = all.first().map_or("", String::as_str);
    format!(
        "ref = \"{}\" (there are: {})",
        first.escape_debug(),
        all.join(", ").escape_debug()
    )
}

impl<T> Candidate<T> {
    /// Returns a selector for this image: a name that no other image has, or the digest.
    fn label<'a>(&'a self, all: impl Iterator<Item = &'a Self> + Clone) -> String {
        let is_own = |name: &&String| {
            all.clone()
                .all(|other| other.digest == self.digest || !other.names.contains(name))
        };
        self.names
            .iter()
            .find(is_own)
            .unwrap_or(&self.digest)
            .clone()
    }
}

fn from_docker(
    files: &LayoutFiles,
    list: &[u8],
    wanted: Option<&str>,
    platform: &Platform,
) -> Result<Found> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Saved {
        config: String,
        repo_tags: Option<Vec<String>>,
        layers: Vec<String>,
    }
    let saved: Vec<Saved> = serde_json::from_slice(list).map_err(|error| {
        refused("its `manifest.json` is not a list of images".into()).source(error)
    })?;
    let read = |image: &Saved| {
        let config = files
            .read(&image.config, MAX_CONFIG)?
            .ok_or_else(|| refused(format!("`{}` is not in it", image.config.escape_debug())))?;
        Ok::<_, Error>((hex::encode(Sha256::digest(&config)), config))
    };
    let mut digests: BTreeMap<String, String> = BTreeMap::new();
    let mut candidates = Vec::new();
    for mut image in saved {
        let digest = match digests.get(&image.config) {
            Some(digest) => digest.clone(),
            None => format!("sha256:{}", read(&image)?.0),
        };
        digests.insert(image.config.clone(), digest.clone());
        candidates.push(Candidate {
            names: image.repo_tags.take().unwrap_or_default(),
            digest,
            fits: true,
            image,
        });
    }
    let Some(Candidate { digest, image, .. }) = select(candidates, wanted)?.into_iter().next()
    else {
        return Err(refused("it contains no image".into()));
    };
    let (found, config) = read(&image)?;
    if sha256(&digest) != Some(found.as_str()) {
        return Err(damaged(&format!("`{}`", image.config), &found, &digest));
    }
    // The file's name is its digest, with or without `.json`.
    let name = image.config.rsplit('/').next().unwrap_or_default();
    let name = name.trim_end_matches(".json");
    if is_lower_sha256(name) && name != found {
        return Err(damaged(&format!("`{}`", image.config), &found, name));
    }
    let config = Configuration::parse(&config, image.layers.len(), platform)?;
    let layers = image.layers.into_iter().zip(&config.diff_ids);
    let layers = layers.map(|(path, diff_id)| LayoutLayer {
        path,
        sha256: None,
        size: None,
        diff_id: diff_id.clone(),
    });
    let layers = layers.collect();
    Ok((found, config, layers))
}
