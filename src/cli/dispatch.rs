//! Owns the verbs: one file each (a folder for a noun), and the one `match` that selects them.

use crate::cli::Command;
use crate::sys::error::Result;
use crate::up::context::Context;

/// Runs a command; returns the exit code.
pub(crate) fn run(cx: &Context, command: Command) -> Result<u8> {
    let done = |result: Result<()>| result.map(|()| 0);
    match command {
        Command::Up(args) => crate::cli::up::up(cx, &args),
        Command::Plan(args) => crate::cli::plan::plan(cx, args),
        Command::Down(args) => done(crate::cli::down::down(cx, &args)),
        Command::Rm(args) => done(crate::cli::rm::rm(cx, &args)),
        Command::Ls(args) => done(crate::cli::ls::ls(cx, &args)),
        Command::Status(args) => crate::cli::status::status(cx, &args),
        Command::Shell(args) => crate::cli::shell::shell(cx, args),
        Command::Exec(args) => crate::cli::exec::exec(cx, args),
        Command::Env(args) => done(crate::cli::env::env(cx, &args)),
        Command::Logs(args) => done(crate::cli::logs::logs(cx, &args)),
        Command::Snapshot(command) => done(crate::cli::snapshot::snapshot(cx, &command)),
        Command::Verify(args) => crate::cli::verify::verify(cx, &args),
        Command::Rollback(args) => done(crate::cli::rollback::rollback(cx, &args)),
        Command::Fork(args) => done(crate::cli::fork::fork(cx, &args)),
        Command::Push(args) => done(crate::cli::push::push(cx, &args)),
        Command::Pull(args) => done(crate::cli::pull::pull(cx, &args)),
        Command::Du(args) => done(crate::cli::du::du(cx, &args)),
        Command::Report(args) => done(crate::cli::report::command::report(cx, &args)),
        Command::Gc(args) => done(crate::cli::gc::gc(cx, &args)),
        Command::Cache(command) => done(crate::cli::cache::cache(cx, &command)),
        Command::Image(command) => crate::cli::image::image(cx, command),
        Command::Profile(command) => crate::cli::profile::profile(cx, command),
        Command::Hook(command) => crate::cli::hook::hook(cx, &command),
        Command::On(args) => crate::cli::on::on(cx, &args),
        Command::Matrix(command) => crate::cli::matrix::matrix(cx, &command),
        Command::Target(command) => crate::cli::target::target(cx, &command),
        Command::Export(args) => crate::cli::export::export(cx, &args),
        Command::Import(args) => done(crate::cli::import::import(cx, &args)),
        Command::Lock(args) => done(crate::cli::lock::lock(cx, &args)),
        Command::Trust(args) => done(crate::cli::trust::trust(cx, &args)),
        Command::Setup(args) => done(crate::cli::setup::command::setup(cx, &args)),
        Command::Doctor(args) => crate::cli::doctor::command::doctor(cx, &args),
        Command::Fsck(args) => crate::cli::fsck::fsck(cx, &args),
        Command::Completions(args) => done(crate::cli::completions::completions(cx, &args)),
        Command::Man(args) => done(crate::cli::man::man(cx, &args)),
        Command::Help(args) => done(crate::cli::help::help(cx, &args)),
        Command::Schema(args) => done(crate::cli::schema::schema(cx, &args)),
    }
}
