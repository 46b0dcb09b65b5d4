//! Owns signatures of snapshots in a registry, in cosign's format: an image under the tag `sha256-DIGEST.sig`, whose
//! layers name the digest of the signed manifest and carry the signature as an annotation.
//!
//! The manifest's digest covers all of a snapshot: its configuration and its layers.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::document::{CONFIG, MANIFEST, descriptor};
use super::key_file::{SigningKey, VerifyingKey};
use crate::image::fetch::ByteCounter;
use crate::image::oci::{Descriptor, Registry, RequestSubject, Tagged, refused, sha256};
use crate::sys::checksum::is_lower_sha256;
use crate::sys::error::{Kind, Result, ResultExt as _};

const PAYLOAD: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
const TYPE: &str = "cosign container image signature";
const MAX_PAYLOAD: u64 = 64 << 10;
const MAX_SIGNATURES: usize = 64;

#[derive(Deserialize)]
struct Signatures {
    #[serde(default)]
    layers: Vec<Value>,
}

#[derive(Deserialize)]
struct Payload {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    image: SignedImage,
    r#type: String,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

fn tag_for(sha256: &str) -> String {
    format!("sha256-{sha256}.sig")
}

/// Returns the SHA-256 of the manifest that a signature's tag belongs to.
pub(super) fn subject(tag: &str) -> Option<&str> {
    let digits = tag.strip_prefix("sha256-")?.strip_suffix(".sig")?;
    is_lower_sha256(digits).then_some(digits)
}

/// Refuses a manifest that this key has not signed.
pub(super) async fn verify(
    registry: &Registry,
    key: &VerifyingKey,
    manifest: &str,
    blobs: &Path,
) -> Result<()> {
    let layers = signatures(registry, manifest).await?;
    let mut others = Vec::new();
    for layer in &layers {
        let descriptor = Descriptor::deserialize(layer)
            .map_err(|error| refused("its signature cannot be read".into()).source(error))?;
        let Some(signature) = descriptor.annotation(SIGNATURE) else {
            continue;
        };
        let aside = ByteCounter::default();
        let blob = RequestSubject::Blob;
        let payload = registry.obtain(blob, &descriptor, MAX_PAYLOAD, blobs, &aside);
        let payload = fs_err::read(payload.await?)?;
        if !key.verifies(&payload, signature) {
            continue;
        }
        match serde_json::from_slice(&payload) {
            Ok(Payload { critical }) if critical.r#type == TYPE => {
                let signed = critical.image.digest;
                if sha256(&signed) == Some(manifest) {
                    return Ok(());
                }
                others.push(signed);
            }
            _ => others.push("something else".to_owned()),
        }
    }
    let key = key.path().display();
    let why = match (layers.is_empty(), others.first()) {
        (true, _) => "it is not signed".to_owned(),
        (false, None) => format!("it is not signed with the key that belongs to `{key}`"),
        (false, Some(other)) => format!("its signature is for {}", other.escape_debug()),
    };
    Err(drift!("manifest sha256:{manifest} is refused: {why}").help(
        "rockenv push ENV --sign KEY, on the machine that built it; to accept unsigned snapshots, leave out `--verify` and `verify-key`",
    ))
}

/// Signs a manifest and keeps its other signatures. The new one is the first, because readers skip those after a limit.
pub(super) async fn sign(
    registry: &Registry,
    key: &SigningKey,
    repository: &str,
    manifest: &str,
    blobs: &Path,
) -> Result<()> {
    if is_signed(registry, key, manifest, blobs).await? {
        return Ok(());
    }
    let digest = format!("sha256:{manifest}");
    let payload = json!({
        "critical": {
            "identity": { "docker-reference": repository },
            "image": { "docker-manifest-digest": digest },
            "type": TYPE,
        },
        "optional": null,
    })
    .to_string();
    let mut layers = signatures(registry, manifest).await?;
    let mut own = descriptor(PAYLOAD, payload.as_bytes());
    own["annotations"] = json!({ SIGNATURE: key.sign(payload.as_bytes())? });
    layers.insert(0, own);
    let digests: Vec<&Value> = layers.iter().map(|layer| &layer["digest"]).collect();
    let config = json!({
        "architecture": "", "os": "", "config": {},
        "rootfs": { "type": "layers", "diff_ids": digests },
    })
    .to_string();
    let document = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": descriptor(CONFIG, config.as_bytes()), "layers": layers,
    })
    .to_string();
    for blob in [payload.as_bytes(), config.as_bytes()] {
        registry.upload_bytes(blob).await?;
    }
    let tag = tag_for(manifest);
    match registry
        .publish(&tag, MANIFEST, document.as_bytes())
        .await?
    {
        Tagged::Set => Ok(()),
        Tagged::Immutable => Err(unavailable!(
            "the registry does not let tag `{tag}` have another signature"
        )
        .help("let the registry move tags `sha256-*`")),
    }
}

pub(super) async fn is_signed(
    registry: &Registry,
    key: &SigningKey,
    manifest: &str,
    blobs: &Path,
) -> Result<bool> {
    match verify(registry, key.public(), manifest, blobs).await {
        Ok(()) => Ok(true),
        Err(error) if [Kind::Drift, Kind::Invalid].contains(&error.kind()) => Ok(false),
        Err(error) => Err(error),
    }
}

async fn signatures(registry: &Registry, manifest: &str) -> Result<Vec<Value>> {
    let found = registry.find_tag(&tag_for(manifest)).await;
    let Some((bytes, _)) = found.context(|| "cannot get the signature".to_owned())? else {
        return Ok(Vec::new());
    };
    let found: Signatures = serde_json::from_slice(&bytes)
        .map_err(|error| refused("its signature cannot be read".into()).source(error))?;
    let mut layers = found.layers;
    layers.retain(|layer| layer["mediaType"] == PAYLOAD);
    layers.truncate(MAX_SIGNATURES);
    Ok(layers)
}
