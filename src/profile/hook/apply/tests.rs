//! Tests of the effect of patches and edits on files.

use super::*;
use crate::profile::hook::{Patch, Work};

fn hook(edits: Vec<Edit>, patches: &[&str]) -> Hook {
    let patches = patches.iter().enumerate().map(|(index, text)| Patch {
        name: format!("{index}.patch"),
        url: None,
        sha256: String::new(),
        directory: PathBuf::new(),
        strip: 1,
        bytes: Some(text.as_bytes().to_vec()),
    });
    Hook {
        name: "h".into(),
        work: Work {
            volume: "src".into(),
            patches: patches.collect(),
            edits,
            ..Work::default()
        },
        ..Hook::default()
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
            true => file(text.as_bytes(), false),
            false => FileInSource::Absent,
        })
    };
    let changes = apply(hook, &read)?.files;
    Ok(changes.get(Path::new("f")).map(|change| match change {
        HookChange::Write { bytes, .. } => String::from_utf8(bytes.clone()).unwrap(),
        HookChange::Remove => "removed".to_owned(),
    }))
}

#[test]
fn an_edit_is_made_as_often_as_it_says_or_not_at_all() {
    let one = hook(vec![edit("a", "bb", 2)], &[]);
    assert_eq!(on(&one, "a-a").unwrap().unwrap(), "bb-bb");
    for (text, words) in [
        ("-", "must occur 2 times in `f`, but is missing"),
        ("a", "but occurs once"),
        ("aaa", "but occurs 3 times"),
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
        ("# \"a\",\n", "is missing"),
        ("\"a\", \"b\",\n", "is missing"),
        ("x = \"a\",\n", "is missing"),
        ("\"a\",\n\"a\", # again\n", "occurs 2 times"),
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
fn a_patch_may_touch_a_file_more_than_once() {
    let lines = |two: &str, nine: &str| {
        let lines = (1..=12).map(|at| match at {
            2 => format!("{two}\n"),
            9 => format!("{nine}\n"),
            at => format!("{at}\n"),
        });
        lines.collect::<String>()
    };
    let first = "From: 1\n\ndiff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n 1\n-2\n+TWO\n 3\n-- \n2.40\n\n";
    let second = "From: 2\n\ndiff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -8,3 +8,3 @@\n 8\n-9\n+NINE\n 10\n-- \n2.40\n";
    let series = hook(Vec::new(), &[&format!("{first}{second}")]);
    let with = lines("TWO", "NINE");
    assert_eq!(on(&series, &lines("2", "9")).unwrap().unwrap(), with);
    assert_eq!(on(&series, &with).unwrap(), None);
    let error = on(&series, &lines("TWO", "9")).unwrap_err();
    assert_has!(error.message(), "is partly applied in the source");

    // Both parts change the same lines, so the source lacks the result of the first part.
    let again = first.replace("-2\n+TWO", "-TWO\n+zwei");
    let series = hook(Vec::new(), &[&format!("{first}{again}")]);
    let with = lines("zwei", "9");
    assert_eq!(on(&series, &lines("2", "9")).unwrap().unwrap(), with);
    assert_eq!(on(&series, &with).unwrap(), None);

    // Created, then changed.
    let create = "--- /dev/null\n+++ b/g\n@@ -0,0 +1 @@\n+one\n";
    let change = "--- a/g\n+++ b/g\n@@ -1 +1 @@\n-one\n+two\n";
    let series = hook(Vec::new(), &[&format!("{create}{change}")]);
    let changes = apply(&series, &absent).unwrap();
    assert_eq!(changes.files[Path::new("g")], write("two\n", None));
    let made = |_: &Path| Ok(file(b"two\n", false));
    assert_eq!(apply(&series, &made).unwrap().already, ["0.patch"]);

    // Made executable, then removed.
    let set = "diff --git a/g b/g\nold mode 100644\nnew mode 100755\n";
    let remove = "diff --git a/g b/g\ndeleted file mode 100755\n--- a/g\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n";
    let series = hook(Vec::new(), &[&format!("{set}{remove}")]);
    assert_eq!(apply(&series, &absent).unwrap().already, ["0.patch"]);
    let changes = apply(&series, &|_: &Path| Ok(file(b"one\n", false))).unwrap();
    assert_eq!(changes.files[Path::new("g")], HookChange::Remove);
}

fn absent(_: &Path) -> Result<FileInSource> {
    Ok(FileInSource::Absent)
}

/// Changes of a script's content, and of its mode to an executable's.
const CHANGE: &str = "diff --git a/t.sh b/t.sh\nindex 1111111..2222222 100755\n--- a/t.sh\n+++ b/t.sh\n@@ -1 +1 @@\n-one\n+two\n";
const SET: &str = "diff --git a/t.sh b/t.sh\nold mode 100644\nnew mode 100755\n";

fn write(text: &str, executable: Option<bool>) -> HookChange {
    HookChange::Write {
        bytes: text.into(),
        executable,
    }
}

fn file(bytes: &[u8], executable: bool) -> FileInSource {
    FileInSource::File {
        bytes: bytes.to_vec(),
        executable,
    }
}

#[test]
fn empty_files_are_created_and_deleted() {
    let create = "diff --git a/pkg/__init__.py b/pkg/__init__.py\nnew file mode 100644\nindex 0000000..e69de29\n";
    let path = Path::new("pkg/__init__.py");
    let patch = hook(Vec::new(), &[create]);
    let changes = apply(&patch, &absent).unwrap();
    assert_eq!(changes.files[path], write("", Some(false)));
    let empty = |_: &Path| Ok(file(b"", false));
    assert_eq!(apply(&patch, &empty).unwrap().already, ["0.patch"]);
    let other = |_: &Path| Ok(file(b"text\n", false));
    let error = apply(&patch, &other).unwrap_err();
    assert_has!(error.message(), "another one exists");

    let delete = "diff --git a/pkg/__init__.py b/pkg/__init__.py\ndeleted file mode 100644\nindex e69de29..0000000\n";
    let patch = hook(Vec::new(), &[delete]);
    let changes = apply(&patch, &empty).unwrap();
    assert_eq!(changes.files[path], HookChange::Remove);
    assert_eq!(apply(&patch, &absent).unwrap().already, ["0.patch"]);
    let error = apply(&patch, &other).unwrap_err();
    assert_has!(error.message(), "the file has other content");
}

#[test]
fn a_later_patch_keeps_the_permission_of_an_earlier_one() {
    let create = "diff --git a/t.sh b/t.sh\nnew file mode 100755\nindex 0000000..1111111\n--- /dev/null\n+++ b/t.sh\n@@ -0,0 +1 @@\n+one\n";
    let plain = |_: &Path| Ok(file(b"one\n", false));
    let written = write("two\n", Some(true));
    let of = |patches: &[&str], read: &dyn Fn(&Path) -> Result<FileInSource>| {
        let mut changes = apply(&hook(Vec::new(), patches), read).unwrap();
        changes.files.remove(Path::new("t.sh")).unwrap()
    };
    assert_eq!(of(&[create, CHANGE], &absent), written);
    assert_eq!(of(&[SET, CHANGE], &plain), written);
    assert_eq!(of(&[&format!("{SET}{CHANGE}")], &plain), written);
    // A change of the content alone does not set the permission.
    assert_eq!(of(&[CHANGE], &plain), write("two\n", None));
}

#[test]
fn the_permission_of_the_source_stays_until_a_patch_sets_it() {
    let unset = "diff --git a/t.sh b/t.sh\nold mode 100755\nnew mode 100644\n";
    let both = unset.to_owned() + CHANGE.split_once('\n').unwrap().1;
    let made = |patches: &[&str], text: &str, executable: bool| {
        let read = |_: &Path| Ok(file(text.as_bytes(), executable));
        apply(&hook(Vec::new(), patches), &read).unwrap()
    };
    let (one, two, path) = ("one\n", "two\n", Path::new("t.sh"));
    let series = format!("{CHANGE}{unset}");
    for patches in [&[CHANGE, unset][..], &[&series], &[&both], &[unset, CHANGE]] {
        let changes = made(patches, one, true);
        assert_eq!(changes.already, Vec::<String>::new(), "{patches:?}");
        assert_eq!(changes.files[path], write(two, Some(false)));
        let changes = made(patches, two, false);
        assert_eq!(changes.already.len(), patches.len(), "{patches:?}");
    }
    // An executable file already has the permission.
    assert_eq!(made(&[CHANGE, SET], one, true).already, ["1.patch"]);
    // The source has the new content, but not yet the permission.
    let changes = made(&[&both], two, true);
    assert_eq!(changes.files[path], write(two, Some(false)));
}

#[test]
fn what_a_patch_added_is_not_added_once_more_elsewhere() {
    // The same three lines occur again further down.
    let insert = "--- a/f\n+++ b/f\n@@ -1,3 +1,4 @@\n a\n+new\n b\n c\n";
    let patch = hook(Vec::new(), &[insert]);
    let (without, with) = ("a\nb\nc\n-\na\nb\nc\n", "a\nnew\nb\nc\n-\na\nb\nc\n");
    assert_eq!(on(&patch, without).unwrap().unwrap(), with);
    assert_eq!(on(&patch, with).unwrap(), None);
    // The same holds if all lines have moved.
    assert_eq!(on(&patch, &format!("0\n{with}")).unwrap(), None);
    let error = on(&patch, &format!("0\n{without}")).unwrap_err();
    let said = error.chain().join(": ");
    assert_has!(said, "applies at both line 2 and line 6");
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
