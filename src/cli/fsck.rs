//! Owns `fsck`.

use clap::Args;
use serde::Serialize;

use crate::engine::choose::service_at;
use crate::plan::resolve::Engine;
use crate::store::check::{Attempt, Findings, Problem, examine, repair, repair_format};
use crate::sys::error::{Error, Result};
use crate::ui::{object, size};
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct FsckArgs {
    /// Repair what can be repaired; no data is lost
    #[arg(long)]
    repair: bool,
}

/// A problem and its outcome.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    problem: Problem,
    mended: bool,
    done: Option<String>,
}

/// Checks the store; returns the exit code.
pub(crate) fn fsck(cx: &Context, args: &FsckArgs) -> Result<u8> {
    // The services that answer. Must precede opening the store, which makes an ordinary user root of a user namespace.
    let connect = |engine| service_at(engine, &cx.config.sockets).ok();
    let services: Vec<_> = Engine::SERVICES.into_iter().filter_map(connect).collect();
    let mut lines = Vec::new();
    let format = repair_format(&cx.config.home, args.repair).map_err(advised)?;
    let damaged = format.is_some();
    if let Some(problem) = format {
        lines.push(Line {
            problem,
            mended: args.repair,
            done: None,
        });
    }
    let mut found = Findings::default();
    // A damaged format file must be repaired before anything else can be read.
    if !damaged || args.repair {
        let store = cx.existing_store().map_err(advised)?;
        let mut attempts = Vec::new();
        // Frees the ballast, so that a full disk does not prevent the repair.
        let ballast = match args.repair {
            true => store.drop_ballast()?,
            false => None,
        };
        if args.repair {
            attempts = repair(&store, &services).map_err(advised)?;
        }
        drop(ballast);
        let look = || -> Result<Findings> {
            Ok(examine(&store.inventory_with(&services).map_err(advised)?))
        };
        found = look()?;
        if !found.problems.is_empty() {
            // A running command leaves intermediate states, which are gone at a second look.
            let again = look()?.problems;
            found.problems.retain(|problem| again.contains(problem));
        }
        for Attempt { problem, done } in attempts {
            let mended = !found.problems.contains(&problem);
            let done = match done {
                Ok(done) => done,
                Err(why) => Some(why),
            };
            found.problems.retain(|left| *left != problem);
            lines.push(Line {
                problem,
                mended,
                done,
            });
        }
    }
    lines.extend(found.problems.into_iter().map(|problem| Line {
        problem,
        mended: false,
        done: None,
    }));
    let clean = lines.iter().all(|line| line.mended);
    if cx.json {
        let notes = found.notes.iter();
        let notes = notes.map(|(message, help)| object! { message: message, help: help });
        cx.ui.json(&object! {
            schema: "rockenv/fsck/1",
            store: cx.config.home.display().to_string(),
            clean: clean,
            problems: &lines,
            notes: notes.collect::<Vec<_>>(),
        })?;
    } else {
        show(cx, &lines, &found.notes, args.repair);
    }
    Ok(u8::from(!clean))
}

/// Adds the command to type for a user without access to the store.
fn advised(error: Error) -> Error {
    if nix::unistd::geteuid().is_root() || error.help_text().is_some() {
        return error;
    }
    error.help("sudo rockenv fsck")
}

fn show(cx: &Context, lines: &[Line], notes: &[(String, String)], repaired: bool) {
    for line in lines {
        let word = if line.mended { "repaired: " } else { "" };
        let problem = &line.problem;
        cx.ui
            .data(&format!("{word}{}: {}\n", problem.object, problem.message));
        if let Some(done) = &line.done {
            cx.ui.data(&format!("  {done}\n"));
        }
    }
    for (message, help) in notes {
        let help = cx.ui.settings().hint(help);
        cx.ui.data(&format!("note: {message}\n  {help}\n"));
    }
    let left = lines.iter().filter(|line| !line.mended);
    let left: Vec<&Problem> = left.map(|line| &line.problem).collect();
    let problems = size::count(left.len(), "problem");
    let home = cx.config.home.display();
    match left.first() {
        None if lines.is_empty() => cx.ui.note(&format!("{home}: no problems")),
        None => cx.ui.note(&format!("{home}: repaired everything")),
        Some(first) if repaired && first.help == "rockenv fsck --repair" => cx.ui.note(&format!(
            "{home}: {problems} remaining; try again when no other command is running"
        )),
        Some(first) => cx
            .ui
            .note(&format!("{home}: {problems}\nhelp: {}", first.help)),
    }
}
