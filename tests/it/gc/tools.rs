//! Caches of the real tools, and what the tools leave when `gc` asks them to clean up.

use std::path::Path;
use std::process::Command;

use fs_err as fs;
use rockenv::testing::cache::CacheKind;
use rockenv::testing::entries;

use crate::image_oci::make::{Server, response};
use crate::support::loopfs::{bind, run};
use crate::support::wheels;

fn kind(cache: &Path) -> Option<CacheKind> {
    CacheKind::of(&entries(cache))
}

const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Asks the cache's tool to leave at most `max` bytes, as `gc` does in an env.
fn shrink_to(cache: &Path, max: u64) {
    let script = kind(cache).unwrap().script();
    let uv = wheels::uv();
    let path = format!("{}:{PATH}", uv.parent().unwrap().display());
    run(Command::new("sh")
        .args(["-ec", script, "sh"])
        .arg(cache)
        .arg(max.to_string())
        .env_clear()
        .env("PATH", path));
}

fn shrink(cache: &Path) {
    shrink_to(cache, 0);
}

/// Writes a wheel of 100 kB.
fn wheel(place: &Path) {
    let make = "import sys, zipfile
with zipfile.ZipFile(sys.argv[1], 'w') as wheel:
    wheel.writestr('demo.py', '#' * 100000)
    wheel.writestr('demo-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: demo\\nVersion: 1.0\\n')
    wheel.writestr('demo-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('demo-1.0.dist-info/RECORD', '')";
    run(Command::new("/usr/bin/python3")
        .args(["-c", make])
        .arg(place));
}

/// Returns the size of all files below a directory, without the directories themselves.
fn bytes(cache: &Path) -> u64 {
    let entries = fs::read_dir(cache).unwrap().flatten();
    entries
        .map(|entry| match entry.file_type().unwrap().is_dir() {
            true => bytes(&entry.path()),
            false => entry.metadata().unwrap().len(),
        })
        .sum()
}

#[test]
fn ccache_is_known_by_its_cache() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("a.c"), "int a;\n").unwrap();
    run(Command::new("ccache")
        .args(["gcc", "-c", "a.c", "-o", "a.o"])
        .current_dir(directory.path())
        .env_clear()
        .env("PATH", PATH)
        .env("CCACHE_DIR", at("cache")));
    assert_eq!(kind(&at("cache")), Some(CacheKind::Ccache));
    let files = || {
        let mut stats = Command::new("ccache");
        stats.arg("--print-stats").env_clear().env("PATH", PATH);
        let stats = run(stats.env("CCACHE_DIR", at("cache")));
        let mut lines = stats.lines();
        let count = lines.find_map(|line| line.strip_prefix("files_in_cache\t"));
        count.unwrap().to_owned()
    };
    shrink_to(&at("cache"), 1 << 30);
    assert_ne!(files(), "0");
    // ccache itself takes a size of 0 for no limit.
    shrink_to(&at("cache"), 0);
    assert_eq!(files(), "0");
}

#[test]
fn pip_is_known_by_its_cache_and_empties_it() {
    let directory = tempfile::tempdir().unwrap();
    let (cache, wheel) = (
        directory.path().join("cache"),
        directory.path().join("demo-1.0-py3-none-any.whl"),
    );
    fs::create_dir(&cache).unwrap();
    self::wheel(&wheel);
    let body = fs::read(&wheel).unwrap();
    // Without a date, pip keeps nothing.
    let date = run(Command::new("date")
        .args(["-u", "+%a, %d %b %Y %H:%M:%S GMT"])
        .env("LC_ALL", "C"));
    let head = format!(
        "Date: {date}\r\nCache-Control: max-age=3600\r\nContent-Type: application/zip\r\n",
        date = date.trim()
    );
    let server = Server::start(move |_| response("200 OK", &head, &body));
    run(Command::new("/usr/bin/pip3")
        .args(["download", "--no-deps", "--disable-pip-version-check"])
        .args(["--trusted-host", "127.0.0.1", "--dest"])
        .arg(directory.path().join("out"))
        .arg(format!("http://{}/demo-1.0-py3-none-any.whl", server.host))
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", directory.path())
        .env("PIP_CACHE_DIR", &cache));
    assert!(bytes(&cache) > 100_000, "pip cached nothing");
    assert_eq!(kind(&cache), Some(CacheKind::Pip));
    shrink(&cache);
    assert_eq!(bytes(&cache), 0);
}

#[test]
fn uv_is_known_by_its_cache_and_empties_it_where_it_is_mounted() {
    let directory = tempfile::tempdir().unwrap();
    let (real, cache, wheel) = (
        directory.path().join("real"),
        directory.path().join("cache"),
        directory.path().join("demo-1.0-py3-none-any.whl"),
    );
    for place in [&real, &cache] {
        fs::create_dir(place).unwrap();
    }
    // As in an env, the directory itself cannot be removed.
    let _bound = bind(&real, &cache);
    self::wheel(&wheel);
    run(Command::new(wheels::uv())
        .args([
            "pip",
            "install",
            "--quiet",
            "--offline",
            "--no-config",
            "--python",
            "/usr/bin/python3",
        ])
        .arg("--target")
        .arg(directory.path().join("out"))
        .arg(&wheel)
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", directory.path())
        .env("UV_CACHE_DIR", &cache));
    assert!(bytes(&cache) > 100_000, "uv cached nothing");
    assert_eq!(kind(&cache), Some(CacheKind::Uv));
    // Files in use are removed only if the others were not enough.
    shrink_to(&cache, 1 << 30);
    assert!(bytes(&cache) > 100_000);
    shrink(&cache);
    assert_eq!(bytes(&real), 0);
}

#[test]
fn pacman_keeps_the_packages_that_are_installed_and_files_that_are_none() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["cache", "content", "root", "pacman/sync", "pacman/local"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    let _bound = bind(&at("pacman"), Path::new("/var/lib/pacman"));
    let cache = at("cache");
    for name in ["used", "other"] {
        let about = format!(
            "pkgname = {name}\npkgbase = {name}\npkgver = 1.0-1\npkgdesc = x\nurl = x\nbuilddate = 1700000000\n\
             packager = x\nsize = 10\narch = any\n"
        );
        fs::write(at("content/.PKGINFO"), about).unwrap();
        fs::write(at("content/file"), vec![1; 100_000]).unwrap();
        run(Command::new("bsdtar")
            .args(["--zstd", "-C"])
            .arg(at("content"))
            .arg("-cf")
            .arg(cache.join(format!("{name}-1.0-1-any.pkg.tar.zst")))
            .args([".PKGINFO", "file"]));
    }
    fs::write(cache.join("mine.txt"), "the user's").unwrap();
    run(Command::new("pacman")
        .args(["-U", "--noconfirm", "--dbpath", "/var/lib/pacman", "--root"])
        .arg(at("root"))
        .arg("--cachedir")
        .arg(&cache)
        .arg(cache.join("used-1.0-1-any.pkg.tar.zst")));
    assert_eq!(kind(&cache), Some(CacheKind::Pacman));
    shrink(&cache);
    let entries = fs::read_dir(&cache).unwrap().flatten();
    let mut left: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    left.sort();
    assert_eq!(left, ["mine.txt", "used-1.0-1-any.pkg.tar.zst"]);
}

#[test]
fn apt_cleans_the_cache_that_it_is_told_and_nothing_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    // The cache is mounted as `/var/cache/apt`, or as `archives` below it.
    for (place, top) in [
        ("whole", "whole/archives"),
        ("part/archives", "part/archives"),
    ] {
        let (cache, top) = (directory.path().join(place), directory.path().join(top));
        fs::create_dir_all(top.join("partial")).unwrap();
        let package = top.join("hello_2.10-3_amd64.deb");
        fs::write(&package, [1; 5000]).unwrap();
        // These are beside `archives`, which is all that apt considers its own.
        let mine = directory.path().join("mine.txt");
        let inside = directory.path().join("whole/mine.txt");
        for mine in [&mine, &inside] {
            fs::write(mine, "the user's").unwrap();
        }
        assert_eq!(kind(&cache), Some(CacheKind::Apt), "{place}");
        shrink(&cache);
        assert!(!package.exists(), "{place}");
        for mine in [&mine, &inside] {
            assert_eq!(fs::read_to_string(mine).unwrap(), "the user's");
        }
    }
}
