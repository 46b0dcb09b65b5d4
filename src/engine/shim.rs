//! Owns the make shim: rockenv's binary under the name `make`, first on the path of every env that has a make.
//!
//! make does not join the jobserver in an env's `MAKEFLAGS` by itself (see [`makeflags`]). Without `-j` it stays
//! serial. With `-j` it would start that many jobs on top of all others. The shim makes it join the jobserver instead:
//! through the FIFO since GNU make 4.4, through two descriptors of the FIFO before.

use std::ffi::{OsStr, OsString};
use std::os::fd::IntoRawFd as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use fs_err as fs;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

#[cfg(doc)]
use crate::engine::jobserver::makeflags;
use crate::engine::nspawn::PROGRAM;
use crate::sys::host;
use crate::ui::{Ui, UiSettings};

/// The names of the shim.
const NAMES: [&str; 2] = ["make", "gmake"];
/// The directories where a make would be.
const USUAL: [&str; 3] = ["/usr/local/bin", "/usr/bin", "/bin"];

/// Installs the shim on the path inside, for each existing make; if that fails, `make -j` is not counted.
pub(crate) fn install() {
    let Some(directory) = Path::new(PROGRAM).parent() else {
        return;
    };
    for name in NAMES {
        let is_in = |usual: &&str| Path::new(usual).join(name).exists();
        if USUAL.iter().any(is_in) {
            drop(symlink(PROGRAM, directory.join(name)));
        }
    }
}

/// Returns whether the program was started as make.
pub(crate) fn is_make(program: &OsStr) -> bool {
    Path::new(program)
        .file_name()
        .is_some_and(|name| NAMES.iter().any(|own| name == *own))
}

/// Replaces this process with the real make. Returns only if make is missing or cannot be run.
pub(crate) fn run(program: &OsStr, arguments: &[OsString]) -> ExitCode {
    let name = Path::new(program).file_name().unwrap_or(program);
    let Some(make) = real(name) else {
        say(&format!("{}: not found", name.display()));
        return ExitCode::from(127);
    };
    let mut command = Command::new(&make);
    command.arg0(program);
    let flags = host::inherited("MAKEFLAGS")
        .and_then(|flags| flags.into_string().ok())
        .unwrap_or_default();
    match joined(&make, &flags, arguments) {
        Some((flags, rest)) => command.args(rest).env("MAKEFLAGS", flags),
        None => command.args(arguments),
    };
    let error = command.exec();
    say(&format!("{}: {error}", make.display()));
    ExitCode::from(126)
}

fn say(text: &str) {
    Ui::new(UiSettings::default()).note(text);
}

/// Returns the next make of that name on the path that is not this program.
fn real(name: &OsStr) -> Option<PathBuf> {
    let own = fs::metadata("/proc/self/exe").ok()?;
    let path = host::inherited("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|candidate| {
            fs::metadata(candidate).is_ok_and(|found| {
                found.is_file() && (found.dev(), found.ino()) != (own.dev(), own.ino())
            })
        })
}

/// Returns the flags and arguments that make `make` join, if it should.
fn joined(make: &Path, flags: &str, arguments: &[OsString]) -> Option<(String, Vec<OsString>)> {
    let fifo = offered(flags)?;
    let rest = without_jobs(arguments)?;
    let said = Command::new(make)
        .arg("--version")
        .env_remove("MAKEFLAGS")
        .output()
        .ok()?;
    let version = version(&String::from_utf8_lossy(&said.stdout))?;
    let auth = if version >= (4, 4) {
        format!("--jobserver-auth=fifo:{fifo}")
    } else {
        // Opened without `O_CLOEXEC`: make inherits the descriptors.
        let open = |flag| nix::fcntl::open(fifo, flag, Mode::empty()).ok();
        let (read, write) = (open(OFlag::O_RDONLY)?, open(OFlag::O_WRONLY)?);
        let word = if version >= (4, 2) { "auth" } else { "fds" };
        format!(
            "--jobserver-{word}={},{}",
            read.into_raw_fd(),
            write.into_raw_fd()
        )
    };
    let (left, right) = flags.split_once("-- ")?;
    Some((format!("{left}-j {auth} -- {right}"), rest))
}

/// Returns the offered FIFO, unless a parent make has joined it.
fn offered(flags: &str) -> Option<&str> {
    let (left, right) = flags.split_once("-- ")?;
    if left.contains("--jobserver-") {
        return None;
    }
    right
        .split(' ')
        .find_map(|word| word.strip_prefix("--jobserver-auth=fifo:"))
}

/// Returns the arguments without those that request several jobs; `None` if they request at most one.
fn without_jobs(arguments: &[OsString]) -> Option<Vec<OsString>> {
    let mut rest = Vec::new();
    let mut several = false;
    let mut words = arguments.iter().peekable();
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    while let Some(word) = words.next() {
        let Some(text) = word.to_str() else {
            rest.push(word.clone());
            continue;
        };
        if text == "--" {
            rest.push(word.clone());
            rest.extend(words.by_ref().cloned());
            break;
        }
        let (kept, count) = match (text.strip_prefix("--jobs"), short_jobs(text)) {
            (Some(""), _) => ("", ""),
            (Some(value), _) if value.starts_with('=') => ("", &value[1..]),
            (_, Some(split)) => split,
            _ => {
                rest.push(word.clone());
                continue;
            }
        };
        let mut count = count.to_owned();
        if count.is_empty()
            && let Some(next) = words.peek().and_then(|next| next.to_str())
            && is_number(next)
        {
            next.clone_into(&mut count);
            words.next();
        }
        if !count.is_empty() && !is_number(&count) || count == "1" {
            return None;
        }
        several = true;
        if !kept.is_empty() && kept != "-" {
            rest.push(kept.into());
        }
    }
    several.then_some(rest)
}

/// Splits short options such as `-kj4` into those before `j` and its number.
fn short_jobs(text: &str) -> Option<(&str, &str)> {
    let letters = text.strip_prefix('-')?;
    for (at, letter) in letters.char_indices() {
        match letter {
            'j' => return Some((&text[..=at], &letters[at + 1..])),
            // The rest is the option's value.
            '-' | 'C' | 'f' | 'o' | 'W' | 'I' | 'l' | 'O' | 'E' => return None,
            _ => {}
        }
    }
    None
}

/// Parses the version of GNU make from its output.
fn version(text: &str) -> Option<(u32, u32)> {
    let number = text.strip_prefix("GNU Make ")?.lines().next()?;
    let mut parts = number.trim().split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rest(line: &str) -> Option<String> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        without_jobs(&words).map(|rest| {
            let rest: Vec<_> = rest.iter().map(|word| word.to_str().unwrap()).collect();
            rest.join(" ")
        })
    }

    #[test]
    fn the_wish_for_several_jobs_is_found_however_it_is_written() {
        for (line, want) in [
            ("-j8 all", "all"),
            ("-j all", "all"),
            ("all -j 8", "all"),
            ("--jobs=8 V=1 all", "V=1 all"),
            ("--jobs 8 all", "all"),
            ("--jobs all", "all"),
            ("-kj4 all", "-k all"),
            ("-C j -j3", "-C j"),
            ("-j4 -- -j5", "-- -j5"),
        ] {
            assert_eq!(rest(line).as_deref(), Some(want), "{line}");
        }
        for line in [
            "all",
            "-j1 all",
            "-j 1",
            "-fj4",
            "-- -j4",
            "--just-print",
            "-jx",
        ] {
            assert_eq!(rest(line), None, "{line}");
        }
    }

    #[test]
    fn a_fifo_is_taken_once() {
        assert_eq!(offered(" -- --jobserver-auth=fifo:/j"), Some("/j"));
        assert_eq!(offered("w -- A=b --jobserver-auth=fifo:/j"), Some("/j"));
        assert_eq!(
            offered("-j --jobserver-auth=3,4 -- --jobserver-auth=fifo:/j"),
            None
        );
        assert_eq!(offered("-j4 --jobserver-auth=fifo:/j"), None);
        assert_eq!(offered(""), None);
    }

    #[test]
    fn versions_are_gnus() {
        assert_eq!(version("GNU Make 4.4.1\nBuilt for"), Some((4, 4)));
        assert_eq!(version("GNU Make 3.82\n"), Some((3, 82)));
        assert_eq!(version("bmake"), None);
    }
}
