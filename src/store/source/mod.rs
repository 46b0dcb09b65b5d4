//! Owns `source` volumes: cloning the repository that a profile names by `git`, and fingerprints of directories.
//!
//! `git` runs the program, and `checkout` runs it on repositories that other processes write to. `fingerprint` reads
//! the content of a source, and `part` that of a path in it. `patched` recognises TheRock's own patches. `unchanged`
//! cheaply checks whether a source is unchanged, and `touched` whether a process wrote to it meanwhile.

mod checkout;
mod fingerprint;
mod git;
mod part;
mod patched;
mod pin;
mod special_files;
mod touched;
mod unchanged;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) use checkout::{Checkout, git_directories, small_file};
pub(crate) use git::Git;
pub(crate) use part::is_absent;

use crate::plan::resolve::{self, Spec, Volume, VolumeKind, VolumeSource};
use crate::store::{Lock, Store};
use crate::sys::address::without_login;
use crate::sys::error::{Kind, Result, ResultExt as _};
use crate::sys::shell::quoted_path;
use crate::tree::file;
use fs_err as fs;
use sha2::{Digest as _, Sha256};

/// A repository as a profile names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repository {
    /// Volume's name.
    pub name: String,
    pub origin: resolve::Git,
}

/// Help for a source directory of the user that does not exist.
pub(crate) const MISSING: &str =
    "correct `path` of the volume in the profile, or put the source there";

/// Refuses a missing directory of the user, which rockenv neither creates nor fetches, and a file in its place.
pub(crate) fn is_there(volume: &str, path: &Path) -> Result<()> {
    let place = path.display();
    let error = match path.metadata() {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => invalid!("source `{volume}` at `{place}` is not a directory"),
        Err(error) => invalid!("source `{volume}` is missing from `{place}`").source(error),
    };
    Err(error.help(MISSING))
}

/// Returns the directories of a spec's sources, as `up` prepared them.
pub(crate) fn directories(store: &Store, spec: &Spec) -> BTreeMap<String, PathBuf> {
    let cloned = spec.volumes.iter().filter_map(|volume| {
        let VolumeSource::Git(git) = &volume.source else {
            return None;
        };
        let clone = Repository::new(&volume.name, git);
        Some((volume.name.clone(), clone.directory(store)))
    });
    cloned.collect()
}

/// Returns the origins of a spec's sources, by volume: names of clones in the store, and directories of the user.
pub(crate) fn origins(store: &Store, spec: &Spec) -> BTreeMap<String, String> {
    let origin = |volume: &Volume| match &volume.source {
        VolumeSource::Git(git) => {
            let clone = Repository::new(&volume.name, git).directory(store);
            Some(clone.file_name()?.to_string_lossy().into_owned())
        }
        VolumeSource::Path(path) if volume.kind == VolumeKind::Source => {
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            Some(real.to_string_lossy().into_owned())
        }
        VolumeSource::Path(_) | VolumeSource::Store => None,
    };
    let volumes = spec.volumes.iter();
    volumes
        .filter_map(|volume| Some((volume.name.clone(), origin(volume)?)))
        .collect()
}

impl Repository {
    pub(crate) fn new(name: &str, origin: &resolve::Git) -> Self {
        let (name, origin) = (name.to_owned(), origin.clone());
        Self { name, origin }
    }

    /// Returns its directory in the store. Each URL and revision has its own, so that no env moves another env's
    /// checkout. With submodules, it is a separate one, unless the plain checkout has them.
    pub(crate) fn directory(&self, store: &Store) -> PathBuf {
        let plain = self.place(store, false);
        if !self.origin.submodules {
            return plain;
        }
        let own = self.place(store, true);
        match !own.exists() && plain.join(".git").exists() && has_submodules(&plain) {
            true => plain,
            false => own,
        }
    }

    fn place(&self, store: &Store, submodules: bool) -> PathBuf {
        let mut hash = Sha256::new();
        hash.update(&self.origin.url);
        hash.update([0]);
        hash.update(self.origin.rev.as_deref().unwrap_or_default());
        if submodules {
            hash.update(b"\0submodules");
        }
        store.root().join("sources").join(format!(
            "{}-{}",
            self.name,
            &hex::encode(hash.finalize())[..12]
        ))
    }

    /// Clones the repository if it is missing, checks it against the profile, and returns its directory.
    ///
    /// A checkout with local changes stays as it is: the changes are in the fingerprint.
    pub(crate) fn prepare(
        &self,
        store: &Store,
        git: &Git<'_>,
        offline: bool,
        progress: &mut dyn FnMut(&str),
    ) -> Result<PathBuf> {
        let directory = self.directory(store);
        if directory.join(".git").exists() {
            self.check(&directory, git)?;
            return Ok(directory);
        }
        if offline {
            return Err(unavailable!(
                "source `{}` is not cloned yet, and `--offline` forbids cloning it",
                self.name
            )
            .help("run once without --offline"));
        }
        let beside = |end: &str| {
            let mut path = directory.clone().into_os_string();
            path.push(end);
            PathBuf::from(path)
        };
        let mut told = String::new();
        let _lock = Lock::exclusive_waiting(&beside(".lock"), "clone", &mut |waits| {
            if told != waits {
                waits.clone_into(&mut told);
                progress(&format!("source `{}` {waits}", self.name));
            }
            git.stop_if_cancelled()
        })?;
        if directory.join(".git").exists() {
            return Ok(directory);
        }
        let temporary = beside(".part");
        // Under this lock, it can only be an interrupted clone.
        store.discard(&temporary)?;
        fs::create_dir(&temporary)?;
        let (uid, gid) = (git.user.uid.into(), git.user.gid.into());
        nix::unistd::chown(&temporary, Some(uid), Some(gid))?;
        let url = without_login(&self.origin.url);
        progress(&format!("cloning {url}"));
        let cloned = self
            .clone_into(&temporary, git)
            .map_err(Git::help(&self.origin.url))
            .context(|| format!("cannot clone source `{}` from `{url}`", self.name));
        if cloned.is_err() {
            store.discard(&temporary)?;
        }
        cloned?;
        // Without this, files lost in a power failure would pass for the user's changes.
        nix::unistd::syncfs(fs::File::open(&temporary)?.file())?;
        fs::rename(&temporary, &directory)?;
        Ok(directory)
    }

    fn clone_into(&self, directory: &Path, git: &Git<'_>) -> Result<()> {
        // The default is the user's, and git 3's is SHA-256. A repository fetches only from one with the same ids.
        let is_id = |rev: &str| {
            [40, 64].contains(&rev.len()) && rev.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let id = match &self.origin.rev {
            Some(rev) if is_id(rev) => Some(rev.clone()),
            // The fetch reports an error.
            _ => git.newest(&self.origin.url, None).unwrap_or_default(),
        };
        git.run(directory, init(id.is_some_and(|id| id.len() == 64)))?;
        git.run(
            directory,
            &["remote", "add", "origin", "--", &self.origin.url],
        )?;
        let depth = self.origin.depth.map(|depth| format!("--depth={depth}"));
        let rev = self.origin.rev.as_deref().unwrap_or("HEAD");
        let mut arguments = vec!["fetch", "--quiet", "--no-tags"];
        arguments.extend(depth.as_deref());
        arguments.extend(["--", "origin", rev]);
        let found = match git.run(directory, &arguments) {
            Ok(_) => "FETCH_HEAD".to_owned(),
            Err(error) => {
                // Not every server serves a bare commit. In that case, fetch everything and look up the commit.
                let heads = "+refs/heads/*:refs/remotes/origin/*";
                let all = ["fetch", "--quiet", "--tags", "--", "origin", heads];
                git.run(directory, &all)?;
                let is_commit = |name: &String| {
                    let commit = format!("{name}^{{commit}}");
                    let verify = ["rev-parse", "--quiet", "--verify", &commit];
                    git.run(directory, &verify).is_ok()
                };
                let mut names = [rev.to_owned(), format!("origin/{rev}")].into_iter();
                names
                    .find(is_commit)
                    .ok_or_else(|| error.of_kind(Kind::NotFound))?
            }
        };
        git.check_out(directory, &["checkout", "--quiet", "--detach", &found])?;
        if self.origin.submodules {
            let mut arguments = vec!["submodule", "--quiet", "update", "--init", "--recursive"];
            arguments.extend(depth.as_deref());
            git.check_out(directory, &arguments)?;
        }
        Ok(())
    }

    /// Refuses a checkout that is not at the commit that the profile pins.
    fn check(&self, directory: &Path, git: &Git<'_>) -> Result<()> {
        let Some(rev) = &self.origin.rev else {
            return Ok(());
        };
        let checkout = git.open(directory)?;
        let (head, digits) = (checkout.head()?, rev.to_ascii_lowercase());
        // A tag or a branch may have such a name too.
        let is_commit = || {
            let named = format!("{rev}^{{commit}}");
            let named = checkout.text(&["rev-parse", "--quiet", "--verify", &named]);
            [40, 64].contains(&rev.len()) || named.is_ok_and(|named| named.starts_with(&digits))
        };
        let hexadecimal = rev.len() >= 7 && rev.bytes().all(|byte| byte.is_ascii_hexdigit());
        if hexadecimal && !head.starts_with(&digits) && is_commit() {
            return Err(drift!(
                "source `{}` is at {}, but the profile pins {rev}",
                self.name,
                head
            )
            .help(format!("git -C {} checkout {rev}", quoted_path(directory))));
        }
        Ok(())
    }
}

/// Returns the arguments that create a repository with SHA-1 or SHA-256 ids. Early versions of git, such as 2.25, have
/// only the former, and no option for them.
fn init(is_sha256: bool) -> &'static [&'static str] {
    match is_sha256 {
        true => &["init", "--quiet", "--object-format=sha256"],
        false => &["-c", "init.defaultObjectFormat=sha1", "init", "--quiet"],
    }
}

fn has_submodules(checkout: &Path) -> bool {
    let named = match file::read(checkout, Path::new(".gitmodules")) {
        Ok(file::FoundEntry::File { bytes, .. }) => bytes,
        Ok(file::FoundEntry::Absent | file::FoundEntry::Empty) => return true,
        Err(_) => return false,
    };
    let named = String::from_utf8_lossy(&named);
    let lines = named.lines().filter_map(|line| line.trim().split_once('='));
    let mut paths = lines.filter(|(key, _)| key.trim() == "path");
    paths.all(|(_, path)| checkout.join(path.trim()).join(".git").exists())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::SystemTime;

    use super::*;
    use crate::engine::BuildUser;
    use crate::store::check::names;

    pub(super) fn me() -> &'static BuildUser {
        static ME: LazyLock<BuildUser> = LazyLock::new(|| {
            BuildUser::new(
                nix::unistd::getuid().as_raw(),
                nix::unistd::getgid().as_raw(),
            )
        });
        &ME
    }

    /// Runs git with a user name, and allows submodules from local paths.
    pub(super) fn run(directory: &Path, arguments: &[&str]) -> String {
        let who = ["-c", "user.name=t", "-c", "user.email=t@example.org"];
        let local = ["-c", "protocol.file.allow=always"];
        let all = [&who[..], &local, arguments].concat();
        Git::new(me()).run(directory, &all).unwrap()
    }

    pub(super) fn repository() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let run = |arguments: &[&str]| run(directory.path(), arguments);
        run(&["init", "--quiet"]);
        fs::write(directory.path().join("a"), "one").unwrap();
        run(&["add", "a"]);
        run(&["commit", "--quiet", "-m", "first"]);
        directory
    }

    /// Adds the repository `inner` as a submodule, without a commit.
    pub(super) fn add_submodule(outer: &Path, inner: &Path, name: &str) {
        let url = inner.to_str().unwrap();
        run(outer, &["submodule", "--quiet", "add", "--", url, name]);
    }

    /// Sets a file's modification time, as `touch` and `cp -p` do.
    pub(super) fn set_modified(path: &Path, time: SystemTime) {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.file().set_modified(time).unwrap();
    }

    /// Describes a repository at a path, without submodules.
    pub(super) fn source(origin: &Path, rev: Option<&str>) -> Repository {
        let origin = resolve::Git {
            url: format!("file://{}", origin.display()),
            rev: rev.map(str::to_owned),
            depth: Some(1),
            submodules: false,
        };
        Repository::new("src", &origin)
    }

    #[test]
    fn a_pinned_commit_is_cloned_and_a_moved_one_is_refused() {
        let (origin, git) = (repository(), Git::new(me()));
        let (_home, store) = Store::scratch();
        let head = run(origin.path(), &["rev-parse", "HEAD"]);
        let head = head.trim();
        let mut source = source(origin.path(), Some(&head[..12]));
        source.origin.submodules = true;
        let directory = source.prepare(&store, &git, false, &mut |_| {}).unwrap();
        assert_eq!(fs::read_to_string(directory.join("a")).unwrap(), "one");
        let print = git.fingerprint(&directory).unwrap();
        assert_eq!(print, format!("git:{head}"));
        let commit = ["commit", "--quiet", "--allow-empty", "-m", "moved"];
        run(&directory, &commit);
        let moved = source.prepare(&store, &git, true, &mut |_| {});
        let error = moved.unwrap_err();
        assert_eq!(error.kind(), Kind::Drift);
        assert!(error.help_text().unwrap().contains("checkout"));
    }

    #[test]
    fn a_clone_has_ids_like_those_of_its_origin() {
        let options = init(false).iter().filter(|word| word.starts_with("--"));
        assert!(options.eq(&["--quiet"]), "git 2.25 has no other option");
        let (origin, git) = (tempfile::tempdir().unwrap(), Git::new(me()));
        let run = |arguments: &[&str]| run(origin.path(), arguments);
        run(&["init", "--quiet", "--object-format=sha256"]);
        run(&["commit", "--quiet", "--allow-empty", "-m", "first"]);
        let head = run(&["rev-parse", "HEAD"]).trim().to_owned();
        let (_home, store) = Store::scratch();
        for rev in [Some(head.as_str()), None] {
            let source = source(origin.path(), rev);
            let directory = source.prepare(&store, &git, false, &mut |_| {}).unwrap();
            assert_eq!(git.head(&directory).unwrap().as_ref(), Some(&head));
        }
    }

    #[test]
    fn a_tag_or_branch_whose_name_looks_like_a_commit_stays_usable() {
        let (origin, git) = (repository(), Git::new(me()));
        git.run(origin.path(), &["tag", "20240101"]).unwrap();
        git.run(origin.path(), &["branch", "deadbeef"]).unwrap();
        let (_home, store) = Store::scratch();
        for (rev, depth) in [
            ("20240101", None),
            ("20240101", Some(1)),
            ("deadbeef", Some(1)),
        ] {
            let mut source = source(origin.path(), Some(rev));
            source.name = format!("src{}", depth.unwrap_or(0));
            source.origin.depth = depth;
            for _ in 0..2 {
                source.prepare(&store, &git, false, &mut |_| {}).unwrap();
            }
        }
    }

    #[test]
    fn a_checkout_without_submodules_is_not_the_one_with_them() {
        let (outer, inner, git) = (repository(), repository(), Git::new(me()));
        add_submodule(outer.path(), inner.path(), "sub dir");
        run(outer.path(), &["commit", "--quiet", "-m", "s"]);
        let (_home, store) = Store::scratch();
        let source = |submodules| {
            let mut source = source(outer.path(), None);
            (source.origin.depth, source.origin.submodules) = (None, submodules);
            source
        };
        let (without, with) = (source(false), source(true));
        let plain = without.prepare(&store, &git, false, &mut |_| {}).unwrap();
        assert_eq!(without.directory(&store), plain);
        assert_ne!(with.directory(&store), plain);
        // A plain checkout with submodules stays in use: an earlier version made it, or the user fetched them.
        let update = ["submodule", "--quiet", "update", "--init"];
        run(&plain, &update);
        assert!(plain.join("sub dir/a").exists());
        assert_eq!(with.directory(&store), plain);
        // Once a separate checkout exists, it stays in use.
        fs::remove_file(plain.join("sub dir/.git")).unwrap();
        let own = with.directory(&store);
        fs::create_dir(&own).unwrap();
        fs::write(plain.join("sub dir/.git"), "").unwrap();
        assert_eq!(with.directory(&store), own);
    }

    #[test]
    fn cancel_ends_a_clone_from_a_silent_server_and_leaves_nothing() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (_home, store) = Store::scratch();
        let mut source = source(Path::new(""), None);
        source.origin.url = format!("git://{}/src", server.local_addr().unwrap());
        source.origin.depth = None;
        let cancel = AtomicBool::new(false);
        let start = std::time::Instant::now();
        let tick = || {
            if start.elapsed() > std::time::Duration::from_millis(300) {
                cancel.store(true, Ordering::Relaxed);
            }
        };
        let git = Git {
            user: me(),
            cancel: &cancel,
            tick: Box::new(tick),
        };
        let ended = source.prepare(&store, &git, false, &mut |_| {});
        let error = ended.unwrap_err();
        assert!(matches!(error.kind(), Kind::Signal(_)), "{error}");
        assert!(start.elapsed() < std::time::Duration::from_secs(20));
        let mut left = names(&store.root().join("sources")).unwrap();
        left.retain(|name| !name.ends_with(".lock"));
        assert!(left.is_empty(), "{left:?}");
    }
}
