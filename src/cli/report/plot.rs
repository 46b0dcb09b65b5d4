//! Owns the plots of a report: points on the shared axis, and the SVG that shows them. Text stays outside the SVG,
//! because the page stretches the SVG to its own width.

use maud::{Markup, html};

use super::timeline::Axis;
use super::{EnvReport, Run, millis};
use crate::plan::samples::Sample;
use crate::ui::size;

/// Width of every plot in SVG units.
const WIDTH: f64 = 1000.0;
/// Height of plots with a curve in SVG units.
const HEIGHT: f64 = 100.0;
/// Maximum number of points drawn; no screen shows more.
const POINTS: usize = 1000;
/// Minimum length of a bar in SVG units; shorter ones would be invisible.
const VISIBLE: f64 = 3.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    Memory,
    Processors,
    Jobs,
    Disk,
}

impl Quantity {
    pub(super) const ALL: [Self; 4] = [Self::Memory, Self::Processors, Self::Jobs, Self::Disk];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Memory => "Memory",
            Self::Processors => "Processors",
            Self::Jobs => "Jobs",
            Self::Disk => "Disk",
        }
    }

    pub(super) fn explanation(self) -> &'static str {
        match self {
            Self::Memory => "held by the step, without page cache",
            Self::Processors => "busy on average since the last sample",
            Self::Jobs => "job slots of the machine in use",
            Self::Disk => "growth in use since the first step began, by all processes",
        }
    }

    /// Returns its name in a sentence, which is also its CSS class.
    pub(super) fn name(self) -> String {
        self.title().to_lowercase()
    }

    pub(super) fn show(self, value: f64) -> String {
        match self {
            Self::Memory => size::bytes(value.max(0.0) as u64),
            Self::Disk => size::delta(value as i64),
            Self::Processors => format!("{value:.1}"),
            Self::Jobs => format!("{value:.0}"),
        }
    }

    /// Returns the values of one run with their milliseconds since its start. `before` is the disk growth of earlier
    /// runs.
    fn values(self, run: &Run, before: i64) -> Vec<(u64, f64)> {
        let point = |(at, sample): (usize, &Sample)| {
            let value = match self {
                Self::Memory => sample.memory? as f64,
                Self::Jobs => f64::from(sample.jobs?),
                Self::Disk => (before + sample.disk) as f64,
                Self::Processors => rate(run.samples[at.checked_sub(1)?], *sample)?,
            };
            Some((sample.at_ms, value))
        };
        let samples = run.samples.iter().enumerate();
        samples.filter_map(point).collect()
    }
}

/// Returns the average number of busy processors between two samples.
fn rate(from: Sample, to: Sample) -> Option<f64> {
    let used = to.cpu_ms?.checked_sub(from.cpu_ms?)?;
    let time = to.at_ms.checked_sub(from.at_ms).filter(|time| *time > 0)?;
    Some(used as f64 / time as f64)
}

/// A curve: the points of each run, as position from 0 to 1 and value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Curve {
    pub(super) runs: Vec<Vec<(f64, f64)>>,
    /// The maximum, and the limit if it is close enough to be shown.
    pub(super) peak: f64,
    pub(super) limit: Option<f64>,
}

impl Curve {
    /// Returns the curve, or `None` without samples.
    pub(super) fn of(quantity: Quantity, report: &EnvReport, axis: &Axis) -> Option<Self> {
        let mut curve = Self::default();
        let mut before = 0;
        for run in &report.runs {
            let began = run.began_ms();
            let points: Vec<(f64, f64)> = quantity
                .values(run, before)
                .into_iter()
                .map(|(at, value)| {
                    let at = i64::try_from(at).unwrap_or(i64::MAX);
                    (axis.place(began.saturating_add(at)), value)
                })
                .collect();
            // A single sample stands for the whole run.
            let points = match points.as_slice() {
                [(_, value)] => vec![
                    (axis.place(began), *value),
                    (axis.place(run.ended.as_millisecond()), *value),
                ],
                _ => points,
            };
            before += run.disk_delta;
            if !points.is_empty() {
                curve
                    .runs
                    .push(thin(&points, POINTS / report.runs.len().clamp(1, 50)));
            }
        }
        let values = curve.runs.iter().flatten().map(|(_, value)| *value);
        curve.peak = values.reduce(f64::max)?;
        let limit = match quantity {
            Quantity::Memory => report.memory_max.map(|bytes| bytes as f64),
            Quantity::Processors => Some(f64::from(report.cores)),
            Quantity::Jobs => report
                .runs
                .iter()
                .map(|run| f64::from(run.jobs))
                .reduce(f64::max),
            Quantity::Disk => None,
        };
        // A limit far above the peak would flatten the curve.
        curve.limit = limit.filter(|limit| *limit > 0.0 && *limit <= curve.peak * 4.0);
        Some(curve)
    }

    pub(super) fn top(&self) -> f64 {
        let most = self.peak.max(self.limit.unwrap_or(0.0));
        if most > 0.0 { most * 1.08 } else { 1.0 }
    }
}

/// Reduces the number of points and keeps the highest of each group.
fn thin(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    let each = points.len().div_ceil(most.max(1)).max(1);
    points
        .chunks(each)
        .map(|chunk| {
            let higher = |a: (f64, f64), b: &(f64, f64)| if b.1 > a.1 { *b } else { a };
            chunk.iter().fold(chunk[0], higher)
        })
        .collect()
}

/// Renders the vertical lines that all plots share.
fn grid(axis: &Axis, height: f64) -> Markup {
    let lines = axis.ticks().into_iter().map(|(at, _)| (at, "tick"));
    let cuts = axis.cuts().into_iter().map(|at| (at, "cut"));
    html! {
        @for (at, class) in lines.chain(cuts) {
            path class=(class) d=(format!("M{:.1} 0V{height}", at * WIDTH)) {}
        }
    }
}

/// Renders the lane of one step: a bar per run.
pub(super) fn lane(report: &EnvReport, step: usize, axis: &Axis) -> Markup {
    html! {
        svg class="lane" viewBox={ "0 0 " (WIDTH) " 20" } preserveAspectRatio="none" role="img" {
            (grid(axis, 20.0))
            @for run in report.runs.iter().filter(|run| run.step == step) { (bar(run, axis)) }
        }
    }
}

fn bar(run: &Run, axis: &Axis) -> Markup {
    let from = axis.place(run.began_ms()) * WIDTH;
    let to = axis.place(run.ended.as_millisecond()) * WIDTH;
    let width = (to - from).max(VISIBLE);
    let x = from.min(WIDTH - width);
    let (class, word) = match run.done {
        true => ("done", "took"),
        false => ("failed", "failed after"),
    };
    html! {
        rect class=(class) x=(format!("{x:.1}")) y="2" width=(format!("{width:.1}")) height="16" {
            title { (word) " " (millis(run.wall_ms)) ", " (run.jobs) " jobs, disk " (size::delta(run.disk_delta)) }
        }
    }
}

/// Renders the plot of a curve. The page's script shows `data-points` at the pointer.
pub(super) fn chart(quantity: Quantity, curve: &Curve, axis: &Axis) -> Markup {
    let top = curve.top();
    let y = |value: f64| (HEIGHT - (value / top).clamp(0.0, 1.0) * HEIGHT).clamp(0.0, HEIGHT);
    let (mut area, mut line, mut points) = (Vec::new(), Vec::new(), Vec::new());
    for run in &curve.runs {
        let at = |(at, value): &(f64, f64)| format!("{:.1} {:.1}", at * WIDTH, y(*value));
        let path = run.iter().map(at).collect::<Vec<_>>().join("L");
        let ends = [run.first(), run.last()].map(|end| end.map_or(0.0, |(at, _)| at * WIDTH));
        area.push(format!(
            "M{:.1} {HEIGHT}L{path}L{:.1} {HEIGHT}Z",
            ends[0], ends[1]
        ));
        line.push(format!("M{path}"));
        let shown = |(at, value): &(f64, f64)| format!("{at:.4}|{}", quantity.show(*value));
        points.extend(run.iter().map(shown));
    }
    let label = [quantity.title(), &quantity.show(curve.peak)].join(" over time, at most ");
    html! {
        svg class="chart" viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } preserveAspectRatio="none" role="img"
            aria-label=(label) data-points=(points.join(";")) {
            (grid(axis, HEIGHT))
            path class="area" d=(area.concat()) {}
            path class="line" d=(line.concat()) {}
            @if let Some(limit) = curve.limit {
                path class="limit" d=(format!("M0 {:.1}H{WIDTH}", y(limit))) {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    fn run(ended_s: i64, samples: &[(u64, u64, u64, i64)]) -> Run {
        let sample = |(at_ms, memory, cpu_ms, disk): &(u64, u64, u64, i64)| Sample {
            at_ms: *at_ms,
            memory: Some(*memory),
            cpu_ms: Some(*cpu_ms),
            jobs: None,
            disk: *disk,
        };
        Run {
            step: 0,
            ended: Timestamp::from_second(ended_s).unwrap(),
            wall_ms: 1000,
            done: true,
            jobs: 4,
            disk_delta: 500,
            samples: samples.iter().map(sample).collect(),
        }
    }

    fn report() -> EnvReport {
        EnvReport {
            cores: 8,
            memory_max: Some(1 << 40),
            runs: vec![
                run(10, &[(0, 100, 0, 0), (1000, 300, 3000, 700)]),
                run(11, &[(0, 200, 0, 0), (1000, 250, 500, 100)]),
            ],
            ..EnvReport::default()
        }
    }

    #[test]
    fn curves_are_rates_sums_and_peaks() {
        let report = report();
        let axis = Axis::new([(9000, 11_000)]);
        let curve = |quantity| Curve::of(quantity, &report, &axis);
        let memory = curve(Quantity::Memory).unwrap();
        assert_eq!(memory.runs[0], [(0.0, 100.0), (0.5, 300.0)]);
        // A limit far above the curve is not drawn.
        assert_eq!((memory.peak, memory.limit), (300.0, None));
        let processors = curve(Quantity::Processors).unwrap();
        assert_eq!(
            processors.runs,
            [[(0.0, 3.0), (0.5, 3.0)], [(0.5, 0.5), (1.0, 0.5)]]
        );
        assert_eq!(processors.limit, Some(8.0));
        // The second run starts from the first run's end, not from its peak.
        let disk = curve(Quantity::Disk).unwrap();
        assert_eq!(disk.runs[1], [(0.5, 500.0), (1.0, 600.0)]);
        assert_eq!(curve(Quantity::Jobs), None);
        let svg = chart(Quantity::Memory, &memory, &axis).0;
        assert!(svg.contains("data-points=\"0.0000|100 B;0.5000|300 B;0.5000|200 B;"));
    }

    #[test]
    fn thinning_keeps_the_peak() {
        let points: Vec<_> = (0..5000)
            .map(|n| (f64::from(n), f64::from(n % 777)))
            .collect();
        let few = thin(&points, 100);
        assert!(few.len() <= 100);
        assert!(few.iter().any(|point| point.1 > 775.5));
        assert_eq!(thin(&points[..2], 100), points[..2]);
    }

    #[test]
    fn a_bar_can_always_be_seen() {
        let mut report = report();
        report.runs[1].wall_ms = 0;
        let svg = lane(&report, 0, &Axis::new([(9000, 11_000)])).0;
        assert_has!(svg, "x=\"997.0\" y=\"2\" width=\"3.0\"");
    }
}
