//! A test's own repositories, served on loopback: git refuses to read another user's repositories from the disk.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::run::wait_until;

/// git's daemon, killed when dropped.
#[derive(Debug)]
pub(crate) struct Daemon {
    port: u16,
    child: Child,
}

impl Daemon {
    /// Serves every repository below `directory`, including those created later.
    pub(crate) fn start(directory: &Path) -> Self {
        // The port was free a moment ago; git's daemon cannot report one that it chose itself.
        let port = {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            listener.local_addr().expect("its number").port()
        };
        let path = git(Path::new("/"), &["--exec-path"]);
        // Started directly: killing a `git` wrapper would leave the daemon running.
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

    /// Returns the port that the daemon listens on.
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

/// Makes a repository on branch `main` with one commit of one file, and returns the commit. All commits can be fetched.
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

/// Runs git with a dummy committer, and returns its output.
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
