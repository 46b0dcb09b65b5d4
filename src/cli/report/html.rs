//! Owns the HTML page: one file with its style, its plots and a short script, which loads nothing else.
//!
//! Names and log lines are untrusted. Any text not written here goes through [`text`]. The page's own policy forbids
//! every script but the one with the named digest, and every address.

use std::fmt::Write as _;

use base64::Engine as _;
use sha2::{Digest as _, Sha256};

use super::plot::{self, Curve, Quantity};
use super::timeline::Axis;
use super::{MARK, Report, millis, took, word};
use crate::plan::record::Outcome;
use crate::ui::size;
use crate::ui::text::escape;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("hover.js");

/// Escapes text for an element or a quoted attribute.
fn text(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in escape(text).chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

/// Returns a sentence with text in backquotes shown as code.
fn prose(sentence: &str) -> String {
    let mut html = String::new();
    let parts: Vec<&str> = sentence.split('`').collect();
    for (at, part) in parts.iter().enumerate() {
        // An unpaired backquote is a normal character.
        match at % 2 {
            1 if at + 1 < parts.len() => {
                write!(html, "<code>{}</code>", text(part)).expect("a string");
            }
            1 => write!(html, "`{}", text(part)).expect("a string"),
            _ => html.push_str(&text(part)),
        }
    }
    html
}

#[derive(Clone, Copy)]
enum Column {
    Name(&'static str),
    Text(&'static str),
    Number(&'static str),
    Bar,
}

enum Cell {
    Text(String),
    /// HTML made by this module.
    Ready(String),
    /// A share of the largest, from 0 to 1.
    Share(f64),
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::Text(text.as_ref().to_owned())
    }
}

fn share(part: u64, whole: u64) -> Cell {
    Cell::Share(part as f64 / whole.max(1) as f64)
}

fn table(columns: &[Column], rows: impl IntoIterator<Item = Vec<Cell>>) -> String {
    let class = |column: &Column| match column {
        Column::Name(_) => " class=\"name\"",
        Column::Text(_) => "",
        Column::Number(_) => " class=\"number\"",
        Column::Bar => " class=\"bar\"",
    };
    let title = |column: &Column| match column {
        Column::Name(title) | Column::Text(title) | Column::Number(title) => *title,
        Column::Bar => "",
    };
    let mut html = String::from("<div class=\"card wide\"><table>");
    if columns.iter().any(|column| !title(column).is_empty()) {
        html.push_str("<thead><tr>");
        for column in columns {
            write!(html, "<th{}>{}</th>", class(column), title(column)).expect("a string");
        }
        html.push_str("</tr></thead>");
    }
    html.push_str("<tbody>");
    for row in rows {
        html.push_str("<tr>");
        for (column, cell) in columns.iter().zip(row) {
            let inside = match cell {
                Cell::Text(said) => text(&said),
                Cell::Ready(html) => html,
                Cell::Share(share) => format!(
                    "<svg viewBox=\"0 0 100 6\" preserveAspectRatio=\"none\" aria-hidden=\"true\"><rect width=\"{:.1}\" height=\"6\"/></svg>",
                    share.clamp(0.0, 1.0) * 100.0
                ),
            };
            write!(html, "<td{}>{inside}</td>", class(column)).expect("a string");
        }
        html.push_str("</tr>");
    }
    html + "</tbody></table></div>"
}

pub fn html(report: &Report) -> String {
    let digest = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(SCRIPT));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"generator\" content=\"{MARK}\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'sha256-{digest}'\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{} – rockenv report</title>\n<style>\n{STYLE}</style>\n\
         </head>\n<body>\n",
        text(&report.env)
    );
    header(&mut page, report);
    let axis = Axis::new(
        report
            .runs
            .iter()
            .map(|run| (run.began_ms(), run.ended.as_millisecond())),
    );
    if !report.runs.is_empty() {
        timeline(&mut page, report, &axis);
    }
    if !report.tail.is_empty() {
        section(&mut page, "failure", "End of the failed step's log");
        let lines: Vec<String> = report.tail.iter().map(|line| text(line)).collect();
        write!(
            page,
            "<div class=\"card\"><pre>{}</pre></div>",
            lines.join("\n")
        )
        .expect("a string");
    }
    steps(&mut page, report);
    compilation(&mut page, report);
    space(&mut page, report);
    origin(&mut page, report);
    write!(
        page,
        "<footer>{}</footer>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        text(&report.written_by())
    )
    .expect("a string");
    page
}

fn section(page: &mut String, id: &str, title: &str) {
    write!(page, "\n<h2 id=\"{id}\">{title}</h2>\n").expect("a string");
}

fn header(page: &mut String, report: &Report) {
    let verdict = report.verdict.name();
    write!(
        page,
        "<header>\n<p class=\"brand\">rockenv report</p>\n<div class=\"title\"><h1>{}</h1><span class=\"badge {verdict}\">{verdict}</span></div>\n\
         <p>{}</p>\n<p class=\"soft\">profile {} · {}</p>\n<dl class=\"totals\">",
        text(&report.env),
        prose(&report.summary),
        text(&report.profile),
        text(&report.targets())
    )
    .expect("a string");
    for (name, value) in report.totals() {
        write!(page, "<div><dt>{name}</dt><dd>{value}</dd></div>").expect("a string");
    }
    page.push_str("</dl>\n</header>\n");
}

fn timeline(page: &mut String, report: &Report, axis: &Axis) {
    section(page, "timeline", "Timeline");
    page.push_str("<div class=\"card plots\">\n");
    for (at, step) in report.steps.iter().enumerate() {
        let took = match step.cost {
            Some(cost) => millis(cost.wall_ms),
            None => word(step.outcome).to_owned(),
        };
        writeln!(
            page,
            "<div class=\"row step\"><div class=\"label\"><b>{}</b><span>{took}</span></div><div class=\"over\">{}<i class=\"cursor\"></i></div></div>",
            text(&step.name),
            plot::lane(report, at, axis)
        )
        .expect("a string");
    }
    times(page, axis);
    let mut missing = Vec::new();
    for quantity in Quantity::ALL {
        let Some(curve) = Curve::of(quantity, report, axis) else {
            missing.push(quantity.title().to_lowercase());
            continue;
        };
        let limit = curve.limit.map(|limit| match quantity {
            Quantity::Processors => format!(" of {limit:.0}"),
            _ => format!(", limit {}", quantity.show(limit)),
        });
        writeln!(
            page,
            "<div class=\"row quantity {}\"><div class=\"label\"><b>{}</b><small>at most {}{}</small><small>{}</small><output></output></div>\
             <div class=\"over\">{}<i class=\"cursor\"></i></div></div>",
            quantity.class(),
            quantity.title(),
            quantity.show(curve.peak),
            limit.unwrap_or_default(),
            quantity.explanation(),
            plot::chart(quantity, &curve, axis),
        )
        .expect("a string");
    }
    times(page, axis);
    page.push_str("</div>\n");
    if !axis.cuts().is_empty() {
        page.push_str("<p class=\"soft\">Dotted lines: idle time is cut out.</p>\n");
    }
    if !missing.is_empty() {
        let missing = missing.join(", ");
        writeln!(page, "<p class=\"soft\">Not counted here: {missing}.</p>").expect("a string");
    }
}

fn times(page: &mut String, axis: &Axis) {
    page.push_str("<div class=\"row times\"><div></div><div class=\"over\">");
    for (at, after) in axis.ticks() {
        let class = if at > 0.93 { " class=\"last\"" } else { "" };
        let after = u64::try_from(after).unwrap_or(0);
        write!(
            page,
            "<span{class} style=\"left:{:.2}%\">{}</span>",
            at * 100.0,
            tick(after)
        )
        .expect("a string");
    }
    page.push_str("</div></div>\n");
}

/// Formats a round time, short.
fn tick(millis: u64) -> String {
    let (unit, word) = match millis {
        0 => return "0".to_owned(),
        3_600_000.. if millis.is_multiple_of(3_600_000) => (3_600_000, "h"),
        60_000.. if millis.is_multiple_of(60_000) => (60_000, "min"),
        1000.. if millis.is_multiple_of(1000) => (1000, "s"),
        1000.. => return format!("{:.1} s", millis as f64 / 1000.0),
        _ => (1, "ms"),
    };
    format!("{} {word}", millis / unit)
}

fn steps(page: &mut String, report: &Report) {
    section(page, "steps", "Steps");
    let longest = report.steps.iter().filter_map(|step| step.cost);
    let longest = longest.map(|cost| cost.wall_ms).max().unwrap_or(0);
    let rows = report.steps.iter().map(|step| {
        let class = match step.outcome {
            Outcome::Done => "done",
            Outcome::Failed => "failed",
            _ => "other",
        };
        let mut state = format!("<span class=\"word {class}\">{}</span>", word(step.outcome));
        if let Some(reason) = &step.reason
            && step.outcome != Outcome::Done
        {
            write!(state, "<br><span class=\"soft\">{}</span>", prose(reason)).expect("a string");
        }
        let mut row = vec![Cell::from(&step.name), Cell::Ready(state)];
        match step.cost {
            Some(cost) => {
                row.push(share(cost.wall_ms, longest));
                row.extend(took(cost).map(Cell::from));
            }
            None => row.extend((0..6).map(|_| Cell::from(""))),
        }
        row
    });
    let columns = [
        Column::Name("step"),
        Column::Text("state"),
        Column::Bar,
        Column::Number("time"),
        Column::Number("processors"),
        Column::Number("memory"),
        Column::Number("with page cache"),
        Column::Number("disk"),
    ];
    page.push_str(&table(&columns, rows));
    if !report.left_out.is_empty() {
        section(page, "skipped", "Left out");
        facts(page, &report.left_out);
    }
}

fn facts(page: &mut String, facts: &[super::Fact]) {
    let rows = facts
        .iter()
        .map(|fact| vec![Cell::from(&fact.name), Cell::from(&fact.value)]);
    page.push_str(&table(&[Column::Name(""), Column::Name("")], rows));
}

fn compilation(page: &mut String, report: &Report) {
    if !report.builds.is_empty() {
        section(page, "builds", "Ninja builds");
        let most = report.builds.iter().map(|build| build.busy_ms).max();
        let rows = report.builds.iter().map(|build| {
            vec![
                Cell::from(&build.directory),
                share(build.busy_ms, most.unwrap_or(0)),
                Cell::from(millis(build.busy_ms)),
                Cell::from(build.edges.to_string()),
            ]
        });
        let columns = [
            Column::Name("directory"),
            Column::Bar,
            Column::Number("sum of commands"),
            Column::Number("commands"),
        ];
        page.push_str(&table(&columns, rows));
    }
    if !report.slowest.is_empty() {
        section(page, "slowest", "Longest commands");
        let most = report.slowest.iter().map(|edge| edge.took_ms).max();
        let rows = report.slowest.iter().map(|edge| {
            vec![
                Cell::from(&edge.output),
                Cell::from(&edge.directory),
                share(edge.took_ms, most.unwrap_or(0)),
                Cell::from(millis(edge.took_ms)),
            ]
        });
        let columns = [
            Column::Name("makes"),
            Column::Name("in"),
            Column::Bar,
            Column::Number("time"),
        ];
        page.push_str(&table(&columns, rows));
    }
    if !report.caches.is_empty() {
        section(page, "caches", "Caches");
        let rows = report.caches.iter().map(|cache| {
            let lookups = cache.lookups.map_or_else(String::new, |(hits, misses)| {
                match (hits * 100).checked_div(hits + misses) {
                    Some(percent) => format!("{hits} of {} ({percent} %)", hits + misses),
                    None => "none".to_owned(),
                }
            });
            vec![
                Cell::from(&cache.name),
                Cell::from(cache.content.as_deref().unwrap_or("")),
                Cell::from(lookups),
                Cell::from(size::bytes(cache.bytes)),
                Cell::from(cache.max.map(size::bytes).unwrap_or_default()),
            ]
        });
        let columns = [
            Column::Name("cache"),
            Column::Text("content"),
            Column::Number("total hits"),
            Column::Number("on disk"),
            Column::Number("at most"),
        ];
        page.push_str(&table(&columns, rows));
    }
}

fn space(page: &mut String, report: &Report) {
    if report.space.is_empty() {
        return;
    }
    section(page, "space", "Largest on disk");
    let most = report.space.iter().map(|space| space.bytes).max();
    let rows = report.space.iter().map(|space| {
        vec![
            Cell::from(&space.name),
            Cell::from(&space.note),
            share(space.bytes, most.unwrap_or(0)),
            Cell::from(size::bytes(space.bytes)),
        ]
    });
    let columns = [
        Column::Name("what"),
        Column::Text(""),
        Column::Bar,
        Column::Number("on disk"),
    ];
    page.push_str(&table(&columns, rows));
}

fn origin(page: &mut String, report: &Report) {
    section(page, "environment", "Build environment and inputs");
    facts(page, &report.facts);
    if !report.lock.is_empty() {
        section(page, "lock", "Locked");
        facts(page, &report.lock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::{Fact, Step};

    #[test]
    fn whatever_a_name_is_it_is_text() {
        let hostile = "<script>alert('\"&')</script>\x1b\u{202e}";
        let report = Report {
            env: hostile.to_owned(),
            profile: hostile.to_owned(),
            targets: vec![hostile.to_owned()],
            summary: hostile.to_owned(),
            tail: vec![hostile.to_owned()],
            steps: vec![Step {
                name: hostile.to_owned(),
                outcome: Outcome::Failed,
                reason: Some(hostile.to_owned()),
                cost: None,
            }],
            left_out: vec![Fact::new(hostile, hostile)],
            facts: vec![Fact::new(hostile, hostile)],
            ..Report::default()
        };
        let page = html(&report);
        assert_eq!(page.matches("<script").count(), 1);
        assert!(!page.contains("alert('"));
        assert!(!page.contains(['\x1b', '\u{202e}']));
        let shown = "&lt;script&gt;alert(&#39;&quot;&amp;&#39;)&lt;/script&gt;\\x1b\\u{202e}";
        assert_eq!(page.matches(shown).count(), 12);
    }

    #[test]
    fn code_is_what_has_both_quotes() {
        assert_eq!(
            prose("step `a<b` is `it`"),
            "step <code>a&lt;b</code> is <code>it</code>"
        );
        assert_eq!(prose("one ` only"), "one ` only");
        assert_eq!(prose(""), "");
    }

    #[test]
    fn the_page_asks_for_nothing() {
        let page = html(&Report::default());
        for word in ["http:", "https:", "src=", "@import", "url("] {
            assert!(!page.contains(word), "{word}");
        }
        // The policy names the digest of the actual script.
        let inside = page.split("<script>").nth(1).unwrap();
        let inside = inside.split("</script>").next().unwrap();
        let digest = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(inside));
        assert!(page.contains(&format!("'sha256-{digest}'")));
    }

    #[test]
    fn round_times_are_short() {
        let shown = [0, 20, 1500, 10_000, 120_000, 7_200_000, 5_400_000].map(tick);
        assert_eq!(
            shown,
            ["0", "20 ms", "1.5 s", "10 s", "2 min", "2 h", "90 min"]
        );
    }
}
