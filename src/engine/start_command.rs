//! Owns starting a command inside a container, as the user it names.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::SigSet;
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Pid};

use super::wire::{Command, Reply};
use crate::sys::account::rights::set_ids;
use crate::sys::sockets::SocketRules;

/// Minimum score of a command. If the machine has no memory left, the kernel kills a process with a high score. systemd
/// gives up to 200 to the programs of a desktop session, and 0 to those of root.
const OOM_SCORE: i32 = 500;
const OOM_FILE: &str = "/proc/self/oom_score_adj";

/// Soft limits, which a command may raise. A crash leaves no core file in a source. Stacks are as under systemd-nspawn:
/// with no limit, which a service may have, the kernel places memory differently and threads get smaller stacks.
const LIMITS: [(Resource, u64); 2] = [
    (Resource::RLIMIT_CORE, 0),
    (Resource::RLIMIT_STACK, 8 << 20),
];

/// Directories that describe terminals; the last one is in the home.
const TERMINFO: [&str; 4] = [
    "/etc/terminfo",
    "/lib/terminfo",
    "/usr/share/terminfo",
    ".terminfo",
];
const XTERM: &str = "xterm-256color";

/// Starts a command, or reports the failure as shells do.
pub(super) fn start(
    command: &Command,
    fds: Vec<OwnedFd>,
    in_service: bool,
) -> std::result::Result<(Pid, Option<OwnedFd>), Reply> {
    // The error of `exec` does not distinguish a missing directory from a missing program.
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    if let Err(error) = nix::fcntl::open(command.cwd.as_str(), flags, Mode::empty()) {
        let words = error.desc().to_lowercase();
        return Err(Reply::NotStarted {
            code: 126,
            message: format!("cannot start in directory `{}`: {words}", command.cwd),
        });
    }
    execute(command, fds, in_service).map_err(|error| {
        let absent = error.kind() == std::io::ErrorKind::NotFound;
        Reply::NotStarted {
            code: if absent { 127 } else { 126 },
            message: format!(
                "cannot run `{}`: {}",
                command.argv[0].as_ref().display(),
                without_number(&error)
            ),
        }
    })
}

/// Returns the kernel's message without the number that std adds.
fn without_number(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => Errno::from_raw(number).desc().to_lowercase(),
        None => error.to_string(),
    }
}

/// Starts a command in its own session, as the user it names.
fn execute(
    command: &Command,
    fds: Vec<OwnedFd>,
    in_service: bool,
) -> std::io::Result<(Pid, Option<OwnedFd>)> {
    let (stdio, terminal) = if command.tty {
        let (outer, inner) = open_terminal(command)?;
        let stderr = fds.into_iter().next().map_or_else(|| inner.try_clone(), Ok);
        ([inner.try_clone()?, inner, stderr?], Some(outer))
    } else {
        let fds: [OwnedFd; 3] = fds
            .try_into()
            .map_err(|_| std::io::Error::other("a command needs three descriptors"))?;
        (fds, None)
    };
    let [stdin, stdout, stderr] = stdio;
    let home = command.env.iter().find(|(name, _)| name == "HOME");
    let home = Path::new(home.map_or("/", |(_, home)| home.as_str()));
    let terminfo = TERMINFO.map(|directory| home.join(directory));
    let variables = command.env.iter().map(|(name, value)| match name.as_str() {
        "TERM" if command.tty => (name, described(value, &terminfo)),
        _ => (name, value.as_str()),
    });
    let mut process = std::process::Command::new(&command.argv[0]);
    process
        .args(&command.argv[1..])
        .env_clear()
        .envs(variables)
        .current_dir(&command.cwd)
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout))
        .stderr(Stdio::from(stderr));
    become_user(&mut process, command, in_service)?;
    let child = process.spawn()?;
    // `reap` collects commands by pid; the handle would wait a second time.
    Ok((Pid::from_raw(child.id().cast_signed()), terminal))
}

/// Returns the name of a terminal for programs inside. A terminal such as `xterm-kitty` understands xterm's sequences,
/// but few images describe it, and curses programs refuse an unknown name.
fn described<'a>(name: &'a str, directories: &[PathBuf]) -> &'a str {
    let has = |name: &str| {
        let mut files = directories.iter().map(|path| path.join("x").join(name));
        files.any(|file| file.exists())
    };
    match name.starts_with("xterm-") && !has(name) && has(XTERM) {
        true => XTERM,
        false => name,
    }
}

#[expect(
    unsafe_code,
    reason = "a child changes its user and session between fork and exec"
)]
fn become_user(
    process: &mut std::process::Command,
    command: &Command,
    in_service: bool,
) -> std::io::Result<()> {
    let groups = command.groups.as_ref();
    let groups: Option<Vec<Gid>> =
        groups.map(|groups| groups.iter().copied().map(Gid::from_raw).collect());
    let (uid, gid) = (command.uid, command.gid);
    let no_new_privs = command.no_new_privs;
    let terminal = command.tty.then(std::io::stdin);
    // systemd-nspawn already runs under these rules. In a service's container there is no CAP_SYS_ADMIN, so a command
    // needs `no_new_privs` to enforce them.
    let mut sockets = match in_service && no_new_privs {
        true => Some(SocketRules::new().map_err(std::io::Error::other)?),
        false => None,
    };
    let own = fs_err::read_to_string(OOM_FILE).unwrap_or_default();
    let own = own.trim().parse().unwrap_or(OOM_SCORE);
    let oom_score = own.max(OOM_SCORE).to_string();
    // SAFETY: the agent has one thread, and the closure only makes system calls on values made before the fork. It
    // allocates only for an error.
    unsafe {
        process.pre_exec(move || {
            // The child would inherit the agent's signal mask.
            SigSet::empty().thread_set_mask()?;
            nix::unistd::setsid()?;
            if let Some(terminal) = &terminal {
                rustix::process::ioctl_tiocsctty(terminal)?;
            }
            nix::sys::stat::umask(Mode::from_bits_truncate(0o022));
            for (limit, soft) in LIMITS {
                let (_, most) = getrlimit(limit)?;
                setrlimit(limit, soft.min(most), most)?;
            }
            drop(fs_err::write(OOM_FILE, &oom_score));
            set_ids(uid, gid, groups.as_deref())?;
            if no_new_privs {
                nix::sys::prctl::set_no_new_privs()?;
            }
            sockets.as_mut().map_or(Ok(()), SocketRules::enforce)
        });
    }
    Ok(())
}

/// Opens a pseudo terminal of the container's own `/dev/pts`, so that `tty` inside names it.
fn open_terminal(command: &Command) -> std::io::Result<(OwnedFd, OwnedFd)> {
    let outer = nix::pty::posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)?;
    nix::pty::grantpt(&outer)?;
    nix::pty::unlockpt(&outer)?;
    let name = nix::pty::ptsname_r(&outer)?;
    let inner = fs_err::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlag::O_NOCTTY.bits())
        .open(&name)?;
    let (uid, gid) = (command.uid.into(), command.gid.into());
    nix::unistd::chown(name.as_str(), Some(uid), Some(gid))?;
    Ok((outer.into(), inner.into_parts().0.into()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use nix::sys::wait::waitpid;

    use super::*;
    use crate::engine::wire::Word;

    fn shell(script: &str, tty: bool) -> Command {
        let words = ["/bin/sh", "-c", script].map(|word| Word::Text(word.to_owned()));
        Command {
            argv: words.to_vec(),
            cwd: "/".to_owned(),
            uid: nix::unistd::getuid().as_raw(),
            gid: nix::unistd::getgid().as_raw(),
            tty,
            ..Command::default()
        }
    }

    #[test]
    fn a_terminal_that_the_image_does_not_describe_is_an_xterm() {
        let directory = tempfile::tempdir().unwrap();
        fs_err::create_dir(directory.path().join("x")).unwrap();
        let directories = [directory.path().to_owned()];
        assert_eq!(described("xterm-kitty", &directories), "xterm-kitty");
        for name in [XTERM, "xterm-kitty"] {
            fs_err::write(directory.path().join("x").join(name), "").unwrap();
        }
        for (name, shown) in [
            ("xterm-kitty", "xterm-kitty"),
            ("xterm-ghostty", XTERM),
            ("xterm", "xterm"),
            ("mine", "mine"),
        ] {
            assert_eq!(described(name, &directories), shown);
        }
    }

    #[test]
    fn redirected_errors_are_not_in_the_terminal() {
        let mut errors = tempfile::tempfile().unwrap();
        let fds = vec![errors.try_clone().unwrap().into()];
        let command = shell("test -t 0 && test -t 1 && echo error >&2", true);
        let (pid, _terminal) = start(&command, fds, false).unwrap();
        waitpid(pid, None).unwrap();
        let mut text = String::new();
        errors.rewind().unwrap();
        errors.read_to_string(&mut text).unwrap();
        assert_eq!(text, "error\n");
    }

    #[test]
    fn a_command_has_the_same_limits_everywhere_and_is_killed_first() {
        let (soft, hard) = getrlimit(Resource::RLIMIT_CORE).unwrap();
        setrlimit(Resource::RLIMIT_CORE, hard, hard).unwrap();
        let (stack, most) = getrlimit(Resource::RLIMIT_STACK).unwrap();
        setrlimit(Resource::RLIMIT_STACK, 4 << 20, most).unwrap();
        let script = "ulimit -s && ulimit -c && ulimit -c \"$(ulimit -H -c)\" && cat /proc/self/oom_score_adj";
        let command = shell(script, false);
        let null = || OwnedFd::from(fs_err::File::open("/dev/null").unwrap().into_parts().0);
        let mut output = tempfile::tempfile().unwrap();
        let fds = vec![null(), output.try_clone().unwrap().into(), null()];
        let (pid, _) = start(&command, fds, false).unwrap();
        waitpid(pid, None).unwrap();
        setrlimit(Resource::RLIMIT_CORE, soft, hard).unwrap();
        setrlimit(Resource::RLIMIT_STACK, stack, most).unwrap();
        let mut text = String::new();
        output.rewind().unwrap();
        output.read_to_string(&mut text).unwrap();
        let score = text.strip_prefix("8192\n0\n").unwrap().trim_end();
        assert!(score.parse::<i32>().unwrap() >= OOM_SCORE, "{text}");
    }
}
