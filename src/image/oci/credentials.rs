//! Owns finding the invoking user's password for a registry: in the files of `docker login` and `podman login`, or
//! through a credential helper `docker-credential-NAME` that such a file names.
//!
//! If rockenv is root and the file belongs to another user, the helper runs as that user. Helpers that run as root come
//! only from the system's directories.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::reference::DOCKER_HUB;
use crate::image::Logins;
use crate::sys::account::{self, Person};
use crate::sys::error::{Result, ResultExt as _, if_exists};
use crate::sys::process::{Event, Program};
use crate::sys::userns;

const MAX_FILE: u64 = 1 << 20;
/// Maximum size of a helper's answer, in bytes.
const MAX_ANSWER: u64 = 1 << 16;
/// Message of a helper that has no password.
const NOT_FOUND: &str = "credentials not found";
const LOG_IN: &str = "log in again: podman login, docker login";

/// User name of a login that has an identity token instead of a password. `docker login` keeps one if the registry
/// issues it, as Azure's does.
const TOKEN: &str = "<token>";

#[derive(Debug)]
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
    /// The file that has the login, for messages.
    pub(super) file: PathBuf,
}

#[derive(Debug)]
pub(super) struct CredentialHelper<'a> {
    /// The helper's name without `docker-credential-`.
    name: &'a str,
    /// The registry's name in the file.
    server: &'a str,
    /// Whether the file says that the helper has a password.
    promised: bool,
    file: &'a Path,
    owner: (u32, u32),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
    #[serde(default)]
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
    #[serde(skip)]
    owner: (u32, u32),
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
    identitytoken: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// Returns the login for a repository from the first file that has one: for the repository, a parent of it, or its
/// registry. `ask` queries a helper.
pub(super) fn find(
    repository: &str,
    host: &str,
    files: &[PathBuf],
    ask: &mut dyn FnMut(&CredentialHelper<'_>) -> Result<Option<Login>>,
) -> Result<Option<Login>> {
    // `docker login` and `podman login` use different names for Docker Hub.
    let (other, server) = match host {
        DOCKER_HUB => ("docker.io", "https://index.docker.io/v1/"),
        host => (host, host),
    };
    let mut names = Vec::new();
    for host in [host, other] {
        names.push(format!("{host}/{repository}"));
        while let Some((shorter, _)) = names.last().and_then(|name| name.rsplit_once('/')) {
            names.push(shorter.to_owned());
        }
    }
    for path in files {
        let Some(file) = read(path)? else { continue };
        let auths: BTreeMap<&str, (&str, &Entry)> = file
            .auths
            .iter()
            .map(|(key, entry)| (place(key), (key.as_str(), entry)))
            .collect();
        let entry = names.iter().find_map(|name| auths.get(name.as_str()));
        if let Some((_, entry)) = entry {
            match (entry.identitytoken.as_deref(), entry.auth.as_deref()) {
                (Some(token), _) if !token.is_empty() => {
                    return Ok(Some(Login {
                        user: TOKEN.to_owned(),
                        password: token.to_owned(),
                        file: path.clone(),
                    }));
                }
                (_, Some(auth)) if !auth.is_empty() => return decode(auth, path).map(Some),
                _ => {}
            }
        }
        let helper = names.iter().find_map(|name| {
            let mut helpers = file.cred_helpers.iter();
            helpers.find(|(key, _)| name == place(key))
        });
        // A real store has an empty entry for each login. Other helpers serve all registries.
        let store = || {
            let server = entry.map_or(server, |(key, _)| key);
            Some((file.creds_store.as_ref()?, server, entry.is_some()))
        };
        let helper = helper.map(|(server, name)| (name, server.as_str(), true));
        let keeper = helper.or_else(store);
        // An empty name is Docker's way to use no helper.
        if let Some((name, server, promised)) = keeper
            && !name.is_empty()
            && let Some(login) = ask(&CredentialHelper {
                name,
                server,
                promised,
                file: path,
                owner: file.owner,
            })?
        {
            return Ok(Some(login));
        }
    }
    Ok(None)
}

impl Login {
    /// Returns the token that only the registry's token server accepts, if there is no password.
    pub(super) fn identity_token(&self) -> Option<&str> {
        (self.user == TOKEN).then_some(self.password.as_str())
    }
}

impl CredentialHelper<'_> {
    /// Asks the helper; `None` if it does not have the password.
    pub(super) fn ask(
        &self,
        logins: &Logins,
        cancel: &AtomicBool,
        tick: &mut dyn FnMut(),
    ) -> Result<Option<Login>> {
        let name = format!("docker-credential-{}", self.name);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if !self.name.bytes().all(plain) {
            let (name, file) = (self.name.escape_debug(), self.file.display());
            let error = invalid!("credential helper `{name}` not found: `{file}` names it");
            return Err(error.help(LOG_IN));
        }
        let help = format!(
            "podman login --authfile auth.json {}, then REGISTRY_AUTH_FILE=$PWD/auth.json",
            self.server
        );
        let program = match self.program(&name, &logins.programs, userns::is_root()) {
            Ok(program) => program,
            Err(_) if !self.promised => return Ok(None),
            Err(error) => return Err(error.help(help)),
        };
        let answer = program
            .arg("get")
            .inherit_env()
            .env("HOME", &logins.home)
            .input(self.server)
            // Helpers print errors on standard output.
            .allow_exit_code(1)
            .output(MAX_ANSWER, cancel, &mut |event| {
                if let Event::Tick = event {
                    tick();
                }
            })
            .context(|| format!("cannot get the password for `{}`", self.server))?;
        if let Ok(Answer { username, secret }) = serde_json::from_slice(&answer) {
            return Ok(Some(Login {
                user: username,
                password: secret,
                file: self.file.to_owned(),
            }));
        }
        let said = String::from_utf8_lossy(&answer);
        let said = said.lines().next().unwrap_or_default();
        // Output that looks like an answer may contain a password.
        if said.contains(NOT_FOUND) || (!self.promised && !said.contains('{')) {
            return Ok(None);
        }
        let error =
            unavailable!("`{name}` does not give the password for `{}`", self.server).help(help);
        Err(match said.contains('{') || said.is_empty() {
            true => error,
            false => error.source(said.to_owned()),
        })
    }

    /// Finds the helper in `programs`, the caller's search path, or in the system's directories. Root of a user
    /// namespace is an ordinary user, who owns the file as uid 0.
    fn program(&self, name: &str, programs: &OsStr, is_root: bool) -> Result<Program> {
        let need = format!("the password for `{}`", self.server);
        let (uid, gid) = self.owner;
        if is_root && uid == 0 {
            return Program::find(name, &need);
        }
        let program = match which::which_in(name, Some(programs), "/") {
            Ok(path) => Program::at(path),
            Err(_) => Program::find(name, &need)?,
        };
        Ok(match is_root {
            true => program.user(Person::of(uid, gid)),
            false => program,
        })
    }
}

/// Returns the host of a key, because older Docker versions wrote URLs. Keeps two URLs of Docker Hub that hold tokens
/// of its web site, which the registry refuses.
fn place(key: &str) -> &str {
    let Some(rest) = key.strip_prefix("https://").or(key.strip_prefix("http://")) else {
        return key;
    };
    match rest.split_once('/') {
        Some((_, "v1/access-token" | "v1/refresh-token")) => key,
        Some((host, _)) => host,
        None => rest,
    }
}

fn read(path: &Path) -> Result<Option<File>> {
    use std::io::Read as _;
    let Some(file) = if_exists(account::open(path))? else {
        return Ok(None);
    };
    let (found, mut text) = (file.metadata()?, Vec::new());
    file.take(MAX_FILE).read_to_end(&mut text)?;
    // Docker takes an empty file for one without logins.
    if text.trim_ascii().is_empty() {
        return Ok(None);
    }
    // The parser's own error could quote the file.
    let mut read: File = serde_json::from_slice(&text).map_err(|error| {
        let (path, line) = (path.display(), error.line());
        invalid!("`{path}` is not a file of registry logins: see line {line}").help(LOG_IN)
    })?;
    read.owner = (found.uid(), found.gid());
    Ok(Some(read))
}

fn decode(auth: &str, path: &Path) -> Result<Login> {
    let bytes = STANDARD.decode(auth).unwrap_or_default();
    let text = String::from_utf8(bytes).unwrap_or_default();
    let Some((user, password)) = text.split_once(':') else {
        let path = path.display();
        return Err(invalid!("`{path}` has a login that cannot be read").help(LOG_IN));
    };
    Ok(Login {
        user: user.to_owned(),
        // Docker pads passwords with NUL bytes.
        password: password.trim_end_matches('\0').to_owned(),
        file: path.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn user(file: &dyn std::fmt::Display) -> Result<Option<String>> {
        user_at("h.example:5000", file)
    }

    fn user_at(host: &str, file: &dyn std::fmt::Display) -> Result<Option<String>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("auth.json");
        fs_err::write(&path, file.to_string()).unwrap();
        let files = [directory.path().join("absent"), path];
        let mut ask = |keeper: &CredentialHelper<'_>| {
            let user = format!("{} for {} {}", keeper.name, keeper.server, keeper.promised);
            Ok((keeper.name != "empty").then(|| Login {
                user,
                password: String::new(),
                file: PathBuf::new(),
            }))
        };
        find("team/app", host, &files, &mut ask).map(|login| login.map(|login| login.user))
    }

    fn auth(user: &str) -> Value {
        json!({ "auth": STANDARD.encode(format!("{user}:p:w")) })
    }

    #[test]
    fn the_closest_entry_wins() {
        for (auths, expected) in [
            (
                json!({ "h.example:5000": auth("a"), "h.example:5000/team": auth("b") }),
                Some("b"),
            ),
            (
                json!({ "https://h.example:5000/v1/": auth("c") }),
                Some("c"),
            ),
            (
                json!({ "h.example": auth("d"), "h.example:5000/tea": auth("e") }),
                None,
            ),
        ] {
            let found = user(&json!({ "auths": auths })).unwrap();
            assert_eq!(found.as_deref(), expected, "{auths}");
        }
    }

    #[test]
    fn docker_hub_has_several_names() {
        let user = |file: &Value| {
            user_at("index.docker.io", file)
                .unwrap()
                .unwrap_or_default()
        };
        for key in [
            "docker.io",
            "index.docker.io",
            "https://index.docker.io/v1/",
        ] {
            assert_eq!(user(&json!({ "auths": { (key): auth("me") } })), "me");
            let helper = json!({ "credHelpers": { (key): "x" } });
            assert_eq!(user(&helper), format!("x for {key} true"));
        }
        let store = "x for https://index.docker.io/v1/ false";
        assert_eq!(user(&json!({ "credsStore": "x" })), store);
    }

    #[test]
    fn an_identity_token_is_a_login_without_a_password() {
        let azure = "00000000-0000-0000-0000-000000000000";
        for (token, expected) in [("t", TOKEN), ("", azure)] {
            let entry =
                json!({ "auth": STANDARD.encode(format!("{azure}:")), "identitytoken": token });
            let found = user(&json!({ "auths": { "h.example:5000": entry } })).unwrap();
            assert_eq!(found.as_deref(), Some(expected));
        }
    }

    #[test]
    fn tokens_of_docker_hub_s_web_site_are_no_login() {
        // `docker login` writes these entries for a login through the web site.
        let entries = |entry: &dyn Fn(&str) -> Value| -> Value {
            let entries = ["", "access-token", "refresh-token"]
                .map(|end| (format!("https://index.docker.io/v1/{end}"), entry(end)));
            serde_json::Map::from_iter(entries).into()
        };
        let user = |file: Value| user_at("index.docker.io", &file).unwrap().unwrap();
        let auths = entries(&|end| auth(&format!("u{end}")));
        assert_eq!(user(json!({ "auths": auths })), "u");
        let stored = json!({ "auths": entries(&|_| json!({})), "credsStore": "x" });
        assert_eq!(user(stored), "x for https://index.docker.io/v1/ true");
    }

    #[test]
    fn what_cannot_be_used_is_said_without_being_shown() {
        let secret = json!({ "auth": STANDARD.encode("secret") });
        let error = user(&json!({ "auths": { "h.example:5000": secret } })).unwrap_err();
        assert!(error.message().contains("cannot be read"));
        let error = user(&"{\"auths\": \"secret\"").unwrap_err();
        assert!(!error.chain().join(" ").contains("secret"));
    }

    #[test]
    fn only_root_of_the_machine_ignores_the_caller_s_path() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("docker-credential-x");
        fs_err::write(&path, "").unwrap();
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let helper = CredentialHelper {
            name: "x",
            server: "h.example",
            promised: true,
            file: &path,
            owner: (0, 0),
        };
        let programs = directory.path().as_os_str();
        let find = |is_root| helper.program("docker-credential-x", programs, is_root);
        assert!(find(true).is_err());
        assert!(find(false).is_ok());
    }

    #[test]
    fn programs_are_asked_that_the_file_names_for_the_registry() {
        assert_eq!(user(&"").unwrap(), None);
        let helpers = json!({ "h.example": "no", "h.example:5000": "y" });
        let entry = json!({ "https://h.example:5000/v1/": {} });
        for (file, expected) in [
            (json!({}), None),
            (
                json!({ "auths": { "h.example:5000": {} }, "credsStore": "" }),
                None,
            ),
            (
                json!({ "credHelpers": { "h.example:5000": "" }, "credsStore": "x" }),
                None,
            ),
            (json!({ "credsStore": "empty" }), None),
            (
                json!({ "auths": entry, "credsStore": "x" }),
                Some("x for https://h.example:5000/v1/ true"),
            ),
            (
                json!({ "credsStore": "x" }),
                Some("x for h.example:5000 false"),
            ),
            (
                json!({ "credHelpers": helpers, "credsStore": "x" }),
                Some("y for h.example:5000 true"),
            ),
        ] {
            assert_eq!(user(&file).unwrap().as_deref(), expected, "{file}");
        }
    }
}
