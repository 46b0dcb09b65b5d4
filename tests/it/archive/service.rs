//! Serves a signed archive on loopback with Debian's packages and two of its own, in the layout of a snapshot service:
//! one directory for each moment, and a redirect from a moment in between to the one before it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;

use crate::support::cache::made_once;
use crate::support::loopfs::{LoopFs, run};

/// Part of the cache directory's name. Increase it when the cached content changes.
const VERSION: u32 = 1;

pub(crate) const SUITE: &str = "trixie";

/// Returns a directory with the Debian packages of an image with apt, described by `Packages`. They are fetched from
/// the host's mirror once for each checkout, and packed without compression, which would take longer than the rest of
/// the test.
fn base() -> PathBuf {
    made_once(&format!("archive-{VERSION}"), "done", |cache| {
        let script = r#"
            rm -rf --one-file-system part
            mkdir -p part/fetched part/pool/base
            unshare --mount --propagation private mmdebstrap --quiet --variant=apt --format=null \
                --skip=essential/unlink,cleanup --customize-hook="cp \$1/var/cache/apt/archives/*.deb '$PWD/part/fetched'" \
                "$1" -
            cd part
            for package in fetched/*.deb; do
                dpkg-deb --raw-extract "$package" "$TMPDIR/tree"
                dpkg-deb --build -Znone "$TMPDIR/tree" pool/base/${package##*/} >/dev/null
                rm -r "$TMPDIR/tree"
            done
            rm -r fetched
            apt-ftparchive packages pool/base >Packages
            mv "$PWD" ../done"#;
        let scratch = LoopFs::in_memory(1 << 30);
        let mut command = Command::new("sh");
        run(command
            .args(["-euc", script, "sh", SUITE])
            .env("TMPDIR", scratch.path())
            .current_dir(cache));
    })
}

/// The archive, and the key that signs it.
pub(crate) struct Archive {
    pub(crate) host: String,
    directory: tempfile::TempDir,
}

impl Archive {
    pub(crate) fn start() -> Self {
        // On the disk of the cached packages, so that they can be hard-linked.
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let archive = directory.path().join("archive/debian");
        fs::create_dir_all(&archive).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        // The thread ends with the test program.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let archive = archive.clone();
                // A write fails if the client has hung up.
                std::thread::spawn(move || drop(answer(client, &archive)));
            }
        });
        let archive = Self { host, directory };
        archive.make_key("ours");
        archive
    }

    /// Makes a signing key.
    pub(crate) fn make_key(&self, name: &str) {
        let home = self.directory.path().join(name);
        fs::create_dir(&home).unwrap();
        let script = r#"
            chmod 700 .
            gpg --batch --quiet --pinentry-mode loopback --passphrase '' --quick-generate-key "$1 <a@example.org>" ed25519 sign 0
            gpg --batch --armor --export >key
            gpgconf --kill all"#;
        self.run(name, &home, script, &[name]);
    }

    /// Returns the file with the public part of a key.
    pub(crate) fn key(&self, name: &str) -> PathBuf {
        self.directory.path().join(name).join("key")
    }

    /// Returns the directory of a moment.
    pub(crate) fn at(&self, moment: &str) -> PathBuf {
        self.directory.path().join("archive/debian").join(moment)
    }

    /// Publishes Debian's packages and the archive's own ones at `version`, which write down the host names and domains
    /// that they find. With `expired`, the Release files have a `Valid-Until` in the past.
    pub(crate) fn publish(&self, moment: &str, version: &str, expired: bool) {
        let place = self.at(moment);
        fs::create_dir(&place).unwrap();
        let script = r#"
            mkdir -p pool/own
            cp -rl "$1/pool/base" pool/base
            for name in greeting parting; do
                mkdir -p tree/DEBIAN tree/usr/share
                echo "$name $2" >tree/usr/share/$name
                printf '%s\n' "Package: $name" "Version: $2" 'Architecture: all' 'Maintainer: a <a@example.org>' \
                    'Description: a package of the test' >tree/DEBIAN/control
                printf '%s\n' '#!/bin/sh' \
                    "exec >/usr/share/$name.host; uname -n; cat /etc/hostname" \
                    "grep -E '^(search|domain)' /etc/resolv.conf || :" \
                    >tree/DEBIAN/postinst
                chmod 755 tree/DEBIAN/postinst
                dpkg-deb --root-owner-group --build tree pool/own/${name}_$2_all.deb >/dev/null
                rm -r tree
            done
            architecture=$(dpkg --print-architecture)
            for suite in $4 $4-updates; do
                index=dists/$suite/main/binary-$architecture
                mkdir -p $index
                : >$index/Packages
                [ $suite != $4 ] || { cat "$1/Packages"; apt-ftparchive packages pool/own; } >$index/Packages
                field=APT::FTPArchive::Release
                apt-ftparchive -o $field::Suite=$suite -o $field::Codename=$suite -o $field::Components=main \
                    -o $field::Architectures=$architecture release dists/$suite |
                    sed "s/^Date: .*/Date: Thu, 01 Aug 2024 00:00:00 UTC$3/" >release
                mv release dists/$suite/Release
            done"#;
        let until = match expired {
            true => "\\nValid-Until: Thu, 08 Aug 2024 00:00:00 UTC",
            false => "",
        };
        let base = base();
        let arguments = [base.to_str().unwrap(), version, until, SUITE];
        self.run("ours", &place, script, &arguments);
        self.sign(moment, "ours");
    }

    /// Signs a moment's Release files.
    pub(crate) fn sign(&self, moment: &str, key: &str) {
        let script = "for suite in dists/*; do gpg --batch --quiet --yes --clearsign -o $suite/InRelease $suite/Release; done
            gpgconf --kill all";
        self.run(key, &self.at(moment), script, &[]);
    }

    /// Runs a script with the key's gpg home. The script must stop its gpg agent.
    fn run(&self, key: &str, place: &Path, script: &str, arguments: &[&str]) {
        let mut command = Command::new("sh");
        run(command
            .args(["-euc", script, "sh"])
            .args(arguments)
            .env("GNUPGHOME", self.directory.path().join(key))
            .current_dir(place));
    }
}

/// Answers one request. `/debian` is the newest moment. `/archive/debian/MOMENT` is that moment, or a redirect to the
/// one before it.
fn answer(mut client: TcpStream, archive: &Path) -> std::io::Result<()> {
    let mut head = BufReader::new(client.try_clone()?).lines();
    let line = head.next().transpose()?.unwrap_or_default();
    while head
        .next()
        .transpose()?
        .is_some_and(|line| !line.is_empty())
    {}
    let path = line.split(' ').nth(1).unwrap_or_default();
    let dated = path.strip_prefix("/archive/debian/");
    let (asked, rest) = match dated {
        Some(dated) => dated.split_once('/').unwrap_or_default(),
        None => ("Z", path.strip_prefix("/debian/").unwrap_or_default()),
    };
    let moments = fs::read_dir(archive)?.flatten();
    let mut moments: Vec<String> = moments
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|moment| moment.as_str() <= asked)
        .collect();
    moments.sort();
    let moment = moments.pop().unwrap_or_default();
    if dated.is_some() && moment != asked {
        let to = format!("/archive/debian/{moment}/{rest}");
        return write!(
            client,
            "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }
    // apt percent-encodes these characters of package names.
    let rest = [("%2b", "+"), ("%7e", "~"), ("%3a", ":"), ("%25", "%")]
        .iter()
        .fold(rest.to_owned(), |path, (code, sign)| {
            path.replace(code, sign)
        });
    let (status, body) = match fs::read(archive.join(moment).join(rest)) {
        Ok(body) => ("200 OK", body),
        Err(_) => ("404 Not Found", Vec::new()),
    };
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    client.write_all(&body)
}
