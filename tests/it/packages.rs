//! Owns the tests of `packaging/`: each package is made in an env, installed, run and removed in a bare tree, and the
//! store stays.

use std::path::Path;
use std::process::Command;

use crate::support::env::TestStore;
use crate::support::loopfs::run;
use fs_err as fs;

/// The shipped profile with this build's binary in place of a compiled one.
const STEPS: &str = r#"
schema = 1
extends = "rockenv.toml"
image = "base"

[env]
ZSTD_CLEVEL = "1"

[[step]]
name = "tools"
packages = ["fakeroot", "libarchive-tools", "makepkg", "pacman-package-manager", "rpm", "zstd"]

[[step]]
name = "compile"
copy = [{ from = "rockenv", to = "/home/builder/rockenv" }]

[[step]]
name = "sbom"
remove = true

[[step]]
name = "rpm-installed"
user = "root"
run = '''
root=/var/tmp/fedora
mkdir -p $root/var/lib/rockenv/envs/mine
rpm --root $root --initdb
rpm --root $root --install /out/*.rpm
chroot $root /usr/bin/rockenv --version | grep -Fx "rockenv @VERSION@"
rpm --root $root --verify rockenv
rpm --root $root --erase rockenv
[ -d $root/var/lib/rockenv/envs/mine ]
[ -z "$(find $root/usr -type f | grep -v /lib/sysimage/)" ]
'''

[[step]]
name = "arch-installed"
user = "root"
run = '''
root=/var/tmp/arch
mkdir -p $root/var/lib/pacman $root/var/lib/rockenv/envs/mine
printf '[options]\nArchitecture = x86_64\nLocalFileSigLevel = Never\n' > /var/tmp/pacman.conf
pacman="pacman --config /var/tmp/pacman.conf --root $root --noconfirm"
$pacman -U /out/*.pkg.tar.zst
chroot $root /usr/bin/rockenv --version | grep -Fx "rockenv @VERSION@"
$pacman -Qkk rockenv
$pacman -R rockenv
[ -d $root/var/lib/rockenv/envs/mine ]
[ -z "$(find $root/usr -type f)" ]
'''
"#;

const DEBIAN: &str = r#"
[[volume]]
name = "packages"
kind = "host"
path = "@PACKAGES@"
target = "/packages"

[[step]]
name = "installed"
user = "root"
run = '''
mkdir -p /var/lib/rockenv/envs/mine
dpkg --install /packages/*.deb
rockenv --version | grep -Fx "rockenv @VERSION@"
rockenv profile show hip-smoke > /dev/null
[ -z "$(dpkg --verify rockenv | grep -v ' /usr/share/\(man\|doc\)/')" ]
dpkg --purge rockenv
[ -d /var/lib/rockenv/envs/mine ]
[ ! -e /usr/bin/rockenv ] && [ ! -e /usr/share/rockenv ]
'''
"#;

/// Copies what the packages are made of; the binary without symbols, which a profile may not be large enough to copy.
fn checkout(directory: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut copy = Command::new("cp");
    copy.arg("-r").args(
        [
            "packaging",
            "Cargo.toml",
            "README.md",
            "CHANGELOG.md",
            "LICENSE-APACHE",
            "LICENSE-MIT",
        ]
        .map(|name| root.join(name)),
    );
    run(copy.arg(directory));
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(directory.join("packaging/rockenv"));
    run(strip.arg(env!("CARGO_BIN_EXE_rockenv")));
}

#[test]
fn each_package_installs_runs_and_leaves_the_store_when_it_is_removed() {
    let store = TestStore::new();
    let directory = store.work().join("checkout");
    fs::create_dir(&directory).unwrap();
    checkout(&directory);
    let version = env!("CARGO_PKG_VERSION");
    let name = store.env().to_owned();
    let profile = directory.join("packaging").join(format!("{name}.toml"));
    fs::write(&profile, STEPS.replace("@VERSION@", version)).unwrap();
    let up = ["up", profile.to_str().unwrap()];
    store.rockenv(&up).ok();

    let exported = store.work().join("exported");
    store
        .rockenv(&["export", &name, exported.to_str().unwrap()])
        .ok();
    let packages = exported.join("packages");
    let found = fs::read_dir(&packages).unwrap();
    let mut found: Vec<_> = found
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    let expected = [
        format!("rockenv-{version}-1-x86_64.pkg.tar.zst"),
        format!("rockenv-{version}-1.x86_64.rpm"),
        format!("rockenv-{version}-x86_64-linux.tar.zst"),
        format!("rockenv_{version}_amd64.deb"),
    ];
    assert_eq!(found, expected);

    let debian = format!("{name}-debian");
    let text = DEBIAN
        .replace("@VERSION@", version)
        .replace("@PACKAGES@", packages.to_str().unwrap());
    store.profile_named(&debian, &text);
    store.rockenv(&["up", &debian]).ok();
    store.assert_clean();
}
