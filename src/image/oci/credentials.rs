//! Owns finding the invoking user's password for a registry, in the files where `docker login` and `podman login` put it.
//!
//! Programs that such files name as keepers of passwords are not run: rockenv is root, and the files are the user's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::reference::Reference;
use crate::error::{Error, Result};

const MAX_FILE: u64 = 1 << 20;

/// A user's name and password.
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
    /// Where it was found, for messages.
    pub(super) file: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
    #[serde(default)]
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
}

/// Returns the login for an image: of its repository or what that is in, else of its registry, from the first file that
/// has one.
pub(super) fn find(reference: &Reference, host: &str, files: &[PathBuf]) -> Result<Option<Login>> {
    let mut names = vec![format!("{host}/{}", reference.repository)];
    while let Some((shorter, _)) = names.last().and_then(|name| name.rsplit_once('/')) {
        names.push(shorter.to_owned());
    }
    for path in files {
        let Some(file) = read(path)? else { continue };
        let auths: BTreeMap<&str, &Entry> = file
            .auths
            .iter()
            .map(|(key, entry)| (place(key), entry))
            .collect();
        let entry = names.iter().find_map(|name| auths.get(name.as_str()));
        if let Some(auth) = entry.and_then(|entry| entry.auth.as_deref())
            && !auth.is_empty()
        {
            return decode(auth, path).map(Some);
        }
        let helper = file
            .cred_helpers
            .iter()
            .find(|(key, _)| names.iter().any(|name| name == place(key)))
            .map(|(_, helper)| helper)
            // A store keeps what was logged in to, and notes that by an empty entry.
            .or(file.creds_store.as_ref().filter(|_| entry.is_some()));
        if let Some(helper) = helper {
            return Err(Error::unavailable(format!(
                "the password for `{host}` is kept by `docker-credential-{}`, which rockenv does not run",
                helper.escape_debug()
            ))
            .help(format!("podman login --authfile auth.json {host}, then REGISTRY_AUTH_FILE=$PWD/auth.json")));
        }
    }
    Ok(None)
}

/// Docker once wrote addresses where hosts are meant.
fn place(key: &str) -> &str {
    match key.strip_prefix("https://").or(key.strip_prefix("http://")) {
        Some(rest) => rest.split('/').next().unwrap_or(rest),
        None => key,
    }
}

fn read(path: &Path) -> Result<Option<File>> {
    use fs_err::os::unix::fs::OpenOptionsExt as _;
    use std::io::Read as _;
    let file = fs_err::OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY)
        .open(path);
    let mut text = Vec::new();
    match file {
        Ok(file) => file.take(MAX_FILE).read_to_end(&mut text)?,
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    // The parser's own words could quote what is in the file.
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        Error::invalid(format!(
            "`{}` is not a file of registry logins: see line {}",
            path.display(),
            error.line()
        ))
        .help("log in again: podman login, docker login")
    })
}

fn decode(auth: &str, path: &Path) -> Result<Login> {
    let text = STANDARD
        .decode(auth)
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    text.as_deref()
        .and_then(|text| text.split_once(':'))
        .map(|(user, password)| Login {
            user: user.to_owned(),
            // Docker pads it.
            password: password.trim_end_matches('\0').to_owned(),
            file: path.to_owned(),
        })
        .ok_or_else(|| {
            Error::invalid(format!(
                "`{}` has a login that cannot be read",
                path.display()
            ))
            .help("log in again: podman login, docker login")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(file: &str) -> Result<Option<String>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("auth.json");
        fs_err::write(&path, file).unwrap();
        let reference = Reference::parse("h.example:5000/team/app:1").unwrap();
        let files = [directory.path().join("absent"), path];
        find(&reference, &reference.host, &files).map(|login| login.map(|login| login.user))
    }

    #[test]
    fn the_closest_entry_wins() {
        let auth = |user: &str| {
            format!(
                "{{\"auth\":\"{}\"}}",
                STANDARD.encode(format!("{user}:p:w"))
            )
        };
        let file = |entries: &[(&str, &str)]| {
            let entries: Vec<_> = entries
                .iter()
                .map(|(key, user)| format!("\"{key}\":{}", auth(user)))
                .collect();
            format!("{{\"auths\":{{{}}}}}", entries.join(","))
        };
        let both = file(&[("h.example:5000", "a"), ("h.example:5000/team", "b")]);
        assert_eq!(user(&both).unwrap().as_deref(), Some("b"));
        let address = file(&[("https://h.example:5000/v1/", "c")]);
        assert_eq!(user(&address).unwrap().as_deref(), Some("c"));
        let others = file(&[("h.example", "d"), ("h.example:5000/tea", "e")]);
        assert_eq!(user(&others).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_used_is_said_without_being_shown() {
        let error = user("{\"auths\":{\"h.example:5000\":{\"auth\":\"c2VjcmV0\"}}}").unwrap_err();
        assert!(error.message().contains("cannot be read"));
        let error = user("{\"auths\": \"secret\"").unwrap_err();
        assert!(!error.chain().join(" ").contains("secret"));
        let error = user("{\"auths\":{\"h.example:5000\":{}},\"credsStore\":\"x\"}").unwrap_err();
        assert!(error.message().contains("docker-credential-x"));
        assert_eq!(user("{\"credsStore\":\"x\"}").unwrap(), None);
    }
}
