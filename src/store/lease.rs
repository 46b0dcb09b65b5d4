//! Owns leases: what a running command is about to stand on and its env's record does not say yet, `envs/<name>/lease`.
//!
//! A lease holds as long as the env's lock does, whatever the clock says: nobody who died can keep anything.

use std::collections::BTreeMap;

use fs_err as fs;

use super::check::{is_busy, names};
use super::{LockedEnv, Store, lock};
use crate::plan::gc::Lease;
use crate::sys::error::{Error, Result};

const LEASE: &str = "lease";

impl LockedEnv<'_> {
    /// Keeps layers and an image until the lock is given back. Returns whether all of them are there still.
    pub fn lease(&self, lease: &Lease) -> Result<bool> {
        let shared = self.store.lock_shared()?;
        let mut there = self.store.image(&lease.image)?.is_some();
        for id in &lease.layers {
            there &= self.store.layer(id)?.is_some();
        }
        if there {
            let text = serde_json::to_vec(lease)
                .map_err(|error| Error::unexpected("cannot encode a lease").source(error))?;
            fs::write(self.directory.join(LEASE), text)?;
            self.store.use_image(&lease.image);
        }
        drop(shared);
        Ok(there)
    }

    /// Gives up what an earlier command kept.
    pub(super) fn end_lease(&self) -> Result<()> {
        match fs::remove_file(self.directory.join(LEASE)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl Store {
    /// Returns what running commands keep, by env.
    pub fn leases(&self) -> Result<BTreeMap<String, Lease>> {
        let mut leases = BTreeMap::new();
        for name in names(&self.root.join("envs"))? {
            // One that cannot be read keeps everything: see [`Store::unreadable`].
            if let Ok(Some(lease)) = self.lease_of(&name)
                && is_busy(&lock::env_lock(&self.env_dir(&name)))
            {
                leases.insert(name, lease);
            }
        }
        Ok(leases)
    }

    /// Reads what a command keeps, or kept when it ran.
    pub(super) fn lease_of(&self, env: &str) -> Result<Option<Lease>> {
        crate::sys::atomic::read_json(&self.env_dir(env).join(LEASE))
    }
}
