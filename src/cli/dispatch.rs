//! Owns the verbs: one file each (a directory for a noun), and the `match` that selects them.

use super::Command;
use crate::sys::error::Result;
use crate::up::context::Context;

/// Runs a command; returns the exit code.
pub(crate) fn run(cx: &Context, command: Command) -> Result<u8> {
    let done = |result: Result<()>| result.map(|()| 0);
    match command {
        Command::Up(args) => super::up::up(cx, &args),
        Command::Plan(args) => super::plan::plan(cx, args),
        Command::Down(args) => done(super::down::down(cx, &args)),
        Command::Rm(args) => done(super::rm::rm(cx, &args)),
        Command::Ls => done(super::ls::ls(cx)),
        Command::Status(args) => super::status::status(cx, &args),
        Command::Shell(args) => super::shell::shell(cx, args),
        Command::Exec(args) => super::exec::exec(cx, args),
        Command::Env(args) => done(super::env::env(cx, &args)),
        Command::Logs(args) => done(super::logs::logs(cx, &args)),
        Command::Snapshot(command) => done(super::snapshot::snapshot(cx, &command)),
        Command::Verify(args) => super::verify::verify(cx, &args),
        Command::Rollback(args) => done(super::rollback::rollback(cx, &args)),
        Command::Fork(args) => done(super::fork::fork(cx, &args)),
        Command::Push(args) => done(super::push::push(cx, &args)),
        Command::Pull(args) => done(super::pull::pull(cx, &args)),
        Command::Du(args) => done(super::du::du(cx, &args)),
        Command::Report(args) => done(super::report::command::report(cx, &args)),
        Command::Gc(args) => done(super::gc::gc(cx, &args)),
        Command::Cache(command) => done(super::cache::cache(cx, &command)),
        Command::Image(command) => super::image::image(cx, command),
        Command::Profile(command) => super::profile::profile(cx, command),
        Command::Hook(command) => super::hook::hook(cx, &command),
        Command::On(request) => super::on::on(cx, request),
        Command::Matrix(command) => super::matrix::matrix(cx, &command),
        Command::Target(command) => super::target::target(cx, &command),
        Command::Export(args) => super::export::export(cx, &args),
        Command::Import(args) => done(super::import::import(cx, &args)),
        Command::Lock(args) => done(super::lock::lock(cx, &args)),
        Command::Trust(args) => done(super::trust::trust(cx, &args)),
        Command::Setup(args) => done(super::setup::command::setup(cx, &args)),
        Command::Doctor => super::doctor::command::doctor(cx),
        Command::Fsck(args) => super::fsck::fsck(cx, &args),
        Command::Completions(args) => done(super::completions::completions(cx, &args)),
        Command::Man(args) => done(super::man::man(cx, &args)),
        Command::Help(args) => done(super::help::help(cx, &args)),
        Command::Schema(args) => done(super::schema::schema(cx, &args)),
    }
}
