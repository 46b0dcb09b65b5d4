//! Owns finding unreadable files in a store: a damaged file hides what it describes, so nothing that it may need is
//! removed.

use std::fmt;

use super::Store;
use super::check::{is_busy, names};
use super::lock;
use crate::plan::ids::EnvName;
use crate::sys::error::{Error, Result};

/// An object whose description cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The object, such as "env `gfx1103`".
    pub object: String,
    /// Why it cannot be read.
    why: String,
}

impl Unreadable {
    fn new(object: String, error: &Error) -> Self {
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

impl Store {
    /// Returns the envs whose record cannot be read.
    pub fn unreadable_envs(&self) -> Result<Vec<Unreadable>> {
        let mut found = Vec::new();
        for name in names(&self.root.join("envs"))? {
            let error = match name.parse::<EnvName>() {
                Ok(name) => self.record(&name).err(),
                // Not made by rockenv: a file, or a directory that a user renamed.
                Err(error) => {
                    let record = self.root.join("envs").join(&name).join("record.json");
                    record.exists().then(|| error.into())
                }
            };
            found.extend(error.map(|error| Unreadable::new(format!("env `{name}`"), &error)));
        }
        Ok(found)
    }

    /// Returns all unreadable users of layers and images: envs, layers, and leases of running commands.
    pub fn unreadable(&self) -> Result<Vec<Unreadable>> {
        let mut found = self.unreadable_envs()?;
        for id in self.layer_ids()? {
            // Nothing uses what a repair set aside.
            if !id.contains(super::check::ASIDE) {
                let error = self.layer(&id).err();
                found.extend(error.map(|error| Unreadable::new(format!("layer `{id}`"), &error)));
            }
        }
        for name in self.env_names()? {
            if let Err(error) = self.lease_of(&name)
                && is_busy(&lock::env_lock(&self.env_dir(&name)))
            {
                let object = format!("the lease of the command in env `{name}`");
                found.push(Unreadable::new(object, &error));
            }
        }
        Ok(found)
    }
}
