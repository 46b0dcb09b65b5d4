//! Two workers run commands on the same envs and kill them at random moments, with volumes of every kind bound.
//! Afterwards nothing runs, and not one byte outside rockenv's own files has changed.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::loopfs::{self, Kind, LoopFs};
use crate::support::random::Random;
use crate::support::run::{processes, wait_for};

struct Ground {
    store: TestStore,
    envs: [String; 2],
    /// The longest time before a command is killed, in ms.
    patience: u64,
    /// How the commands ended: verb and exit code, or `killed`.
    ends: Mutex<BTreeMap<String, u32>>,
    /// Output of the commands that ended with an unexpected code.
    wrong: Mutex<Vec<String>>,
}

/// Returns the exit codes that a command may have while another one kills its container, locks its env or removes it.
/// `down` also asks the lock holder to end.
fn expected(verb: &str) -> &'static [i32] {
    match verb {
        "up" => &[0, 4, 6, 143],
        "exec" => &[0, 4, 6, 7, 137, 143],
        // No `gc` can free a terabyte here.
        "gc" => &[10, 143],
        // Exit code 2: a snapshot of that name exists already.
        "snapshot" => &[0, 2, 6, 7, 143],
        _ => &[0, 6, 7, 143],
    }
}

impl Ground {
    /// Lays out the user's own directories and a profile that binds volumes of every kind.
    fn new(store: TestStore) -> Self {
        let user = store.work();
        for name in ["src", "host", "out"] {
            for number in 0..20 {
                let directory = user.join(name).join(format!("d{}", number % 4));
                fs::create_dir_all(&directory).unwrap();
                fs::write(
                    directory.join(format!("f{number}")),
                    format!("{name} {number}").repeat(50),
                )
                .unwrap();
            }
        }
        fs::hard_link(user.join("src/d0/f0"), user.join("src/link")).unwrap();
        fs_err::os::unix::fs::symlink("d0/f0", user.join("src/symlink")).unwrap();
        // The build user owns the source and may write to it, but no write may reach it.
        let own = ["src", "host", "out"].map(|name| user.join(name));
        loopfs::run(Command::new("chown").args(["-Rh", "1234:1234"]).args(own));
        store.profile_named(
            "p",
            &format!(
                r#"
hooks = ["change"]
volume = [
  {{ name = "src", kind = "source", path = "{0}/src", target = "/v/src" }},
  {{ name = "build", kind = "build", target = "/v/build" }},
  {{ name = "cache", kind = "cache", target = "/v/cache" }},
  {{ name = "out", kind = "output", path = "{0}/out", target = "/v/out" }},
  {{ name = "host", kind = "host", path = "{0}/host", target = "/v/host", access = "rw" }},
]
[[step]]
name = "first"
run = "mkdir -p $HOME/first; for i in 1 2 3 4 5 6 7 8; do echo $i > $HOME/first/$i; done; cat /v/src/d0/* > $HOME/src"
[[step]]
name = "second"
run = "for i in 1 2 3 4 5 6; do echo $i > /v/build/$i; ln -f /v/build/$i /v/build/l$i; done; sleep 0.1; rm -rf $HOME/first; grep -q changed /v/src/d1/f1; echo step > /v/src/d1/f5; rm -f /v/src/d1/f9"
inputs = ["src"]
[[step]]
name = "third"
user = "root"
run = "echo third > /etc/third; mv /usr/share/doc /usr/share/doc2; test -e /v/host/d0/f0"
"#,
                user.display()
            ),
        );
        fs::create_dir_all(user.join("hooks/change")).unwrap();
        fs::write(
            user.join("hooks/change/hook.toml"),
            r#"
schema = 1
description = "every kind of change"
why = "to see that the source stays as it is"
volume = "src"
[[patch]]
file = "new.patch"
[[edit]]
file = "d1/f1"
find = "src 1"
replace = "changed"
count = 50
[script]
run = "rm d2/f2; ln -f d3/f3 linked; chmod 600 d3/f7; echo x >> d3/f11"
changes = ["d2/f2", "d3/f3", "d3/f7", "d3/f11", "linked"]
"#,
        )
        .unwrap();
        fs::write(
            user.join("hooks/change/new.patch"),
            "--- /dev/null\n+++ b/new/file\n@@ -0,0 +1 @@\n+new\n",
        )
        .unwrap();
        Self {
            envs: ["a", "b"].map(|env| format!("{}-{env}", store.env())),
            store,
            patience: 600,
            ends: Mutex::default(),
            wrong: Mutex::default(),
        }
    }

    /// Runs a command that must succeed, and returns its output and messages.
    fn ok(&self, arguments: &[&str]) -> String {
        let ran = self.store.rockenv(arguments).ok();
        ran.text() + &ran.err
    }

    /// Starts a random command, and kills it, or lets it end.
    fn cycle(&self, random: &mut Random) {
        let env = self.envs[random.below(2) as usize].as_str();
        let name = format!("s{}", random.below(3));
        let exec =
            "echo x >> $HOME/x; echo y >> /v/build/y; mkdir -p $HOME/d; rm -rf $HOME/d; sleep 0.05";
        let arguments: Vec<&str> = match random.below(14) {
            0..=3 => vec!["up", "p", "--name", env],
            4 => vec!["up", "p", "--name", env, "--rerun", "second"],
            5 | 6 => vec!["exec", env, "--", "sh", "-c", exec],
            7 => vec![
                "exec",
                "--root",
                env,
                "--",
                "sh",
                "-c",
                "echo z >> /etc/z; rm -f /etc/third",
            ],
            8 => vec!["snapshot", "create", env, &name],
            9 => vec![
                "rollback",
                "--yes",
                env,
                ["first", "second", "s0"][random.below(3) as usize],
            ],
            10 => vec!["down", env],
            11 | 12 => vec!["gc", "--yes", "--preset", "ci", "--free", "1T"],
            _ => vec!["rm", "--yes", env],
        };
        let mut said = tempfile::tempfile().unwrap();
        let mut child = self
            .store
            .command(&arguments)
            .stdout(Stdio::null())
            .stderr(said.try_clone().unwrap())
            .process_group(0)
            .spawn()
            .unwrap();
        let patience = Duration::from_millis(random.below(self.patience));
        let started = Instant::now();
        while started.elapsed() < patience {
            if let Some(status) = child.try_wait().unwrap() {
                return self.ended(&arguments, status, &mut said);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
        // Sometimes kills the whole process group, as a terminal or a CI runner would.
        if random.below(3) == 0 {
            let _: nix::Result<()> =
                nix::sys::signal::killpg(pid, nix::sys::signal::Signal::SIGKILL);
        }
        // Sometimes kills the holder process first.
        if random.below(4) == 0 {
            for holder in processes()
                .into_iter()
                .filter(|(_, line)| line.contains("__hold") && line.contains("rockenv"))
            {
                if self.owns(holder.0) {
                    let _: nix::Result<()> = nix::sys::signal::kill(
                        nix::unistd::Pid::from_raw(holder.0),
                        nix::sys::signal::Signal::SIGKILL,
                    );
                }
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        self.count(arguments[0], "killed");
    }

    /// Counts how a command ended that was not killed, and keeps its output if the code is unexpected.
    fn ended(&self, arguments: &[&str], status: ExitStatus, mut said: impl Read + Seek) {
        let signalled = status.signal().map(|number| 128 + number);
        let end = status.code().or(signalled).unwrap_or_default();
        self.count(arguments[0], &end.to_string());
        if !expected(arguments[0]).contains(&end) {
            let mut text = String::new();
            said.seek(SeekFrom::Start(0)).unwrap();
            said.read_to_string(&mut text).unwrap();
            let line = format!("rockenv {}: {end}\n{text}", arguments.join(" "));
            eprintln!("{line}");
            self.wrong.lock().unwrap().push(line);
        }
    }

    fn count(&self, verb: &str, end: &str) {
        *self
            .ends
            .lock()
            .unwrap()
            .entry(format!("{verb} {end}"))
            .or_default() += 1;
    }

    /// Returns whether a process has a file of this store open.
    fn owns(&self, pid: i32) -> bool {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            return false;
        };
        entries.flatten().any(|entry| {
            fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(self.store.home()))
        })
    }
}

type Content = BTreeMap<PathBuf, (u32, u32, u32, i64, i64, u64, Vec<u8>)>;

/// Returns everything that must not change: kind, permissions, owner, times and bytes.
fn content(root: &Path) -> Content {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_path_buf()];
    while let Some(path) = left.pop() {
        let data = fs::symlink_metadata(&path).unwrap();
        let bytes = if data.is_dir() {
            left.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
            Vec::new()
        } else if data.is_symlink() {
            fs::read_link(&path)
                .unwrap()
                .into_os_string()
                .into_encoded_bytes()
        } else {
            fs::read(&path).unwrap()
        };
        found.insert(
            path,
            (
                data.mode(),
                data.uid(),
                data.gid(),
                data.mtime(),
                data.mtime_nsec(),
                data.nlink(),
                bytes,
            ),
        );
    }
    found
}

/// Runs commands on a new store and kills them. Returns how they ended.
pub(crate) fn hammer(kind: Kind, method: &str, cycles: u64, seed: u64) -> BTreeMap<String, u32> {
    let disk = LoopFs::with_base(kind);
    let mut ground = Ground::new(TestStore::on(&disk));
    let before = content(ground.store.work());
    // The time before a kill depends on the machine, so that commands of each kind finish even on a busy one.
    let began = Instant::now();
    ground.ok(&["up", "p", "--name", ground.envs[0].as_str()]);
    let up = u64::try_from(began.elapsed().as_millis()).unwrap();
    ground.patience = ground.patience.max(up / 2);
    eprintln!("{method}, seed {seed}");
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let ground = &ground;
            scope.spawn(move || {
                let mut random = Random::new(seed.wrapping_mul(worker + 1));
                for _ in 0..cycles / 2 {
                    ground.cycle(&mut random);
                }
            });
        }
    });
    let ends = ground.ends.lock().unwrap().clone();
    eprintln!("{method}: {ends:?}");
    let wrong = ground.wrong.lock().unwrap().join("\n");
    assert!(wrong.is_empty(), "seed {seed}: {wrong}");
    // A run in which every command finished, or none did, would prove nothing.
    assert!(
        ends.keys().filter(|end| end.ends_with(" killed")).count() >= 2,
        "{ends:?}"
    );
    // Wherever a command was cut off, the next `up` reaches the same state.
    for env in ground.envs.each_ref() {
        let env = env.as_str();
        ground.ok(&["up", "p", "--name", env]);
        let listed = ground.ok(&[
            "exec",
            env,
            "--",
            "sh",
            "-c",
            "cat /etc/third; ls /v/build $HOME; cmp /v/src/d0/f0 /v/src/link",
        ]);
        assert!(
            listed.contains("third") && listed.contains("l6"),
            "{env}: {listed}"
        );
        assert!(
            ground
                .ok(&["up", "p", "--name", env])
                .contains("nothing to do")
        );
    }
    let list = ground.ok(&["ls", "--json"]);
    assert!(ground.envs.iter().all(|env| list.contains(env)));
    let format = fs::read_to_string(ground.store.home().join("format")).unwrap();
    assert!(format.contains(method), "{format}");
    ground.store.assert_clean();
    assert_changed_nothing(&before, ground.store.work());
    let [one, two] = &ground.envs;
    ground.ok(&["rm", "--yes", one, two]);
    wait_for("the store is not empty", || {
        let mut left = Vec::new();
        for name in ["layers", "volumes", "trash"] {
            left.extend(
                fs::read_dir(ground.store.home().join(name))
                    .unwrap()
                    .flatten()
                    .map(|entry| entry.path()),
            );
        }
        for env in &ground.envs {
            left.extend(
                fs::read_dir(ground.store.home().join("envs").join(env))
                    .unwrap()
                    .flatten()
                    .map(|entry| entry.path()),
            );
        }
        left.retain(|path| path.file_name().unwrap() != "lock");
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    });
    ground.store.assert_clean();
    assert_changed_nothing(&before, ground.store.work());
    ends
}

fn assert_changed_nothing(before: &Content, user: &Path) {
    let after = content(user);
    for (path, old) in before {
        assert_eq!(after.get(path), Some(old), "`{}` changed", path.display());
    }
}
