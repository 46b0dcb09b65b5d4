//! Owns the compiled-in files: the repository's own profiles, images and hooks, so the binary works alone.

use include_dir::{Dir, include_dir};

/// `profiles/`: `<name>.toml`, and the files that the profiles copy.
pub(crate) static PROFILES: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/profiles");

/// `images/`: `<name>.toml`.
pub(crate) static IMAGES: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/images");

/// `hooks/`: `<name>/hook.toml`, and the files next to it.
pub(crate) static HOOKS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/hooks");

/// Returns the names and texts of the `<name>.toml` at the top of a compiled-in directory, sorted.
pub(crate) fn toml_files(dir: &'static Dir<'static>) -> Vec<(&'static str, &'static str)> {
    let mut files: Vec<_> = dir
        .files()
        .filter_map(|file| {
            let name = file.path().to_str()?.strip_suffix(".toml")?;
            Some((name, file.contents_utf8()?))
        })
        .collect();
    files.sort_unstable();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    // Commands of two envs often have the same process id, because each container counts its own. Files in a shared
    // cache would have the same name.
    #[test]
    fn no_script_names_a_file_by_its_process() {
        let files = PROFILES.dirs().flat_map(Dir::files);
        for file in files.filter(|file| file.path().extension().is_some_and(|end| end == "sh")) {
            let text = file.contents_utf8().unwrap();
            assert!(!text.contains("$$"), "{}", file.path().display());
        }
    }

    // `include_dir` notices a changed file, but cargo does not rebuild for a new one.
    #[test]
    fn nothing_new_was_forgotten() {
        for (dir, built) in [
            ("profiles", &PROFILES),
            ("images", &IMAGES),
            ("hooks", &HOOKS),
        ] {
            let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(dir);
            let mut left = vec![root.clone()];
            while let Some(path) = left.pop() {
                for entry in fs_err::read_dir(path).unwrap() {
                    let path = entry.unwrap().path();
                    let inside = path.strip_prefix(&root).unwrap();
                    assert!(
                        built.get_entry(inside).is_some(),
                        "{dir}/{} is not compiled in: touch src/sys/builtin.rs",
                        inside.display()
                    );
                    if path.is_dir() {
                        left.push(path);
                    }
                }
            }
        }
    }
}
