//! Owns the findings of `doctor`: a pure function of the facts that `probe` gathers. Each missing item comes with a
//! command that fixes it.

pub(crate) mod command;

mod engines;
mod gpu;
mod network;
pub(crate) mod probe;
mod services;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub(crate) use engines::abilities;
pub(crate) use gpu::{GpuFacts, Node};
pub(crate) use network::NetworkFacts;
use serde::Serialize;
pub(crate) use services::ServiceFacts;

use crate::cli::setup::{Feature, Manager, TOOLS, Tool};
use crate::plan::ids::EnvName;
use crate::plan::resolve::Engine;
use crate::sys::shell::quoted_path;
use crate::tree::Method;
use crate::ui::size;

/// First kernel with `cgroup.kill`, which kills a whole control group at once.
const CGROUP_KILL: (u32, u32) = (5, 14);
/// Oldest supported systemd-nspawn.
const NSPAWN: u32 = 249;
/// Disk space for a full build of TheRock.
const THEROCK_DISK: u64 = 230 << 30;

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Facts {
    /// The engine of new envs.
    pub engine: Engine,
    pub root: bool,
    pub through_sudo: bool,
    pub systemd: bool,
    /// Kernel's major and minor version.
    pub kernel: (u32, u32),
    pub manager: Option<Manager>,
    /// Missing tools, by their names in `setup`'s table.
    pub missing: Vec<String>,
    pub nspawn: Option<u32>,
    /// The kernel supports overlay file systems.
    pub overlay: bool,
    /// The kernel cannot mount btrfs, like that of RHEL.
    pub no_btrfs: bool,
    pub cgroup: Cgroups,
    /// Memory pressure information (PSI) is available.
    pub pressure: bool,
    /// Limit on user namespaces; `None` if the kernel lacks them.
    pub user_namespaces: Option<u64>,
    /// Why this process cannot work in one, and the command that permits it.
    pub obstacle: Option<(&'static str, String)>,
    /// Why the calling user has no ids for one, and the command that helps.
    pub lack_of_ids: Option<(String, String)>,
    pub store: StoreFacts,
    pub gpu: GpuFacts,
    pub services: Vec<ServiceFacts>,
    pub network: NetworkFacts,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Cgroups {
    /// Controllers mounted as cgroup v1.
    pub v1: Vec<String>,
    /// Controllers of cgroup v2, if mounted.
    pub v2: Option<Vec<String>>,
}

impl Cgroups {
    /// Returns whether a controller exists, in either version.
    fn has(&self, name: &str) -> bool {
        let mut all = self.v1.iter().chain(self.v2.iter().flatten());
        all.any(|one| one == name)
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct StoreFacts {
    pub path: PathBuf,
    pub exists: bool,
    /// File system of the store's root, or of its future location.
    pub file_system: Option<String>,
    /// The store's snapshot method, or the method that a new store would use.
    pub method: Option<Method>,
    /// Why a store on btrfs cannot use btrfs snapshots.
    pub not_btrfs: Option<String>,
    /// Why the store cannot be used, and the command that fixes it.
    pub problem: Option<(String, String)>,
    pub free: Option<u64>,
    /// Mount point at or above it for which fstab has a file system that is not mounted.
    pub unmounted: Option<PathBuf>,
    /// Envs with leftovers of a killed command.
    pub leftovers: Vec<EnvName>,
    /// Envs that an ended `up --ephemeral` did not remove.
    pub ephemeral: Vec<EnvName>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckState {
    Ok,
    /// Something does not work.
    Missing,
    /// Information only; every requested feature works.
    Note,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    pub state: CheckState,
    pub message: String,
    /// The command that fixes it.
    pub command: Option<String>,
    /// Without it no env can be built.
    pub essential: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Section {
    pub title: &'static str,
    pub checks: Vec<Check>,
}

/// Returns whether the engine of new envs can build them.
pub(crate) fn is_fit(sections: &[Section]) -> bool {
    !sections
        .iter()
        .flat_map(|section| &section.checks)
        .any(|check| check.essential && check.state == CheckState::Missing)
}

pub(crate) fn examine(facts: &Facts) -> Vec<Section> {
    let sections = [
        ("engine nspawn", nspawn(facts)),
        ("engines docker and podman", services::checks(facts)),
        ("store", store(facts)),
        ("images and sources", images(facts)),
        ("network", network::checks(&facts.network)),
        ("limits", limits(facts)),
        ("gpu (no build needs one)", gpu::checks(facts)),
    ];
    sections
        .map(|(title, checks)| Section { title, checks })
        .into()
}

fn ok(message: impl Into<String>) -> Check {
    Check::new(CheckState::Ok, message)
}

fn missing(message: impl Into<String>, command: impl Into<String>) -> Check {
    Check::new(CheckState::Missing, message).try_(command)
}

fn note(message: impl Into<String>) -> Check {
    Check::new(CheckState::Note, message)
}

impl Check {
    fn new(state: CheckState, message: impl Into<String>) -> Self {
        Self {
            state,
            message: message.into(),
            command: None,
            essential: false,
        }
    }

    fn essential(mut self) -> Self {
        self.essential = true;
        self
    }

    /// Makes the check essential if the engine is used, else downgrades it to a note.
    fn essential_if(self, is_used: bool) -> Self {
        match is_used {
            true => self.essential(),
            false if self.state == CheckState::Missing => Self {
                state: CheckState::Note,
                ..self
            },
            false => self,
        }
    }

    fn try_(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into());
        self
    }
}

impl Facts {
    /// Returns the command with sudo unless the user is root already. Commands on the store do without: an ordinary
    /// user's store is not root's.
    fn sudo(&self, command: &str) -> String {
        match self.root && !self.through_sudo {
            true => command.to_owned(),
            false => format!("sudo {command}"),
        }
    }

    fn lacks(&self, tool: &Tool) -> bool {
        self.missing.iter().any(|name| name == tool.name)
    }

    /// Returns the commands that add a kernel parameter.
    fn boot_with(&self, word: &str) -> String {
        let edit = format!("sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{word} /' /etc/default/grub");
        let grubby = format!("grubby --update-kernel=ALL --args={word}");
        let kargs = format!("rpm-ostree kargs --append-if-missing={word}");
        let commands: &[&str] = match self.manager {
            Some(Manager::Dnf) => &[&grubby],
            Some(Manager::RpmOstree) => &[&kargs],
            Some(Manager::Apt) => &[&edit, "update-grub"],
            Some(Manager::Zypper) => &[&edit, "grub2-mkconfig -o /boot/grub2/grub.cfg"],
            _ => &[&edit, "grub-mkconfig -o /boot/grub/grub.cfg"],
        };
        let commands = commands.iter().chain(&["reboot"]);
        let commands: Vec<String> = commands.map(|command| self.sudo(command)).collect();
        commands.join(" && ")
    }
}

/// Returns the check for a tool. The suggested command installs everything that the feature needs.
fn tool(facts: &Facts, tool: &Tool) -> Check {
    if !facts.lacks(tool) {
        return ok(tool.name);
    }
    let text = format!("{} missing: needed to {}", tool.name, tool.why);
    if facts.manager.is_some_and(|one| tool.package(one).is_none()) {
        return note(format!("{text}; this distribution has no package of it"));
    }
    let command = facts.sudo("rockenv setup");
    match tool.optional {
        true => note(text).try_(command),
        false => missing(text, command),
    }
}

fn tools(feature: Feature) -> impl Iterator<Item = &'static Tool> {
    let tools = TOOLS.iter();
    tools.filter(move |one| one.features.contains(&feature))
}

fn nspawn(facts: &Facts) -> Vec<Check> {
    let is_used = facts.engine == Engine::Nspawn;
    let mut checks = vec![match facts.root {
        true => ok("running as root"),
        false => missing(
            "not root: containers, mounts and snapshots need it",
            "sudo rockenv doctor",
        )
        .essential_if(is_used),
    }];
    for one in tools(Feature::Nspawn) {
        checks.push(match (one.name, facts.nspawn) {
            ("systemd-nspawn", Some(version)) if version < NSPAWN => note(format!(
                "systemd-nspawn {version} is older than {NSPAWN}, the oldest supported version"
            )),
            ("systemd-nspawn", Some(version)) => ok(format!("systemd-nspawn {version}")),
            _ => tool(facts, one).essential_if(is_used),
        });
    }
    checks.push(match facts.systemd {
        true => ok("systemd is PID 1: each container is a scope of its own"),
        false => ok("systemd is not PID 1: rockenv manages control groups itself"),
    });
    checks
}

fn store(facts: &Facts) -> Vec<Check> {
    let store = &facts.store;
    let at = store.path.display();
    let mut checks = Vec::new();
    if let Some(point) = &store.unmounted {
        checks.push(
            missing(
                format!(
                    "/etc/fstab has a file system for {}, but it is not mounted",
                    point.display()
                ),
                facts.sudo(&format!("mount {}", quoted_path(point))),
            )
            .essential(),
        );
    }
    if let Some((problem, command)) = &store.problem {
        checks.push(missing(problem.clone(), command.clone()).essential());
    } else if !store.exists {
        checks.push(ok(format!("{at} will be made by the first `rockenv up`")));
    }
    let on = store
        .file_system
        .as_ref()
        .map(|name| format!(" on {name}"))
        .unwrap_or_default();
    match store.method {
        Some(Method::Overlay) => {
            let text = format!(
                "{at}{on}: overlay snapshots, without build volumes: `rollback` and `fork` leave build trees out"
            );
            checks.push(match (facts.no_btrfs, store.exists) {
                // An XFS file system that RHEL 7 made has no reflinks.
                (true, _) => note(text + "; a store on xfs with reflinks includes them"),
                (false, true) => note(text)
                    .try_(facts.sudo("rockenv --home /another/place setup --store-image 300G")),
                (false, false) => note(text).try_(facts.sudo("rockenv setup --store-image 300G")),
            });
        }
        Some(method) => {
            let why = store.not_btrfs.as_ref();
            let why = why.map(|why| format!("; {why}")).unwrap_or_default();
            checks.push(ok(format!(
                "{at}{on}: {method} snapshots, build volumes included{why}"
            )));
        }
        None => {}
    }
    if !facts.overlay && matches!(store.method, None | Some(Method::Overlay)) {
        checks.push(
            missing(
                "the kernel has no overlay file system",
                facts.sudo("modprobe overlay"),
            )
            .essential(),
        );
    }
    if let Some(free) = store.free {
        let text = format!("{} free", size::bytes(free));
        checks.push(if free < THEROCK_DISK {
            note(format!(
                "{text}; all of TheRock takes {}",
                size::bytes(THEROCK_DISK)
            ))
            .try_(match store.exists {
                true => "rockenv du",
                // It lists the starting points that need less.
                false => "rockenv plan gfx1103",
            })
        } else {
            ok(text)
        });
    }
    if !store.leftovers.is_empty() {
        checks.push(
            note(format!(
                "a killed command left unfinished work in: {}",
                store.leftovers.join(", ")
            ))
            .try_("rockenv fsck --repair"),
        );
    }
    if !store.ephemeral.is_empty() {
        checks.push(
            note(format!(
                "left by a killed `up --ephemeral`; the next command that changes the store removes them: {}",
                store.ephemeral.join(", ")
            ))
            .try_("rockenv gc"),
        );
    }
    checks
}

fn images(facts: &Facts) -> Vec<Check> {
    let is_here = |one: &&Tool| {
        let has = |feature| one.features.contains(&feature);
        !has(Feature::Nspawn) && (has(Feature::Images) || has(Feature::Sources))
    };
    let here = TOOLS.iter().filter(is_here);
    let mut checks: Vec<Check> = here.map(|one| tool(facts, one)).collect();
    let arch = tools(Feature::Pacman).filter(|one| facts.lacks(one));
    let arch: Vec<&str> = arch.map(|one| one.name).collect();
    checks.push(if arch.is_empty() {
        ok("pacstrap, for Arch images")
    } else {
        note(format!("missing for Arch images: {}", arch.join(", ")))
            .try_(facts.sudo("rockenv setup --for pacman"))
    });
    checks
}

fn limits(facts: &Facts) -> Vec<Check> {
    let version = match (&facts.cgroup.v2, facts.cgroup.v1.is_empty()) {
        (Some(_), true) => "cgroup v2",
        (Some(_), false) => "cgroup v1 and v2",
        (None, false) => "cgroup v1",
        (None, true) => "no cgroups",
    };
    let mut checks = Vec::new();
    for (controller, what, word) in [
        ("memory", "memory", "cgroup_enable=memory"),
        (
            "pids",
            "the number of processes",
            "systemd.unified_cgroup_hierarchy=1",
        ),
    ] {
        checks.push(if facts.cgroup.has(controller) {
            ok(format!("{what} can be limited ({version})"))
        } else {
            missing(
                format!("{what} cannot be limited: no {controller} controller ({version})"),
                facts.boot_with(word),
            )
        });
    }
    checks.push(
        match facts.cgroup.v2.is_some() && facts.kernel >= CGROUP_KILL {
            true => ok("the kernel ends a container at once (cgroup.kill)"),
            false => note("no cgroup.kill: rockenv ends containers process by process"),
        },
    );
    checks.push(match facts.pressure {
        true => ok("memory pressure information (PSI) available"),
        false => note(
            "no memory pressure information (PSI): rockenv holds back jobs only by the memory that is left",
        )
        .try_(facts.boot_with("psi=1")),
    });
    checks.push(match &facts.obstacle {
        _ if facts.user_namespaces.is_none() => {
            note("the kernel has no user namespaces; only rootless engines need them")
        }
        Some((reason, command)) => missing(
            format!("cannot work in a user namespace: {reason}; only rootless engines need to"),
            facts.sudo(command),
        )
        .essential_if(facts.engine != Engine::Nspawn && !facts.root),
        None => ok("user namespaces"),
    });
    if facts.engine != Engine::Nspawn
        && let Some((why, command)) = &facts.lack_of_ids
    {
        checks.push(missing(why, command).essential());
    }
    checks
}
