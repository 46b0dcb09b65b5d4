//! Owns what every command gets: configuration, output and the way to the store.

use std::os::unix::fs::MetadataExt as _;

use fs_err as fs;

use crate::rocm::gpu;
use crate::store::Store;
use crate::store::ballast::Dropped;
use crate::store::config::Config;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::host::Host;
use crate::sys::userns;
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
    /// Looks for GPUs.
    pub fn gpus(&self) -> gpu::Machine {
        gpu::Machine::detect(&self.config.gpu_root)
    }

    /// Opens the store to change it; makes it if it is not there.
    pub fn store(&self) -> Result<Store> {
        let store = Store::open(&self.config.home)?;
        store.close(self.config.user.uid)?;
        self.reap(&store)?;
        Ok(store)
    }

    /// Opens a store that must be there to change it, with the rights that takes.
    pub fn store_to_change(&self, what: &str) -> Result<Store> {
        self.host_as_root(what)?;
        let store = self.existing_store()?;
        store.close(self.config.user.uid)?;
        self.reap(&store)?;
        Ok(store)
    }

    /// Opens a store that must be there to free space, on a full disk too: the ballast goes before anything is written, a lock's
    /// holder included.
    pub fn store_to_free(&self, what: &str) -> Result<(Store, Option<Dropped>)> {
        self.host_as_root(what)?;
        let store = self.existing_store()?;
        let ballast = store.drop_ballast()?;
        self.reap(&store)?;
        Ok((store, ballast))
    }

    /// Removes what killed `up --ephemeral` left; what cannot be removed now is no reason to do nothing else.
    pub fn reap(&self, store: &Store) -> Result<()> {
        let (reaped, wrong) = store.reap()?;
        for reaped in &reaped {
            self.ui.note(&reaped.to_string());
        }
        for error in wrong {
            self.ui.warn(&error.chain().join(": "));
        }
        match reaped.is_empty() {
            true => Ok(()),
            false => self.tidy(store),
        }
    }

    /// Opens a store that must be there to read all of it: what belongs to a user's subordinate ids can be read only by the root
    /// of a namespace. Where there is none to be had, what can be read is read.
    pub fn store_to_read(&self) -> Result<Store> {
        let own = nix::unistd::geteuid().as_raw();
        if fs::metadata(&self.config.home).is_ok_and(|data| data.uid() == own)
            && let Err(error) = userns::enter()
        {
            self.ui.detail(&error.chain().join(": "));
        }
        self.existing_store()
    }

    /// Opens a store that must be there.
    pub fn existing_store(&self) -> Result<Store> {
        Store::open_existing(&self.config.home)?.ok_or_else(|| {
            Error::not_found(format!("no store at `{}`", self.config.home.display()))
                .help("rockenv up hip-smoke")
        })
    }

    /// Reads the machine, and gets the rights to change a store: an ordinary user has them in a namespace.
    pub fn host_as_root(&self, what: &str) -> Result<Host> {
        userns::enter().context(|| format!("{what} needs root"))?;
        Host::probe()
    }

    /// Asks before something is dropped, on a terminal; a script has decided already.
    pub fn confirm(&self, question: &str) -> Result<()> {
        match self.agrees(question)? {
            true => Ok(()),
            false => Err(Error::new(Kind::Usage, "nothing changed")),
        }
    }

    /// Asks the same where something was dropped already.
    pub fn agrees(&self, question: &str) -> Result<bool> {
        let terminals = self.ui.settings().terminals;
        Ok(!terminals.stdin || !terminals.stderr || self.ui.confirm(question)?)
    }

    /// Ends a command that took a snapshot: it is written to disk in the background, and the trash emptied.
    pub fn settle(&self, store: &Store) -> Result<()> {
        store.start_background(&Host::probe()?.program)
    }

    /// Ends a command that may have thrown something away.
    pub fn tidy(&self, store: &Store) -> Result<()> {
        if store.has_trash() {
            store.start_background(&Host::probe()?.program)?;
        }
        Ok(())
    }

    /// Ends a command that frees space: where the disk was full, what it threw away is gone before the ballast comes back.
    pub fn tidy_full(&self, store: &Store, ballast: Option<Dropped>) -> Result<()> {
        if ballast.is_some() {
            store.reclaim()?;
        }
        drop(ballast);
        self.tidy(store)
    }
}
