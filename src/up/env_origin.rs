//! Owns which profile an env belongs to: the file that it was made from. Another file of the same name must not
//! continue with its build volumes.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::request::UpRequest;
use super::select::Selection;
use crate::profile::Origin;
use crate::remote;
use crate::store::{Store, source};
use crate::sys::address::without_login;
use crate::sys::error::Result;

/// Refuses an env that was made from another profile. Returns a note if that profile is in another checkout of the same
/// repository.
pub(super) fn check(
    store: &Store,
    selection: &Selection,
    request: &UpRequest<'_>,
) -> Result<Option<String>> {
    let (env, origin) = (&selection.name, selection.profile.origin());
    // An env that is about to be removed does not count.
    if store.is_abandoned(env) || store.record(env)?.is_none() {
        return Ok(None);
    }
    // Without a spec there is no origin to compare.
    let Ok(Origin::File(old)) = store.spec(env).map(|spec| spec.origin) else {
        return Ok(None);
    };
    match relation(&old, origin) {
        Relation::Same => Ok(None),
        Relation::Checkout => Ok(Some(format!(
            "env `{env}` was made from `{}`: continuing with another checkout of the same repository",
            old.display()
        ))),
        Relation::Other => {
            let new = request.command("up", &[("--name", Some("NAME"))]);
            Err(usage!("env `{env}` was made from `{}`", old.display())
                .help(format!("{new}, or remove the env first: rockenv rm {env}")))
        }
    }
}

/// How the profile that an env was made from is related to another one.
#[derive(Debug, PartialEq, Eq)]
enum Relation {
    /// The same file; or the old one was moved or removed.
    Same,
    /// The same file in another checkout of the repository.
    Checkout,
    Other,
}

fn relation(old: &Path, new: &Origin) -> Relation {
    let Some(found) = fs::metadata(old).ok().filter(std::fs::Metadata::is_file) else {
        return Relation::Same;
    };
    let Origin::File(new) = new else {
        return Relation::Other;
    };
    let is_same =
        |other: std::fs::Metadata| (found.dev(), found.ino()) == (other.dev(), other.ino());
    let sent = || remote::sent_file(old).is_some_and(|sent| remote::sent_file(new) == Some(sent));
    if fs::metadata(new).is_ok_and(is_same) || sent() {
        return Relation::Same;
    }
    match (in_repository(old), in_repository(new)) {
        (Some(old), Some(new)) if old == new => Relation::Checkout,
        _ => Relation::Other,
    }
}

/// Returns where a file's repository was cloned from, or the repository itself if it was not cloned, and the file's
/// path in the checkout.
fn in_repository(file: &Path) -> Option<(String, PathBuf)> {
    let file = fs::canonicalize(file).ok()?;
    let top = file.ancestors().find(|top| top.join(".git").exists())?;
    let (_, common) = source::git_directories(top).ok()?;
    let directory = fs::canonicalize(common).ok()?;
    let config = source::small_file(&directory.join("config")).ok()?;
    let url = config.and_then(|config| url(&config));
    let repository = url.unwrap_or_else(|| directory.to_string_lossy().into_owned());
    Some((repository, file.strip_prefix(top).ok()?.to_owned()))
}

/// Returns the URL of `origin` in a repository's configuration, without user and password, which differ in each CI job.
fn url(config: &str) -> Option<String> {
    let mut sections = config.lines().map(str::trim);
    sections.find(|line| *line == "[remote \"origin\"]")?;
    let url = sections
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split_once('='))
        .find(|(key, _)| key.trim() == "url")?
        .1
        .trim();
    Some(without_login(url))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_is_another_profile_unless_it_is_gone_sent_again_or_checked_out_again() {
        let place = tempfile::tempdir().unwrap();
        let at = |path: &str| place.path().join(path);
        let put = |path: &str, text: &str| {
            fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            fs::write(at(path), text).unwrap();
        };
        for (place, url) in [
            ("a", "https://one:token@host/x.git"),
            ("b", "https://two:other@host/x.git"),
            ("c", "https://host/y.git"),
        ] {
            let config = format!("[core]\n\tbare = false\n[remote \"origin\"]\n\turl = {url}\n");
            put(&format!("{place}/.git/config"), &config);
            put(&format!("{place}/build.toml"), "");
            put(&format!("{place}/d/build.toml"), "");
        }
        put("local/.git/config", "[core]\n");
        put("local/.git/worktrees/tree/commondir", "../..\n");
        put(
            "tree/.git",
            &format!("gitdir: {}\n", at("local/.git/worktrees/tree").display()),
        );
        for path in ["local/p.toml", "tree/p.toml", "c1/p.toml", "c2/p.toml"] {
            put(path, "");
        }
        let sent = ".cache/rockenv/on";
        for path in ["1/x/p.toml", "1/y/p.toml", "1/y/q.toml", "2/x/p.toml"] {
            put(&format!("{sent}/{path}"), "");
        }
        std::os::unix::fs::symlink(at("c1"), at("link")).unwrap();
        let (sent_old, sent_new) = (format!("{sent}/1/x/p.toml"), format!("{sent}/1/y/p.toml"));
        let cases = [
            ("c1/p.toml", "c1/p.toml", Relation::Same),
            ("c1/p.toml", "c2/p.toml", Relation::Other),
            ("c1/p.toml", "link/p.toml", Relation::Same),
            ("gone/p.toml", "c2/p.toml", Relation::Same),
            (&sent_old, &sent_new, Relation::Same),
            (&sent_old, ".cache/rockenv/on/1/y/q.toml", Relation::Other),
            (&sent_old, ".cache/rockenv/on/2/x/p.toml", Relation::Other),
            ("a/build.toml", "b/build.toml", Relation::Checkout),
            ("a/build.toml", "b/d/build.toml", Relation::Other),
            ("a/build.toml", "a/d/build.toml", Relation::Other),
            ("a/build.toml", "c/build.toml", Relation::Other),
            ("local/p.toml", "tree/p.toml", Relation::Checkout),
        ];
        for (old, new, expected) in cases {
            let found = relation(&at(old), &Origin::File(at(new)));
            assert_eq!(found, expected, "{old} {new}");
        }
        let builtin = Origin::Builtin("build.toml".to_owned());
        assert_eq!(relation(&at("c1/p.toml"), &builtin), Relation::Other);
        assert_eq!(relation(&at("gone"), &builtin), Relation::Same);
    }
}
