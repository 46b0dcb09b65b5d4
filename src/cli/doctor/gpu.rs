//! Owns the GPU section of `doctor`: the GPUs that the compute driver lists, and whether each device node can be
//! opened.

use serde::Serialize;

use super::{Check, Facts, missing, note, ok};
use crate::plan::resolve::Engine;
use crate::rocm::gpu::probe::{AccessLayer, Finding};
use crate::rocm::gpu::{Device, Machine};

#[derive(Clone, Debug, Serialize)]
pub(crate) struct GpuFacts {
    pub machine: Machine,
    pub nodes: Vec<Node>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Node {
    pub device: Device,
    /// The result of opening the device.
    pub finding: Finding,
}

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let GpuFacts { machine, nodes } = &facts.gpu;
    if !machine.kfd {
        return vec![match (machine.wsl, machine.on_bus, &machine.driver) {
            (true, ..) => note(
                "WSL has /dev/dxg instead of /dev/kfd: steps with `gpu` are skipped, and reported as skipped",
            ),
            (false, true, None) => missing(
                "AMD GPU found, but /dev/kfd is missing: steps with `gpu` are skipped",
                facts.sudo("modprobe amdgpu"),
            ),
            (false, true, Some(driver)) if driver == "amdgpu" => note(
                "AMD GPU found, but /dev/kfd is missing: the kernel lacks CONFIG_HSA_AMD, or this is a container \
                 without the device: steps with `gpu` are skipped",
            ),
            (false, true, Some(driver)) => note(format!(
                "the AMD GPU's driver is {driver}, not amdgpu: steps with `gpu` are skipped"
            )),
            (false, false, _) => {
                note("no AMD GPU: steps with `gpu` are skipped, and reported as skipped")
            }
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
    if checks.is_empty() {
        checks.push(
            note("/dev/kfd exists, but the kernel lists no GPU")
                .try_(facts.sudo("journalctl -k -g amdgpu")),
        );
    }
    for gpu in &machine.gpus {
        let path = gpu.render_node();
        if !nodes.iter().any(|node| node.device.path == path) {
            checks.push(missing(
                format!("{path} missing: the render node of GPU {}", gpu.pci),
                facts.sudo("journalctl -k -g amdgpu"),
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
    let trigger = facts.sudo(&format!(
        "udevadm trigger --action=add --name-match={}",
        device.path
    ));
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
        _ => missing(format!("{about}: only root can open it"), trigger),
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
        }
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
                on_bus: true,
                ..nothing().machine
            },
            nodes: vec![node("/dev/kfd", 0), node("/dev/dri/renderD128", 128)],
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
        let (message, command) = check(|facts| facts.gpu.machine.kfd = false).unwrap();
        assert_has!(message, "/dev/kfd is missing");
        assert_eq!(command, "modprobe amdgpu");
        for driver in ["amdgpu", "vfio-pci"] {
            let mut facts = debian();
            facts.gpu = card();
            facts.gpu.machine.kfd = false;
            facts.gpu.machine.driver = Some(driver.to_owned());
            assert!(of(&facts, CheckState::Missing).is_empty(), "{driver}");
        }
        let (message, command) = check(|facts| drop(facts.gpu.nodes.pop())).unwrap();
        assert_has!(message, "/dev/dri/renderD128 missing");
        assert_eq!(command, "journalctl -k -g amdgpu");
        // Root can open anything, but the build user in the container cannot.
        for change in [
            (|facts| facts.gpu.nodes[0].device.gid = 0) as fn(&mut Facts),
            |facts| facts.gpu.nodes[0].device.mode = 0o600,
        ] {
            let (message, command) = check(change).unwrap();
            assert_has!(message, "only root can open it");
            assert_eq!(
                command,
                "udevadm trigger --action=add --name-match=/dev/kfd"
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
