//! Owns `report`: writes an env's report to one file, which may replace only another report.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::Args;
use fs_err as fs;

use crate::cli::report::collect::gather;
use crate::cli::report::{self, MARK};
use crate::plan::ids::EnvName;
use crate::sys::account::{Existing, FilePlace, caller};
use crate::sys::error::Result;
use crate::ui::text;
use crate::up::context::Context;

/// Number of leading bytes that must contain the mark.
const BEGINNING: u64 = 512;

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The env [default: the only one]
    #[arg(value_name = "ENV")]
    name: Option<EnvName>,
    /// Markdown instead of HTML
    #[arg(long)]
    markdown: bool,
    /// Output file, `-` for standard output [default: ENV-report.html or .md]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace a file that is not a report
    #[arg(short, long)]
    force: bool,
}

pub(crate) fn report(cx: &Context, args: &ReportArgs) -> Result<()> {
    // `conflicts_with` does not see a global option that precedes the command.
    if cx.json && (args.markdown || args.force || args.output.is_some()) {
        return Err(usage!(
            "`--json` cannot be combined with `--markdown`, `--output` or `--force`"
        )
        .help("leave out --json"));
    }
    let store = cx.store_to_read()?;
    let name = store.named_or_only(args.name.as_ref())?;
    let path = args.output.clone().unwrap_or_else(|| {
        let end = if args.markdown { "md" } else { "html" };
        PathBuf::from(format!("{name}-report.{end}"))
    });
    let to_stdout = path == Path::new("-");
    store.known(&name)?;
    if !cx.json && !to_stdout {
        // Fails before the expensive work.
        may_replace(&FilePlace::new(caller(), &path)?, args.force)?;
    }
    let report = gather(&store, &name)?;
    if cx.json {
        return cx.ui.json(&report);
    }
    let page = match args.markdown {
        true => report::markdown(&report),
        false => report::html(&report),
    };
    if to_stdout {
        cx.ui.raw(page.as_bytes());
        return Ok(());
    }
    let place = FilePlace::new(caller(), &path)?;
    may_replace(&place, args.force)?;
    place.put(page.as_bytes(), Existing::Replace)?;
    cx.ui.data(&text::os(&path));
    Ok(())
}

/// Refuses to replace a file that is not a report.
fn may_replace(place: &FilePlace<'_>, force: bool) -> Result<()> {
    let elsewhere = "rockenv report ENV --output FILE; `-` is standard output";
    let found = place.open().map_err(|error| error.help(elsewhere))?;
    match found {
        Some(file) if !force && !is_report(&file)? => Err(place
            .exists(" and is not a report")
            .help("`--force` replaces it; `--output FILE` writes elsewhere")),
        _ => Ok(()),
    }
}

fn is_report(file: &fs::File) -> Result<bool> {
    let mut start = Vec::new();
    file.take(BEGINNING).read_to_end(&mut start)?;
    let start = String::from_utf8_lossy(&start);
    let marks = [
        format!("<meta name=\"generator\" content=\"{MARK}\">"),
        format!("<!-- {MARK} -->"),
    ];
    Ok(marks.iter().any(|mark| start.contains(mark)))
}
