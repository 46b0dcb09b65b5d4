//! Owns checking a profile: finds all of its errors without building or fetching anything.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use super::context::Context;
use super::hooks;
use super::select::machine_targets;
use crate::engine::choose::engine_of_new_env;
use crate::image::catalog;
use crate::plan::resolve::{self, BaseImage, Inputs, Spec};
use crate::profile::hook::{self, Hook};
use crate::profile::{
    self, Action, Problem, Profile, ProfileDraft, UnreadPart, VolumeKind, copy_key,
};
use crate::rocm::target::Target;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::shell::quoted;
use crate::sys::span::At;

#[derive(Debug, Default)]
pub(crate) struct ProfileCheck {
    /// The resolved profile, if nothing is wrong with it.
    pub(crate) spec: Option<Spec>,
    /// Valid, but probably not intended.
    pub(crate) advice: Vec<String>,
    pub(crate) errors: Vec<Error>,
}

/// The target to check for if neither the profile nor the command line names one.
const EXAMPLE: &str = "gfx1103";

/// Checks a profile for its own targets, or for `targets`.
pub(crate) fn check(cx: &Context, what: &str, targets: &[String]) -> ProfileCheck {
    let mut checked = ProfileCheck::default();
    match checked.read(cx, what, targets) {
        Ok(spec) if checked.errors.is_empty() => checked.spec = Some(spec),
        Ok(_) => {}
        Err(error) => checked.errors.insert(0, error),
    }
    checked
}

impl ProfileCheck {
    /// Reads the profile, and resolves its readable parts.
    fn read(&mut self, cx: &Context, what: &str, targets: &[String]) -> Result<Spec> {
        let targets = targets.iter().map(|name| Target::named(name));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        let names = profile::names(&cx.config.profile_dirs)?;
        let names = names.iter().map(String::as_str);
        let request = resolve::profile_or_target(what, &targets, names);
        let request = request.map_err(|error| match error.kind() {
            Kind::NotFound => profile::suggest_file(what, error),
            _ => error,
        })?;
        let mut draft = profile::draft(&cx.config.profile_dirs, &request.profile)?;
        let Some(mut profile) = draft.profile.take() else {
            draft.finished()?;
            return Err(unexpected!("profile `{what}` is empty"));
        };
        let (files, problems) = profile::read_files(&cx.config.profile_dirs, &profile);
        draft.add(problems);
        self.image(cx, &profile, &mut draft);
        let hooks = self.hooks(cx, &mut profile, &mut draft);
        let mut inputs = inputs(cx, &profile, &hooks, request.targets)?;
        inputs.file_digests.extend(files.digests());
        let spec = self.resolve(&profile, &mut inputs, &mut draft);
        if let Ok(spec) = &spec {
            draft.add(missing_paths(&profile, spec));
            self.advice.extend(missing_inputs(spec));
        }
        if !draft.has_steps {
            let problem = Problem::new(&(0..0), "no steps", "in this file or one it extends");
            let help = "add one: [[step]] with a name, and run, packages, copy or export";
            draft.add(vec![problem.help(help).unless(UnreadPart::Part)]);
        }
        self.advice.extend(profile::advice(&profile));
        // Problems with a place hide the errors that follow from them.
        if !draft.is_valid() {
            draft.finished()?;
        }
        spec
    }

    fn image(&mut self, cx: &Context, profile: &Profile, draft: &mut ProfileDraft) {
        if profile.image.is_empty() {
            return;
        }
        let chosen = resolve::Chosen::new(profile, None, None, &BTreeMap::new());
        let Ok(image) = chosen.and_then(|chosen| chosen.image()) else {
            return;
        };
        if let Err(error) = catalog::find(&cx.config.image_dirs, &image) {
            self.named(error, &profile.image, draft, || format!("image `{image}`"));
        }
    }

    /// Reads all hooks, also those of variants and the like. Drops unreadable ones from the profile.
    fn hooks(
        &mut self,
        cx: &Context,
        profile: &mut Profile,
        draft: &mut ProfileDraft,
    ) -> BTreeMap<String, Hook> {
        let choices = [
            &mut profile.variants,
            &mut profile.releases,
            &mut profile.from,
        ];
        let choices = choices.into_iter().flat_map(BTreeMap::values_mut);
        let lists = choices.map(|choice| &mut choice.hooks);
        let mut hooks = BTreeMap::new();
        for names in std::iter::once(&mut profile.hooks).chain(lists) {
            names.retain(|name| match read_hook(cx, name) {
                Ok(hook) => {
                    hooks.insert(name.value.clone(), hook);
                    true
                }
                Err(error) => {
                    self.named(error, name, draft, || format!("hook `{name}`"));
                    false
                }
            });
        }
        hooks
    }

    /// Reports an error with a name in the profile: at its place if nothing has that name, or else as it is.
    fn named(
        &mut self,
        error: Error,
        name: &At<String>,
        draft: &mut ProfileDraft,
        what: impl FnOnce() -> String,
    ) {
        if error.kind() == Kind::NotFound {
            let mut problem = Problem::new(&name.place, error.message(), "not found");
            problem.help = error.help_text().map(str::to_owned);
            draft.add(vec![problem]);
        } else {
            let error = Err::<(), _>(error).context(what);
            self.errors.extend(error.err());
        }
    }

    /// Resolves the profile, for the example target if it names none and needs one.
    fn resolve(
        &mut self,
        profile: &Profile,
        inputs: &mut Inputs,
        draft: &mut ProfileDraft,
    ) -> Result<Spec> {
        let mut problems = Vec::new();
        let mut spec = resolve::draft(profile, inputs, &mut problems);
        let has_target = !profile.targets.is_empty() || !inputs.targets.is_empty();
        if !has_target && (spec.is_err() || !problems.is_empty()) {
            let before = problems.len();
            inputs.targets.push(Target::parse(EXAMPLE)?);
            problems.clear();
            spec = resolve::draft(profile, inputs, &mut problems);
            if problems.len() < before {
                self.advice.push(format!(
                    "it names no targets: checked for {EXAMPLE}; `up` needs `--target`"
                ));
            }
        }
        draft.add(problems);
        spec
    }
}

/// Reads a hook, and its patches as far as they are known without a download.
fn read_hook(cx: &Context, name: &str) -> Result<Hook> {
    let hook = hook::load(&cx.config.hook_dirs, name)?;
    if hook.work.patches.iter().all(|patch| patch.bytes.is_some()) {
        hook::files(&hook)?;
    }
    Ok(hook)
}

/// Returns the inputs for resolving, without the store or any source.
fn inputs(
    cx: &Context,
    profile: &Profile,
    hooks: &BTreeMap<String, Hook>,
    targets: Vec<Target>,
) -> Result<Inputs> {
    let unseen = || "unseen".to_owned();
    let sources = profile.steps.iter().flat_map(|step| &step.inputs);
    let copied = profile.steps.iter().flat_map(|step| match &step.action {
        Action::Copy(items) => items
            .iter()
            .map(|item| copy_key(&step.name, &item.from))
            .collect(),
        Action::Run { .. } | Action::Packages(_) | Action::Export(_) => Vec::new(),
    });
    Ok(Inputs {
        env_name: None,
        stem: None,
        targets,
        machine_targets: machine_targets(cx)?,
        variant: None,
        from: None,
        params: BTreeMap::new(),
        engine: engine_of_new_env(cx.config.engine.as_deref(), &cx.config.sockets)?,
        // Steps with a GPU are checked on every machine.
        without_gpu: None,
        user: cx.config.user.clone(),
        host_home: cx.config.host_home.clone(),
        image: BaseImage::Unbuilt(unseen()),
        image_env: BTreeMap::new(),
        file_digests: copied.map(|key| (key, unseen())).collect(),
        fingerprints: sources.map(|name| (name.clone(), Some(unseen()))).collect(),
        prints: BTreeMap::new(),
        checkout: None,
        declared: Vec::new(),
        hooks: hooks::facts(hooks)?,
    })
}

/// Returns the directories of the host that do not exist, or are files.
fn missing_paths(profile: &Profile, spec: &Spec) -> Vec<Problem> {
    let missing = spec.volumes.iter().filter_map(|volume| {
        let resolve::VolumeSource::Path(path) = &volume.source else {
            return None;
        };
        let is_read = matches!(volume.kind, VolumeKind::Host | VolumeKind::Source);
        let is_wrong_kind = volume.kind != VolumeKind::Host && path.is_file();
        if !is_wrong_kind && (!is_read || path.exists()) {
            return None;
        }
        let mut written = profile.volumes.iter();
        let written = written.find(|written| written.name == volume.name)?;
        let profile::VolumeSource::Path(at) = &written.source else {
            return None;
        };
        let (name, shown) = (&volume.name, path.display());
        if is_wrong_kind {
            let message = format!("volume `{name}`: `{shown}` is not a directory");
            return Some(Problem::new(&at.place, message, "a file"));
        }
        let message = format!("volume `{name}`: `{shown}` does not exist");
        let help = format!("mkdir -p {}", quoted(&path.to_string_lossy()));
        Some(Problem::new(&at.place, message, "no such directory").help(help))
    });
    missing.collect()
}

/// Returns advice about inputs of steps that the user's directories lack: a missing path is part of a key as such.
fn missing_inputs(spec: &Spec) -> Vec<String> {
    let inputs = spec
        .steps
        .iter()
        .flat_map(|step| step.inputs.iter().map(move |input| (step, input)));
    let missing = inputs.filter_map(|(step, input)| {
        let (volume, below) = profile::input(input);
        let resolve::VolumeSource::Path(path) = &spec.volume(volume)?.source else {
            return None;
        };
        // A missing volume and a pattern are reported already, and a link is an input whether it dangles or not.
        let found = path.join(below).symlink_metadata();
        let is_missing = found.is_err_and(|error| error.kind() == ErrorKind::NotFound);
        let is_new = !below.contains(['*', '?']) && path.exists();
        (is_missing && is_new).then(|| {
            format!(
                "step `{}`: input `{input}` does not exist: check its name, because other files do not run the step again",
                step.name
            )
        })
    });
    missing.collect()
}
