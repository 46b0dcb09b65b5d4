//! Owns what `up` and `plan` learn about a profile's hooks before anything is built.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;

use crate::execute;
use crate::image::fetch;
use crate::plan::resolve::HookFacts;
use crate::profile::Profile;
use crate::profile::hook::{self, Hook};
use crate::store::Store;
use crate::store::source::Git;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::signals::Cancel;
use crate::sys::span::At;
use crate::up::context::Context;
use crate::up::resolve::Gathered;

pub(crate) fn read(
    cx: &Context,
    profile: &Profile,
    names: &[At<String>],
) -> Result<BTreeMap<String, Hook>> {
    let load = |name: &At<String>| {
        let hook = hook::load(&cx.config.hook_dirs, name)
            .context(|| format!("profile `{}` names hook `{name}`", profile.name))?;
        Ok((name.value.clone(), hook))
    };
    names.iter().map(load).collect()
}

/// Returns the facts about hooks for resolving.
pub(crate) fn facts(hooks: &BTreeMap<String, Hook>) -> Result<BTreeMap<String, HookFacts>> {
    let facts = |(name, hook): (&String, &Hook)| {
        let facts = HookFacts {
            digest: hook.digest()?,
            volume: hook.work.volume.clone(),
            from_step: hook.work.from_step.clone(),
            applies: hook.applies.clone(),
            not_now: None,
        };
        Ok((name.clone(), facts))
    };
    hooks.iter().map(facts).collect()
}

/// Reads patches that the store already has.
pub(crate) fn known_patches<'h>(
    hooks: impl IntoIterator<Item = &'h mut Hook>,
    store: &Store,
) -> Result<()> {
    for hook in hooks {
        for patch in &mut hook.work.patches {
            let blob = store.root().join("blobs/sha256").join(&patch.sha256);
            if patch.bytes.is_none() && blob.is_file() {
                fetch::verify(&blob, &patch.sha256, &AtomicBool::new(false))?;
                patch.bytes = Some(fs_err::read(&blob)?);
            }
        }
    }
    Ok(())
}

/// Fetches the patches that have a URL, and keeps them in the store.
pub(crate) fn fetch_patches(
    hooks: &mut BTreeMap<String, Hook>,
    store: &Store,
    offline: bool,
    cancel: &Cancel<'_>,
) -> Result<()> {
    let _downloads = store.keep_downloads()?;
    known_patches(hooks.values_mut(), store)?;
    for hook in hooks.values_mut() {
        for patch in &mut hook.work.patches {
            let (Some(url), None) = (&patch.url, &patch.bytes) else {
                continue;
            };
            if offline {
                return Err(unavailable!(
                    "hook `{}`: patch `{}` is not fetched yet, and `--offline` forbids fetching it",
                    hook.name,
                    patch.name
                )
                .help("run once without --offline"));
            }
            let blobs = store.root().join("blobs");
            let mut progress = |_, _| cancel.poll();
            let (sha256, most) = (&patch.sha256, hook::MAX_PATCH);
            let blob = fetch::fetch(url, sha256, most, &blobs, cancel.flag(), &mut progress)
                .context(|| format!("hook `{}`: cannot fetch its patch", hook.name))?;
            patch.bytes = Some(fs_err::read(blob)?);
        }
    }
    Ok(())
}

/// Drops hooks that are not for the source's revision, as far as its history is known.
pub(crate) fn apply_to_inputs(gathered: &mut Gathered<'_>, git: &Git<'_>) -> Result<()> {
    for facts in gathered.inputs.hooks.values_mut() {
        let Some(source) = gathered.sources.get(&facts.volume) else {
            continue;
        };
        let short = |commit: &str| commit.chars().take(12).collect::<String>();
        if let Some(since) = &facts.applies.since
            && git.contains(source, since)? == Some(false)
        {
            let reason = format!("only for sources with commit {}", short(since));
            facts.not_now = Some(reason);
        }
        if let Some(until) = &facts.applies.until
            && git.contains(source, until)? == Some(true)
        {
            facts.not_now = Some(format!("only for sources before commit {}", short(until)));
        }
    }
    Ok(())
}

/// Asks the sources whether the hooks will apply; returns notes for the user.
pub(crate) fn ask(gathered: &Gathered<'_>) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    let mut hooks = Vec::new();
    let mut absent = BTreeSet::new();
    let (selection, inputs, sources) = (gathered.selection, &gathered.inputs, &gathered.sources);
    let profile = &selection.profile;
    let targets = inputs.targets_of(profile);
    let mut names = inputs.chosen(profile)?.hooks();
    // The order in which they are applied.
    names.sort_by_key(|name| inputs.hooks.get(&name.value)?.first_step(profile));
    for At { value: name, .. } in &names {
        let (Some(hook), Some(facts)) = (gathered.hooks.get(name), inputs.hooks.get(name)) else {
            continue;
        };
        // Whether the hook applies does not matter before its first step.
        if selection.stops_before(facts.first_step(profile)) {
            continue;
        }
        let not_now = facts.not_now.clone();
        if let Some(reason) = not_now.or_else(|| facts.applies.not_for(&targets)) {
            notes.push(format!("hook `{name}` skipped: {reason}"));
        } else if !sources.contains_key(&facts.volume) {
            absent.insert(name.clone());
        } else {
            hooks.push(hook);
        }
    }
    let early = hook::precheck(&hooks, &|volume, path| {
        let source = sources
            .get(volume)
            .ok_or_else(|| unexpected!("source `{volume}` is missing"))?;
        execute::file_in_source(source, path)
    })?;
    for (hook, patch) in early.already {
        notes.push(format!("hook `{hook}`: the source already has `{patch}`"));
    }
    absent.extend(early.later);
    for name in absent {
        let note = format!("hook `{name}` cannot be checked before its source is fetched");
        notes.push(note);
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::store::lock::{Lock, WAIT};
    use crate::sys::signals::Signals;

    #[test]
    fn patches_are_fetched_while_gc_removes_no_downloads() {
        let (_directory, store) = Store::scratch();
        let path = store.root().join("blobs/lock");
        let gc = Lock::exclusive(&path, "the downloads", "gc", WAIT).unwrap();
        let pause = Duration::from_millis(50);
        let begun = Instant::now();
        let gc = std::thread::spawn(move || {
            std::thread::sleep(pause);
            drop(gc);
        });
        let signals = Signals::take().unwrap();
        fetch_patches(&mut BTreeMap::new(), &store, true, &Cancel::new(&signals)).unwrap();
        assert!(begun.elapsed() >= pause);
        gc.join().unwrap();
    }
}
