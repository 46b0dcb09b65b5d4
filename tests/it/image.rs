//! Builds images with the real tools. Needs root; the Debian tests need the package mirror.

mod deep;
mod inputs;
mod listed;
mod stopped;
mod verified;

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rockenv::testing::digest::compare;
use rockenv::testing::error::{Kind, Result};
use rockenv::testing::{BuildContext, BuildProgress, Built, Recipe, TaskContext, build};

use crate::support::run::{HANGS, wait_for, wait_until};

struct Place {
    dir: tempfile::TempDir,
    mirrors: BTreeMap<String, String>,
    cancel: AtomicBool,
    date: i64,
}

impl Place {
    fn new() -> Self {
        // On the disk that a store would use, because /tmp may be in memory.
        let dir = tempfile::Builder::new()
            .prefix(&format!("rockenv-image-{}-", std::process::id()))
            .tempdir_in("/var/tmp")
            .unwrap();
        Self {
            dir,
            mirrors: BTreeMap::new(),
            cancel: AtomicBool::new(false),
            date: 1_790_000_000,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn build(&self, recipe: &str, name: &str) -> Result<Built> {
        self.build_with(recipe, name, &mut |_| {})
    }

    fn build_with(
        &self,
        recipe: &str,
        name: &str,
        progress: &mut dyn FnMut(BuildProgress<'_>),
    ) -> Result<Built> {
        let into = self.path(name);
        fs_err::create_dir_all(&into).unwrap();
        let recipe = Recipe::parse(recipe, "test.toml", self.dir.path()).unwrap();
        let built = build(
            &recipe,
            &mut BuildContext {
                into: &into,
                blobs: &self.path("blobs"),
                source_date: Some(self.date),
                task: TaskContext {
                    mirrors: &self.mirrors,
                    logins: &rockenv::testing::Logins::default(),
                    notice: rockenv::testing::Notice::default(),
                    env: &BTreeMap::new(),
                    cancel: &self.cancel,
                    progress,
                },
            },
        );
        if built.is_ok() {
            assert!(!into.join(".rockenv-build").exists());
        }
        built
    }

    #[track_caller]
    fn assert_same(&self, a: &str, b: &str) {
        let differences =
            compare(&self.path(a), &self.path(b), 20, &AtomicBool::new(false)).unwrap();
        assert!(differences.is_empty(), "{differences:#?}");
    }

    fn mounts_and_processes(&self) -> Vec<String> {
        mounts_and_processes(self.dir.path().to_str().unwrap())
    }
}

/// Returns the mounts and processes below paths that start with `path`.
fn mounts_and_processes(path: &str) -> Vec<String> {
    let mut found: Vec<String> = fs_err::read_to_string("/proc/self/mounts")
        .unwrap()
        .lines()
        .filter(|line| line.contains(path))
        .map(ToString::to_string)
        .collect();
    for entry in fs_err::read_dir("/proc").unwrap() {
        let process = entry.unwrap().path();
        let line = fs_err::read(process.join("cmdline")).unwrap_or_default();
        let root = fs_err::read_link(process.join("root")).unwrap_or_default();
        // The environment of mmdebstrap and its children names the scratch directory.
        let environment = fs_err::read(process.join("environ")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        if root.to_string_lossy().starts_with(path)
            || String::from_utf8_lossy(&environment).contains(path)
        {
            found.push(line);
        }
    }
    found
}

fn sh(script: &str, directory: &Path) {
    let output = Command::new("sh")
        .args(["-ec", script])
        .current_dir(directory)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{script}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Writes the recipe of image `x`.
fn recipe(store: &crate::support::env::TestStore, provider: &str, table: &str) {
    let text = format!("schema = 1\nprovider = \"{provider}\"\n[{provider}]\n{table}\n");
    fs_err::write(store.work().join("images/x.toml"), text).unwrap();
}

const TRIXIE: &str = "schema = 1\nprovider = \"mmdebstrap\"\n\
     [mmdebstrap]\ndistribution = \"debian\"\nsuite = \"trixie\"\napt-options = ['Acquire::Retries \"3\"']\n";

#[test]
fn debian_twice_is_one_digest() {
    let place = Place::new();
    let mut lines = 0;
    let first = place
        .build_with(TRIXIE, "a", &mut |progress| {
            lines += u32::from(matches!(progress, BuildProgress::Line(_)));
        })
        .unwrap();
    assert!(lines > 5, "{lines}");
    let second = place.build(TRIXIE, "b").unwrap();
    place.assert_same("a", "b");
    assert_eq!(first, second);
    assert_eq!(
        (
            first.os_release.id.as_str(),
            first.os_release.version_id.as_str()
        ),
        ("debian", "13")
    );
    assert!(
        first.packages.len() > 60 && first.packages.iter().any(|package| package.name == "libc6")
    );
    assert!(first.entries > 4000 && first.bytes > 50 << 20, "{first:?}");
    assert_eq!(
        fs_err::metadata(place.path("a")).unwrap().mtime(),
        place.date
    );
    assert_eq!(fs_err::read(place.path("a/etc/resolv.conf")).unwrap(), b"");
    assert!(!place.path("a/dev/null").exists());
    assert_eq!(place.mounts_and_processes(), Vec::<String>::new());
}

#[test]
fn a_cancelled_build_leaves_no_process_and_no_mount() {
    let place = Place::new();
    let mut stopped = None;
    let outcome = place.build_with(TRIXIE, "a", &mut |progress| {
        // Cancels in the middle of the build, with /proc and others mounted into the new tree.
        if let BuildProgress::Line(line) = progress
            && line.contains("installing essential packages")
        {
            stopped = Some(Instant::now());
            place.cancel.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!(outcome.unwrap_err().kind(), Kind::Signal(2));
    assert!(
        stopped.unwrap().elapsed() < HANGS,
        "{:?}",
        stopped.unwrap().elapsed()
    );
    assert_eq!(place.mounts_and_processes(), Vec::<String>::new());
}

#[test]
fn a_killed_build_leaves_no_process_and_no_mount() {
    // This test program, told to run the test above, is the process to kill.
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "image::debian_twice_is_one_digest"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let path = format!("/var/tmp/rockenv-image-{}-", child.id());
    wait_until("something runs inside the new tree", || {
        assert!(child.try_wait().unwrap().is_none());
        let installs = |line: &String| line.contains("dpkg\0") && line.contains("--install");
        mounts_and_processes(&path).iter().any(installs)
    });
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("something is left", || match mounts_and_processes(&path) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:#?}")),
    });
    for entry in fs_err::read_dir("/var/tmp").unwrap() {
        let entry = entry.unwrap().path();
        if entry.to_str().is_some_and(|name| name.starts_with(&path)) {
            sh("rm -rf --one-file-system \"$PWD\"", &entry);
        }
    }
}

#[test]
fn a_failing_tool_is_shown_with_what_it_says_is_wrong() {
    let place = Place::new();
    let recipe = TRIXIE.replace("trixie", "no-such-suite");
    let error = place.build(&recipe, "a").unwrap_err();
    // The message begins with apt's complaint about the archive, and the failed tool follows.
    let said = error.message();
    assert!(
        said.starts_with("apt says: ") && said.contains("no-such-suite"),
        "{error:?}"
    );
    let chain = error.chain().join("\n");
    assert!(
        chain.contains("`mmdebstrap` failed with status"),
        "{error:?}"
    );
}

#[test]
fn a_snapshot_without_an_archive_says_what_to_configure() {
    let apt = Command::new("apt-get").arg("--version").output().unwrap();
    let apt = String::from_utf8_lossy(&apt.stdout).into_owned();
    // Newer versions select dated archives themselves.
    if !["apt 2.4", "apt 2.6", "apt 2.7"]
        .iter()
        .any(|old| apt.starts_with(old))
    {
        return crate::support::skip::skip(
            "a_snapshot_without_an_archive",
            "this host's apt knows archives",
        );
    }
    let place = Place::new();
    let error = place
        .build(&format!("{TRIXIE}snapshot = \"20260101T000000Z\"\n"), "a")
        .unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(
        error.help_text().unwrap().contains("`debian-snapshot = "),
        "{error:?}"
    );
}

/// Makes a repository in a directory that others may enter, with a `base` that depends on another package, as in the
/// real one.
pub(crate) fn arch_repository(place: &Path) {
    let directory = place.join("packages");
    let package = |name: &str, body: &str| {
        let dir = directory.join(name);
        fs_err::create_dir_all(&dir).unwrap();
        fs_err::write(
            dir.join("PKGBUILD"),
            format!("pkgname={name}\npkgver=1\npkgrel=1\narch=(any)\n{body}"),
        )
        .unwrap();
    };
    let filesystem = "package() {\n mkdir -p $pkgdir/etc $pkgdir/usr/bin $pkgdir/usr/lib $pkgdir/var/log\n\
         echo 'ID=arch' > $pkgdir/usr/lib/os-release\n ln -s ../usr/lib/os-release $pkgdir/etc/os-release\n\
         ln -s usr/bin $pkgdir/bin\n echo 'root:x:0:0::/root:/bin/sh' > $pkgdir/etc/passwd\n\
         echo 'root::14871::::::' > $pkgdir/etc/shadow; chmod 600 $pkgdir/etc/shadow\n echo 'root:x:0:' > $pkgdir/etc/group\n}\n";
    package("filesystem", filesystem);
    package("base", "depends=(filesystem tool)\npackage() { :; }\n");
    package(
        "tool",
        "package() { install -Dm4755 /dev/null $pkgdir/usr/bin/tool; }\n",
    );
    fs_err::create_dir_all(place.join("mirror/core/os/x86_64")).unwrap();
    fs_err::create_dir_all(place.join("mirror/extra/os/x86_64")).unwrap();
    // makepkg refuses to run as root.
    sh(
        "chmod 755 .. && chown -R nobody ../packages ../mirror",
        &directory,
    );
    for name in ["filesystem", "base", "tool"] {
        let script = format!(
            "cd {name} && setpriv --reuid=nobody --regid=nogroup --clear-groups env HOME=$PWD LC_ALL=C PKGEXT=.pkg.tar.zst \
             PKGDEST={}/core/os/x86_64 makepkg -d --nosign",
            place.join("mirror").display()
        );
        sh(&script, &directory);
    }
    sh(
        "cd core/os/x86_64 && repo-add -q core.db.tar.gz *.pkg.tar.*",
        &place.join("mirror"),
    );
    sh(
        "cd extra/os/x86_64 && repo-add -q extra.db.tar.gz",
        &place.join("mirror"),
    );
}

#[test]
fn arch_twice_is_one_digest() {
    let mut place = Place::new();
    arch_repository(place.dir.path());
    place.mirrors.insert(
        "arch".into(),
        format!("file://{}", place.path("mirror").display()),
    );
    let recipe = "schema = 1\nprovider = \"pacstrap\"\n[pacstrap]\n";
    let unsigned = place.build(recipe, "unsigned").unwrap_err();
    let chain = unsigned.chain().join("\n");
    assert!(chain.contains(".sig"), "{chain}");

    place
        .mirrors
        .insert("arch-signatures".into(), "never".into());
    let first = place.build(recipe, "a").unwrap();
    // The installation dates differ, so they cannot be the reason for equal trees.
    std::thread::sleep(Duration::from_millis(1100));
    let second = place.build(recipe, "b").unwrap();
    place.assert_same("a", "b");
    assert_eq!(first, second);
    let names: Vec<_> = first
        .packages
        .iter()
        .map(|package| package.name.as_str())
        .collect();
    assert_eq!(names, ["base", "filesystem", "tool"]);
    assert_eq!(first.os_release.id, "arch");
    assert_eq!(
        fs_err::metadata(place.path("a/usr/bin/tool"))
            .unwrap()
            .mode()
            & 0o7777,
        0o4755
    );
    assert_eq!(place.mounts_and_processes(), Vec::<String>::new());
}

#[test]
fn a_tarball_is_verified_and_keeps_its_bytes() {
    let place = Place::new();
    sh(
        "mkdir -p top/etc && echo ID=void > top/etc/os-release && tar --zstd -cf t.tar.zst top",
        place.dir.path(),
    );
    let digest = crate::support::run::sha256(&place.path("t.tar.zst"));
    let recipe = |digest: &str| {
        format!(
            "schema=1\nprovider=\"tarball\"\n[tarball]\npath=\"t.tar.zst\"\nsha256=\"{digest}\"\nstrip-components=1"
        )
    };
    let first = place.build(&recipe(&digest), "a").unwrap();
    let second = place.build(&recipe(&digest), "b").unwrap();
    assert_eq!((first.os_release.id.as_str(), &first), ("void", &second));
    let nothing = recipe(&digest).replace("components=1", "components=9");
    let error = place.build(&nothing, "d").unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    let message = "nothing is left of the archive after `strip-components = 9`";
    assert_eq!(error.message(), message);
    let error = place.build(&recipe(&"0".repeat(64)), "c").unwrap_err();
    assert_eq!(error.kind(), Kind::Drift);
    assert_eq!(fs_err::read_dir(place.path("c")).unwrap().count(), 0);
    let mut change = |_: BuildProgress<'_>| fs_err::write(place.path("t.tar.zst"), "x").unwrap();
    let error = place.build_with(&recipe(&digest), "e", &mut change);
    assert_eq!(error.unwrap_err().kind(), Kind::Drift);
}

#[test]
fn an_archive_bomb_is_the_recipe_s_fault() {
    let store = crate::support::env::TestStore::new();
    let images = store.work().join("images");
    for (compress, end) in [("zstd -q", "zst"), ("xz -0", "xz"), ("gzip -9", "gz")] {
        let make =
            format!("truncate -s 300M zeros; tar -cf - zeros | {compress} > bomb.{end}; rm zeros");
        sh(&make, &images);
        let digest = crate::support::run::sha256(&images.join(format!("bomb.{end}")));
        let recipe = format!(
            "schema = 1\nprovider = 'tarball'\n[tarball]\npath = 'bomb.{end}'\nsha256 = '{digest}'\n"
        );
        fs_err::write(images.join("bomb.toml"), recipe).unwrap();
        store
            .rockenv(&["image", "build", "bomb"])
            .exits(3)
            .says(&["grows more than 250 times"]);
        let left = fs_err::read_dir(store.home().join("images")).unwrap();
        let left = left.filter(|entry| entry.as_ref().unwrap().path().join("root").exists());
        assert_eq!(left.count(), 1, "only the image that each store has");
    }
}

#[test]
fn a_directory_is_copied_with_everything() {
    let place = Place::new();
    let from = place.path("from");
    fs_err::create_dir(&from).unwrap();
    sh(
        "mkdir -p d/e && echo text > d/file && ln d/file d/e/hard && ln -s /etc/passwd link && ln link hard-link\n\
         truncate -s 50M sparse && printf x | dd of=sparse bs=1 seek=20000000 conv=notrunc status=none\n\
         mkfifo fifo && mknod null c 1 3 && touch su && chown 1234:5678 su && chmod 6755 su && setcap cap_net_raw+ep su\n\
         setfattr -n user.note -v v d && chmod 3777 d && touch -d '2001-02-03 04:05:06.789Z' d link d/file -h\n\
         python3 -c \"open(b'caf\\xe9', 'w')\"",
        &from,
    );
    let recipe = "schema=1\nprovider=\"directory\"\n[directory]\npath=\"from\"";
    place.build(recipe, "copy").unwrap();
    place.assert_same("from", "copy");
    let (a, b) = (
        from.join("sparse").metadata().unwrap(),
        place.path("copy/sparse").metadata().unwrap(),
    );
    assert!(
        b.blocks() <= a.blocks() + 8,
        "{} {}",
        a.blocks(),
        b.blocks()
    );
    assert_eq!(place.path("copy/null").metadata().unwrap().rdev(), 0x103);
}

#[test]
fn a_directory_with_a_mount_in_it_or_the_copy_itself_is_refused() {
    let place = Place::new();
    fs_err::create_dir_all(place.path("from/mnt")).unwrap();
    let recipe = "schema=1\nprovider=\"directory\"\n[directory]\npath=\"from\"";
    sh("mount -t tmpfs none from/mnt", place.dir.path());
    let outcome = place.build(recipe, "a");
    sh("umount from/mnt", place.dir.path());
    let chain = outcome.unwrap_err().chain().join("\n");
    assert!(chain.contains("`mnt` is a mount point"), "{chain}");

    let error = place.build(recipe, "from/inside").unwrap_err();
    assert!(error.message().contains("is inside"), "{error:?}");
    symlink("from", place.path("link")).unwrap();
    place.build(&recipe.replace("from", "link"), "b").unwrap();
    place.assert_same("from", "b");
}

#[test]
fn a_directory_that_is_not_empty_is_refused() {
    let place = Place::new();
    fs_err::create_dir(place.path("from")).unwrap();
    let recipe = "schema=1\nprovider=\"directory\"\n[directory]\npath=\"x\"";
    let error = place.build(recipe, "").unwrap_err();
    assert!(error.message().contains("is not empty"));
}
