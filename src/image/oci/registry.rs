//! Owns the communication with one registry about one repository: its address, its mirror, logging in, requests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION,
};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use sha2::{Digest as _, Sha256};

use super::credentials::{self, Login};
use super::endpoint::Endpoint;
use super::manifest::{self, Descriptor, MANIFEST_TYPES, MAX_MANIFEST, damaged, refused};
use super::reference::{Reference, sha256};
use super::token_server::TokenServer;
use crate::image::Logins;
use crate::image::fetch::{self, Body, ByteCounter, Download, Size};
use crate::sys::checksum::Algorithm;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};

/// The subject of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RequestSubject {
    /// An index or a manifest.
    Manifest,
    /// A configuration or a layer.
    Blob,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Pull,
    Push,
}

/// Everything needed to access a registry.
pub(crate) struct Access<'a> {
    /// The user's mirrors, by the registry's host.
    pub(crate) mirrors: &'a BTreeMap<String, String>,
    pub(crate) logins: &'a Logins,
    pub(crate) cancel: &'a AtomicBool,
    /// Called at intervals while a credential helper runs.
    pub(crate) tick: &'a mut dyn FnMut(),
}

/// A repository of a registry.
pub(crate) struct Registry {
    /// Host and repository, for messages.
    name: String,
    host: String,
    repository: String,
    /// `https://host/v2/repository`.
    base: Url,
    client: reqwest::Client,
    /// For layers, whose transfer has no time limit.
    uploads: reqwest::Client,
    login: Option<Login>,
    operation: Operation,
    /// The current login, once the registry asked for one.
    authorization: Mutex<Option<Granted>>,
}

/// The authorization of requests since the last login.
#[derive(Clone)]
struct Granted {
    header: HeaderValue,
    since: Instant,
    /// The origin of the token, if it is one.
    server: Option<TokenServer>,
}

/// Maximum age of a token at the start of a layer: the shortest-lived ones last a minute.
const FRESH: Duration = Duration::from_secs(30);

/// How often a registry is asked for what it has just stored.
const LOOKS: usize = 3;

/// Returns a header of an answer.
fn header(response: &Response, name: &str) -> Option<String> {
    let value = response.headers().get(name)?;
    value.to_str().ok().map(str::to_owned)
}

/// Returns the manifest's digest according to an answer.
fn digest_of(response: &Response) -> Option<String> {
    let digest = header(response, "docker-content-digest")?;
    sha256(&digest).map(str::to_owned)
}

impl Granted {
    /// Returns whether it may expire during a request that cannot be repeated. A password does not.
    fn is_stale(&self, now: Instant) -> bool {
        let is_token = self.header.as_bytes().starts_with(b"Bearer ");
        is_token && now.saturating_duration_since(self.since) >= FRESH
    }
}

impl Registry {
    /// Determines the repository's address and the user's login; sends nothing yet.
    pub(crate) fn new(
        reference: &Reference,
        operation: Operation,
        access: &mut Access<'_>,
    ) -> Result<Self> {
        let Endpoint {
            https,
            host,
            repository,
        } = Endpoint::of(reference, access.mirrors)?;
        // Docker Hub's registry has another name than its web site.
        let host = match host.as_str() {
            "docker.io" => "index.docker.io".to_owned(),
            _ => host,
        };
        let logins = access.logins;
        let login = credentials::find(reference, &host, &logins.files, &mut |keeper| {
            keeper.ask(logins, access.cancel, &mut *access.tick)
        })?;
        let scheme = if https { "https" } else { "http" };
        let base = format!("{scheme}://{host}/v2/{repository}");
        Ok(Self {
            name: format!("{host}/{repository}"),
            base: Url::parse(&base).map_err(|error| {
                Error::invalid(format!("`{base}` is not an address")).source(error)
            })?,
            host,
            repository,
            client: fetch::client(https)?,
            uploads: fetch::upload_client(https)?,
            login,
            operation,
            authorization: Mutex::new(None),
        })
    }

    /// Resolves a tag; returns the document and its SHA-256.
    pub(super) async fn tag(&self, tag: &str) -> Result<(Vec<u8>, String)> {
        self.find_tag(tag).await?.ok_or_else(|| {
            Error::not_found(format!("there is no image `{}:{tag}`", self.name))
                .help("check `ref` in the recipe")
        })
    }

    /// Resolves a tag or a digest; `None` if it does not exist.
    pub(crate) async fn find_tag(&self, tag: &str) -> Result<Option<(Vec<u8>, String)>> {
        let response = self.get(RequestSubject::Manifest, tag, 0).await?;
        let what = format!("{}:{tag}", self.name);
        match response.status() {
            StatusCode::NOT_FOUND => return Ok(None),
            status if !status.is_success() => {
                return Err(Error::unavailable(format!("cannot ask for `{what}`"))
                    .source(format!("the registry answered {status}")));
            }
            _ => {}
        }
        let promised = digest_of(&response);
        let kind = header(&response, CONTENT_TYPE.as_str()).unwrap_or_default();
        let bytes = Body::new(response, &what).whole(MAX_MANIFEST).await?;
        manifest::check_header(&kind, &bytes)
            .context(|| format!("cannot use the image `{what}`"))?;
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

    /// Returns whether a tag, or a manifest of that digest, exists.
    pub(crate) async fn has(&self, tag: &str) -> Result<bool> {
        Ok(self.look(RequestSubject::Manifest, tag).await?.is_some())
    }

    /// Returns whether a blob of that digest exists; it must have that size.
    pub(crate) async fn has_blob(&self, sha256: &str, size: u64) -> Result<bool> {
        let name = format!("sha256:{sha256}");
        let Some(response) = self.look(RequestSubject::Blob, &name).await? else {
            return Ok(false);
        };
        let found = header(&response, CONTENT_LENGTH.as_str());
        match found.and_then(|found| found.parse::<u64>().ok()) {
            Some(found) if found != size => Err(Error::invalid(format!(
                "registry `{}` has {found} bytes as `{}@{name}`, not {size}",
                self.host, self.name
            ))
            .help("remove it there and push again, or push to another repository")),
            // A few registries do not report it.
            _ => Ok(true),
        }
    }

    async fn look(&self, part: RequestSubject, name: &str) -> Result<Option<Response>> {
        let response = self
            .authorized(|| self.request(Method::HEAD, part, name))
            .await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(None),
            status if status.is_success() => Ok(Some(response)),
            status => Err(self.answered("ask for", &format!("{}@{name}", self.name), status)),
        }
    }

    /// Fails unless the registry has the blob that it claims to have stored; some need a moment.
    async fn assert_stored(&self, name: &str, has: impl AsyncFn() -> Result<bool>) -> Result<()> {
        for _ in 0..LOOKS {
            if has().await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Err(Error::unavailable(format!(
            "registry `{}` claims to have stored `{}@{name}`, but does not have it",
            self.host, self.name
        ))
        .help("run the same command again, or push to another registry"))
    }

    /// Uploads a blob. Its digest and size are requested after all of it is sent; `None` if the connection ended
    /// before.
    pub(crate) async fn upload(
        &self,
        blob: reqwest::Body,
        digest: impl AsyncFnOnce() -> Result<Option<(String, u64)>>,
    ) -> Result<()> {
        let begin = format!("{}/blobs/uploads/", self.base);
        let response = self
            .authorized(|| self.client.post(&begin).header(CONTENT_LENGTH, 0))
            .await?;
        let place = self.next_place(&begin, &response)?;
        // A stream that is packed while it is sent cannot be sent twice, so begin with a valid token.
        if self.is_own(&place)
            && self
                .granted()
                .is_some_and(|old| old.is_stale(Instant::now()))
        {
            self.log_in(None).await?;
        }
        let sent = self
            .uploads
            .patch(place.clone())
            .header(CONTENT_TYPE, "application/octet-stream")
            .body(blob);
        let response = self.send_with(sent, self.authorization_at(&place)).await;
        if let Ok(response) = &response {
            // A registry that refuses early may stop reading, and the packing side would wait for that.
            self.accepted(response)?;
        }
        // A local read error is the cause of the broken connection.
        let digest = digest().await?;
        let place = self.next_place(place.as_str(), &response?)?;
        let (sha256, size) =
            digest.ok_or_else(|| self.answered("send to", &self.name, StatusCode::OK))?;
        let digest = format!("sha256:{sha256}");
        let mut finish = place.clone();
        finish.query_pairs_mut().append_pair("digest", &digest);
        // The token may have expired during the upload.
        let finish = || self.uploads.put(finish.clone()).header(CONTENT_LENGTH, 0);
        let response = match self.is_own(&place) {
            true => self.authorized(finish).await?,
            false => self.send_with(finish(), None).await?,
        };
        self.accepted(&response)?;
        self.assert_stored(&digest, async || self.has_blob(&sha256, size).await)
            .await
    }

    /// Refuses an unsuccessful answer.
    fn accepted(&self, response: &Response) -> Result<()> {
        match response.status().is_success() {
            true => Ok(()),
            false => Err(self.answered("send to", &self.name, response.status())),
        }
    }

    /// Stores a document under a tag.
    pub(crate) async fn publish(&self, tag: &str, kind: &str, document: &[u8]) -> Result<()> {
        let url = format!("{}/manifests/{tag}", self.base);
        let response = self
            .authorized(|| {
                let request = self.client.put(&url).header(CONTENT_TYPE, kind);
                request.body(document.to_vec())
            })
            .await?;
        let what = format!("{}:{tag}", self.name);
        if !response.status().is_success() {
            return Err(self.answered("send to", &what, response.status()));
        }
        let sha256 = hex::encode(Sha256::digest(document));
        if let Some(found) = digest_of(&response).filter(|found| *found != sha256) {
            let what = format!("what registry `{}` stored as `{what}`", self.host);
            return Err(damaged(&what, &found, &sha256));
        }
        let digest = format!("sha256:{sha256}");
        self.assert_stored(&digest, async || self.has(&digest).await)
            .await
    }

    /// Returns the address where an upload continues.
    fn next_place(&self, asked: &str, response: &Response) -> Result<Url> {
        self.accepted(response)?;
        let location = header(response, LOCATION.as_str());
        Url::parse(asked)
            .ok()
            .zip(location)
            .and_then(|(asked, location)| asked.join(&location).ok())
            .ok_or_else(|| {
                Error::unavailable(format!(
                    "registry `{}` does not name an address for the upload",
                    self.host
                ))
            })
    }

    fn answered(&self, verb: &str, what: &str, status: StatusCode) -> Error {
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.refusal(),
            _ => Error::unavailable(format!("cannot {verb} `{what}`"))
                .source(format!("the registry answered {status}")),
        }
    }

    /// Returns the file for a descriptor, downloading it if necessary.
    pub(crate) async fn obtain(
        &self,
        part: RequestSubject,
        descriptor: &Descriptor,
        limit: u64,
        blobs: &Path,
        counter: &ByteCounter,
    ) -> Result<PathBuf> {
        let (sha256, size) = (descriptor.sha256()?, descriptor.size);
        if size > limit {
            return Err(refused(format!(
                "`sha256:{sha256}` has {size} bytes (limit {limit})"
            )));
        }
        self.obtain_sha256(part, sha256, Size::Exactly(size), blobs, counter)
            .await
    }

    /// Returns the file with this SHA-256, downloading it if necessary.
    pub(crate) async fn obtain_sha256(
        &self,
        part: RequestSubject,
        sha256: &str,
        size: Size,
        blobs: &Path,
        counter: &ByteCounter,
    ) -> Result<PathBuf> {
        let digest = format!("sha256:{sha256}");
        let name = format!("{}@{digest}", self.name);
        let wanted = Download {
            name: &name,
            algorithm: Algorithm::Sha256,
            digest: sha256,
            size,
        };
        let open = async |from| self.get(part, &digest, from).await;
        fetch::obtain(&wanted, open, blobs, counter).await
    }

    async fn get(&self, part: RequestSubject, name: &str, from: u64) -> Result<Response> {
        self.authorized(|| fetch::ranged(self.request(Method::GET, part, name), from))
            .await
    }

    fn request(&self, method: Method, part: RequestSubject, name: &str) -> RequestBuilder {
        match part {
            RequestSubject::Manifest => self
                .client
                .request(method, format!("{}/manifests/{name}", self.base))
                .header(ACCEPT, MANIFEST_TYPES.join(", ")),
            RequestSubject::Blob => self
                .client
                .request(method, format!("{}/blobs/{name}", self.base)),
        }
    }

    /// Sends a request; logs in when the registry asks for that, and again when the login has expired.
    async fn authorized(&self, make: impl Fn() -> RequestBuilder) -> Result<Response> {
        let granted = self.granted().map(|granted| granted.header);
        let response = self.send_with(make(), granted).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        let granted = self.log_in(Some(response.headers())).await?;
        let response = self.send_with(make(), Some(granted)).await?;
        match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.refusal()),
            _ => Ok(response),
        }
    }

    /// Returns the authorization for a request to this place. An upload may go elsewhere, which must not get the
    /// user's password.
    fn authorization_at(&self, place: &Url) -> Option<HeaderValue> {
        let granted = self.granted().filter(|_| self.is_own(place));
        granted.map(|granted| granted.header)
    }

    /// Returns whether that is the registry itself.
    fn is_own(&self, place: &Url) -> bool {
        self.base.origin() == place.origin()
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
            // reqwest removes it if a redirect leads to another host.
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

    /// Logs in as an answer requests, or once more; returns the authorization for further requests.
    async fn log_in(&self, answer: Option<&HeaderMap>) -> Result<HeaderValue> {
        let server = match answer {
            Some(answer) => TokenServer::named(answer, &self.base)?,
            None => self.granted().and_then(|granted| granted.server),
        };
        let text = match (&server, &self.login) {
            (Some(server), login) => {
                let actions = match self.operation {
                    Operation::Pull => "pull",
                    Operation::Push => "pull,push",
                };
                let scope = format!("repository:{}:{actions}", self.repository);
                let token = server.token(&self.client, &self.base, &scope, login.as_ref());
                let token = token.await?.ok_or_else(|| self.refusal())?;
                format!("Bearer {token}")
            }
            (None, Some(login)) => {
                use base64::Engine as _;
                let pair = format!("{}:{}", login.user, login.password);
                let pair = base64::engine::general_purpose::STANDARD.encode(pair);
                format!("Basic {pair}")
            }
            (None, None) => return Err(self.refusal()),
        };
        let mut value = HeaderValue::try_from(text)
            .map_err(|_| refused("its registry issued an invalid token".into()))?;
        value.set_sensitive(true);
        if let Ok(mut place) = self.authorization.lock() {
            *place = Some(Granted {
                header: value.clone(),
                since: Instant::now(),
                server,
            });
        }
        Ok(value)
    }

    fn refusal(&self) -> Error {
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
                    Operation::Push => "push to",
                    Operation::Pull => "pull",
                };
                Error::unavailable(format!(
                    "authentication required to {verb} `{}` at registry `{}`",
                    self.name, self.host
                ))
            }
        };
        error.help(format!("podman login {0}, or docker login {0}", self.host))
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
            let server = None;
            let granted = Granted {
                header,
                since,
                server,
            };
            granted.is_stale(now)
        };
        assert!(!is_stale("Bearer t", 0) && !is_stale("Bearer t", 29));
        assert!(is_stale("Bearer t", 30) && is_stale("Bearer t", 3600));
        assert!(!is_stale("Basic dTpw", 3600));
    }
}
