//! Owns compatibility facts about targets: foreign code that runs on a target, and the effect of a project that is not
//! built for it.
//!
//! Every claim has a source. This project has tested none of them on hardware.

use serde::Serialize;

use super::{GpuKind, Target, TargetInfo};

/// How code built for another ISA can run on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum How {
    /// The code was built for a generic ISA that the compiler defines.
    Generic,
    /// `HSA_OVERRIDE_GFX_VERSION` makes the runtime treat the GPU as another one.
    Override,
    /// A distribution's patched runtime loads code of an ISA that is identical or a subset.
    Extended,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Compatible {
    /// The ISA that the code was built for.
    pub code: String,
    pub how: How,
    pub note: String,
    pub sources: Vec<&'static str>,
}

const LLVM: &str = "https://llvm.org/docs/AMDGPUUsage.html";
const DEBIAN: &str = "https://lists.debian.org/debian-ai/2023/05/msg00010.html";
const DEBIAN_PATCH: &str = "https://salsa.debian.org/rocm-team/rocm-hipamd";
const SOLUS: &str = "https://github.com/NixOS/nixpkgs/pull/298388";
const SAME_MAJOR: &str = "https://github.com/ROCm/rocm-systems/pull/5686";

const LIKE_GFX1030: &[&str] = &[
    "gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036",
];

/// LLVM's generic ISAs and the targets that run them.
const GENERIC: [(&str, &[&str]); 6] = [
    ("gfx9-generic", &["gfx900", "gfx906", "gfx90c"]),
    ("gfx9-4-generic", &["gfx942", "gfx950"]),
    ("gfx10-1-generic", &["gfx1010", "gfx1011", "gfx1012"]),
    ("gfx10-3-generic", LIKE_GFX1030),
    (
        "gfx11-generic",
        &[
            "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
        ],
    ),
    ("gfx12-generic", &["gfx1200", "gfx1201"]),
];

/// Rows of Debian's patches: each target of the first list runs code for each ISA of the second list.
const EXTENDED: [(&[&str], &[&str]); 3] = [
    (&["gfx900", "gfx906", "gfx90c"], &["gfx900", "gfx90c"]),
    (&["gfx1010", "gfx1011", "gfx1012"], &["gfx1010"]),
    (LIKE_GFX1030, LIKE_GFX1030),
];

/// Reported overrides: targets, ISA of the code, source, and remark.
const OVERRIDES: [(&[&str], &str, &str, &str); 2] = [
    (
        &[
            "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036",
        ],
        "gfx1030",
        "https://github.com/ROCm/Tensile/issues/1907",
        "the ISA is the same; not official",
    ),
    (
        &["gfx1103"],
        "gfx1100",
        "https://github.com/ROCm/rocBLAS/issues/1536",
        "works for some users; not official, and not needed for code built for gfx1103",
    ),
];

pub(crate) fn runs(target: Target) -> Vec<Compatible> {
    let name = target.name();
    let mut runs = Vec::new();
    for (code, _) in GENERIC
        .iter()
        .filter(|(_, members)| members.contains(&name))
    {
        runs.push(Compatible {
            code: (*code).to_owned(),
            how: How::Generic,
            note: format!("built with --offload-arch={code}, in code objects of version 6"),
            sources: vec![LLVM],
        });
    }
    for (_, code, source, note) in OVERRIDES.iter().filter(|(on, ..)| on.contains(&name)) {
        let value = Target::parse(code).map(|code| code.override_version());
        runs.push(Compatible {
            code: (*code).to_owned(),
            how: How::Override,
            note: format!(
                "HSA_OVERRIDE_GFX_VERSION={}: {note}",
                value.unwrap_or_default()
            ),
            sources: vec![source, SAME_MAJOR],
        });
    }
    for (_, codes) in EXTENDED.iter().filter(|(on, _)| on.contains(&name)) {
        for code in codes.iter().filter(|code| **code != name) {
            runs.push(Compatible {
                code: (*code).to_owned(),
                how: How::Extended,
                note: "if comgr and the HIP runtime have Debian's patches, which Gentoo, Solus and nixpkgs also use"
                    .to_owned(),
                sources: vec![DEBIAN, DEBIAN_PATCH, SOLUS],
            });
        }
    }
    runs
}

/// Returns the effect of leaving out a project, if known.
pub(crate) fn without(project: &str) -> Option<&'static str> {
    Some(match project {
        "rccl" => {
            "no communication between GPUs: PyTorch is built without nccl (hook `torch-without-rccl`)"
        }
        "rccl-tests" => "the tests of rccl",
        "hipSPARSELt" => "no products with structured sparsity; PyTorch does without",
        "hipBLASLt" => "matrix products by rocBLAS only",
        "composable_kernel" => "MIOpen without its kernels",
        "rocWMMA" => "a header library; code that uses it is not built",
        "hipTensor" => "no tensor contractions; nothing else needs it",
        "rocprofiler-compute" => "a tool for profiles; the rest of the profiler is built",
        _ => return None,
    })
}

/// Returns the fitting variant of TheRock's profile, and the reason.
pub(crate) fn advised_variant(info: &TargetInfo) -> (&'static str, &'static str) {
    match (info.rccl_buildable(), info.kind) {
        (false, _) => (
            "lean",
            "RCCL cannot be built for this target, and PyTorch does not need it",
        ),
        (true, GpuKind::Igpu) => (
            "lean",
            "an integrated GPU has no other GPU to communicate with",
        ),
        (true, GpuKind::Dgpu) => (
            "lean",
            "RCCL is for several cards; with these: `--variant full-torch`",
        ),
        (true, GpuKind::Dcgpu) => (
            "full-torch",
            "machines have several of these, and RCCL lets them communicate",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocm::target;
    use crate::sys::builtin;

    #[test]
    fn tables_name_targets() {
        let names = GENERIC.iter().flat_map(|(_, members)| members.iter());
        let names = names.chain(
            EXTENDED
                .iter()
                .flat_map(|(on, codes)| on.iter().chain(*codes)),
        );
        let names = names.chain(
            OVERRIDES
                .iter()
                .flat_map(|(on, code, ..)| on.iter().chain([code])),
        );
        for name in names {
            Target::parse(name).unwrap();
        }
    }

    #[test]
    fn every_excluded_project_is_explained() {
        for target in target::all() {
            for excluded in &target.info().declared.excluded {
                assert!(
                    without(&excluded.project).is_some(),
                    "{target} {excluded:?}"
                );
            }
        }
    }

    #[test]
    fn what_runs_where() {
        let codes = |name: &str| {
            let runs = runs(Target::parse(name).unwrap());
            runs.iter()
                .map(|one| format!("{} {:?}", one.code, one.how))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            codes("gfx1103"),
            ["gfx11-generic Generic", "gfx1100 Override"]
        );
        let gfx1031 = codes("gfx1031");
        assert!(gfx1031.contains(&"gfx1030 Override".to_owned()));
        assert!(gfx1031.contains(&"gfx1030 Extended".to_owned()));
        assert!(!gfx1031.iter().any(|one| one.starts_with("gfx1031")));
        // gfx1010 has fewer instructions than its siblings, so it runs only its own code.
        assert_eq!(codes("gfx1010"), ["gfx10-1-generic Generic"]);
        assert_eq!(
            codes("gfx1012"),
            ["gfx10-1-generic Generic", "gfx1010 Extended"]
        );
        assert!(codes("gfx1250").is_empty());
    }

    #[test]
    fn variants_are_those_of_the_shipped_profiles() {
        let mut seen = 0;
        let profiles = builtin::toml_files(&builtin::PROFILES);
        for (name, text) in profiles {
            let profile: toml::Table = toml::from_str(text).unwrap();
            let Ok(target) = Target::parse(name) else {
                continue;
            };
            // The profile that they extend has variant `lean`.
            let variant = profile.get("variant").and_then(toml::Value::as_str);
            let advised = advised_variant(target.info()).0;
            assert_eq!(variant.unwrap_or("lean"), advised, "{name}");
            seen += 1;
        }
        assert!(seen >= 6, "{seen}");
    }
}
