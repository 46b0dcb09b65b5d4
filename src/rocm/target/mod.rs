//! Owns the facts about targets: products, kind, families, and the projects that TheRock does not build for a target.
//!
//! The table `target/gpu_targets.json` was taken from one commit of TheRock, which the file names. It is compiled in,
//! so that names are checked before anything is downloaded. Targets that the store learned from a newer checkout take
//! precedence.

mod compatibility;
mod learned;
mod products;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::LazyLock;

pub(crate) use compatibility::{Compatible, How, advised_variant, runs, without};
pub(crate) use learned::{Learned, file as learned_file};
use serde::{Deserialize, Serialize};

use crate::rocm::therock::Declared;
use crate::sys::error::{Error, Result};
use crate::sys::suggest;

/// The kind of GPU, which determines its memory and drivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuKind {
    /// A graphics card.
    Dgpu,
    /// Part of a CPU.
    Igpu,
    /// A server accelerator.
    Dcgpu,
}

/// TheRock's support of a target on Linux.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Support {
    /// The marketing name of the architecture, such as `RDNA3`.
    pub architecture: String,
    /// TheRock produces packages.
    pub build_passing: bool,
    /// A short test on hardware passes.
    pub sanity_tested: bool,
    /// The target is meant for use.
    pub release_ready: bool,
}

#[derive(Clone, Debug, Deserialize)]
pub struct TargetInfo {
    /// The facts of TheRock's CMake files.
    #[serde(flatten)]
    pub declared: Declared,
    pub kind: GpuKind,
    /// The products that releases support.
    pub release_products: Option<String>,
    support: Option<Support>,
}

impl TargetInfo {
    pub fn rccl_buildable(&self) -> bool {
        let mut excluded = self.declared.excluded.iter();
        !excluded.any(|one| one.project == "rccl")
    }
}

#[derive(Debug, Deserialize)]
struct Source {
    commit: String,
}

#[derive(Debug, Deserialize)]
struct Table {
    source: Source,
    targets: Vec<TargetInfo>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut table = compiled_in();
    if let Some(learned) = Learned::installed() {
        learned.join(&mut table);
    }
    table
});

fn compiled_in() -> Table {
    // Any test that runs catches an invalid table.
    #[expect(clippy::expect_used, reason = "the table is a constant of the program")]
    serde_json::from_str(include_str!("gpu_targets.json")).expect("gpu_targets.json")
}

/// A GPU ISA that TheRock supports, such as `gfx1103`.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Target(&'static TargetInfo);

const ALL: &str = "`rockenv target ls` shows them all, `rockenv target learn --source DIR` imports those of a newer TheRock";

impl Target {
    /// Parses a name, which must be in the table.
    pub fn parse(name: &str) -> Result<Self> {
        if let Some(info) = TABLE.targets.iter().find(|info| info.declared.name == name) {
            return Ok(Self(info));
        }
        let error = invalid!("unknown target `{}`", name.escape_debug());
        Err(error.help(Self::advice(name)))
    }

    /// Parses what a person types: a target's name, or a product such as `780m`.
    pub fn named(text: &str) -> Result<Self> {
        match Self::parse(text) {
            Err(error) => {
                let product = match family(text) {
                    Some(_) => None,
                    None => products::only(text)?,
                };
                // Not `invalid`, because the name does not come from a file.
                let unknown = not_found!("{}", error.message());
                product.ok_or_else(|| unknown.help(Self::advice(text)))
            }
            found => found,
        }
    }

    pub fn products(self) -> &'static [&'static str] {
        products::of(self)
    }

    /// Returns the same target as a checkout declares it.
    pub fn declared(self, declared: &Declared) -> Self {
        // Leaks a few hundred bytes, once for each target of a command.
        Self(Box::leak(Box::new(learned::row(Some(self.0), declared))))
    }

    pub(crate) fn advice(name: &str) -> String {
        if let Some(members) = family(name) {
            let members = joined(&members, ", ");
            return format!("`{name}` is a family; name one or more of its targets: {members}");
        }
        // Tools print an ISA with its features: `gfx90a:sramecc+:xnack-`.
        let isa = name.split(':').next().unwrap_or(name);
        match suggest::closest(isa, all().map(|target| target.name())) {
            Some(close) => format!("did you mean `{close}`? {ALL}"),
            None => ALL.to_owned(),
        }
    }

    pub fn name(&self) -> &'static str {
        &self.0.declared.name
    }

    pub fn info(&self) -> &'static TargetInfo {
        self.0
    }

    pub fn support(&self) -> Option<&'static Support> {
        self.0.support.as_ref()
    }

    /// Returns true if the target is in `family`. Every target is in the family of its own name.
    pub fn is_in(&self, family: &str) -> bool {
        let mut families = self.0.declared.families.iter();
        self.name() == family || families.any(|name| name == family)
    }

    /// Returns the value of `HSA_OVERRIDE_GFX_VERSION` that makes a runtime load code built for this target.
    ///
    /// ROCr expects decimal numbers, while the last two digits of a name are hexadecimal: gfx90a is 9.0.10.
    pub fn override_version(&self) -> String {
        let digits = self.name().trim_start_matches("gfx");
        let (major, rest) = digits.split_at(digits.len().saturating_sub(2));
        let mut parts = rest.chars().map(|digit| digit.to_digit(16).unwrap_or(0));
        let (minor, stepping) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        format!("{major}.{minor}.{stepping}")
    }
}

/// Returns the ISA name of a KFD `gfx_target_version`, whether or not TheRock supports it.
pub(crate) fn isa_name(version: u32) -> String {
    let (major, minor, stepping) = (version / 10_000, version / 100 % 100, version % 100);
    format!("gfx{major}{minor:x}{stepping:x}")
}

/// Returns every target in TheRock's order.
pub(crate) fn all() -> impl Iterator<Item = Target> {
    TABLE.targets.iter().map(Target)
}

/// Returns the targets of a family; `None` if TheRock has no family of that name.
pub(crate) fn family(name: &str) -> Option<Vec<Target>> {
    let members: Vec<Target> = all().filter(|target| target.is_in(name)).collect();
    (!members.is_empty()).then_some(members)
}

pub(crate) fn families() -> impl Iterator<Item = &'static str> {
    let names = TABLE
        .targets
        .iter()
        .flat_map(|TargetInfo { declared, .. }| {
            let families = declared.families.iter().chain([&declared.name]);
            families.map(String::as_str)
        });
    names.collect::<BTreeSet<_>>().into_iter()
}

/// Returns the names of targets, with a text between them.
pub(crate) fn joined(targets: &[Target], between: &str) -> String {
    let names: Vec<&str> = targets.iter().map(Target::name).collect();
    names.join(between)
}

pub(crate) fn shown(targets: &[Target]) -> String {
    match targets.is_empty() {
        true => "no target".to_owned(),
        false => joined(targets, ", "),
    }
}

/// Returns the commit of TheRock that the table was taken from.
pub(crate) fn table_commit() -> &'static str {
    &TABLE.source.commit
}

fn position(target: &Target) -> usize {
    all()
        .position(|other| other == *target)
        .unwrap_or(usize::MAX)
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl PartialEq for Target {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Target {}

// By position, not by name: people expect gfx90a before gfx1030.
impl Ord for Target {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        position(self).cmp(&position(other))
    }
}

impl PartialOrd for Target {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl TryFrom<String> for Target {
    type Error = Error;

    /// Accepts a saved name that was known when it was saved, even if it was forgotten since.
    fn try_from(name: String) -> Result<Self> {
        let digits = name.strip_prefix("gfx").unwrap_or_default();
        let is_name = digits.len() >= 3 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        match Self::parse(&name) {
            Err(_) if is_name => Ok(Self(Box::leak(Box::new(learned::name_only(name))))),
            other => other,
        }
    }
}

impl From<Target> for String {
    fn from(target: Target) -> Self {
        target.name().to_owned()
    }
}

#[cfg(test)]
pub(crate) fn parsed(names: &[&str]) -> Vec<Target> {
    let targets = names.iter().map(|name| Target::parse(name).unwrap());
    targets.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_consistent() {
        assert_eq!(all().count(), 28);
        assert_eq!(families().count(), 53);
        assert_eq!(table_commit().len(), 40);
        for target in all() {
            assert_eq!(Target::parse(target.name()).unwrap(), target);
        }
    }

    #[test]
    fn unknown_names_get_advice() {
        let help = |name: &str| {
            let error = Target::parse(name).unwrap_err();
            error.help_text().unwrap().to_owned()
        };
        assert_has!(help("gfx1013"), "`gfx1");
        assert!(help("GFX1103").contains("`gfx1103`"));
        assert_has!(help("gfx90a:sramecc+:xnack-"), "`gfx90a`");
        // Swapped digits rank before a wrong digit.
        assert_has!(help("gfx1130"), "`gfx1103`");
        assert_has!(help("gfx1120"), "`gfx1102`");
        assert!(help("gfx110X-igpu").ends_with("one or more of its targets: gfx1103"));
        assert!(help("radeon").starts_with("`rockenv target ls` shows them all"));
    }

    #[test]
    fn versions_are_decimal() {
        for (name, version, kfd) in [
            ("gfx1103", "11.0.3", 110_003),
            ("gfx90a", "9.0.10", 90_010),
            ("gfx90c", "9.0.12", 90_012),
            ("gfx942", "9.4.2", 90_402),
            ("gfx1151", "11.5.1", 110_501),
            ("gfx1201", "12.0.1", 120_001),
        ] {
            let target = Target::parse(name).unwrap();
            assert_eq!(target.override_version(), version);
            assert_eq!(isa_name(kfd), name);
        }
        assert_eq!(isa_name(110_004), "gfx1104");
        assert!(Target::parse(&isa_name(110_004)).is_err());
    }

    #[test]
    fn order_is_the_tables() {
        assert!(Target::parse("gfx90a").unwrap() < Target::parse("gfx1030").unwrap());
    }

    #[test]
    fn serde_is_the_name() {
        let target = Target::parse("gfx1103").unwrap();
        assert_eq!(serde_json::to_string(&target).unwrap(), "\"gfx1103\"");
        assert_eq!(
            serde_json::from_str::<Target>("\"gfx1103\"").unwrap(),
            target
        );
        assert!(serde_json::from_str::<Target>("\"gfx1\"").is_err());
        assert!(serde_json::from_str::<Target>("\"radeon\"").is_err());
        // Saved names stay readable.
        let forgotten: Target = serde_json::from_str("\"gfx1310\"").unwrap();
        assert_eq!(forgotten.name(), "gfx1310");
        assert!(Target::parse("gfx1310").is_err());
    }
}
