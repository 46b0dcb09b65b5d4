//! Owns reading facts about the machine, as plain values for `resolve`, the jobs decision and preflight.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::userns;

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Host {
    pub cores: u32,
    /// Memory in bytes that this process may use: the machine's, or less if its control group limits it.
    pub memory: u64,
    pub systemd: bool,
    /// Whether this process is the machine's root, not a user namespace's.
    pub root: bool,
    /// Path of the running rockenv binary, or of the one that replaced it.
    pub program: PathBuf,
}

/// Returns this machine's architecture in the notation of container images.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

impl Host {
    pub(crate) fn probe() -> Result<Self> {
        let cores = std::thread::available_parallelism()
            .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
        Ok(Self {
            cores,
            memory: total_memory(&fs::read_to_string(MEMINFO)?, is_of_kernel(MEMINFO))
                .min(group_memory()),
            systemd: Path::new("/run/systemd/system").is_dir(),
            root: userns::is_root(),
            program: std::env::current_exe()
                .map(in_place)
                .context(|| "cannot find rockenv's own binary".to_owned())?,
        })
    }
}

/// Returns the path of a running program's file, or of the file that replaced it, as an upgrade does.
fn in_place(program: PathBuf) -> PathBuf {
    let path = program.to_str();
    let replaced = path.and_then(|path| path.strip_suffix(" (deleted)"));
    replaced.map(PathBuf::from).unwrap_or(program)
}

/// Returns the working directory; fails if it has been removed.
pub(crate) fn working_directory() -> Result<PathBuf> {
    std::env::current_dir().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            not_found!("the working directory does not exist any more").help("cd to another one")
        }
        _ => unexpected!("cannot find the working directory").source(error),
    })
}

pub(crate) fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn trimmed(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

pub(crate) fn kernel() -> Option<String> {
    trimmed("/proc/sys/kernel/osrelease").map(|release| format!("Linux {release}"))
}

/// Returns the version of the module `amdgpu`, if it is not the kernel's in-tree module.
pub(crate) fn amdgpu() -> Option<String> {
    trimmed("/sys/module/amdgpu/version")
}

/// Returns whether AppArmor confines programs that have a profile.
pub(crate) fn has_apparmor() -> bool {
    trimmed("/sys/module/apparmor/parameters/enabled").as_deref() == Some("Y")
}

/// Returns whether SELinux enforces its policy. A permissive one refuses nothing.
pub(crate) fn has_selinux() -> bool {
    trimmed("/sys/fs/selinux/enforce").as_deref() == Some("1")
}

/// The machine's current memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MemoryNow {
    pub total: u64,
    /// Memory that programs can still allocate.
    pub available: u64,
    /// Percentage of the last ten seconds in which some process waited for memory, if the kernel reports it.
    pub stalled: Option<f64>,
}

pub(crate) fn memory_now() -> MemoryNow {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (meminfo, of_machine) = (text(MEMINFO), is_of_kernel(MEMINFO));
    let total = total_memory(&meminfo, of_machine);
    let cached = match of_machine {
        true => zfs_cache(&text("/proc/spl/kstat/zfs/arcstats")),
        false => 0,
    };
    MemoryNow {
        total,
        // If the field is unreadable, assumes enough memory. It is 0 once the kernel's own reserve is in use.
        available: memory_field(&meminfo, "MemAvailable:")
            .map_or(total, |bytes| bytes.saturating_add(cached).min(total)),
        stalled: fs::read_to_string("/proc/pressure/memory")
            .ok()
            .and_then(|text| stalled(&text, "some ", "avg10=")),
    }
}

/// Returns how many processes the kernel has killed on this machine because memory ran out.
pub(crate) fn oom_kills() -> u64 {
    let vmstat = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    field(&vmstat, "oom_kill ").unwrap_or(0)
}

/// Returns the number after `name` at the beginning of a line.
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// Returns the lowest memory limit of this process's control group and its ancestors; `u64::MAX` without a limit.
fn group_memory() -> u64 {
    let groups = memory_groups();
    lowest(groups.iter().flat_map(|group| memory_limits(group)))
}

fn lowest(limits: impl Iterator<Item = u64>) -> u64 {
    // `memory.high` may be 0: a container with a share of that would be killed at once.
    limits.filter(|bytes| *bytes > 0).min().unwrap_or(u64::MAX)
}

/// Returns the memory limits of a control group, in bytes.
pub(crate) fn memory_limits(group: &Path) -> impl Iterator<Item = u64> {
    // Above `memory.high` the kernel stalls the group's processes. `memory.limit_in_bytes` is that of cgroup v1.
    let files = ["memory.max", "memory.high", "memory.limit_in_bytes"].into_iter();
    // Without a limit the file contains `max`, or a number larger than any machine's memory.
    files.filter_map(|file| {
        let text = fs::read_to_string(group.join(file)).ok()?;
        text.trim().parse().ok()
    })
}

/// Returns the directories of this process's control group and its ancestors that may limit memory.
pub(crate) fn memory_groups() -> Vec<PathBuf> {
    let text = |path: &str| system_text(path).unwrap_or_default();
    memory_groups_of(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo"))
}

/// Returns the same from the texts of `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn memory_groups_of(own: &str, mounts: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((mount, source)) = line.split_once(" - ") else {
            continue;
        };
        let mut source = source.split(' ');
        let (kind, options) = (source.next(), source.nth(1).unwrap_or_default());
        let path = match kind {
            Some("cgroup2") => group_path(own, ""),
            Some("cgroup") if options.split(',').any(|one| one == "memory") => {
                group_path(own, "memory")
            }
            _ => continue,
        };
        let mut mount = mount.split(' ').skip(3);
        let (Some(root), Some(at), Some(path)) = (mount.next(), mount.next(), path) else {
            continue;
        };
        // In a container, the mount may begin at the container's own group.
        let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        found.extend(below.ancestors().map(|group| Path::new(at).join(group)));
    }
    found
}

/// Returns the control group that `/proc/PID/cgroup` names for a controller; the empty name is cgroup v2.
pub(crate) fn group_path<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let mut controllers = controllers.split(',');
        controllers.any(|one| one == controller).then_some(path)
    })
}

/// Returns a field of a line of pressure stall information (PSI).
pub(crate) fn stalled(text: &str, line: &str, field: &str) -> Option<f64> {
    let line = text.lines().find_map(|found| found.strip_prefix(line))?;
    line.split(' ')
        .find_map(|found| found.strip_prefix(field)?.parse().ok())
}

const MEMINFO: &str = "/proc/meminfo";

/// Returns whether a file in `/proc` is the kernel's. In a container, lxcfs may have mounted one with the container's
/// memory there, to which the machine's huge pages and ZFS's cache do not belong.
fn is_of_kernel(path: &str) -> bool {
    let device = |path: &str| Some(fs::metadata(path).ok()?.dev());
    device(path) == device("/proc")
}

/// Returns the total memory in bytes; of a machine, without the huge pages that are reserved for other programs.
fn total_memory(meminfo: &str, of_machine: bool) -> u64 {
    let field = |name: &str| memory_field(meminfo, name).unwrap_or(0);
    let huge = if of_machine { field("Hugetlb:") } else { 0 };
    let rest = field("MemTotal:").saturating_sub(huge);
    // Other containers than those of lxcfs may show a total of their own.
    rest.max(field("MemAvailable:"))
}

/// Returns the bytes of ZFS's cache that programs can get, from its `arcstats`. The kernel does not count them as
/// available, and the cache may take almost all of the memory.
fn zfs_cache(arcstats: &str) -> u64 {
    let field = |name: &str| {
        arcstats.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some(name)).then(|| words.nth(1)?.parse::<u64>().ok())?
        })
    };
    let kept = field("c_min").unwrap_or(0);
    field("size").unwrap_or(0).saturating_sub(kept)
}

/// Parses a field of `/proc/meminfo` and returns it in bytes.
fn memory_field(meminfo: &str, name: &str) -> Option<u64> {
    let kib = meminfo.lines().find_map(|line| {
        line.strip_prefix(name)?
            .trim()
            .strip_suffix(" kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    Some(kib? * 1024)
}

/// A file system's space, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Space {
    #[serde(rename = "size")]
    pub total: u64,
    /// Bytes in use, including metadata.
    pub used: u64,
    /// Bytes that an ordinary user can still write; in a file system in a file, as long as the file can grow.
    pub free: u64,
}

pub(crate) fn space(path: &Path) -> Result<Space> {
    let found = nix::sys::statvfs::statvfs(path)
        .context(|| format!("cannot ask for free space at `{}`", path.display()))?;
    if found.blocks() == 0 {
        // A tmpfs without a limit, or a FUSE file system that does not know. With zero, nothing would fit, and `gc`
        // would keep at most nothing.
        let total = i64::MAX.unsigned_abs();
        return Ok(Space {
            total,
            used: 0,
            free: total,
        });
    }
    // Some network file systems report more blocks than a number of bytes can count.
    let bytes = |blocks: u64| blocks.saturating_mul(found.fragment_size());
    let used = bytes(found.blocks().saturating_sub(found.blocks_free()));
    Ok(Space {
        total: bytes(found.blocks()),
        used,
        free: bytes(found.blocks_available()).min(growth(path, used).unwrap_or(u64::MAX)),
    })
}

/// Returns how many bytes a file system may grow by, if it is in a file. The file may be sparse and its disk almost
/// full: then writes fail that the file system has promised, and it becomes read-only.
fn growth(path: &Path, used: u64) -> Option<u64> {
    let mounted = mounted_as(beneath::open_path(path).ok()?.as_fd())?;
    let image = fs::read(backing_file(&mounted)?).ok()?;
    let image = PathBuf::from(OsString::from_vec(image.trim_ascii_end().to_owned()));
    // A loop device may also show a part of another device.
    let data = fs::metadata(&image).ok().filter(|data| data.is_file())?;
    let kept = data.blocks().saturating_mul(512);
    let disk = nix::sys::statvfs::statvfs(&image).ok()?;
    let free = disk.blocks_available().saturating_mul(disk.fragment_size());
    Some(free.saturating_add(kept.saturating_sub(used)))
}

/// Returns the file that names the file of a loop device, if the file system is mounted from one.
fn backing_file(mounted: &str) -> Option<String> {
    let device = mounted.split(' ').nth(1)?.strip_prefix("/dev/loop")?;
    let is_number = !device.is_empty() && device.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| format!("/sys/block/loop{device}/loop/backing_file"))
}

/// Returns the type, source and options of the file system of `fd`.
pub(crate) fn mounted_as(fd: BorrowedFd<'_>) -> Option<String> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    let id = info
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))?
        .trim();
    let table = fs::read("/proc/thread-self/mountinfo").ok()?;
    let table = String::from_utf8_lossy(&table);
    let line = table
        .lines()
        .find(|line| line.split(' ').next() == Some(id))?;
    line.split_once(" - ").map(|(_, tail)| tail.to_owned())
}

/// Returns the bytes that an ordinary user can still write below `path`.
pub(crate) fn free_space(path: &Path) -> Result<u64> {
    Ok(space(path)?.free)
}

/// Returns whether a file system has practically no room for another file, however many bytes are free. Some do not
/// count files.
pub(crate) fn lacks_inodes(path: &Path) -> bool {
    nix::sys::statvfs::statvfs(path)
        .is_ok_and(|found| found.files() > 0 && found.files_available() <= found.files() / 1000)
}

/// Returns how far the clock that can be set is ahead of the one that cannot, in nanoseconds.
pub(crate) fn clock_ahead() -> Option<i64> {
    let read = |clock: ClockId| {
        let time = clock_gettime(clock).ok()?;
        Some(time.tv_sec() * 1_000_000_000 + time.tv_nsec())
    };
    // Another process may run between two readings, so the quickest of several is the most exact.
    let readings = (0..8).filter_map(|_| {
        let before = read(ClockId::CLOCK_BOOTTIME)?;
        let time = read(ClockId::CLOCK_REALTIME)?;
        let after = read(ClockId::CLOCK_BOOTTIME)?;
        Some((after - before, time - before))
    });
    readings.min().map(|(_, ahead)| ahead)
}

/// Reads a text of the system. Names in it, such as those of mount points, processes and users, may be in any encoding.
pub(crate) fn system_text(path: impl AsRef<Path>) -> std::io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path.as_ref())?).into_owned())
}

/// Returns an environment variable inside an env, where rockenv replaces another program.
pub(crate) fn inherited(name: &str) -> Option<std::ffi::OsString> {
    std::env::vars_os().find_map(|(known, value)| (known == name).then_some(value))
}

/// Returns whether a text is a valid environment variable name in any shell.
pub(crate) fn is_variable_name(text: &str) -> bool {
    let first = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    let mut bytes = text.bytes();
    text.len() <= 256
        && bytes.next().is_some_and(first)
        && bytes.all(|byte| first(byte) || byte.is_ascii_digit())
}

/// Returns the sorted names in a directory; empty if it is unreadable.
pub(crate) fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_does_not_know_its_space_is_not_full() {
        let proc = space(Path::new("/proc")).unwrap();
        assert!(proc.total > 0);
        assert_eq!((proc.used, proc.free), (0, proc.total));
    }

    #[test]
    fn a_loop_device_has_a_file() {
        let expected = Some("/sys/block/loop12/loop/backing_file".to_owned());
        for (mounted, expected) in [
            ("btrfs /dev/loop12 rw,relatime", expected),
            ("btrfs /dev/loop12p1 rw", None),
            ("fuse /dev/loop/../x rw", None),
            ("ext4 /dev/sda1 rw", None),
            ("tmpfs", None),
        ] {
            assert_eq!(backing_file(mounted), expected, "{mounted}");
        }
    }

    #[test]
    fn memory_is_read_in_bytes() {
        assert_eq!(
            memory_field("MemTotal:       24684092 kB\nMemFree: 1 kB\n", "MemTotal:"),
            Some(24_684_092 * 1024)
        );
        // No memory left is not an unknown amount.
        let available = "MemAvailable:";
        assert_eq!(memory_field("MemAvailable: 0 kB\n", available), Some(0));
        assert_eq!(memory_field("nonsense", available), None);
        for (available, huge, total) in [(5, 0, 64), (5, 56, 8), (5, 62, 5), (60, 900, 60)] {
            let text = format!(
                "MemTotal: 64 kB\nMemAvailable: {available} kB\nHugepagesize: 2048 kB\nHugetlb: {huge} kB\n"
            );
            assert_eq!(total_memory(&text, true), total * 1024, "{text}");
            assert_eq!(total_memory(&text, false), 64 << 10, "{text}");
        }
        assert!(is_of_kernel("/proc/filesystems") && !is_of_kernel("/dev/null"));
        assert_eq!(lowest([0, 90, 91].into_iter()), 90);
        assert_eq!(lowest([0].into_iter()), u64::MAX);
        let zfs = "13 1 0x01 147 39984 5 7\nname type data\nc_min 4 2\nc_max 4 60\nsize 4 50\n";
        assert_eq!((zfs_cache(zfs), zfs_cache("")), (48, 0));
        assert_eq!(field("oom_kill_x 1\noom_kill 7\n", "oom_kill "), Some(7));
        let text = "some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=1\n";
        assert_eq!(stalled(text, "some ", "avg10="), Some(12.5));
        assert_eq!(stalled(text, "full ", "avg300="), Some(0.0));
    }

    #[test]
    fn the_program_is_the_one_that_replaced_it() {
        for program in ["/usr/bin/rockenv", "/usr/bin/rockenv (deleted)"] {
            assert_eq!(in_place(program.into()), Path::new("/usr/bin/rockenv"));
        }
    }

    #[test]
    fn memory_is_limited_by_the_group_and_by_all_above_it() {
        let mounts = "25 20 0:22 / /proc rw - proc proc rw\n\
            30 24 0:26 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n\
            31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
            32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let own = "4:memory:/a/b\n3:cpu,cpuacct:/c\n0::/d\n";
        let expected = [
            "/sys/fs/cgroup/memory/a/b",
            "/sys/fs/cgroup/memory/a",
            "/sys/fs/cgroup/memory",
            "/sys/fs/cgroup/unified/d",
            "/sys/fs/cgroup/unified",
        ];
        assert_eq!(memory_groups_of(own, mounts), expected.map(PathBuf::from));
        // In a container, the mount begins at the container's group.
        let mounts = "30 24 0:26 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let groups = |mounts: &str| memory_groups_of("0::/docker/x/y\n", mounts);
        let expected = ["/sys/fs/cgroup/y", "/sys/fs/cgroup"].map(PathBuf::from);
        assert_eq!(groups(mounts), expected);
        assert!(memory_groups_of("", "").is_empty());
        // The name of another mount point does not matter.
        let table = tempfile::NamedTempFile::new().unwrap();
        let other = b"29 24 0:25 / /media/caf\xe9 rw - ext4 /dev/a rw\n";
        fs::write(table.path(), [&other[..], mounts.as_bytes()].concat()).unwrap();
        assert_eq!(groups(&system_text(table.path()).unwrap()), expected);
    }
}
