//! Owns what rockenv's processes say to each other about a container.
//!
//! Three parties speak: the *client* (`up`, `exec`, `shell`), the *holder* (one process outside that owns a
//! container's life) and the *agent* (rockenv's binary inside, which starts commands).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::BuildUser;

/// A command to run inside a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; a program without a slash is looked up in the command's own `PATH`.
    pub argv: Vec<String>,
    /// The whole environment, nothing is inherited.
    pub env: Vec<(String, String)>,
    /// Working directory inside.
    pub cwd: String,
    /// User id inside (and outside: there is no mapping).
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary group ids; `None`: those that the agent has, some of which may have no number in its namespace.
    pub groups: Option<Vec<u32>>,
    /// Sets `no_new_privs`, so that setuid programs inside gain nothing.
    pub no_new_privs: bool,
    /// Allocates a pseudo terminal inside; its other end comes back with [`Reply::Started`].
    pub tty: bool,
}

/// What a client asks of the agent.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Starts a command; without `tty` the frame carries stdin, stdout and stderr.
    Run(Command),
    /// Sends a signal to the command's process group.
    Signal(i32),
    /// Ends the container where it only waits for another command; answered by whether it does.
    Retire,
}

/// What the agent answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The command runs; with `tty` the frame carries the terminal's other end.
    Started,
    /// The command could not be started, with the exit code that shells use (126 or 127).
    NotStarted {
        /// 127 where the program is absent, 126 where it cannot be run.
        code: u8,
        /// What could not be done, and what the kernel said.
        message: String,
    },
    /// The command ended.
    Exited {
        /// Exit code, or 128 plus the signal's number.
        code: u8,
        /// The signal that ended it.
        signal: Option<i32>,
        /// The container ends now, for it was the last command in it and nobody else wants it.
        last: bool,
    },
}

/// What the holder tells the agent, over a stream of their own. Its end means: stop everything.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToAgent {
    /// First frame; carries the listening socket.
    Listen {
        /// The user to make known in the tree, where nobody did so from outside.
        user: Option<BuildUser>,
    },
    /// Stop when no command runs and none came for so long; answered by [`FromAgent::Remaining`] or
    /// [`FromAgent::Idle`].
    Drain(Duration),
}

/// What the agent tells the holder.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromAgent {
    /// The agent runs and accepts commands.
    Ready,
    /// How many commands still run; the container ends with the last, or is used again.
    Remaining(usize),
    /// None, and the container waits for another.
    Idle,
}
