//! Builds in CI: what is said there, and the jobs that are written for it. Needs root.

mod action;
mod gitlab;
mod kubernetes;
mod output;
mod pipelines;
mod slurm;

use std::process::Command;

use crate::support::env::TestStore;
use fs_err as fs;

/// Two steps that are the same for all targets, one that is not, and one with a GPU, which write down that they ran.
const STEPS: &str = "
[params]
x = ''
[resources]
memory = '100M'
memory-per-job = '10M'
[[volume]]
name = 'runs'
kind = 'host'
access = 'rw'
path = 'OUT'
target = '/runs'
[[step]]
name = 'one'
run = 'echo one >> /runs/log'
[[step]]
name = 'two'
run = 'echo two >> /runs/log'
[[step]]
name = 'own'
run = '''
echo ${target} >> /runs/log
test ! -e /runs/no-${target}
test ! -e /runs/wait || $(cat /runs/wait)
'''
[[step]]
name = 'test'
gpu = true
run = 'echo test >> /runs/log'
";

/// Writes the profile, and who has a GPU.
fn project(store: &TestStore) {
    store.profile(&STEPS.replace("OUT", &store.runs().display().to_string()));
    let text = "build = ['self-hosted', 'big']\n[gpu]\ngfx1103 = ['self-hosted', '780m']\n";
    fs::write(store.work().join("runners.toml"), text).unwrap();
}

/// Runs a command on a machine without a GPU, whatever this one has: jobs that need one fail there.
fn without_gpu<'a>(store: &TestStore, command: &'a mut Command) -> &'a mut Command {
    command.env("ROCKENV_GPU_ROOT", store.work().join("no-gpu"))
}

/// What a job that needs a GPU says there.
const NO_GPU: &str = "steps with a GPU cannot run: this machine has no GPU";

/// Returns what is left of envs in the store.
fn left(store: &TestStore) -> Vec<String> {
    let below = |name: &str| fs::read_dir(store.home().join(name)).into_iter().flatten();
    let left = below("layers").chain(below("envs")).flatten();
    // An env's lock outlives it.
    left.filter(|entry| {
        entry.path().join("record.json").exists() || entry.path().join("layer.json").exists()
    })
    .map(|entry| entry.path().display().to_string())
    .collect()
}
