//! Owns the Docker and Podman section of `doctor`.

use serde::Serialize;

use super::{Check, Facts, missing, note, ok};
use crate::engine::choose::{Sockets, service_at};
use crate::plan::resolve::Engine;
use crate::sys::process::Program;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ServiceFacts {
    pub engine: Engine,
    /// The engine's program is installed.
    pub installed: bool,
    /// The service's version, if it answers.
    pub version: Option<String>,
    /// Why the service cannot be used, and the command that fixes it.
    pub problem: Option<(String, String)>,
}

impl ServiceFacts {
    /// Makes a service that answers, for tests.
    #[cfg(test)]
    pub(super) fn sample(engine: Engine) -> Self {
        Self {
            engine,
            installed: true,
            version: Some("28.1".to_owned()),
            problem: None,
        }
    }

    pub(super) fn probe(sockets: &Sockets) -> Vec<Self> {
        let ask = |engine| {
            let found = service_at(engine, sockets);
            let is_installed = || Program::find(program(engine), "containers").is_ok();
            let problem = |error| super::probe::problem(error, "rockenv doctor");
            Self {
                engine,
                installed: found.is_ok() || is_installed(),
                problem: found.as_ref().err().map(problem),
                version: found.ok().map(|service| service.version),
            }
        };
        Engine::SERVICES.map(ask).to_vec()
    }

    /// Returns whether the service answers, and is new enough.
    pub(super) fn is_supported(&self) -> bool {
        let version = self.version.as_deref();
        version.is_some_and(|version| !is_older(version, oldest(self.engine)))
    }
}

fn program(engine: Engine) -> &'static str {
    match engine {
        Engine::Docker => "dockerd",
        Engine::Podman => "podman",
        Engine::Nspawn => "systemd-nspawn",
    }
}

fn oldest(engine: Engine) -> (u32, u32) {
    match engine {
        Engine::Docker => (20, 10),
        Engine::Podman => (4, 3),
        Engine::Nspawn => (super::NSPAWN, 0),
    }
}

/// Compares versions such as `20.10.24+dfsg1`; one of another form counts as new.
fn is_older(version: &str, than: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map_while(|part| part.parse().ok());
    let major = numbers.next();
    major.is_some_and(|major| (major, numbers.next().unwrap_or(0)) < than)
}

/// Returns the checks for services. Only the service of the engine for new envs is required.
pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    facts
        .services
        .iter()
        .map(|found| match (&found.version, &found.problem) {
            (_, Some(_)) if !found.installed && found.engine != facts.engine => {
                note(format!("{} is not installed", program(found.engine)))
            }
            (_, Some((problem, command))) => {
                // The error does not know whether rockenv was invoked through sudo. Only the shell itself has `unset`.
                let command = match command.strip_prefix("sudo ") {
                    Some(command) => facts.sudo(command),
                    None if facts.root && !command.starts_with("unset ") => facts.sudo(command),
                    None => command.clone(),
                };
                missing(problem.clone(), command).essential_if(found.engine == facts.engine)
            }
            (version, None) => {
                let (engine, version) = (found.engine, version.as_deref().unwrap_or_default());
                let (major, minor) = oldest(engine);
                match is_older(version, (major, minor)) {
                    true => note(format!(
                        "{engine} {version} is older than {major}.{minor}, the oldest supported version"
                    )),
                    false => ok(format!("{engine} {version} answers: `up --engine {engine}`")),
                }
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::CheckState;
    use crate::cli::doctor::tests::debian;
    use crate::engine::docker::Contexts;

    #[test]
    fn what_does_not_answer_is_a_note_with_a_command() {
        let mut facts = debian();
        facts.services = ServiceFacts::probe(&Sockets {
            docker: Some("unix:///nowhere/docker.sock".to_owned()),
            contexts: Contexts::default(),
            podman: "/nowhere/podman.sock".to_owned(),
        });
        for found in &mut facts.services {
            found.installed = true;
        }
        facts.services.push(ServiceFacts::sample(Engine::Docker));
        let checks = checks(&facts);
        assert_eq!(checks[0].state, CheckState::Note);
        assert_has!(checks[0].message, "/nowhere/docker.sock");
        assert_has!(checks[1].command.as_ref().unwrap(), "podman");
        assert_eq!(checks[2].state, CheckState::Ok);
        assert!(checks[2].message.contains("docker 28.1"));
        for (version, state) in [
            ("3.4.4", CheckState::Note),
            ("4.3.1", CheckState::Ok),
            ("10.0.0-dev", CheckState::Ok),
            ("master", CheckState::Ok),
        ] {
            let mut facts = debian();
            facts.services = vec![ServiceFacts {
                version: Some(version.to_owned()),
                ..ServiceFacts::sample(Engine::Podman)
            }];
            assert_eq!(super::checks(&facts)[0].state, state, "{version}");
        }
        facts.services[0].installed = false;
        let check = super::checks(&facts).remove(0);
        assert_eq!(
            (check.message.as_str(), check.command),
            ("dockerd is not installed", None)
        );
        facts.through_sudo = true;
        facts.services[1].problem =
            Some(("far away".to_owned(), "unset CONTAINER_HOST".to_owned()));
        let check = super::checks(&facts).remove(1);
        assert_eq!(check.command.as_deref(), Some("unset CONTAINER_HOST"));
    }
}
