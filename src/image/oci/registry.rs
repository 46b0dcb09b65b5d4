//! Owns talking to one registry about one repository: its address, the mirror in its place, logging in, requests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use oci_client::RegistryOperation;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use reqwest::{Response, StatusCode};
use sha2::{Digest as _, Sha256};

use super::credentials::{self, Login};
use super::manifest::{Descriptor, MANIFEST_TYPES, MAX_MANIFEST, damaged, refused};
use super::reference::{Reference, is_host, is_repository, sha256};
use crate::error::{Error, Kind, Result};
use crate::image::download::{self, Meter, Wanted};
use crate::image::{BuildContext, Progress, hex};

/// What a request is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// An index or a manifest.
    Manifest,
    /// A configuration or a layer.
    Blob,
}

/// A repository of a registry.
pub(super) struct Registry {
    /// Host and repository, for messages.
    name: String,
    host: String,
    /// `https://host/v2/repository`.
    base: String,
    client: reqwest::Client,
    login: Option<Login>,
    auth: oci_client::Client,
    image: oci_client::Reference,
    /// What the registry asked for, as soon as it has.
    authorization: Mutex<Option<HeaderValue>>,
}

impl Registry {
    /// Finds out where the repository is and who the user is there; nothing is sent yet.
    pub(super) fn new(reference: &Reference, cx: &mut BuildContext<'_>) -> Result<Self> {
        let Place {
            https,
            host,
            repository,
        } = Place::of(reference, cx.mirrors)?;
        let image = oci_client::Reference::with_tag(host, repository, "latest".into());
        // One registry answers at another name than its own.
        let host = image.resolve_registry().to_owned();
        let logins = cx.logins;
        let login = credentials::find(reference, &host, &logins.files, &mut |keeper| {
            // Whoever shows the progress looks for signals then.
            let tick = &mut || {
                (cx.progress)(Progress::Bytes {
                    done: 0,
                    total: None,
                });
            };
            keeper.ask(logins, cx.cancel, tick)
        })?;
        download::install_cryptography();
        let auth = oci_client::Client::try_from(ClientConfig {
            protocol: match https {
                true => ClientProtocol::Https,
                false => ClientProtocol::HttpsExcept(vec![host.clone()]),
            },
            connect_timeout: Some(Duration::from_secs(30)),
            read_timeout: Some(Duration::from_secs(60)),
            user_agent: download::USER_AGENT,
            ..ClientConfig::default()
        })
        .map_err(|error| Error::unexpected("cannot make an HTTP client").source(error))?;
        let scheme = if https { "https" } else { "http" };
        Ok(Self {
            name: format!("{host}/{}", image.repository()),
            base: format!("{scheme}://{host}/v2/{}", image.repository()),
            host,
            client: download::client(https)?,
            login,
            auth,
            image,
            authorization: Mutex::new(None),
        })
    }

    /// Asks what a tag stands for at present; returns the document and its SHA-256.
    pub(super) async fn tag(&self, tag: &str) -> Result<(Vec<u8>, String)> {
        let mut response = self.get(Part::Manifest, tag, 0).await?;
        let what = format!("{}:{tag}", self.name);
        match response.status() {
            StatusCode::NOT_FOUND => {
                return Err(Error::not_found(format!("there is no image `{what}`"))
                    .help("check `ref` in the recipe"));
            }
            status if !status.is_success() => {
                return Err(Error::unexpected(format!("cannot ask for `{what}`"))
                    .source(format!("the registry answered {status}")));
            }
            _ => {}
        }
        let promised = response
            .headers()
            .get("docker-content-digest")
            .and_then(|digest| digest.to_str().ok())
            .and_then(sha256)
            .map(str::to_owned);
        let mut bytes = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| download::failed(&what, error))?
        {
            bytes.extend_from_slice(&chunk);
            if bytes.len() as u64 > MAX_MANIFEST {
                return Err(refused(format!(
                    "its manifest has more than {MAX_MANIFEST} bytes"
                )));
            }
        }
        let found = hex(&Sha256::digest(&bytes));
        match promised {
            Some(promised) if promised != found => Err(damaged(
                &format!("the manifest of `{what}`"),
                &found,
                &promised,
            )),
            _ => Ok((bytes, found)),
        }
    }

    /// Returns the file with what a descriptor points to, downloading it if need be.
    pub(super) async fn obtain(
        &self,
        part: Part,
        descriptor: &Descriptor,
        limit: u64,
        blobs: &Path,
        meter: &Meter,
    ) -> Result<PathBuf> {
        let limit = limit.min(descriptor.size);
        self.obtain_sha256(part, descriptor.sha256()?, limit, blobs, meter)
            .await
    }

    /// Returns the file with this SHA-256, downloading it if need be.
    pub(super) async fn obtain_sha256(
        &self,
        part: Part,
        sha256: &str,
        limit: u64,
        blobs: &Path,
        meter: &Meter,
    ) -> Result<PathBuf> {
        let digest = format!("sha256:{sha256}");
        let name = format!("{}@{digest}", self.name);
        let wanted = Wanted {
            name: &name,
            sha256,
            limit,
        };
        let open = async |from| self.get(part, &digest, from).await;
        download::obtain(&wanted, open, blobs, meter).await
    }

    /// Sends a request; logs in when the registry asks for that, and again when it forgets.
    async fn get(&self, part: Part, name: &str, from: u64) -> Result<Response> {
        let response = self.send(part, name, from, self.authorization()).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        drop(response);
        let authorization = self.log_in().await?;
        if let Ok(mut place) = self.authorization.lock() {
            place.clone_from(&authorization);
        }
        let response = self.send(part, name, from, authorization).await?;
        match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.refusal(None)),
            _ => Ok(response),
        }
    }

    fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.lock().ok()?.clone()
    }

    async fn send(
        &self,
        part: Part,
        name: &str,
        from: u64,
        authorization: Option<HeaderValue>,
    ) -> Result<Response> {
        let mut request = match part {
            Part::Manifest => self
                .client
                .get(format!("{}/manifests/{name}", self.base))
                .header(ACCEPT, MANIFEST_TYPES.join(", ")),
            Part::Blob => self.client.get(format!("{}/blobs/{name}", self.base)),
        };
        if let Some(value) = authorization {
            // reqwest takes it off where a redirect leads to another host.
            request = request.header(AUTHORIZATION, value);
        }
        let outcome = download::ranged(request, from).send().await;
        outcome.map_err(|error| {
            let error = error.without_url();
            let refused = error.is_connect();
            let error = Error::unavailable(format!("cannot reach registry `{}`", self.host)).source(error);
            match refused {
                true => error.help(format!(
                    "check `ref`, the network, and `\"{}\" = \"...\"` under [mirror] in config.toml",
                    self.host
                )),
                false => error,
            }
        })
    }

    /// Returns what to send as authorization.
    async fn log_in(&self) -> Result<Option<HeaderValue>> {
        let auth = match &self.login {
            Some(login) => RegistryAuth::Basic(login.user.clone(), login.password.clone()),
            None => RegistryAuth::Anonymous,
        };
        let token = self
            .auth
            .auth(&self.image, &auth, RegistryOperation::Pull)
            .await
            .map_err(|error| self.refusal(Some(error)))?;
        let text = match (token, &self.login) {
            (Some(token), _) => format!("Bearer {token}"),
            (None, Some(login)) => {
                use base64::Engine as _;
                let pair = format!("{}:{}", login.user, login.password);
                let pair = base64::engine::general_purpose::STANDARD.encode(pair);
                format!("Basic {pair}")
            }
            (None, None) => return Err(self.refusal(None)),
        };
        let mut value = HeaderValue::try_from(text)
            .map_err(|_| refused("its registry hands out a token that is none".into()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn refusal(&self, cause: Option<oci_client::errors::OciDistributionError>) -> Error {
        let error = match &self.login {
            Some(login) => Error::new(
                Kind::Unavailable,
                format!(
                    "registry `{}` refuses user `{}` (from `{}`)",
                    self.host,
                    login.user,
                    login.file.display()
                ),
            ),
            None => Error::unavailable(format!(
                "registry `{}` lets nobody have `{}` without logging in",
                self.host, self.name
            )),
        };
        let error = match cause {
            Some(cause) => error.source(cause),
            None => error,
        };
        error.help(format!("podman login {0}, or docker login {0}", self.host))
    }
}

/// Where requests go.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    https: bool,
    host: String,
    repository: String,
}

impl Place {
    /// Takes the user's mirror of the registry if there is one; it may say `http://`, which nothing else may but this machine.
    fn of(reference: &Reference, mirrors: &BTreeMap<String, String>) -> Result<Self> {
        let Some(mirror) = mirrors.get(&reference.host) else {
            return Ok(Self {
                https: !reference.is_loopback(),
                host: reference.host.clone(),
                repository: reference.repository.clone(),
            });
        };
        let wrong = || {
            Error::invalid(format!(
                "mirror `{}` is not an address: `{mirror}`",
                reference.host
            ))
            .help(format!(
                "\"{}\" = \"https://mirror.example.org/prefix\"",
                reference.host
            ))
        };
        let (https, rest) = match (
            mirror.strip_prefix("https://"),
            mirror.strip_prefix("http://"),
        ) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err(wrong()),
        };
        // What follows the host goes before every name.
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
            Place::of(&Reference::parse(reference).unwrap(), &mirrors)
                .map(|place| (place.https, place.host, place.repository))
        };
        let expect =
            |https, host: &str, repository: &str| (https, host.to_owned(), repository.to_owned());
        assert_eq!(
            place("h.example/a/b", None).unwrap(),
            expect(true, "h.example", "a/b")
        );
        assert_eq!(
            place("127.0.0.1:5000/a", None).unwrap(),
            expect(false, "127.0.0.1:5000", "a")
        );
        assert_eq!(
            place(
                "h.example/a/b",
                Some(("h.example", "https://m.example:8443/proxy/"))
            )
            .unwrap(),
            expect(true, "m.example:8443", "proxy/a/b")
        );
        assert_eq!(
            place("h.example/a", Some(("h.example", "http://cache"))).unwrap(),
            expect(false, "cache", "a")
        );
        assert_eq!(
            place(
                "127.0.0.1:5000/a",
                Some(("127.0.0.1:5000", "https://127.0.0.1:5000"))
            )
            .unwrap(),
            expect(true, "127.0.0.1:5000", "a")
        );
        assert_eq!(
            place("h.example/a", Some(("other.example", "http://x.example"))).unwrap(),
            expect(true, "h.example", "a")
        );
        for bad in [
            "m.example",
            "ftp://m.example",
            "https://",
            "https://m.example/Up",
            "https://u@m.example",
        ] {
            let error = place("h.example/a", Some(("h.example", bad))).unwrap_err();
            assert!(error.message().contains("not an address"), "{bad}");
        }
    }
}
