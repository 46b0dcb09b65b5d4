//! Owns the conversation with a Docker or Podman service: every request rockenv makes, and every way in which the
//! two differ. Podman speaks Docker's protocol; which of the two answers is asked once.
//!
//! What rockenv makes there carries the labels of [`Labels`], so that it is found again by what it is, not by memory.

mod archive;
mod container;
mod context;
mod create;
mod hold;
mod listing;
mod objects;
mod ping;
mod retry;
mod unpack;
pub use unpack::SUBCOMMAND as UNPACK;

use crate::engine::docker::ping::greet;
pub use container::{Place, State};
pub use context::Contexts;
pub(super) use hold::hold;
pub use listing::Entry;
pub use objects::{Frozen, Image, Object, What};
pub use unpack::Unpack;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bollard::ClientVersion;
use bollard::errors::Error as Refusal;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::{signals, userns};

/// How long an answer may take that needs no work.
const SOON: Duration = Duration::from_secs(30);
/// How often a long wait looks for signals.
const LOOK: Duration = Duration::from_millis(50);
/// How long a service may contradict itself about what others are making or removing.
const SETTLE: Duration = Duration::from_secs(25);
/// How soon a question that failed for that is asked again.
const AGAIN: Duration = Duration::from_millis(20);
/// How long a request may stand before that is said, or before it is made again.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a start may take, on a machine that has too much to do.
const SLOW: Duration = Duration::from_secs(600);
/// How long copying a tree may take: an import, a commit, the removal of an image.
const LATE: Duration = Duration::from_secs(3600);

/// Which program answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flavour {
    /// Docker's daemon.
    Docker,
    /// Podman's service.
    Podman,
}

impl fmt::Display for Flavour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        })
    }
}

/// The labels of an object, by name without the prefix `rockenv.`.
///
/// An image passes its labels on to containers and these to images: each container has every label, empty where
/// one does not apply, and an image has those of the container that it was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The store's root.
    pub store: String,
    /// Its id: another store may come to be at that path.
    pub id: String,
    /// Id of the env.
    pub env: String,
    /// Id of the live tree that a container is, and that an image was.
    pub tree: String,
    /// Key of the step that runs in a container, and that ran in the container that an image was.
    pub key: String,
    /// Of an image that is all there is of its step's snapshot: how many layers there were below it.
    pub whole: String,
    /// What a container is set up with; another set-up needs another container.
    pub setup: String,
}

impl Labels {
    fn pairs(&self) -> [(&'static str, &str); 7] {
        [
            ("rockenv.store", &self.store),
            ("rockenv.id", &self.id),
            ("rockenv.env", &self.env),
            ("rockenv.tree", &self.tree),
            ("rockenv.key", &self.key),
            ("rockenv.whole", &self.whole),
            ("rockenv.setup", &self.setup),
        ]
    }

    fn map(&self) -> HashMap<String, String> {
        self.pairs()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }
}

/// Is told in a sentence what is waited for.
type Tell = Box<dyn Fn(String)>;

/// A service that answers.
pub struct Service {
    client: bollard::Docker,
    runtime: Runtime,
    /// Whose end makes every wait end, and how long after it.
    starter: RefCell<Option<(OwnedFd, Duration)>>,
    /// Who is told of a request that stands.
    tell: RefCell<Option<Tell>>,
    /// The socket at which it answers.
    pub socket: PathBuf,
    /// What it is.
    pub flavour: Flavour,
    /// Its version, as it says.
    pub version: String,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("socket", &self.socket)
            .field("flavour", &self.flavour)
            .finish_non_exhaustive()
    }
}

impl Service {
    /// Connects to the service at a socket and asks what it is.
    pub fn connect(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let unreachable = |source: String| unreachable(socket, source);
        let greeting = greet(socket).map_err(unreachable)?;
        let client = |version: &ClientVersion| {
            bollard::Docker::connect_with_unix(&socket.to_string_lossy(), LATE.as_secs(), version)
                .map_err(|error| unreachable(error.to_string()))
        };
        // Old services refuse a newer version than theirs.
        let client = match greeting.protocol < *bollard::API_DEFAULT_VERSION {
            true => client(&greeting.protocol)?,
            false => client(bollard::API_DEFAULT_VERSION)?,
        };
        Ok(Self {
            client,
            runtime,
            starter: RefCell::new(None),
            tell: RefCell::new(None),
            socket: socket.to_owned(),
            flavour: greeting.flavour,
            version: greeting.version,
        })
    }

    /// Ends every wait from now on so long after the other side of a socket has closed it; `None`: no more.
    fn heed(&self, starter: Option<(OwnedFd, Duration)>) {
        *self.starter.borrow_mut() = starter;
    }

    /// Tells from now on of requests that stand.
    fn tell(&self, tell: impl Fn(String) + 'static) {
        *self.tell.borrow_mut() = Some(Box::new(tell));
    }

    fn lacks(&self, what: &str) -> Error {
        Error::not_found(format!(
            "cannot {what}: {} does not have it any more",
            self.flavour
        ))
        .help("rockenv fsck")
    }

    /// Waits for an answer; `what` completes "cannot ...".
    fn ask<T>(
        &self,
        limit: Duration,
        what: &str,
        request: impl Future<Output = std::result::Result<T, Refusal>>,
    ) -> Result<T> {
        self.found(limit, what, request)?
            .ok_or_else(|| self.lacks(what))
    }

    /// Waits for an answer; `None` where the object is not there.
    fn found<T>(
        &self,
        limit: Duration,
        what: &str,
        request: impl Future<Output = std::result::Result<T, Refusal>>,
    ) -> Result<Option<T>> {
        let starter = self.starter.borrow();
        let answer = self.runtime.block_on(async {
            tokio::select! {
                answer = tokio::time::timeout(limit, request) => Some(answer),
                () = interrupted(starter.as_ref()) => None,
                () = self.lose_patience(what) => None,
            }
        });
        // Whoever took the signal reads it, and says which it was.
        let Some(answer) = answer else {
            return Err(Error::new(
                Kind::Signal(nix::libc::SIGINT),
                format!("interrupted: cannot {what}"),
            ));
        };
        match answer {
            Err(_) => Err(Error::unavailable(format!(
                "cannot {what}: {} did not answer within {} s",
                self.flavour,
                limit.as_secs()
            ))
            .help(restart(self.flavour))),
            Ok(Ok(value)) => Ok(Some(value)),
            Ok(Err(refusal)) if is_absent(&refusal) => Ok(None),
            Ok(Err(refusal)) => Err(self.error(&refusal)).context(|| format!("cannot {what}")),
        }
    }

    /// Says after a while what is waited for, and goes on waiting.
    async fn lose_patience(&self, what: &str) {
        tokio::time::sleep(PATIENCE).await;
        if let Some(tell) = &*self.tell.borrow() {
            tell(format!(
                "{} takes longer than {} s to {what}",
                self.flavour,
                PATIENCE.as_secs()
            ));
        }
        std::future::pending::<()>().await;
    }

    fn error(&self, refusal: &Refusal) -> Error {
        let (kind, message) = match refusal {
            Refusal::DockerResponseServerError {
                status_code,
                message,
            } => (
                Kind::Unexpected,
                format!(
                    "{} answered {status_code}: {}",
                    self.flavour,
                    message.trim()
                ),
            ),
            Refusal::JsonDataError { message, .. } => (
                Kind::Unexpected,
                format!(
                    "{} gave an answer that makes no sense: {message}",
                    self.flavour
                ),
            ),
            Refusal::RequestTimeoutError => (
                Kind::Unavailable,
                format!("{} does not answer", self.flavour),
            ),
            other => (
                Kind::Unavailable,
                format!("{} broke the connection off: {other}", self.flavour),
            ),
        };
        let error = Error::new(kind, message);
        if kind == Kind::Unavailable {
            return error.help(restart(self.flavour));
        }
        error
    }
}

/// Asks a question that changes nothing until its answer is not one of a moment between two states.
async fn settled<T: DeserializeOwned, F: Future<Output = std::result::Result<T, Refusal>>>(
    question: impl Fn() -> F,
) -> std::result::Result<T, Refusal> {
    let deadline = Instant::now() + SETTLE;
    loop {
        let answer = question().await;
        if let Err(Refusal::JsonDataError { contents, .. }) = &answer
            && let Some(understood) = in_dockers_words(contents)
        {
            return Ok(understood);
        }
        match answer {
            Err(refusal) if is_passing(&refusal) && Instant::now() < deadline => {
                tokio::time::sleep(AGAIN).await;
            }
            answer => return answer,
        }
    }
}

/// Returns whether an answer may come from a moment between two states, which Podman does not hide: it looks at a
/// process that ends meanwhile, or lists first and fails where one of the listed is gone by then.
fn is_passing(refusal: &Refusal) -> bool {
    match refusal {
        Refusal::JsonDataError { .. } => true,
        Refusal::DockerResponseServerError {
            status_code: 500,
            message,
        } => [
            "no such process",
            "not known",
            "no such container",
            // Of an image that is being removed, whichever one was asked for.
            "locating item named",
        ]
        .iter()
        .any(|passing| message.contains(passing)),
        _ => false,
    }
}

/// Reads an answer with a state of containers that Docker has no word for: to Podman one is "stopped" that has ended and was
/// not cleaned up after, which may take long where there is no root. `None` where that is not what is wrong with it.
fn in_dockers_words<T: DeserializeOwned>(answer: &str) -> Option<T> {
    let mut answer: Value = serde_json::from_str(answer).ok()?;
    let containers = match &mut answer {
        Value::Array(all) => all.iter_mut().collect(),
        one => vec![one],
    };
    for container in containers {
        let state = container.get_mut("State")?;
        let state = match state.is_object() {
            true => state.get_mut("Status")?,
            false => state,
        };
        if *state == "stopped" {
            *state = "exited".into();
        }
    }
    serde_json::from_value(answer).ok()
}

/// Ends when a signal has come or the starter is gone for so long; never where there is none, and signals end the process as usual.
async fn interrupted(starter: Option<&(OwnedFd, Duration)>) {
    let grace = starter.map_or(Duration::ZERO, |(_, grace)| *grace);
    let starter = starter.map(|(socket, _)| socket.as_fd());
    let watched: Vec<_> = signals::taken().into_iter().chain(starter).collect();
    if watched.is_empty() {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(LOOK).await;
        let mut fds: Vec<_> = watched
            .iter()
            .map(|fd| PollFd::new(*fd, PollFlags::POLLIN))
            .collect();
        if matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..)) {
            return tokio::time::sleep(grace).await;
        }
    }
}

/// Returns whether the service does not have what was asked for.
fn is_absent(refusal: &Refusal) -> bool {
    let Refusal::DockerResponseServerError {
        status_code,
        message,
    } = refusal
    else {
        return false;
    };
    // Podman takes the id of an image that it does not have for a bad name.
    *status_code == 404 || message.contains("cannot specify 64-byte hexadecimal strings")
}

fn unreachable(socket: &Path, source: String) -> Error {
    let podman = socket.to_string_lossy().contains("podman");
    let help = if source.contains("ermission denied") {
        "sudo usermod -aG docker \"$USER\", then log in again"
    } else {
        restart(if podman {
            Flavour::Podman
        } else {
            Flavour::Docker
        })
    };
    Error::unavailable(format!("no service answers at `{}`", socket.display()))
        .source(source)
        .help(help)
}

/// Returns the command that starts the service again.
fn restart(flavour: Flavour) -> &'static str {
    let root = userns::is_root();
    match (flavour, root) {
        (Flavour::Docker, _) => "sudo systemctl restart docker",
        (Flavour::Podman, true) => "systemctl restart podman.socket",
        (Flavour::Podman, false) => "systemctl --user restart podman.socket",
    }
}

#[cfg(test)]
mod tests {
    use bollard::models::{ContainerInspectResponse, ContainerSummary};

    use super::*;

    #[test]
    fn what_podman_calls_stopped_has_ended() {
        let one = |state| {
            format!(
                r#"{{ "Id": "a", "State": {{ "Status": "{state}", "Running": false, "ExitCode": 3 }} }}"#
            )
        };
        let read = |text: &str| in_dockers_words::<ContainerInspectResponse>(text);
        let found = read(&one("stopped")).unwrap().state.unwrap();
        assert_eq!((found.running, found.exit_code), (Some(false), Some(3)));
        assert!(serde_json::from_str::<ContainerInspectResponse>(&one("stopped")).is_err());
        let all = r#"[{ "Id": "a", "State": "running" }, { "Id": "b", "State": "stopped" }]"#;
        let found = in_dockers_words::<Vec<ContainerSummary>>(all).unwrap();
        assert_eq!(found[1].id.as_deref(), Some("b"));
        for other in [&one("unheard of"), "[1]", "{}", "<html>"] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn what_others_are_removing_is_no_answer() {
        let says = |status_code, message: &str| Refusal::DockerResponseServerError {
            status_code,
            message: message.to_owned(),
        };
        let removed = "failed to convert ImageData to ImageInspect '26e6': locating item named \"manifest\" for image with ID \"adbd\": file does not exist";
        assert!(is_passing(&says(500, removed)));
        assert!(!is_passing(&says(404, removed)));
        assert!(!is_passing(&says(500, "no space left on device")));
    }
}
