//! Owns finding profiles, images and hooks by name: first in the user's directories, then among the built-in ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::sys::account;
use crate::sys::error::{Result, if_exists};
use crate::sys::suggest;
use crate::sys::trusted_files::Checked;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    pub path: PathBuf,
    /// Whether it belongs to the current directory: then built-in files take precedence.
    pub current: bool,
    /// Its content at the time of the trust check, if trust depends on the content.
    pub checked: Option<Arc<Checked>>,
}

impl From<PathBuf> for Directory {
    fn from(path: PathBuf) -> Self {
        Self {
            path,
            current: false,
            checked: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogEntry {
    pub name: String,
    /// Its file; `None` for a built-in entry.
    pub path: Option<PathBuf>,
}

/// Returns all named entries, sorted. The first entry of a name wins, and directories may be missing. `of` returns the
/// name and file of a directory's entry, or `None` if it is not one to list.
pub(crate) fn list<'a>(
    directories: &[Directory],
    builtin: impl IntoIterator<Item = &'a str>,
    of: impl Fn(&Path) -> Option<(String, PathBuf)>,
) -> Result<Vec<CatalogEntry>> {
    let mut found: Vec<CatalogEntry> = Vec::new();
    let builtin: Vec<&str> = builtin.into_iter().collect();
    let mut add = |name: String, path: Option<PathBuf>| {
        if !found.iter().any(|known| known.name == name) {
            found.push(CatalogEntry { name, path });
        }
    };
    for directory in directories {
        let entries = match if_exists(fs_err::read_dir(&directory.path)) {
            Err(_) if account::is_missing(&directory.path) => continue,
            entries => entries?.into_iter().flatten(),
        };
        for entry in entries {
            if let Some((name, path)) = of(&entry?.path())
                && !(directory.current && builtin.contains(&name.as_str()))
            {
                add(name, Some(path));
            }
        }
    }
    for name in builtin {
        add(name.to_owned(), None);
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Returns the name of `<name>.toml`. Skips hidden files, which belong to editors.
pub(crate) fn toml_file(path: &Path) -> Option<(String, PathBuf)> {
    let name = path.file_stem()?.to_string_lossy().into_owned();
    let is_toml = path.extension().is_some_and(|end| end == "toml");
    (is_toml && !name.starts_with('.')).then(|| (name, path.to_owned()))
}

/// Returns the entry with that name; `what` is its kind, as in `rockenv WHAT ls`.
pub(crate) fn named<'a>(
    listed: &'a [CatalogEntry],
    what: &str,
    name: &str,
) -> Result<&'a CatalogEntry> {
    if let Some(found) = listed.iter().find(|listed| listed.name == name) {
        return Ok(found);
    }
    let error = not_found!("no {what} `{}`", name.escape_debug());
    let known = listed.iter().map(|listed| listed.name.as_str());
    Err(error.help(suggest::help(name, known, &format!("rockenv {what} ls"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_s_come_first_and_what_is_absent_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b.toml", "a.toml", "c.txt", ".#b.toml"] {
            fs_err::write(directory.path().join(name), "").unwrap();
        }
        let mut directories = [
            directory.path().join("none"),
            directory.path().join("c.txt"),
            directory.path().to_owned(),
        ]
        .map(Directory::from);
        let found = list(&directories, ["a", "z"], toml_file).unwrap();
        let shown: Vec<_> = found
            .iter()
            .map(|listed| (listed.name.as_str(), listed.path.is_some()))
            .collect();
        assert_eq!(shown, [("a", true), ("b", true), ("z", false)]);
        assert_eq!(named(&found, "image", "z").unwrap().path, None);
        directories[2].current = true;
        let found = list(&directories, ["a", "z"], toml_file).unwrap();
        assert_eq!(named(&found, "image", "a").unwrap().path, None);
        assert!(named(&found, "image", "b").unwrap().path.is_some());
        let error = named(&found, "image", "quite another").unwrap_err();
        assert_eq!(error.help_text(), Some("rockenv image ls"));
    }
}
