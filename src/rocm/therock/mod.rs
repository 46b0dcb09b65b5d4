//! A checkout of TheRock: its table of targets and its topology, read as data.
//!
//! Nothing in a checkout is executed. `cmake` parses the function call that declares a target, `topology` parses the
//! TOML, and both refuse unknown input rather than guess. `drift` compares a checkout with the built-in table,
//! `fingerprints` reads what TheRock writes when it is configured, and `tarballs` finds the downloads of its build.

pub(crate) mod build_tree;
mod cmake;
mod drift;
mod fingerprints;
pub(crate) mod tarballs;
mod targets;
mod topology;

use std::io::Read as _;
use std::path::Path;

pub(crate) use drift::drift;
pub(crate) use fingerprints::ArtifactFingerprints;
pub(crate) use targets::{Declared, Excluded};
pub(crate) use topology::{ArtifactType as StageKind, Topology};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::span;

pub(crate) const TARGETS: &str = "cmake/therock_amdgpu_targets.cmake";
/// The user's own targets, in the same directory.
const CUSTOM_TARGETS: &str = "cmake/therock_custom_amdgpu_targets.cmake";
const TOPOLOGY: &str = "BUILD_TOPOLOGY.toml";

const VERSION: &str = "version.json";

/// Maximum size of a file, in bytes. TheRock's own files are below 64 KiB.
const LARGEST: u64 = 4 << 20;

#[derive(Clone, Debug)]
pub(crate) struct Checkout {
    /// Targets in the checkout's order.
    pub targets: Vec<Declared>,
    /// Arguments of the table that have no effect, and what is unknown in the topology, each with its position.
    pub ignored: Vec<String>,
    /// Stages, groups and artifacts. `None` for older checkouts, and for a topology with something unknown.
    pub topology: Option<Topology>,
    /// The version, such as `7.14.0`. `None` for checkouts before April 2025.
    pub version: Option<String>,
}

impl Checkout {
    pub(crate) fn is_one(directory: &Path) -> bool {
        directory.join(TARGETS).is_file()
    }

    pub(crate) fn read(directory: &Path) -> Result<Self> {
        let Some(text) = text(directory, TARGETS)? else {
            return Err(not_found!(
                "`{}` is not a checkout of TheRock: it has no `{TARGETS}`",
                directory.display()
            )
            .help("git clone https://github.com/ROCm/TheRock"));
        };
        let targets::TargetTable {
            mut targets,
            mut ignored,
        } = targets::parse(TARGETS, &text)?;
        if let Some(text) = self::text(directory, CUSTOM_TARGETS)? {
            let table = targets::parse(CUSTOM_TARGETS, &text)?;
            ignored.extend(table.ignored);
            for custom in table.targets {
                if targets.iter().any(|target| target.name == custom.name) {
                    let message =
                        format!("{CUSTOM_TARGETS}: `{}` is already declared", custom.name);
                    return Err(invalid!("{message}"));
                }
                targets.push(custom);
            }
        }
        // TheRock adds keys every few weeks. Without the topology, any stage may build any artifact.
        let topology = self::text(directory, TOPOLOGY)?.and_then(|text| {
            topology::parse(TOPOLOGY, &text)
                .inspect_err(|error| ignored.push(error.message().to_owned()))
                .ok()
        });
        let version = self::text(directory, VERSION)?.map(|text| version(&text));
        Ok(Self {
            targets,
            ignored,
            topology,
            version: version.transpose()?,
        })
    }

    pub(crate) fn target(&self, name: &str) -> Option<&Declared> {
        self.targets.iter().find(|target| target.name == name)
    }
}

fn version(text: &str) -> Result<String> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Version {
        rocm_version: String,
    }

    let found: Version = serde_json::from_str(text)
        .map_err(|error| invalid!("{VERSION} has no `rocm-version`").source(error))?;
    Ok(found.rocm_version)
}

fn text(directory: &Path, file: &str) -> Result<Option<String>> {
    let Some(bytes) = content(directory, Path::new(file), LARGEST)? else {
        return Ok(None);
    };
    let text = String::from_utf8(bytes).map_err(|error| {
        invalid!("`{}` is not UTF-8", directory.join(file).display()).source(error)
    })?;
    Ok(Some(text))
}

/// Reads a regular file below a directory without following links; `None` if it does not exist.
fn content(directory: &Path, below: &Path, largest: u64) -> Result<Option<Vec<u8>>> {
    let path = directory.join(below);
    let shown = || format!("cannot read `{}`", path.display());
    let refused = || {
        invalid!(
            "`{}` is not a regular file of at most {largest} bytes",
            path.display()
        )
    };
    // `O_DIRECTORY` rejects a FIFO or another special file without opening it.
    let flags = OFlag::O_DIRECTORY | OFlag::O_PATH | OFlag::O_CLOEXEC;
    let found = nix::fcntl::open(directory, flags, Mode::empty())
        .and_then(|top| beneath::open_by(top, below, OFlag::O_PATH, beneath::BELOW))
        .and_then(|found| beneath::open_regular(found, OFlag::O_RDONLY));
    let file = match found {
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
        Err(Errno::ELOOP) => return Err(refused().source("links are not followed")),
        other => fs_err::File::from_parts(other.context(shown)?.into(), &path),
    };
    let found = file.metadata()?;
    if !found.is_file() || found.len() > largest {
        return Err(refused());
    }
    let mut bytes = Vec::new();
    file.take(largest).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Maximum number of characters of a line that an error shows.
const SHOWN: usize = 160;

/// Returns an error that shows a position in a text: `FILE:LINE:COLUMN: MESSAGE`, with the line and a mark below it.
fn error_at(file: &str, text: &str, at: span::Place, message: &str) -> Error {
    let boundary = |mut at: usize| {
        at = at.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    let start = boundary(at.start);
    let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
    let line = text[line_start..].lines().next().unwrap_or_default();
    let number = span::line(text, start);
    let column = 1 + text[line_start..start].chars().count();
    let end = boundary(at.end).max(start);
    let marked = text[start..end].lines().next().unwrap_or_default();
    let width = marked.chars().count();
    let shown: String = line.chars().take(SHOWN).collect();
    let shown = shown.replace('\t', " ");
    let before = column - 1;
    let shown = match before < SHOWN {
        true => {
            let mark = "^".repeat(width.clamp(1, SHOWN - before));
            format!("{shown}\n{}{mark}", " ".repeat(before))
        }
        // The position is beyond the shown part. A line may have millions of characters.
        false => shown,
    };
    invalid!("{file}:{number}:{column}: {message}").source(shown)
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    #[test]
    fn a_mark_is_no_longer_than_the_line_that_is_shown() {
        let text = "x".repeat(1 << 20);
        let end = text.len();
        for (start, marked) in [(5, SHOWN - 5), (SHOWN - 1, 1), (SHOWN, 0), (end - 1, 0)] {
            let error = error_at("f.cmake", &text, start..end, "wrong");
            let shown = &error.chain()[1];
            assert_eq!(shown.matches('^').count(), marked, "{start}");
            assert!(shown.len() <= 2 * SHOWN + 1, "{start}");
        }
    }

    #[test]
    fn an_unknown_key_of_the_topology_leaves_the_targets() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("cmake")).unwrap();
        let table = "therock_add_amdgpu_target(gfx1103 \"x\" FAMILY gfx110X-all)\n";
        fs::write(at(TARGETS), table).unwrap();
        fs::write(at(TOPOLOGY), "new = 1\n").unwrap();
        let checkout = Checkout::read(directory.path()).unwrap();
        assert!(checkout.target("gfx1103").is_some() && checkout.topology.is_none());
        assert_has!(checkout.ignored[0], "1:1: unknown field `new`");
    }

    #[test]
    fn links_and_pipes_in_a_checkout_are_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("cmake")).unwrap();
        fs::write(at("cmake/file"), "text").unwrap();
        fs::os::unix::fs::symlink("cmake", at("link")).unwrap();
        fs::os::unix::fs::symlink("cmake/file", at("file")).unwrap();
        fs::os::unix::fs::symlink("/dev/zero", at("endless")).unwrap();
        nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let read = |name: &str| text(directory.path(), name);
        assert_eq!(read("cmake/file").unwrap().as_deref(), Some("text"));
        for name in ["absent", "cmake/absent", "cmake/file/below"] {
            assert_eq!(read(name).unwrap(), None, "{name}");
        }
        for name in ["link/file", "file", "endless", "pipe", "cmake"] {
            let error = read(name).unwrap_err();
            assert_has!(error.message(), "is not a regular file");
        }
        assert_eq!(text(&at("cmake/file"), TARGETS).unwrap(), None);
        assert_eq!(text(&at("absent"), TARGETS).unwrap(), None);
        assert_eq!(text(&at("pipe"), TARGETS).unwrap(), None);
    }
}
