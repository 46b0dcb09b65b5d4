//! Owns comparing a checkout of TheRock with the built-in table. Pure.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use super::{Checkout, Excluded, StageKind};
use crate::rocm::target::{self, Target};

/// The stages that profiles rely on, and how often each is built.
const STAGES: [(&str, StageKind); 11] = [
    ("comm-libs", StageKind::Generic),
    ("compiler-runtime", StageKind::Generic),
    ("cv-libs", StageKind::Generic),
    ("dctools-core", StageKind::Generic),
    ("debug-tools", StageKind::Generic),
    ("math-libs", StageKind::PerArch),
    ("media-libs", StageKind::Generic),
    ("profiler-apps", StageKind::Generic),
    ("runtime-tests", StageKind::Generic),
    ("storage-libs", StageKind::Generic),
    ("wsl-rocdxg", StageKind::Generic),
];

/// The artifacts that these stages build.
const ARTIFACTS: &str = "\
    amd-dbgapi amd-llvm aqlprofile base blas composable-kernel core-amdsmi core-hip core-hipinfo core-hiptests \
    core-kpack core-ocl core-ocl-icd core-runtime elfio fft fftw3 flatbuffers fmt hipblasltprovider hipdnn \
    hipdnn-integration-tests hipdnn-samples hipfile hipify hipkernelprovider hiptensor hipthreads host-blas \
    host-suite-sparse kfdtest libhipcxx miopen miopenprovider mirage nlohmann-json openmpi prim rand rccl rdc \
    rocalution rocdecode rocgdb rocjitsu rocjitsu-hotswap rocjpeg rocprofiler-compute rocprofiler-sdk \
    rocprofiler-systems rocprofiler-systems-examples rocr-debug-agent rocr-debug-agent-tests rocrtst rocshmem rocwmma \
    rpp solver sparse spdlog support sysdeps sysdeps-amd-mesa sysdeps-expat sysdeps-gmp sysdeps-hwloc sysdeps-libmnl \
    sysdeps-libnl sysdeps-libpciaccess sysdeps-mpfr sysdeps-ncurses sysdeps-util-linux wsl-rocdxg";

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub(crate) enum Drift {
    NewTarget {
        target: String,
        product: String,
    },
    NoTarget {
        target: String,
    },
    Product {
        target: String,
        was: String,
        now: String,
    },
    Families {
        target: String,
        added: Vec<String>,
        removed: Vec<String>,
    },
    Excluded {
        target: String,
        #[serde(flatten)]
        excluded: Excluded,
    },
    Included {
        target: String,
        project: String,
    },
    Issue {
        target: String,
        project: String,
        was: Option<String>,
        now: Option<String>,
    },
    NewStage {
        stage: String,
    },
    NoStage {
        stage: String,
    },
    Stage {
        stage: String,
        now: StageKind,
    },
    NewArtifact {
        artifact: String,
    },
    NoArtifact {
        artifact: String,
    },
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = "none";
        match self {
            Self::NewTarget { target, product } => write!(f, "{target}: new, {product}"),
            Self::NoTarget { target } => write!(f, "{target}: not there"),
            Self::Product { target, was, now } => {
                write!(f, "{target}: product `{now}`, previously `{was}`")
            }
            Self::Families {
                target,
                added,
                removed,
            } => {
                write!(f, "{target}: families")?;
                for name in added {
                    write!(f, " +{name}")?;
                }
                for name in removed {
                    write!(f, " -{name}")?;
                }
                Ok(())
            }
            Self::Excluded { target, excluded } => {
                let issue = excluded.issue.as_deref().unwrap_or("no issue named");
                write!(
                    f,
                    "{target}: {} is now excluded ({issue})",
                    excluded.project
                )
            }
            Self::Included { target, project } => write!(f, "{target}: {project} is now built"),
            Self::Issue {
                target,
                project,
                was,
                now,
            } => write!(
                f,
                "{target}: {project} is excluded for {}, previously for {}",
                now.as_deref().unwrap_or(none),
                was.as_deref().unwrap_or(none)
            ),
            Self::NewStage { stage } => write!(f, "stage {stage}: new"),
            Self::NoStage { stage } => write!(f, "stage {stage}: missing"),
            Self::Stage { stage, now } => match now {
                StageKind::Generic => write!(f, "stage {stage}: now built once for all targets"),
                StageKind::PerArch => write!(f, "stage {stage}: now built for each target"),
            },
            Self::NewArtifact { artifact } => write!(f, "artifact {artifact}: new"),
            Self::NoArtifact { artifact } => write!(f, "artifact {artifact}: missing"),
        }
    }
}

/// Returns all differences of a checkout: targets first, in the order of the tables.
pub(crate) fn drift(checkout: &Checkout) -> Vec<Drift> {
    let mut drift = Vec::new();
    for target in target::all() {
        match checkout.target(target.name()) {
            Some(declared) => one(target, declared, &mut drift),
            None => drift.push(Drift::NoTarget {
                target: target.to_string(),
            }),
        }
    }
    for declared in &checkout.targets {
        if Target::parse(&declared.name).is_err() {
            drift.push(Drift::NewTarget {
                target: declared.name.clone(),
                product: declared.product.clone(),
            });
        }
    }
    if let Some(topology) = &checkout.topology {
        for (stage, kind) in STAGES {
            let stage = stage.to_owned();
            match topology.stages.get(&stage).map(|found| found.kind) {
                None => drift.push(Drift::NoStage { stage }),
                Some(now) if now != kind => drift.push(Drift::Stage { stage, now }),
                Some(_) => {}
            }
        }
        for stage in topology.stages.keys() {
            if !STAGES.iter().any(|(known, _)| known == stage) {
                let stage = stage.clone();
                drift.push(Drift::NewStage { stage });
            }
        }
        let known: BTreeSet<&str> = ARTIFACTS.split_whitespace().collect();
        let found: BTreeSet<&str> = topology.artifacts.keys().map(String::as_str).collect();
        let lost = known.difference(&found).map(|name| (*name).to_owned());
        drift.extend(lost.map(|artifact| Drift::NoArtifact { artifact }));
        let new = found.difference(&known).map(|name| (*name).to_owned());
        drift.extend(new.map(|artifact| Drift::NewArtifact { artifact }));
    }
    drift
}

fn one(target: Target, declared: &super::Declared, drift: &mut Vec<Drift>) {
    let info = &target.info().declared;
    let name = || target.to_string();
    if info.product != declared.product {
        drift.push(Drift::Product {
            target: name(),
            was: info.product.clone(),
            now: declared.product.clone(),
        });
    }
    let was: BTreeSet<&String> = info.families.iter().collect();
    let now: BTreeSet<&String> = declared.families.iter().collect();
    let list = |a: &BTreeSet<&String>, b| a.difference(b).map(|one| (*one).clone()).collect();
    if was != now {
        drift.push(Drift::Families {
            target: name(),
            added: list(&now, &was),
            removed: list(&was, &now),
        });
    }
    for excluded in &declared.excluded {
        let project = &excluded.project;
        match info.excluded.iter().find(|one| one.project == *project) {
            None => drift.push(Drift::Excluded {
                target: name(),
                excluded: excluded.clone(),
            }),
            Some(Excluded { issue: was, .. }) if *was != excluded.issue => {
                drift.push(Drift::Issue {
                    target: name(),
                    project: project.clone(),
                    was: was.clone(),
                    now: excluded.issue.clone(),
                });
            }
            Some(_) => {}
        }
    }
    for Excluded { project, .. } in &info.excluded {
        if !declared.excluded.iter().any(|one| one.project == *project) {
            drift.push(Drift::Included {
                target: name(),
                project: project.clone(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocm::therock::Declared;

    fn same() -> Checkout {
        Checkout {
            targets: target::all()
                .map(|target| target.info().declared.clone())
                .collect(),
            ignored: Vec::new(),
            version: None,
            topology: None,
        }
    }

    #[test]
    fn what_is_the_same_is_no_drift() {
        assert_eq!(drift(&same()), []);
    }

    /// Returns a topology with the known stages and these artifacts.
    fn topology<'a>(artifacts: impl Iterator<Item = &'a str>) -> super::super::Topology {
        let mut text = "[metadata]\nversion = '2.0'\n[source_sets]\n".to_owned();
        for (name, kind) in STAGES {
            let kind = serde_json::to_string(&kind).unwrap();
            let stage = format!("[build_stages.{name}]\nartifact_groups = []\ntype = {kind}\n");
            text.push_str(&stage);
        }
        text.push_str("[artifact_groups.all]\ntype = 'generic'\n");
        for name in artifacts {
            let of = "artifact_group = 'all'\ntype = 'target-neutral'";
            let artifact = format!("[artifacts.{name}]\n{of}\n");
            text.push_str(&artifact);
        }
        super::super::topology::parse("t.toml", &text).unwrap()
    }

    #[test]
    fn artifacts_that_came_and_went_are_named() {
        let known = || ARTIFACTS.split_whitespace();
        assert_eq!(known().count(), 73);
        let mut checkout = same();
        checkout.topology = Some(topology(known()));
        assert_eq!(drift(&checkout), []);
        let others = known().filter(|name| *name != "rocwmma");
        checkout.topology = Some(topology(others.chain(["rocnew", "rocnewer"])));
        let lines: Vec<String> = drift(&checkout).iter().map(ToString::to_string).collect();
        let expected = [
            "artifact rocwmma: missing",
            "artifact rocnew: new",
            "artifact rocnewer: new",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn every_difference_is_named() {
        let mut checkout = same();
        checkout.targets.retain(|target| target.name != "gfx900");
        checkout.targets.push(Declared {
            name: "gfx1170".into(),
            product: "New".into(),
            families: vec!["gfx1170".into()],
            excluded: Vec::new(),
        });
        let mut targets = checkout.targets.iter_mut();
        let target = targets.find(|target| target.name == "gfx1103").unwrap();
        target.product = "Radeon 780M".into();
        target.families.pop();
        target.families.push("phoenix".into());
        target.excluded.retain(|one| one.project != "rccl");
        target.excluded.push(Excluded {
            project: "rocFFT".into(),
            issue: None,
        });
        target.excluded[0].issue = None;
        let lines: Vec<String> = drift(&checkout).iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "gfx900: not there",
                "gfx1103: product `Radeon 780M`, previously `AMD Radeon 780M Laptop iGPU`",
                "gfx1103: families +phoenix -gfx110X-igpu",
                "gfx1103: hipSPARSELt is excluded for none, previously for https://github.com/ROCm/TheRock/issues/2042",
                "gfx1103: rocFFT is now excluded (no issue named)",
                "gfx1103: rccl is now built",
                "gfx1170: new, New",
            ]
        );
    }
}
