//! Owns the policy of `gc`: the `[gc]` table of the configuration, the presets, and both as plain numbers.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plan::resolve::seconds;
use crate::profile::value::{self, Refused};
use crate::profile::{Amount, shorten};
use crate::sys::error::Result;

/// A named policy.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// Little disk: items unused for a month go, and a fifth stays free
    Laptop,
    /// Much disk: the last three snapshots stay, items unused for three months go, and a tenth stays free
    #[default]
    Workstation,
    /// Built once: items unused for a week go, and a quarter stays free
    Ci,
}

/// The `[gc]` table, exactly as written; missing values are the preset's.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Table {
    /// Source of the other values: `laptop`, `workstation` or `ci`.
    pub preset: Option<Preset>,
    /// Maximum size of the store: a size, or a part of the file system such as `60%`.
    pub keep_at_most: Option<String>,
    /// How much removable data stays, however full the disk is: a size, or a part of the file system.
    pub keep_at_least: Option<String>,
    /// Space to keep free on the file system for ordinary users: a size, or a part of it.
    pub min_free: Option<String>,
    /// Time without use after which an item goes even if there is room: `90d`, or `never`.
    pub older_than: Option<String>,
    /// Newest snapshots of steps that each env keeps.
    pub keep_last: Option<usize>,
    /// Also remove sub-projects of TheRock from build volumes if an artifact contains their installed files.
    pub expunge: Option<bool>,
    /// Caches by name.
    pub cache: BTreeMap<String, CacheTable>,
}

/// Settings of one cache.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CacheTable {
    /// Size above which the cache is shrunk; overrides profiles.
    pub max: Option<String>,
}

impl Table {
    /// Takes missing values from a table of lower rank.
    pub fn or(self, lower: Self) -> Self {
        Self {
            preset: self.preset.or(lower.preset),
            keep_at_most: self.keep_at_most.or(lower.keep_at_most),
            keep_at_least: self.keep_at_least.or(lower.keep_at_least),
            min_free: self.min_free.or(lower.min_free),
            older_than: self.older_than.or(lower.older_than),
            keep_last: self.keep_last.or(lower.keep_last),
            expunge: self.expunge.or(lower.expunge),
            cache: lower.cache.into_iter().chain(self.cache).collect(),
        }
    }
}

/// What to keep: the values of a [`Table`], parsed, or the preset's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Policy {
    pub preset: Preset,
    pub keep_at_most: Option<Amount>,
    pub keep_at_least: Amount,
    pub min_free: Amount,
    pub older_than: Option<Duration>,
    pub keep_last: usize,
    pub expunge: bool,
    pub cache_max: BTreeMap<String, u64>,
}

const GIB: u64 = 1 << 30;
const DAY: Duration = Duration::from_secs(24 * 3600);

impl Preset {
    fn policy(self) -> Policy {
        let (least, free, days, last) = match self {
            Self::Laptop => (5 * GIB, 20, 30, 1),
            Self::Workstation => (50 * GIB, 10, 90, 3),
            Self::Ci => (0, 25, 7, 0),
        };
        Policy {
            preset: self,
            keep_at_most: None,
            keep_at_least: Amount::Bytes(least),
            min_free: Amount::Percent(free),
            older_than: Some(DAY * days),
            keep_last: last,
            expunge: false,
            cache_max: BTreeMap::new(),
        }
    }
}

/// A value of the table that cannot be used.
#[derive(Debug)]
pub(crate) struct Bad {
    /// Its key below `gc`.
    pub(crate) key: Vec<String>,
    pub(crate) why: String,
}

pub(crate) const EXAMPLES: &str =
    "keep-at-least = \"20G\", min-free = \"10%\", older-than = \"90d\"";

impl Policy {
    /// Reads a table; `preset` overrides the table's own.
    pub(crate) fn new(table: &Table, preset: Option<Preset>) -> Result<Self> {
        let mut wrong = Vec::new();
        let policy = Self::read(table, preset, &mut wrong);
        wrong.into_iter().next().map_or(Ok(policy), |bad| {
            let key = bad.key.join(".");
            Err(invalid!("`{key}` in the `gc` table: {}", bad.why).help(EXAMPLES))
        })
    }

    /// Reads a table like `new`, but collects bad values in `wrong` and uses the preset's instead.
    pub(crate) fn read(table: &Table, preset: Option<Preset>, wrong: &mut Vec<Bad>) -> Self {
        fn good<T>(
            wrong: &mut Vec<Bad>,
            key: &[&str],
            text: Option<&String>,
            parse: impl FnOnce(&str) -> std::result::Result<T, Refused>,
        ) -> Option<T> {
            let refused = |Refused { message: why, .. }| {
                let key = key.iter().map(|&part| part.to_owned()).collect();
                wrong.push(Bad { key, why });
            };
            parse(text?).map_err(refused).ok()
        }
        let mut policy = preset.or(table.preset).unwrap_or_default().policy();
        let mut size = |key, text: Option<&String>| good(wrong, &[key], text, amount);
        policy.keep_at_most = size("keep-at-most", table.keep_at_most.as_ref());
        policy.keep_at_least =
            size("keep-at-least", table.keep_at_least.as_ref()).unwrap_or(policy.keep_at_least);
        policy.min_free = size("min-free", table.min_free.as_ref()).unwrap_or(policy.min_free);
        policy.older_than = good(wrong, &["older-than"], table.older_than.as_ref(), age)
            .unwrap_or(policy.older_than);
        policy.keep_last = table.keep_last.unwrap_or(policy.keep_last);
        policy.expunge = table.expunge.unwrap_or(policy.expunge);
        for (name, cache) in &table.cache {
            let max = good(
                wrong,
                &["cache", name, "max"],
                cache.max.as_ref(),
                value::size,
            );
            policy.cache_max.extend(max.map(|max| (name.clone(), max)));
        }
        policy
    }

    /// Converts parts of the file system into bytes; `size` is the file system's size.
    pub(crate) fn limits(&self, size: u64) -> Limits {
        Limits {
            keep_at_most: self.keep_at_most.map(|amount| amount.of(size)),
            keep_at_least: self.keep_at_least.of(size),
            min_free: self.min_free.of(size),
            older_than: self.older_than,
            keep_last: self.keep_last,
        }
    }
}

/// A policy in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Limits {
    pub keep_at_most: Option<u64>,
    pub keep_at_least: u64,
    pub min_free: u64,
    #[serde(serialize_with = "seconds::serialize")]
    pub older_than: Option<Duration>,
    pub keep_last: usize,
}

fn amount(text: &str) -> std::result::Result<Amount, Refused> {
    let Some(number) = text.trim().strip_suffix('%') else {
        return value::size(text).map(Amount::Bytes);
    };
    match number.trim().parse() {
        Ok(percent) if percent <= 100 => Ok(Amount::Percent(percent)),
        _ => Err(Refused::new(format!(
            "`{}` is not a percentage",
            shorten(text)
        ))),
    }
}

fn age(text: &str) -> std::result::Result<Option<Duration>, Refused> {
    match text {
        "never" => Ok(None),
        _ => value::duration(text).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Policy> {
        Policy::new(&toml::from_str(text).unwrap(), None)
    }

    #[test]
    fn a_table_changes_what_it_names_of_a_preset() {
        let policy =
            read("preset = 'ci'\nmin-free = '30G'\nkeep-at-most = '60%'\ncache.ccache.max = '20G'")
                .unwrap();
        assert_eq!(policy.preset, Preset::Ci);
        assert_eq!(policy.older_than, Some(DAY * 7));
        assert_eq!(policy.cache_max["ccache"], 20 * GIB);
        let limits = policy.limits(1000 * GIB);
        assert_eq!(limits.min_free, 30 * GIB);
        assert_eq!(limits.keep_at_most, Some(600 * GIB));
        assert_eq!(read("").unwrap(), Preset::Workstation.policy());
        assert_eq!(read("older-than = 'never'").unwrap().older_than, None);
        let own = Table {
            preset: Some(Preset::Ci),
            ..Table::default()
        };
        assert_eq!(
            Policy::new(&own, Some(Preset::Laptop)).unwrap().preset,
            Preset::Laptop
        );
    }

    #[test]
    fn the_nearer_file_wins() {
        let [near, far] = [
            "min-free = '1G'\ncache.a.max = '1G'",
            "min-free = '2G'\nkeep-last = 7\ncache.a.max = '2G'\ncache.b.max = '3G'",
        ]
        .map(|text| toml::from_str::<Table>(text).unwrap());
        let policy = Policy::new(&near.or(far), None).unwrap();
        assert_eq!(policy.min_free, Amount::Bytes(GIB));
        assert_eq!(policy.keep_last, 7);
        assert_eq!(policy.cache_max["a"], GIB);
        assert_eq!(policy.cache_max["b"], 3 * GIB);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (text, part) in [
            ("min-free = '101%'", "min-free"),
            ("keep-at-least = 'much'", "keep-at-least"),
            ("older-than = '3w'", "older-than"),
            ("older-than = ''", "older-than"),
            ("cache.x.max = '1Q'", "cache.x.max"),
        ] {
            let error = read(text).unwrap_err();
            assert_has!(error.message(), part);
            assert_eq!(error.kind().exit_code(), 3);
        }
    }
}
