//! Owns `du`: the report as a table or JSON.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::{Args, ValueEnum};

use crate::plan::ids::EnvName;
use crate::store::usage::report::{Class, Inside, UsageReport, UsageRow, count};
use crate::store::usage::service::Held;
use crate::sys::error::Result;
use crate::tree::measure::DiskUsage;
use crate::tree::mounts_below;
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct DuArgs {
    /// Only this env, in detail
    #[arg(value_name = "ENV")]
    name: Option<EnvName>,
    /// Show directories down to this depth in build volumes, caches, sources and outputs [default: the parts of
    /// TheRock's build trees]
    #[arg(long, value_name = "LEVELS")]
    depth: Option<usize>,
    /// Order of the rows: by kind, or largest first
    #[arg(long, value_enum, default_value = "kind")]
    sort: Sort,
    /// Show exclusive and shared space
    #[arg(long)]
    shared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sort {
    Kind,
    Size,
}

pub(crate) fn du(cx: &Context, args: &DuArgs) -> Result<()> {
    let store = cx.store_to_read()?;
    if let Some(name) = &args.name {
        store.known(name)?;
    }
    let inside = args.depth.map_or(Inside::Parts, Inside::Directories);
    let mut report = count(&store, args.name.as_deref(), inside)?;
    if cx.json {
        if args.sort == Sort::Size {
            let rows = &mut report.rows;
            rows.sort_by_key(|row| Reverse(row.size.allocated));
        }
        cx.ui.json(&report)?;
    } else {
        let lines = match &args.name {
            Some(name) => detail(&report, name),
            None => overview(&report, !store.unreadable_envs()?.is_empty()),
        };
        let bars = cx.ui.settings().terminals.stdout;
        cx.ui.table(&lines.table(args.sort, bars, args.shared));
        cx.ui.data(&format!(
            "\nfile system: {} used, {} free of {}\n",
            size::bytes(report.file_system.used),
            size::bytes(report.file_system.free),
            size::bytes(report.file_system.total),
        ));
    }
    for unreadable in store.unreadable()? {
        cx.ui.warn(&unreadable.to_string());
    }
    caveats(cx, &report);
    Ok(())
}

/// Explains the limits of the numbers.
fn caveats(cx: &Context, report: &UsageReport) {
    if report.extents && !cx.json {
        cx.ui
            .detail("blocks shared by clones are counted once, where they are oldest");
    }
    if report.unshared > 0 {
        cx.ui.warn(&format!(
            "shared or compressed blocks of {} are not reported: actual sizes may be smaller",
            size::count(report.unshared, "file")
        ));
    }
    if report.unreadable > 0 {
        let first = report.problems.first().map_or("", String::as_str);
        cx.ui.warn(&format!(
            "cannot read {}, actual sizes may be larger: {first}",
            size::count(report.unreadable, "path")
        ));
    }
    for problem in &report.silent_services {
        cx.ui.warn(&format!(
            "a container service does not answer, so its disk usage is not counted: {problem}"
        ));
    }
    if report.mounts_skipped > 0 {
        let mut mounts = mounts_below(&report.store);
        mounts.retain(|mount| *mount != report.store);
        let mounts = mounts.iter().map(|mount| format!("`{}`", mount.display()));
        cx.ui.warn(&format!(
            "not counted: {} in the store: {}",
            size::count(report.mounts_skipped, "mount"),
            mounts.collect::<Vec<_>>().join(", ")
        ));
    }
}

/// A line of the report. `below` has the lines that it sums up, or its details.
struct Line {
    name: String,
    size: DiskUsage,
    note: String,
    below: Vec<Self>,
    /// Known instead of `size`, such as for data at a service: own bytes, and the bytes including parent layers.
    bytes: Option<(u64, Option<u64>)>,
}

impl Line {
    fn at_service(
        name: &str,
        engine: &str,
        own: u64,
        total: Option<u64>,
        note: impl Into<String>,
    ) -> Self {
        Self {
            bytes: Some((own, total)),
            ..Self::new(format!("{name} at {engine}"), DiskUsage::default(), note)
        }
    }

    fn held(name: &str, held: &Held, note: String) -> Self {
        Self::at_service(name, &held.engine, held.own, Some(held.total), note)
    }

    fn allocated(&self) -> u64 {
        self.bytes.map_or(self.size.allocated, |(own, _)| own)
    }

    /// Returns the cells of its row. The exclusive and shared space are empty without `shared`.
    fn cells(&self, indent: &str, bar: String, shared: bool) -> [String; 7] {
        let part = |bytes| match shared && self.bytes.is_none() {
            true => size::bytes(bytes),
            false => String::new(),
        };
        let apparent = self
            .bytes
            .map_or(Some(self.size.apparent), |(_, total)| total);
        [
            format!("{indent}{}", self.name),
            size::bytes(self.allocated()),
            bar,
            part(self.size.exclusive),
            part(self.size.shared()),
            apparent.map(size::bytes).unwrap_or_default(),
            self.note.clone(),
        ]
    }

    fn new(name: impl Into<String>, size: DiskUsage, note: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            size,
            note: note.into(),
            below: Vec::new(),
            bytes: None,
        }
    }

    /// Creates a line for one item or several similar ones, with its parts below if the rows describe them.
    fn of(name: impl Into<String>, rows: &[&UsageRow]) -> Self {
        let mut line = Self::inside(name, rows, None);
        let parts: BTreeSet<_> = rows.iter().filter_map(|row| row.part).collect();
        for part in parts {
            let alike = rows.iter().filter(|row| row.part == Some(part));
            let size: DiskUsage = alike.map(|row| row.size).sum();
            line.size += size;
            line.below.push(Self::new(part.title(), size, part.note()));
        }
        line
    }

    fn inside(name: impl Into<String>, rows: &[&UsageRow], inside: Option<&Path>) -> Self {
        let own = || {
            let own = rows.iter().filter(|row| row.part.is_none());
            own.filter(|row| row.inside.as_deref() == inside)
        };
        let note = own().find_map(|row| row.content.clone());
        let size = own().map(|row| row.size).sum();
        let mut line = Self::new(name, size, note.unwrap_or_default());
        let top = inside.unwrap_or(Path::new(""));
        let mut seen = BTreeSet::new();
        for path in rows.iter().filter_map(|row| row.inside.as_deref()) {
            if path.parent() == Some(top) && seen.insert(path) {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let part = Self::inside(name, rows, Some(path));
                line.size += part.size;
                line.below.push(part);
            }
        }
        line
    }
}

#[derive(Default)]
struct Lines {
    lines: Vec<Line>,
    /// Totals, which come last in every order.
    last: Vec<Line>,
}

impl Lines {
    /// Renders the table. `bars` shows each line's share of the largest line, `shared` the bytes that other items hold
    /// as well.
    fn table(mut self, sort: Sort, bars: bool, shared: bool) -> Table {
        fn gather(add: &mut dyn FnMut(&Line, &str), lines: &mut [Line], sort: Sort, indent: &str) {
            if sort == Sort::Size {
                lines.sort_by_key(|line| Reverse(line.allocated()));
            }
            for line in lines {
                add(line, indent);
                gather(add, &mut line.below, sort, &format!("{indent}  "));
            }
        }
        let whole = self.lines.iter().map(Line::allocated).max();
        let whole = whole.filter(|_| bars).unwrap_or(0);
        let (exclusive, others) = match shared {
            true => (">exclusive", ">shared"),
            false => (">", ">"),
        };
        let mut table = Table::new(["what", ">on disk", "", exclusive, others, ">apparent", ""]);
        let mut add = |line: &Line, indent: &str| {
            let bar = size::bar(line.allocated(), whole);
            table.row(line.cells(indent, bar, shared));
        };
        gather(&mut add, &mut self.lines, sort, "");
        for line in &self.last {
            table.row(line.cells("", String::new(), shared));
        }
        table
    }
}

/// Returns all rows of one item: the whole and its parts.
fn same<'a>(report: &'a UsageReport, row: &UsageRow) -> Vec<&'a UsageRow> {
    fn what(row: &UsageRow) -> (Class, &str, Option<&str>, &[String]) {
        (row.class, &row.name, row.snapshot.as_deref(), &row.envs)
    }
    let of = |other: &&UsageRow| what(other) == what(row);
    report.rows.iter().filter(of).collect()
}

/// Creates a line for each volume of a class that exactly these envs need, whichever snapshots froze the volume.
fn volumes(report: &UsageReport, class: Class, envs: &[String]) -> Vec<Line> {
    let mut volumes: BTreeMap<&str, Vec<&UsageRow>> = BTreeMap::new();
    for row in &report.rows {
        if row.class == class && row.envs == envs {
            volumes.entry(&row.name).or_default().push(row);
        }
    }
    let lines = volumes.into_iter();
    lines.map(|(name, rows)| Line::of(name, &rows)).collect()
}

/// The parts of an env in display order.
const PARTS: [(Class, &str); 7] = [
    (Class::Snapshots, "snapshots"),
    (Class::Frozen, "volumes in snapshots"),
    (Class::Live, "live tree"),
    (Class::Build, "build volumes"),
    (Class::Failed, "failed tree"),
    (Class::Logs, "logs"),
    (Class::Records, "records"),
];

/// Returns the lines for the whole store. If env records are `unreadable`, unused data may belong to their envs.
fn overview(report: &UsageReport, unreadable: bool) -> Lines {
    let unused = match unreadable {
        true => "may belong to an env whose record cannot be read: `rockenv fsck`",
        false => "no env needs it: `rockenv gc --dry-run` shows what it would remove",
    };
    let mut lines = Lines::default();
    for (env, freed) in &report.freed {
        let own = std::slice::from_ref(env);
        let held = report.at_services.iter().filter(|held| held.envs == own);
        let held: Vec<_> = held.filter(|held| held.class != Class::Image).collect();
        let engine = held.first().map_or("", |held| held.engine.as_str());
        let mut note = format!("`rockenv rm {env}` frees {}", size::bytes(*freed));
        if !held.is_empty() {
            let bytes = held.iter().map(|held| held.own).sum();
            note = format!("{note}, and {} at {engine}", size::bytes(bytes));
        }
        let mut line = Line::new(format!("env {env}"), DiskUsage::default(), note);
        for (class, title) in PARTS {
            let mut part = Line::new(title, report.own(env, class), "");
            line.size += part.size;
            if class == Class::Build {
                part.below = volumes(report, class, own);
            }
            if part.size.entries > 0 {
                line.below.push(part);
            }
        }
        for (class, title) in PARTS {
            if held.iter().any(|held| held.class == class) {
                let bytes = report.held(class, own);
                line.below
                    .push(Line::at_service(title, engine, bytes, None, ""));
            }
        }
        lines.lines.push(line);
    }
    for (users, size) in shared(report) {
        let note = format!("needed by {}", users.join(", "));
        let mut line = Line::new("shared snapshots", size, note);
        line.below = volumes(report, Class::Frozen, users);
        for volume in &mut line.below {
            line.size += volume.size;
            volume.name = format!("volume {}", volume.name);
        }
        lines.lines.push(line);
    }
    for row in report.rows.iter().filter(|row| row.is_whole()) {
        let name = match (row.class, row.envs.as_slice()) {
            (Class::Output, [env]) => format!("output {env}/{}", row.name),
            (Class::Image | Class::Cache | Class::Source | Class::Output, _) => {
                format!("{} {}", class_word(row.class), row.name)
            }
            _ => continue,
        };
        let mut line = Line::of(name, &same(report, row));
        if row.class == Class::Image {
            let note = needed_by(&row.envs, "no env depends on it");
            line = Line::new(line.name, row.size, note);
        }
        lines.lines.push(line);
    }
    for (class, title, note) in [
        (Class::Blobs, "downloads", ""),
        (Class::Unused, "unused", unused),
        (Class::Trash, "trash", "being deleted"),
        (Class::Other, "store metadata", ""),
    ] {
        let rows = report.rows.iter().filter(|row| row.class == class);
        let size: DiskUsage = rows.map(|row| row.size).sum();
        let empty = size.apparent == 0 && class != Class::Other;
        if !empty {
            lines.lines.push(Line::new(title, size, note));
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
        let note = needed_by(&held.envs, "no env needs it");
        lines.lines.push(Line::held(&name, held, note));
    }
    lines.last = totals(report);
    lines
}

/// Returns the store's total, and one per service. Services keep their data in their own storage, which may be on
/// another disk.
fn totals(report: &UsageReport) -> Vec<Line> {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for held in &report.at_services {
        *sums.entry(&held.engine).or_default() += held.own;
    }
    let note = "in its own storage, not in the total above";
    let at_services = sums.into_iter();
    let at_services =
        at_services.map(|(engine, sum)| Line::at_service("total", engine, sum, None, note));
    std::iter::once(Line::new("total", report.total, ""))
        .chain(at_services)
        .collect()
}

/// Returns the lines for one env: each snapshot and volume by name.
fn detail(report: &UsageReport, env: &str) -> Lines {
    let mut lines = Lines::default();
    for row in report.rows.iter().filter(|row| row.is_whole()) {
        let name = match row.class {
            Class::Frozen => format!(
                "volume {} in snapshot {}",
                row.name,
                row.snapshot.as_deref().unwrap_or_default()
            ),
            Class::Live if !row.name.is_empty() => "tree of a running step".to_owned(),
            Class::Blobs | Class::Trash | Class::Unused | Class::Other => continue,
            class => format!("{} {}", class_word(class), row.name)
                .trim_end()
                .to_owned(),
        };
        let mut notes = Vec::new();
        notes.extend(row.content.clone());
        notes.extend(also_needed(&row.envs, env));
        if row.class.is_kept() {
            notes.push("kept by `rm`".to_owned());
        }
        let mut line = Line::of(name, &same(report, row));
        let mut elsewhere = row.size.counted_elsewhere;
        if row.class == Class::Frozen {
            // Most parts are counted with the live volume and would show zero here.
            line.below.retain(|part| part.size.allocated > 0);
            elsewhere = line.size.counted_elsewhere;
        }
        if elsewhere > 0 {
            notes.push(format!(
                "and {} counted above or in other envs",
                size::bytes(elsewhere)
            ));
        }
        line.note = notes.join("; ");
        lines.lines.push(line);
    }
    for held in &report.at_services {
        let name = match held.class {
            Class::Live => "live tree".to_owned(),
            Class::Image | Class::Failed => format!("{} {}", class_word(held.class), held.name),
            _ => format!("snapshot {}", held.name),
        };
        let note = also_needed(&held.envs, env).unwrap_or_default();
        lines.lines.push(Line::held(&name, held, note));
    }
    let own = report.freed.get(env).copied().unwrap_or_default();
    let note = format!("freed by `rockenv rm {env}`");
    lines.last = totals(report);
    lines.last.push(Line {
        bytes: Some((own, None)),
        ..Line::new("only here", DiskUsage::default(), note)
    });
    lines
}

fn also_needed(envs: &[String], env: &str) -> Option<String> {
    let others = envs.iter().map(String::as_str);
    let others: Vec<&str> = others.filter(|user| *user != env).collect();
    (!others.is_empty()).then(|| format!("also needed by {}", others.join(", ")))
}

/// Sums up layers that several envs need, per set of envs.
fn shared(report: &UsageReport) -> BTreeMap<&[String], DiskUsage> {
    let mut sums: BTreeMap<&[String], DiskUsage> = BTreeMap::new();
    for row in &report.rows {
        if row.class == Class::Snapshots && row.envs.len() > 1 {
            *sums.entry(&row.envs).or_default() += row.size;
        }
    }
    sums
}

/// Returns the label in front of a row's name.
pub(super) fn class_word(class: Class) -> &'static str {
    match class {
        Class::Snapshots => "snapshot",
        Class::Frozen => "frozen volume",
        Class::Live => "live tree",
        Class::Build => "build volume",
        Class::Failed => "failed tree of",
        Class::Logs => "logs",
        Class::Records => "records",
        Class::Image => "image",
        Class::Cache => "cache",
        Class::Source => "source",
        Class::Output => "output",
        Class::Blobs | Class::Trash | Class::Unused | Class::Other => "store",
    }
}

fn needed_by(envs: &[String], nobody: &str) -> String {
    match envs {
        [] => nobody.to_owned(),
        envs => format!("needed by {}", envs.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, allocated: u64, below: Vec<Line>) -> Line {
        let size = DiskUsage {
            allocated,
            apparent: allocated,
            exclusive: 1 << 20,
            ..DiskUsage::default()
        };
        Line {
            below,
            ..Line::new(name, size, "")
        }
    }

    #[test]
    fn bars_are_shares_of_the_largest_and_only_for_terminals() {
        let lines = || Lines {
            lines: vec![
                line("image", 3 << 20, Vec::new()),
                line("env", 4 << 20, vec![line("logs", 1 << 20, Vec::new())]),
            ],
            last: vec![Line::new("total", DiskUsage::default(), "")],
        };
        insta::assert_snapshot!(lines().table(Sort::Size, true, false).render(), @r"
        what    on disk                apparent
        env     4.0 MiB  ████████████   4.0 MiB
          logs  1.0 MiB  ███            1.0 MiB
        image   3.0 MiB  █████████      3.0 MiB
        total       0 B                     0 B
        ");
        insta::assert_snapshot!(lines().table(Sort::Kind, false, false).render(), @r"
        what    on disk  apparent
        image   3.0 MiB   3.0 MiB
        env     4.0 MiB   4.0 MiB
          logs  1.0 MiB   1.0 MiB
        total       0 B       0 B
        ");
        insta::assert_snapshot!(lines().table(Sort::Kind, false, true).render(), @r"
        what    on disk  exclusive   shared  apparent
        image   3.0 MiB    1.0 MiB  2.0 MiB   3.0 MiB
        env     4.0 MiB    1.0 MiB  3.0 MiB   4.0 MiB
          logs  1.0 MiB    1.0 MiB      0 B   1.0 MiB
        total       0 B        0 B      0 B       0 B
        ");
    }
}
