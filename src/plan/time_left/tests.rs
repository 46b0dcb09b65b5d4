//! Replays of recorded builds, and forecasts from little data.

use std::io::Read as _;
use std::ops::Range;

use super::*;

/// A recorded build: its commands, its target, and when each command began and ended. See `tests/builds/README.md`.
struct Recording {
    name: &'static str,
    graph: String,
    target: String,
    log: Vec<(u64, u64, String)>,
}

impl Recording {
    fn read(name: &'static str, packed: &[u8]) -> Self {
        let mut text = String::new();
        let mut decoder = zstd::Decoder::new(packed).unwrap();
        decoder.read_to_string(&mut text).unwrap();
        let (graph, rest) = text.split_once("%built ").unwrap();
        let (target, log) = rest.split_once('\n').unwrap();
        let line = |line: &str| {
            let mut fields = line.splitn(3, ' ');
            let mut next = || fields.next().unwrap().to_owned();
            (next().parse().unwrap(), next().parse().unwrap(), next())
        };
        let mut log: Vec<(u64, u64, String)> = log.lines().map(line).collect();
        log.sort_by_key(|(_, end, _)| *end);
        Self {
            name,
            graph: graph.to_owned(),
            target: target.to_owned(),
            log,
        }
    }

    fn all() -> [Self; 3] {
        let rocrand = include_bytes!("../../../tests/builds/rocrand.zst");
        let llama = include_bytes!("../../../tests/builds/llama-cpp.zst");
        let llvm = include_bytes!("../../../tests/builds/llvm.zst");
        [
            Self::read("rocRAND", rocrand),
            Self::read("llama.cpp", llama),
            Self::read("LLVM", llvm),
        ]
    }

    /// Returns the times in a made-up earlier build: three times as slow, and each up to 20 % off.
    fn earlier(&self) -> HashMap<&str, u64> {
        let times = self
            .log
            .iter()
            .zip(0_u64..)
            .map(|((start, end, output), at)| {
                let off = 80 + at.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 41;
                (output.as_str(), (end - start) * 3 * off / 100)
            });
        times.collect()
    }

    /// Returns, for each percent of the build's time, the true time left and the estimate, as fractions of that time.
    fn replay(&self, earlier: &HashMap<&str, u64>) -> Vec<(f64, [f64; 3])> {
        let graph = BuildGraph::parse(&self.graph).unwrap();
        let total = self.log.len();
        let past = |output: &str| earlier.get(output).copied();
        let mut forecast = BuildForecast::new(graph, Some(total), &self.target, past, |_| false);
        assert!(forecast.exact, "{}: {total} commands", self.name);
        let whole = self.log.last().unwrap().1;
        let mut done = 0;
        let point = |percent: u64| {
            let now = whole * percent / 100;
            while self.log[done].1 <= now {
                let (start, end, output) = &self.log[done];
                let millis = Duration::from_millis;
                forecast.ended(output, millis(end - start), millis(*end));
                done += 1;
            }
            let left = forecast.left(Duration::from_millis(now), done, 2);
            let part = |left: Duration| left.as_secs_f64() * 1e3 / whole as f64;
            let truth = (whole - now) as f64 / whole as f64;
            (truth, [left.least, left.likely, left.most].map(part))
        };
        (1..100).map(point).collect()
    }
}

/// Returns the worst error of the estimate from some percent on, relative to the time left. Ignores errors below a
/// twentieth of the whole build.
fn worst(name: &str, points: &[(f64, [f64; 3])], from: usize) -> f64 {
    let mut worst = 0.0;
    for ((truth, [least, likely, most]), percent) in points.iter().zip(1..) {
        // `tests/bench/time_left.py` plots these lines.
        println!("{name},{percent},{truth:.4},{least:.4},{likely:.4},{most:.4}");
        let error = (truth - likely).abs();
        if percent >= from && error > 0.05 {
            worst = f64::max(worst, error / truth);
        }
    }
    println!("{name}: at worst {worst:.2} from {from} % on");
    worst
}

/// In rocRAND, one command takes half the time, so its error of 20 % alone is a tenth of the whole.
#[test]
fn a_build_whose_commands_are_known_is_within_a_quarter_from_the_first_fifth_on() {
    for (recording, bound) in Recording::all().iter().zip([0.30, 0.25, 0.25]) {
        let points = recording.replay(&recording.earlier());
        let name = format!("{}, known", recording.name);
        assert!(worst(&name, &points, 20) <= bound, "{name}");
    }
}

/// Nothing shows that a directory without an ended command takes longer than the others. So first builds meet the bound
/// later: llama.cpp from a quarter on, except in its last fifth, where C++ follows HIP; LLVM from half on, when it
/// reaches its largest library; rocRAND never, because one of its 24 commands takes half the time.
#[test]
fn a_first_build_is_within_half_once_its_directories_are_known() {
    let bounds = [(20, 0.50), (25, 0.55), (50, 0.25)];
    for (recording, (from, bound)) in Recording::all().iter().zip(bounds) {
        let points = recording.replay(&HashMap::new());
        let name = format!("{}, new", recording.name);
        assert!(worst(&name, &points, from) <= bound, "{name}");
    }
}

/// LLVM's graph has a target for nearly every number of commands.
#[test]
fn a_build_that_is_resumed_has_only_what_is_left() {
    let recording = &Recording::all()[2];
    let graph = BuildGraph::parse(&recording.graph).unwrap();
    let half = recording.log.len() / 2;
    let (ended, rest) = recording.log.split_at(half);
    let ended = ended.iter();
    let ended = ended.map(|(start, end, output)| (output.as_str(), end - start));
    let ended: HashMap<&str, u64> = ended.collect();
    let past = |output: &str| ended.get(output).copied();
    let ran = |output: &str| ended.contains_key(output);
    let target = &recording.target;
    let mut forecast = BuildForecast::new(graph, Some(rest.len()), target, past, ran);
    assert!(forecast.exact);
    let begun = recording.log[half - 1].1;
    let whole = recording.log.last().unwrap().1 - begun;
    let part = |left: TimeLeft| left.likely.as_secs_f64() * 1e3 / whole as f64;
    let first = part(forecast.left(Duration::ZERO, 0, 2));
    for (start, end, output) in rest {
        let since = |at: &u64| Duration::from_millis(at.saturating_sub(begun));
        forecast.ended(output, since(end) - since(start), since(end));
    }
    let last = forecast.left(Duration::from_millis(whole), rest.len(), 2);
    assert!((0.35..1.5).contains(&first), "{first}");
    assert_eq!(last.likely, Duration::ZERO);
}

#[test]
fn one_command_that_takes_long_says_little_about_other_directories() {
    let others: String = (0..100)
        .map(|at| format!("build other/{at}: gen\n"))
        .collect();
    let file = "build tables/0: gen\nbuild tables/1: gen\n".to_owned() + &others;
    let graph = BuildGraph::parse(&file).unwrap();
    let mut forecast = BuildForecast::new(graph, Some(102), "", |_| None, |_| false);
    let hour = Duration::from_secs(3600);
    forecast.ended("tables/0", hour, hour);
    let left = forecast.left(hour, 1, 1).likely;
    // The other command of that directory is expected to take as long.
    assert!(left > hour / 2 && left < hour * 2, "{left:?}");
}

/// In the outermost build of TheRock, each sub-project is one command.
#[test]
fn a_sub_project_that_takes_long_says_that_others_do() {
    let file = "build a/stamp/build.stamp: gen\nbuild b/stamp/build.stamp: gen\n";
    let graph = BuildGraph::parse(file).unwrap();
    let mut forecast = BuildForecast::new(graph, Some(2), "", |_| None, |_| false);
    let hour = Duration::from_secs(3600);
    forecast.ended("a/stamp/build.stamp", hour, hour);
    let left = forecast.left(hour, 1, 1).likely;
    assert!(left > hour / 2 && left < hour * 2, "{left:?}");
}

#[test]
fn a_build_that_gets_fewer_jobs_takes_longer() {
    let file: String = (0..40).map(|at| format!("build {at}.o: cc\n")).collect();
    let graph = BuildGraph::parse(&file).unwrap();
    let mut forecast = BuildForecast::new(graph, Some(40), "", |_| Some(10_000), |_| false);
    let seconds = Duration::from_secs;
    let mut end_two_at_a_time = |commands: Range<u64>| {
        for at in commands {
            let end = seconds(10 * (at / 2 + 1));
            forecast.ended(&format!("{at}.o"), seconds(10), end);
        }
        forecast.left(seconds(50), 10, forecast.jobs(8, Some(2)))
    };
    assert_eq!(end_two_at_a_time(0..10).likely, seconds(150));
    end_two_at_a_time(10..38);
    // Nothing else could use the other jobs.
    assert_eq!(forecast.jobs(8, Some(2)), 8);
    assert_eq!(forecast.jobs(8, None), 8);
}

#[test]
fn a_build_of_part_of_the_commands_counts_those_that_remain() {
    // Which two of the three are built is unknown.
    let file = "build a.o: cc a.c\nbuild b.o: cc b.c\nbuild c.o: cc c.c\n";
    let graph = BuildGraph::parse(file).unwrap();
    let mut forecast = BuildForecast::new(graph, Some(2), "", |_| Some(8000), |_| false);
    assert!(!forecast.exact);
    let seconds = Duration::from_secs;
    assert_eq!(forecast.left(seconds(0), 0, 2).likely, seconds(8));
    forecast.ended("a.o", seconds(8), seconds(8));
    assert_eq!(forecast.left(seconds(8), 1, 1).likely, seconds(8));
    forecast.ended("unknown", seconds(8), seconds(8));
    assert_eq!(forecast.left(seconds(8), 2, 1).likely, seconds(0));
}

#[test]
fn nothing_makes_it_panic() {
    let graph = BuildGraph::parse("build a: cc b\nbuild b: cc a\nbuild c: phony a\n").unwrap();
    let mut forecast = BuildForecast::new(graph, None, "", |_| None, |_| false);
    let seconds = Duration::from_secs;
    forecast.ended("a", seconds(5), seconds(1));
    forecast.ended("a", seconds(5), Duration::MAX);
    for jobs in [0, 1, 1000] {
        forecast.left(seconds(0), usize::MAX, jobs);
    }
    let graph = BuildGraph::parse("build a: cc\nbuild b: cc a\n").unwrap();
    let forecast = BuildForecast::new(graph, None, "", |_| Some(u64::MAX), |_| false);
    forecast.left(seconds(0), 0, 1);
}
