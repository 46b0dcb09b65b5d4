//! A test's own repositories, served on loopback: git refuses to read another user's repositories from the disk.

use std::path::Path;
use std::process::{Command, Stdio};

use super::server::Server;

/// git's daemon, killed when dropped.
#[derive(Debug)]
pub(crate) struct Daemon(Server);

impl Daemon {
    /// Serves every repository below `directory`, including those created later.
    pub(crate) fn start(directory: &Path) -> Self {
        let path = git(Path::new("/"), &["--exec-path"]);
        Self(Server::start(|port| {
            // Started directly: killing a `git` wrapper would leave the daemon running.
            let mut daemon = Command::new(Path::new(&path).join("git-daemon"));
            daemon
                .args(["--export-all", "--reuseaddr", "--listen=127.0.0.1"])
                .arg(format!("--port={port}"))
                .arg(format!("--base-path={}", directory.display()))
                .stderr(Stdio::null());
            daemon
        }))
    }

    /// Returns the port that the daemon listens on.
    pub(crate) fn port(&self) -> u16 {
        self.0.port
    }
}

/// Makes a repository on branch `main` with one commit of one file, and returns the commit. All commits can be fetched.
#[track_caller]
pub(crate) fn repository(directory: &Path, file: &str, text: &str) -> String {
    fs_err::create_dir_all(directory).expect("a directory for the repository");
    git(directory, &["init", "--quiet"]);
    git(
        directory,
        &["config", "uploadpack.allowAnySHA1InWant", "true"],
    );
    fs_err::write(directory.join(file), text).expect("a file of the repository");
    git(directory, &["add", file]);
    git(directory, &["commit", "--quiet", "-m", "first"]);
    git(directory, &["rev-parse", "HEAD"])
}

/// Runs git with a dummy committer and without the caller's configuration, and returns its output. A hook of git that
/// runs the tests has variables that name the repository to work on.
#[track_caller]
pub(crate) fn git(directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new("git");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("GIT_") {
            command.env_remove(name);
        }
    }
    let out = command
        .args(["-c", "user.name=t", "-c", "user.email=t@example.org"])
        .args(["-c", "protocol.file.allow=always", "-c", "safe.directory=*"])
        .args(["-c", "init.defaultBranch=main"])
        .args(arguments)
        .current_dir(directory)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .expect("git");
    assert!(out.status.success(), "git {arguments:?}: {out:?}");
    String::from_utf8(out.stdout)
        .expect("UTF-8")
        .trim()
        .to_owned()
}
