//! The repositories and their servers on loopback: git, and http for files and an index of wheels.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use fs_err as fs;

use crate::support::git::Daemon;
use crate::support::loopfs::run;
use crate::support::wheels;

/// The servers that TheRock is fetched from.
pub(super) struct Upstream {
    pub(super) directory: PathBuf,
    pub(super) commit: String,
    pub(super) git: Daemon,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Upstream {
    pub(super) fn start(directory: &Path, built: PathBuf) -> Self {
        let http = TcpListener::bind("127.0.0.1:0").unwrap();
        let http_port = http.local_addr().unwrap().port();
        fs::create_dir_all(directory).unwrap();
        let git = Daemon::start(directory);
        let made = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/therock/make"))
            .arg(directory)
            .arg(format!("git://127.0.0.1:{}", git.port()))
            .arg(format!("http://127.0.0.1:{http_port}"))
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(made.status.success());
        // Adds wheels for pip to those that `make` put there.
        let links = directory.join("links.html");
        let mut page = fs::read_to_string(&links).unwrap();
        for wheel in fs::read_dir(wheels::pytest()).unwrap() {
            let wheel = wheel.unwrap();
            let name = wheel.file_name().into_string().unwrap();
            fs::copy(wheel.path(), directory.join(&name)).unwrap();
            writeln!(page, "<a href=\"{name}\">{name}</a>").unwrap();
        }
        fs::write(&links, page).unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (seen, files) = (requests.clone(), directory.to_owned());
        std::thread::spawn(move || {
            for client in http.incoming().flatten() {
                let path = answer(client, &files, &built);
                seen.lock().unwrap().extend(path);
            }
        });
        Self {
            directory: directory.to_owned(),
            commit: String::from_utf8(made.stdout).unwrap().trim().to_owned(),
            git,
            requests,
        }
    }

    /// Commits a file to the superproject, which leaves its submodules as they are. Returns the commit.
    pub(super) fn commit_of(&self, file: &str) -> String {
        let script = "mkdir -p \"$(dirname \"$1\")\"; echo added >\"$1\"; git add -- \"$1\"
            git -c user.name=test -c user.email=test@example.org commit --quiet --message more; git rev-parse HEAD";
        let mut command = Command::new("sh");
        command.args(["-euc", script, "sh", file]);
        let commit = run(command.current_dir(self.directory.join("TheRock")));
        commit.trim().to_owned()
    }

    pub(super) fn requests(&self, path: &str) -> usize {
        let seen = self.requests.lock().unwrap();
        seen.iter().filter(|seen| *seen == path).count()
    }
}

/// Answers one request: a file, or `/whl-multi-arch/NAME/` with links to the wheels of that name. Returns its path.
fn answer(mut client: TcpStream, files: &Path, wheels: &Path) -> Option<String> {
    let mut reader = BufReader::new(client.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut header = String::new();
    while reader.read_line(&mut header).ok()? > 2 {
        header.clear();
    }
    let (kind, body) = match path.strip_prefix("/whl-multi-arch/") {
        Some(name) if name.ends_with('/') => {
            let module = name.trim_end_matches('/').replace('-', "_");
            let mut page = String::new();
            for file in ["rocm/dist", "torch"]
                .iter()
                .flat_map(|part| fs::read_dir(wheels.join(part)).into_iter().flatten())
                .flatten()
                .map(|entry| entry.path())
            {
                let file = file.strip_prefix(wheels).unwrap().to_str().unwrap();
                let own = file.rsplit('/').next()?.split('-').next()?;
                if own == module {
                    let name = file.rsplit('/').next()?;
                    writeln!(page, "<a href=\"/wheels/{file}\">{name}</a>").ok()?;
                }
            }
            ("text/html", Some(page.into_bytes()))
        }
        _ => {
            let file = match path.strip_prefix("/wheels/") {
                Some(wheel) => wheels.join(wheel.replace("%2B", "+")),
                None => files.join(path.trim_start_matches('/')),
            };
            let kind = match file.extension().is_some_and(|end| end == "html") {
                true => "text/html",
                false => "application/octet-stream",
            };
            (kind, fs::read(file).ok())
        }
    };
    let status = if body.is_some() {
        "200 OK"
    } else {
        "404 Not Found"
    };
    let body = body.unwrap_or_default();
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    client.write_all(head.as_bytes()).ok()?;
    client.write_all(&body).ok()?;
    Some(path)
}
