//! A command of `exec` or `shell` that wrote nothing to a build volume leaves the next build clean. A command that did,
//! or may have, does not.

use std::io::Write as _;
use std::path::PathBuf;

use fs_err as fs;
use nix::sys::signal::Signal;

use super::{on_each, on_overlay_and_btrfs};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::wait_until;

const VOLUME: &str = "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n";

/// Returns two steps that each case rebuilds. The second continues with the files that it finds.
fn profile(case: usize) -> String {
    format!(
        "{VOLUME}[[step]]\nname = 'one'\nrun = 'mkdir /v/build/d; echo {case} > /v/build/d/file'\n\
         [[step]]\nname = 'two'\nincremental = true\nrun = 'echo {case} >> /v/build/log'\n"
    )
}

/// Returns whether the env's newest snapshot is clean.
fn is_clean(store: &TestStore) -> bool {
    let list = store.rockenv(&["snapshot", "ls", store.env()]).ok().text();
    let last = list.lines().last().unwrap();
    assert!(last.contains("step"), "{list}");
    !last.contains("incremental")
}

/// Returns the file that the first step made.
fn file(store: &TestStore) -> PathBuf {
    let record = store.record();
    let id = record["head"]["volumes"]["build"].as_str().unwrap();
    store.home().join("volumes").join(id).join("d/file")
}

#[test]
fn only_a_command_that_wrote_to_a_build_volume_makes_the_next_build_incremental() {
    on_overlay_and_btrfs(|store, method| {
        let read = "ls -lR /v/build; cat /v/build/d/file";
        let cases: [(&[&str], bool); 8] = [
            (&[read, read, "echo mine > $HOME/mine"], true),
            (&["echo 1 >> /v/build/d/file", read], false),
            // The second command runs in the container that the first one left.
            (&[read, "echo 1 >> /v/build/d/file"], false),
            (&["rm /v/build/d/file"], false),
            (&["ln /v/build/d/file /v/build/d/link"], false),
            (&["chmod 600 /v/build/d/file"], false),
            // Stores that can restore the emptied volume do so.
            (&["rm -r /v/build/d"], method != "overlay"),
            (
                &[
                    "cp -p /v/build/d/file $HOME/old; echo 9 > /v/build/d/file; touch -r $HOME/old /v/build/d/file",
                ],
                false,
            ),
        ];
        for (case, (scripts, clean)) in cases.into_iter().enumerate() {
            // The same walk finds these writes on every kind of store, so one store is enough.
            if method != "overlay" && (3..6).contains(&case) {
                continue;
            }
            store.profile(&profile(case));
            let until = ["up", store.env(), "--clean", "--until", "one"];
            store.rockenv(&until).ok();
            for script in scripts {
                store.sh(script).ok();
            }
            store.up();
            assert_eq!(is_clean(store), clean, "{method}: {scripts:?}");
        }
    });
}

#[test]
fn a_clean_build_keeps_the_volumes_that_no_snapshot_has() {
    let store = TestStore::new();
    let env = store.env();
    store.up_with(&profile(0));
    let write = "echo mine > /v/build/precious";
    for (script, taken) in [
        (write.to_owned(), false),
        (format!("{write}; echo mine > ~/mine"), false),
        // The snapshot in between has only the root file system.
        (format!("{write}; echo more > ~/mine"), true),
    ] {
        store.sh(&script).ok();
        if taken {
            store.rockenv(&["snapshot", "create", env, "mine"]).ok();
        }
        let plan = store.rockenv(&["plan", env, "--clean"]).ok();
        plan.says(&["build volume `build` has changes", "and keeps it"]);
        let up = store.rockenv(&["up", env, "--clean"]).ok();
        let told = up.err.split("rm -r ").nth(1);
        let told = told.unwrap_or_else(|| panic!("{script}: {}", up.err));
        let kept = told.split_whitespace().next().unwrap();
        let text = fs::read_to_string(PathBuf::from(kept).join("precious")).unwrap();
        assert_eq!(text, "mine\n", "{script}");
        store.sh("ls /v/build").ok().prints("d\nlog");
        // No other command removes it.
        store.rockenv(&["fsck", "--repair"]).ok();
        let told = format!("rm -r {kept}");
        store.rockenv(&["gc", "--dry-run"]).says(&[&told]);
    }
    store.sh("cat /v/build/log").ok();
    let up = store.rockenv(&["up", env, "--clean"]).ok();
    assert!(!up.err.contains("rm -r"), "{}", up.err);
    // A step has used the files since.
    store.sh(write).ok();
    store.up_with(&profile(0).replace("echo 0 >>", "echo 1 >>"));
    store.sh("cat /v/build/precious").ok();
    for (verb, told) in [("plan", true), ("up", true), ("up", false)] {
        let ran = store.rockenv(&[verb, env, "--clean"]).ok();
        let lost = "wrote to them before the last step ran is deleted";
        assert_eq!(ran.err.contains(lost), told, "{verb}: {}", ran.err);
        assert!(!ran.err.contains("rm -r"), "{verb}: {}", ran.err);
    }
    store.sh("ls /v/build").ok().prints("d\nlog");
}

#[test]
fn a_step_is_resumed_clean_unless_a_command_wrote_to_its_build_volume() {
    on_each(|store, method| {
        let flags = store.work().join("flags");
        fs::create_dir(&flags).unwrap();
        let env = store.env();
        let write = "echo mine >> /v/build/log; echo written";
        for (case, (verb, script, clean)) in [
            ("exec", "cat /v/build/log", true),
            ("shell", "cat /v/build/log", true),
            ("exec", write, false),
            ("shell", write, false),
            ("killed", "echo mine >> /v/build/log; sleep 1000", false),
        ]
        .into_iter()
        .enumerate()
        {
            store.profile(&format!(
                "{VOLUME}[[volume]]\nname = 'flags'\nkind = 'host'\npath = '{}'\ntarget = '/flags'\n\
                 [[step]]\nname = 'one'\nrun = 'echo {case} >> /v/build/log; test -e /flags/{case}'\n",
                flags.display()
            ));
            store.rockenv(&["up", env, "--clean"]).exits(5);
            match verb {
                "exec" => drop(store.sh(script).ok()),
                "shell" => {
                    let mut command = store.command(&["shell", "--failed", env]);
                    command.stdin(std::process::Stdio::piped());
                    let mut shell = crate::support::run::Background::start(command);
                    shell
                        .stdin()
                        .write_all(format!("{script}\n").as_bytes())
                        .unwrap();
                    shell.wait().ok();
                }
                _ => {
                    let log = file(store).parent().unwrap().with_file_name("log");
                    let exec = store.start(&["exec", env, "--", "sh", "-c", script]);
                    wait_until("the command writes", || {
                        fs::read_to_string(&log).is_ok_and(|text| text.contains("mine"))
                    });
                    exec.signal(Signal::SIGKILL);
                    drop(exec.wait());
                }
            }
            fs::write(flags.join(case.to_string()), "").unwrap();
            store.up();
            assert_eq!(is_clean(store), clean, "{method}: {verb} {script}");
        }
    });
}

#[test]
fn a_step_that_a_command_joined_is_incremental() {
    on_overlay_and_btrfs(|store, method| {
        let (env, runs) = (store.env(), store.runs());
        // The step waits for the command, and succeeds if `ok` exists.
        let write = |case: usize, volume: &str| {
            store.profile(&format!(
                "{volume}[[volume]]\nname = 'runs'\nkind = 'host'\naccess = 'rw'\npath = '{}'\ntarget = '/runs'\n\
                 [[step]]\nname = 'one'\nrun = '''\necho one >> /runs/log; echo {case} > ~/case\n\
                 test ! -d /v/build || echo step >> /v/build/log; touch /runs/waits\n\
                 until test -e /runs/go; do sleep 0.05; done; test -e /runs/ok'''\n\
                 [[step]]\nname = 'two'\nrun = 'echo two >> /runs/log'\n",
                runs.display()
            ));
        };
        let up = |more: &[&str], script: Option<&str>, code: i32| {
            for name in ["waits", "go", "ok"] {
                drop(fs::remove_file(runs.join(name)));
            }
            let up = store.start(&[&["up", env], more].concat());
            wait_until("the step runs", || runs.join("waits").exists());
            if let Some(script) = script {
                let note = "the step's snapshot counts as incremental";
                // The note comes before the command begins.
                let said = store
                    .root_sh(&format!("echo begins >&2; {script}"))
                    .ok()
                    .err;
                let (first, second) = said.split_once("begins").unwrap();
                assert!(first.contains(note) && second == "\n", "{said}");
                assert!(!store.root_sh(script).ok().err.contains(note), "twice");
            }
            if code == 0 {
                fs::write(runs.join("ok"), "").unwrap();
            }
            fs::write(runs.join("go"), "").unwrap();
            up.wait().exits(code);
        };
        let new = format!("{env}-new");
        for (case, (volume, script, clean)) in [
            (VOLUME, None, true),
            (VOLUME, Some("echo mine >> /v/build/log"), false),
            // The command's writes cannot be told from the step's.
            (VOLUME, Some("true"), false),
            ("", Some("echo mine > /etc/mine"), false),
        ]
        .into_iter()
        .enumerate()
        {
            let what = format!("{method}: {volume:?} {script:?}");
            write(case, volume);
            up(&[], script, 0);
            assert_eq!(store.ran(), ["one", "two"], "{what}");
            assert_eq!(is_clean(store), clean, "{what}");
            if !clean {
                let why =
                    "it is incremental: a command of `exec` or `shell` may have changed files";
                let export = ["export", env, "--snapshots", "none.oci.tar"];
                store.rockenv(&export).exits(2).says(&[why]);
            }
            store.rockenv(&["up", env, "--name", &new]).ok();
            // On overlay, another env does not get the build volume.
            let builds = !clean || method == "overlay";
            assert_eq!(!store.ran().is_empty(), builds, "{what}");
            store.rockenv(&["rm", "--yes", env, &new]).ok();
        }
        // A step that failed after a command joined is resumed as incremental, in its fork as well.
        let fork = format!("{env}-fork");
        write(9, VOLUME);
        up(&[], Some("echo mine >> /v/build/log"), 5);
        store.rockenv(&["fork", env, &fork]).ok();
        up(&[], None, 0);
        assert!(!is_clean(store), "{method}");
        store.rockenv(&["up", env, "--name", &fork]).ok();
        let list = store.rockenv(&["snapshot", "ls", &fork]).ok().text();
        // Where volumes cannot be copied, the fork's are empty.
        assert_eq!(list.contains("incremental"), method != "overlay", "{list}");
        up(&["--clean"], None, 0);
        assert!(is_clean(store), "{method}");
    });
}

#[test]
fn mapped_memory_and_a_clock_that_was_set_are_no_way_to_write_unseen() {
    // btrfs compares the volume itself. Only the case of the mapped write depends on the file system.
    let disk = LoopFs::with_base(Kind::Xfs);
    for (store, cases) in [(TestStore::new(), 4), (TestStore::on(&disk), 1)] {
        for case in 0..cases {
            store.profile(&profile(case));
            let until = ["up", store.env(), "--clean", "--until", "one"];
            store.rockenv(&until).ok();
            store.sh("cat /v/build/d/file").ok();
            let path = store.env_dir().join("record.json");
            let text = fs::read(&path).unwrap();
            let mut record: serde_json::Value = serde_json::from_slice(&text).unwrap();
            let since = &mut record["head"]["by_hand"]["since"];
            match case {
                0 => write_mapped(&file(&store)),
                1 => since["ahead"] = (since["ahead"].as_i64().unwrap() + 1_000_000_000).into(),
                2 => since["boot"] = "another".into(),
                // The record of an older version.
                _ => drop(record["head"].as_object_mut().unwrap().remove("by_hand")),
            }
            fs::write(&path, record.to_string()).unwrap();
            store.up();
            assert!(!is_clean(&store), "{case}");
        }
    }
}

/// Writes to a file through a memory mapping.
#[expect(unsafe_code, reason = "no safe wrapper maps a file")]
fn write_mapped(path: &std::path::Path) {
    use std::os::fd::AsRawFd as _;
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let access = nix::libc::PROT_READ | nix::libc::PROT_WRITE;
    // SAFETY: the file is not empty, and no other process maps or truncates it.
    unsafe {
        let at = nix::libc::mmap(
            std::ptr::null_mut(),
            1,
            access,
            nix::libc::MAP_SHARED,
            file.file().as_raw_fd(),
            0,
        );
        assert_ne!(at, nix::libc::MAP_FAILED);
        at.cast::<u8>().write_volatile(b'9');
        assert_eq!(nix::libc::munmap(at, 1), 0);
    }
}
