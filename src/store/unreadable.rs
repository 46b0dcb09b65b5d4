//! Owns reading all layers and their users at once, and finding unreadable ones: a damaged file hides what it
//! describes, so nothing that it may need is removed.

use std::collections::BTreeMap;
use std::fmt;

use super::check::names;
use super::{Layer, Record, Store};
use crate::plan::gc::Lease;
use crate::plan::ids::{EnvName, LayerId};
use crate::sys::error::{Error, Result};

/// An object whose description cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The object, such as "env `gfx1103`".
    pub object: String,
    why: String,
}

impl Unreadable {
    pub(super) fn new(object: String, error: &Error) -> Self {
        Self {
            object,
            why: error.chain().join(": "),
        }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is skipped: {}; details: rockenv fsck",
            self.object, self.why
        )
    }
}

/// All layers and their users, read once.
#[derive(Debug)]
pub(super) struct Users {
    /// What running commands keep.
    pub leases: BTreeMap<EnvName, Lease>,
    pub records: BTreeMap<EnvName, Record>,
    pub layers: BTreeMap<LayerId, Layer>,
    /// Those of them that cannot be read.
    pub unreadable: Vec<Unreadable>,
}

impl Store {
    pub fn unreadable_envs(&self) -> Result<Vec<Unreadable>> {
        Ok(self.read_records()?.1)
    }

    /// Returns all unreadable users of layers and images: envs, layers, and leases of running commands.
    pub fn unreadable(&self) -> Result<Vec<Unreadable>> {
        Ok(self.users()?.unreadable)
    }

    pub(super) fn users(&self) -> Result<Users> {
        // Leases come first: a lease ends after the record names the layers.
        let (leases, of_leases) = self.leases()?;
        let (records, mut unreadable) = self.read_records()?;
        let mut layers = BTreeMap::new();
        for id in self.layer_ids()? {
            // Nothing uses what a repair set aside.
            if id.contains(super::check::ASIDE) {
                continue;
            }
            match self.layer(&id) {
                Ok(layer) => layers.extend(layer.map(|layer| (id, layer))),
                Err(error) => unreadable.push(Unreadable::new(format!("layer `{id}`"), &error)),
            }
        }
        unreadable.extend(of_leases);
        Ok(Users {
            leases,
            records,
            layers,
            unreadable,
        })
    }

    /// Reads the records of all envs. Returns those that cannot be read too.
    fn read_records(&self) -> Result<(BTreeMap<EnvName, Record>, Vec<Unreadable>)> {
        let mut records = BTreeMap::new();
        let mut unreadable = Vec::new();
        let envs = self.root.join("envs");
        for name in names(&envs)? {
            let read = match name.parse::<EnvName>() {
                Ok(env) => self
                    .record(&env)
                    .map(|found| found.map(|found| (env, found))),
                // Not made by rockenv: a file, or a directory that a user renamed.
                Err(error) if envs.join(&name).join("record.json").exists() => Err(error.into()),
                Err(_) => continue,
            };
            match read {
                Ok(found) => records.extend(found),
                Err(error) => unreadable.push(Unreadable::new(format!("env `{name}`"), &error)),
            }
        }
        Ok((records, unreadable))
    }
}
