//! Owns the GPU section of `doctor`: the GPUs that the compute driver lists, and whether each device node can be
//! opened.

use serde::Serialize;

use super::{Check, Facts, missing, note, ok};
use crate::plan::resolve::Engine;
use crate::rocm::gpu::probe::{AccessLayer, Finding};
use crate::rocm::gpu::{Device, KFD, Machine};

#[derive(Clone, Debug, Serialize)]
pub(crate) struct GpuFacts {
    pub machine: Machine,
    pub nodes: Vec<Node>,
    /// The running kernel's modules do not include amdgpu.
    pub no_module: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Node {
    pub device: Device,
    /// The result of opening the device.
    pub finding: Finding,
}

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let GpuFacts { machine, nodes, .. } = &facts.gpu;
    if !machine.kfd {
        let driver = machine.unlisted.values().min().map(Option::as_deref);
        return vec![match (machine.wsl, machine.gpus.is_empty(), driver) {
            (true, ..) => note(
                "WSL has /dev/dxg instead of /dev/kfd: steps with `gpu` are skipped, and reported as skipped",
            ),
            (false, true, None) => {
                note("no AMD GPU: steps with `gpu` are skipped, and reported as skipped")
            }
            (false, true, Some(None)) if facts.gpu.no_module => note(
                "AMD GPU found, but this kernel has no module amdgpu: it is in Ubuntu's linux-modules-extra, Debian's \
                 linux-image-amd64 and Fedora's kernel-modules: steps with `gpu` are skipped",
            ),
            (false, true, Some(None)) => missing(
                "AMD GPU found, but /dev/kfd is missing: steps with `gpu` are skipped",
                facts.sudo("modprobe amdgpu"),
            ),
            (false, true, Some(Some(driver))) if driver != "amdgpu" => note(format!(
                "the AMD GPU's driver is {driver}, not amdgpu: steps with `gpu` are skipped"
            )),
            _ => note(
                "AMD GPU found, but /dev/kfd is missing: the kernel lacks CONFIG_HSA_AMD, or this is a container \
                 without the device: steps with `gpu` are skipped",
            ),
        }];
    }
    let mut checks: Vec<Check> = machine
        .gpus
        .iter()
        .map(|gpu| match gpu.target() {
            Some(target) => ok(format!("GPU {gpu}: {}", target.info().declared.product)),
            None => note(format!("GPU {gpu}: TheRock does not support this target"))
                .try_("rockenv target ls"),
        })
        .collect();
    let log = facts.sudo("journalctl -k -g amdgpu");
    // In a container, the GPUs of others are on the bus too.
    if !machine.hidden {
        checks.extend(
            machine
                .unlisted
                .iter()
                .map(|(pci, driver)| match driver.as_deref() {
                    Some("amdgpu") => {
                        note(format!("GPU {pci}: the compute driver does not list it")).try_(&log)
                    }
                    Some(other) => note(format!("GPU {pci}: its driver is {other}, not amdgpu")),
                    None => note(format!("GPU {pci}: it has no driver")).try_(&log),
                }),
        );
    } else if machine.gpus.is_empty() {
        checks.push(missing(
            "device rules of a control group hide the GPU",
            "if this machine is a container, its engine must allow the GPU's render node; \
             a job of Slurm asks for it with `--gres`",
        ));
    }
    if checks.is_empty() {
        checks.push(note("/dev/kfd exists, but the kernel lists no GPU").try_(&log));
    }
    // LXC makes a file for an optional device that its host does not have.
    if !nodes.iter().any(|node| node.device.path == KFD) {
        checks.push(missing(
            format!("{KFD} is not a device node"),
            "if this machine is a container, load amdgpu on its host, then start it again",
        ));
    }
    for gpu in &machine.gpus {
        let path = gpu.render_node();
        if !nodes.iter().any(|node| node.device.path == path) {
            checks.push(missing(
                format!("{path} missing: the render node of GPU {}", gpu.pci),
                &log,
            ));
        }
    }
    checks.extend(nodes.iter().map(|node| node_check(facts, node)));
    checks
}

/// Checks that steps can open a node. Inside a container the build user opens it, through its group. Root gives the
/// build user that group. In rootless Podman the build user is the user who runs `doctor`, with the same groups.
pub(super) fn node_check(facts: &Facts, node: &Node) -> Check {
    let Node { device, finding } = node;
    let about = format!(
        "{} for group {} (mode {:04o})",
        device.path, device.gid, device.mode
    );
    let by_all = device.mode & 0o006 == 0o006;
    let by_group = device.mode & 0o060 == 0o060 && device.gid != 0;
    let is_refused = finding.layer == Some(AccessLayer::Group);
    match (&finding.error, &finding.mend) {
        (Some(_), _) if is_refused && by_group && !facts.root => match facts.engine {
            Engine::Podman => missing(
                format!("{about}: you are not in this group"),
                AccessLayer::UserNamespace.fix(&device.path, true),
            ),
            Engine::Nspawn | Engine::Docker => ok(about),
        },
        (Some(error), Some(mend)) => missing(format!("{}: {error}", device.path), mend.clone()),
        _ if by_all || by_group => ok(match &finding.driver {
            Some(driver) => format!("{about}: {driver}"),
            None => about,
        }),
        _ => missing(
            format!("{about}: only root can open it"),
            AccessLayer::Group.fix(&device.path, false),
        ),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::CheckState;
    use super::super::tests::{debian, of};
    use super::*;

    pub(in super::super) fn nothing() -> GpuFacts {
        GpuFacts {
            machine: Machine::detect("/nonexistent".as_ref()),
            nodes: Vec::new(),
            no_module: false,
        }
    }

    /// A GPU without a driver.
    pub(in super::super) fn without_driver() -> GpuFacts {
        let mut gpu = nothing();
        gpu.machine.unlisted.insert("0000:03:00.0".to_owned(), None);
        gpu
    }

    /// One GPU with working nodes.
    pub(in super::super) fn card() -> GpuFacts {
        let node = |path: &str, minor| Node {
            device: Device {
                path: path.to_owned(),
                source: path.into(),
                major: 226,
                minor,
                gid: 105,
                mode: 0o660,
            },
            finding: Finding {
                path: path.to_owned(),
                ok: true,
                driver: Some("amdgpu 3.61".to_owned()),
                layer: None,
                error: None,
                mend: None,
            },
        };
        GpuFacts {
            machine: Machine {
                gpus: vec![crate::rocm::gpu::Gpu {
                    index: 0,
                    isa: "gfx1103".to_owned(),
                    pci: "0000:c1:00.0".to_owned(),
                    partition: None,
                    render: "renderD128".to_owned(),
                    memory: 4 << 30,
                    compute_units: 12,
                }],
                kfd: true,
                ..nothing().machine
            },
            nodes: vec![node("/dev/kfd", 0), node("/dev/dri/renderD128", 128)],
            no_module: false,
        }
    }

    /// Nothing that a command of this machine fixes.
    #[test]
    fn other_faults_of_a_gpu_are_notes() {
        let unlisted = |facts: &mut Facts, driver: Option<&str>| {
            let driver = driver.map(str::to_owned);
            let machine = &mut facts.gpu.machine;
            machine.unlisted.insert("0000:03:00.0".to_owned(), driver);
        };
        let check = |change: &dyn Fn(&mut Facts), words: &str, log: bool| {
            let mut facts = debian();
            facts.gpu = card();
            change(&mut facts);
            assert!(of(&facts, CheckState::Missing).is_empty(), "{words}");
            let notes = of(&facts, CheckState::Note);
            let found = notes.iter().find(|note| note.message.contains(words));
            let command = &found.unwrap().command;
            assert_eq!(command.is_some(), log, "{notes:?}");
        };
        // The compute driver lists the GPU: this is a container.
        check(
            &|facts| facts.gpu.machine.kfd = false,
            "container without the device",
            false,
        );
        for (driver, words) in [
            ("amdgpu", "CONFIG_HSA_AMD"),
            ("vfio-pci", "is vfio-pci, not"),
        ] {
            let change = |facts: &mut Facts| {
                facts.gpu = nothing();
                unlisted(facts, Some(driver));
            };
            check(&change, words, false);
        }
        let no_module = |facts: &mut Facts| {
            facts.gpu = without_driver();
            facts.gpu.no_module = true;
        };
        check(&no_module, "this kernel has no module amdgpu", false);
        // Beside a GPU that works.
        for (driver, words, log) in [
            (
                Some("amdgpu"),
                "GPU 0000:03:00.0: the compute driver does not list it",
                true,
            ),
            (
                Some("vfio-pci"),
                "GPU 0000:03:00.0: its driver is vfio-pci",
                false,
            ),
            (None, "GPU 0000:03:00.0: it has no driver", true),
        ] {
            check(&|facts| unlisted(facts, driver), words, log);
        }
    }

    #[test]
    fn each_fault_of_a_gpu_has_its_command() {
        let check = |change: fn(&mut Facts)| {
            let mut facts = debian();
            facts.gpu = card();
            change(&mut facts);
            let found = of(&facts, CheckState::Missing).into_iter().next();
            found.map(|check| (check.message, check.command.unwrap_or_default()))
        };
        let fail = |facts: &mut Facts, layer: AccessLayer| {
            let finding = &mut facts.gpu.nodes[0].finding;
            finding.ok = false;
            finding.layer = Some(layer);
            finding.error = Some("no".to_owned());
            finding.mend = Some(layer.fix("/dev/kfd", false));
        };
        assert_eq!(check(|_| {}), None);
        let (message, command) = check(|facts| facts.gpu = without_driver()).unwrap();
        assert_has!(message, "/dev/kfd is missing");
        assert_eq!(command, "modprobe amdgpu");
        let (message, command) = check(|facts| {
            facts.gpu.machine.gpus.clear();
            facts.gpu.machine.hidden = true;
        })
        .unwrap();
        assert_has!(message, "device rules of a control group");
        assert_has!(command, "render node; a job of Slurm");
        let (message, command) = check(|facts| drop(facts.gpu.nodes.pop())).unwrap();
        assert_has!(message, "/dev/dri/renderD128 missing");
        assert_eq!(command, "journalctl -k -g amdgpu");
        let (message, _) = check(|facts| drop(facts.gpu.nodes.remove(0))).unwrap();
        assert_has!(message, "/dev/kfd is not a device node");
        // Root can open anything, but the build user in the container cannot.
        for change in [
            (|facts| facts.gpu.nodes[0].device.gid = 0) as fn(&mut Facts),
            |facts| facts.gpu.nodes[0].device.mode = 0o600,
        ] {
            let (message, command) = check(change).unwrap();
            assert_has!(message, "only root can open it");
            assert_has!(
                command,
                "udevadm trigger --action=add --name-match=/dev/kfd; if this machine is a container"
            );
        }
        // The caller's groups are irrelevant, unless the caller's own Podman runs the steps.
        let mut facts = debian();
        facts.root = false;
        facts.gpu = card();
        fail(&mut facts, AccessLayer::Group);
        assert!(
            !of(&facts, CheckState::Missing)
                .iter()
                .any(|check| check.message.contains("kfd"))
        );
        facts.engine = Engine::Podman;
        let of_kfd = |facts: &Facts| node_check(facts, &facts.gpu.nodes[0]);
        let refused = of_kfd(&facts);
        assert_has!(
            refused.message,
            "/dev/kfd for group 105 (mode 0660): you are not in this group"
        );
        assert_has!(refused.command.as_ref().unwrap(), "sudo usermod -aG");
        // As a member of the group, or by an ACL such as logind's.
        facts.gpu = card();
        assert_has!(of_kfd(&facts).message, "amdgpu 3.61");
        let mut facts = debian();
        facts.gpu = card();
        fail(&mut facts, AccessLayer::DeviceCgroup);
        let checks = of(&facts, CheckState::Missing);
        assert_eq!(checks[0].message, "/dev/kfd: no");
        assert!(checks[0].command.as_ref().unwrap().contains("systemctl"));
    }
}
