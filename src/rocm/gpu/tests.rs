//! Detection and choice on simulated machines, whose files are in `tests/gpu`.

use fs_err as fs;

use super::*;
use crate::rocm::target::parsed as targets;
use crate::sys::error::Kind;

/// Creates a machine's files and reads them. The directory lives as long as the first value.
fn machine(text: &str) -> (tempfile::TempDir, Machine) {
    let root = tempfile::tempdir().unwrap();
    for part in text.split(">>> ").skip(1) {
        let (path, content) = part.split_once('\n').unwrap();
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let machine = Machine::detect(root.path());
    (root, machine)
}

fn text(name: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu");
    fs::read_to_string(directory.join(name)).unwrap()
}

fn known(name: &str) -> (tempfile::TempDir, Machine) {
    machine(&text(name))
}

fn named(isa: &str) -> String {
    format!("rockenv lock {isa}")
}

/// Returns the result of `--gpu SELECTOR` for these targets: render node and note, or the reason for no GPU.
fn chosen(machine: &Machine, selector: &str, names: &[&str]) -> Result<String> {
    let choice = machine.choose(&selector.into(), &targets(names), Extras::default())?;
    Ok(match choice {
        Choice::Gpu { grant, note: None } => grant.gpu.render,
        Choice::Gpu { grant, note } => format!("{}: {}", grant.gpu.render, note.unwrap()),
        Choice::Without { why } => why,
    })
}

fn taken(machine: &Machine, selector: &str, names: &[&str]) -> String {
    chosen(machine, selector, names).unwrap()
}

/// Returns what `--gpu SELECTOR` grants.
fn granted(machine: &Machine, selector: &str, extras: Extras) -> Grant {
    match machine.choose(&selector.into(), &[], extras).unwrap() {
        Choice::Gpu { grant, .. } => *grant,
        Choice::Without { why } => panic!("{why}"),
    }
}

#[test]
fn a_gpu_in_a_processor() {
    let (_root, machine) = known("780m");
    let [gpu] = &machine.gpus[..] else {
        panic!("{:?}", machine.gpus);
    };
    assert_eq!(gpu.to_string(), "0000:c1:00.0 (gfx1103, renderD128)");
    assert_eq!((gpu.index, gpu.partition), (0, None));
    assert_eq!((gpu.compute_units, gpu.memory), (12, 4 << 30));
    assert_eq!(machine.target(named).unwrap().name(), "gfx1103");
    let pci = ["0000:c1:00.0", "0000:C1:00.0", "c1:00.0"];
    let others = ["auto", "required", "0", "renderD128", "/dev/dri/renderD128"];
    for selector in others.into_iter().chain(pci) {
        assert_eq!(taken(&machine, selector, &["gfx1103"]), "renderD128");
        assert_eq!(taken(&machine, selector, &[]), "renderD128");
    }
    // Code built for another target does not run, unless the user insists.
    assert_eq!(
        taken(&machine, "auto", &["gfx90a", "gfx1100"]),
        "this machine has gfx1103, not gfx90a or gfx1100"
    );
    let error = chosen(&machine, "required", &["gfx90a"]).unwrap_err();
    assert_eq!(
        error.message(),
        "steps with a GPU cannot run: this machine has gfx1103, not gfx90a"
    );
    assert!(taken(&machine, "0", &["gfx90a"]).ends_with("does not run code for gfx90a"));
    assert_eq!(taken(&machine, "none", &["gfx1103"]), "`--gpu none` is set");
    // Cards beside it that the compute driver skipped, or another driver has claimed.
    let card = text("no-driver");
    let cards = card.replace("0000:03", "0000:43") + &card;
    let (_root, machine) = self::machine(&(text("780m") + &cards));
    let skipped = "the compute driver does not list GPU 0000:03:00.0, GPU 0000:43:00.0";
    assert_eq!(
        taken(&machine, "auto", &["gfx1100"]),
        format!("this machine has gfx1103, not gfx1100; {skipped}")
    );
    let error = chosen(&machine, "43:00.0", &[]).unwrap_err();
    assert_eq!(error.chain()[1], skipped);
}

#[test]
fn a_wrong_name_is_answered_with_the_right_ones() {
    let (_root, machine) = known("7900xtx-igpu");
    for name in ["2", "renderD130", "card0", "0000:03:00.1", "", "gfx1100"] {
        let error = chosen(&machine, name, &[]).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert_eq!(error.message(), format!("no GPU `{name}` in this machine"));
        assert_eq!(
            error.help_text(),
            Some(
                "`--gpu renderD129` is gfx1100 at 0000:03:00.0, `--gpu renderD128` is gfx1036 at 0000:15:00.0"
            )
        );
    }
}

#[test]
fn a_gpu_that_no_target_fits_is_named() {
    let unknown = |name: &str, version| machine(&text(name).replace(version, "100307"));
    let (_root, machine) = unknown("780m", "110003");
    let error = machine.target(named).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!(
        error.message(),
        "this machine's GPU is gfx1037, which TheRock does not build for"
    );
    assert_has!(error.help_text().unwrap(), "rockenv lock gfx1103");
    // If another GPU has a known target, the help names it.
    let (_root, machine) = unknown("7900xtx-igpu", "110000");
    let error = machine.target(named).unwrap_err();
    assert_eq!(error.kind(), Kind::Usage);
    assert_eq!(error.help_text(), Some("rockenv lock gfx1036"));
}

#[test]
fn of_two_equal_cards_the_first_is_taken_and_the_other_can_be() {
    let (root, machine) = known("two-equal");
    assert_eq!(machine.target(named).unwrap().name(), "gfx1100");
    assert_eq!(
        taken(&machine, "auto", &["gfx1100"]),
        "renderD128: using GPU 0000:03:00.0 (gfx1100, renderD128); `--gpu renderD129` selects another one"
    );
    assert_eq!(taken(&machine, "43:00.0", &["gfx1100"]), "renderD129");
    assert_eq!(taken(&machine, "1", &["gfx1100"]), "renderD129");
    // A container may have the node of one of them.
    fs::remove_file(root.path().join("dev/dri/renderD128")).unwrap();
    let machine = Machine::detect(root.path());
    for selector in ["auto", "0"] {
        assert_eq!(taken(&machine, selector, &["gfx1100"]), "renderD129");
    }
}

#[test]
fn partitions_share_an_address() {
    let (_root, machine) = known("mi300x-partitions");
    assert_eq!(machine.gpus.len(), 8);
    // The first device's partitions are numbered as Linux does it, the second one's as some of AMD's drivers do.
    for (index, pci) in [(2, "0000:05:00.0"), (6, "0001:26:00.0")] {
        let third = &machine.gpus[index];
        assert_eq!(
            (third.pci.as_str(), third.partition, third.isa.as_str()),
            (pci, Some(2), "gfx942")
        );
    }
    assert!(chosen(&machine, "05:00.1", &["gfx942"]).is_err());
    assert_eq!(taken(&machine, "renderD134", &["gfx942"]), "renderD134");
    assert_eq!(taken(&machine, "6", &["gfx942"]), "renderD134");
    let error = chosen(&machine, "0001:26:00.0", &["gfx942"]).unwrap_err();
    assert_eq!(error.kind(), Kind::Usage);
    assert_eq!(
        error.message(),
        "`--gpu 0001:26:00.0` matches 4 partitions of one device"
    );
    let help = error.help_text().unwrap();
    assert_has!(help, "renderD132");
    assert!(!help.contains("renderD128"), "{help}");
}

#[test]
fn machines_without_one_say_why() {
    let driver = |name: &str| {
        let file = "sys/bus/pci/devices/0000:03:00.0/uevent";
        text("no-driver") + &format!(">>> {file}\nDRIVER={name}\n")
    };
    let failed = text("no-driver") + ">>> dev/kfd\n";
    // Reading it fails, as under the device rules of a container.
    let hidden = failed.clone() + ">>> sys/class/kfd/kfd/topology/nodes/1/properties/unreadable\n";
    let not_loaded = "the GPU's driver is not loaded: `modprobe amdgpu`";
    let other = "the GPU's driver is vfio-pci, not amdgpu";
    for (text, why) in [
        (text("none"), "this machine has no GPU"),
        (text("no-driver"), not_loaded),
        (text("wsl"), "WSL has no /dev/kfd"),
        // Loading the driver again would not help.
        (driver("vfio-pci"), other),
        (driver("amdgpu"), "this machine has no /dev/kfd"),
        (failed, "the compute driver lists no GPU"),
        (hidden, "device rules of a control group hide the GPU"),
    ] {
        let (_root, machine) = machine(&text);
        assert_eq!(machine.gpus, []);
        assert_eq!(taken(&machine, "auto", &["gfx1103"]), why);
        let error = chosen(&machine, "required", &["gfx1103"]).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert_eq!(
            error.message(),
            format!("steps with a GPU cannot run: {why}")
        );
        assert!(error.help_text().unwrap().contains("rockenv doctor"));
        // A render node of another vendor is not a candidate.
        let error = chosen(&machine, "renderD128", &[]).unwrap_err();
        assert_eq!(error.chain(), ["no GPU `renderD128` in this machine", why]);
        let error = machine.target(named).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert_eq!(error.message(), format!("no target given, and {why}"));
    }
    // A container without devices still sees the host's `/sys`.
    for node in ["dev/kfd", "dev/dri/renderD128"] {
        let (root, _) = known("780m");
        fs::remove_file(root.path().join(node)).unwrap();
        let machine = Machine::detect(root.path());
        let lack = format!("this machine has no /{node}");
        assert_eq!(taken(&machine, "auto", &[]), lack);
        let error = chosen(&machine, "0", &[]).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert_has!(error.message(), &lack);
    }
}

/// Replaces a node below `dev` by a link to an existing device.
fn stand_in(root: &Path, node: &str) {
    let path = root.join("dev").join(node);
    fs::remove_file(&path).unwrap();
    fs_err::os::unix::fs::symlink("/dev/null", path).unwrap();
}

#[test]
fn a_chosen_gpu_stays_the_same_when_the_nodes_get_other_numbers() {
    let (root, machine) = known("two-equal");
    for path in ["kfd", "dri/renderD128", "dri/renderD129"] {
        stand_in(root.path(), path);
    }
    let grant = granted(&machine, "43:00.0", Extras::default());
    assert_eq!(grant.devices().unwrap()[1].path, "/dev/dri/renderD129");
    // The driver was loaded again.
    let nodes = root.path().join("sys/class/kfd/kfd/topology/nodes");
    for (node, old, new) in [(1, "128", "129"), (2, "129", "128")] {
        let path = nodes.join(format!("{node}/properties"));
        let minor = |number: &str| format!("drm_render_minor {number}\n");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace(&minor(old), &minor(new))).unwrap();
    }
    assert_eq!(grant.devices().unwrap()[1].path, "/dev/dri/renderD128");
    fs::remove_file(nodes.join("2/properties")).unwrap();
    let error = grant.devices().unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    let gone = "GPU 0000:43:00.0 (gfx1100, renderD129) is gone";
    assert_eq!(error.chain(), [gone]);
    fs::remove_file(nodes.join("1/properties")).unwrap();
    let error = grant.devices().unwrap_err();
    assert_eq!(error.chain(), [gone, "the compute driver lists no GPU"]);
}

#[test]
fn other_nodes_enter_only_where_the_profile_asks() {
    let (root, machine) = known("780m");
    for path in ["kfd", "dri/renderD128", "accel/accel0", "dma_heap/system"] {
        stand_in(root.path(), path);
    }
    let paths = |extras| {
        let devices = granted(&machine, "auto", extras).devices().unwrap();
        let null = Path::new("/dev/null");
        for device in &devices {
            let number = (device.major, device.minor);
            assert_eq!((&*device.source, number), (null, (1, 3)));
        }
        // Root's group is never granted.
        assert!(groups(&devices).is_empty());
        let paths = devices.into_iter().map(|device| device.path);
        paths.collect::<Vec<_>>()
    };
    let all = Extras {
        accel: true,
        dma_heap: true,
    };
    let own = ["/dev/kfd", "/dev/dri/renderD128"];
    assert_eq!(paths(Extras::default()), own);
    let more = ["/dev/accel/accel0", "/dev/dma_heap/system"];
    assert_eq!(paths(all), [own, more].concat());
    fs::remove_file(root.path().join("dev/accel/accel0")).unwrap();
    let choice = machine.choose(&Selector::Auto, &[], all).unwrap();
    assert!(matches!(choice, Choice::Without { why } if why == "this machine has no /dev/accel"));
    let error = machine.choose(&Selector::Required, &[], all).unwrap_err();
    assert_eq!(
        error.message(),
        "steps with a GPU cannot run: this machine has no /dev/accel"
    );
}

#[test]
fn a_node_that_is_gone_or_no_device_is_said_before_the_start() {
    let (root, machine) = known("780m");
    let devices = || granted(&machine, "auto", Extras::default()).devices();
    let error = devices().unwrap_err();
    assert!(error.message().ends_with("is not a device node"), "{error}");
    assert_eq!(error.help_text(), Some("rockenv doctor"));
    fs::remove_file(root.path().join("dev/dri/renderD128")).unwrap();
    fs::remove_file(root.path().join("dev/kfd")).unwrap();
    fs_err::os::unix::fs::symlink("/dev/null", root.path().join("dev/kfd")).unwrap();
    let error = devices().unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!(
        error.message(),
        "the GPU's device node `/dev/dri/renderD128` is gone"
    );
    assert_eq!(error.help_text(), Some("sudo journalctl -k -g amdgpu"));
}
