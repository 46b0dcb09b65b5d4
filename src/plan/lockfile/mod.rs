//! Owns the lock file, `ENV.lock`: the exact inputs of a profile, in a file for review.
//!
//! `up --locked` builds from it and refuses differences. `check` finds differences (pure), `diff` compares two lock
//! files (pure), `steps` finds steps that changed by themselves (pure), `file` reads and writes. Only `observed`
//! contains times and facts of a machine, and it is never compared.

mod check;
mod diff;
mod file;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub(crate) use check::{
    Choices, built, choices, drift, fetched, hooks, image, left, some, source, sources, steps,
};
pub(crate) use diff::{LockChange, changes, describe};
pub(crate) use file::{check_place, parse, place, read, read_known, write};

use crate::image::Package;
use crate::image::recipe::Pin;
use crate::plan::ids::ImageKey;
use crate::plan::image::Image;
use crate::plan::pins::Pins;
use crate::plan::resolve::StepKey;
use crate::rocm::therock::ArtifactFingerprints;
use crate::sys::address::without_login;
use crate::sys::name::StepName;

/// Version of the format. Others are refused.
pub(crate) const VERSION: u32 = 2;

/// A field that is `None` has no key in the file: TOML has no null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Lockfile {
    pub version: u32,
    pub profile: String,
    /// Targets built for, in the order of the table.
    pub targets: Vec<String>,
    /// Targets of the machine that it was locked on, for generic steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub machine_targets: Vec<String>,
    pub variant: Option<String>,
    /// Starting point.
    pub from: String,
    /// Build user as `UID:GID`: the ids own result files, so they are in step keys.
    pub build_user: String,
    /// Parameters from the command line.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub params: BTreeMap<String, String>,
    pub image: LockedImage,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub source: BTreeMap<String, LockedSource>,
    /// Digests of the profile's hooks, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, String>,
    /// Files that rockenv itself fetches, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fetched: BTreeMap<String, Fetched>,
    /// Files in caches whose content the profile locks, by volume, then path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, BTreeMap<String, CacheFile>>,
    /// Steps in order, including those with a GPU, on any machine.
    #[serde(default, rename = "step")]
    pub steps: Vec<LockedStep>,
    /// Facts about the machine that it was locked on.
    pub observed: Observed,
}

impl Lockfile {
    pub fn step(&self, name: &str) -> Option<&LockedStep> {
        self.steps.iter().find(|step| step.name == name)
    }

    /// Returns a warning if URLs in it contain logins; `file` is its path.
    pub(crate) fn login_warning(&self, file: &Path) -> Option<String> {
        let git = self.source.values();
        let git = git.filter_map(|source| source.git.as_ref());
        let fetched = self.fetched.values().filter_map(|file| file.url.as_ref());
        let files = self.files.values().flat_map(BTreeMap::values);
        let all = git.chain(fetched).chain(files.filter_map(CacheFile::url));
        let all = all.chain(self.params.values());
        // The user name in an SSH URL is no secret.
        let all = all.filter(|url| !url.starts_with("ssh:") && !url.starts_with("git+ssh:"));
        let logins = all.filter_map(|url| {
            let shown = without_login(url);
            let host = shown.split(['/', '?', '#']).nth(2)?;
            (shown != *url).then(|| host.to_owned())
        });
        let hosts: Vec<String> = logins.collect::<BTreeSet<_>>().into_iter().collect();
        (!hosts.is_empty()).then(|| {
            format!(
                "`{}` contains the login of {}: keep it out of git, or use a credential helper",
                file.display(),
                hosts.join(" and ")
            )
        })
    }

    /// Returns the step with a key, under any name.
    pub fn of_key(&self, key: &StepKey) -> Option<&LockedStep> {
        self.steps.iter().find(|step| step.key == *key)
    }
}

/// An image as it was built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LockedImage {
    pub name: String,
    /// Digest of the recipe as written.
    pub recipe: String,
    /// Names the image in a store: the pinned recipe, packages and content.
    pub key: ImageKey,
    pub digest: String,
    /// Digest of the container image's manifest, with `sha256:`.
    pub resolved: Option<String>,
    /// Environment variables of the container image.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Time of the distribution's dated archive, `YYYYMMDDTHHMMSSZ`.
    pub snapshot: Option<String>,
    /// Timestamp for files made by the build, in seconds since 1970.
    pub source_date: i64,
    /// Versions and architectures of its packages, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub packages: BTreeMap<String, String>,
}

impl LockedImage {
    /// Describes an image built from the recipe of this name and digest, pinned to a time or not. The image may have
    /// been built under another name.
    pub fn new(name: &str, recipe: &str, snapshot: Option<&str>, image: &Image) -> Self {
        Self {
            name: name.to_owned(),
            recipe: recipe.to_owned(),
            key: image.key.clone(),
            digest: image.digest.clone(),
            resolved: image.resolved.clone(),
            env: image.env.clone().unwrap_or_default(),
            snapshot: snapshot.map(str::to_owned),
            source_date: image.source_date,
            packages: packages(&image.packages),
        }
    }

    /// Returns the pin that limits the recipe to this image.
    pub fn pin(&self) -> Pin<'_> {
        Pin {
            snapshot: self.snapshot.as_deref(),
            resolved: self.resolved.as_deref(),
        }
    }
}

/// Returns packages by name, or by `name:architecture` if there are several of one name.
pub(crate) fn packages(list: &[Package]) -> BTreeMap<String, String> {
    let mut count: BTreeMap<&str, usize> = BTreeMap::new();
    for package in list {
        *count.entry(&package.name).or_default() += 1;
    }
    let named = list.iter().map(|package| {
        let name = match count.get(package.name.as_str()) {
            Some(1) => package.name.clone(),
            _ => format!("{}:{}", package.name, package.architecture),
        };
        let version = format!("{} {}", package.version, package.architecture);
        (name, version.trim_end().to_owned())
    });
    named.collect()
}

/// A source volume at a commit, or by its content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LockedSource {
    /// Repository that the profile names; `None` for a local directory.
    pub git: Option<String>,
    /// Commit, tag or branch that the profile names.
    pub rev: Option<String>,
    /// The commit; `None` for a directory that is not a repository.
    pub commit: Option<String>,
    /// Digest of the content, without a commit.
    pub content: Option<String>,
    /// Commits of submodules, by path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub submodules: BTreeMap<String, String>,
}

impl LockedSource {
    /// Returns the fingerprint of the locked source, in the form of `source::Git::fingerprint`.
    pub fn fingerprint(&self) -> String {
        match (&self.commit, &self.content) {
            (Some(commit), _) => format!("git:{commit}"),
            (None, Some(content)) => format!("content:{content}"),
            (None, None) => "nothing".to_owned(),
        }
    }
}

/// A file that rockenv fetches for an env and keeps in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fetched {
    /// Its origin; `None` for a user's file.
    pub url: Option<String>,
    pub sha256: String,
}

fn sums(files: &BTreeMap<String, Fetched>) -> BTreeMap<String, String> {
    values(files, |file| file.sha256.clone())
}

/// Returns one value of each entry, by name.
fn values<V, W>(map: &BTreeMap<String, V>, value: impl Fn(&V) -> W) -> BTreeMap<String, W> {
    let pairs = map.iter();
    pairs
        .map(|(name, entry)| (name.clone(), value(entry)))
        .collect()
}

/// A file in a cache: fetched by rockenv, or written by a step, in which case only its digest is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum CacheFile {
    /// Digest of its content.
    Sha256(String),
    /// With its origin.
    Fetched(Fetched),
}

impl CacheFile {
    pub fn sha256(&self) -> &String {
        match self {
            Self::Sha256(sha256) => sha256,
            Self::Fetched(file) => &file.sha256,
        }
    }

    pub fn url(&self) -> Option<&String> {
        match self {
            Self::Sha256(_) => None,
            Self::Fetched(file) => file.url.as_ref(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockedStep {
    pub name: StepName,
    pub key: StepKey,
    /// The key's parts besides the parent, as [`crate::plan::resolve::Step::parts`]. They only serve to describe
    /// changes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<String, String>,
    /// Versions and digests of files that it fetched, if it reported them and had run when the lock file was written.
    #[serde(default, skip_serializing_if = "Pins::is_empty")]
    pub pins: Pins,
    /// TheRock's fingerprints that it left for later keys, if it had run when the lock file was written.
    pub prints: Option<LockedFingerprints>,
    /// `pins` and `prints` come from a snapshot built on another build's files, as `--allow-incremental` permits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incremental: bool,
}

/// TheRock's fingerprints after a step that configures it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockedFingerprints {
    /// Artifacts with their fingerprints, empty if TheRock has none.
    pub artifacts: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub stages: BTreeMap<String, BTreeSet<String>>,
}

impl LockedFingerprints {
    /// Describes a step's outputs.
    pub fn new(prints: &ArtifactFingerprints) -> Self {
        let print = |print: &Option<String>| print.clone().unwrap_or_default();
        Self {
            artifacts: values(&prints.artifacts, print),
            stages: prints.stages.clone(),
        }
    }

    /// Converts back to the form that a step leaves.
    pub fn fingerprints(&self) -> ArtifactFingerprints {
        let print = |print: &String| Some(print.clone()).filter(|print| !print.is_empty());
        ArtifactFingerprints {
            artifacts: values(&self.artifacts, print),
            stages: self.stages.clone(),
        }
    }
}

/// Facts about a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Observed {
    /// When it was locked.
    pub time: Timestamp,
    pub rockenv: String,
    pub engine: String,
    pub kernel: String,
    /// Version of the GPU driver, if it is separate from the kernel.
    pub amdgpu: Option<String>,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A lock file with a value in every part.
    pub(crate) const EXAMPLE: &str = r#"# What `rockenv up --locked` builds from. Made by `rockenv lock`: keep it with the profile, do not edit it.
version = 2
profile = "p"
targets = ["gfx1103"]
variant = "lean"
from = "source"
build-user = "1000:1000"

[params]
jobs = "4"

[image]
name = "debian"
recipe = "1111111111111111111111111111111111111111111111111111111111111111"
key = "2222222222222222222222222222222222222222222222222222222222222222"
digest = "3333333333333333333333333333333333333333333333333333333333333333"
snapshot = "20260101T000000Z"
source-date = 1767225600

[image.env]
LANG = "C"

[image.packages]
bash = "5.2.37-2 amd64"
zlib1g = "1.3-1 amd64"

[source.therock]
git = "https://example.org/therock"
rev = "main"
commit = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

[source.therock.submodules]
"base/half" = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"

[hooks]
h = "4444444444444444444444444444444444444444444444444444444444444444"

[fetched.ninja]
url = "https://example.org/ninja.zip"
sha256 = "5555555555555555555555555555555555555555555555555555555555555555"

[files.tarballs]
"zlib/zlib.tar.gz" = "6666666666666666666666666666666666666666666666666666666666666666"

[files.tarballs."xz/xz.tar.gz"]
url = "https://example.org/xz.tar.gz"
sha256 = "9999999999999999999999999999999999999999999999999999999999999999"

[[step]]
name = "z-first"
key = "6cff91b4516e742a98cc06077fbfda396384d0eb3085b3b7f44d6cfc335f2d5f"

[step.parts]
"input therock" = "999999999999"
script = "999999999999"
settings = "999999999999"

[step.pins]
meson = "1.7.0 sha256:7777777777777777777777777777777777777777777777777777777777777777"

[[step]]
name = "a-second"
key = "55565a698aa3e80704d6179f1be0fd48ef5663140ec730993fbd74e30544414f"

[step.parts]
script = "999999999999"
settings = "999999999999"

[step.prints.artifacts]
base = "8888888888888888888888888888888888888888888888888888888888888888"
blas = ""

[step.prints.stages]
math = ["blas"]

[observed]
time = "2026-01-02T03:04:05Z"
rockenv = "0.1.0"
engine = "nspawn"
kernel = "6.18.0"
"#;

    pub(crate) fn example() -> Lockfile {
        parse(EXAMPLE, "the example").unwrap()
    }

    #[test]
    fn two_architectures_of_a_package_have_two_names() {
        let package = |name: &str, architecture: &str| Package {
            name: name.to_owned(),
            version: "1".to_owned(),
            architecture: architecture.to_owned(),
        };
        let found = packages(&[
            package("libc6", "amd64"),
            package("libc6", "i386"),
            package("bash", "amd64"),
        ]);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["bash", "libc6:amd64", "libc6:i386"]);
        assert_eq!(found["libc6:i386"], "1 i386");
    }

    #[test]
    fn hosts_of_logins_are_named() {
        let mut lock = example();
        let place = Path::new("p.lock");
        let source = lock.source.get_mut("therock").unwrap();
        source.git = Some("ssh://git@example.org/therock".to_owned());
        let warning = lock.login_warning(place);
        assert_eq!(warning, None);
        let ninja = lock.fetched.get_mut("ninja").unwrap();
        ninja.url = Some("https://TOKEN@example.org:81/ninja.zip".to_owned());
        let source = lock.source.get_mut("therock").unwrap();
        source.git = Some("https://me:TOKEN@example.net/therock".to_owned());
        assert_eq!(
            lock.login_warning(place).as_deref(),
            Some(
                "`p.lock` contains the login of example.net and example.org:81: \
                 keep it out of git, or use a credential helper"
            )
        );
        let ninja = lock.fetched.get_mut("ninja").unwrap();
        ninja.url = Some("https://example.org/ninja.zip?token=TOKEN".to_owned());
        let parameter = "https://TOKEN@example.com".to_owned();
        lock.params.insert("mirror".to_owned(), parameter);
        let warning = lock.login_warning(place).unwrap();
        let hosts = "example.com and example.net and example.org: ";
        assert!(warning.contains(hosts), "{warning}");
    }
}
