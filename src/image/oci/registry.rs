//! Owns talking to a registry about one repository: address, mirror, login and requests.

mod reason;
mod tags;
mod upload;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue,
};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use sha2::{Digest as _, Sha256};

use super::credentials::{self, Login};
use super::endpoint::Endpoint;
use super::manifest::{self, Descriptor, MANIFEST_TYPES, MAX_MANIFEST, damaged, refused};
use super::reference::{DOCKER_HUB, Reference, is_loopback, sha256};
use super::retry::{self, Notice, Patience};
use super::token_server::{self, TokenRequest, TokenServer};
use crate::image::fetch::{self, Body, ByteCounter, Download, Size};
use crate::image::{BuildProgress, TaskContext, certificates};
use crate::sys::checksum::Algorithm;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::ui::size;
use reason::error_message;
pub(crate) use upload::{Tagged, Upload};

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
    Delete,
}

#[derive(Debug, Default)]
pub(crate) struct Attempts {
    patience: Patience,
    logged_in: bool,
}

pub(crate) struct Registry {
    /// Host and repository, for messages.
    name: String,
    host: String,
    /// The `[mirror]` entry that names the host, or could name it.
    mirror: String,
    repository: String,
    /// `https://host/v2/repository`.
    base: Url,
    client: reqwest::Client,
    /// Client for layers, whose transfer has no time limit.
    uploads: reqwest::Client,
    login: Option<Login>,
    operation: Operation,
    /// The current authorization, once the registry has asked for a login.
    authorization: Mutex<Option<Granted>>,
    /// Whether the registry refuses streams of unknown digest and size.
    wants_digests: AtomicBool,
    notice: Notice,
}

/// The authorization of requests since the last login.
#[derive(Clone)]
struct Granted {
    header: HeaderValue,
    since: Instant,
    /// The server that issued the token. `None` for a password.
    server: Option<TokenServer>,
}

/// Maximum age of a token before a layer is sent. The shortest-lived tokens last a minute.
const FRESH: Duration = Duration::from_secs(30);

fn header(response: &Response, name: &str) -> Option<String> {
    let value = response.headers().get(name)?;
    value.to_str().ok().map(str::to_owned)
}

/// Returns the manifest's digest according to a response.
fn digest_of(response: &Response) -> Option<String> {
    let digest = header(response, "docker-content-digest")?;
    sha256(&digest).map(str::to_owned)
}

/// Returns the scope of a token: what most requests of an operation need, and what the registry asks for besides. Only
/// the registry knows the action for a removal: Quay refuses `delete`, and others want it. Azure's registry wants its
/// own action for a list of tags. A token for a pull never allows a change.
fn scope(repository: &str, operation: Operation, asked: &str) -> String {
    let repository = format!("repository:{repository}:");
    let mut actions = match operation {
        Operation::Pull | Operation::Delete => vec!["pull"],
        Operation::Push => vec!["pull", "push"],
    };
    let asked = asked.split(' ');
    let asked = asked.filter_map(|scope| scope.strip_prefix(&repository));
    for action in asked.flat_map(|all| all.split(',')) {
        let changes = ["push", "delete", "*"].contains(&action);
        let is_allowed = !changes || operation != Operation::Pull;
        if is_allowed && !actions.contains(&action) {
            actions.push(action);
        }
    }
    repository + &actions.join(",")
}

fn failed(verb: &str, what: &str) -> Error {
    unavailable!("cannot {verb} `{what}`")
        .help("run the command again later, or use another registry")
}

impl Granted {
    /// Returns whether the authorization may expire during a request that cannot be repeated. Passwords do not expire.
    fn is_stale(&self, now: Instant) -> bool {
        let is_token = self.header.as_bytes().starts_with(b"Bearer ");
        is_token && now.saturating_duration_since(self.since) >= FRESH
    }
}

impl Registry {
    /// Determines the repository's address and the user's login, without sending a request.
    pub(crate) fn new(
        reference: &Reference,
        operation: Operation,
        cx: &mut TaskContext<'_>,
    ) -> Result<Self> {
        let Endpoint {
            https,
            host,
            repository,
        } = Endpoint::of(reference, cx.mirrors)?;
        // Docker Hub's registry has another name than its web site.
        let host = match host.as_str() {
            "docker.io" => DOCKER_HUB.to_owned(),
            _ => host,
        };
        let logins = cx.logins;
        let login = credentials::find(&repository, &host, &logins.files, &mut |keeper| {
            // The progress callback checks for signals.
            let progress = &mut *cx.progress;
            keeper.ask(logins, cx.cancel, &mut || {
                progress(BuildProgress::Bytes {
                    done: 0,
                    total: None,
                });
            })
        })?;
        let mirror = cx.mirrors.get(&reference.host);
        let mirror = mirror.map_or("...", String::as_str);
        let scheme = if https { "https" } else { "http" };
        let base = format!("{scheme}://{host}/v2/{repository}");
        let local = is_loopback(&host);
        Ok(Self {
            name: format!("{host}/{repository}"),
            base: Url::parse(&base)
                .map_err(|error| invalid!("`{base}` is not an address").source(error))?,
            host,
            mirror: format!("\"{}\" = \"{mirror}\"", reference.host),
            repository,
            client: fetch::client(https, local)?,
            uploads: fetch::upload_client(https, local)?,
            login,
            operation,
            authorization: Mutex::new(None),
            wants_digests: AtomicBool::new(false),
            notice: cx.notice.clone(),
        })
    }

    /// Resolves a tag; returns the document and its SHA-256.
    pub(super) async fn tag(&self, tag: &str) -> Result<(Vec<u8>, String)> {
        self.find_tag(tag).await?.ok_or_else(|| {
            not_found!("there is no image `{}:{tag}`", self.name).help("check `ref` in the recipe")
        })
    }

    /// Resolves a tag or a digest; `None` if it does not exist.
    pub(crate) async fn find_tag(&self, tag: &str) -> Result<Option<(Vec<u8>, String)>> {
        let response = self.get(RequestSubject::Manifest, tag, 0).await?;
        let asked = sha256(tag).map(str::to_owned);
        let separator = if asked.is_some() { '@' } else { ':' };
        let what = format!("{}{separator}{tag}", self.name);
        match response.status() {
            StatusCode::NOT_FOUND => return Ok(None),
            status if !status.is_success() => {
                return Err(self.answered("ask for", &what, response).await);
            }
            _ => {}
        }
        let promised = digest_of(&response);
        let kind = header(&response, CONTENT_TYPE.as_str()).unwrap_or_default();
        let bytes = Body::new(response, &what).whole(MAX_MANIFEST).await?;
        manifest::check_header(&kind, &bytes)
            .context(|| format!("cannot use the image `{what}`"))?;
        let found = hex::encode(Sha256::digest(&bytes));
        // If the caller asked for a digest, that digest is authoritative, whatever the registry says.
        let mut expected = asked.into_iter().chain(promised);
        match expected.find(|expected| *expected != found) {
            Some(expected) => {
                let what = format!("the manifest of `{what}`");
                Err(damaged(&what, &found, &expected))
            }
            None => Ok(Some((bytes, found))),
        }
    }

    /// Returns whether a tag, or a manifest with a digest, exists.
    pub(crate) async fn has(&self, tag: &str) -> Result<bool> {
        Ok(self.head(RequestSubject::Manifest, tag).await?.is_some())
    }

    /// Returns whether a blob with this digest exists. Fails if the blob has another size.
    pub(crate) async fn has_blob(&self, sha256: &str, size: u64) -> Result<bool> {
        let name = format!("sha256:{sha256}");
        let Some(response) = self.head(RequestSubject::Blob, &name).await? else {
            return Ok(false);
        };
        let found = header(&response, CONTENT_LENGTH.as_str());
        match found.and_then(|found| found.parse::<u64>().ok()) {
            Some(found) if found != size => {
                let (who, name) = (self.who(), format!("{}@{name}", self.name));
                let help = "remove the blob from the registry and push again, or push to another repository";
                Err(invalid!("{who} has {found} bytes as `{name}`, not {size}").help(help))
            }
            // A few registries do not report the size.
            _ => Ok(true),
        }
    }

    async fn head(&self, part: RequestSubject, name: &str) -> Result<Option<Response>> {
        let response = self
            .authorized(|| self.request(Method::HEAD, part, name))
            .await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(None),
            status if status.is_success() => Ok(Some(response)),
            _ => {
                let what = format!("{}@{name}", self.name);
                Err(self.answered("ask for", &what, response).await)
            }
        }
    }

    /// Returns the error for an unsuccessful response, with the server's reason. Only the registry itself can refuse
    /// the user: no other server gets the login.
    async fn answered(&self, verb: &str, what: &str, response: Response) -> Error {
        let (status, address) = (response.status(), response.url().clone());
        let wait =
            retry::asked(&response).map(|wait| format!("it asks to wait {}", size::duration(wait)));
        let reasons: Vec<String> = error_message(response)
            .await
            .into_iter()
            .chain(wait)
            .collect();
        let reason = (!reasons.is_empty()).then(|| reasons.join("; "));
        if self.is_own(&address) {
            return self.error(verb, what, status, reason);
        }
        let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
        let server = token_server::place(&address);
        failed(verb, what).source(format!(
            "`{server}`, where the registry redirects, answered {status}{reason}"
        ))
    }

    fn error(&self, verb: &str, what: &str, status: StatusCode, reason: Option<String>) -> Error {
        let answer = match reason {
            Some(reason) => format!("the registry answered {status}: {reason}"),
            None => format!("the registry answered {status}"),
        };
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.refusal().source(answer),
            StatusCode::PAYLOAD_TOO_LARGE => failed(verb, what).source(answer).help(
                "let the proxy before the registry accept larger requests (`client_max_body_size 0;` in nginx), or use another registry",
            ),
            _ => failed(verb, what).source(answer),
        }
    }

    /// Returns a descriptor's file, downloading it if necessary.
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
            let what = format!("`sha256:{sha256}` has {size} bytes (limit {limit})");
            return Err(refused(what));
        }
        let size = Size::Exactly(size);
        self.obtain_sha256(part, sha256, size, blobs, counter).await
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
        let open = async |from| {
            let response = self.get(part, &digest, from).await?;
            match response.status() {
                // The download handles a partial file that is too long.
                StatusCode::RANGE_NOT_SATISFIABLE => Ok(response),
                status if status.is_success() => Ok(response),
                _ => Err(self.answered("download", &name, response).await),
            }
        };
        let found = fetch::download(&wanted, open, blobs, counter).await;
        found.map_err(|error| match error.kind() {
            // The default help is about a recipe's digest.
            Kind::Drift => error.help("remove it from the registry, then push it again"),
            _ => error,
        })
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

    /// Sends a request until the registry asks neither for a login nor for a later retry.
    async fn authorized(&self, make: impl Fn() -> RequestBuilder) -> Result<Response> {
        let mut attempts = Attempts::default();
        loop {
            let granted = self.granted().map(|granted| granted.header);
            let response = self.send_with(make(), granted).await?;
            if !self.goes_on(&response, &mut attempts).await? {
                return Ok(response);
            }
        }
    }

    /// Returns whether to send a request again: after a login when the registry asks for it or the login has expired,
    /// or after a wait when the registry asks to retry later. The target of a redirect cannot ask for a login: it could
    /// name its own token server, which would get the user's password.
    async fn goes_on(&self, response: &Response, attempts: &mut Attempts) -> Result<bool> {
        let is_own = self.is_own(response.url());
        if is_own && response.status() == StatusCode::UNAUTHORIZED && !attempts.logged_in {
            self.log_in(Some(response.headers())).await?;
            attempts.logged_in = true;
            return Ok(true);
        }
        let patience = &mut attempts.patience;
        let waits = patience.waits(response, &self.who(), &self.notice).await;
        // The login may have expired while waiting.
        attempts.logged_in &= !waits;
        Ok(waits)
    }

    /// Returns the authorization for a request to this address. An upload may go to another host, which must not get
    /// the user's password.
    fn authorization_at(&self, place: &Url) -> Option<HeaderValue> {
        let granted = self.granted().filter(|_| self.is_own(place));
        granted.map(|granted| granted.header)
    }

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
            // reqwest drops the header when a redirect leads to another host.
            request = request.header(AUTHORIZATION, value);
        }
        let outcome = request.send().await;
        outcome.map_err(|error| {
            let error = error.without_url();
            let (refused, lost) = (error.is_connect(), error.is_redirect());
            let untrusted = certificates::help(&error);
            let error = unavailable!("cannot reach registry `{}`", self.host).source(error);
            if let Some(help) = untrusted {
                return error.help(help);
            }
            match (refused, lost) {
                (true, _) => error.help(format!(
                    "check the name, the network, and `{}` under [mirror] in config.toml",
                    self.mirror
                )),
                (_, true) => error.help(
                    "it redirects requests too often, or to a refused address: check the registry's address, or use another registry",
                ),
                _ => error.help("run the command again later, or use another registry"),
            }
        })
    }

    /// Logs in as a response requests, or once more; returns the authorization for further requests.
    async fn log_in(&self, answer: Option<&HeaderMap>) -> Result<HeaderValue> {
        let named = match answer {
            Some(answer) => TokenServer::named(answer, &self.base)?,
            None => None,
        };
        let login = self.login.as_ref();
        // Only a token server gets an identity token.
        let password = login.filter(|login| login.identity_token().is_none());
        // Harbor asks for a password when a token has expired, even one that needed none.
        let server = match (answer, password) {
            (Some(_), Some(_)) => named,
            _ => named.or_else(|| self.granted()?.server),
        };
        let text = match (&server, password) {
            (Some(server), _) => {
                let request = TokenRequest {
                    scope: scope(&self.repository, self.operation, &server.scope),
                    login,
                    notice: &self.notice,
                };
                let token = server.token(&self.client, &self.base, &request);
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

    fn who(&self) -> String {
        format!("registry `{}`", self.host)
    }

    fn refusal(&self) -> Error {
        let host = &self.host;
        let error = match &self.login {
            Some(login) => {
                let what = match login.identity_token() {
                    Some(_) => "the identity token".to_owned(),
                    None => format!("user `{}`", login.user),
                };
                let file = login.file.display();
                unavailable!("registry `{host}` refuses {what} (from `{file}`)")
            }
            None => {
                let verb = match self.operation {
                    Operation::Push => "push to",
                    Operation::Pull => "pull",
                    Operation::Delete => "remove from",
                };
                let name = &self.name;
                unavailable!("authentication required to {verb} `{name}` at registry `{host}`")
            }
        };
        error.help(format!("podman login {host}, or docker login {host}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_allows_what_the_registry_asks_for() {
        use Operation::{Delete, Pull, Push};
        for (operation, asked, actions) in [
            (Pull, "", "pull"),
            (Push, "repository:a/b:pull", "pull,push"),
            (Push, "repository:a/b:push,pull", "pull,push"),
            // Azure, Quay, and the distribution project's own.
            (Pull, "repository:a/b:metadata_read", "pull,metadata_read"),
            (Delete, "repository:a/b:pull,push", "pull,push"),
            (Delete, "repository:a/b:delete", "pull,delete"),
            // The placeholders of Gitea, GitHub and Amazon.
            (Pull, "*", "pull"),
            (Pull, "repository:user/image:pull", "pull"),
            (Pull, "aws", "pull"),
            (Pull, "repository:a/b/c:x repository:a/b:y", "pull,y"),
            (Pull, "repository:a/b:pull,push,delete,*", "pull"),
        ] {
            let scope = scope("a/b", operation, asked);
            assert_eq!(scope, format!("repository:a/b:{actions}"), "{asked}");
        }
    }

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
