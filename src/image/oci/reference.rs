//! Owns image references, `host/name:tag@sha256:digest`, and platforms such as `linux/amd64`.

use std::fmt;

use serde::Deserialize;

use crate::sys::address::hide_secrets;
use crate::sys::checksum::is_lower_sha256;
use crate::sys::host;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Registry, with a port if given.
    pub(crate) host: String,
    pub(crate) repository: String,
    /// Without a tag and a digest, `latest` is meant.
    pub(crate) tag: Option<String>,
    /// SHA-256 of the manifest or index, in hexadecimal digits.
    pub(crate) sha256: Option<String>,
}

impl Reference {
    /// Parses a reference. The error has a message and an example of the correct form.
    pub(crate) fn parse(text: &str) -> Result<Self, (String, String)> {
        let shown = hide_secrets(text);
        let wrong = |what: &str, help: &str| Err((format!("`{shown}` {what}"), help.to_owned()));
        let (rest, sha256) = match text.split_once('@') {
            Some((rest, digest)) => match sha256(digest) {
                Some(sha256) => (rest, Some(sha256.to_owned())),
                None => {
                    return wrong(NO_DIGEST, "ref = \"registry.example.org/name@sha256:...\"");
                }
            },
            None => (text, None),
        };
        // By convention, a first part without a dot or a port is not a host but part of the name.
        let names_host = |host: &str| host.contains(['.', ':']) || host == "localhost";
        let parts = rest.split_once('/').filter(|(host, _)| names_host(host));
        let Some((host, path)) = parts else {
            return wrong("names no registry", EXAMPLE);
        };
        if !is_host(host) {
            return wrong("has a registry that is not a host name", EXAMPLE);
        }
        let (repository, tag) = match path.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (path, None),
        };
        if !is_repository(repository) {
            return wrong(
                "has a name with other characters than a-z, 0-9 and single `.`, `_`, `-` between them",
                EXAMPLE,
            );
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return wrong("has a tag that no registry accepts", EXAMPLE);
        }
        let is_official = ["docker.io", DOCKER_HUB].contains(&host) && !repository.contains('/');
        Ok(Self {
            host: host.to_owned(),
            repository: match is_official {
                true => format!("library/{repository}"),
                false => repository.to_owned(),
            },
            tag: tag.map(str::to_owned),
            sha256,
        })
    }
}

/// Host of Docker Hub's registry. Its images are called `docker.io/...`.
pub(super) const DOCKER_HUB: &str = "index.docker.io";
pub(in crate::image) const NO_DIGEST: &str =
    "has a digest that is not `sha256:` and 64 lower-case hexadecimal digits";
const EXAMPLE: &str = "ref = \"registry.example.org/name:tag\"";

/// Returns the hexadecimal digits of `sha256:...`.
pub(crate) fn sha256(digest: &str) -> Option<&str> {
    let digits = digest.strip_prefix("sha256:")?;
    is_lower_sha256(digits).then_some(digits)
}

pub(super) fn is_host(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((name, port)) => (
                name,
                port.strip_prefix(':').or(port.is_empty().then_some("0")),
            ),
            None => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, Some("0")),
        },
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-".contains(&byte);
    let is_name = match host.starts_with('[') {
        true => name.parse::<std::net::Ipv6Addr>().is_ok(),
        false => {
            name.bytes().all(plain)
                && name.split('.').all(|label| {
                    !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
                })
        }
    };
    is_name && port.is_some_and(|port| port.parse::<u16>().is_ok())
}

/// Returns whether a host, with or without a port, is this machine. Connections to it are not encrypted.
pub(super) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost"
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

pub(super) fn is_repository(name: &str) -> bool {
    let lower = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let part = |part: &str| {
        part.bytes()
            .all(|byte| lower(byte) || b"._-".contains(&byte))
            && part.bytes().next().is_some_and(lower)
            && part.bytes().last().is_some_and(lower)
            && !part.contains("..")
    };
    name.len() <= 255 && name.split('/').all(part)
}

fn is_tag(tag: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    tag.len() <= 128
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|byte| word(byte) || b".-".contains(&byte))
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(in crate::image) struct Platform {
    #[serde(default)]
    pub(super) os: String,
    #[serde(default)]
    pub(super) architecture: String,
    pub(super) variant: Option<String>,
}

impl Platform {
    /// Returns this machine's platform in the form that recipes use.
    pub(in crate::image) fn own() -> String {
        format!("linux/{}", host::architecture())
    }

    pub(in crate::image) fn parse(text: &str) -> Option<Self> {
        let word =
            |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let parts: Vec<&str> = text.split('/').collect();
        if !parts.iter().all(word) {
            return None;
        }
        match parts.as_slice() {
            ["linux", architecture, variant @ ..] if variant.len() < 2 => Some(Self {
                os: "linux".into(),
                architecture: (*architecture).into(),
                variant: variant.first().map(|variant| (*variant).into()),
            }),
            _ => None,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        let variant = self.variant.as_ref();
        variant.map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references() {
        let digest = "ab".repeat(32);
        let full = format!("registry.example.org:5000/a/b-c_d.e:1.0@sha256:{digest}");
        let reference = Reference::parse(&full).unwrap();
        assert_eq!(
            (reference.host.as_str(), reference.repository.as_str()),
            ("registry.example.org:5000", "a/b-c_d.e")
        );
        assert_eq!(
            (reference.tag.as_deref(), reference.sha256),
            (Some("1.0"), Some(digest))
        );
        for (text, name) in [
            ("docker.io/debian:13", "library/debian"),
            ("index.docker.io/debian", "library/debian"),
            ("docker.io/rocm/dev", "rocm/dev"),
            ("quay.io/debian", "debian"),
        ] {
            assert_eq!(Reference::parse(text).unwrap().repository, name);
        }
        for good in [
            "localhost/a",
            "127.0.0.1:5000/a:b",
            "[::1]:5000/a",
            "h.example/a__b",
        ] {
            assert!(Reference::parse(good).is_ok(), "{good}");
        }
        for bad in [
            "fedora",
            "fedora:43",
            "a/b",
            "h.example/",
            "h.example//a",
            "h.example/A",
            "h.example/a:",
            "h.example/a:-",
            "h.example/a@sha256:abc",
            "h.example/a@md5:abc",
            "h.example/../a",
            "h.example/a/..",
            "h.example/a b",
            "h..example/a",
            "-h.example/a",
            "h.example:x/a",
            "user@h.example/a",
            "h.example/a?x",
            "h.example/a\n",
            "https://h.example/a",
            "[::1/a",
        ] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
        let (message, _) = Reference::parse("https://me:x@h.example/a").unwrap_err();
        assert_eq!(message, format!("`https://****@h.example/a` {NO_DIGEST}"));
    }

    #[test]
    fn loopback() {
        for (host, expected) in [
            ("localhost:5000", true),
            ("127.0.0.2", true),
            ("127.0.0.1:5000", true),
            ("[::1]:5000", true),
            ("127.0.0.1.example.org", false),
            ("localhost.example.org", false),
        ] {
            assert_eq!(is_loopback(host), expected, "{host}");
        }
    }

    #[test]
    fn platforms() {
        assert_eq!(
            Platform::parse("linux/arm64/v8").unwrap().variant.unwrap(),
            "v8"
        );
        assert!(Platform::parse(&Platform::own()).is_some());
        for bad in [
            "",
            "linux",
            "windows/amd64",
            "linux/",
            "linux/a b",
            "linux/a/b/c",
        ] {
            assert_eq!(Platform::parse(bad), None, "{bad}");
        }
    }
}
