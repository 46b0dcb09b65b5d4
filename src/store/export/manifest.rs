//! Owns the manifest: an in-toto statement (v1) about files, with SLSA provenance (v1) as predicate.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::ExportedEntry;
use crate::plan::ids::StepKey;
use crate::plan::lockfile::Lockfile;
use crate::plan::resolve::{Spec, VolumeSource};
use crate::profile::hook::Hook;
use crate::store::images::Image;
use crate::sys::address::{shown_value, without_login};
use crate::sys::error::{Result, encoded};

const STATEMENT: &str = "https://in-toto.io/Statement/v1";
const PROVENANCE: &str = "https://slsa.dev/provenance/v1";
/// `docs/reference/lock.md` defines the parameters below. Another definition gets another number.
const BUILD_TYPE: &str = "urn:rockenv:build:1";
const BUILDER: &str = "urn:rockenv:builder:1";

/// A statement as `check` reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    #[serde(rename = "_type")]
    pub kind: String,
    pub subject: Vec<Subject>,
    #[serde(rename = "predicateType")]
    pub predicate_type: String,
    pub predicate: Value,
}

/// A file, a link or an empty directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Subject {
    /// Path below the manifest's directory, with `/` as separator.
    pub name: String,
    /// Digests by algorithm, including `sha256`: of a file's content, of a link's target, of the empty string for a
    /// directory.
    pub digest: BTreeMap<String, String>,
    /// `type`, and a link's `target`, for anything but a regular file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Value>,
}

impl Subject {
    fn new(name: &str, named: &ExportedEntry) -> Self {
        let note = |name: &str, text: &str| (name.to_owned(), Value::from(text));
        let (sha256, annotations) = match named {
            ExportedEntry::File(sha256) => (sha256.clone(), BTreeMap::new()),
            ExportedEntry::Symlink(target) => (
                hex::encode(Sha256::digest(target)),
                [note("type", "symlink"), note("target", target)].into(),
            ),
            ExportedEntry::Directory => (
                hex::encode(Sha256::digest("")),
                [note("type", "directory")].into(),
            ),
        };
        Self {
            name: name.to_owned(),
            digest: BTreeMap::from([("sha256".to_owned(), sha256)]),
            annotations,
        }
    }

    /// Returns the entry that it describes.
    pub(super) fn named(&self) -> Result<ExportedEntry> {
        let text = |name: &str| self.annotations.get(name).and_then(Value::as_str);
        match (text("type"), text("target"), self.digest.get("sha256")) {
            (Some("symlink"), Some(target), _) => Ok(ExportedEntry::Symlink(target.to_owned())),
            (Some("directory"), _, _) => Ok(ExportedEntry::Directory),
            (_, _, Some(sha256)) => Ok(ExportedEntry::File(sha256.clone())),
            (_, _, None) => Err(invalid!(
                "the manifest has no SHA-256 of `{}`",
                self.name.escape_debug()
            )),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub spec: &'a Spec,
    pub image: &'a Image,
    /// Its hooks, as far as they still exist.
    pub hooks: &'a BTreeMap<String, Hook>,
    /// Checked-out submodules, by source and path.
    pub submodules: &'a BTreeSet<(String, String)>,
    /// The lock file that it was built from, and the digest of its text.
    pub lock: Option<(&'a Lockfile, &'a str)>,
    /// The last step, if later ones of the profile were not run.
    pub until: Option<&'a str>,
    /// Keys of the steps that were built on files from an earlier build.
    pub incremental: &'a BTreeMap<StepKey, String>,
}

/// Makes the manifest for files, links and empty directories, by path.
pub(crate) fn manifest(env: &Env<'_>, files: &BTreeMap<String, ExportedEntry>) -> Manifest {
    let spec = env.spec;
    let subject = files.iter().map(|(name, named)| Subject::new(name, named));
    let targets: Vec<String> = spec.targets.iter().map(ToString::to_string).collect();
    let mut external = json!({
        "profile": spec.profile,
        "targets": targets,
        "from": spec.from,
    });
    if let Some(variant) = &spec.variant {
        external["variant"] = json!(variant);
    }
    if let Some((lock, _)) = env.lock {
        external["params"] = json!(published(&lock.params));
        external["machineTargets"] = json!(lock.machine_targets);
    }
    let steps = spec.steps.iter().map(|step| {
        let hooks = spec.hooks.iter().filter(|hook| hook.from == step.name);
        let hooks: Vec<&str> = hooks.map(|hook| hook.name.as_str()).collect();
        let mut shown = json!({ "name": step.name, "key": step.key });
        if !hooks.is_empty() {
            shown["hooks"] = json!(hooks);
        }
        if env.incremental.contains_key(step.key.as_str()) {
            shown["history"] = json!("incremental");
        }
        shown
    });
    let skipped = spec.skipped.iter();
    let skipped = skipped.map(|step| json!({ "name": step.name, "reason": step.reason }));
    let mut internal = json!({
        "engine": spec.engine.name(),
        "buildUser": format!("{}:{}", spec.user.uid, spec.user.gid),
        "steps": steps.collect::<Vec<_>>(),
        "skippedSteps": skipped.collect::<Vec<_>>(),
    });
    if let Some(until) = env.until {
        internal["until"] = json!(until);
    }
    Manifest {
        kind: STATEMENT.to_owned(),
        subject: subject.collect(),
        predicate_type: PROVENANCE.to_owned(),
        predicate: json!({
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": external,
                "internalParameters": internal,
                "resolvedDependencies": dependencies(env),
            },
            "runDetails": {
                "builder": {
                    "id": BUILDER,
                    "version": { "rockenv": env!("CARGO_PKG_VERSION") },
                },
            },
        }),
    }
}

fn dependencies(env: &Env<'_>) -> Vec<Value> {
    let spec = env.spec;
    let mut found = Vec::new();
    // rockenv's own digest of a tree; the standard has none.
    let mut digest = BTreeMap::from([("rockenvTree", env.image.digest.clone())]);
    if let Some(resolved) = env.image.resolved.as_deref() {
        let sha256 = resolved.strip_prefix("sha256:").unwrap_or(resolved);
        digest.insert("sha256", sha256.to_owned());
    }
    found.push(json!({ "name": format!("image/{}", spec.image), "digest": digest }));
    for (name, print) in &spec.fingerprints {
        let (kind, rest) = print.split_once(':').unwrap_or(("content", print));
        let (digest, changes) = rest.split_once('+').unwrap_or((rest, ""));
        let algorithm = match kind {
            "git" => "gitCommit",
            _ => "rockenvContent",
        };
        let mut source = json!({
            "name": format!("source/{name}"),
            "digest": { algorithm: digest },
        });
        let volume = spec.volume(name).map(|volume| &volume.source);
        if let Some(VolumeSource::Git(git)) = volume
            && git.url.contains("://")
        {
            source["uri"] = json!(format!("git+{}@{digest}", without_login(&git.url)));
        }
        if !changes.is_empty() {
            // The commit alone does not identify it: the checkout had local changes.
            source["annotations"] = json!({ "changes": changes });
        }
        found.push(source);
        let source = env.lock.and_then(|(lock, _)| lock.source.get(name));
        let submodules = source.map(|source| &source.submodules);
        let is_there = |path: &String| env.submodules.contains(&(name.clone(), path.clone()));
        let submodules = submodules.into_iter().flatten();
        for (path, commit) in submodules.filter(|(path, _)| is_there(path)) {
            found.push(json!({
                "name": format!("source/{name}/{path}"),
                "digest": { "gitCommit": commit },
            }));
        }
    }
    for hook in &spec.hooks {
        let mut shown = json!({
            "name": format!("hook/{}", hook.name),
            "digest": { "rockenvHook": hook.digest },
        });
        if let Some(known) = env.hooks.get(&hook.name) {
            shown["annotations"] = json!({ "description": known.description });
        }
        found.push(shown);
    }
    if let Some((lock, digest)) = env.lock {
        for (name, file) in &lock.fetched {
            let name = format!("fetched/{name}");
            found.push(fetched(&name, &file.sha256, file.url.as_deref()));
        }
        for (volume, files) in &lock.files {
            for (path, file) in files {
                let name = format!("files/{volume}/{path}");
                let url = file.url().map(String::as_str);
                found.push(fetched(&name, file.sha256(), url));
            }
        }
        found.push(json!({
            "name": "lock",
            "digest": { "sha256": digest },
            "mediaType": "application/toml",
        }));
    }
    found
}

/// Returns parameters without secrets.
fn published(params: &BTreeMap<String, String>) -> BTreeMap<&str, String> {
    let params = params.iter();
    params
        .map(|(name, value)| (name.as_str(), shown_value(name, value)))
        .collect()
}

/// Describes a fetched file. A login in its URL must not be published.
fn fetched(name: &str, sha256: &str, url: Option<&str>) -> Value {
    let mut shown = json!({ "name": name, "digest": { "sha256": sha256 } });
    if let Some(url) = url {
        shown["uri"] = json!(without_login(url));
    }
    shown
}

impl Manifest {
    pub(crate) fn text(&self) -> Result<String> {
        let text = encoded(serde_json::to_string_pretty(self), "a manifest")?;
        Ok(text + "\n")
    }
}

/// Reads a manifest of rockenv or of another tool with the same format; `name` is for errors.
pub(crate) fn parse(text: &[u8], name: &str) -> Result<Manifest> {
    let bad =
        |cause: String| invalid!("`{name}` is not a manifest of exported files").source(cause);
    let manifest: Manifest =
        serde_json::from_slice(text).map_err(|error| bad(error.to_string()))?;
    if manifest.kind != STATEMENT {
        let kind = manifest.kind.escape_debug();
        return Err(bad(format!("its type is `{kind}`")));
    }
    let mut subjects = manifest.subject.iter();
    if let Some(subject) = subjects.find(|subject| !subject.digest.contains_key("sha256")) {
        let name = subject.name.escape_debug();
        return Err(bad(format!("`{name}` contains no SHA-256")));
    }
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_parameters_have_no_login() {
        let url = "https://me:TOKEN@example.org/p?token=TOKEN";
        let shown = fetched("fetched/p", "00", Some(url));
        assert_eq!(shown["uri"], "https://example.org/p?token=***");
        assert!(fetched("files/c/f", "00", None).get("uri").is_none());
        let params = [
            ("mirror", "https://me:x@h"),
            ("hf-token", "TOKEN"),
            ("n", "1"),
        ];
        let params = params.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let shown = [
            ("mirror", "https://****@h"),
            ("hf-token", "***"),
            ("n", "1"),
        ];
        let shown = shown.map(|(name, value)| (name, value.to_owned()));
        assert_eq!(published(&params.into()), BTreeMap::from(shown));
    }
}
