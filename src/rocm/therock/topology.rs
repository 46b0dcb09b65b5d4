//! Owns TheRock's `BUILD_TOPOLOGY.toml`. Stages build groups of artifacts, which depend on each other.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_spanned::Spanned;

use super::error_at;
use crate::sys::error::Result;

/// How often a stage or group is built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ArtifactType {
    /// Once for all targets.
    #[default]
    Generic,
    /// Once for each target.
    PerArch,
}

/// Whether the targets share an artifact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Scope {
    TargetNeutral,
    TargetSpecific,
}

/// The file's tables by name, exactly as written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Topology {
    #[serde(rename = "metadata")]
    _metadata: Metadata,
    #[serde(rename = "source_sets")]
    sources: BTreeMap<String, SourceSet>,
    #[serde(rename = "build_stages")]
    pub stages: BTreeMap<String, Stage>,
    #[serde(rename = "artifact_groups")]
    pub groups: BTreeMap<String, Group>,
    pub artifacts: BTreeMap<String, Artifact>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "listed so that unknown keys are refused")]
struct Metadata {
    version: String,
    description: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "listed so that unknown keys are refused")]
struct SourceSet {
    description: Option<String>,
    submodules: Option<Vec<String>>,
    external_git_sources: Option<Vec<External>>,
    disable_platforms: Option<Vec<String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "listed so that unknown keys are refused")]
struct External {
    name: String,
    origin: String,
    commit: String,
    path: Option<String>,
}

/// A stage: groups that are built together.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stage {
    #[serde(rename = "description")]
    _description: Option<String>,
    #[serde(default, rename = "type")]
    pub kind: ArtifactType,
    #[serde(rename = "artifact_groups")]
    pub groups: Vec<Spanned<String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "listed so that unknown keys are refused")]
pub(crate) struct Group {
    description: Option<String>,
    r#type: Option<ArtifactType>,
    #[serde(default, rename = "artifact_group_deps")]
    pub deps: Vec<Spanned<String>>,
    #[serde(default, rename = "source_sets")]
    sources: Vec<Spanned<String>>,
    disable_platforms: Option<Vec<String>>,
}

/// A unit of packaging.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "listed so that unknown keys are refused")]
pub(crate) struct Artifact {
    #[serde(rename = "artifact_group")]
    pub group: Spanned<String>,
    r#type: Scope,
    #[serde(default, rename = "artifact_deps")]
    pub deps: Vec<Spanned<String>>,
    test_artifacts: Option<Vec<String>>,
    feature_name: Option<String>,
    feature_group: Option<String>,
    platform: Option<String>,
    disable_platforms: Option<Vec<String>>,
    disable_platforms_if_flags_not_set: Option<BTreeMap<String, String>>,
    disable_processors: Option<Vec<String>>,
    python_requires: Option<Vec<String>>,
    split_databases: Option<Vec<String>>,
}

/// Parses a topology. Errors for unknown keys and dangling names show the position.
pub(super) fn parse(file: &str, text: &str) -> Result<Topology> {
    let topology: Topology = toml::from_str(text).map_err(|error| {
        let span = error.span().unwrap_or(0..0);
        error_at(file, text, span, error.message())
    })?;
    let check = |known: bool, what: &str, name: &Spanned<String>| -> Result<()> {
        let message = || format!("there is no {what} `{}`", name.get_ref());
        known
            .then_some(())
            .ok_or_else(|| error_at(file, text, name.span(), &message()))
    };
    let group =
        |name: &Spanned<String>| check(topology.groups.contains_key(name.get_ref()), "group", name);
    let stages = topology.stages.values().flat_map(|stage| &stage.groups);
    let groups = topology.groups.values();
    let artifacts = topology.artifacts.values();
    let named = stages.chain(groups.clone().flat_map(|group| &group.deps));
    let named = named.chain(artifacts.clone().map(|artifact| &artifact.group));
    named.into_iter().try_for_each(group)?;
    for set in groups.flat_map(|group| &group.sources) {
        let known = topology.sources.contains_key(set.get_ref());
        check(known, "source set", set)?;
    }
    for dep in artifacts.flat_map(|artifact| &artifact.deps) {
        let known = topology.artifacts.contains_key(dep.get_ref());
        check(known, "artifact", dep)?;
    }
    if topology.stages.is_empty() {
        return Err(invalid!("{file} has no stages"));
    }
    Ok(topology)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
[metadata]
version = "2.0"
[source_sets.base]
submodules = ["half"]
[build_stages.compiler]
artifact_groups = ["llvm"]
[build_stages.math]
artifact_groups = ["blas"]
type = "per-arch"
[artifact_groups.llvm]
type = "generic"
source_sets = ["base"]
[artifact_groups.blas]
type = "per-arch"
artifact_group_deps = ["llvm"]
[artifacts.amd-llvm]
artifact_group = "llvm"
type = "target-neutral"
[artifacts.blas]
artifact_group = "blas"
type = "target-specific"
artifact_deps = ["amd-llvm"]
"#;

    #[test]
    fn the_topology_is_read() {
        let topology = parse("t.toml", TEXT).unwrap();
        assert_eq!(topology.stages["compiler"].kind, ArtifactType::Generic);
        assert_eq!(topology.stages["math"].kind, ArtifactType::PerArch);
        assert_eq!(topology.artifacts["blas"].deps[0].get_ref(), "amd-llvm");
    }

    #[test]
    fn mistakes_have_a_place() {
        for row in [
            r#"["llvm"] => ["gcc"] => t.toml:7:20: there is no group `gcc`"#,
            r#"["base"] => ["none"] => there is no source set `none`"#,
            r#"["amd-llvm"] => ["gcc"] => t.toml:23:18: there is no artifact `gcc`"#,
            r#""per-arch" => "sometimes" => unknown variant `sometimes`"#,
            r#"type = "target-neutral" => new = 1 => t.toml:19:1: unknown field `new`"#,
            r#"artifact_group = "blas" =>  => missing field `artifact_group`"#,
        ] {
            let (old, rest) = row.split_once(" => ").unwrap();
            let (new, words) = rest.split_once(" => ").unwrap();
            let error = parse("t.toml", &TEXT.replacen(old, new, 1)).unwrap_err();
            assert_has!(error.message(), words);
        }
    }
}
