//! A store of a test's own, with an image in it, and a guard that nothing of it is left when the test ends: no
//! mount, process, control group, loop device, lock or file of systemd-nspawn's.

use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::loopfs::{LoopFs, need_root, run};
use super::ordinary::Ordinary;

/// How long what ends by itself may take to do so, in seconds.
const PATIENCE: u64 = 10;

/// A store and the directories of a user around it.
#[derive(Debug)]
pub(crate) struct TestStore {
    name: String,
    home: PathBuf,
    work: PathBuf,
    // Last: what is in it is removed after the guard has looked.
    _directory: tempfile::TempDir,
}

impl TestStore {
    /// Makes a store on the disk that the checkout is on, in which image `base` is built already.
    pub(crate) fn new() -> Self {
        need_root();
        let directory = directory();
        let home = directory.path().join("store");
        clone_template(&home);
        Self::with(directory, home)
    }

    /// Makes a store at `home`, of which only the parent exists; the first `up` builds image `base` in it.
    pub(crate) fn at(home: &Path) -> Self {
        need_root();
        Self::with(directory(), home.to_owned())
    }

    /// Makes a store on a file system of its own, which must live longer.
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

    /// Returns a name that no other test has: of the profile, its env and its control groups.
    pub(crate) fn env(&self) -> &str {
        &self.name
    }

    /// Returns the store's root.
    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    /// Returns the directory that commands start in; `profiles/` and `images/` are in it. A user's files go here.
    pub(crate) fn work(&self) -> &Path {
        &self.work
    }

    /// Returns the env's directory in the store.
    pub(crate) fn env_dir(&self) -> PathBuf {
        self.home.join("envs").join(&self.name)
    }

    /// Writes the profile; `body` is what follows `schema` and `image`.
    pub(crate) fn profile(&self, body: &str) {
        self.profile_named(&self.name, body);
    }

    /// Writes another profile, whose name should begin with [`TestStore::env`] for the guard to see its containers.
    pub(crate) fn profile_named(&self, name: &str, body: &str) {
        let text = format!("schema = 1\nimage = \"base\"\n{body}");
        fs::write(
            self.work.join("profiles").join(format!("{name}.toml")),
            text,
        )
        .expect("a profile");
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
            .current_dir(&self.work)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if ordinary.is_none() {
            command.env("SUDO_UID", "1234").env("SUDO_GID", "1234");
        }
        self.become_user(&mut command);
        // As `tests/service` sets them.
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

    /// Makes a command that starts rockenv one of the ordinary user, where the tests have one.
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
        self.rockenv(&["exec", &self.name, "--", "sh", "-c", script])
    }

    /// Runs a shell script in the env as root.
    pub(crate) fn root_sh(&self, script: &str) -> Ran {
        self.rockenv(&["exec", "--root", &self.name, "--", "sh", "-c", script])
    }

    /// Starts a command in the background, killed when dropped.
    pub(crate) fn start<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Background {
        Background::start(self.command(arguments))
    }

    /// Fails unless nothing of the store is left; runs by itself when a test ends well.
    pub(crate) fn assert_clean(&self) {
        wait_for(patience(PATIENCE), "something is left", || {
            self.retire();
            match self.left() {
                left if left.is_empty() => Ok(()),
                left => Err(left.join("\n")),
            }
        });
    }

    /// Ends the containers that wait for another command, and only these.
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

    /// Lists what is left, in words.
    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let home = self.home.to_string_lossy().into_owned();
        // As mountinfo writes it.
        let mounted = home
            .replace('\\', "\\134")
            .replace(' ', "\\040")
            .replace('\n', "\\012");
        let own = std::process::id().cast_signed();
        for (pid, line) in processes() {
            let place = PathBuf::from(format!("/proc/{pid}"));
            // A test's thread may have a mount namespace of its own.
            let mounts = if pid == own {
                PathBuf::from("/proc/thread-self")
            } else {
                place.clone()
            };
            let mounts = fs::read(mounts.join("mountinfo")).unwrap_or_default();
            for mount in String::from_utf8_lossy(&mounts).lines() {
                if mount.contains(&format!("{mounted}/")) {
                    left.push(format!("mount of process {pid} `{line}`: {mount}"));
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
        for directory in ["propagate", "unix-export"] {
            let mut names = Vec::new();
            find_directories(
                &Path::new("/run/systemd/nspawn").join(directory),
                1,
                &self.machine(),
                &mut names,
            );
            left.extend(
                names
                    .into_iter()
                    .map(|path| format!("directory `{}`", path.display())),
            );
        }
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

    /// Returns the processes in the containers of the store's envs, with their command lines.
    pub(crate) fn contained(&self) -> Vec<(i32, String)> {
        let mut groups = vec![format!("{}-", self.machine())];
        groups.extend(self.service_groups());
        let mut found = processes();
        if Ordinary::get().is_some() {
            // Without root there may be no control groups at all.
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

    /// Returns a program and argument that sleeps for long and that no other test runs.
    pub(crate) fn sleeper(&self) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        format!(
            "sleep 8{}.{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        )
    }

    fn machine(&self) -> String {
        format!("rockenv-{}", self.name)
    }

    /// Returns the names of the control groups that a service made, while the containers run.
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

    /// Ends what a failed test left, so that the next one does not meet it.
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

/// What a command said and how it ended.
#[derive(Debug)]
pub(crate) struct Ran {
    line: String,
    /// Exit code; 128 and the signal's number for one that a signal ended.
    pub(crate) code: i32,
    /// Its standard output.
    pub(crate) out: Vec<u8>,
    /// Its standard error, as text.
    pub(crate) err: String,
}

impl Ran {
    /// Returns standard output as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    /// Fails unless the command succeeded.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        self.exits(0)
    }

    /// Fails unless the command ended with `code`.
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Self {
        assert_eq!(
            self.code,
            code,
            "rockenv {}\n{}{}",
            self.line,
            self.text(),
            self.err
        );
        self
    }

    /// Fails unless standard error has each of `texts`.
    #[track_caller]
    pub(crate) fn says(self, texts: &[&str]) -> Self {
        for text in texts {
            assert!(
                self.err.contains(text),
                "rockenv {} does not say `{text}`:\n{}",
                self.line,
                self.err
            );
        }
        self
    }

    /// Fails unless standard output, without the last newline, is `text`.
    #[track_caller]
    pub(crate) fn prints(self, text: &str) -> Self {
        let out = self.text();
        assert_eq!(
            out.strip_suffix('\n').unwrap_or(&out),
            text,
            "rockenv {}\n{}",
            self.line,
            self.err
        );
        self
    }
}

fn code_of(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Runs a command to its end; `line` is what it is called.
pub(crate) fn finish(line: String, mut command: Command) -> Ran {
    let output = command.output().expect("rockenv runs");
    Ran {
        line,
        code: code_of(output.status),
        out: output.stdout,
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// A command in the background, killed when dropped.
#[derive(Debug)]
pub(crate) struct Background {
    line: String,
    child: Option<std::process::Child>,
}

impl Background {
    /// Starts it.
    pub(crate) fn start(mut command: Command) -> Self {
        let line = format!("{command:?}");
        Self {
            line,
            child: Some(command.spawn().expect("rockenv starts")),
        }
    }

    /// Returns its process id.
    pub(crate) fn pid(&self) -> i32 {
        self.child
            .as_ref()
            .expect("not waited for")
            .id()
            .cast_signed()
    }

    /// Sends a signal to it alone.
    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the signal is sent");
    }

    /// Returns its standard input.
    pub(crate) fn stdin(&mut self) -> std::process::ChildStdin {
        let child = self.child.as_mut().expect("not waited for");
        child.stdin.take().expect("a pipe")
    }

    /// Says whether it has not ended.
    pub(crate) fn runs(&mut self) -> bool {
        let child = self.child.as_mut().expect("not waited for");
        child.try_wait().expect("a child").is_none()
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Ran {
        let child = self.child.take().expect("not waited for");
        let output = child.wait_with_output().expect("a child");
        Ran {
            line: std::mem::take(&mut self.line),
            code: code_of(output.status),
            out: output.stdout,
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// Waits until `done`, or fails with what it says is missing.
#[track_caller]
pub(crate) fn wait_for(
    patience: Duration,
    what: &str,
    mut done: impl FnMut() -> Result<(), String>,
) {
    let started = Instant::now();
    loop {
        match done() {
            Ok(()) => return,
            Err(left) => assert!(
                started.elapsed() < patience,
                "{what} after {patience:?}:\n{left}"
            ),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until `done` is true.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    wait_for(Duration::from_secs(30), what, || {
        if done() { Ok(()) } else { Err(String::new()) }
    });
}

/// Returns the processes of the machine with their command lines, arguments apart by one space.
pub(crate) fn processes() -> Vec<(i32, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        if let Ok(pid) = entry.file_name().to_string_lossy().parse()
            && let Ok(line) = fs::read(entry.path().join("cmdline"))
        {
            let line = line.strip_suffix(b"\0").unwrap_or(&line);
            found.push((pid, String::from_utf8_lossy(line).replace('\0', " ")));
        }
    }
    found
}

/// Returns the processes whose command line is exactly `line`.
pub(crate) fn processes_called(line: &str) -> Vec<i32> {
    let found = processes().into_iter().filter(|(_, found)| found == line);
    found.map(|(pid, _)| pid).collect()
}

/// Returns a process's direct children.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let found = processes().into_iter().filter(|(child, _)| {
        let text = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        // pid (name) state ppid
        let parent = text
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        parent == Some(pid)
    });
    found.map(|(child, _)| child).collect()
}

/// Returns what a process has used at most, in bytes.
pub(crate) fn peak_memory(pid: i32) -> u64 {
    memory(pid, "VmHWM:")
}

/// Returns what a process uses now of memory that is no file's, in bytes: the program itself does not count, which
/// is large in a debug build.
pub(crate) fn own_memory(pid: i32) -> u64 {
    memory(pid, "RssAnon:")
}

fn memory(pid: i32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .and_then(|text| text.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

fn find_directories(root: &Path, depth: u32, name: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let mine = entry
            .file_name()
            .to_string_lossy()
            .contains(&format!("{name}-"));
        if mine {
            found.push(entry.path());
        }
        // Everything in one of ours is ours.
        let name = if mine { "" } else { name };
        if depth > 1 {
            find_directories(&entry.path(), depth - 1, name, found);
        }
    }
}

/// A directory on the disk that the checkout is on: `/tmp` may be memory.
fn directory() -> tempfile::TempDir {
    let ordinary = Ordinary::get();
    let parent = match &ordinary {
        Some(user) => &user.directory,
        None => Path::new(env!("CARGO_TARGET_TMPDIR")),
    };
    fs::create_dir_all(parent).expect("a directory for tests");
    let directory = tempfile::Builder::new()
        .prefix("store-")
        .tempdir_in(parent)
        .expect("a temporary directory");
    if let Some(user) = ordinary {
        user.own(directory.path());
    }
    directory
}

fn lay_out(work: &Path) {
    fs::create_dir_all(work.join("images")).expect("a directory for images");
    fs::create_dir_all(work.join("profiles")).expect("a directory for profiles");
    let base = match Ordinary::get() {
        None => format!(
            "schema = 1\nprovider = \"directory\"\n[directory]\npath = '{}'\n",
            super::rootfs().display()
        ),
        Some(user) => {
            user.own(work);
            let (path, digest) = user.archive(&super::rootfs());
            format!(
                "schema = 1\nprovider = \"tarball\"\n[tarball]\npath = '{}'\nsha256 = '{digest}'\n",
                path.display()
            )
        }
    };
    fs::write(work.join("images/base.toml"), base).expect("an image recipe");
}

/// Makes a store from one in which image `base` is built: its files, which nobody changes, by hard links.
fn clone_template(home: &Path) {
    let template = template();
    fs::create_dir(home).expect("the store's root");
    let ordinary = Ordinary::get();
    if let Some(user) = &ordinary {
        user.own(home);
    }
    let script = r#"
        cd "$1"
        find . -mindepth 1 -maxdepth 1 ! -name images -exec cp -a -t "$2" {} +
        mkdir -m 700 "$2/images"
        for part in images/*; do
            mkdir -m 700 "$2/$part"
            find "$part" -mindepth 1 -maxdepth 1 ! -name root -exec cp -a -t "$2/$part" {} +
            [ ! -e "$part/root" ] || cp -al "$part/root" "$2/$part/root"
        done"#;
    run(Command::new("sh")
        .args(["-euc", script, "sh"])
        .args([&template, home]));
    if let Some(user) = ordinary {
        // Made above, by root.
        user.own(&home.join("images"));
        for entry in fs::read_dir(home.join("images")).expect("images").flatten() {
            user.own(&entry.path());
        }
    }
}

/// Returns a store with nothing but image `base`, made once for each build of rockenv.
fn template() -> PathBuf {
    let program = fs::metadata(env!("CARGO_BIN_EXE_rockenv")).expect("rockenv");
    let version = format!(
        "{}.{:09}-{}",
        program.mtime(),
        program.mtime_nsec(),
        program.len()
    );
    let ordinary = Ordinary::get();
    let parent = match &ordinary {
        Some(user) => user.directory.join("template"),
        None => Path::new(env!("CARGO_TARGET_TMPDIR")).join("template"),
    };
    fs::create_dir_all(&parent).expect("a directory for the template");
    let lock = fs::File::create(parent.join("lock")).expect("a lock file");
    lock.file().lock().expect("the lock");
    let link = parent.join("current");
    let current = parent.join(&version);
    if fs::read_link(&link).is_ok_and(|target| target == Path::new(&version)) {
        return current.join("store");
    }
    // Only other builds' are there, and nobody uses them: test programs of one checkout run one after another.
    let clean =
        "find \"$1\" -mindepth 1 -maxdepth 1 ! -name lock -exec rm -rf --one-file-system {} +";
    run(Command::new("sh").args(["-euc", clean, "sh"]).arg(&parent));
    let work = current.join("work");
    lay_out(&work);
    let mut build = match &ordinary {
        Some(user) => Command::new(user.program()),
        None => Command::new(env!("CARGO_BIN_EXE_rockenv")),
    };
    if let Some(user) = &ordinary {
        user.own(&current);
        user.become_user(&mut build);
    }
    run(build
        .args(["image", "build", "base"])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", &work)
        .env("ROCKENV_HOME", current.join("store"))
        .current_dir(&work));
    symlink(&version, &link).expect("the template's name");
    current.join("store")
}

/// Says whether the tests run beside a service (`tests/service`), whose containers are no children of rockenv's.
pub(crate) fn is_service() -> bool {
    std::env::vars_os().any(|(name, _)| name == "ROCKENV_TEST_ENGINE")
}

/// Returns the name of an engine that the tests do not run with.
pub(crate) fn other_engine() -> &'static str {
    let docker =
        std::env::vars_os().any(|(name, value)| name == "ROCKENV_TEST_ENGINE" && value == "docker");
    if docker { "podman" } else { "docker" }
}

/// Returns how long something may take that needs so many seconds at most under systemd-nspawn: a service may take
/// seconds of its own to end a container.
pub(crate) fn patience(seconds: u64) -> Duration {
    Duration::from_secs(if is_service() { seconds + 20 } else { seconds })
}

/// Returns the numbers of the user that steps run as, outside and inside: without root, root inside is the user outside.
pub(crate) fn build_user() -> (u32, u32) {
    match Ordinary::get() {
        Some(user) => (user.uid, 0),
        None => (1234, 1234),
    }
}

/// Gives the command the default reaction to signals: a shell starts what runs in its background deaf to Ctrl-C.
#[expect(
    unsafe_code,
    reason = "the child changes its signals between fork and exec"
)]
fn hear_signals(command: &mut Command) {
    use nix::sys::signal::{SigHandler, signal};
    use std::os::unix::process::CommandExt as _;
    // SAFETY: three system calls, and no handler is installed.
    unsafe {
        command.pre_exec(|| {
            for number in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP] {
                signal(number, SigHandler::SigDfl)?;
            }
            Ok(())
        });
    }
}
