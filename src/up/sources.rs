//! Owns the inputs of `up` and `lock` beside the image: sources, fetched and with fingerprints, and the patches of
//! hooks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{checkout, hooks};
use crate::plan::resolve::{self, VolumeKind, VolumeSource};
use crate::store::Store;
use crate::store::source::{self, Git, Repository};
use crate::sys::error::Result;
use crate::sys::signals::{Cancel, Signals};
use crate::ui::Reporter;
use crate::ui::event::Event;
use crate::up::resolve::{Prepared, once};

/// Fetches missing sources and patches; returns the directories of the sources, and notes for the user.
pub(crate) fn prepare(
    prepared: &mut Prepared,
    store: &Store,
    offline: bool,
    signals: &Signals,
    reporter: &Reporter,
) -> Result<(BTreeMap<String, PathBuf>, Vec<String>)> {
    let sources = prepare_sources(offline, store, prepared, signals, reporter)?;
    let mut notes = checkout::settle(prepared, &sources)?;
    notes.extend(prepare_hooks(offline, store, prepared, &sources, signals)?);
    Ok((sources, notes))
}

/// Fetches missing sources, and reads the fingerprints that steps need.
fn prepare_sources(
    offline: bool,
    store: &Store,
    prepared: &mut Prepared,
    signals: &Signals,
    reporter: &Reporter,
) -> Result<BTreeMap<String, PathBuf>> {
    let volumes = resolve::volumes(&prepared.profile, &prepared.inputs)?;
    let cancel = Cancel::new(signals);
    let look = || cancel.look();
    let user = prepared.inputs.user.clone();
    let git = Git {
        user: &user,
        cancel: cancel.flag(),
        tick: &look,
    };
    let mut sources = BTreeMap::new();
    for volume in volumes
        .iter()
        .filter(|volume| volume.kind == VolumeKind::Source)
    {
        let directory = match &volume.source {
            VolumeSource::Git(source) => {
                let mut say = |message: &str| {
                    reporter.emit(&Event::Note {
                        message: message.to_owned(),
                    });
                };
                let repository = Repository::new(&volume.name, source);
                let pinned = prepared.pinned.as_ref();
                let directory = match pinned.and_then(|pinned| pinned.commit(&volume.name)) {
                    Some(commit) => repository.prepare_at(store, &git, commit, offline, &mut say),
                    None => repository.prepare(store, &git, offline, &mut say),
                };
                cancel.outcome(directory)?
            }
            VolumeSource::Path(path) => {
                source::is_there(&volume.name, path)?;
                path.clone()
            }
            VolumeSource::Store => continue,
        };
        let known = store.known_fingerprint(&directory);
        let read = once(|path: &Path| git.remembered_fingerprint(path, &known));
        cancel.outcome(prepared.fingerprint(&volume.name, &directory, &git, &read))?;
        cancel.outcome(prepared.compare(&volume.name, &directory, &read))?;
        sources.insert(volume.name.clone(), directory);
    }
    Ok(sources)
}

/// Fetches the patches of hooks, and asks the sources whether the hooks will apply; returns notes for the user.
fn prepare_hooks(
    offline: bool,
    store: &Store,
    prepared: &mut Prepared,
    sources: &BTreeMap<String, PathBuf>,
    signals: &Signals,
) -> Result<Vec<String>> {
    let cancel = Cancel::new(signals);
    let look = || cancel.look();
    cancel.outcome(hooks::fetch_patches(
        &mut prepared.hooks,
        store,
        offline,
        cancel.flag(),
        &look,
    ))?;
    let user = prepared.inputs.user.clone();
    let git = Git {
        user: &user,
        cancel: cancel.flag(),
        tick: &look,
    };
    cancel.outcome(hooks::apply_to_inputs(prepared, sources, &git))?;
    hooks::ask(prepared, sources)
}
