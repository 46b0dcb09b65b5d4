//! Owns the sample machines for `doctor`'s tests, and the expected findings.

use super::*;

/// A Debian machine with everything except a GPU.
pub(super) fn debian() -> Facts {
    Facts {
        engine: Engine::Nspawn,
        root: true,
        through_sudo: false,
        systemd: true,
        kernel: (6, 12),
        manager: Some(Manager::Apt),
        missing: Vec::new(),
        nspawn: Some(257),
        overlay: true,
        no_btrfs: false,
        cgroup: Cgroups {
            v1: Vec::new(),
            v2: Some(["cpu", "memory", "pids"].map(str::to_owned).to_vec()),
        },
        pressure: true,
        user_namespaces: Some(1000),
        obstacle: None,
        lack_of_ids: None,
        store: StoreFacts {
            path: "/var/lib/rockenv".into(),
            exists: true,
            file_system: Some("btrfs".into()),
            method: Some(Method::Btrfs),
            free: Some(900 << 30),
            ..StoreFacts::default()
        },
        gpu: gpu::tests::nothing(),
        services: Vec::new(),
        network: NetworkFacts::default(),
    }
}

pub(super) fn of(facts: &Facts, state: CheckState) -> Vec<Check> {
    examine(facts)
        .into_iter()
        .flat_map(|section| section.checks)
        .filter(|check| check.state == state)
        .collect()
}

#[test]
fn a_good_machine_misses_nothing() {
    let facts = debian();
    assert!(is_fit(&examine(&facts)));
    assert_eq!(of(&facts, CheckState::Missing), []);
    assert_eq!(of(&facts, CheckState::Note).len(), 1, "the missing GPU");
}

#[test]
fn a_fresh_machine_is_told_what_to_type() {
    let mut facts = debian();
    facts.missing = TOOLS.iter().map(|tool| tool.name.to_owned()).collect();
    facts.nspawn = None;
    assert!(!is_fit(&examine(&facts)));
    for check in of(&facts, CheckState::Missing) {
        assert_eq!(check.command.as_deref(), Some("rockenv setup"), "{check:?}");
    }
}

#[test]
fn a_user_is_told_to_be_root() {
    let mut facts = debian();
    facts.root = false;
    facts.store.method = Some(Method::Overlay);
    assert!(!is_fit(&examine(&facts)));
    let commands: Vec<_> = examine(&facts)
        .into_iter()
        .flat_map(|section| section.checks)
        .filter_map(|check| check.command)
        .collect();
    assert!(
        commands.iter().all(|one| one.starts_with("sudo ")),
        "{commands:?}"
    );
}

#[test]
fn who_uses_a_service_needs_neither_root_nor_nspawn() {
    let mut facts = debian();
    facts.root = false;
    facts.store.free = Some(60 << 30);
    facts.store.leftovers = vec!["a".parse().unwrap()];
    let advised = examine(&facts).swap_remove(2).checks.into_iter();
    let advised: Vec<_> = advised.filter_map(|check| check.command).collect();
    assert_eq!(
        advised,
        ["rockenv du", "rockenv fsck --repair"],
        "their own store"
    );
    facts.missing = vec!["systemd-nspawn".into()];
    facts.nspawn = None;
    facts.engine = Engine::Podman;
    facts.services = vec![ServiceFacts::sample(Engine::Podman)];
    assert!(is_fit(&examine(&facts)));
    assert_eq!(of(&facts, CheckState::Missing), []);
    for engine in Engine::SERVICES {
        facts.engine = engine;
        facts.services = vec![ServiceFacts::sample(engine)];
        facts.obstacle = Some(("no", "sysctl -w a=1".into()));
        assert!(!is_fit(&examine(&facts)), "{engine}");
        facts.root = true;
        assert!(is_fit(&examine(&facts)), "{engine}");
        (facts.root, facts.obstacle) = (false, None);
    }
    facts.lack_of_ids = Some(("no ids".into(), "tee -a /etc/subuid".into()));
    assert!(!is_fit(&examine(&facts)));
    facts.lack_of_ids = None;
    // The service, however, is required, installed or not.
    facts.services[0].version = None;
    facts.services[0].problem = Some(("it does not answer".into(), "start it".into()));
    for installed in [true, false] {
        facts.services[0].installed = installed;
        assert!(!is_fit(&examine(&facts)));
        assert_eq!(of(&facts, CheckState::Missing).len(), 1);
    }
}

#[test]
fn a_container_with_cgroup_v1_works_and_says_what_it_lacks() {
    let mut facts = debian();
    facts.systemd = false;
    facts.kernel = (5, 10);
    facts.nspawn = Some(252);
    facts.cgroup = Cgroups {
        v1: vec!["memory".into()],
        v2: None,
    };
    facts.pressure = false;
    facts.store.method = Some(Method::Overlay);
    facts.store.free = Some(60 << 30);
    facts.obstacle = Some(("no", "sysctl -w user.max_user_namespaces=15000".into()));
    let sections = examine(&facts);
    assert!(is_fit(&sections));
    let text = format!("{sections:?}");
    for part in [
        "\"rockenv --home /another/place setup --store-image 300G",
        "psi=1",
        "holds back jobs only by the memory that is left",
        "no pids controller (cgroup v1)",
        "max_user_namespaces",
        "no cgroup.kill",
        "230.0 GiB",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_fedora_gaming_machine() {
    let mut facts = debian();
    facts.manager = Some(Manager::Dnf);
    facts.cgroup.v2 = Some(vec!["pids".into()]);
    facts.gpu = gpu::tests::card();
    let text = format!("{:?}", examine(&facts));
    let grubby = "grubby --update-kernel=ALL --args";
    let kargs = "rpm-ostree kargs --append-if-missing";
    for (manager, sudo, command) in [
        (Manager::Dnf, "", grubby),
        (Manager::Dnf, "sudo ", grubby),
        (Manager::RpmOstree, "sudo ", kargs),
    ] {
        facts.manager = Some(manager);
        facts.through_sudo = !sudo.is_empty();
        let missing = of(&facts, CheckState::Missing);
        assert_eq!(missing.len(), 1);
        let wanted = format!("{sudo}{command}=cgroup_enable=memory && {sudo}reboot");
        assert_eq!(missing[0].command, Some(wanted));
    }
    for part in [
        "GPU 0000:c1:00.0 (gfx1103, renderD128): AMD Radeon 780M",
        "/dev/dri/renderD128 for group 105 (mode 0660)",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_new_store_may_be_an_image_where_it_will_be() {
    let mut facts = debian();
    facts.store.exists = false;
    facts.store.method = Some(Method::Overlay);
    facts.store.free = Some(60 << 30);
    let text = format!("{:?}", of(&facts, CheckState::Note));
    assert_has!(text, "\"rockenv setup --store-image 300G\"");
    assert_has!(text, "\"rockenv plan gfx1103\"");
    facts.no_btrfs = true;
    let text = format!("{:?}", of(&facts, CheckState::Note));
    assert!(!text.contains("--store-image"), "{text}");
    assert_has!(text, "a store on xfs");
}

#[test]
fn nobody_is_sent_to_install_a_tool_without_a_package() {
    let mut facts = debian();
    facts.manager = Some(Manager::Pacman);
    facts.missing = vec!["mmdebstrap".into()];
    assert_eq!(of(&facts, CheckState::Missing), []);
    let notes = of(&facts, CheckState::Note);
    let told = notes
        .iter()
        .find(|one| one.message.starts_with("mmdebstrap"));
    assert_eq!(told.unwrap().command, None);
}

#[test]
fn a_store_that_is_not_mounted_or_broken_stops_everything() {
    let mut facts = debian();
    facts.store.unmounted = Some("/mnt".into());
    assert!(!is_fit(&examine(&facts)));
    let mut facts = debian();
    facts.store.problem = Some(("a store cannot live here".into(), "do that".into()));
    facts.store.method = None;
    assert!(!is_fit(&examine(&facts)));
    let mut facts = debian();
    facts.overlay = false;
    facts.store.method = Some(Method::Overlay);
    assert!(!is_fit(&examine(&facts)));
    facts.store.method = Some(Method::Reflink);
    assert!(is_fit(&examine(&facts)));
}
