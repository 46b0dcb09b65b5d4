//! Owns the connection to another machine: ssh with the user's configuration.

use std::fmt;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::str::FromStr;

use nix::sys::signal::Signal;

use crate::sys::error::{Result, ResultExt as _};
use crate::sys::process::end_with_parent;
use crate::sys::shell::quoted;

/// ssh's own exit code for a failed connection.
const SSH_FAILED: i32 = 255;
/// Line that marks the start of a script's output, because a login shell may print text first.
const BEGIN: &str = "rockenv: output of the script";
/// Maximum length of a line kept while waiting for `BEGIN`.
const LONGEST_LINE: u64 = 1 << 10;

/// A machine reachable by ssh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
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
            // A bare IPv6 address contains colons, so a port after it requires brackets.
            Some((host, port)) if host.ends_with(']') || !host.contains(':') => {
                let port = port
                    .parse()
                    .map_err(|_| format!("`{port}` is not a port"))?;
                (host, Some(port))
            }
            _ => (rest, None),
        };
        let host = host.replace(['[', ']'], "");
        // ssh would take a leading `-` as an option.
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

#[derive(Debug)]
pub(crate) struct SshConnection<'a> {
    pub(crate) machine: &'a Machine,
    /// The ssh program and its options.
    pub(crate) ssh: &'a [String],
}

impl Machine {
    /// Returns the machine's URL as the user types it.
    pub(crate) fn url(&self) -> String {
        let (user, host) = match self.host.rsplit_once('@') {
            Some((user, host)) => (format!("{user}@"), host),
            None => (String::new(), self.host.as_str()),
        };
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host.to_owned(),
        };
        let port = self.port.map(|port| format!(":{port}"));
        format!("ssh://{user}{host}{}", port.unwrap_or_default())
    }
}

impl SshConnection<'_> {
    /// Prepares a shell script to run on the machine, with `more` options for ssh; `words` are its arguments.
    pub(crate) fn script(&self, more: &[&str], script: &str, words: &[&str]) -> Result<Command> {
        let (program, options) = self
            .ssh
            .split_first()
            .ok_or_else(|| invalid!("ROCKENV_SSH is empty").help("unset ROCKENV_SSH"))?;
        let mut command = Command::new(program);
        command.args(options).args(more);
        // The user's configuration for logins does not apply to a script. ssh takes the first value of an option.
        command.args(["-o", "RequestTTY=no", "-o", "RemoteCommand=none"]);
        if let Some(port) = self.machine.port {
            command.arg("-p").arg(port.to_string());
        }
        let text = for_any_shell(script, words);
        command.arg("--").arg(&self.machine.host).arg(text);
        Ok(command)
    }

    /// Prepares a script whose output is to be read through [`output`].
    pub(crate) fn script_with_output(
        &self,
        more: &[&str],
        script: &str,
        words: &[&str],
    ) -> Result<Command> {
        let script = format!("printf '\\n%s\\n' '{BEGIN}'\n{script}");
        let mut command = self.script(more, &script, words)?;
        command.stdout(Stdio::piped());
        Ok(command)
    }

    /// Starts ssh. It ends when rockenv ends, and so does the command on the other machine.
    pub(crate) fn start(&self, mut command: Command) -> Result<Child> {
        end_with_parent(&mut command, Signal::SIGTERM, None, false);
        command.spawn().map_err(|error| {
            let program = command.get_program().to_string_lossy();
            let (message, help) = match &*program {
                "ssh" => (
                    format!("cannot start ssh to {}", self.machine),
                    "install ssh (package openssh-client, openssh-clients or openssh)",
                ),
                named => (
                    format!("cannot start `{named}`, the program in ROCKENV_SSH"),
                    "unset ROCKENV_SSH, or set it to an ssh command: ROCKENV_SSH='ssh -i KEY'",
                ),
            };
            unavailable!("{message}").source(error).help(help)
        })
    }

    /// Returns whether ssh itself failed or was killed by a signal.
    pub(crate) fn is_failure(status: ExitStatus) -> bool {
        matches!(status.code(), Some(SSH_FAILED) | None)
    }

    /// Turns ssh's exit status into a result.
    pub(crate) fn judge(&self, what: &str, status: ExitStatus) -> Result<()> {
        match status.code() {
            Some(0) => Ok(()),
            Some(SSH_FAILED) => Err(unavailable!(
                "cannot reach {} by ssh, or the connection was lost",
                self.machine
            )
            .help(self.by_hand())),
            _ => Err(unavailable!("cannot {what} on {}", self.machine)),
        }
    }

    /// Returns the command that tries the connection.
    fn by_hand(&self) -> String {
        let words: Vec<_> = self.ssh.iter().map(|word| quoted(word)).collect();
        format!("{} {} true", words.join(" "), quoted(&self.machine.url()))
    }

    /// Fails for a script that did not begin: the login shell may be another program, such as an SFTP server.
    pub(crate) fn not_begun<T>(&self, what: &str, status: ExitStatus) -> Result<T> {
        // 126, 127: a program is missing, and its shell has named it.
        if let Some(126 | 127 | SSH_FAILED) | None = status.code() {
            self.judge(what, status)?;
        }
        Err(unavailable!(
            "the login shell on {} ends before it runs the command of rockenv",
            self.machine
        )
        .help(self.by_hand()))
    }

    /// Runs a script and connects `talk` to its input and output.
    pub(crate) fn run_script<T>(
        &self,
        what: &str,
        script: &str,
        words: &[&str],
        talk: impl FnOnce(ChildStdin, BufReader<ChildStdout>) -> io::Result<T>,
    ) -> Result<T> {
        let mut command = self.script_with_output(&[], script, words)?;
        command.stdin(Stdio::piped());
        let mut child = self.start(command)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(unexpected!("ssh has no input or output"));
        };
        let talked = output(stdout).map(|stdout| stdout.map(|stdout| talk(stdin, stdout)));
        let talked = match talked {
            Ok(Some(talked)) => talked,
            Ok(None) => return self.not_begun(what, child.wait()?),
            Err(error) => Err(error),
        };
        let is_theirs = |error: &io::Error| {
            matches!(
                error.kind(),
                ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof
            )
        };
        match &talked {
            // ssh's own error takes precedence: a broken pipe is only its consequence.
            Err(error) if !is_theirs(error) => {
                child.kill()?;
                child.wait()?;
            }
            _ => self.judge(what, child.wait()?)?,
        }
        talked.context(|| format!("cannot {what} on {}", self.machine))
    }
}

/// Returns the output of a script, without text that the login shell printed before it; `None` if the script did not
/// begin.
pub(crate) fn output<R: Read>(from: R) -> io::Result<Option<BufReader<R>>> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while line != format!("{BEGIN}\n").as_bytes() {
        line.clear();
        if (&mut from)
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut line)?
            == 0
        {
            return Ok(None);
        }
    }
    Ok(Some(from))
}

/// Returns a command line that runs a script in a plain shell, whatever the user's login shell. csh accepts no
/// multi-line text, and expands `!` to earlier commands even in quotes.
fn for_any_shell(script: &str, words: &[&str]) -> String {
    use base64::Engine as _;
    let words: Vec<_> = words.iter().map(|word| quoted(word)).collect();
    let text = format!("set -- {}\n{script}\n", words.join(" "));
    let text = base64::engine::general_purpose::STANDARD.encode(text);
    format!("exec sh -c 'text=$(echo {text} | base64 -d) || exit 126; eval \"$text\"' sh")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_begins_after_that_of_the_login_shell() {
        let read = |text: &str| {
            let mut rest = String::new();
            let mut from = output(text.as_bytes()).unwrap()?;
            from.read_to_string(&mut rest).unwrap();
            Some(rest)
        };
        let script = format!("\n{BEGIN}\na\nb");
        for printed in ["", "welcome", "two\nlines\n", &"x".repeat(5000)] {
            let text = format!("{printed}{script}");
            assert_eq!(read(&text).unwrap(), "a\nb", "{printed}");
            assert_eq!(read(printed), None);
        }
    }

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
        for text in ["ssh://me@[2001:db8::1]", "me@2001:db8::1"] {
            assert_eq!(of(text), machine("me@2001:db8::1", None));
        }
        for text in [
            "ssh://me@big:2222",
            "ssh://me@[2001:db8::1]",
            "ssh://[2001:db8::1]:22",
        ] {
            assert_eq!(text.parse::<Machine>().unwrap().url(), text);
        }
        let connection = SshConnection {
            machine: &of("ssh://me@big:2222").unwrap(),
            ssh: &["ssh", "-i", "my key"].map(str::to_owned),
        };
        let help = "ssh -i 'my key' ssh://me@big:2222 true";
        assert_eq!(connection.by_hand(), help);
        for text in "|ssh://|-oProxyCommand=x|ssh://-x|a b|big:x|ssh://big/store".split('|') {
            assert!(of(text).is_err(), "{text}");
        }
    }
}
