//! Owns locking an env for an `up`: its lock, its lease on layers, and its record.

use std::path::PathBuf;

use super::resolve::Resolved;
use super::select::check_engine;
use super::{Run, env_origin};
use crate::plan::gc::Lease;
use crate::plan::ids::{ImageKey, LayerId};
use crate::plan::record::Record;
use crate::plan::resolve::Spec;
use crate::plan::{Observed, Plan};
use crate::store::{LockedEnv, lock};
use crate::sys::atomic::random_id;
use crate::sys::error::Result;

pub(super) fn lock<'a>(run: &Run<'a>, resolved: &Resolved<'_>) -> Result<LockedEnv<'a>> {
    let store = run.with.store;
    let env = store.lock_env(&resolved.spec.name, "up", lock::WAIT)?;
    env.check_owner()?;
    // Another `up` may have made the env since this one looked.
    let (selection, request) = (resolved.gathered.selection, run.args.plan.request("up"));
    env_origin::check(store, selection, &request)?;
    if let Some(record) = env.record() {
        check_engine(env.name(), record, selection.choice.engine, &request)?;
    }
    if run.args.ephemeral && !env.is_owned()? {
        return Err(busy!("env `{}` was removed in the meantime", env.name())
            .help(run.args.resume_command()));
    }
    Ok(env)
}

/// Leases the layers that the env will start from; false if one is gone.
pub(super) fn lease(
    env: &LockedEnv<'_>,
    resolved: &Resolved<'_>,
    observed: &Observed,
    plan: &Plan,
) -> Result<bool> {
    // An orphaned layer is not in the store yet, so `gc` cannot remove it.
    let known = |layer: &&LayerId| !observed.orphaned.contains(layer.as_str());
    env.lease(&Lease {
        layers: plan.start.iter().filter(known).cloned().collect(),
        image: resolved.image.key.clone(),
    })
}

/// Gives a new env its record, and resets one whose image changed.
pub(super) fn record(
    run: &Run<'_>,
    env: &mut LockedEnv<'_>,
    resolved: &Resolved<'_>,
) -> Result<()> {
    let (spec, image, selection) = (&resolved.spec, &resolved.image, resolved.gathered.selection);
    let command = Some(run.args.lasting_command(selection.lock_file()));
    if env.record().is_none() {
        let service = selection.choice.service.clone();
        let mut record = new_record(spec, &image.key, service)?;
        record.command = command;
        return env.commit(record);
    }
    if env.known_record()?.command != command {
        env.update(|record| record.command = command)?;
    }
    if env.known_record()?.image_key != image.key {
        // A new base changes every key. Snapshots stay, each with its own image.
        let key = image.key.clone();
        keep_work(run, env)?;
        env.update(|record| {
            record.image_key = key;
            record.image.clone_from(&spec.image);
        })?;
    }
    Ok(())
}

/// Moves an env to the bare image. Keeps manual changes, and build volumes that no snapshot contains.
fn keep_work(run: &Run<'_>, env: &mut LockedEnv<'_>) -> Result<()> {
    let reporter = &run.with.task.reporter;
    if let Some(name) = env.keep_changes("before-image")? {
        reporter.warn(format!(
            "the image changed: changes made by `exec` or `shell` are kept as snapshot `{name}`"
        ));
    }
    if let Some(name) = env.keep_failed("before-image")? {
        reporter.warn(format!(
            "the image changed: changes made by `shell --failed` are kept as snapshot `{name}`"
        ));
    }
    let store = run.with.store;
    if store.freezes_volumes() {
        return env.reset();
    }
    let mut volumes = env.known_record()?.head.volumes.values();
    if !run.args.plan.clean && volumes.any(|id| !store.is_volume_empty(id)) {
        reporter.warn(
            "the image changed: steps continue with the build volumes of the earlier one; \
             `--clean` empties them and runs every step again",
        );
    }
    env.reset_root()
}

pub(crate) fn new_record(
    spec: &Spec,
    image_key: &ImageKey,
    service: Option<PathBuf>,
) -> Result<Record> {
    let (id, now) = (random_id()?.try_into()?, jiff::Timestamp::now());
    Ok(Record {
        service,
        ..Record::new(spec, id, image_key.to_owned(), now)
    })
}
