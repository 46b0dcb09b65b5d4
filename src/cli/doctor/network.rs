//! Owns the network section of `doctor`: the machine's proxies and certificate authorities, which steps do not see.

use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use super::{Check, note, ok};
use crate::store::config::Config;

/// Directories in which distributions keep administrator-added certificate authorities.
const ANCHORS: [&str; 5] = [
    "usr/local/share/ca-certificates",
    "etc/pki/ca-trust/source/anchors",
    "usr/share/pki/ca-trust-source/anchors",
    "etc/ca-certificates/trust-source/anchors",
    "etc/pki/trust/anchors",
];

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct NetworkFacts {
    /// Names of the caller's proxy variables.
    pub proxies: Vec<String>,
    /// An apt configuration file that names a proxy.
    pub apt_proxy: Option<PathBuf>,
    /// Certificate authorities added by the administrator.
    pub authorities: Vec<PathBuf>,
    /// The configuration sets `ca-certificates`.
    pub trusted: bool,
}

impl NetworkFacts {
    pub(super) fn probe(root: &Path, config: &Config) -> Self {
        let mut authorities: Vec<PathBuf> = ANCHORS
            .iter()
            .flat_map(|place| files(&root.join(place)))
            .filter(|path| {
                let known = ["crt", "pem", "cer", "der", "p11-kit"];
                path.extension()
                    .is_some_and(|found| known.iter().any(|one| found == *one))
            })
            .collect();
        authorities.sort();
        let mut apt = files(&root.join("etc/apt/apt.conf.d"));
        apt.push(root.join("etc/apt/apt.conf"));
        apt.sort();
        Self {
            proxies: config.proxies.keys().cloned().collect(),
            apt_proxy: apt.into_iter().find(|path| names_proxy(path)),
            authorities,
            trusted: config.authorities.is_some(),
        }
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect()
}

fn names_proxy(path: &Path) -> bool {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::trim_start).any(|line| {
        let line = line.to_ascii_lowercase();
        line.starts_with("acquire::http") && line.contains("proxy")
    })
}

pub(super) fn checks(facts: &NetworkFacts) -> Vec<Check> {
    let mut checks = Vec::new();
    if facts.trusted {
        checks.push(ok("steps trust the `ca-certificates` of the configuration"));
    } else if let [first, rest @ ..] = facts.authorities.as_slice() {
        let more = match rest.len() {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        let message = format!(
            "steps do not trust certificate authorities added to this machine: {}{more}",
            first.display()
        );
        checks.push(note(message).try_("in /etc/rockenv/config.toml: ca-certificates = \"host\""));
    }
    if !facts.proxies.is_empty() {
        checks.push(
            note(format!(
                "image builds and downloads use the proxy from {}; steps do not, unless the profile passes it on",
                facts.proxies.join(", ")
            ))
            .try_(format!("in the profile: env-from-host = {:?}", facts.proxies)),
        );
    }
    if let Some(path) = &facts.apt_proxy {
        let message = format!(
            "apt uses the proxy from {} on this machine, but not in steps",
            path.display()
        );
        let passed = "export http_proxy=URL, and in the profile: env-from-host = [\"http_proxy\"]";
        checks.push(note(message).try_(passed));
    }
    if checks.is_empty() {
        checks.push(ok(
            "no proxy, and no certificate authority added to this machine",
        ));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::super::CheckState;
    use super::*;

    #[test]
    fn what_steps_do_not_see_is_told_with_what_to_write() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join(ANCHORS[0]);
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("README"), "").unwrap();
        fs::create_dir_all(root.path().join("etc/apt/apt.conf.d")).unwrap();
        let apt = root.path().join("etc/apt/apt.conf.d/01proxy");
        fs::write(&apt, "// Acquire::http::Proxy \"x\";\n").unwrap();
        let (mut config, _) = Config::of(std::collections::BTreeMap::new(), None).unwrap();
        config.authorities = None;
        let all = |config: &Config| checks(&NetworkFacts::probe(root.path(), config));
        assert!(
            all(&config)
                .iter()
                .all(|check| check.state == CheckState::Ok)
        );
        fs::write(place.join("company.crt"), "").unwrap();
        fs::write(&apt, "Acquire::http::Proxy \"http://proxy:3128\";\n").unwrap();
        config.proxies = [("https_proxy".to_owned(), "http://proxy".to_owned())].into();
        let commands: Vec<String> = all(&config)
            .into_iter()
            .filter(|check| check.state == CheckState::Note)
            .filter_map(|check| check.command)
            .collect();
        assert_eq!(commands.len(), 3);
        assert!(commands[0].contains("ca-certificates = \"host\""));
        assert!(commands[1].contains("env-from-host = [\"https_proxy\"]"));
        config.authorities = Some(crate::image::certificates::Authorities::Host);
        assert_eq!(all(&config)[0].state, CheckState::Ok);
    }
}
