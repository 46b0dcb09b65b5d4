//! Owns choosing a GPU: the meaning of `--gpu` on this machine for the env's targets. Pure, except for checking that
//! the profile's additional nodes exist.

use super::{Extras, Gpu, Grant, Machine};
use crate::rocm::target::{self, Target};
use crate::sys::error::Result;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selector {
    None,
    /// The first GPU that runs code for the env's targets, if any.
    Auto,
    /// Like `Auto`, but fails without such a GPU.
    Required,
    /// An index, a PCI address or a render node.
    Named(String),
}

impl From<&str> for Selector {
    fn from(text: &str) -> Self {
        match text {
            "none" => Self::None,
            "auto" => Self::Auto,
            "required" => Self::Required,
            other => Self::Named(other.to_owned()),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Choice {
    Gpu {
        grant: Box<Grant>,
        note: Option<String>,
    },
    /// No GPU. Steps with `gpu` are skipped.
    Without {
        /// The reason that skipped steps show.
        why: String,
    },
}

impl Machine {
    /// Chooses the GPU of an env that builds for `targets`. Without targets, any GPU fits.
    pub(crate) fn choose(
        &self,
        selector: &Selector,
        targets: &[Target],
        extras: Extras,
    ) -> Result<Choice> {
        let without = |why: String| match selector {
            Selector::Required => Err(unavailable!("steps with a GPU cannot run: {why}").help(
                "rockenv doctor shows the GPUs; with `--gpu auto` steps with a GPU are skipped",
            )),
            _ => Ok(Choice::Without { why }),
        };
        let wanted = target::joined(targets, " or ");
        let (gpu, note) = match selector {
            Selector::None => return without("`--gpu none` is set".to_owned()),
            Selector::Named(name) => {
                let gpu = self.named(name)?;
                if let Some(lack) = self.lack() {
                    return Err(
                        unavailable!("GPU {gpu} cannot be used: {lack}").help("rockenv doctor")
                    );
                }
                let note = (!fits(gpu, targets))
                    .then(|| format!("GPU {gpu} does not run code for {wanted}"));
                (gpu, note)
            }
            Selector::Auto | Selector::Required => {
                if let Some(lack) = self.lack() {
                    return without(lack);
                }
                let mut fitting = self.gpus.iter().filter(|gpu| fits(gpu, targets));
                let Some(gpu) = fitting.next() else {
                    let isas = self.isas().join(", ");
                    let here = format!("this machine has {isas}, not {wanted}");
                    // The wanted GPU may be another one.
                    return without(match self.skipped() {
                        Some(skipped) => format!("{here}; {skipped}"),
                        None => here,
                    });
                };
                let note = fitting.next().map(|other| {
                    format!(
                        "using GPU {gpu}; `--gpu {}` selects another one",
                        other.render
                    )
                });
                (gpu, note)
            }
        };
        for directory in extras.directories() {
            if self.nodes_in(directory).is_empty() {
                let why = format!("this machine has no {directory}");
                return match selector {
                    Selector::Named(_) => Err(unavailable!("{why}").help("rockenv doctor")),
                    _ => without(why),
                };
            }
        }
        Ok(Choice::Gpu {
            grant: Box::new(Grant {
                root: self.root.clone(),
                gpu: gpu.clone(),
                extras,
            }),
            note,
        })
    }

    /// Finds the GPU with this index, PCI address or render node.
    fn named(&self, name: &str) -> Result<&Gpu> {
        let render = name.strip_prefix("/dev/dri/").unwrap_or(name);
        let pci = name.to_ascii_lowercase();
        let found: Vec<&Gpu> = self
            .gpus
            .iter()
            .filter(|gpu| {
                gpu.render == render
                    || gpu.index.to_string() == name
                    || gpu.pci == pci
                    || gpu.pci.strip_prefix("0000:") == Some(&pci)
            })
            .collect();
        match found[..] {
            [one] => Ok(one),
            [] => {
                let (why, help) = match self.gpus.is_empty() {
                    true => (self.lack(), "rockenv doctor".to_owned()),
                    false => (self.skipped(), choices(self.gpus.iter())),
                };
                let error = unavailable!("no GPU `{name}` in this machine").help(help);
                Err(match why {
                    Some(why) => error.source(why),
                    None => error,
                })
            }
            [..] => Err(usage!(
                "`--gpu {name}` matches {} partitions of one device",
                found.len()
            )
            .help(choices(found.into_iter()))),
        }
    }
}

/// Lists a name for each GPU. The index, the address and the node are all accepted.
fn choices<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> String {
    let each: Vec<String> = gpus
        .map(|gpu| format!("`--gpu {}` is {} at {}", gpu.render, gpu.isa, gpu.pci))
        .collect();
    each.join(", ")
}

fn fits(gpu: &Gpu, targets: &[Target]) -> bool {
    targets.is_empty() || targets.iter().any(|target| target.name() == gpu.isa)
}
