//! Owns the savings of starting from prebuilt parts: a pure function of the profile, the resolved spec, and known costs
//! of its steps. Figures are measured on this machine or published; nothing is guessed.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Serialize;

use crate::plan::jobs::Past;
use crate::plan::record::Outcome;
use crate::plan::resolve::Spec;
use crate::profile::{Choice, FROM_SOURCE, Profile, Step};
use crate::sys::name::StepName;

/// Cost of a step, and the figure's source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Figure {
    pub step: StepName,
    /// Time of the step, in seconds.
    pub seconds: Option<u64>,
    /// Whether the time is a limit, not a measurement.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub limit: bool,
    /// Disk usage, in bytes.
    pub disk: Option<u64>,
    /// Where the figure comes from.
    pub source: String,
}

/// A starting point (`--from`), compared with building everything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct StartingPoint {
    pub name: String,
    /// One line, for display.
    pub description: String,
    pub leaves_out: Vec<StepName>,
    /// Known figures of those steps, possibly not all. Downloads that replace the steps are not counted.
    pub figures: Vec<Figure>,
    /// Disk usage, in bytes.
    #[serde(skip)]
    pub(crate) disk: Option<u64>,
    /// Disk saved compared with building everything, in bytes.
    #[serde(skip)]
    pub(crate) disk_saved: Option<u64>,
    /// Largest memory need of its steps, in bytes.
    #[serde(skip)]
    pub(crate) memory: Option<u64>,
}

impl StartingPoint {
    /// Returns the seconds and bytes that it saves. The bytes come from the profile's totals if known, or else from the
    /// known figures of the skipped steps, as the seconds always do.
    pub(crate) fn saves(&self) -> (u64, u64) {
        let seconds = self.figures.iter().filter_map(|figure| figure.seconds);
        let disk = self.figures.iter().filter_map(|figure| figure.disk);
        let disk = self.disk_saved.unwrap_or_else(|| disk.sum());
        (seconds.sum(), disk)
    }
}

/// Compares every starting point of a profile with building from source. `past` holds the profile's runs on this
/// machine, oldest first.
pub(crate) fn starting_points(profile: &Profile, spec: &Spec, past: &[Past]) -> Vec<StartingPoint> {
    // A variant or a release may change the total.
    let whole = match spec.from == FROM_SOURCE {
        true => spec.resources.disk,
        false => profile.resources.disk,
    };
    let point = |(name, choice): (&String, &Choice)| {
        let steps = profile.steps.iter();
        let own = steps.clone().filter(|step| is_of(step, name));
        let without = steps
            .filter(|step| in_variant(step, spec.variant.as_deref()))
            .filter(|step| is_of(step, FROM_SOURCE) && !is_of(step, name));
        let disk = whole.zip(choice.disk);
        StartingPoint {
            name: name.clone(),
            description: choice.description.clone(),
            leaves_out: without.clone().map(|step| step.name.clone()).collect(),
            figures: without.filter_map(|step| figure(step, past)).collect(),
            disk: choice.disk,
            disk_saved: disk.map(|(whole, part)| whole.saturating_sub(part)),
            memory: own.filter_map(|step| step.memory).max(),
        }
    };
    let mut points: Vec<StartingPoint> = profile.from.iter().map(point).collect();
    // Closest to the sources first.
    points.sort_by_key(|point| point.leaves_out.len());
    points
}

/// Returns the steps that belong to other variants or starting points.
pub(crate) fn other_choices<'a>(profile: &'a Profile, spec: &Spec) -> BTreeSet<&'a str> {
    let steps = profile.steps.iter();
    let other =
        steps.filter(|step| !is_of(step, &spec.from) || !in_variant(step, spec.variant.as_deref()));
    other.map(|step| step.name.as_str()).collect()
}

fn is_of(step: &Step, point: &str) -> bool {
    let from = step.when.from.as_ref();
    from.is_none_or(|from| from.iter().any(|name| name.value == point))
}

fn in_variant(step: &Step, variant: Option<&str>) -> bool {
    let variants = step.when.variant.as_ref();
    variants.is_none_or(|names| names.iter().any(|name| Some(name.as_str()) == variant))
}

/// Returns a step's figure; prefers this machine's to the published one.
fn figure(step: &Step, past: &[Past]) -> Option<Figure> {
    let done = |run: &&Past| run.outcome == Outcome::Done && run.step == step.name;
    let measured = past.iter().rfind(done).map(|run| Figure {
        step: step.name.clone(),
        seconds: Some(run.cost.wall_ms.div_ceil(1000)),
        limit: false,
        disk: u64::try_from(run.cost.disk_delta).ok(),
        source: format!("env {}, on this machine", run.env),
    });
    let published = || {
        let published = step.published.as_ref()?;
        Some(Figure {
            step: step.name.clone(),
            seconds: published.time.as_ref().map(Duration::as_secs),
            limit: published.limit,
            disk: published.disk,
            source: published.source.clone(),
        })
    };
    measured.or_else(published)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::from_text;

    const TEXT: &str = r#"
schema = 1
image = "x"
variant = "a"
resources.disk = "230G"
from = { wheels = { description = "wheels", disk = "20G" }, compiler = {} }
variants = { a = {}, b = {} }
[[step]]
name = "compiler"
when = { from = ["source"] }
published = { time = "8h", source = "them" }
run = "x"
[[step]]
name = "libs"
when = { from = ["source", "compiler"] }
published = { time = "2h", disk = "1G", source = "them" }
run = "x"
[[step]]
name = "only-b"
when = { from = ["source"], variant = ["b"] }
published = { time = "100h", source = "them" }
run = "x"
[[step]]
name = "fetch"
when = { from = ["wheels"] }
run = "x"
[[step]]
name = "all"
run = "x"
"#;

    #[test]
    fn what_is_left_out_counts_and_what_happened_here_before_what_was_published() {
        let profile = from_text("p", TEXT).unwrap();
        let spec =
            crate::plan::resolve::resolve(&profile, &crate::plan::resolve::tests_inputs()).unwrap();
        let ran = |outcome, seconds: u64| {
            let mut past = Past::sample("libs", outcome);
            past.cost.wall_ms = seconds * 1000;
            past
        };
        let past = [
            ran(Outcome::Done, 30),
            ran(Outcome::Done, 60),
            ran(Outcome::Failed, 90),
        ];
        let points = starting_points(&profile, &spec, &past);
        let shown = points.iter().map(|point| {
            let left_out = point.leaves_out.join(" ");
            (format!("{} without {left_out}", point.name), point.saves())
        });
        let compiler = ("compiler without compiler".to_owned(), (8 * 3600, 0));
        let wheels = (8 * 3600 + 60, 210 << 30);
        let wheels = ("wheels without compiler libs".to_owned(), wheels);
        assert_eq!(shown.collect::<Vec<_>>(), [compiler, wheels]);
        assert_eq!(points[1].figures[1].source, "env a, on this machine");
        assert_eq!(points[0].figures[0].source, "them");
    }
}
