//! What is refused, and where the message points.

use super::*;
use crate::sys::error::Kind;

#[test]
fn errors_point_into_the_profile() {
    let many = inputs!(targets: targets(&["gfx1100", "gfx1103"]));
    let error = resolve(&profile(TEXT), &many).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    insta::assert_snapshot!(error.message(), @r#"
    profile `p` is invalid: 2 errors
      × `${target.override}` stands for one target, but there are gfx1100, gfx1103
        ╭─[/p/p.toml:25:29]
     24 │ [runtime-env]
     25 │ HSA_OVERRIDE_GFX_VERSION = "${target.override}"
        ·                             ─────────┬────────
        ·                                      ╰── here
     26 │ [[step]]
        ╰────
      help: `${targets}` is all of them, separated by `;`
      × `${target}` stands for one target, but there are gfx1100, gfx1103
        ╭─[/p/p.toml:37:16]
     36 │ inputs = ["src"]
     37 │ env = { GFX = "${target}" }
        ·                ────┬────
        ·                    ╰── here
     38 │ run = "cmake -DP=${prefix} $${HOME}"
        ╰────
      help: `${targets}` is all of them, separated by `;`
    "#);

    let with = |name: &str, value: &str| inputs!(params: params(&[(name, value)]));
    let error = resolve(&profile(TEXT), &with("prefix", "opt/../x")).unwrap_err();
    assert_has!(error.message(), "`opt/../x` is not an absolute path");
    let error = resolve(&profile(TEXT), &with("perfix", "")).unwrap_err();
    assert_eq!(error.message(), "profile `p` has no parameter `perfix`");
    assert_eq!(error.help_text(), Some("did you mean `prefix`?"));
    assert_eq!(error.kind(), Kind::Usage);

    let text = TEXT.replace("image = \"debian\"", "image = \"${prefix}\"");
    let error = resolve(&profile(&text), &inputs()).unwrap_err();
    assert_has!(error.message(), "bad image name `/opt/x`");
    assert_has!(error.message(), "[/p/p.toml:4:9]");

    for other in [
        inputs!(fingerprints: BTreeMap::new()),
        inputs!(hooks: BTreeMap::new()),
        inputs!(file_digests: BTreeMap::new()),
    ] {
        let error = resolve(&profile(TEXT), &other).unwrap_err();
        assert_eq!(error.kind(), Kind::Unexpected);
    }
    // Volumes are known before the fingerprints that depend on them.
    let unknown = inputs!(fingerprints: BTreeMap::new());
    assert_eq!(volumes(&profile(TEXT), &unknown).unwrap().len(), 4);
}

#[test]
fn params_cannot_smuggle() {
    let text = r#"
schema = 1
image = "debian"
params = { url = "https://example.org/x", rev = "main", pkg = "cmake" }
[[volume]]
name = "v"
kind = "source"
git = "${url}"
rev = "${rev}"
target = "/v"
[[step]]
name = "s"
packages = ["${pkg}"]
"#;
    for (name, value) in [
        ("url", "ext::sh -c id"),
        ("url", "--upload-pack=id"),
        ("url", "https://me:secret@example.org/a b"),
        ("rev", "--orphan"),
        ("pkg", "-o=Dpkg::Pre-Invoke::=id"),
        ("pkg", "a b"),
        ("pkg", ""),
        ("rev", "a\0b"),
    ] {
        let smuggled = inputs!(params: params(&[(name, value)]));
        let error = resolve(&profile(text), &smuggled).unwrap_err();
        // The profile is not at fault.
        assert_eq!(error.kind(), Kind::Usage, "{name} {value}");
        assert_has!(error.message(), name);
        assert!(!error.message().contains("secret"), "{}", error.message());
    }
    let wrong = inputs!(params: params(&[("rev", "-x")]));
    let error = volumes(&profile(text), &wrong).unwrap_err();
    assert_eq!(error.kind(), Kind::Usage);
    let said = "parameter `rev=-x` is not valid in /p/p.toml:9: ";
    assert_has!(error.message(), said);
    // Other errors are the profile's fault.
    let error = resolve(&profile(&text.replace("${pkg}", "${target}")), &wrong).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    // A value that looks like a reference stays text.
    let spec = spec(TEXT, &inputs!(params: params(&[("prefix", "/${jobs}$")])));
    let script = finish(script(spec.step("configure").unwrap()), &facts(4, 4));
    assert_eq!(script, "cmake -DP=/${jobs}$ ${HOME}");
}

#[test]
fn host_paths() {
    for (path, found) in [
        ("~", "/home/me"),
        ("~/a b", "/home/me/a b"),
        ("~//etc", "/home/me/etc"),
        ("/srv", "/srv"),
        // Relative to the file, not to the working directory.
        ("./a", "/p/a"),
        ("../a", "/p/../a"),
        (".//etc", "/p/etc"),
        ("./${prefix}", "/p/opt/x"),
        ("/srv/${target}", "/srv/gfx1103"),
    ] {
        let volumes = volumes(&profile(&TEXT.replace("~/src", path)), &inputs()).unwrap();
        let source = volumes.iter().find(|volume| volume.name == "src");
        let VolumeSource::Path(at) = &source.unwrap().source else {
            panic!("{source:?}");
        };
        assert_eq!(at.to_str(), Some(found), "{path}");
    }
}

/// Resolves a profile that copies a file to this path.
fn copied(text: &str, to: &str) -> crate::sys::error::Result<Spec> {
    let text = text.replace("to = \"/opt/run.sh\"", &format!("to = \"{to}\""));
    resolve(&profile(&text), &inputs())
}

/// Resolves a profile that exports this path.
fn exported(text: &str, from: &str) -> crate::sys::error::Result<Spec> {
    let text = text.replace("from = \"${prefix}\"", &format!("from = \"{from}\""));
    resolve(&profile(&text), &inputs())
}

#[test]
fn a_copy_does_not_write_over_the_users_files() {
    for to in ["/work/src/run.sh", "/work/src"] {
        let said = copied(TEXT, to).unwrap_err().chain().join("\n");
        assert_has!(said, "cannot write into volume `src`");
    }
    for to in ["/work/srcs/run.sh", "/work/run.sh"] {
        copied(TEXT, to).unwrap();
    }
}

#[test]
fn files_that_end_with_their_step_are_neither_copied_nor_exported() {
    for path in "/tmp/run.sh /var/tmp/x/run.sh /run/x /var/run/x /var/lock/x".split(' ') {
        for result in [copied(TEXT, path), exported(TEXT, path)] {
            let error = result.unwrap_err();
            assert_has!(error.message(), "is in no snapshot");
        }
    }
    let in_volume = TEXT.replace("target = \"/work\"", "target = \"/tmp/build\"");
    for (text, path) in [(&*in_volume, "/tmp/build/run.sh"), (TEXT, "/tmpx/run.sh")] {
        copied(text, path).unwrap();
        exported(text, path).unwrap();
    }
}

#[test]
fn a_volume_is_not_exported_into_itself() {
    for from in ["/out", "/out/x"] {
        exported(TEXT, from).unwrap_err();
    }
    for from in ["/out/x/y", "/outside"] {
        exported(TEXT, from).unwrap();
    }
}

#[test]
fn expansion_ends_at_the_length_of_an_argument() {
    let says = |text: &str, words: &[&str]| {
        let error = resolve(&profile(text), &inputs()).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        for word in words {
            assert_has!(error.message(), word);
        }
    };
    let head = |length: usize, rest: &str| {
        let value = "x".repeat(length);
        format!("schema = 1\nimage = \"debian\"\nparams = {{ a = '{value}' }}\n{rest}")
    };
    let longer = "the expanded text is longer than 128 KiB";
    let script = "[[step]]\nname = 'a'\nrun = 'echo ${a}${a}'\n";
    says(&head(70 << 10, script), &[longer, "p.toml:6:17"]);
    let variable = "[env]\nABC = '${a}'\n[[step]]\nname = 'a'\nrun = 'true'\n";
    says(&head((128 << 10) - 4, variable), &[longer, "p.toml:5:8"]);
    resolve(&profile(&head((128 << 10) - 5, variable)), &inputs()).unwrap();
    // Each text is short enough, but all of them together are not.
    let variables: String = (0..1000).map(|at| format!("A{at} = '${{a}}'\n")).collect();
    let many = format!("[env]\n{variables}[[step]]\nname = 'a'\nrun = 'true'\n");
    says(&head(100_000, &many), &["longer than 64 MiB"]);
    let steps: String = (0..1000)
        .map(|at| format!("[[step]]\nname = 'a{at}'\nrun = 'true'\n"))
        .collect();
    let many = format!("[env]\nA = '${{a}}'\n{steps}");
    says(&head(100_000, &many), &["longer than 64 MiB"]);
}
