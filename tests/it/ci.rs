//! Builds in CI: their output, and the generated jobs. Needs root.

mod action;
mod gitlab;
mod kubernetes;
mod output;
mod pipelines;
mod slurm;

use std::process::Command;

use crate::support::env::TestStore;
use fs_err as fs;

/// Two steps that all targets share, one that differs by target, and one with a GPU. Each records that it ran.
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

/// Writes the profile, and the file that names the runners with GPUs.
fn project(store: &TestStore) {
    store.profile(&STEPS.replace("OUT", &store.runs().display().to_string()));
    let text = "build = ['self-hosted', 'big']\n[gpu]\ngfx1103 = ['self-hosted', '780m']\n";
    fs::write(store.work().join("runners.toml"), text).unwrap();
}

/// Runs a command as on a machine without a GPU, whatever this one has. Jobs that need a GPU fail there.
fn without_gpu<'a>(store: &TestStore, command: &'a mut Command) -> &'a mut Command {
    command.env("ROCKENV_GPU_ROOT", store.work().join("no-gpu"))
}

/// The error of a job that needs a GPU on such a machine.
const NO_GPU: &str = "steps with a GPU cannot run: this machine has no GPU";

/// Returns the remaining layers and env records of the store.
fn left(store: &TestStore) -> Vec<String> {
    let below = |name: &str| fs::read_dir(store.home().join(name)).into_iter().flatten();
    let left = below("layers").chain(below("envs")).flatten();
    // The env's directory outlives it, because the lock file stays.
    left.filter(|entry| {
        entry.path().join("record.json").exists() || entry.path().join("layer.json").exists()
    })
    .map(|entry| entry.path().display().to_string())
    .collect()
}
