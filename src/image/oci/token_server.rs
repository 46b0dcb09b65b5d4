//! Owns token servers. A registry refers clients without a login to its token server, which issues tokens for a
//! password or anonymously.
//!
//! As with Docker and containerd, the server may be on any host, and it gets the user's password for the registry. The
//! registry was reached over https and names the server, so the server must use https too. A password is never sent to
//! another host unencrypted.

use std::borrow::Cow;

use futures_util::stream;
use http_auth::ChallengeParser;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, WWW_AUTHENTICATE};
use reqwest::{RequestBuilder, StatusCode, Url};
use serde::Deserialize;

use super::credentials::Login;
use super::retry::{self, Notice, Patience};
use crate::image::fetch::{self, Body};
use crate::sys::error::{Error, Result};
use crate::ui::size;

/// Maximum size of a response with a token, in bytes. Registries accept no header of this size.
const MAX_ANSWER: u64 = 1 << 20;

/// The address of a registry's token server.
#[derive(Clone, Debug)]
pub(super) struct TokenServer {
    address: Url,
    service: Option<String>,
    /// The scopes that the registry asks for, separated by spaces.
    pub(super) scope: String,
}

/// The scope and login of a token request.
pub(super) struct TokenRequest<'a> {
    pub(super) scope: String,
    pub(super) login: Option<&'a Login>,
    /// Tells the user that the server asks to wait.
    pub(super) notice: &'a Notice,
}

/// A server may use either name, or both for the same token: an alias would refuse these.
#[derive(Deserialize)]
struct Answer {
    token: Option<String>,
    access_token: Option<String>,
}

fn token_in(answer: &[u8]) -> Result<String> {
    // The parser's own error could quote a token.
    let missing = || invalid!("its answer has no token");
    let answer: Answer = serde_json::from_slice(answer).map_err(|_| missing())?;
    let mut tokens = [answer.token, answer.access_token].into_iter().flatten();
    tokens.find(|token| !token.is_empty()).ok_or_else(missing)
}

impl TokenServer {
    /// Returns the token server that a registry's response names; `None` if the registry does not ask for a token.
    pub(super) fn named(answer: &HeaderMap, registry: &Url) -> Result<Option<Self>> {
        let lines = answer.get_all(WWW_AUTHENTICATE).iter();
        let mut challenges = lines
            .filter_map(|line| line.to_str().ok())
            .flat_map(ChallengeParser::new)
            .flatten();
        let bearer = challenges.find(|asked| asked.scheme.eq_ignore_ascii_case("bearer"));
        let Some(bearer) = bearer else {
            return Ok(None);
        };
        let parameter = |name: &str| {
            let mut found = bearer.params.iter();
            let found = found.find(|(found, _)| found.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_unescaped())
        };
        let realm = parameter("realm").unwrap_or_default();
        let safe = |address: &Url| match address.scheme() {
            "https" => true,
            "http" => registry.scheme() == "http",
            _ => false,
        };
        match Url::parse(&realm).ok().filter(safe) {
            Some(address) => Ok(Some(Self {
                address,
                service: parameter("service"),
                scope: parameter("scope").unwrap_or_default(),
            })),
            None => Err(invalid!(
                "registry `{}` sends logins to `{}`, which is not an {} address",
                place(registry),
                realm.escape_debug(),
                registry.scheme()
            )
            .help("the registry is misconfigured, or another server answers in its place")),
        }
    }

    /// Requests a token, and waits if the server asks to; `None` if the login is not sufficient.
    pub(super) async fn token(
        &self,
        client: &reqwest::Client,
        registry: &Url,
        request: &TokenRequest<'_>,
    ) -> Result<Option<String>> {
        let is_open = self.address.scheme() == "http" && self.address.host() != registry.host();
        if request.login.is_some() && is_open {
            return Err(invalid!(
                "registry `{}` wants its password sent to `{}` without encryption",
                place(registry),
                place(&self.address)
            )
            .help("the registry must name an https address there, or one at its own host"));
        }
        let outcome = self.ask(client, request).await;
        outcome.map_err(|error| {
            let (registry, server) = (place(registry), place(&self.address));
            let what = format!("cannot get a token for registry `{registry}` from `{server}`");
            Error::new(error.kind(), what).source(error)
        })
    }

    /// Returns the address with the parameters of a request.
    fn with_parameters(&self, request: &TokenRequest<'_>) -> Url {
        let mut address = self.address.clone();
        let mut query = address.query_pairs_mut();
        query.append_pair("scope", &request.scope);
        if let Some(service) = &self.service {
            query.append_pair("service", service);
        }
        if let Some(token) = request.login.and_then(Login::identity_token) {
            query
                .append_pair("client_id", "rockenv")
                .append_pair("grant_type", "refresh_token")
                .append_pair("refresh_token", token);
        }
        drop(query);
        address
    }

    /// Returns the request for a token. An identity token goes into a form, as OAuth 2 wants it.
    fn request(&self, client: &reqwest::Client, request: &TokenRequest<'_>) -> RequestBuilder {
        let address = self.with_parameters(request);
        let Some(login) = request.login else {
            return client.get(address);
        };
        if login.identity_token().is_none() {
            let password = Some(&login.password);
            return client.get(address).basic_auth(&login.user, password);
        }
        let form = address.query().unwrap_or_default().to_owned();
        let length = form.len();
        let parts: [std::io::Result<String>; 1] = [Ok(form)];
        client
            .post(self.address.clone())
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header(CONTENT_LENGTH, length)
            // Except for a stream, a redirect (307, 308) would send the token to another host.
            .body(reqwest::Body::wrap_stream(stream::iter(parts)))
    }

    async fn ask(
        &self,
        client: &reqwest::Client,
        request: &TokenRequest<'_>,
    ) -> Result<Option<String>> {
        let who = format!("token server `{}`", place(&self.address));
        let mut patience = Patience::default();
        let response = loop {
            let response = in_time(async {
                let sent = self.request(client, request).send().await;
                sent.map_err(|error| {
                    unavailable!("it cannot be reached").source(error.without_url())
                })
            });
            let response = response.await?;
            if !patience.waits(&response, &who, request.notice).await {
                break response;
            }
        };
        match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Ok(None),
            status if !status.is_success() => {
                let wait = retry::asked(&response);
                let wait = wait.map(|wait| format!(", and asks to wait {}", size::duration(wait)));
                let wait = wait.unwrap_or_default();
                return Err(unavailable!("it answered {status}{wait}"));
            }
            _ => {}
        }
        let answer = in_time(Body::new(response, "token").whole(MAX_ANSWER)).await?;
        token_in(&answer).map(Some)
    }
}

/// Limits the wait for a response, like for a registry.
async fn in_time<T>(answer: impl Future<Output = Result<T>>) -> Result<T> {
    let patience = fetch::patience();
    match tokio::time::timeout(patience, answer).await {
        Ok(outcome) => outcome,
        Err(_) => Err(unavailable!("no answer for {} seconds", patience.as_secs())),
    }
}

/// Returns the host and port of an address.
pub(super) fn place(address: &Url) -> Cow<'_, str> {
    let host = address.host_str().unwrap_or_default();
    match address.port() {
        Some(port) => format!("{host}:{port}").into(),
        None => host.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(registry: &str, line: &str) -> Result<Option<String>> {
        let mut answer = HeaderMap::new();
        answer.append(WWW_AUTHENTICATE, line.parse().unwrap());
        let registry = Url::parse(registry).unwrap();
        let server = TokenServer::named(&answer, &registry)?;
        Ok(server.map(|server| server.address.to_string()))
    }

    #[test]
    fn a_password_goes_into_a_header_and_an_identity_token_into_a_form() {
        let server = TokenServer {
            address: Url::parse("http://127.0.0.1:1/oauth2/token?account=a").unwrap(),
            service: Some("h.example".to_owned()),
            scope: String::new(),
        };
        let client = fetch::client(false, true).unwrap();
        let sent = |user: &str| {
            let login = Login {
                user: user.to_owned(),
                password: "p&q".to_owned(),
                file: "auth.json".into(),
            };
            let request = TokenRequest {
                scope: "repository:a/b:pull".to_owned(),
                login: Some(&login),
                notice: &Notice::default(),
            };
            let sent = server.request(&client, &request).build().unwrap();
            // Only a stream is not sent again to the target of a redirect.
            let is_stream = sent.body().is_some_and(|body| body.as_bytes().is_none());
            let is_basic = sent.headers().contains_key("authorization");
            let query = sent.url().query().unwrap_or_default().to_owned();
            let parameters = server.with_parameters(&request);
            let parameters = parameters.query().unwrap_or_default().to_owned();
            let method = sent.method().to_string();
            ((method, is_basic, is_stream), query, parameters)
        };
        let common = "account=a&scope=repository%3Aa%2Fb%3Apull&service=h.example";
        let get = ("GET".to_owned(), true, false);
        assert_eq!(sent("me"), (get, common.to_owned(), common.to_owned()));
        let form =
            format!("{common}&client_id=rockenv&grant_type=refresh_token&refresh_token=p%26q");
        let post = ("POST".to_owned(), false, true);
        assert_eq!(sent("<token>"), (post, "account=a".to_owned(), form));
    }

    #[test]
    fn a_token_has_either_name_or_both() {
        let token = |answer: &str| token_in(answer.as_bytes()).ok();
        for answer in [
            r#"{"token":"t"}"#,
            r#"{"access_token":"t","refresh_token":"r"}"#,
            r#"{"token":"t","access_token":"t","expires_in":300}"#,
            r#"{"token":"","access_token":"t"}"#,
            r#"{"token":null,"access_token":"t"}"#,
        ] {
            assert_eq!(token(answer).as_deref(), Some("t"), "{answer}");
        }
        for answer in ["{}", "", r#"{"token":""}"#, r#"{"token":1}"#] {
            assert_eq!(token(answer), None, "{answer}");
        }
    }

    #[test]
    fn a_token_server_is_asked_by_https_unless_the_registry_is_not() {
        let (https, http) = ("https://h.example/v2/a", "http://127.0.0.1:5000/v2/a");
        let bearer = |realm: &str| format!("Bearer realm=\"{realm}\",service=\"s\"");
        for (registry, realm, taken) in [
            (https, "https://auth.example/token", true),
            (https, "http://h.example/token", false),
            (https, "file:///etc/passwd", false),
            (https, "ftp://h.example/", false),
            (https, "/token", false),
            (https, "", false),
            (http, "http://127.0.0.1:5001/token", true),
            (http, "https://auth.example/token", true),
            (http, "file:///etc/passwd", false),
            (http, "unix:/run/docker.sock", false),
        ] {
            let found = named(registry, &bearer(realm));
            assert_eq!(found.is_ok(), taken, "{registry} {realm}: {found:?}");
        }
        assert_eq!(named(https, "Basic realm=\"x\"").unwrap(), None);
        let both = "Basic realm=\"x\", Bearer realm=\"https://a.example/t\"";
        let found = named(https, both).unwrap();
        assert_eq!(found.as_deref(), Some("https://a.example/t"));
    }
}
