//! Owns output generated from rockenv itself: completion scripts, manual pages, schemas.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use fs_err as fs;

use crate::cli::{completions, help, manual};
use crate::plan::record::Record;
use crate::store::config;
use crate::sys::account::become_caller;
use crate::sys::error::{Error, Kind, Result};
use crate::ui::event::{Event, SCHEMA};
use crate::ui::metrics;
use crate::up::context::Context;
use crate::{image, profile};

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell that will read it
    shell: Shell,
}

/// A shell with completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]

pub(crate) enum Shell {
    /// source <(rockenv completions bash)
    Bash,
    /// source <(rockenv completions zsh)
    Zsh,
    /// rockenv completions fish | source
    Fish,
    /// eval (rockenv completions elvish | slurp)
    Elvish,
    /// rockenv completions powershell | Out-String | Invoke-Expression
    Powershell,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// The command, such as `gc` or `snapshot diff` [default: rockenv itself]
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    command: Vec<String>,
    /// Write one page for each command into this directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// What the ids of schemas begin with. An id names a schema; nothing is fetched from there.
const SCHEMA_ID: &str = "urn:rockenv:schema:";

#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// What to describe
    #[arg(default_value = "profile")]
    what: Subject,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Subject {
    /// `profiles/*.toml`
    Profile,
    /// `images/*.toml`
    Image,
    /// `hooks/*/hook.toml`
    Hook,
    /// `rockenv.toml` and `config.toml`
    Config,
    /// A line of `up --progress json`
    Events,
    /// A line of `up --metrics`
    Metrics,
    /// What the store remembers of an env
    Record,
}

/// Prints a script that completes with rockenv's own help.
pub(crate) fn completions(cx: &Context, args: &CompletionsArgs) -> Result<()> {
    let shell = match args.shell {
        Shell::Bash => "bash",
        Shell::Zsh => "zsh",
        Shell::Fish => "fish",
        Shell::Elvish => "elvish",
        Shell::Powershell => "powershell",
    };
    cx.ui.raw(completions::script(shell)?.as_bytes());
    Ok(())
}

/// Prints the manual page, or writes one for each command.
pub(crate) fn man(cx: &Context, args: &ManArgs) -> Result<()> {
    let Some(directory) = &args.dir else {
        let command = help::find(help::command(), &args.command)?;
        cx.ui.raw(&manual::page(&command, &args.command.join(" "))?);
        return Ok(());
    };
    // This needs none of root's rights.
    become_caller()?;
    fs::create_dir_all(directory)?;
    for (path, page) in manual::pages()? {
        let name = format!("rockenv {path}");
        let file = format!("{}.1", name.trim_end().replace(' ', "-"));
        fs::write(directory.join(file), page)?;
    }
    cx.ui.note(&format!(
        "wrote manual pages to {}; read one with: man -l {}",
        directory.display(),
        directory.join("rockenv-up.1").display()
    ));
    Ok(())
}

/// Prints a JSON schema.
pub(crate) fn schema(cx: &Context, args: &SchemaArgs) -> Result<()> {
    let mut schema = match args.what {
        Subject::Profile => profile::schema(),
        Subject::Hook => crate::profile::hook::schema(),
        Subject::Image => image::recipe::schema().to_value(),
        Subject::Config => schemars::schema_for!(config::File).to_value(),
        Subject::Record => schemars::schema_for!(Record).to_value(),
        Subject::Metrics => schemars::schema_for!(metrics::Row).to_value(),
        Subject::Events => events()?,
    };
    if let Some(top) = schema.as_object_mut() {
        let name = args.what.to_possible_value();
        let name = name
            .as_ref()
            .map_or("", clap::builder::PossibleValue::get_name);
        top.insert("$id".to_owned(), format!("{SCHEMA_ID}{name}").into());
    }
    cx.ui.json(&schema)
}

/// Returns the schema of a line: an event plus the version and time that every line begins with.
fn events() -> Result<serde_json::Value> {
    let mut schema = schemars::schema_for!(Event).to_value();
    let top = schema
        .as_object_mut()
        .ok_or_else(|| Error::new(Kind::Unexpected, "the schema of events is not an object"))?;
    top.insert(
        "properties".to_owned(),
        serde_json::json!({
            "schema": { "description": "Version of the stream.", "const": SCHEMA },
            "time": { "description": "When it happened.", "type": "string", "format": "date-time" },
        }),
    );
    top.insert("required".to_owned(), serde_json::json!(["schema", "time"]));
    Ok(schema)
}
