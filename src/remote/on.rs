//! Owns running a rockenv command on another machine, by ssh. Store, sources, caches and containers are all there. The
//! local machine sends the program and its configuration, shows the output, and fetches results.

use std::io::{self, Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sha2::{Digest as _, Sha256};

use super::RemoteRequest;
use super::received::unpack;
use super::remote_exec::{FORCE_COLOR, NO_COLOR};
use super::ssh::{SshConnection, output};
use super::transfer::{LATEST, Manifest, send, short};
use super::tree::{Seen, Tree};
use crate::store::config::{Config, Terminal};
use crate::store::lock::Lock;
use crate::sys::account::{Existing, become_caller};
use crate::sys::error::{Result, ResultExt as _, named_path};
use crate::sys::host::{Host, working_directory};
use crate::sys::readable::readable;
use crate::sys::shell::quoted;
use crate::sys::signals::{Cancel, Signals};
use crate::sys::trust::DIRECTORIES;
use crate::tree::listing::Listing;
use crate::tree::remove_tree;
use crate::tree::writer::Writer;
use crate::ui::Ui;
use crate::ui::ci::System;

/// Directory on the other machine, relative to the user's home.
const PLACE: &str = ".cache/rockenv";

/// Prefix of the directory that files arrive in, and the number of random characters after it.
const ARRIVAL: &str = ".rockenv-fetch-";
const RANDOM: usize = 6;
/// How long a fetch may take before a note appears.
const SILENCE: Duration = Duration::from_secs(2);
/// How long connecting may take before a note appears. It is longer, because ssh may ask for a password first.
const CONNECT: Duration = Duration::from_secs(10);
/// Exceeds the padding that tar adds to an archive.
const LAST_BLOCK: u64 = 1 << 20;

/// Runs the command on the other machine. ssh reports a signal as a failure of its own, so the shell turns signals into
/// an exit code. 255 is ssh's own code, so 255 becomes 254. Ctrl-C must not end the shell.
const RUN: &str = r#"cd "$HOME/$1" || exit 1
program=$HOME/$2 sudo=$3 digest=$4 shown=$5
shift 5
trap : HUP INT QUIT TERM
$sudo "$program" __remote-exec $PPID "$digest" "$shown" "$@"
code=$?
[ $code != 255 ] || code=254
exit $code"#;

/// Splits the path of a file that another machine sent to this one: the place that belongs to the sender's working
/// directory, and the file's path below that directory. The component between them depends on the files' content.
pub(crate) fn sent_file(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let ending = Path::new(PLACE).join("on");
    let place = path
        .ancestors()
        .find(|place| place.parent().is_some_and(|on| on.ends_with(&ending)))?;
    let mut below = path.strip_prefix(place).ok()?.components();
    below.next()?;
    Some((place.to_owned(), below.as_path().to_owned()))
}

/// Runs the request on the other machine. Returns the command's exit code.
pub(crate) fn on(ui: &Ui, config: &Config, request: &RemoteRequest) -> Result<u8> {
    for path in request.send.iter().chain(&request.fetch) {
        check_below(path)?;
    }
    // Root is not needed: the files and the ssh keys belong to the caller.
    become_caller()?;
    let ssh = SshConnection {
        machine: &request.machine,
        ssh: &config.ssh,
    };
    let working = working_directory()?;
    let digest = short(working.as_os_str().as_encoded_bytes());
    let place = format!("{PLACE}/on/{digest}");
    if request.command.is_empty() && request.send.is_empty() {
        let latest = format!("{place}/{LATEST}");
        return fetch_all(ui, &ssh, &latest, &working, &request.fetch).map(|()| 0);
    }
    let manifest = manifest(&working, &request.send)?;
    let program = send_program(ui, &ssh)?;
    let received = send(ui, &ssh, &program, &place, &working, &manifest)?;
    if let Some((directory, path)) = received.changed {
        let changed = format!("`{}` was changed on {}", path.display(), ssh.machine);
        let kept = format!("keeping it in `~/{place}/{directory}`");
        ui.note(&format!("{changed} since it was sent: {kept}"));
    }
    let directory = format!("{place}/{}", received.directory);
    let code = match request.command.is_empty() {
        true => 0,
        false => run(ui, config, &ssh, &directory, &program, request)?,
    };
    if code == 0 {
        fetch_all(ui, &ssh, &directory, &working, &request.fetch)?;
    }
    Ok(code)
}

/// Refuses paths outside the working directory.
fn check_below(path: &Path) -> Result<()> {
    let parts = path.components();
    let mut parts = parts.filter(|part| *part != Component::CurDir).peekable();
    if parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_))) {
        return Ok(());
    }
    Err(
        usage!("`{}` is not below the working directory", path.display())
            .help("name it relative to the working directory, without `..`"),
    )
}

/// Ensures that this exact program is on the other machine. Returns its path relative to the home. Before it sends a
/// new program, it removes programs that were not used for a month, except for that of the timer of `setup --timer`.
fn send_program(ui: &Ui, ssh: &SshConnection<'_>) -> Result<String> {
    let bytes = fs::read(Host::probe()?.program)?;
    let digest = hex::encode(Sha256::digest(&bytes));
    let path = format!("{PLACE}/bin/{digest}");
    let mut look = ssh.script(
        &[],
        r#"[ "$(uname -sm)" = "Linux x86_64" ] || exit 3; test -x "$HOME/$1" || exit 4; touch "$HOME/$1"; exit 5"#,
        &[&path],
    )?;
    // A login shell may print text of its own.
    look.stdin(Stdio::null()).stdout(Stdio::null());
    let mut look = ssh.start(look)?;
    if let Ok(ended) = pidfd_open(Pid::from_child(&look), PidfdFlags::empty())
        && readable([Some(ended.as_fd())], Some(CONNECT))? == [false]
    {
        ui.note(&format!("waiting for ssh to connect to {}", ssh.machine));
    }
    let status = look.wait()?;
    match status.code() {
        Some(3) => {
            return Err(unavailable!(
                "{} is not an x86_64 Linux machine",
                ssh.machine
            ));
        }
        Some(4) => {}
        Some(5) => return Ok(path),
        // An SFTP server ends with 0 without input, and waits forever with that of the next script.
        _ => return ssh.not_begun("look for rockenv", status),
    }
    ui.note(&format!("sending rockenv to {}", ssh.machine));
    let script = r#"set -e
umask 077
mkdir -p "$HOME/${1%/*}"
find "$HOME/${1%/*}" -maxdepth 1 -type f -name "$3*" -mtime +30 ! -exec \
  sh -c 'grep -qs "${1##*/}" /etc/systemd/system/rockenv-gc.service' sh {} \; -delete || :
new=$(mktemp "$HOME/$1.XXXXXX")
trap 'rm -f "$new"' EXIT
cat >"$new"
[ "$(sha256sum <"$new")" = "$2  -" ]
chmod 755 "$new"
[ -x "$new" ] || { echo "$HOME is mounted noexec: no program in it runs" >&2; exit 1; }
sync "$new"
mv "$new" "$HOME/$1""#;
    let any_digest = "[0-9a-f]".repeat(digest.len());
    let arguments: [&str; 3] = [&path, &digest, &any_digest];
    ssh.run_script("store rockenv", script, &arguments, |mut pipe, _| {
        pipe.write_all(&bytes)
    })?;
    Ok(path)
}

/// Lists the local configuration, profiles, images and hooks, which are always sent, and `more`.
fn manifest(working: &Path, more: &[PathBuf]) -> Result<Manifest> {
    let mut found = Manifest::new();
    for entry in fs::read_dir(working)? {
        let name = PathBuf::from(entry?.file_name());
        let is_ending = |ending| ending == "toml" || ending == "lock";
        if DIRECTORIES.iter().any(|always| name == Path::new(always))
            || name.extension().is_some_and(is_ending)
        {
            list(working, &name, &mut found)?;
        }
    }
    for path in more {
        let parts = path.components();
        let path: PathBuf = parts.filter(|part| *part != Component::CurDir).collect();
        if let Err(error) = fs::symlink_metadata(working.join(&path)) {
            return Err(not_found!("cannot send `{}`", path.display())
                .source(named_path(&path)(error))
                .help("--send takes a path below the working directory"));
        }
        list(working, &path, &mut found)?;
    }
    Ok(found)
}

fn list(working: &Path, path: &Path, found: &mut Manifest) -> Result<()> {
    let refuse = |why: &str| {
        Err(invalid!("cannot send `{}`: {why}", path.display())
            .help("move it out of the directory that is sent"))
    };
    if path.to_str().is_none() {
        return refuse("its name is not UTF-8");
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return refuse("it has no name");
    };
    let seen = Tree::open(&working.join(parent))?.stat(name.as_ref())?;
    match &seen {
        Seen::Directory => {
            for entry in fs::read_dir(working.join(path))? {
                list(working, &path.join(entry?.file_name()), found)?;
            }
        }
        Seen::Is { .. } => {}
        Seen::Absent | Seen::Other => {
            return refuse("it is not a readable file, directory or link");
        }
    }
    found.insert(path.to_owned(), seen);
    Ok(())
}

/// Runs rockenv on the other machine, on a terminal if there is one here. The command ends with the connection, because
/// its further output would be lost.
fn run(
    ui: &Ui,
    config: &Config,
    ssh: &SshConnection<'_>,
    directory: &str,
    program: &str,
    request: &RemoteRequest,
) -> Result<u8> {
    let sudo = if request.sudo { "sudo -n" } else { "" };
    let digest = config.current.digest()?.unwrap_or_default();
    let shown = variables(&config.terminal);
    let mut words = vec![directory, program, sudo, &digest, &shown];
    words.extend(request.command.iter().map(String::as_str));
    let terminals = ui.settings().terminals;
    // A remote terminal merges stdout and stderr. Streams that are separate here must stay separate.
    let at_terminal =
        terminals.stdin && terminals.stdout && (terminals.stderr || request.reads_input);
    let options: &[&str] = match at_terminal {
        // Suppresses ssh's closing message.
        true => &["-t", "-o", "LogLevel=ERROR"],
        false => &[],
    };
    let mut command = match at_terminal {
        true => ssh.script(options, RUN, &words)?,
        false => ssh.script_with_output(options, RUN, &words)?,
    };
    if !at_terminal && !request.reads_input {
        // ssh would consume input that is meant for a later program.
        command.stdin(Stdio::null());
    }
    let mut child = ssh.start(command)?;
    let is_run = match child.stdout.take() {
        Some(stdout) => pass_on(ui, stdout)?,
        None => true,
    };
    let status = child.wait()?;
    if !is_run {
        return ssh.not_begun("run rockenv", status);
    }
    match status.code() {
        // 1: sudo refuses. 126, 127: the shell cannot run sudo.
        Some(1 | 126 | 127) if request.sudo => check_sudo(ssh, options, program)?,
        _ => {}
    }
    match status.code() {
        Some(code) if !SshConnection::is_failure(status) => Ok(u8::try_from(code).unwrap_or(1)),
        _ => ssh.judge("run rockenv", status).map(|()| 0),
    }
}

/// Returns the names of the variables that determine how output is shown here. ssh forwards none of them.
fn variables(terminal: &Terminal) -> String {
    let colors = [
        (NO_COLOR, terminal.no_color),
        (FORCE_COLOR, terminal.force_color),
    ];
    let colors = colors.iter().filter(|(_, is_set)| *is_set);
    let system = terminal.ci_system.map(System::variable);
    let colors = colors.map(|(name, _)| *name);
    let names: Vec<&str> = system.into_iter().chain(colors).collect();
    names.join(",")
}

/// Prints the output of a script. Returns whether the script began.
fn pass_on(ui: &Ui, stdout: impl Read) -> io::Result<bool> {
    let Some(mut stdout) = output(stdout)? else {
        return Ok(false);
    };
    let mut bytes = vec![0; 1 << 16];
    loop {
        let count = stdout.read(&mut bytes)?;
        ui.bytes(&bytes[..count]);
        ui.flush();
        if count == 0 || ui.closed() {
            return Ok(true);
        }
    }
}

/// Distinguishes a refusal by sudo from a failed command, which has already reported its error.
fn check_sudo(ssh: &SshConnection<'_>, options: &[&str], program: &str) -> Result<()> {
    let script = r#"sudo -n "$HOME/$1" --version >/dev/null 2>&1 && exit
sudo -n true 2>/dev/null && exit 2; exit 1"#;
    let mut command = ssh.script(options, script, &[program])?;
    if options.is_empty() {
        command.stdin(Stdio::null()).stdout(Stdio::null());
    }
    let status = ssh.start(command)?.wait()?;
    if status.success() || SshConnection::is_failure(status) {
        return Ok(());
    }
    if status.code() == Some(2) {
        let error = unavailable!("root on {} runs no program in the user's home", ssh.machine);
        return Err(error.help(
            "a home that root can read, not on NFS with `root_squash`, or ssh://root@HOST without --sudo",
        ));
    }
    Err(unavailable!(
        "`sudo -n` does not run rockenv on {}",
        ssh.machine
    )
    .help(
        "a line `USER ALL=(root) NOPASSWD: ALL` in a file of /etc/sudoers.d there, or ssh://root@HOST without --sudo",
    ))
}

/// Fetches all paths. A signal ends the fetch and removes partially received files.
fn fetch_all(
    ui: &Ui,
    ssh: &SshConnection<'_>,
    directory: &str,
    working: &Path,
    paths: &[PathBuf],
) -> Result<()> {
    if paths.is_empty() {
        return Ok(());
    }
    let signals = Signals::take()?;
    let cancel = Cancel::new(&signals);
    paths.iter().try_for_each(|path| {
        let fetched = fetch(ui, ssh, directory, working, path, &signals);
        // Ctrl-C ends ssh too, and the end of ssh may be noticed before the signal.
        cancel.poll();
        cancel.outcome(fetched)
    })
}

/// Reads until a signal arrives, and prints a note if reading takes long.
struct UntilSignal<'a, R> {
    from: R,
    signals: &'a Signals,
    ui: &'a Ui,
    begun: Instant,
    /// Text of the note; `None` once printed.
    what: Option<String>,
}

impl<R: Read + AsFd> Read for UntilSignal<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let told_in = SILENCE.saturating_sub(self.begun.elapsed());
            let limit = self.what.is_some().then_some(told_in);
            let fds = [Some(self.signals.as_fd()), Some(self.from.as_fd())];
            let [signal, sent] = readable(fds, limit)?;
            if signal {
                return Err(io::Error::other("interrupted"));
            }
            if self.begun.elapsed() >= SILENCE
                && let Some(what) = self.what.take()
            {
                self.ui.note(&what);
            }
            if sent {
                return self.from.read(into);
            }
        }
    }
}

/// Creates the directory that files arrive in, and locks it for the duration of the fetch. First removes directories
/// that killed commands left behind.
fn make_arrival(working: &Path) -> Result<(tempfile::TempDir, Option<Lock>)> {
    for entry in fs::read_dir(working)? {
        let entry = entry?;
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(ARRIVAL));
        let is_random = |text: &str| {
            text.len() == RANDOM && text.chars().all(|letter| letter.is_ascii_alphanumeric())
        };
        if random.is_some_and(is_random)
            && let Ok(Some(_lock)) = Lock::try_directory(&entry.path())
        {
            // Another user's directory cannot be removed and stays.
            drop(remove_tree(&entry.path()));
        }
    }
    loop {
        let arrival = tempfile::Builder::new()
            .prefix(ARRIVAL)
            .rand_bytes(RANDOM)
            .tempdir_in(working)?;
        let lock = Lock::try_directory(arrival.path());
        // Before the lock was taken, another fetch may have locked or removed the directory.
        if !matches!(lock, Ok(None)) && arrival.path().exists() {
            // Some file systems cannot lock directories. On these, cleanup skips the directory as well.
            return Ok((arrival, lock.ok().flatten()));
        }
    }
}

/// Fetches a file or directory, all or nothing.
fn fetch(
    ui: &Ui,
    ssh: &SshConnection<'_>,
    directory: &str,
    working: &Path,
    path: &Path,
    signals: &Signals,
) -> Result<()> {
    let name = path.to_string_lossy();
    let cannot = || format!("cannot fetch `{name}` from {}", ssh.machine);
    let (arrival, _lock) = make_arrival(working).context(cannot)?;
    let mut command = ssh.script_with_output(
        &[],
        r#"cd "$HOME/$1" 2>/dev/null && { [ -e "$2" ] || [ -L "$2" ]; } || exit 7; exec tar -c -f - -- "$2""#,
        &[directory, &name],
    )?;
    command.stdin(Stdio::null());
    let mut child = ssh.start(command)?;
    let mut is_sent = false;
    let unpacked = child.stdout.take().map_or(Ok(()), |from| {
        let from = UntilSignal {
            from,
            signals,
            ui,
            begun: Instant::now(),
            what: Some(format!("fetching `{name}` from {}", ssh.machine)),
        };
        let Some(mut from) = output(from)? else {
            return Ok(());
        };
        is_sent = true;
        unpack(&mut from, arrival.path(), path)?;
        // tar may still write the padding of the last block.
        io::copy(&mut from.take(LAST_BLOCK), &mut io::sink()).map(drop)
    });
    if unpacked.is_err() {
        // The other end may neither send data nor exit.
        drop(child.kill());
    }
    let status = child.wait()?;
    if status.code() == Some(7) {
        return Err(not_found!("{}", cannot()).source("there is no such file").help(
            format!("--fetch takes a path below ~/{directory} there, which corresponds to the working directory"),
        ));
    }
    unpacked.context(cannot)?;
    let what = format!("read `{name}`");
    if !is_sent {
        return ssh.not_begun(&what, status);
    }
    ssh.judge(&what, status)?;
    place_below(arrival.path(), working).context(cannot)
}

/// Moves entries below `working`. A file with the same content stays. If any entry differs, nothing is moved.
fn place_below(arriving: &Path, working: &Path) -> Result<()> {
    let (from, to) = (Tree::open(arriving)?, Tree::open(working)?);
    let refusing_overwrite = |path: &Path| {
        usage!(
            "`{}` exists already, with different content",
            path.display()
        )
        .help(format!("mv {0} {0}.mine", quoted(&path.to_string_lossy())))
    };
    let entries = Listing::of(arriving)?.entries;
    for (path, _) in entries.iter().filter(|(_, entry)| entry.is_directory()) {
        // Only root can move or remove the entries of a read-only directory.
        fs::set_permissions(arriving.join(path), std::fs::Permissions::from_mode(0o700))?;
    }
    let mut fresh = Vec::new();
    for (path, entry) in entries {
        match to.stat(&path)? {
            Seen::Absent => fresh.push((path, entry)),
            found if found == from.stat(&path)? => {}
            _ => return Err(refusing_overwrite(&path)),
        }
    }
    // New directories, including empty ones, keep their permissions.
    let mut writer = Writer::open(working, false)?;
    for (path, entry) in fresh {
        if entry.is_directory() {
            writer.put(&path, &entry, None, Existing::Refuse)?;
        } else if !from.move_to(&path, &to)? {
            return Err(refusing_overwrite(&path));
        }
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_arrives_whole_or_not_at_all() {
        use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
        // Nobody but root can move entries out of a read-only directory.
        let before = nix::unistd::setfsuid(nix::unistd::Uid::from_raw(43_210));
        let directory = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
        {
            fs::create_dir_all(from.join("out/empty")).unwrap();
            fs::create_dir(from.join("out/fixed")).unwrap();
            fs::write(from.join("out/fixed/f"), "f").unwrap();
            fs::write(from.join("out/a"), "a").unwrap();
            fs::hard_link(from.join("out/a"), from.join("out/b")).unwrap();
            std::os::unix::fs::symlink("a", from.join("out/l")).unwrap();
        }
        let set_mode = |path: PathBuf, mode| {
            fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        fs::create_dir_all(to.join("out")).unwrap();
        // A file in the way of a link, or of a directory, stops everything.
        for name in ["l", "fixed"] {
            fs::write(to.join("out").join(name), "mine").unwrap();
            assert!(place_below(&from, &to).is_err());
            assert_eq!(fs::read_dir(to.join("out")).unwrap().count(), 1);
            fs::remove_file(to.join("out").join(name)).unwrap();
        }
        set_mode(from.join("out/empty"), 0o750);
        set_mode(from.join("out/fixed"), 0o555);
        place_below(&from, &to).unwrap();
        let found = |name: &str| fs::symlink_metadata(to.join("out").join(name)).unwrap();
        assert_eq!(found("empty").mode() & 0o777, 0o750);
        assert_eq!(found("fixed").mode() & 0o777, 0o555);
        assert!(found("fixed/f").is_file());
        // So that it can be removed.
        set_mode(to.join("out/fixed"), 0o755);
        assert_eq!(found("a").ino(), found("b").ino());
        assert!(found("l").is_symlink());
        // With one thread, the next test runs in this one.
        nix::unistd::setfsuid(before);
    }

    #[test]
    fn no_exit_code_of_the_command_is_ssh_s_own() {
        let directory = tempfile::tempdir().unwrap();
        // A shell in place of rockenv reads the script `__remote-exec`.
        fs::write(directory.path().join("__remote-exec"), "exit $4\n").unwrap();
        let place = directory.path().to_str().unwrap();
        for (code, passed_on) in [("0", 0), ("7", 7), ("254", 254), ("255", 254)] {
            let status = std::process::Command::new("sh")
                .args(["-c", RUN, "sh", place, "bin/sh", "", "digest", "", code])
                .env("HOME", "/")
                .status()
                .unwrap();
            assert_eq!(status.code(), Some(passed_on), "{code}");
        }
    }

    #[test]
    fn only_what_is_below_is_sent_and_fetched() {
        for path in ["out", "./out/a", "a/b"] {
            check_below(path.as_ref()).unwrap();
        }
        for path in ["/etc", "../x", "a/../../b", ".", ""] {
            assert!(check_below(path.as_ref()).is_err(), "{path}");
        }
    }
}
