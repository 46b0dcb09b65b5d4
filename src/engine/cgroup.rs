//! Owns the control group of one container: its limits, its figures, and killing every process in it.
//!
//! If systemd is PID 1, it owns the tree, so rockenv requests a transient scope. Elsewhere rockenv creates the
//! directories itself, in every relevant cgroup v1 hierarchy and in v2. A bare v2 mount beside v1 has no controllers,
//! but its `cgroup.kill` still ends a whole tree at once.

use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::Device;
use super::hold::PATIENCE;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::host::{self, group_path, system_text};

/// The slice of all containers if systemd is PID 1.
pub(crate) const SLICE: &str = "rockenv.slice";

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Limits {
    /// Maximum memory, in bytes.
    pub memory_max: Option<u64>,
    /// Maximum number of processes and threads.
    pub tasks_max: Option<u64>,
}

/// The resource usage of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Processor time, in microseconds; `None` if no hierarchy counts it.
    pub cpu_us: Option<u64>,
    /// Peak memory, in bytes, including page cache.
    pub memory_peak: Option<u64>,
    /// How often the kernel killed a process, or systemd-oomd a whole group, because memory ran out; `None` if no
    /// hierarchy counts that.
    pub oom_kills: Option<u64>,
}

/// The cgroup v1 hierarchies used for limits and figures.
const V1: [&str; 5] = ["memory", "pids", "cpuacct", "devices", "freezer"];

/// Mount points of the kernel's hierarchies, and this process's place in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hierarchies {
    /// cgroup v1: controller and parent directory for rockenv's groups.
    pub v1: Vec<(String, PathBuf)>,
    /// cgroup v2: its mount point.
    pub v2: Option<PathBuf>,
}

impl Hierarchies {
    pub fn probe() -> Result<Self> {
        let mounts = system_text("/proc/self/mountinfo")?;
        let own = system_text("/proc/self/cgroup")?;
        let mut found = Self::parse(&mounts, &own);
        found.v1.retain(|(_, directory)| directory.is_dir());
        Ok(found)
    }

    fn parse(mountinfo: &str, own: &str) -> Self {
        let mut found = Self::default();
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else {
                continue;
            };
            let Some(mount) = left.split(' ').nth(4) else {
                continue;
            };
            let mut right = right.split(' ');
            let kind = right.next().unwrap_or_default();
            let options = right.nth(1).unwrap_or_default();
            match kind {
                "cgroup2" if found.v2.is_none() => found.v2 = Some(PathBuf::from(mount)),
                "cgroup" => {
                    let has = |name: &str| options.split(',').any(|option| option == name);
                    // systemd-nspawn mirrors its v2 path into systemd's own v1 hierarchy and leaves it there.
                    if has("name=systemd") {
                        found.v1.push(("name=systemd".to_owned(), mount.into()));
                    }
                    for controller in V1.into_iter().filter(|name| has(name)) {
                        let path = group_path(own, controller).unwrap_or("/");
                        let directory = Path::new(mount).join(path.trim_start_matches('/'));
                        found.v1.push((controller.to_owned(), directory));
                    }
                }
                _ => {}
            }
        }
        found
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cgroup {
    /// The transient scope's unit name, if systemd is PID 1.
    pub unit: Option<String>,
    /// Directories by controller; the empty name is cgroup v2.
    pub directories: Vec<(String, PathBuf)>,
}

impl Cgroup {
    /// Names the group for `id` without creating it, so that the caller can record it first.
    pub(crate) fn plan(id: &str, hierarchies: &Hierarchies, systemd: bool) -> Self {
        let mut v1 = hierarchies.v1.iter();
        // The limits and figures of a scope would be in v1 groups, which a scope does not record.
        let is_v1 = v1.any(|(name, _)| name == "memory" || name == "pids");
        if systemd
            && !is_v1
            && let Some(mount) = &hierarchies.v2
        {
            let unit = format!("{id}.scope");
            let path = mount.join(SLICE).join(&unit);
            return Self {
                unit: Some(unit),
                directories: vec![(String::new(), path)],
            };
        }
        let v1 = hierarchies.v1.iter();
        let v1 = v1.map(|(name, path)| (name.clone(), path.join(id)));
        let v2 = hierarchies.v2.iter();
        let v2 = v2.map(|mount| (String::new(), mount.join(id)));
        Self {
            unit: None,
            directories: v1.chain(v2).collect(),
        }
    }

    /// Finds the group that a service created for the container `id`, from the process `pid` in it.
    pub(crate) fn of_container(pid: i64, id: &str) -> Result<Self> {
        let mounts = system_text("/proc/self/mountinfo")?;
        let theirs = system_text(format!("/proc/{pid}/cgroup"))?;
        let found = Hierarchies::parse(&mounts, &theirs);
        let mut directories = found.v1;
        if let Some(mount) = found.v2 {
            let path = group_path(&theirs, "").unwrap_or("/");
            directories.push((String::new(), mount.join(path.trim_start_matches('/'))));
        }
        // Killing a group that the container shares would kill other processes too.
        directories.retain(|(_, path)| path.to_string_lossy().contains(id) && path.is_dir());
        Ok(Self {
            unit: None,
            directories,
        })
    }

    /// Returns whether this is the group that [`Cgroup::plan`] names for `id`. A recorded group is used only if it
    /// cannot be any other.
    pub(super) fn is_of(&self, id: &str) -> bool {
        let scope = format!("{id}.scope");
        self.unit.as_ref().is_none_or(|unit| *unit == scope)
            && self.lie_in_hierarchies(|name| name == id || name == scope)
    }

    /// Returns whether this is a group that a service created for one container.
    pub(super) fn is_of_service(&self) -> bool {
        let of_one = |name: &str| {
            let mut words = name.split(|c: char| !c.is_ascii_hexdigit());
            words.any(|word| word.len() == 64)
        };
        self.unit.is_none() && self.lie_in_hierarchies(of_one)
    }

    /// Returns whether every directory is below a mounted hierarchy and is named like a single container's group.
    fn lie_in_hierarchies(&self, of_one: impl Fn(&str) -> bool) -> bool {
        let mounts = system_text("/proc/self/mountinfo").unwrap_or_default();
        let found = Hierarchies::parse(&mounts, "");
        let tops = found.v1.into_iter().map(|(_, mount)| mount);
        let tops: Vec<PathBuf> = tops.chain(found.v2).collect();
        self.directories.iter().all(|(_, directory)| {
            let below = tops.iter().find_map(|top| directory.strip_prefix(top).ok());
            let names = below.and_then(|below| {
                let parts = below.components().map(|part| match part {
                    Component::Normal(name) => name.to_str(),
                    _ => None,
                });
                parts.collect::<Option<Vec<&str>>>()
            });
            names.is_some_and(|names| names.iter().any(|name| of_one(name)))
        })
    }

    /// Returns whether the group restricts which devices may be opened, by systemd's rules or those of cgroup v1.
    pub(crate) fn has_device_rules(&self) -> bool {
        let mut controllers = self.directories.iter().map(|(controller, _)| controller);
        self.unit.is_some() || controllers.any(|controller| controller == "devices")
    }

    /// Creates the directories and sets the limits. [`Cgroup::launcher`] creates a scope instead.
    ///
    /// Returns a sentence for each limit that this machine cannot enforce.
    pub(crate) fn create(&self, limits: &Limits, devices: &[Device]) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        if self.unit.is_some() {
            return Ok(missing);
        }
        for (controller, directory) in &self.directories {
            if controller.is_empty()
                && let Some(parent) = directory.parent()
            {
                // Fails below the root of the hierarchy. The limits are then reported as missing.
                let file = parent.join("cgroup.subtree_control");
                for name in ["memory", "pids", "cpu", "io"] {
                    drop(fs::write(&file, format!("+{name}")));
                }
            }
            match fs::create_dir(directory) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                other => other?,
            }
            if controller == "devices" {
                close_devices(directory, devices)?;
            }
        }
        if let Some(bytes) = limits.memory_max {
            if !self.set(&["memory.limit_in_bytes", "memory.max"], bytes)? {
                missing.push("memory is not limited: no cgroup memory controller here".to_owned());
            }
            // Without this, a container at its limit swaps instead of being killed.
            drop(self.set(&["memory.memsw.limit_in_bytes"], bytes));
            drop(self.set(&["memory.swap.max"], 0));
        }
        if let Some(count) = limits.tasks_max
            && !self.set(&["pids.max"], count)?
        {
            missing.push(
                "the number of processes is not limited: no cgroup pids controller here".to_owned(),
            );
        }
        Ok(missing)
    }

    /// Returns the program and arguments that run a command inside the group.
    pub(crate) fn launcher(&self, limits: &Limits, devices: &[Device]) -> Vec<String> {
        let Some(unit) = &self.unit else {
            return Vec::new();
        };
        let mut argv: Vec<String> = ["systemd-run", "--scope", "--quiet", "--collect"]
            .map(str::to_owned)
            .to_vec();
        argv.push(format!("--slice={SLICE}"));
        argv.push(format!("--unit={unit}"));
        let mut property = |text: String| argv.push(format!("--property={text}"));
        // With this, `OOMPolicy` is `continue`. Old releases of systemd refuse that property for a scope.
        property("Delegate=yes".to_owned());
        if let Some(bytes) = limits.memory_max {
            property(format!("MemoryMax={bytes}"));
            property("MemorySwapMax=0".to_owned());
        }
        // Without this, systemd applies a default that a large build may reach.
        let tasks = limits.tasks_max;
        let tasks = tasks.map_or_else(|| "infinity".to_owned(), |count| count.to_string());
        property(format!("TasksMax={tasks}"));
        property("DevicePolicy=closed".to_owned());
        for class in ["/dev/ptmx", "char-pts", "/dev/net/tun", "/dev/fuse"] {
            property(format!("DeviceAllow={class} rwm"));
        }
        for device in devices {
            // By number, because the bound node may have another name.
            let (major, minor) = (device.major, device.minor);
            property(format!("DeviceAllow=/dev/char/{major}:{minor} rw"));
        }
        argv.push("--".to_owned());
        argv
    }

    /// Returns the files to write `0` to, in order to enter the group.
    pub(crate) fn procs_files(&self) -> Vec<PathBuf> {
        let own = self.directories.iter().filter(|_| self.unit.is_none());
        own.map(|(_, path)| path.join("cgroup.procs")).collect()
    }

    /// Writes `value` to the first of `files` that exists; returns whether any does.
    fn set(&self, files: &[&str], value: u64) -> Result<bool> {
        for (_, directory) in &self.directories {
            for file in files {
                let path = directory.join(file);
                if path.exists() {
                    fs::write(&path, value.to_string())?;
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Reads a file of the first hierarchy that has it.
    pub(super) fn read(&self, file: &str) -> Option<String> {
        let mut directories = self.directories.iter();
        directories.find_map(|(_, directory)| fs::read_to_string(directory.join(file)).ok())
    }

    /// Reads the group's usage so far.
    pub(crate) fn figures(&self) -> Figures {
        let number = |file: &str| self.read(file)?.trim().parse::<u64>().ok();
        let field = |file: &str, name: &str| host::field(&self.read(file)?, name);
        let by_kernel = field("memory.events", "oom_kill ")
            .or_else(|| field("memory.oom_control", "oom_kill "));
        // Before Linux 5.19, this is all that is known of the peak.
        let reached = field("memory.events", "oom ");
        let mut directories = self.directories.iter();
        let unified = directories.find(|(name, _)| name.is_empty());
        let by_oomd = unified.map(|(_, directory)| oomd_kills(directory));
        Figures {
            cpu_us: field("cpu.stat", "usage_usec ")
                .or_else(|| Some(number("cpuacct.usage")? / 1000)),
            memory_peak: number("memory.peak")
                .or_else(|| number("memory.max_usage_in_bytes"))
                .or_else(|| number("memory.max").filter(|_| reached > Some(0))),
            oom_kills: by_kernel.max(by_oomd.filter(|count| *count > 0)),
        }
    }

    pub(crate) fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        for (_, directory) in &self.directories {
            processes(directory, &mut found);
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Freezes or thaws every process in the group; returns whether this machine supports it.
    pub(crate) fn freeze(&self, frozen: bool) -> bool {
        let (old, new) = if frozen {
            ("FROZEN", "1")
        } else {
            ("THAWED", "0")
        };
        self.directories.iter().any(|(controller, directory)| {
            let (file, value) = match controller.as_str() {
                "" => ("cgroup.freeze", new),
                "freezer" => ("freezer.state", old),
                _ => return false,
            };
            let path = directory.join(file);
            path.exists() && fs::write(path, value).is_ok()
        })
    }

    /// Returns whether [`Self::freeze`] stopped the group.
    pub(crate) fn is_frozen(&self) -> bool {
        self.directories.iter().any(|(controller, directory)| {
            let (file, frozen) = match controller.as_str() {
                "" => ("cgroup.freeze", "1"),
                "freezer" => ("freezer.self_freezing", "1"),
                _ => return false,
            };
            fs::read_to_string(directory.join(file)).is_ok_and(|text| text.trim() == frozen)
        })
    }

    /// Sends SIGTERM to every process in the group except systemd-nspawn, whose exit would kill the others at once.
    pub(crate) fn terminate(&self) {
        for pid in self.processes() {
            let engine = fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|name| name.trim_end() == "systemd-nspawn");
            if !engine {
                let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
        }
    }

    /// Kills every process in the group and waits until none is left.
    pub(crate) fn kill(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        // In cgroup v1 a frozen process does not die.
        self.freeze(false);
        loop {
            for (controller, directory) in &self.directories {
                if controller.is_empty() {
                    // Absent before Linux 5.14; the signals below do the same in more steps.
                    drop(fs::write(directory.join("cgroup.kill"), "1"));
                }
            }
            let left = self.processes();
            if left.is_empty() {
                return Ok(());
            }
            for pid in &left {
                let _: nix::Result<()> = kill(Pid::from_raw(*pid), Signal::SIGKILL);
            }
            if Instant::now() > deadline {
                return Err(busy!("processes {left:?} do not exit")
                    .help("look at their state with `ps -o pid,stat,wchan:20,cmd -p PID`; state D means that the kernel holds them"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Removes the directories; the group must be empty.
    pub(crate) fn remove(&self) -> Result<()> {
        if self.unit.is_some() {
            // The scope ends by itself with its last process.
            return Ok(());
        }
        for (_, directory) in &self.directories {
            remove_group(directory)
                .context(|| format!("cannot remove cgroup `{}`", directory.display()))?;
        }
        Ok(())
    }
}

fn processes(directory: &Path, into: &mut Vec<i32>) {
    let text = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    let pids = text.lines().filter_map(|line| line.parse::<i32>().ok());
    into.extend(pids.filter(|pid| *pid > 0));
    for child in children(directory) {
        processes(&child, into);
    }
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// Returns how often systemd-oomd has killed a group or one below it: it kills only groups without others below them,
/// such as the `payload` that systemd-nspawn makes. The kernel does not count that, but systemd-oomd leaves an attribute
/// before it kills.
fn oomd_kills(directory: &Path) -> u64 {
    let mut value = [0_u8; 20];
    let length = rustix::fs::getxattr(directory, "user.oomd_ooms", &mut value).unwrap_or(0);
    let text = String::from_utf8_lossy(&value[..length]);
    let below = children(directory);
    let below = below.iter().map(|child| oomd_kills(child)).sum::<u64>();
    text.parse::<u32>().map_or(0, u64::from) + below
}

fn remove_group(directory: &Path) -> std::io::Result<()> {
    for child in children(directory) {
        remove_group(&child)?;
    }
    // A group stays busy for a moment after its last process exits, longer on a loaded machine.
    let deadline = Instant::now() + PATIENCE;
    loop {
        match fs::remove_dir(directory) {
            Err(error)
                if error.kind() == std::io::ErrorKind::ResourceBusy
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => return other,
        }
    }
}

/// Restricts a v1 device group to the standard devices of containers and to `devices` (systemd does this for a scope).
fn close_devices(directory: &Path, devices: &[Device]) -> Result<()> {
    fs::write(directory.join("devices.deny"), "a")?;
    // null, zero, full, random, urandom, tty, console, ptmx, pts, tun, fuse. `m` alone lets packages create other nodes
    // but not open them.
    let standard = [
        "1:3", "1:5", "1:7", "1:8", "1:9", "5:0", "5:1", "5:2", "136:*", "10:200", "10:229",
    ];
    let create = ["c *:* m", "b *:* m"].map(str::to_owned).into_iter();
    let standard = standard.map(|node| format!("c {node} rwm"));
    let given = devices.iter();
    let given = given.map(|device| format!("c {}:{} rw", device.major, device.minor));
    for rule in create.chain(standard).chain(given) {
        fs::write(directory.join("devices.allow"), rule)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:3 - cgroup2 cgroup2 rw\n";

    #[test]
    fn v1_hierarchies_are_found_below_the_callers_own_group() {
        let found = Hierarchies::parse(HYBRID, "4:memory:/jobs/7\n2:cpu,cpuacct:/\n0::/\n");
        let v1 = [
            ("cpuacct", "/sys/fs/cgroup/cpu,cpuacct"),
            ("memory", "/sys/fs/cgroup/memory/jobs/7"),
        ];
        let v1 = v1.map(|(name, path)| (name.to_owned(), PathBuf::from(path)));
        assert_eq!(found.v1, v1);
        assert_eq!(found.v2, Some("/sys/fs/cgroup/unified".into()));
    }

    #[test]
    fn a_group_out_of_memory_is_known_by_what_killed_it() {
        let top = tempfile::tempdir().unwrap();
        let payload = top.path().join("payload");
        fs::create_dir(&payload).unwrap();
        let group = Cgroup {
            unit: None,
            directories: vec![(String::new(), top.path().to_owned())],
        };
        assert_eq!(group.figures().oom_kills, None);
        fs::write(top.path().join("memory.events"), "oom_kill 0\n").unwrap();
        assert_eq!(group.figures().oom_kills, Some(0));
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&payload, "user.oomd_ooms", b"1", flags).unwrap();
        assert_eq!(group.figures().oom_kills, Some(1));
        fs::write(top.path().join("memory.max"), "9\n").unwrap();
        assert_eq!(group.figures().memory_peak, None);
        fs::write(top.path().join("memory.events"), "oom 1\n").unwrap();
        assert_eq!(group.figures().memory_peak, Some(9));
    }

    #[test]
    fn a_scope_is_planned_where_systemd_rules() {
        let found = Hierarchies {
            v1: Vec::new(),
            v2: Some("/sys/fs/cgroup".into()),
        };
        let group = Cgroup::plan("rockenv-a-1", &found, true);
        let scope = Path::new("/sys/fs/cgroup/rockenv.slice/rockenv-a-1.scope");
        assert_eq!(group.directories[0].1, scope);
        let argv = group.launcher(
            &Limits {
                memory_max: Some(5),
                tasks_max: None,
            },
            &[Device {
                major: 511,
                ..Device::default()
            }],
        );
        assert!(argv.contains(&"--property=MemoryMax=5".to_owned()));
        assert!(argv.contains(&"--property=TasksMax=infinity".to_owned()));
        assert!(argv.contains(&"--property=DeviceAllow=/dev/char/511:0 rw".to_owned()));
        let has = |name: &str| argv.iter().any(|argument| argument.contains(name));
        assert!(has("Delegate=yes") && !has("OOMPolicy"));
        assert!(group.procs_files().is_empty());
        // With cgroup v1 beside an empty v2, out of memory is reported in v1.
        let hybrid = Hierarchies::parse(HYBRID, "4:memory:/\n0::/\n");
        let group = Cgroup::plan("rockenv-a-1", &hybrid, true);
        let memory = PathBuf::from("/sys/fs/cgroup/memory/rockenv-a-1");
        assert!(group.unit.is_none());
        assert!(group.directories.contains(&("memory".to_owned(), memory)));
    }
}
