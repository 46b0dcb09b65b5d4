//! Owns the store in a file: a sparse btrfs image, mounted at the store's root now and at each boot. If a step fails,
//! the earlier ones are undone.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fs_err as fs;
use nix::mount::{MntFlags, umount2};

use super::fstab;
use crate::store::Store;
use crate::sys::error::{Error, Kind, Result, ResultExt as _, if_exists, named_path};
use crate::sys::host::free_space;
use crate::sys::process::Program;
use crate::sys::shell::{quoted, quoted_path};
use crate::sys::signals::Signals;
use crate::tree::mounts::{self, is_in_table};
use crate::tree::{self, Method};
use crate::ui::{Ui, size};

/// Minimum size: a smaller btrfs has no space left after its own metadata.
const SMALLEST: u64 = 1 << 30;

const FSTAB: &str = "/etc/fstab";

/// A completed step, and what undoes it.
type Undo<'a> = (String, Box<dyn FnOnce() -> Result<()> + 'a>);

#[derive(Debug)]
pub(crate) struct StoreImage {
    /// Mount point: the store's root.
    pub at: PathBuf,
    pub file: PathBuf,
    pub size: u64,
    /// Warnings to show before the question.
    pub warnings: Vec<String>,
}

impl StoreImage {
    /// Checks that an image can be created for `home`; changes nothing.
    pub(crate) fn plan(home: &Path, size: u64) -> Result<Self> {
        let (Some(parent), Some(name)) = (home.parent(), home.file_name()) else {
            return Err(usage!("a store cannot be at `{}`", home.display())
                .help("rockenv --home /var/lib/rockenv setup --store-image 300G"));
        };
        if size < SMALLEST {
            return Err(usage!("{} is too small for a store", size::bytes(size))
                .help("rockenv setup --store-image 300G"));
        }
        if !parent.is_dir() {
            return Err(not_found!("no directory `{}`", parent.display())
                .help(format!("mkdir -p {}", quoted_path(parent))));
        }
        let at = fs::canonicalize(parent)?.join(name);
        let mut file = at.clone().into_os_string();
        file.push(".img");
        let file = PathBuf::from(file);
        refuse_unfit(&at, &file, size)?;
        let free = free_space(&fs::canonicalize(parent)?)?;
        let mut warnings = Vec::new();
        if size > free {
            warnings.push(format!(
                "the file may grow to {}, but only {} are free: watch `{}`, because a store that cannot grow loses the data it is writing",
                size::bytes(size),
                size::bytes(free),
                parent.display()
            ));
        }
        Ok(Self {
            at,
            file,
            size,
            warnings,
        })
    }

    /// Returns the planned steps, one per line.
    pub(crate) fn steps(&self) -> Vec<String> {
        let (file, at) = (self.file.display(), self.at.display());
        vec![
            format!(
                "make {file}: {}, sparse: it takes space only as it fills",
                size::bytes(self.size)
            ),
            format!("make a btrfs file system in it (label `rockenv`)"),
            format!(
                "add to {FSTAB}: {}",
                fstab::line(&self.file, &self.at).trim_end()
            ),
            format!("mount it at {at}"),
        ]
    }

    /// Returns the commands that undo the setup.
    pub(crate) fn undo_text(&self) -> String {
        let [file, at] = [&self.file, &self.at].map(|path| path.to_string_lossy());
        format!(
            "to undo (what is in the store is lost): umount {} && sed -i {} {FSTAB} && rm {}",
            quoted(&at),
            quoted(&format!("\\{}d", fstab::pattern(&self.file))),
            quoted(&file)
        )
    }

    /// Creates and mounts the image. Undoes everything on failure or a signal.
    pub(crate) fn make(&self, ui: &Ui, signals: &Signals) -> Result<()> {
        let mut done: Vec<Undo<'_>> = Vec::new();
        let result = self.make_steps(ui, signals, &mut done);
        if result.is_err() {
            for (what, undo) in done.into_iter().rev() {
                if let Err(error) = undo() {
                    ui.warn(&format!("cannot undo {what}: {}", error.chain().join(": ")));
                }
            }
        }
        result
    }

    fn make_steps<'a>(
        &'a self,
        ui: &Ui,
        signals: &Signals,
        done: &mut Vec<Undo<'a>>,
    ) -> Result<()> {
        // Another command may have made a store there during the question and the installation of packages.
        refuse_unfit(&self.at, &self.file, self.size)?;
        let go_on = || match signals.pending()? {
            Some(number) => Err(Error::new(
                Kind::Signal(number),
                "interrupted; nothing was changed",
            )),
            None => Ok(()),
        };
        {
            use fs_err::os::unix::fs::OpenOptionsExt as _;
            let file = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&self.file)?;
            done.push((
                format!("the file `{}`", self.file.display()),
                Box::new(move || Ok(fs::remove_file(&self.file)?)),
            ));
            file.set_len(self.size)?;
        }
        go_on()?;
        ui.note(&format!("making a file system in {}", self.file.display()));
        run(
            "mkfs.btrfs",
            &[
                "--quiet".as_ref(),
                "--label".as_ref(),
                "rockenv".as_ref(),
                self.file.as_os_str(),
            ],
        )?;
        go_on()?;
        if !self.at.exists() {
            fs::create_dir(&self.at)?;
            done.push((
                format!("the directory `{}`", self.at.display()),
                Box::new(move || Ok(fs::remove_dir(&self.at)?)),
            ));
        }
        let before = read_table()?;
        let after = fstab::with(
            before.as_deref().unwrap_or_default(),
            &fstab::line(&self.file, &self.at),
        );
        fstab::replace(Path::new(FSTAB), &after)?;
        done.push((
            format!("the line in {FSTAB}"),
            Box::new(move || restore_table(before.as_deref(), &after)),
        ));
        go_on()?;
        // Mounts through the fstab entry, which proves that it will work at the next boot.
        run("mount", &[self.at.as_os_str()]).context(|| {
            format!(
                "cannot mount `{}` at `{}`",
                self.file.display(),
                self.at.display()
            )
        })?;
        done.push((
            format!("the mount at `{}`", self.at.display()),
            Box::new(move || Ok(umount2(&self.at, MntFlags::empty())?)),
        ));
        go_on()?;
        // A new file system has no label of SELinux, and a daemon may not look for the store there. Files inherit it.
        if Program::find("restorecon", "labels of SELinux").is_ok()
            && let Err(error) = run("restorecon", &[self.at.as_os_str()])
        {
            ui.warn(&error.chain().join(": "));
        }
        let store = Store::open(&self.at)?;
        if store.method() != Method::Btrfs {
            return Err(unexpected!(
                "the store at `{}` is {}, not btrfs",
                self.at.display(),
                store.method()
            ));
        }
        if Path::new("/run/systemd/system").is_dir()
            && let Err(error) = run("systemctl", &["daemon-reload".as_ref()])
        {
            // Only a warning: systemd reads fstab at the next boot anyway.
            ui.warn(&error.chain().join(": "));
        }
        Ok(())
    }
}

/// Refuses if a store image would hide existing data or is unnecessary.
fn refuse_unfit(at: &Path, file: &Path, size: u64) -> Result<()> {
    let elsewhere = format!(
        "or choose another place: rockenv --home /somewhere/else setup --store-image {}G",
        size.div_ceil(1 << 30)
    );
    if mounts::at_or_below(at)?.iter().any(|point| point == at) {
        return Err(usage!("`{}` is a mount point already", at.display())
            .help(format!("umount {}, {elsewhere}", quoted_path(at))));
    }
    match fs::read_dir(at) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Err(usage!(
                    "`{}` is not empty: a file system mounted there would hide what is in it",
                    at.display()
                )
                .help(format!("mv {0} {0}.old, {elsewhere}", quoted_path(at))));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            return Err(
                named_path(at)(error).help(format!("mv {0} {0}.old, {elsewhere}", quoted_path(at)))
            );
        }
    }
    if is_in_table(&read_table()?.unwrap_or_default(), at) {
        return Err(
            usage!("{FSTAB} mounts something at `{}` already", at.display())
                .help(format!("mount {}, {elsewhere}", quoted_path(at))),
        );
    }
    if fs::symlink_metadata(file).is_ok() {
        return Err(usage!("`{}` exists already", file.display())
            .help(format!("mv {0} {0}.old, {elsewhere}", quoted_path(file))));
    }
    let parent = at.parent().unwrap_or(Path::new("/"));
    if tree::btrfs::is_btrfs(fs::File::open(parent)?.file())? {
        return Err(usage!(
            "`{}` is on btrfs already: the store needs no file system of its own",
            parent.display()
        )
        .help("rockenv up hip-smoke"));
    }
    Ok(())
}

fn read_table() -> Result<Option<Vec<u8>>> {
    if_exists(fs::read(FSTAB))
}

fn run(name: &str, arguments: &[&std::ffi::OsStr]) -> Result<()> {
    Program::find(name, "a store in a file")?
        .args(arguments)
        .output(1 << 20, &AtomicBool::new(false), &mut |_| {})
        .map(drop)
}

fn restore_table(before: Option<&[u8]>, after: &[u8]) -> Result<()> {
    if read_table()?.as_deref() != Some(after) {
        return Err(busy!("another program changed {FSTAB} in the meantime")
            .help(format!("remove the line with {} manually", fstab::MARK)));
    }
    match before {
        Some(before) => fstab::replace(Path::new(FSTAB), before),
        None => Ok(fs::remove_file(FSTAB)?),
    }
}

#[cfg(test)]
mod tests {
    use std::io::sink;

    use super::*;
    use crate::ui::UiSettings;

    #[test]
    fn a_store_that_was_made_after_the_question_is_not_hidden() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().join("store");
        fs::create_dir_all(at.join("envs")).unwrap();
        let image = StoreImage {
            at,
            // No file can be made there, so this test mounts nothing.
            file: directory.path().join("absent/store.img"),
            size: SMALLEST,
            warnings: Vec::new(),
        };
        let ui = Ui::with_writers(UiSettings::default(), Box::new(sink()), Box::new(sink()));
        let error = image.make(&ui, &Signals::take().unwrap()).unwrap_err();
        assert_has!(error.message(), "is not empty");
    }
}
