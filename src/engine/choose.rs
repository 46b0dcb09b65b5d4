//! Owns choosing an env's engine: the requested engine, the env's own engine, or the first that works here.

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use fs_err as fs;

use super::docker::{Contexts, Flavour, Service};
use crate::plan::resolve::Engine;
use crate::sys::error::{Kind, Result};
use crate::sys::process::Program;
use crate::sys::userns;

const DOCKER: &str = "/run/docker.sock";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sockets {
    /// The value of `DOCKER_HOST`.
    pub docker: Option<String>,
    /// Docker's contexts, used without `DOCKER_HOST`.
    pub contexts: Contexts,
    /// Podman's socket, or the value of `CONTAINER_HOST`.
    pub podman: String,
}

impl Sockets {
    /// Returns Docker's address, as Docker's own client finds it.
    fn docker(&self) -> Result<String> {
        if let Some(host) = &self.docker {
            return Ok(host.clone());
        }
        let host = self.contexts.host()?;
        Ok(host.unwrap_or_else(|| DOCKER.to_owned()))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub engine: Engine,
    /// The service's socket, for engines that are services.
    pub service: Option<PathBuf>,
    pub reason: Reason,
}

/// Why no engine works here, and the command that helps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Absence {
    pub why: String,
    pub help: Option<String>,
}

/// Why an engine was chosen; shown in a few words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The user named it.
    Asked,
    /// The env was created with it.
    MadeWith,
    /// It is the first that works here.
    Found(&'static str),
    /// No engine works here; the plan assumes this one.
    Absent(Absence),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "asked for",
            Self::MadeWith => "the env was created with it",
            Self::Found(why) => why,
            Self::Absent(_) => "no engine here",
        })
    }
}

/// Chooses an engine.
///
/// `asked` is the engine on the command line or in the configuration, `made_with` the env's engine. `nspawn` tells
/// whether systemd-nspawn can be used: it is installed, and rockenv runs as root.
pub(crate) fn choose(
    asked: Option<&str>,
    made_with: Option<(&str, Option<PathBuf>)>,
    nspawn: bool,
    sockets: &Sockets,
) -> Result<Choice> {
    let asked = asked.filter(|name| *name != "auto");
    let (engine, service, reason) = match (asked, made_with) {
        (Some(name), _) => {
            let engine = named(name)?;
            let service = match engine {
                Engine::Nspawn => None,
                Engine::Docker | Engine::Podman => Some(service_at(engine, sockets)?.socket),
            };
            (engine, service, Reason::Asked)
        }
        (None, Some((name, service))) => (named(name)?, service, Reason::MadeWith),
        (None, None) if nspawn => {
            let why = "root, and systemd-nspawn is installed";
            (Engine::Nspawn, None, Reason::Found(why))
        }
        (None, None) => first_service(sockets)?,
    };
    Ok(Choice {
        engine,
        service,
        reason,
    })
}

pub(crate) fn is_nspawn_installed() -> bool {
    Program::find("systemd-nspawn", "containers").is_ok()
}

/// Chooses an engine to plan for. If none works, falls back to the requested one or systemd-nspawn.
pub(crate) fn choose_to_plan(
    asked: Option<&str>,
    made_with: Option<(&str, Option<PathBuf>)>,
    nspawn: bool,
    sockets: &Sockets,
) -> Result<Choice> {
    match choose(asked, made_with, nspawn, sockets) {
        Err(error) if error.kind() == Kind::Unavailable => {
            let asked = asked.filter(|name| *name != "auto");
            let why = match asked {
                Some(_) => error.chain().join(": "),
                None => error.message().to_owned(),
            };
            Ok(Choice {
                engine: asked.map_or(Ok(Engine::Nspawn), named)?,
                service: None,
                reason: Reason::Absent(Absence {
                    why,
                    help: asked.and(error.help_text()).map(str::to_owned),
                }),
            })
        }
        other => other,
    }
}

/// Returns the engine that a new env would get.
pub(crate) fn engine_of_new_env(asked: Option<&str>, sockets: &Sockets) -> Result<Engine> {
    let nspawn = userns::is_root() && is_nspawn_installed();
    choose_to_plan(asked, None, nspawn, sockets).map(|choice| choice.engine)
}

/// Checks the name of an engine in a configuration.
pub(crate) fn known(name: &str) -> Result<()> {
    match name {
        "auto" => Ok(()),
        _ => named(name).map(drop),
    }
}

fn named(name: &str) -> Result<Engine> {
    Engine::ALL
        .into_iter()
        .find(|engine| engine.name() == name)
        .ok_or_else(|| {
            usage!("unknown engine `{name}`").help("one of: auto, nspawn, docker, podman")
        })
}

fn first_service(sockets: &Sockets) -> Result<(Engine, Option<PathBuf>, Reason)> {
    let why = "systemd-nspawn is not installed or needs root; this service answers";
    let mut causes = Vec::new();
    for engine in Engine::SERVICES {
        match service_at(engine, sockets) {
            Ok(service) => return Ok((engine, Some(service.socket), Reason::Found(why))),
            Err(error) => causes.push(error.chain().join(": ")),
        }
    }
    let nspawn = match is_nspawn_installed() {
        true => "needs root",
        false => "is not installed",
    };
    Err(unavailable!(
        "no engine available: systemd-nspawn {nspawn}, and neither Docker nor Podman answers"
    )
    .source(causes.join("; "))
    .help("rockenv doctor"))
}

/// Connects to the service of an engine, and checks that it is the expected one.
pub(crate) fn service_at(engine: Engine, sockets: &Sockets) -> Result<Service> {
    let (host, flavour) = match engine {
        Engine::Podman => (sockets.podman.clone(), Flavour::Podman),
        Engine::Nspawn | Engine::Docker => (sockets.docker()?, Flavour::Docker),
    };
    let path = host.strip_prefix("unix://").unwrap_or(&host);
    // Docker Desktop's containers are in a virtual machine: neither the agent's socket nor a GPU reaches them.
    if path.contains("://") || path.ends_with("/.docker/desktop/docker.sock") {
        let help = match engine {
            Engine::Podman => "unset CONTAINER_HOST".to_owned(),
            Engine::Nspawn | Engine::Docker if host.starts_with("ssh://") => {
                format!("rockenv on {host} up ...")
            }
            Engine::Nspawn | Engine::Docker => format!("DOCKER_HOST=unix://{DOCKER} rockenv ..."),
        };
        return Err(unavailable!(
            "engine `{engine}` at `{host}` is not on this machine, but rockenv mounts local directories"
        )
        .help(help));
    }
    let service = Service::connect(path.as_ref())?;
    if service.flavour != flavour {
        let error = unavailable!("at `{path}` answers {}, not {flavour}", service.flavour);
        return Err(error.help(format!("rockenv up ... --engine {}", service.flavour)));
    }
    // Root's service would leave root's files in the user's store, which the user cannot remove. For root of a user
    // namespace, uid 0 is the user, and any other owner another user.
    let is_zero = fs::metadata(path)?.uid() == 0;
    if !userns::is_root() && is_zero != nix::unistd::geteuid().is_root() {
        let error = unavailable!("{flavour} at `{path}` belongs to root; only root can use it");
        return Err(error.help(format!("sudo rockenv up ... --engine {flavour}")));
    }
    Ok(service)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> Sockets {
        Sockets {
            docker: Some("/nowhere/docker.sock".into()),
            contexts: Contexts::default(),
            podman: "unix:///nowhere/podman.sock".into(),
        }
    }

    #[test]
    fn what_was_asked_for_wins_then_what_the_env_was_made_with() {
        let of = |asked, made| choose(asked, made, true, &nowhere());
        assert_eq!(of(None, None).unwrap().engine, Engine::Nspawn);
        assert_eq!(of(Some("auto"), None).unwrap().engine, Engine::Nspawn);
        let made = || Some(("podman", Some(PathBuf::from("/p"))));
        let choice = of(None, made()).unwrap();
        assert_eq!(choice.engine, Engine::Podman);
        assert_eq!(choice.service, Some("/p".into()));
        assert_eq!(of(Some("nspawn"), made()).unwrap().engine, Engine::Nspawn);
    }

    #[test]
    fn without_any_engine_the_error_says_what_was_tried() {
        let error = choose(None, None, false, &nowhere()).unwrap_err();
        let text = error.chain().join("\n");
        assert_has!(text, "/nowhere/docker.sock");
        assert_has!(text, "/nowhere/podman.sock");
        for (asked, engine) in [(None, Engine::Nspawn), (Some("podman"), Engine::Podman)] {
            let planned = choose_to_plan(asked, None, false, &nowhere()).unwrap();
            assert_eq!(planned.engine, engine);
            let Reason::Absent(absence) = planned.reason else {
                panic!("{:?}", planned.reason);
            };
            let is_any = absence.why.starts_with("no engine available");
            assert_eq!(is_any, asked.is_none(), "{absence:?}");
        }
        let error = choose(Some("lxc"), None, true, &nowhere()).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        let local = "DOCKER_HOST=unix:///run/docker.sock rockenv ...";
        for (host, help) in [
            ("tcp://192.0.2.1:2375", local),
            ("unix:///home/me/.docker/desktop/docker.sock", local),
            ("/home/me/.docker/desktop/docker.sock", local),
            ("ssh://root@big", "rockenv on ssh://root@big up ..."),
        ] {
            let remote = Sockets {
                docker: Some(host.into()),
                ..nowhere()
            };
            let error = choose(Some("docker"), None, true, &remote).unwrap_err();
            assert_has!(error.message(), "not on this machine");
            assert_eq!(error.help_text(), Some(help));
        }
    }
}
