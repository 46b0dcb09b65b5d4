//! Owns `report`: an env's report as one file, which replaces nothing but another report.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use fs_err as fs;

use super::profile::give_to_user;
use crate::context::Context;
use crate::error::{Error, Kind, Result, ResultExt as _};
use crate::report::{self, MARK, gather::gather};
use crate::ui::text;

/// So far into a file its mark is looked for, in bytes.
const BEGINNING: u64 = 512;

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The env
    #[arg(value_name = "ENV")]
    name: String,
    /// Markdown instead of HTML
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Where to write it, `-` for standard output [default: ENV-report.html or .md]
    #[arg(short, long, value_name = "FILE", conflicts_with = "json")]
    output: Option<PathBuf>,
    /// Replace a file that is no report
    #[arg(short, long)]
    force: bool,
}

/// Writes a report.
pub fn report(cx: &Context, args: &ReportArgs) -> Result<()> {
    let store = cx.store_to_read()?;
    let path = args.output.clone().unwrap_or_else(|| {
        let end = if args.markdown { "md" } else { "html" };
        PathBuf::from(format!("{}-report.{end}", args.name))
    });
    let to_stdout = path == Path::new("-");
    store.known(&args.name)?;
    if !cx.json && !to_stdout {
        // Before the work is done.
        may_replace(&path, args.force)?;
    }
    let report = gather(&store, &args.name)?;
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
    write(cx, &path, &page, args.force)?;
    cx.ui.data(&text::path(&path));
    Ok(())
}

/// Refuses to replace what somebody else wrote, and whatever is no file.
fn may_replace(path: &Path, force: bool) -> Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !found.is_file() {
        return Err(Error::new(
            Kind::Usage,
            format!("`{}` is there, and is no file", path.display()),
        )
        .help("rockenv report ENV --output FILE; `-` is standard output"));
    }
    if force || is_report(path)? {
        return Ok(());
    }
    Err(Error::new(
        Kind::Usage,
        format!("`{}` is there, and is no report", path.display()),
    )
    .help("`--force` replaces it; `--output FILE` writes elsewhere"))
}

fn is_report(path: &Path) -> Result<bool> {
    let mut start = Vec::new();
    fs::File::open(path)?
        .take(BEGINNING)
        .read_to_end(&mut start)?;
    let start = String::from_utf8_lossy(&start);
    let marks = [
        format!("<meta name=\"generator\" content=\"{MARK}\">"),
        format!("<!-- {MARK} -->"),
    ];
    Ok(marks.iter().any(|mark| start.contains(mark)))
}

/// Puts the page in its place at once: a reader sees the old one or the new one.
fn write(cx: &Context, path: &Path, page: &str, force: bool) -> Result<()> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let cannot = || format!("cannot write `{}`", path.display());
    let mut file = tempfile::Builder::new()
        .prefix(".rockenv-report-")
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(parent)
        .context(cannot)?;
    file.write_all(page.as_bytes()).context(cannot)?;
    give_to_user(cx, file.path())?;
    may_replace(path, force)?;
    file.persist(path)
        .map_err(|error| error.error)
        .context(cannot)?;
    Ok(())
}
