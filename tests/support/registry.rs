//! A real registry on loopback, and hand-written requests to it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::server::Server;

/// An answer to one request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

/// Sends one request; `head` contains further header lines, each with its line end.
pub(crate) fn http(host: &str, method: &str, path: &str, head: &str, body: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(host).expect("the registry, its files and its answers");
    let lines = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {}\r\n{head}\r\n",
        body.len()
    );
    stream
        .write_all(lines.as_bytes())
        .expect("the registry, its files and its answers");
    stream
        .write_all(body)
        .expect("the registry, its files and its answers");
    let mut answer = Vec::new();
    stream
        .read_to_end(&mut answer)
        .expect("the registry, its files and its answers");
    let end = answer
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .expect("the registry, its files and its answers");
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    Answer {
        status: head
            .split(' ')
            .nth(1)
            .expect("the registry, its files and its answers")
            .parse()
            .expect("the registry, its files and its answers"),
        head,
        body: answer[end + 4..].to_vec(),
    }
}

/// Debian's `docker-registry`, stopped when dropped.
pub(crate) struct Registry {
    _server: Server,
    pub(crate) host: String,
    /// Header lines of requests, for a registry that requires a login.
    pub(crate) head: &'static str,
    directory: tempfile::TempDir,
}

/// The password of `user` is `se:cret`.
const HTPASSWD: &str = "user:$2y$05$fXuqYPCFaTLhCBQHdC.7Yec9AzzvcEj5UYP9CoVo7frNDNPsh8DS.\n";
pub(crate) const LOGIN: &str = "dXNlcjpzZTpjcmV0";

impl Registry {
    pub(crate) fn start(login: bool) -> Self {
        let directory =
            tempfile::tempdir_in("/var/tmp").expect("the registry, its files and its answers");
        let place = directory.path().display();
        let auth = match login {
            true => format!("auth: {{ htpasswd: {{ realm: test, path: {place}/htpasswd }} }}\n"),
            false => String::new(),
        };
        fs_err::write(directory.path().join("htpasswd"), HTPASSWD)
            .expect("the registry, its files and its answers");
        let server = Server::start(|port| {
            let config = format!(
                "version: 0.1\nlog: {{ level: error, accesslog: {{ disabled: false }} }}\n\
                 storage: {{ delete: {{ enabled: true }}, filesystem: {{ rootdirectory: {place}/data }} }}\n\
                 http: {{ addr: '127.0.0.1:{port}', secret: x }}\n{auth}"
            );
            let path = directory.path().join("config.yml");
            fs_err::write(&path, config).expect("the registry, its files and its answers");
            // Dies with the test program, however that ends.
            let mut registry = Command::new("setpriv");
            registry
                .args(["--pdeathsig", "KILL", "docker-registry", "serve"])
                .arg(&path)
                .stdout(
                    fs_err::File::create(directory.path().join("log"))
                        .expect("the registry, its files and its answers")
                        .into_file(),
                )
                .stderr(Stdio::null());
            registry
        });
        let head = match login {
            true => "authorization: Basic dXNlcjpzZTpjcmV0\r\n",
            false => "",
        };
        Self {
            host: format!("127.0.0.1:{}", server.port),
            _server: server,
            head,
            directory,
        }
    }

    /// Flips a bit of a blob; returns its file and the original content.
    pub(crate) fn spoil(&self, sha256: &str) -> (PathBuf, Vec<u8>) {
        let what = "the registry's files";
        let blobs = self.data().join("docker/registry/v2/blobs/sha256");
        let file = blobs.join(&sha256[..2]).join(sha256).join("data");
        let good = fs_err::read(&file).expect(what);
        let mut bad = good.clone();
        bad[good.len() / 2] ^= 1;
        fs_err::write(&file, bad).expect(what);
        (file, good)
    }

    /// Returns the directory of its blobs and tags.
    pub(crate) fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// Returns the paths of the requests with this method that it has answered so far.
    pub(crate) fn answered(&self, method: &str) -> Vec<String> {
        let log = fs_err::read_to_string(self.directory.path().join("log"))
            .expect("the registry, its files and its answers");
        let requests = log.lines().filter_map(|line| {
            let request = line.split('"').nth(1)?;
            request
                .strip_prefix(method)?
                .strip_prefix(' ')
                .map(str::to_owned)
        });
        requests
            .map(|request| {
                request
                    .split([' ', '?'])
                    .next()
                    .unwrap_or_default()
                    .to_owned()
            })
            .collect()
    }
}
