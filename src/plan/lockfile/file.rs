//! Owns the lock file on disk: its place, reading it, and replacing it atomically.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::{Lockfile, VERSION};
use crate::plan::ids::{PathBelow, Sha256Hex};
use crate::profile::Origin;
use crate::rocm::target::Target;
use crate::sys::account::{self, Existing, FilePlace, Rights};
use crate::sys::address::hide_secrets;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _, encoded};

/// Maximum size of a lock file, in bytes.
const LARGEST: u64 = 16 << 20;

const HEADER: &str = "\
# What `rockenv up --locked` builds from. Made by `rockenv lock`: keep it with the profile, do not edit it.
";

/// Returns the path of an env's lock file: beside its profile, or in the working directory for a built-in one.
pub(crate) fn place(profile: &Origin, env: &str) -> PathBuf {
    let name = format!("{env}.lock");
    match profile {
        Origin::File(path) => path.with_file_name(name),
        Origin::Builtin(_) => PathBuf::from(name),
    }
}

/// Reads a lock file with the caller's rights; `None` if it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<Lockfile>> {
    read_as(account::caller(), path)
}

/// Reads a lock file that the store knows, with rockenv's own rights.
pub(crate) fn read_known(path: &Path) -> Result<Option<Lockfile>> {
    read_as(&Rights::Own, path)
}

fn read_as(rights: &Rights, path: &Path) -> Result<Option<Lockfile>> {
    let open = |flags| rights.open_named(path, flags);
    let opened = match rights {
        // Opening a device may have side effects. gc reads files at places that other users may write to.
        Rights::Own => {
            open(OFlag::O_PATH).and_then(|found| beneath::open_regular(found, OFlag::O_RDONLY))
        }
        // The user's own process opens the file: reopening a path-only descriptor here would have root's rights.
        Rights::Of(..) => open(OFlag::O_RDONLY | OFlag::O_NONBLOCK),
    };
    let file = match opened {
        Err(Errno::ENOENT) => return Ok(None),
        other => other.context(|| format!("cannot read `{}`", path.display()))?,
    };
    let file = fs::File::from_parts(file.into(), path);
    let found = file.metadata()?;
    if !found.is_file() || found.len() > LARGEST {
        return Err(invalid!("`{}` is not a rockenv lock file", path.display()));
    }
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes)?;
    let text =
        String::from_utf8(bytes).map_err(|_| invalid!("`{}` is not UTF-8", path.display()))?;
    parse(&text, &path.display().to_string()).map(Some)
}

/// Parses a lock file; `name` is for errors.
pub(crate) fn parse(text: &str, name: &str) -> Result<Lockfile> {
    let bad = |cause: &dyn std::fmt::Display| {
        invalid!("`{name}` is not a rockenv lock file")
            .source(hide_secrets(cause.to_string().trim_end()))
            .help("rockenv lock PROFILE --file NEW.lock")
    };
    let table: toml::Table = text.parse().map_err(|error| bad(&error))?;
    // The version comes first, because other formats cannot be parsed.
    let version = table.get("version").and_then(toml::Value::as_integer);
    match version {
        Some(version) if version == i64::from(VERSION) => {}
        Some(version @ 1..) => {
            return Err(invalid!(
                "`{name}` has format {version}, but this rockenv supports only {VERSION}"
            )
            .help("use the rockenv version that made it"));
        }
        _ => return Err(bad(&"it has no `version`")),
    }
    let file: Lockfile = toml::from_str(text).map_err(|error| bad(&error))?;
    if let Some(digest) = file
        .digests()
        .find(|digest| digest.parse::<Sha256Hex>().is_err())
    {
        return Err(bad(&format!(
            "`{}` is not a SHA-256",
            digest.escape_debug()
        )));
    }
    if let Some(path) = file.paths().find(|path| path.parse::<PathBelow>().is_err()) {
        let path = path.escape_debug();
        return Err(bad(&format!("`{path}` is not a path inside a volume")));
    }
    let mut targets = file.machine_targets.iter();
    if let Some(error) = targets.find_map(|name| Target::parse(name).err()) {
        return Err(bad(&error));
    }
    Ok(file)
}

impl Lockfile {
    /// Returns the names and paths that become paths of files and directories.
    fn paths(&self) -> impl Iterator<Item = &str> {
        let files = self.files.values().flat_map(BTreeMap::keys);
        let submodules = self.source.values();
        let submodules = submodules.flat_map(|source| source.submodules.keys());
        let names = self.files.keys().chain(self.source.keys());
        names.chain(files).chain(submodules).map(String::as_str)
    }

    /// Returns the digests that become names of files and directories.
    fn digests(&self) -> impl Iterator<Item = &str> {
        let image = [&*self.image.key, &self.image.digest, &self.image.recipe];
        let fetched = self.fetched.values().map(|file| file.sha256.as_str());
        let files = self.files.values().flat_map(BTreeMap::values);
        let files = files.map(|file| file.sha256().as_str());
        image.into_iter().chain(fetched).chain(files)
    }

    /// Returns the text of the file: the same content always gives the same text.
    pub fn text(&self) -> Result<String> {
        let text = encoded(toml::to_string(self), "a lock file")?;
        Ok(format!("{HEADER}{text}"))
    }
}

/// Refuses a path in a directory that does not exist.
pub(crate) fn check_place(path: &Path) -> Result<()> {
    let rights = account::caller();
    FilePlace::new(rights, &account::resolved(rights, path)).map(drop)
}

/// Writes the file at `path` atomically. `old` is what was there when locking began, which may take long. A file that
/// changed since, or that is not a lock file, is refused.
pub(crate) fn write(path: &Path, lock: &Lockfile, old: Option<&Lockfile>) -> Result<()> {
    let rights = account::caller();
    // Follow a link: its target is the user's lock file.
    let path = &account::resolved(rights, path);
    let now = match read(path) {
        Ok(now) => now,
        Err(error) => {
            return Err(invalid!(
                "`{}` exists and is not a lock file; refusing to overwrite it",
                path.display()
            )
            .source(error)
            .help("rockenv lock PROFILE --file OTHER.lock"));
        }
    };
    if now.as_ref() == Some(lock) {
        return Ok(());
    }
    if now.as_ref() != old {
        return Err(busy!(
            "`{}` changed while its inputs were locked; not overwriting it",
            path.display()
        )
        .help("run the command again"));
    }
    let existing = match old {
        Some(_) => Existing::Replace,
        None => Existing::Refuse,
    };
    FilePlace::new(rights, path)?.put(lock.text()?.as_bytes(), existing)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::super::tests::{EXAMPLE, example};
    use super::*;

    #[test]
    fn the_text_is_stable_and_read_back() {
        assert_eq!(example().text().unwrap(), EXAMPLE);
    }

    #[test]
    fn what_is_no_lock_file_is_refused_and_never_replaced() {
        let text = example().text().unwrap();
        let refused = |old: &str, new: &str| {
            let error = parse(&text.replace(old, new), "p.lock").unwrap_err();
            error.message().to_owned()
        };
        for version in ["1", "3"] {
            let message = refused("version = 2", &format!("version = {version}"));
            let words = format!("has format {version}, but this rockenv supports only 2");
            assert_has!(message, &words);
        }
        for (old, new) in [
            ("version = 2", "version = 0"),
            ("version = 2\n", ""),
            ("[observed]", "[seen]"),
            (&"5".repeat(64), "../../etc"),
        ] {
            assert_has!(refused(old, new), "not a rockenv lock file");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("p.lock");
        fs::write(&path, "[package]\nname = \"precious\"\n").unwrap();
        let error = write(&path, &example(), None).unwrap_err();
        assert_has!(error.message(), "refusing to overwrite");
        assert!(fs::read_to_string(&path).unwrap().contains("precious"));
        // A socket cannot be opened, so this shows that only regular files are.
        let socket = directory.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = read_known(&socket).unwrap_err();
        assert_has!(error.message(), "not a rockenv lock file");
    }

    #[test]
    fn a_file_is_replaced_whole_and_keeps_its_mode_and_link() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("real.lock");
        let link = directory.path().join("p.lock");
        write(&path, &example(), None).unwrap();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        fs_err::os::unix::fs::symlink(&path, &link).unwrap();
        let mut other = example();
        other.targets.push("gfx1201".to_owned());
        write(&link, &other, Some(&example())).unwrap();
        // Another program wrote the file after locking began.
        for old in [Some(&example()), None] {
            let mut newest = other.clone();
            newest.targets.clear();
            let error = write(&link, &newest, old).unwrap_err();
            assert_has!(error.message(), "changed while its inputs were locked");
        }
        assert_eq!(read(&path).unwrap().unwrap(), other);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_lock_file_is_beside_its_profile() {
        let own = Origin::File("/home/me/p/x.toml".into());
        assert_eq!(
            place(&own, "x-gfx1103"),
            Path::new("/home/me/p/x-gfx1103.lock")
        );
        let built_in = Origin::Builtin("x.toml".to_owned());
        assert_eq!(place(&built_in, "x"), Path::new("x.lock"));
    }
}
