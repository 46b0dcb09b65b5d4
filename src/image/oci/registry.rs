//! Owns talking to one registry about one repository: its address, the mirror in its place, logging in, requests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use oci_client::RegistryOperation;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, LOCATION};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use sha2::{Digest as _, Sha256};

use super::credentials::{self, Login};
use super::manifest::{Descriptor, MANIFEST_TYPES, MAX_MANIFEST, damaged, refused};
use super::reference::{Reference, is_host, is_repository, sha256};
use crate::image::Logins;
use crate::image::certificates::Authorities;
use crate::image::fetch::{self, Meter, Size, Wanted};
use crate::sys::checksum::Algorithm;
use crate::sys::error::{Error, Kind, Result};

/// What a request is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    /// An index or a manifest.
    Manifest,
    /// A configuration or a layer.
    Blob,
}

/// What is needed to talk to a registry.
pub(crate) struct Access<'a> {
    /// The user's mirrors, by the host of what they stand in for.
    pub(crate) mirrors: &'a BTreeMap<String, String>,
    pub(crate) logins: &'a Logins,
    pub(crate) cancel: &'a AtomicBool,
    /// Called now and then while a program is asked for a password.
    pub(crate) tick: &'a mut dyn FnMut(),
}

/// A repository of a registry.
pub(crate) struct Registry {
    /// Host and repository, for messages.
    name: String,
    host: String,
    /// `https://host/v2/repository`.
    base: String,
    client: reqwest::Client,
    /// For layers, which take as long as they take.
    uploads: reqwest::Client,
    login: Option<Login>,
    auth: oci_client::Client,
    image: oci_client::Reference,
    operation: RegistryOperation,
    /// What the registry asked for, as soon as it has.
    authorization: Mutex<Option<Granted>>,
}

/// What requests carry since the last login.
#[derive(Clone)]
struct Granted {
    header: HeaderValue,
    since: Instant,
}

/// How old a token may be when a layer begins: the shortest-lived ones last a minute.
const FRESH: Duration = Duration::from_secs(30);

impl Granted {
    /// Returns whether it may end before a request does that begins now and cannot be sent twice. A password does not.
    fn is_stale(&self, now: Instant) -> bool {
        let is_token = self.header.as_bytes().starts_with(b"Bearer ");
        is_token && now.saturating_duration_since(self.since) >= FRESH
    }
}

impl Registry {
    /// Finds out where the repository is and who the user is there; nothing is sent yet.
    pub(crate) fn new(
        reference: &Reference,
        operation: RegistryOperation,
        access: &mut Access<'_>,
    ) -> Result<Self> {
        let Place {
            https,
            host,
            repository,
        } = Place::of(reference, access.mirrors)?;
        let image = oci_client::Reference::with_tag(host, repository, "latest".into());
        // One registry answers at another name than its own.
        let host = image.resolve_registry().to_owned();
        let logins = access.logins;
        let login = credentials::find(reference, &host, &logins.files, &mut |keeper| {
            keeper.ask(logins, access.cancel, &mut *access.tick)
        })?;
        fetch::install_cryptography();
        let auth = oci_client::Client::try_from(ClientConfig {
            protocol: match https {
                true => ClientProtocol::Https,
                false => ClientProtocol::HttpsExcept(vec![host.clone()]),
            },
            connect_timeout: Some(Duration::from_secs(30)),
            read_timeout: Some(Duration::from_secs(60)),
            user_agent: fetch::USER_AGENT,
            extra_root_certificates: Authorities::for_registries()?,
            ..ClientConfig::default()
        })
        .map_err(|error| Error::unexpected("cannot make an HTTP client").source(error))?;
        let scheme = if https { "https" } else { "http" };
        Ok(Self {
            name: format!("{host}/{}", image.repository()),
            base: format!("{scheme}://{host}/v2/{}", image.repository()),
            host,
            client: fetch::client(https)?,
            uploads: fetch::upload_client(https)?,
            login,
            auth,
            image,
            operation,
            authorization: Mutex::new(None),
        })
    }

    /// Asks what a tag stands for at present; returns the document and its SHA-256.
    pub(super) async fn tag(&self, tag: &str) -> Result<(Vec<u8>, String)> {
        self.find_tag(tag).await?.ok_or_else(|| {
            Error::not_found(format!("there is no image `{}:{tag}`", self.name))
                .help("check `ref` in the recipe")
        })
    }

    /// Asks what a tag or a digest stands for at present; nothing where there is none.
    pub(crate) async fn find_tag(&self, tag: &str) -> Result<Option<(Vec<u8>, String)>> {
        let mut response = self.get(Part::Manifest, tag, 0).await?;
        let what = format!("{}:{tag}", self.name);
        match response.status() {
            StatusCode::NOT_FOUND => return Ok(None),
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
            .map_err(|error| fetch::failed(&what, error))?
        {
            bytes.extend_from_slice(&chunk);
            if bytes.len() as u64 > MAX_MANIFEST {
                return Err(refused(format!(
                    "its manifest has more than {MAX_MANIFEST} bytes"
                )));
            }
        }
        let found = hex::encode(Sha256::digest(&bytes));
        match promised {
            Some(promised) if promised != found => Err(damaged(
                &format!("the manifest of `{what}`"),
                &found,
                &promised,
            )),
            _ => Ok(Some((bytes, found))),
        }
    }

    /// Returns whether there is a tag, or a blob of that digest.
    pub(crate) async fn has(&self, part: Part, name: &str) -> Result<bool> {
        let response = self
            .authorized(|| self.request(Method::HEAD, part, name))
            .await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(false),
            status if status.is_success() => Ok(true),
            status => Err(self.answered("ask for", &format!("{}@{name}", self.name), status)),
        }
    }

    /// Uploads a blob; its digest is asked for when all of it is sent: nothing where the connection ended before.
    pub(crate) async fn upload(
        &self,
        blob: reqwest::Body,
        digest: impl AsyncFnOnce() -> Result<Option<String>>,
    ) -> Result<()> {
        let begin = format!("{}/blobs/uploads/", self.base);
        let response = self
            .authorized(|| self.client.post(&begin).header(CONTENT_LENGTH, 0))
            .await?;
        let place = self.next_place(&begin, &response)?;
        // What is packed while it is sent cannot be sent twice, so it begins with a token that holds.
        if self.is_own(&place)
            && self
                .granted()
                .is_some_and(|old| old.is_stale(Instant::now()))
        {
            self.log_in().await?;
        }
        let sent = self
            .uploads
            .patch(place.clone())
            .header(CONTENT_TYPE, "application/octet-stream")
            .body(blob);
        let response = self.send_with(sent, self.authorization_at(&place)).await;
        if let Ok(response) = &response {
            // Whoever refuses a part of it may read no more, and what makes the rest would wait for that.
            self.accepted(response)?;
        }
        // What could not be read here is why the connection broke.
        let digest = digest().await?;
        let place = self.next_place(place.as_str(), &response?)?;
        let digest = digest.ok_or_else(|| self.answered("send to", &self.name, StatusCode::OK))?;
        let mut finish = place.clone();
        finish
            .query_pairs_mut()
            .append_pair("digest", &format!("sha256:{digest}"));
        // The token may have ended meanwhile: a layer takes as long as it takes.
        let finish = || self.uploads.put(finish.clone()).header(CONTENT_LENGTH, 0);
        let response = match self.is_own(&place) {
            true => self.authorized(finish).await?,
            false => self.send_with(finish(), None).await?,
        };
        self.accepted(&response)
    }

    /// Refuses an answer that is no success.
    fn accepted(&self, response: &Response) -> Result<()> {
        match response.status().is_success() {
            true => Ok(()),
            false => Err(self.answered("send to", &self.name, response.status())),
        }
    }

    /// Puts a document under a tag.
    pub(crate) async fn publish(&self, tag: &str, kind: &str, document: &[u8]) -> Result<()> {
        let url = format!("{}/manifests/{tag}", self.base);
        let response = self
            .authorized(|| {
                let request = self.client.put(&url).header(CONTENT_TYPE, kind);
                request.body(document.to_vec())
            })
            .await?;
        match response.status().is_success() {
            true => Ok(()),
            false => Err(self.answered(
                "send to",
                &format!("{}:{tag}", self.name),
                response.status(),
            )),
        }
    }

    /// Returns where an upload goes on.
    fn next_place(&self, asked: &str, response: &Response) -> Result<reqwest::Url> {
        self.accepted(response)?;
        let location = response.headers().get(LOCATION);
        let location = location.and_then(|value| value.to_str().ok());
        reqwest::Url::parse(asked)
            .ok()
            .zip(location)
            .and_then(|(asked, location)| asked.join(location).ok())
            .ok_or_else(|| {
                Error::unexpected(format!(
                    "registry `{}` does not say where an upload goes",
                    self.host
                ))
            })
    }

    fn answered(&self, verb: &str, what: &str, status: StatusCode) -> Error {
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.refusal(None),
            _ => Error::unexpected(format!("cannot {verb} `{what}`"))
                .source(format!("the registry answered {status}")),
        }
    }

    /// Returns the file with what a descriptor points to, downloading it if need be.
    pub(crate) async fn obtain(
        &self,
        part: Part,
        descriptor: &Descriptor,
        limit: u64,
        blobs: &Path,
        meter: &Meter,
    ) -> Result<PathBuf> {
        let (sha256, size) = (descriptor.sha256()?, descriptor.size);
        if size > limit {
            return Err(refused(format!(
                "`sha256:{sha256}` has {size} bytes (limit {limit})"
            )));
        }
        self.obtain_sha256(part, sha256, Size::Exactly(size), blobs, meter)
            .await
    }

    /// Returns the file with this SHA-256, downloading it if need be.
    pub(crate) async fn obtain_sha256(
        &self,
        part: Part,
        sha256: &str,
        size: Size,
        blobs: &Path,
        meter: &Meter,
    ) -> Result<PathBuf> {
        let digest = format!("sha256:{sha256}");
        let name = format!("{}@{digest}", self.name);
        let wanted = Wanted {
            name: &name,
            algorithm: Algorithm::Sha256,
            digest: sha256,
            size,
        };
        let open = async |from| self.get(part, &digest, from).await;
        fetch::obtain(&wanted, open, blobs, meter).await
    }

    async fn get(&self, part: Part, name: &str, from: u64) -> Result<Response> {
        self.authorized(|| fetch::ranged(self.request(Method::GET, part, name), from))
            .await
    }

    fn request(&self, method: Method, part: Part, name: &str) -> RequestBuilder {
        match part {
            Part::Manifest => self
                .client
                .request(method, format!("{}/manifests/{name}", self.base))
                .header(ACCEPT, MANIFEST_TYPES.join(", ")),
            Part::Blob => self
                .client
                .request(method, format!("{}/blobs/{name}", self.base)),
        }
    }

    /// Sends a request; logs in when the registry asks for that, and again when it forgets.
    async fn authorized(&self, make: impl Fn() -> RequestBuilder) -> Result<Response> {
        let granted = self.granted().map(|granted| granted.header);
        let response = self.send_with(make(), granted).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        drop(response);
        let granted = self.log_in().await?;
        let response = self.send_with(make(), Some(granted)).await?;
        match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.refusal(None)),
            _ => Ok(response),
        }
    }

    /// Returns what a request to there carries. An upload may go elsewhere, where the user's password is nobody's business.
    fn authorization_at(&self, place: &reqwest::Url) -> Option<HeaderValue> {
        let granted = self.granted().filter(|_| self.is_own(place));
        granted.map(|granted| granted.header)
    }

    /// Returns whether that is the registry itself.
    fn is_own(&self, place: &reqwest::Url) -> bool {
        reqwest::Url::parse(&self.base).is_ok_and(|own| own.origin() == place.origin())
    }

    fn granted(&self) -> Option<Granted> {
        self.authorization.lock().ok()?.clone()
    }

    async fn send_with(
        &self,
        mut request: RequestBuilder,
        authorization: Option<HeaderValue>,
    ) -> Result<Response> {
        if let Some(value) = authorization {
            // reqwest takes it off where a redirect leads to another host.
            request = request.header(AUTHORIZATION, value);
        }
        let outcome = request.send().await;
        outcome.map_err(|error| {
            let error = error.without_url();
            let refused = error.is_connect();
            let error = Error::unavailable(format!("cannot reach registry `{}`", self.host)).source(error);
            match refused {
                true => error.help(format!(
                    "check the name, the network, and `\"{}\" = \"...\"` under [mirror] in config.toml",
                    self.host
                )),
                false => error,
            }
        })
    }

    /// Logs in; returns what requests carry from now on.
    async fn log_in(&self) -> Result<HeaderValue> {
        let auth = match &self.login {
            Some(login) => RegistryAuth::Basic(login.user.clone(), login.password.clone()),
            None => RegistryAuth::Anonymous,
        };
        let token = self
            .auth
            .auth(&self.image, &auth, self.operation)
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
        if let Ok(mut place) = self.authorization.lock() {
            *place = Some(Granted {
                header: value.clone(),
                since: Instant::now(),
            });
        }
        Ok(value)
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
            None => {
                let verb = match self.operation {
                    RegistryOperation::Push => "push to",
                    RegistryOperation::Pull => "have",
                };
                Error::unavailable(format!(
                    "registry `{}` lets nobody {verb} `{}` without logging in",
                    self.host, self.name
                ))
            }
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
    fn a_layer_begins_with_a_token_that_holds() {
        let since = Instant::now();
        let is_stale = |header: &'static str, seconds| {
            let header = HeaderValue::from_static(header);
            let now = since + Duration::from_secs(seconds);
            Granted { header, since }.is_stale(now)
        };
        assert!(!is_stale("Bearer t", 0) && !is_stale("Bearer t", 29));
        assert!(is_stale("Bearer t", 30) && is_stale("Bearer t", 3600));
        assert!(!is_stale("Basic dTpw", 3600));
    }

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
