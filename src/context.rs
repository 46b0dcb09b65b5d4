//! Owns what every command gets: configuration, output and the way to the store.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::store::Store;
use crate::ui::Ui;

/// Made once, passed by reference.
#[derive(Debug)]
pub struct Context {
    /// Configuration.
    pub config: Config,
    /// Output.
    pub ui: Ui,
    /// Print results as JSON.
    pub json: bool,
}

impl Context {
    /// Opens the store; makes it if it is not there.
    pub fn store(&self) -> Result<Store> {
        Store::open(&self.config.home)
    }

    /// Opens a store that must be there.
    pub fn existing_store(&self) -> Result<Store> {
        Store::open_existing(&self.config.home)?.ok_or_else(|| {
            Error::not_found(format!("no store at `{}`", self.config.home.display()))
                .help("rockenv up hip-smoke")
        })
    }

    /// Reads the machine and refuses to go on where root is needed.
    pub fn host_as_root(&self, what: &str) -> Result<Host> {
        let host = Host::probe()?;
        if !host.root {
            return Err(
                Error::unavailable(format!("{what} with systemd-nspawn needs root"))
                    .help("sudo rockenv ..."),
            );
        }
        Ok(host)
    }

    /// Ends a command that may have thrown something away.
    pub fn tidy(&self, store: &Store) -> Result<()> {
        store.reap_in_background(&Host::probe()?.program)
    }
}
