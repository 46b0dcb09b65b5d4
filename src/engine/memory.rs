//! Owns a control group's memory figures: its usage, its stalls, and the limits of the groups around it.

use std::path::Path;

use fs_err as fs;

use super::cgroup::Cgroup;
use crate::sys::host;

/// Memory in use without page cache, and its limit, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limited {
    pub(super) used: u64,
    pub(super) limit: u64,
}

impl Cgroup {
    /// Returns the memory in use without page cache, in bytes, if it is counted.
    pub(crate) fn anonymous(&self) -> Option<u64> {
        let mut directories = self.directories.iter();
        directories.find_map(|(_, directory)| anonymous(directory))
    }

    /// Returns a field of the control group's memory pressure (PSI): a share of time, in percent.
    pub(crate) fn stalled(&self, line: &str, field: &str) -> Option<f64> {
        host::stalled(&self.read("memory.pressure")?, line, field)
    }

    /// Returns the memory of each group with a limit around this one: a session, a slice, a cluster's job, a container.
    pub(super) fn around(&self) -> Vec<Limited> {
        if self.directories.is_empty() {
            // The container has no group of its own, so its processes are in the group of this process.
            let groups = host::memory_groups().into_iter();
            return groups.filter_map(|group| limited(&group)).collect();
        }
        let directories = self.directories.iter();
        let above = directories.flat_map(|(_, directory)| directory.ancestors().skip(1));
        above.filter_map(limited).collect()
    }
}

/// Returns the memory of a group and those below it; `None` without a limit.
fn limited(directory: &Path) -> Option<Limited> {
    Some(Limited {
        limit: host::memory_limits(directory).min()?,
        used: anonymous(directory)?,
    })
}

/// Returns the memory in use in a group and those below it without page cache, in bytes, if it is counted.
fn anonymous(directory: &Path) -> Option<u64> {
    let text = fs::read_to_string(directory.join("memory.stat")).ok()?;
    let field = |name| host::field(&text, name);
    // In cgroup v1, fields without `total_` leave out the groups below.
    let (held, shared) = match field("total_rss ") {
        Some(held) => (held, field("total_shmem ")),
        None => (field("anon ")?, field("shmem ")),
    };
    Some(held + shared.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_around_count_if_they_have_a_limit() {
        let top = tempfile::tempdir().unwrap();
        let own = top.path().join("job/step/env");
        fs::create_dir_all(&own).unwrap();
        let write = |group: &str, file: &str, text: &str| {
            fs::write(top.path().join(group).join(file), text).unwrap();
        };
        // `around` leaves out the group's own limit.
        write("job/step/env", "memory.stat", "anon 5\nfile 9\nshmem 1\n");
        write("job/step/env", "memory.max", "10\n");
        write("job/step", "memory.stat", "anon 7\nshmem 1\n");
        write("job/step", "memory.max", "max\n");
        write("job", "memory.stat", "anon 70\nfile 9\nshmem 10\n");
        write("job", "memory.max", "100\n");
        let group = Cgroup {
            unit: None,
            directories: vec![(String::new(), own)],
        };
        let job = |used| vec![Limited { used, limit: 100 }];
        assert_eq!((group.anonymous(), group.around()), (Some(6), job(80)));
        write("job", "memory.high", "90\n");
        assert_eq!(group.around()[0].limit, 90);
        write("job", "memory.high", "max\n");
        // The same in cgroup v1.
        let text = "rss 1\nshmem 1\ntotal_cache 9\ntotal_rss 60\ntotal_shmem 2\n";
        write("job", "memory.stat", text);
        fs::rename(
            top.path().join("job/memory.max"),
            top.path().join("job/memory.limit_in_bytes"),
        )
        .unwrap();
        assert_eq!(group.around(), job(62));
    }
}
