//! Owns sending blobs and manifests to a repository.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, LOCATION};
use reqwest::{RequestBuilder, Response, StatusCode, Url};
use sha2::{Digest as _, Sha256};

use super::reason::{error_message, is_immutable};
use super::{Attempts, Registry, digest_of, header};
use crate::image::fetch::long_patience;
use crate::image::oci::manifest::damaged;
use crate::sys::error::Result;

/// How often to check that a registry has what it just stored.
const LOOKS: usize = 3;

/// The result of sending a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upload {
    Stored,
    /// The registry did not take the stream, which may be sent again from the beginning.
    Again,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tagged {
    Set,
    Immutable,
}

impl Registry {
    /// Returns whether the registry needs a stream's digest and size in advance.
    pub(crate) fn wants_digests(&self) -> bool {
        self.wants_digests.load(Ordering::Relaxed)
    }

    /// Uploads a stream. Asks for its digest and size after the last byte; `None` if the connection ended earlier.
    pub(crate) async fn upload(
        &self,
        blob: reqwest::Body,
        digest: impl AsyncFnOnce() -> Result<Option<(String, u64)>>,
        attempts: &mut Attempts,
    ) -> Result<Upload> {
        let place = self.begin().await?;
        let sent = self
            .uploads
            .patch(place.clone())
            .header(CONTENT_TYPE, "application/octet-stream")
            .body(blob);
        let response = self.send_with(sent, self.authorization_at(&place)).await;
        let response = match response {
            Ok(response) => {
                // A registry that refuses early may stop reading, and the packing side would block.
                if self.goes_on(&response, attempts).await? {
                    return Ok(Upload::Again);
                }
                if is_unsupported(response.status()) {
                    self.wants_digests.store(true, Ordering::Relaxed);
                    return Ok(Upload::Again);
                }
                Ok(self.accepted(response).await?)
            }
            Err(error) => Err(error),
        };
        // A local read error is the cause of the broken connection.
        let digest = digest().await?;
        let place = self.next_place(&response?)?;
        let failed = || self.error("send to", &self.name, StatusCode::OK, None);
        let (sha256, size) = digest.ok_or_else(failed)?;
        let finish = with_digest(place.clone(), &sha256);
        // The token may have expired during the upload.
        let finish = || self.uploads.put(finish.clone()).header(CONTENT_LENGTH, 0);
        self.finish(&place, finish, &sha256, size).await?;
        Ok(Upload::Stored)
    }

    /// Uploads a stream with a known digest in a single request.
    pub(crate) async fn upload_whole(
        &self,
        blob: reqwest::Body,
        sha256: &str,
        size: u64,
        attempts: &mut Attempts,
    ) -> Result<Upload> {
        let place = self.begin().await?;
        let sent = whole(self.uploads.put(with_digest(place.clone(), sha256)), size).body(blob);
        let response = self.send_with(sent, self.authorization_at(&place)).await?;
        if self.goes_on(&response, attempts).await? {
            return Ok(Upload::Again);
        }
        self.accepted(response).await?;
        self.assert_blob(sha256, size).await?;
        Ok(Upload::Stored)
    }

    pub(crate) async fn upload_bytes(&self, blob: &[u8]) -> Result<()> {
        let (sha256, size) = (hex::encode(Sha256::digest(blob)), blob.len() as u64);
        let place = self.begin().await?;
        let url = with_digest(place.clone(), &sha256);
        let send = || {
            let request = whole(self.uploads.put(url.clone()), size).body(blob.to_vec());
            // Nothing else ends the wait for a registry that takes all of it and never answers.
            request.timeout(long_patience())
        };
        self.finish(&place, send, &sha256, size).await
    }

    /// Begins an upload; returns its address. A stream that is packed while it is sent cannot be repeated, so a token
    /// that is about to expire is renewed first.
    async fn begin(&self) -> Result<Url> {
        let begin = format!("{}/blobs/uploads/", self.base);
        let response = self
            .authorized(|| self.client.post(&begin).header(CONTENT_LENGTH, 0))
            .await?;
        let response = self.accepted(response).await?;
        let place = self.next_place(&response)?;
        let granted = self.granted().filter(|_| self.is_own(&place));
        if granted.is_some_and(|granted| granted.is_stale(Instant::now())) {
            self.log_in(None).await?;
        }
        Ok(place)
    }

    /// Sends the last request of an upload to its address. The request can be repeated.
    async fn finish(
        &self,
        place: &Url,
        make: impl Fn() -> RequestBuilder,
        sha256: &str,
        size: u64,
    ) -> Result<()> {
        let response = match self.is_own(place) {
            true => self.authorized(make).await?,
            false => self.send_with(make(), None).await?,
        };
        // A gateway may give up while the registry stores the blob, which then no longer knows the upload.
        let is_gone = response.status() == StatusCode::NOT_FOUND;
        if !is_gone || !self.has_blob(sha256, size).await? {
            self.accepted(response).await?;
        }
        self.assert_blob(sha256, size).await
    }

    async fn accepted(&self, response: Response) -> Result<Response> {
        match response.status().is_success() {
            true => Ok(response),
            false => Err(self.answered("send to", &self.name, response).await),
        }
    }

    /// Stores a document under a tag or its digest.
    pub(crate) async fn publish(&self, tag: &str, kind: &str, document: &[u8]) -> Result<Tagged> {
        let url = format!("{}/manifests/{tag}", self.base);
        let response = self
            .authorized(|| {
                let request = self.client.put(&url).header(CONTENT_TYPE, kind);
                request.body(document.to_vec())
            })
            .await?;
        let what = format!("{}:{tag}", self.name);
        let status = response.status();
        if !status.is_success() {
            let said = error_message(response).await;
            let is_immutable = said.as_deref().is_some_and(is_immutable);
            if is_immutable && self.has(tag).await? {
                return Ok(Tagged::Immutable);
            }
            return Err(self.error("send to", &what, status, said));
        }
        let sha256 = hex::encode(Sha256::digest(document));
        if let Some(found) = digest_of(&response).filter(|found| *found != sha256) {
            let what = format!("what registry `{}` stored as `{what}`", self.host);
            return Err(damaged(&what, &found, &sha256));
        }
        let digest = format!("sha256:{sha256}");
        self.assert_stored(&digest, async || self.has(&digest).await)
            .await?;
        Ok(Tagged::Set)
    }

    async fn assert_blob(&self, sha256: &str, size: u64) -> Result<()> {
        let digest = format!("sha256:{sha256}");
        self.assert_stored(&digest, async || self.has_blob(sha256, size).await)
            .await
    }

    /// Fails unless the registry has the content that it claims to have stored. Some registries need a moment.
    async fn assert_stored(&self, name: &str, has: impl AsyncFn() -> Result<bool>) -> Result<()> {
        for _ in 0..LOOKS {
            if has().await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let (who, name) = (self.who(), format!("{}@{name}", self.name));
        Err(
            unavailable!("{who} claims to have stored `{name}`, but does not have it")
                .help("run the command again, or push to another registry"),
        )
    }

    /// Returns the address where the upload continues. It may be relative to the target of a redirect.
    fn next_place(&self, response: &Response) -> Result<Url> {
        let location = header(response, LOCATION.as_str());
        let place = location.and_then(|location| response.url().join(&location).ok());
        let who = self.who();
        place.ok_or_else(|| unavailable!("{who} does not name an address for the upload"))
    }
}

/// Returns whether the status means that the registry does not support streams.
fn is_unsupported(status: StatusCode) -> bool {
    [
        StatusCode::METHOD_NOT_ALLOWED,
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        StatusCode::NOT_IMPLEMENTED,
    ]
    .contains(&status)
}

fn with_digest(mut place: Url, sha256: &str) -> Url {
    let digest = format!("sha256:{sha256}");
    place.query_pairs_mut().append_pair("digest", &digest);
    place
}

fn whole(request: RequestBuilder, size: u64) -> RequestBuilder {
    request
        .header(CONTENT_TYPE, "application/octet-stream")
        .header(CONTENT_LENGTH, size)
}
