//! Owns the fingerprints that TheRock writes when it is configured. They cover each artifact's sources, options and
//! dependencies.
//!
//! An artifact has no fingerprint if one of its sources is not a clean checkout, or if it is split by targets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Checkout;
use crate::sys::error::Result;

/// Maximum size of a file, in bytes. Each contains a list of some hundred names, or a digest.
const MAX: u64 = 1 << 20;

/// The fingerprints of a configured build directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactFingerprints {
    /// The artifacts that the build directory builds, with their fingerprints if known.
    pub artifacts: BTreeMap<String, Option<String>>,
    pub stages: BTreeMap<String, BTreeSet<String>>,
}

impl ArtifactFingerprints {
    /// Reads the fingerprints from a build directory in which `source` was configured.
    pub fn read(build: &Path, source: Option<&Path>) -> Result<Self> {
        let content = |below: &Path| {
            super::content(build, below, MAX)?
                .ok_or_else(|| not_found!("`{}` is missing", build.join(below).display()))
        };
        let file = Path::new("artifact_subprojects.json");
        let listed: BTreeMap<String, Vec<String>> = serde_json::from_slice(&content(file)?)
            .map_err(|error| {
                let file = build.join(file);
                invalid!("`{}` is not a list of artifacts", file.display()).source(error)
            })?;
        let mut hashes: BTreeMap<String, Sha256> = BTreeMap::new();
        let mut files = Vec::new();
        for entry in fs::read_dir(build.join("artifacts"))? {
            let path = Path::new("artifacts").join(entry?.file_name());
            files.extend((path.extension() == Some("fprint".as_ref())).then_some(path));
        }
        files.sort();
        for path in files {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            // The file is named ARTIFACT_COMPONENT_TARGETS, and only the artifact's part may contain `_`.
            let Some(artifact) = name.rsplitn(3, '_').nth(2) else {
                continue;
            };
            let hash = hashes.entry(artifact.to_owned()).or_default();
            hash.update(name.as_bytes());
            hash.update([0]);
            hash.update(content(&path)?);
            hash.update([0]);
        }
        let artifacts = listed.into_keys().map(|artifact| {
            let print = hashes
                .remove(&artifact)
                .map(|hash| hex::encode(hash.finalize()));
            (artifact, print)
        });
        Ok(Self {
            artifacts: artifacts.collect(),
            stages: source.map_or_else(BTreeMap::new, stages),
        })
    }

    /// Returns the value for a configuration without fingerprints.
    pub fn none() -> Self {
        Self {
            artifacts: [("all".to_owned(), None)].into(),
            stages: BTreeMap::new(),
        }
    }

    /// Returns the fingerprints of the artifacts that `stages` build, or of all artifacts if `stages` is empty. `own`
    /// replaces a missing fingerprint, or all of them if TheRock was `blind`.
    ///
    /// An unknown stage may build any artifact.
    pub fn of(&self, stages: &[String], own: &str, blind: bool) -> Vec<(String, String)> {
        let known: Option<Vec<_>> = stages.iter().map(|stage| self.stages.get(stage)).collect();
        let built: Option<BTreeSet<&String>> = known
            .filter(|known| !known.is_empty())
            .map(|known| known.into_iter().flatten().collect());
        let artifacts = self.artifacts.iter();
        artifacts
            .filter(|(name, _)| built.as_ref().is_none_or(|built| built.contains(name)))
            .map(|(name, print)| {
                let therocks = print.clone().filter(|_| !blind);
                let print = therocks.unwrap_or_else(|| format!("own:{own}"));
                (name.clone(), print)
            })
            .collect()
    }
}

/// Returns the artifacts of each stage. Empty if the source cannot be read.
fn stages(source: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let Some(topology) = Checkout::read(source).ok().and_then(|found| found.topology) else {
        return BTreeMap::new();
    };
    let built = |groups: &BTreeSet<&str>| {
        let artifacts = topology.artifacts.iter();
        artifacts
            .filter(|(_, artifact)| groups.contains(artifact.group.get_ref().as_str()))
            .map(|(name, _)| name.clone())
            .collect()
    };
    let of = |(name, stage): (&String, &super::topology::Stage)| {
        let groups = stage.groups.iter().map(|group| group.get_ref().as_str());
        (name.clone(), built(&groups.collect()))
    };
    topology.stages.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_artifact_is_known_by_all_its_files_and_its_stage() {
        let build = tempfile::tempdir().unwrap();
        let path = build.path();
        fs::create_dir(path.join("artifacts")).unwrap();
        fs::write(
            path.join("artifact_subprojects.json"),
            r#"{ "amd-llvm": ["amd-llvm"], "blas": ["rocBLAS"], "core_hip": ["clr"] }"#,
        )
        .unwrap();
        let write = |name: &str, text: &str| {
            fs::write(path.join("artifacts").join(name), text).unwrap();
        };
        write("amd-llvm_lib_generic.fprint", "a");
        write("core_hip_dev_generic.fprint", "b");
        write("core_hip_lib_generic.fprint", "c");
        write("left-over_lib_generic.fprint", "d");
        let mut before = ArtifactFingerprints::read(path, None).unwrap();
        let missing = before.artifacts.iter().filter(|(_, print)| print.is_none());
        assert_eq!(missing.map(|(name, _)| name).collect::<Vec<_>>(), ["blas"]);
        write("core_hip_dev_generic.fprint", "x");
        let after = ArtifactFingerprints::read(path, None).unwrap();
        let changed = |name: &str| before.artifacts[name] != after.artifacts[name];
        assert_eq!(
            (changed("amd-llvm"), changed("core_hip"), changed("blas")),
            (false, true, false)
        );

        let names = |stages: &[&str], prints: &ArtifactFingerprints| {
            let stages: Vec<String> = stages.iter().map(|name| (*name).to_owned()).collect();
            let found = prints.of(&stages, "f1", false);
            found.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        before.stages = [("math".to_owned(), ["blas".to_owned()].into())].into();
        assert_eq!(names(&["math"], &before), ["blas"]);
        assert_eq!(before.of(&["math".to_owned()], "f1", false)[0].1, "own:f1");
        let blind = before.of(&[], "f1", true);
        assert!(blind.iter().all(|(_, print)| print == "own:f1"));
        assert_eq!(names(&[], &before).len(), 3);
        assert_eq!(names(&["math", "unknown"], &before).len(), 3);
    }

    #[test]
    fn what_is_no_file_is_not_followed() {
        let build = tempfile::tempdir().unwrap();
        let list = build.path().join("artifact_subprojects.json");
        std::os::unix::fs::symlink("/etc/passwd", &list).unwrap();
        let error = ArtifactFingerprints::read(build.path(), None).unwrap_err();
        assert_has!(error.message(), "is not a regular file");
    }
}
