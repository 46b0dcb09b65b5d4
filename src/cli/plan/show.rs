//! Owns the output of `plan`: the summary, the machine's part, the steps and the starting points, in 80 columns.

use std::collections::BTreeMap;
use std::time::Duration;

use super::PlanReport;
use crate::engine::choose::Reason;
use crate::plan::savings::{Figure, StartingPoint};
use crate::plan::{Action, Plan, PlanStep, Volumes};
use crate::profile::FROM_SOURCE;
use crate::store::Store;
use crate::ui::table::Table;
use crate::ui::text::wrap;
use crate::ui::{Tone, Ui, size};
use crate::up::select::Selection;

const COLUMNS: usize = 80;
/// Width of the labels on the left.
const NAME: usize = 7;

/// Shows everything except the notes.
pub(super) fn show(
    ui: &Ui,
    report: &PlanReport<'_>,
    selection: &Selection,
    store: Option<&Store>,
    is_verbose: bool,
) {
    summary(ui, report);
    ui.data("\n");
    row(ui, "image", report.image);
    let engine = match &selection.choice.reason {
        Reason::Absent(_) => format!("planned for {}, which cannot be used here", report.engine),
        reason => format!("{} ({reason})", report.engine),
    };
    row(ui, "engine", &engine);
    let store = store.map_or_else(
        || "none yet".to_owned(),
        |store| format!("{} at {}", store.method(), store.root().display()),
    );
    row(ui, "store", &store);
    for (name, text) in report.needs.rows() {
        row(ui, name, &text);
    }
    let gpu = report.gpu.map(ToString::to_string);
    row(ui, "gpu", gpu.as_deref().unwrap_or("none"));
    if let Some(writes) = report.host_writes {
        row(ui, "writes", &writes.planned());
    }
    for said in report.fingerprints {
        row(ui, "keys", &said.to_string());
    }
    ui.data("\n");
    steps(ui, report, is_verbose);
    if report.from == FROM_SOURCE && report.plan.runs() > 0 {
        starting_points(ui, report.ways);
    }
}

/// Shows what `up` would do, or every reason why it would refuse.
fn summary(ui: &Ui, report: &PlanReport<'_>) {
    let env = report.env;
    if let Some(refused) = report.refused {
        ui.headline(Tone::Bad, &format!("{env}: `up` would refuse"));
        for reason in &refused.reasons {
            paragraph(ui, "  - ", reason);
        }
        paragraph(ui, "help: ", &ui.settings().hint(&refused.help));
        return;
    }
    let count = |action| {
        let steps = report.plan.steps.iter();
        steps.filter(|step| step.action == action).count()
    };
    let steps = |count| size::count(count, "step");
    let mut parts = Vec::new();
    for (verb, count) in [("pull", count(Action::Pull)), ("run", count(Action::Run))] {
        if count > 0 {
            parts.push(format!("{verb} {}", steps(count)));
        }
    }
    let text = if report.plan.is_empty() {
        format!("{env}: up to date, nothing to do")
    } else if parts.is_empty() {
        format!("{env}: `up` would restore a snapshot, and run no step")
    } else {
        let time = report.needs.forecast_time();
        let time = time.map(|time| format!(", in about {}", size::duration(time)));
        let time = time.unwrap_or_default();
        format!("{env}: `up` would {}{time}", parts.join(" and "))
    };
    ui.headline(Tone::Good, &text);
}

fn row(ui: &Ui, name: &str, text: &str) {
    paragraph(ui, &format!("{name:<NAME$}"), text);
}

fn paragraph(ui: &Ui, begin: &str, text: &str) {
    let indent = " ".repeat(begin.len());
    let lines = wrap(text, COLUMNS - begin.len());
    ui.data(&format!("{begin}{}\n", lines.join(&format!("\n{indent}"))));
}

fn steps(ui: &Ui, report: &PlanReport<'_>, is_verbose: bool) {
    let is_hidden = |step: &&PlanStep| {
        let other = report.other_choices.contains(step.name.as_str());
        matches!(step.action, Action::Skip | Action::Later) && other && !is_verbose
    };
    let shown = report.plan.steps.iter().filter(|step| !is_hidden(step));
    let table = Table::of(["step", "plan", "why"], shown, |step| {
        let word = match step.action {
            Action::Hit => "have",
            Action::Pull => "pull",
            Action::Run => "run",
            Action::Skip => "skip",
            Action::Later => "later",
        };
        [&step.name, word, &step.why].map(str::to_owned)
    });
    ui.table(&table.within(COLUMNS));
    let hidden = report.plan.steps.iter().filter(is_hidden).count();
    if hidden > 0 {
        let what = match hidden {
            1 => "1 step of another variant or starting point is".to_owned(),
            many => format!("{many} steps of other variants or starting points are"),
        };
        ui.data(&format!("{what} not shown; `-v` shows all\n"));
    }
}

/// Returns the note about what happens to build volumes.
pub(super) fn build_volumes(plan: &Plan) -> String {
    let word = match plan.volumes {
        Volumes::Live => "are kept",
        Volumes::Restored => "are restored from the previous snapshot",
        Volumes::Fresh => "start empty",
    };
    format!("build volumes {word}")
}

/// Shows the starting points with known savings.
fn starting_points(ui: &Ui, ways: &[StartingPoint]) {
    let ways: Vec<&StartingPoint> = ways.iter().filter(|way| way.saves() != (0, 0)).collect();
    if ways.is_empty() {
        return;
    }
    let table = Table::of(["--from", "saves", "disk", "without"], &ways, |way| {
        let (seconds, disk) = way.saves();
        let time = size::duration(Duration::from_secs(seconds));
        let time = match way.figures.iter().any(|figure| figure.limit) {
            _ if seconds == 0 => String::new(),
            true => format!("up to {time}"),
            false => time,
        };
        let disk = match disk {
            0 => String::new(),
            bytes => size::bytes(bytes),
        };
        [way.name.clone(), time, disk, way.leaves_out.join(", ")]
    });
    ui.data("\n");
    ui.table(&table.within(COLUMNS));
    ui.data(&sources(&ways));
}

/// Returns the sources of the starting points' figures, each source once.
fn sources(ways: &[&StartingPoint]) -> String {
    let mut sources: BTreeMap<(bool, &str), Vec<&Figure>> = BTreeMap::new();
    for figure in ways.iter().flat_map(|way| &way.figures) {
        let known = sources.entry((figure.limit, &figure.source)).or_default();
        if !known.contains(&figure) {
            known.push(figure);
        }
    }
    let mut text = String::new();
    for ((is_limit, source), figures) in sources {
        let figures: Vec<String> = figures.into_iter().map(shown).collect();
        let what = if is_limit {
            "time limits, not measured, of "
        } else {
            ""
        };
        let line = format!("{}: {what}{source}", figures.join(", "));
        text.push_str(&wrap(&line, COLUMNS - 2).join("\n  "));
        text.push('\n');
    }
    text
}

fn shown(figure: &Figure) -> String {
    let mut text = figure.step.to_string();
    if let Some(seconds) = figure.seconds {
        let time = size::duration(Duration::from_secs(seconds));
        text.extend([" ", &time]);
    }
    if let Some(bytes) = figure.disk {
        text.extend([" ", &size::bytes(bytes)]);
    }
    text
}
