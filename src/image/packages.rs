//! Owns reading a root file system's distribution and its installed packages.

use crate::sys::error::Result;
use crate::tree::root_fs::Tree;

/// Maximum size of a package database; dpkg's status file of a full desktop has 10 MB.
const MAX_DATABASE: usize = 256 << 20;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Package {
    /// Name in the distribution.
    pub name: String,
    /// Full version, with epoch and revision.
    pub version: String,
    /// The distribution's name for the architecture.
    pub architecture: String,
}

/// `ID` and `VERSION_ID` of os-release; empty if missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OsRelease {
    /// `debian`, `ubuntu`, `arch`, ...
    pub id: String,
    /// `13`, `24.04`; empty for rolling releases.
    pub version_id: String,
}

pub(super) fn os_release(tree: &Tree) -> Result<OsRelease> {
    let mut found = OsRelease::default();
    for path in ["etc/os-release", "usr/lib/os-release"] {
        let Some(data) = tree.read(path, 64 << 10)? else {
            continue;
        };
        for line in String::from_utf8_lossy(&data).lines() {
            let Some((key, value)) = line.split_once('=') else {
                continue;
            };
            let value = value.trim().trim_matches(['"', '\'']).to_string();
            match key.trim() {
                "ID" => found.id = value,
                "VERSION_ID" => found.version_id = value,
                _ => {}
            }
        }
        break;
    }
    Ok(found)
}

/// Returns the installed packages, sorted; none for package managers without a plain text database.
pub(super) fn installed(tree: &Tree) -> Result<Vec<Package>> {
    let mut packages = Vec::new();
    if let Some(status) = tree.read("var/lib/dpkg/status", MAX_DATABASE)? {
        packages.extend(dpkg(&String::from_utf8_lossy(&status)));
    }
    for name in tree.list("var/lib/pacman/local")? {
        let path = format!(
            "var/lib/pacman/local/{}/desc",
            String::from_utf8_lossy(&name)
        );
        if let Some(desc) = tree.read(&path, 16 << 20)? {
            packages.extend(pacman(&String::from_utf8_lossy(&desc)));
        }
    }
    packages.sort();
    Ok(packages)
}

fn dpkg(status: &str) -> Vec<Package> {
    let field = |stanza: &str, name: &str| {
        let mut lines = stanza.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.trim().to_string())
    };
    let mut packages = Vec::new();
    for stanza in status.split("\n\n") {
        let is_installed =
            field(stanza, "Status").is_some_and(|status| status.ends_with(" installed"));
        let fields = (
            field(stanza, "Package"),
            field(stanza, "Version"),
            field(stanza, "Architecture"),
        );
        if let (true, (Some(name), Some(version), Some(architecture))) = (is_installed, fields) {
            packages.push(Package {
                name,
                version,
                architecture,
            });
        }
    }
    packages
}

fn pacman(desc: &str) -> Option<Package> {
    let field = |name: &str| {
        let mut lines = desc.lines().skip_while(|line| *line != name);
        lines.nth(1).map(ToString::to_string)
    };
    Some(Package {
        name: field("%NAME%")?,
        version: field("%VERSION%")?,
        architecture: field("%ARCH%").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, text).unwrap();
        }
        dir
    }

    fn tree(path: &Path) -> Tree {
        Tree::open(path).unwrap()
    }

    #[test]
    fn dpkg_and_pacman_databases() {
        let status = "Package: b\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:2-3\nDescription: x\n y\n\n\
                      Package: gone\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n\n\
                      Package: a\nStatus: hold ok installed\nArchitecture: all\nVersion: 4\n";
        let dir = root(&[
            ("var/lib/dpkg/status", status),
            (
                "var/lib/pacman/local/z-1-1/desc",
                "%NAME%\nz\n\n%VERSION%\n1-1\n\n%ARCH%\nany\n",
            ),
        ]);
        let names: Vec<_> = installed(&tree(dir.path()))
            .unwrap()
            .into_iter()
            .map(|p| (p.name, p.version))
            .collect();
        let expected = [("a", "4"), ("b", "1:2-3"), ("z", "1-1")];
        assert_eq!(
            names,
            expected.map(|(name, version)| (name.to_string(), version.to_string()))
        );
    }

    #[test]
    fn links_are_resolved_inside_the_image_only() {
        let dir = root(&[
            ("usr/lib/os-release", "ID=debian\nVERSION_ID=\"13\"\n"),
            ("etc/x", ""),
        ]);
        std::os::unix::fs::symlink("/usr/lib/os-release", dir.path().join("etc/os-release"))
            .unwrap();
        let found = os_release(&tree(dir.path())).unwrap();
        assert_eq!(
            (found.id.as_str(), found.version_id.as_str()),
            ("debian", "13")
        );

        let evil = root(&[("etc/x", "")]);
        std::os::unix::fs::symlink("/proc/self/environ", evil.path().join("etc/os-release"))
            .unwrap();
        std::os::unix::fs::symlink("/", evil.path().join("var")).unwrap();
        assert_eq!(
            os_release(&tree(evil.path())).unwrap(),
            OsRelease::default()
        );
        assert!(installed(&tree(evil.path())).unwrap().is_empty());
    }

    #[test]
    fn a_fifo_in_place_of_a_file_does_not_hang() {
        let dir = root(&[("etc/x", "")]);
        nix::unistd::mkfifo(
            &dir.path().join("etc/os-release"),
            nix::sys::stat::Mode::S_IRWXU,
        )
        .unwrap();
        assert_eq!(os_release(&tree(dir.path())).unwrap(), OsRelease::default());
    }
}
