//! Owns identifying caches: which tool made one, judged by its files, and how that tool shrinks it.

use std::collections::BTreeSet;

use serde::Serialize;

/// A tool that keeps a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Compiler output, by ccache.
    Ccache,
    Uv,
    Pip,
    Pacman,
    Apt,
}

/// The entries of a cache: paths below its directory; those of directories end in a slash.
#[derive(Clone, Debug, Default)]
pub struct Entries(pub(crate) BTreeSet<String>);

impl Entries {
    fn has(&self, path: &str) -> bool {
        self.0.contains(path)
    }

    /// Returns the direct entries of a directory, whose name is empty for the top or ends in a slash.
    fn within<'a>(&'a self, directory: &'a str) -> impl Iterator<Item = &'a str> {
        let all = self.0.iter();
        let below = all.filter_map(move |path| path.strip_prefix(directory));
        below.filter(|path| !path.is_empty() && !path.trim_end_matches('/').contains('/'))
    }

    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        let names = self.0.iter().map(|path| path.trim_end_matches('/'));
        names.filter(|name| !name.contains('/'))
    }
}

/// Returns whether the content of a directory of this name helps to identify the tool.
pub fn identifies_tool(name: &str) -> bool {
    matches!(name, "archives" | "http" | "http-v2") || is_digit(name)
}

/// Returns whether a name is one of the sixteen directories by a hash's first digit.
fn is_digit(name: &str) -> bool {
    matches!(name.as_bytes(), [b'0'..=b'9' | b'a'..=b'f'])
}

fn is_part(name: &str) -> bool {
    name.strip_suffix('/').is_some_and(is_digit)
}

/// Returns whether a name is a bucket of uv, such as `wheels-v5/`.
fn is_bucket(name: &str) -> bool {
    let parts = name
        .strip_suffix('/')
        .and_then(|name| name.rsplit_once("-v"));
    parts.is_some_and(|(word, version)| {
        !word.is_empty() && !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit())
    })
}

impl CacheKind {
    /// Identifies the tool by the files that it creates itself. Some tools treat every entry as theirs, so a cache with
    /// foreign entries belongs to no known tool.
    pub fn of(entries: &Entries) -> Option<Self> {
        [Self::Ccache, Self::Uv, Self::Pip, Self::Pacman, Self::Apt]
            .into_iter()
            .find(|kind| kind.made(entries))
    }

    fn made(self, entries: &Entries) -> bool {
        let all = |directory: &str, fits: fn(&str) -> bool| {
            let mut found = entries.within(directory).peekable();
            found.peek().is_some() && found.all(fits)
        };
        match self {
            Self::Ccache => {
                let own = |path: &str| {
                    matches!(path, "stats" | "CACHEDIR.TAG")
                        || path.strip_suffix("/stats").is_some_and(is_digit)
                };
                let part = |name: &str| {
                    let mut below = entries.0.iter().filter_map(|path| path.strip_prefix(name));
                    is_part(name) && below.any(own)
                };
                entries.has("ccache.conf") || entries.within("").any(part)
            }
            Self::Uv => {
                let own = |name: &str| {
                    is_bucket(name)
                        || matches!(name, "CACHEDIR.TAG" | ".gitignore" | ".git" | ".lock")
                        || name.starts_with(".tmp")
                };
                let kept = |name: &str| {
                    is_bucket(name) && (name.starts_with("archive-") || name.starts_with("wheels-"))
                };
                entries.has("CACHEDIR.TAG") && all("", own) && entries.within("").any(kept)
            }
            Self::Pip => {
                // Before 23.3, pip keeps its downloads in a directory with a generic name, and may have no other.
                let own = |name: &str| matches!(name, "http/" | "wheels/");
                all("http-v2/", is_part) || (all("http/", is_part) && all("", own))
            }
            Self::Pacman => entries
                .within("")
                .any(|name| name.contains(".pkg.tar.") && !name.ends_with('/')),
            Self::Apt => {
                let own =
                    |name: &str| matches!(name, "partial/" | "lock") || (name.ends_with(".deb"));
                let archives = |directory: &str| {
                    entries.has(&format!("{directory}partial/")) && all(directory, own)
                };
                archives("archives/") || archives("")
            }
        }
    }

    pub fn tool(self) -> &'static str {
        match self {
            Self::Ccache => "ccache",
            Self::Uv => "uv",
            Self::Pip => "pip",
            Self::Pacman => "pacman",
            Self::Apt => "apt-get",
        }
    }

    /// Returns whether root owns its files.
    pub fn is_root(self) -> bool {
        matches!(self, Self::Pacman | Self::Apt)
    }

    /// Describes how the tool shrinks a cache, and whether that may empty it.
    pub fn shrinks(self) -> (&'static str, bool) {
        match self {
            Self::Ccache => ("removes the least recently used entries", false),
            Self::Uv => (
                "removes unused entries; if that is not enough, everything",
                true,
            ),
            Self::Pip | Self::Apt => ("empties it completely", true),
            Self::Pacman => ("removes packages that are not installed", false),
        }
    }

    /// Returns a shell script that shrinks the cache in directory `$1` to `$2` bytes, or as near as the tool can.
    pub fn script(self) -> &'static str {
        match self {
            Self::Ccache => {
                // ccache reads a size of 0 as no limit.
                r#"CCACHE_DIR="$1" CCACHE_MAXSIZE="$(($2 < 1000 ? 1 : $2 / 1000))k" exec ccache --cleanup"#
            }
            // Unused entries first; everything only if that was not enough. uv then also tries to remove the
            // directory, which is a mount point, and so fails after doing its work.
            Self::Uv => {
                r#"export UV_CACHE_DIR="$1"
uv cache prune
test "$(du -sk "$1" | cut -f 1)" -le "$(($2 / 1024))" || uv cache clean || test -z "$(ls -A "$1")""#
            }
            Self::Pip => r#"PIP_CACHE_DIR="$1" exec pip cache purge"#,
            Self::Pacman => r#"exec pacman -Sc --noconfirm --cachedir "$1""#,
            Self::Apt => {
                r#"test -d "$1/archives" || set -- "${1%/archives}" "$2"
exec apt-get clean -o Dir::Cache="$1""#
            }
        }
    }
}

/// Describes a cache that no known tool keeps, by the names in its top directory.
pub fn content<'a>(names: impl IntoIterator<Item = &'a str> + Clone) -> Option<&'static str> {
    let any = |fits: fn(&str) -> bool| names.clone().into_iter().any(fits);
    // Each entry is a kernel, named by 256 bits in base 32.
    let triton = |name: &str| {
        name.len() == 52
            && name
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || (b'2'..=b'7').contains(&byte))
    };
    if any(|name| name.ends_with(".ukdb") || name.ends_with(".ufdb.txt")) {
        Some("MIOpen kernels")
    } else if any(|name| name.starts_with("llvmcache-")) {
        Some("comgr code objects")
    } else if any(triton) {
        Some("Triton kernels")
    } else {
        None
    }
}

/// Adds up hits and misses of ccache's `stats` files: one number per line, with a meaning for each position.
pub fn ccache_hits<'a>(files: impl IntoIterator<Item = &'a str>) -> (u64, u64) {
    const MISSES: usize = 4;
    const HITS: [usize; 2] = [8, 22];
    let (mut hits, mut misses) = (0_u64, 0_u64);
    for file in files {
        let numbers: Vec<u64> = file
            .lines()
            // Any number can be in a user's cache. Sums of larger ones could overflow.
            .map(|line| line.trim().parse::<u32>().map_or(0, u64::from))
            .collect();
        let at = |index: usize| numbers.get(index).copied().unwrap_or(0);
        misses += at(MISSES);
        hits += HITS.into_iter().map(at).sum::<u64>();
    }
    (hits, misses)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(entries: &str) -> Option<CacheKind> {
        let entries = entries.split_ascii_whitespace().map(str::to_owned);
        CacheKind::of(&Entries(entries.collect()))
    }

    #[test]
    fn files_tell_the_tool() {
        use CacheKind::{Apt, Ccache, Pacman, Pip, Uv};
        for (entries, kind) in [
            ("3/ 3/stats tmp/", Ccache),
            ("b/ b/CACHEDIR.TAG b/f/ tmp/", Ccache),
            ("0/ 0/c/ 0/c/stats", Ccache),
            ("ccache.conf", Ccache),
            ("archive-v0/ sdists-v9/ .lock .gitignore CACHEDIR.TAG", Uv),
            ("http-v2/ http-v2/a/ wheels/ selfcheck/", Pip),
            ("http/ http/0/", Pip),
            ("zlib-1:1.3-1-x86_64.pkg.tar.zst", Pacman),
            (
                "archives/ archives/lock archives/partial/ pkgcache.bin",
                Apt,
            ),
            ("partial/ hello_1_amd64.deb", Apt),
        ] {
            assert_eq!(of(entries), Some(kind), "{entries}");
        }
    }

    #[test]
    fn what_only_looks_like_a_tool_s_is_nobody_s() {
        for entries in [
            "3/ tmp/",
            "3/ 3/photos/ tmp/",
            "archive-v2.tar",
            "archive-v2.tar CACHEDIR.TAG",
            "archive-v2/ wheels-v1/",
            "archive-v0/ CACHEDIR.TAG mine.txt",
            "archive-vintage/ CACHEDIR.TAG",
            "http/ http/logs/",
            "http/ http/a/ logs/",
            "http-v2",
            "wheels/",
            "thing.pkg.tar.d/",
            "archives/",
            "archives/ archives/2024.tar archives/partial/",
            "partial/ mine.txt",
            "mine.deb",
            "something",
            "",
        ] {
            assert_eq!(of(entries), None, "{entries}");
        }
    }

    #[test]
    fn a_cache_is_measured_by_busybox_too() {
        assert_has!(CacheKind::Uv.script(), "du -sk ");
    }

    #[test]
    fn what_no_tool_keeps_is_named() {
        let triton = "KMZBXNPV5TB27ZFXWKZQ5LSTK7ZHZBAKSLGSVQ6JGSBB2ZTM3TQA";
        assert_eq!(triton.len(), 52);
        for (name, wanted) in [
            ("gfx1103_6.ukdb", Some("MIOpen kernels")),
            ("llvmcache-0123", Some("comgr code objects")),
            (triton, Some("Triton kernels")),
            ("README", None),
        ] {
            assert_eq!(content([name]), wanted, "{name}");
        }
    }

    #[test]
    fn hits_are_at_their_places() {
        let file = |values: &[(usize, u64)]| {
            let mut numbers = vec![0; 49];
            for (at, value) in values {
                numbers[*at] = *value;
            }
            numbers
                .iter()
                .map(|number| format!("{number}\n"))
                .collect::<String>()
        };
        let files = [
            file(&[(4, 6), (22, 2)]),
            file(&[(8, 1)]),
            "damaged".to_owned(),
            file(&[(8, u64::MAX)]),
        ];
        assert_eq!(ccache_hits(files.iter().map(String::as_str)), (3, 6));
    }
}
