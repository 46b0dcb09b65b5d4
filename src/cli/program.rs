//! Owns the process, from arguments to exit code.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::process::ExitCode;

use nix::sys::signal::SigSet;
use nix::unistd::AccessFlags;

use crate::cli::help::{self, Unparsed};
use crate::cli::{Command, GlobalArgs, completions, dispatch};
use crate::engine::shim;
use crate::execute::in_container;
use crate::image::{certificates, fetch};
use crate::rocm::target::Learned;
use crate::rocm::{gpu, target};
use crate::store::config::Config;
use crate::store::lock;
use crate::sys::account;
use crate::sys::error::{Kind, Result};
use crate::sys::shell::quoted_path;
use crate::ui::{Terminals, Ui, UiSettings};
use crate::up::context::Context;
use crate::{engine, remote};

pub(crate) fn run() -> ExitCode {
    let mut arguments = std::env::args_os();
    if let Some(program) = arguments.next().filter(|program| shim::is_make(program)) {
        return shim::run(&program, &arguments.collect::<Vec<_>>());
    }
    if let Some(code) = own_subcommand().or_else(completions::answer) {
        return code;
    }
    let mut cli = match help::parse() {
        Ok(cli) => cli,
        Err(Unparsed::Meant(error)) => {
            Ui::new(settings(&GlobalArgs::default(), None)).error(&error);
            return ExitCode::from(error.kind().exit_code());
        }
        Err(Unparsed::Usage(error)) => {
            // Help and version are results, everything else is a usage error. A closed pipe is not a failure.
            let code = if error.use_stderr() {
                Kind::Usage.exit_code()
            } else {
                0
            };
            drop(error.print());
            return ExitCode::from(code);
        }
    };
    if let Command::On(args) = &mut cli.command {
        args.hand_on(&cli.global);
    }
    let mut ui = Ui::new(settings(&cli.global, None));
    let result = Config::read().and_then(|(mut config, mut invalid)| {
        // These describe rockenv itself, to a shell, an installation, or the person who corrects the configuration.
        if matches!(
            cli.command,
            Command::Completions(_) | Command::Man(_) | Command::Schema(_) | Command::Help(_)
        ) {
            invalid.clear();
        }
        // `doctor` reports on the machine even with an invalid configuration.
        if !matches!(cli.command, Command::Doctor)
            && let Some(last) = invalid.pop()
        {
            invalid.iter().for_each(|error| ui.error(error));
            return Err(last);
        }
        invalid.iter().for_each(|error| ui.error(error));
        let broken = invalid.first().map(|error| error.kind().exit_code());
        if let Some(home) = &cli.global.home {
            config.home = std::path::absolute(home)?;
            config.roots_store = None;
        }
        ui = Ui::new(settings(&cli.global, Some(&config)));
        certificates::configure(config.authorities.clone());
        fetch::configure(config.http_timeout);
        let shown = ui.clone();
        lock::show_waits(Box::new(move |text: &str| shown.note(text)));
        let cx = Context {
            config,
            ui: ui.clone(),
            json: cli.global.json,
            names_home: cli.global.home.is_some(),
        };
        let cx = crate::cli::trust::ask(cx, &cli)?;
        use_learned_targets(&cx);
        let code =
            dispatch::run(&cx, cli.command).map_err(|error| cx.suggest_roots_store(error))?;
        cx.ui.finish()?;
        Ok(broken.unwrap_or(code))
    });
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // Results precede the error. No drop flushes them, because the lock wait callback holds a clone of `ui`
            // until exit.
            drop(ui.finish());
            ui.error(&error);
            ExitCode::from(error.kind().exit_code())
        }
    }
}

/// Uses the targets that the store learned, if any.
fn use_learned_targets(cx: &Context) {
    let home = &cx.config.home;
    // Without read access, opening the store reports the refusal.
    if nix::unistd::access(&target::learned_file(home), AccessFlags::R_OK).is_err() {
        return;
    }
    match Learned::read(home) {
        Ok(Some(learned)) => learned.install(),
        Ok(None) => {}
        Err(error) => cx.ui.warn(&format!(
            "{}; using the built-in targets only; write the file again with `rockenv target learn --source DIR`",
            error.chain().join(": ")
        )),
    }
}

fn settings(global: &GlobalArgs, config: Option<&Config>) -> UiSettings {
    let terminal = config
        .map(|config| config.terminal.clone())
        .unwrap_or_default();
    UiSettings {
        quiet: global.quiet,
        verbose: global.verbose,
        yes: global.yes,
        no_color: terminal.no_color,
        force_color: terminal.force_color,
        dumb: terminal.term.as_deref().is_none_or(|term| term == "dumb"),
        ci: terminal.ci,
        ci_system: terminal.ci_system,
        integration: terminal.integration,
        through_sudo: config.is_some_and(|config| config.through_sudo),
        home: global.home.as_deref().map(quoted_path),
        variable_home: config
            .filter(|config| {
                let home = config.host_variable("ROCKENV_HOME");
                home.is_some_and(|home| !home.is_empty())
            })
            .map(|config| quoted_path(&config.home)),
        terminals: Terminals::detect(),
    }
}

/// Runs rockenv's internal processes: holder, agent, trash reaper, and the helpers inside an env and on another
/// machine.
fn own_subcommand() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let name = arguments.next()?.into_string().ok()?;
    if !name.starts_with("__") {
        return None;
    }
    close_inherited();
    let rest: Vec<String> = arguments
        .filter_map(|argument| argument.into_string().ok())
        .collect();
    let result: Result<()> = match name.as_str() {
        "__hold" => engine::hold::run(),
        "__agent" => engine::agent::run(rest.first().map(std::path::Path::new)),
        "__reap" => reap(std::env::args_os().nth(2)),
        "__copy" => in_container::copy(&rest),
        "__export" => in_container::export(&rest),
        in_container::LAYER => in_container::layer(&rest),
        "__receive" => remote::receive(&rest),
        "__remote-exec" => remote::remote_exec(&rest),
        "__watch" => remote::watch(&rest),
        account::rights::SUBCOMMAND => account::rights::serve(&rest),
        "__probe-gpu" => gpu::probe::run(&rest),
        _ => Err(usage!("no subcommand `{name}`")),
    };
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            Ui::new(UiSettings::default()).error(&error);
            ExitCode::from(error.kind().exit_code())
        }
    })
}

/// Closes the descriptors that the caller left open beside the standard streams, as a shell does after `exec 3>&1`. The
/// process may outlive the command, and a pipe's reader would wait for it.
fn close_inherited() {
    let entries = fs_err::read_dir("/proc/self/fd").into_iter().flatten();
    let open: Vec<RawFd> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for descriptor in open.into_iter().filter(|number| *number > 2) {
        // The descriptor of the list itself is closed already.
        let _: nix::Result<()> = nix::unistd::close(descriptor);
    }
}

/// `__reap STORE`: the store's path may contain any bytes.
fn reap(root: Option<OsString>) -> Result<()> {
    let root = root.ok_or_else(|| usage!("no store given"))?;
    // The parent command blocks signals, but this process must not delay a shutdown.
    SigSet::empty().thread_set_mask()?;
    // A terminal's Ctrl-C must not reach a process that only cleans up.
    let _: nix::Result<nix::unistd::Pid> = nix::unistd::setsid();
    match crate::store::Store::open_existing(root.as_ref())? {
        Some(store) => {
            // On a full disk only emptying the trash makes room for the durability marks, so a failure here must wait.
            let marked = store.make_all_durable();
            store.await_trash()?;
            marked
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_variable_names_no_store() {
        for (home, shown) in [("", None), ("/srv/s", Some("/srv/s"))] {
            let variables = [("ROCKENV_HOME".to_owned(), home.to_owned())];
            let (config, _) = Config::of(variables.into(), None).unwrap();
            let settings = settings(&GlobalArgs::default(), Some(&config));
            assert_eq!(settings.variable_home.as_deref(), shown);
        }
    }
}
