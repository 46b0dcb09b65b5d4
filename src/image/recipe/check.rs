//! Owns validating a recipe's strings.
//!
//! A recipe may come from a stranger, and both apt and pacman have options that run programs on the host. So every
//! string that reaches a tool's command line or configuration is checked for its use there, and options must be on an
//! allow-list.

use std::path::Path;

use super::{Mmdebstrap, Oci, Pacstrap, Source, Tarball, snapshot_time};
use crate::image::oci::{NO_DIGEST, Platform, Reference, sha256};
use crate::sys::address::without_login;
use crate::sys::checksum::is_sha256;
use crate::sys::error::Error;
use crate::sys::suggest;

/// apt options that a recipe may set. Deliberately excluded: options that run a program (`DPkg::*`, `*::Pre-Invoke`,
/// `Proxy-Auto-Detect`, `Apt::Key::gpgvcommand`), move a directory (`Dir::*`) or weaken signatures.
const APT_OPTIONS: [&str; 15] = [
    "APT::Install-Recommends",
    "APT::Install-Suggests",
    "APT::Default-Release",
    "APT::Immediate-Configure",
    "APT::AutoRemove::RecommendsImportant",
    "APT::AutoRemove::SuggestsImportant",
    "APT::Get::Install-Recommends",
    "APT::Get::Never-Include-Phased-Updates",
    "Acquire::Retries",
    "Acquire::Languages",
    "Acquire::Check-Valid-Until",
    "Acquire::PDiffs",
    "Acquire::By-Hash",
    "Acquire::http::Timeout",
    "Acquire::https::Timeout",
];

/// pacman.conf keys that a recipe may set. For the same reasons no `XferCommand`, `HookDir`, `Include`, `SigLevel`.
const PACMAN_OPTIONS: [&str; 7] = [
    "IgnorePkg",
    "IgnoreGroup",
    "NoUpgrade",
    "NoExtract",
    "ParallelDownloads",
    "DisableDownloadTimeout",
    "Architecture",
];

/// The fault of a table, and the text in it that the error points at.
pub(super) struct Bad {
    pub(super) error: Error,
    pub(super) mentions: String,
}

fn bad(mentions: &str, message: String, help: impl Into<String>) -> Bad {
    Bad {
        error: invalid!("{message}").help(help),
        mentions: mentions.into(),
    }
}

impl Source {
    pub(super) fn checked(mut self, base: &Path) -> std::result::Result<Self, Bad> {
        match &mut self {
            Self::Mmdebstrap(table) => table.check()?,
            Self::Pacstrap(table) => table.check()?,
            Self::Oci(table) => {
                table.check()?;
                table.path = table.path.take().map(|path| base.join(path));
            }
            Self::Tarball(table) => {
                table.check()?;
                table.path = table.path.take().map(|path| base.join(path));
            }
            Self::Directory(table) => {
                if table.path.as_os_str().is_empty() {
                    return Err(bad("path", "`path` is empty".into(), "path = \"rootfs\""));
                }
                table.path = base.join(&table.path);
            }
        }
        Ok(self)
    }
}

impl Mmdebstrap {
    fn check(&self) -> std::result::Result<(), Bad> {
        word("suite", &self.suite, ".-")?;
        for component in &self.components {
            word("component", component, ".-/")?;
        }
        if self.components.is_empty() {
            return Err(bad(
                "components",
                "`components` is empty".into(),
                "components = [\"main\"]",
            ));
        }
        const VARIANTS: [&str; 8] = [
            "minbase",
            "essential",
            "apt",
            "required",
            "buildd",
            "important",
            "debootstrap",
            "standard",
        ];
        let variant = self.variant.as_str();
        if !VARIANTS.contains(&variant) {
            let message = format!("unknown variant `{variant}`");
            let help = suggest::choices_help(variant, &VARIANTS, "variants");
            return Err(bad(variant, message, help));
        }
        for package in &self.packages {
            word("package", package, "+.:=~/-_")?;
        }
        if let Some(architecture) = &self.architecture {
            word("architecture", architecture, "-")?;
        }
        check_snapshot(self.snapshot.as_deref())?;
        self.apt_options
            .iter()
            .try_for_each(|option| check_apt_option(option))
    }
}

impl Pacstrap {
    fn check(&self) -> std::result::Result<(), Bad> {
        if self.packages.is_empty() {
            return Err(bad(
                "packages",
                "`packages` is empty".into(),
                "packages = [\"base\"]",
            ));
        }
        for package in &self.packages {
            word("package", package, "+._-@/")?;
        }
        for repository in &self.repositories {
            word("repository", repository, "._-")?;
            if repository == "options" {
                return Err(bad(
                    repository,
                    "a repository cannot be named `options`".into(),
                    "core, extra, multilib",
                ));
            }
        }
        check_snapshot(self.snapshot.as_deref())?;
        for line in &self.pacman_conf {
            let key = line.split('=').next().unwrap_or_default().trim();
            if line.contains(['\n', '\r', '[', ']']) || !PACMAN_OPTIONS.contains(&key) {
                return Err(bad(
                    line,
                    format!("a recipe cannot set pacman option `{line}`"),
                    format!("allowed: {}", PACMAN_OPTIONS.join(", ")),
                ));
            }
        }
        Ok(())
    }
}

impl Oci {
    /// Returns the digest pinned by `ref`, in hexadecimal digits.
    pub(in crate::image) fn sha256(&self) -> Option<String> {
        Reference::parse(self.reference.as_deref()?).ok()?.sha256
    }

    fn check(&self) -> std::result::Result<(), Bad> {
        if Platform::parse(&self.platform).is_none() {
            return Err(bad(
                &self.platform,
                format!("`{}` is not a platform", self.platform.escape_debug()),
                "platform = \"linux/amd64\"",
            ));
        }
        match (&self.reference, &self.path) {
            (None, None) => Err(bad(
                "",
                "neither `ref` nor `path` is given".into(),
                "ref = \"registry.example.org/name@sha256:...\", or path = \"DIRECTORY\"",
            )),
            (None, Some(_)) => Ok(()),
            // Images in files may have any name.
            (Some(text), Some(_)) => {
                let digest = match text.split_once('@') {
                    Some((_, digest)) => Some(digest),
                    None => Some(text.as_str()).filter(|text| text.starts_with("sha256:")),
                };
                match digest.is_none_or(|digest| sha256(digest).is_some()) {
                    true => Ok(()),
                    false => Err(bad(
                        text,
                        format!("`{}` {NO_DIGEST}", text.escape_debug()),
                        "ref = \"name:tag@sha256:...\"",
                    )),
                }
            }
            (Some(text), None) => match Reference::parse(text) {
                Ok(_) => Ok(()),
                Err((message, help)) => Err(bad(text, message, help)),
            },
        }
    }
}

impl Tarball {
    fn check(&mut self) -> std::result::Result<(), Bad> {
        match (&self.path, &self.url) {
            (Some(_), None) => {}
            (None, Some(url))
                if url.starts_with("https://") && !url.contains(char::is_whitespace) => {}
            (None, Some(url)) => {
                return Err(bad(
                    url,
                    format!("`{}` is not an https address", without_login(url)),
                    "only https:// is fetched",
                ));
            }
            (Some(_), Some(_)) => {
                return Err(bad(
                    "url",
                    "both `path` and `url` are given".into(),
                    "keep one of them",
                ));
            }
            (None, None) => {
                return Err(bad(
                    "",
                    "neither `path` nor `url` is given".into(),
                    "path = \"rootfs.tar.zst\"",
                ));
            }
        }
        let digest = self
            .sha256
            .trim_start_matches("sha256:")
            .to_ascii_lowercase();
        if !is_sha256(&digest) {
            return Err(bad(
                "sha256",
                format!("`{}` is not a SHA-256 (64 hexadecimal digits)", self.sha256),
                "sha256sum FILE prints it",
            ));
        }
        self.sha256 = digest;
        Ok(())
    }
}

/// Checks a name that becomes a command-line argument. Refuses leading dashes and the separators of the tool's lists.
fn word(what: &str, value: &str, extra: &str) -> std::result::Result<(), Bad> {
    let allowed = |character: char| character.is_ascii_alphanumeric() || extra.contains(character);
    let starts = value.starts_with(|character: char| character.is_ascii_alphanumeric());
    if starts && value.chars().all(allowed) {
        return Ok(());
    }
    Err(bad(
        value,
        format!("`{value}` is not a {what} name"),
        "letters, digits and the distribution's punctuation; no blanks, no leading dash",
    ))
}

fn check_snapshot(id: Option<&str>) -> std::result::Result<(), Bad> {
    match id {
        Some(id) if snapshot_time(id).is_none() => Err(bad(
            id,
            format!("`{id}` is not a snapshot id"),
            "snapshot = \"20260101T000000Z\" (UTC)",
        )),
        _ => Ok(()),
    }
}

fn check_apt_option(option: &str) -> std::result::Result<(), Bad> {
    let (name, value) = option
        .split_once(char::is_whitespace)
        .unwrap_or((option, ""));
    let value = value.trim().trim_end_matches(';').trim_end();
    let inner = value
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'))
        .unwrap_or(value);
    let plain =
        |character: char| character.is_ascii_alphanumeric() || ".,:_-/ ".contains(character);
    if inner.is_empty() || !inner.chars().all(plain) || inner.contains("//") {
        return Err(bad(
            option,
            format!("apt option `{option}` is not `Name \"value\"` with a plain value"),
            "apt-options = ['Acquire::Retries \"5\"']",
        ));
    }
    if APT_OPTIONS
        .iter()
        .any(|known| known.eq_ignore_ascii_case(name))
    {
        return Ok(());
    }
    let message = format!("a recipe cannot set apt option `{name}`");
    Err(bad(
        name,
        message,
        suggest::choices_help(name, &APT_OPTIONS, "allowed"),
    ))
}
