//! Owns identifying the service at a socket by its shortest answer: for longer ones Podman starts a dozen programs to
//! ask for their versions.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use bollard::ClientVersion;

use super::Flavour;

/// Limit for the answer, which does not wait for a service's other work.
const LIMIT: Duration = Duration::from_secs(30);

/// Maximum size of an answer's head, in bytes.
const MAX_HEAD: u64 = 1 << 16;

/// A service's description of itself.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ping {
    pub(super) flavour: Flavour,
    pub(super) version: String,
    pub(super) protocol: ClientVersion,
}

/// Asks the service at a socket; the error tells why there is no answer.
pub(super) fn ping(socket: &Path) -> Result<Ping, String> {
    let head = ask(socket).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "it does not answer".to_owned(),
        _ => error.to_string(),
    })?;
    let first = head.lines().next().unwrap_or_default();
    parse(&head).ok_or_else(|| match first.is_empty() {
        true => "it closed the connection".to_owned(),
        false => format!(
            "it does not answer like Docker or Podman: `{}`",
            first.escape_debug()
        ),
    })
}

/// Returns the head of the answer.
fn ask(socket: &Path) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /_ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut head = Vec::new();
    let mut answer = BufReader::new(stream.take(MAX_HEAD));
    loop {
        let length = answer.read_until(b'\n', &mut head)?;
        if length == 0 || head.ends_with(b"\r\n\r\n") {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

fn parse(head: &str) -> Option<Ping> {
    let mut lines = head.lines();
    let (_, status) = lines.next()?.strip_prefix("HTTP/1.")?.split_once(' ')?;
    if !status.starts_with("200") {
        return None;
    }
    let lines: Vec<_> = lines.filter_map(|line| line.split_once(':')).collect();
    let field = |wanted: &str| {
        let mut found = lines.iter();
        let (_, value) = found.find(|(name, _)| name.eq_ignore_ascii_case(wanted))?;
        Some(value.trim())
    };
    let (major, minor) = field("Api-Version")?.split_once('.')?;
    let protocol = ClientVersion {
        major_version: major.parse().ok()?,
        minor_version: minor.parse().ok()?,
    };
    let (flavour, version) = match field("Libpod-Api-Version") {
        Some(version) => (Flavour::Podman, Some(version)),
        None => {
            let server = field("Server").and_then(|server| server.split_once('/'));
            let version = server.and_then(|(_, version)| version.split(' ').next());
            (Flavour::Docker, version)
        }
    };
    Some(Ping {
        flavour,
        version: version.unwrap_or_default().to_owned(),
        protocol,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identify_head(head: &str) -> Option<(Flavour, String, usize)> {
        parse(head).map(|found| (found.flavour, found.version, found.protocol.minor_version))
    }

    #[test]
    fn both_say_what_they_are() {
        let docker =
            "HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nServer: Docker/20.10.24+dfsg1 (linux)\r\n\r\n";
        let found = Some((Flavour::Docker, "20.10.24+dfsg1".to_owned(), 41));
        assert_eq!(identify_head(docker), found);
        let podman = "HTTP/1.1 200 OK\r\nAPI-Version: 1.41\r\nLibpod-API-Version: 5.4.2\r\nServer: Libpod/5.4.2 (linux)\r\n\r\n";
        let found = Some((Flavour::Podman, "5.4.2".to_owned(), 41));
        assert_eq!(identify_head(podman), found);
        for other in [
            "",
            "220 mail.example.org ESMTP\r\n",
            "HTTP/1.1 500 Internal Server Error\r\nApi-Version: 1.41\r\n\r\n",
            "HTTP/1.1 200 OK\r\nServer: nginx\r\n\r\n",
        ] {
            assert_eq!(identify_head(other), None, "{other}");
        }
    }
}
