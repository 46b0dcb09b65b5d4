//! Owns parsing `.ninja_log`, formats 5 to 7: the time of each command of a build, and which ones ended last. Pure.

use std::collections::BTreeMap;

/// First line of every log, up to the version.
const HEADER: &str = "# ninja log v";

/// A command that ninja ran, by its first output.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Command {
    /// Its first output, relative to the build's directory.
    pub output: String,
    /// When it ended, in milliseconds since ninja started.
    pub ended_ms: u64,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
}

/// Parses a log; `None` for other files and unknown formats.
///
/// A command that ran several times counts once, with its last time. So does a command with several outputs, which has
/// a line for each.
pub(crate) fn parse(text: &str) -> Option<Vec<Command>> {
    let (first, rest) = text.split_once('\n')?;
    let version: u32 = first.strip_prefix(HEADER)?.trim().parse().ok()?;
    if !(5..=7).contains(&version) {
        return None;
    }
    // The last line of an output is valid; its line number determines the order.
    let mut last: BTreeMap<&str, (usize, u64, u64, &str)> = BTreeMap::new();
    for (at, line) in rest.lines().enumerate() {
        let fields: Vec<&str> = line.splitn(6, '\t').collect();
        let [start, end, _, output, hash, ..] = fields[..] else {
            continue;
        };
        // ninja's own type is `int`. Sums of larger numbers could overflow.
        let (Ok(start), Ok(end)) = (start.parse::<u32>(), end.parse::<u32>()) else {
            continue;
        };
        last.insert(output, (at, start.into(), end.into(), hash));
    }
    let mut commands: BTreeMap<(u64, u64, &str), (usize, &str)> = BTreeMap::new();
    for (output, (at, start, end, hash)) in last {
        let first = commands.entry((start, end, hash)).or_insert((at, output));
        *first = (*first).min((at, output));
    }
    let mut commands: Vec<_> = commands.into_iter().collect();
    commands.sort_by_key(|(_, order)| *order);
    let command = |((start, end, _), (_, output)): ((u64, u64, &str), (usize, &str))| Command {
        output: output.to_owned(),
        ended_ms: end,
        took_ms: end.saturating_sub(start),
    };
    Some(commands.into_iter().map(command).collect())
}

/// Returns the length of a log without the commands that ended in the last `ms` milliseconds of its builds.
pub(crate) fn length_without_last(log: &[u8], ms: u64) -> usize {
    let mut length = log.len();
    if !log.starts_with(HEADER.as_bytes()) {
        return length;
    }
    let (mut left, mut later) = (ms, None);
    for line in log.split_inclusive(|byte| *byte == b'\n').rev() {
        let fields = String::from_utf8_lossy(line);
        let end = fields.split('\t').nth(1);
        let end = end.and_then(|end| end.parse::<u32>().ok());
        let passed = match (end, later) {
            (Some(end), Some(later)) if end <= later => later - end,
            // The last command of an earlier run of ninja.
            (Some(_), Some(later)) => later,
            (Some(_), None) => 0,
            // The last line may have been cut short.
            (None, None) if !line.starts_with(b"#") => 0,
            (None, _) => break,
        };
        let Some(rest) = left.checked_sub(passed.into()) else {
            break;
        };
        left = rest;
        later = end;
        length -= line.len();
    }
    length
}

/// Returns whether an output only stamps other work: a whole sub-project, built by its own ninja.
pub(crate) fn is_stamp(output: &str) -> bool {
    output.ends_with(".stamp") || output.contains("/stamp/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_count_once_as_they_were_the_last_time() {
        for version in 5..=7 {
            let text = format!(
                "# ninja log v{version}\n0\t100\t1\told.o\taa\n5\t2005\t1\ta.o\tbb\n7\t9\t1\tx.h\tcc\n7\t9\t1\tx.cc\tcc\n\
                 1\t31\t2\told.o\taa\nbroken\n3\t\n0\t{}\t1\tlong.o\tdd",
                u64::MAX
            );
            let found = parse(&text).unwrap();
            let times = found.iter().map(|one| (one.output.as_str(), one.took_ms));
            let wanted = [("a.o", 2000), ("x.h", 2), ("old.o", 30)];
            assert_eq!(times.collect::<Vec<_>>(), wanted);
        }
    }

    #[test]
    fn other_files_are_no_logs() {
        for text in "|# ninja log v4\n|# ninja log v8\n|# ninja log vx\n|hello\n".split('|') {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse("# ninja log v5\n"), Some(Vec::new()));
    }

    #[test]
    fn the_commands_that_ended_last_are_those_at_the_end_of_a_log() {
        let lines = [
            "# ninja log v5\n",
            "0\t900000\t1\ta\taa\n",
            // Another run of ninja.
            "0\t5000\t1\tb\tbb\n",
            "1\t65000\t1\tc\tcc\n",
            "1\t65000\t1\td\tcc\n",
            "9\t70000\t1\te",
        ];
        let log = lines.concat();
        let kept = |ms| {
            let length = length_without_last(log.as_bytes(), ms);
            log[..length].lines().count()
        };
        assert_eq!(
            [0, 4999, 5000, 64_999, 65_000, 70_000].map(kept),
            [5, 5, 3, 3, 2, 1]
        );
        for text in ["", "hello", "# ninja log v5\n"] {
            assert_eq!(length_without_last(text.as_bytes(), 9), text.len());
        }
        assert_eq!(length_without_last(b"# ninja log v5\n0\t7", 9), 15);
    }

    #[test]
    fn stamps_are_known() {
        assert!(is_stamp("math-libs/rocBLAS/stamp/build.stamp"));
        assert!(!is_stamp("CMakeFiles/stamping.dir/a.cpp.o"));
    }
}
