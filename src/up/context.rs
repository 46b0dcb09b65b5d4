//! Owns the context of every command: configuration, output and access to the store.

use std::os::unix::fs::MetadataExt as _;

use fs_err as fs;
use serde::Serialize;

use crate::plan::jobs::{self, Sizing};
use crate::plan::resolve::{Engine, Spec};
use crate::rocm::gpu;
use crate::store::Store;
use crate::store::ballast::Dropped;
use crate::store::config::Config;
use crate::sys::account;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::host::Host;
use crate::sys::userns;
use crate::ui::Ui;
use crate::ui::table::Table;

/// Made once, passed by reference.
#[derive(Debug)]
pub(crate) struct Context {
    pub config: Config,
    pub ui: Ui,
    pub json: bool,
    /// Whether `--home` names the store.
    pub names_home: bool,
}

impl Context {
    /// Returns the sizing of a command that is not a step.
    pub(crate) fn sizing(&self, spec: &Spec, host: &Host) -> Sizing {
        jobs::size(&jobs::SizingInputs {
            resources: &spec.resources,
            cores: host.cores,
            memory: host.memory,
            configured: self.config.jobs,
            asked: None,
            past: &[],
        })
    }

    /// Prints rows as JSON, or as a table.
    pub(crate) fn list<R: Serialize, const N: usize>(
        &self,
        rows: &[R],
        header: [&str; N],
        cells: impl Fn(&R) -> [String; N],
    ) -> Result<()> {
        if self.json {
            return self.ui.json(&rows);
        }
        self.ui.table(&Table::of(header, rows, cells));
        Ok(())
    }

    /// Looks for GPUs.
    pub(crate) fn gpus(&self) -> gpu::Machine {
        gpu::Machine::detect(&self.config.gpu_root)
    }

    /// Opens the store for changes, and makes a missing one.
    pub(crate) fn store(&self) -> Result<Store> {
        self.opened(Store::open(&self.config.home)?)
    }

    /// Opens an existing store for changes, with the rights for that.
    pub(crate) fn store_to_change(&self, what: &str) -> Result<Store> {
        self.host_as_root(what)?;
        self.opened(self.existing_store()?)
    }

    /// Closes an opened store's directories to all users but the build user and the person behind `sudo`, and removes
    /// envs left by killed commands.
    fn opened(&self, store: Store) -> Result<Store> {
        if let Some(person) = account::caller().person() {
            store.close(person.uid)?;
        }
        store.close(self.config.user.uid)?;
        self.reap(&store)?;
        Ok(store)
    }

    /// Opens an existing store to free space, even on a full disk: drops the ballast before any write, even before the
    /// lock holder is recorded.
    pub(crate) fn store_to_free(&self, what: &str) -> Result<(Store, Option<Dropped>)> {
        self.host_as_root(what)?;
        let store = self.existing_store()?;
        store.check_directories()?;
        let ballast = store.drop_ballast()?;
        self.reap(&store)?;
        Ok((store, ballast))
    }

    /// Removes envs left by killed `up --ephemeral` commands. A failure here must not stop the command.
    pub(crate) fn reap(&self, store: &Store) -> Result<()> {
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

    /// Opens an existing store to read all of it. Files of a user's subordinate ids are readable only to root of a
    /// user namespace; without one, reads as much as possible.
    pub(crate) fn store_to_read(&self) -> Result<Store> {
        let own = nix::unistd::geteuid().as_raw();
        if fs::metadata(&self.config.home).is_ok_and(|data| data.uid() == own)
            && let Err(error) = userns::enter()
        {
            self.ui.detail(&error.chain().join(": "));
        }
        self.existing_store()
    }

    pub(crate) fn existing_store(&self) -> Result<Store> {
        Store::open_existing(&self.config.home)?.ok_or_else(|| self.no_store())
    }

    fn no_store(&self) -> Error {
        let own = self.config.home.display();
        match &self.config.roots_store {
            None => not_found!("no store at `{own}`").help("rockenv up hip-smoke"),
            Some(root) => not_found!("no store at `{own}`; root has one at `{}`", root.display())
                .help(&self.config.sudo_command),
        }
    }

    /// Reads the machine, and gains the rights to change a store: an ordinary user gets them in a user namespace.
    /// A user who has not chosen to work without root is told to use sudo.
    pub(crate) fn host_as_root(&self, what: &str) -> Result<Host> {
        let config = &self.config;
        let has_own = config.home.exists();
        if config.roots_store.is_some() && !has_own && !self.chose_rootless() {
            return Err(self.no_store());
        }
        // If root has a store too, the user may mean its envs.
        let has_own_alone = has_own && config.roots_store.is_none();
        self.host_of(what, has_own_alone || self.chose_rootless())
    }

    /// Does the same for a user who works without root.
    pub(crate) fn host_as_rootless(&self, what: &str) -> Result<Host> {
        self.host_of(what, true)
    }

    /// Points a user who may mean root's store to it.
    pub(crate) fn note_roots_store(&self, has_own: bool) {
        if let Some(root) = &self.config.roots_store {
            let too = if has_own { " too" } else { "" };
            let command = &self.config.sudo_command;
            let place = format!("root has a store{too}, at `{}`", root.display());
            self.ui.note(&format!("{place}; to use it: {command}"));
        }
    }

    /// Points a user whose own store lacks an env to root's.
    pub(crate) fn suggest_roots_store(&self, error: Error) -> Error {
        let (Some(root), Kind::NoEnv) = (&self.config.roots_store, error.kind()) else {
            return error;
        };
        let (message, root) = (error.message(), root.display());
        let message = format!("{message} in your store; root has another store, at `{root}`");
        Error::new(Kind::NoEnv, message).help(match error.help_text() {
            Some(help) if error.names_another() => help,
            _ => &self.config.sudo_command,
        })
    }

    fn chose_rootless(&self) -> bool {
        self.config.engine.as_deref() == Some(Engine::Podman.name())
    }

    fn host_of(&self, what: &str, is_rootless: bool) -> Result<Host> {
        let needs = || format!("{what} needs root");
        match userns::enter() {
            Err(_) if !is_rootless => {
                return Err(unavailable!("{}", needs()).help(&self.config.sudo_command));
            }
            other => other.context(needs)?,
        }
        Host::probe()
    }

    /// Asks before data is dropped. A command from a script, without a terminal, has decided already.
    pub(crate) fn confirm(&self, question: &str) -> Result<()> {
        match self.is_confirmed(question)? {
            true => Ok(()),
            false => Err(usage!("nothing changed")),
        }
    }

    /// Asks the same after some data was dropped; returns the answer.
    pub(crate) fn is_confirmed(&self, question: &str) -> Result<bool> {
        Ok(!self.ui.settings().terminals.stdin || self.ui.confirm(question)?)
    }

    /// Ends a command that took a snapshot: a background process writes it to disk and empties the trash.
    pub(crate) fn flush_in_background(&self, store: &Store) -> Result<()> {
        store.start_background(&Host::probe()?.program)
    }

    /// Ends a command that may have moved data to the trash.
    pub(crate) fn tidy(&self, store: &Store) -> Result<()> {
        if store.has_trash() {
            store.start_background(&Host::probe()?.program)?;
        }
        Ok(())
    }

    /// Ends a command that frees space. On a full disk, the trash is emptied before the ballast is restored. An entry
    /// that stays there does not fail the command, whose work is done.
    pub(crate) fn tidy_full(&self, store: &Store, ballast: Option<Dropped>) -> Result<()> {
        if ballast.is_some()
            && let Err(error) = store.reclaim()
        {
            self.ui.warn(&error.chain().join(": "));
        }
        drop(ballast);
        self.tidy(store)
    }
}
