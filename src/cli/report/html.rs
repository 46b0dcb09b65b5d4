//! Owns the HTML page: one file with its style, its plots and a short script, which loads nothing else.
//!
//! Names and log lines are untrusted. The template escapes them, and [`text`] escapes their control characters. The
//! page's content security policy forbids all scripts except the one with the given digest, and all network addresses.

use base64::Engine as _;
use maud::{DOCTYPE, Markup, PreEscaped, html as markup};
use sha2::{Digest as _, Sha256};

use super::plot::{self, Curve, Quantity};
use super::timeline::Axis;
use super::{EnvReport, MARK, millis, took, word};
use crate::plan::record::Outcome;
use crate::ui::size;
use crate::ui::text::escape;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("hover.js");

/// Renders untrusted text.
fn text(text: impl AsRef<str>) -> Markup {
    markup! { (escape(text.as_ref())) }
}

/// Renders a sentence with backquoted text as code.
fn prose(sentence: &str) -> Markup {
    let parts: Vec<&str> = sentence.split('`').collect();
    markup! {
        @for (at, part) in parts.iter().enumerate() {
            @if at % 2 == 0 {
                (text(part))
            } @else if at + 1 < parts.len() {
                code { (text(part)) }
            } @else {
                // An unpaired backquote is an ordinary character.
                "`" (text(part))
            }
        }
    }
}

/// CSS class and title of a column.
type Column = (Option<&'static str>, &'static str);

const BAR: Column = (Some("bar"), "");

fn name(title: &'static str) -> Column {
    (Some("name"), title)
}

fn number(title: &'static str) -> Column {
    (Some("number"), title)
}

/// Renders a bar with the length of `part` relative to `whole`.
fn share(part: u64, whole: u64) -> Markup {
    let width = (part as f64 / whole.max(1) as f64).clamp(0.0, 1.0) * 100.0;
    markup! {
        svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true" {
            rect width=(format!("{width:.1}")) height="6" {}
        }
    }
}

fn table(columns: &[Column], rows: impl IntoIterator<Item = Vec<Markup>>) -> Markup {
    let has_titles = columns.iter().any(|(_, title)| !title.is_empty());
    markup! {
        div class="card wide" {
            table class=[has_titles.then_some("titled")] {
                @if has_titles {
                    thead {
                        tr {
                            @for (class, title) in columns { th class=[class] { (title) } }
                        }
                    }
                }
                tbody {
                    @for row in rows {
                        tr {
                            @for ((class, title), cell) in columns.iter().zip(row) {
                                td class=[class] data-title=[Some(title).filter(|title| !title.is_empty())] { (cell) }
                            }
                        }
                    }
                }
            }
        }
    }
}

pub(crate) fn html(report: &EnvReport) -> String {
    let digest = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(SCRIPT));
    let policy =
        format!("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'");
    let axis = Axis::new(
        report
            .runs
            .iter()
            .map(|run| (run.began_ms(), run.ended.as_millisecond())),
    );
    let page = markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="generator" content=(MARK);
                meta http-equiv="Content-Security-Policy" content=(policy);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (text(&report.env)) " – rockenv report" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (header(report))
                @if !report.runs.is_empty() { (timeline(report, &axis)) }
                @if !report.tail.is_empty() {
                    (section("failure", "End of the failed step's log"))
                    div class="card" {
                        pre {
                            @for (at, line) in report.tail.iter().enumerate() {
                                @if at > 0 { "\n" }
                                (text(line))
                            }
                        }
                    }
                }
                (steps(report))
                (compilation(report))
                (space(report))
                (facts("environment", "Build environment and inputs", &report.facts))
                (facts("lock", "Locked", &report.lock))
                footer { (text(report.written_by())) }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    page.into_string()
}

fn section(id: &str, title: &str) -> Markup {
    markup! { h2 id=(id) { (title) } }
}

/// Renders a section with a table; empty if the table has no rows.
fn listing(
    id: &str,
    title: &str,
    columns: &[Column],
    rows: impl IntoIterator<Item = Vec<Markup>>,
) -> Markup {
    let rows: Vec<_> = rows.into_iter().collect();
    markup! {
        @if !rows.is_empty() {
            (section(id, title))
            (table(columns, rows))
        }
    }
}

fn header(report: &EnvReport) -> Markup {
    let verdict = report.verdict.name();
    markup! {
        header {
            p class="brand" { "rockenv report" }
            div class="title" {
                h1 { (text(&report.env)) }
                span class={ "badge " (verdict) } { (verdict) }
            }
            p { (prose(&report.summary)) }
            p class="soft" { "profile " (text(&report.profile)) " · " (text(report.targets())) }
            dl class="totals" {
                @for (name, value) in report.totals() {
                    div { dt { (name) } dd { (value) } }
                }
            }
        }
    }
}

fn timeline(report: &EnvReport, axis: &Axis) -> Markup {
    let curves = Quantity::ALL.map(|quantity| (quantity, Curve::of(quantity, report, axis)));
    let missing = curves.iter().filter(|(_, curve)| curve.is_none());
    let missing: Vec<String> = missing.map(|(quantity, _)| quantity.name()).collect();
    markup! {
        (section("timeline", "Timeline"))
        div class="card plots" {
            @for (at, step) in report.steps.iter().enumerate() {
                div class="row step" {
                    div class="label" {
                        b { (text(&step.name)) }
                        span {
                            @match step.cost {
                                Some(cost) => (millis(cost.wall_ms)),
                                None => (word(step.outcome)),
                            }
                        }
                    }
                    div class="over" { (plot::lane(report, at, axis)) i class="cursor" {} }
                }
            }
            (times(axis))
            @for (quantity, curve) in &curves {
                @if let Some(curve) = curve { (plotted(*quantity, curve, axis)) }
            }
            (times(axis))
        }
        @if !axis.cuts().is_empty() {
            p class="soft" { "Dotted lines: idle time is cut out." }
        }
        @if !missing.is_empty() {
            p class="soft" { "Not counted here: " (missing.join(", ")) "." }
        }
    }
}

fn plotted(quantity: Quantity, curve: &Curve, axis: &Axis) -> Markup {
    let limit = curve.limit.map(|limit| match quantity {
        Quantity::Processors => format!(" of {limit:.0}"),
        _ => format!(", limit {}", quantity.show(limit)),
    });
    markup! {
        div class={ "row quantity " (quantity.name()) } {
            div class="label" {
                b { (quantity.title()) }
                small { "at most " (quantity.show(curve.peak)) (limit.unwrap_or_default()) }
                small { (quantity.explanation()) }
                output {}
            }
            div class="over" { (plot::chart(quantity, curve, axis)) i class="cursor" {} }
        }
    }
}

fn times(axis: &Axis) -> Markup {
    markup! {
        div class="row times" {
            div {}
            div class="over" {
                @for (at, after) in axis.ticks() {
                    span class=[(at > 0.93).then_some("last")] style=(format!("left:{:.2}%", at * 100.0)) {
                        (tick(u64::try_from(after).unwrap_or(0)))
                    }
                }
            }
        }
    }
}

/// Formats a round time in short form.
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

fn steps(report: &EnvReport) -> Markup {
    let longest = report.steps.iter().filter_map(|step| step.cost);
    let longest = longest.map(|cost| cost.wall_ms).max().unwrap_or(0);
    let rows = report.steps.iter().map(|step| {
        let class = match step.outcome {
            Outcome::Done => "done",
            Outcome::Failed => "failed",
            _ => "other",
        };
        let reason = step.reason.as_ref();
        let mut row = vec![
            text(&step.name),
            markup! {
                span class={ "word " (class) } { (word(step.outcome)) }
                @if let Some(reason) = reason.filter(|_| step.outcome != Outcome::Done) {
                    br;
                    span class="soft" { (prose(reason)) }
                }
            },
        ];
        match step.cost {
            Some(cost) => {
                row.push(share(cost.wall_ms, longest));
                row.extend(took(cost).map(text));
            }
            None => row.extend((0..6).map(|_| text(""))),
        }
        row
    });
    let columns = [
        name("step"),
        (None, "state"),
        BAR,
        number("time"),
        number("processors"),
        number("memory"),
        number("with page cache"),
        number("disk"),
    ];
    markup! {
        (section("steps", "Steps"))
        (table(&columns, rows))
        (facts("skipped", "Left out", &report.left_out))
    }
}

fn facts(id: &str, title: &str, facts: &[super::Fact]) -> Markup {
    let row = |fact: &super::Fact| vec![text(&fact.name), text(&fact.value)];
    listing(id, title, &[name(""), name("")], facts.iter().map(row))
}

fn compilation(report: &EnvReport) -> Markup {
    let busiest = report.builds.iter().map(|build| build.busy_ms).max();
    let builds = report.builds.iter().map(|build| {
        vec![
            text(&build.directory),
            share(build.busy_ms, busiest.unwrap_or(0)),
            text(millis(build.busy_ms)),
            text(build.edges.to_string()),
        ]
    });
    let longest = report.slowest.iter().map(|edge| edge.took_ms).max();
    let slowest = report.slowest.iter().map(|edge| {
        vec![
            text(&edge.output),
            text(&edge.directory),
            share(edge.took_ms, longest.unwrap_or(0)),
            text(millis(edge.took_ms)),
        ]
    });
    let caches = report.caches.iter().map(|cache| {
        let lookups = cache.lookups.map_or_else(String::new, |(hits, misses)| {
            match (hits * 100).checked_div(hits + misses) {
                Some(percent) => format!("{hits} of {} ({percent} %)", hits + misses),
                None => "none".to_owned(),
            }
        });
        vec![
            text(&cache.name),
            text(cache.content.as_deref().unwrap_or("")),
            text(lookups),
            text(size::bytes(cache.bytes)),
            text(cache.max.map(size::bytes).unwrap_or_default()),
        ]
    });
    markup! {
        (listing("builds", "Ninja builds", &[name("directory"), BAR, number("sum of commands"), number("commands")], builds))
        (listing("slowest", "Longest commands", &[name("makes"), name("in"), BAR, number("time")], slowest))
        (listing("caches", "Caches", &[name("cache"), (None, "content"), number("total hits"), number("on disk"), number("at most")], caches))
    }
}

fn space(report: &EnvReport) -> Markup {
    let most = report.space.iter().map(|space| space.bytes).max();
    let rows = report.space.iter().map(|space| {
        vec![
            text(&space.name),
            text(&space.note),
            share(space.bytes, most.unwrap_or(0)),
            text(size::bytes(space.bytes)),
        ]
    });
    let columns = [name("what"), (None, ""), BAR, number("on disk")];
    listing("space", "Largest on disk", &columns, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::{Fact, StepRow};

    #[test]
    fn whatever_a_name_is_it_is_text() {
        let hostile = "<script>alert('\"&')</script>\x1b\u{202e}";
        let report = EnvReport {
            env: hostile.to_owned(),
            profile: hostile.to_owned(),
            targets: vec![hostile.to_owned()],
            summary: hostile.to_owned(),
            tail: vec![hostile.to_owned()],
            steps: vec![StepRow {
                name: hostile.to_owned(),
                outcome: Outcome::Failed,
                reason: Some(hostile.to_owned()),
                cost: None,
            }],
            left_out: vec![Fact::new(hostile, hostile)],
            facts: vec![Fact::new(hostile, hostile)],
            ..EnvReport::default()
        };
        let page = html(&report);
        assert_eq!(page.matches("<script").count(), 1);
        assert!(!page.contains("<script>alert"));
        assert!(!page.contains(['\x1b', '\u{202e}']));
        let shown = "&lt;script&gt;alert('&quot;&amp;')&lt;/script&gt;\\x1b\\u{202e}";
        assert_eq!(page.matches(shown).count(), 12);
        // On narrow screens the title appears beside the value.
        assert_has!(page, "<td data-title=\"state\">");
    }

    #[test]
    fn code_is_what_has_both_quotes() {
        assert_eq!(
            prose("step `a<b` is `it`").0,
            "step <code>a&lt;b</code> is <code>it</code>"
        );
        assert_eq!(prose("one ` only").0, "one ` only");
        assert_eq!(prose("").0, "");
    }

    #[test]
    fn the_page_asks_for_nothing() {
        let page = html(&EnvReport::default());
        for word in ["http:", "https:", "src=", "@import", "url("] {
            assert!(!page.contains(word), "{word}");
        }
        // The policy contains the digest of the actual script.
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
