//! Owns the image of an env: found in the store, announced by a registry, pulled or built.

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

/// Finds or builds the image; `None` if a registry has it, which then delivers it together with the steps on it.
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

/// Returns the image after pulling; `None` if the keys are based on another one.
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
        // The registry did not deliver the announced image, and all keys are based on that.
        Some(_) => Ok(None),
        None => build(run, prepared).map(|_| None),
    }
}

/// Returns the image if the store has it: the locked one, or the recipe's current one.
fn there(store: &Store, prepared: &Prepared) -> Result<Option<Image>> {
    match &prepared.pinned {
        None => store.image_of(&prepared.recipe),
        Some(pinned) => store.image(&pinned.lock.image.key),
    }
}

/// Builds the image, as locked or by its recipe.
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

/// Refuses what cannot work before the image is built, which may take long.
fn check_early(run: &Run<'_>, prepared: &mut Prepared) -> Result<()> {
    // Its notes on the image and the sources are about to become outdated.
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
