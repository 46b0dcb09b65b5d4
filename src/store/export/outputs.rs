//! Owns the export of an env's outputs: which files, whether they may be exported, and what the manifest says about
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use serde::Serialize;

use super::files::{self, ExportedEntry, OutputItem, compare, copy, is_missing, list, write};
use super::manifest::{Env, manifest, parse};
use crate::plan::ids::EnvName;
use crate::plan::layer::Layer;
use crate::plan::lockfile::{self, Lockfile};
use crate::plan::record::{Outcome as Step, StepRecord};
use crate::plan::resolve::Spec;
use crate::profile::hook;
use crate::store::history::Reuse;
use crate::store::results::{ResultState, outputs};
use crate::store::{LockedEnv, Store, source};
use crate::sys::account;
use crate::sys::catalog::Directory;
use crate::sys::error::{Error, Result, ResultExt as _, named_path};
use crate::sys::name::StepName;
use crate::sys::shell::quoted_path;
use crate::sys::trusted_files;
use crate::tree::listing::{PathState, path_state};
use crate::tree::mounts;

/// Suffix of the manifest's name; the prefix is the env's name.
const MANIFEST: &str = ".provenance.json";
/// Maximum size of a manifest, in bytes: some 200,000 files.
const LARGEST_MANIFEST: u64 = 64 << 20;

pub(crate) struct OutputsExport<'a> {
    pub env: &'a EnvName,
    /// Created if missing. Existing files are never replaced.
    pub directory: &'a Path,
    /// The output volumes; empty for all.
    pub volumes: &'a [String],
    pub reuse: Reuse,
    pub hook_dirs: &'a [Directory],
    pub warn: &'a dyn Fn(&str),
}

impl OutputsExport<'_> {
    /// Copies the files; returns the manifest's path, and its entries.
    pub(crate) fn run(&self, store: &Store) -> Result<(PathBuf, BTreeMap<String, ExportedEntry>)> {
        let name = self.env;
        store.known(name)?;
        // Locked, so that no step writes while files are read.
        let env = store.lock_known(name, "export", Duration::from_secs(5))?;
        let incremental = incremental(store, &env)?;
        // The oldest layer has the reason.
        if self.reuse == Reuse::Clean
            && let Some(layer) = incremental.last()
        {
            return Err(is_incremental(&env, layer)?);
        }
        let incremental = incremental.into_iter();
        let incremental = incremental.filter_map(|layer| Some((layer.key?, layer.title)));
        let incremental = incremental.collect();
        let mut spec = store.spec(name)?;
        let until = match env.known_record()?.complete {
            true => None,
            false => Some(reached(store, &env)?),
        };
        let mut items = self.items(store, &spec)?;
        self.as_left(store, &env, &spec, &mut items)?;
        if let Some(until) = &until {
            // Later steps did not contribute to these files.
            let last = spec.steps.iter().position(|step| step.name == *until);
            spec.steps.truncate(last.map_or(0, |last| last + 1));
            let steps: Vec<StepName> = spec.steps.iter().map(|step| step.name.clone()).collect();
            spec.hooks.retain(|hook| steps.contains(&hook.from));
        }
        let text = store.locked_text(&spec)?;
        let lock = match &text {
            Some(text) => Some(lockfile::parse(text, "the env's lock file")?),
            None => None,
        };
        let image_key = &env.known_record()?.image_key;
        let image = store
            .image(image_key)?
            .ok_or_else(|| not_found!("the image of env `{name}` is gone").help("rockenv fsck"))?;
        // The digest covers what hooks do, so a missing description is no loss.
        let hooks = spec.hooks.iter().filter_map(|hook| {
            let found = hook::load(self.hook_dirs, &hook.name).ok()?;
            (found.digest().ok()? == hook.digest).then(|| (hook.name.clone(), found))
        });
        let known = Env {
            spec: &spec,
            image: &image,
            hooks: &hooks.collect(),
            submodules: &checked_out(store, &spec, lock.as_ref()),
            lock: lock.as_ref().zip(spec.lock.as_deref()),
            until: until.as_deref(),
            incremental: &incremental,
        };
        mounts::check_mounted(self.directory, "the export", "name another directory")?;
        account::make_directories(account::caller(), self.directory).map_err(|error| {
            error.help(format!(
                "rockenv export {name} DIR, with a directory of your own"
            ))
        })?;
        let elsewhere = |error: Error| match error.help_text() {
            Some(files::ELSEWHERE) => error.help(format!("rockenv export {name} NEW-DIRECTORY")),
            _ => error,
        };
        let (files, fresh) = compare(&items, self.directory).map_err(elsewhere)?;
        let place = format!("{name}{MANIFEST}");
        let mut texts = BTreeMap::from([(place.clone(), manifest(&known, &files).text()?)]);
        texts.extend(text.map(|text| (format!("{name}.lock"), text)));
        // Check first: if one of them is refused, nothing is written.
        for (name, text) in &texts {
            is_missing(self.directory, name, text).map_err(elsewhere)?;
        }
        copy(&fresh, &files, self.directory).map_err(elsewhere)?;
        for (name, text) in &texts {
            write(self.directory, name, text).map_err(elsewhere)?;
        }
        if lock.is_none() {
            let record = env.known_record()?;
            (self.warn)(&format!(
                "env `{name}` was not built from a lock file, so its manifest has no exact inputs: `{}`, then `{} --locked`",
                record.lock_command(),
                record.up_command(),
            ));
        }
        let file = self.directory.join(format!("{name}.lock"));
        let warning = lock.as_ref().and_then(|lock| lock.login_warning(&file));
        warning.iter().for_each(|text| (self.warn)(text));
        Ok((self.directory.join(place), files))
    }

    fn items(&self, store: &Store, spec: &Spec) -> Result<Vec<OutputItem>> {
        let mut only = self.volumes.iter();
        if let Some(unknown) = only.find(|only| !outputs(spec).any(|volume| volume.name == **only))
        {
            let names: Vec<&str> = outputs(spec).map(|volume| volume.name.as_str()).collect();
            let (name, names) = (self.env, names.join(", "));
            return Err(not_found!("env `{name}` has no output volume `{unknown}`")
                .help(format!("choose one of: {names}")));
        }
        let mut items = Vec::new();
        for volume in outputs(spec).filter(|volume| self.exports(&volume.name)) {
            let place = store.output_dir(spec, volume)?;
            if place.is_dir() {
                items.extend(list(&place, Path::new(&volume.name))?);
            }
        }
        Ok(items)
    }

    /// Checks that files are as the manifest's steps left them, and leaves out all others, which belong to other
    /// builds or to the user.
    fn as_left(
        &self,
        store: &Store,
        env: &LockedEnv<'_>,
        spec: &Spec,
        items: &mut Vec<OutputItem>,
    ) -> Result<()> {
        let (mut left, mut differences) = (BTreeSet::new(), Vec::new());
        if let Some(head) = &env.known_record()?.head.layer {
            for (volume, results) in store.results(head, spec)? {
                let paths = results.listing.entries.keys();
                left.extend(paths.map(|path| Path::new(&volume).join(path)));
            }
            differences = store.differences(head, spec, true)?;
        }
        differences.retain(|difference| self.exports(&difference.volume));
        let (name, up) = (env.name(), env.known_record()?.up_command());
        for difference in differences {
            let place = Path::new(&difference.volume).join(&difference.path);
            match (&difference.state, difference.state.words()) {
                (_, None) => {}
                (ResultState::Missing, _) => {
                    return Err(drift!(
                        "`{}`, written by a step of env `{name}`, is missing from its output",
                        place.display()
                    )
                    .help(format!("{up} restores it")));
                }
                (ResultState::Unlinked, Some(what)) => (self.warn)(&format!(
                    "`{}`, written by a step of env `{name}`, {what}: `{up}` links it again",
                    place.display()
                )),
                (_, Some(what)) => {
                    let volume = spec.volume(&difference.volume);
                    let directory = volume.map(|volume| store.output_dir(spec, volume));
                    let directory = directory.transpose()?.unwrap_or_default();
                    return Err(drift!(
                        "`{}` differs from the result of a step of env `{name}`: it {what}",
                        directory.join(&difference.path).display()
                    )
                    .help(format!("move it away: `{up}` restores the step's file")));
                }
            }
        }
        // A directory is expected if a step left anything below it.
        let leads = |item: &OutputItem| {
            let mut below = left.range(item.to.clone()..);
            below.next().is_some_and(|path| path.starts_with(&item.to))
        };
        let (known, others): (Vec<_>, Vec<_>) = std::mem::take(items)
            .into_iter()
            .partition(|item| left.contains(&item.to) || item.entry.is_directory() && leads(item));
        *items = known;
        let files = others.iter().filter(|item| !item.entry.is_directory());
        let files: Vec<String> = files
            .map(|item| format!("`{}`", item.to.display()))
            .collect();
        if !files.is_empty() {
            (self.warn)(&format!(
                "left out, because no step of env `{name}` as it is now left it: {}",
                lockfile::some(&files)
            ));
        }
        match items.is_empty() {
            false => Ok(()),
            true => Err(not_found!("env `{name}` has no files in its output volumes")
            .help("a step with `export`, or one that writes to a volume of kind `output`, puts it there")),
        }
    }

    fn exports(&self, volume: &String) -> bool {
        self.volumes.is_empty() || self.volumes.contains(volume)
    }
}

fn is_incremental(env: &LockedEnv<'_>, layer: &Layer) -> Result<Error> {
    let (name, up) = (env.name(), env.known_record()?.up_command());
    let (step, why) = (&layer.title, layer.history.why());
    let error = drift!("env `{name}` is incremental: step `{step}` was not a clean build: {why}");
    let help = format!("{up} --clean makes a clean one; to export it anyway: --allow-incremental");
    Ok(error.help(help))
}

/// Returns the layers of the env's steps that differ from a clean build, newest first.
fn incremental(store: &Store, env: &LockedEnv<'_>) -> Result<Vec<Layer>> {
    let chain = match &env.known_record()?.head.layer {
        Some(head) => store.chain(head)?,
        None => Vec::new(),
    };
    let of_steps = chain.into_iter().filter(|layer| layer.key.is_some());
    Ok(of_steps.filter(|layer| !layer.is_clean()).collect())
}

/// Returns the submodules that a lock file names and that are checked out. The build did not read the others.
fn checked_out(store: &Store, spec: &Spec, lock: Option<&Lockfile>) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for (name, directory) in source::directories(store, spec) {
        let locked = lock.and_then(|lock| lock.source.get(&name));
        for path in locked.iter().flat_map(|locked| locked.submodules.keys()) {
            let git = Path::new(path).join(".git");
            if matches!(path_state(&directory, &git), Ok(PathState::Taken(_))) {
                found.insert((name.clone(), path.clone()));
            }
        }
    }
    found
}

/// Returns the last step of an env that was built only up to that step, as by `--until`. Refuses any other unfinished
/// env.
fn reached(store: &Store, env: &LockedEnv<'_>) -> Result<StepName> {
    let record = env.known_record()?;
    let attempt = store.attempt(env.name(), record)?;
    let stands = || {
        let is_open = |step: &StepRecord| step.outcome == Step::Pending;
        let steps = &record.steps;
        let first_open = steps.iter().position(is_open).unwrap_or(steps.len());
        let (done, later) = steps.split_at(first_open);
        let passes = |step: &StepRecord| step.outcome.is_done();
        let is_past = |step: &StepRecord| passes(step) || step.outcome == Step::Skipped;
        let passed = done.iter().all(is_past);
        let last = done.iter().rfind(|step| passes(step))?;
        let snapshot = record.snapshot(&last.name)?;
        let fits = snapshot.key.is_some()
            && snapshot.key == last.key
            && record.head.layer.as_ref() == Some(&snapshot.layer)
            && record.failed.is_none()
            && attempt.is_none();
        (fits && passed && later.iter().all(is_open)).then(|| last.name.clone())
    };
    stands().ok_or_else(|| {
        let name = env.name();
        drift!("env `{name}` is not finished: the inputs of its outputs are not known yet")
            .help(format!("{}, or rockenv status {name}", record.up_command()))
    })
}

/// A manifest, compared with the files beside it.
#[derive(Debug, Serialize)]
pub(crate) struct CheckedManifest {
    pub manifest: PathBuf,
    pub files: usize,
    pub differences: Vec<String>,
}

fn manifest_bytes(path: &Path) -> Result<Vec<u8>> {
    let found = trusted_files::open(path, LARGEST_MANIFEST + 1)?;
    let bytes = found.map(|found| found.bytes).unwrap_or_default();
    match bytes.len() as u64 {
        1..=LARGEST_MANIFEST => Ok(bytes),
        _ => Err(invalid!(
            "`{}` is not a file of at most {} MiB",
            path.display(),
            LARGEST_MANIFEST >> 20
        )),
    }
}

/// Compares the files of a directory with each manifest in it.
pub(crate) fn check(directory: &Path) -> Result<Vec<CheckedManifest>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(directory)
        .map_err(|error| named_path(directory)(error).help("rockenv export --check DIR"))?;
    let mut entries = entries.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs_err::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(MANIFEST) {
            let path = entry.path();
            let manifest = parse(&manifest_bytes(&path)?, &path.display().to_string())?;
            let differences = files::check(directory, &manifest)
                .context(|| format!("cannot check `{}`", path.display()))?;
            found.push(CheckedManifest {
                differences,
                files: manifest.subject.len(),
                manifest: path,
            });
        }
    }
    if found.is_empty() {
        let place = directory.display();
        let error = not_found!("there is no manifest (`ENV{MANIFEST}`) in `{place}`");
        return Err(error.help(format!("rockenv export ENV {}", quoted_path(directory))));
    }
    Ok(found)
}
