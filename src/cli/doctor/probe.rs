//! Owns gathering the facts that `examine` judges. Probing changes nothing and leaves nothing behind.

use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fs_err as fs;

use super::{Cgroups, Facts, GpuFacts, NetworkFacts, Node, ServiceFacts, StoreFacts};
use crate::cli::setup::{Manager, TOOLS};
use crate::engine::cgroup::Hierarchies;
use crate::engine::choose::engine_of_new_env;
use crate::engine::hold::ContainerRecord;
use crate::plan::ids::EnvName;
use crate::plan::resolve::Engine;
use crate::rocm::gpu;
use crate::rocm::gpu::probe::Finding;
use crate::store::config::Config;
use crate::store::{Store, lock};
use crate::sys::error::Error;
use crate::sys::host::{Host, free_space};
use crate::sys::process::Program;
use crate::sys::readable::readable;
use crate::sys::userns;
use crate::tree;

/// How long a driver may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

impl Facts {
    /// Probes the machine. The configuration determines the store's path.
    pub(crate) fn probe(host: &Host, config: &Config, gpus: gpu::Machine) -> Self {
        let groups = Hierarchies::probe().unwrap_or_default();
        let engine = engine_of_new_env(config.engine.as_deref(), &config.sockets);
        Self {
            engine: engine.unwrap_or(Engine::Nspawn),
            root: host.root,
            through_sudo: config.through_sudo,
            systemd: host.systemd,
            kernel: kernel(),
            manager: Manager::detect(),
            missing: TOOLS
                .iter()
                .filter(|tool| !tool.is_there())
                .map(|tool| tool.name.to_owned())
                .collect(),
            nspawn: nspawn_version(),
            overlay: has_file_system("overlay") == Some(true),
            no_btrfs: has_file_system("btrfs") == Some(false),
            cgroup: Cgroups {
                v1: groups
                    .v1
                    .iter()
                    .map(|(name, _)| name.clone())
                    .filter(|name| !name.contains('='))
                    .collect(),
                v2: groups.v2.map(|mount| {
                    let text = read(mount.join("cgroup.controllers")).unwrap_or_default();
                    text.split_whitespace().map(str::to_owned).collect()
                }),
            },
            // With `psi=0`, older kernels have the file and refuse to read it.
            pressure: read("/proc/pressure/memory").is_some(),
            user_namespaces: read("/proc/sys/user/max_user_namespaces")
                .and_then(|text| text.trim().parse().ok()),
            obstacle: userns::obstacle(),
            lack_of_ids: userns::lack_of_ids().map(|error| {
                let help = error.help_text().unwrap_or_default().to_owned();
                (error.message().to_owned(), help)
            }),
            store: store(host, &config.home),
            gpu: GpuFacts::probe(gpus),
            services: ServiceFacts::probe(&config.sockets),
            network: NetworkFacts::probe(Path::new("/"), config),
        }
    }
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path.as_ref()).ok()
}

/// Returns the running kernel's release.
fn release() -> String {
    let text = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().to_owned()
}

fn kernel() -> (u32, u32) {
    let release = release();
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn nspawn_version() -> Option<u32> {
    let output = Program::find("systemd-nspawn", "containers")
        .ok()?
        .arg("--version")
        .output(1 << 16, &AtomicBool::new(false), &mut |_| {})
        .ok()?;
    parse_version(&String::from_utf8_lossy(&output))
}

/// Parses `systemd 252 (252.39-1~deb12u2)` and `systemd 257~rc1`.
fn parse_version(text: &str) -> Option<u32> {
    let version = text.split_whitespace().nth(1)?;
    let digits = version
        .split(|letter: char| !letter.is_ascii_digit())
        .next()?;
    digits.parse().ok()
}

/// Returns whether a file system can be mounted: built in, loaded, or available as a module of this kernel; `None` if
/// the list of modules is not here, as in containers.
fn has_file_system(name: &str) -> Option<bool> {
    let listed = read("/proc/filesystems").is_some_and(|text| {
        let mut lines = text.lines();
        lines.any(|line| line.rsplit('\t').next() == Some(name))
    });
    match listed {
        true => Some(true),
        false => has_module(Path::new("/"), &release(), name),
    }
}

/// Returns whether a kernel has a module; `None` if its list is not here, as in containers.
fn has_module(root: &Path, release: &str, name: &str) -> Option<bool> {
    // The second directory is NixOS's.
    let mut places = [
        "lib/modules",
        "run/booted-system/kernel-modules/lib/modules",
    ]
    .into_iter();
    let list = |place: &str| read(root.join(place).join(release).join("modules.dep"));
    let text = places.find_map(list)?;
    Some(text.contains(&format!("/{name}.ko")))
}

fn store(host: &Host, home: &Path) -> StoreFacts {
    let mut facts = StoreFacts {
        path: home.to_owned(),
        unmounted: tree::mounts::unmounted(home),
        ..StoreFacts::default()
    };
    // The store will be created on the file system of its nearest existing ancestor.
    let there: PathBuf = home
        .ancestors()
        .find(|path| path.is_dir())
        .unwrap_or(Path::new("/"))
        .to_owned();
    facts.free = free_space(&there).ok();
    match Store::open_existing(home) {
        // The check of the mount point reports it.
        Err(_) if facts.unmounted.is_some() => {}
        Err(error) => facts.problem = Some(problem(&error, "rockenv fsck --repair")),
        Ok(Some(store)) => {
            facts.exists = true;
            facts.method = Some(store.method());
            facts.leftovers = leftovers(&store);
            facts.ephemeral = store.abandoned().unwrap_or_default();
        }
        Ok(None) => {}
    }
    match tree::probe(&there) {
        Ok(probe) => {
            facts.method = facts.method.or(Some(probe.method));
            if probe.file_system == "btrfs" && facts.method != Some(tree::Method::Btrfs) {
                facts.not_btrfs = probe.reasons.into_iter().next();
            }
            facts.file_system = Some(probe.file_system);
        }
        // Probing an overlay mount needs root.
        Err(error) if host.root && !facts.exists && facts.problem.is_none() => {
            facts.problem = Some(problem(&error, "rockenv setup --store-image 300G"));
        }
        Err(_) => {}
    }
    facts
}

/// Returns an error's message and its suggested command, or `otherwise` if the error suggests none.
pub(super) fn problem(error: &Error, otherwise: &str) -> (String, String) {
    (
        error.chain().join(": "),
        error.help_text().unwrap_or(otherwise).to_owned(),
    )
}

fn leftovers(store: &Store) -> Vec<EnvName> {
    let mut found = store.envs().unwrap_or_default();
    found.retain(|name| {
        let directory = store.env_dir(name);
        ContainerRecord::path(&directory.join("run")).exists()
            && lock::holder(&lock::env_lock(&directory)).is_none()
    });
    found
}

impl GpuFacts {
    /// Opens every node of the machine's GPUs as the current user.
    fn probe(machine: gpu::Machine) -> Self {
        let nodes = gpu::all_devices(&machine).into_iter().map(|device| {
            let outside = device.source.to_string_lossy().into_owned();
            let mut command = Command::new("/proc/self/exe");
            let number = format!("{outside}={}:{}", device.major, device.minor);
            let findings = answer(command.args(["__probe-gpu", &number]), PATIENCE);
            let finding = match findings {
                Ok(findings) => findings.into_iter().next(),
                Err(_) => Some(gpu::probe::examine(&outside, None)),
            };
            let finding = finding.unwrap_or_else(|| gpu::probe::no_answer(&outside));
            Node { finding, device }
        });
        let root = &machine.root;
        // A driver that is built in has a directory, but no module.
        let no_module = !root.join("sys/module/amdgpu").exists()
            && has_module(root, &release(), "amdgpu") == Some(false);
        Self {
            nodes: nodes.collect(),
            no_module,
            machine,
        }
    }
}

/// Returns the findings in the line that a program prints, or none if it has printed nothing by the time limit. It may
/// hang in a driver, also while it ends, where no signal helps, so nothing waits for its end.
fn answer(command: &mut Command, limit: Duration) -> std::io::Result<Vec<Finding>> {
    let command = command.stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut text = Vec::new();
    if let Some(output) = &mut child.stdout
        && readable([Some(output.as_fd())], Some(limit)) == Ok([true])
    {
        BufReader::new(output).read_until(b'\n', &mut text)?;
    }
    child.kill().ok();
    Ok(serde_json::from_slice(&text).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_does_not_answer_is_not_waited_for() {
        let found = gpu::probe::no_answer("/dev/kfd");
        let text = serde_json::to_string(&[&found]).unwrap();
        let begun = std::time::Instant::now();
        for (script, limit, wanted) in [
            ("echo \"$0\"; exec sleep 60", PATIENCE, vec![found]),
            ("exec sleep 60", Duration::from_millis(20), Vec::new()),
        ] {
            let mut shell = Command::new("sh");
            assert_eq!(
                answer(shell.args(["-c", script, &text]), limit).unwrap(),
                wanted
            );
        }
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn modules_are_found_where_nixos_has_them_too() {
        let root = tempfile::tempdir().unwrap();
        for place in ["lib", "run/booted-system/kernel-modules/lib"] {
            let has = |name| has_module(root.path(), "6.12", name);
            assert_eq!(has("overlay"), None);
            let modules = root.path().join(place).join("modules/6.12");
            fs::create_dir_all(&modules).unwrap();
            let list = modules.join("modules.dep");
            fs::write(&list, "kernel/fs/overlayfs/overlay.ko.xz:\n").unwrap();
            assert_eq!((has("overlay"), has("amdgpu")), (Some(true), Some(false)));
            fs::remove_file(list).unwrap();
        }
    }

    #[test]
    fn versions_are_read_whatever_follows_them() {
        for (text, want) in [
            ("systemd 252 (252.39-1~deb12u2)\n+PAM", Some(252)),
            ("systemd 257~rc1 (x)", Some(257)),
            ("systemd v258.1", None),
            ("", None),
        ] {
            assert_eq!(parse_version(text), want, "{text}");
        }
    }
}
