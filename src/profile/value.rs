//! Owns parsing single values of a profile: names, sizes, durations, paths, variables, git locations.
//!
//! For an invalid value each function returns a sentence for a person; the caller adds the place.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::structure::shorten;
use crate::rocm::target::Target;
use crate::sys::address::without_login;
use crate::sys::host::is_variable_name;
use crate::sys::name::{StepName, is_short_name};

/// Why a value was refused, and what to write instead if that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub message: String,
    pub help: Option<String>,
}

impl Refused {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            help: None,
        }
    }

    #[must_use]
    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

type Result<T> = std::result::Result<T, Refused>;

fn refuse_if(is_bad: bool, refused: impl FnOnce() -> Refused) -> Result<()> {
    match is_bad {
        true => Err(refused()),
        false => Ok(()),
    }
}

/// Refuses a value: "bad WHAT `TEXT`".
fn bad(what: &str, text: &str, help: &str) -> Refused {
    Refused::new(format!("bad {what} `{}`", shorten(text))).help(help)
}

/// Checks a name of a profile, image, hook, volume, parameter or env.
///
/// The same rule everywhere: such a name becomes a file name, a label and part of a command line.
pub(crate) fn name(what: &str, text: &str) -> Result<()> {
    refuse_if(!is_short_name(text), || bad_name(what, text))
}

pub(crate) fn step_name(text: &str) -> Result<StepName> {
    text.parse().map_err(|_| bad_name("step", text))
}

fn bad_name(what: &str, text: &str) -> Refused {
    let rule = "up to 64 of a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit";
    bad(&format!("{what} name"), text, rule)
}

/// Checks the name of a component, which may have capitals, as project names do.
pub(crate) fn project(what: &str, text: &str) -> Result<()> {
    name(what, &text.to_ascii_lowercase())
}

pub(crate) fn variable(text: &str) -> Result<()> {
    let rule = "letters, digits and `_`, not starting with a digit";
    refuse_if(!is_variable_name(text), || bad("variable name", text, rule))
}

/// The largest size, in bytes.
const LARGEST_SIZE: u64 = 1 << 50;

/// Parses a size in bytes: `230G`, `1.5 GiB`, `500MB`, `4096B`.
///
/// `K`, `M`, `G` and `T` are powers of 1024, as in systemd and the container engines; `KB`, `MB`, `GB` and `TB` are
/// powers of 1000.
pub(crate) fn size(text: &str) -> Result<u64> {
    let help = "a number and K, M, G or T, such as \"230G\" or \"1.5T\"";
    let bad = || bad("size", text, help);
    let trimmed = text.trim();
    let end = trimmed
        .find(|letter: char| !letter.is_ascii_digit() && letter != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let unit = unit.trim_start();
    let (prefix, base) = match unit.len() {
        0 | 1 => (Some(unit), 1024_u64),
        2 => (unit.strip_suffix(['B', 'b']), 1000),
        3 => (unit.strip_suffix("iB"), 1024),
        _ => return Err(bad()),
    };
    let prefix = prefix.and_then(|prefix| prefix.chars().next());
    let power = match prefix.map(|letter| letter.to_ascii_uppercase()) {
        // `2` for two gigabytes would be two bytes.
        None if unit.is_empty() && !matches!(number, "" | "0") => {
            return Err(
                Refused::new(format!("size `{}` has no unit", shorten(text)))
                    .help(format!("write `\"{number}G\"`, or K, M, T or B for G")),
            );
        }
        None if unit.is_empty() => 0,
        Some('B') if unit.len() == 1 => 0,
        Some('K') => 1,
        Some('M') => 2,
        Some('G') => 3,
        Some('T') => 4,
        _ => return Err(bad()),
    };
    let scale = u128::from(base.pow(power));
    // Digits, not floats: 0.1 has no exact binary form and a size is compared for equality.
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| match text.len() {
        0 => Some(0),
        1..=18 => text.parse::<u128>().ok(),
        _ => None,
    };
    if whole.is_empty() || number.ends_with('.') {
        return Err(bad());
    }
    let (Some(units), Some(parts)) = (digits(whole), digits(fraction)) else {
        return Err(bad());
    };
    let parts = parts * scale / 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(18));
    // A larger size is a mistake, and sums of sizes stay far from overflow.
    match u64::try_from(units * scale + parts) {
        Ok(bytes) if bytes <= LARGEST_SIZE => Ok(bytes),
        _ => Err(
            Refused::new(format!("size `{}` is larger than 1024T", shorten(text)))
                .help("write a smaller one, such as \"230G\" or \"1.5T\""),
        ),
    }
}

/// A size, or a part of the machine's memory or of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Amount {
    /// At most 100.
    Percent(u8),
    Bytes(u64),
}

impl Amount {
    /// Returns the amount in bytes; a percentage is that of `whole` bytes.
    pub(crate) fn of(self, whole: u64) -> u64 {
        match self {
            Self::Percent(percent) => {
                let percent = u64::from(percent);
                whole / 100 * percent + whole % 100 * percent / 100
            }
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// The least memory with which a container starts.
const LEAST_MEMORY: u64 = 16 << 20;

pub(crate) fn memory_max(text: &str) -> Result<Amount> {
    let Some(number) = text.trim().strip_suffix('%') else {
        return match size(text) {
            Ok(0) => Err(Refused::new("a memory limit of zero")),
            Ok(bytes) if bytes < LEAST_MEMORY => Err(Refused::new(format!(
                "`memory-max` of `{}` is too little to start a container: the least is 16 MiB",
                shorten(text)
            ))
            .help("write `\"16M\"` or more; a build needs `memory-per-job` for each job")),
            Ok(bytes) => Ok(Amount::Bytes(bytes)),
            Err(refused) => Err(refused.help(
                "a size such as \"48G\", or a share of the machine's memory such as \"90%\"",
            )),
        };
    };
    match number.trim_end().parse() {
        Ok(percent @ 1..=100) => Ok(Amount::Percent(percent)),
        _ => Err(bad("percentage", text, "\"1%\" to \"100%\"")),
    }
}

/// Parses targets separated by `;`, possibly none.
pub(crate) fn targets(text: &str) -> Result<Vec<Target>> {
    let names = text.split(';').filter(|name| !name.is_empty());
    names.map(target).collect()
}

pub(crate) fn target(name: &str) -> Result<Target> {
    let refused = || Refused::new(format!("unknown target `{}`", shorten(name)));
    Target::parse(name).map_err(|_| refused().help(Target::advice(name)))
}

/// Parses a duration: `90s`, `10m`, `2h 30m`, `1d`.
pub(crate) fn duration(text: &str) -> Result<Duration> {
    let help = "numbers with d, h, m or s, such as \"2h 30m\"";
    let bad = || bad("duration", text, help);
    let mut rest = text.trim();
    let mut seconds = 0_u64;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest
            .find(|letter: char| !letter.is_ascii_digit())
            .ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        let after = rest[digits..].trim_start();
        let letters = after
            .find(|letter: char| !letter.is_ascii_alphabetic())
            .unwrap_or(after.len());
        let unit = match &after[..letters] {
            "s" | "sec" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err(bad()),
        };
        let part = number.checked_mul(unit).ok_or_else(bad)?;
        seconds = seconds.checked_add(part).ok_or_else(bad)?;
        rest = after[letters..].trim_start();
    }
    // A year: a longer timeout is a mistake, and sums with clock readings stay far from overflow.
    match seconds {
        0 => Err(Refused::new("a duration of zero")),
        1..=31_536_000 => Ok(Duration::from_secs(seconds)),
        _ => Err(Refused::new(format!(
            "duration `{}` is longer than a year",
            shorten(text)
        ))),
    }
}

/// Checks a path inside the env: absolute and normalised, so that equal paths are equal strings.
pub(crate) fn inside(text: &str) -> Result<()> {
    let shown = shorten(text);
    if text.len() > 4095 {
        return Err(Refused::new("a path longer than 4095 bytes"));
    }
    if text.chars().any(char::is_control) {
        return Err(Refused::new(format!(
            "control character in the path `{shown}`"
        )));
    }
    if !text.starts_with('/') {
        return Err(Refused::new(format!("`{shown}` is not an absolute path"))
            .help("a path in the env starts with `/`"));
    }
    let mut parts = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let normal = format!("/{}", parts.join("/"));
    refuse_if(normal != text, || {
        let refused = Refused::new(format!("`{shown}` is not a normal path"));
        refused.help(format!("write `{}`", shorten(&normal)))
    })
}

/// Checks a path to export: its last part is its name in the volume.
pub(crate) fn exported(text: &str) -> Result<()> {
    inside(text)?;
    refuse_if(text == "/", || {
        Refused::new("`/` has no name to be exported under")
            .help("export a file or directory in it, such as `/opt/rocm`")
    })
}

/// Checks a destination in the env, which must not be below the engine's own mounts.
pub(crate) fn destination(text: &str) -> Result<()> {
    inside(text)?;
    // In images, `/var/run` is a link to `/run`.
    let engines = ["/proc", "/sys", "/dev", "/run/rockenv", "/var/run/rockenv"];
    let taken = engines.iter().any(|dir| Path::new(text).starts_with(dir))
        || matches!(text, "/" | "/run" | "/var/run" | "/tmp");
    refuse_if(taken, || {
        Refused::new(format!("`{}` belongs to the engine", shorten(text))).help(
            "not `/`, `/run`, `/tmp`, nor anything in `/proc`, `/sys`, `/dev` or `/run/rockenv`",
        )
    })
}

/// Checks where a volume is mounted: nothing runs without the image's own files, and an engine that puts its mounts
/// into a volume makes files in a user's directory.
pub(crate) fn mount_point(text: &str) -> Result<()> {
    destination(text)?;
    let images =
        "/bin /etc /lib /lib64 /sbin /usr /usr/bin /usr/lib /usr/lib64 /usr/sbin /var /var/tmp";
    refuse_if(images.split(' ').any(|directory| directory == text), || {
        Refused::new(format!("`{text}` belongs to the image"))
            .help("mount the volume in a directory of its own, such as `/project/src`")
    })
}

/// Checks a path relative to the profile's directory, which it must not leave.
pub(crate) fn beside(text: &str) -> Result<()> {
    below(text, "the profile's directory", "files/build.sh")
}

/// Checks a path relative to a directory, which it must not leave.
pub(crate) fn below(text: &str, directory: &str, example: &str) -> Result<()> {
    let shown = shorten(text);
    let advice = format!("relative to {directory}, such as `{example}`");
    if text.len() > 4095 || text.chars().any(char::is_control) {
        return Err(bad("path", text, &advice));
    }
    if text.starts_with('/') || text.starts_with('~') {
        return Err(Refused::new(format!("`{shown}` is not relative")).help(advice));
    }
    if text.split('/').any(|part| part == "..") {
        return Err(Refused::new(format!("`{shown}` leaves {directory}")).help(advice));
    }
    let is_odd = text.split('/').any(|part| matches!(part, "" | "."));
    refuse_if(is_odd, || {
        Refused::new(format!("`{shown}` is not a normal path")).help(advice)
    })
}

/// Checks a git repository's location.
///
/// A closed list, because git runs on the host: `ext::` runs a command there, and a leading dash is an option.
pub(crate) fn git_url(text: &str) -> Result<()> {
    let help = "https://, http://, ssh://, git:// or file://, or user@host:path";
    let bad = || bad("git URL", &without_login(text), help);
    if text.contains(|letter: char| letter.is_control() || letter == ' ') {
        return Err(bad());
    }
    let host = ["https://", "http://", "ssh://", "git://"]
        .into_iter()
        .find_map(|scheme| text.strip_prefix(scheme));
    if let Some(host) = host {
        let host = host.split('/').next().unwrap_or_default();
        // After the user name, too: ssh would read `git@-oProxyCommand=...` as an option.
        let named = host.rsplit('@').next().unwrap_or_default();
        // ssh before 9.6 expands user and host in the shell commands of `ProxyCommand` and `Match exec`. git decodes
        // `%60` before. Only `@` and `%` are harmless.
        let decoded = host.replace("%40", "@").replace("%25", "");
        let in_shell = |c: char| "%'`\"$\\;&<>|(){}".contains(c);
        let in_shell = text.starts_with("ssh:") && decoded.contains(in_shell);
        let is_option = named.starts_with('-') || host.starts_with('-');
        return refuse_if(named.is_empty() || is_option || in_shell, bad);
    }
    if text.starts_with("file:///") {
        return Ok(());
    }
    let (login, path) = text.split_once(':').ok_or_else(bad)?;
    let (user, host) = login.split_once('@').ok_or_else(bad)?;
    let word = |text: &str| {
        let fine = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        !text.starts_with('-') && !text.is_empty() && text.chars().all(fine)
    };
    let is_good = word(user) && word(host) && !path.is_empty() && !path.starts_with(':');
    refuse_if(!is_good, bad)
}

/// Checks a git revision: nothing that git could read as an option or a range.
pub(crate) fn git_rev(text: &str) -> Result<()> {
    let odd = |letter: char| {
        letter.is_control() || matches!(letter, ' ' | '~' | '^' | ':' | '?' | '*' | '[' | '\\')
    };
    let is_range = text.contains("..") || text.contains("@{");
    let is_bad = text.is_empty() || text.starts_with('-') || is_range || text.contains(odd);
    refuse_if(is_bad, || bad("revision", text, "a commit, tag or branch"))
}

/// Checks a package name in the form of package managers, with its version or architecture.
pub(crate) fn package(text: &str) -> Result<()> {
    let odd = |letter: char| letter.is_control() || letter.is_whitespace();
    let is_bad = text.is_empty() || text.starts_with('-') || text.contains(odd);
    refuse_if(is_bad, || {
        bad("package name", text, "one package for each entry")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that `read` accepts the first list and refuses the second, each separated by `|`.
    fn check<T: std::fmt::Debug>(read: impl Fn(&str) -> Result<T>, good: &str, bad: &str) {
        good.split('|').for_each(|text| drop(read(text).unwrap()));
        for text in bad.split('|') {
            assert!(read(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn names() {
        check(|text| name("step", text), "ubuntu-24.04", "A|a\0|${target}");
        check(variable, "A|_|a_1|ROCM_PATH", "|1A|A=B|A B|A\n|Ä");
        let good = "hipcc|g++|libc6:arm64|rocm=7.0|hipcc/forky";
        check(package, good, "|-y|a b|a\n");
    }

    #[test]
    fn sizes() {
        for (text, want) in [
            ("0", 0),
            ("4096B", 4096),
            ("4K", 4 << 10),
            ("1.5G", 3 << 29),
            ("230G", 230 << 30),
            ("230 GiB", 230 << 30),
            ("230GB", 230_000_000_000),
            ("2t", 2 << 40),
            ("0.1GB", 100_000_000),
            ("1024T", 1 << 50),
        ] {
            assert_eq!(size(text), Ok(want), "{text}");
        }
        assert_has!(size("").unwrap_err().message, "bad size");
        for text in ["1024.1T", "1126TB", "999999999999999999T"] {
            let refused = size(text).unwrap_err();
            assert_has!(refused.message, "is larger than 1024T");
        }
        let bad = "|G|-1G|1P|1..5G|1.G|.5G|1e3|99999999999T|1 2G|1GiBs|1BB|2|4096|0.5|1€|٣G";
        check(size, "0", bad);
    }

    #[test]
    fn memory_limits() {
        assert_eq!(memory_max("90%"), Ok(Amount::Percent(90)));
        assert_eq!(memory_max("48G"), Ok(Amount::Bytes(48 << 30)));
        check(memory_max, "90%", "0%|101%|%|0|-5%|9.5%|lots");
    }

    #[test]
    fn durations() {
        for (text, want) in [
            ("90s", 90),
            ("10m", 600),
            ("2h 30m", 9000),
            ("2h30m", 9000),
            ("1d", 86_400),
            ("5 min", 300),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_secs(want)), "{text}");
        }
        let bad = "|10|m|2w|1h -3m|0s|366d|99999999999999999999s|1.5h|18446744073709551615d";
        check(duration, "90s", bad);
    }

    #[test]
    fn paths() {
        let good = "/a|/a/b|/run/user|/tmp/x|/runner|/process|/a b|/run/rockenvx";
        let bad = "|a|./a|/|/proc|/proc/1|/sys|/dev/kfd|/run|/run/rockenv|/run/rockenv/bin|/tmp|/a/|\
                   /var/run|/var/run/rockenv/x|/a//b|/a/./b|/a/../proc|/a\nb|//proc|~";
        check(destination, good, bad);
        check(
            mount_point,
            "/var/cache/x|/usr/local|/opt",
            "/var/tmp|/var|/usr|/usr/lib|/etc|/bin|/proc",
        );
        check(exported, "/a|/a/b", "/|a|/a/");
        let refused = inside("/a/../b//c/").unwrap_err();
        assert_eq!(refused.help.unwrap(), "write `/b/c`");
        let bad = "|.|..|../a|a/../../b|/a|~/a|a//b|a/|a\0b";
        check(beside, "a|a/b.sh|..a", bad);
    }

    #[test]
    fn git_locations() {
        let good = "https://github.com/ROCm/TheRock|ssh://git@example.org:22/x|\
                    ssh://me%40here@example.org/x$y|git@github.com:ROCm/TheRock.git|file:///srv/git/x";
        let bad = "|-x|ext::sh -c id|ext::id|fd::3|ssh://-oProxyCommand=id/x|\
                   ssh://git@-oProxyCommand=id/x|ssh://git@`id`/x|ssh://$(id)@a/x|ssh://%60id%60@a/x|\
                   -a@b:c|a@-b:c|file://x|/srv/x|a@b::c|https:///x";
        check(git_url, good, bad);
        let good = "89553ce3746e|v1.2|main|release/7.1";
        check(git_rev, good, "|-x|a..b|a b|HEAD~1|@{-1}");
    }
}
