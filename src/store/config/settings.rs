//! Owns the sources of settings: the caller's variables, then the configuration files, nearest first.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Terminal;
use super::file::{self, File};
use crate::engine::BuildUser;
use crate::engine::choose::Sockets;
use crate::engine::docker::Contexts;
use crate::engine::job_slots::MOST_JOBS;
use crate::image::Logins;
use crate::image::certificates::{self, Authorities};
use crate::plan::gc::policy;
use crate::profile::value::{self, Refused};
use crate::sys::account::{self, home_of};
use crate::sys::catalog::Directory;
use crate::sys::error::{Error, Result};
use crate::sys::trust::{self, Current};
use crate::ui::Integration;
use crate::ui::ci::System;

/// Default location of root's store.
const ROOTS_STORE: &str = "/var/lib/rockenv";
/// The variable that tells ccache about a storage shared by several machines.
const CCACHE_REMOTE: &str = "CCACHE_REMOTE_STORAGE";

/// Programs that start an interactive shell.
const SHELLS: [&str; 10] = [
    "bash", "csh", "dash", "fish", "ksh", "nu", "sh", "su", "tcsh", "zsh",
];

pub(super) struct Settings {
    variables: BTreeMap<String, String>,
    /// The working directory, or `/` if there is none.
    working: PathBuf,
    pub(super) invoking_user: BuildUser,
    pub(super) host_home: PathBuf,
    pub(super) user_dir: PathBuf,
    pub(super) current: Current,
    /// Nearest first: the first one that sets a key wins.
    files: Vec<File>,
    pub(super) authorities: Option<Authorities>,
}

impl Settings {
    /// Reads the files as far as they are valid.
    pub(super) fn read(
        variables: BTreeMap<String, String>,
        working: Option<&Path>,
        errors: &mut Vec<Error>,
    ) -> Result<Self> {
        let mut settings = Self {
            invoking_user: invoking_user(&variables)?,
            variables,
            working: working.unwrap_or(Path::new("/")).to_owned(),
            host_home: PathBuf::new(),
            user_dir: PathBuf::new(),
            current: Current::default(),
            files: Vec::new(),
            authorities: None,
        };
        settings.find_home();
        let variable = settings.set("ROCKENV_CA_CERTIFICATES");
        settings.authorities = variable
            .map(|text| certificates::Written::variable(text))
            .map(|written| written.resolve(&settings.working, &settings.host_home))
            .transpose()?;
        if let Some(working) = working {
            let trusted = settings.set(trust::VARIABLE).map(String::as_str);
            let sent = settings.set(trust::DIGEST_VARIABLE).map(String::as_str);
            let mut current = Current::read(working, &settings.user_dir, trusted, sent);
            let file = file::read_current(working, &mut current, errors);
            settings.files.extend(file);
            settings.current = current;
        }
        settings.read_file(&settings.user_dir.join("config.toml"), errors)?;
        settings.read_file(Path::new("/etc/rockenv/config.toml"), errors)?;
        Ok(settings)
    }

    fn find_home(&mut self) {
        let (uid, home) = (self.invoking_user.uid, || self.path("HOME"));
        // NSS says `/` for a dynamic user of systemd, whose service sets another `HOME`. Under sudo, `HOME` is root's.
        let is_own = uid == nix::unistd::geteuid().as_raw() && !account::is_local(uid);
        let found = match is_own {
            true => home().or_else(|| home_of(uid)),
            false => home_of(uid).or_else(home),
        };
        self.host_home = found.unwrap_or_else(|| PathBuf::from("/"));
        self.user_dir = self.own("XDG_CONFIG_HOME", ".config").join("rockenv");
    }

    /// Adds a file of the user or of the system, if there is one.
    fn read_file(&mut self, path: &Path, errors: &mut Vec<Error>) -> Result<()> {
        let Some(mut file) = file::read_file(path, errors) else {
            return Ok(());
        };
        let directory = path.parent().unwrap_or(&self.working);
        let File {
            home,
            ninja,
            sign_key,
            verify_key,
            profile_dirs,
            image_dirs,
            hook_dirs,
            ..
        } = &mut file;
        let one = [home, ninja, sign_key, verify_key].into_iter().flatten();
        let many = [profile_dirs, image_dirs, hook_dirs].into_iter().flatten();
        // Never relative to the working directory, which another user may control.
        for path in one.chain(many) {
            *path = account::path_in_file(path, directory, &self.host_home);
        }
        // Another user may control the working directory, so it must not choose trusted authorities.
        if self.authorities.is_none()
            && let Some(written) = &file.ca_certificates
        {
            self.authorities = Some(written.resolve(directory, &self.host_home)?);
        }
        self.files.push(file);
        Ok(())
    }

    /// Returns a variable that is set and not empty. A relative path in `$XDG_*` is invalid by their specification: it
    /// would make files of the working directory, which may be a stranger's, the user's own configuration.
    pub(super) fn set(&self, name: &str) -> Option<&String> {
        let value = self.variables.get(name)?;
        let is_valid = value.starts_with('/') || !name.starts_with("XDG_") && !value.is_empty();
        is_valid.then_some(value)
    }

    pub(super) fn path(&self, name: &str) -> Option<PathBuf> {
        self.set(name).map(PathBuf::from)
    }

    /// Returns the value of the first file that sets it.
    pub(super) fn first<T>(&self, pick: fn(&File) -> Option<T>) -> Option<T> {
        self.files.iter().find_map(pick)
    }

    /// Returns the variable, or else the value of the first file that sets it.
    pub(super) fn text(&self, name: &str, pick: fn(&File) -> Option<String>) -> Option<String> {
        self.set(name).cloned().or_else(|| self.first(pick))
    }

    /// Returns the path that a variable names, or else that of the first configuration file that names one.
    pub(super) fn named_path(
        &self,
        name: &str,
        pick: fn(&File) -> Option<PathBuf>,
    ) -> Option<PathBuf> {
        let variable = self.path(name).map(|path| self.working.join(path));
        variable.or_else(|| self.first(pick))
    }

    /// Returns a directory of the invoking user. If root acts for another user, `$XDG_*` are root's.
    fn own(&self, name: &str, below: &str) -> PathBuf {
        let is_own = self.invoking_user.uid == nix::unistd::geteuid().as_raw();
        let named = self.path(name).filter(|_| is_own);
        named.unwrap_or_else(|| self.host_home.join(below))
    }

    pub(super) fn home(&self) -> PathBuf {
        match self.named_path("ROCKENV_HOME", |file| file.home.clone()) {
            Some(home) => self.working.join(home),
            None if is_root() => PathBuf::from(ROOTS_STORE),
            None => self.own("XDG_DATA_HOME", ".local/share").join("rockenv"),
        }
    }

    /// Returns root's store, if an ordinary user named no store and root has one.
    pub(super) fn roots_store(&self) -> Option<PathBuf> {
        let named = self.named_path("ROCKENV_HOME", |file| file.home.clone());
        let root = PathBuf::from(ROOTS_STORE);
        (!is_root() && named.is_none() && root.is_dir()).then_some(root)
    }

    pub(super) fn through_sudo(&self) -> bool {
        let command = self.set("SUDO_COMMAND");
        is_root() && command.is_some_and(|command| !is_shell(command))
    }

    pub(super) fn jobs(&self) -> Result<Option<u32>> {
        let Some(text) = self.set("ROCKENV_JOBS") else {
            return Ok(self.first(|file| file.jobs));
        };
        match text.parse::<u32>() {
            Ok(jobs) if (1..=MOST_JOBS).contains(&jobs) => Ok(Some(jobs)),
            _ => Err(
                invalid!("ROCKENV_JOBS: `{text}` is not a number from 1 to {MOST_JOBS}")
                    .help("ROCKENV_JOBS=4"),
            ),
        }
    }

    /// Parses a value like [`Settings::text`]; `example` is a valid one.
    pub(super) fn parsed<T>(
        &self,
        name: &str,
        pick: fn(&File) -> Option<String>,
        parse: fn(&str) -> std::result::Result<T, Refused>,
        example: &str,
    ) -> Result<Option<T>> {
        let parsed = self.text(name, pick).map(|text| parse(&text));
        parsed.transpose().map_err(|refused| {
            invalid!("{name}: {}", refused.message).help(format!("{name}={example}"))
        })
    }

    /// Returns how long a container stays; the files were checked when they were read.
    pub(super) fn idle(&self) -> Option<Duration> {
        idle(&self.first(|file| file.idle.clone())?).ok()
    }

    pub(super) fn build_user(&self) -> Result<BuildUser> {
        match self.text("ROCKENV_BUILD_USER", |file| file.build_user.clone()) {
            Some(text) => parse_user(&text),
            None if is_root() => Ok(self.invoking_user.clone()),
            // An ordinary user is root in the user namespace that changes the store, and in a rootless container.
            None => Ok(BuildUser::new(0, 0)),
        }
    }

    pub(super) fn mirrors(&self) -> BTreeMap<String, String> {
        let files = self.files.iter().rev();
        files.flat_map(|file| file.mirror.clone()).collect()
    }

    pub(super) fn gc(&self) -> policy::Table {
        let tables = self.files.iter().map(|file| file.gc.clone());
        tables.fold(policy::Table::default(), policy::Table::or)
    }

    /// Returns the directories that `pick` names, then those called `name` beside the configuration files.
    pub(super) fn directories(
        &self,
        pick: fn(&File) -> &Vec<PathBuf>,
        name: &str,
    ) -> Vec<Directory> {
        let files = self.files.iter().flat_map(|file| pick(file).clone());
        let mut found: Vec<Directory> = files.map(Directory::from).collect();
        if self.current.counts() {
            let directory = self.current.as_directory();
            let path = directory.path.join(name);
            found.push(Directory { path, ..directory });
        }
        found.push(self.user_dir.join(name).into());
        found.push(Path::new("/etc/rockenv").join(name).into());
        found
    }

    pub(super) fn sockets(&self) -> Sockets {
        let home = || Some(self.path("HOME")?.join(".docker"));
        Sockets {
            docker: self.set("DOCKER_HOST").cloned(),
            // Of the effective user: `sudo docker` uses root's contexts too.
            contexts: Contexts {
                directory: self.path("DOCKER_CONFIG").or_else(home),
                name: self.set("DOCKER_CONTEXT").cloned(),
            },
            podman: self
                .set("CONTAINER_HOST")
                .cloned()
                .unwrap_or_else(|| podman_socket(self.set("XDG_RUNTIME_DIR"))),
        }
    }

    pub(super) fn logins(&self) -> Logins {
        let files = match self.set("REGISTRY_AUTH_FILE") {
            Some(path) => vec![self.working.join(path)],
            None => {
                let uid = self.invoking_user.uid;
                let config = self.own("XDG_CONFIG_HOME", ".config");
                let mut files = vec![
                    PathBuf::from(format!("/run/user/{uid}/containers/auth.json")),
                    config.join("containers/auth.json"),
                    self.own("DOCKER_CONFIG", ".docker").join("config.json"),
                ];
                // Podman keeps the logins of root there without a session. Others may not even search that directory.
                if uid == 0 {
                    files.insert(1, "/run/containers/0/auth.json".into());
                }
                files
            }
        };
        Logins {
            files,
            programs: self.set("PATH").map_or_else(OsString::new, OsString::from),
            home: self.host_home.clone(),
        }
    }

    pub(super) fn terminal(&self) -> Terminal {
        let is_true = |name: &str| self.set(name).is_some_and(|value| value == "true");
        let mut systems = System::ALL.into_iter();
        let ci_system = systems.find(|system| is_true(system.variable()));
        let ci = self.set("CI");
        Terminal {
            no_color: self.set("NO_COLOR").is_some(),
            force_color: self.set("CLICOLOR_FORCE").is_some_and(|value| value != "0"),
            term: self.set("TERM").cloned(),
            integration: Integration::detect(|name| self.set(name).cloned()),
            ci: ci_system.is_some() || ci.is_some_and(|value| value != "false" && value != "0"),
            ci_system,
            step_summary: self
                .path("GITHUB_STEP_SUMMARY")
                .filter(|_| ci_system == Some(System::Github)),
        }
    }

    pub(super) fn proxies(&self) -> BTreeMap<String, String> {
        let mut proxies = self.variables.clone();
        proxies.retain(|name, _| {
            matches!(
                name.to_ascii_lowercase().as_str(),
                "http_proxy" | "https_proxy" | "ftp_proxy" | "no_proxy"
            )
        });
        proxies
    }

    pub(super) fn environment(&self) -> BTreeMap<String, String> {
        let mut environment = self.variables.clone();
        if let Some(url) = self.text(CCACHE_REMOTE, |file| file.ccache_remote.clone()) {
            environment.insert(CCACHE_REMOTE.to_owned(), url);
        }
        environment
    }
}

/// Returns the user who called rockenv, from the variables of `sudo`, `pkexec` and `doas`.
pub(super) fn invoking_user(variables: &BTreeMap<String, String>) -> Result<BuildUser> {
    let names = ["SUDO_UID", "SUDO_GID", "PKEXEC_UID", "DOAS_USER"];
    let [uid, gid, pkexec, doas] =
        names.map(|name| variables.get(name).filter(|value| !value.is_empty()));
    account::invoking_user(uid, gid, pkexec, doas)
}

/// Returns whether sudo started a shell for a person. There, a second sudo would make root the invoking user, and `up`
/// would build every step again, because the keys have the build user.
fn is_shell(command: &str) -> bool {
    let mut words = command.split(' ');
    let program = words.next().and_then(|path| path.rsplit('/').next());
    // With `-s`, the shell reads a script from standard input.
    let is_interactive = words.all(|word| word.starts_with('-') && word != "-s");
    program.is_some_and(|program| SHELLS.contains(&program)) && is_interactive
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
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

pub(super) fn idle(text: &str) -> std::result::Result<Duration, Refused> {
    match text {
        "never" => Ok(Duration::ZERO),
        _ => value::duration(text),
    }
}

pub(super) fn parse_user(text: &str) -> Result<BuildUser> {
    let parsed = text
        .split_once(':')
        .and_then(|(uid, gid)| Some(BuildUser::new(uid.parse().ok()?, gid.parse().ok()?)));
    parsed.ok_or_else(|| {
        invalid!("build user `{text}` is not `UID:GID`").help("ROCKENV_BUILD_USER=1000:1000")
    })
}
