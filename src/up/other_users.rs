//! Owns finding volumes in the store that steps cannot write to, because they belong to a user other than the build
//! user: several people may build in root's store, each with their own build user.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use crate::plan::record::Record;
use crate::plan::resolve::{Access, Spec, Step, User, Volume, VolumeKind, VolumeSource};
use crate::plan::{Plan, Volumes};
use crate::store::Store;
use crate::sys::account::name_of;
use crate::sys::shell::quoted_path;
use crate::sys::userns;
use crate::tree::acl;

/// The volumes of other users that the steps of a plan would write to.
#[derive(Debug, Default)]
pub(crate) struct OthersVolumes {
    /// Why the env cannot continue with one of its build volumes, and what to do.
    pub(crate) refusal: Option<(String, String)>,
    /// Warnings about caches and outputs, which the steps may not need to write to.
    pub(crate) warnings: Vec<String>,
}

impl OthersVolumes {
    /// Finds these volumes. `new` is the command that makes another env.
    pub(crate) fn of(
        store: Option<&Store>,
        spec: &Spec,
        plan: &Plan,
        record: Option<&Record>,
        new: &str,
    ) -> Self {
        let mut found = Self::default();
        let Some(store) = store else { return found };
        // Without root, the build user is a number in the user namespace, which `up` has entered and `plan` has not.
        if !nix::unistd::geteuid().is_root() {
            return found;
        }
        let runs = plan.running();
        let runs = runs.filter_map(|planned| spec.step(&planned.name));
        let runs: Vec<&Step> = runs.filter(|step| step.user == User::Builder).collect();
        let is_seen = |volume: &Volume| runs.iter().any(|step| step.volumes.contains(&volume.name));
        let built_by = |uid: u32| {
            store
                .spec(&spec.name)
                .is_ok_and(|before| before.user.uid == uid)
        };
        let volumes = spec.volumes.iter();
        for volume in volumes.filter(|volume| volume.access == Access::Rw && is_seen(volume)) {
            let Some((kind, path)) = place(store, spec, plan, record, volume) else {
                continue;
            };
            let Ok(data) = fs::metadata(&path) else {
                continue;
            };
            let is_build = volume.kind == VolumeKind::Build;
            // A root step may have given a build volume to another user, for later steps to read.
            if may_write(spec, &path, &data) || is_build && !built_by(data.uid()) {
                continue;
            }
            let (name, user) = (&volume.name, &spec.user);
            let (as_root, name_of): (_, fn(u32) -> String) = match userns::is_root() {
                true => ("", name_of),
                false => ("podman unshare ", |uid| uid.to_string()),
            };
            let (owner, own) = (name_of(data.uid()), name_of(user.uid));
            let reason = format!(
                "{kind} `{name}` belongs to user {owner}: steps that run as user {own} cannot write to it"
            );
            let help = match data.uid() {
                0 => {
                    let place = quoted_path(&path);
                    format!("{as_root}chown -R {}:{} {place}", user.uid, user.gid)
                }
                uid => format!(
                    "to build as user {owner} too: build-user = \"{uid}:{}\" in the configuration",
                    data.gid()
                ),
            };
            if is_build {
                found.refusal = Some((reason, format!("{new}; {help}")));
            } else {
                found.warnings.push(format!("{reason}; {help}"));
            }
        }
        found
    }
}

/// Returns the name of a volume's kind, and the volume's directory in the store when the first step runs.
fn place(
    store: &Store,
    spec: &Spec,
    plan: &Plan,
    record: Option<&Record>,
    volume: &Volume,
) -> Option<(&'static str, PathBuf)> {
    match (volume.kind, &volume.source) {
        (VolumeKind::Build, _) => {
            let id = record?.head.volumes.get(&volume.name)?;
            let stays = plan.volumes == Volumes::Live && !store.is_volume_empty(id);
            stays.then(|| ("build volume", store.volume_dir(id)))
        }
        (VolumeKind::Cache, VolumeSource::Store) => Some(("cache", store.cache_dir(&volume.name))),
        (VolumeKind::Output, VolumeSource::Store) => {
            let directory = store.output_dir(spec, volume).ok()?;
            Some(("output", directory))
        }
        // Users manage the directories of these volumes themselves.
        (VolumeKind::Cache | VolumeKind::Output, VolumeSource::Path(_) | VolumeSource::Git(_))
        | (VolumeKind::Source | VolumeKind::Host, _) => None,
    }
}

/// Returns whether the build user may write to a directory.
fn may_write(spec: &Spec, directory: &Path, data: &Metadata) -> bool {
    let (uid, gid) = (spec.user.uid, spec.user.gid);
    let others = if data.gid() == gid { 0o022 } else { 0o002 };
    let is_listed = || acl::named_users(directory).is_ok_and(|users| users.contains(&uid));
    [0, data.uid()].contains(&uid) || data.mode() & others != 0 || is_listed()
}
