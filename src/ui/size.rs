//! Owns formatting quantities for people: bytes, durations, ages.

use std::fmt::Display;
use std::time::Duration;

use bytesize::ByteSize;
use jiff::Timestamp;

/// Returns bytes in binary units: `512 B`, `1.5 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// Width of a bar in cells.
pub(super) const BAR: u64 = 12;

/// Returns a bar for `part` of `whole`, in eighths of a cell; empty if `whole` is zero.
pub(crate) fn bar(part: u64, whole: u64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if whole == 0 {
        return String::new();
    }
    let eighths = u128::from(part.min(whole)) * u128::from(BAR) * 8 / u128::from(whole);
    // `BAR` bounds the quotient, so the cast is lossless.
    let (full, rest) = ((eighths / 8) as usize, (eighths % 8) as usize);
    format!("{}{}", "█".repeat(full), EIGHTHS[rest])
}

/// Formats a count with its noun: `1 step`, `3 steps`.
pub(crate) fn count<N: Copy + Display + PartialEq + From<u8>>(number: N, thing: &str) -> String {
    let end = if number == N::from(1) { "" } else { "s" };
    format!("{number} {thing}{end}")
}

/// Formats a step's load: `8 jobs, 5.1 GiB`.
pub(crate) fn load(jobs: Option<u32>, memory: Option<u64>) -> String {
    let jobs = jobs.map(|jobs| count(jobs, "job"));
    let parts: Vec<String> = jobs.into_iter().chain(memory.map(bytes)).collect();
    parts.join(", ")
}

/// Formats progress: `1.5 GiB of 3.0 GiB (50 %)`, or `1.5 GiB` without a known total.
pub(crate) fn progress(done: u64, total: Option<u64>) -> String {
    match total {
        Some(total) if total > 0 => {
            let percent = u128::from(done.min(total)) * 100 / u128::from(total);
            format!("{} of {} ({percent} %)", bytes(done), bytes(total))
        }
        _ => bytes(done),
    }
}

/// Returns a change in bytes with its sign: `+1.5 GiB`, `-512 B`, `0 B`.
pub(crate) fn delta(change: i64) -> String {
    let sign = match change.signum() {
        1 => "+",
        -1 => "-",
        _ => "",
    };
    format!("{sign}{}", bytes(change.unsigned_abs()))
}

/// Returns a duration to two places: `35 ms`, `3.2 s`, `4 min 05 s`, `2 h 03 min`, `3 d 4 h`.
pub(crate) fn duration(duration: Duration) -> String {
    let millis = duration.as_millis();
    // Rounds before splitting into units: 59.96 s is one minute, not 60.0 s.
    if millis < 1000 {
        return format!("{millis} ms");
    }
    if millis < 59_950 {
        let tenths = (millis + 50) / 100;
        return format!("{}.{} s", tenths / 10, tenths % 10);
    }
    let seconds = (millis + 500) / 1000;
    if seconds < 3600 {
        return format!("{} min {:02} s", seconds / 60, seconds % 60);
    }
    let minutes = (seconds + 30) / 60;
    if minutes < 24 * 60 {
        return format!("{} h {:02} min", minutes / 60, minutes % 60);
    }
    let hours = (minutes + 30) / 60;
    format!("{} d {} h", hours / 24, hours % 24)
}

/// Formats the time left: `12–18 min left`, or `about 41 min 00 s left` if both bounds are equal.
pub(crate) fn left(least: Duration, most: Duration) -> String {
    let whole = |duration: Duration| Duration::from_secs(duration.as_secs().max(1));
    let (unit, name) = match most.as_secs() {
        _ if least == most => return format!("about {} left", self::duration(whole(most))),
        0..120 => (1, "s"),
        120..7200 => (60, "min"),
        _ => (3600, "h"),
    };
    let (least, most) = (least.as_secs() / unit, most.as_secs().div_ceil(unit).max(1));
    format!("{least}–{most} {name} left")
}

/// Formats the time since `then`, to one place: `5 min ago`.
pub(crate) fn ago(then: Timestamp) -> String {
    let since = Timestamp::now().duration_since(then);
    age(since.try_into().unwrap_or_default())
}

/// Formats an age to one place: `just now`, `5 min ago`, `3 h ago`, `12 d ago`.
fn age(since: Duration) -> String {
    let seconds = since.as_secs();
    match seconds {
        0..60 => "just now".to_owned(),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_short() {
        let seconds = Duration::from_secs;
        let left = |least, most| left(seconds(least), seconds(most));
        let duration = |millis| duration(Duration::from_millis(millis));
        let age = |since| age(seconds(since));
        for (text, wanted) in [
            (bytes(0), "0 B"),
            (bytes(512), "512 B"),
            (bytes(1536), "1.5 KiB"),
            (bytes(1_610_612_736), "1.5 GiB"),
            (bytes(230 << 30), "230.0 GiB"),
            (bytes(u64::MAX), "16.0 EiB"),
            (delta(-1536), "-1.5 KiB"),
            (delta(0), "0 B"),
            (delta(i64::MIN), "-8.0 EiB"),
            (bar(0, 0), ""),
            (bar(0, 5), ""),
            (bar(1, 96), "▏"),
            (bar(3, 24), "█▌"),
            (bar(5, 5), "████████████"),
            (bar(u64::MAX, u64::MAX), "████████████"),
            (bar(u64::MAX, 1), "████████████"),
            (progress(512, None), "512 B"),
            (
                progress(1 << 30, Some(3 << 30)),
                "1.0 GiB of 3.0 GiB (33 %)",
            ),
            (progress(u64::MAX, Some(1)), "16.0 EiB of 1 B (100 %)"),
            (progress(0, Some(0)), "0 B"),
            (left(0, 0), "about 1.0 s left"),
            (left(61, 61), "about 1 min 01 s left"),
            (left(0, 1), "0–1 s left"),
            (left(40, 119), "40–119 s left"),
            (left(59, 121), "0–3 min left"),
            (left(720, 1080), "12–18 min left"),
            (left(7100, 7201), "1–3 h left"),
            (duration(0), "0 ms"),
            (duration(999), "999 ms"),
            (duration(3210), "3.2 s"),
            (duration(59_949), "59.9 s"),
            (duration(59_950), "1 min 00 s"),
            (duration(245_000), "4 min 05 s"),
            (duration(3_599_600), "1 h 00 min"),
            (duration(7_380_000), "2 h 03 min"),
            (duration(86_400_000 * 3 + 3_600_000 * 4), "3 d 4 h"),
            (age(3), "just now"),
            (age(300), "5 min ago"),
            (age(100_000), "27 h ago"),
            (age(1_036_800), "12 d ago"),
        ] {
            assert_eq!(text, wanted);
        }
    }
}
