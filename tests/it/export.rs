//! Tests of `export`: the files, the format of the manifest, and that it overwrites no file of the user.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use crate::support::env::{TestStore, build_user};
use crate::support::git::{Daemon, repository};
use crate::support::loopfs::bind;
use crate::support::run::{finish, sha256};
use fs_err as fs;
use nix::mount::{MsFlags, mount};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The published format: the fields of in-toto's `statement.md` and `resource_descriptor.md` (v1) and of SLSA's
/// `provenance.proto` (v1), and no others.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<ResourceDescriptor>,
    predicate_type: String,
    predicate: Provenance,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ResourceDescriptor {
    name: Option<String>,
    uri: Option<String>,
    #[serde(default)]
    digest: BTreeMap<String, String>,
    content: Option<String>,
    download_location: Option<String>,
    media_type: Option<String>,
    #[serde(default)]
    annotations: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Provenance {
    build_definition: BuildDefinition,
    run_details: RunDetails,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct BuildDefinition {
    build_type: String,
    external_parameters: Map<String, Value>,
    #[serde(default)]
    internal_parameters: Map<String, Value>,
    #[serde(default)]
    resolved_dependencies: Vec<ResourceDescriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RunDetails {
    builder: Builder,
    metadata: Option<Map<String, Value>>,
    #[serde(default)]
    byproducts: Vec<ResourceDescriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Builder {
    id: String,
    #[serde(default)]
    version: BTreeMap<String, String>,
    #[serde(default)]
    builder_dependencies: Vec<ResourceDescriptor>,
}

/// Parses a statement, and checks the rules that the specifications state in prose.
fn valid(text: &[u8]) -> Statement {
    let statement: Statement = serde_json::from_slice(text).unwrap();
    assert_eq!(statement.kind, "https://in-toto.io/Statement/v1");
    assert_eq!(statement.predicate_type, "https://slsa.dev/provenance/v1");
    let uri = |text: &str| {
        let (scheme, rest) = text.split_once(':').unwrap_or_default();
        let fine =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"+-.".contains(&byte);
        assert!(
            !scheme.is_empty() && scheme.bytes().all(fine) && !rest.is_empty(),
            "{text}"
        );
        assert!(!text.contains(char::is_whitespace), "{text}");
    };
    let descriptor = |one: &ResourceDescriptor| {
        assert!(
            one.uri.is_some() || !one.digest.is_empty() || one.content.is_some(),
            "{one:?}"
        );
        one.uri
            .iter()
            .chain(&one.download_location)
            .for_each(|text| uri(text));
        assert!(
            one.media_type
                .as_ref()
                .is_none_or(|kind| kind.contains('/'))
        );
        assert!(one.annotations.keys().all(|name| !name.is_empty()));
        for (algorithm, digest) in &one.digest {
            let length = match algorithm.as_str() {
                "gitCommit" => 40,
                _ => 64,
            };
            let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            assert!(
                digest.len() == length && digest.bytes().all(digit),
                "{one:?}"
            );
        }
    };
    let mut names = BTreeSet::new();
    for subject in &statement.subject {
        descriptor(subject);
        assert!(subject.digest.contains_key("sha256"));
        assert!(names.insert(subject.name.clone().unwrap()), "twice");
    }
    assert!(!names.is_empty());
    let Provenance {
        build_definition: definition,
        run_details: run,
    } = &statement.predicate;
    uri(&definition.build_type);
    uri(&run.builder.id);
    assert!(!definition.external_parameters.is_empty());
    assert_eq!(run.builder.version["rockenv"], env!("CARGO_PKG_VERSION"));
    let lists = [
        &definition.resolved_dependencies,
        &run.byproducts,
        &run.builder.builder_dependencies,
    ];
    lists.into_iter().flatten().for_each(descriptor);
    // Metadata would differ between machines and from day to day.
    assert!(run.metadata.is_none());
    statement
}

fn profile(port: u16) -> String {
    format!(
        r#"
[[volume]]
name = "src"
kind = "source"
git = "git://127.0.0.1:{port}/repo"
rev = "main"
target = "/v/src"
[[volume]]
name = "out"
kind = "output"
target = "/v/out"
[[volume]]
name = "more"
kind = "output"
target = "/v/more"
[[step]]
name = "build"
inputs = ["src"]
run = "mkdir -p /v/out/dist; cat /v/src/a > /v/out/dist/a-1.0.whl; echo more > /v/more/b"
"#
    )
}

#[test]
fn what_is_handed_out_says_what_it_was_made_from() {
    let upstream = tempfile::tempdir().unwrap();
    let commit = repository(&upstream.path().join("repo"), "a", "wheel\n");
    let daemon = Daemon::start(upstream.path());
    let store = TestStore::new();
    let env = store.env();
    store.profile(&profile(daemon.port()));
    let absent = store.shows("export ENV to");
    store.rockenv(&["lock", env]).ok();
    store.rockenv(&["up", env, "--locked"]).ok();
    insta::assert_snapshot!(absent + &store.shows("export ENV to"), @"
    error: no env `ENV`
    help: rockenv ls
    exit code 7
    exported 2 files; to/ENV.provenance.json describes them
    ");
    let to = store.work().join("to");
    let name = format!("{env}.provenance.json");
    let text = fs::read(to.join(&name)).unwrap();
    let statement = valid(&text);
    let subjects: Vec<&str> = statement
        .subject
        .iter()
        .map(|subject| subject.name.as_deref().unwrap())
        .collect();
    assert_eq!(subjects, ["more/b", "out/dist/a-1.0.whl"]);
    assert_eq!(
        fs::read_to_string(to.join("out/dist/a-1.0.whl")).unwrap(),
        "wheel\n"
    );
    let definition = &statement.predicate.build_definition;
    let dependency = |name: &str| {
        let mut all = definition.resolved_dependencies.iter();
        all.find(|one| one.name.as_deref() == Some(name)).unwrap()
    };
    let source = dependency("source/src");
    assert_eq!(source.digest["gitCommit"], commit);
    let uri = format!("git+git://127.0.0.1:{}/repo@{commit}", daemon.port());
    assert_eq!(source.uri.as_deref(), Some(uri.as_str()));
    assert!(dependency("image/base").digest.contains_key("rockenvTree"));
    let sum = sha256(&to.join(format!("{env}.lock")));
    assert_eq!(sum, dependency("lock").digest["sha256"]);
    assert_eq!(
        fs::read(to.join(format!("{env}.lock"))).unwrap(),
        fs::read(store.work().join(format!("profiles/{env}.lock"))).unwrap()
    );
    assert_eq!(definition.internal_parameters["steps"][0]["name"], "build");
    // Files in a user's directory belong to the user.
    let owner = fs::metadata(&to).unwrap().uid();
    assert_eq!(fs::metadata(to.join("more/b")).unwrap().uid(), owner);
    assert_eq!(fs::metadata(to.join(&name)).unwrap().uid(), owner);

    // A second export, and one to another directory, write the same bytes.
    insta::assert_snapshot!(store.shows("export ENV to\nexport ENV again\nexport --check to"), @"
    $ rockenv export ENV to
    exported 2 files; to/ENV.provenance.json describes them
    $ rockenv export ENV again
    exported 2 files; again/ENV.provenance.json describes them
    $ rockenv export --check to
    to/ENV.provenance.json: 2 of 2 files match
    ");
    assert_eq!(
        fs::read(store.work().join("again").join(&name)).unwrap(),
        text
    );
    store
        .rockenv(&["export", "--check", "to", "--allow-incremental"])
        .exits(2);
    let read_only = store.work().join("read-only");
    fs::create_dir(&read_only).unwrap();
    let _mounted = bind(&read_only, &read_only);
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(None::<&str>, &read_only, None::<&str>, flags, None::<&str>).unwrap();
    for through_sudo in [true, false] {
        let mut command = store.command(&["export", env, "read-only"]);
        if !through_sudo {
            command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        }
        finish("export".to_owned(), command).exits(2).says(&[
            "cannot write to directory `read-only/more`",
            &format!("help: rockenv export {env} NEW-DIRECTORY"),
        ]);
    }
    fs::write(to.join("more/b"), "changed").unwrap();
    fs::remove_file(to.join("out/dist/a-1.0.whl")).unwrap();
    let pipe = store.work().join("pipe");
    fs::create_dir(&pipe).unwrap();
    nix::unistd::mkfifo(&pipe.join(&name), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let outside = String::from_utf8(text).unwrap().replace("more/b", "../b");
    fs::create_dir(store.work().join("bad")).unwrap();
    fs::write(store.work().join("bad").join(&name), outside).unwrap();
    // A changed file counts as the user's: `export` keeps it, and writes nothing else.
    let said = store.shows(
        "export --check to
        export ENV to
        export --check profiles
        export --check pipe
        export --check bad",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv export --check to
    more/b has different content
    out/dist/a-1.0.whl is missing
    to/ENV.provenance.json: 0 of 2 files match
    exit code 8
    $ rockenv export ENV to
    error: `to/more/b` exists with other content; refusing to overwrite it
    help: rockenv export ENV NEW-DIRECTORY
    exit code 2
    $ rockenv export --check profiles
    error: there is no manifest (`ENV.provenance.json`) in `profiles`
    help: rockenv export ENV profiles
    exit code 7
    $ rockenv export --check pipe
    error: `pipe/ENV.provenance.json` is not a file of at most 64 MiB
    exit code 3
    $ rockenv export --check bad
    error: cannot check `bad/ENV.provenance.json`
      caused by: the manifest names `../b`, which is outside its directory
    exit code 3
    ");
    assert_eq!(fs::read_to_string(to.join("more/b")).unwrap(), "changed");
    assert!(!to.join("out/dist/a-1.0.whl").exists());
}

#[test]
fn links_are_not_followed_and_an_unfinished_env_is_refused() {
    let store = TestStore::new();
    let env = store.env();
    let body = "[[volume]]\nname = \"out\"\nkind = \"output\"\ntarget = \"/v/out\"\n\
                [[step]]\nname = \"one\"\nrun = \"ln -s /etc/shadow /v/out/link\"\n\
                [[step]]\nname = \"two\"\nrun = \"true\"\n";
    store.profile(&body.replace("true", "false"));
    store.rockenv(&["up", env]).exits(5);
    insta::assert_snapshot!(store.shows("export ENV to"), @"
    error: env `ENV` is not finished: the inputs of its outputs are not known yet
    help: rockenv up ENV, or rockenv status ENV
    exit code 8
    ");
    store.profile(body);
    store.up();
    insta::assert_snapshot!(store.shows("export ENV to --volume in"), @"
    error: env `ENV` has no output volume `in`
    help: choose one of: out
    exit code 7
    ");
    assert!(!store.work().join("to").exists());
    store.sh("mkfifo /v/out/pipe; echo a > /v/out/a").ok();
    // `export` does not follow a link in the user's directory either.
    let to = store.work().join("to");
    fs::create_dir(&to).unwrap();
    std::os::unix::fs::chown(&to, Some(1234), Some(1234)).unwrap();
    fs_err::os::unix::fs::symlink("/tmp", to.join("out")).unwrap();
    insta::assert_snapshot!(store.shows("export ENV to"), @"
    warning: left out, because no step of env `ENV` as it is now left it: `out/a`; `out/pipe`
    error: `to/out` exists with other content; refusing to overwrite it
    help: rockenv export ENV NEW-DIRECTORY
    exit code 2
    ");
    fs::remove_file(to.join("out")).unwrap();
    insta::assert_snapshot!(store.shows("export ENV to"), @"
    warning: left out, because no step of env `ENV` as it is now left it: `out/a`; `out/pipe`
    warning: env `ENV` was not built from a lock file, so its manifest has no exact inputs: `rockenv lock ENV`, then `rockenv up ENV --locked`
    exported 1 link; to/ENV.provenance.json describes them
    ");
    valid(&fs::read(to.join(format!("{env}.provenance.json"))).unwrap());
}

/// Builds an env that writes `a/z` and its hard link `a/zz`, and nothing to `b`. Returns the outputs and a directory to
/// export to.
fn two_outputs(store: &TestStore, run: &str) -> [PathBuf; 2] {
    store.profile(&format!(
        "volume = [{{ name = 'a', kind = 'output', target = '/a' }},
                   {{ name = 'b', kind = 'output', target = '/b' }}]
         params = {{ word = 'one' }}
         [[step]]\nname = 'make'\nrun = 'echo ${{word}} > /a/z; ln -f /a/z /a/zz{run}'\n"
    ));
    let word = ["up", store.env(), "--param", "word=two", "--gpu", "none"];
    store.rockenv(&word).ok();
    let outputs = store.home().join("outputs").join(store.env());
    [outputs, store.work().join("to")]
}

#[test]
fn a_result_is_no_link_to_a_file_that_is_left_out() {
    let store = TestStore::new();
    let [outputs, to] = two_outputs(&store, "");
    fs::hard_link(outputs.join("a/z"), outputs.join("a/backup")).unwrap();
    let absent = "/media/no-such-disk/out";
    let message = format!("the disk of the export at `{absent}` is not mounted");
    store
        .rockenv(&["export", store.env(), absent])
        .exits(4)
        .says(&[message.as_str()]);
    store.rockenv(&["export", store.env(), "fresh"]).ok();
    let fresh = store.work().join("fresh/a");
    assert_eq!(fs::metadata(&fresh).unwrap().mode() & 0o777, 0o755);
    assert!(!fresh.join("backup").exists());
    // The target has another file with the name of the one that is left out.
    fs::create_dir_all(to.join("a")).unwrap();
    fs::write(to.join("a/backup"), "other\n").unwrap();
    for path in [&to, &to.join("a"), &to.join("a/backup")] {
        std::os::unix::fs::chown(path, Some(1234), Some(1234)).unwrap();
    }
    insta::assert_snapshot!(store.shows("export ENV to"), @"
    warning: left out, because no step of env `ENV` as it is now left it: `a/backup`
    warning: env `ENV` was not built from a lock file, so its manifest has no exact inputs: `rockenv lock ENV --param 'word=two'`, then `rockenv up ENV --param 'word=two' --gpu none --locked`
    exported 2 files; to/ENV.provenance.json describes them
    ");
    let read = |name: &str| fs::read_to_string(to.join(name)).unwrap();
    assert_eq!([read("a/backup"), read("a/z")], ["other\n", "two\n"]);
    let file = |name: &str| fs::metadata(to.join(name)).unwrap();
    assert_eq!(file("a/z").ino(), file("a/zz").ino());
    assert_eq!((file("a/z").nlink(), file("a/backup").nlink()), (2, 1));
}

#[test]
fn a_users_file_is_left_out_of_one_volume_as_of_all() {
    let store = TestStore::new();
    let [outputs, to] = two_outputs(&store, "");
    fs::write(outputs.join("b/mine"), "mine\n").unwrap();
    insta::assert_snapshot!(store.shows("export ENV to\nexport ENV to --volume b"), @"
    $ rockenv export ENV to
    warning: left out, because no step of env `ENV` as it is now left it: `b/mine`
    warning: env `ENV` was not built from a lock file, so its manifest has no exact inputs: `rockenv lock ENV --param 'word=two'`, then `rockenv up ENV --param 'word=two' --gpu none --locked`
    exported 2 files; to/ENV.provenance.json describes them
    $ rockenv export ENV to --volume b
    warning: left out, because no step of env `ENV` as it is now left it: `b/mine`
    error: env `ENV` has no files in its output volumes
    help: a step with `export`, or one that writes to a volume of kind `output`, puts it there
    exit code 7
    ");
    assert!(!to.join("b").exists());
}

#[test]
fn nothing_is_written_beside_a_manifest_of_another_build() {
    let store = TestStore::new();
    let [_, to] = two_outputs(&store, "");
    let env = store.env();
    store.rockenv(&["export", env, "to"]).ok();
    store.rockenv(&["lock", env, "--param", "word=two"]).ok();
    two_outputs(&store, "; echo > /a/new");
    insta::assert_snapshot!(store.shows("export ENV to"), @"
    error: `to/ENV.provenance.json` exists with other content; refusing to overwrite it
    help: rockenv export ENV NEW-DIRECTORY
    exit code 2
    ");
    assert!(!to.join("a/new").exists());
}

#[test]
fn the_commands_for_an_env_are_those_of_its_last_up() {
    let store = TestStore::new();
    let env = store.env();
    store.profile(
        "volume = [{ name = 'a', kind = 'output', target = '/a' }]
         [[step]]\nname = 'make'\nrun = 'echo > /a/z'\n",
    );
    store.rockenv(&["lock", env]).ok();
    store.rockenv(&["up", env, "--locked"]).ok();
    store.up().says(&["nothing to do"]);
    insta::assert_snapshot!(store.shows("export ENV to"), @"
    warning: env `ENV` was not built from a lock file, so its manifest has no exact inputs: `rockenv lock ENV`, then `rockenv up ENV --locked`
    exported 1 file; to/ENV.provenance.json describes them
    ");
}

#[test]
fn a_step_that_exports_writes_over_nothing_but_what_it_left() {
    let store = TestStore::new();
    let out = store.work().join("out");
    fs::create_dir(&out).unwrap();
    let others = format!("# mine\n{} *kept\n", "0".repeat(64));
    for (name, text) in [("made", "mine\n"), ("SHA256SUMS", &others)] {
        fs::write(out.join(name), text).unwrap();
    }
    let user = build_user().0;
    for path in [out.clone(), out.join("made"), out.join("SHA256SUMS")] {
        std::os::unix::fs::chown(path, Some(user), Some(user)).unwrap();
    }
    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
    let write = |word: &str| {
        store.profile(&format!(
            "volume = [{{ name = 'out', kind = 'output', path = '../out', target = '/out' }}]
             [[step]]\nname = 'make'\nrun = 'echo {word} > ~/made'
             [[step]]\nname = 'export'\nexport = [{{ from = '/home/builder/made', to = 'out' }}]\n"
        ));
    };
    write("one");
    store
        .rockenv(&["up", store.env()])
        .exits(5)
        .says(&["`/out/made` exists and was not written by an export"]);
    assert_eq!(
        (read("made").as_str(), read("SHA256SUMS")),
        ("mine\n", others.clone())
    );
    fs::rename(out.join("made"), out.join("mine")).unwrap();
    store.up();
    assert_eq!(
        (read("made").as_str(), read("mine").as_str()),
        ("one\n", "mine\n")
    );
    assert!(
        read("SHA256SUMS").starts_with(&others),
        "{}",
        read("SHA256SUMS")
    );
    // An export replaces a file that an earlier export wrote.
    write("two");
    store.up();
    assert_eq!(read("made"), "two\n");
    assert_eq!(read("SHA256SUMS").matches("  made\n").count(), 1);
    // It does not replace a file that was changed since.
    fs::write(out.join("made"), "changed\n").unwrap();
    write("three");
    store
        .rockenv(&["up", store.env()])
        .exits(5)
        .says(&["`/out/made` was changed since an export wrote it"]);
    assert_eq!(read("made"), "changed\n");
}

/// A directory of releases has its own sums.
#[test]
fn a_step_that_exports_keeps_files_and_lines_of_the_users_own_sums() {
    let store = TestStore::new();
    let out = store.work().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("made"), "mine\n").unwrap();
    let sum = sha256(&out.join("made"));
    let sums = format!("{sum}  made\n{}  absent\n", "0".repeat(64));
    fs::write(out.join("SHA256SUMS"), &sums).unwrap();
    let user = build_user().0;
    for path in [out.clone(), out.join("made"), out.join("SHA256SUMS")] {
        std::os::unix::fs::chown(path, Some(user), Some(user)).unwrap();
    }
    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
    let write = |name: &str, word: &str| {
        store.profile(&format!(
            "volume = [{{ name = 'out', kind = 'output', path = '../out', target = '/out' }}]
             [[step]]\nname = 'make'\nrun = 'echo {word} > ~/{name}'
             [[step]]\nname = 'export'\nexport = [{{ from = '/home/builder/{name}', to = 'out' }}]\n"
        ));
    };
    write("made", "one");
    store
        .rockenv(&["up", store.env()])
        .exits(5)
        .says(&["`/out/made` exists and was not written by an export"]);
    assert_eq!(
        (read("made").as_str(), read("SHA256SUMS")),
        ("mine\n", sums.clone())
    );
    write("other", "one");
    store.up();
    assert!(
        read("SHA256SUMS").starts_with(&sums),
        "{}",
        read("SHA256SUMS")
    );
    // Files that the user adds later are the user's too.
    fs::write(out.join("later"), "later\n").unwrap();
    let sum = sha256(&out.join("later"));
    let more = format!("{}{sum}  later\n", read("SHA256SUMS"));
    fs::write(out.join("SHA256SUMS"), more).unwrap();
    write("later", "two");
    store
        .rockenv(&["up", store.env()])
        .exits(5)
        .says(&["`/out/later` exists and was not written by an export"]);
    assert_eq!(read("later"), "later\n");
    write("other", "two");
    store.up();
    assert_eq!(read("other"), "two\n");
}
