//! Owns the image that an env stands on: found in the store, foretold by a registry, pulled or built.

use super::locked::Locked;
use super::observe::plan_for;
use super::options::options;
use super::preflight::Needs;
use super::registry::wanted_image;
use super::resolve::Prepared;
use super::{Run, task};
use crate::plan::lockfile;
use crate::plan::resolve::{VolumeKind, VolumeSource};
use crate::store::Store;
use crate::store::images::Image;
use crate::store::source;
use crate::sys::error::Result;

/// Finds the image, or builds it; none where a registry has it, which then comes together with the steps that stand on it.
pub(super) fn find(run: &Run<'_>, prepared: &mut Prepared) -> Result<Option<Image>> {
    let mut image = there(run.store, prepared)?;
    let is_foretold = match (&run.source, &image) {
        (Some(source), None) => source.stand_on_image(prepared)?,
        _ => false,
    };
    if image.is_none() && !is_foretold {
        image = Some(build(run, prepared)?);
    }
    if let Some(image) = &image {
        prepared.stand_on(image.clone());
    }
    Ok(image)
}

/// Returns the image now that what a registry has was pulled; none where the keys stand on another one.
pub(super) fn settle(
    run: &Run<'_>,
    prepared: &mut Prepared,
    found: Option<Image>,
) -> Result<Option<Image>> {
    if found.is_some() {
        return Ok(found);
    }
    if let Some(source) = &run.source
        && there(run.store, prepared)?.is_none()
    {
        source.pull(run.store, &wanted_image(prepared), None)?;
    }
    match there(run.store, prepared)? {
        Some(image) if image.key == prepared.inputs.image_key => Ok(Some(image)),
        // The registry did not keep what it promised, and all keys stand on that.
        Some(_) => Ok(None),
        None => build(run, prepared).map(|_| None),
    }
}

/// Returns the image if the store has it: the locked one, or what the recipe stands for at present.
fn there(store: &Store, prepared: &Prepared) -> Result<Option<Image>> {
    match &prepared.pinned {
        None => store.image_of(&prepared.recipe),
        Some(pinned) => store.image(&pinned.lock.image.key),
    }
}

/// Builds the image: as it was locked, or as its recipe says.
fn build(run: &Run<'_>, prepared: &mut Prepared) -> Result<Image> {
    let Run {
        cx,
        store,
        signals,
        reporter,
        ..
    } = *run;
    if !run.args.force {
        check_early(run, prepared)?;
    }
    let (name, recipe) = (&prepared.profile.image.value, &prepared.recipe);
    let Some(locked) = &prepared.pinned else {
        return task::build_image(cx, store, name, recipe, false, signals, reporter);
    };
    let Locked { lock, .. } = locked;
    let image = task::locked_image(cx, store, recipe, &lock.image, signals, reporter)?;
    match image.key == lock.image.key {
        true => Ok(image),
        false => Err(locked.drift(&lockfile::image(&lock.image, &image))),
    }
}

/// Refuses what cannot work before the image is made, which may take long.
fn check_early(run: &Run<'_>, prepared: &mut Prepared) -> Result<()> {
    // What it says of the image and the sources is about to change.
    drop(prepared.predict(run.cx, Some(run.store))?);
    let spec = prepared.resolve(Some(run.store))?;
    for volume in &spec.volumes {
        if let (VolumeKind::Source, VolumeSource::Path(path)) = (volume.kind, &volume.source) {
            source::is_there(&volume.name, path)?;
        }
    }
    let (_, plan) = plan_for(run.store, None, prepared, &spec, &options(run.args))?;
    let record = run.store.record(&spec.name)?;
    Needs::of(prepared, &spec, &plan, run.store.root(), record.as_ref())?.preflight()
}
