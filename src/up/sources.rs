//! Owns the inputs of `up` and `lock` besides the image: sources, fetched and with fingerprints, and the patches of
//! hooks.

use std::path::Path;

use super::{checkout, hooks};
use crate::plan::resolve::{self, VolumeKind, VolumeSource};
use crate::store::source::{self, Git, Repository};
use crate::sys::error::Result;
use crate::sys::signals::Cancel;
use crate::up::downloads::Fetching;
use crate::up::resolve::{Gathered, once};

/// Gathers all inputs but the image: fetches missing sources and patches, reads the fingerprints that steps need, and asks
/// the sources whether the hooks will apply. Returns notes for the user.
pub(crate) fn fetch(gathered: &mut Gathered<'_>, with: Fetching<'_>) -> Result<Vec<String>> {
    let (store, offline) = (with.store, with.offline);
    let selection = gathered.selection;
    let volumes = resolve::volumes(&selection.profile, &gathered.inputs)?;
    let cancel = Cancel::new(with.task.signals);
    let git = Git::until(&selection.inputs.user, &cancel);
    let volumes = volumes.iter();
    for volume in volumes.filter(|volume| volume.kind == VolumeKind::Source) {
        let directory = match &volume.source {
            VolumeSource::Git(source) => {
                let mut say = |message: &str| with.task.reporter.note(message);
                let repository = Repository::new(&volume.name, source);
                let commit = selection.commit(&volume.name);
                let directory = repository.prepare_at(store, &git, commit, offline, &mut say);
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
        cancel.outcome(gathered.fingerprint(&volume.name, &directory, &git, &read))?;
        cancel.outcome(gathered.compare(&volume.name, &directory, &read))?;
        gathered.sources.insert(volume.name.clone(), directory);
    }
    let mut notes = checkout::use_target_table(gathered)?;
    let cancel = Cancel::new(with.task.signals);
    let fetched = hooks::fetch_patches(&mut gathered.hooks, store, offline, &cancel);
    cancel.outcome(fetched)?;
    let git = Git::until(&selection.inputs.user, &cancel);
    cancel.outcome(hooks::apply_to_inputs(gathered, &git))?;
    notes.extend(hooks::ask(gathered)?);
    Ok(notes)
}
