//! Owns what in a store cannot be read: a damaged file hides what it describes, and nothing that this may need is removed.

use std::fmt;

use super::Store;
use super::check::{is_busy, names};
use super::lock;
use crate::sys::error::{Error, Result};

/// Something whose description cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// What it is, such as "env `gfx1103`".
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
            "{} is left out: {}; `rockenv fsck --repair` sets the file aside",
            self.object, self.why
        )
    }
}

impl Store {
    /// Returns the envs whose record cannot be read.
    pub fn unreadable_envs(&self) -> Result<Vec<Unreadable>> {
        let mut found = Vec::new();
        for name in names(&self.root.join("envs"))? {
            let error = self.record(&name).err();
            found.extend(error.map(|error| Unreadable::new(format!("env `{name}`"), &error)));
        }
        Ok(found)
    }

    /// Returns everything that may stand on a layer or an image, and does not say on which: envs, layers, and what running commands keep.
    pub fn unreadable(&self) -> Result<Vec<Unreadable>> {
        let mut found = self.unreadable_envs()?;
        for id in self.layer_ids()? {
            // What a repair set aside is used by nobody.
            if !id.contains(super::check::ASIDE) {
                let error = self.layer(&id).err();
                found.extend(error.map(|error| Unreadable::new(format!("layer `{id}`"), &error)));
            }
        }
        for name in names(&self.root.join("envs"))? {
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
