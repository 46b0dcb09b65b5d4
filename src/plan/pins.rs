//! Owns the pins of a step: names, versions and digests of files that it fetched, one per line of its report. A lock
//! file keeps them and provides them to the step's next run.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use fs_err as fs;

use crate::plan::resolve::differing;
use crate::sys::checksum::is_sha256;
use crate::sys::error::{Result, if_exists};

/// Directory in the container: a step reads `locked`, which exists if a lock file has pins for it, and writes
/// `installed`.
pub(crate) const INSIDE: &str = "/run/rockenv/pins";
/// The directory's name in an env's `run` directory.
pub(crate) const NAME: &str = "pins";
const LOCKED: &str = "locked";
const INSTALLED: &str = "installed";
/// Maximum size of a report, in bytes.
const MAX: u64 = 1 << 20;

/// Version and `sha256:DIGEST` by name.
pub(crate) type Pins = BTreeMap<String, String>;

/// Makes the directory for one run of a step, with the locked pins.
pub(crate) fn write(directory: &Path, locked: Option<&Pins>) -> Result<()> {
    fs::create_dir_all(directory)?;
    // The step's user may not exist on the host.
    fs::set_permissions(directory, std::fs::Permissions::from_mode(0o777))?;
    if let Some(locked) = locked {
        let lines = locked.iter().map(|(name, is)| format!("{name} {is}\n"));
        fs::write(directory.join(LOCKED), lines.collect::<String>())?;
    }
    Ok(())
}

/// Reads a step's report; empty without a report. A malformed report fails the step.
pub(crate) fn read(directory: &Path, step: &str) -> Result<Pins> {
    let path = directory.join(INSTALLED);
    let Some(found) = if_exists(fs::symlink_metadata(&path))? else {
        return Ok(Pins::new());
    };
    let bad = |what: &str| {
        step_failed!(
            "the report of step `{step}`, `{INSIDE}/{INSTALLED}`, {what}; each line must be \
             `NAME VERSION sha256:DIGEST`"
        )
    };
    // A link could lead anywhere on the host.
    if !found.is_file() || found.len() > MAX {
        return Err(bad("is not a regular file, or too long"));
    }
    let text = String::from_utf8(fs::read(&path)?).map_err(|_| bad("is not UTF-8"))?;
    let lines = text.lines().map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            [name, version, digest] if is_digest(digest) && !name.is_empty() => {
                Ok((name.to_owned(), format!("{version} {digest}")))
            }
            _ => Err(bad(&format!("has a line `{}`", line.escape_debug()))),
        }
    });
    lines.collect()
}

fn is_digest(text: &str) -> bool {
    let digest = text.strip_prefix("sha256:");
    digest.is_some_and(is_sha256)
}

/// Describes how fetched files differ from the locked pins.
pub(crate) fn differences(step: &str, locked: &Pins, found: &Pins) -> Vec<String> {
    let version = |text: &String| text.split(' ').next().unwrap_or_default().to_owned();
    let differs = |name: &String| match (locked.get(name), found.get(name)) {
        (Some(was), Some(is)) if version(was) == version(is) => format!(
            "`{name}` {} of step `{step}` differs from the locked content",
            version(is)
        ),
        (was, is) => format!(
            "`{name}` of step `{step}` is {} in the lock file, but {} was installed",
            was.map_or_else(|| "not".to_owned(), version),
            is.map_or_else(|| "nothing".to_owned(), version)
        ),
    };
    differing(locked, found).map(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads names, versions and digits of digests.
    fn pins(list: &str) -> Pins {
        let pin = |pin: &str| {
            let (name, is) = pin.split_once(' ').unwrap();
            let (version, digit) = is.split_once(' ').unwrap();
            let digest = digit.repeat(64);
            (name.to_owned(), format!("{version} sha256:{digest}"))
        };
        list.split(", ").map(pin).collect()
    }

    #[test]
    fn what_was_locked_is_offered_and_what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join(NAME);
        let locked = pins("lit 18.1 a, meson 1.7 b");
        write(&place, Some(&locked)).unwrap();
        assert_eq!(read(&place, "s").unwrap(), Pins::new());
        fs::copy(place.join(LOCKED), place.join(INSTALLED)).unwrap();
        assert_eq!(read(&place, "s").unwrap(), locked);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(INSTALLED);
        for text in "lit|lit 18.1|lit 18.1 sha256:12|lit  sha256:12|\0".split('|') {
            fs::write(&file, text).unwrap();
            let error = read(directory.path(), "tools").unwrap_err();
            assert_has!(error.message(), "step `tools`");
        }
        fs::remove_file(&file).unwrap();
        fs_err::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        let error = read(directory.path(), "tools").unwrap_err();
        assert_has!(error.message(), "is not a regular file");
    }

    #[test]
    fn differences_name_the_thing() {
        let locked = pins("lit 18.1 a, meson 1.7 b, six 1 c");
        assert!(differences("tools", &locked, &locked).is_empty());
        let found = pins("lit 18.2 a, meson 1.7 d, mako 1 c");
        assert_eq!(
            differences("tools", &locked, &found),
            [
                "`lit` of step `tools` is 18.1 in the lock file, but 18.2 was installed",
                "`mako` of step `tools` is not in the lock file, but 1 was installed",
                "`meson` 1.7 of step `tools` differs from the locked content",
                "`six` of step `tools` is 1 in the lock file, but nothing was installed",
            ]
        );
    }
}
