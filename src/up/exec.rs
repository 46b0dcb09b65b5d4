//! Owns running a command in an env for `exec` and `shell`: in the container that is running, or in one of its own.

use std::ffi::OsString;
use std::io::{IsTerminal as _, stdin, stdout};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::engine::hold::{ContainerRecord, Hold, OnDisconnect};
use crate::engine::job_slots::SlotClaim;
use crate::engine::ninja;
use crate::engine::session::{Client, End, Running};
use crate::engine::wire::{Command, Then, Word};
use crate::execute::gpu_check::{self, GpuCheck};
use crate::execute::terminal::Exit;
use crate::execute::{ByHand, base_environment, container, host_environment, owner, terminal};
use crate::image::certificates;
use crate::plan::ids::{EnvName, TreeId};
use crate::plan::record::Failed;
use crate::plan::resolve::{self, Spec};
use crate::rocm::gpu::{self, Choice, Device, Selector};
use crate::store::env::env_named;
use crate::store::lock::{self, Holder};
use crate::store::{LockedEnv, Store, source};
use crate::sys::error::{Kind, Result};
use crate::sys::host::Host;
use crate::up::context::Context;
use crate::up::stop_and_lock::holder;

/// How long to retry a busy env.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to retry while another command starts a container, and how long a container may take to end.
const START: Duration = Duration::from_secs(60);
/// How long the lock holder may take to record that its container waits.
const NOTE: Duration = Duration::from_secs(30);

/// A command to run in an env.
pub(crate) struct Job {
    pub host: Host,
    pub store: Store,
    pub env: EnvName,
    pub root: bool,
    pub gpu: Option<String>,
    pub failed: bool,
    /// Whether the command runs in a private tree.
    pub apart: bool,
    pub argv: Vec<OsString>,
    pub workdir: Option<String>,
    pub variables: Vec<(String, String)>,
    pub tty: bool,
}

impl Job {
    /// Opens an env for a command; without a name, the only env.
    pub(crate) fn new(cx: &Context, name: Option<&EnvName>) -> Result<Self> {
        let host = cx.host_as_root("running commands in an env")?;
        let store = cx.existing_store()?;
        cx.reap(&store)?;
        let env = store.named_or_only(name)?;
        store.known(&env)?;
        Ok(Self {
            host,
            store,
            env,
            root: false,
            gpu: None,
            failed: false,
            apart: false,
            argv: Vec::new(),
            workdir: None,
            variables: Vec::new(),
            tty: stdin().is_terminal() && stdout().is_terminal(),
        })
    }
}

/// Runs the command in the running container, or in one of its own; returns its exit code.
pub(crate) fn run(cx: &Context, job: &Job) -> Result<u8> {
    let store = &job.store;
    let started = Instant::now();
    let mut wait = lock::Wait::begin();
    loop {
        // A running container does not have the failed step's tree, and cannot get new devices. A waiting container
        // ends when the lock is taken.
        let is_other = job.failed || job.apart || job.gpu.is_some();
        let locked = if is_other || is_outdated(cx, job)? {
            store.lock_known(&job.env, "exec", Duration::ZERO)
        } else {
            store.lock_unheld(&job.env, "exec")
        };
        match locked {
            Ok(env) => return own(cx, job, env),
            Err(error) if error.kind() == Kind::Busy => {
                let joins = !(job.failed || job.apart);
                if joins && let Some(exit) = join(cx, job)? {
                    if exit.then == Then::Ends {
                        await_end(cx, job)?;
                    }
                    return Ok(exit.code);
                }
                // Between two steps, or just after the last one, there is no container to join.
                let starts = |holder: Holder| holder.verb == "exec";
                let patience = match holder(store, &job.env).is_some_and(starts) {
                    true if joins => START,
                    _ => PATIENCE,
                };
                if started.elapsed() > patience {
                    return Err(error);
                }
                let path = lock::env_lock(&store.env_dir(&job.env));
                wait.tell(&path, &env_named(&job.env))?;
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits for the end of a container whose starter is gone: after its last command, the env must be free and clean.
fn await_end(cx: &Context, job: &Job) -> Result<()> {
    match job.store.lock_env(&job.env, "exec", START) {
        // The command's exit code does not depend on the end of the container. Ctrl-C ends the wait.
        Err(error) if matches!(error.kind(), Kind::Busy | Kind::Signal(_)) => {
            let message = format!("the container of env `{}` is still ending", job.env);
            cx.ui.warn(&message);
        }
        locked => drop(locked?),
    }
    cx.tidy(&job.store)
}

/// Returns whether the env's container waits for a command, but a new container would have other inputs.
fn is_outdated(cx: &Context, job: &Job) -> Result<bool> {
    match ContainerRecord::read(&job.store.env_dir(&job.env).join("run")) {
        Some(state) if state.idle => {
            Ok(state.made_of != inputs_digest(cx, job, &job.store.spec(&job.env)?)?)
        }
        _ => Ok(false),
    }
}

/// Returns a digest of an `exec` container's inputs outside the env. The env's lock protects the inputs inside.
fn inputs_digest(cx: &Context, job: &Job, spec: &Spec) -> Result<String> {
    let sizing = cx.sizing(spec, &job.host);
    let settings = (cx.config.idle, sizing.jobs.value, sizing.budget.value);
    container::inputs_digest(&job.env, &job.store, spec, &job.host, &settings)
}

/// Waits for the lock holder to record that the container waits again. The next command may read the record to tell
/// whether the env is in use.
fn await_note(run: &Path, waits: u64) {
    let until = Instant::now() + NOTE;
    while ContainerRecord::read(run).is_some_and(|state| state.waits < waits)
        && Instant::now() < until
    {
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Returns the record of the running container that other commands may join. A container listens a moment before it has
/// a record. A waiting one with another protocol is about to end.
fn joinable(run: &Path) -> Option<ContainerRecord> {
    let ends = |state: &ContainerRecord| state.idle && !state.has_this_protocol();
    ContainerRecord::read(run).filter(|state| !state.is_private && !ends(state))
}

/// Runs the job in the running container; `None` if the container is gone, or is for another command alone.
fn join(cx: &Context, job: &Job) -> Result<Option<Exit>> {
    let store = &job.store;
    let run = store.env_dir(&job.env).join("run");
    // The step's processes are frozen, and so is the one that would start the command.
    if store.is_paused(&job.env) {
        return Err(busy!(
            "a step of env `{}` is paused: the disk is full; it resumes by itself once there is space",
            job.env
        )
        .help("rockenv gc"));
    }
    // A connection would keep another command's container alive.
    if joinable(&run).is_none() {
        return Ok(None);
    }
    let Some(client) = Client::join(&run)? else {
        return Ok(None);
    };
    // Another container may have taken the place of the first one before the connection.
    let Some(state) = joinable(&run) else {
        return Ok(None);
    };
    if !state.has_this_protocol() {
        return Err(busy!(
            "the container of env `{}` was started by another build of rockenv",
            job.env
        )
        .help(format!(
            "wait for its commands, or end them: rockenv down {}",
            job.env
        )));
    }
    let spec = store.spec(&job.env)?;
    let devices = devices(cx, job, &spec)?;
    let mut command = command(cx, job, &spec, &devices);
    // The service created the container's device nodes with the groups of that time.
    if let Some(groups) = &mut command.groups
        && !devices.is_empty()
    {
        let nodes: Vec<Device> = devices.iter().cloned().chain(state.nodes).collect();
        *groups = gpu::groups(&nodes);
    }
    // The check has its own connection: the first one keeps a container alive that is about to end.
    if !devices.is_empty() {
        let Some(second) = Client::join(&run)? else {
            return Ok(None);
        };
        if gpu_check::check(&second, &devices, &command, None)? == GpuCheck::Gone {
            return Ok(None);
        }
    }
    store.use_env(&job.env, &store.known(&job.env)?);
    // Only a step's container has no digest of its inputs, because it never waits for another command.
    if state.made_of.is_empty() && store.join_attempt(&job.env)? {
        cx.ui.note(
            "a step is running: because this command could change its files, the step's snapshot counts as incremental",
        );
    }
    let by_hand = ByHand::begin(&store.env_dir(&job.env))?;
    let exit = terminal::run(&client, command, &|| tell_wait(cx, job));
    by_hand.end()?;
    if let Ok(Some(Exit {
        then: Then::Waits(waits),
        ..
    })) = exit
    {
        await_note(&run, waits);
    }
    exit
}

/// Returns the current nodes of the requested GPU.
fn devices(cx: &Context, job: &Job, spec: &Spec) -> Result<Vec<Device>> {
    let selector = match job.gpu.as_deref() {
        None | Some("none") => return Ok(Vec::new()),
        Some(which) => Selector::from(which),
    };
    let machine = cx.gpus();
    match machine.choose(&selector, &spec.targets, spec.gpu)? {
        Choice::Gpu { grant, note } => {
            if let Some(note) = note {
                cx.ui.note(&note);
            }
            grant.devices()
        }
        Choice::Without { why } => {
            let error = unavailable!("the command cannot use a GPU: {why}");
            Err(match machine.gpus.first() {
                // The GPU exists, but runs code for another target.
                Some(gpu) if machine.lack().is_none() => {
                    error.help(format!("--gpu={} passes it in all the same", gpu.render))
                }
                _ => error.help("rockenv doctor"),
            })
        }
    }
}

/// Puts the ninja of the env's builds into the container: another version cannot read their logs, and would start over.
/// If that ninja is unavailable, the image's serves, as in steps.
fn place_ninja(cx: &Context, store: &Store, env: &LockedEnv<'_>, spec: &Spec) -> Result<()> {
    if spec.resources.ninja {
        let (run, blobs) = (env.run_dir(), store.root().join("blobs"));
        let image = store.image_root(&env.known_record()?.image_key);
        let (own, cancel) = (cx.config.ninja.as_deref(), AtomicBool::new(false));
        drop(ninja::place(&run, own, &blobs, &image, true, &cancel));
    }
    Ok(())
}

/// Returns the failed step whose tree `shell --failed` opens.
fn failed_step(env: &LockedEnv<'_>) -> Result<Failed> {
    let (name, failed) = (env.name(), &env.known_record()?.failed);
    failed.clone().ok_or_else(|| {
        not_found!("no step of env `{name}` failed").help(format!("rockenv shell {name}"))
    })
}

/// Warns if the container of a live or failed tree was removed, for example by `docker system prune`.
pub(crate) fn warn_of_lost_changes(
    cx: &Context,
    env: &LockedEnv<'_>,
    tree: Option<&TreeId>,
) -> Result<()> {
    if let Some(tree) = tree
        && let Some(flavour) = env.without_container(tree)?
    {
        cx.ui.warn(&format!(
            "{flavour} has no container of env `{}`: changes outside volumes since its snapshot, if any, are gone",
            env.name()
        ));
    }
    Ok(())
}

/// Runs the job in a container of its own.
fn own(cx: &Context, job: &Job, mut env: LockedEnv<'_>) -> Result<u8> {
    let Job { host, store, .. } = job;
    let spec = store.spec(&job.env)?;
    // Whatever refuses the command comes before the first change: a live tree can count as a command's.
    let failed = job.failed.then(|| failed_step(&env)).transpose()?;
    let devices = devices(cx, job, &spec)?;
    if !job.apart {
        env.touch();
    }
    env.ensure_volumes(&spec.build_volumes(), &spec.user)?;
    if !job.apart {
        env.show_volumes()?;
    }
    let (tree, layer) = if let Some(failed) = failed {
        warn_of_lost_changes(cx, &env, Some(&failed.tree))?;
        env.show_failed()?;
        (failed.tree, failed.parent)
    } else if job.apart {
        let layer = env.known_record()?.head.layer.clone();
        (env.checkout_tree(layer.as_ref())?, layer)
    } else {
        warn_of_lost_changes(cx, &env, env.known_record()?.head.tree.as_ref())?;
        (env.live_tree()?, env.known_record()?.head.layer.clone())
    };
    let root = env.root(&tree, layer.as_ref(), None)?;
    place_ninja(cx, store, &env, &spec)?;
    let context = container::ContainerContext {
        env: &env,
        store,
        spec: &spec,
        sources: &source::directories(store, &spec),
        host,
    };
    let container = context.of_shell(root, devices.clone())?;
    // Device nodes get new numbers when a driver is reloaded, and a failed step's tree is used only once.
    let stays = devices.is_empty() && !job.failed && !job.apart;
    // A user must not wait for job slots: the first is always granted, and more only if they are free.
    let sizing = cx.sizing(&spec, host);
    let (file, together) = (store.jobs_file(), sizing.together);
    let claim = SlotClaim::open(&file, sizing.budget.value, together, &job.env)?;
    let (ticket, claim) = claim.pass(sizing.jobs.value, env.run_dir().join(container::FIFO));
    let hold = Hold {
        container,
        jobs: ticket,
        tie: OnDisconnect::Drain(if stays {
            cx.config.idle
        } else {
            Duration::ZERO
        }),
        run: env.run_dir(),
        program: host.program.clone(),
        systemd: host.systemd && host.root,
        rootless: !host.root,
        made_of: inputs_digest(cx, job, &spec)?,
        is_private: job.failed || job.apart,
    };
    let running = Running::start(&hold, env.lock_fd(), claim)?;
    let command = command(cx, job, &spec, &devices);
    let by_hand = ByHand::begin(env.directory())?;
    let code = in_container(&running, &devices, command, &|| tell_wait(cx, job));
    let mut noted = by_hand.end();
    let interrupted = match &code {
        Ok(exit) => exit.is_some_and(|exit| exit.interrupted),
        Err(error) => matches!(error.kind(), Kind::Signal(_)),
    };
    let end = running.finish(interrupted);
    if let Ok(End::Ended(_)) = &end {
        container::clean(store, &env.run_dir())?;
    }
    if job.apart {
        // If this command did not see the container end, the next one cleans up the tree, because no record names it.
        store.discard(&env.directory().join("trees").join(tree))?;
    } else {
        noted = noted.and(env.show_volumes());
        // A shell may stay open for days.
        env.touch();
    }
    drop(env);
    cx.tidy(store)?;
    let code = match (code, end) {
        (Err(ended), Err(why)) if matches!(ended.kind(), Kind::Command(_)) => {
            Err(ended.source(why))
        }
        // If both failed, the lock holder knows the reason.
        (_, Err(why)) => return Err(why),
        (code, Ok(_)) => code,
    };
    noted?;
    let exit = code?.ok_or_else(|| unavailable!("the container ended before the command began"))?;
    Ok(exit.code)
}

fn tell_wait(cx: &Context, job: &Job) {
    let container = format!("the container of env `{}`", job.env);
    let message = format!("waiting for {container}, which does not answer yet");
    cx.ui.note(&message);
}

/// Runs a command in a container that was just started, after its devices are checked; `None` if it did not start.
fn in_container(
    running: &Running,
    devices: &[Device],
    command: Command,
    waits: &dyn Fn(),
) -> Result<Option<Exit>> {
    if !devices.is_empty() {
        match running.connect() {
            Ok(client)
                if gpu_check::check(&client, devices, &command, None)? == GpuCheck::Passed => {}
            // The container failed to start, and its holder knows why.
            _ => return Ok(None),
        }
    }
    // Not earlier: a connection without a command would look like another client's.
    let client = running.connect()?;
    terminal::run(&client, command, waits)
}

/// Returns the command as the container runs it, with its environment and its user.
fn command(cx: &Context, job: &Job, spec: &Spec, devices: &[Device]) -> Command {
    let mut env = base_environment(spec, job.root);
    let sizing = cx.sizing(spec, &job.host);
    let facts = sizing.facts(sizing.jobs.value);
    let own = spec.env.iter();
    env.extend(own.map(|(name, value)| (name.clone(), resolve::finish(value, &facts))));
    certificates::set_variables(&mut env, &spec.env, &spec.image_env);
    env.extend(host_environment(spec, &cx.config));
    if job.tty {
        let term = cx.config.terminal.term.as_deref().unwrap_or("dumb");
        env.insert("TERM".to_owned(), term.to_owned());
    }
    // `-e` sets what the command sees, not where it starts.
    let home = env.get("HOME").cloned().unwrap_or_else(|| "/".to_owned());
    env.extend(job.variables.iter().cloned());
    let (uid, gid) = owner(job.root, spec);
    Command {
        argv: job.argv.iter().cloned().map(Word::from).collect(),
        env: env.into_iter().collect(),
        cwd: job.workdir.clone().unwrap_or(home),
        uid,
        gid,
        groups: job.host.root.then(|| gpu::groups(devices)),
        no_new_privs: !job.root,
        tty: job.tty,
    }
}
