//! Jobs of a real Slurm with one node on loopback, its own directories and its own munge, and with a database of
//! accounts where a test needs one.

mod figures;
mod queue;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use fs_err as fs;
use jiff::civil::DateTime;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{NO_GPU, project, without_gpu};
use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::registry::Registry;
use crate::support::run::{
    Background, Ran, finish, processes, processes_called, wait_for, wait_for_process, wait_until,
};

/// Slurm's daemons, ended on drop.
struct Slurm {
    directory: tempfile::TempDir,
    /// In the order of their start.
    daemons: Vec<Child>,
}

impl Slurm {
    fn start() -> Self {
        Self::started(false)
    }

    /// Starts a Slurm whose `sacct` knows the jobs.
    fn with_accounts() -> Self {
        Self::started(true)
    }

    fn started(accounts: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut slurm = Self {
            directory,
            daemons: Vec::new(),
        };
        for (name, mode) in [("state", 0o700), ("spool", 0o755), ("munge", 0o755)] {
            let path = slurm.path(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        }
        let key = slurm.path("munge/key");
        fs::write(&key, [7; 128]).unwrap();
        fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        fs::write(slurm.path("gpu0"), "").unwrap();
        let gres = format!("Name=gpu File={}\n", slurm.path("gpu0").display());
        fs::write(slurm.path("gres.conf"), gres).unwrap();
        let [controller, node, database] = free_ports();
        let mut configuration = slurm.configuration(controller, node);
        if accounts {
            configuration += &slurm.accounting(database);
        }
        fs::write(slurm.path("slurm.conf"), configuration).unwrap();

        let munge = ["key-file", "socket", "pid-file", "log-file", "seed-file"];
        let munge = munge.map(|name| {
            let file = name.trim_end_matches("-file");
            format!("--{name}={}", slurm.path("munge").join(file).display())
        });
        slurm.daemon(
            "/usr/sbin/munged",
            &[
                &["--foreground".to_owned(), "--force".to_owned()],
                &munge[..],
            ]
            .concat(),
        );
        let socket = slurm.path("munge/socket");
        wait_for("munge does not listen", || match socket.exists() {
            true => Ok(()),
            false => Err(slurm.log("munged")),
        });
        if accounts {
            slurm.keep_accounts(database);
        }
        slurm.daemon("/usr/sbin/slurmctld", &["-D".to_owned()]);
        slurm.daemon("/usr/sbin/slurmd", &["-D".to_owned()]);
        wait_for("the node is not ready", || {
            let state = slurm
                .tool("sinfo")
                .args(["-h", "-o", "%T"])
                .output()
                .unwrap();
            match state.stdout.as_slice() {
                b"idle\n" => Ok(()),
                _ => Err(slurm.log("slurmctld") + &slurm.log("slurmd")),
            }
        });
        slurm
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns a minimal configuration: no control groups, which this machine may lack, and no binding of jobs to
    /// processors.
    fn configuration(&self, controller: u16, node: u16) -> String {
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let name = name.trim().split('.').next().unwrap();
        let at = self.directory.path().display();
        format!(
            "ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={at}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
NodeName={name} NodeAddr=127.0.0.1 CPUs=1024 RealMemory=65536 Gres=gpu:1
PartitionName=all Nodes={name} Default=YES MaxTime=INFINITE State=UP
"
        )
    }

    /// Returns the settings of a controller that keeps jobs in a database and samples their usage each second.
    fn accounting(&self, port: u16) -> String {
        format!(
            "AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
",
            self.path("munge/socket").display()
        )
    }

    /// Starts a database, and the daemon that writes jobs into it. The controller needs both when it starts.
    fn keep_accounts(&mut self, port: u16) {
        let data = self.path("data");
        let [place, socket] = [&data, &data.join("socket")].map(|path| path.display().to_string());
        let options = ["--no-defaults", "--user=root", "--innodb-log-file-size=4M"];
        run(Command::new("mariadb-install-db")
            .args(options)
            .args(["--auth-root-authentication-method=socket", "--skip-test-db"])
            .arg(format!("--datadir={place}")));
        let mut options = options.map(str::to_owned).to_vec();
        options.extend([
            "--skip-networking".to_owned(),
            format!("--datadir={place}"),
            format!("--socket={socket}"),
        ]);
        self.daemon("/usr/sbin/mariadbd", &options);
        wait_for("the database does not listen", || {
            match data.join("socket").exists() {
                true => Ok(()),
                false => Err(self.log("mariadbd")),
            }
        });
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let configuration = format!(
            "AuthType=auth/munge
AuthInfo=socket={at}/munge/socket,cred_expire=5
DbdHost={name}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
PidFile={at}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
",
            name = name.trim().split('.').next().unwrap(),
            at = self.directory.path().display(),
        );
        let file = self.path("slurmdbd.conf");
        fs::write(&file, configuration).unwrap();
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        self.daemon("/usr/sbin/slurmdbd", &["-D".to_owned()]);
        wait_for("slurmdbd does not listen", || {
            TcpStream::connect(("127.0.0.1", port))
                .map(drop)
                .map_err(|error| format!("{error}\n{}", self.log("slurmdbd")))
        });
        let add = ["--immediate", "add", "cluster", "test"];
        run(self.tool("sacctmgr").args(add));
    }

    fn daemon(&mut self, program: &str, arguments: &[String]) {
        let name = program.rsplit('/').next().unwrap();
        let log = fs::File::create(self.path(&format!("{name}.out"))).unwrap();
        let mut command = self.tool(program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.file().try_clone().unwrap())
            .stderr(log.into_file());
        self.daemons.push(command.spawn().unwrap());
    }

    /// Lets the node fail: ends its daemon and its jobs, and tells the controller, which would notice only after
    /// `SlurmdTimeout`.
    fn fail(&mut self) {
        let spool = self.path("spool").display().to_string();
        let mut node = self.daemons.pop().unwrap();
        node.kill().unwrap();
        node.wait().unwrap();
        // A job's shell is a child of the job's `slurmstepd`.
        let shells = processes();
        let shells = shells.iter().filter(|(_, line)| line.contains(&spool));
        let keepers = shells.filter_map(|(shell, _)| {
            let stat = fs::read_to_string(format!("/proc/{shell}/stat")).ok()?;
            let (_, fields) = stat.rsplit_once(") ")?;
            let parent: i32 = fields.split(' ').nth(1)?.parse().ok()?;
            let name = fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
            name.starts_with("slurmstepd").then_some(parent)
        });
        // Finds all processes before the first kill: the children of a dead process belong to process 1.
        let all: Vec<i32> = keepers.flat_map(descendants).collect();
        for pid in all {
            let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let name = run(self.tool("sinfo").args(["-h", "-o", "%n"]));
        let name = format!("NodeName={}", name.trim());
        let state = ["State=DOWN", "Reason=failed"];
        run(self.tool("scontrol").args(["update", &name]).args(state));
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.out"))).unwrap_or_default()
    }

    fn tool(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("SLURM_CONF", self.path("slurm.conf"))
            // slurmdbd finds the database here.
            .env("MYSQL_UNIX_PORT", self.path("data/socket"))
            .current_dir(self.directory.path());
        command
    }

    /// Returns Slurm's records of jobs and tasks, one on each line.
    fn jobs(&self) -> Vec<String> {
        let text = run(self.tool("scontrol").args(["show", "job", "--oneliner"]));
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until no job is left. Returns the jobs' names and how they ended, sorted.
    fn ended(&self) -> Vec<String> {
        wait_for("jobs are left", || {
            let queue = run(self.tool("squeue").args(["--noheader", "--array"]));
            match queue.is_empty() {
                true => Ok(()),
                false => Err(queue + &self.log("slurmctld")),
            }
        });
        let field = |job: &str, name: &str| {
            let mut fields = job.split(' ').filter_map(|field| field.split_once('='));
            fields
                .find(|(known, _)| *known == name)
                .unwrap()
                .1
                .to_owned()
        };
        let jobs = self.jobs();
        let mut ended: Vec<String> = jobs
            .iter()
            .map(|job| format!("{} {}", field(job, "JobName"), field(job, "JobState")))
            .collect();
        ended.sort();
        ended
    }
}

/// Returns different ports on which no process listens.
fn free_ports() -> [u16; 3] {
    // Holds all ports until all are known.
    let ports = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    ports.map(|port| port.local_addr().unwrap().port())
}

/// Returns a process and all its descendants.
fn descendants(pid: i32) -> Vec<i32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let below = children
        .split_whitespace()
        .filter_map(|child| child.parse().ok());
    let mut all = vec![pid];
    all.extend(below.flat_map(descendants));
    all
}

impl Drop for Slurm {
    fn drop(&mut self) {
        drop(self.tool("scancel").args(["--user=root"]).output());
        for mut daemon in self.daemons.drain(..).rev() {
            let _: nix::Result<()> =
                kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM);
            drop(daemon.wait());
        }
    }
}

fn submit(store: &TestStore, slurm: &Slurm, more: &[&str]) -> Ran {
    let two = ["--profile", store.env(), "gfx1103", "gfx1201"];
    submit_all(store, slurm, &two, more)
}

fn submit_all(store: &TestStore, slurm: &Slurm, envs: &[&str], more: &[&str]) -> Ran {
    let asked = [
        &["matrix", "slurm", "--submit"],
        envs,
        &["--rockenv", env!("CARGO_BIN_EXE_rockenv")],
        more,
    ]
    .concat();
    let mut command = store.command(&asked);
    command
        .env("SLURM_CONF", slurm.path("slurm.conf"))
        // The caller trusts the checkout, but each job has to trust it by itself.
        .env("SBATCH_EXPORT", "ALL,ROCKENV_TRUSTED_DIRS=");
    without_gpu(store, &mut command);
    finish(asked.join(" "), command)
}

#[test]
fn what_is_common_is_a_job_and_each_env_a_task() {
    let store = TestStore::new();
    project(&store);
    let slurm = Slurm::start();
    // If Slurm refuses a job, the command cancels the others, and nothing is left in the queue.
    let refused = submit(&store, &slurm, &["--gres", "tape:1"]).exits(4);
    refused.says(&["cannot submit the jobs to Slurm", "sbatch: error", "help: "]);
    let left = slurm.ended();
    let array = format!("envs-{}-gfx1103", store.env());
    assert_eq!(left, ["common CANCELLED", &format!("{array} CANCELLED")]);

    let rows = store.work().join("rows.jsonl");
    let options = ["--gres", "gpu:1", "--timeout", "30"];
    let measured = ["--", "--metrics", rows.to_str().unwrap()];
    let submitted = submit(&store, &slurm, &[&options[..], &measured].concat());
    let submitted = submitted.ok().text();
    let names: Vec<String> = submitted
        .lines()
        .map(|line| line.split(' ').next().unwrap().replace(store.env(), "E"))
        .collect();
    assert_eq!(
        names,
        [
            "common",
            "E-gfx1103",
            "E-gfx1201",
            "E-gfx1103-gpu",
            "E-gfx1201-gpu"
        ]
    );
    let ended = slurm.ended();
    let done: Vec<String> = ended
        .iter()
        .filter(|line| !line.ends_with("CANCELLED"))
        .map(|line| line.replace(store.env(), "E"))
        .collect();
    assert_eq!(
        done,
        [
            "common COMPLETED",
            "envs-E-gfx1103 COMPLETED",
            "envs-E-gfx1103 COMPLETED",
            "E-gfx1103-gpu FAILED",
            "E-gfx1201-gpu FAILED",
        ],
        "{ended:?}"
    );
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    // Each row names one of the jobs that ran.
    let rows = fs::read_to_string(rows).unwrap();
    let jobs = slurm.jobs();
    assert!(rows.lines().count() > 3, "{rows}");
    for row in rows.lines() {
        let row: Value = serde_json::from_str(row).unwrap();
        let id = format!("JobId={} ", row["slurm_job"].as_str().unwrap());
        assert!(jobs.iter().any(|job| job.starts_with(&id)), "{id} {jobs:?}");
    }
    for job in slurm.jobs().iter().filter(|job| !job.contains("CANCELLED")) {
        assert!(
            job.contains("MinMemoryNode=100M") && job.contains("TimeLimit=00:30:00"),
            "{job}"
        );
        // Only the jobs that need a GPU request one.
        assert_eq!(job.contains("gpu:1"), job.contains("-gpu UserId="), "{job}");
        // A job that finds no GPU fails.
        if job.contains("gpu:1") {
            assert!(job.contains("ExitCode=4:0"), "{job}");
            let log = job
                .split(' ')
                .find_map(|field| field.strip_prefix("StdOut="));
            let log = fs::read_to_string(log.unwrap()).unwrap();
            assert!(log.contains(NO_GPU), "{log}");
        }
    }

    // If the common job fails, the jobs that depend on it do not wait forever.
    let profile = store
        .work()
        .join("profiles")
        .join(format!("{}.toml", store.env()));
    let text = fs::read_to_string(&profile).unwrap();
    fs::write(&profile, text.replace("echo two", "false; echo two")).unwrap();
    submit(&store, &slurm, &[]).ok();
    let mut ended = slurm.ended();
    ended.retain(|line| line.ends_with("FAILED") && !line.contains("-gpu "));
    assert_eq!(ended, ["common FAILED"]);
    assert_eq!(store.ran(), ["one"; 0], "what was built is found again");
    for target in ["gfx1103", "gfx1201"] {
        store
            .rockenv(&["--yes", "rm", &format!("{}-{target}", store.env())])
            .ok();
    }
}

#[test]
fn jobs_of_a_node_that_fails_go_on_from_the_registry() {
    let store = TestStore::new();
    project(&store);
    let registry = Registry::start(false);
    let mut slurm = Slurm::start();
    let sleeper = store.sleeper();
    fs::write(store.runs().join("wait"), &sleeper).unwrap();
    let repository = format!("{}/team/rocm", registry.host);
    submit(&store, &slurm, &["--registry", &repository]).ok();
    wait_until("both tasks are in their last step", || {
        processes_called(&sleeper).len() == 2
    });
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "one", "two"]);
    slurm.fail();
    fs::remove_file(store.runs().join("wait")).unwrap();
    wait_until("nothing of the envs is left", || {
        let home = store.home().display().to_string();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let works = |(_, line): &(i32, String)| line.contains(&home) || *line == sleeper;
        !mounts.contains(&home) && !processes().iter().any(works)
    });
    // The next node has no store. The kernel and nspawn keep these directories in memory, so they end with the node.
    fs::remove_dir_all(store.home()).unwrap();
    let memory = ["/sys/fs/cgroup", "/run/systemd/nspawn"];
    let ours = format!("*/rockenv-{}-*", store.env());
    let what = ["-depth", "-type", "d", "-path", &ours, "-delete"];
    // `find` fails if another process removes a directory meanwhile.
    Command::new("find")
        .args(memory)
        .args(what)
        .output()
        .unwrap();
    slurm.daemon("/usr/sbin/slurmd", &["-D".to_owned()]);
    let array = format!("envs-{}-gfx1103", store.env());
    let expected = [&array, &array, "common"].map(|name| format!("{name} COMPLETED"));
    let mut ended = slurm.ended();
    ended.sort_by_key(|line| line.starts_with("common"));
    assert_eq!(ended, expected);
    for job in slurm.jobs().iter().filter(|job| job.contains(&array)) {
        assert!(job.contains(" Restarts=1 "), "{job}");
    }
    assert_eq!(store.ran(), ["gfx1103", "gfx1201"]);
}

#[test]
fn a_submission_that_is_interrupted_takes_back_what_it_has() {
    let store = TestStore::new();
    project(&store);
    let sleeper = store.sleeper();
    // `sbatch` prints more than the job's id, and accepts the second job only after a very long time.
    let sbatch =
        format!("test ! -e ../first || {sleeper}; touch ../first; echo Welcome; echo 4711");
    let tools = [
        ("sbatch", sbatch.as_str()),
        ("scancel", "echo $* > ../taken-back"),
        ("squeue", ""),
    ];
    let command = submit_with(&store, &tools);
    let running = Background::start(command);
    wait_for_process(&sleeper);
    running.signal(Signal::SIGINT);
    running.wait().exits(130).says(&["interrupted"]);
    let taken_back = fs::read_to_string(store.work().join("taken-back")).unwrap();
    assert_eq!(taken_back, "4711\n");
    assert!(processes_called(&sleeper).is_empty());
}

/// Prepares a submission of two envs, with these scripts as Slurm's commands.
fn submit_with(store: &TestStore, tools: &[(&str, &str)]) -> Command {
    use std::os::unix::fs::PermissionsExt as _;
    let place = store.work().join("bin");
    fs::create_dir_all(&place).unwrap();
    for (name, script) in tools {
        let file = place.join(name);
        let text = format!("#!/bin/sh\ncd {}\n{script}\n", place.display());
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let envs = ["--profile", store.env(), "gfx1103", "gfx1201"];
    let mut command = store.command(&[&["matrix", "slurm", "--submit"][..], &envs].concat());
    command.env("PATH", format!("{}:/usr/bin:/bin", place.display()));
    command
}

#[test]
fn what_keeps_jobs_from_being_submitted_has_its_exit_code() {
    let store = TestStore::new();
    project(&store);
    let submit = |tools: &[(&str, &str)]| {
        let command = submit_with(&store, tools);
        finish("matrix slurm --submit".into(), command)
    };
    let mut command = submit_with(&store, &[]);
    command.env("PATH", store.work().join("bin"));
    let refused = finish("matrix slurm --submit".into(), command);
    insta::assert_snapshot!(store.shown(&refused), @"
    error: cannot submit the jobs to Slurm: there is no `squeue` here
    help: run rockenv on a machine of the cluster, or write the script without `--submit`
    exit code 4
    ");
    // An array, in the format that `squeue` has for job, task and comment. Its id is named only without others' tasks.
    let env = format!("{}-gfx1201", store.env());
    let queue = format!("echo 4711 1 rockenv:other,{env}");
    let with_other = format!("echo 4711 0 rockenv:other,{env}; {queue}");
    let refused = [
        &[("squeue", &*queue), ("sbatch", ""), ("scancel", "")][..],
        &[("squeue", &*with_other)],
        &[("squeue", "echo 'slurm_load_jobs error' >&2; exit 1")],
        &[
            ("squeue", ""),
            ("sbatch", "echo 'sbatch: error: no' >&2; exit 1"),
        ],
    ];
    let refused = refused.map(|tools| store.shown(&submit(tools)));
    insta::assert_snapshot!(refused.concat(), @"
    error: cannot submit the jobs to Slurm
      caused by: `sh` failed with status 1
      caused by: these envs are already in the queue, as job 4711: ENV-gfx1201
    help: scancel 4711, or wait for it
    exit code 6
    error: cannot submit the jobs to Slurm
      caused by: `sh` failed with status 1
      caused by: these envs are already in the queue, as job 4711_1: ENV-gfx1201
    help: scancel 4711_1, or wait for it
    exit code 6
    error: cannot submit the jobs to Slurm
      caused by: `sh` failed with status 1
      caused by: slurm_load_jobs error
        squeue failed
    help: `scontrol ping` shows whether Slurm answers
    exit code 4
    error: cannot submit the jobs to Slurm
      caused by: `sh` failed with status 1
      caused by: sbatch: error: no
    help: check `--gres` and `--sbatch`; sinfo shows what the cluster has
    exit code 4
    ");
}
