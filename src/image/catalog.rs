//! Owns finding image recipes by name, and reading them.

use std::path::Path;

use super::Recipe;
use crate::sys::catalog::{CatalogEntry, Directory};
use crate::sys::error::Result;
use crate::sys::{builtin, catalog};

/// Returns every recipe. The user's recipes precede built-in ones of the same name.
pub fn list(directories: &[Directory]) -> Result<Vec<CatalogEntry>> {
    let builtin = builtin::toml_files(&builtin::IMAGES);
    let names = builtin.into_iter().map(|(name, _)| name);
    catalog::list(directories, names, catalog::toml_file)
}

pub fn find(directories: &[Directory], name: &str) -> Result<Recipe> {
    match &catalog::named(&list(directories)?, "image", name)?.path {
        Some(path) => Recipe::load(directories, path),
        None => {
            let mut builtin = builtin::toml_files(&builtin::IMAGES).into_iter();
            let text = builtin.find(|(known, _)| *known == name);
            let (_, text) = text.ok_or_else(|| unexpected!("a built-in recipe is missing"))?;
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
        let file = directory.path().join("debian-trixie.toml");
        let text =
            "schema = 1\nprovider = \"directory\"\n[directory]\npath = \"/srv/tree\"\n".to_owned();
        fs_err::write(&file, &text).unwrap();
        let directories = [directory.path().to_path_buf().into()];
        assert_eq!(
            find(&directories, "debian-trixie")
                .unwrap()
                .source
                .provider(),
            "directory"
        );
        let error = find(&directories, "debian-trixi").unwrap_err();
        assert_eq!(error.help_text(), Some("did you mean `debian-trixie`?"));
        fs_err::write(&file, text + &"\n".repeat(1 << 20)).unwrap();
        let error = find(&directories, "debian-trixie").unwrap_err();
        assert_has!(error.message(), "is larger than 1024 KiB");
    }
}
