//! Owns the job summary on GitHub Actions, to which `up` and `matrix up` append.

use std::io::Write as _;

use crate::cli::report;
use crate::plan::ids::EnvName;
use crate::store::Store;
use crate::sys::account::{FilePlace, caller};
use crate::sys::error::{Result, ResultExt as _};
use crate::up::context::Context;

/// Appends an env's report: its steps and its disk usage.
pub(crate) fn of_env(cx: &Context, store: &Store, env: &EnvName) {
    let page = || Ok(report::markdown(&report::collect::gather(store, env)?));
    add(cx, page);
}

pub(crate) fn of_matrix(cx: &Context, titles: &[&str], rows: &[Vec<String>]) {
    let page = || {
        let mut page = "# rockenv matrix up\n".to_owned();
        let cells = |row: &Vec<String>| {
            row.iter()
                .map(|cell| report::markdown::text(cell))
                .collect()
        };
        report::markdown::table(&mut page, titles, rows.iter().map(cells));
        Ok(page)
    };
    add(cx, page);
}

/// Appends a page to the summary. A failure must not fail the build.
fn add(cx: &Context, page: impl FnOnce() -> Result<String>) {
    let Some(path) = &cx.config.terminal.step_summary else {
        return;
    };
    let write = || {
        let page = page()?;
        let mut file = FilePlace::new(caller(), path)?.append()?;
        Ok(file.write_all(format!("{page}\n").as_bytes())?)
    };
    let written: Result<()> = write();
    if let Err(error) = written.context(|| "cannot write the job's summary".to_owned()) {
        cx.ui.warn(&error.chain().join(": "));
    }
}
