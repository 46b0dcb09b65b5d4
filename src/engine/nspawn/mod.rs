//! Owns systemd-nspawn: its command line, a pure function from a container to arguments; `hold` runs it.
//!
//! Works with systemd 249 to 258. nspawn reads `.nspawn` files beside the tree unless told not to (CVE-2026-40226). It
//! mounts a small tmpfs over `/tmp` unless its environment says otherwise.

mod hold;

use std::path::Path;

pub(super) use hold::hold;

use super::Container;
use crate::sys::process::PATH;

/// Path of rockenv's binary inside every container.
pub(crate) const PROGRAM: &str = "/run/rockenv/bin/rockenv";

/// Environment of systemd-nspawn itself; `/tmp` comes from the store instead of a tmpfs in memory.
pub(crate) const ENVIRONMENT: [(&str, &str); 3] = [
    ("SYSTEMD_NSPAWN_TMPFS_TMP", "0"),
    ("PATH", PATH),
    ("LC_ALL", "C.UTF-8"),
];

/// The default capabilities of systemd-nspawn that Docker and Podman do not grant: a step has one key for all engines.
/// With the first three, root inside could remount read-only binds, open host files by their handles, and restart the
/// container.
const DROPPED: &str = "--drop-capability=CAP_SYS_ADMIN,CAP_DAC_READ_SEARCH,CAP_SYS_BOOT,CAP_AUDIT_CONTROL,\
    CAP_IPC_OWNER,CAP_LEASE,CAP_LINUX_IMMUTABLE,CAP_NET_ADMIN,CAP_NET_BROADCAST,CAP_SYS_NICE,CAP_SYS_PTRACE,\
    CAP_SYS_RESOURCE,CAP_SYS_TTY_CONFIG";

/// System calls that Docker and Podman allow. systemd-nspawn ties most of them to capabilities that no engine grants,
/// and allows those of Landlock since release 257 only.
const ALLOWED: &str = "--system-call-filter=@memlock @pkey adjtimex clock_adjtime landlock_add_rule \
    landlock_create_ruleset landlock_restrict_self modify_ldt ptrace process_vm_readv process_vm_writev";

/// System calls that Docker, for `io_uring` since release 25, and Podman refuse.
const REFUSED: &str =
    "--system-call-filter=~io_uring_enter io_uring_register io_uring_setup userfaultfd";

/// Returns the arguments that run the agent in `container`, whose tree is mounted at `root`. `has_device_rules` tells
/// whether its control group restricts which devices may be opened; `open_files` are the limits of open files.
pub(crate) fn argv(
    container: &Container,
    root: &Path,
    program: &Path,
    has_device_rules: bool,
    open_files: (u64, u64),
) -> Vec<String> {
    let mut argv: Vec<String> = [
        "systemd-nspawn",
        "--quiet",
        "--settings=no",
        "--as-pid2",
        "--register=no",
        "--keep-unit",
        "--pipe",
        "--link-journal=no",
        "--timezone=off",
        "--hostname=rockenv",
        DROPPED,
        ALLOWED,
        REFUSED,
    ]
    .map(str::to_owned)
    .to_vec();
    if !has_device_rules {
        // Root inside could create nodes in `/dev` and open the host's disks.
        argv.push("--drop-capability=CAP_MKNOD".to_owned());
    }
    // The default is 4096, which a step cannot raise.
    let (soft, hard) = open_files;
    argv.push(format!("--rlimit=RLIMIT_NOFILE={soft}:{hard}"));
    argv.push(format!("--machine={}", container.id));
    argv.push(format!("--directory={}", root.display()));
    let network: &[&str] = match container.network {
        true => &["--resolv-conf=bind-host"],
        false => &["--resolv-conf=off", "--private-network"],
    };
    argv.extend(network.iter().map(|option| (*option).to_owned()));
    argv.push(format!("--bind-ro={}:{PROGRAM}", escape(program)));
    for bind in &container.binds {
        let option = match bind.read_only {
            true => "--bind-ro",
            false => "--bind",
        };
        let (source, target) = (escape(&bind.source), escape(Path::new(&bind.target)));
        argv.push(format!("{option}={source}:{target}"));
    }
    for device in &container.devices {
        let (source, path) = (escape(&device.source), escape(Path::new(&device.path)));
        argv.push(format!("--bind={source}:{path}"));
    }
    argv.extend(["--", PROGRAM, "__agent"].map(str::to_owned));
    argv
}

/// Escapes the separator of a bind's parts, `:`, and the escape character itself.
fn escape(path: &Path) -> String {
    path.to_string_lossy()
        .replace('\\', "\\\\")
        .replace(':', "\\:")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Bind, Device};

    pub(super) fn container() -> Container {
        Container {
            id: "rockenv-a-1".into(),
            root: super::super::Root::Directory("/tree".into()),
            binds: vec![Bind::read_only("/src/a:b\\c", "/therock/src")],
            keep_groups: false,
            devices: vec![Device {
                path: "/dev/kfd".into(),
                source: "/dev/kfd".into(),
                ..Device::default()
            }],
            network: false,
            limits: Default::default(),
            user: None,
            certificates: None,
        }
    }

    fn arguments(container: &Container, has_device_rules: bool) -> Vec<String> {
        let (root, program) = (Path::new("/mnt"), Path::new("/opt/rockenv"));
        argv(container, root, program, has_device_rules, (1024, 8192))
    }

    #[test]
    fn binds_are_escaped_and_devices_are_bound_one_by_one() {
        let argv = arguments(&container(), true);
        assert!(argv.contains(&r"--bind-ro=/src/a\:b\\c:/therock/src".to_owned()));
        assert!(argv.contains(&"--bind=/dev/kfd:/dev/kfd".to_owned()));
        assert!(argv.contains(&"--private-network".to_owned()));
        assert!(argv.contains(&"--settings=no".to_owned()));
        let is_landlock = |word: &str| word == "landlock_create_ruleset";
        assert!(argv.iter().any(|option| option.split(' ').any(is_landlock)));
        assert!(argv.contains(&"--rlimit=RLIMIT_NOFILE=1024:8192".to_owned()));
        assert_eq!(argv[argv.len() - 2..], [PROGRAM, "__agent"]);
    }

    #[test]
    fn without_rules_for_devices_none_can_be_made() {
        let dropped = |rules| {
            let argv = arguments(&container(), rules);
            argv.contains(&"--drop-capability=CAP_MKNOD".to_owned())
        };
        assert!(dropped(false) && !dropped(true));
    }

    #[test]
    fn the_network_is_the_hosts_or_none() {
        let mut container = container();
        container.network = true;
        let argv = arguments(&container, true);
        assert!(!argv.iter().any(|argument| argument == "--private-network"));
        assert!(argv.contains(&"--resolv-conf=bind-host".to_owned()));
    }
}
