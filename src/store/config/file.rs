//! Owns the configuration files: their keys, and reading one, with all of its errors at once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use fs_err as fs;
use serde::Deserialize;
use serde_json::Value as Json;
use serde_spanned::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use crate::engine::choose;
use crate::engine::job_slots::MOST_JOBS;
use crate::image::certificates;
use crate::plan::gc::policy::{self, Policy};
use crate::profile::{self, Origin, Problem, Sources, value};
use crate::rocm::target::Target;
use crate::store::history::Reuse;
use crate::sys::account;
use crate::sys::error::{Error, ResultExt as _, if_exists};
use crate::sys::span::Place;
use crate::sys::suggest;
use crate::sys::trust::{self, Current};
use crate::sys::trusted_files;

/// Larger than any configuration, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// The keys of `[mirror]` that name no host.
const ARCHIVES: [&str; 11] = [
    "debian",
    "debian-snapshot",
    "debian-security",
    "debian-security-snapshot",
    "debian-signed-by",
    "ubuntu",
    "ubuntu-snapshot",
    "ubuntu-signed-by",
    "arch",
    "arch-snapshot",
    "arch-signatures",
];

/// A configuration file, exactly as written. Relative paths start from its directory, and `~` is the caller's home.
#[derive(Clone, Debug, Default, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct File {
    /// The store's root.
    pub home: Option<PathBuf>,
    /// Engine to use: `auto`, `nspawn`, `docker` or `podman`.
    pub engine: Option<String>,
    /// Job slots of this machine for all envs together [default: the number of cores].
    pub jobs: Option<u32>,
    /// How long a container waits after `exec` or `shell` for the next command, such as `60s`, or `never`.
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
    /// Private key that signs pushed snapshots, as `cosign generate-key-pair` makes it; its password is in
    /// `COSIGN_PASSWORD`.
    pub sign_key: Option<PathBuf>,
    /// Public key that pulled snapshots must be signed with.
    pub verify_key: Option<PathBuf>,
    /// Which snapshots envs and machines share: only `clean` ones, or `incremental` ones too.
    pub reuse: Option<Reuse>,
    /// Build user as `UID:GID`, instead of the invoking user.
    pub build_user: Option<String>,
    /// Targets of all envs on this machine: `${machine.targets}` in profiles, so that common steps are built once for
    /// all of them.
    pub targets: Option<Vec<String>>,
    /// Directories searched for profiles before the built-in ones.
    #[serde(default)]
    pub profile_dirs: Vec<PathBuf>,
    /// Directories searched for image recipes before the built-in ones.
    #[serde(default)]
    pub image_dirs: Vec<PathBuf>,
    /// Directories searched for hooks before the built-in ones.
    #[serde(default)]
    pub hook_dirs: Vec<PathBuf>,
    /// Package mirrors by distribution: `debian`, `debian-security`, `ubuntu`, `arch`, and `debian-snapshot` and so on
    /// for dated archives, `debian-signed-by` and `ubuntu-signed-by` with the file of their keys, `arch-signatures`;
    /// and the replacement for a registry, or for another download host, by its name: `"registry.example.org" =
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

static SCHEMA: LazyLock<Json> = LazyLock::new(|| schemars::schema_for!(File).to_value());

/// Reads the configuration of the current directory, as far as it applies and is valid.
pub(super) fn read_current(
    working: &Path,
    current: &mut Current,
    errors: &mut Vec<Error>,
) -> Option<File> {
    let path = working.join(trust::CONFIGURATION);
    let found = fs::symlink_metadata(&path).ok()?;
    // An error shows lines of the file, and a stranger's link may lead to one that only the caller can read.
    if found.is_symlink() && !current.counts() {
        current.unread.push(trust::CONFIGURATION.to_owned());
        return None;
    }
    let read = trusted_files::read(&[current.as_directory()], &path, MAX_FILE).and_then(|file| {
        file.ok_or_else(|| invalid!("`{}` is not a regular file", path.display()))
    });
    let file = super::valid(read, errors)?;
    // The link may have been put there meanwhile.
    if file.real.parent() != Some(&*current.directory) && !current.counts() {
        current.unread.push(trust::CONFIGURATION.to_owned());
        return None;
    }
    let text = String::from_utf8_lossy(&file.bytes).into_owned();
    Some(parse(path, text, Some(current), errors))
}

/// Reads another configuration file, as far as it is valid.
pub(super) fn read_file(path: &Path, errors: &mut Vec<Error>) -> Option<File> {
    let read = account::open(path).and_then(std::io::read_to_string);
    let read = if_exists(read).context(|| format!("cannot read `{}`", path.display()));
    let text = super::valid(read, errors)??;
    Some(parse(path.to_owned(), text, None, errors))
}

/// Returns the valid settings of a file. A single error lists all invalid ones.
fn parse(
    path: PathBuf,
    text: String,
    mut current: Option<&mut Current>,
    errors: &mut Vec<Error>,
) -> File {
    let what = format!("configuration `{}`", path.display());
    let mut sources = Sources::default();
    sources.push(Origin::File(path), text);
    let (mut table, not_toml) = DeTable::parse_recoverable(&sources[0].text);
    let problems = not_toml.iter().map(|error| Problem::not_toml(error, 0));
    let mut problems: Vec<Problem> = problems.collect();
    if !problems.is_empty() {
        errors.push(profile::invalid(&what, &sources, problems));
        return File::default();
    }
    // In a trusted directory, keys that do not apply are checked too.
    if let Some(current) = current.as_mut().filter(|current| !current.counts()) {
        current.keep(table.get_mut());
    }
    let found = profile::check_as("the configuration", &SCHEMA, 0, &mut table);
    problems.extend(found);
    if let Some(current) = current.filter(|current| current.counts()) {
        current.keep(table.get_mut());
    }
    let read = |table: &Spanned<DeTable<'_>>| File::deserialize(Deserializer::from(table.clone()));
    let file = read(&table).and_then(|file| {
        let wrong = file.values();
        if wrong.is_empty() {
            return Ok(file);
        }
        for (key, why, help) in wrong {
            let place = take(table.get_mut(), &key).unwrap_or_default();
            let message = format!("`{}`: {why}", key.join("."));
            problems.push(Problem::new(&place, message, "invalid").help(help));
        }
        read(&table)
    });
    let file = file.unwrap_or_else(|error| {
        let place = error.span().unwrap_or_default();
        problems.push(Problem::new(&place, error.message(), "here"));
        File::default()
    });
    if !problems.is_empty() {
        errors.push(profile::invalid(&what, &sources, problems));
    }
    file
}

/// Removes a key and returns the place of its value.
fn take(table: &mut DeTable<'_>, key: &[String]) -> Option<Place> {
    let (last, tables) = key.split_last()?;
    let mut table = table;
    for name in tables {
        let DeValue::Table(inner) = table.get_mut(name.as_str())?.get_mut() else {
            return None;
        };
        table = inner;
    }
    table.remove(last.as_str()).map(|value| value.span())
}

/// Returns whether a key of `[mirror]` names an archive or a host. A name without a domain and a port may be a host of
/// the local network, unless it resembles that of an archive.
fn is_mirrored(name: &str) -> bool {
    ARCHIVES.contains(&name)
        || name.contains(['.', ':'])
        || suggest::closest(name, ARCHIVES).is_none()
}

/// Returns what the value of an archive in `[mirror]` must be, with an example, unless it is that. The value of a host
/// is checked when the host is asked.
fn wrong_mirror(name: &str, value: &str) -> Option<(&'static str, &'static str)> {
    match name {
        "arch-signatures" => (!["required", "never"].contains(&value))
            .then_some(("must be `required` or `never`", "remove it")),
        _ if name.ends_with("-signed-by") || !ARCHIVES.contains(&name) => None,
        _ => (!value.contains(":/")).then_some((
            "must be an address",
            "\"https://mirror.example.org/ARCHIVE\", or \"file:///DIRECTORY\"",
        )),
    }
}

/// A value that is invalid: its key, why, and help.
type Bad = (Vec<String>, String, String);

impl File {
    /// Returns invalid values that have the right type.
    fn values(&self) -> Vec<Bad> {
        let mut all = Vec::new();
        let mut bad = |key: &str, why: &str, help: &str| {
            all.push((vec![key.to_owned()], why.to_owned(), help.to_owned()));
        };
        if let Some(Err(error)) = self.engine.as_deref().map(choose::known) {
            let help = error.help_text().unwrap_or_default();
            bad("engine", error.message(), help);
        }
        let paths = [
            ("home", self.home.as_slice()),
            ("ninja", self.ninja.as_slice()),
            ("sign-key", self.sign_key.as_slice()),
            ("verify-key", self.verify_key.as_slice()),
            ("profile-dirs", self.profile_dirs.as_slice()),
            ("image-dirs", self.image_dirs.as_slice()),
            ("hook-dirs", self.hook_dirs.as_slice()),
        ];
        for (key, paths) in paths {
            // It would name the directory of the file.
            if paths.contains(&PathBuf::new()) {
                bad(key, "an empty path", "remove it");
            }
        }
        for (key, text) in [("disk-floor", &self.disk_floor), ("log-max", &self.log_max)] {
            if let Some(Err(refused)) = text.as_deref().map(value::size) {
                bad(key, &refused.message, &refused.help.unwrap_or_default());
            }
        }
        if let Some(Err(refused)) = self.idle.as_deref().map(super::settings::idle) {
            let help = "idle = \"60s\", \"5m\" or \"never\"";
            bad("idle", &refused.message, help);
        }
        if let Some(Err(refused)) = self.http_timeout.as_deref().map(value::duration) {
            bad("http-timeout", &refused.message, "http-timeout = \"60s\"");
        }
        let allowed = 1..=MOST_JOBS;
        if self.jobs.is_some_and(|jobs| !allowed.contains(&jobs)) {
            let why = format!("must be from 1 to {MOST_JOBS}");
            bad("jobs", &why, "jobs = 4");
        }
        if let Some(Err(error)) = self.build_user.as_deref().map(super::settings::parse_user) {
            bad("build-user", error.message(), "build-user = \"1000:1000\"");
        }
        for name in self.targets.iter().flatten() {
            if let Err(error) = Target::parse(name) {
                bad("targets", error.message(), &Target::advice(name));
            }
        }
        let nowhere = Path::new("");
        if let Some(Err(error)) =
            (self.ca_certificates.as_ref()).map(|written| written.resolve(nowhere, nowhere))
        {
            let help = error.help_text().unwrap_or_default();
            bad("ca-certificates", error.message(), help);
        }
        for name in self.mirror.keys().filter(|name| !is_mirrored(name)) {
            all.push((
                vec!["mirror".to_owned(), name.clone()],
                "neither an archive nor a host with a domain or port".to_owned(),
                suggest::help(name, ARCHIVES, "write the host's domain too"),
            ));
        }
        for (name, value) in &self.mirror {
            if let Some((why, help)) = wrong_mirror(name, value) {
                let key = vec!["mirror".to_owned(), name.clone()];
                all.push((key, why.to_owned(), help.to_owned()));
            }
        }
        let mut wrong = Vec::new();
        Policy::read(&self.gc, None, &mut wrong);
        all.extend(wrong.into_iter().map(|bad| {
            let key = std::iter::once("gc".to_owned()).chain(bad.key);
            (key.collect(), bad.why, policy::EXAMPLES.to_owned())
        }));
        all
    }
}
