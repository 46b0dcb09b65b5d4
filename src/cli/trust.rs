//! Owns `trust`: makes a directory's files apply, and offers that when a command looks for them.

use std::path::PathBuf;

use clap::Args;

use crate::cli::{Cli, Command};
use crate::store::config::Config;
use crate::sys::error::{Result, named_path};
use crate::sys::trust::{self, TrustState, Trusted};
use crate::ui::object;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct TrustArgs {
    /// The directory; with --revoke also a profile's file [default: the current directory]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
    /// List what is trusted, and whether it has changed since
    #[arg(long, conflicts_with_all = ["directory", "revoke"])]
    show: bool,
    /// Stop trusting it
    #[arg(long)]
    revoke: bool,
}

/// Trusts a directory, revokes trust, or lists trusted paths.
pub(crate) fn trust(cx: &Context, args: &TrustArgs) -> Result<()> {
    if args.show {
        return show(cx);
    }
    let config = &cx.config;
    let given = match &args.directory {
        Some(directory) => std::path::absolute(directory)?,
        None => crate::sys::host::working_directory()?,
    };
    // Trust in a deleted path can still be revoked.
    let path = match fs_err::canonicalize(&given) {
        Err(_) if args.revoke => given,
        other => other.map_err(|error| named_path(&given)(error).help("rockenv trust DIR"))?,
    };
    if args.revoke {
        if !Trusted::forget(&config.user_dir, &path)? {
            return Err(
                not_found!("`{}` is not trusted", path.display()).help("rockenv trust --show")
            );
        }
        cx.ui
            .note(&format!("`{}` is no longer trusted", path.display()));
        return Ok(());
    }
    if !path.is_dir() {
        return Err(usage!("`{}` is not a directory", path.display()).help("rockenv trust DIR"));
    }
    let names = trust::present(&path);
    if names.is_empty() {
        return Err(not_found!(
            "`{}` has no rockenv.toml, profiles/, images/ or hooks/",
            path.display()
        )
        .help("rockenv trust DIR"));
    }
    // Digested before the question, because a change during the question has not been agreed to.
    let digest = trust::digest(&path)?;
    cx.confirm(&question(&path, &names))?;
    let said = format!("`{}` is trusted: {}", path.display(), names.join(", "));
    remember(config, path, digest)?;
    cx.ui.note(&said);
    Ok(())
}

fn question(path: &std::path::Path, names: &[&str]) -> String {
    format!(
        "trust {} of `{}`? Its profiles can build with your rights",
        names.join(", "),
        path.display()
    )
}

fn remember(config: &Config, path: PathBuf, digest: String) -> Result<()> {
    let trusted = Trusted {
        path,
        digest: Some(digest),
        writes: Vec::new(),
    };
    trusted.write(&config.user_dir)
}

fn show(cx: &Context) -> Result<()> {
    let mut rows = Vec::new();
    for known in Trusted::all(&cx.config.user_dir)? {
        let is_same = |digest: &String| trust::digest(&known.path).is_ok_and(|now| now == *digest);
        let state = match known.digest.as_ref().is_none_or(is_same) {
            true => "trusted",
            false => "changed",
        };
        rows.push(object! { path: known.path, state: state, writes: known.writes });
    }
    cx.list(&rows, ["path", "state"], |row| {
        [row.path.display().to_string(), row.state.to_owned()]
    })
}

/// Warns that files of the current directory do not apply. On a terminal, offers to trust them if the command looks for
/// them.
pub(crate) fn ask(cx: Context, cli: &Cli) -> Result<Context> {
    let looks = match cli.command {
        Command::Trust(_)
        | Command::Completions(_)
        | Command::Man(_)
        | Command::Schema(_)
        | Command::Help(_) => {
            return Ok(cx);
        }
        Command::Up(_)
        | Command::Plan(_)
        | Command::Image(_)
        | Command::Profile(_)
        | Command::Hook(_)
        | Command::On(_)
        | Command::Matrix(_)
        | Command::Lock(_)
        | Command::Verify(_) => true,
        Command::Down(_)
        | Command::Rm(_)
        | Command::Ls
        | Command::Status(_)
        | Command::Shell(_)
        | Command::Exec(_)
        | Command::Env(_)
        | Command::Logs(_)
        | Command::Snapshot(_)
        | Command::Rollback(_)
        | Command::Fork(_)
        | Command::Push(_)
        | Command::Pull(_)
        | Command::Du(_)
        | Command::Report(_)
        | Command::Gc(_)
        | Command::Cache(_)
        | Command::Target(_)
        | Command::Export(_)
        | Command::Import(_)
        | Command::Setup(_)
        | Command::Doctor
        | Command::Fsck(_) => false,
    };
    let Some(notice) = cx.config.current.notice() else {
        return Ok(cx);
    };
    let terminals = cx.ui.settings().terminals;
    let can_ask = looks && terminals.stdin && terminals.stderr && !cli.global.yes;
    let current = &cx.config.current;
    if !can_ask || current.counts() || current.state == TrustState::Empty {
        cx.ui.warn(&notice);
        return Ok(cx);
    }
    let digest = trust::digest(&current.directory)?;
    let names = trust::present(&current.directory);
    if !cx.ui.confirm(&question(&current.directory, &names))? {
        cx.ui.warn(&notice);
        return Ok(cx);
    }
    remember(&cx.config, current.directory.clone(), digest)?;
    let (mut config, invalid) = Config::read()?;
    if let Some(error) = invalid.into_iter().next() {
        return Err(error);
    }
    // The files may have changed during the question.
    if let Some(notice) = config.current.notice() {
        cx.ui.warn(&notice);
    }
    if cli.global.home.is_some() {
        config.home.clone_from(&cx.config.home);
        config.roots_store = None;
    }
    Ok(Context { config, ..cx })
}
