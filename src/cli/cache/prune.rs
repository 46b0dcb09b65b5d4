//! Owns `cache prune`: removes old snapshots from a registry.

use std::path::PathBuf;

use clap::Args;
use jiff::{SignedDuration, Timestamp};

use crate::plan::lockfile;
use crate::profile::value;
use crate::share::{self, Keep, PrunePlan};
use crate::store::Store;
use crate::sys::error::Result;
use crate::sys::signals::Cancel;
use crate::ui::table::Table;
use crate::ui::{object, size};
use crate::up::context::Context;
use crate::up::registry;
use crate::up::task::{Subject, Task};

#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Repository as `HOST/NAME` [default: `registry` in the configuration]
    #[arg(long, value_name = "REF", required = true, num_args = 0..=1)]
    registry: Option<Option<String>>,
    /// Remove only snapshots that were built longer ago than this, such as `30d`
    #[arg(long, value_name = "DURATION")]
    older_than: String,
    /// Keep the snapshots that this lock file names; may be repeated
    #[arg(long, value_name = "FILE")]
    keep_lock: Vec<PathBuf>,
    /// Show what would be removed, and change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

pub(super) fn prune(cx: &Context, args: &PruneArgs) -> Result<()> {
    let named = args.registry.as_ref().and_then(Option::as_deref);
    let repository = registry::repository(cx, named, None)?;
    if let (Some(named), Some(tag)) = (named, repository.single_snapshot()) {
        let error = usage!("`{named}` names a single snapshot; `prune` is for whole repositories");
        return Err(error.help(format!(
            "--registry {repository}; to remove only `{tag}`, use the registry's own tools"
        )));
    }
    if let Some(root) = &cx.config.roots_store {
        cx.ui.warn(&format!(
            "snapshots of envs in root's store, at `{}`, are not kept; to keep them: {}",
            root.display(),
            cx.config.sudo_command
        ));
    }
    let keep = keep(cx, args)?;
    let task = Task::start(cx)?;
    let label = format!("look at {repository}");
    let plan = task.with_progress(Subject::Transfer(&label), |cx| {
        share::survey(&repository, &keep, cx)
    })?;
    if !cx.json {
        show(cx, &plan);
    }
    let (mut removed, mut bytes) = (plan.removed.clone(), plan.bytes);
    if !args.dry_run && !plan.removed.is_empty() {
        let tags = size::count(plan.removed.len(), "tag");
        let cancel = Cancel::new(&task.signals);
        let agreed = cx.confirm(&format!("remove {tags} from {repository}?"));
        cancel.poll();
        cancel.outcome(agreed)?;
        let label = format!("remove from {repository}");
        (removed, bytes) = task.with_progress(Subject::Transfer(&label), |cx| {
            share::remove(&repository, &plan, cx)
        })?;
    }
    // The other tags moved or came into use during the prune.
    let left = plan.removed.len() - removed.len();
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/cache-prune/1",
            dry_run: args.dry_run,
            removed: &removed,
            kept: plan.kept + left,
            others: plan.others,
            bytes: bytes,
        });
    }
    let kept = format!("{} of rockenv kept, {} of others", plan.kept, plan.others);
    cx.ui.data(&match (args.dry_run, plan.removed.len()) {
        (_, 0) => format!("nothing to remove; {kept}\n"),
        (true, all) => format!(
            "{} would be removed, with layers of {}; {kept}\n",
            size::count(all, "tag"),
            size::bytes(bytes)
        ),
        (false, _) if left > 0 => {
            let left = size::count(left, "tag");
            let removed = size::count(removed.len(), "tag");
            format!(
                "removed {removed}; {kept}; {left} moved or came into use meanwhile, and stay\n"
            )
        }
        (false, all) => format!(
            "removed {}; {kept}; the registry frees {} when it collects garbage\n",
            size::count(all, "tag"),
            size::bytes(bytes)
        ),
    });
    Ok(())
}

/// Returns what to keep: recent builds, and everything that lock files and this machine's envs refer to.
fn keep(cx: &Context, args: &PruneArgs) -> Result<Keep> {
    let age = value::duration(&args.older_than)
        .map_err(|refused| usage!("--older-than: {}", refused.message).help("--older-than 30d"))?;
    let since = SignedDuration::try_from(age)
        .ok()
        .and_then(|age| Timestamp::now().checked_sub(age).ok())
        .unwrap_or(Timestamp::MIN);
    let mut keep = Keep {
        keys: std::collections::BTreeSet::new(),
        since,
    };
    for path in &args.keep_lock {
        let lock = lockfile::read(path)?.ok_or_else(|| {
            not_found!("`{}` does not exist", path.display()).help("rockenv lock PROFILE writes it")
        })?;
        keep.keys.insert(lock.image.key.to_string());
        keep.keys
            .extend(lock.steps.iter().map(|step| step.key.to_string()));
    }
    if let Some(store) = Store::open_existing(&cx.config.home)? {
        for env in store.envs()? {
            let Some(record) = store.record(&env)? else {
                continue;
            };
            keep.keys.insert(record.image_key.to_string());
            let steps = record.steps.iter().filter_map(|step| step.key.as_ref());
            keep.keys.extend(steps.map(ToString::to_string));
        }
    }
    Ok(keep)
}

fn show(cx: &Context, plan: &PrunePlan) {
    if plan.removed.is_empty() {
        return;
    }
    let header = ["tag", "snapshot", "built"];
    cx.ui.table(&Table::of(header, &plan.removed, |tag| {
        let title = tag.title.as_deref().unwrap_or("signature");
        let built = tag
            .built
            .map(|built| built.strftime("%Y-%m-%d").to_string());
        [
            tag.tag.clone(),
            title.to_owned(),
            built.unwrap_or_else(|| "-".to_owned()),
        ]
    }));
}
