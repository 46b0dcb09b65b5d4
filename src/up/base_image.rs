//! Owns the image of an env: found in the store, announced by a registry, pulled or built.

use super::Run;
use super::downloads::Fetching;
use super::locked::Locked;
use super::observe::plan_for;
use super::options::options;
use super::preflight::Needs;
use super::registry::wanted_image;
use super::resolve::Gathered;
use super::select::Selection;
use crate::plan::lockfile;
use crate::plan::resolve::{VolumeKind, VolumeSource};
use crate::store::images::Image;
use crate::store::{Store, source};
use crate::sys::error::Result;

/// Finds or builds the image. A registry that has it delivers it later, together with the steps on it.
pub(super) fn find(run: &Run<'_>, gathered: &mut Gathered<'_>) -> Result<()> {
    let selection = gathered.selection;
    let image = match there(run.with.store, selection)? {
        Some(image) => image,
        None => {
            if let Some(source) = &run.source
                && source.announce(gathered)?
            {
                return Ok(());
            }
            build(run, selection)?
        }
    };
    gathered.base_on(image);
    Ok(())
}

/// Returns the image after pulling; `None` if the keys are based on another image.
pub(super) fn ensure_pulled(run: &Run<'_>, gathered: &Gathered<'_>) -> Result<Option<Image>> {
    if let Some(image) = &gathered.image {
        return Ok(Some(image.clone()));
    }
    let selection = gathered.selection;
    if let Some(source) = &run.source
        && there(run.with.store, selection)?.is_none()
    {
        source.pull(run.with.store, &wanted_image(selection), None)?;
    }
    match there(run.with.store, selection)? {
        Some(image) if Some(&image.key) == gathered.inputs.image.key() => Ok(Some(image)),
        // All keys are based on the announced image, which the registry did not deliver.
        Some(_) => Ok(None),
        None => build(run, selection).map(|_| None),
    }
}

/// Returns the image if the store has it: the locked one, or the recipe's current one.
pub(crate) fn there(store: &Store, selection: &Selection) -> Result<Option<Image>> {
    match &selection.locked {
        None => store.image_of(&selection.recipe),
        Some(locked) => store.image(&locked.lock.image.key),
    }
}

/// Builds the image, as locked or by its recipe.
fn build(run: &Run<'_>, selection: &Selection) -> Result<Image> {
    let Fetching { task, store, .. } = run.with;
    if !run.args.force {
        check_early(run, selection)?;
    }
    let (name, recipe) = (&selection.image, &selection.recipe);
    let Some(locked) = &selection.locked else {
        return task.build_image(store, name, recipe, false);
    };
    let Locked { lock, .. } = locked;
    let image = task.locked_image(store, recipe, &lock.image)?;
    match image.key == lock.image.key {
        true => Ok(image),
        false => Err(locked
            .drift(&lockfile::image(&lock.image, &image))
            .help(locked.update(name))),
    }
}

/// Refuses builds that cannot work before the image is built, which may take long.
fn check_early(run: &Run<'_>, selection: &Selection) -> Result<()> {
    let (store, args) = (run.with.store, &run.args.plan);
    // The notes on the image and the sources are about to become outdated.
    let (mut gathered, _) = Gathered::predict(selection, Some(store), args.clean)?;
    let spec = gathered.resolve(Some(store))?;
    for volume in &spec.volumes {
        if let (VolumeKind::Source, VolumeSource::Path(path)) = (volume.kind, &volume.source) {
            source::is_there(&volume.name, path)?;
        }
    }
    let (_, plan) = plan_for(store, None, &gathered, &spec, &options(args))?;
    let record = store.record(&spec.name)?;
    Needs::of(selection, &spec, &plan, store.root(), record.as_ref())?.preflight()
}
