//! The profile's scripts alone, with paths below a test directory and programs that print how they were called.

use std::path::Path;
use std::process::Command;

use crate::support::loopfs::run;
use fs_err as fs;

/// Copies the scripts to `opt/` of the directory, and redirects their `/therock`, `/cache` and `/tmp` into it.
fn scripts(directory: &Path) {
    let opt = directory.join("opt");
    for made in ["opt", "home", "tmp", "cache", "bin", "therock/build"] {
        fs::create_dir_all(directory.join(made)).unwrap();
    }
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/therock");
    let scripts = fs::read_dir(own).unwrap().map(|entry| entry.unwrap());
    for script in scripts.filter(|script| script.file_type().unwrap().is_file()) {
        let mut text = fs::read_to_string(script.path()).unwrap();
        // The directory itself may be in /tmp.
        for (from, to) in [
            ("/opt/rockenv", "DIRECTORY/opt"),
            ("/therock/", "DIRECTORY/therock/"),
            ("/cache/", "DIRECTORY/cache/"),
            ("/tmp/", "DIRECTORY/tmp/"),
        ] {
            text = text.replace(from, to);
        }
        let text = text.replace("DIRECTORY", directory.to_str().unwrap());
        fs::write(opt.join(script.file_name()), text).unwrap();
    }
}

fn profile() -> toml::Table {
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/therock.toml");
    fs::read_to_string(profile).unwrap().parse().unwrap()
}

/// Runs shell code in the directory.
fn sh(directory: &Path, code: &str) -> String {
    let bin = directory.join("bin");
    let code = format!("PATH='{}':$PATH\n{code}", bin.display());
    let mut command = Command::new("sh");
    command.args(["-euc", &code]).current_dir(directory);
    run(command
        .env("HOME", directory.join("home"))
        .env("GIT_CONFIG_NOSYSTEM", "1"))
}

/// Copies the scripts, and makes a superproject without files and a `cmake` that prints its arguments.
fn configurable(directory: &Path) {
    scripts(directory);
    sh(
        directory,
        "git init -q -b main therock/src; cd therock/src
         git -c user.name=t -c user.email=t@example.org commit -q --allow-empty -m all
         printf '#!/bin/sh\\nprintf \"%%s\\\\n\" \"$@\"\\n' >../../bin/cmake; chmod +x ../../bin/cmake",
    );
}

#[test]
fn a_flag_that_a_script_has_keeps_its_values() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    scripts(directory);
    let help = "echo 'usage: [--depth DEPTH] [--system-projects A [A ...]] [--dir-mode M]'";
    fs::write(directory.join("help.sh"), help).unwrap();
    let words =
        "--depth 1 --stage all --system-projects half ROCR-Runtime --dir /x --depth=2 --jobs=3";
    let taken = sh(
        directory,
        &format!("sh opt/flags.sh 'sh help.sh' {words} 2>said"),
    );
    let taken: Vec<_> = taken.split_whitespace().collect();
    assert_eq!(
        taken,
        [
            "--depth",
            "1",
            "--system-projects",
            "half",
            "ROCR-Runtime",
            "--depth=2"
        ]
    );
    let said = fs::read_to_string(directory.join("said")).unwrap();
    let left_out = said.lines().filter_map(|line| line.split(' ').next_back());
    assert_eq!(left_out.collect::<Vec<_>>(), ["--stage", "--dir", "--jobs"]);
}

/// The commits of a submodule's own submodules are known only once it is there.
#[test]
fn mirrors_of_a_submodules_own_submodules_are_used() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    scripts(directory);
    let made = r#"
        git init -q -b main checkout
        cd checkout
        mkdir build_tools
        echo 'import os, subprocess, sys
if "--help" not in sys.argv:
    print(os.environ["GIT_COMMITTER_DATE"], file=sys.stderr)
    subprocess.run(["git", "config", "--global", "--get-regexp", "insteadof"])' >build_tools/fetch_sources.py
        cd ..
        commit() { git -C "$1" -c user.name=t -c user.email=t@example.org commit -q --allow-empty -m "$2"; }
        for name in wanted old nested; do
          git init -q -b main "$name"
          commit "$name" "$name"
          git clone -q --mirror "$name" "cache/git-mirrors/ROCm/$name.git"
          git -C "cache/git-mirrors/ROCm/$name.git" config remote.origin.url "https://example.org/$name.git"
        done
        cd checkout
        for name in wanted old; do
          printf '[submodule "%s"]\n\tpath = %s\n\turl = ../%s\n' $name $name $name >>.gitmodules
        done
        commit=$(git -C ../cache/git-mirrors/ROCm/wanted.git rev-parse HEAD)
        git add .
        git update-index --add --cacheinfo "160000,$commit,wanted"
        git update-index --add --cacheinfo "160000,0123456789012345678901234567890123456789,old"
        commit . checkout"#;
    sh(directory, made);
    let used = sh(directory, "cd checkout; sh ../opt/sources.sh --jobs 8");
    let used = used.lines().filter_map(|line| line.split(' ').next_back());
    let mut used: Vec<_> = used.collect();
    used.sort_unstable();
    assert_eq!(
        used,
        [
            "https://example.org/nested.git",
            "https://example.org/wanted.git"
        ]
    );
    // A submodule that is as the last fetch left it is neither fetched nor patched again.
    let again = || sh(directory, "cd checkout; sh ../opt/sources.sh --jobs 8");
    assert_eq!(again(), "all submodules are as they were fetched\n");
    sh(
        directory,
        "mkdir checkout/patches; touch checkout/patches/one",
    );
    assert!(again().contains("nested.git"));
}

/// `git submodule update` would remove the changes of these commits from the files.
#[test]
fn a_fetch_replaces_no_commit_of_the_user() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    scripts(directory);
    let made = r#"
        git config --global user.name t
        git config --global user.email t@example.org
        git config --global protocol.file.allow always
        mkdir -p cache/git-mirrors
        git init -q inner
        git -C inner commit -q --allow-empty -m older
        git -C inner commit -q --allow-empty -m inner
        git init -q checkout
        cd checkout
        mkdir build_tools
        echo 'import subprocess, sys
if "--help" not in sys.argv:
    subprocess.run(["git", "submodule", "--quiet", "update"], check=True)' >build_tools/fetch_sources.py
        git submodule --quiet add ../inner sub
        git add .
        git commit -q -m checkout
        git worktree add -q ../tree
        # The commit of another superproject is on a branch.
        git -C sub checkout -q -b branch HEAD~1
        git add sub
        git commit -q -m older
        git reset -q HEAD~1
        sh ../opt/sources.sh
        git diff --quiet"#;
    sh(directory, made);
    let refuses = |change: &str| {
        let refused = format!("cd checkout; {change}; ! sh ../opt/sources.sh 2>&1");
        let refused = sh(directory, &refused);
        let named = "your commits in these submodules: sub\n";
        assert!(refused.contains(named), "{refused}");
    };
    refuses("git -C sub commit -q --allow-empty -m mine");
    // The checkout names the commit now.
    let head = "git -C sub rev-parse HEAD";
    let built = format!("cd checkout; {head}; git add sub; sh ../opt/sources.sh; {head}");
    let heads = sh(directory, &built);
    let (mine, after) = heads.split_once('\n').unwrap();
    assert_eq!(mine, after.trim());
    // Nothing names it any more, and patches of a fetch may be on top of it.
    refuses("git reset -q; git commit -q --allow-empty -m next");
    refuses("git -C sub -c user.email=therockbot@amd.com commit -q --allow-empty -m patch");
    // A commit from elsewhere.
    let theirs = "git -C sub commit-tree -m theirs HEAD^{tree}";
    refuses(&format!("git -C sub checkout -q $({theirs})"));
    let refused = sh(directory, "cd tree; ! sh ../opt/sources.sh 2>&1");
    assert!(refused.contains("help: use a clone"), "{refused}");
}

/// Before 7.13, TheRock does not configure without explicit targets.
#[test]
fn old_releases_are_configured_for_the_machines_targets() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    configurable(directory);
    for (version, of_its_own) in [
        ("6.4.0", true),
        ("7.0.0", true),
        ("7.9.0", true),
        ("7.12.1", true),
        ("7.13.0", false),
        ("10.1.0", false),
    ] {
        let json = format!("{{\"rocm-version\": \"{version}\"}}");
        fs::write(directory.join("therock/src/version.json"), json).unwrap();
        let configure = "sh opt/configure.sh 2 1 1 4294967296 '-DTHEROCK_DIST_AMDGPU_FAMILIES=gfx1103;gfx1201' \
             -DTHEROCK_ENABLE_EMULATION=OFF";
        let said = sh(directory, configure);
        let has = said.contains("-DTHEROCK_AMDGPU_FAMILIES=gfx1103;gfx1201\n");
        assert_eq!(has, of_its_own, "{version}: {said}");
    }
}

/// TheRock's newer splitter fails for RCCL without code for the env's targets, hours after the configuration.
#[test]
fn rccl_without_code_for_the_targets_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    configurable(directory);
    let splitter = "therock/src/rocm-systems/shared/kpack/python/rocm_kpack/artifact_splitter.py";
    for (file, text) in [
        ("therock/src/version.json", "{\"rocm-version\": \"10.1.0\"}"),
        (
            "therock/build/build.ninja",
            "x --artifact-prefix rccl_lib\n",
        ),
        (
            "therock/build/comm-libs/rccl/_toolchain.cmake",
            "set(GPU_TARGETS gfx1201;gfx1250 CACHE STRING \"From super-project\" FORCE)\n",
        ),
        (splitter, "raise RuntimeError(\"no device code objects\")\n"),
    ] {
        let file = directory.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    let said = |own: &str| {
        let configure =
            format!("sh opt/configure.sh 2 1 1 4294967296 {own} -DTHEROCK_ENABLE_EMULATION=OFF");
        sh(
            directory,
            &format!("{{ {configure} >out && echo configured; }} 2>&1 || true"),
        )
    };
    for own in [
        "",
        "-DTHEROCK_AMDGPU_FAMILIES=gfx1201",
        "'-DTHEROCK_AMDGPU_FAMILIES=gfx1103;gfx1201'",
    ] {
        assert_eq!(said(own), "configured\n", "{own}");
    }
    let own = "-DTHEROCK_AMDGPU_FAMILIES=gfx1103";
    let refused = said(own);
    assert!(
        refused.starts_with("error: RCCL has no code for gfx1103"),
        "{refused}"
    );
    fs::write(directory.join(splitter), "").unwrap();
    assert_eq!(said(own), "configured\n");
}

/// The volume `out` may be a directory of the user's, or have results of an earlier rockenv, which wrote no mark.
#[test]
fn only_results_of_this_profile_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    scripts(directory);
    let out = directory.join("therock/out");
    fs::create_dir_all(out.join("torch")).unwrap();
    let empty = "sh ../../opt/empty.sh";
    let emptied = format!("cd therock/out; {empty} rocm; echo 1 > rocm/a.whl; {empty} torch");
    sh(directory, &emptied);

    // Lines about results are written anew, and the user's own stay.
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/therock.toml");
    let profile: toml::Table = fs::read_to_string(profile).unwrap().parse().unwrap();
    let mut steps = profile["step"].as_array().unwrap().iter();
    let checksums = steps.find(|step| step["name"].as_str() == Some("checksums"));
    let checksums = checksums.unwrap()["run"].as_str().unwrap();
    fs::write(out.join("SHA256SUMS"), "0  mine\n1  ./rocm/old.whl\n").unwrap();
    let sums = sh(&out, checksums);
    let names: Vec<_> = sums.lines().map(|line| &line[line.len() - 4..]).collect();
    assert_eq!(names, ["mine", ".whl"], "{sums}");
    assert!(sums.ends_with("  ./rocm/a.whl\n"), "{sums}");

    sh(directory, &format!("cd therock/out; {empty} rocm"));
    assert!(!out.join("rocm/a.whl").exists());

    // Others' files are found before hours of building, and a link is the user's even if its target is empty.
    fs::write(out.join("rocm/mine"), "").unwrap();
    fs::remove_file(out.join("rocm/.rockenv")).unwrap();
    fs::remove_dir_all(out.join("torch")).unwrap();
    std::os::unix::fs::symlink("elsewhere", out.join("torch")).unwrap();
    for (script, named) in [
        ("empty.sh therock/out/rocm", "rocm"),
        ("empty.sh therock/out/torch", "torch"),
        ("build.sh 1 1 1 1 all", "rocm"),
        ("torch_sources.sh '' '' ''", "torch"),
    ] {
        let said = sh(directory, &format!("! sh opt/{script} 2>&1"));
        assert!(
            said.contains(&format!("therock/out/{named}` has files")),
            "{said}"
        );
    }
    assert!(out.join("rocm/mine").exists() && out.join("torch").is_symlink());
}

/// The `rocm` package accepts only names that its wheels have. Before 7.13 the bundle's name is the one for all targets.
#[test]
fn the_first_target_or_an_indexs_family_names_the_wheels() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    scripts(directory);
    for (place, family) in [
        ("/therock/out/rocm/dist", "gfx1103"),
        ("https://example.org/whl-multi-arch/", "gfx1103"),
        ("https://example.org/v2/gfx110X-all/", "gfx110X-all"),
        ("https://example.org/whl/gfx1151", "gfx1151"),
    ] {
        let family_of = format!("sh opt/family.sh 'gfx1103;gfx1201' {place}");
        assert_eq!(sh(directory, &family_of).trim(), family, "{place}");
    }
    let profile = profile();
    let mut steps = profile["step"].as_array().unwrap().iter();
    let configure = steps.find(|step| step["name"].as_str() == Some("configure"));
    let run = configure.unwrap()["run"].as_str().unwrap();
    let (_, name) = run.split_once("DIST_BUNDLE_NAME=").unwrap();
    let (name, _) = name.split_once('"').unwrap();
    let name = name.replace("${targets}", "gfx1103;gfx1201");
    assert_eq!(sh(directory, &format!("echo {name}")).trim(), "gfx1103");
}

/// TheRock publishes its nightly builds in `whl-next` since August 2026.
#[test]
fn the_index_is_the_one_of_the_instructions() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    scripts(directory);
    let pytorch = directory.join("therock/src/external-builds/pytorch");
    fs::create_dir_all(&pytorch).unwrap();
    fs::write(pytorch.join("README.md"), "https://example.org/whl-multi/").unwrap();
    for index in [
        "https://rocm.nightlies.amd.com/whl-multi-arch/",
        "https://nightly.repo.amd.com/rocm/whl-next",
    ] {
        let script = format!("# under v5/rocm/whl-next/\npip --index-url {index} rocm\n");
        fs::write(pytorch.join("build_prod_wheels.py"), script).unwrap();
        assert_eq!(sh(directory, "sh opt/index.sh ''").trim(), index);
    }
}

/// An index has versions of several releases. Without an answer it is unknown whether it has the checkout's.
#[test]
fn an_index_is_asked_for_the_checkouts_release() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    scripts(directory);
    fs::create_dir_all(directory.join("therock/src")).unwrap();
    let version = "{\"rocm-version\": \"7.14.0\"}";
    fs::write(directory.join("therock/src/version.json"), version).unwrap();
    // The script ends with an error where the programs of the new venv are missing.
    let said = |answer: &str| {
        let pip =
            format!("case \"$*\" in\n*'index versions'*) {answer} ;;\n*) echo \"$@\" ;;\nesac");
        let code = format!(
            "cat >bin/python3 <<'END'\n#!/bin/sh\n{pip}\nEND\nchmod +x bin/python3
             sh opt/install.sh gfx1103 --index-url https://example.org/whl-next/ 2>&1 || true"
        );
        sh(directory, &code)
    };
    let both = said("echo 'Available versions: 10.1.0a20260807, 7.14.0'");
    assert!(
        both.contains("rocm[libraries,devel,device]==7.14.*"),
        "{both}"
    );
    let other = said("echo 'Available versions: 10.1.0, 7.15.0'");
    assert!(other.contains("no ROCm 7.14"), "{other}");
    assert!(other.contains("rocm[libraries,devel,device]\n"), "{other}");
    assert_eq!(said("exit 1"), "");
}

/// Without the image's compiler in PATH, `tools` ends with an error. The image of release 7.9 has an older one.
#[test]
fn the_compilers_of_all_images_are_found() {
    let profile = profile();
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("images");
    let paths = fs::read_dir(images).unwrap();
    let paths = paths.map(|entry| entry.unwrap().path());
    let mut seen = 0;
    for path in paths.filter(|path| path.to_str().unwrap().contains("therock-manylinux")) {
        let text = fs::read_to_string(&path).unwrap();
        let (_, gcc) = text.split_once(", gcc ").unwrap();
        let gcc: String = gcc.chars().take_while(char::is_ascii_digit).collect();
        for name in ["PATH", "LIBRARY_PATH", "LD_LIBRARY_PATH"] {
            let value = profile["env"][name].as_str().unwrap();
            let toolset = format!("/opt/rh/gcc-toolset-{gcc}/root/usr/");
            assert!(value.contains(&toolset), "{path:?}: {name}");
        }
        seen += 1;
    }
    assert_eq!(seen, 7);
}

/// A part whose sources are not fetched cannot be built, and one that no wheel has need not be. Release 7.13 builds
/// IREE by default.
#[test]
fn what_is_not_fetched_is_not_built() {
    let profile = profile();
    let variant = &profile["variants"]["full-torch"];
    for params in [&profile["params"], &variant["params"]] {
        let features = params["features"].as_str().unwrap();
        let fetch = profile["params"]["fetch"].as_str().unwrap();
        for flag in fetch.split(' ') {
            let part = flag.strip_prefix("--no-include-").unwrap();
            // The name of 7.11 for `media-libs`, which that release builds on request only.
            let part = part.replace("rocm-media", "media-libs");
            let part = part.replace('-', "_").to_uppercase();
            let off = format!("-DTHEROCK_ENABLE_{part}=OFF");
            assert!(features.split(' ').any(|word| word == off), "{flag}");
        }
        // TheRock's `build_python_packages.py` puts these into no wheel.
        for part in [
            "ENABLE_HIPTENSOR=OFF",
            "COMPOSABLE_KERNEL_FOR_MIOPEN_ONLY=ON",
            "ENABLE_ROCALUTION=OFF",
            "ENABLE_HIPDNN_SAMPLES=OFF",
        ] {
            let option = format!("-DTHEROCK_{part}");
            assert!(features.split(' ').any(|word| word == option), "{part}");
        }
    }
}
