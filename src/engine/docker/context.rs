//! Owns Docker's contexts: the endpoint chosen by `docker context use`, as Docker's own client finds it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::sys::error::{Result, if_exists};
use crate::sys::shell::quoted;
use fs_err as fs;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

/// The context for the machine's own socket.
const DEFAULT: &str = "default";

/// Where the current context comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    /// Directory of Docker's `config.json`; `None` without a home.
    pub directory: Option<PathBuf>,
    /// `DOCKER_CONTEXT`.
    pub name: Option<String>,
}

/// Part of `config.json`.
#[derive(Deserialize)]
struct Settings {
    #[serde(rename = "currentContext")]
    current: Option<String>,
}

/// Part of a context's `meta.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Meta {
    #[serde(default)]
    endpoints: BTreeMap<String, Endpoint>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Endpoint {
    host: Option<String>,
}

impl Contexts {
    /// Returns the endpoint of the current context, such as `unix:///run/user/1000/docker.sock`; `None` for the default
    /// context.
    pub fn host(&self) -> Result<Option<String>> {
        let Some(directory) = &self.directory else {
            return Ok(None);
        };
        let name = match &self.name {
            Some(name) => Some(name.clone()),
            None => read::<Settings>(&directory.join("config.json"))?
                .and_then(|settings| settings.current),
        };
        let Some(name) = name.filter(|name| !name.is_empty() && name != DEFAULT) else {
            return Ok(None);
        };
        let digest = hex::encode(Sha256::digest(name.as_bytes()));
        let contexts = directory.join("contexts/meta");
        let path = contexts.join(digest).join("meta.json");
        let mut meta = read::<Meta>(&path)?.ok_or_else(|| {
            unavailable!("there is no Docker context `{name}`")
                .source(format!("no `{}`", path.display()))
                .help("docker context use default")
        })?;
        let endpoint = meta.endpoints.remove("docker");
        let host = endpoint.and_then(|endpoint| endpoint.host);
        host.map(Some).ok_or_else(|| {
            unavailable!("Docker context `{name}` names no endpoint")
                .help(format!("docker context inspect {}", quoted(&name)))
        })
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let Some(bytes) = if_exists(fs::read(path))? else {
        return Ok(None);
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| {
        invalid!("`{}` is damaged", path.display())
            .source(error)
            .help("DOCKER_HOST=unix:///run/docker.sock rockenv ...")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_endpoint_is_that_of_the_context_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: Option<&str>| Contexts {
            directory: Some(directory.path().to_owned()),
            name: name.map(str::to_owned),
        };
        let settings = |text: &str| fs::write(directory.path().join("config.json"), text).unwrap();
        assert_eq!(at(None).host().unwrap(), None);
        settings("{\"auths\": {}}");
        assert_eq!(at(None).host().unwrap(), None);
        settings("{\"currentContext\": \"mine\"}");
        let error = at(None).host().unwrap_err();
        assert_has!(error.message(), "no Docker context `mine`");
        // `printf mine | sha256sum`, as `docker context create` names it.
        let digest = "3fd30542fe3f61b14bd4a4b2dc0b6fb30fa6f63ebce52dd1778aaa8c4dc02cff";
        let place = directory.path().join("contexts/meta").join(digest);
        fs::create_dir_all(&place).unwrap();
        let write = |text: &str| fs::write(place.join("meta.json"), text).unwrap();
        write(
            r#"{"Name":"mine","Metadata":{},"Endpoints":{"docker":{"Host":"unix:///x/d.sock","SkipTLSVerify":false}}}"#,
        );
        let host = Some("unix:///x/d.sock".to_owned());
        assert_eq!(at(None).host().unwrap(), host);
        // The variable wins over the file, and `default` means no endpoint.
        assert_eq!(at(Some("default")).host().unwrap(), None);
        settings("{}");
        assert_eq!(at(None).host().unwrap(), None);
        assert_eq!(at(Some("mine")).host().unwrap(), host);
        write("{\"Name\": \"mine\", \"Endpoints\": {}}");
        assert!(at(Some("mine")).host().is_err());
        write("{");
        assert!(at(Some("mine")).host().is_err());
        assert_eq!(Contexts::default().host().unwrap(), None);
    }
}
