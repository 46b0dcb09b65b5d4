//! Owns the host directories that the steps of a profile can write to. `up` shows them, and asks before the first
//! build, unless all of the profile's files are trusted.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::plan::resolve::{self, Access, VolumeSource};
use crate::profile::{Origin, Profile};
use crate::store::config::Config;
use crate::store::path_volumes::follow;
use crate::sys::error::{Result, if_exists};
use crate::sys::trust::{self, TrustState, Trusted};
use crate::up::context::Context;
use crate::up::select::Selection;

const OUTSIDE: &str = "outside its directory and your home";
const HOME: &str = "contains your home";
const HIDDEN: &str = "hidden in your home";
const NEW: &str = "new in the file, and outside its directory";

/// Host directories that the steps of a profile can write to, without the user's consent so far.
#[derive(Debug, Serialize)]
pub(crate) struct HostWrites {
    #[serde(skip)]
    file: PathBuf,
    pub(crate) writes: BTreeSet<PathBuf>,
    pub(crate) asks: Vec<PathBuf>,
    /// The reason to ask, for each of `asks`.
    #[serde(skip)]
    reasons: Vec<&'static str>,
    /// Directories with earlier consent.
    #[serde(skip)]
    known: Vec<PathBuf>,
}

impl HostWrites {
    /// Returns where the steps of a profile can write; `None` if all of its files are trusted, or the user has agreed.
    pub(crate) fn new(cx: &Context, selection: &Selection) -> Result<Option<Self>> {
        let config = &cx.config;
        let Some(file) = untrusted(config, &selection.profile) else {
            return Ok(None);
        };
        let writes = writable(selection)?;
        let known = Trusted::read(&config.user_dir, file);
        // A step may have changed the file since the caller looked at it, so new directories in it need consent.
        let is_known = known.is_some()
            || config.current.state == TrustState::Changed && config.current.contains(file);
        let known = known.unwrap_or_default().writes;
        if writes.iter().all(|path| known.contains(path)) {
            return Ok(None);
        }
        let home = fs_err::canonicalize(&config.host_home).ok();
        let home = home.as_deref().filter(|home| home.parent().is_some());
        let beside = file.parent().unwrap_or(file);
        let asked = writes.iter().filter(|path| !known.contains(path));
        let asked = asked.filter_map(|path| {
            let is_new = is_known && !known.iter().any(|known| differ_in_target(known, path));
            Some((path.clone(), reason(path, beside, home, is_new)?))
        });
        let (asks, reasons) = asked.unzip();
        Ok(Some(Self {
            file: file.to_owned(),
            writes,
            asks,
            reasons,
            known,
        }))
    }

    /// Returns a sentence about the writes, for `plan`.
    pub(crate) fn planned(&self) -> String {
        let writes = format!("steps can write to {}", shown(&self.writes));
        match self.asks.is_empty() {
            true => writes,
            false => format!(
                "{writes}; `up` asks before they write to {}",
                shown(&self.asks)
            ),
        }
    }
}

/// Returns the first untrusted file of a profile: the named one, or one that a trusted file extends.
fn untrusted<'p>(config: &Config, profile: &'p Profile) -> Option<&'p Path> {
    let mut files = profile.files().filter_map(|(origin, _)| match origin {
        Origin::File(path) => Some(path.as_path()),
        Origin::Builtin(_) => None,
    });
    files.find(|file| {
        !trust::is_listed(file, config.trusted_dirs.as_deref())
            && !config.current.covers(file)
            && !is_own(config, file)
    })
}

/// Returns whether a file is one of the user's own profiles: in a profile directory, or where a link in one leads.
fn is_own(config: &Config, file: &Path) -> bool {
    let own = config.profile_dirs.iter().filter(|one| !one.current);
    own.map(|one| &one.path).any(|directory| {
        let entries = fs_err::read_dir(directory).into_iter().flatten().flatten();
        let mut places = entries.map(|entry| entry.path()).chain([directory.clone()]);
        places.any(|place| fs_err::canonicalize(place).is_ok_and(|real| file.starts_with(real)))
    })
}

/// Shows where the steps of a profile with an untrusted file can write. Asks about directories outside of both that
/// file's directory and the user's home, about the home itself and hidden directories in it, and about new ones in a
/// known file. Remembers consent.
pub(crate) fn confirm(cx: &Context, selection: &Selection) -> Result<()> {
    let Some(found) = HostWrites::new(cx, selection)? else {
        return Ok(());
    };
    let (file, writes) = (found.file.display(), shown(&found.writes));
    let message = format!("steps of `{file}` can write to: {writes}");
    cx.ui.note(&message);
    if !found.asks.is_empty() {
        let asks = found.asks.iter().zip(&found.reasons);
        let asks: Vec<String> = asks
            .map(|(path, reason)| format!("`{}` ({reason})", path.display()))
            .collect();
        if !cx.ui.settings().can_answer() {
            let message = format!("steps would write to {}", asks.join(", "));
            return Err(usage!("{message}").help("pass `--yes` to allow it"));
        }
        let question = format!("allow them to write to {}?", asks.join(", "));
        if !cx.ui.confirm(&question)? {
            return Err(usage!("nothing changed"));
        }
    }
    let mut writes = found.writes;
    writes.extend(found.known);
    let trusted = Trusted {
        path: found.file,
        digest: None,
        writes: writes.into_iter().collect(),
    };
    trusted.write(&cx.config.user_dir)
}

/// Returns why `up` asks about a directory, if it does. `beside` is the directory of the profile's file, and `is_new`
/// whether the file was used without this directory before.
fn reason(path: &Path, beside: &Path, home: Option<&Path>, is_new: bool) -> Option<&'static str> {
    let is_beside = path.starts_with(beside);
    let Some(home) = home else {
        return (!is_beside).then_some(OUTSIDE);
    };
    let is_hidden = |below: &Path| {
        let mut names = below.components();
        names.any(|name| name.as_os_str().as_bytes().starts_with(b"."))
    };
    match path.strip_prefix(home) {
        _ if home.starts_with(path) => Some(HOME),
        // A file in the home itself has all of the home beside it.
        _ if is_beside && !home.starts_with(beside) => None,
        Ok(below) if is_hidden(below) => Some(HIDDEN),
        Ok(_) => (is_new && !is_beside).then_some(NEW),
        Err(_) => (!is_beside).then_some(OUTSIDE),
    }
}

/// Returns whether two paths differ only in names of targets, as those of a profile for several targets do.
fn differ_in_target(one: &Path, other: &Path) -> bool {
    let without = |path: &Path| {
        let text = path.to_string_lossy();
        let parts = text.split("gfx").enumerate().map(|(at, part)| match at {
            0 => part.to_owned(),
            _ => part
                .trim_start_matches(|digit: char| digit.is_ascii_hexdigit())
                .to_owned(),
        });
        parts.collect::<Vec<_>>()
    };
    without(one) == without(other)
}

fn shown<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> String {
    let paths = paths.into_iter();
    let paths: Vec<String> = paths.map(|path| format!("`{}`", path.display())).collect();
    paths.join(", ")
}

/// Returns the host directories that steps can write to, with links resolved as far as the paths exist.
fn writable(selection: &Selection) -> Result<BTreeSet<PathBuf>> {
    let volumes = resolve::volumes(&selection.profile, &selection.inputs)?;
    let mut writes = BTreeSet::new();
    for volume in volumes {
        match (volume.access, volume.source) {
            (Access::Rw, VolumeSource::Path(path)) => {
                writes.insert(without_links(&path)?);
            }
            (Access::Rw, VolumeSource::Git(_) | VolumeSource::Store) | (Access::Ro, _) => {}
        }
    }
    Ok(writes)
}

fn without_links(path: &Path) -> Result<PathBuf> {
    follow(
        &std::path::absolute(path)?,
        &|entry| match fs_err::read_link(entry) {
            // The entry is not a link.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(None),
            target => if_exists(target),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_and_new_directories_of_the_home_are_asked_about() {
        for (path, beside, asks, asks_if_new) in [
            // Beside the file, or below that directory.
            ("/home/me/work", "/home/me/work", None, None),
            ("/home/me/work/.git/hooks", "/home/me/work", None, None),
            ("/home/me/.local/p/out", "/home/me/.local/p", None, None),
            ("/srv/work/out", "/srv/work", None, None),
            // In the home.
            ("/home/me/out", "/home/me/work", None, Some(NEW)),
            ("/home/me/out", "/srv/work", None, Some(NEW)),
            ("/home/me/.ssh", "/home/me/work", Some(HIDDEN), Some(HIDDEN)),
            ("/home/me/a/.b/c", "/srv/work", Some(HIDDEN), Some(HIDDEN)),
            // The file is in the home itself, or above.
            ("/home/me/out", "/home/me", None, None),
            ("/home/me/.ssh", "/home/me", Some(HIDDEN), Some(HIDDEN)),
            ("/home/me/.ssh", "/home", Some(HIDDEN), Some(HIDDEN)),
            ("/home/me", "/home/me", Some(HOME), Some(HOME)),
            // The home itself, and its parent.
            ("/home/me", "/home/me/work", Some(HOME), Some(HOME)),
            ("/home", "/home/me/work", Some(HOME), Some(HOME)),
            // Elsewhere.
            ("/srv/.out", "/home/me/work", Some(OUTSIDE), Some(OUTSIDE)),
            ("/home/men", "/home/me/work", Some(OUTSIDE), Some(OUTSIDE)),
        ] {
            let home = Some(Path::new("/home/me"));
            let found =
                [false, true].map(|is_new| reason(path.as_ref(), beside.as_ref(), home, is_new));
            assert_eq!(found, [asks, asks_if_new], "{path} beside {beside}");
        }
        let nowhere = reason("/srv/out".as_ref(), "/work".as_ref(), None, false);
        assert_eq!(nowhere, Some(OUTSIDE));
    }

    #[test]
    fn what_a_trusted_file_extends_elsewhere_is_not_trusted() {
        let place = tempfile::tempdir().unwrap();
        let real = fs_err::canonicalize(place.path()).unwrap();
        let (work, user) = (real.join("work"), real.join("user"));
        let step = "image = 'i'\n[[step]]\nname = 's'\nrun = 'true'\n";
        for (file, text) in [
            ("work/x.toml", step),
            ("work/profiles/near.toml", step),
            ("work/profiles/own.toml", "extends = 'near.toml'\n"),
            ("work/profiles/far.toml", "extends = '../x.toml'\n"),
            ("work/profiles/mine.toml", "extends = 'linked'\n"),
            ("user/rockenv/profiles/plain.toml", step),
            ("user/rockenv/profiles/over.toml", "extends = 'far'\n"),
            ("dotfiles/linked.toml", step),
            ("dotfiles/checked.toml", step),
        ] {
            let path = real.join(file);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, format!("schema = 1\n{text}")).unwrap();
        }
        for (file, link) in [
            ("linked.toml", user.join("rockenv/profiles/linked.toml")),
            ("checked.toml", work.join("profiles/checked.toml")),
        ] {
            let file = real.join("dotfiles").join(file);
            std::os::unix::fs::symlink(file, link).unwrap();
        }
        let trusted = Trusted {
            path: work.clone(),
            digest: Some(trust::digest(&work).unwrap()),
            writes: Vec::new(),
        };
        trusted.write(&user.join("rockenv")).unwrap();
        let variables = |listed: &Path| {
            [
                ("XDG_CONFIG_HOME".to_owned(), user.display().to_string()),
                (trust::VARIABLE.to_owned(), listed.display().to_string()),
            ]
        };
        let found = |listed: &Path, name: &str| {
            let (config, _) = Config::of(variables(listed).into(), Some(&work)).unwrap();
            let profile = crate::profile::load(&config.profile_dirs, name).unwrap();
            untrusted(&config, &profile).map(Path::to_owned)
        };
        let nowhere = Path::new("/nowhere");
        for name in ["near", "own", "mine", "plain", "linked", "checked"] {
            assert_eq!(found(nowhere, name), None, "{name}");
        }
        let outside = work.join("x.toml");
        let named = outside.to_str().unwrap();
        for name in ["far", "over", named] {
            assert_eq!(found(nowhere, name), Some(outside.clone()), "{name}");
            assert_eq!(found(&work, name), None, "{name}");
        }
    }

    #[test]
    fn a_path_leads_back_from_what_does_not_exist() {
        let place = tempfile::tempdir().unwrap();
        let real = fs_err::canonicalize(place.path()).unwrap();
        fs_err::create_dir(real.join("there")).unwrap();
        std::os::unix::fs::symlink("there", real.join("link")).unwrap();
        std::os::unix::fs::symlink("gone", real.join("dangling")).unwrap();
        for (path, leads_to) in [
            ("there/../absent", "absent"),
            ("there/absent/../../other", "other"),
            ("absent/../link/new", "there/new"),
            ("absent/deeper/../../link/../out", "out"),
            ("dangling/new", "gone/new"),
        ] {
            let found = without_links(&real.join(path)).unwrap();
            assert_eq!(found, real.join(leads_to), "{path}");
        }
        // A part that cannot be read may be a link to anywhere.
        std::os::unix::fs::symlink("loop", real.join("loop")).unwrap();
        without_links(&real.join("loop/out")).unwrap_err();
        let found = without_links(&real.join("there")).unwrap();
        assert_eq!(found.as_os_str(), real.join("there").as_os_str());
    }

    #[test]
    fn another_target_is_no_new_directory() {
        let differ = |one: &str, other: &str| differ_in_target(one.as_ref(), other.as_ref());
        assert!(differ("/home/me/out/gfx1103", "/home/me/out/gfx90a"));
        assert!(differ("/home/me/out-gfx1103/x", "/home/me/out-gfx1201/x"));
        assert!(!differ("/home/me/out/gfx1103", "/home/me/out"));
        assert!(!differ("/home/me/out/gfx1103", "/home/me/other/gfx1103"));
        assert!(!differ(
            "/home/me/out/gfx1103",
            "/home/me/out/gfx1103/../.ssh"
        ));
    }
}
