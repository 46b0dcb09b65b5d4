//! Commands about GPUs, on machines described in `tests/gpu`. Needs neither root nor a GPU.

use std::process::{Command, Output};

use crate::support::machine::lay_out;
use crate::support::transcript::measured;

/// A machine with a new user's home directory.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        lay_out(&directory.path().join("root"), text);
        Self(directory)
    }

    fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let place = self.0.path();
        let Output {
            status,
            stdout,
            stderr,
        } = Command::new(env!("CARGO_BIN_EXE_rockenv"))
            .args(arguments)
            .env_clear()
            .env("HOME", place)
            .env("XDG_CONFIG_HOME", place)
            .env("ROCKENV_HOME", place.join("store"))
            .env("ROCKENV_GPU_ROOT", place.join("root"))
            .current_dir(place)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (status.code().unwrap(), text(stdout), text(stderr))
    }

    /// Returns the exit code and the words of `plan`, without the figures of free disk space, which other tests change.
    fn plan(&self, arguments: &[&str]) -> (i32, String, String) {
        let (code, out, err) = self.run(&[&["plan"], arguments].concat());
        let stays = |text: String| {
            let words = measured(text);
            words.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        (code, stays(out), stays(err))
    }

    fn says(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.run(arguments);
        assert_eq!(code, 0, "{arguments:?}: {err}");
        out
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.says(arguments)).unwrap()
    }
}

#[test]
fn detect_lists_what_the_driver_lists() {
    let machine = Machine::new(include_str!("../gpu/7900xtx-igpu"));
    insta::assert_snapshot!(machine.says(&["target", "detect"]), @r"
    index  target   address       node           memory  units  product
        0  gfx1100  0000:03:00.0  renderD129   24.0 GiB     96  AMD RX 7900 XTX
        1  gfx1036  0000:15:00.0  renderD128  512.0 MiB      2  AMD Raphael iGPU
    ");
    let found = machine.json(&["target", "detect", "--json"]);
    assert_eq!(found["usable"], true);
    assert_eq!(found["gpus"][0]["target"], "gfx1100");
    assert_eq!(found["gpus"][1]["render"], "renderD128");
    let partitions = Machine::new(include_str!("../gpu/mi300x-partitions"));
    let found = partitions.json(&["target", "detect", "--json"]);
    assert_eq!(found["gpus"].as_array().unwrap().len(), 8);
    assert_eq!(found["gpus"][5]["partition"], 1);
    let none = Machine::new(include_str!("../gpu/wsl"));
    let (code, out, err) = none.run(&["target", "detect"]);
    assert_eq!((code, out.as_str()), (0, ""));
    assert!(err.contains("WSL has no /dev/kfd"), "{err}");
    let both = [
        include_str!("../gpu/780m"),
        include_str!("../gpu/no-driver"),
    ]
    .concat();
    let (_, _, err) = Machine::new(&both).run(&["target", "detect"]);
    assert!(err.contains("does not list GPU 0000:03:00.0"), "{err}");
}

#[test]
fn show_tells_what_a_target_lacks() {
    let machine = Machine::new(include_str!("../gpu/780m"));
    insta::assert_snapshot!(machine.says(&["target", "show", "gfx1103"]), @"
    target    gfx1103
    product   AMD Radeon 780M Laptop iGPU
    names     Radeon 780M, Radeon 760M, Radeon 740M, Phoenix, Hawk Point, AMD Ryzen 7 7840U / Ryzen 9 270
    kind      in a processor, RDNA3
    families  gfx1103, igpu-all, gfx110X-all, gfx110X-igpu
    override  11.0.3
    support   built, tested on hardware and ready for use
    variant   lean: RCCL cannot be built for this target, and PyTorch does not need it
    here      0000:c1:00.0 as renderD128

    projects that TheRock excludes for it:
    project              issue                                        without it
    hipSPARSELt          https://github.com/ROCm/TheRock/issues/2042  no products with structured sparsity; PyTorch does without
    rccl                 https://github.com/ROCm/TheRock/issues/150   no communication between GPUs: PyTorch is built without nccl (hook `torch-without-rccl`)
    rccl-tests           none named                                   the tests of rccl
    rocprofiler-compute  https://github.com/ROCm/TheRock/issues/2892  a tool for profiles; the rest of the profiler is built

    code for these targets also runs on it (reported by others, not tested):
    gfx11-generic: built with --offload-arch=gfx11-generic, in code objects of version 6
      https://llvm.org/docs/AMDGPUUsage.html
    gfx1100: HSA_OVERRIDE_GFX_VERSION=11.0.0: works for some users; not official, and not needed for code built for gfx1103
      https://github.com/ROCm/rocBLAS/issues/1536
      https://github.com/ROCm/rocm-systems/pull/5686
    ");
    let shown = machine.json(&["target", "show", "gfx1103", "--json"]);
    assert_eq!(shown["support"]["release_ready"], true);
    let excluded = shown["excluded_projects"].as_array().unwrap();
    assert!(excluded.iter().any(|one| one["project"] == "rccl"));
    let (code, _, err) = machine.run(&["target", "show", "gfx1104"]);
    assert_eq!(code, 7);
    insta::assert_snapshot!(err, @"
    error: unknown target `gfx1104`
    help: did you mean `gfx1100`? `rockenv target ls` shows them all, `rockenv target learn --source DIR` imports those of a newer TheRock
    ");
    // `target show` accepts every listed target.
    let all = machine.json(&["target", "ls", "--json"]);
    for row in all.as_array().unwrap() {
        machine.says(&["target", "show", row["target"].as_str().unwrap()]);
    }
}

#[test]
fn plan_names_the_gpu_or_why_there_is_none() {
    let plan = |machine: &Machine, more: &[&str]| {
        let mut arguments = vec!["plan", "hip-smoke", "--json", "--target"];
        arguments.extend(more);
        let plan = machine.json(&arguments);
        let steps = plan["plan"]["steps"].as_array().unwrap();
        let execute = steps.iter().find(|step| step["name"] == "execute").unwrap();
        let why = execute["why"].as_str().unwrap().to_owned();
        (plan["gpu"]["render"].as_str().map(str::to_owned), why)
    };
    let machine = Machine::new(include_str!("../gpu/7900xtx-igpu"));
    assert_eq!(
        plan(&machine, &["gfx1036"]).0.as_deref(),
        Some("renderD128")
    );
    assert_eq!(
        plan(&machine, &["gfx1100"]).0.as_deref(),
        Some("renderD129")
    );
    assert_eq!(
        plan(&machine, &["gfx90a"]),
        (
            None,
            "this machine has gfx1036, gfx1100, not gfx90a".to_owned()
        )
    );
    assert_eq!(
        plan(&machine, &["gfx90a", "--gpu", "1"]).0.as_deref(),
        Some("renderD128")
    );
    let (_, why) = plan(&machine, &["gfx1100", "--gpu", "none"]);
    assert!(why.contains("--gpu none"), "{why}");
    let (code, _, err) = machine.run(&[
        "plan",
        "hip-smoke",
        "--target",
        "gfx1100",
        "--gpu",
        "04:00.0",
    ]);
    assert_eq!(code, 4);
    insta::assert_snapshot!(err, @"
    error: no GPU `04:00.0` in this machine
    help: `--gpu renderD129` is gfx1100 at 0000:03:00.0, `--gpu renderD128` is gfx1036 at 0000:15:00.0
    ");
    // With two equal GPUs, `plan` takes the first one and says so.
    let machine = Machine::new(include_str!("../gpu/two-equal"));
    let (_, out, err) = machine.run(&["plan", "hip-smoke", "--target", "gfx1100"]);
    assert!(
        out.contains("gpu    0000:03:00.0 (gfx1100, renderD128)\n"),
        "{out}"
    );
    assert!(
        err.contains("`--gpu renderD129` selects another one"),
        "{err}"
    );
}

#[test]
fn without_an_argument_the_machines_own_target_is_meant() {
    let own = |text| Machine::new(text).run(&["plan"]);
    // The same as `plan gfx1103`.
    let machine = Machine::new(include_str!("../gpu/780m"));
    assert_eq!(machine.plan(&[]), machine.plan(&["gfx1103"]));
    let (code, _, err) = own(include_str!("../gpu/7900xtx-igpu"));
    assert_eq!(code, 2);
    insta::assert_snapshot!(err, @"
    error: the GPUs in this machine differ: gfx1036, gfx1100
    help: rockenv plan gfx1100
    ");
    let none = Machine::new(include_str!("../gpu/none"));
    let variant = ["--variant", "ci"];
    for verb in ["up", "plan", "lock"] {
        let (code, _, err) = none.run(&[&[verb][..], &variant].concat());
        assert_eq!(code, 4);
        insta::allow_duplicates! {
            insta::assert_snapshot!(err.replace(verb, "VERB"), @"
            error: no target given, and this machine has no GPU
            help: rockenv VERB gfx1103 --variant ci, or another one of `rockenv target ls`
            ");
        }
    }
}

#[test]
fn targets_alone_say_what_is_built_whatever_the_machine_has() {
    for text in [include_str!("../gpu/none"), include_str!("../gpu/780m")] {
        let machine = Machine::new(text);
        for target in ["gfx1103", "gfx1150"] {
            assert_eq!(machine.plan(&["--target", target]), machine.plan(&[target]));
        }
        let two = ["--target", "gfx1103", "--target", "gfx1201"];
        let named = [&["therock"], &two[..]].concat();
        assert_eq!(machine.plan(&two), machine.plan(&named));
    }
}

#[test]
fn doctor_says_what_is_wrong_with_each_machine() {
    for (text, words) in [
        (
            include_str!("../gpu/780m"),
            "GPU 0000:c1:00.0 (gfx1103, renderD128): AMD Radeon 780M",
        ),
        (include_str!("../gpu/no-driver"), "modprobe amdgpu"),
        (include_str!("../gpu/wsl"), "WSL has /dev/dxg"),
        (include_str!("../gpu/none"), "no AMD GPU"),
    ] {
        let (_, out, _) = Machine::new(text).run(&["doctor"]);
        assert!(out.contains(words), "{words} in {out}");
    }
}
