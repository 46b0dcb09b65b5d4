//! Owns requests about a whole repository: listing its tags, and removing a manifest.

use std::collections::BTreeSet;

use reqwest::header::LINK;
use reqwest::{Method, Response, StatusCode, Url};
use serde::Deserialize;

use super::reason::error_message;
use super::{Registry, RequestSubject};
use crate::image::fetch::Body;
use crate::sys::error::{Error, Result};

/// Number of tags to request per page. Registries may send fewer.
const PAGE: usize = 1000;
/// Maximum size of a page, in bytes.
const MAX_PAGE: u64 = 4 << 20;
const MAX_TAGS: usize = 1_000_000;

#[derive(Deserialize)]
struct Page {
    /// `null` in an empty repository.
    tags: Option<Vec<String>>,
}

impl Registry {
    /// Returns all tags. Empty if the repository does not exist.
    pub(crate) async fn tags(&self) -> Result<BTreeSet<String>> {
        let mut tags = BTreeSet::new();
        let mut next = Some(format!("{}/tags/list?n={PAGE}", self.base));
        while let Some(url) = next {
            let response = self.authorized(|| self.client.get(&url)).await?;
            match response.status() {
                // Tags on a missing page could protect the manifests of others.
                StatusCode::NOT_FOUND if tags.is_empty() => break,
                status if !status.is_success() => {
                    let error = self.answered("list the tags of", &self.name, response);
                    return Err(error.await);
                }
                _ => {}
            }
            let following = following(&url, &response);
            let what = format!("the tags of `{}`", self.name);
            let page = Body::new(response, &what).whole(MAX_PAGE).await?;
            let page: Page = serde_json::from_slice(&page).map_err(|error| {
                unavailable!("registry `{}` sent no list of tags", self.host).source(error)
            })?;
            let before = tags.len();
            tags.extend(page.tags.into_iter().flatten());
            // The page after a page without new tags would be the same again, forever.
            next = following.filter(|_| tags.len() > before);
            if tags.len() > MAX_TAGS {
                let name = &self.name;
                return Err(unavailable!("`{name}` has more than {MAX_TAGS} tags"));
            }
        }
        Ok(tags)
    }

    /// Removes a manifest and all its tags, if they still exist.
    pub(crate) async fn delete(&self, sha256: &str) -> Result<()> {
        let digest = format!("sha256:{sha256}");
        let (verb, what) = ("remove", format!("{}@{digest}", self.name));
        let response = self
            .authorized(|| self.request(Method::DELETE, RequestSubject::Manifest, &digest))
            .await?;
        match response.status() {
            // Some registries that do not support deletion have no such endpoint.
            StatusCode::NOT_FOUND => match self.has(&digest).await? {
                true => Err(self.cannot_delete()),
                false => Ok(()),
            },
            status if status.is_success() => Ok(()),
            StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                Err(self.cannot_delete())
            }
            // Older registries use this code instead of 405. Google's removes no manifest that has a tag.
            StatusCode::BAD_REQUEST => {
                let status = response.status();
                let refuses = ["UNSUPPORTED", "GOOGLE_MANIFEST_DANGLING_TAG"];
                match error_message(response).await {
                    Some(said) if refuses.iter().any(|code| said.starts_with(code)) => {
                        Err(self.cannot_delete())
                    }
                    said => Err(self.error(verb, &what, status, said)),
                }
            }
            _ => Err(self.answered(verb, &what, response).await),
        }
    }

    fn cannot_delete(&self) -> Error {
        let host = &self.host;
        unavailable!("registry `{host}` does not let clients remove anything").help(own_rules(host))
    }
}

/// Returns the address of the next page. Only the query is taken from the response: a registry behind a proxy often
/// does not know its own name and path, and no other host may get the token.
fn following(asked: &str, response: &Response) -> Option<String> {
    let links = response.headers().get_all(LINK).iter();
    let link = links
        .filter_map(|link| link.to_str().ok())
        .find_map(next_link)?;
    let mut next = Url::parse(asked).ok()?;
    let query = next.join(link).ok()?.query().map(str::to_owned);
    next.set_query(query.as_deref());
    Some(next.into())
}

/// Returns how to remove old tags at a registry that does not let clients delete.
fn own_rules(host: &str) -> &'static str {
    let name = host.split(':').next().unwrap_or_default();
    match name {
        "ghcr.io" => {
            "remove versions of the package at GitHub, or by the action `actions/delete-package-versions`"
        }
        "index.docker.io" => "remove tags in the repository's settings at Docker Hub",
        _ if name.ends_with(".amazonaws.com") => {
            "set a lifecycle policy: aws ecr put-lifecycle-policy"
        }
        _ if name.ends_with(".pkg.dev") => {
            "set a cleanup policy: gcloud artifacts repositories set-cleanup-policies"
        }
        _ => {
            "allow it there (`storage: delete: enabled: true` in a `registry`), or use the registry's own cleanup rules"
        }
    }
}

/// Returns the address in `<ADDRESS>; rel="next"`.
fn next_link(header: &str) -> Option<&str> {
    header.split(',').find_map(|link| {
        let (address, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
        let is_next = |parameter: &str| {
            let value = parameter.trim().strip_prefix("rel=");
            value.is_some_and(|value| value.trim_matches('"').eq_ignore_ascii_case("next"))
        };
        parameters.split(';').any(is_next).then_some(address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_found() {
        let next = "</v2/a/tags/list?last=b&n=2>; rel=\"next\"";
        assert_eq!(next_link(next), Some("/v2/a/tags/list?last=b&n=2"));
        let both = "<https://h.example/1>; rel=\"prev\", <https://h.example/3>; title=x; rel=next";
        assert_eq!(next_link(both), Some("https://h.example/3"));
        for not in [
            "",
            "</2>",
            "</2>; rel=\"last\"",
            "rel=\"next\"",
            "</2; rel=\"next\"",
        ] {
            assert_eq!(next_link(not), None, "{not}");
        }
    }
}
