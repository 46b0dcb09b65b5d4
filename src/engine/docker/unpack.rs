//! Owns turning a layer from elsewhere into a snapshot: as for a step, rockenv unpacks it in a container created from
//! the snapshot below, and freezes the container.
//!
//! A service could load an image by itself, but it would need all layers for that, unpack by its own rules, and report
//! nothing about the result. This way every byte is hashed where it is unpacked, and the service needs no knowledge of
//! the other machine.

use std::path::Path;
use std::time::Duration;

use bollard::models::HostConfig;

use super::container::{mount, running, settings};
use super::{ContainerTree, Service};
use crate::engine::{Bind, nspawn};
use crate::sys::error::{Error, Kind, Result};

pub(crate) const SUBCOMMAND: &str = "__layer";
/// Path of the layer inside.
const LAYER: &str = "/run/rockenv/layer";
/// Path of the error report inside.
const REPORT: &str = "/run/rockenv/report";
/// Polling interval for the container.
const PERIOD: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug)]
pub struct Unpack<'a> {
    /// The container that becomes the snapshot, and the parent image.
    pub place: &'a ContainerTree,
    pub archive: &'a Path,
    /// SHA-256 of the unpacked archive.
    pub diff_id: &'a str,
    /// The size of the unpacked archive, if its publisher declares it.
    pub unpacked: Option<u64>,
    /// The rockenv binary that unpacks.
    pub program: &'a Path,
    /// Host path for the error report.
    pub report: &'a Path,
}

impl Service {
    /// Runs a container that unpacks the layer, and waits for it to exit. Calls `look` meanwhile, which may abort.
    pub fn unpack(&self, what: &Unpack<'_>, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let name = &what.place.name;
        fs_err::write(what.report, "")?;
        let bind = |bind: Bind| mount(&bind, self.flavour);
        let mounts = vec![
            bind(Bind::read_only(what.program, nspawn::PROGRAM))?,
            bind(Bind::read_only(what.archive, LAYER))?,
            bind(Bind::writable(what.report, REPORT))?,
        ];
        let host = HostConfig {
            network_mode: Some("none".to_owned()),
            pids_limit: Some(-1),
            // A default of Docker but not of Podman. A layer may contain device nodes; creating them does not open
            // them.
            cap_add: Some(vec!["MKNOD".to_owned()]),
            ..settings(mounts, self.flavour)?
        };
        let mut words = [SUBCOMMAND, LAYER, what.diff_id, REPORT]
            .map(str::to_owned)
            .to_vec();
        words.extend(what.unpacked.map(|unpacked| unpacked.to_string()));
        let (image, labels) = (&what.place.image, what.place.labels());
        let made = self.create(name, image, &labels, running(words, host))?;
        if made.is_none() {
            return Err(self.lacks("make a container"));
        }
        self.start(name)?;
        loop {
            match self.state(name)? {
                None => {
                    let flavour = self.flavour;
                    return Err(unexpected!("container `{name}` was removed from {flavour}"));
                }
                Some(state) if state.running => {
                    look()?;
                    std::thread::sleep(PERIOD);
                }
                Some(state) => return outcome(state.exit_code, what.report),
            }
        }
    }
}

fn outcome(code: i64, report: &Path) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let kinds = [Kind::Drift, Kind::Invalid, Kind::OutOfSpace];
    let kind = kinds
        .into_iter()
        .find(|kind| i64::from(kind.exit_code()) == code);
    let said = fs_err::read_to_string(report)?;
    let message = match said.as_str() {
        "" => format!("the container that unpacks it exited with code {code}"),
        said => said.to_owned(),
    };
    Err(Error::new(kind.unwrap_or(Kind::Unexpected), message))
}
