//! Owns the ninja that rockenv puts into envs: a version that joins the jobserver, unlike those of distributions before
//! 2026.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::image::fetch;
use crate::sys::error::{Kind, Result, ResultExt as _};
use crate::tree::file;
use fs_err as fs;
use sha2::{Digest as _, Sha256};

/// The release that is fetched by default.
const URL: &str = "https://github.com/ninja-build/ninja/releases/download/v1.13.2/ninja-linux.zip";
const SHA256: &str = "5749cbc4e668273514150a80e387a957f933c6ed3f5f11e03fb30955e2bbead6";
/// The text that a jobserver client looks for in its environment, which ninja contains since version 1.13.
const CLIENT: &[u8] = b"--jobserver-auth=";
/// Larger than any release, packed or unpacked, in bytes.
const LIMIT: u64 = 64 << 20;

/// Name of the program in an env's `run` directory.
pub(crate) const NAME: &str = "ninja";
/// Its path inside.
pub(crate) const INSIDE: &str = "/run/rockenv/bin/ninja";

/// Puts ninja into an env's `run` directory: the user's `own`, else the release from the store's `blobs` or the
/// network, else the ninja in the image. Returns a note for the user about the last case.
pub(crate) fn place(
    run: &Path,
    own: Option<&Path>,
    blobs: &Path,
    image_root: &Path,
    offline: bool,
    cancel: &AtomicBool,
) -> Result<Option<String>> {
    let mut note = None;
    let program = match own {
        Some(path) => {
            let program = fs::read(path)?;
            check(path, &program)?;
            program
        }
        None => match release(blobs, offline, cancel) {
            // A release with other content, or a full disk, stays an error.
            Err(error) if error.kind() == Kind::Unavailable => {
                let Ok(Some((path, program))) = of_image(image_root) else {
                    return Err(error);
                };
                note = Some(format!("{error}: using `/{path}` of the image"));
                program
            }
            fetched => fetched?,
        },
    };
    let path = run.join(NAME);
    if fs::read(&path).is_ok_and(|there| there == program) {
        return Ok(note);
    }
    fs::create_dir_all(run)?;
    // Renamed into place, because the previous one may be running.
    let part = run.join("ninja.part");
    fs::write(&part, &program)?;
    fs::set_permissions(&part, std::fs::Permissions::from_mode(0o755))?;
    fs::rename(part, path)?;
    Ok(note)
}

fn release(blobs: &Path, offline: bool, cancel: &AtomicBool) -> Result<Vec<u8>> {
    let help = "install ninja 1.13 or newer in the image, or on the host and set ROCKENV_NINJA=/usr/bin/ninja";
    let there = blobs.join("sha256").join(SHA256).exists();
    if offline && !there {
        return Err(unavailable!(
            "ninja is not in the store yet and `--offline` forbids fetching it"
        )
        .help(help));
    }
    let zip = fetch::fetch(URL, SHA256, LIMIT, blobs, cancel, &mut |_, _| {})
        .context(|| "cannot fetch ninja".to_owned())
        .map_err(|error| match error.kind() {
            Kind::Signal(_) => error,
            _ => error.help(help),
        })?;
    unzip(&fs::read(&zip)?, NAME)
        .ok_or_else(|| unexpected!("`{}` contains no program `{NAME}`", zip.display()))
}

/// Returns the first ninja of an image that joins the jobserver, and its path there.
fn of_image(root: &Path) -> Result<Option<(&'static str, Vec<u8>)>> {
    for path in [
        "usr/local/bin/ninja",
        "usr/bin/ninja",
        "usr/bin/ninja-build",
    ] {
        let program = file::read_up_to(root, Path::new(path), LIMIT)?;
        if let Some(program) = program.filter(|program| is_client(program)) {
            return Ok(Some((path, program)));
        }
    }
    Ok(None)
}

/// Returns the URL and digest of the release, or `None` and the digest of the user's `own`.
pub(crate) fn identity(own: Option<&Path>) -> Result<(Option<&'static str>, String)> {
    match own {
        Some(path) => Ok((None, hex::encode(Sha256::digest(fs::read(path)?)))),
        None => Ok((Some(URL), SHA256.to_owned())),
    }
}

/// Refuses a ninja that does not join the jobserver. The program is not run to ask for its version, because it would
/// have root's rights here.
fn check(path: &Path, program: &[u8]) -> Result<()> {
    match is_client(program) {
        true => Ok(()),
        false => Err(invalid!(
            "`{}` cannot join the machine's job slots: it is not ninja 1.13 or newer",
            path.display()
        )
        .help("pip download --no-deps ninja, or remove `ninja` from the configuration")),
    }
}

fn is_client(program: &[u8]) -> bool {
    program.windows(CLIENT.len()).any(|part| part == CLIENT)
}

/// Returns a file of a zip archive by the last part of its name; `None` if it is missing, or the archive is broken.
fn unzip(zip: &[u8], name: &str) -> Option<Vec<u8>> {
    let number = |at: usize, length: usize| {
        let bytes = zip.get(at..at.checked_add(length)?)?;
        bytes
            .iter()
            .rev()
            .try_fold(0usize, |sum, byte| Some(sum << 8 | usize::from(*byte)))
    };
    // The end record, which a comment may follow.
    let end = (0..=zip.len().checked_sub(22)?)
        .rev()
        .find(|at| zip[*at..].starts_with(b"PK\x05\x06"))?;
    let mut at = number(end + 16, 4)?;
    for _ in 0..number(end + 10, 2)? {
        if !zip.get(at..)?.starts_with(b"PK\x01\x02") {
            return None;
        }
        let short = |field| number(at + field, 2);
        let (names, extra, comment) = (short(28)?, short(30)?, short(32)?);
        let path = std::str::from_utf8(zip.get(at + 46..at + 46 + names)?).ok()?;
        if path.rsplit('/').next() == Some(name) {
            let (length, local) = (number(at + 20, 4)?, number(at + 42, 4)?);
            let start = local + 30 + number(local + 26, 2)? + number(local + 28, 2)?;
            let body = zip.get(start..start.checked_add(length)?)?;
            return match short(10)? {
                0 => Some(body.to_vec()),
                8 => {
                    let mut whole = Vec::new();
                    let decoder = flate2::read::DeflateDecoder::new(body);
                    decoder.take(LIMIT).read_to_end(&mut whole).ok()?;
                    Some(whole)
                }
                _ => None,
            };
        }
        at += 46 + names + extra + comment;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// Builds an archive of one file.
    fn zip(path: &str, content: &[u8], deflate: bool) -> Vec<u8> {
        let body = if deflate {
            let mut encoder =
                flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
            encoder.write_all(content).unwrap();
            encoder.finish().unwrap()
        } else {
            content.to_vec()
        };
        let common = |into: &mut Vec<u8>| {
            into.extend([20, 0, 0, 0, if deflate { 8 } else { 0 }]);
            into.extend([0; 9]);
            into.extend((body.len() as u32).to_le_bytes());
            into.extend((content.len() as u32).to_le_bytes());
            into.extend((path.len() as u16).to_le_bytes());
            into.extend([0, 0]);
        };
        let mut all = b"PK\x03\x04".to_vec();
        common(&mut all);
        all.extend(path.as_bytes());
        all.extend(&body);
        let directory = all.len() as u32;
        all.extend(b"PK\x01\x02\x14\0");
        common(&mut all);
        all.extend([0; 14]);
        all.extend(path.as_bytes());
        let length = all.len() as u32 - directory;
        all.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
        all.extend(length.to_le_bytes());
        all.extend(directory.to_le_bytes());
        all.extend([0, 0]);
        all
    }

    #[test]
    fn a_ninja_is_known_without_running_it() {
        let path = Path::new("/srv/ninja");
        assert!(check(path, b"\x7fELF --jobserver-auth=\0").is_ok());
        let error = check(path, b"#!/bin/sh\necho 1.13.0\n").unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
    }

    #[test]
    fn a_program_is_found_in_an_archive() {
        let content = b"ninja ".repeat(100);
        for deflate in [false, true] {
            let archive = zip("bin/ninja", &content, deflate);
            assert_eq!(unzip(&archive, "ninja").unwrap(), content);
            assert_eq!(unzip(&archive, "other"), None);
            for cut in 0..archive.len() {
                // Truncation at any point must not cause a panic.
                drop(unzip(&archive[..cut], "ninja"));
                drop(unzip(&archive[cut..], "ninja"));
            }
        }
    }

    #[test]
    fn without_the_release_the_image_has_one() {
        let directory = tempfile::tempdir().unwrap();
        let [image, run, outside] =
            ["image", "run", "outside"].map(|name| directory.path().join(name));
        let program = image.join("usr/bin/ninja");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        let (blobs, cancel) = (run.join("blobs"), AtomicBool::new(false));
        let place_offline = || place(&run, None, &blobs, &image, true, &cancel);
        let refused = || {
            let error = place_offline().unwrap_err();
            assert_has!(error.to_string(), "`--offline` forbids");
        };
        refused();
        fs::write(&program, "an older one").unwrap();
        refused();
        // Never a program of the host.
        fs::write(&outside, CLIENT).unwrap();
        fs::remove_file(&program).unwrap();
        std::os::unix::fs::symlink(&outside, &program).unwrap();
        refused();
        assert!(!run.exists());

        fs::remove_file(&program).unwrap();
        fs::write(&program, CLIENT).unwrap();
        let note = place_offline().unwrap().unwrap();
        assert!(
            note.ends_with("using `/usr/bin/ninja` of the image"),
            "{note}"
        );
        assert_eq!(fs::read(run.join(NAME)).unwrap(), CLIENT);
    }
}
