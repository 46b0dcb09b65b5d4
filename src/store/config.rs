//! Owns configuration: the only reader of the process's environment, and of the configuration files.
//!
//! Precedence: flags, `ROCKENV_*`, `./rockenv.toml` if `trust` allows it, the user's `rockenv/config.toml`,
//! `/etc/rockenv/config.toml`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use serde::Deserialize;

use crate::engine::BuildUser;
use crate::engine::choose::Sockets;
use crate::engine::docker::Contexts;
use crate::image::Logins;
use crate::image::certificates::{self, Authorities};
use crate::plan::gc::policy;
use crate::store::history::Reuse;
use crate::sys::account::{self, home_of};
use crate::sys::catalog::Directory;
use crate::sys::checked;
use crate::sys::error::{Error, Result};
use crate::sys::trust::{self, Current};
use crate::ui::ci::System;

mod variables;
pub use variables::VARIABLES;

/// The variable that tells ccache about a storage shared by several machines.
const CCACHE_REMOTE: &str = "CCACHE_REMOTE_STORAGE";
/// Default time that a container stays for the next `exec`: long enough for a person at work.
const IDLE: Duration = Duration::from_secs(60);
/// Larger than any configuration, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Default free space below which a step is paused, in bytes.
const DISK_FLOOR: u64 = 1 << 30;
/// Default maximum size of a step's log, in bytes.
const LOG_MAX: u64 = 256 << 20;

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

/// The environment's settings for output.
#[derive(Clone, Debug, Default)]
pub struct Terminal {
    /// `NO_COLOR` is set and not empty.
    pub no_color: bool,
    /// `CLICOLOR_FORCE` is set and not `0`.
    pub force_color: bool,
    /// `TERM`.
    pub term: Option<String>,
    /// `CI` is set to a true value.
    pub ci: bool,
    /// The CI system that reads the output.
    pub ci_system: Option<System>,
    /// GitHub Actions' file for the job's summary.
    pub step_summary: Option<PathBuf>,
}

/// The complete configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub home: PathBuf,
    /// Requested engine.
    pub engine: Option<String>,
    /// Sockets of container services.
    pub sockets: Sockets,
    /// The ssh program and its options.
    pub ssh: Vec<String>,
    /// Job slots of this machine.
    pub jobs: Option<u32>,
    /// How long a container of a service stays after `exec` for the next one.
    pub idle: Duration,
    /// Free space below which a step is paused, in bytes.
    pub disk_floor: u64,
    /// Maximum size of a step's log, in bytes.
    pub log_max: u64,
    /// How long a server may send almost nothing, if configured.
    pub http_timeout: Option<Duration>,
    /// The user's own ninja.
    pub ninja: Option<PathBuf>,
    /// Repository that snapshots are pushed to and pulled from.
    pub registry: Option<String>,
    /// Whether `up` pulls missing snapshots.
    pub pull: bool,
    /// Whether `up` pushes new snapshots.
    pub push: bool,
    /// Which snapshots envs and machines share.
    pub reuse: Reuse,
    /// Targets of all envs on this machine.
    pub targets: Vec<String>,
    /// Directories of profiles; the first match wins.
    pub profile_dirs: Vec<Directory>,
    /// Directories of image recipes.
    pub image_dirs: Vec<Directory>,
    /// Directories of hooks.
    pub hook_dirs: Vec<Directory>,
    /// The current directory, and which of its files apply.
    pub current: Current,
    /// Directory of the invoking user's configuration.
    pub user_dir: PathBuf,
    /// Directories that are trusted without asking.
    pub trusted_dirs: Option<String>,
    pub mirrors: BTreeMap<String, String>,
    /// Additional certificate authorities.
    pub authorities: Option<Authorities>,
    /// What `gc` keeps: the nearest file that sets a key wins.
    pub gc: policy::Table,
    /// The user's logins to registries; the files need not exist.
    pub logins: Logins,
    /// The user who called, even through `sudo`.
    pub invoking_user: BuildUser,
    /// The user that steps run as.
    pub user: BuildUser,
    /// The invoking user's home on the host, for `~`.
    pub host_home: PathBuf,
    /// Root directory below which GPUs are detected.
    pub gpu_root: PathBuf,
    pub terminal: Terminal,
    /// Proxy variables of the caller, for tools that fetch.
    pub proxies: BTreeMap<String, String>,
    /// Variables of the caller, or their replacements from the configuration, for `env-from-host`.
    environment: BTreeMap<String, String>,
}

impl Config {
    /// Reads environment and files, once.
    pub fn read() -> Result<Self> {
        let environment: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        let working = std::env::current_dir().ok();
        let config = Self::of(environment, working.as_deref())?;
        account::settle(&config.invoking_user);
        Ok(config)
    }

    /// Reads the configuration from these variables, and from the files of the working directory.
    pub(crate) fn of(
        environment: BTreeMap<String, String>,
        working: Option<&Path>,
    ) -> Result<Self> {
        let set = |name: &str| environment.get(name).filter(|value| !value.is_empty());
        let root = nix::unistd::geteuid().is_root();
        let user = account::invoking_user(set("SUDO_UID"), set("SUDO_GID"), set("PKEXEC_UID"))?;
        let host_home = match home_of(user.uid) {
            Some(home) => home,
            None => set("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from),
        };
        // Under sudo, `$XDG_*` are root's, but the invoking user's profiles are meant.
        let own = |name: &str, below: &str| match set(name) {
            Some(path) if set("SUDO_UID").is_none() => PathBuf::from(path),
            _ => host_home.join(below),
        };
        let user_dir = own("XDG_CONFIG_HOME", ".config").join("rockenv");
        let mut files = Vec::new();
        let here = working.unwrap_or(Path::new("/"));
        let mut authorities = set("ROCKENV_CA_CERTIFICATES")
            .map(|text| certificates::Written::variable(text).resolve(here, &host_home))
            .transpose()?;
        let trusted_dirs = set(trust::VARIABLE).cloned();
        let mut current = match working {
            Some(working) => {
                let sent = set(trust::DIGEST_VARIABLE).map(String::as_str);
                Current::look(working, &user_dir, trusted_dirs.as_deref(), sent)
            }
            None => Current::default(),
        };
        if let Some(working) = working {
            files.extend(read_current(working, &mut current)?);
        }
        for path in [
            user_dir.join("config.toml"),
            PathBuf::from("/etc/rockenv/config.toml"),
        ] {
            let Some(file) = read_file(&path)? else {
                continue;
            };
            // The working directory may be anybody's, so it must not choose trusted authorities.
            if authorities.is_none()
                && let Some(written) = &file.ca_certificates
            {
                let directory = path.parent().unwrap_or(here);
                authorities = Some(written.resolve(directory, &host_home)?);
            }
            files.push(file);
        }
        let first = |pick: fn(&File) -> Option<String>| files.iter().find_map(pick);
        let home = set("ROCKENV_HOME")
            .map(PathBuf::from)
            .or_else(|| files.iter().find_map(|file| file.home.clone()));
        let home = match home {
            Some(home) if home.is_absolute() => home,
            Some(home) => working.unwrap_or(Path::new("/")).join(home),
            None if root => PathBuf::from("/var/lib/rockenv"),
            None => own("XDG_DATA_HOME", ".local/share").join("rockenv"),
        };
        let jobs = match set("ROCKENV_JOBS") {
            Some(text) => Some(text.parse().map_err(|_| {
                Error::invalid(format!("ROCKENV_JOBS=`{text}` is not a number"))
                    .help("ROCKENV_JOBS=4 rockenv up ...")
            })?),
            None => files.iter().find_map(|file| file.jobs),
        };
        let bytes = |variable: &str, text: Option<String>, otherwise: u64| match text {
            Some(text) => crate::profile::value::size(&text).map_err(|refused| {
                Error::invalid(format!("{variable}: `{text}` is not a size"))
                    .source(refused.message)
                    .help(format!("{variable}=1G rockenv up ..."))
            }),
            None => Ok(otherwise),
        };
        let disk_floor = set("ROCKENV_DISK_FLOOR").cloned();
        let disk_floor = disk_floor.or_else(|| first(|file| file.disk_floor.clone()));
        let disk_floor = bytes("ROCKENV_DISK_FLOOR", disk_floor, DISK_FLOOR)?;
        let log_max = set("ROCKENV_LOG_MAX").cloned();
        let log_max = log_max.or_else(|| first(|file| file.log_max.clone()));
        let log_max = bytes("ROCKENV_LOG_MAX", log_max, LOG_MAX)?;
        let http_timeout = set("ROCKENV_HTTP_TIMEOUT").cloned();
        let http_timeout = http_timeout.or_else(|| first(|file| file.http_timeout.clone()));
        let files_of_logins = match set("REGISTRY_AUTH_FILE") {
            Some(path) => vec![working.unwrap_or(Path::new("/")).join(path)],
            None => vec![
                PathBuf::from(format!("/run/user/{}/containers/auth.json", user.uid)),
                own("XDG_CONFIG_HOME", ".config").join("containers/auth.json"),
                own("DOCKER_CONFIG", ".docker").join("config.json"),
            ],
        };
        let invoking_user = user.clone();
        // An ordinary user is root in the user namespace that changes the store, and in a rootless container.
        let user = if root { user } else { BuildUser::new(0, 0) };
        let user = match set("ROCKENV_BUILD_USER")
            .cloned()
            .or_else(|| first(|file| file.build_user.clone()))
        {
            Some(text) => parse_user(&text)?,
            None => user,
        };
        // The first file that sets it wins, as for all keys: lists are not merged.
        let targets = files.iter().find(|file| !file.targets.is_empty());
        let targets = targets.map_or(&[][..], |file| &file.targets);
        let targets = targets.to_vec();
        let mut handed = environment.clone();
        if set(CCACHE_REMOTE).is_none()
            && let Some(url) = first(|file| file.ccache_remote.clone())
        {
            handed.insert(CCACHE_REMOTE.to_owned(), url);
        }
        let mut mirrors = BTreeMap::new();
        for file in files.iter().rev() {
            mirrors.extend(file.mirror.clone());
        }
        let mut gc = policy::Table::default();
        for file in &files {
            gc.fill(&file.gc);
        }
        let ci_system = match set("GITHUB_ACTIONS").map(String::as_str) {
            Some("true") => Some(System::Github),
            _ => set("GITLAB_CI")
                .filter(|value| *value == "true")
                .map(|_| System::Gitlab),
        };
        let directories = |pick: fn(&File) -> &Vec<PathBuf>, name: &str| {
            let mut found: Vec<Directory> = files
                .iter()
                .flat_map(|file| pick(file).clone())
                .map(Directory::from)
                .collect();
            if current.counts() {
                let directory = current.as_directory();
                let path = directory.path.join(name);
                found.push(Directory { path, ..directory });
            }
            found.push(user_dir.join(name).into());
            found.push(Path::new("/etc/rockenv").join(name).into());
            found
        };
        Ok(Self {
            home,
            engine: set("ROCKENV_ENGINE")
                .cloned()
                .or_else(|| first(|file| file.engine.clone())),
            sockets: Sockets {
                docker: set("DOCKER_HOST").cloned(),
                // Of the effective user: `sudo docker` uses root's contexts too.
                contexts: Contexts {
                    directory: set("DOCKER_CONFIG").map(PathBuf::from).or_else(|| {
                        let home = set("HOME")?;
                        Some(Path::new(home).join(".docker"))
                    }),
                    name: set("DOCKER_CONTEXT").cloned(),
                },
                podman: set("CONTAINER_HOST")
                    .cloned()
                    .unwrap_or_else(|| podman_socket(set("XDG_RUNTIME_DIR"))),
            },
            ssh: set("ROCKENV_SSH").map_or_else(
                || vec!["ssh".to_owned()],
                |text| shlex::split(text).unwrap_or_default(),
            ),
            jobs,
            idle: first(|file| file.idle.clone()).map_or(Ok(IDLE), |text| parse_idle(&text))?,
            disk_floor,
            log_max,
            http_timeout: http_timeout.map(|text| parse_timeout(&text)).transpose()?,
            ninja: set("ROCKENV_NINJA")
                .map(PathBuf::from)
                .or_else(|| files.iter().find_map(|file| file.ninja.clone())),
            registry: set("ROCKENV_REGISTRY")
                .cloned()
                .or_else(|| first(|file| file.registry.clone())),
            pull: files.iter().find_map(|file| file.pull).unwrap_or(false),
            push: files.iter().find_map(|file| file.push).unwrap_or(false),
            reuse: files.iter().find_map(|file| file.reuse).unwrap_or_default(),
            targets,
            profile_dirs: directories(|file| &file.profile_dirs, "profiles"),
            image_dirs: directories(|file| &file.image_dirs, "images"),
            hook_dirs: directories(|file| &file.hook_dirs, "hooks"),
            current,
            user_dir,
            trusted_dirs,
            invoking_user,
            mirrors,
            authorities,
            gc,
            logins: Logins {
                files: files_of_logins,
                programs: set("PATH").map_or_else(OsString::new, OsString::from),
                home: host_home.clone(),
            },
            user,
            host_home,
            gpu_root: PathBuf::from(set("ROCKENV_GPU_ROOT").map_or("/", String::as_str)),
            terminal: Terminal {
                no_color: set("NO_COLOR").is_some(),
                force_color: set("CLICOLOR_FORCE").is_some_and(|value| value != "0"),
                term: set("TERM").cloned(),
                ci: ci_system.is_some()
                    || set("CI").is_some_and(|value| value != "false" && value != "0"),
                ci_system,
                step_summary: set("GITHUB_STEP_SUMMARY")
                    .filter(|_| ci_system == Some(System::Github))
                    .map(PathBuf::from),
            },
            proxies: environment
                .iter()
                .filter(|(name, _)| {
                    matches!(
                        name.to_ascii_lowercase().as_str(),
                        "http_proxy" | "https_proxy" | "ftp_proxy" | "no_proxy"
                    )
                })
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            environment: handed,
        })
    }

    /// Returns a variable of the caller's environment, for `env-from-host`.
    pub fn host_variable(&self, name: &str) -> Option<&str> {
        self.environment.get(name).map(String::as_str)
    }
}

/// Returns the socket of Podman's service: the system's for root, else the user's own.
fn podman_socket(runtime: Option<&String>) -> String {
    let user = nix::unistd::geteuid();
    if user.is_root() {
        return "/run/podman/podman.sock".to_owned();
    }
    let runtime = runtime.map_or_else(|| format!("/run/user/{user}"), String::clone);
    format!("{runtime}/podman/podman.sock")
}

/// Reads the configuration of the current directory, as far as it applies.
fn read_current(working: &Path, current: &mut Current) -> Result<Option<File>> {
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
    current.keep(table).try_into().map(Some).map_err(invalid)
}

fn read_file(path: &Path) -> Result<Option<File>> {
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
    toml::from_str(&text).map(Some).map_err(|error| {
        Error::invalid(format!("configuration `{}` is invalid", path.display())).source(error)
    })
}

fn parse_idle(text: &str) -> Result<Duration> {
    if text == "never" {
        return Ok(Duration::ZERO);
    }
    crate::profile::value::duration(text).map_err(|refused| {
        Error::invalid(format!("`idle` in the configuration: {}", refused.message))
            .help("\"60s\", \"5m\", or \"never\"")
    })
}

fn parse_timeout(text: &str) -> Result<Duration> {
    crate::profile::value::duration(text).map_err(|refused| {
        Error::invalid(format!("ROCKENV_HTTP_TIMEOUT: {}", refused.message))
            .help("ROCKENV_HTTP_TIMEOUT=60s rockenv up ...")
    })
}

fn parse_user(text: &str) -> Result<BuildUser> {
    let parsed = text
        .split_once(':')
        .and_then(|(uid, gid)| Some(BuildUser::new(uid.parse().ok()?, gid.parse().ok()?)));
    parsed.ok_or_else(|| {
        Error::invalid(format!("build user `{text}` is not `UID:GID`"))
            .help("ROCKENV_BUILD_USER=1000:1000 rockenv up ...")
    })
}

#[cfg(test)]
mod tests;
