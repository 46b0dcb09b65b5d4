//! Owns deciding what a hook changes: pure, from the current content of files to the new one.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::patch::Replayed;
use super::{Edit, FilePatch, Hook, parse_patch};
use crate::sys::error::{Error, Result};

/// The entry at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileInSource {
    File {
        bytes: Vec<u8>,
        /// Whether anybody may execute it.
        executable: bool,
    },
    /// Nothing.
    Absent,
    /// Nothing, and its parent directory is empty: a submodule that was not fetched.
    Unfetched,
}

/// The new entry at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookChange {
    Write {
        bytes: Vec<u8>,
        /// Whether it may be executed; default: unchanged.
        executable: Option<bool>,
    },
    /// Nothing.
    Remove,
}

/// The changes of a hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookChanges {
    /// By path below the volume.
    pub files: BTreeMap<PathBuf, HookChange>,
    /// Patches that the source already has, by name.
    pub already: Vec<String>,
}

/// Decides the changes of the patches and edits of `hook`; `read` returns the entry at a path below the volume. The
/// script is not included.
///
/// Each patch and edit sees the changes of earlier ones. A source that they do not fit is an error of kind `Invalid`.
pub fn apply(hook: &Hook, read: &dyn Fn(&Path) -> Result<FileInSource>) -> Result<HookChanges> {
    let mut changes = HookChanges::default();
    for patch in &hook.work.patches {
        let bytes = patch
            .bytes
            .as_ref()
            .ok_or_else(|| unexpected!("patch `{}` was not fetched", patch.name))?;
        let files = parse_patch(bytes, patch.strip)
            .map_err(|error| hook.refuses(format!("`{}`: {}", patch.name, error.message())))?;
        let mut outcomes = Vec::new();
        for file in &files {
            let path = patch.directory.join(&file.path);
            let found = changes.file(&path, read)?;
            if found == FileInSource::Unfetched {
                return Err(unfetched(hook, &path));
            }
            let outcome = file.apply(&found).map_err(|why| {
                hook.refuses(format!("`{}`: `{}`: {why}", patch.name, path.display()))
            })?;
            outcomes.push((path, outcome));
        }
        let missing: Vec<&PathBuf> = outcomes
            .iter()
            .filter(|(_, outcome)| outcome.is_none())
            .map(|(path, _)| path)
            .collect();
        match missing[..] {
            [] => {}
            _ if missing.len() == outcomes.len() => changes.already.push(patch.name.clone()),
            [first, ..] => {
                return Err(hook.refuses(format!(
                    "`{}` is partly applied in the source: `{}` already has it",
                    patch.name,
                    first.display()
                )));
            }
        }
        for (path, outcome) in outcomes {
            if let Some(change) = outcome {
                changes.files.insert(path, change);
            }
        }
    }
    for edit in &hook.work.edits {
        let bytes = match changes.file(&edit.file, read)? {
            FileInSource::File { bytes, .. } => bytes,
            FileInSource::Unfetched => return Err(unfetched(hook, &edit.file)),
            FileInSource::Absent => {
                return Err(hook.refuses(format!("there is no `{}`", edit.file.display())));
            }
        };
        let bytes = replaced(edit, &bytes).map_err(|found| {
            let times = |count: usize| match count {
                0 => "not there".to_owned(),
                1 => "there once".to_owned(),
                more => format!("there {more} times"),
            };
            hook.refuses(format!(
                "`{}` in `{}` should be {}, and is {}: upstream has moved",
                crate::profile::shorten(&edit.find),
                edit.file.display(),
                times(edit.count),
                times(found)
            ))
        })?;
        changes.write(&edit.file, bytes);
    }
    Ok(changes)
}

fn unfetched(hook: &Hook, path: &Path) -> Error {
    hook.refuses(format!(
        "`{}` is in a submodule that is not fetched yet",
        path.display()
    ))
    .help("from-step = \"STEP\" in its hook.toml names a step after the one that fetches it")
}

impl HookChanges {
    /// Returns the entry at a path after these changes.
    pub fn file(
        &self,
        path: &Path,
        read: &dyn Fn(&Path) -> Result<FileInSource>,
    ) -> Result<FileInSource> {
        Ok(match self.files.get(path) {
            Some(HookChange::Remove) => FileInSource::Absent,
            Some(HookChange::Write { bytes, executable }) => FileInSource::File {
                bytes: bytes.clone(),
                executable: executable.unwrap_or(false),
            },
            None => read(path)?,
        })
    }

    fn write(&mut self, path: &Path, bytes: Vec<u8>) {
        let executable = match self.files.get(path) {
            Some(HookChange::Write { executable, .. }) => *executable,
            _ => None,
        };
        self.files
            .insert(path.to_owned(), HookChange::Write { bytes, executable });
    }
}

/// Replaces every occurrence, or returns their number.
fn replaced(edit: &Edit, bytes: &[u8]) -> std::result::Result<Vec<u8>, usize> {
    let (mut out, mut rest, mut found) = (Vec::with_capacity(bytes.len()), bytes, 0);
    while let Some(place) = occurrence(edit, rest) {
        out.extend_from_slice(&rest[..place.start]);
        out.extend_from_slice(edit.replace.as_bytes());
        let line = &rest[place.clone()];
        if edit.whole_lines && !edit.replace.is_empty() && !edit.replace.ends_with('\n') {
            out.extend_from_slice(ending(line));
        }
        rest = &rest[place.end..];
        found += 1;
    }
    out.extend_from_slice(rest);
    match found == edit.count {
        true => Ok(out),
        false => Err(found),
    }
}

/// Returns how a line ends.
fn ending(line: &[u8]) -> &[u8] {
    match line {
        [.., b'\r', b'\n'] => b"\r\n",
        [.., b'\n'] => b"\n",
        _ => b"",
    }
}

/// Returns the place of the next occurrence.
fn occurrence(edit: &Edit, bytes: &[u8]) -> Option<Range<usize>> {
    let find = edit.find.as_bytes();
    if !edit.whole_lines {
        let start = bytes
            .windows(find.len())
            .position(|window| window == find)?;
        return Some(start..start + find.len());
    }
    let mut start = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let after = line.trim_ascii().strip_prefix(find).map(<[u8]>::trim_ascii);
        if after.is_some_and(|after| {
            after.is_empty() || after.starts_with(b"#") || after.starts_with(b"//")
        }) {
            return Some(start..start + line.len());
        }
        start += line.len();
    }
    None
}

impl FilePatch {
    /// Applies this part of a patch to a file; `None` if the file already has it.
    fn apply(&self, found: &FileInSource) -> std::result::Result<Option<HookChange>, String> {
        let (bytes, executable) = match (found, self.creates) {
            (FileInSource::File { bytes, executable }, _) => (bytes.as_slice(), *executable),
            (FileInSource::Absent, true) => {
                return Ok(Some(HookChange::Write {
                    bytes: self.forward(b"")?.bytes,
                    executable: self.executable,
                }));
            }
            (FileInSource::Absent, false) if self.removes => return Ok(None),
            (FileInSource::Absent | FileInSource::Unfetched, _) => {
                return Err("there is no such file".to_owned());
            }
        };
        if self.creates {
            return match self.backward(bytes).is_ok_and(|rest| rest.bytes.is_empty()) {
                true => Ok(None),
                false => Err("it creates this file, but another one exists".to_owned()),
            };
        }
        let forward = self.forward(bytes);
        if self.removes {
            return match forward?.bytes.is_empty() {
                true => Ok(Some(HookChange::Remove)),
                false => Err("it removes this file, but the file has other content".to_owned()),
            };
        }
        if self.hunks.is_empty() {
            // Only a change of the mode.
            return Ok(
                (self.executable != Some(executable)).then(|| HookChange::Write {
                    bytes: bytes.to_vec(),
                    executable: self.executable,
                }),
            );
        }
        // After applying a patch, it often fits in a second place too: it must be clear which of the two cases it is.
        let weight = |replayed: &Replayed| (replayed.in_place, replayed.matched);
        match (forward, self.backward(bytes)) {
            (Ok(with), Ok(without)) => match weight(&with).cmp(&weight(&without)) {
                Ordering::Greater => Ok(Some(with)),
                Ordering::Less => Ok(None),
                Ordering::Equal => Err("cannot tell whether it is already applied".to_owned()),
            },
            (Ok(with), Err(_)) => Ok(Some(with)),
            (Err(_), Ok(_)) => Ok(None),
            (Err(why), Err(_)) => Err(why),
        }
        .map(|with| {
            with.map(|with| HookChange::Write {
                bytes: with.bytes,
                executable: self.executable,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::hook::{Applies, Patch, Work};

    fn hook(edits: Vec<Edit>, patches: &[&str]) -> Hook {
        let patches = patches.iter().enumerate().map(|(index, text)| Patch {
            name: format!("{index}.patch"),
            sha256: String::new(),
            directory: PathBuf::new(),
            strip: 1,
            bytes: Some(text.as_bytes().to_vec()),
        });
        Hook {
            name: "h".into(),
            description: String::new(),
            why: String::new(),
            links: Vec::new(),
            path: None,
            applies: Applies::default(),
            work: Work {
                volume: "src".into(),
                from_step: None,
                patches: patches.collect(),
                edits,
                script: None,
            },
        }
    }

    fn edit(find: &str, replace: &str, count: usize) -> Edit {
        Edit {
            file: "f".into(),
            find: find.into(),
            whole_lines: false,
            replace: replace.into(),
            count,
        }
    }

    fn on(hook: &Hook, text: &str) -> Result<Option<String>> {
        let read = |path: &Path| {
            Ok(match path == Path::new("f") {
                true => FileInSource::File {
                    bytes: text.as_bytes().to_vec(),
                    executable: false,
                },
                false => FileInSource::Absent,
            })
        };
        let changes = apply(hook, &read)?;
        Ok(changes
            .files
            .get(Path::new("f"))
            .map(|change| match change {
                HookChange::Write { bytes, .. } => String::from_utf8(bytes.clone()).unwrap(),
                HookChange::Remove => "removed".to_owned(),
            }))
    }

    #[test]
    fn an_edit_is_made_as_often_as_it_says_or_not_at_all() {
        let one = hook(vec![edit("a", "bb", 2)], &[]);
        assert_eq!(on(&one, "a-a").unwrap().unwrap(), "bb-bb");
        for (text, words) in [
            ("-", "should be there 2 times, and is not there"),
            ("a", "and is there once"),
            ("aaa", "and is there 3 times"),
        ] {
            let error = on(&one, text).unwrap_err();
            assert_has!(error.message(), words);
            assert!(error.help_text().unwrap().contains("hook check"));
        }
    }

    #[test]
    fn a_line_is_found_with_any_blanks_and_comment() {
        let line = Edit {
            whole_lines: true,
            ..edit("\"a\",", "", 1)
        };
        let one = hook(vec![line], &[]);
        for text in [
            "\"a\",\n",
            "\t\"a\",  # why\n",
            "    \"a\", // b\r\n",
            "\"a\",",
        ] {
            let whole = format!("[\n{text}");
            assert_eq!(on(&one, &whole).unwrap().unwrap(), "[\n", "{text}");
            assert_eq!(
                on(&one, &format!("{text}]\n")).is_ok(),
                text.ends_with('\n')
            );
        }
        for (text, words) in [
            ("# \"a\",\n", "is not there"),
            ("\"a\", \"b\",\n", "is not there"),
            ("x = \"a\",\n", "is not there"),
            ("\"a\",\n\"a\", # again\n", "is there 2 times"),
        ] {
            let error = on(&one, text).unwrap_err();
            assert_has!(error.message(), words);
        }
    }

    #[test]
    fn a_replaced_line_keeps_its_ending() {
        let on_lines = |replace: &str, text: &str| {
            let line = Edit {
                whole_lines: true,
                ..edit("x = 1", replace, 1)
            };
            on(&hook(vec![line], &[]), text).unwrap().unwrap()
        };
        for (replace, text, new) in [
            ("x = 2", "x = 1\nprint(x)\n", "x = 2\nprint(x)\n"),
            ("x = 2", "x = 1\r\nprint(x)\r\n", "x = 2\r\nprint(x)\r\n"),
            ("x = 2", "y\nx = 1", "y\nx = 2"),
            ("x = 2\n", "x = 1\nprint(x)\n", "x = 2\nprint(x)\n"),
            ("a\nb", "x = 1\nprint(x)\n", "a\nb\nprint(x)\n"),
            ("", "x = 1\nprint(x)\n", "print(x)\n"),
        ] {
            assert_eq!(on_lines(replace, text), new, "{replace:?} in {text:?}");
        }
    }

    #[test]
    fn edits_see_what_those_before_them_did() {
        let two = hook(vec![edit("a", "b", 1), edit("b", "c", 2)], &[]);
        assert_eq!(on(&two, "a b").unwrap().unwrap(), "c c");
    }

    const PATCH: &str = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n";

    #[test]
    fn a_patch_applies_elsewhere_in_the_file_and_is_known_when_it_is_there() {
        let patch = hook(Vec::new(), &[PATCH]);
        assert_eq!(
            on(&patch, "zero\none\ntwo\nthree\n").unwrap().unwrap(),
            "zero\none\nTWO\nthree\n"
        );
        assert_eq!(on(&patch, "one\nTWO\nthree\n").unwrap(), None);
        let error = on(&patch, "one\n2\nthree\n").unwrap_err();
        assert_has!(error.message(), "hunk 1");
    }

    #[test]
    fn what_a_patch_added_is_not_added_once_more_elsewhere() {
        // The same three lines occur again further down.
        let insert = "--- a/f\n+++ b/f\n@@ -1,3 +1,4 @@\n a\n+new\n b\n c\n";
        let patch = hook(Vec::new(), &[insert]);
        let (without, with) = ("a\nb\nc\n-\na\nb\nc\n", "a\nnew\nb\nc\n-\na\nb\nc\n");
        assert_eq!(on(&patch, without).unwrap().unwrap(), with);
        assert_eq!(on(&patch, with).unwrap(), None);
        // Moved as a whole, too.
        assert_eq!(on(&patch, &format!("0\n{with}")).unwrap(), None);
        let error = on(&patch, &format!("0\n{without}")).unwrap_err();
        let said = error.chain().join(": ");
        assert_has!(said, "fits at both line 2 and line 6");
        // A patch that removes a line is not yet applied while that line exists.
        let remove = "--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n a\n-b\n";
        let patch = hook(Vec::new(), &[remove]);
        assert_eq!(on(&patch, "a\nb\n").unwrap().unwrap(), "a\n");
        assert_eq!(on(&patch, "a\nc\n").unwrap(), None);
    }

    #[test]
    fn half_a_patch_in_the_source_is_refused() {
        let both =
            "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/g\n@@ -0,0 +1 @@\n+new\n";
        let hook = hook(Vec::new(), &[both]);
        let error = on(&hook, "b\n").unwrap_err();
        assert_has!(error.message(), "is partly applied");
        assert_eq!(on(&hook, "a\n").unwrap().unwrap(), "b\n");
    }

    #[test]
    fn a_patch_removes_only_what_it_knows() {
        let remove = "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n";
        let hook = hook(Vec::new(), &[remove]);
        assert_eq!(on(&hook, "a\n").unwrap().unwrap(), "removed");
        assert!(on(&hook, "a\nb\n").is_err());
    }
}
