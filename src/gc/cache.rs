//! Owns what caches are: which tool made one, told by its files, and how that tool shrinks it.

use serde::Serialize;

/// A tool that keeps a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Compilers' results, by ccache.
    Ccache,
    /// Python packages, by uv.
    Uv,
    /// Python packages, by pip.
    Pip,
    /// Packages of Arch.
    Pacman,
    /// Packages of Debian and Ubuntu.
    Apt,
}

impl Kind {
    /// Tells by the names in a cache's top directory.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str> + Clone) -> Option<Self> {
        let has = |wanted: &str| names.clone().into_iter().any(|name| name == wanted);
        let any = |fits: fn(&str) -> bool| names.clone().into_iter().any(fits);
        // Before 23.3 pip has its downloads in a directory that could be anybody's, and maybe in no other.
        let foreign = |name: &str| !matches!(name, "http" | "wheels");
        // Its directories come one by one, as results do.
        let digit = |name: &str| matches!(name.as_bytes(), [b'0'..=b'9' | b'a'..=b'f']);
        if has("ccache.conf") || (any(digit) && has("tmp")) {
            Some(Self::Ccache)
        } else if any(|name| name.starts_with("archive-v") || name.starts_with("wheels-v")) {
            Some(Self::Uv)
        } else if has("http-v2") || has("selfcheck") || (has("http") && !any(foreign)) {
            Some(Self::Pip)
        } else if any(|name| name.contains(".pkg.tar.")) {
            Some(Self::Pacman)
        } else if has("archives") || any(|name| name.ends_with(".deb")) {
            Some(Self::Apt)
        } else {
            None
        }
    }

    /// Returns the program.
    pub fn tool(self) -> &'static str {
        match self {
            Self::Ccache => "ccache",
            Self::Uv => "uv",
            Self::Pip => "pip",
            Self::Pacman => "pacman",
            Self::Apt => "apt-get",
        }
    }

    /// Says whether root's files are in it.
    pub fn is_root(self) -> bool {
        matches!(self, Self::Pacman | Self::Apt)
    }

    /// Returns a shell script that shrinks the cache in directory `$1` to `$2` bytes, or as near as the tool can.
    pub fn script(self) -> &'static str {
        match self {
            Self::Ccache => {
                r#"CCACHE_DIR="$1" CCACHE_MAXSIZE="$(($2 / 1000))k" exec ccache --cleanup"#
            }
            // Unused entries first; all of it only where they were not enough. Then uv wants to remove the directory too, which
            // is mounted, and so fails when it is done.
            Self::Uv => {
                r#"export UV_CACHE_DIR="$1"
uv cache prune
test "$(du -s --block-size=1 "$1" | cut -f 1)" -le "$2" || uv cache clean || test -z "$(ls -A "$1")""#
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

/// Says what a cache holds that no tool here keeps, by the names in its top directory.
pub fn content<'a>(names: impl IntoIterator<Item = &'a str> + Clone) -> Option<&'static str> {
    let any = |fits: fn(&str) -> bool| names.clone().into_iter().any(fits);
    // 256 bits in base 32, of which each is a kernel.
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

/// Adds up hits and misses of ccache's `stats` files: numbers, one a line, of which each position has its meaning.
pub fn ccache_hits<'a>(files: impl IntoIterator<Item = &'a str>) -> (u64, u64) {
    const MISSES: usize = 4;
    const HITS: [usize; 2] = [8, 22];
    let (mut hits, mut misses) = (0, 0);
    for file in files {
        let numbers: Vec<u64> = file
            .lines()
            .map(|line| line.trim().parse().unwrap_or(0))
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

    #[test]
    fn files_tell_the_tool() {
        for (names, kind) in [
            (&["3", "tmp"][..], Some(Kind::Ccache)),
            (&["ccache.conf"], Some(Kind::Ccache)),
            (&["archive-v0", ".lock", "CACHEDIR.TAG"], Some(Kind::Uv)),
            (&["http-v2", "wheels"], Some(Kind::Pip)),
            (&["http"], Some(Kind::Pip)),
            (&["http", "logs"], None),
            (&["zlib-1:1.3-1-x86_64.pkg.tar.zst"], Some(Kind::Pacman)),
            (&["archives", "pkgcache.bin"], Some(Kind::Apt)),
            (&["partial", "hello_1_amd64.deb"], Some(Kind::Apt)),
            (&["something"], None),
            (&[], None),
        ] {
            assert_eq!(Kind::of(names.iter().copied()), kind, "{names:?}");
        }
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
        ];
        assert_eq!(ccache_hits(files.iter().map(String::as_str)), (3, 6));
    }
}
