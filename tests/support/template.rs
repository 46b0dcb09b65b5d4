//! Stores with only one image, each made once per build of rockenv, and the directories around a store.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use nix::mount::{MntFlags, umount2};

use super::loopfs::{self, Kind, run};
use super::ordinary::Ordinary;
use super::run::{settle, wait_until};

/// Makes a directory on the checkout's disk, because `/tmp` may be in memory.
pub(super) fn directory() -> tempfile::TempDir {
    let ordinary = Ordinary::get();
    let parent = match &ordinary {
        Some(user) => &user.directory,
        None => &base(),
    };
    fs::create_dir_all(parent).expect("a directory for tests");
    let directory = tempfile::Builder::new()
        .prefix("store-")
        // The user that the tests call rockenv for is not root.
        .permissions(PermissionsExt::from_mode(0o755))
        .tempdir_in(parent)
        .expect("a temporary directory");
    if let Some(user) = ordinary {
        user.own(directory.path());
    }
    directory
}

/// Returns the parent of this checkout's directories for tests, which users other than root can enter.
fn base() -> PathBuf {
    let own = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let is_open = |path: &Path| fs::metadata(path).is_ok_and(|found| found.mode() & 0o001 != 0);
    match own.ancestors().all(is_open) {
        true => own.to_owned(),
        false => {
            // Not shared with other checkouts, whose tests would remove this one's templates.
            let mut hasher = DefaultHasher::new();
            own.hash(&mut hasher);
            format!("/var/tmp/rockenv-tests-{:x}", hasher.finish()).into()
        }
    }
}

pub(super) fn lay_out(work: &Path) {
    for directory in [work, &work.join("images"), &work.join("profiles")] {
        fs::create_dir_all(directory).expect("a directory");
        // The user that the tests call rockenv for.
        std::os::unix::fs::chown(directory, Some(1234), Some(1234)).expect("an owner");
    }
    let base = match Ordinary::get() {
        None => recipe(&super::rootfs()),
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

/// Adds the recipe of image `builder`.
pub(crate) fn lay_out_builder(work: &Path) {
    write_recipe(&work.join("images/builder.toml"), &super::rootfs::builder());
}

/// Writes the recipe of an image that is a copy of a directory.
pub(crate) fn write_recipe(to: &Path, tree: &Path) {
    fs::write(to, recipe(tree)).expect("an image recipe");
}

fn recipe(tree: &Path) -> String {
    let path = tree.display();
    format!("schema = 1\nprovider = \"directory\"\n[directory]\npath = '{path}'\n")
}

/// Makes a store from a template with a built image. The image's files, which never change, are hard-linked.
pub(super) fn clone_template(home: &Path, image: &str) {
    let template = template(image);
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
        // Root created these directories above.
        user.own(&home.join("images"));
        for entry in fs::read_dir(home.join("images")).expect("images").flatten() {
            user.own(&entry.path());
        }
    }
}

/// Returns a store with only this image, made once per build of rockenv.
fn template(image: &str) -> PathBuf {
    let parent = match Ordinary::get() {
        Some(user) => user.directory.join("template"),
        None => base().join("template"),
    };
    let made = made_once(&parent.join(image), |current| {
        build(image, current, &current.join("store"));
    });
    made.join("store")
}

/// Returns an image file of a file system with a store in `store` that has only image `base`, made once per build of
/// rockenv.
pub(super) fn disk(kind: Kind) -> PathBuf {
    let parent = base().join("template").join(kind.name());
    let made = made_once(&parent, |current| {
        loopfs::private_mounts();
        fs::create_dir(current).expect("a directory");
        let (file, at) = (current.join("disk"), current.join("fs"));
        loopfs::format(kind, loopfs::SIZE, &file);
        let _mount = loopfs::mount_file(kind, &file, at.clone());
        let home = at.join("store");
        build("base", current, &home);
        settle(&home);
        // Unmounting completes the image file.
        wait_until("it unmounts", || umount2(&at, MntFlags::empty()).is_ok());
    });
    made.join("disk")
}

/// Returns the directory below `parent` that `make` creates and fills, once per build of rockenv.
fn made_once(parent: &Path, make: impl FnOnce(&Path)) -> PathBuf {
    let program = fs::metadata(env!("CARGO_BIN_EXE_rockenv")).expect("rockenv");
    let version = format!(
        "{}.{:09}-{}",
        program.mtime(),
        program.mtime_nsec(),
        program.len()
    );
    fs::create_dir_all(parent).expect("a directory for the template");
    let lock = fs::File::create(parent.join("lock")).expect("a lock file");
    lock.file().lock().expect("the lock");
    let link = parent.join("current");
    let current = parent.join(&version);
    if fs::read_link(&link).is_ok_and(|target| target == Path::new(&version)) {
        return current;
    }
    // Removes the templates of other builds. They are unused, because a checkout's test programs run one after another.
    let clean =
        "find \"$1\" -mindepth 1 -maxdepth 1 ! -name lock -exec rm -rf --one-file-system {} +";
    run(Command::new("sh").args(["-euc", clean, "sh"]).arg(parent));
    make(&current);
    symlink(&version, &link).expect("the template's name");
    current
}

/// Builds an image in a store at `home`, for a user whose working directory is in `current`.
fn build(image: &str, current: &Path, home: &Path) {
    let work = current.join("work");
    lay_out(&work);
    if image == "builder" {
        lay_out_builder(&work);
    }
    let ordinary = Ordinary::get();
    let mut build = match &ordinary {
        Some(user) => Command::new(user.program()),
        None => Command::new(env!("CARGO_BIN_EXE_rockenv")),
    };
    if let Some(user) = &ordinary {
        user.own(current);
        user.become_user(&mut build);
    }
    run(build
        .args(["image", "build", image])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", &work)
        .env("XDG_CONFIG_HOME", &work)
        .env("ROCKENV_HOME", home)
        .env("ROCKENV_TRUSTED_DIRS", &work)
        .current_dir(&work));
}
