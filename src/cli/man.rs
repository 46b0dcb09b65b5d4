//! Owns `man`.

use std::path::{Path, PathBuf};

use clap::Args;
use fs_err as fs;

use crate::cli::{help, man_pages};
use crate::sys::account::become_caller;
use crate::sys::error::{Result, named_path};
use crate::sys::shell::quoted_path;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct ManArgs {
    /// The command, such as `gc` or `snapshot diff` [default: rockenv itself]
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    command: Vec<String>,
    /// Write one page for each command into this directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the manual page, or writes one page per command.
pub(crate) fn man(cx: &Context, args: &ManArgs) -> Result<()> {
    let Some(directory) = &args.dir else {
        let command = help::find(help::command(), &args.command)?;
        cx.ui
            .raw(&man_pages::page(&command, &args.command.join(" "))?);
        return Ok(());
    };
    // Writing the pages does not need root.
    become_caller()?;
    let write = |path: &Path, done: std::io::Result<()>| {
        done.map_err(|error| named_path(path)(error).help("rockenv man --dir ./man"))
    };
    write(directory, fs::create_dir_all(directory))?;
    for (path, page) in man_pages::pages()? {
        let name = format!("rockenv {path}");
        let file = format!("{}.1", name.trim_end().replace(' ', "-"));
        let path = directory.join(file);
        write(&path, fs::write(&path, page))?;
    }
    cx.ui.note(&format!(
        "wrote manual pages to {}; read one with: man -l {}",
        directory.display(),
        quoted_path(&directory.join("rockenv-up.1"))
    ));
    Ok(())
}
