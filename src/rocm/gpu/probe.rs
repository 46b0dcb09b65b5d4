//! Owns proving that device nodes can be used, and explaining failures. `__probe-gpu` opens each node as the user it
//! runs as, and asks the driver for its version.
//!
//! A failure is attributed to the layer that refused, because each layer has a different fix: a missing node, a group,
//! the device rules of a control group, a reloaded driver, a user namespace, SELinux.

use std::io::Write as _;
use std::os::fd::AsRawFd as _;

use fs_err as fs;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, SFlag, major, minor};
use serde::{Deserialize, Serialize};

use super::KFD;
use crate::rocm::gpu::Device;
use crate::sys::beneath;
use crate::sys::error::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AccessLayer {
    Absent,
    /// Owner, group and mode of the node.
    Group,
    /// The device rules of a control group.
    DeviceCgroup,
    /// No driver uses the node's number any more.
    Stale,
    /// The node's group has no id in this user namespace.
    UserNamespace,
    Selinux,
    /// Another reason, see the error.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finding {
    pub path: String,
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<AccessLayer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The command that fixes it on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// Runs `__probe-gpu PATH=MAJOR:MINOR...`: prints a finding for each node as JSON, and fails if a node cannot be used.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let nodes: Vec<(&str, (u64, u64))> = arguments
        .iter()
        .filter_map(|argument| {
            let (path, number) = argument.rsplit_once('=')?;
            let (major, minor) = number.split_once(':')?;
            Some((path, (major.parse().ok()?, minor.parse().ok()?)))
        })
        .collect();
    if nodes.is_empty() || nodes.len() != arguments.len() {
        return Err(usage!(
            "this subcommand is for rockenv's own use, inside an env"
        ));
    }
    let findings = nodes.into_iter();
    let findings = findings.map(|(path, number)| examine(path, Some(number)));
    let findings: Vec<Finding> = findings.collect();
    let mut text = serde_json::to_vec(&findings)
        .map_err(|error| unexpected!("cannot write the findings").source(error))?;
    text.push(b'\n');
    std::io::stdout().write_all(&text)?;
    match findings.iter().all(|finding| finding.ok) {
        true => Ok(()),
        false => Err(unavailable!("a device node cannot be used")),
    }
}

pub(crate) fn arguments(devices: &[Device]) -> Vec<String> {
    devices
        .iter()
        .map(|device| format!("{}={}:{}", device.path, device.major, device.minor))
        .collect()
}

/// The id of unmapped owners and groups in a user namespace.
const NOBODY: u32 = 65_534;

#[derive(Clone, Debug)]
struct Attempt {
    node: std::result::Result<Node, Errno>,
    expected: Option<(u64, u64)>,
    open: Option<Errno>,
    ask: Option<Errno>,
    who: Who,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    device: bool,
    number: (u64, u64),
    uid: u32,
    gid: u32,
    mode: u32,
}

#[derive(Clone, Debug)]
struct Who {
    uid: u32,
    groups: Vec<u32>,
    /// Host groups have other ids in this user namespace, or no id.
    mapped: bool,
    /// The SELinux context, if SELinux is enabled.
    selinux: Option<String>,
}

/// Tries one node. `expected` is its number on the host.
pub(crate) fn examine(path: &str, expected: Option<(u64, u64)>) -> Finding {
    // `fs_err` loses the errno.
    let node = nix::sys::stat::stat(path).map(|found| Node {
        device: beneath::kind(&found) == SFlag::S_IFCHR,
        number: (major(found.st_rdev), minor(found.st_rdev)),
        uid: found.st_uid,
        gid: found.st_gid,
        mode: found.st_mode & 0o7777,
    });
    let mut attempt = Attempt {
        expected,
        open: None,
        ask: None,
        who: Who::me(),
        node,
    };
    let mut driver = None;
    // Opening a FIFO or another special file could block forever.
    if matches!(attempt.node, Ok(Node { device: true, .. })) {
        let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        match nix::fcntl::open(path, flags, Mode::empty()) {
            Err(error) => attempt.open = Some(error),
            Ok(file) => match ask(path, file.as_raw_fd()) {
                Ok(answer) => driver = answer,
                Err(error) => attempt.ask = Some(error),
            },
        }
    }
    let (layer, error) = attempt.refusal().unzip();
    Finding {
        path: path.to_owned(),
        ok: layer.is_none(),
        driver: driver.filter(|_| layer.is_none()),
        layer,
        error,
        mend: layer.map(|layer| layer.fix(path, attempt.who.mapped)),
    }
}

pub(crate) fn no_answer(path: &str) -> Finding {
    Finding {
        path: path.to_owned(),
        ok: false,
        driver: None,
        layer: Some(AccessLayer::Other),
        error: Some("the driver does not answer".to_owned()),
        mend: Some(AccessLayer::Other.fix(path, false)),
    }
}

impl Who {
    fn me() -> Self {
        let groups = nix::unistd::getgroups().unwrap_or_default();
        let mut groups: Vec<u32> = groups.into_iter().map(nix::unistd::Gid::as_raw).collect();
        groups.push(nix::unistd::getegid().as_raw());
        let map = fs::read_to_string("/proc/self/gid_map").unwrap_or_default();
        let whole = map.split_whitespace().eq(["0", "0", "4294967295"]);
        // AppArmor uses this file too, but only SELinux contexts contain colons.
        let context = fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
        let context = context.trim_end_matches(['\0', '\n']);
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            groups,
            mapped: !map.is_empty() && !whole,
            selinux: context.contains(':').then(|| context.to_owned()),
        }
    }

    /// Returns whether owner, group and mode let this process read and write.
    fn may_open(&self, node: &Node) -> bool {
        // Root in a user namespace has rights only over mapped owners.
        if self.uid == 0 && !(self.mapped && [node.uid, node.gid].contains(&NOBODY)) {
            return true;
        }
        let bits = if self.uid == node.uid {
            node.mode >> 6
        } else if self.groups.contains(&node.gid) {
            node.mode >> 3
        } else {
            node.mode
        };
        bits & 0o6 == 0o6
    }
}

impl Attempt {
    /// Returns the layer that refused, and an explanation; `None` if the node can be used.
    fn refusal(&self) -> Option<(AccessLayer, String)> {
        let words = |error: Errno| error.desc().to_lowercase();
        let node = match &self.node {
            Err(Errno::ENOENT | Errno::ENOTDIR) => {
                return Some((AccessLayer::Absent, "it is missing".to_owned()));
            }
            Err(error) => return Some((AccessLayer::Other, words(*error))),
            Ok(node) if !node.device => {
                return Some((AccessLayer::Absent, "it is not a device node".to_owned()));
            }
            Ok(node) => node,
        };
        let (major, minor) = node.number;
        if let Some((now, now_minor)) = self.expected.filter(|number| *number != node.number) {
            let here = format!("its number is {major}:{minor}");
            let why = format!("{here}, but on the host it is now {now}:{now_minor}");
            return Some((AccessLayer::Stale, why));
        }
        match (self.open, self.ask) {
            (None, None) => None,
            (Some(Errno::EACCES), _) => Some(self.denied(node)),
            (Some(error @ Errno::EPERM), _) => {
                let why = words(error) + ": device rules of a control group exclude it";
                Some((AccessLayer::DeviceCgroup, why))
            }
            // The compute driver refuses new users meanwhile. The standard messages of these errors are `try again`
            // and about arguments.
            (Some(Errno::EAGAIN | Errno::EINVAL), _) => {
                let why = "the driver is resetting a GPU, or is suspended; if this lasts, as after a GPU was \
                           unplugged or lent to a virtual machine, reboot";
                Some((AccessLayer::Other, why.to_owned()))
            }
            (Some(error @ (Errno::ENXIO | Errno::ENODEV)), _) => {
                let why = format!("{}: no driver has number {major}:{minor}", words(error));
                Some((AccessLayer::Stale, why))
            }
            // The standard messages of these errors are about terminals and arguments.
            (None, Some(Errno::ENOTTY | Errno::EINVAL | Errno::ENOSYS | Errno::ENODEV)) => {
                let why = format!("number {major}:{minor} belongs to another driver");
                Some((AccessLayer::Stale, why))
            }
            (Some(error), _) | (None, Some(error)) => Some((AccessLayer::Other, words(error))),
        }
    }

    fn denied(&self, node: &Node) -> (AccessLayer, String) {
        let denied = format!(
            "permission denied (group {}, mode {:04o})",
            node.gid, node.mode
        );
        // This precedes the membership check, because all unmapped groups have the same id here.
        if self.who.mapped
            && node.gid == NOBODY
            && node.mode & 0o060 == 0o060
            && node.mode & 0o006 != 0o006
        {
            let why = format!("{denied}: its group has no id in this user namespace");
            return (AccessLayer::UserNamespace, why);
        }
        if self.who.may_open(node) {
            return match &self.who.selinux {
                Some(context) => (
                    AccessLayer::Selinux,
                    format!("permission denied in the SELinux context {context}"),
                ),
                None => (
                    AccessLayer::Other,
                    "permission denied, although its mode allows it".to_owned(),
                ),
            };
        }
        let reason = match (node.gid, node.mode & 0o060) {
            (0, _) => "it belongs to root alone",
            (_, 0o060) => "the user is not in its group",
            _ => "its group has no permission to open it",
        };
        (AccessLayer::Group, format!("{denied}: {reason}"))
    }
}

impl AccessLayer {
    /// Returns the command that fixes the layer on the host, or a sentence if no command does. `rootless`: the
    /// container belongs to an ordinary user.
    pub(crate) fn fix(self, path: &str, rootless: bool) -> String {
        let fix = match self {
            Self::Absent if path == KFD => "sudo modprobe amdgpu".to_owned(),
            Self::Absent => "sudo journalctl -k -g amdgpu".to_owned(),
            // AppArmor's messages have the second word.
            Self::Other => "sudo journalctl -k -g 'amdgpu|DENIED'".to_owned(),
            // udev's default rules give new nodes to group `render`.
            Self::Group => format!("sudo udevadm trigger --action=add --name-match={path}"),
            Self::DeviceCgroup if rootless => {
                "sudo systemctl revert \"user-$(id -u).slice\", then log in again".to_owned()
            }
            Self::DeviceCgroup => "sudo systemctl revert rockenv.slice".to_owned(),
            Self::Stale => {
                "the driver was reloaded: stop the env, then run the command again".to_owned()
            }
            // The group's name is unknown in the container. By udev's rules it is `render`, which users may join.
            Self::UserNamespace => format!(
                "sudo udevadm trigger --settle --action=add --name-match={path} && \
                 sudo usermod -aG \"$(stat -c %G {path})\" \"$USER\", then log in again; this needs crun and Podman 5.1"
            ),
            Self::Selinux => "sudo setsebool -P container_use_devices 1".to_owned(),
        };
        let in_container = match self {
            Self::Absent | Self::Other => return fix,
            // No udev runs there. Proxmox VE's LXC gives the nodes to root, unless a group is set.
            Self::Group | Self::UserNamespace => "its own engine sets the node's group and mode",
            Self::DeviceCgroup => "its own engine must allow the device",
            Self::Stale => "restart that",
            Self::Selinux => "type this on its host",
        };
        format!("{fix}; if this machine is a container itself, {in_container}")
    }
}

/// Asks the driver behind an open node for its version; `None` if this kind of node has no such request.
fn ask(path: &str, fd: i32) -> std::result::Result<Option<String>, Errno> {
    if path == KFD {
        let mut version = KfdVersion::default();
        kfd_version(fd, &mut version)?;
        return Ok(Some(format!("kfd {}.{}", version.major, version.minor)));
    }
    if path.starts_with("/dev/dri/") || path.starts_with("/dev/accel/") {
        return drm_driver(fd).map(Some);
    }
    Ok(None)
}

/// `struct kfd_ioctl_get_version_args`.
#[repr(C)]
#[derive(Debug, Default)]
struct KfdVersion {
    major: u32,
    minor: u32,
}

#[repr(C)]
#[derive(Debug)]
struct DrmVersion {
    major: i32,
    minor: i32,
    patch: i32,
    name_length: usize,
    name: *mut u8,
    date_length: usize,
    date: *mut u8,
    description_length: usize,
    description: *mut u8,
}

#[expect(unsafe_code, reason = "AMDKFD_IOC_GET_VERSION has no safe wrapper")]
fn kfd_version(fd: i32, version: &mut KfdVersion) -> std::result::Result<(), Errno> {
    nix::ioctl_read!(get_version, b'K', 0x01, KfdVersion);
    // SAFETY: the driver writes only the two numbers of the struct.
    unsafe { get_version(fd, version) }.map(drop)
}

#[expect(unsafe_code, reason = "DRM_IOCTL_VERSION has no safe wrapper")]
fn drm_driver(fd: i32) -> std::result::Result<String, Errno> {
    nix::ioctl_readwrite!(get_version, b'd', 0x00, DrmVersion);
    let mut name = [0u8; 32];
    let mut version = DrmVersion {
        major: 0,
        minor: 0,
        patch: 0,
        name_length: name.len(),
        name: name.as_mut_ptr(),
        date_length: 0,
        date: std::ptr::null_mut(),
        description_length: 0,
        description: std::ptr::null_mut(),
    };
    // SAFETY: the driver writes at most the given lengths, and `name` outlives the call.
    unsafe { get_version(fd, &raw mut version) }?;
    let length = version.name_length.min(name.len());
    Ok(format!(
        "{} {}.{}",
        String::from_utf8_lossy(&name[..length]),
        version.major,
        version.minor
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::error::Kind;

    fn attempt() -> Attempt {
        Attempt {
            node: Ok(Node {
                device: true,
                number: (511, 0),
                uid: 0,
                gid: 105,
                mode: 0o660,
            }),
            expected: Some((511, 0)),
            open: None,
            ask: None,
            who: Who {
                uid: 1000,
                groups: vec![1000, 105],
                mapped: false,
                selinux: None,
            },
        }
    }

    fn layer(change: impl FnOnce(&mut Attempt)) -> Option<AccessLayer> {
        let mut attempt = attempt();
        change(&mut attempt);
        attempt.refusal().map(|(layer, _)| layer)
    }

    fn change_node(attempt: &mut Attempt, change: impl FnOnce(&mut Node)) {
        if let Ok(node) = &mut attempt.node {
            change(node);
        }
    }

    #[test]
    fn each_failure_names_its_layer() {
        use AccessLayer::{Absent, DeviceCgroup, Other, Stale};
        assert_eq!(layer(|_| {}), None);
        assert_eq!(layer(|it| it.node = Err(Errno::ENOENT)), Some(Absent));
        assert_eq!(
            layer(|it| change_node(it, |node| node.device = false)),
            Some(Absent)
        );
        assert_eq!(layer(|it| it.node = Err(Errno::EACCES)), Some(Other));
        assert_eq!(layer(|it| it.open = Some(Errno::EPERM)), Some(DeviceCgroup));
        for gone in [Errno::ENXIO, Errno::ENODEV] {
            assert_eq!(layer(|it| it.open = Some(gone)), Some(Stale));
        }
        for foreign in [Errno::ENOTTY, Errno::EINVAL, Errno::ENOSYS] {
            assert_eq!(layer(|it| it.ask = Some(foreign)), Some(Stale));
        }
        // Even if the node opens: its number belongs to another device now.
        assert_eq!(layer(|it| it.expected = Some((510, 0))), Some(Stale));
        assert_eq!(layer(|it| it.open = Some(Errno::EIO)), Some(Other));
        for refused in [Errno::EAGAIN, Errno::EINVAL] {
            let mut busy = attempt();
            busy.open = Some(refused);
            assert_has!(busy.refusal().unwrap().1, "is resetting a GPU");
        }
        // The help of `doctor` must lead on, also where AppArmor refused.
        assert_has!(Other.fix(KFD, false), "journalctl -k -g 'amdgpu|DENIED'");
    }

    #[test]
    fn permission_denied_is_told_apart() {
        use AccessLayer::{Group, Other, Selinux, UserNamespace};
        let check = |change: &dyn Fn(&mut Attempt), layer: AccessLayer, part: &str| {
            let mut attempt = attempt();
            attempt.open = Some(Errno::EACCES);
            change(&mut attempt);
            let (found, words) = attempt.refusal().unwrap();
            assert_eq!(found, layer, "{words}");
            assert_has!(words, part);
        };
        let of_owner = |it: &mut Attempt| change_node(it, |node| node.mode = 0o600);
        let of_root = |it: &mut Attempt| change_node(it, |node| node.gid = 0);
        let outside = |it: &mut Attempt| it.who.groups = vec![1000];
        check(&outside, Group, "group 105, mode 0660");
        check(&of_owner, Group, "its group has no permission");
        check(&of_root, Group, "root alone");
        // Applies to root in the namespace, and to a user with other unmapped groups.
        for (uid, groups) in [(1000, vec![1000]), (0, vec![0]), (0, vec![0, NOBODY])] {
            let mapped = |it: &mut Attempt| {
                it.who = Who {
                    uid,
                    groups: groups.clone(),
                    mapped: true,
                    selinux: None,
                };
                change_node(it, |node| (node.uid, node.gid) = (NOBODY, NOBODY));
            };
            let mapped_of_owner = |it: &mut Attempt| {
                mapped(it);
                of_owner(it);
            };
            check(&mapped, UserNamespace, "has no id");
            check(&mapped_of_owner, Group, "");
        }
        // The mode allows access, so a layer that ignores modes refused it.
        let labelled = |it: &mut Attempt| it.who.selinux = Some("u:r:container_t:s0".into());
        check(&labelled, Selinux, "container_t");
        check(&|_| {}, Other, "");
        // The node is world-writable, as in some distributions, so groups do not matter.
        let world_writable = |it: &mut Attempt| {
            it.who.groups.clear();
            change_node(it, |node| node.mode = 0o666);
        };
        check(&world_writable, Other, "");
    }

    #[test]
    fn real_nodes_are_tried() {
        let finding = examine("/nowhere/kfd", None);
        assert_eq!(finding.layer, Some(AccessLayer::Absent));
        // A device of another driver opens, but does not support the request.
        let null = examine("/dev/null", None);
        assert!(null.ok && null.driver.is_none(), "{null:?}");
        assert_eq!(
            ask(KFD, fs::File::open("/dev/null").unwrap().as_raw_fd()),
            Err(Errno::ENOTTY)
        );
        let stale = examine("/dev/null", Some((511, 0)));
        assert_eq!(stale.layer, Some(AccessLayer::Stale));
        assert_has!(stale.error.unwrap(), "1:3, but on the host it is now 511:0");
    }

    #[test]
    fn what_is_not_a_node_is_refused() {
        for arguments in [
            &[][..],
            &["/dev/kfd"],
            &["/dev/kfd=a:0"],
            &["/dev/null=1:3", ""],
        ] {
            let arguments: Vec<String> = arguments.iter().map(|&text| text.to_owned()).collect();
            assert_eq!(run(&arguments).unwrap_err().kind(), Kind::Usage);
        }
    }
}
