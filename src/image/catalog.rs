//! Owns finding recipes by name: in the user's directories first, then among those compiled in.

use std::path::{Path, PathBuf};

use super::Recipe;
use crate::error::{Error, Result};
use crate::{builtin, suggest};

/// A recipe that can be named.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// The file, or `None` where it is compiled in.
    pub path: Option<PathBuf>,
}

/// Returns every recipe, the user's before the built-in ones of the same name.
pub fn list(directories: &[PathBuf]) -> Result<Vec<Listed>> {
    let mut found: Vec<Listed> = Vec::new();
    let mut add = |name: &str, path: Option<PathBuf>| {
        if !found.iter().any(|known| known.name == name) {
            found.push(Listed {
                name: name.to_owned(),
                path,
            });
        }
    };
    for directory in directories {
        let entries = match fs_err::read_dir(directory) {
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
                ) =>
            {
                continue;
            }
            other => other?,
        };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "toml")
                && let Some(name) = path.file_stem().and_then(|name| name.to_str())
            {
                add(name, Some(path.clone()));
            }
        }
    }
    for (name, _) in builtin::toml_files(&builtin::IMAGES) {
        add(name, None);
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Loads the recipe of that name.
pub fn find(directories: &[PathBuf], name: &str) -> Result<Recipe> {
    let listed = list(directories)?;
    let Some(found) = listed.iter().find(|recipe| recipe.name == name) else {
        let error = Error::not_found(format!("no image `{}`", name.escape_debug()));
        return Err(
            match suggest::closest(name, listed.iter().map(|recipe| recipe.name.as_str())) {
                Some(close) => error.help(format!("did you mean `{close}`?")),
                None => error.help("rockenv image ls"),
            },
        );
    };
    match &found.path {
        Some(path) => Recipe::load(path),
        None => {
            let text = builtin::toml_files(&builtin::IMAGES)
                .into_iter()
                .find(|(known, _)| *known == name);
            let (_, text) =
                text.ok_or_else(|| Error::unexpected("a compiled-in recipe is gone"))?;
            Recipe::parse(text, name, Path::new("/"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_recipe_is_valid() {
        let names: Vec<String> = list(&[])
            .unwrap()
            .into_iter()
            .map(|listed| listed.name)
            .collect();
        for name in &names {
            find(&[], name).unwrap();
        }
        for name in ["arch", "fedora", "therock-manylinux", "ubuntu-24.04"] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
    }

    #[test]
    fn a_users_recipe_comes_first_and_a_typo_is_answered() {
        let directory = tempfile::tempdir().unwrap();
        fs_err::write(
            directory.path().join("debian-trixie.toml"),
            "schema = 1\nprovider = \"directory\"\n[directory]\npath = \"/srv/tree\"\n",
        )
        .unwrap();
        let directories = [directory.path().to_path_buf()];
        assert_eq!(
            find(&directories, "debian-trixie").unwrap().provider(),
            "directory"
        );
        let error = find(&directories, "debian-trixi").unwrap_err();
        assert_eq!(error.help_text(), Some("did you mean `debian-trixie`?"));
    }
}
