//! Tests for what users install: each package is built in an env, then installed, run and removed in a bare tree, which
//! leaves the store alone. Also completion in an installation.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::terminal::Terminal;
use fs_err as fs;

/// The shipped profile with this build's binary in place of a compiled one.
const STEPS: &str = r#"
schema = 1
extends = "rockenv.toml"
image = "base"

[env]
ZSTD_CLEVEL = "1"

[[step]]
name = "tools"
packages = ["fakeroot", "libarchive-tools", "makepkg", "pacman-package-manager", "rpm", "zstd"]

[[step]]
name = "compile"
copy = [
    { from = "rockenv", to = "/home/builder/rockenv" },
    { from = "licences.txt", to = "/home/builder/licences" },
]

[[step]]
name = "sbom"
remove = true

[[step]]
name = "rpm-installed"
user = "root"
run = '''
root=/var/tmp/fedora
mkdir -p $root/var/lib/rockenv/envs/mine
rpm --root $root --initdb
rpm --root $root --install --nosignature /out/*.rpm
chroot $root /usr/bin/rockenv --version | grep -Fx "rockenv @VERSION@"
[ "$(rpm --root $root --query --queryformat '%{VERSION}' rockenv)" = "@VERSION@~rc~1" ]
rpm --root $root --verify rockenv
rpm --root $root --query --licensefiles rockenv | grep -Fx /usr/share/licenses/rockenv/LICENSE-CRATES
rpm --root $root --erase rockenv
[ -d $root/var/lib/rockenv/envs/mine ]
[ -z "$(find $root/usr -type f | grep -v /lib/sysimage/)" ]
'''

[[step]]
name = "arch-installed"
user = "root"
run = '''
root=/var/tmp/arch
mkdir -p $root/var/lib/pacman $root/var/lib/rockenv/envs/mine
printf '[options]\nArchitecture = x86_64\nLocalFileSigLevel = Never\n' > /var/tmp/pacman.conf
pacman="pacman --config /var/tmp/pacman.conf --root $root --noconfirm"
$pacman -U /out/*.pkg.tar.zst
chroot $root /usr/bin/rockenv --version | grep -Fx "rockenv @VERSION@"
$pacman -Qkk rockenv
[ "$(vercmp "$($pacman -Q rockenv | cut -d' ' -f2)" @VERSION@)" = -1 ]
[ -e $root/usr/share/licenses/rockenv/LICENSE-CRATES ]
$pacman -R rockenv
[ -d $root/var/lib/rockenv/envs/mine ]
[ -z "$(find $root/usr -type f)" ]
'''
"#;

const DEBIAN: &str = r#"
[[volume]]
name = "packages"
kind = "host"
path = "@PACKAGES@"
target = "/packages"

[[step]]
name = "installed"
user = "root"
run = '''
mkdir -p /var/lib/rockenv/envs/mine
dpkg --install /packages/*.deb
rockenv --version | grep -Fx "rockenv @VERSION@"
dpkg --compare-versions "$(dpkg-deb --field /packages/*.deb Version)" lt @VERSION@
rockenv profile show hip-smoke > /dev/null
[ -e /usr/share/zsh/vendor-completions/_rockenv ]
grep -Fqx "==== ring" /usr/share/doc/rockenv/copyright
size=$(dpkg-deb --contents /packages/*.deb |
    awk '$6 != "./" { size += $1 ~ "^d" ? 1 : int(($3 + 1023) / 1024) } END { print size }')
[ "$(dpkg-deb --field /packages/*.deb Installed-Size)" = "$size" ]
[ -z "$(dpkg --verify rockenv | grep -v ' /usr/share/\(man\|doc\)/')" ]
dpkg --purge rockenv
[ -d /var/lib/rockenv/envs/mine ]
[ ! -e /usr/bin/rockenv ] && [ ! -e /usr/share/rockenv ]
'''
"#;

/// Copies what the packages are made of, with another version. The binary is stripped: it may be too large for a
/// profile to copy otherwise.
fn checkout(directory: &Path, version: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut copy = Command::new("cp");
    copy.arg("-r").args(
        [
            "packaging",
            "Cargo.toml",
            "README.md",
            "CHANGELOG.md",
            "LICENSE-APACHE",
            "LICENSE-MIT",
        ]
        .map(|name| root.join(name)),
    );
    run(copy.arg(directory));
    let manifest = directory.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).unwrap();
    let own = format!("version = \"{}\"", env!("CARGO_PKG_VERSION"));
    let text = text.replacen(&own, &format!("version = \"{version}\""), 1);
    fs::write(&manifest, text).unwrap();
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(directory.join("packaging/rockenv"));
    run(strip.arg(env!("CARGO_BIN_EXE_rockenv")));
    let text = run(&mut Command::new(root.join("packaging/licences")));
    assert!(text.contains("\n==== ring\n"), "{text}");
    fs::write(directory.join("packaging/licences.txt"), text).unwrap();
}

#[test]
fn each_package_installs_runs_and_leaves_the_store_when_it_is_removed() {
    let store = TestStore::new();
    let directory = store.work().join("checkout");
    fs::create_dir(&directory).unwrap();
    let released = env!("CARGO_PKG_VERSION");
    let version = &format!("{released}-rc-1");
    checkout(&directory, version);
    let tools = STEPS.lines().find(|line| line.starts_with("packages"));
    let shipped = fs::read_to_string(directory.join("packaging/rockenv.toml")).unwrap();
    for tool in tools.unwrap().split('"').skip(1).step_by(2) {
        assert!(shipped.contains(&format!("  \"{tool}\",")), "{tool}");
    }
    let name = store.env().to_owned();
    let profile = directory.join("packaging").join(format!("{name}.toml"));
    fs::write(&profile, STEPS.replace("@VERSION@", released)).unwrap();
    let up = ["up", profile.to_str().unwrap()];
    store.rockenv(&up).ok();

    let exported = store.work().join("exported");
    store
        .rockenv(&["export", &name, exported.to_str().unwrap()])
        .ok();
    let packages = exported.join("packages");
    let found = fs::read_dir(&packages).unwrap();
    let mut found: Vec<_> = found
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    let expected = [
        "SHA256SUMS".to_owned(),
        format!("rockenv-{version}-1.x86_64.rpm"),
        format!("rockenv-{version}-x86_64-linux.tar.zst"),
        format!("rockenv-{released}rc1-1-x86_64.pkg.tar.zst"),
        format!("rockenv_{version}_amd64.deb"),
    ];
    assert_eq!(found, expected);
    // `cargo binstall` downloads the archive by this address, and its suffixes begin with a dot.
    let manifest = fs::read_to_string(directory.join("Cargo.toml")).unwrap();
    let address = manifest.lines().find(|line| line.starts_with("pkg-url"));
    let mut address = address.unwrap().replace("{ version }", version);
    for (variable, value) in [
        ("{ target-arch }", "x86_64"),
        ("{ target-family }", "linux"),
        ("{ archive-suffix }", ".tar.zst\n"),
    ] {
        assert!(address.contains(variable), "{address}");
        address = address.replace(variable, value);
    }
    assert!(
        address.contains(&format!("/{}\n", expected[2])),
        "{address}"
    );
    let sums = fs::read_to_string(packages.join("SHA256SUMS")).unwrap();
    assert_eq!(sums.lines().count(), expected.len() - 1);
    let mut check = Command::new("sha256sum");
    run(check
        .args(["--check", "--strict", "SHA256SUMS"])
        .current_dir(&packages));

    // Builds again after a change.
    let readme = directory.join("README.md");
    fs::write(&readme, fs::read_to_string(&readme).unwrap() + "\n").unwrap();
    store.rockenv(&up).ok();
    let again = store.work().join("again");
    store
        .rockenv(&["export", &name, again.to_str().unwrap()])
        .ok();

    let debian = format!("{name}-debian");
    let text = DEBIAN
        .replace("@VERSION@", released)
        .replace("@PACKAGES@", packages.to_str().unwrap());
    store.profile_named(&debian, &text);
    store.rockenv(&["up", &debian]).ok();
    store.assert_clean();
}

/// Lays out an installation as packages do, and returns the directory that stands for `/`.
fn installed(store: &TestStore) -> PathBuf {
    let root = store.work().join("installed");
    let mut stage = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/stage"));
    stage.arg(env!("CARGO_BIN_EXE_rockenv")).arg(&root);
    run(stage.arg("/usr"));
    root
}

#[test]
fn sudo_make_install_installs_for_an_ordinary_user() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(root.path(), mode).unwrap();
    let install = |program: &str| {
        let mut make = Command::new("make");
        for name in ["SUDO_UID", "SUDO_GID", "PKEXEC_UID"] {
            make.env(name, "1234");
        }
        make.env("DOAS_USER", "nobody")
            .env_remove("MAKEFLAGS")
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            // Nothing is compiled.
            .args(["--old-file=build", "install", "PREFIX=/opt/rock env"])
            .arg(format!("DESTDIR={}", root.path().display()))
            .arg(format!("ROCKENV={program}"));
        make
    };
    let prefix = root.path().join("opt/rock env");
    // Debian's /usr/local may belong to the group `staff`.
    let pages = prefix.join("share/man/man1");
    fs::create_dir_all(&pages).unwrap();
    let of_a_group = std::os::unix::fs::PermissionsExt::from_mode(0o2775);
    fs::set_permissions(&pages, of_a_group).unwrap();
    run(&mut install(env!("CARGO_BIN_EXE_rockenv")));
    assert!(pages.join("rockenv.1").exists());
    let kept = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&pages).unwrap());
    assert_eq!(kept & 0o7777, 0o2775);
    // A new version that fails does not replace the program.
    let program = prefix.join("bin/rockenv");
    let installed = fs::metadata(&program).unwrap().len();
    assert!(!install("/bin/false").output().unwrap().status.success());
    assert_eq!(fs::metadata(&program).unwrap().len(), installed);
}

#[test]
fn the_debian_package_recommends_what_setup_would_install() {
    let read = |path: &str| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        fs::read_to_string(root.join(path)).unwrap()
    };
    let script = read("packaging/deb");
    let recommends = script.lines().find(|line| line.starts_with("Recommends:"));
    let recommends = recommends.unwrap().replace(',', " ");
    let tools: serde_json::Value = serde_json::from_str(&read("src/cli/setup/tools.json")).unwrap();
    for tool in tools.as_array().unwrap() {
        let mut features = tool["features"].as_array().unwrap().iter();
        let is_used =
            features.any(|one| ["nspawn", "images", "sources"].contains(&one.as_str().unwrap()));
        let package = tool["packages"]
            .as_str()
            .unwrap()
            .split(' ')
            .next()
            .unwrap();
        // Essential in Debian; for Ubuntu's images alone.
        if is_used && !["util-linux", "ubuntu-keyring"].contains(&package) {
            let found = recommends.split_whitespace().any(|one| one == package);
            assert!(found, "{package}");
        }
    }
}

#[test]
fn a_program_that_would_not_be_static_does_not_compile() {
    let out = tempfile::tempdir().unwrap();
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition=2024", "--emit=metadata", "--out-dir"]);
    rustc.arg(out.path());
    rustc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/main.rs"));
    let output = rustc.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("unset RUSTFLAGS"), "{errors}");
}

#[test]
fn make_build_names_the_cargo_that_it_needs() {
    let place = tempfile::tempdir().unwrap();
    let cargo = place.path().join("cargo");
    for (script, found) in [("exit 1", "none"), ("echo cargo 1.2.3", "1.2.3")] {
        fs::write(&cargo, format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&cargo, mode).unwrap();
        let mut host = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/host"));
        let path = format!("{}:/usr/bin:/bin", place.path().display());
        let output = host.arg("build").env("PATH", path).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains(&format!("here is {found}:")), "{errors}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn make_build_compiles_to_where_make_install_looks() {
    // An empty one would be the checkout, which `make clean` would remove.
    for (given, used) in [("/a target", "/a target"), ("", "target")] {
        let mut make = Command::new("make");
        make.current_dir(env!("CARGO_MANIFEST_DIR"))
            .env_remove("MAKEFLAGS")
            .args(["--dry-run", "build", "clean"])
            .arg(format!("CARGO_TARGET_DIR={given}"));
        let said = run(&mut make);
        let option = format!("--target-dir \"{used}\"\n");
        assert_eq!(said.matches(&option).count(), 2, "{said}");
    }
    let mut make = Command::new("make");
    make.current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("MAKEFLAGS")
        .env("CARGO_BUILD_TARGET", "aarch64-unknown-linux-gnu")
        // Not silent, make inside `make test` prints its directory, too.
        .args(["--silent", "--eval=shown: ; echo $$CARGO_BUILD_TARGET"])
        .arg("shown");
    assert_eq!(run(&mut make), "x86_64-unknown-linux-gnu\n");
}

/// Stands for rockenv, whose `export` has the rights of the user behind sudo.
const EXPORT: &str = "#!/bin/sh
[ $1 != export ] || setpriv --reuid=${SUDO_UID-$DOAS_USER} --clear-groups touch \"$3/rockenv.deb\"
";

#[test]
fn sudo_make_deb_exports_below_a_target_directory_of_root() {
    let target = tempfile::Builder::new()
        .prefix("a target")
        .tempdir()
        .unwrap();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::set_permissions(target.path(), mode(0o755)).unwrap();
    let program = target.path().join("rockenv");
    fs::write(&program, EXPORT).unwrap();
    fs::set_permissions(&program, mode(0o755)).unwrap();
    for (variable, user) in [("SUDO_UID", "1234"), ("DOAS_USER", "nobody")] {
        let mut make = Command::new("make");
        for name in ["MAKEFLAGS", "SUDO_UID", "PKEXEC_UID"] {
            make.env_remove(name);
        }
        make.current_dir(env!("CARGO_MANIFEST_DIR"))
            .env(variable, user)
            // Nothing is compiled.
            .args(["--old-file=build", "deb"])
            .arg(format!("CARGO_TARGET_DIR={}", target.path().display()))
            .arg(format!("ROCKENV={}", program.display()));
        run(&mut make);
        assert!(target.path().join("packages/rockenv.deb").exists());
    }
}

#[test]
fn the_page_of_installation_removes_all_of_it() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut stage = Command::new(source.join("packaging/stage"));
    stage.arg(env!("CARGO_BIN_EXE_rockenv")).arg(root.path());
    run(stage.arg("/usr/local"));
    let files = || {
        let find = Command::new("find")
            .arg(root.path())
            .args(["-type", "f"])
            .output()
            .unwrap();
        String::from_utf8(find.stdout).unwrap()
    };
    assert_ne!(files(), "");
    let page = fs::read_to_string(source.join("docs/how-to/install.md")).unwrap();
    let here = format!(" {}/usr/local/", root.path().display());
    for line in page.lines() {
        if let Some(arguments) = line.strip_prefix("$ sudo rm ")
            && arguments.contains("/usr/local/")
        {
            let command = format!("rm {arguments}").replace(" /usr/local/", &here);
            run(Command::new("sh").args(["-c", &command]));
        }
    }
    assert_eq!(files(), "");
}

/// Completes the last word as bash does, with the installed script.
const COMPLETE: &str = r#"
source "$1/usr/share/bash-completion/completions/rockenv"
shift
function=$(complete -p rockenv | sed 's/.* -F \([^ ]*\) .*/\1/')
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_TYPE=9 COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMPREPLY=()
"$function" rockenv "${!#}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// Completes the line as fish does, with the installed script.
const FISH: &str =
    "source $argv[1]/usr/share/fish/vendor_completions.d/rockenv.fish; complete -C $argv[2]";

/// Starts zsh with the installed script.
const ZSH: &str = "PS1='> '; fpath=($ROOT/usr/share/zsh/site-functions $fpath); autoload -Uz compinit; compinit -u -D; bindkey -e\n";

#[test]
fn an_installation_completes_names_and_has_the_schema_for_editors() {
    let store = TestStore::new();
    store.up_with(
        "[[step]]\nname = 'first'\nrun = 'true'\n[[step]]\nname = 'second'\nrun = 'true'\n",
    );
    let root = installed(&store);
    let output = |command: &mut Command| {
        let path = format!("{}:/usr/bin:/bin", root.join("usr/bin").display());
        let command = command.env("PATH", path).current_dir("/");
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && errors.is_empty(), "{errors}");
        text
    };
    let complete = |words: &[&str]| {
        let mut command = Command::new("bash");
        command
            .args(["-euc", COMPLETE, "complete"])
            .arg(&root)
            .arg("rockenv")
            .args(words);
        let text = output(command.env("ROCKENV_HOME", store.home()));
        text.lines()
            .map(|line| line.trim_end().to_owned())
            .collect::<Vec<_>>()
    };
    let env = store.env();
    assert_eq!(complete(&["status", &env[..env.len() - 1]]), [env]);
    let elsewhere = tempfile::tempdir().unwrap();
    let elsewhere = elsewhere.path().to_str().unwrap();
    assert_eq!(
        complete(&[
            &format!("--home={elsewhere}"),
            "status",
            &env[..env.len() - 1]
        ]),
        [""]
    );
    // After the names, an empty word lists the options.
    let listed = complete(&["logs", env, ""]);
    assert_eq!(listed[..3], ["first", "second", "--follow"]);
    assert_eq!(complete(&["logs", env, "f"]), ["first"]);
    assert_eq!(complete(&["rollback", env, "s"]), ["second"]);
    assert_eq!(
        complete(&["up", "-t", "gfx110"]),
        ["gfx1100", "gfx1101", "gfx1102", "gfx1103"]
    );
    for system in ["up", "json", "github", "gitlab", "slurm", "kubernetes"] {
        let targets = complete(&["matrix", system, "gfx1100", "gfx120"]);
        assert_eq!(targets, ["gfx1200", "gfx1201"], "{system}");
        let profiles = complete(&["matrix", system, "--profile", "hip-"]);
        assert_eq!(profiles, ["hip-smoke"], "{system}");
    }
    assert_eq!(complete(&["fsc"]), ["fsck"]);
    // As bash-completion asks for a command of sudo.
    let presets = complete(&["setup", "--timer", "="]);
    assert_eq!(presets, ["laptop", "workstation", "ci"]);
    assert_eq!(complete(&["snapshot", "r"]), ["rm"]);
    assert_eq!(complete(&["remove", &env[..env.len() - 1]]), [env]);
    let profile = store.work().join("own.toml");
    fs::write(&profile, "").unwrap();
    let profile = profile.to_str().unwrap();
    let typed = profile.trim_end_matches("n.toml");
    assert_eq!(complete(&["plan", typed]), [profile]);

    let fish = |line: &str| {
        let mut command = Command::new("fish");
        command.args(["--no-config", "--command", FISH]).arg(&root);
        let text = output(command.arg(line).env("ROCKENV_HOME", store.home()));
        let names = text.lines().map(|line| line.split('\t').next().unwrap());
        names.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(fish("rockenv fsc"), ["fsck"]);
    let typed = format!("rockenv logs {env} ");
    assert_eq!(fish(&typed)[..2], ["first", "second"]);
    let typed = format!("rockenv plan {}", profile.trim_end_matches("n.toml"));
    assert_eq!(fish(&typed), [profile]);

    let mut command = Command::new("zsh");
    command.args(["-f", "-i"]).env("ROCKENV_HOME", store.home());
    let path = format!("{}:/usr/bin:/bin", root.join("usr/bin").display());
    command.env("PATH", path).env("ROOT", &root);
    let mut zsh = Terminal::start(command, 24, 80);
    zsh.write(ZSH);
    zsh.write("echo star''ted\n");
    zsh.expect("started");
    for (typed, completed) in [
        (
            format!("rollback {env} f\t"),
            format!("rollback {env} first"),
        ),
        ("fsc\t".to_owned(), "fsck".to_owned()),
    ] {
        // zsh prints the line that it would run.
        zsh.write(&format!("rockenv {typed}\x01print -r -- '[\x05]'\n"));
        zsh.expect(&format!("[rockenv {completed}]"));
    }
    zsh.write("exit\n");
    zsh.child.wait().unwrap();

    let program = root.join("usr/bin/rockenv");
    let text = output(Command::new(program).args(["profile", "new", "mine", "--print"]));
    let line = text.lines().next().unwrap();
    let path = line.strip_prefix("#:schema file://").unwrap();
    assert!(Path::new(path).starts_with(&root), "{path}");
    let schema: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert!(schema["$id"].is_string() && schema["properties"]["step"].is_object());
}

/// Completes as a person types: words that bash splits, and names that must be quoted.
#[test]
fn bash_completes_after_an_equals_sign_and_quotes_names() {
    let store = TestStore::new();
    let root = installed(&store);
    // Unquoted, bash would run the command in this name.
    for name in ["o$(touch pwned);.toml", "a b.toml"] {
        fs::write(store.work().join(name), "").unwrap();
    }
    fs::create_dir(store.work().join("a dir")).unwrap();
    let mut command = Command::new("bash");
    command.args(["--norc", "--noprofile", "-i"]);
    let path = format!("{}:/usr/bin:/bin", root.join("usr/bin").display());
    command.env("PATH", path).current_dir(store.work());
    let mut bash = Terminal::start(command, 24, 200);
    let script = root.join("usr/share/bash-completion/completions/rockenv");
    bash.write(&format!("source {}; echo star''ted\n", script.display()));
    bash.expect("started");
    for (typed, completed) in [
        ("plan llvm --target=gfx95", "[plan][llvm][--target=gfx950]"),
        ("setup --timer=la", "[setup][--timer=laptop]"),
        ("--home=/ plan hip-sm", "[--home=/][plan][hip-smoke]"),
        ("--home=\"./a d", "[--home=./a dir/]"),
        ("plan ./o", "[plan][./o$(touch pwned);.toml]"),
        ("plan \"./a b", "[plan][./a b.toml]"),
    ] {
        // bash prints the words that the program would get.
        bash.write(&format!("rockenv {typed}\t\x01printf '[%s]' \x05\n"));
        bash.expect(&format!("[rockenv]{completed}"));
    }
    bash.write("exit\n");
    bash.child.wait().unwrap();
    assert!(!store.work().join("pwned").exists());
}
