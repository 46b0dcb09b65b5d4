//! Owns the communication with a Docker or Podman service: every request that rockenv makes, and every difference
//! between the two. Podman speaks Docker's protocol; the kind of service is determined once, on connecting.
//!
//! Every object that rockenv creates there carries the labels of [`Labels`]. rockenv finds objects by them, not by a
//! record.

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
pub(crate) use unpack::SUBCOMMAND as UNPACK;

use crate::engine::docker::ping::ping;
pub(crate) use container::ContainerTree;
pub(crate) use context::Contexts;
pub(super) use hold::hold;
pub(crate) use listing::ArchiveEntry;
pub(crate) use objects::{EngineImage, Frozen, Object, ObjectFilter};
pub(crate) use unpack::Unpack;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bollard::ClientVersion;
use bollard::errors::Error as Refusal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::engine::hold::FromHolder;
use crate::plan::ids::{EnvId, StepKey, TreeId};
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::readable::readable;
use crate::sys::{frames, signals, userns};

/// Limit for answers that need no work, but may wait for a service that is busy with other work.
const SOON: Duration = Duration::from_secs(120);
/// How often a long wait checks for signals.
const LOOK: Duration = Duration::from_millis(50);
/// How long a service may contradict itself about objects that other clients are creating or removing.
const SETTLE: Duration = Duration::from_secs(25);
/// Interval for repeating a request after such a contradiction.
const AGAIN: Duration = Duration::from_millis(20);
/// How long a request may stay unanswered before that is reported, or before it is repeated.
const PATIENCE: Duration = Duration::from_secs(10);
/// Limit for a start on an overloaded machine.
const SLOW: Duration = Duration::from_secs(600);
/// Limit for copying a tree: an import, a commit, the removal of an image.
const LATE: Duration = Duration::from_secs(3600);

/// The kind of service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flavour {
    Docker,
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
/// Containers inherit an image's labels and vice versa. So every container has every label, with an empty value if it
/// does not apply, and an image has the labels of its container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The store's root.
    pub store: String,
    /// The store's id, because a different store may appear at that path.
    pub id: String,
    pub env: Option<EnvId>,
    /// Id of the live tree that a container holds, or that an image was frozen from.
    pub tree: Option<TreeId>,
    /// Key of the step that runs in a container, or ran in an image's container.
    pub key: Option<StepKey>,
    /// The setup of a container; a changed setup needs a new container.
    pub setup: String,
}

impl Labels {
    fn map(&self) -> HashMap<String, String> {
        let pairs: [(&str, &str); 7] = [
            ("rockenv.store", &self.store),
            ("rockenv.id", &self.id),
            ("rockenv.env", self.env.as_deref().unwrap_or_default()),
            ("rockenv.tree", self.tree.as_deref().unwrap_or_default()),
            ("rockenv.key", self.key.as_deref().unwrap_or_default()),
            // Replaces that of the image below. `Service::commit` sets it for the complete snapshot of a step: the
            // number of layers below.
            ("rockenv.whole", ""),
            ("rockenv.setup", &self.setup),
        ];
        pairs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }
}

pub struct Service {
    client: bollard::Docker,
    runtime: Runtime,
    /// The socket of a holder's starter, which receives reports of unanswered requests.
    starter: Option<UnixStream>,
    /// How long waits continue after the starter is gone; `None`: to their own end.
    grace: Option<Duration>,
    pub socket: PathBuf,
    pub flavour: Flavour,
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
    /// Connects to the service at a socket and determines its kind.
    pub fn connect(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let unreachable = |source: String| unreachable(socket, source);
        let greeting = ping(socket).map_err(unreachable)?;
        let client = |version: &ClientVersion| {
            bollard::Docker::connect_with_unix(&socket.to_string_lossy(), LATE.as_secs(), version)
                .map_err(|error| unreachable(error.to_string()))
        };
        // Old services refuse a protocol version newer than their own.
        let client = match greeting.protocol < *bollard::API_DEFAULT_VERSION {
            true => client(&greeting.protocol)?,
            false => client(bollard::API_DEFAULT_VERSION)?,
        };
        Ok(Self {
            client,
            runtime,
            starter: None,
            grace: None,
            socket: socket.to_owned(),
            flavour: greeting.flavour,
            version: greeting.version,
        })
    }

    fn lacks(&self, what: &str) -> Error {
        not_found!("cannot {what}: {} no longer has it", self.flavour).help("rockenv fsck")
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

    /// Waits for an answer; `None` if the object does not exist.
    fn found<T>(
        &self,
        limit: Duration,
        what: &str,
        request: impl Future<Output = std::result::Result<T, Refusal>>,
    ) -> Result<Option<T>> {
        let starter = self.starter.as_ref().zip(self.grace);
        let answer = self.runtime.block_on(async {
            tokio::select! {
                answer = tokio::time::timeout(limit, request) => Some(answer),
                () = interrupted(starter) => None,
                () = self.lose_patience(what) => None,
            }
        });
        // The owner of the signal handler reads the signal and reports which one it was.
        let Some(answer) = answer else {
            let kind = Kind::Signal(nix::libc::SIGINT);
            return Err(Error::new(kind, format!("interrupted: cannot {what}")));
        };
        match answer {
            Err(_) => Err(unavailable!(
                "cannot {what}: {} did not answer within {} s",
                self.flavour,
                limit.as_secs()
            )
            .help(restart(self.flavour))),
            Ok(Ok(value)) => Ok(Some(value)),
            Ok(Err(refusal)) if is_absent(&refusal) => Ok(None),
            Ok(Err(refusal)) => Err(self.error(&refusal)).context(|| format!("cannot {what}")),
        }
    }

    /// Reports after a while that the request is slow; never returns.
    async fn lose_patience(&self, what: &str) {
        tokio::time::sleep(PATIENCE).await;
        if let Some(starter) = &self.starter {
            let (flavour, patience) = (self.flavour, PATIENCE.as_secs());
            let message = format!("{flavour} is taking longer than {patience} s to {what}");
            // A starter that is gone needs no message.
            drop(frames::send(starter, &FromHolder::Waits(message), &[]));
        }
        std::future::pending::<()>().await;
    }

    fn error(&self, refusal: &Refusal) -> Error {
        let flavour = self.flavour;
        if let Some((status, message)) = answered(refusal) {
            return unexpected!("{flavour} answered {status}: {}", message.trim());
        }
        let error = match refusal {
            Refusal::JsonDataError { message, .. } => {
                return unexpected!("{flavour} sent an invalid answer: {message}");
            }
            Refusal::RequestTimeoutError => unavailable!("{flavour} does not answer"),
            other => unavailable!("{flavour} closed the connection: {other}"),
        };
        error.help(restart(flavour))
    }
}

/// Repeats a read-only request until its answer does not come from a transient state.
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

/// Returns whether an answer may come from a transient state. Podman does not hide these: it examines a process that
/// exits meanwhile, or fails because a container that it listed is gone. Nor does Docker with containerd's image store.
fn is_passing(refusal: &Refusal) -> bool {
    let messages = [
        "no such process",
        "not known",
        "no such container",
        // From an image that is being removed, even if the request was about another one.
        "locating item named",
        "data changed during operation",
    ];
    matches!(refusal, Refusal::JsonDataError { .. })
        || answered(refusal).is_some_and(|(status, message)| {
            status == 500 && messages.iter().any(|passing| message.contains(passing))
        })
}

/// Parses an answer with a container state unknown to Docker: Podman reports "stopped" for a container that exited and
/// was not cleaned up yet, which may take long without root. Returns `None` if the answer is invalid for another
/// reason.
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

/// Ends once a signal has arrived or the starter is gone, after the grace period. Never ends if there is no starter and
/// signals end the process as usual.
async fn interrupted(starter: Option<(&UnixStream, Duration)>) {
    let grace = starter.map_or(Duration::ZERO, |(_, grace)| grace);
    let starter = starter.map(|(socket, _)| socket.as_fd());
    let watched = [signals::taken(), starter];
    if watched.iter().flatten().count() == 0 {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(LOOK).await;
        if readable(watched, Some(Duration::ZERO)).is_ok_and(|ready| ready.contains(&true)) {
            return tokio::time::sleep(grace).await;
        }
    }
}

/// Returns the status and the message of a refusal that comes from the service itself.
fn answered(refusal: &Refusal) -> Option<(u16, &str)> {
    match refusal {
        Refusal::DockerResponseServerError {
            status_code,
            message,
        } => Some((*status_code, message)),
        _ => None,
    }
}

/// Returns whether the service lacks the object.
fn is_absent(refusal: &Refusal) -> bool {
    answered(refusal).is_some_and(|(status, message)| {
        // Podman takes the id of an image that it lacks for an invalid name.
        status == 404 || message.contains("cannot specify 64-byte hexadecimal strings")
    })
}

fn unreachable(socket: &Path, source: String) -> Error {
    let podman = socket.to_string_lossy().contains("podman");
    let help = match (podman, source.contains("ermission denied")) {
        // The `docker` group does not help: rockenv uses root's service only as root.
        (_, true) => "sudo rockenv ...",
        (true, false) => restart(Flavour::Podman),
        (false, false) => restart(Flavour::Docker),
    };
    unavailable!("no service answers at `{}`", socket.display())
        .source(source)
        .help(help)
}

/// Returns the command that starts the service again.
fn restart(flavour: Flavour) -> &'static str {
    restart_on(
        flavour,
        userns::is_root(),
        Path::new("/run/systemd/system").is_dir(),
        Path::new("/etc/init.d/docker").exists(),
    )
}

/// Returns the command of [`restart`] for a machine with or without systemd and init scripts.
fn restart_on(flavour: Flavour, root: bool, systemd: bool, init: bool) -> &'static str {
    match (flavour, root, systemd) {
        (Flavour::Docker, true, true) => "systemctl restart docker",
        (Flavour::Docker, false, true) => "sudo systemctl restart docker",
        (Flavour::Docker, true, false) if init => "service docker restart",
        (Flavour::Docker, false, false) if init => "sudo service docker restart",
        (Flavour::Docker, true, false) => "dockerd &",
        (Flavour::Docker, false, false) => "sudo dockerd &",
        (Flavour::Podman, true, true) => "systemctl restart podman.socket",
        (Flavour::Podman, false, true) => "systemctl --user restart podman.socket",
        (Flavour::Podman, true, false) => {
            "podman system service --time=0 unix:///run/podman/podman.sock &"
        }
        (Flavour::Podman, false, false) => "podman system service --time=0 &",
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use bollard::models::{ContainerInspectResponse, ContainerSummary};

    use super::*;

    /// Serves one request after another at a socket: each must contain a text, and gets a status and a body.
    pub(in crate::engine) fn serve<const N: usize>(
        socket: &Path,
        answers: [(&'static str, &'static str, &'static str); N],
    ) {
        let service = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            for ((asked, status, body), request) in answers.iter().zip(service.incoming()) {
                let mut request = request.unwrap();
                let mut text = [0; 4096];
                let length = request.read(&mut text).unwrap();
                assert_has!(String::from_utf8_lossy(&text[..length]), asked);
                let fields = "Api-Version: 1.55\r\nConnection: close";
                let (head, length) = (format!("HTTP/1.1 {status}\r\n{fields}"), body.len());
                let answer = format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}");
                request.write_all(answer.as_bytes()).unwrap();
            }
        });
    }

    #[test]
    fn no_machine_is_told_to_use_what_it_lacks() {
        for flavour in [Flavour::Docker, Flavour::Podman] {
            for (root, systemd, init) in [
                (true, false, true),
                (true, false, false),
                (false, false, true),
                (false, true, false),
            ] {
                let command = restart_on(flavour, root, systemd, init);
                assert_eq!(command.contains("systemctl"), systemd, "{command}");
                assert!(!root || !command.contains("sudo"), "{command}");
            }
        }
    }

    #[test]
    fn a_user_who_may_not_use_root_s_service_is_told_to_be_root() {
        for socket in ["/run/docker.sock", "/run/podman/podman.sock"] {
            let denied = unreachable(socket.as_ref(), "Permission denied".to_owned());
            assert_eq!(denied.help_text(), Some("sudo rockenv ..."));
        }
    }

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
        let changed = "consistency error: data changed during operation, retry";
        assert!(is_passing(&says(500, changed)));
        assert!(!is_passing(&says(404, removed)));
        assert!(!is_passing(&says(500, "no space left on device")));
    }
}
