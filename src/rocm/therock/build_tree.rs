//! Owns the layout of TheRock's build tree: the sub-projects that are also in an artifact, and the directories that
//! TheRock's own `+expunge` removes. Pure.

use std::path::{Component, Path, PathBuf};

/// A line in the `CMakeCache.txt` at the top of a build tree.
const PROJECT: &str = "CMAKE_PROJECT_NAME:STATIC=THEROCK";

/// The directories that `PROJECT+expunge` removes from a sub-project. The order matters: without stamps, ninja treats a
/// sub-project as never built, whatever else an interruption leaves. With stamps but without a stage, ninja would
/// wrongly find nothing to do.
pub(crate) const EXPUNGED: [&str; 5] = ["stamp", "stage.prebuilt", "build", "stage", "dist"];

/// Returns whether this is TheRock's own `CMakeCache.txt`.
pub(crate) fn is_top(cache: &str) -> bool {
    cache.lines().any(|line| line.trim_end() == PROJECT)
}

/// Parses an `artifact_manifest.txt`: the directories of the sub-projects whose stages are in that artifact. Skips
/// everything except plain paths below the build tree.
pub(crate) fn archived(manifest: &str) -> Vec<PathBuf> {
    let project = |line: &str| {
        let stage = Path::new(line.trim().trim_end_matches('/'));
        let plain = stage
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        let project = stage.parent()?;
        let fits = plain && stage.file_name()? == "stage" && !project.as_os_str().is_empty();
        fits.then(|| project.to_owned())
    };
    manifest.lines().filter_map(project).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_names_stages_below_the_tree() {
        let manifest = "math-libs/BLAS/rocBLAS/stage\nbase/half/stage/\r\n\n/etc/stage\n../out/stage\na/../../b/stage\nstage\n\
                        core/hip/dist\n./c/stage\n";
        assert_eq!(
            archived(manifest),
            [Path::new("math-libs/BLAS/rocBLAS"), Path::new("base/half")]
        );
    }

    #[test]
    fn the_top_is_known_by_its_project() {
        assert!(is_top("A:STRING=b\nCMAKE_PROJECT_NAME:STATIC=THEROCK\n"));
        assert!(!is_top("CMAKE_PROJECT_NAME:STATIC=THEROCKET\n"));
        assert!(!is_top("# CMAKE_PROJECT_NAME:STATIC=THEROCK"));
    }
}
