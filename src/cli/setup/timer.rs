//! Owns the systemd timer that runs `gc`: its two unit files and their activation.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use crate::plan::gc::policy::Preset;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::process::Program;
use crate::sys::shell::quoted_path;

const UNITS: &str = "/etc/systemd/system";
const NAME: &str = "rockenv-gc";

/// Directories that a group may write to: root's own commands are there, so its members have root's rights already.
/// Debian can give them to the group `staff`.
const LOCAL: [&str; 3] = ["/usr/local", "/usr/local/bin", "/usr/local/sbin"];

/// Root's home; the second one is that of systems with rpm-ostree.
const HOMES: [&str; 2] = ["/root", "/var/roothome"];

#[derive(Debug)]
pub(crate) struct Timer {
    /// Unit files with their content.
    pub files: [(PathBuf, String); 2],
}

impl Timer {
    /// Composes the unit files.
    pub(crate) fn plan(program: &Path, home: &Path, preset: Option<Preset>) -> Result<Self> {
        let preset = preset
            .and_then(|preset| clap::ValueEnum::to_possible_value(&preset))
            .map(|value| format!(" --preset {}", value.get_name()))
            .unwrap_or_default();
        let (program, home) = (quote(program)?, quote(home)?);
        let service = format!(
            "# Written by `rockenv setup --timer`.\n\
             [Unit]\n\
             Description=Remove what rockenv does not need\n\
             Documentation=man:rockenv-gc(1)\n\
             ConditionPathExists={home}/format\n\
             ConditionFileIsExecutable={program}\n\
             RequiresMountsFor={home}\n\
             \n\
             [Service]\n\
             Type=oneshot\n\
             ExecStart={program} --quiet --yes --home {home} gc{preset}\n\
             Nice=19\n\
             IOSchedulingClass=idle\n"
        );
        let timer = "# Written by `rockenv setup --timer`.\n\
             [Unit]\n\
             Description=Remove what rockenv does not need, every day\n\
             Documentation=man:rockenv-gc(1)\n\
             \n\
             [Timer]\n\
             OnCalendar=daily\n\
             RandomizedDelaySec=1h\n\
             Persistent=true\n\
             \n\
             [Install]\n\
             WantedBy=timers.target\n"
            .to_owned();
        let place = |kind: &str| Path::new(UNITS).join(format!("{NAME}.{kind}"));
        Ok(Self {
            files: [(place("service"), service), (place("timer"), timer)],
        })
    }

    /// Returns the planned steps, one per line.
    pub(crate) fn steps(&self) -> Vec<String> {
        let mut steps: Vec<String> = self
            .files
            .iter()
            .map(|(path, _)| format!("write {}", path.display()))
            .collect();
        steps.push(format!("run: systemctl enable --now {NAME}.timer"));
        steps
    }

    /// Writes the units, and enables the timer if systemd runs. Returns `systemd`.
    pub(crate) fn install(&self, systemd: bool) -> Result<bool> {
        fs::create_dir_all(UNITS)?;
        for (path, text) in &self.files {
            crate::sys::atomic::write(path, text.as_bytes())?;
            fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        }
        if systemd {
            let timer = format!("{NAME}.timer");
            for arguments in [&["daemon-reload"][..], &["enable", "--now", &timer]] {
                Program::find("systemctl", "enabling the timer")?
                    .args(arguments)
                    .output(1 << 20, &false.into(), &mut |_| {})
                    .context(|| format!("cannot enable `{timer}`"))?;
            }
        }
        Ok(systemd)
    }
}

/// Refuses a program that another user can replace, because root would run it every day, and one that systemd may not
/// start.
pub(crate) fn check_program(program: &Path, selinux: bool) -> Result<()> {
    let elsewhere = |error: Error| {
        error.help(format!(
            "sudo install {} /usr/local/bin/rockenv, then: sudo /usr/local/bin/rockenv setup --timer",
            quoted_path(program)
        ))
    };
    if selinux && HOMES.iter().any(|home| program.starts_with(home)) {
        return Err(elsewhere(usage!(
            "SELinux lets systemd start no program in root's home, such as `{}`",
            program.display()
        )));
    }
    for path in program.ancestors() {
        let found = fs::metadata(path)?;
        // In a sticky directory users replace their own files only. On a file the bit means nothing.
        let is_sticky = found.is_dir() && found.mode() & 0o1000 != 0;
        let is_local = LOCAL.iter().any(|local| path == Path::new(local));
        let others = match found.gid() == 0 || is_local {
            true => 0o002,
            false => 0o022,
        };
        if found.uid() != 0 || found.mode() & others != 0 && !is_sticky {
            return Err(elsewhere(usage!(
                "other users can change `{}`, and root would run `{}` every day",
                path.display(),
                program.display()
            )));
        }
    }
    Ok(())
}

/// Returns a path that needs no quoting in a unit file; refuses others, because systemd expands escapes and specifiers.
fn quote(path: &Path) -> Result<String> {
    let text = path.to_string_lossy();
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-+@:,".contains(letter);
    if path.is_absolute() && text.chars().all(plain) {
        return Ok(text.into_owned());
    }
    Err(
        usage!("a systemd unit cannot name `{}` safely", path.display())
            .help("use a path of letters, digits, `/`, `.`, `_` and `-`"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preset_and_the_store_are_in_the_service() {
        let timer = Timer::plan(
            Path::new("/usr/local/bin/rockenv"),
            Path::new("/srv/store"),
            Some(Preset::Ci),
        )
        .unwrap();
        let (path, service) = &timer.files[0];
        assert_eq!(path, Path::new("/etc/systemd/system/rockenv-gc.service"));
        assert_has!(
            service,
            "ExecStart=/usr/local/bin/rockenv --quiet --yes --home /srv/store gc --preset ci\n"
        );
        // After rockenv is uninstalled, the service is skipped and does not fail every day.
        assert_has!(
            service,
            "ConditionPathExists=/srv/store/format\nConditionFileIsExecutable=/usr/local/bin/rockenv\n"
        );
        for bad in "/srv/%h|/srv/a b|relative|/srv/$HOME|/a\nExecStart=/b".split('|') {
            let refused = Timer::plan(Path::new("/r"), Path::new(bad), None);
            assert!(refused.is_err(), "{bad:?}");
        }
    }

    #[test]
    fn root_runs_no_program_that_others_can_replace() {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("rockenv");
        fs::write(&program, "").unwrap();
        let set_mode = |path: &Path, mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(path, mode).unwrap();
        };
        let by_root = nix::unistd::geteuid().is_root();
        for (mode, good) in [(0o775, true), (0o777, false), (0o1777, true)] {
            set_mode(place.path(), mode);
            assert_eq!(check_program(&program, false).is_ok(), good && by_root);
        }
        if by_root {
            // A group other than root's.
            set_mode(place.path(), 0o775);
            std::os::unix::fs::chown(place.path(), None, Some(50)).unwrap();
            assert!(check_program(&program, false).is_err());
            set_mode(place.path(), 0o755);
            assert!(check_program(&program, false).is_ok());
        }
        set_mode(&program, 0o1757);
        assert!(check_program(&program, false).is_err());
        let error = check_program(Path::new("/root/.cargo/bin/rockenv"), true).unwrap_err();
        assert_has!(error.message(), "SELinux");
    }
}
