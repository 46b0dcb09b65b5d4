//! Owns the definition of an env's containers: mounts, limits and user, the same for steps, `exec` and `shell`.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::fcntl::OFlag;
use nix::sys::stat::fstat;
use nix::unistd::fchown;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::step::memory_max;
use super::view::{PatchedSource, Views};
use crate::engine::hold::name_prefix;
use crate::engine::jobserver;
use crate::engine::ninja;
use crate::engine::{Bind, Container, Limits, Root};
use crate::image::certificates::ContainerAuthorities;
use crate::plan::ids::EnvName;
use crate::plan::pins;
use crate::plan::resolve::{Access, Action, Spec, Step, User, Volume, VolumeKind, VolumeSource};
use crate::rocm::gpu::Device;
use crate::store::path_volumes::real_path;
use crate::store::results::{check_directory, check_mounted};
use crate::store::{LockedEnv, Store, source};
use crate::sys::account::{self, FilePlace, Rights};
use crate::sys::atomic::random_id;
use crate::sys::error::{Error, Result, ResultExt as _, encoded};
use crate::sys::host::Host;
use crate::sys::shell::quoted_path;
use crate::tree::{self, mounts};

/// Directories on disk that every container gets empty, and that no snapshot contains.
const TEMPORARY: [(&str, &str); 2] = [("tmp", "/tmp"), ("var-tmp", "/var/tmp")];

pub(crate) const FIFO: &str = "jobserver";

/// The inputs of every container of an env.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContainerContext<'a> {
    pub env: &'a LockedEnv<'a>,
    pub store: &'a Store,
    pub spec: &'a Spec,
    /// Directories of `source` volumes by name.
    pub sources: &'a BTreeMap<String, PathBuf>,
    pub host: &'a Host,
}

impl ContainerContext<'_> {
    pub(super) fn of_step(
        &self,
        step: &Step,
        views: &Views,
        root: Root,
        devices: Vec<Device>,
    ) -> Result<Container> {
        let volumes = self.spec.visible(step).collect::<Vec<_>>();
        let mut container = self.build(&volumes, views, root, devices, Some(step))?;
        let pins = self.env.run_dir().join(pins::NAME);
        container.binds.push(Bind::writable(pins, pins::INSIDE));
        Ok(container)
    }

    /// Returns the container of `exec` and `shell`, which has every volume and the network.
    pub(crate) fn of_shell(&self, root: Root, devices: Vec<Device>) -> Result<Container> {
        let volumes = self.spec.volumes.iter().collect::<Vec<_>>();
        let mut views = Views::new();
        for volume in &volumes {
            let mut hooks = self.spec.hooks.iter();
            if hooks.any(|hook| hook.volume == volume.name)
                && let Some(view) = super::view::existing(self.env, &volume.name)?
            {
                views.insert(volume.name.clone(), view);
            }
        }
        self.build(&volumes, &views, root, devices, None)
    }

    /// Returns the container of a step, or of `exec` and `shell`.
    fn build(
        &self,
        volumes: &[&Volume],
        views: &Views,
        root: Root,
        devices: Vec<Device>,
        step: Option<&Step>,
    ) -> Result<Container> {
        let Self {
            env, spec, host, ..
        } = *self;
        let run = env.run_dir();
        let mut binds = Vec::new();
        for (name, target) in TEMPORARY {
            let directory = run.join(name);
            fs::create_dir_all(&directory)?;
            fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o1777))?;
            binds.push(Bind::writable(directory, target));
        }
        let fifo = run.join(FIFO);
        jobserver::make_fifo(&fifo)?;
        binds.push(Bind::writable(fifo, jobserver::INSIDE));
        let program = run.join(ninja::NAME);
        if spec.resources.ninja && program.exists() {
            binds.push(Bind::read_only(program, ninja::INSIDE));
        }
        let first = binds.len();
        for volume in volumes {
            let shown = views.get(&volume.name);
            let (source, view) = match shown {
                Some(PatchedSource::Copy(copy)) => (copy.clone(), None),
                Some(PatchedSource::Overlay(view)) => {
                    (self.directory_of(volume)?, Some(view.clone()))
                }
                Some(PatchedSource::Unfinished) | None => (self.directory_of(volume)?, None),
            };
            let source = match &volume.source {
                VolumeSource::Path(path) if source == *path => real_path(spec, path)?,
                VolumeSource::Path(_) | VolumeSource::Git(_) | VolumeSource::Store => {
                    fs::canonicalize(source)?
                }
            };
            binds.push(Bind {
                source,
                target: volume.target.clone(),
                read_only: volume.access == Access::Ro
                    || matches!(shown, Some(PatchedSource::Unfinished)),
                is_real: true,
                view,
            });
        }
        make_mount_points(volumes, &binds[first..], views)?;
        let is_builder = step.is_none_or(|step| step.user == User::Builder);
        let is_packages = step.is_some_and(|step| matches!(step.action, Action::Packages(_)));
        let tree = match root {
            Root::Service(_) => Some(self.store.image_root(&env.known_record()?.image_key)),
            Root::Directory(_) | Root::Overlay(_) => None,
        };
        Ok(Container {
            // At most 64 characters, each label valid in a host name.
            id: format!("{}{}", name_prefix(env.name()), random_id()?),
            root,
            binds,
            keep_groups: !host.root && !devices.is_empty(),
            devices,
            network: step.is_none_or(|step| step.network),
            limits: Limits {
                memory_max: memory_max(spec, host),
                tasks_max: spec.resources.tasks_max,
            },
            user: is_builder.then(|| spec.user.clone()),
            certificates: ContainerAuthorities::new(is_packages, tree)?,
        })
    }

    /// Returns the host directory of a volume, and creates it if rockenv owns it.
    pub(super) fn directory_of(&self, volume: &Volume) -> Result<PathBuf> {
        let Self {
            env, store, spec, ..
        } = *self;
        if let VolumeSource::Path(path) = &volume.source {
            real_path(spec, path)?;
        }
        match (volume.kind, &volume.source) {
            (VolumeKind::Build, _) => {
                let id = env.known_record()?.head.volumes.get(&volume.name).cloned();
                let id = id.ok_or_else(|| {
                    unexpected!("build volume `{}` does not exist yet", volume.name)
                })?;
                Ok(store.volume_dir(&id))
            }
            (VolumeKind::Cache | VolumeKind::Output, VolumeSource::Path(path)) => {
                check_mounted(path, &volume.name)?;
                check_directory(path, &volume.name)?;
                made_for_caller(path, spec)?;
                Ok(path.clone())
            }
            (VolumeKind::Cache, _) => cache_directory(store, spec, &volume.name),
            (VolumeKind::Output, VolumeSource::Store) => {
                made(output_directory(store, env.name(), &volume.name), spec)
            }
            (VolumeKind::Source, VolumeSource::Git(_)) => {
                let up = env.known_record()?.up_command();
                let found = self.sources.get(&volume.name).filter(|path| path.exists());
                found.cloned().ok_or_else(|| {
                    not_found!("source `{}` is missing from the store", volume.name).help(up)
                })
            }
            (VolumeKind::Source | VolumeKind::Host, VolumeSource::Path(path)) => {
                existing(path, volume)
            }
            (kind @ (VolumeKind::Output | VolumeKind::Host), VolumeSource::Git(_))
            | (kind @ (VolumeKind::Source | VolumeKind::Host), VolumeSource::Store) => {
                Err(invalid!(
                    "volume `{}` of kind {kind:?} names no directory",
                    volume.name
                ))
            }
        }
    }
}

/// Makes missing mount points of volumes in the user's directories with the caller's rights. The engine makes the
/// others, as root. Refuses those that no engine can make.
fn make_mount_points(volumes: &[&Volume], binds: &[Bind], views: &Views) -> Result<()> {
    let mounted = volumes.iter().zip(binds);
    for (inner, bind) in mounted.clone() {
        let target = Path::new(&inner.target);
        let around = mounted.clone().filter_map(|(outer, around)| {
            let below = target.strip_prefix(&outer.target).ok()?;
            (outer.name != inner.name).then_some((outer, around, below))
        });
        let around = around.max_by_key(|(outer, ..)| outer.target.len());
        let Some((outer, around, below)) = around else {
            continue;
        };
        if views.contains_key(&outer.name) || !is_missing(&around.source, below) {
            continue;
        }
        let place = around.source.join(below);
        let is_directory = bind.source.is_dir();
        if around.read_only {
            let (inner, outer, below) = (&inner.name, &outer.name, below.display());
            let (kind, make) = match is_directory {
                true => ("directory", "mkdir -p"),
                false => ("file", "touch"),
            };
            return Err(invalid!(
                "volume `{inner}` is in `{below}` of volume `{outer}`, which is read-only and has no such {kind}"
            )
            .help(format!("{make} {}", quoted_path(&place))));
        }
        let rights = account::caller();
        if matches!(outer.source, VolumeSource::Path(_)) && !matches!(rights, Rights::Own) {
            // The engine makes it where the caller may not write.
            drop(make_mount_point(rights, &place, is_directory));
        }
    }
    Ok(())
}

/// Makes a directory, or an empty file, and the directories on the way.
fn make_mount_point(rights: &Rights, place: &Path, is_directory: bool) -> Result<()> {
    if is_directory {
        return account::make_directories(rights, place);
    }
    if let Some(parent) = place.parent() {
        account::make_directories(rights, parent)?;
    }
    FilePlace::new(rights, place)?.append().map(drop)
}

/// Returns whether an entry below a directory is missing, and no link is on the way.
fn is_missing(directory: &Path, below: &Path) -> bool {
    let mut at = directory.to_owned();
    for part in below {
        at.push(part);
        match fs::symlink_metadata(&at) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return false,
            Err(error) => return error.kind() == ErrorKind::NotFound,
        }
    }
    false
}

/// Returns a digest of the inputs of an `exec` or `shell` container on this machine outside its env: the directories of
/// its volumes, the mounts inside them, the program, hosts and name servers, the certificates, and `settings`.
///
/// A directory that was removed and created again counts as changed, because the container has the old one.
pub(crate) fn inputs_digest(
    env: &EnvName,
    store: &Store,
    spec: &Spec,
    host: &Host,
    settings: &impl Serialize,
) -> Result<String> {
    let sources = source::directories(store, spec);
    let mounted = mounts::mounted()?;
    let volumes = spec.volumes.iter().map(|volume| {
        let path = match (volume.kind, &volume.source) {
            // Replaced only under the env's lock, which the container's holder has.
            (VolumeKind::Build, _) => None,
            (_, VolumeSource::Path(path)) => Some(path.clone()),
            (_, VolumeSource::Git(_)) => sources.get(&volume.name).cloned(),
            (VolumeKind::Cache, VolumeSource::Store) => Some(store.cache_dir(&volume.name)),
            (_, VolumeSource::Store) => Some(output_directory(store, env, &volume.name)),
        };
        // The mount table has no symlinks.
        let path = fs::canonicalize(path?).ok()?;
        let found = fs::metadata(&path).ok()?;
        let inside = mounted.iter().filter(|(point, _)| point.starts_with(&path));
        let inside = inside.map(|(point, what)| (point.to_string_lossy(), what));
        Some((found.dev(), found.ino(), inside.collect::<Vec<_>>()))
    });
    // They may also be rewritten in place. Docker and Podman copy `/etc/hosts` into a container when it starts.
    let files = [
        host.program.as_path(),
        Path::new("/etc/hosts"),
        Path::new("/etc/resolv.conf"),
    ];
    let files = files.map(|path| {
        let found = fs::metadata(path).ok();
        found.map(|found| (found.dev(), found.ino(), found.ctime(), found.ctime_nsec()))
    });
    let volumes: Vec<_> = volumes.collect();
    let authorities = ContainerAuthorities::new(false, None)?;
    let all = (volumes, files, authorities, settings);
    let text = encoded(serde_json::to_vec(&all), "a container")?;
    Ok(hex::encode(Sha256::digest(text)))
}

fn output_directory(store: &Store, env: &EnvName, name: &str) -> PathBuf {
    store.root().join("outputs").join(env).join(name)
}

/// Returns the directory of a cache, and creates it if it is missing.
pub(crate) fn cache_directory(store: &Store, spec: &Spec, name: &str) -> Result<PathBuf> {
    made(store.cache_dir(name), spec)
}

/// Creates a directory for the build user.
fn made(path: PathBuf, spec: &Spec) -> Result<PathBuf> {
    tree::create_directory_for(&path, spec.user.uid, spec.user.gid)?;
    Ok(path)
}

/// Creates a directory for the build user at a path from a profile. If users other than root can change the path, uses
/// the caller's rights. Checks whether the directory exists only afterwards, so that the answer cannot affect which
/// rights are used.
fn made_for_caller(path: &Path, spec: &Spec) -> Result<()> {
    let rights = account::caller();
    let person = match rights {
        Rights::Of(person, _) if !only_root_changes(path) => person,
        Rights::Own | Rights::Of(..) => {
            return tree::create_directory_for(path, spec.user.uid, spec.user.gid);
        }
    };
    if path.exists() {
        return Ok(());
    }
    account::make_directories(rights, path).map_err(Error::of_profile)?;
    let flags = OFlag::O_DIRECTORY | OFlag::O_RDONLY;
    let cannot = || format!("cannot make `{}`", path.display());
    let made = rights.open_named(path, flags).context(cannot)?;
    let found = fstat(&made).context(cannot)?;
    // By now, another directory may be at this path: only one of the caller's is given away. A directory that keeps its
    // owner is not touched, because on NFS even that fails for root.
    if found.st_uid == person.uid && spec.user.uid != person.uid {
        // With the set-group-ID bit, the directory keeps its parent's group, which may be a team's.
        let gid = (found.st_mode & 0o2000 == 0).then(|| spec.user.gid.into());
        fchown(&made, Some(spec.user.uid.into()), gid).context(cannot)?;
    }
    Ok(())
}

/// Returns whether only root can put a symlink or another directory on the path to a missing directory.
fn only_root_changes(path: &Path) -> bool {
    let mut is_next_there = false;
    for directory in path.ancestors().skip(1) {
        let found = match fs::symlink_metadata(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(_) => return false,
            Ok(found) => found,
        };
        // In a sticky directory such as `/tmp`, other users cannot replace root's entries.
        let is_sticky = is_next_there && found.mode() & 0o1000 != 0;
        if !found.is_dir() || found.uid() != 0 || found.mode() & 0o022 != 0 && !is_sticky {
            return false;
        }
        is_next_there = true;
    }
    true
}

/// Returns a user's directory, which is never created: a wrong path would silently become an empty mount.
fn existing(path: &Path, volume: &Volume) -> Result<PathBuf> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() || found.is_file() => Ok(fs::canonicalize(path)?),
        Ok(_) => Err(invalid!(
            "volume `{}`: `{}` is neither a directory nor a file",
            volume.name,
            path.display()
        )),
        Err(error) => Err(
            invalid!("volume `{}` has no directory to mount", volume.name)
                .source(error)
                .help(format!("mkdir -p {}", quoted_path(path))),
        ),
    }
}

/// Removes the directories that existed only while the container ran.
pub(crate) fn clean(store: &Store, run: &Path) -> Result<()> {
    TEMPORARY
        .iter()
        .try_for_each(|(name, _)| discard(store, &run.join(name)))
}

/// Removes the directory of a container that is gone, with its files.
pub(super) fn discard(store: &Store, directory: &Path) -> Result<()> {
    // The directory is usually empty, so it need not pass through the trash.
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => store.discard(directory),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_that_no_engine_can_make_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path();
        let volume = |target: &str| Volume {
            name: target.replace('/', ""),
            kind: VolumeKind::Host,
            target: target.to_owned(),
            access: Access::Ro,
            max: None,
            locked: false,
            disk: None,
            source: VolumeSource::Path(top.to_owned()),
        };
        let (outer, inner) = (volume("/v"), volume("/v/a/b"));
        let volumes = [&outer, &inner];
        let check = |outside: fn(PathBuf, String) -> Bind| {
            let binds = volumes.map(|volume| outside(top.to_owned(), volume.target.clone()));
            make_mount_points(&volumes, &binds, &Views::new())
        };
        let error = check(Bind::read_only).unwrap_err();
        assert_has!(
            error.message(),
            "volume `vab` is in `a/b` of volume `v`, which is read-only"
        );
        check(Bind::writable).unwrap();
        let file = top.join("file");
        fs::write(&file, "").unwrap();
        let binds = [Bind::read_only(top, "/v"), Bind::read_only(file, "/v/a/b")];
        let error = make_mount_points(&volumes, &binds, &Views::new()).unwrap_err();
        assert_has!(error.message(), "has no such file");
        fs::create_dir_all(top.join("a/b")).unwrap();
        check(Bind::read_only).unwrap();
    }
}
