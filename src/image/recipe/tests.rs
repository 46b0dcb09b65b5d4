//! Valid and invalid recipes, as people write them.

use super::*;

const DEBIAN: &str = "schema = 1\nprovider = \"mmdebstrap\"\n[mmdebstrap]\ndistribution = \"debian\"\nsuite = \"trixie\"\n";

fn parse(text: &str) -> Result<Recipe> {
    Recipe::parse(text, "images/x.toml", Path::new("/recipes"))
}

fn refuses(text: &str, message: &str, help: &str) {
    let error = parse(text).unwrap_err();
    assert_eq!(error.message(), message);
    assert_has!(error.help_text().unwrap_or_default(), help);
}

#[test]
fn defaults() {
    let recipe = parse(DEBIAN).unwrap();
    let Source::Mmdebstrap(table) = recipe.source else {
        panic!()
    };
    assert_eq!(
        (table.variant.as_str(), table.components),
        ("minbase", vec!["main".to_string()])
    );
    let arch = parse("schema = 1\nprovider = \"pacstrap\"\n[pacstrap]\n").unwrap();
    let Source::Pacstrap(table) = arch.source else {
        panic!()
    };
    assert_eq!(table.packages, ["base"]);
}

#[test]
fn digest_covers_content_and_nothing_else() {
    let plain = parse(DEBIAN).unwrap();
    let described = parse(&format!("description = \"hello\"\n{DEBIAN}")).unwrap();
    assert_eq!(plain.digest(), described.digest());
    let more = parse(&format!("{DEBIAN}packages = [\"gcc\"]\n")).unwrap();
    assert_ne!(plain.digest(), more.digest());
    let tar = |place: &str| {
        let text = format!(
            "schema=1\nprovider=\"tarball\"\n[tarball]\n{place}\nsha256=\"{}\"",
            "ab".repeat(32)
        );
        parse(&text).unwrap().digest()
    };
    assert_eq!(
        tar("path = \"a.tar\""),
        tar("url = \"https://host.invalid/a.tar\"")
    );
    let oci = |table: &str| {
        let text = format!("schema=1\nprovider=\"oci\"\n[oci]\n{table}\n");
        parse(&text).unwrap().digest()
    };
    let (one, other) = ("ab".repeat(32), "cd".repeat(32));
    let pinned = oci(&format!("ref=\"a.example/x@sha256:{one}\""));
    assert_eq!(pinned, oci(&format!("ref=\"b.example/y:1@sha256:{one}\"")));
    assert_ne!(pinned, oci(&format!("ref=\"a.example/x@sha256:{other}\"")));
    assert_ne!(
        pinned,
        oci(&format!(
            "ref=\"a.example/x@sha256:{one}\"\nplatform=\"linux/riscv64\""
        ))
    );
    assert_ne!(oci("ref=\"a.example/x:1\""), oci("ref=\"a.example/x:2\""));
    assert_ne!(oci("path=\"a\""), oci("path=\"b\""));
}

#[test]
fn unknown_keys_show_line_and_caret() {
    let error = parse(&format!("{DEBIAN}pakages = []\n")).unwrap_err();
    let chain = error.chain().join("\n");
    assert!(
        chain.contains("6 | pakages") && chain.contains("^^^") && chain.contains("`packages`"),
        "{chain}"
    );
}

#[test]
fn semantic_errors_name_the_line_and_suggest() {
    refuses(
        "schema = 1\nprovider = \"mmdebstap\"\n",
        "images/x.toml:2: unknown provider `mmdebstap`",
        "did you mean `mmdebstrap`",
    );
    refuses(
        &format!("{DEBIAN}[tarball]\npath=\"x\"\nsha256=\"\""),
        "images/x.toml:6: [tarball] does not belong to provider \"mmdebstrap\"",
        "remove [tarball]",
    );
    refuses(
        "schema = 1\nprovider = \"pacstrap\"\n",
        "images/x.toml:2: provider \"pacstrap\" needs a table [pacstrap]",
        "add [pacstrap]",
    );
    refuses(
        &format!("{DEBIAN}snapshot = \"2026-01-01\"\n"),
        "images/x.toml:6: `2026-01-01` is not a snapshot id",
        "20260101T000000Z",
    );
    refuses(
        "schema=1\nprovider=\"tarball\"\n[tarball]\nurl = \"http://x.invalid/a\"\nsha256=\"\"",
        "images/x.toml:4: `http://x.invalid/a` is not an https address",
        "https",
    );
    let oci = |table: &str| format!("schema=1\nprovider=\"oci\"\n[oci]\n{table}\n");
    refuses(
        &oci("ref = \"fedora:43\""),
        "images/x.toml:4: `fedora:43` names no registry",
        "ref = \"registry.example.org/",
    );
    refuses(
        &oci("platform = \"linux/amd64\""),
        "images/x.toml:3: neither `ref` nor `path` is given",
        "ref = \"",
    );
    refuses(
        &oci("ref = \"h.example/a\"\nplatform = \"windows/amd64\""),
        "images/x.toml:5: `windows/amd64` is not a platform",
        "linux/amd64",
    );
    refuses(
        &format!("{DEBIAN}packages = [\"--setup-hook=sh\"]"),
        "images/x.toml:6: `--setup-hook=sh` is not a package name",
        "dash",
    );
}

#[test]
fn options_that_run_programs_on_the_host_are_refused() {
    for option in [
        "APT::Update::Pre-Invoke:: \"touch /tmp/owned\"",
        "DPkg::Pre-Install-Pkgs \"/bin/sh\"",
        "Dir::Bin::gpg \"/bin/true\"",
        "Apt::Key::gpgvcommand \"/bin/true\"",
        "Acquire::http::Proxy-Auto-Detect \"/bin/sh\"",
        "Acquire::Retries \"1\"; DPkg::Options \"x\"",
        "Acquire::Retries \"1\"\nDPkg::Options \"x\"",
        "#include \"/etc/shadow\"",
        "/etc/shadow",
    ] {
        let text = format!(
            "{DEBIAN}apt-options = [{}]\n",
            toml::Value::String(option.into())
        );
        assert!(parse(&text).is_err(), "{option}");
    }
    assert!(
        parse(&format!(
            "{DEBIAN}apt-options = ['Acquire::Retries \"5\"', 'APT::Install-Recommends true;']"
        ))
        .is_ok()
    );
    for line in [
        "XferCommand = /bin/sh",
        "Include = /etc/passwd",
        "[core]",
        "SigLevel = Never",
        "HookDir = /tmp",
    ] {
        let text =
            format!("schema=1\nprovider=\"pacstrap\"\n[pacstrap]\npacman-conf = [\"{line}\"]");
        assert!(parse(&text).is_err(), "{line}");
    }
}

#[test]
fn relative_paths_are_relative_to_the_recipe() {
    let recipe = parse("schema=1\nprovider=\"directory\"\n[directory]\npath=\"rootfs\"").unwrap();
    assert_eq!(
        recipe.source,
        Source::Directory(Directory {
            path: "/recipes/rootfs".into()
        })
    );
}

#[test]
fn snapshot_ids() {
    assert_eq!(snapshot_time("20260101T000000Z"), Some(1_767_225_600));
    assert_eq!(
        snapshot_id(1_767_225_600).as_deref(),
        Some("20260101T000000Z")
    );
    for id in [
        "20260101",
        "20261301T000000Z",
        "20260101T000000",
        "2026+101T000000Z",
        "2026101T000000Z",
        "20260101T000060Z",
        " 20260101T000000Z",
    ] {
        assert_eq!(snapshot_time(id), None, "{id}");
    }
}

#[test]
fn a_pin_decides_what_the_recipe_leaves_open_and_nothing_else() {
    let resolved = format!("sha256:{}", "ab".repeat(32));
    let pin = Pin {
        snapshot: Some("20260101T000000Z"),
        resolved: Some(&resolved),
    };
    let debian = parse(DEBIAN).unwrap();
    assert_eq!(debian.dated_mirror().as_deref(), Some("debian-snapshot"));
    let dated = debian.pinned(pin);
    assert_eq!(dated.snapshot(), Some("20260101T000000Z"));
    assert_ne!(dated.digest(), debian.digest());
    assert_eq!(dated.dated_mirror(), None);
    let own = parse(&format!("{DEBIAN}snapshot = \"20250101T000000Z\"\n")).unwrap();
    assert_eq!(own.pinned(pin), own);
    let oci = |reference: &str| {
        let text = format!("schema=1\nprovider=\"oci\"\n[oci]\nref = \"{reference}\"\n");
        parse(&text).unwrap()
    };
    let pinned = oci("a.example/x:1").pinned(pin);
    assert_eq!(pinned, oci(&format!("a.example/x:1@{resolved}")));
    assert_eq!(pinned.pinned(pin), pinned);
    assert_eq!(debian.pinned(Pin::default()), debian);
}

#[test]
fn the_schema_is_closed() {
    let schema = serde_json::to_value(schema()).unwrap();
    assert_eq!(schema["additionalProperties"], false);
    let providers = serde_json::json!(PROVIDERS);
    assert_eq!(schema["properties"]["provider"]["enum"], providers);
    assert!(
        schema["$defs"]["Mmdebstrap"]["properties"]["apt-options"].is_object(),
        "{schema}"
    );
}
