//! Owns reading a root file system's distribution and its installed packages.

use std::collections::{BTreeMap, BTreeSet};

use crate::sys::error::Result;
use crate::tree::root_fs::Tree;

/// Maximum size of a package database. dpkg's status file of a full desktop has 10 MB.
pub(crate) const MAX_DATABASE: usize = 256 << 20;
/// dpkg's database of installed packages.
pub(crate) const DPKG_STATUS: &str = "var/lib/dpkg/status";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Package {
    pub name: String,
    /// Full version, with epoch and revision.
    pub version: String,
    /// The distribution's name for the architecture.
    pub architecture: String,
}

/// `ID` and `VERSION_ID` of os-release. Empty if missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OsRelease {
    /// `debian`, `ubuntu`, `arch`, ...
    pub id: String,
    /// `13`, `24.04`. Empty for rolling releases.
    pub version_id: String,
}

pub(super) fn os_release(tree: &Tree) -> Result<OsRelease> {
    let mut found = OsRelease::default();
    let read = |path| tree.read(path, 64 << 10);
    let data = match read("etc/os-release")? {
        None => read("usr/lib/os-release")?,
        data => data,
    };
    for line in String::from_utf8_lossy(&data.unwrap_or_default()).lines() {
        let (key, value) = line.split_once('=').unwrap_or_default();
        let value = value.trim().trim_matches(['"', '\'']).to_string();
        match key.trim() {
            "ID" => found.id = value,
            "VERSION_ID" => found.version_id = value,
            _ => {}
        }
    }
    Ok(found)
}

/// Returns the installed packages, sorted. Empty for package managers without a plain-text database.
pub(super) fn installed(tree: &Tree) -> Result<Vec<Package>> {
    let mut packages = Vec::new();
    if let Some(status) = tree.read(DPKG_STATUS, MAX_DATABASE)? {
        packages.extend(dpkg(&String::from_utf8_lossy(&status)));
    }
    for name in tree.list("var/lib/pacman/local")? {
        let name = String::from_utf8_lossy(&name);
        let path = format!("var/lib/pacman/local/{name}/desc");
        if let Some(desc) = tree.read(&path, 16 << 20)? {
            packages.extend(pacman(&String::from_utf8_lossy(&desc)));
        }
    }
    packages.sort();
    Ok(packages)
}

fn dpkg(status: &str) -> Vec<Package> {
    let stanzas = installed_stanzas(status).filter_map(|stanza| {
        Some(Package {
            name: field(stanza, "Package")?.to_owned(),
            version: field(stanza, "Version")?.to_owned(),
            architecture: field(stanza, "Architecture")?.to_owned(),
        })
    });
    stanzas.collect()
}

/// Returns the installed packages with GPU code and the ISAs of that code, as Debian's packages declare them.
pub(crate) fn gpu_code(status: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let stanzas = installed_stanzas(status).filter_map(|stanza| {
        let isas = field(stanza, "X-Rocm-Gpu-Architecture")?;
        Some((field(stanza, "Package")?, isas.split_whitespace().collect()))
    });
    stanzas.collect()
}

/// Returns the entries of installed packages in dpkg's database.
fn installed_stanzas(status: &str) -> impl Iterator<Item = &str> {
    status.split("\n\n").filter(|stanza| {
        field(stanza, "Status").is_some_and(|status| status.ends_with(" installed"))
    })
}

fn field<'a>(stanza: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = stanza.lines().filter_map(|line| line.split_once(": "));
    let (_, value) = lines.find(|(key, _)| key.eq_ignore_ascii_case(name))?;
    Some(value.trim())
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

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, text).unwrap();
        }
        dir
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
        let names: Vec<_> = installed(&Tree::open(dir.path()).unwrap())
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
    fn packages_say_which_gpus_their_code_is_for() {
        let status = "Package: librocblas4\nStatus: install ok installed\nX-Rocm-Gpu-Architecture: gfx906 gfx1100\n\n\
                      Package: librocfft0\nStatus: deinstall ok config-files\nX-ROCm-GPU-Architecture: gfx906\n\n\
                      Package: libc6\nStatus: install ok installed\n";
        let expected = [("librocblas4", BTreeSet::from(["gfx1100", "gfx906"]))];
        assert_eq!(gpu_code(status), BTreeMap::from(expected));
    }

    #[test]
    fn the_host_s_packages_are_not_the_image_s() {
        let dir = root(&[("usr/lib/os-release", "ID=debian\nVERSION_ID=\"13\"\n")]);
        std::os::unix::fs::symlink("/", dir.path().join("var")).unwrap();
        let tree = Tree::open(dir.path()).unwrap();
        let found = os_release(&tree).unwrap();
        assert_eq!((&*found.id, &*found.version_id), ("debian", "13"));
        assert!(installed(&tree).unwrap().is_empty());
    }
}
