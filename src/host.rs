//! Owns reading the machine: what `resolve`, the jobs decision and preflight need to know, as plain values.

use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use crate::error::{Result, ResultExt as _};
use crate::userns;

/// What the machine has.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// Processors this process may use.
    pub cores: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Whether systemd is PID 1.
    pub systemd: bool,
    /// Whether this process is root of the machine.
    pub root: bool,
    /// rockenv's own binary.
    pub program: PathBuf,
}

impl Host {
    /// Reads the machine.
    pub fn probe() -> Result<Self> {
        let cores = std::thread::available_parallelism()
            .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
        Ok(Self {
            cores,
            memory: memory_total(&fs::read_to_string("/proc/meminfo")?),
            systemd: Path::new("/run/systemd/system").is_dir(),
            root: userns::is_root(),
            program: std::env::current_exe()
                .context(|| "cannot find rockenv's own binary".to_owned())?,
        })
    }
}

/// Parses `/proc/meminfo`; returns bytes.
fn memory_total(meminfo: &str) -> u64 {
    let kib = meminfo.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix(" kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    kib.unwrap_or(0) * 1024
}

/// Free space below `path` that an ordinary user could still write, in bytes.
pub fn free_space(path: &Path) -> Result<u64> {
    let found = nix::sys::statvfs::statvfs(path)
        .context(|| format!("cannot ask for free space at `{}`", path.display()))?;
    Ok(found.blocks_available() * found.fragment_size())
}

/// How many jobs fit: cores, memory by what one job takes, and what was configured.
pub fn jobs(cores: u32, memory: u64, memory_per_job: Option<u64>, configured: Option<u32>) -> u32 {
    let by_memory = memory_per_job
        .filter(|bytes| *bytes > 0)
        .map_or(u32::MAX, |bytes| {
            u32::try_from(memory / bytes).unwrap_or(u32::MAX)
        });
    cores
        .min(by_memory)
        .min(configured.unwrap_or(u32::MAX))
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        assert_eq!(
            memory_total("MemTotal:       24684092 kB\nMemFree: 1 kB\n"),
            24_684_092 * 1024
        );
        assert_eq!(memory_total("nonsense"), 0);
    }

    #[test]
    fn jobs_are_bounded_by_cores_memory_and_configuration() {
        let gib = 1 << 30;
        assert_eq!(jobs(16, 64 * gib, Some(4 * gib), None), 16);
        assert_eq!(jobs(16, 32 * gib, Some(4 * gib), None), 8);
        assert_eq!(jobs(16, 2 * gib, Some(4 * gib), None), 1);
        assert_eq!(jobs(16, 64 * gib, None, Some(3)), 3);
    }
}
