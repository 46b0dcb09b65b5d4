//! Owns the configuration files: their keys, and reading one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Deserialize;
use toml::de::DeTable;

use crate::image::certificates;
use crate::plan::gc::policy::{self, Policy};
use crate::profile::value;
use crate::rocm::target::Target;
use crate::store::history::Reuse;
use crate::sys::checked;
use crate::sys::error::{Error, Result};
use crate::sys::span;
use crate::sys::trust::{self, Current};

/// Larger than any configuration, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// A configuration file, exactly as written.
#[derive(Clone, Debug, Default, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct File {
    /// The store's root.
    pub home: Option<PathBuf>,
    /// Engine to use: `auto`, `nspawn`, `docker` or `podman`.
    pub engine: Option<String>,
    /// Job slots of this machine for all envs together [default: the number of cores].
    pub jobs: Option<u32>,
    /// How long a container of Docker or Podman stays after `exec` for the next one, such as `60s`, or `never`.
    pub idle: Option<String>,
    /// Free space below which a step is paused, such as "1G"; "0" never pauses.
    pub disk_floor: Option<String>,
    /// Maximum size of a step's log, such as "256M"; of a longer one the middle is omitted.
    pub log_max: Option<String>,
    /// How long a server may send almost nothing, such as "60s".
    pub http_timeout: Option<String>,
    /// A ninja 1.13 or newer, instead of the one that rockenv fetches.
    pub ninja: Option<PathBuf>,
    /// ccache's storage for several machines, `redis://...` or `http://...`, for profiles that name
    /// `CCACHE_REMOTE_STORAGE` in `env-from-host`.
    pub ccache_remote: Option<String>,
    /// Repository that snapshots are pushed to and pulled from, such as `registry.example.org/rockenv`.
    pub registry: Option<String>,
    /// Whether `up` pulls missing snapshots from there.
    pub pull: Option<bool>,
    /// Whether `up` pushes new snapshots there.
    pub push: Option<bool>,
    /// Which snapshots envs and machines share: only `clean` ones, or `incremental` ones too.
    pub reuse: Option<Reuse>,
    /// Build user as `UID:GID`, instead of the invoking user.
    pub build_user: Option<String>,
    /// Targets of all envs on this machine: `${machine.targets}` in profiles, so that common steps are built once for
    /// all of them.
    #[serde(default)]
    pub targets: Vec<String>,
    /// Directories searched for profiles before the built-in ones.
    #[serde(default)]
    pub profile_dirs: Vec<PathBuf>,
    /// Directories searched for image recipes before the built-in ones.
    #[serde(default)]
    pub image_dirs: Vec<PathBuf>,
    /// Directories searched for hooks before the built-in ones.
    #[serde(default)]
    pub hook_dirs: Vec<PathBuf>,
    /// Package mirrors by distribution: `debian`, `ubuntu`, `arch`, and `debian-snapshot` and so on for dated
    /// archives, `debian-signed-by` and `ubuntu-signed-by` with the file of their keys; and the replacement for a
    /// registry, or for another download host, by its name: `"registry.example.org" =
    /// "https://mirror.example.org/prefix"`.
    #[serde(default)]
    pub mirror: BTreeMap<String, String>,
    /// Additional certificate authorities for steps, image builds and downloads: "host", for those of this machine,
    /// or a list of PEM files. Ignored in `./rockenv.toml`.
    pub ca_certificates: Option<certificates::Written>,
    /// What `gc` keeps.
    #[serde(default)]
    pub gc: policy::Table,
}

/// Reads the configuration of the current directory, as far as it applies.
pub(super) fn read_current(working: &Path, current: &mut Current) -> Result<Option<File>> {
    let path = working.join(trust::CONFIGURATION);
    if fs::symlink_metadata(&path).is_err() {
        return Ok(None);
    }
    let invalid = |error| {
        Error::invalid(format!("configuration `{}` is invalid", path.display())).source(error)
    };
    let file = checked::read(&[current.as_directory()], &path, MAX_FILE)?
        .ok_or_else(|| Error::invalid(format!("`{}` is not a regular file", path.display())))?;
    let text = String::from_utf8_lossy(&file.bytes);
    if current.counts() {
        // An untrusted file is checked all the same.
        toml::from_str::<File>(&text).map_err(invalid)?;
    }
    let table = text.parse::<toml::Table>().map_err(invalid)?;
    let file: File = current.keep(table).try_into().map_err(|error| {
        // Read as a text, the error has a place.
        invalid(toml::from_str::<File>(&text).err().unwrap_or(error))
    })?;
    file.check(&path, &text).map(|()| Some(file))
}

pub(super) fn read_file(path: &Path) -> Result<Option<File>> {
    let text = match fs::read_to_string(path) {
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(None);
        }
        other => other?,
    };
    let file: File = toml::from_str(&text).map_err(|error| {
        Error::invalid(format!("configuration `{}` is invalid", path.display())).source(error)
    })?;
    file.check(path, &text).map(|()| Some(file))
}

/// A value whose text is invalid: its key, why, and help.
type Bad = (Vec<String>, String, String);

impl File {
    /// Refuses values whose text is invalid, by file, line and key.
    fn check(&self, path: &Path, text: &str) -> Result<()> {
        let Err((key, why, help)) = self.values() else {
            return Ok(());
        };
        let line = span::line(text, place(text, &key).unwrap_or_default());
        let (key, path) = (key.join("."), path.display());
        let message = format!("`{key}` in configuration `{path}:{line}`: {why}");
        Err(Error::invalid(message).help(help))
    }

    fn values(&self) -> std::result::Result<(), Bad> {
        let bad = |key: &str, why: String, help: &str| (vec![key.to_owned()], why, help.to_owned());
        for (key, text) in [("disk-floor", &self.disk_floor), ("log-max", &self.log_max)] {
            if let Some(Err(refused)) = text.as_deref().map(value::size) {
                let help = refused.help.unwrap_or_default();
                return Err(bad(key, refused.message, &help));
            }
        }
        if let Some(Err(refused)) = self.idle.as_deref().map(super::settings::idle) {
            let help = "idle = \"60s\", \"5m\" or \"never\"";
            return Err(bad("idle", refused.message, help));
        }
        if let Some(Err(refused)) = self.http_timeout.as_deref().map(value::duration) {
            let help = "http-timeout = \"60s\"";
            return Err(bad("http-timeout", refused.message, help));
        }
        if self.jobs == Some(0) {
            let why = "a step needs at least 1 job".to_owned();
            return Err(bad("jobs", why, "jobs = 4"));
        }
        for name in &self.targets {
            if let Err(error) = Target::parse(name) {
                let why = error.message().to_owned();
                return Err(bad("targets", why, &Target::advice(name)));
            }
        }
        Policy::read(&self.gc, None).map(drop).map_err(|bad| {
            let key = std::iter::once("gc".to_owned()).chain(bad.key);
            (key.collect(), bad.why, policy::EXAMPLES.to_owned())
        })
    }
}

/// Returns where a key is in a text.
fn place(text: &str, key: &[String]) -> Option<usize> {
    let (table, _) = DeTable::parse_recoverable(text);
    let (last, tables) = key.split_last()?;
    let mut table = table.get_ref();
    for name in tables {
        table = table.get(name.as_str())?.get_ref().as_table()?;
    }
    Some(table.get(last.as_str())?.span().start)
}
