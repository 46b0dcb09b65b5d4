use super::*;

impl Recording {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.bytes()).unwrap()
    }
}

pub(super) fn ui(settings: UiSettings) -> (Ui, Recording, Recording) {
    let (out, err) = (Recording::default(), Recording::default());
    let ui = Ui::with_writers(settings, Box::new(out.clone()), Box::new(err.clone()));
    (ui, out, err)
}

const ALL: Terminals = Terminals {
    stdin: true,
    stdout: true,
    stderr: true,
};

#[test]
fn results_and_messages_go_to_their_own_streams() {
    let (ui, out, err) = ui(UiSettings::default());
    ui.data("one\ntwo \x1b[31m");
    ui.json(&serde_json::json!({"a": "\u{9b}"})).unwrap();
    ui.note("note");
    ui.detail("only with -v");
    ui.warn("careful");
    ui.finish().unwrap();
    assert_eq!(
        out.text(),
        "one\ntwo \\x1b[31m\n{\n  \"a\": \"\\u009b\"\n}\n"
    );
    assert_eq!(err.text(), "note\nwarning: careful\n");
}

#[test]
fn results_are_seen_before_what_is_said_of_them() {
    let both = Recording::default();
    let out = io::BufWriter::new(both.clone());
    let settings = UiSettings::default();
    let ui = Ui::with_writers(settings, Box::new(out), Box::new(both.clone()));
    ui.data("result");
    ui.note("1 result");
    ui.finish().unwrap();
    assert_eq!(both.text(), "result\n1 result\n");
}

#[test]
fn an_error_shows_its_causes_and_the_way_out() {
    let error = unavailable!("cannot start `gfx1103`")
        .source(io::Error::other("first line\nsecond \x1b[2J"))
        .help("rockenv doctor");
    let (ui, _, err) = ui(UiSettings::default());
    ui.error(&error);
    insta::assert_snapshot!(err.text(), @r"
    error: cannot start `gfx1103`
      caused by: first line
        second \x1b[2J
    help: rockenv doctor
    ");
}

#[test]
fn colour_is_for_terminals_and_can_be_forced_or_refused() {
    for (set, colored) in [
        ("", false),
        ("terminal", true),
        ("terminal dumb", false),
        ("terminal no-color", false),
        ("force-color", true),
        ("force-color no-color", false),
    ] {
        let (ui, _, err) = ui(UiSettings {
            terminals: match set.contains("terminal") {
                true => ALL,
                false => Terminals::default(),
            },
            dumb: set.contains("dumb"),
            no_color: set.contains("no-color"),
            force_color: set.contains("force-color"),
            ..UiSettings::default()
        });
        ui.warn("x");
        assert_eq!(err.text().contains('\x1b'), colored, "{set}");
    }
}

#[test]
fn a_reader_that_has_enough_is_no_error_but_a_full_disk_is() {
    struct Failing(io::ErrorKind);
    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    for (kind, exit) in [
        (io::ErrorKind::BrokenPipe, None),
        (io::ErrorKind::StorageFull, Some(10)),
    ] {
        let out = Box::new(Failing(kind));
        let ui = Ui::with_writers(UiSettings::default(), out, Box::new(io::sink()));
        assert!(!ui.closed());
        ui.data("x");
        assert!(ui.closed());
        let result = ui.finish();
        assert_eq!(result.err().map(|error| error.kind().exit_code()), exit);
    }
}

#[test]
fn questions_need_a_terminal_or_an_answer() {
    let (quiet, _, _) = ui(UiSettings::default());
    let error = quiet.confirm("remove `gfx1103`?").unwrap_err();
    assert_eq!(error.kind().exit_code(), 2);
    assert!(error.help_text().unwrap().contains("--yes"));
    let (yes, _, err) = ui(UiSettings {
        yes: true,
        ..UiSettings::default()
    });
    assert!(yes.confirm("remove?").unwrap());
    assert_eq!(err.text(), "");
    for (answer, taken) in [
        ("y\n", true),
        (" YES \n", true),
        ("\n", false),
        ("yup\n", false),
        ("", false),
    ] {
        assert_eq!(is_yes(answer), taken);
    }
}

#[test]
fn github_gets_no_command_that_arrives_in_parts() {
    let (ui, out, _) = ui(UiSettings {
        ci_system: Some(ci::System::Github),
        ..UiSettings::default()
    });
    for part in ["a:", ":b\n :", ":error::x\n##", "[y]\n::", "z"] {
        ui.lines(part.as_bytes());
    }
    ui.finish().unwrap();
    assert_eq!(out.text(), "a::b\n \\x3a:error::x\n#\\x23[y]\n\\x3a:z");
}

#[test]
fn raw_bytes_are_exact_unless_a_person_sees_them() {
    let (piped, out, _) = ui(UiSettings::default());
    piped.raw(b"\x1b[31m\xff\n");
    assert_eq!(out.bytes(), b"\x1b[31m\xff\n");
    let (seen, out, _) = ui(UiSettings {
        terminals: ALL,
        ..UiSettings::default()
    });
    seen.raw(b"\x1b[31m\xff\n");
    assert_eq!(out.text(), "\\x1b[31m\\xff\n");
    // A build's output must be harmless at the other end of a pipe too, unless the user asks for raw bytes.
    let (piped, out, _) = ui(UiSettings::default());
    piped.lines(b"\x1b[31m\xff\n");
    piped.bytes(b"\x1b[31m\xff\n");
    assert_eq!(out.bytes(), b"\\x1b[31m\\xff\n\x1b[31m\xff\n");
}
