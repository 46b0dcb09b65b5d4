//! Owns the report as Markdown, for an issue, a merge request or a terminal.

use std::fmt::Write as _;

use super::{EnvReport, Fact, MARK, millis, took, word};
use crate::plan::record::Outcome;
use crate::ui::size;
use crate::ui::text::escape;

/// Escapes text for one line or table cell so that Markdown shows it literally.
pub(crate) fn text(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in escape(text).chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            // Prevents a mention of a user with that name.
            '@' => safe.push_str("&#64;"),
            '\\' | '|' | '`' | '*' | '_' | '[' | ']' | '#' | '~' | '>' | '!' => {
                safe.push('\\');
                safe.push(c);
            }
            c => safe.push(c),
        }
    }
    safe
}

/// Appends a table. A title that begins with `>` marks a numeric column.
pub(crate) fn table(
    page: &mut String,
    titles: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
) {
    let columns = titles.iter().map(|title| match title.strip_prefix('>') {
        Some(title) => (title, "---:"),
        None => (*title, "---"),
    });
    let (titles, rules): (Vec<&str>, Vec<&str>) = columns.unzip();
    let [titles, rules] = [titles, rules].map(|cells| cells.join(" | "));
    write!(page, "\n| {titles} |\n| {rules} |\n").expect("a string");
    for row in rows {
        writeln!(page, "| {} |", row.join(" | ")).expect("a string");
    }
}

/// Appends a section with a table, unless the table has no rows.
fn section(
    page: &mut String,
    title: &str,
    titles: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
) {
    let mut rows = rows.into_iter().peekable();
    if rows.peek().is_some() {
        write!(page, "\n## {title}\n").expect("a string");
        table(page, titles, rows);
    }
}

fn facts(page: &mut String, title: &str, facts: &[Fact]) {
    let row = |fact: &Fact| vec![text(&fact.name), text(&fact.value)];
    section(page, title, &["what", ""], facts.iter().map(row));
}

pub(crate) fn markdown(report: &EnvReport) -> String {
    let totals = report.totals().into_iter();
    let totals: Vec<String> = totals
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    let mut page = format!(
        "<!-- {MARK} -->\n# {}: {}\n\n{}\n\nProfile {}, {}: {}.\n",
        text(&report.env),
        report.verdict.name(),
        text(&report.summary),
        text(&report.profile),
        text(&report.targets()),
        totals.join(", ")
    );
    page.push_str("\n## Steps\n");
    let rows = report.steps.iter().map(|step| {
        let state = word(step.outcome);
        let state = match (step.outcome, &step.reason) {
            // The failed step's reason is the summary.
            (Outcome::Done | Outcome::Failed, _) | (_, None) => state.to_owned(),
            (_, Some(reason)) => format!("{state}: {}", text(reason)),
        };
        let mut row = vec![text(&step.name), state];
        if let Some(cost) = step.cost {
            row.extend(took(cost));
        }
        row.resize(7, String::new());
        row
    });
    let titles = [
        "step",
        "state",
        ">time",
        ">processors",
        ">memory",
        ">with page cache",
        ">disk",
    ];
    table(&mut page, &titles, rows);
    if !report.tail.is_empty() {
        page.push_str("\n## End of the failed step's log\n\n");
        // Indented, because a line of the log could close a fence.
        for line in &report.tail {
            writeln!(page, "    {}", escape(line)).expect("a string");
        }
    }
    facts(&mut page, "Left out", &report.left_out);
    let builds = report.builds.iter().map(|build| {
        let busy = millis(build.busy_ms);
        vec![text(&build.directory), busy, build.edges.to_string()]
    });
    let titles = ["directory", ">sum of commands", ">commands"];
    section(&mut page, "Ninja builds", &titles, builds);
    let slowest = report.slowest.iter().map(|edge| {
        let took = millis(edge.took_ms);
        vec![text(&edge.output), text(&edge.directory), took]
    });
    let titles = ["makes", "in", ">time"];
    section(&mut page, "Longest commands", &titles, slowest);
    let caches = report.caches.iter().map(|cache| {
        let content = text(cache.content.as_deref().unwrap_or(""));
        vec![text(&cache.name), content, size::bytes(cache.bytes)]
    });
    let titles = ["cache", "content", ">on disk"];
    section(&mut page, "Caches", &titles, caches);
    let space = report.space.iter().map(|space| {
        let bytes = size::bytes(space.bytes);
        vec![text(&space.name), text(&space.note), bytes]
    });
    section(
        &mut page,
        "Largest on disk",
        &["what", "", ">on disk"],
        space,
    );
    facts(&mut page, "Build environment and inputs", &report.facts);
    facts(&mut page, "Locked", &report.lock);
    write!(page, "\n{}\n", text(&report.written_by())).expect("a string");
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::{Fact, StepRow};

    #[test]
    fn whatever_a_name_is_it_is_text_in_its_cell() {
        let report = EnvReport {
            facts: vec![Fact::new("a|b\n# c", "<script> `x` **y** @somebody")],
            tail: vec!["```".to_owned(), "</pre>".to_owned()],
            steps: vec![StepRow {
                name: "test".to_owned(),
                outcome: Outcome::Skipped,
                reason: Some("`--gpu none` is set".to_owned()),
                cost: None,
            }],
            ..EnvReport::default()
        };
        let page = markdown(&report);
        let row = "| a\\|b\\\\n\\# c | &lt;script\\> \\`x\\` \\*\\*y\\*\\* &#64;somebody |\n";
        assert_has!(page, row);
        assert!(page.contains("\n    ```\n    </pre>\n"));
        assert_has!(page, "| test | skipped: \\`--gpu none\\` is set |");
    }
}
