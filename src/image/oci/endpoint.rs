//! Owns the address that requests for a repository go to: its registry, or the user's mirror of it.

use std::collections::BTreeMap;

use super::reference::{Reference, is_host, is_loopback, is_repository};
use crate::sys::error::Result;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) https: bool,
    pub(super) host: String,
    pub(super) repository: String,
}

impl Endpoint {
    /// Uses the user's mirror of the registry, if configured. Only a mirror, or this machine, may be reached by
    /// `http://`.
    pub(super) fn of(reference: &Reference, mirrors: &BTreeMap<String, String>) -> Result<Self> {
        let host = &reference.host;
        let Some(mirror) = mirrors.get(host) else {
            return Ok(Self {
                https: !is_loopback(host),
                host: host.clone(),
                repository: reference.repository.clone(),
            });
        };
        // It may contain a password, which must not be shown.
        let wrong = || {
            invalid!("mirror `{host}` must be an http or https address without a login").help(
                format!("\"{host}\" = \"https://mirror.example.org/prefix\""),
            )
        };
        let (https, rest) = match mirror.split_once("://") {
            Some(("https", rest)) => (true, rest),
            Some(("http", rest)) => (false, rest),
            _ => return Err(wrong()),
        };
        // The mirror's path becomes a prefix of the repository.
        let whole = format!("{}/{}", rest.trim_end_matches('/'), reference.repository);
        match whole.split_once('/') {
            Some((host, repository)) if is_host(host) && is_repository(repository) => Ok(Self {
                https,
                host: host.to_owned(),
                repository: repository.to_owned(),
            }),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_stand_in_for_registries() {
        let place = |reference: &str, mirror: Option<(&str, &str)>| {
            let mirrors = mirror
                .into_iter()
                .map(|(k, v)| (k.into(), v.into()))
                .collect();
            Endpoint::of(&Reference::parse(reference).unwrap(), &mirrors)
                .map(|place| (place.https, place.host, place.repository))
        };
        let (one, local) = ("h.example", "127.0.0.1:5000");
        let proxy = "https://m.example:8443/proxy/";
        for (reference, mirror, expected) in [
            ("h.example/a/b", None, (true, one, "a/b")),
            ("127.0.0.1:5000/a", None, (false, local, "a")),
            (
                "h.example/a/b",
                Some((one, proxy)),
                (true, "m.example:8443", "proxy/a/b"),
            ),
            (
                "h.example/a",
                Some((one, "http://cache")),
                (false, "cache", "a"),
            ),
            (
                "127.0.0.1:5000/a",
                Some((local, "https://127.0.0.1:5000")),
                (true, local, "a"),
            ),
            (
                "h.example/a",
                Some(("other.example", "http://x.example")),
                (true, one, "a"),
            ),
        ] {
            let (https, host, repository) = place(reference, mirror).unwrap();
            assert_eq!((https, &*host, &*repository), expected);
        }
        for bad in [
            "m.example",
            "ftp://m.example",
            "https://",
            "https://m.example/Up",
            "https://u:secret@m.example",
        ] {
            let error = place("h.example/a", Some(("h.example", bad))).unwrap_err();
            let message = "mirror `h.example` must be an http or https address without a login";
            assert_eq!(error.message(), message);
        }
    }
}
