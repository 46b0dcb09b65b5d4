//! Owns measuring inside directories whose content is not rockenv's: the directories in a build volume or cache, in
//! the order that decides which row owns shared bytes, and the purpose of those in TheRock's build tree.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use crate::rocm::therock::build_tree::is_top;
use crate::store::build_logs::text;
use crate::tree;

/// Purpose of a directory in TheRock's build tree. Directories of hard links come after their link targets, so that
/// their own bytes are the bytes that they add.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BuildTreePart {
    Build,
    /// The files that it installs.
    Stage,
    /// Those files plus its dependencies.
    Dist,
    /// Artifacts before they are split by target.
    ArtifactsUnsplit,
    Artifacts,
}

impl BuildTreePart {
    /// Returns the common name of these directories.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Build => "*/build",
            Self::Stage => "*/stage",
            Self::Dist => "*/dist",
            Self::ArtifactsUnsplit => "artifacts-unsplit",
            Self::Artifacts => "artifacts",
        }
    }

    pub(crate) fn note(self) -> &'static str {
        match self {
            Self::Build => "objects: ninja continues from them",
            Self::Stage => "what the project installs",
            Self::Dist => "with what it needs, by hard links to stage",
            Self::ArtifactsUnsplit => "hard links to stage: frees little without it",
            Self::Artifacts => "copies, by component",
        }
    }

    /// Returns the purpose of the directory `name` in the tree's top or in a sub-project.
    fn of(name: &str, in_top: bool, in_project: bool) -> Option<Self> {
        match name {
            "build" if in_project => Some(Self::Build),
            "stage" if in_project => Some(Self::Stage),
            "dist" if in_project || in_top => Some(Self::Dist),
            "artifacts-unsplit" if in_top => Some(Self::ArtifactsUnsplit),
            "artifacts" if in_top => Some(Self::Artifacts),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct FoundDirectory {
    pub(crate) path: PathBuf,
    /// Its purpose, or that of its parent.
    pub(crate) part: Option<BuildTreePart>,
    /// Whether it has that purpose itself.
    pub(crate) is_part: bool,
}

/// No sub-project of TheRock is deeper.
const DEEPEST: usize = 7;

/// These contain no sub-projects, but many other files.
const BARREN: [&str; 3] = ["CMakeFiles", "source", "stamp"];

pub(crate) fn is_therock(top: &Path) -> bool {
    text(top, Path::new("CMakeCache.txt")).is_some_and(|cache| is_top(&cache))
}

/// Returns the directories of TheRock's build tree by purpose.
pub(crate) fn parts(top: &Path) -> BTreeMap<BuildTreePart, Vec<PathBuf>> {
    let mut found = Vec::new();
    Walk::new(top, true).collect(top, DEEPEST, None, &mut found);
    let mut parts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for FoundDirectory { path, part, .. } in found {
        if let Some(part) = part {
            parts.entry(part).or_default().push(path);
        }
    }
    parts
}

/// Returns the directories down to `depth` below `top`, each after its parent; without links and mount points.
pub(crate) fn directories(top: &Path, depth: usize) -> Vec<FoundDirectory> {
    let mut found = Vec::new();
    // A link may lead to a directory that is not the store's.
    if depth > 0 && fs::symlink_metadata(top).is_ok_and(|found| found.is_dir()) {
        Walk::new(top, false).collect(top, depth, None, &mut found);
        // Sort across sub-projects, which have links to each other's stages.
        found.sort_by_key(|found| found.part);
    }
    found
}

struct Walk<'a> {
    top: &'a Path,
    therock: bool,
    mounted: Vec<PathBuf>,
    /// Look only for the parts of TheRock's tree.
    parts_only: bool,
}

impl<'a> Walk<'a> {
    fn new(top: &'a Path, parts_only: bool) -> Self {
        Self {
            top,
            therock: is_therock(top),
            mounted: tree::mounts_below(top),
            parts_only,
        }
    }

    fn collect(
        &self,
        directory: &Path,
        depth: usize,
        within: Option<BuildTreePart>,
        found: &mut Vec<FoundDirectory>,
    ) {
        if depth == 0 {
            return;
        }
        let inside = self.inside(directory);
        let in_project = self.therock && inside.iter().any(|path| name(path) == "stamp");
        let in_top = self.therock && directory == self.top;
        for path in inside {
            if self.parts_only && BARREN.contains(&name(&path)) {
                continue;
            }
            let part = within.or_else(|| BuildTreePart::of(name(&path), in_top, in_project));
            let is_part = within.is_none() && part.is_some();
            found.push(FoundDirectory {
                path: path.clone(),
                part,
                is_part,
            });
            if !(self.parts_only && is_part) {
                self.collect(&path, depth - 1, part, found);
            }
        }
    }

    fn inside(&self, directory: &Path) -> Vec<PathBuf> {
        let mut inside: Vec<PathBuf> = fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .filter(|path| !self.mounted.contains(path))
            .collect();
        inside.sort();
        inside
    }
}

fn name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes TheRock's build tree, or another one with the same names.
    fn tree(is_therock: bool) -> tempfile::TempDir {
        let top = tempfile::tempdir().unwrap();
        for path in DIRECTORIES {
            fs::create_dir_all(top.path().join(path)).unwrap();
        }
        fs::write(top.path().join("file"), "").unwrap();
        fs_err::os::unix::fs::symlink("/", top.path().join("link")).unwrap();
        if is_therock {
            let cache = "CMAKE_PROJECT_NAME:STATIC=THEROCK\n";
            fs::write(top.path().join("CMakeCache.txt"), cache).unwrap();
        }
        top
    }

    fn below<'a>(top: &Path, paths: impl IntoIterator<Item = &'a PathBuf>) -> String {
        let paths = paths.into_iter();
        let below = paths.map(|path| path.strip_prefix(top).unwrap().to_str().unwrap());
        below.collect::<Vec<_>>().join(" ")
    }

    const DIRECTORIES: [&str; 9] = [
        "artifacts-unsplit/x",
        "zlib/dist",
        "zlib/stage",
        "zlib/stamp",
        "zlib/build/a/build",
        "core/hip/dist",
        "core/hip/stamp",
        "core/build",
        "dist/rocm",
    ];

    #[test]
    fn hard_links_come_last_and_links_are_not_entered() {
        let top = tree(true);
        let found = |depth| {
            let found = directories(top.path(), depth);
            below(top.path(), found.iter().map(|found| &found.path))
        };
        assert_eq!(found(0), "");
        assert_eq!(found(1), "core zlib dist artifacts-unsplit");
        let expected = "core core/build core/hip zlib zlib/stamp zlib/build zlib/stage dist \
                        dist/rocm zlib/dist artifacts-unsplit artifacts-unsplit/x";
        assert_eq!(found(2), expected);
    }

    #[test]
    fn only_therocks_own_directories_are_known() {
        let top = tree(true);
        let known = |top: &Path| {
            let found = directories(top, 4);
            let parts = found.iter().filter(|found| found.is_part);
            below(top, parts.map(|found| &found.path))
        };
        let expected = "zlib/build zlib/stage core/hip/dist dist zlib/dist artifacts-unsplit";
        assert_eq!(known(top.path()), expected);
        let parts = parts(top.path()).into_iter();
        let parts = parts.map(|(part, paths)| (part, below(top.path(), &paths)));
        let parts: Vec<_> = parts.collect();
        let expected = [
            (BuildTreePart::Build, "zlib/build"),
            (BuildTreePart::Stage, "zlib/stage"),
            (BuildTreePart::Dist, "core/hip/dist dist zlib/dist"),
            (BuildTreePart::ArtifactsUnsplit, "artifacts-unsplit"),
        ];
        let expected = expected.map(|(part, paths)| (part, paths.to_owned()));
        assert_eq!(parts, expected);

        // The same names mean nothing in another tree.
        let other = tree(false);
        assert!(!is_therock(other.path()));
        assert!(known(other.path()).is_empty());
        let listed = directories(other.path(), 1);
        let listed = below(other.path(), listed.iter().map(|found| &found.path));
        assert_eq!(listed, "artifacts-unsplit core dist zlib");
    }
}
