//! Owns creating a container at a service. The name is unique, so repeated requests create only one container.

use bollard::errors::Error as Refusal;
use bollard::models::ContainerCreateBody;
use bollard::query_parameters::CreateContainerOptionsBuilder;

use super::{LATE, Labels, PATIENCE, Service, answered, is_absent, settled};
use crate::engine::docker::retry::retry;
use crate::sys::error::{Error, Result};

impl Service {
    /// Creates a container, and returns the service's warnings; `None` if the service lacks its image.
    pub(super) fn create(
        &self,
        name: &str,
        image: &str,
        labels: &Labels,
        body: ContainerCreateBody,
    ) -> Result<Option<Vec<String>>> {
        let body = ContainerCreateBody {
            image: Some(image.to_owned()),
            labels: Some(labels.map()),
            ..body
        };
        let request = || self.request(name, body.clone());
        let look = async || Ok(self.is_made(name, &body).await?.then(Vec::new));
        let made = retry(PATIENCE, request, is_taken, look);
        self.found(LATE, "make a container", made).map_err(explain)
    }

    async fn request(
        &self,
        name: &str,
        mut body: ContainerCreateBody,
    ) -> std::result::Result<Vec<String>, Refusal> {
        loop {
            let options = CreateContainerOptionsBuilder::new().name(name).build();
            let made = self.client.create_container(Some(options), body.clone());
            match (made.await, body.host_config.as_mut()) {
                (Err(refusal), Some(host))
                    if host.cgroup_parent.is_some() && wants_no_slice(&refusal) =>
                {
                    host.cgroup_parent = None;
                }
                (answer, _) => return answer.map(|made| made.warnings),
            }
        }
    }

    /// Returns whether the container of that name exists with the requested labels. It does not while the service
    /// creates it.
    async fn is_made(
        &self,
        name: &str,
        body: &ContainerCreateBody,
    ) -> std::result::Result<bool, Refusal> {
        let found = match settled(|| self.client.inspect_container(name, None)).await {
            Err(refusal) if is_absent(&refusal) => return Ok(false),
            other => other?,
        };
        let labels = found.config.and_then(|config| config.labels);
        let labels = labels.unwrap_or_default();
        let mut wanted = body.labels.iter().flatten();
        Ok(wanted.all(|(name, value)| labels.get(name) == Some(value)))
    }
}

/// Returns whether a request was refused because a container of that name exists, or is being created.
fn is_taken(refusal: &Refusal) -> bool {
    answered(refusal)
        .is_some_and(|(status, message)| status == 409 || message.contains("already in use"))
}

/// Returns whether Podman refused a slice because systemd does not manage its control groups.
fn wants_no_slice(refusal: &Refusal) -> bool {
    let slice = "systemd slice received as cgroup parent";
    answered(refusal).is_some_and(|(_, message)| message.contains(slice))
}

/// Explains that a service does not see a directory that exists here.
fn explain(error: Error) -> Error {
    let said = error.chain().join(": ");
    let docker = said.contains("bind source path does not exist");
    let podman = said.contains("statfs ") && said.contains("no such file or directory");
    match docker || podman {
        true => error.help(
            "use a service that sees the directories of rockenv: Docker from a snap does not, nor does a service outside the container that rockenv runs in",
        ),
        false => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_sees_other_directories_is_explained() {
        let docker = "docker answered 400: invalid mount config for type \"bind\": bind source path does not exist: /srv/a";
        let podman = "podman answered 500: statfs /srv/a: no such file or directory";
        let other = "podman answered 500: no such file or directory";
        for (said, explained) in [(docker, true), (podman, true), (other, false)] {
            let error = unexpected!("cannot make a container").source(said.to_owned());
            assert_eq!(explain(error).help_text().is_some(), explained, "{said}");
        }
    }
}
