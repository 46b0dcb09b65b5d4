//! Owns `du`: the report as a table or JSON.

use std::collections::BTreeMap;

use clap::Args;

use crate::context::Context;
use crate::error::Result;
use crate::ui::size;
use crate::ui::table::Table;
use crate::usage::report::{Class, Report, Row, Size, report};

/// Arguments of `du`.
#[derive(Debug, Args)]
pub struct DuArgs {
    /// Only this env, in detail
    #[arg(value_name = "ENV")]
    name: Option<String>,
}

/// Shows where the disk space went.
pub fn du(cx: &Context, args: &DuArgs) -> Result<()> {
    let store = cx.existing_store()?;
    if let Some(name) = &args.name {
        store.known(name)?;
    }
    let report = report(&store, args.name.as_deref())?;
    if cx.json {
        cx.ui.json(&report)?;
    } else {
        let table = match &args.name {
            Some(name) => detail(&report, name),
            None => overview(&report),
        };
        cx.ui.table(&table);
        cx.ui.data(&format!(
            "\nfile system: {} used, {} free of {}\n",
            size::bytes(report.file_system.used),
            size::bytes(report.file_system.free),
            size::bytes(report.file_system.size),
        ));
    }
    caveats(cx, &report);
    Ok(())
}

/// Says how far the numbers can be trusted.
fn caveats(cx: &Context, report: &Report) {
    if report.extents && !cx.json {
        cx.ui
            .detail("blocks shared by clones are counted once, where they are oldest");
    }
    if report.unshared > 0 {
        cx.ui.warn(&format!(
            "{} files would not say which blocks they share: sizes are at most what is shown",
            report.unshared
        ));
    }
    if report.unreadable > 0 {
        let first = report.problems.first().map_or("", String::as_str);
        cx.ui.warn(&format!(
            "{} paths could not be read, sizes are at least what is shown: {first}",
            report.unreadable
        ));
    }
    for problem in &report.silent_services {
        cx.ui.warn(&format!(
            "what a service holds is not counted, since it does not answer: {problem}"
        ));
    }
    if report.mounts_skipped > 0 {
        cx.ui.warn(&format!(
            "{} mounts in the store are not counted",
            report.mounts_skipped
        ));
    }
}

fn cells(name: String, size: Size, note: String) -> [String; 4] {
    [
        name,
        size::bytes(size.allocated),
        size::bytes(size.apparent),
        note,
    ]
}

/// A row for what a service holds: own bytes, and those with what it stands on.
fn service_row(
    name: &str,
    engine: &str,
    own: u64,
    total: Option<u64>,
    note: String,
) -> [String; 4] {
    [
        format!("{name} at {engine}"),
        size::bytes(own),
        total.map(size::bytes).unwrap_or_default(),
        note,
    ]
}

/// The parts of an env, in the order of a life.
const PARTS: [(Class, &str); 6] = [
    (Class::Snapshots, "snapshots"),
    (Class::Live, "live tree"),
    (Class::Build, "build volumes"),
    (Class::Failed, "failed tree"),
    (Class::Logs, "logs"),
    (Class::Records, "records"),
];

/// The whole store.
fn overview(report: &Report) -> Table {
    let mut table = Table::new(["what", ">on disk", ">apparent", ""]);
    for (env, freed) in &report.freed {
        let parts: Vec<(&str, Size)> = PARTS
            .iter()
            .map(|(class, title)| (*title, report.own(env, *class)))
            .collect();
        let total: Size = parts.iter().map(|(_, size)| *size).sum();
        let own = std::slice::from_ref(env);
        let held = report.at_services.iter().filter(|held| held.envs == own);
        let held: Vec<_> = held.filter(|held| held.class != Class::Image).collect();
        let engine = held.first().map_or("", |held| held.engine.as_str());
        let mut note = format!("`rockenv rm {env}` frees {}", size::bytes(*freed));
        if !held.is_empty() {
            let bytes = held.iter().map(|held| held.own).sum();
            note = format!("{note}, and {} at {engine}", size::bytes(bytes));
        }
        table.row(cells(format!("env {env}"), total, note));
        for (title, part) in parts.into_iter().filter(|(_, part)| part.entries > 0) {
            table.row(cells(format!("  {title}"), part, String::new()));
        }
        for (class, title) in PARTS {
            if held.iter().any(|held| held.class == class) {
                let (name, bytes) = (format!("  {title}"), report.held(class, own));
                table.row(service_row(&name, engine, bytes, None, String::new()));
            }
        }
    }
    for (users, size) in shared(report) {
        let note = format!("needed by {}", users.join(", "));
        table.row(cells("shared snapshots".to_owned(), size, note));
    }
    for row in &report.rows {
        let (word, note) = match row.class {
            Class::Image => ("image", used_by(row)),
            Class::Cache => ("cache", String::new()),
            Class::Source => ("source", String::new()),
            Class::Output => ("output", String::new()),
            _ => continue,
        };
        let name = match (row.class, row.envs.as_slice()) {
            (Class::Output, [env]) => format!("output {env}/{}", row.name),
            _ => format!("{word} {}", row.name),
        };
        table.row(cells(name, row.size, note));
    }
    for (class, title, note) in [
        (Class::Blobs, "downloads", ""),
        (Class::Unused, "unused", "no env needs it"),
        (Class::Trash, "trash", "being deleted"),
        (Class::Other, "the store's own", ""),
    ] {
        let rows = report.rows.iter().filter(|row| row.class == class);
        let size: Size = rows.map(|row| row.size).sum();
        let empty = size.apparent == 0 && class != Class::Other;
        if !empty {
            table.row(cells(title.to_owned(), size, note.to_owned()));
        }
    }
    let held = report.at_services.iter().filter(|held| match held.class {
        Class::Image | Class::Unused => true,
        _ => held.envs.len() > 1,
    });
    for held in held {
        let name = match held.class {
            Class::Image => format!("image {}", held.name),
            Class::Unused => format!("unused snapshot {}", held.name),
            _ => format!("shared snapshot {}", held.name),
        };
        let note = match held.envs.as_slice() {
            [] => "no env needs it".to_owned(),
            envs => format!("needed by {}", envs.join(", ")),
        };
        table.row(service_row(
            &name,
            &held.engine,
            held.own,
            Some(held.total),
            note,
        ));
    }
    table.row(cells("total".to_owned(), report.total, String::new()));
    total_at_services(&mut table, report);
    table
}

/// What services hold is on their disk, which need not be the store's.
fn total_at_services(table: &mut Table, report: &Report) {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for held in &report.at_services {
        *sums.entry(&held.engine).or_default() += held.own;
    }
    for (engine, sum) in sums {
        let note = "in its own storage, not in the total above".to_owned();
        table.row(service_row("total", engine, sum, None, note));
    }
}

/// One env: each snapshot and volume by name.
fn detail(report: &Report, env: &str) -> Table {
    let mut table = Table::new(["what", ">on disk", ">apparent", ""]);
    for row in &report.rows {
        let name = match row.class {
            Class::Snapshots => format!("snapshot {}", row.name),
            Class::Live if row.name.is_empty() => "live tree".to_owned(),
            Class::Live => "tree of a running step".to_owned(),
            Class::Build => format!("build volume {}", row.name),
            Class::Failed => format!("failed tree of {}", row.name),
            Class::Logs => "logs".to_owned(),
            Class::Records => "records".to_owned(),
            Class::Image => format!("image {}", row.name),
            _ => continue,
        };
        let others: Vec<&str> = row
            .envs
            .iter()
            .map(String::as_str)
            .filter(|user| *user != env)
            .collect();
        let mut notes = Vec::new();
        if !others.is_empty() {
            notes.push(format!("also needed by {}", others.join(", ")));
        }
        if row.size.counted_elsewhere > 0 {
            notes.push(format!(
                "and {} of what is counted above or in other envs",
                size::bytes(row.size.counted_elsewhere)
            ));
        }
        table.row(cells(name, row.size, notes.join("; ")));
    }
    for held in &report.at_services {
        let name = match held.class {
            Class::Image => format!("image {}", held.name),
            Class::Live => "live tree".to_owned(),
            Class::Failed => format!("failed tree of {}", held.name),
            _ => format!("snapshot {}", held.name),
        };
        let others = held.envs.iter().map(String::as_str);
        let others: Vec<&str> = others.filter(|user| *user != env).collect();
        let note = match others.as_slice() {
            [] => String::new(),
            _ => format!("also needed by {}", others.join(", ")),
        };
        table.row(service_row(
            &name,
            &held.engine,
            held.own,
            Some(held.total),
            note,
        ));
    }
    table.row(cells("total".to_owned(), report.total, String::new()));
    total_at_services(&mut table, report);
    let own = report.freed.get(env).copied().unwrap_or_default();
    let note = format!("what `rockenv rm {env}` frees");
    table.row(["only here", &size::bytes(own), "", &note]);
    table
}

/// Sums the layers that several envs need, by those envs.
fn shared(report: &Report) -> BTreeMap<&[String], Size> {
    let mut sums: BTreeMap<&[String], Size> = BTreeMap::new();
    for row in &report.rows {
        if row.class == Class::Snapshots && row.envs.len() > 1 {
            *sums.entry(&row.envs).or_default() += row.size;
        }
    }
    sums
}

fn used_by(row: &Row) -> String {
    if row.envs.is_empty() {
        "no env stands on it".to_owned()
    } else {
        format!("needed by {}", row.envs.join(", "))
    }
}
