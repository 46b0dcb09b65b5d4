//! Owns looking into what is somebody's content rather than rockenv's: the directories in a build volume or cache, in the
//! order that decides who has shared bytes, and what is known of them by their names.

use std::path::{Path, PathBuf};

use fs_err as fs;

use crate::rootfs;

/// Returns the directories down to `depth` below `top`, each after the one it is in; no links, and nothing that is mounted.
pub(super) fn directories(top: &Path, depth: usize) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if depth == 0 {
        return found;
    }
    let mounted = rootfs::mounts_below(top);
    let mut inside: Vec<PathBuf> = fs::read_dir(top)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .filter(|path| !mounted.contains(path))
        .collect();
    inside.sort_by_key(|path| (rank(path), path.clone()));
    for path in inside {
        let deeper = directories(&path, depth - 1);
        found.push(path);
        found.extend(deeper);
    }
    found
}

fn name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("")
}

/// What is made of hard links comes after what they link to: its own bytes are then what it really adds.
fn rank(path: &Path) -> u8 {
    match name(path) {
        "dist" => 1,
        "artifacts-unsplit" => 2,
        "artifacts" => 3,
        _ => 0,
    }
}

/// Says what a directory in a build volume is, where TheRock's layout tells.
pub(super) fn in_build(path: &Path) -> Option<&'static str> {
    match name(path) {
        "stage" => Some("what the project installs"),
        "dist" => Some("with what it needs, by hard links to stage"),
        "artifacts-unsplit" => Some("hard links to stage: frees little without it"),
        "artifacts" => Some("copies, by component"),
        "build" => Some("objects: ninja goes on from them"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hard_links_come_last_and_links_are_not_entered() {
        let top = tempfile::tempdir().unwrap();
        for path in [
            "artifacts-unsplit/x",
            "zlib/dist",
            "zlib/stage",
            "zlib/build/deep",
        ] {
            fs::create_dir_all(top.path().join(path)).unwrap();
        }
        fs::write(top.path().join("file"), "").unwrap();
        fs_err::os::unix::fs::symlink("/", top.path().join("link")).unwrap();
        let found = |depth| -> Vec<String> {
            let found = directories(top.path(), depth);
            let below = found
                .iter()
                .map(|path| path.strip_prefix(top.path()).unwrap());
            below.map(|path| path.display().to_string()).collect()
        };
        assert_eq!(found(0), [""; 0]);
        assert_eq!(found(1), ["zlib", "artifacts-unsplit"]);
        assert_eq!(
            found(2),
            [
                "zlib",
                "zlib/build",
                "zlib/stage",
                "zlib/dist",
                "artifacts-unsplit",
                "artifacts-unsplit/x"
            ]
        );
        assert!(in_build(Path::new("core/hip/dist")).is_some());
        assert!(in_build(Path::new("core/hip")).is_none());
    }
}
