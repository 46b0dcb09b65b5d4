//! Snapshots as files: `export --snapshots` and `import`, other programs that read them, and commands that are cut off.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{STEPS, assert_same, without_volume};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::ordinary::{MadeUp, Ordinary};
use crate::support::registry::Registry;
use crate::support::run::wait_until;

/// A step that takes a while to pack.
const LARGE: &str = "[[step]]\nname = 'one'\nuser = 'root'\nrun = 'mkdir -p /opt; head -c 40M /dev/urandom > /opt/one'\n";

/// Gives both machines the profile and builds it on the first. Returns its name.
pub(super) fn built(one: &TestStore, other: &TestStore, body: &str) -> String {
    let name = one.env().to_owned();
    for store in [one, other] {
        store.profile_named(&name, body);
    }
    one.rockenv(&["up", &name]).ok();
    name
}

pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "lost+found").collect();
    names.sort();
    names
}

/// Creates an empty directory for the test and returns its path.
fn empty(store: &TestStore) -> PathBuf {
    let directory = store.work().join("disk");
    fs::create_dir(&directory).unwrap();
    chown(&directory, Some(1234), Some(1234)).unwrap();
    directory
}

#[test]
fn nothing_is_built_of_what_was_imported() {
    let (btrfs, xfs) = (LoopFs::with_base(Kind::Btrfs), LoopFs::new(Kind::Xfs));
    for (one, other, body, file) in [
        // With build volumes, from a store that freezes them, and with the image.
        (
            TestStore::on(&btrfs),
            TestStore::new(),
            STEPS,
            "demo.oci.tar",
        ),
        (
            TestStore::new(),
            TestStore::on(&xfs),
            without_volume(),
            "demo.oci",
        ),
    ] {
        let name = built(&one, &other, body);
        let disk = empty(&one);
        let place = disk.join(file);
        one.rockenv(&["export", &name, "--snapshots", text(&place)])
            .ok()
            .says(&["wrote the image and one, two, three to", file]);
        assert_eq!(names(&disk), [file]);
        other.rockenv(&["import", text(&place)]).ok().says(&[
            "imported ",
            "one, two, three from",
            file,
        ]);
        other
            .rockenv(&["up", &name])
            .ok()
            .says(&["3 steps, 3 done before"]);
        assert_same(&one, &other, &name);
        other
            .rockenv(&["import", text(&place)])
            .ok()
            .says(&["the store already has all of it"]);
        other.rockenv(&["fsck"]).ok();
        // Exporting the same snapshots again writes the same bytes.
        let again = disk.join(format!("again-{file}"));
        one.rockenv(&["export", &name, "--snapshots", text(&again)])
            .ok();
        let differ = Command::new("diff")
            .args(["-r", text(&place), text(&again)])
            .status()
            .unwrap();
        assert!(differ.success(), "{file}");
    }
}

#[test]
fn a_part_of_the_steps_is_enough_for_that_part() {
    let (one, other) = (TestStore::new(), TestStore::new());
    let name = built(&one, &other, without_volume());
    let place = empty(&one).join("demo.oci.tar");
    let export = one.rockenv(&[
        "export",
        &name,
        "--snapshots",
        text(&place),
        "--until",
        "two",
        "--json",
    ]);
    let said = export.ok().json();
    assert_eq!(said["schema"], "rockenv/export-snapshots/1");
    assert_eq!(said["steps"], serde_json::json!(["one", "two"]));
    let import = other.rockenv(&["import", text(&place), "--json"]).ok();
    let said = import.json();
    assert_eq!(said["schema"], "rockenv/import/1");
    assert_eq!(
        said["snapshots"][0]["steps"],
        serde_json::json!(["one", "two"])
    );
    other
        .rockenv(&["up", &name])
        .ok()
        .says(&["3 steps, 2 done before"]);
}

/// Runs a program that must succeed, and returns what it prints.
fn run(program: &str, words: &[&str]) -> String {
    let out = Command::new(program).args(words).output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {words:?}: {error}");
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn other_programs_read_it_and_what_they_copy_is_imported() {
    let (one, other) = (TestStore::new(), TestStore::new());
    let body =
        "[[step]]\nname = 'one'\nuser = 'root'\nrun = 'mkdir -p /opt; echo one > /opt/one'\n";
    let name = built(&one, &other, body);
    let disk = empty(&one);
    let [file, directory] = ["demo.oci.tar", "demo.oci"].map(|name| disk.join(name));
    for place in [&file, &directory] {
        one.rockenv(&["export", &name, "--snapshots", text(place)])
            .ok();
    }
    let archive = format!("oci-archive:{}", file.display());
    let layout = format!("oci:{}", directory.display());
    let inspect = |from: &str| -> Value {
        serde_json::from_str(&run("skopeo", &["inspect", "--raw", from])).unwrap()
    };
    assert_eq!(inspect(&archive), inspect(&layout));
    assert_eq!(inspect(&archive)["annotations"]["rockenv.step"], "one");
    // Podman's storage for this test, in a path that is short enough for podman.
    let storage = tempfile::tempdir_in("/var/tmp").unwrap();
    let podman = |words: &[&str]| {
        let [root, run_root] = ["root", "run"].map(|name| storage.path().join(name));
        let own = ["--root", text(&root), "--runroot", text(&run_root)];
        run(
            "podman",
            &[&own[..], &["--storage-driver", "vfs"], words].concat(),
        )
    };
    podman(&["load", "--quiet", "--input", text(&file)]);
    let image = format!("localhost/{name}:one");
    let mounted = podman(&["image", "mount", &image]).trim().to_owned();
    assert_eq!(
        fs::read_to_string(Path::new(&mounted).join("opt/one")).unwrap(),
        "one\n"
    );
    podman(&["image", "unmount", &image]);
    podman(&["image", "rm", &image]);
    // Copies into a registry and out of it again: skopeo keeps every byte.
    let registry = Registry::start(false);
    let key = inspect(&archive)["annotations"]["rockenv.key"].clone();
    let reference = format!("{}/team/rocm:{}", registry.host, key.as_str().unwrap());
    let at_registry = format!("docker://{reference}");
    let copy = disk.join("copy");
    let to = format!("oci:{}:{}", copy.display(), key.as_str().unwrap());
    let skopeo = |words: &[&str]| run("skopeo", &[&["copy", "--quiet"], words].concat());
    skopeo(&["--dest-tls-verify=false", &archive, &at_registry]);
    skopeo(&["--src-tls-verify=false", &at_registry, &to]);
    other
        .rockenv(&["import", text(&copy)])
        .ok()
        .says(&["imported one from"]);
    other
        .rockenv(&["pull", &reference])
        .ok()
        .says(&["the store already has all of it"]);
    // An archive that was packed by hand.
    let packed = disk.join("packed.tar");
    run("tar", &["-cf", text(&packed), "-C", text(&directory), "."]);
    other
        .rockenv(&["import", text(&packed)])
        .ok()
        .says(&["the store already has all of it"]);
    other.rockenv(&["up", &name]).ok().says(&["1 done before"]);
}

fn a_full_disk_is_said_and_left_as_it_was(one: &TestStore, name: &str) {
    let disk = LoopFs::sized(Kind::Ext4, 24 << 20);
    chown(disk.path(), Some(1234), Some(1234)).unwrap();
    for file in ["demo.oci.tar", "demo.oci"] {
        let place = disk.join(file);
        one.rockenv(&["export", name, "--snapshots", text(&place)])
            .exits(10)
            .says(&["cannot export to", "No space left on device"]);
        assert_eq!(names(&disk.join("")), Vec::<String>::new());
    }
}

#[test]
fn an_export_that_was_cut_off_is_cleaned_up_at_once_or_by_the_next() {
    let (one, other) = (TestStore::new(), TestStore::new());
    let name = built(&one, &other, LARGE);
    a_full_disk_is_said_and_left_as_it_was(&one, &name);
    let disk = empty(&one);
    for file in ["demo.oci.tar", "demo.oci"] {
        let place = disk.join(file);
        let words = ["export", &name, "--snapshots", text(&place)];
        let partial = disk.join(format!(".{file}.rockenv-partial"));
        // Tries again if the export was faster than this loop.
        let mut cut_off = false;
        for _ in 0..5 {
            let running = one.start(&words);
            wait_until("something is written", || {
                partial.exists() || place.exists()
            });
            if !place.exists() {
                // Only one export at a time may write the file.
                let busy = one.rockenv(&words);
                if busy.code == 6 {
                    busy.says(&["another export is writing"]);
                }
            }
            running.signal(Signal::SIGKILL);
            drop(running);
            cut_off = partial.exists();
            if cut_off {
                break;
            }
            drop((fs::remove_file(&place), fs::remove_dir_all(&place)));
        }
        assert!(cut_off && !place.exists());
        one.rockenv(&words).ok();
        assert!(!partial.exists());
        // An interrupted export removes its own partial file.
        let other_place = disk.join(format!("other-{file}"));
        let running = one.start(&["export", &name, "--snapshots", text(&other_place)]);
        wait_until("something is written", || names(&disk).len() > 1);
        running.signal(Signal::SIGINT);
        running.wait();
        assert!(!names(&disk).iter().any(|name| name.starts_with('.')));
        drop((
            fs::remove_file(&other_place),
            fs::remove_dir_all(&other_place),
        ));
        other.rockenv(&["import", text(&place)]).ok();
        drop((fs::remove_file(&place), fs::remove_dir_all(&place)));
    }
}

#[test]
fn an_import_that_was_killed_leaves_nothing_and_the_next_one_converges() {
    let (one, other) = (TestStore::new(), TestStore::new());
    let name = built(&one, &other, LARGE);
    let place = empty(&one).join("demo.oci.tar");
    one.rockenv(&["export", &name, "--snapshots", text(&place)])
        .ok();
    let images = other.home().join("images");
    let arriving = || {
        let names = names(&images);
        names.iter().any(|name| name.starts_with("tmp-pull-"))
    };
    let layers = other.home().join("layers");
    let running = other.start(&["import", text(&place)]);
    wait_until("something arrives", || {
        arriving() || !names(&layers).is_empty()
    });
    running.signal(Signal::SIGKILL);
    drop(running);
    other.rockenv(&["import", text(&place)]).ok();
    assert!(!arriving());
    other.rockenv(&["up", &name]).ok().says(&["1 done before"]);
    assert_same(&one, &other, &name);
}

#[test]
fn what_another_engine_has_under_the_same_key_is_imported_once() {
    let [one, other] = [TestStore::new(), TestStore::new()];
    let name = built(&one, &other, without_volume());
    // As in `/tmp`, which belongs to root, the export is the caller's.
    let shared = tempfile::tempdir().unwrap();
    fs::set_permissions(shared.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
    let place = shared.path().join("demo.oci");
    one.rockenv(&["export", &name, "--snapshots", text(&place)])
        .ok();
    let caller = Ordinary::get().map_or(1234, |user| user.uid);
    assert_eq!(fs::metadata(&place).unwrap().uid(), caller);
    let import = || drop(other.rockenv(&["import", text(&place)]).ok());
    let layers = || names(&other.home().join("layers"));
    import();
    let all = layers();
    import();
    assert_eq!(layers(), all);
    // Makes the layers look as if another engine had made them.
    for layer in &all {
        let path = other.home().join("layers").join(layer).join("layer.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        json["kept"] = serde_json::json!({ "socket": "/run/other.sock", "image": "other" });
        fs::write(&path, json.to_string()).unwrap();
    }
    import();
    let both = layers();
    assert_eq!(both.len(), 2 * all.len());
    import();
    assert_eq!(layers(), both);
}

/// An ordinary user is root of a user namespace before `import` looks for the service.
#[test]
fn an_ordinary_user_s_podman_takes_what_is_imported() {
    let disk = LoopFs::new(Kind::Ext4);
    let above = disk.path().parent().unwrap();
    fs::set_permissions(above, std::fs::Permissions::from_mode(0o755)).unwrap();
    let user = MadeUp::at(disk.join("home"));
    let socket = user.home.join("podman.sock");
    let podman = UnixListener::bind(&socket).unwrap();
    chown(&socket, Some(MadeUp::UID), Some(MadeUp::UID)).unwrap();
    let words = ["import", "--engine", "podman", "missing"];
    let mut import = user.command(user.program(), &words);
    import.env("CONTAINER_HOST", format!("unix://{}", socket.display()));
    let ran = std::thread::scope(|scope| {
        scope.spawn(|| {
            for request in podman.incoming() {
                let mut request = request.unwrap();
                if request.read(&mut [0; 1024]).unwrap() == 0 {
                    return;
                }
                request
                    .write_all(b"HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nLibpod-Api-Version: 5.4.2\r\n\r\n")
                    .unwrap();
            }
        });
        let ran = import.output();
        // An empty request ends the thread.
        drop(UnixStream::connect(&socket));
        ran.unwrap()
    });
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(said.contains("cannot import `missing`"), "{said}");
}
