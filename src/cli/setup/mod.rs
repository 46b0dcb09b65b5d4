//! Owns rockenv's host requirements: the tools for each feature, their packages per distribution, and their
//! installation.

pub(crate) mod command;

mod fstab;
pub(crate) mod install;
pub(crate) mod store_image;
pub(crate) mod timer;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::sys::process::Program;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Feature {
    /// Run steps under systemd-nspawn
    Nspawn,
    /// Build Debian and Ubuntu images
    Images,
    /// Clone sources
    Sources,
    /// Build Arch images
    Pacman,
    /// Make a btrfs store in a file (`--store-image`)
    Btrfs,
    /// Run rockenv's own tests
    Tests,
}

/// Features of a plain `rockenv setup`.
pub(crate) const DEFAULT: [Feature; 3] = [Feature::Nspawn, Feature::Images, Feature::Sources];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Manager {
    Apt,
    Pacman,
    Dnf,
    Zypper,
    /// Of Fedora's image-based systems, on which dnf refuses to install.
    #[serde(rename = "rpm-ostree")]
    RpmOstree,
}

impl Manager {
    const ALL: [Self; 5] = [
        Self::Apt,
        Self::RpmOstree,
        Self::Dnf,
        Self::Zypper,
        Self::Pacman,
    ];

    /// Returns its program with the words that install packages.
    fn words(self) -> &'static [&'static str] {
        match self {
            Self::Apt => &["apt-get", "install", "--yes", "--no-install-recommends"],
            Self::Pacman => &["pacman", "-S", "--needed", "--noconfirm"],
            Self::Dnf => &["dnf", "install", "--assumeyes"],
            Self::Zypper => &["zypper", "--non-interactive", "install"],
            Self::RpmOstree => &["rpm-ostree", "install", "--idempotent"],
        }
    }

    fn program(self) -> &'static str {
        self.words()[0]
    }

    /// Detects this machine's package manager.
    pub(crate) fn detect() -> Option<Self> {
        let os = ["/etc/os-release", "/usr/lib/os-release"]
            .iter()
            .find_map(|path| fs_err::read_to_string(path).ok())
            .unwrap_or_default();
        // Other systems use rpm-ostree to make images.
        let is_image = Path::new("/run/ostree-booted").exists();
        let there: Vec<_> = Self::ALL
            .into_iter()
            .filter(|manager| is_image || *manager != Self::RpmOstree)
            .filter(|manager| Program::find(manager.program(), "installing packages").is_ok())
            .collect();
        Self::choose(&os, &there)
    }

    /// Chooses by the distribution among the installed managers, because a distribution may carry another's package
    /// manager.
    fn choose(os_release: &str, there: &[Self]) -> Option<Self> {
        let ids = ["ID=", "ID_LIKE="].into_iter().flat_map(|key| {
            os_release
                .lines()
                .filter_map(move |line| line.strip_prefix(key))
                .flat_map(|value| value.trim_matches(['"', '\'']).split(' '))
        });
        let own = ids.filter_map(|id| match id {
            "debian" | "ubuntu" => Some(Self::Apt),
            "arch" => Some(Self::Pacman),
            "fedora" | "rhel" if there.contains(&Self::RpmOstree) => Some(Self::RpmOstree),
            "fedora" | "rhel" => Some(Self::Dnf),
            "suse" | "opensuse" => Some(Self::Zypper),
            _ => None,
        });
        own.chain(there.iter().copied())
            .find(|manager| there.contains(manager))
    }

    /// Returns the command line that installs `packages`.
    pub(crate) fn command(self, packages: &[&str]) -> Vec<String> {
        let words = self.words().iter().chain(packages);
        words.map(|word| (*word).to_owned()).collect()
    }
}

/// A tool that the host should have.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tool {
    /// Program in the system's directories, or a label if `files` is set.
    pub name: &'static str,
    /// For tools that are no program: any of these files proves that the tool is installed.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    pub features: Vec<Feature>,
    /// Purpose, as the rest of "needed to".
    pub why: &'static str,
    /// Without the tool only a part of the feature fails.
    #[serde(default)]
    pub optional: bool,
    /// Package for apt, pacman, dnf and zypper, or one name for all of them; `-` if a distribution has no package.
    packages: &'static str,
}

/// All tools, in the order in which `setup` and `doctor` name them.
pub(crate) static TOOLS: LazyLock<Vec<Tool>> =
    LazyLock::new(|| serde_json::from_str(include_str!("tools.json")).expect("tools.json"));

impl Tool {
    pub(crate) fn is_there(&self) -> bool {
        if self.files.is_empty() {
            return Program::find(self.name, self.why).is_ok();
        }
        self.files.iter().any(|path| path.exists())
    }

    pub(crate) fn package(&self, manager: Manager) -> Option<&'static str> {
        let packages: Vec<&str> = self.packages.split(' ').collect();
        let column = match manager {
            Manager::Apt => 0,
            Manager::Pacman => 1,
            Manager::Dnf | Manager::RpmOstree => 2,
            Manager::Zypper => 3,
        };
        let package = packages.get(column).or(packages.first())?;
        Some(*package).filter(|package| *package != "-")
    }
}

pub(crate) fn missing(
    features: &[Feature],
    is_there: impl Fn(&Tool) -> bool,
) -> Vec<&'static Tool> {
    TOOLS
        .iter()
        .filter(|tool| tool.features.iter().any(|one| features.contains(one)))
        .filter(|tool| !is_there(tool))
        .collect()
}

/// Returns the packages for `tools`, without duplicates.
pub(crate) fn packages(tools: &[&Tool], manager: Manager) -> Vec<&'static str> {
    let packages: BTreeSet<_> = tools
        .iter()
        .filter_map(|tool| tool.package(manager))
        .collect();
    packages.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_known_by_its_name_not_by_what_is_installed() {
        let both = [Manager::Apt, Manager::Pacman];
        for (os, there, want) in [
            ("ID=debian\n", &both[..], Some(Manager::Apt)),
            ("NAME=x\nID=arch\n", &both, Some(Manager::Pacman)),
            (
                "ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n",
                &both,
                Some(Manager::Apt),
            ),
            (
                "ID=\"opensuse-tumbleweed\"\nID_LIKE=\"opensuse suse\"\n",
                &[Manager::Zypper],
                Some(Manager::Zypper),
            ),
            (
                "ID=nobara\nID_LIKE=fedora",
                &[Manager::Dnf],
                Some(Manager::Dnf),
            ),
            (
                "ID=bazzite\nID_LIKE=\"fedora\"",
                &[Manager::RpmOstree, Manager::Dnf],
                Some(Manager::RpmOstree),
            ),
            ("", &[Manager::Dnf], Some(Manager::Dnf)),
            ("ID=debian", &[], None),
            ("ID=nixos", &[], None),
        ] {
            assert_eq!(Manager::choose(os, there), want, "{os}");
        }
    }

    #[test]
    fn a_bare_debian_needs_these() {
        let tools = missing(&DEFAULT, |tool| {
            matches!(tool.name, "unshare" | "Debian archive keys" | "gpg")
        });
        assert_eq!(
            packages(&tools, Manager::Apt),
            [
                "ca-certificates",
                "distro-info-data",
                "git",
                "mmdebstrap",
                "systemd-container",
                "ubuntu-keyring"
            ]
        );
        assert!(missing(&DEFAULT, |_| true).is_empty());
        let of = |manager| packages(&tools, manager);
        assert_eq!(of(Manager::RpmOstree), of(Manager::Dnf));
    }

    #[test]
    fn the_certificates_of_fedora_are_found() {
        // Since Fedora 44 there is no other list.
        let list = Path::new("/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem");
        let mut files = TOOLS.iter().flat_map(|tool| &tool.files);
        assert!(files.any(|file| file == list));
    }

    #[test]
    fn every_feature_has_tools_and_debian_has_them_all() {
        for feature in Feature::value_variants() {
            let tools = missing(&[*feature], |_| false);
            assert!(!tools.is_empty(), "{feature:?}");
            for tool in tools {
                assert!(tool.package(Manager::Apt).is_some(), "{}", tool.name);
            }
        }
    }
}
