//! What `export --snapshots` does not write, and what `import` does not take. Nothing of it gets a name in the store.

use std::path::{Path, PathBuf};

use fs_err as fs;
use rockenv::testing::Store;
use serde_json::{Value, json};

use super::files::{built, text};
use super::{STEPS, sha256};
use crate::support::env::TestStore;
use crate::support::transcript::measured;

const STEP: &str =
    "[[step]]\nname = 'one'\nuser = 'root'\nrun = 'mkdir -p /opt; echo one > /opt/one'\n";

#[test]
fn nothing_is_written_over_and_the_longest_name_has_room_for_what_is_not_finished() {
    let (one, other) = (TestStore::new(), TestStore::new());
    let name = built(&one, &other, STEP);
    let work = one.work();
    fs::write(work.join("mine.tar"), "mine").unwrap();
    fs::create_dir(work.join("mine")).unwrap();
    std::os::unix::fs::symlink("nowhere", work.join("link.tar")).unwrap();
    let export = |place: &str| one.rockenv(&["export", &name, "--snapshots", place]);
    // A link or another user's file already has the name of the partial file.
    std::os::unix::fs::symlink("mine.tar", work.join(".x.tar.rockenv-partial")).unwrap();
    let own = work.join(".y.tar.rockenv-partial");
    fs::write(&own, "mine").unwrap();
    std::os::unix::fs::chown(&own, Some(1234), Some(1234)).unwrap();
    let said = one.shows(
        "export ENV --snapshots mine.tar
        export ENV --snapshots mine
        export ENV --snapshots link.tar
        export ENV --snapshots x.tar
        export ENV --snapshots y.tar
        export ENV --snapshots x.tar.gz
        export ENV --snapshots absent/x.tar
        export ENV --snapshots x.oci --until none
        export absent --snapshots x.oci",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv export ENV --snapshots mine.tar
    error: `./mine.tar` already exists; refusing to overwrite it
    help: rockenv export ENV --snapshots NEW-NAME
    exit code 2
    $ rockenv export ENV --snapshots mine
    error: `./mine` already exists; refusing to overwrite it
    help: rockenv export ENV --snapshots NEW-NAME
    exit code 2
    $ rockenv export ENV --snapshots link.tar
    error: `./link.tar` already exists; refusing to overwrite it
    help: rockenv export ENV --snapshots NEW-NAME
    exit code 2
    $ rockenv export ENV --snapshots x.tar
    error: `./.x.tar.rockenv-partial` already exists; refusing to overwrite it
    help: rockenv export ENV --snapshots NEW-NAME
    exit code 2
    $ rockenv export ENV --snapshots y.tar
    error: `./.y.tar.rockenv-partial` already exists; refusing to overwrite it
    help: rockenv export ENV --snapshots NEW-NAME
    exit code 2
    $ rockenv export ENV --snapshots x.tar.gz
    error: `x.tar.gz` would be compressed twice: its layers are already
    help: --snapshots x.tar
    exit code 2
    $ rockenv export ENV --snapshots absent/x.tar
    error: directory `absent` does not exist
    help: mkdir -p absent
    exit code 7
    $ rockenv export ENV --snapshots x.oci --until none
    error: env `ENV` has no snapshot of a step `none`
    help: rockenv snapshot ls ENV
    exit code 7
    $ rockenv export absent --snapshots x.oci
    error: no env `absent`
    help: rockenv ls
    exit code 7
    ");
    for file in [&work.join("mine.tar"), &own] {
        assert_eq!(fs::read_to_string(file).unwrap(), "mine");
    }
    assert_eq!(fs::read_dir(work.join("mine")).unwrap().count(), 0);
    assert!(!work.join("x.oci").exists());
    for (letter, end) in [("n", ".oci"), ("é", ".tar")] {
        let long = letter.repeat((255 - end.len()) / letter.len()) + end;
        export(&long).ok();
        assert!(work.join(long).exists());
    }
}

#[test]
fn what_cannot_be_pushed_cannot_be_exported() {
    let (one, other) = (TestStore::new(), TestStore::new());
    built(&one, &other, STEPS);
    insta::assert_snapshot!(one.shows("export ENV --snapshots x.oci.tar"), @"
    error: no snapshot of env `ENV` can be shared: its build volume `build` is not part of it, because this is an overlay store
    help: rockenv setup --store-image SIZE makes a store that freezes them
    exit code 2
    ");
}

#[test]
fn a_directory_whose_name_means_a_deletion_is_not_written() {
    let (one, other) = (TestStore::new(), TestStore::new());
    let body = "[[step]]\nname = 'one'\nuser = 'root'\nrun = 'mkdir -p /opt/kept /opt/.wh.kept'\n";
    built(&one, &other, body);
    insta::assert_snapshot!(measured(one.shows("export ENV --snapshots x.oci")), @"
    export to x.oci … SIZE
    error: cannot export to `x.oci`
      caused by: cannot export snapshot `one`
      caused by: `/opt/.wh.kept` cannot be shared: in a layer its name means a deletion
    help: remove or rename it in the step that makes it
    exit code 3
    ");
    assert!(!one.work().join("x.oci").exists());
}

/// An OCI layout with changed documents and matching digests.
struct Forged {
    directory: PathBuf,
    index: Value,
    manifest: Value,
    config: Value,
}

impl Forged {
    fn of(directory: PathBuf) -> Self {
        let json =
            |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            json(
                &directory
                    .join("blobs/sha256")
                    .join(&digest["sha256:".len()..]),
            )
        };
        let index = json(&directory.join("index.json"));
        let manifest = blob(&index["manifests"][0]);
        let config = blob(&manifest["config"]);
        Self {
            directory,
            index,
            manifest,
            config,
        }
    }

    /// Stores bytes under their digest, and returns digest and size.
    fn put(&self, bytes: &[u8]) -> (Value, Value) {
        let digest = sha256(bytes);
        let place = self.directory.join("blobs/sha256").join(&digest);
        fs::write(place, bytes).unwrap();
        (json!(format!("sha256:{digest}")), json!(bytes.len()))
    }

    fn write(mut self) {
        let (digest, size) = self.put(&serde_json::to_vec(&self.config).unwrap());
        self.manifest["config"]["digest"] = digest;
        self.manifest["config"]["size"] = size;
        let (digest, size) = self.put(&serde_json::to_vec(&self.manifest).unwrap());
        for entry in self.index["manifests"].as_array_mut().unwrap() {
            entry["digest"] = digest.clone();
            entry["size"] = size.clone();
        }
        let index = serde_json::to_vec(&self.index).unwrap();
        fs::write(self.directory.join("index.json"), index).unwrap();
    }

    /// Returns the file of the last layer.
    fn layer(&self) -> PathBuf {
        let layers = self.manifest["layers"].as_array().unwrap();
        let digest = layers.last().unwrap()["digest"].as_str().unwrap();
        self.directory
            .join("blobs/sha256")
            .join(&digest["sha256:".len()..])
    }

    fn name(&mut self) -> &mut Value {
        &mut self.index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"]
    }
}

/// A change to a layout, with the exit code of `import` and what it says.
type Case = (fn(Forged), i32, &'static str);

const CASES: [Case; 18] = [
    (
        |it| fs::remove_file(it.directory.join("oci-layout")).unwrap(),
        3,
        "no `oci-layout` in it",
    ),
    (
        |it| {
            fs::write(
                it.directory.join("oci-layout"),
                r#"{"imageLayoutVersion":"2.0.0"}"#,
            )
            .unwrap();
        },
        3,
        "its version is 2.0.0",
    ),
    (
        |it| fs::remove_file(it.directory.join("index.json")).unwrap(),
        3,
        "is it incomplete?",
    ),
    (
        |it| fs::write(it.directory.join("index.json"), vec![b' '; 5 << 20]).unwrap(),
        3,
        "has 5242880 bytes",
    ),
    (
        |it| fs::write(it.directory.join("index.json"), "{").unwrap(),
        3,
        "is not an index",
    ),
    (
        |mut it| {
            it.index["manifests"] = vec![it.index["manifests"][0].clone(); 300].into();
            it.write();
        },
        3,
        "it contains 300 images",
    ),
    (
        |mut it| {
            it.index["manifests"] = json!([]);
            it.write();
        },
        3,
        "contains no image",
    ),
    (
        |mut it| {
            *it.name() = json!("a".repeat(64));
            it.write();
        },
        8,
        "has unexpected content",
    ),
    (
        |mut it| {
            it.manifest["annotations"]["rockenv.key"] = json!("a".repeat(64));
            it.write();
        },
        8,
        "its manifest declares key",
    ),
    (
        |mut it| {
            it.config.as_object_mut().unwrap().remove("rockenv");
            it.write();
        },
        3,
        "it is not a snapshot that",
    ),
    (
        |mut it| {
            it.config["rockenv"] = json!({ "schema": 2, "layers": [] });
            it.write();
        },
        3,
        "it was pushed by a newer rockenv",
    ),
    (
        |mut it| {
            it.config["rockenv"]["image"]["name"] = json!("other");
            it.config["rockenv"]["image"]["digest"] = json!("a".repeat(64));
            it.write();
        },
        8,
        "does not match its description",
    ),
    (
        |it| {
            let layer = it.layer();
            let bytes = fs::read(&layer).unwrap();
            fs::write(layer, &bytes[..bytes.len() / 2]).unwrap();
        },
        3,
        "not copied to its end",
    ),
    (
        |it| {
            let layer = it.layer();
            let mut bytes = fs::read(&layer).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(layer, bytes).unwrap();
        },
        8,
        "a layer in it has SHA-256",
    ),
    (|it| fs::remove_file(it.layer()).unwrap(), 3, "is not in it"),
    (
        |it| {
            let layer = it.layer();
            let away = it.directory.with_extension("away");
            fs::rename(&layer, &away).unwrap();
            std::os::unix::fs::symlink(away, layer).unwrap();
        },
        3,
        "is not a regular file",
    ),
    (
        |it| {
            let layer = it.layer();
            fs::remove_file(&layer).unwrap();
            nix::unistd::mkfifo(&layer, nix::sys::stat::Mode::S_IRWXU).unwrap();
        },
        3,
        "is not a regular file",
    ),
    // The digests fit here, so the archive itself has to be refused.
    (
        |mut it| {
            let mut header = tar::Header::new_gnu();
            header.as_old_mut().name[..10].copy_from_slice(b"../../evil");
            header.set_size(4);
            header.set_mode(0o644);
            header.set_cksum();
            let mut archive = header.as_bytes().to_vec();
            archive.extend([b"evil".as_slice(), &[0; 508 + 1024]].concat());
            let (digest, size) = it.put(&archive);
            let last = it.manifest["layers"].as_array().unwrap().len() - 1;
            it.manifest["layers"][last]["digest"] = digest.clone();
            it.manifest["layers"][last]["size"] = size;
            it.config["rootfs"]["diff_ids"][last] = digest;
            it.write();
        },
        3,
        "../../evil",
    ),
];

#[test]
fn what_was_tampered_with_is_not_imported() {
    let (one, other) = (TestStore::new(), TestStore::new());
    let name = built(&one, &other, STEP);
    one.rockenv(&["export", &name, "--snapshots", "good"]).ok();
    let good = one.work().join("good");
    for (at, (change, code, says)) in CASES.into_iter().enumerate() {
        let directory = one.work().join(format!("case-{at}"));
        let copied = std::process::Command::new("cp")
            .args(["-r", text(&good), text(&directory)])
            .status();
        assert!(copied.unwrap().success());
        change(Forged::of(directory.clone()));
        let import = other.rockenv(&["import", text(&directory)]);
        import.exits(code).says(&["cannot import", says]);
        untouched(&other);
    }
    assert!(!other.home().join("evil").exists() && !other.home().join("images/evil").exists());
    other.rockenv(&["import", text(&good)]).ok();
    other.rockenv(&["up", &name]).ok().says(&["1 done before"]);
    other.rockenv(&["fsck"]).ok();
}

fn untouched(store: &TestStore) {
    let open = Store::open_existing(store.home()).unwrap().unwrap();
    assert!(open.layers().unwrap().is_empty());
}

/// Returns an entry of a tar file.
fn entry(name: &str, kind: tar::EntryType, bytes: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(kind);
    if kind == tar::EntryType::Symlink {
        header.set_link_name("/etc/passwd").unwrap();
    }
    header.set_mode(0o644);
    header.set_size(bytes.len() as u64);
    header.set_cksum();
    let padding = vec![0; bytes.len().next_multiple_of(512) - bytes.len()];
    [header.as_bytes().as_slice(), bytes, &padding].concat()
}

#[test]
fn a_file_that_is_no_layout_is_not_imported() {
    use tar::EntryType::{Directory, Link, Regular, Symlink};
    let (one, other) = (TestStore::new(), TestStore::new());
    let name = built(&one, &other, STEP);
    one.rockenv(&["export", &name, "--snapshots", "good.tar"])
        .ok();
    let good = fs::read(one.work().join("good.tar")).unwrap();
    let before = |entry: Vec<u8>| [entry, good.clone()].concat();
    let mut far = entry("index.json", Regular, b"");
    // An impossible size, in an otherwise valid header.
    far[124..136].copy_from_slice(b"77777777777\0");
    far[148..156].copy_from_slice(b"        ");
    let sum: u32 = far[..512].iter().map(|byte| u32::from(*byte)).sum();
    far[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let cases = [
        (Vec::new(), "it is empty"),
        (vec![0; 1024], "no `oci-layout` in it"),
        (
            b"some text that is not an archive".to_vec(),
            "refused archive",
        ),
        (
            [b"\x1f\x8b\x08\0".as_slice(), &good].concat(),
            "it is compressed",
        ),
        (good[..good.len() / 2].to_vec(), "it ends inside"),
        (
            good[..good.len() - 1024 - 512].to_vec(),
            "it ends inside `index.json`",
        ),
        (before(far), "it ends inside `index.json`"),
        (
            before(entry("manifest.json", Regular, b"[]")),
            "`manifest.json` does not belong in a layout",
        ),
        (
            before(entry("../oci-layout", Regular, b"{}")),
            "`../oci-layout` does not belong in a layout",
        ),
        (
            before(entry("/oci-layout", Regular, b"{}")),
            "`/oci-layout` does not belong in a layout",
        ),
        (
            before(entry("index.json", Symlink, b"")),
            "`index.json` does not belong in a layout",
        ),
        (
            before(entry("index.json", Link, b"")),
            "`index.json` does not belong in a layout",
        ),
        (
            before(entry("blobs/sha512", Directory, b"")),
            "`blobs/sha512` does not belong in a layout",
        ),
        (
            before(entry("oci-layout", Regular, b"{}")),
            "`oci-layout` is in it twice",
        ),
    ];
    for (at, (bytes, says)) in cases.into_iter().enumerate() {
        let place = one.work().join(format!("case-{at}.tar"));
        fs::write(&place, bytes).unwrap();
        let import = other.rockenv(&["import", text(&place)]);
        import.exits(3).says(&["cannot import", says]);
        untouched(&other);
    }
    insta::assert_snapshot!(other.shows("import absent.tar\nimport /dev/null"), @"
    $ rockenv import absent.tar
    error: cannot import `absent.tar`
      caused by: `absent.tar` does not exist
    help: rockenv export ENV --snapshots FILE.oci.tar, on the machine that built it
    exit code 7
    $ rockenv import /dev/null
    error: cannot import `/dev/null`
      caused by: this is not an OCI layout: it is neither a file nor a directory
    help: rockenv export ENV --snapshots FILE.oci.tar makes one, and so does skopeo copy docker://HOST/NAME:KEY oci:DIR:KEY
    exit code 3
    ");
}
