//! A test's own store, with an image in it, and a guard that checks for leftovers when the test ends: mounts,
//! processes, control groups, loop devices, locks, and systemd-nspawn's files.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::loopfs::{LoopFs, need_root};
use super::ordinary::Ordinary;
use super::run::{Background, Ran, children, finish, hear_signals, processes, settle, wait_for};
use super::template::{clone_template, directory, lay_out, lay_out_builder};

/// A store and the directories of a user around it.
#[derive(Debug)]
pub(crate) struct TestStore {
    name: String,
    home: PathBuf,
    work: PathBuf,
    // Declared last: the directory is removed after the guard has checked it.
    _directory: tempfile::TempDir,
}

impl TestStore {
    /// Makes a store on the checkout's disk, with image `base` already built.
    pub(crate) fn new() -> Self {
        Self::with_image("base")
    }

    /// Makes a store with image `builder` already built, from [`super::rootfs::builder`].
    pub(crate) fn with_builder() -> Self {
        let store = Self::with_image("builder");
        lay_out_builder(&store.work);
        store
    }

    /// Makes a store with another image already built.
    pub(crate) fn with_image(image: &str) -> Self {
        need_root();
        let directory = directory();
        let home = directory.path().join("store");
        clone_template(&home, image);
        Self::with(directory, home)
    }

    /// Makes a store at `home`, whose parent exists; the first `up` builds image `base`.
    pub(crate) fn at(home: &Path) -> Self {
        need_root();
        Self::with(directory(), home.to_owned())
    }

    /// Makes a store on a file system of its own, which must outlive it. [`LoopFs::with_base`] contains image `base`.
    pub(crate) fn on(disk: &LoopFs) -> Self {
        Self::at(&disk.join("store"))
    }

    fn with(directory: tempfile::TempDir, home: PathBuf) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "t{}x{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let work = directory.path().join("work");
        lay_out(&work);
        Self {
            name,
            home,
            work,
            _directory: directory,
        }
    }

    /// Returns the test's unique name, used for the profile, its env and its control groups.
    pub(crate) fn env(&self) -> &str {
        &self.name
    }

    /// Returns the store's root.
    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    /// Returns the working directory of commands, with `profiles/` and `images/`. A user's files go here.
    pub(crate) fn work(&self) -> &Path {
        &self.work
    }

    /// Returns the directory of the user's own configuration, profiles, images and hooks, and creates it if missing.
    pub(crate) fn user_config(&self) -> PathBuf {
        let directory = self.work.join(".config/rockenv");
        fs::create_dir_all(&directory).expect("a directory");
        directory
    }

    /// Writes the user's configuration, the only file in which keys that name programs, paths and hosts apply.
    pub(crate) fn configure(&self, text: &str) {
        fs::write(self.user_config().join("config.toml"), text).expect("a configuration");
    }

    /// Returns the env's directory in the store.
    pub(crate) fn env_dir(&self) -> PathBuf {
        self.home.join("envs").join(&self.name)
    }

    /// Returns the directory of the env's output volume `out`.
    pub(crate) fn out(&self) -> PathBuf {
        self.home.join("outputs").join(&self.name).join("out")
    }

    /// Returns the env's record.
    pub(crate) fn record(&self) -> serde_json::Value {
        json(&self.env_dir().join("record.json"))
    }

    /// Returns the state of the env's container.
    pub(crate) fn state(&self) -> serde_json::Value {
        json(&self.env_dir().join("run/state.json"))
    }

    /// Returns the names of an env's steps and the keys of their snapshots.
    pub(crate) fn keys(&self, env: &str) -> Vec<(String, String)> {
        let record = json(&self.home.join("envs").join(env).join("record.json"));
        let steps = record["steps"].as_array().expect("steps").iter();
        let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
        steps
            .map(|step| (text(&step["name"]), text(&step["key"])))
            .collect()
    }

    /// Returns the keys of a profile's steps by name, from `plan`.
    pub(crate) fn planned_keys(&self, words: &[&str]) -> BTreeMap<String, String> {
        let plan = self
            .rockenv(&[&["plan", "--json"], words].concat())
            .ok()
            .json();
        let steps = plan["plan"]["steps"].as_array().expect("steps").iter();
        let word =
            |step: &serde_json::Value, key: &str| step[key].as_str().expect("a text").to_owned();
        steps
            .map(|step| (word(step, "name"), word(step, "key")))
            .collect()
    }

    /// Writes the profile; `body` follows `schema` and `image`.
    pub(crate) fn profile(&self, body: &str) {
        self.profile_named(&self.name, body);
    }

    /// Writes another profile. Its name should begin with [`TestStore::env`], so that the guard sees its containers.
    pub(crate) fn profile_named(&self, name: &str, body: &str) {
        let text = format!("schema = 1\nimage = \"base\"\n{body}");
        fs::write(
            self.work.join("profiles").join(format!("{name}.toml")),
            text,
        )
        .expect("a profile");
    }

    /// Returns a directory of the user that steps may write to.
    pub(crate) fn runs(&self) -> PathBuf {
        let runs = self.work.join("runs");
        if !runs.exists() {
            fs::create_dir(&runs).expect("a directory");
            std::os::unix::fs::chown(&runs, Some(1234), Some(1234)).expect("an owner");
        }
        runs
    }

    /// Returns the lines that steps added to `log` in [`TestStore::runs`], sorted, and removes the file.
    pub(crate) fn ran(&self) -> Vec<String> {
        let log = self.runs().join("log");
        let text = fs::read_to_string(&log).unwrap_or_default();
        drop(fs::remove_file(log));
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    /// Prepares a command with a clear environment. Steps run as uid and gid 1234.
    pub(crate) fn command<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Command {
        let ordinary = Ordinary::get();
        let mut command = match &ordinary {
            Some(user) => Command::new(user.program()),
            None => Command::new(env!("CARGO_BIN_EXE_rockenv")),
        };
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", &self.work)
            .env("ROCKENV_HOME", &self.home)
            .env("ROCKENV_TRUSTED_DIRS", &self.work)
            .env("XDG_CONFIG_HOME", self.work.join(".config"))
            .current_dir(&self.work)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if ordinary.is_none() {
            command.env("SUDO_UID", "1234").env("SUDO_GID", "1234");
        }
        self.become_user(&mut command);
        // `tests/service` sets these.
        for (from, to) in [
            ("ROCKENV_TEST_ENGINE", "ROCKENV_ENGINE"),
            ("DOCKER_HOST", "DOCKER_HOST"),
            ("CONTAINER_HOST", "CONTAINER_HOST"),
        ] {
            if let Some((_, value)) = std::env::vars_os().find(|(name, _)| name == from) {
                command.env(to, value);
            }
        }
        hear_signals(&mut command);
        command
    }

    /// Makes a command that starts rockenv run as the ordinary user, if the tests have one.
    pub(crate) fn become_user(&self, command: &mut Command) {
        if let Some(user) = Ordinary::get() {
            user.own_all(&self.work);
            user.become_user(command);
        }
    }

    /// Runs a command to its end.
    pub(crate) fn rockenv<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Ran {
        let line = arguments
            .iter()
            .map(|argument| argument.as_ref().to_string_lossy().into_owned());
        let line = line.collect::<Vec<_>>().join(" ");
        finish(line, self.command(arguments))
    }

    /// Runs `up` on the profile, which must succeed.
    #[track_caller]
    pub(crate) fn up(&self) -> Ran {
        self.rockenv(&["up", &self.name]).ok()
    }

    /// Writes a profile and runs it.
    #[track_caller]
    pub(crate) fn up_with(&self, body: &str) -> Ran {
        self.profile(body);
        self.up()
    }

    /// Runs a shell script in the env as the build user.
    pub(crate) fn sh(&self, script: &str) -> Ran {
        self.sh_in(&self.name, script)
    }

    /// Runs a shell script in another env as the build user.
    pub(crate) fn sh_in(&self, env: &str, script: &str) -> Ran {
        self.rockenv(&["exec", env, "--", "sh", "-c", script])
    }

    /// Runs a shell script in the env as root.
    pub(crate) fn root_sh(&self, script: &str) -> Ran {
        self.rockenv(&["exec", "--root", &self.name, "--", "sh", "-c", script])
    }

    /// Starts a command in the background, killed when dropped.
    pub(crate) fn start<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Background {
        Background::start(self.command(arguments))
    }

    /// Fails if anything of the store is left. Runs automatically when a test succeeds.
    pub(crate) fn assert_clean(&self) {
        wait_for("something is left", || {
            self.retire();
            match self.left() {
                left if left.is_empty() => Ok(()),
                left => Err(left.join("\n")),
            }
        });
    }

    /// Ends the containers that idle between commands, and no others.
    fn retire(&self) {
        let envs = fs::read_dir(self.home.join("envs"));
        for env in envs.into_iter().flatten().flatten() {
            let state = fs::read(env.path().join("run/state.json")).unwrap_or_default();
            let state: serde_json::Value = serde_json::from_slice(&state).unwrap_or_default();
            if state["idle"] == true {
                let name = env.file_name().into_string().expect("a name");
                self.rockenv(&["down", &name]).ok();
            }
        }
    }

    /// Describes what is left.
    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let home = self.home.to_string_lossy().into_owned();
        // Escapes as in mountinfo.
        let mounted = home
            .replace('\\', "\\134")
            .replace(' ', "\\040")
            .replace('\n', "\\012");
        let own = std::process::id().cast_signed();
        let mut seen = BTreeSet::new();
        for (pid, line) in processes() {
            let place = PathBuf::from(format!("/proc/{pid}"));
            // A test's thread may have a mount namespace of its own.
            let mounts = if pid == own {
                PathBuf::from("/proc/thread-self")
            } else {
                place.clone()
            };
            // Processes with the same namespace and root have the same mounts.
            let shared = ["ns/mnt", "root"].map(|name| fs::read_link(mounts.join(name)).ok());
            if !seen.contains(&shared) {
                let mounts = fs::read(mounts.join("mountinfo")).unwrap_or_default();
                for mount in String::from_utf8_lossy(&mounts).lines() {
                    if mount.contains(&format!("{mounted}/")) {
                        left.push(format!("mount of process {pid} `{line}`: {mount}"));
                    }
                }
                // The mounts of a process that has ended are empty.
                if !mounts.is_empty() {
                    seen.insert(shared);
                }
            }
            if pid == own {
                continue;
            }
            let links = ["exe", "cwd", "root"].map(|name| place.join(name));
            let descriptors = fs::read_dir(place.join("fd"))
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.path());
            let uses = links
                .into_iter()
                .chain(descriptors)
                .filter_map(|link| fs::read_link(link).ok())
                .find(|target| target.starts_with(&self.home));
            if let Some(target) = uses {
                left.push(format!(
                    "process {pid} `{line}` uses `{}`",
                    target.display()
                ));
            } else if line.contains(&home) || line.contains(&self.machine()) {
                left.push(format!("process {pid} `{line}`"));
            }
        }
        let mut groups = Vec::new();
        find_directories(Path::new("/sys/fs/cgroup"), 4, &self.machine(), &mut groups);
        left.extend(
            groups
                .into_iter()
                .map(|path| format!("cgroup `{}`", path.display())),
        );
        let mut names = Vec::new();
        let nspawn = Path::new("/run/systemd/nspawn");
        find_directories(nspawn, 2, &self.machine(), &mut names);
        left.extend(
            names
                .into_iter()
                .map(|path| format!("directory `{}`", path.display())),
        );
        for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            let file =
                fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if file.contains(&format!("{home}/")) {
                left.push(format!(
                    "loop device {:?} of `{}`",
                    entry.file_name(),
                    file.trim()
                ));
            }
        }
        for lock in self.locks() {
            let file = fs::File::open(&lock).expect("a lock file");
            if file.file().try_lock().is_err() {
                left.push(format!("lock `{}` is held", lock.display()));
            }
        }
        left
    }

    /// Waits for background processes to write the store's snapshots to disk and to empty the trash.
    pub(crate) fn settle(&self) {
        settle(&self.home);
    }

    /// Returns the processes in the containers of the store's envs, with their command lines.
    pub(crate) fn contained(&self) -> Vec<(i32, String)> {
        let mut groups = vec![self.machine()];
        groups.extend(self.service_groups());
        let mut found = processes();
        if Ordinary::get().is_some() {
            // Without root there may be no control groups.
            let own = fs::read_link("/proc/self/ns/pid").expect("a namespace");
            found.retain(|(pid, _)| {
                let place = PathBuf::from(format!("/proc/{pid}"));
                let mounts = fs::read(place.join("mountinfo")).unwrap_or_default();
                fs::read_link(place.join("ns/pid")).is_ok_and(|space| space != own)
                    && String::from_utf8_lossy(&mounts)
                        .contains(&format!("/envs/{}/run/", self.name))
            });
            return found;
        }
        found.retain(|(pid, _)| {
            fs::read_to_string(format!("/proc/{pid}/cgroup"))
                .is_ok_and(|text| groups.iter().any(|group| text.contains(group)))
        });
        found
    }

    /// Returns a long sleep, as program and argument, that no other test runs.
    pub(crate) fn sleeper(&self) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        format!(
            "sleep 8{}.{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        )
    }

    /// Returns the beginning of the names of the containers of the store's envs. The dash tells them from those of
    /// another test, whose number begins with this one's.
    fn machine(&self) -> String {
        format!("rockenv-{}-", self.name)
    }

    /// Returns the names of the control groups that a service made for running containers.
    fn service_groups(&self) -> Vec<String> {
        let envs = fs::read_dir(self.home.join("envs"));
        let mut groups = Vec::new();
        for env in envs.into_iter().flatten().flatten() {
            let state = fs::read(env.path().join("run/state.json")).unwrap_or_default();
            let state: serde_json::Value = serde_json::from_slice(&state).unwrap_or_default();
            let directories = state["cgroup"]["directories"].as_array();
            for directory in directories.into_iter().flatten() {
                let path = Path::new(directory[1].as_str().unwrap_or_default());
                let name = path.file_name().and_then(OsStr::to_str);
                groups.extend(
                    name.filter(|_| !state["place"].is_null())
                        .map(str::to_owned),
                );
            }
        }
        groups
    }

    fn locks(&self) -> Vec<PathBuf> {
        let envs = fs::read_dir(self.home.join("envs"))
            .into_iter()
            .flatten()
            .flatten();
        let mut locks: Vec<PathBuf> = envs.map(|entry| entry.path().join("lock")).collect();
        locks.push(self.home.join("lock"));
        locks.retain(|path| path.exists());
        locks
    }

    /// Kills what a failed test left behind, so that it does not affect the next test.
    fn end_all(&self) {
        for _ in 0..20 {
            let mut groups = Vec::new();
            find_directories(Path::new("/sys/fs/cgroup"), 4, &self.machine(), &mut groups);
            for group in &groups {
                let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
                for pid in text
                    .lines()
                    .filter_map(|line| line.parse().ok())
                    .filter(|pid| *pid > 1)
                {
                    let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
            }
            if groups
                .iter()
                .rev()
                .all(|group| fs::remove_dir(group).is_ok())
            {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end_all();
        } else {
            self.assert_clean();
        }
    }
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).expect("a JSON file")).expect("a JSON document")
}

fn find_directories(root: &Path, depth: u32, name: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let mine = entry.file_name().to_string_lossy().contains(name);
        if mine {
            found.push(entry.path());
        }
        // Everything inside the store's directories belongs to the store.
        let name = if mine { "" } else { name };
        if depth > 1 {
            find_directories(&entry.path(), depth - 1, name, found);
        }
    }
}

/// Returns whether the tests run with a service (`tests/service`), whose containers are not rockenv's children.
pub(crate) fn is_service() -> bool {
    std::env::vars_os().any(|(name, _)| name == "ROCKENV_TEST_ENGINE")
}

/// Returns the name of an engine that the tests do not use.
pub(crate) fn other_engine() -> &'static str {
    let docker =
        std::env::vars_os().any(|(name, value)| name == "ROCKENV_TEST_ENGINE" && value == "docker");
    if docker { "podman" } else { "docker" }
}

/// Returns the time limit for an operation that takes at most `seconds` under systemd-nspawn: a service may take
/// seconds of its own to end a container.
pub(crate) fn patience(seconds: u64) -> Duration {
    Duration::from_secs(if is_service() { seconds + 20 } else { seconds })
}

/// Returns the uid of steps outside and inside the env: without root, the caller is root inside.
pub(crate) fn build_user() -> (u32, u32) {
    match Ordinary::get() {
        Some(user) => (user.uid, 0),
        None => (1234, 1234),
    }
}
