//! What patches and edits make of files.

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
    let absent = |_: &Path| Ok(FileInSource::Absent);
    let changes = apply(&patch, &absent).unwrap();
    let written = HookChange::Write {
        bytes: Vec::new(),
        executable: Some(false),
    };
    assert_eq!(changes.files[path], written);
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
