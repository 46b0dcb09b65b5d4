//! Owns pruning sub-projects of TheRock in build volumes: finding those whose installed files are in an artifact, and
//! removing one, as TheRock's own `+expunge` does.
//!
//! Applies only if snapshots do not include build volumes: otherwise it would free no space. The tree is a build's
//! output, so nothing in it may lead elsewhere: no link, no mount, no path in a file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::build_logs::{self, text};
use super::check::names;
use super::journal;
use super::usage::subdirectories::is_therock;
use super::{LockedEnv, Store};
use crate::plan::gc::{Inventory, Project};
use crate::plan::ids::{PathBelow, VolumeId};
use crate::rocm::therock::build_tree::{EXPUNGED, archived};
use crate::store::gc_apply::Removal;
use crate::sys::atomic::random_id;
use crate::sys::error::Result;
use crate::tree::{file, measure};

/// Returns the sub-projects that were built below the build tree `top` and that an artifact contains; none if it is
/// not TheRock's.
fn archived_in(top: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    if !is_therock(top) {
        return Ok(found);
    }
    for artifact in names(&top.join("artifacts"))? {
        let artifact = Path::new("artifacts").join(artifact);
        let Some(manifest) = text(top, &artifact.join("artifact_manifest.txt")) else {
            continue;
        };
        for project in archived(&manifest) {
            let copy = artifact.join(&project).join("stage");
            let built = text(top, &project.join("stamp/stage.stamp")).is_some();
            if built && file::is_directory(top, &copy) {
                found.insert(project);
            }
        }
    }
    Ok(found)
}

impl Store {
    /// Adds the removable sub-projects of finished envs.
    pub(super) fn add_projects(&self, inventory: &mut Inventory) -> Result<()> {
        if self.freezes_volumes() {
            return Ok(());
        }
        let mut projects = BTreeMap::new();
        for (name, env) in &inventory.envs {
            if env.busy || env.unsettled || !env.record.complete {
                continue;
            }
            for (volume, id) in &env.record.head.volumes {
                let top = self.volume_dir(id);
                for project in archived_in(&top)? {
                    let log = build_logs::read(&top, &project.join("build"));
                    let took_ms =
                        log.map(|log| log.commands.iter().map(|command| command.took_ms).sum());
                    let bytes = build_tree_bytes(&top.join(&project));
                    if let Some(path) = project.to_str() {
                        let place = (name.clone(), volume.to_string(), path.to_owned());
                        projects.insert(place, Project { bytes, took_ms });
                    }
                }
            }
        }
        inventory.projects = projects;
        Ok(())
    }

    /// Moves the files of a sub-project that `+expunge` removes to the trash.
    pub(super) fn take_project(&self, volume: &VolumeId, project: &Path) -> Result<()> {
        let top = self.volume_dir(volume);
        for part in EXPUNGED {
            let place = self.root().join("trash").join(random_id()?);
            file::move_out(&top, &project.join(part), &place)?;
        }
        Ok(())
    }
}

/// Returns the bytes that removing a sub-project frees, without files that artifacts or other `dist` directories
/// share by hard links.
fn build_tree_bytes(project: &Path) -> u64 {
    let parts = EXPUNGED.iter().map(|part| project.join(part));
    let roots: Vec<_> = parts.map(|path| measure::Root::new(path, 0)).collect();
    let usage = measure::scan(&roots, &measure::MeasureOptions::default());
    usage.total().exclusive
}

impl LockedEnv<'_> {
    /// Removes a sub-project, if it still may be removed.
    pub(super) fn prune_build_tree(&mut self, volume: &str, project: &str) -> Result<Removal> {
        let record = self.known_record()?;
        if !record.complete {
            return Ok(Removal::Stays("the env is no longer complete".to_owned()));
        }
        let Some(id) = record.head.volumes.get(volume) else {
            return Ok(Removal::Gone);
        };
        let top = self.store.volume_dir(id);
        let project: PathBelow = project.parse()?;
        if !archived_in(&top)?.contains::<Path>(project.as_ref()) {
            return Ok(Removal::Stays(
                "no artifact contains it any more".to_owned(),
            ));
        }
        // Once the stamp is gone, only this entry shows that the rest must go too.
        let entry = journal::JournalEntry::Expunge {
            volume: id.clone(),
            project: project.clone(),
        };
        journal::begin(&self.directory, &entry)?;
        let taken = self.store.take_project(id, project.as_ref());
        journal::clear(&self.directory)?;
        taken.map(|()| Removal::Gone)
    }
}
