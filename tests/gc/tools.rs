//! Caches as the real tools leave them, and what those tools leave of them when they are asked as `gc` asks.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use fs_err as fs;
use rockenv::gc::cache::Kind;

use crate::support::loopfs::run;

fn kind(cache: &Path) -> Option<Kind> {
    let entries = fs::read_dir(cache).unwrap().flatten();
    let names: Vec<String> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    Kind::of(names.iter().map(String::as_str))
}

fn shrink(cache: &Path) {
    let script = kind(cache).unwrap().script();
    run(Command::new("sh")
        .args(["-ec", script, "sh"])
        .arg(cache)
        .arg("0")
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"));
}

/// Returns what the files below a directory hold, and not what its directories take.
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
fn pip_is_known_by_its_cache_and_empties_it() {
    let directory = tempfile::tempdir().unwrap();
    let (cache, wheel) = (
        directory.path().join("cache"),
        directory.path().join("demo-1.0-py3-none-any.whl"),
    );
    fs::create_dir(&cache).unwrap();
    let make = "import sys, zipfile
with zipfile.ZipFile(sys.argv[1], 'w') as wheel:
    wheel.writestr('demo.py', '#' * 100000)
    wheel.writestr('demo-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: demo\\nVersion: 1.0\\n')
    wheel.writestr('demo-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('demo-1.0.dist-info/RECORD', '')";
    run(Command::new("/usr/bin/python3")
        .args(["-c", make])
        .arg(&wheel));
    let body = fs::read(&wheel).unwrap();
    // Without it nothing is kept.
    let date = run(Command::new("date")
        .args(["-u", "+%a, %d %b %Y %H:%M:%S GMT"])
        .env("LC_ALL", "C"));
    let date = date.trim().to_owned();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut client in server.incoming().flatten() {
            let mut reader = BufReader::new(client.try_clone().unwrap());
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            let head = format!(
                "HTTP/1.1 200 OK\r\nDate: {date}\r\nCache-Control: max-age=3600\r\nContent-Type: application/zip\r\nContent-Length: {}\r\n\
                 Connection: close\r\n\r\n",
                body.len()
            );
            client.write_all(head.as_bytes()).unwrap();
            client.write_all(&body).unwrap();
        }
    });
    run(Command::new("/usr/bin/pip3")
        .args(["download", "--no-deps", "--disable-pip-version-check"])
        .args(["--trusted-host", "127.0.0.1", "--dest"])
        .arg(directory.path().join("out"))
        .arg(format!("http://127.0.0.1:{port}/demo-1.0-py3-none-any.whl"))
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", directory.path())
        .env("PIP_CACHE_DIR", &cache));
    assert!(bytes(&cache) > 100_000, "pip cached nothing");
    assert_eq!(kind(&cache), Some(Kind::Pip));
    shrink(&cache);
    assert_eq!(bytes(&cache), 0);
}

#[test]
fn apt_cleans_the_cache_that_it_is_told_and_nothing_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    // Mounted as `/var/cache/apt`, and as `archives` below it.
    for (place, top) in [
        ("whole", "whole/archives"),
        ("part/archives", "part/archives"),
    ] {
        let (cache, top) = (directory.path().join(place), directory.path().join(top));
        fs::create_dir_all(top.join("partial")).unwrap();
        let package = top.join("hello_2.10-3_amd64.deb");
        fs::write(&package, [1; 5000]).unwrap();
        // Beside what apt takes for its own, which is all of `archives`.
        let mine = directory.path().join("mine.txt");
        let inside = directory.path().join("whole/mine.txt");
        for mine in [&mine, &inside] {
            fs::write(mine, "the user's").unwrap();
        }
        assert_eq!(kind(&cache), Some(Kind::Apt), "{place}");
        shrink(&cache);
        assert!(!package.exists(), "{place}");
        for mine in [&mine, &inside] {
            assert_eq!(fs::read_to_string(mine).unwrap(), "the user's");
        }
    }
}
