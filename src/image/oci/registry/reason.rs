//! Owns the reasons that registries give for refusing a request.

use reqwest::Response;
use serde::Deserialize;
use serde_json::Value;

use crate::image::fetch::Body;

/// Maximum size of a registry's error response, in bytes.
const MAX_REASON: u64 = 64 << 10;

/// Returns a response's reason for a refusal, as its code and message.
pub(super) async fn error_message(response: Response) -> Option<String> {
    let body = Body::new(response, "answer").whole(MAX_REASON).await.ok()?;
    reason_in(&body)
}

fn reason_in(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Answer {
        errors: Vec<Reason>,
    }
    #[derive(Deserialize)]
    struct Reason {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
        /// Anything. Nexus has its reason only here, as a text.
        #[serde(default)]
        detail: Value,
    }
    let answer: Answer = serde_json::from_slice(body).ok()?;
    let reason = answer.errors.into_iter().next()?;
    let detail = reason.detail.as_str().unwrap_or_default();
    let text = format!("{}: {}: {detail}", reason.code, reason.message);
    let text: String = text.trim_matches([':', ' ']).chars().take(400).collect();
    (!text.is_empty()).then_some(text)
}

/// Returns whether the reason for a refusal is that the tag exists and must not move.
pub(super) fn is_immutable(reason: &str) -> bool {
    let reason = reason.to_ascii_lowercase();
    // Docker Hub and Google speak of "immutability".
    let words = [
        "immutab",
        "cannot be overwritten",
        "does not allow updating",
    ];
    words.iter().any(|words| reason.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_that_must_not_move_is_known_by_each_registry_s_words() {
        let reason = |code: &str, message: &str, detail: Value| {
            let reason = serde_json::json!({ "code": code, "message": message, "detail": detail });
            reason_in(
                serde_json::json!({ "errors": [reason] })
                    .to_string()
                    .as_bytes(),
            )
            .unwrap()
        };
        let said = |code: &str, message: &str| reason(code, message, Value::Null);
        let nexus = "Repository does not allow updating assets: docker-hosted";
        for reason in [
            // Amazon, Harbor, Google, Docker Hub, Alibaba, Nexus.
            said(
                "TAG_INVALID",
                "The image tag 'a' already exists in the 'b' repository and cannot be overwritten because the repository is immutable.",
            ),
            said(
                "PRECONDITION",
                "Failed to process request due to 'b:a' configured as immutable.",
            ),
            said(
                "MANIFEST_INVALID",
                "cannot update tag a. The repository has enabled tag immutability",
            ),
            said(
                "DENIED",
                "requested access to the resource is denied - This tag is already assigned to an image in this repository and cannot be updated due to immutability settings.",
            ),
            said(
                "DENIED",
                "The requested tag already exists and cannot be overwritten.",
            ),
            reason("BLOB_UPLOAD_INVALID", "blob upload invalid", nexus.into()),
        ] {
            assert!(is_immutable(&reason), "{reason}");
        }
        let other = reason(
            "MANIFEST_INVALID",
            "manifest invalid",
            serde_json::json!({}),
        );
        assert_eq!(other, "MANIFEST_INVALID: manifest invalid");
        assert!(!is_immutable(&other));
    }
}
