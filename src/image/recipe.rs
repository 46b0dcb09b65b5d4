//! Owns `Recipe`: a checked image file (`images/*.toml`), and the digest of everything that determines its content.

mod check;

use std::path::{Path, PathBuf};

use jiff::civil::DateTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::oci::Platform;
use crate::sys::address::hide_secrets;
use crate::sys::error::{Error, Result};
use crate::sys::span::{self, At, Place};
use crate::sys::{catalog, suggest, trusted_files};
use check::Bad;

/// Maximum size of a recipe, in bytes. Recipes are written by hand.
const LARGEST: u64 = 1 << 20;
const PROVIDERS: [&str; 5] = ["mmdebstrap", "pacstrap", "oci", "tarball", "directory"];

/// An image recipe as written in `images/<name>.toml`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Image")]
struct RawRecipe {
    /// Format version; 1.
    #[schemars(range(min = 1, max = 1))]
    schema: At<u32>,
    /// One line for `rockenv image ls`.
    #[serde(default)]
    description: String,
    /// What makes the root file system; the table of the same name configures it.
    // The parser reads any string, so that its error can suggest a name.
    #[schemars(extend("enum" = PROVIDERS))]
    provider: At<String>,
    mmdebstrap: Option<At<Mmdebstrap>>,
    pacstrap: Option<At<Pacstrap>>,
    oci: Option<At<Oci>>,
    tarball: Option<At<Tarball>>,
    directory: Option<At<Directory>>,
}

/// A distribution that mmdebstrap builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Distribution {
    /// Debian.
    Debian,
    /// Ubuntu.
    Ubuntu,
}

impl Distribution {
    /// Returns the name as written in recipes and in the configuration's mirrors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Debian => "debian",
            Self::Ubuntu => "ubuntu",
        }
    }
}

/// A Debian or Ubuntu image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Mmdebstrap {
    /// Which archive.
    pub distribution: Distribution,
    /// Release code name, such as `trixie` or `noble`.
    pub suite: String,
    /// Archive components.
    #[serde(default = "main_component")]
    pub components: Vec<String>,
    /// mmdebstrap's package set.
    #[serde(default = "minbase")]
    pub variant: String,
    /// Packages on top of the variant.
    #[serde(default)]
    pub packages: Vec<String>,
    /// apt options such as `Acquire::Retries "5"`; they stay in the image.
    #[serde(default)]
    pub apt_options: Vec<String>,
    /// Debian architecture [default: the host's].
    pub architecture: Option<String>,
    /// Time of the distribution's dated archive, `YYYYMMDDTHHMMSSZ`.
    pub snapshot: Option<String>,
}

/// An Arch Linux image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Pacstrap {
    /// Packages and groups to install.
    #[serde(default = "base_package")]
    pub packages: Vec<String>,
    /// Repositories, in order.
    #[serde(default = "arch_repositories")]
    pub repositories: Vec<String>,
    /// Time of the configured `arch-snapshot` archive, `YYYYMMDDTHHMMSSZ`.
    pub snapshot: Option<String>,
    /// Further lines for the `[options]` section of pacman.conf.
    #[serde(default)]
    pub pacman_conf: Vec<String>,
}

/// A container image: in a registry, or in files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Oci {
    /// `host/name:tag@sha256:digest`. With a digest it is always the same image; a tag alone is resolved when the
    /// image is built. With `path`: selects one of several images.
    #[serde(rename = "ref")]
    pub reference: Option<String>,
    /// OCI layout (a directory, or an archive of one) or `docker save` archive, relative to the recipe.
    pub path: Option<PathBuf>,
    /// Operating system and processor [default: this machine's].
    #[serde(default = "Platform::own")]
    pub platform: String,
}

/// An archive of a root file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Tarball {
    /// File, relative to the recipe.
    pub path: Option<PathBuf>,
    /// https address.
    pub url: Option<String>,
    /// SHA-256 of the file, 64 hexadecimal digits.
    pub sha256: String,
    /// Leading path components to drop.
    #[serde(default)]
    pub strip_components: u32,
}

/// A directory to copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Directory {
    /// Directory, relative to the recipe.
    pub path: PathBuf,
}

fn main_component() -> Vec<String> {
    vec!["main".into()]
}

fn minbase() -> String {
    "minbase".into()
}

fn base_package() -> Vec<String> {
    vec!["base".into()]
}

fn arch_repositories() -> Vec<String> {
    vec!["core".into(), "extra".into()]
}

/// The provider that makes the root file system, with its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Mmdebstrap(Mmdebstrap),
    Pacstrap(Pacstrap),
    Oci(Oci),
    Tarball(Tarball),
    Directory(Directory),
}

impl Source {
    /// Returns the provider's name.
    pub(crate) fn provider(&self) -> &'static str {
        match self {
            Self::Mmdebstrap(_) => "mmdebstrap",
            Self::Pacstrap(_) => "pacstrap",
            Self::Oci(_) => "oci",
            Self::Tarball(_) => "tarball",
            Self::Directory(_) => "directory",
        }
    }
}

/// The resolved inputs of a locked recipe.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pin<'a> {
    /// Time of the dated archive, `YYYYMMDDTHHMMSSZ`.
    pub snapshot: Option<&'a str>,
    /// Digest of a container image's manifest, with `sha256:`.
    pub resolved: Option<&'a str>,
}

/// A checked recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// One line for people.
    pub description: String,
    /// The provider that makes the root file system. Its paths are absolute if the recipe came from a file.
    pub source: Source,
}

impl Recipe {
    /// Reads and checks a recipe file. Relative paths start from the file's directory.
    pub fn load(directories: &[catalog::Directory], path: &Path) -> Result<Self> {
        let file = trusted_files::read(directories, path, LARGEST + 1)?;
        let file = file.ok_or_else(|| invalid!("`{}` is not a regular file", path.display()))?;
        if file.bytes.len() as u64 > LARGEST {
            let limit = LARGEST / 1024;
            return Err(invalid!("`{}` is larger than {limit} KiB", path.display()));
        }
        let text = String::from_utf8(file.bytes)
            .map_err(|_| invalid!("`{}` is not UTF-8", path.display()))?;
        let base = path.parent().unwrap_or(Path::new("."));
        Self::parse(&text, &path.display().to_string(), base)
    }

    /// Checks a recipe's text. `name` is for errors, and relative paths start from `base`.
    pub fn parse(text: &str, name: &str, base: &Path) -> Result<Self> {
        let raw: RawRecipe = toml::from_str(text).map_err(|error| {
            invalid!("{name} is not a valid image recipe")
                .source(hide_secrets(error.to_string().trim_end()))
                .help("rockenv schema image")
        })?;
        let at = |place: &Place, error| locate(error, name, span::line(text, place.start));
        if raw.schema.value != 1 {
            let error = invalid!("schema {} is not known to this rockenv", raw.schema)
                .help("write schema = 1");
            return Err(at(&raw.schema.place, error));
        }
        let provider = raw.provider.as_str();
        if !PROVIDERS.contains(&provider) {
            let help = suggest::choices_help(provider, &PROVIDERS, "providers");
            let error = invalid!("unknown provider `{provider}`").help(help);
            return Err(at(&raw.provider.place, error));
        }
        let tables = [
            table(raw.mmdebstrap, Source::Mmdebstrap),
            table(raw.pacstrap, Source::Pacstrap),
            table(raw.oci, Source::Oci),
            table(raw.tarball, Source::Tarball),
            table(raw.directory, Source::Directory),
        ];
        let mut given = None;
        for (source, place) in tables.into_iter().flatten() {
            let table = source.provider();
            if table != provider {
                let message = format!("[{table}] does not belong to provider \"{provider}\"");
                let help = format!("remove [{table}], or write provider = \"{table}\"");
                return Err(at(&place, invalid!("{message}").help(help)));
            }
            given = Some((source, place.start));
        }
        let Some((source, start)) = given else {
            let error = invalid!("provider \"{provider}\" needs a table [{provider}]")
                .help(format!("add [{provider}]"));
            return Err(at(&raw.provider.place, error));
        };
        let source = source.checked(base).map_err(|Bad { error, mentions }| {
            // Points at the value itself rather than at its table, if possible.
            let inside = text.get(start..).and_then(|rest| rest.find(&mentions));
            let start = start + inside.filter(|_| !mentions.is_empty()).unwrap_or(0);
            at(&(start..start), error)
        })?;
        Ok(Self {
            description: raw.description,
            source,
        })
    }

    /// Returns the SHA-256 of everything that determines the content, as canonical JSON. This excludes the description,
    /// and the address of an archive, whose digest is included. The content of a `directory` is only known when it is
    /// built.
    pub fn digest(&self) -> String {
        let content = match &self.source {
            Source::Mmdebstrap(table) => vec![json!(table)],
            Source::Pacstrap(table) => vec![json!(table)],
            Source::Oci(table) => match (&table.path, table.sha256()) {
                (None, Some(sha256)) => vec![json!(sha256), json!(table.platform)],
                (path, _) => vec![
                    json!(table.reference),
                    json!(path.as_deref().map(path_digits)),
                    json!(table.platform),
                ],
            },
            Source::Tarball(table) => vec![json!(table.sha256), json!(table.strip_components)],
            Source::Directory(table) => vec![json!(path_digits(&table.path))],
        };
        let mut value = vec![json!("rockenv-image-1"), json!(self.source.provider())];
        value.extend(content);
        // serde_json sorts keys and has a unique compact form, so the text is canonical JSON.
        hex::encode(Sha256::digest(json!(value).to_string()).as_slice())
    }

    /// Returns whether the digest includes the absolute path of files, and so depends on the recipe's own path.
    pub fn is_by_path(&self) -> bool {
        match &self.source {
            Source::Directory(_) => true,
            Source::Oci(table) => table.path.is_some(),
            Source::Mmdebstrap(_) | Source::Pacstrap(_) | Source::Tarball(_) => false,
        }
    }

    /// Returns the recipe with open choices filled in from the pin. Choices that the recipe makes stay.
    #[must_use]
    pub fn pinned(&self, pin: Pin<'_>) -> Self {
        let mut recipe = self.clone();
        match &mut recipe.source {
            Source::Mmdebstrap(Mmdebstrap { snapshot, .. })
            | Source::Pacstrap(Pacstrap { snapshot, .. })
                if snapshot.is_none() =>
            {
                *snapshot = pin.snapshot.map(str::to_owned);
            }
            Source::Oci(table) if table.path.is_none() && table.sha256().is_none() => {
                if let (Some(reference), Some(resolved)) = (&mut table.reference, pin.resolved) {
                    reference.push('@');
                    reference.push_str(resolved);
                }
            }
            _ => {}
        }
        recipe
    }

    /// Returns the configuration key of the mirror that would have the recipe's packages as of a past time; `None` if
    /// the recipe already names a time or has no packages.
    pub fn dated_mirror(&self) -> Option<String> {
        match &self.source {
            Source::Mmdebstrap(table) if table.snapshot.is_none() => {
                Some(format!("{}-snapshot", table.distribution.name()))
            }
            Source::Pacstrap(table) if table.snapshot.is_none() => Some("arch-snapshot".to_owned()),
            _ => None,
        }
    }

    /// Returns the archive time that the recipe names.
    pub fn snapshot(&self) -> Option<&str> {
        match &self.source {
            Source::Mmdebstrap(table) => table.snapshot.as_deref(),
            Source::Pacstrap(table) => table.snapshot.as_deref(),
            Source::Oci(_) | Source::Tarball(_) | Source::Directory(_) => None,
        }
    }
}

fn table<T>(table: Option<At<T>>, variant: fn(T) -> Source) -> Option<(Source, Place)> {
    table.map(|table| (variant(table.value), table.place))
}

/// Encodes a path for JSON, because a path need not be UTF-8.
fn path_digits(path: &Path) -> String {
    hex::encode(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()))
}

/// Returns the JSON schema of image recipes.
pub(crate) fn schema() -> schemars::Schema {
    schemars::schema_for!(RawRecipe)
}

const SNAPSHOT_ID: &str = "%Y%m%dT%H%M%SZ";

/// Returns the snapshot id of a time in seconds since 1970.
pub(crate) fn snapshot_id(seconds: i64) -> Option<String> {
    let moment = jiff::Timestamp::from_second(seconds).ok()?;
    Some(moment.strftime(SNAPSHOT_ID).to_string())
}

/// Returns the seconds since 1970 of a snapshot id `YYYYMMDDTHHMMSSZ`.
pub(crate) fn snapshot_time(id: &str) -> Option<i64> {
    let moment = DateTime::strptime(SNAPSHOT_ID, id).ok()?;
    let zoned = moment.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    let seconds = zoned.timestamp().as_second();
    // The parser also accepts signs, blanks and single digits.
    (snapshot_id(seconds)? == id).then_some(seconds)
}

fn locate(error: Error, name: &str, line: usize) -> Error {
    invalid!("{name}:{line}: {}", error.message()).help_if(error.help_text())
}

#[cfg(test)]
mod tests;
