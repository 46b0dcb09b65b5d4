//! Owns the command that each kind of step runs inside its container.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::engine::jobserver;
use crate::engine::nspawn::PROGRAM;
use crate::engine::wire::{Command, Word};
use crate::image::certificates;
use crate::plan::resolve::{Action, CopyItem, Facts, Spec, Step, User, finish};
use crate::profile::{CopiedFile, CopyFiles};
use crate::store::config::Config;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::host::Host;

/// Search path for programs inside.
pub(super) const PATH: &str =
    "/run/rockenv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Installs packages with the image's package manager. Refreshes the lists, because an image may be old, and removes
/// them, because the next step refreshes them anyway. A list that cannot be fetched is an error: without it, older
/// packages would be installed.
const INSTALL: &str = r#"set -eu
# A volume keeps its files.
is_volume() {
    [ "$(findmnt -no TARGET -T "$1" 2>/dev/null || echo /)" != / ]
}
ca=/run/rockenv/ca-certificates.crt
[ -e $ca ] || ca=
if command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    set -- ${ca:+-o Acquire::https::CAInfo=$ca} -- "$@"
    apt-get -q ${ca:+-o Acquire::https::CAInfo=$ca} -o APT::Update::Error-Mode=any update
    apt-get -q -y --no-install-recommends install "$@"
    is_volume /var/cache/apt/archives || apt-get -q clean
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
elif command -v pacman >/dev/null; then
    # An image has no keyring, because a keyring contains a private key. One that a step made stays in use.
    keys=/etc/pacman.d/gnupg
    if [ ! -e $keys/pubring.gpg ]; then
        keys=$(mktemp -d)
        # May fail where no package is signed. Otherwise pacman says what is missing.
        pacman-key --gpgdir "$keys" --init && pacman-key --gpgdir "$keys" --populate || :
    fi
    # Without it, pacman 7.1 and later download nothing in a container. An upgrade from 7.0 removes it from an image.
    ! grep -q '^#DisableSandboxFilesystem$' /etc/pacman.conf ||
        sed -i 's/^#DisableSandboxFilesystem$/DisableSandboxFilesystem/' /etc/pacman.conf
    # With an upgrade, because a new package may need newer libraries than the image has.
    pacman --gpgdir "$keys" -Syu --noconfirm --needed -- "$@"
    [ "$keys" = /etc/pacman.d/gnupg ] || rm -rf "$keys"
    # `pacman -Scc --noconfirm` removes nothing: its default answer is no.
    is_volume /var/cache/pacman/pkg || rm -rf /var/cache/pacman/pkg/*
elif command -v dnf >/dev/null; then
    # Without `--`, which dnf5 refuses before 5.4.3. No package's name begins with a dash.
    # As apt-get does, it may replace packages: RHEL 9's images have `curl-minimal`, which conflicts with `curl`.
    dnf -y --setopt=install_weak_deps=False ${ca:+--setopt=sslcacert=$ca} install --allowerasing "$@"
    dnf -q clean all
elif command -v microdnf >/dev/null; then
    microdnf install -y --setopt=install_weak_deps=0 "$@"
    microdnf clean all
elif command -v tdnf >/dev/null; then
    tdnf install -y "$@"
    tdnf clean all
elif command -v zypper >/dev/null; then
    zypper --non-interactive install --no-recommends "$@"
    zypper --quiet clean --all
elif command -v apk >/dev/null; then
    apk add --no-cache "$@"
else
    echo "no supported package manager found: apt-get, pacman, dnf, microdnf, tdnf, zypper, apk" >&2
    exit 1
fi
"#;

/// A command and its standard input.
#[derive(Debug)]
pub(super) struct PreparedCommand {
    pub(super) command: Command,
    pub(super) stdin: OwnedFd,
}

/// Prepares the command of a step.
pub(super) fn prepare(
    step: &Step,
    spec: &Spec,
    files: &CopyFiles,
    config: &Config,
    facts: &Facts,
    groups: Option<Vec<u32>>,
) -> Result<PreparedCommand> {
    let text = |text: &str| finish(text, facts);
    let mut env = base_environment(spec, matches!(step.user, User::Root));
    // rockenv's own program must not see the image's variables.
    if let Action::Run { .. } | Action::Packages(_) = step.action {
        let variables = step.env.iter();
        env.extend(variables.map(|(name, value)| (name.clone(), text(value))));
        certificates::set_variables(&mut env, &step.env, &spec.image_env);
        env.extend(host_environment(spec, config));
    }
    let mut stdin = OwnedFd::from(fs_err::File::open("/dev/null")?.into_parts().0);
    let mut root = matches!(step.user, User::Root);
    let argv = match &step.action {
        Action::Run { shell, script } => shell.iter().cloned().chain([text(script)]).collect(),
        Action::Packages(packages) => {
            root = true;
            let own = ["/bin/sh", "-c", INSTALL, "install"].map(str::to_owned);
            own.into_iter().chain(packages.iter().cloned()).collect()
        }
        Action::Copy(items) => {
            stdin = archive(&step.name, items, files)?;
            let (uid, gid) = owner(root, spec);
            // Parent directories may be root's. `copy` gives the entries that it creates to the step's user.
            root = true;
            let mut argv = vec![PROGRAM.to_owned(), "__copy".to_owned()];
            argv.extend([uid, gid].map(|id| id.to_string()));
            let theirs = spec
                .visible(step)
                .filter(|volume| volume.kind.is_users_own());
            argv.extend(theirs.map(|volume| volume.target.clone()));
            argv
        }
        Action::Export(items) => {
            let mut argv = vec![PROGRAM.to_owned(), "__export".to_owned()];
            for item in items {
                let volume = spec
                    .volume(&item.to)
                    .ok_or_else(|| unexpected!("no volume `{}`", item.to))?;
                argv.extend([volume.target.clone(), item.from.clone()]);
            }
            argv
        }
    };
    let (uid, gid) = owner(root, spec);
    let command = Command {
        argv: argv.into_iter().map(Word::Text).collect(),
        env: env.into_iter().collect(),
        cwd: step.workdir.clone(),
        uid,
        gid,
        groups,
        no_new_privs: !root,
        tty: false,
    };
    Ok(PreparedCommand { command, stdin })
}

/// Returns the uid and gid that a command runs as, or that own the files it copies.
pub(crate) fn owner(root: bool, spec: &Spec) -> (u32, u32) {
    match root {
        true => (0, 0),
        false => (spec.user.uid, spec.user.gid),
    }
}

/// Returns the variables of every command inside.
pub(crate) fn base_environment(spec: &Spec, root: bool) -> BTreeMap<String, String> {
    let (user, home) = if root {
        ("root", "/root")
    } else {
        (spec.user.name.as_str(), spec.user.home.as_str())
    };
    own_variables(&spec.name, user, home)
}

/// Returns the host's variables that the profile passes on to commands inside.
pub(crate) fn host_environment(spec: &Spec, config: &Config) -> BTreeMap<String, String> {
    let names = spec.env_from_host.iter();
    names
        .filter_map(|name| Some((name.clone(), config.host_variable(name)?.to_owned())))
        .collect()
}

/// Returns rockenv's own variables, whose names are in `profile::OWN_VARIABLES`.
fn own_variables(env: &str, user: &str, home: &str) -> BTreeMap<String, String> {
    [
        ("PATH", PATH),
        ("HOME", home),
        ("USER", user),
        ("LOGNAME", user),
        ("LANG", "C.UTF-8"),
        ("container", "rockenv"),
        ("ROCKENV_ENV", env),
        ("MAKEFLAGS", jobserver::makeflags().as_str()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect()
}

pub(crate) fn memory_max(spec: &Spec, host: &Host) -> Option<u64> {
    spec.resources.memory_max.map(|limit| limit.of(host.memory))
}

/// Writes the files of a `copy` step as an archive, in an unnamed file.
fn archive(step: &str, items: &[CopyItem], files: &CopyFiles) -> Result<OwnedFd> {
    use std::io::{Seek as _, SeekFrom};
    let cannot = || format!("cannot gather the files of step `{step}`");
    let mut archive = tar::Builder::new(tempfile::tempfile().context(cannot)?);
    for item in items {
        let copied = files
            .item(step, &item.from)
            .ok_or_else(|| unexpected!("no content for `{}`", item.from))?;
        for entry in &copied.entries {
            let relative = item.to.trim_start_matches('/');
            let path = match entry.path.as_os_str().is_empty() {
                true => relative.into(),
                false => Path::new(relative).join(&entry.path),
            };
            let mut header = tar::Header::new_gnu();
            let appended = match &entry.content {
                CopiedFile::Dir => {
                    header.set_entry_type(tar::EntryType::Directory);
                    header.set_size(0);
                    header.set_mode(0o755);
                    archive.append_data(&mut header, &path, std::io::empty())
                }
                CopiedFile::File { executable, bytes } => {
                    header.set_size(bytes.len() as u64);
                    header.set_mode(if *executable { 0o755 } else { 0o644 });
                    archive.append_data(&mut header, &path, bytes.as_slice())
                }
                CopiedFile::Link(target) => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    header.set_size(0);
                    header.set_mode(0o777);
                    archive.append_link(&mut header, &path, target)
                }
            };
            appended.context(cannot)?;
        }
    }
    let mut file = archive.into_inner().context(cannot)?;
    file.seek(SeekFrom::Start(0)).context(cannot)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::OWN_VARIABLES;

    /// Runs the script for two packages where only `findmnt` and these programs exist, which print their arguments.
    fn install_with(programs: &str) -> String {
        install_on("/", programs)
    }

    /// Does the same where the package manager's cache is on the mount point `target`.
    fn install_on(target: &str, programs: &str) -> String {
        let bin = tempfile::tempdir().unwrap();
        let script = format!(
            "cd '{}'\nfor name in {programs}; do printf '#!/bin/sh\\necho %s \"$@\"\\n' $name >$name; done\n\
             printf '#!/bin/sh\\necho {target}\\n' >findmnt\nchmod 755 *\nPATH=$PWD\n{INSTALL}",
            bin.path().display()
        );
        let done = std::process::Command::new("/bin/sh")
            .args(["-c", &script, "install", "cmake", "git"])
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    #[test]
    fn packages_are_installed_as_package_managers_accept() {
        let dnf = "dnf -y --setopt=install_weak_deps=False install --allowerasing cmake git\ndnf -q clean all\n";
        assert_eq!(install_with("dnf"), dnf);
        let microdnf =
            "microdnf install -y --setopt=install_weak_deps=0 cmake git\nmicrodnf clean all\n";
        assert_eq!(install_with("microdnf"), microdnf);
        let tdnf = "tdnf install -y cmake git\ntdnf clean all\n";
        assert_eq!(install_with("tdnf"), tdnf);
        let zypper = "zypper --non-interactive install --no-recommends cmake git\nzypper --quiet clean --all\n";
        assert_eq!(install_with("zypper"), zypper);
        assert_eq!(install_with("apk"), "apk add --no-cache cmake git\n");
        // A cache in a volume is shared with other envs.
        let cleans = |target: &str| install_on(target, "apt-get rm").contains("apt-get -q clean\n");
        assert!(cleans("/") && !cleans("/var/cache/apt"));
        // On Arch Linux, this machine's keyring passes for the image's.
        if !Path::new("/etc/pacman.d/gnupg/pubring.gpg").exists() {
            let keys = "--gpgdir mktemp -d";
            let pacman = format!(
                "pacman-key {keys} --init\npacman-key {keys} --populate\n\
                 grep -q ^#DisableSandboxFilesystem$ /etc/pacman.conf\n\
                 sed -i s/^#DisableSandboxFilesystem$/DisableSandboxFilesystem/ /etc/pacman.conf\n\
                 pacman {keys} -Syu --noconfirm --needed -- cmake git\nrm -rf mktemp -d\n"
            );
            let said = install_with("pacman pacman-key mktemp grep sed rm");
            let rest = said.strip_prefix(&pacman).expect(&said);
            assert!(rest.starts_with("rm -rf /var/cache/pacman/pkg/"), "{said}");
            // An image without signed packages needs no keyring.
            let said = install_with("pacman mktemp grep sed rm");
            assert_has!(said, "cmake git");
        }
    }

    #[test]
    fn profiles_know_the_variables_that_are_rockenv_s() {
        let names: Vec<String> = own_variables("e", "u", "/h").into_keys().collect();
        assert_eq!(names, OWN_VARIABLES);
    }
}
