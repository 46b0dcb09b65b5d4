//! Owns `doctor`.

use crate::cli::code_of;
use crate::cli::doctor::{CheckState, Facts, abilities, examine, is_fit};
use crate::sys::error::{Kind, Result};
use crate::sys::host::Host;
use crate::ui::table::Table;
use crate::ui::{Tone, object};
use crate::up::context::Context;

/// Reports what this machine supports; returns the exit code.
pub(crate) fn doctor(cx: &Context) -> Result<u8> {
    let host = Host::probe()?;
    let facts = Facts::probe(&host, &cx.config, cx.gpus());
    let sections = examine(&facts);
    let abilities = abilities(&facts);
    let fit = is_fit(&sections);
    let code = code_of(fit, Kind::Unavailable);
    if cx.json {
        cx.ui.json(&object! {
            schema: "rockenv/doctor/2",
            fit: fit,
            sections: &sections,
            engines: &abilities,
            facts: &facts,
        })?;
        return Ok(code);
    }
    for section in &sections {
        cx.ui.heading(section.title);
        for check in &section.checks {
            let (tone, word) = match check.state {
                CheckState::Ok => (Tone::Good, "ok"),
                CheckState::Missing => (Tone::Bad, "missing"),
                CheckState::Note => (Tone::Doubtful, "note"),
            };
            cx.ui.finding(tone, word, &check.message);
            if let Some(command) = &check.command {
                let command = cx.ui.settings().hint(command);
                cx.ui.data(&format!("{:11}{command}\n", ""));
            }
        }
    }
    let header = ["engines here", "nspawn", "docker", "podman"];
    cx.ui.table(&Table::of(header, &abilities, |row| {
        [row.what, &row.nspawn, &row.docker, &row.podman].map(str::to_owned)
    }));
    let engine = facts.engine;
    let (tone, summary) = match fit {
        true => (Tone::Good, format!("envs can be built here with {engine}")),
        false => (
            Tone::Bad,
            format!("envs cannot be built with {engine} yet: see the missing items above"),
        ),
    };
    cx.ui.headline(tone, &summary);
    Ok(code)
}
