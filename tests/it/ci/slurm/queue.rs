//! Envs that are submitted again.

use fs_err as fs;

use super::{Slurm, project, submit_all};
use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::run::wait_until;

#[test]
fn each_env_that_is_in_the_queue_is_found() {
    let store = TestStore::new();
    project(&store);
    let slurm = Slurm::start();
    let submit = |targets: &[&str], more: &[&str]| {
        let envs = [&["--profile", store.env()], targets].concat();
        submit_all(&store, &slurm, &envs, more)
    };
    let refused = |targets: &[&str], env: &str| {
        let name = format!("{}-{env}", store.env());
        let said = submit(targets, &[]).exits(6);
        let queued = "these envs are already in the queue, as job ";
        said.says(&[queued, &name, "help: scancel "]);
    };
    let gpu = ["--gres", "gpu:1", "--sbatch=--hold"];
    let submitted = submit(&["gfx1103", "gfx1201"], &gpu).ok().text();
    refused(&["gfx1201"], "gfx1201");
    refused(&["gfx1100", "gfx1103", "gfx1201"], "gfx1103");
    // An env is in use while its step with a GPU waits.
    for line in submitted.lines().filter(|line| !line.contains("-gpu ")) {
        let (_, id) = line.split_once(' ').unwrap();
        run(slurm.tool("scontrol").args(["release", id]));
    }
    wait_until("the envs are built", || {
        let format = ["--noheader", "--format=%j"];
        let queue = run(slurm.tool("squeue").args(format));
        queue.lines().all(|name| name.ends_with("-gpu"))
    });
    refused(&["gfx1201"], "gfx1201");
    // Other envs can still be submitted.
    submit(&["gfx1100"], &["--sbatch=--hold"]).ok();
    refused(&["gfx1100"], "gfx1100");
    run(slurm.tool("scancel").arg("--user=root"));
    slurm.ended();
    // The names of an array's envs are in its comment, whose length Slurm limits.
    let names: Vec<String> = (0..40)
        .map(|number| format!("{}-{number:030}", store.env()))
        .collect();
    let profile = store.work().join(format!("profiles/{}.toml", store.env()));
    let text = fs::read_to_string(profile).unwrap();
    for name in &names {
        fs::write(store.work().join(format!("profiles/{name}.toml")), &text).unwrap();
    }
    let mut all: Vec<&str> = names.iter().flat_map(|name| ["--profile", name]).collect();
    all.push("gfx1103");
    let held = submit_all(&store, &slurm, &all, &["--sbatch=--hold"]).ok();
    assert_eq!(held.text().lines().count(), 41);
    for name in [&names[0], &names[20], &names[39]] {
        let said = submit_all(&store, &slurm, &["--profile", name, "gfx1103"], &[]);
        said.exits(6).says(&[name]);
    }
    run(slurm.tool("scancel").arg("--user=root"));
    slurm.ended();
}
