//! Owns `export`: writes an env's results with a manifest of their inputs, checks such copies, and writes snapshots to
//! files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::plan::ids::EnvName;
use crate::share::Shareable;
use crate::store::export::{self, ExportedEntry, OutputsExport};
use crate::sys::error::{Kind, Result};
use crate::ui::event::Outcome;
use crate::ui::{object, text};
use crate::up::context::Context;
use crate::up::push;
use crate::up::task::Task;

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The env
    #[arg(required_unless_present = "check")]
    env: Option<EnvName>,
    /// Directory to write to, created if missing; existing files are never replaced
    #[arg(value_name = "DIR", required_unless_present_any = ["check", "snapshots"])]
    directory: Option<PathBuf>,
    /// Output volume to export instead of all; may be given again
    #[arg(long, value_name = "NAME")]
    volume: Vec<String>,
    /// Export the env's snapshots instead, for `import` on another machine: an OCI image layout, in a file if the name
    /// ends in `.tar`, otherwise in a directory
    #[arg(long, value_name = "FILE|DIR", conflicts_with_all = ["directory", "volume"])]
    snapshots: Option<PathBuf>,
    /// Last step whose snapshot is exported
    #[arg(long, value_name = "STEP", requires = "snapshots", conflicts_with_all = ["directory", "volume", "check"])]
    until: Option<String>,
    /// Compare exported files with their manifest
    #[arg(long, value_name = "DIR", conflicts_with_all = ["env", "directory", "volume", "snapshots", "allow_incremental"])]
    check: Option<PathBuf>,
    /// Also export outputs that were built on files from an earlier build [default: `reuse` in the configuration]
    #[arg(long)]
    allow_incremental: bool,
}

/// Exports or checks; returns the exit code.
pub(crate) fn export(cx: &Context, args: &ExportArgs) -> Result<u8> {
    if let Some(directory) = &args.check {
        return check(cx, directory);
    }
    if let (Some(env), Some(place)) = (&args.env, &args.snapshots) {
        return snapshots(cx, args, env, place).map(|()| 0);
    }
    let (Some(env), Some(directory)) = (&args.env, &args.directory) else {
        return Err(unexpected!("give an env, or a directory to check"));
    };
    let store = cx.store_to_change("reading an env")?;
    let export = OutputsExport {
        env,
        directory,
        volumes: &args.volume,
        reuse: cx.config.reuse.or_incremental(args.allow_incremental),
        hook_dirs: &cx.config.hook_dirs,
        warn: &|text| cx.ui.warn(text),
    };
    let (manifest, files) = export.run(&store)?;
    show(cx, &manifest, &files)?;
    Ok(0)
}

fn show(cx: &Context, manifest: &Path, entries: &BTreeMap<String, ExportedEntry>) -> Result<()> {
    let (mut files, mut links) = (BTreeMap::new(), BTreeMap::new());
    let mut directories = Vec::new();
    for (name, named) in entries {
        match named {
            ExportedEntry::File(sha256) => drop(files.insert(name, sha256)),
            ExportedEntry::Symlink(target) => drop(links.insert(name, target)),
            ExportedEntry::Directory => directories.push(name),
        }
    }
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/export/1",
            manifest: manifest,
            files: files,
            links: links,
            directories: directories,
        });
    }
    let counts = [
        (files.len(), "file", "files"),
        (links.len(), "link", "links"),
        (directories.len(), "empty directory", "empty directories"),
    ];
    let counts = counts.into_iter().filter(|(count, _, _)| *count > 0);
    let counts: Vec<String> = counts
        .map(|(count, one, many)| format!("{count} {}", if count == 1 { one } else { many }))
        .collect();
    cx.ui.note(&format!(
        "exported {}; {} describes them",
        counts.join(", "),
        manifest.display()
    ));
    Ok(())
}

/// Writes shareable snapshots to a file or a directory.
fn snapshots(cx: &Context, args: &ExportArgs, env: &EnvName, place: &Path) -> Result<()> {
    cx.host_as_root("exporting snapshots")?;
    let store = cx.existing_store()?;
    let task = Task::start(cx)?;
    let reuse = cx.config.reuse.or_incremental(args.allow_incremental);
    let warn = |text| task.reporter.warn(text);
    let what = Shareable::of(&store, env, args.until.as_deref(), reuse, &warn)?;
    let (pushed, message) = push::to_file(&task, &store, place, &what)?;
    task.reporter.finish(Outcome::Done, message);
    if cx.json {
        let last = what.layers.last();
        cx.ui.json(&object! {
            schema: "rockenv/export-snapshots/1",
            snapshots: place,
            key: last.and_then(|layer| layer.key.as_deref()),
            steps: what.steps(),
            layers: pushed.sent,
            bytes: pushed.sent_bytes,
            left_out: pushed.left_out,
        })?;
    }
    Ok(())
}

fn check(cx: &Context, directory: &Path) -> Result<u8> {
    let found = export::check(directory)?;
    let same = found.iter().all(|checked| checked.differences.is_empty());
    if cx.json {
        cx.ui.json(&found)?;
    } else {
        for checked in &found {
            for difference in &checked.differences {
                cx.ui.data(&format!("{}\n", text::escape(difference)));
            }
            let (total, other) = (checked.files, checked.differences.len());
            cx.ui.note(&format!(
                "{}: {} of {total} files match",
                checked.manifest.display(),
                total - other
            ));
        }
    }
    Ok(super::code_of(same, Kind::Drift))
}
