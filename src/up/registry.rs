//! Owns the registry side of `push`, `pull`, `import`, `up` and `plan`: the choice of the registry, and its content.

use std::cell::Cell;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::engine::choose::{choose, choose_to_plan, is_nspawn_installed};
use crate::engine::docker::Service;
use crate::plan::ids::StepKey;
use crate::plan::resolve::{Engine, Spec};
use crate::plan::{Action, StepOptions};
use crate::share::{
    self, Import, Pulled, Repository, SigningKey, SnapshotRef, VerifyingKey, WantedChain,
};
use crate::store::Store;
use crate::store::history::Reuse;
use crate::store::images::TaskContext;
use crate::sys::error::{Kind, Result};
use crate::sys::userns;
use crate::ui::event::Outcome;
use crate::ui::{Reporter, size};
use crate::up::context::Context;
use crate::up::observe::plan_for;
use crate::up::options::{PlanOptions, options};
use crate::up::resolve::Gathered;
use crate::up::select::Selection;
use crate::up::task::{Subject, Task};

/// Returns the named repository, or the configured one. Pulled content must be signed with `key` or the configured key,
/// if either is set.
pub(crate) fn repository(
    cx: &Context,
    named: Option<&str>,
    key: Option<&Path>,
) -> Result<Repository> {
    let mut repository = unsigned(cx, named)?;
    if let Some(path) = key.or(cx.config.verify_key.as_deref()) {
        repository.verifies = Some(Arc::new(VerifyingKey::read(path)?));
    }
    Ok(repository)
}

/// Returns the same repository for pushing, signing with `key` or the configured key.
pub(crate) fn repository_to_push(
    cx: &Context,
    named: Option<&str>,
    key: Option<&Path>,
) -> Result<Repository> {
    let mut repository = unsigned(cx, named)?;
    if let Some(path) = key.or(cx.config.sign_key.as_deref()) {
        let password = cx.config.host_variable("COSIGN_PASSWORD");
        repository.signs = Some(Arc::new(SigningKey::read(path, password)?));
    }
    Ok(repository)
}

fn unsigned(cx: &Context, named: Option<&str>) -> Result<Repository> {
    match (named, &cx.config.registry) {
        (Some(text), _) => Repository::parse(text),
        (None, Some(text)) => Repository::parse(text).map_err(|error| {
            let help = error.help_text().unwrap_or_default().to_owned();
            invalid!("`registry` in the configuration: {}", error.message()).help(help)
        }),
        (None, None) => Err(usage!("no registry is configured").help(
            "registry = \"registry.example.org/rockenv\" in config.toml, or ROCKENV_REGISTRY",
        )),
    }
}

/// Returns the label for progress of transfers from a repository.
pub(crate) fn shown(repository: &Repository) -> String {
    format!("pull from {repository}")
}

/// Returns the service that would keep a new env's snapshots; `None` if the store does, or no engine works.
pub(crate) fn service(cx: &Context, asked: Option<&str>) -> Result<Option<Service>> {
    let asked = asked.or(cx.config.engine.as_deref());
    let asked = asked.filter(|name| *name != "auto");
    let nspawn = userns::is_root() && is_nspawn_installed();
    let choose = match asked {
        Some(_) => choose,
        None => choose_to_plan,
    };
    let choice = choose(asked, None, nspawn, &cx.config.sockets)?;
    choice.service.as_deref().map(Service::connect).transpose()
}

/// Gains the rights to add snapshots to a store. With Podman, a user may work without root.
pub(crate) fn host_for(cx: &Context, asked: Option<&str>, what: &str) -> Result<()> {
    let host = match asked == Some(Engine::Podman.name()) {
        true => cx.host_as_rootless(what),
        false => cx.host_as_root(what),
    };
    host.map(drop)
}

/// Describes a transfer.
pub(crate) fn describe(verb: &str, pulled: &Pulled, from: &dyn Display) -> String {
    let what = match (pulled.image_pulled, pulled.steps.as_slice()) {
        (true, []) => "the image".to_owned(),
        (true, steps) => format!("the image and {}", steps.join(", ")),
        (false, steps) => steps.join(", "),
    };
    format!("{verb} {what} from {from} ({})", size::bytes(pulled.bytes))
}

/// Reports the end of a transfer to the store.
pub(crate) fn finish(verb: &str, pulled: &Pulled, from: &dyn Display, reporter: &Reporter) {
    match (
        pulled.steps.as_slice(),
        pulled.image_pulled,
        pulled.incremental.as_slice(),
    ) {
        ([], false, []) => reporter.finish(Outcome::Hit, "the store already has all of it"),
        ([], false, _) => reporter.finish(Outcome::Hit, "the store already has all the others"),
        _ => reporter.finish(Outcome::Done, describe(verb, pulled, from)),
    }
}

/// Warns about skipped incremental snapshots.
pub(crate) fn note_incremental(pulled: &Pulled, reporter: &Reporter) {
    if !pulled.incremental.is_empty() {
        let steps = pulled.incremental.join(", ");
        reporter.warn(format!(
            "skipped incremental snapshots, which were not clean builds: {steps}; `--allow-incremental` includes them"
        ));
    }
}

/// The registry that provides missing steps to `up`.
pub(crate) struct Source<'a> {
    task: &'a Task<'a>,
    pub(crate) repository: Repository,
    reuse: Reuse,
    /// Whether it failed. The failure is reported once, and the registry is not asked again.
    failed: Cell<bool>,
}

impl<'a> Source<'a> {
    /// Returns the source, if pulling is requested.
    pub(crate) fn new(task: &'a Task<'a>, args: &PlanOptions) -> Result<Option<Self>> {
        let cx = task.cx;
        if !args.pulls(&cx.config) {
            return Ok(None);
        }
        Ok(Some(Self {
            task,
            repository: repository(cx, None, None)?,
            // A clean build uses no incremental snapshot, so it would pull one again and again.
            reuse: match args.clean {
                true => Reuse::Clean,
                false => args.reuse(&cx.config),
            },
            failed: Cell::new(false),
        }))
    }

    /// Pulls an image or steps, to the service that keeps the trees. Returns false if the registry lacks them or does
    /// not answer: `up` then builds them.
    pub(crate) fn pull(
        &self,
        store: &Store,
        wanted: &SnapshotRef,
        service: Option<&Service>,
    ) -> Result<bool> {
        let started = Instant::now();
        let to = Import {
            store,
            user: &self.task.cx.config.user,
            service,
            reuse: self.reuse,
        };
        let cx = self.task.cx;
        match self.ask(|cx| share::pull(to, &self.repository, wanted, cx)) {
            Ok(Some(pulled)) => {
                let what = shown(&self.repository);
                self.task.transfer_finished(what, started);
                cx.ui.note(&describe("pulled", &pulled, &self.repository));
                cx.flush_in_background(store)?;
                // A skipped snapshot is not available, however often it is requested.
                Ok(pulled.incremental.is_empty())
            }
            other => {
                // A failed pull leaves its download.
                cx.tidy(store)?;
                other.map(|_| false)
            }
        }
    }

    /// Pulls the longest available prefix of the steps to run. Returns false without one, and if the plan refuses what
    /// was `pulled` last: another pull would change nothing.
    pub(crate) fn pull_steps(
        &self,
        store: &Store,
        gathered: &Gathered<'_>,
        spec: &Spec,
        asked: &StepOptions,
        pulled: &mut Option<StepKey>,
    ) -> Result<bool> {
        let mut keys = missing_keys(store, gathered, spec, asked)?;
        if pulled.as_ref().is_some_and(|key| keys.contains(key)) {
            return Ok(false);
        }
        while let Some(key) = self.available(&keys)? {
            let service = gathered.selection.choice.service.as_deref();
            let service = service.map(Service::connect).transpose()?;
            // Without an image there are no keys.
            let image = gathered.inputs.image.key().cloned();
            let Some(wanted) = image.and_then(|image| WantedChain::of(spec, image, &key)) else {
                return Ok(false);
            };
            let wanted = SnapshotRef::Chain(wanted);
            if self.pull(store, &wanted, service.as_ref())? {
                *pulled = Some(key);
                return Ok(true);
            }
            // The step has expired, as tags do under a registry's retention rules. An earlier step may still exist.
            let at = keys.iter().position(|wanted| *wanted == key);
            keys.drain(..=at.unwrap_or(keys.len() - 1));
        }
        Ok(false)
    }

    /// Uses the key of the locked image, or else of the registry's image, without a pull. Returns whether the key is
    /// known.
    pub(super) fn announce(&self, gathered: &mut Gathered<'_>) -> Result<bool> {
        // The key of a locked image is known, even if the registry lacks the image.
        if gathered.selection.locked.is_some() {
            return Ok(true);
        }
        let wanted = wanted_image(gathered.selection);
        let found = self.ask(|cx| share::image(&self.repository, &wanted, cx))?;
        if let Some(image) = &found {
            gathered.announce(image);
        }
        Ok(found.is_some())
    }

    /// Returns the first of these keys that the registry has.
    pub(crate) fn available(&self, keys: &[StepKey]) -> Result<Option<StepKey>> {
        if keys.is_empty() {
            return Ok(None);
        }
        self.ask(|cx| share::available(&self.repository, keys, self.reuse, cx))
    }

    /// Asks the registry, and shows the progress. Returns `None` if the registry has no such object, or warns and
    /// returns `None` if it does not answer, so that `up` continues. Wrong data and a full disk are errors.
    fn ask<T>(
        &self,
        ask: impl FnOnce(&mut TaskContext<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        if self.failed.get() {
            return Ok(None);
        }
        let what = shown(&self.repository);
        let asked = self.task.with_progress(Subject::Transfer(&what), ask);
        asked.or_else(|error| match error.kind() {
            Kind::Unavailable | Kind::Unexpected | Kind::NotFound | Kind::NoLayer => {
                let message = format!("{}; building it here", error.chain().join(": "));
                self.task.reporter.warn(message);
                let absent = matches!(error.kind(), Kind::NotFound | Kind::NoLayer);
                self.failed.set(!absent);
                Ok(None)
            }
            _ => Err(error),
        })
    }
}

/// Returns the wanted image: the locked one, or the recipe's.
pub(crate) fn wanted_image(selection: &Selection) -> SnapshotRef {
    match &selection.locked {
        None => SnapshotRef::Recipe(selection.recipe.digest()),
        Some(locked) => SnapshotRef::Chain(WantedChain::image(locked.lock.image.key.clone())),
    }
}

/// Returns the keys of the steps that would run and could be pulled, the last one first.
fn missing_keys(
    store: &Store,
    gathered: &Gathered<'_>,
    spec: &Spec,
    asked: &StepOptions,
) -> Result<Vec<StepKey>> {
    // A clean build must not use existing snapshots.
    if asked.clean && !store.freezes_volumes() {
        return Ok(Vec::new());
    }
    let (observed, plan) = plan_for(store, None, gathered, spec, asked)?;
    let again = asked.rerun.as_deref();
    let steps = plan.steps.into_iter();
    let mut keys: Vec<StepKey> = steps
        .take_while(|step| Some(&*step.name) != again)
        .filter(|step| {
            let found = step.key.as_ref().and_then(|key| observed.layers.get(key));
            step.action == Action::Run && found.is_none_or(|found| found.refused)
        })
        .filter_map(|step| step.key)
        .collect();
    keys.reverse();
    Ok(keys)
}

/// Asks what `up` would pull. Returns the spec, which may be based on an image that only the registry has, and the key
/// of the last step that the registry has, with the registry's name.
pub(crate) fn remote(
    source: &Source<'_>,
    store: Option<&Store>,
    gathered: &mut Gathered<'_>,
    args: &PlanOptions,
    mut spec: Spec,
) -> Result<(Spec, Option<(StepKey, String)>)> {
    if gathered.image.is_none()
        && gathered.selection.locked.is_none()
        && source.announce(gathered)?
    {
        spec = gathered.resolve(store)?;
    }
    let keys = match store {
        Some(store) => missing_keys(store, gathered, &spec, &options(args))?,
        None => {
            let steps = spec.steps.iter().rev();
            steps.map(|step| step.key.clone()).collect()
        }
    };
    let last = source.available(&keys)?;
    Ok((spec, last.map(|key| (key, source.repository.to_string()))))
}
