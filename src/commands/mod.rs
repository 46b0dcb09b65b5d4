//! Owns the verbs: one file for each, and the one `match` that finds them.

pub mod cache;
mod checkout;
mod converge;
pub mod doctor;
mod downloads;
pub mod du;
mod ephemeral;
pub mod exec;
pub mod export;
pub mod fsck;
pub mod gc;
pub mod generate;
pub mod hook;
mod hooks;
pub mod image;
pub mod import;
mod inputs;
pub mod list;
pub mod lock;
pub mod logs;
pub mod matrix;
mod needs;
mod offline;
pub mod on;
mod pinned;
pub mod plan;
mod prepare;
pub mod profile;
pub mod pull;
pub mod push;
pub mod remove;
pub mod report;
pub mod runtime;
mod select;
pub mod setup;
mod sharing;
pub mod snapshot;
mod summary;
pub mod target;
pub mod trust;
pub mod up;
mod verdict;
mod writes;

use crate::cli::Command;
use crate::context::Context;
use crate::error::Result;

/// Runs a command; returns the exit code.
pub fn run(cx: &Context, command: Command) -> Result<u8> {
    let done = |result: Result<()>| result.map(|()| 0);
    match command {
        Command::Up(args) => up::up(cx, args),
        Command::Plan(args) => done(plan::plan(cx, args)),
        Command::Down(args) => done(remove::down(cx, &args)),
        Command::Rm(args) => done(remove::rm(cx, &args)),
        Command::Ls(args) => done(list::ls(cx, &args)),
        Command::Status(args) => list::status(cx, &args),
        Command::Shell(args) => exec::shell(cx, args),
        Command::Exec(args) => exec::exec(cx, args),
        Command::Env(args) => done(runtime::env(cx, &args)),
        Command::Logs(args) => done(logs::logs(cx, &args)),
        Command::Snapshot(command) => done(snapshot::snapshot(cx, command)),
        Command::Rollback(args) => done(snapshot::rollback(cx, &args)),
        Command::Fork(args) => done(snapshot::fork(cx, &args)),
        Command::Push(args) => done(push::push(cx, &args)),
        Command::Pull(args) => done(pull::pull(cx, &args)),
        Command::Du(args) => done(du::du(cx, &args)),
        Command::Report(args) => done(report::report(cx, &args)),
        Command::Gc(args) => done(gc::gc(cx, &args)),
        Command::Cache(command) => done(cache::cache(cx, &command)),
        Command::Image(command) => image::image(cx, command),
        Command::Profile(command) => profile::profile(cx, command),
        Command::Hook(command) => hook::hook(cx, &command),
        Command::On(args) => on::on(cx, &args),
        Command::Matrix(command) => matrix::matrix(cx, &command),
        Command::Target(command) => target::target(cx, &command),
        Command::Export(args) => export::export(cx, &args),
        Command::Import(args) => done(import::import(cx, &args)),
        Command::Lock(args) => done(lock::lock(cx, &args)),
        Command::Trust(args) => done(trust::trust(cx, &args)),
        Command::Setup(args) => done(setup::setup(cx, &args)),
        Command::Doctor(args) => doctor::doctor(cx, &args),
        Command::Fsck(args) => fsck::fsck(cx, &args),
        Command::Completions(args) => done(generate::completions(cx, &args)),
        Command::Man(args) => done(generate::man(cx, &args)),
        Command::Schema(args) => done(generate::schema(cx, &args)),
    }
}
