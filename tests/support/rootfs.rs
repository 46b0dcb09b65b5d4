//! Small Debian trees to run containers on, built once per checkout and shared by all test programs.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use fs_err as fs;

use super::cache::made_once;

/// Part of the cache's name; raise it when the built content changes.
const VERSION: u32 = 2;

/// Files that no test reads. Every store copies, digests and removes the tree, and a service unpacks it.
const LEFT_OUT: [&str; 12] = [
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/doc/*/*",
    "/usr/share/zoneinfo/*",
    "/usr/share/cmake-*/Help/*",
    "/usr/lib/x86_64-linux-gnu/gconv/*",
    "/usr/lib/x86_64-linux-gnu/perl*/unicore/lib/*",
    "/usr/lib/x86_64-linux-gnu/perl/*/CORE/*",
    "/usr/lib/x86_64-linux-gnu/lib*san.so.*",
    "/usr/lib/gcc/*/lib*san*",
    "/usr/libexec/gcc/*/lto1",
    "/usr/bin/*-lto-dump-*",
];

/// Returns the tree; the first caller builds it, with mmdebstrap and the host's package mirror.
pub(crate) fn rootfs() -> PathBuf {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    TREE.get_or_init(|| build("rootfs", "minbase", &[])).clone()
}

/// Prepares the real cosign, which the host's distribution may lack, with its own libraries.
pub(crate) fn cosign() -> Command {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    let tree = TREE.get_or_init(|| build("cosign", "extract", &["cosign"]));
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    command
        .arg("--library-path")
        .arg(&libraries)
        .arg(tree.join("usr/bin/cosign"));
    command
}

/// Returns a tree with the tools for a build shaped like TheRock's. Its pip takes setuptools from Debian, and no
/// package from elsewhere.
pub(crate) fn builder() -> PathBuf {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    let packages = [
        "ca-certificates",
        "ccache",
        "cmake",
        "g++",
        "git",
        "make",
        "ninja-build",
        "python3",
        "python3-venv",
    ];
    let tree = TREE
        .get_or_init(|| build("builder", "minbase", &packages))
        .clone();
    let pip = "[global]\nindex-url = file:///nowhere\nfind-links = /usr/share/python-wheels\n";
    fs::write(tree.join("etc/pip.conf"), pip).expect("pip's configuration");
    // Tests that run at the same time link the image's files into their own stores, and unlink them. ccache would take a
    // header whose change time is newer than a compilation's start for one that changed meanwhile, and keep no result.
    let ccache = "sloppiness = include_file_ctime\n";
    fs::write(tree.join("etc/ccache.conf"), ccache).expect("ccache's configuration");
    tree
}

fn build(name: &str, variant: &str, packages: &[&str]) -> PathBuf {
    super::loopfs::need_root();
    made_once(&format!("{name}-{VERSION}"), "tree", |cache| {
        let part = cache.join("part");
        let mut clean = Command::new("rm");
        super::loopfs::run(clean.arg("-rf").arg("--one-file-system").arg(&part));
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "mmdebstrap",
            "--quiet",
        ]);
        command.arg(format!("--variant={variant}"));
        let left_out = LEFT_OUT.map(|path| format!("--dpkgopt=path-exclude={path}"));
        command.args(left_out);
        for path in ["doc/*/copyright", "zoneinfo/Etc/*"] {
            command.arg(format!("--dpkgopt=path-include=/usr/share/{path}"));
        }
        if !packages.is_empty() {
            command.arg(format!("--include={}", packages.join(",")));
        }
        super::loopfs::run(command.arg("trixie").arg(&part));
        fs::rename(&part, cache.join("tree")).expect("the tree's name");
    })
}
