//! Owns unified diffs, the format of `diff -u` and `git diff`, applied exactly. A hunk may have moved; its lines must
//! match.

use std::path::PathBuf;

use crate::sys::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePatch {
    /// Path, after stripping.
    pub path: PathBuf,
    /// Whether the file must not exist.
    pub creates: bool,
    pub removes: bool,
    /// The new executable permission, if the patch sets it.
    pub executable: Option<bool>,
    pub hunks: Vec<Hunk>,
}

/// Lines that replace others. Each line includes its newline, except a last line without one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hunk {
    /// Number of the first line before, from 0.
    pub old_start: usize,
    /// Number of the first line after, from 0.
    pub new_start: usize,
    pub old: Vec<Vec<u8>>,
    pub new: Vec<Vec<u8>>,
}

/// The result of a patch on a file, and its reliability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replayed {
    pub bytes: Vec<u8>,
    /// Each hunk was at its declared line.
    pub in_place: bool,
    pub matched: usize,
}

impl FilePatch {
    /// Returns the content with the patch applied.
    pub fn forward(&self, bytes: &[u8]) -> std::result::Result<Replayed, String> {
        let hunks = self.hunks.iter();
        let hunks = hunks.map(|hunk| (hunk.old_start, &hunk.old, &hunk.new));
        replay(bytes, hunks)
    }

    /// Returns the content with the patch reverted.
    pub fn backward(&self, bytes: &[u8]) -> std::result::Result<Replayed, String> {
        let hunks = self.hunks.iter();
        let hunks = hunks.map(|hunk| (hunk.new_start, &hunk.new, &hunk.old));
        replay(bytes, hunks)
    }
}

type Lines = Vec<Vec<u8>>;

fn replay<'a>(
    bytes: &[u8],
    hunks: impl Iterator<Item = (usize, &'a Lines, &'a Lines)>,
) -> std::result::Result<Replayed, String> {
    let lines: Vec<&[u8]> = bytes.split_inclusive(|byte| *byte == b'\n').collect();
    let mut replayed = Replayed {
        bytes: Vec::with_capacity(bytes.len()),
        in_place: true,
        matched: 0,
    };
    let (mut next, mut moved) = (0_usize, 0_isize);
    for (index, (start, old, new)) in hunks.enumerate() {
        let wanted = start.saturating_add_signed(moved);
        let fits = |at: &usize| {
            lines
                .get(*at..*at + old.len())
                .is_some_and(|found| found.iter().zip(old).all(|(a, b)| *a == b.as_slice()))
        };
        let number = index + 1;
        let at = if wanted >= next && fits(&wanted) {
            wanted
        } else {
            // A hunk without old lines fits anywhere, so only its declared line is right. Two possible places are an
            // error.
            let mut places = (next..=lines.len()).filter(|at| !old.is_empty() && fits(at));
            match (places.next(), places.next()) {
                (Some(at), None) => at,
                (Some(one), Some(other)) => {
                    return Err(format!(
                        "hunk {number} is not at its line, and applies at both line {} and line {}",
                        one + 1,
                        other + 1
                    ));
                }
                (None, _) => return Err(format!("hunk {number} does not apply")),
            }
        };
        replayed.bytes.extend(lines[next..at].concat());
        replayed.bytes.extend(new.concat());
        let offset = at.cast_signed() - wanted.cast_signed();
        replayed.in_place &= offset == 0;
        replayed.matched += old.len();
        moved += offset;
        next = at + old.len();
    }
    replayed.bytes.extend(lines[next..].concat());
    Ok(replayed)
}

/// Parses a patch; strips `strip` leading parts of its paths.
pub fn parse(bytes: &[u8], strip: usize) -> Result<Vec<FilePatch>> {
    let mut parser = Parser {
        lines: bytes.split_inclusive(|byte| *byte == b'\n').collect(),
        at: 0,
        strip,
    };
    let mut files = Vec::new();
    while parser.at < parser.lines.len() {
        files.extend(parser.file()?);
    }
    match files.is_empty() {
        true => Err(invalid!("no patch in unified format")),
        false => Ok(files),
    }
}

struct Parser<'a> {
    lines: Vec<&'a [u8]>,
    at: usize,
    strip: usize,
}

impl<'a> Parser<'a> {
    fn wrong(&self, what: impl std::fmt::Display) -> Error {
        invalid!("line {}: {what}", self.at + 1)
    }

    fn line(&self) -> Option<&'a [u8]> {
        self.lines.get(self.at).copied()
    }

    /// Parses up to the end of one file's part; `None` if only other text follows.
    fn file(&mut self) -> Result<Option<FilePatch>> {
        let mut mode = None;
        let mut head: Option<GitHead> = None;
        while let Some(line) = self.line() {
            let text = String::from_utf8_lossy(line);
            let text = text.trim_end_matches(['\n', '\r']);
            if let Some(names) = text.strip_prefix("diff --git ") {
                if let Some(whole) = self.without_hunks(head.take(), mode)? {
                    return Ok(Some(whole));
                }
                let path = git_name(names).map(|name| self.path(name)).transpose()?;
                head = Some(GitHead { path, kind: None });
                mode = None;
            } else if let (Some(head), Some((kind, bits))) = (&mut head, GitKind::of(text)) {
                mode = Some(match bits {
                    "100644" => false,
                    "100755" => true,
                    other => return Err(self.wrong(format!("a file of mode {other}"))),
                });
                head.kind = Some(kind);
            } else if let (Some(_), Some(bits)) = (&head, other_than_file(text)) {
                return Err(self.wrong(format!("a file of mode {bits}")));
            } else if is_not_lines(text, head.is_some()) {
                return Err(self.wrong(format!("rockenv does not apply `{text}`")));
            } else if text.starts_with("--- ") && self.next_starts(b"+++ ") {
                return self.body(mode).map(Some);
            } else if head.is_some() && !is_in_head(text) {
                // The message of another commit follows.
                if let Some(whole) = self.without_hunks(head.take(), mode.take())? {
                    return Ok(Some(whole));
                }
            }
            self.at += 1;
        }
        self.without_hunks(head, mode)
    }

    /// Returns the part of a file that ends without hunks: an empty file, or a change of the mode only.
    fn without_hunks(
        &self,
        head: Option<GitHead>,
        executable: Option<bool>,
    ) -> Result<Option<FilePatch>> {
        let head = head.and_then(|head| Some((head.kind?, head.path)));
        let Some((kind, path)) = head else {
            return Ok(None);
        };
        Ok(Some(FilePatch {
            path: path.ok_or_else(|| self.wrong("a file without a name"))?,
            creates: kind == GitKind::Create,
            removes: kind == GitKind::Delete,
            executable,
            hunks: Vec::new(),
        }))
    }

    fn next_starts(&self, with: &[u8]) -> bool {
        self.lines
            .get(self.at + 1)
            .is_some_and(|line| line.starts_with(with))
    }

    fn body(&mut self, executable: Option<bool>) -> Result<FilePatch> {
        let old = self.name(b"--- ")?;
        self.at += 1;
        let new = self.name(b"+++ ")?;
        self.at += 1;
        let path = new.as_ref().or(old.as_ref()).cloned();
        let path = path.ok_or_else(|| self.wrong("a file without a name"))?;
        let mut hunks = Vec::new();
        while self.line().is_some_and(|line| line.starts_with(b"@@ ")) {
            hunks.push(self.hunk()?);
        }
        if hunks.is_empty() {
            return Err(self.wrong("a file without changes"));
        }
        let mut after = self.lines[self.at..].iter();
        let is_context = |line: &[u8]| line.starts_with(b" ") || line.trim_ascii().is_empty();
        let next = after.find(|line| !is_context(line));
        if next.is_some_and(|line| is_change(line)) {
            return Err(self.wrong("more lines than the hunk declares"));
        }
        Ok(FilePatch {
            path,
            creates: old.is_none(),
            removes: new.is_none(),
            executable,
            hunks,
        })
    }

    /// Returns the path of a `---` or `+++` line; `None` for `/dev/null`.
    fn name(&self, word: &[u8]) -> Result<Option<PathBuf>> {
        let line = self.line().and_then(|line| line.strip_prefix(word));
        let text = line.and_then(|line| std::str::from_utf8(line).ok());
        let text = text.ok_or_else(|| self.wrong("a name that is not UTF-8"))?;
        // `diff` adds the time after a tab.
        let text = text.split(['\t', '\n', '\r']).next().unwrap_or_default();
        match text {
            "/dev/null" => Ok(None),
            text => self.path(text).map(Some),
        }
    }

    fn path(&self, text: &str) -> Result<PathBuf> {
        if text.starts_with('"') {
            return Err(self.wrong(format!("a quoted name, {text}")));
        }
        let parts: Vec<&str> = text.split('/').skip(self.strip).collect();
        let path = parts.join("/");
        super::catalog::below(&path).map_err(|why| self.wrong(format!("`{text}` {why}")))
    }

    fn hunk(&mut self) -> Result<Hunk> {
        let line = String::from_utf8_lossy(self.line().unwrap_or_default()).into_owned();
        let ranges = line
            .strip_prefix("@@ -")
            .and_then(|rest| rest.split_once(" @@"))
            .and_then(|(ranges, _)| ranges.split_once(" +"))
            .and_then(|(old, new)| Some((range(old)?, range(new)?)));
        let Some(((old_at, mut old_left), (new_at, mut new_left))) = ranges else {
            return Err(self.wrong("not the head of a hunk"));
        };
        // A range without lines names the line before it.
        let start = |at: usize, count: usize| if count == 0 { at } else { at.saturating_sub(1) };
        let mut hunk = Hunk {
            old_start: start(old_at, old_left),
            new_start: start(new_at, new_left),
            ..Hunk::default()
        };
        self.at += 1;
        while old_left > 0 || new_left > 0 {
            let line = self
                .line()
                .ok_or_else(|| self.wrong("the patch is truncated"))?;
            let (sign, rest) = match line.split_first() {
                // Some mailers strip the blank from an empty line of context.
                Some((b'\n', _)) | None => (&b' ', line),
                Some(split) => split,
            };
            let (in_old, in_new) = match sign {
                b' ' => (true, true),
                b'-' => (true, false),
                b'+' => (false, true),
                _ => return Err(self.wrong("neither ` `, `-` nor `+`")),
            };
            if (in_old && old_left == 0) || (in_new && new_left == 0) {
                return Err(self.wrong("more lines than the hunk declares"));
            }
            self.at += 1;
            let mut text = rest.to_vec();
            if self.line().is_some_and(|next| next.starts_with(b"\\")) {
                self.at += 1;
                text.pop();
            }
            if in_old {
                old_left -= 1;
                hunk.old.push(text.clone());
            }
            if in_new {
                new_left -= 1;
                hunk.new.push(text);
            }
        }
        Ok(hunk)
    }
}

/// The content of git's header lines for a file. Without hunks, there is no other information.
struct GitHead {
    path: Option<PathBuf>,
    kind: Option<GitKind>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum GitKind {
    Create,
    Delete,
    Mode,
}

impl GitKind {
    /// Parses a header line about the change of a file; also returns the file's mode.
    fn of(line: &str) -> Option<(Self, &str)> {
        let starts = [
            ("new file mode ", Self::Create),
            ("deleted file mode ", Self::Delete),
            ("new mode ", Self::Mode),
        ];
        let found = |(start, kind)| Some((kind, line.strip_prefix(start)?.trim()));
        starts.into_iter().find_map(found)
    }
}

/// Returns `NEW` of `diff --git OLD NEW`, if both names are equal except for their first part.
fn git_name(names: &str) -> Option<&str> {
    let half = names.len() / 2;
    let (old, new) = (names.get(..half)?, names.get(half..)?.strip_prefix(' ')?);
    let rest = |name: &str| name.find('/').map(|at| name[at..].to_owned());
    (old == new || rest(old).is_some_and(|old| Some(old) == rest(new))).then_some(new)
}

/// Returns the mode in an `index` line of a link or a submodule.
fn other_than_file(line: &str) -> Option<&str> {
    let (_, bits) = line.strip_prefix("index ")?.split_once(' ')?;
    ["120000", "160000"].contains(&bits).then_some(bits)
}

/// Returns whether a line says that the change is not made of lines. Before git's header of a file, in a commit's
/// message, only lines of `diff` count.
fn is_not_lines(line: &str, in_head: bool) -> bool {
    let words = ["rename from ", "copy from ", "GIT binary patch"];
    (line.starts_with("Binary files ") && line.ends_with(" differ"))
        || (in_head && words.iter().any(|word| line.starts_with(word)))
}

/// Returns whether a line after a hunk is part of a change too, so that it must not be taken for other text. `-- ` begins
/// a signature.
fn is_change(line: &[u8]) -> bool {
    let is_other = line.starts_with(b"--- ") || line.trim_ascii_end() == b"--";
    line.starts_with(b"@@ -") || matches!(line.first(), Some(b'+' | b'-')) && !is_other
}

/// Returns whether a line belongs to git's header of a file.
fn is_in_head(line: &str) -> bool {
    let starts = [
        "old mode ",
        "new mode ",
        "new file mode ",
        "deleted file mode ",
        "similarity index ",
        "dissimilarity index ",
        "index ",
    ];
    starts.iter().any(|start| line.starts_with(start))
}

/// Parses `START` or `START,COUNT`. No patch has more lines than 32 bits can count.
fn range(text: &str) -> Option<(usize, usize)> {
    let number = |text: &str| usize::try_from(text.parse::<u32>().ok()?).ok();
    match text.split_once(',') {
        Some((start, count)) => Some((number(start)?, number(count)?)),
        None => Some((number(text)?, 1)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::profile::tests::cases;

    fn one(text: &str) -> FilePatch {
        let mut files = parse(text.as_bytes(), 1).unwrap();
        assert_eq!(files.len(), 1);
        files.remove(0)
    }

    #[test]
    fn git_and_diff_are_read() {
        let git = one(
            "From: somebody\n\ndiff --git a/x/y b/x/y\nindex 1..2 100644\n--- a/x/y\n+++ b/x/y\n@@ -2 +2,2 @@ fn\n-b\n+B\n+C\n",
        );
        assert_eq!(git.path, PathBuf::from("x/y"));
        assert_eq!(git.forward(b"a\nb\nc\n").unwrap().bytes, b"a\nB\nC\nc\n");
        assert_eq!(git.backward(b"a\nB\nC\nc\n").unwrap().bytes, b"a\nb\nc\n");
        let diff = one("--- old/y\t2026-01-01\n+++ new/y\t2026-01-02\n@@ -1,0 +2 @@\n+b\n");
        assert_eq!(diff.forward(b"a\nc\n").unwrap().bytes, b"a\nb\nc\n");
        let mode = one("diff --git a/run b/run\nold mode 100644\nnew mode 100755\n");
        assert_eq!((mode.executable, mode.hunks.len()), (Some(true), 0));
    }

    #[test]
    fn a_commit_message_is_not_part_of_the_patch() {
        let diff = "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n";
        for words in [
            "copy from the upstream tree, with one change.",
            "rename from g",
            "Binary files are left alone.",
            "GIT binary patch",
        ] {
            let text = format!("From: somebody\n\n{words}\n---\n f | 2 +-\n\n{diff}-- \n2.40\n");
            assert_eq!(one(&text).path, PathBuf::from("f"), "{words}");
            // Between two commits of a series.
            let mode = "diff --git a/g b/g\nold mode 100644\nnew mode 100755\n-- \n2.40\n\n";
            let files = parse(format!("{mode}{text}").as_bytes(), 1).unwrap();
            assert_eq!(files.len(), 2, "{words}");
            let files = parse(format!("{diff}{text}").as_bytes(), 1).unwrap();
            assert_eq!(files.len(), 2, "{words}");
        }
    }

    #[test]
    fn no_line_number_is_too_large() {
        let most = u64::MAX;
        for head in [
            format!("-{most},2 +1,2"),
            format!("-1,2 +{most},2"),
            format!("-{most},0 +{most},2"),
            format!("-1,{most} +1,{most}"),
            format!("-{} +{}", most / 2 + 1, most / 2 + 1),
        ] {
            let text = format!("--- a/f\n+++ b/f\n@@ {head} @@\n-a\n-b\n+c\n+d\n");
            let Ok(files) = parse(text.as_bytes(), 1) else {
                continue;
            };
            drop(files[0].forward(b"0\na\nb\n"));
            drop(files[0].backward(b"0\nc\nd\n"));
        }
    }

    #[test]
    fn the_end_of_the_file_may_have_no_line_break() {
        let patch = one("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n");
        assert_eq!(patch.forward(b"a").unwrap().bytes, b"a\n");
        assert!(patch.forward(b"a\n").is_err());
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for (text, words) in cases(
            r#"
            hello => no patch
            --- a/f; +++ b/f; @@ -1,2 +1 @@; -a => truncated
            --- a/f; +++ b/f; @@ -1 +1 @@; *a => neither
            --- a/f; +++ b/f; @@ nonsense @@ => head of a hunk
            --- a/f; +++ b/f; @@ -1 +1 @@; -a; +b; +c => more lines
            --- a/f; +++ b/f; @@ -1 +1 @@; -a; +b; -c => more lines
            --- a/f; +++ b/f; @@ -1 +1 @@; -a; +b; ; @@ -9 +9 @@; -c; +d => line 6: more lines
            --- a/../f; +++ b/../f; @@ -1 +1 @@; -a; +b => leaves
            --- a/.git/config; +++ b/.git/config; @@ -1 +1 @@; -a; +b => belongs to git
            diff --git a/f b/g; rename from f; rename to g => does not apply
            diff --git a/f b/f; Binary files a/f and b/f differ => does not apply
            diff --git a/l b/l; new file mode 120000 => mode 120000
            diff --git a/l b/l; deleted file mode 120000 => mode 120000
            diff --git a/f b/g; similarity index 100%; rename from f; rename to g => does not apply `rename from f`
            Binary files a/f and b/f differ => does not apply `Binary
            --- a/f; +++ b/f; @@ -1 +1 @@; -a; +b; Binary files a/g and b/g differ => does not apply `Binary
            diff --git a/f b/f; index 1..2; GIT binary patch; delta 1 => does not apply `GIT binary patch`
            diff --git a/f b/g; similarity index 100%; copy from f; copy to g => does not apply `copy from f`
            diff --git "a/\303\251" "b/\303\251"; new file mode 100644; index 0000000..e69de29 => quoted name
            "#,
        ) {
            let error = parse(format!("{text}\n").as_bytes(), 1).unwrap_err();
            assert_has!(error.message(), words);
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(parse(&bytes, 1));
        }

        // The hunks between two texts turn one into the other, both ways.
        #[test]
        fn forward_and_backward_are_inverse(
            old in proptest::collection::vec("[ab]{0,2}", 1..12),
            new in proptest::collection::vec("[ab]{0,2}", 1..12),
        ) {
            let body = |sign: &str, lines: &[String]| lines.iter().map(|line| format!("{sign}{line}\n")).collect::<String>();
            let text = format!(
                "--- a/f\n+++ b/f\n@@ -1,{} +1,{} @@\n{}{}",
                old.len(), new.len(), body("-", &old), body("+", &new)
            );
            let patch = one(&text);
            let (before, after) = (body("", &old), body("", &new));
            prop_assert_eq!(patch.forward(before.as_bytes()).unwrap().bytes, after.as_bytes());
            prop_assert_eq!(patch.backward(after.as_bytes()).unwrap().bytes, before.as_bytes());
        }
    }
}
