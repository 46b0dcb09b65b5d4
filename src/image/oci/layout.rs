//! Owns images in files: an OCI layout, in a directory or packed into an archive, and the output of `docker save`.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::layout_files::{INDEX, LayoutFiles, Part, blob};
use super::manifest::{
    self, Configuration, Descriptor, Document, MAX_CONFIG, MAX_MANIFEST, MAX_NESTING, Manifest,
    damaged, refused,
};
use super::reference::{Platform, Reference, sha256};
use crate::image::fetch::sha256_of;
use crate::image::tar::unpack::{self, unpack};
use crate::sys::error::{Error, Result, ResultExt as _};

/// An image in files.
#[derive(Debug)]
pub(super) struct Layout {
    files: LayoutFiles,
    /// Of the manifest, or of the configuration if there is none.
    pub(super) sha256: String,
    pub(super) config: Configuration,
    pub(super) layers: Vec<LayoutLayer>,
    /// The directory of an unpacked archive; removed at the end.
    _unpacked: Option<tempfile::TempDir>,
}

/// One layer.
#[derive(Debug)]
pub(super) struct LayoutLayer {
    path: String,
    /// Of the file; `docker save` records only that of the content.
    sha256: Option<String>,
    size: Option<u64>,
    pub(super) diff_id: String,
}

impl Layout {
    /// Opens the image in a directory or archive; `scratch` is for unpacking an archive.
    ///
    /// `wanted` selects one of several: a reference, or only a tag.
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

    /// Opens a layer's file, verified as far as its digest is known.
    pub(super) fn layer(&self, layer: &LayoutLayer, cancel: &AtomicBool) -> Result<Part> {
        let (mut part, _) = self.files.part(&layer.path, layer.size)?;
        if let Some(sha256) = &layer.sha256 {
            let found = sha256_of(&mut part, cancel)?;
            if found != *sha256 {
                return Err(damaged(&format!("layer `{}`", layer.path), &found, sha256));
            }
            part.rewind();
        }
        Ok(part)
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
    let mut entries = match wanted {
        Some(wanted) => named(entries, wanted)?,
        None => entries,
    };
    several(&entries)?;
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

/// Returns the entries matching a reference, a tag or a digest.
fn named(entries: Vec<Descriptor>, wanted: &str) -> Result<Vec<Descriptor>> {
    let (wanted_name, digest) = match wanted.split_once('@') {
        Some((name, digest)) => (name, sha256(digest)),
        None => (wanted, sha256(wanted)),
    };
    let tag = Reference::parse(wanted)
        .ok()
        .and_then(|reference| reference.tag);
    let all: Vec<String> = entries
        .iter()
        .flat_map(|entry| entry.names().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let mut found = entries;
    found.retain(|entry| match digest {
        Some(digest) => entry.sha256().is_ok_and(|sha256| sha256 == digest),
        None => entry
            .names()
            .any(|name| name == wanted_name || Some(name) == tag.as_deref()),
    });
    match found.is_empty() {
        true => Err(absent(wanted, &all)),
        false => Ok(found),
    }
}

fn absent(wanted: &str, all: &[String]) -> Error {
    not_found!("it contains no image named `{}`", wanted.escape_debug()).help(match all.first() {
        Some(first) => format!(
            "ref = \"{}\" (there are: {})",
            first.escape_debug(),
            all.join(", ").escape_debug()
        ),
        None => "remove `ref`: its images have no names".into(),
    })
}

/// Refuses to choose between images with different names.
fn several(entries: &[Descriptor]) -> Result<()> {
    let mut names: Vec<&str> = entries
        .iter()
        .filter_map(|entry| entry.names().next())
        .collect();
    names.sort_unstable();
    names.dedup();
    ambiguous(&names)
}

fn ambiguous(names: &[&str]) -> Result<()> {
    match names {
        [first, _, ..] => Err(invalid!("it contains {} images", names.len()).help(format!(
            "ref = \"{}\" (there are: {})",
            first.escape_debug(),
            names.join(", ").escape_debug()
        ))),
        _ => Ok(()),
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
    let mut saved: Vec<Saved> = serde_json::from_slice(list).map_err(|error| {
        refused("its `manifest.json` is not a list of images".into()).source(error)
    })?;
    let tags = |image: &Saved| image.repo_tags.clone().unwrap_or_default();
    let all: Vec<String> = saved.iter().flat_map(tags).collect();
    if let Some(wanted) = wanted {
        let name = wanted.split('@').next().unwrap_or(wanted);
        let digest = wanted.split('@').find_map(sha256);
        saved.retain(|image| match digest {
            Some(digest) => image.config.contains(digest),
            None => tags(image).iter().any(|tag| tag == name),
        });
        if saved.is_empty() {
            return Err(absent(wanted, &all));
        }
    }
    if saved.len() > 1 {
        ambiguous(&all.iter().map(String::as_str).collect::<Vec<_>>())?;
    }
    let Some(image) = saved.into_iter().next() else {
        return Err(refused("it contains no image".into()));
    };
    let config = files
        .read(&image.config, MAX_CONFIG)?
        .ok_or_else(|| refused(format!("`{}` is not in it", image.config.escape_debug())))?;
    let found = hex::encode(Sha256::digest(&config));
    // The file is named by its digest, with or without `.json`.
    let name = image.config.rsplit('/').next().unwrap_or_default();
    let name = name.trim_end_matches(".json");
    if sha256(&format!("sha256:{name}")).is_some_and(|sha256| sha256 != found) {
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
