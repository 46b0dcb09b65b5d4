//! Repositories of a test's own, served on this machine's loopback: git reads none of another user's from the disk.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::run::wait_until;

/// git's daemon, which ends with it.
#[derive(Debug)]
pub(crate) struct Daemon {
    port: u16,
    child: Child,
}

impl Daemon {
    /// Serves every repository below `directory`, those made later too.
    pub(crate) fn start(directory: &Path) -> Self {
        // Free a moment ago; git's daemon cannot be asked which port it took.
        let port = {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            listener.local_addr().expect("its number").port()
        };
        let path = git(Path::new("/"), &["--exec-path"]);
        // Not through `git`, which would be killed in its place.
        let child = Command::new(Path::new(&path).join("git-daemon"))
            .args(["--export-all", "--reuseaddr", "--listen=127.0.0.1"])
            .arg(format!("--port={port}"))
            .arg(format!("--base-path={}", directory.display()))
            .stderr(Stdio::null())
            .spawn()
            .expect("git's daemon");
        wait_until("git's daemon listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Self { port, child }
    }

    /// Returns the port that it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Makes a repository on branch `main` with one file in one commit, and returns that. Any commit of it can be fetched.
#[track_caller]
pub(crate) fn repository(directory: &Path, file: &str, text: &str) -> String {
    fs_err::create_dir_all(directory).expect("a directory for the repository");
    git(directory, &["init", "--quiet", "--initial-branch=main"]);
    git(
        directory,
        &["config", "uploadpack.allowAnySHA1InWant", "true"],
    );
    fs_err::write(directory.join(file), text).expect("a file of the repository");
    git(directory, &["add", file]);
    git(directory, &["commit", "--quiet", "-m", "first"]);
    git(directory, &["rev-parse", "HEAD"])
}

/// Runs git as a committer of no consequence, and returns what it says.
#[track_caller]
pub(crate) fn git(directory: &Path, arguments: &[&str]) -> String {
    let out = Command::new("git")
        .args(["-c", "user.name=t", "-c", "user.email=t@example.org"])
        .args(["-c", "protocol.file.allow=always", "-c", "safe.directory=*"])
        .args(arguments)
        .current_dir(directory)
        .output()
        .expect("git");
    assert!(out.status.success(), "git {arguments:?}: {out:?}");
    String::from_utf8(out.stdout)
        .expect("UTF-8")
        .trim()
        .to_owned()
}
