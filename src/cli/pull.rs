//! Owns `pull`: fetches snapshots from a registry, by name, or the missing ones of an env.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::engine::docker::Service;
use crate::plan::ids::{EnvName, StepKey};
use crate::share::{self, Import, Pulled, Repository, SnapshotRef, WantedChain};
use crate::store::history::Reuse;
use crate::store::{Store, check_name};
use crate::sys::error::{Kind, Result};
use crate::ui::object;
use crate::up::context::Context;
use crate::up::registry;
use crate::up::task::{Subject, Task};

#[derive(Debug, Args)]
pub struct PullArgs {
    /// Snapshot as `HOST/NAME:TAG`, where the tag is a step's key or one given to `push`; or an env whose snapshots
    /// are gone
    #[arg(value_name = "REF|ENV")]
    what: String,
    /// Engine whose envs get the snapshot, unless an env is given: auto, nspawn, docker or podman
    #[arg(short, long)]
    engine: Option<String>,
    /// Also take snapshots that were built on files from an earlier build [default: `reuse` in the configuration]
    #[arg(long)]
    allow_incremental: bool,
    /// Refuse snapshots that are not signed with this public key, as `cosign generate-key-pair` makes it [default:
    /// `verify-key` in the configuration]
    #[arg(long, value_name = "KEY")]
    verify: Option<PathBuf>,
}

pub(crate) fn pull(cx: &Context, args: &PullArgs) -> Result<()> {
    let engine = args.engine.as_deref();
    let by_name = args.what.contains('/');
    if let (Some(_), false) = (engine, by_name) {
        return Err(usage!("env `{}` cannot change its engine", args.what)
            .help(format!("rockenv pull {}", args.what)));
    }
    registry::host_for(cx, engine, "pulling snapshots")?;
    let task = Task::start(cx)?;
    let asking = Asking {
        task: &task,
        reuse: cx.config.reuse.or_incremental(args.allow_incremental),
        verify: args.verify.as_deref(),
    };
    let pulled = match by_name {
        true => {
            let service = registry::service(cx, engine)?;
            asking.by_name(&cx.store()?, &args.what, service.as_ref())?
        }
        false => asking.of_env(&check_name(&args.what)?)?,
    };
    if cx.json {
        return cx
            .ui
            .json(&object! { schema: "rockenv/pull/1", #[serde(flatten)] pulled: &pulled });
    }
    Ok(())
}

/// The context of a pull.
struct Asking<'a> {
    task: &'a Task<'a>,
    reuse: Reuse,
    /// Public key that replaces the configured one.
    verify: Option<&'a Path>,
}

impl Asking<'_> {
    fn repository(&self, named: Option<&str>) -> Result<Repository> {
        registry::repository(self.task.cx, named, self.verify)
    }

    fn by_name(&self, store: &Store, text: &str, service: Option<&Service>) -> Result<Pulled> {
        let repository = self.repository(Some(text))?;
        let name = repository.single_snapshot().ok_or_else(|| {
            usage!("`{text}` does not name a snapshot").help(format!("rockenv pull {text}:TAG"))
        })?;
        let wanted = SnapshotRef::of(&name);
        self.one(store, &repository, &wanted, service)?
            .ok_or_else(|| {
                not_found!("there is no snapshot `{name}` at `{repository}`").help(format!(
                    "rockenv push ENV {text}, on the machine that built it"
                ))
            })
    }

    /// Pulls the snapshot of the env's last step that the registry has.
    fn of_env(&self, env: &EnvName) -> Result<Pulled> {
        let (repository, cx) = (self.repository(None)?, self.task.cx);
        let way = format!("rockenv up PROFILE --pull, or rockenv pull {repository}:TAG");
        let store = &cx.existing_store().map_err(|error| match error.kind() {
            Kind::NotFound if cx.config.roots_store.is_none() => error.help(way.as_str()),
            _ => error,
        })?;
        let record = store.known(env).map_err(|error| match error.kind() {
            Kind::NoEnv if !error.names_another() => error.help(way),
            _ => error,
        })?;
        let steps = record.steps.iter().rev();
        let keys: Vec<StepKey> = steps.filter_map(|step| step.key.clone()).collect();
        let shown = registry::shown(&repository);
        let found = self.task.with_progress(Subject::Transfer(&shown), |cx| {
            share::available(&repository, &keys, self.reuse, cx)
        })?;
        let nothing = || {
            not_found!("`{repository}` has no snapshot of env `{env}`")
                .help(format!("rockenv push {env}, on the machine that built it"))
        };
        let found = found.ok_or_else(nothing)?;
        let chain = WantedChain::of(&store.spec(env)?, record.image_key.clone(), &found);
        let wanted = SnapshotRef::Chain(chain.ok_or_else(nothing)?);
        let service = record.service.as_deref();
        let service = service.map(Service::connect).transpose()?;
        let service = service.as_ref();
        self.one(store, &repository, &wanted, service)?
            .ok_or_else(nothing)
    }

    fn one(
        &self,
        store: &Store,
        repository: &Repository,
        wanted: &SnapshotRef,
        service: Option<&Service>,
    ) -> Result<Option<Pulled>> {
        let shown = registry::shown(repository);
        let Task { cx, reporter, .. } = self.task;
        let to = Import {
            store,
            user: &cx.config.user,
            service,
            reuse: self.reuse,
        };
        let pulled = self.task.with_progress(Subject::Transfer(&shown), |cx| {
            share::pull(to, repository, wanted, cx)
        });
        cx.flush_in_background(store)?;
        let Some(pulled) = pulled? else {
            return Ok(None);
        };
        registry::note_incremental(&pulled, reporter);
        registry::finish("pulled", &pulled, repository, reporter);
        Ok(Some(pulled))
    }
}
