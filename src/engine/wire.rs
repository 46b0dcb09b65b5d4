//! Owns the messages between rockenv's processes about a container.
//!
//! There are three parties: the *client* (`up`, `exec`, `shell`), the *holder* (one process outside that owns a
//! container's life) and the *agent* (rockenv's binary inside, which starts commands).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::BuildUser;

/// A word of a command, which need not be UTF-8.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Word {
    Text(String),
    Bytes(Vec<u8>),
}

impl From<OsString> for Word {
    fn from(word: OsString) -> Self {
        word.into_string()
            .map_or_else(|word| Self::Bytes(word.into_vec()), Self::Text)
    }
}

impl AsRef<OsStr> for Word {
    fn as_ref(&self) -> &OsStr {
        match self {
            Self::Text(text) => text.as_ref(),
            Self::Bytes(bytes) => OsStr::from_bytes(bytes),
        }
    }
}

/// A command to run inside a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
pub(crate) struct Command {
    /// Program and arguments; a program without a slash is looked up in the command's own `PATH`.
    pub argv: Vec<Word>,
    /// The whole environment; nothing is inherited.
    pub env: Vec<(String, String)>,
    /// Working directory inside.
    pub cwd: String,
    /// User id inside and outside: there is no mapping.
    pub uid: u32,
    pub gid: u32,
    /// Supplementary group ids; `None`: the agent's groups, some of which may have no id in its namespace.
    pub groups: Option<Vec<u32>>,
    /// Sets `no_new_privs`, so that setuid programs inside gain nothing.
    pub no_new_privs: bool,
    /// Allocates a pseudo terminal inside; [`Reply::Started`] returns its other end.
    pub tty: bool,
}

/// Requests of a client to the agent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Starts a command. The frame carries stdin, stdout and stderr; with `tty` only a stderr that is no terminal.
    Run(Command),
    /// Sends a signal to the command's process group.
    Signal(i32),
    /// Ends the container if it only waits for another command; the answer is whether it does.
    Retire,
}

/// Answers of the agent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The command is about to start. It may run from now on, and end the agent before the next answer.
    Starting,
    /// The command runs; with `tty` the frame carries the terminal's other end.
    Started,
    /// The signal was sent: the agent answers, whatever the command does.
    Signalled,
    /// The command could not be started, with the exit code that shells use (126 or 127).
    NotStarted {
        /// 127 if the program is missing, 126 if it cannot be run.
        code: u8,
        /// The failed operation, and the kernel's message.
        message: String,
    },
    Exited {
        /// Exit code, or 128 plus the signal's number.
        code: u8,
        signal: Option<i32>,
        then: Then,
    },
}

/// The state of a container after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Then {
    /// Another command, or the container's starter, still uses it.
    Stays,
    /// It waits for another command, for the time with this number.
    Waits(u64),
    /// It ends now: no other command uses it, or it was told to end.
    Ends,
}

/// Messages from the holder to the agent, over their own stream. The end of the stream means: stop everything.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToAgent {
    /// First frame; carries the listening socket.
    Listen {
        /// The user to add to the tree, if that was not done from outside.
        user: Option<BuildUser>,
    },
    /// Exit once no command runs and none has arrived for this long; answered by [`FromAgent::Remaining`] or
    /// [`FromAgent::Idle`].
    Drain(Duration),
}

/// Messages from the agent to the holder.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromAgent {
    /// The agent runs and accepts commands.
    Ready,
    /// How many commands still run; the container ends with the last, or is used again.
    Remaining(usize),
    /// No command runs, and the container waits for another; counts the waits so far.
    Idle(u64),
}
