//! GPU device nodes that do not work: rockenv names the cause and runs nothing. `tests/vm/gpu` tests working nodes,
//! with real drivers.

use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Gid, chown};

use crate::support::env::TestStore;
use crate::support::machine::lay_out;
use crate::support::run::{Ran, finish, wait_for_process};

const PROFILE: &str = "[[step]]\nname = 'use'\ngpu = true\nrun = 'echo ran > ~/ran'\n";

/// A store, and a machine with one GPU.
struct Machine {
    store: TestStore,
    root: PathBuf,
}

impl Machine {
    /// Makes nodes with the numbers of /dev/null and /dev/loop-control, which group 4242 may open.
    fn new() -> Self {
        let store = TestStore::new();
        let root = store.work().join("machine");
        lay_out(&root, include_str!("../../gpu/780m"));
        let machine = Self { store, root };
        machine.node("kfd", 1, 3, 0o660);
        machine.node("dri/renderD128", 10, 237, 0o660);
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join("dev").join(name)
    }

    fn node(&self, name: &str, major: u64, minor: u64, mode: u32) {
        let path = self.path(name);
        if path.exists() {
            fs::remove_file(&path).unwrap();
        }
        mknod(&path, SFlag::S_IFCHR, Mode::empty(), makedev(major, minor)).unwrap();
        self.group(name, 4242, mode);
    }

    fn group(&self, name: &str, gid: u32, mode: u32) {
        use std::os::unix::fs::PermissionsExt as _;
        let path = self.path(name);
        chown(&path, None, Some(Gid::from_raw(gid))).unwrap();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn rockenv(&self, arguments: &[&str]) -> Ran {
        let mut command = self.store.command(arguments);
        command.env("ROCKENV_GPU_ROOT", &self.root);
        finish(arguments.join(" "), command)
    }

    fn exec(&self, script: &str) -> Ran {
        self.rockenv(&["exec", "--gpu", self.store.env(), "--", "sh", "-c", script])
    }
}

#[test]
fn a_step_does_not_start_before_its_gpu_works() {
    let machine = Machine::new();
    let env = machine.store.env();
    machine.store.profile(PROFILE);
    machine.rockenv(&["up", env]).exits(4).says(&[
        "cannot run step `use`",
        "the GPU cannot be used inside",
        // The group and the device rules allow the open, but another driver is behind the node.
        "`/dev/kfd`: number 1:3 belongs to another driver; `/dev/dri/renderD128`: number 10:237 belongs",
    ]);
    machine
        .store
        .sh("cat ran 2>/dev/null || echo no")
        .ok()
        .prints("no");
    // The machine is at fault, so the step does not count as failed.
    machine.rockenv(&["shell", "--failed", env]).exits(7);
    // With `--gpu none` the step is skipped, which does not count as done.
    machine
        .rockenv(&["up", env, "--gpu", "none"])
        .ok()
        .says(&["1 step skipped because `--gpu none` is set: use"]);
    // A step that a condition leaves out does not count as skipped.
    machine.store.profile(&format!(
        "{PROFILE}[[step]]\nname = 'other'\nwhen = {{ engine = ['{}'] }}\nrun = 'false'\n\
         [[step]]\nname = 'last'\nrun = 'true'\n",
        crate::support::env::other_engine()
    ));
    machine
        .rockenv(&["up", env, "--gpu", "none"])
        .ok()
        .says(&["done; 1 step skipped because `--gpu none` is set: use\n"]);
    machine
        .rockenv(&["up", env, "--gpu", "none"])
        .ok()
        .says(&["nothing to do; 1 step skipped because `--gpu none` is set: use\n"]);
    let plan = machine.rockenv(&["plan", env]).ok().text();
    assert!(plan.contains("use    run"), "{plan}");
}

#[test]
fn each_layer_that_says_no_is_named() {
    let machine = Machine::new();
    machine
        .store
        .up_with("[[step]]\nname = 'one'\nrun = 'true'\n");
    machine.group("kfd", 4242, 0o600);
    machine.exec("touch ran").exits(4).says(&[
        "`/dev/kfd`: permission denied (group 4242, mode 0600): its group has no permission to open it",
        "help: sudo udevadm trigger --action=add --name-match=/dev/kfd",
    ]);
    // rockenv gives no user root's group.
    machine.group("kfd", 0, 0o660);
    machine
        .exec("touch ran")
        .exits(4)
        .says(&["(group 0, mode 0660): it belongs to root alone"]);
    machine.node("kfd", free_major(), 0, 0o660);
    machine
        .exec("touch ran")
        .exits(4)
        .says(&["no driver has number", "help: the driver was reloaded"]);
    fs::remove_file(machine.path("kfd")).unwrap();
    machine
        .exec("touch ran")
        .exits(4)
        .says(&["the command cannot use a GPU: this machine has no /dev/kfd"]);
    machine.store.sh("ls").ok().prints("");
    // A command that did not start holds nothing.
    machine.node("kfd", 1, 3, 0o660);
    machine.exec("true").exits(4);
    machine.rockenv(&["rm", machine.store.env()]).ok();
}

#[test]
fn who_joins_a_container_without_a_gpu_is_told() {
    let machine = Machine::new();
    machine
        .store
        .up_with("[[step]]\nname = 'one'\nrun = 'true'\n");
    let sleeper = machine.store.sleeper();
    let line = format!("touch started; exec {sleeper}");
    let running = machine
        .store
        .start(&["exec", machine.store.env(), "--", "sh", "-c", &line]);
    wait_for_process(&sleeper);
    machine.exec("true").exits(4).says(&[
        "`/dev/kfd`: it is missing; `/dev/dri/renderD128`: it is missing",
        "the container runs without the GPU",
    ]);
    machine.rockenv(&["down", machine.store.env()]).ok();
    drop(running);
}

/// Returns a major number without a driver.
fn free_major() -> u64 {
    let used = fs::read_to_string("/proc/devices").unwrap();
    let used: Vec<&str> = used.split_whitespace().collect();
    (300..500)
        .find(|number| !used.contains(&number.to_string().as_str()))
        .unwrap()
}

#[test]
fn a_node_that_is_a_link_is_what_it_leads_to() {
    let machine = Machine::new();
    machine
        .store
        .up_with("[[step]]\nname = 'one'\nrun = 'true'\n");
    let real = machine.root.join("real");
    fs::rename(machine.path("kfd"), &real).unwrap();
    fs_err::os::unix::fs::symlink(Path::new("../real"), machine.path("kfd")).unwrap();
    machine
        .exec("true")
        .exits(4)
        .says(&["`/dev/kfd`: number 1:3"]);
}
