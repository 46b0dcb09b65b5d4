//! Owns `profile new`.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::profile::{self};
use crate::sys::account::{Existing, FilePlace, caller, make_directories};
use crate::sys::error::Result;
use crate::sys::shell::quoted_path;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct NewArgs {
    /// Its name
    name: String,
    /// Print it instead of writing `profiles/NAME.toml`
    #[arg(long)]
    print: bool,
}

/// Returns the profile schema that is installed with this program.
fn installed_schema() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let prefix = program.parent()?.parent()?;
    let schema = prefix.join("share/rockenv/schema/profile.json");
    schema.exists().then_some(schema)
}

pub(super) fn new(cx: &Context, args: &NewArgs) -> Result<()> {
    let directory = if args.print { "" } else { "profiles/" };
    let mut text = profile::template(&args.name, directory)?;
    // Editors use the schema for checks and completion.
    if let Some(schema) = installed_schema() {
        text = format!("#:schema file://{}\n{text}", schema.display());
    }
    if args.print {
        cx.ui.data(&text);
        return Ok(());
    }
    let directory = Path::new("profiles");
    let path = directory.join(format!("{}.toml", args.name));
    make_directories(caller(), directory)?;
    let place = FilePlace::new(caller(), &path)?;
    if place.open()?.is_some() {
        return Err(place
            .exists("")
            .help(format!("rockenv profile check {}", quoted_path(&path))));
    }
    place.put(text.as_bytes(), Existing::Refuse)?;
    cx.ui.note(&format!(
        "wrote {}; next: rockenv profile check {}",
        path.display(),
        quoted_path(&path)
    ));
    Ok(())
}
