//! Owns what `up --locked`, `plan --locked` and `lock` do with a lock file before the build.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use sha2::{Digest as _, Sha256};

use super::request::UpRequest;
use crate::engine::ninja;
use crate::plan::Plan;
use crate::plan::lockfile::{self, Choices, Fetched, Lockfile};
use crate::plan::resolve::{self, BaseImage, BuildUser, Inputs, Spec, Step, VolumeSource};
use crate::profile::Profile;
use crate::profile::hook::Patch;
use crate::remote::{self, LATEST};
use crate::rocm::target::Target;
use crate::rocm::therock::ArtifactFingerprints;
use crate::store::Store;
use crate::store::source::Repository;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::shell::quoted_path;
use crate::up::context::Context;
use crate::up::lock_inputs::ALL;
use crate::up::select::Selection;

/// A lock file that an env is built from.
#[derive(Clone, Debug)]
pub(crate) struct Locked {
    pub(crate) path: PathBuf,
    pub(crate) lock: Lockfile,
    /// The command that rewrites it.
    pub(crate) command: String,
}

impl Locked {
    /// Makes the error for differences from it.
    pub(crate) fn drift(&self, differences: &[String]) -> Error {
        lockfile::drift(&self.path, differences, &self.command)
    }

    /// Returns the command that locks an image, a source or everything again.
    pub(crate) fn update(&self, what: &str) -> String {
        format!("{} --update {what}", self.command)
    }

    /// Returns the SHA-256 of its text.
    pub(crate) fn digest(&self) -> Result<String> {
        Ok(hex::encode(Sha256::digest(self.lock.text()?)))
    }
}

/// Returns the absolute path that the store records for a lock file. If another machine sent the file, the path leads
/// to the last version: each version stays in a directory of its own, and recording each of them would keep the data of
/// all versions.
pub(crate) fn lasting_path(file: &Path) -> Result<PathBuf> {
    let file = fs::canonicalize(file)?;
    let last = remote::sent_file(&file).map(|(place, below)| place.join(LATEST).join(below));
    Ok(last.filter(|last| last.exists()).unwrap_or(file))
}

/// Returns the path of the request's lock file, regardless of `--name`.
pub(crate) fn place(selection: &Selection) -> Result<PathBuf> {
    let mut inputs = selection.inputs.clone();
    inputs.env_name = None;
    inputs.targets.sort_unstable();
    inputs.targets.dedup();
    let name = inputs.name_of_env(&selection.profile)?;
    Ok(lockfile::place(selection.profile.origin(), &name))
}

/// Returns the command that writes the request's lock file.
pub(crate) fn command(request: &UpRequest<'_>, file: Option<&Path>) -> String {
    let file = file.map(Path::to_string_lossy);
    request.command("lock", &[("--file", file.as_deref())])
}

/// Reads the request's lock file and applies it; refuses differences that are already known.
pub(crate) fn follow(
    cx: &Context,
    selection: &mut Selection,
    request: &UpRequest<'_>,
    file: Option<&Path>,
) -> Result<()> {
    let path = match file {
        Some(file) => file.to_owned(),
        None => place(selection)?,
    };
    let command = command(request, file);
    let lock = lockfile::read(&path)?.ok_or_else(|| {
        not_found!("there is no lock file `{}`", path.display()).help(command.clone())
    })?;
    let differences = lockfile::choices(&lock, &choices(selection));
    if !other_choices(&lock, selection).is_empty() {
        let help = match has_old_targets(&lock, selection) {
            true => format!("{command} --update {ALL}"),
            // `lock` does not overwrite it.
            false => {
                let new = Some("NEW.lock");
                let lock = request.command("lock", &[("--file", new)]);
                let flags = [("--name", request.name), ("--lock-file", new)];
                format!(
                    "{lock}, then: {} --locked",
                    request.command(request.verb, &flags)
                )
            }
        };
        return Err(lockfile::drift(&path, &differences, &help));
    }
    let refused = |error| of_params(error, &path, &command);
    let used = selection.use_params(cx, lock.params.clone());
    used.map_err(&refused)?;
    selection.choose_engine(cx, request)?;
    let locked = Locked {
        path: path.clone(),
        lock,
        command: command.clone(),
    };
    let applied = apply_choices(cx, selection, locked, differences);
    applied.map_err(&refused)?;
    // Steps that depend on a source's history are compared once the source exists.
    let mut applies = selection.inputs.hooks.values().map(|hook| &hook.applies);
    match applies.any(|applies| applies.since.is_some() || applies.until.is_some()) {
        true => Ok(()),
        false => check_steps(selection, &selection.inputs).map_err(&refused),
    }
}

/// Turns an error of parameters into drift of the lock file that contains them: the command line is not at fault.
/// `command` rewrites the file.
pub(crate) fn of_params(error: Error, path: &Path, command: &str) -> Error {
    match error.kind() {
        Kind::Usage => {
            let help = format!("rm {}, then: {command}", quoted_path(path));
            lockfile::drift(path, &[error.message().to_owned()], &help)
        }
        _ => error,
    }
}

/// Returns how a lock file's choices differ from the request's, apart from parameters.
pub(crate) fn other_choices(lock: &Lockfile, selection: &Selection) -> Vec<String> {
    let params = &BTreeMap::new();
    let now = Choices {
        params,
        ..choices(selection)
    };
    lockfile::choices(lock, &now)
}

/// Returns whether a lock file differs only because the profile has other targets now: `lock --update all` adopts
/// them.
pub(crate) fn has_old_targets(lock: &Lockfile, selection: &Selection) -> bool {
    let targets = choices(selection).targets.iter();
    let adopted = Lockfile {
        targets: targets.map(ToString::to_string).collect(),
        ..lock.clone()
    };
    selection.inputs.targets.is_empty() && other_choices(&adopted, selection).is_empty()
}

/// Replaces open choices by the locked ones. `differences` holds those already known.
pub(crate) fn apply_choices(
    cx: &Context,
    selection: &mut Selection,
    locked: Locked,
    mut differences: Vec<String>,
) -> Result<()> {
    let lock = &locked.lock;
    let image = &selection.image;
    if *image != lock.image.name {
        let locked = format!("the image is `{}` in the lock file", lock.image.name);
        differences.push(format!("{locked}, but `{image}` in the profile"));
    } else if selection.recipe.digest() != lock.image.recipe {
        let place = match selection.recipe.is_by_path() {
            true => ", or its `path` is in another directory",
            false => "",
        };
        differences.push(format!("the recipe of image `{image}` has changed{place}"));
    }
    let hooks = selection.inputs.hooks.iter();
    let hooks = hooks.map(|(name, facts)| (name.clone(), facts.digest.clone()));
    differences.extend(lockfile::hooks(lock, &hooks.collect()));
    differences.extend(lockfile::fetched(lock, &fetched(cx, selection)?));
    let inputs = &mut selection.inputs;
    let targets = lock.machine_targets.iter();
    inputs.machine_targets = targets
        .map(|name| Target::parse(name))
        .collect::<Result<_>>()?;
    inputs.image = BaseImage::Known(lock.image.key.clone());
    inputs.image_env.clone_from(&lock.image.env);
    let prints = lock.source.iter();
    let prints = prints.map(|(name, source)| (name.clone(), Some(source.fingerprint())));
    inputs.fingerprints.extend(prints);
    let volumes = resolve::volumes(&selection.profile, inputs)?;
    differences.extend(lockfile::sources(lock, &volumes));
    if !differences.is_empty() {
        return Err(locked.drift(&differences));
    }
    let own = format!("{}:{}", inputs.user.uid, inputs.user.gid);
    if own != lock.build_user {
        selection.notes.push(format!(
            "`{}` was made with the build user {}, and here it is {own}: keys of steps that run as it differ; \
             `build-user = \"{}\"` in the configuration would make them equal",
            locked.path.display(),
            lock.build_user,
            lock.build_user
        ));
    }
    selection.recipe = selection.recipe.pinned(lock.image.pin());
    selection.locked = Some(locked);
    Ok(())
}

/// Refuses cache files that differ from the locked ones. Missing ones are fetched later, by steps or by rockenv.
pub(crate) fn check_files(selection: &Selection, store: &Store) -> Result<()> {
    let Some(locked) = &selection.locked else {
        return Ok(());
    };
    let differences = store.other_cache_files(&locked.lock, &|_| true)?;
    match differences.is_empty() {
        true => Ok(()),
        false => Err(locked.drift(&differences).help(format!(
            "remove the file, or lock it with: {}",
            locked.update(ALL)
        ))),
    }
}

/// Returns the choices of the build.
pub(crate) fn choices(selection: &Selection) -> Choices<'_> {
    let (profile, inputs) = (&selection.profile, &selection.inputs);
    Choices {
        profile: &profile.name,
        targets: inputs.asked_targets(profile),
        variant: inputs.variant.as_deref().or(profile.variant.as_deref()),
        from: inputs
            .from
            .as_deref()
            .unwrap_or(crate::profile::FROM_SOURCE),
        params: &inputs.params,
    }
}

/// Refuses steps that differ from the locked ones. Does nothing without a lock file.
pub(crate) fn check_steps(selection: &Selection, inputs: &Inputs) -> Result<()> {
    let Some(locked) = &selection.locked else {
        return Ok(());
    };
    // Parts of a source have fingerprints of their own, which need the source.
    let prints = &inputs.fingerprints;
    let known = |name: &String| prints.get(name).is_some_and(Option::is_some);
    let mut needed = selection.profile.steps.iter().flat_map(|step| &step.inputs);
    if !needed.all(known) {
        return Ok(());
    }
    let prints = |step: &Step| locked_fingerprints(&locked.lock, step);
    let spec = resolve(&selection.profile, inputs, &locked.lock, &prints)?;
    let differences = lockfile::steps(&locked.lock, &spec);
    match differences.is_empty() {
        true => Ok(()),
        false => Err(locked.drift(&differences)),
    }
}

/// Refuses base snapshots whose steps differ from the lock file. `up` is the env's own command.
pub(crate) fn check_built(
    selection: &Selection,
    store: &Store,
    spec: &Spec,
    plan: &Plan,
    up: &str,
) -> Result<()> {
    let (Some(locked), Some(start)) = (&selection.locked, &plan.start) else {
        return Ok(());
    };
    // The chain ends with the first step's layer.
    for layer in store.chain(start)?.iter().rev() {
        // Another env may have made the layer under another step name, and a lock file from another build user has
        // another key.
        let mut steps = spec.steps.iter();
        let step = steps.find(|step| layer.key.as_ref() == Some(&step.key));
        let Some(step) = step.and_then(|step| locked.lock.step(&step.name)) else {
            continue;
        };
        let differences = match layer.pins.is_empty() {
            // Layers found at a service lack the step's report.
            true if layer.kept.is_some() => Vec::new(),
            _ => lockfile::left(step, layer.prints.as_ref(), &layer.pins),
        };
        if !differences.is_empty() {
            let again = format!("{up} --rerun {}", step.name);
            return Err(lockfile::drift(&locked.path, &differences, &again));
        }
    }
    Ok(())
}

/// Records the env's checkouts in the spec: a locked commit may have its own checkout, and later commands find it by
/// the spec.
pub(crate) fn follow_sources(
    spec: &mut Spec,
    selection: &Selection,
    store: &Store,
    sources: &BTreeMap<String, PathBuf>,
) {
    if selection.locked.is_none() {
        return;
    }
    for volume in &mut spec.volumes {
        if let VolumeSource::Git(git) = &mut volume.source
            && let Some(directory) = sources.get(&volume.name)
            && *directory != Repository::new(&volume.name, git).directory(store)
        {
            git.rev = selection.commit(&volume.name).map(str::to_owned);
        }
    }
}

/// Resolves independently of the machine: with a GPU, the lock file's build user, and the TheRock fingerprints in
/// `prints`. A step without fingerprints there has the source's in its key.
pub(crate) fn resolve(
    profile: &Profile,
    inputs: &Inputs,
    lock: &Lockfile,
    prints: &dyn Fn(&Step) -> Option<ArtifactFingerprints>,
) -> Result<Spec> {
    let mut inputs = inputs.clone();
    inputs.without_gpu = None;
    inputs.prints.clear();
    let number = |text: &str| text.parse::<u32>().ok();
    let numbers = lock.build_user.split_once(':');
    let numbers = numbers.and_then(|(uid, gid)| Some((number(uid)?, number(gid)?)));
    let (uid, gid) = numbers.ok_or_else(|| {
        let user = lock.build_user.escape_debug();
        invalid!("the lock file's `build-user` is `{user}`, not UID:GID")
    })?;
    inputs.user = BuildUser::new(uid, gid);
    loop {
        let spec = resolve::resolve(profile, &inputs)?;
        let open = spec.open.as_ref().and_then(|name| spec.step(name));
        let Some((step, prints)) = open.and_then(|step| Some((step, prints(step)?))) else {
            return Ok(spec);
        };
        inputs.prints.insert(step.key.clone(), prints);
    }
}

/// Returns the TheRock fingerprints that a lock file has for a step.
pub(crate) fn locked_fingerprints(lock: &Lockfile, step: &Step) -> Option<ArtifactFingerprints> {
    let prints = lock.of_key(&step.key)?.prints.as_ref()?;
    Some(prints.fingerprints())
}

/// Returns the files that rockenv fetches for the env, by name.
pub(crate) fn fetched(cx: &Context, selection: &Selection) -> Result<BTreeMap<String, Fetched>> {
    let mut files = BTreeMap::new();
    if selection.profile.resources.ninja {
        let (url, sha256) = ninja::identity(cx.config.ninja.as_deref())?;
        let url = url.map(str::to_owned);
        files.insert("ninja".to_owned(), Fetched { url, sha256 });
    }
    for (name, hook) in &selection.hooks {
        add_patches(&mut files, name, &hook.work.patches);
    }
    Ok(files)
}

/// Adds a hook's patches that have a URL, named by its last part. If several have the same last part, the last patch
/// gets that name, as in older lock files, and each other one gets a number too.
fn add_patches(files: &mut BTreeMap<String, Fetched>, hook: &str, patches: &[Patch]) {
    for patch in patches.iter().rev().filter(|patch| patch.url.is_some()) {
        let last = patch.name.rsplit('/').next().unwrap_or_default();
        let is_other = |file: &Fetched| file.sha256 != patch.sha256;
        let mut name = format!("{hook}/{last}");
        let mut number = 1;
        while files.get(&name).is_some_and(is_other) {
            number += 1;
            name = format!("{hook}/{last}-{number}");
        }
        files.entry(name).or_insert_with(|| Fetched {
            url: patch.url.clone(),
            sha256: patch.sha256.clone(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_version_of_a_sent_lock_file_is_known() {
        let home = tempfile::tempdir().unwrap();
        let home = fs::canonicalize(home.path()).unwrap();
        let place = home.join(".cache/rockenv/on/1234");
        let latest = place.join(LATEST);
        for version in ["one", "two"] {
            let file = place.join(version).join("d/p.lock");
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, version).unwrap();
            // Without a link to the last version, the path stays as it is.
            assert_eq!(lasting_path(&file).unwrap(), file);
            fs::os::unix::fs::symlink(version, &latest).unwrap();
            assert_eq!(lasting_path(&file).unwrap(), latest.join("d/p.lock"));
            fs::remove_file(&latest).unwrap();
        }
        let own = home.join("p.lock");
        fs::write(&own, "").unwrap();
        assert_eq!(lasting_path(&own).unwrap(), own);
    }

    #[test]
    fn patches_whose_addresses_end_alike_have_names_of_their_own() {
        let patch = |place: &str, digit: &str| {
            let url = format!("https://example.org/{place}/fix.patch");
            Patch {
                name: url.clone(),
                url: Some(url),
                sha256: digit.repeat(64),
                directory: PathBuf::new(),
                strip: 1,
                bytes: None,
            }
        };
        let mut files = BTreeMap::new();
        // The same content twice is one file.
        let patches = [patch("a", "1"), patch("b", "2"), patch("c", "2")];
        add_patches(&mut files, "h", &patches);
        let found = files
            .iter()
            .map(|(name, file)| (name.as_str(), &file.sha256[..1]));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [("h/fix.patch", "2"), ("h/fix.patch-2", "1")]
        );
    }
}
