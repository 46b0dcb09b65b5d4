//! Owns configuration: the only reader of the process's environment, and of the configuration files.
//!
//! Precedence: flags, `ROCKENV_*`, `./rockenv.toml` if `trust` allows it, the user's `rockenv/config.toml`,
//! `/etc/rockenv/config.toml`.
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::engine::BuildUser;
use crate::engine::choose::Sockets;
use crate::image::Logins;
use crate::image::certificates::Authorities;
use crate::plan::gc::policy;
use crate::profile::value;
use crate::store::history::Reuse;
use crate::sys::account;
use crate::sys::catalog::Directory;
use crate::sys::error::{Error, Result};
use crate::sys::shell::quoted;
use crate::sys::trust::{self, Current};
use crate::ui::Integration;
use crate::ui::ci::System;

mod file;
mod settings;
pub use file::File;
use settings::Settings;

/// Returns the environment variables that rockenv reads, with their meaning, for the documentation.
pub fn variables() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = include_str!("config/variables.txt").lines();
    lines.filter_map(|line| line.split_once(": "))
}

/// Default time that a container stays for the next `exec`: long enough for a person at work.
const IDLE: Duration = Duration::from_secs(60);
/// Default free space below which a step is paused, in bytes.
const DISK_FLOOR: u64 = 1 << 30;
/// Default maximum size of a step's log, in bytes.
const LOG_MAX: u64 = 256 << 20;

/// The environment's settings for output.
#[derive(Clone, Debug, Default)]
pub struct Terminal {
    /// `NO_COLOR` is set and not empty.
    pub no_color: bool,
    /// `CLICOLOR_FORCE` is set and not `0`.
    pub force_color: bool,
    pub term: Option<String>,
    /// Features of the terminal that rockenv uses.
    pub integration: Integration,
    /// `CI` is set to a true value.
    pub ci: bool,
    pub ci_system: Option<System>,
    /// GitHub Actions' file for the job's summary.
    pub step_summary: Option<PathBuf>,
}

/// All settings; [`File`] describes those that have a key.
#[derive(Clone, Debug)]
pub struct Config {
    pub home: PathBuf,
    /// Root's store, if it exists and an ordinary user named no store.
    pub roots_store: Option<PathBuf>,
    /// The command through sudo, quoted for a shell.
    pub sudo_command: String,
    /// Root was called through sudo, and not from a shell that sudo started.
    pub through_sudo: bool,
    pub engine: Option<String>,
    pub sockets: Sockets,
    /// The ssh program and its options.
    pub ssh: Vec<String>,
    pub jobs: Option<u32>,
    pub idle: Duration,
    /// In bytes.
    pub disk_floor: u64,
    /// In bytes.
    pub log_max: u64,
    pub http_timeout: Option<Duration>,
    pub ninja: Option<PathBuf>,
    pub registry: Option<String>,
    pub pull: bool,
    pub push: bool,
    pub sign_key: Option<PathBuf>,
    pub verify_key: Option<PathBuf>,
    pub reuse: Reuse,
    pub targets: Vec<String>,
    /// Directories of profiles; the first match wins.
    pub profile_dirs: Vec<Directory>,
    pub image_dirs: Vec<Directory>,
    pub hook_dirs: Vec<Directory>,
    /// The current directory, and which of its files apply.
    pub current: Current,
    /// Directory of the invoking user's configuration.
    pub user_dir: PathBuf,
    /// Directories that are trusted without asking.
    pub trusted_dirs: Option<String>,
    pub mirrors: BTreeMap<String, String>,
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
    /// Reads the environment and the files, once. Returns the valid settings, and an error for everything that is
    /// invalid.
    pub fn read() -> Result<(Self, Vec<Error>)> {
        let (environment, mut errors) = readable(std::env::vars_os());
        // Files of a home on NFS may be readable only with the user's rights.
        account::set_caller(&settings::invoking_user(&environment)?);
        let (mut config, invalid) = Self::of(environment, std::env::current_dir().ok().as_deref())?;
        errors.extend(invalid);
        let words = std::env::args_os().skip(1);
        let words = words.map(|word| quoted(&word.to_string_lossy()).into_owned());
        let words: Vec<String> = words.collect();
        config.sudo_command = format!("sudo rockenv {}", words.join(" "));
        Ok((config, errors))
    }

    /// Does the same with the given variables and working directory.
    pub(crate) fn of(
        environment: BTreeMap<String, String>,
        working: Option<&Path>,
    ) -> Result<(Self, Vec<Error>)> {
        let mut errors = Vec::new();
        let settings = Settings::read(environment, working, &mut errors)?;
        let jobs = valid(settings.jobs(), &mut errors).flatten();
        let mut size = |name, pick: fn(&File) -> Option<String>| {
            valid(settings.parsed(name, pick, value::size, "1G"), &mut errors).flatten()
        };
        let disk_floor = size("ROCKENV_DISK_FLOOR", |file| file.disk_floor.clone());
        let log_max = size("ROCKENV_LOG_MAX", |file| file.log_max.clone());
        let timeout = |file: &File| file.http_timeout.clone();
        let timeout = settings.parsed("ROCKENV_HTTP_TIMEOUT", timeout, value::duration, "60s");
        let http_timeout = valid(timeout, &mut errors).flatten();
        let user = valid(settings.build_user(), &mut errors);
        let config = Self {
            home: settings.home(),
            roots_store: settings.roots_store(),
            sudo_command: "sudo rockenv ...".to_owned(),
            through_sudo: settings.through_sudo(),
            engine: settings.text("ROCKENV_ENGINE", |file| file.engine.clone()),
            sockets: settings.sockets(),
            ssh: settings.set("ROCKENV_SSH").map_or_else(
                || vec!["ssh".to_owned()],
                |text| shlex::split(text).unwrap_or_default(),
            ),
            jobs,
            idle: settings.idle().unwrap_or(IDLE),
            disk_floor: disk_floor.unwrap_or(DISK_FLOOR),
            log_max: log_max.unwrap_or(LOG_MAX),
            http_timeout,
            ninja: settings
                .path("ROCKENV_NINJA")
                .or_else(|| settings.first(|file| file.ninja.clone())),
            registry: settings.text("ROCKENV_REGISTRY", |file| file.registry.clone()),
            pull: settings.first(|file| file.pull).unwrap_or(false),
            push: settings.first(|file| file.push).unwrap_or(false),
            sign_key: settings.named_path("ROCKENV_SIGN_KEY", |file| file.sign_key.clone()),
            verify_key: settings.named_path("ROCKENV_VERIFY_KEY", |file| file.verify_key.clone()),
            reuse: settings.first(|file| file.reuse).unwrap_or_default(),
            targets: settings
                .first(|file| file.targets.clone())
                .unwrap_or_default(),
            profile_dirs: settings.directories(|file| &file.profile_dirs, "profiles"),
            image_dirs: settings.directories(|file| &file.image_dirs, "images"),
            hook_dirs: settings.directories(|file| &file.hook_dirs, "hooks"),
            trusted_dirs: settings.set(trust::VARIABLE).cloned(),
            mirrors: settings.mirrors(),
            gc: settings.gc(),
            logins: settings.logins(),
            user: user.unwrap_or_else(|| settings.invoking_user.clone()),
            gpu_root: settings
                .path("ROCKENV_GPU_ROOT")
                .unwrap_or_else(|| PathBuf::from("/")),
            terminal: settings.terminal(),
            proxies: settings.proxies(),
            environment: settings.environment(),
            current: settings.current,
            user_dir: settings.user_dir,
            invoking_user: settings.invoking_user,
            host_home: settings.host_home,
            authorities: settings.authorities,
        };
        Ok((config, errors))
    }

    /// Returns a variable of the caller's environment, for `env-from-host`.
    pub fn host_variable(&self, name: &str) -> Option<&str> {
        self.environment.get(name).map(String::as_str)
    }
}

/// Returns the variables that are UTF-8, and an error for each of rockenv's own that is not: without it, another store
/// or key would apply.
fn readable(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> (BTreeMap<String, String>, Vec<Error>) {
    let (mut found, mut errors) = (BTreeMap::new(), Vec::new());
    for (name, value) in variables {
        match (name.into_string(), value.into_string()) {
            (Ok(name), Ok(value)) => {
                found.insert(name, value);
            }
            (Ok(name), Err(_)) if name.starts_with("ROCKENV_") => {
                let error = invalid!("{name}: the value is not UTF-8");
                errors.push(error.help(format!("unset {name}")));
            }
            _ => {}
        }
    }
    (found, errors)
}

fn valid<T>(read: Result<T>, errors: &mut Vec<Error>) -> Option<T> {
    read.map_err(|error| errors.push(error)).ok()
}

#[cfg(test)]
mod tests;
