//! Owns `on`: a command of rockenv's on another machine, by ssh. Everything is there: store, sources, caches, containers.
//! This machine sends the program and what it has configured, shows what is said, and fetches results.

use std::fmt;
use std::io::Write;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;

use clap::Args;
use fs_err as fs;
use sha2::{Digest as _, Sha256};

use super::select::quoted;
use crate::context::Context;
use crate::error::{Error, Kind, Result, ResultExt as _};
use crate::host::Host;
use crate::profile::hex;

/// What ssh itself ends with where it could not connect.
const SSH_FAILED: i32 = 255;
/// What of the working directory is looked at by rockenv, and so is sent.
const LOOKED_AT: [&str; 3] = ["profiles", "images", "hooks"];
/// Where the other machine keeps it, below the user's home.
const PLACE: &str = ".cache/rockenv";

/// Arguments of `on`.
#[derive(Debug, Args)]
pub struct OnArgs {
    /// The machine
    #[arg(value_name = "ssh://[USER@]HOST[:PORT]")]
    machine: Machine,
    /// Run it there with `sudo -n`
    #[arg(long)]
    sudo: bool,
    /// Send a file or directory below the working directory too; may be given again
    #[arg(long, value_name = "PATH")]
    send: Vec<PathBuf>,
    /// Fetch a file or directory after success, below the working directory on both machines; no file here is replaced
    #[arg(long, value_name = "PATH")]
    fetch: Vec<PathBuf>,
    /// What rockenv is to do there, such as `up gfx1103`
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
}

/// A machine that ssh knows.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Machine {
    /// `HOST` or `USER@HOST`.
    host: String,
    port: Option<u16>,
}

impl FromStr for Machine {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let rest = text.strip_prefix("ssh://").unwrap_or(text);
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.rsplit_once(':') {
            // An address of version 6 has colons of its own, in brackets.
            Some((host, port)) if !port.contains(']') => {
                let port = port
                    .parse()
                    .map_err(|_| format!("`{port}` is not a port"))?;
                (host, Some(port))
            }
            _ => (rest, None),
        };
        let host = host.replace(['[', ']'], "");
        // One that begins with `-` would be an option of ssh's.
        let bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | '\'' | '"');
        if host.is_empty() || host.starts_with('-') || host.contains(bad) {
            return Err("not ssh://[USER@]HOST[:PORT]".to_owned());
        }
        Ok(Self { host, port })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.host)
    }
}

/// The way there.
struct Way<'a> {
    machine: &'a Machine,
    ssh: &'a [String],
}

impl Way<'_> {
    /// Prepares a shell script to be run there; `words` are its arguments.
    fn script(&self, script: &str, words: &[&str]) -> Result<Command> {
        let (program, options) = self.ssh.split_first().ok_or_else(|| {
            Error::invalid("ROCKENV_SSH names no program").help("unset ROCKENV_SSH")
        })?;
        let mut command = Command::new(program);
        command.args(options);
        if let Some(port) = self.machine.port {
            command.arg("-p").arg(port.to_string());
        }
        // Whatever shell the user has there, this is for a plain one.
        let mut text = format!("exec sh -c {} sh", quoted(script));
        for word in words {
            text.push(' ');
            text.push_str(&quoted(word));
        }
        command.arg("--").arg(&self.machine.host).arg(text);
        Ok(command)
    }

    fn start(&self, mut command: Command) -> Result<Child> {
        command.spawn().map_err(|error| {
            Error::unavailable(format!("cannot start ssh to {}", self.machine))
                .source(error)
                .help("apt install openssh-client")
        })
    }

    /// Makes an error of ssh's own end.
    fn judge(&self, what: &str, status: ExitStatus) -> Result<()> {
        match status.code() {
            Some(0) => Ok(()),
            Some(SSH_FAILED) => Err(Error::unavailable(format!(
                "cannot reach {} by ssh",
                self.machine
            ))
            .help(format!("ssh {} true", self.machine))),
            _ => Err(Error::unavailable(format!(
                "cannot {what} on {}",
                self.machine
            ))),
        }
    }

    /// Runs a script that reads what `write` writes.
    fn send(
        &self,
        what: &str,
        script: &str,
        words: &[&str],
        write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<()> {
        let mut command = self.script(script, words)?;
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = self.start(command)?;
        let mut pipe = child.stdin.take();
        let written = pipe.as_mut().map_or(Ok(()), |pipe| write(pipe));
        drop(pipe);
        // What ssh says comes first: a broken pipe is its consequence.
        self.judge(what, child.wait()?)?;
        written.context(|| format!("cannot {what} on {}", self.machine))
    }
}

/// Runs the command there; returns its exit code.
pub fn on(cx: &Context, args: &OnArgs) -> Result<u8> {
    for path in args.send.iter().chain(&args.fetch) {
        check_below(path)?;
    }
    let way = Way {
        machine: &args.machine,
        ssh: &cx.config.ssh,
    };
    let working = std::env::current_dir()?;
    let program = send_program(cx, &way)?;
    let place = format!(
        "{PLACE}/on/{}",
        short(working.as_os_str().as_encoded_bytes())
    );
    send_files(&way, &working, &place, &args.send)?;
    let code = run(&way, &place, &program, args)?;
    if code == 0 {
        for path in &args.fetch {
            fetch(&way, &place, &working, path)?;
        }
    }
    Ok(code)
}

/// Refuses what is not below the working directory.
fn check_below(path: &Path) -> Result<()> {
    let below = path
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if below
        && path
            .components()
            .any(|part| matches!(part, Component::Normal(_)))
    {
        return Ok(());
    }
    Err(Error::new(
        Kind::Usage,
        format!("`{}` is not below the working directory", path.display()),
    )
    .help("name it relative to the working directory, without `..`"))
}

fn short(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))[..16].to_owned()
}

/// Makes sure that this very program is there; returns its path below the home.
fn send_program(cx: &Context, way: &Way<'_>) -> Result<String> {
    let bytes = fs::read(Host::probe()?.program)?;
    let digest = hex(&Sha256::digest(&bytes));
    let path = format!("{PLACE}/bin/{digest}");
    let mut look = way.script(
        r#"[ "$(uname -m)" = x86_64 ] || exit 3; test -x "$HOME/$1" || exit 4"#,
        &[&path],
    )?;
    look.stdin(Stdio::null());
    let status = way.start(look)?.wait()?;
    match status.code() {
        Some(0) => return Ok(path),
        Some(3) => {
            return Err(Error::unavailable(format!(
                "{} is no x86_64 machine",
                way.machine
            )));
        }
        Some(4) => {}
        _ => return way.judge("look for rockenv", status).map(|()| path),
    }
    cx.ui.note(&format!("sending rockenv to {}", way.machine));
    let script = r#"set -e
umask 077
mkdir -p "$HOME/${1%/*}"
new=$(mktemp "$HOME/$1.XXXXXX")
trap 'rm -f "$new"' EXIT
cat >"$new"
[ "$(sha256sum <"$new")" = "$2  -" ]
chmod 755 "$new"
mv "$new" "$HOME/$1""#;
    way.send("store rockenv", script, &[&path, &digest], |pipe| {
        pipe.write_all(&bytes)
    })?;
    Ok(path)
}

/// Makes the directory there have what is here of configuration, profiles, images and hooks. Only what was sent before is
/// removed there: results of steps may be beside it.
fn send_files(way: &Way<'_>, working: &Path, place: &str, more: &[PathBuf]) -> Result<()> {
    let mut paths: Vec<PathBuf> = LOOKED_AT.iter().map(PathBuf::from).collect();
    for entry in fs::read_dir(working)? {
        let name = PathBuf::from(entry?.file_name());
        if name
            .extension()
            .is_some_and(|ending| ending == "toml" || ending == "lock")
        {
            paths.push(name);
        }
    }
    paths.extend(more.iter().cloned());
    paths.retain(|path| working.join(path).symlink_metadata().is_ok());
    let script = r#"set -e
umask 077
mkdir -p "$HOME/$1/work"
cd "$HOME/$1"
rm -rf new
mkdir new
tar -x -f - -C new
(cd new && find . ! -type d -print0 | sort -z) >sent.new
if [ -e sent ]; then comm -z -23 sent sent.new | (cd work && xargs -0 -r rm -f --); fi
cp -a --remove-destination new/. work/
rm -rf new
mv sent.new sent"#;
    way.send("store profiles", script, &[place], |pipe| {
        let mut archive = tar::Builder::new(std::io::BufWriter::new(pipe));
        archive.follow_symlinks(false);
        for path in &paths {
            let from = working.join(path);
            match from.symlink_metadata()?.is_dir() {
                true => archive.append_dir_all(path, &from)?,
                false => archive.append_path_with_name(&from, path)?,
            }
        }
        archive.into_inner()?.flush()
    })
}

/// Runs rockenv there. It ends with the connection: nobody would see how it goes on.
fn run(way: &Way<'_>, place: &str, program: &str, args: &OnArgs) -> Result<u8> {
    let script = r#"cd "$HOME/$1/work" || exit 1
program=$HOME/$2 sudo=$3
shift 3
exec 3<&0
$sudo "$program" "$@" </dev/null 3<&- &
child=$!
(cat <&3; kill -TERM $child) >/dev/null 2>&1 &
watch=$!
wait $child
code=$?
kill $watch
exit $code"#;
    let sudo = if args.sudo { "sudo -n" } else { "" };
    let mut words = vec![place, program, sudo];
    words.extend(args.command.iter().map(String::as_str));
    let mut command = way.script(script, &words)?;
    command.stdin(Stdio::piped());
    let mut child = way.start(command)?;
    // Open until it has ended: its end there means that nobody is here any more.
    let pipe = child.stdin.take();
    let status = child.wait()?;
    drop(pipe);
    match status.code() {
        Some(SSH_FAILED) | None => way.judge("run rockenv", status).map(|()| 0),
        Some(code) => Ok(u8::try_from(code).unwrap_or(1)),
    }
}

/// Fetches a file or directory from there.
fn fetch(way: &Way<'_>, place: &str, working: &Path, path: &Path) -> Result<()> {
    let name = path.to_string_lossy();
    let mut command = way.script(
        r#"cd "$HOME/$1/work" && exec tar -c -f - -- "$2""#,
        &[place, &name],
    )?;
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = way.start(command)?;
    let unpacked = match child.stdout.take() {
        Some(pipe) => unpack(pipe, working),
        None => Ok(()),
    };
    let status = child.wait()?;
    unpacked.context(|| format!("cannot fetch `{name}` from {}", way.machine))?;
    way.judge(&format!("read `{name}`"), status)
}

/// Writes an archive below `working`; what is there already is never replaced.
fn unpack(pipe: impl std::io::Read, working: &Path) -> std::io::Result<()> {
    let mut archive = tar::Archive::new(pipe);
    archive.set_overwrite(false);
    archive.set_preserve_mtime(true);
    archive.unpack(working)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_written_as_for_docker_or_ssh() {
        let of = |text: &str| text.parse::<Machine>();
        let machine = |host: &str, port| {
            Ok(Machine {
                host: host.to_owned(),
                port,
            })
        };
        assert_eq!(of("ssh://root@big"), machine("root@big", None));
        assert_eq!(of("ssh://me@big:2222/"), machine("me@big", Some(2222)));
        assert_eq!(of("big"), machine("big", None));
        assert_eq!(
            of("ssh://[2001:db8::1]:22"),
            machine("2001:db8::1", Some(22))
        );
        assert_eq!(
            of("ssh://me@[2001:db8::1]"),
            machine("me@2001:db8::1", None)
        );
        for text in [
            "",
            "ssh://",
            "-oProxyCommand=x",
            "ssh://-x",
            "a b",
            "big:x",
            "ssh://big/store",
        ] {
            assert!(of(text).is_err(), "{text}");
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
