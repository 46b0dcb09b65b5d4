//! Owns leases: layers and images that a running command needs and its env's record does not name yet, in
//! `envs/<name>/lease`.
//!
//! A lease is valid while the env's lock is held, whatever the clock says: a dead process keeps nothing.

use std::collections::BTreeMap;

use fs_err as fs;

use super::check::is_busy;
use super::unreadable::Unreadable;
use super::{LockedEnv, Store, lock};
use crate::plan::gc::Lease;
use crate::plan::ids::EnvName;
use crate::sys::atomic;
use crate::sys::error::{Result, encoded};

pub(super) const LEASE: &str = "lease";

impl LockedEnv<'_> {
    /// Keeps layers and an image until the lock is released. Returns whether all of them still exist.
    pub fn lease(&self, lease: &Lease) -> Result<bool> {
        let shared = self.store.lock_shared()?;
        let mut there = self.store.image(&lease.image)?.is_some();
        for id in &lease.layers {
            there &= self.store.layer(id)?.is_some();
        }
        if there {
            let text = encoded(serde_json::to_vec(lease), "a lease")?;
            fs::write(self.directory.join(LEASE), text)?;
            self.store.use_image(&lease.image);
        }
        drop(shared);
        Ok(there)
    }
}

impl Store {
    /// Returns what running commands keep, by env, and the unreadable leases, each of which keeps everything.
    pub fn leases(&self) -> Result<(BTreeMap<EnvName, Lease>, Vec<Unreadable>)> {
        let (mut leases, mut unreadable) = (BTreeMap::new(), Vec::new());
        for name in self.env_names()? {
            let directory = self.env_dir(&name);
            let lease = atomic::read_json::<Lease>(&directory.join(LEASE));
            if let Some(lease) = lease.transpose()
                && is_busy(&lock::env_lock(&directory))
            {
                match lease {
                    Ok(lease) => drop(leases.insert(name, lease)),
                    Err(error) => {
                        let object = format!("the lease of the command in env `{name}`");
                        unreadable.push(Unreadable::new(object, &error));
                    }
                }
            }
        }
        Ok((leases, unreadable))
    }
}
