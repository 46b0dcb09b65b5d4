//! Owns an image's documents: the index of platforms, the manifest and the configuration, and the checks before they
//! are trusted.
//!
//! Only the tree's layers and the environment are used. The image's user, working directory, command and labels are
//! ignored, because a profile sets its own.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::reference::{Platform, sha256};
use crate::sys::error::{Error, Result};
use crate::sys::host::is_variable_name;
use crate::ui::size::count;

/// Common registries' manifests and indexes have a few kilobytes. Registries themselves refuse larger ones than this.
pub(crate) const MAX_MANIFEST: u64 = 4 << 20;
/// A configuration grows with the image's history.
pub(super) const MAX_CONFIG: u64 = 16 << 20;
const MAX_LAYERS: usize = 1024;
/// Names and values together. For a single variable the kernel accepts at most 128 KiB.
const MAX_ENVIRONMENT: usize = 64 << 10;
/// Limit for nested indexes. Digests make a cycle impossible.
pub(super) const MAX_NESTING: usize = 4;

pub(super) const MANIFEST_TYPES: [&str; 4] = [
    INDEX_TYPES[0],
    "application/vnd.oci.image.manifest.v1+json",
    INDEX_TYPES[1],
    "application/vnd.docker.distribution.manifest.v2+json",
];
const INDEX_TYPES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];

/// A reference to content by digest.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(super) digest: String,
    pub(crate) size: u64,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

impl Descriptor {
    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.get(name).map(String::as_str)
    }

    /// Returns the SHA-256 in hexadecimal digits, which is safe as a file name.
    pub(crate) fn sha256(&self) -> Result<&str> {
        let shown = self.digest.escape_debug();
        sha256(&self.digest).ok_or_else(|| refused(format!("digest `{shown}` is not a SHA-256")))
    }

    /// Returns the image's names in the index: tags, or full references.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        [
            "io.containerd.image.name",
            "org.opencontainers.image.ref.name",
        ]
        .into_iter()
        .filter_map(|key| self.annotation(key))
    }

    /// Returns whether the content is an image or an index that may be for a platform.
    pub(super) fn fits(&self, platform: &Platform) -> bool {
        let is_for = |described: &Platform| {
            described.os == platform.os
                && described.architecture == platform.architecture
                && (platform.variant.is_none() || described.variant == platform.variant)
        };
        MANIFEST_TYPES.contains(&self.media_type.as_str())
            && self.platform.as_ref().is_none_or(is_for)
    }
}

#[derive(Debug)]
pub(super) enum Document {
    /// An index: manifests of several platforms or images.
    Index(Vec<Descriptor>),
    Manifest(Manifest),
}

/// The configuration of an image, and its layers, lowest first.
#[derive(Clone, Debug)]
pub(super) struct Manifest {
    pub(super) config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
}

impl Document {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Raw {
            schema_version: u32,
            #[serde(default)]
            media_type: String,
            manifests: Option<Vec<Descriptor>>,
            config: Option<Descriptor>,
            layers: Option<Vec<Descriptor>>,
        }
        let raw: Raw = serde_json::from_slice(bytes).map_err(|error| {
            let page = match bytes.trim_ascii_start().starts_with(b"<") {
                true => " (it is a web page)",
                false => "",
            };
            refused(format!("its manifest is invalid{page}")).source(error)
        })?;
        let document = match (raw.schema_version, raw.manifests, raw.config, raw.layers) {
            // Readers that prefer either half would see two different images in one document.
            (2, Some(manifests), None, None) => Ok(Self::Index(manifests)),
            (2, None, Some(config), Some(layers)) => Self::manifest(config, layers),
            (2, ..) => Err(refused(
                "its manifest is neither an image nor an index".into(),
            )),
            (version, ..) => Err(
                refused(format!("its manifest has version {version}, not 2"))
                    .help("push it again with a tool that writes version 2"),
            ),
        }?;
        document.check_type(&raw.media_type)?;
        Ok(document)
    }

    /// Refuses a document with a wrong media type. Readers that rely on the media type would see another image.
    pub(super) fn check_type(&self, name: &str) -> Result<()> {
        let is_index = matches!(self, Self::Index(_));
        if !MANIFEST_TYPES.contains(&name) || INDEX_TYPES.contains(&name) == is_index {
            return Ok(());
        }
        let what = if is_index { "an index" } else { "a manifest" };
        Err(refused(format!("it is {what}, but declared as `{name}`")))
    }

    fn manifest(config: Descriptor, layers: Vec<Descriptor>) -> Result<Self> {
        let count = layers.len();
        if count > MAX_LAYERS {
            let what = format!("it has {count} layers (limit {MAX_LAYERS})");
            return Err(refused(what));
        }
        for layer in &layers {
            let kind = layer.media_type.as_str();
            let is_tree = kind.starts_with("application/vnd.oci.image.layer.")
                || kind.starts_with("application/vnd.docker.image.rootfs.");
            if !is_tree || kind.ends_with("+encrypted") {
                let kind = kind.escape_debug();
                return Err(refused(format!("layer type `{kind}` is not a file system")));
            }
            layer.sha256()?;
        }
        config.sha256()?;
        Ok(Self::Manifest(Manifest { config, layers }))
    }
}

/// Refuses a manifest whose media type differs from the registry's header.
pub(super) fn check_header(kind: &str, bytes: &[u8]) -> Result<()> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Called {
        media_type: String,
    }
    let kind = kind.split(';').next().unwrap_or_default().trim();
    match serde_json::from_slice::<Called>(bytes) {
        Ok(Called { media_type })
            if MANIFEST_TYPES.contains(&kind) && kind != media_type.as_str() =>
        {
            let own = media_type.escape_debug();
            Err(refused(format!(
                "its registry declares it as `{kind}`, but it declares itself as `{own}`"
            )))
        }
        // Parsing refuses an invalid manifest later.
        _ => Ok(()),
    }
}

pub(super) fn choose<'a>(entries: &'a [Descriptor], platform: &Platform) -> Result<&'a Descriptor> {
    let fitting = entries.iter().filter(|entry| entry.fits(platform));
    // Some indexes list `linux/amd64/v2` before `linux/amd64`.
    let found = fitting.min_by_key(|entry| {
        let described = entry.platform.as_ref();
        (described != Some(platform), described.is_none())
    });
    found.ok_or_else(|| {
        let mut there: Vec<String> = entries
            .iter()
            .filter_map(|entry| entry.platform.as_ref())
            .filter(|platform| platform.os != "unknown")
            .map(Platform::to_string)
            .collect();
        there.sort();
        there.dedup();
        not_found!("the image is not available for {platform}").help(match there.is_empty() {
            true => "its index is empty; use another image".into(),
            false => format!(
                "platform = \"{}\" (there are: {})",
                there[0].escape_debug(),
                there.join(", ").escape_debug()
            ),
        })
    })
}

#[derive(Debug)]
pub(super) struct Configuration {
    /// SHA-256 of each layer's uncompressed bytes.
    pub(super) diff_ids: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    /// The skipped variables, with reasons.
    pub(super) left_out: Vec<String>,
}

impl Configuration {
    /// Parses the configuration of an image with this many layers.
    pub(super) fn parse(config: &[u8], layers: usize, platform: &Platform) -> Result<Self> {
        #[derive(Deserialize)]
        struct Raw {
            #[serde(default)]
            os: String,
            #[serde(default)]
            architecture: String,
            config: Option<Run>,
            rootfs: RootFs,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Run {
            env: Option<Vec<String>>,
        }
        #[derive(Deserialize)]
        struct RootFs {
            diff_ids: Vec<String>,
        }
        let raw: Raw = serde_json::from_slice(config)
            .map_err(|error| refused("its configuration is invalid".into()).source(error))?;
        // Some tools omit these fields. If present, they must match.
        let differs = |said: &str, wanted: &str| !said.is_empty() && said != wanted;
        if differs(&raw.os, &platform.os) || differs(&raw.architecture, &platform.architecture) {
            let there = format!("{}/{}", raw.os, raw.architecture);
            let there = there.escape_debug();
            return Err(not_found!("the image is for {there}, not for {platform}")
                .help(format!("platform = \"{there}\"")));
        }
        let found = raw.rootfs.diff_ids.len();
        if found != layers {
            let layers = count(layers, "layer");
            let what = format!("its manifest has {layers}, its configuration {found}");
            return Err(refused(what));
        }
        let diff_ids = raw.rootfs.diff_ids.iter().map(|digest| {
            let shown = digest.escape_debug();
            let wrong = || refused(format!("layer `{shown}` is not identified by a SHA-256"));
            sha256(digest).map(str::to_owned).ok_or_else(wrong)
        });
        let mut found = Self {
            diff_ids: diff_ids.collect::<Result<_>>()?,
            env: BTreeMap::new(),
            left_out: Vec::new(),
        };
        let env = raw.config.and_then(|run| run.env).unwrap_or_default();
        found.variables(&env)?;
        Ok(found)
    }

    /// Copies the variables that a profile could set, too.
    fn variables(&mut self, entries: &[String]) -> Result<()> {
        let size: usize = entries.iter().map(String::len).sum();
        if size > MAX_ENVIRONMENT {
            return Err(refused(format!(
                "its environment has {size} bytes (limit {MAX_ENVIRONMENT})"
            )));
        }
        for entry in entries {
            // The last duplicate wins, as in other engines.
            match entry.split_once('=') {
                Some((name, text)) if is_variable_name(name) && !text.contains('\0') => {
                    self.env.insert(name.to_owned(), text.to_owned());
                }
                Some((name, _)) if is_variable_name(name) => self.left_out.push(format!(
                    "variable `{name}` of the image: its value contains a NUL byte"
                )),
                _ => {
                    let name = entry.split('=').next().unwrap_or_default();
                    let name: String = name.chars().take(64).collect();
                    let name = name.escape_debug();
                    let what = format!("variable `{name}` of the image: not a variable name");
                    self.left_out.push(what);
                }
            }
        }
        Ok(())
    }
}

pub(super) const ANOTHER: &str = "the image is damaged or was tampered with; use another";

pub(crate) fn refused(what: String) -> Error {
    invalid!("refused image: {what}").help(ANOTHER)
}

/// Returns the error for bytes that do not match their digest.
pub(crate) fn damaged(what: &str, found: &str, sha256: &str) -> Error {
    drift!("{what} has SHA-256 {found}, not {sha256}").help(ANOTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_for_exactly_the_platform_is_chosen() {
        let entry = |digest: &str, platform: Option<&str>| {
            let platform = platform.and_then(|text| {
                let mut parts = text.split('/').map(str::to_owned);
                let (os, architecture) = (parts.next()?, parts.next()?);
                let variant = parts.next();
                Some(Platform {
                    os,
                    architecture,
                    variant,
                })
            });
            Descriptor {
                media_type: MANIFEST_TYPES[1].to_owned(),
                digest: digest.to_owned(),
                size: 1,
                platform,
                annotations: BTreeMap::new(),
            }
        };
        let entries = [
            entry("any", None),
            entry("attestation", Some("unknown/unknown")),
            entry("v3", Some("linux/amd64/v3")),
            entry("amd64", Some("linux/amd64")),
            entry("v7", Some("linux/arm/v7")),
            entry("v5", Some("linux/arm/v5")),
        ];
        for (platform, chosen) in [
            ("linux/amd64", "amd64"),
            ("linux/amd64/v3", "v3"),
            ("linux/arm/v5", "v5"),
            ("linux/arm", "v7"),
            ("linux/s390x", "any"),
        ] {
            let platform = Platform::parse(platform).unwrap();
            assert_eq!(choose(&entries, &platform).unwrap().digest, chosen);
        }
    }
}
