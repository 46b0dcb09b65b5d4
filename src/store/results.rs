//! Owns what steps leave in output volumes, which are part of no snapshot: the layer of a step has a copy of it,
//! `results/<volume>`, and every env that stands on the layer gets it.
//!
//! Whatever else is in an output directory is somebody's. A link is neither kept nor followed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::Store;
use crate::error::Result;
use crate::export;
use crate::spec::{Spec, Volume, VolumeKind, VolumeSource};

/// What tells that a file was written to: inode, size, change time.
type Mark = (u64, u64, i64, i64);

/// The files of an output directory at one time.
#[derive(Debug, Default)]
pub struct Marks(BTreeMap<PathBuf, Mark>);

impl Marks {
    /// Reads those of a directory; one that is not there has none.
    pub fn of(directory: &Path) -> Result<Self> {
        let mut marks = Self::default();
        marks.read(directory, Path::new(""))?;
        Ok(marks)
    }

    fn read(&mut self, directory: &Path, below: &Path) -> Result<()> {
        let entries = match fs::read_dir(directory.join(below)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            let (path, kind) = (below.join(entry.file_name()), entry.file_type()?);
            if kind.is_dir() {
                self.read(directory, &path)?;
            } else if kind.is_file() {
                let found = entry.metadata()?;
                let mark = (found.ino(), found.size(), found.ctime(), found.ctime_nsec());
                self.0.insert(path, mark);
            }
        }
        Ok(())
    }

    /// Returns the files that are new since, or were written to.
    fn since(self, before: &Self) -> impl Iterator<Item = PathBuf> {
        let changed = self
            .0
            .into_iter()
            .filter(|(path, mark)| before.0.get(path) != Some(mark));
        changed.map(|(path, _)| path)
    }
}

/// A result that could not be put where it belongs: another file is there.
#[derive(Debug)]
pub struct InTheWay {
    /// The output volume.
    pub volume: String,
    /// The file that is there.
    pub path: PathBuf,
    /// The step whose result it is not.
    pub step: String,
}

/// What is to be done about results that are not in an env's output.
#[derive(Debug, Default)]
pub struct Bringing {
    /// Files to write: the output directory, the path below it, the layer's directory that has it.
    files: Vec<(PathBuf, PathBuf, PathBuf)>,
    /// Those that cannot be.
    pub in_the_way: Vec<InTheWay>,
}

impl Bringing {
    /// Returns the layers that have what is to be written.
    pub fn layers(&self) -> BTreeSet<String> {
        let kept = self.files.iter().map(|(_, _, kept)| layer_of(kept));
        kept.map(|id| id.to_string_lossy().into_owned()).collect()
    }
}

/// Returns the output volumes of an env.
pub fn outputs(spec: &Spec) -> impl Iterator<Item = &Volume> {
    let volumes = spec.volumes.iter();
    volumes.filter(|volume| volume.kind == VolumeKind::Output)
}

impl Store {
    /// Returns the directory of an output volume.
    pub fn output_dir(&self, env: &str, volume: &Volume) -> PathBuf {
        match &volume.source {
            VolumeSource::Path(path) => path.clone(),
            _ => self.root.join("outputs").join(env).join(&volume.name),
        }
    }

    /// Returns where a layer has its step's results of an output volume.
    pub fn results_dir(&self, layer: &str, volume: &str) -> PathBuf {
        self.layer_dir(layer).join("results").join(volume)
    }

    /// Returns the results of the steps up to a layer, by output volume and path, with the layer that has them: of a file that several
    /// steps wrote, the last one's.
    pub fn results(
        &self,
        top: &str,
        spec: &Spec,
    ) -> Result<BTreeMap<String, BTreeMap<PathBuf, PathBuf>>> {
        let chain = self.chain(top)?;
        let mut found = BTreeMap::new();
        for volume in outputs(spec) {
            let mut of_volume = BTreeMap::new();
            for layer in chain.iter().rev() {
                let kept = self.results_dir(&layer.id, &volume.name);
                let files = Marks::of(&kept)?.0.into_keys();
                of_volume.extend(files.map(|path| (path, kept.clone())));
            }
            found.insert(volume.name.clone(), of_volume);
        }
        Ok(found)
    }

    /// Decides which results of the steps up to a layer go to the env's output. A file in the place of one is replaced if one
    /// of `known`, layers of the same env, has it; else it is in the way.
    pub fn results_to_bring(&self, top: &str, spec: &Spec, known: &[String]) -> Result<Bringing> {
        let mut bringing = Bringing::default();
        for (volume, files) in self.results(top, spec)? {
            let Some(volume) = spec.volume(&volume) else {
                continue;
            };
            let directory = self.output_dir(&spec.name, volume);
            for (path, kept) in files {
                if is_there(&directory.join(&path)) {
                    if is_same(&kept, &directory, &path)? {
                        continue;
                    }
                    let ours = known.iter().map(|id| self.results_dir(id, &volume.name));
                    let mut ours = ours.filter(|ours| is_there(&ours.join(&path)));
                    if export::open(&directory, &path).is_err()
                        || !ours.any(|ours| is_same(&ours, &directory, &path).unwrap_or(false))
                    {
                        bringing.in_the_way.push(InTheWay {
                            volume: volume.name.clone(),
                            step: self.title_of(&kept),
                            path,
                        });
                        continue;
                    }
                }
                bringing.files.push((directory.clone(), path, kept));
            }
        }
        Ok(bringing)
    }

    /// Puts results where they belong.
    pub fn bring_results(&self, bringing: Bringing, spec: &Spec) -> Result<()> {
        for (directory, path, kept) in bringing.files {
            let mut owner = Some((spec.user.uid, spec.user.gid));
            if directory.exists() {
                owner = export::owner(&directory)?;
            } else {
                fs::create_dir_all(&directory)?;
                owner = export::owner(&directory)?.and(owner);
                export::give(fs::File::open(&directory)?.file(), owner)?;
            }
            // A link on the way is none of rockenv's: then it is an error that something is in the way.
            if export::open(&directory, &path).is_ok() {
                fs::remove_file(directory.join(&path))?;
            }
            export::put_copy(&kept, &path, &directory, owner)?;
        }
        Ok(())
    }

    fn title_of(&self, kept: &Path) -> String {
        let layer = self.layer(&layer_of(kept).to_string_lossy()).ok().flatten();
        layer.map(|layer| layer.title).unwrap_or_default()
    }
}

/// Copies what was written since `before` to the results of a layer that is being made.
pub fn keep(before: &Marks, directory: &Path, into: &Path) -> Result<()> {
    for path in Marks::of(directory)?.since(before) {
        fs::create_dir_all(into)?;
        export::put_copy(directory, &path, into, None)?;
    }
    Ok(())
}

/// Returns the layer whose results a directory has.
fn layer_of(kept: &Path) -> &OsStr {
    let layer = kept.parent().and_then(Path::parent);
    layer.and_then(Path::file_name).unwrap_or_default()
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Says whether a result is the same below two directories.
pub fn is_same(kept: &Path, directory: &Path, path: &Path) -> Result<bool> {
    let Ok(there) = fs::symlink_metadata(directory.join(path)) else {
        return Ok(false);
    };
    let own = fs::symlink_metadata(kept.join(path))?;
    if !there.is_file() || own.len() != there.len() {
        return Ok(false);
    }
    let written = |found: &std::fs::Metadata| (found.mtime(), found.mtime_nsec());
    if written(&own) == written(&there) {
        return Ok(true);
    }
    Ok(export::digest(kept, path)? == export::digest(directory, path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_wrote_is_kept_and_nothing_else() {
        let (out, into) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (out, into) = (out.path(), into.path().join("results/out"));
        fs::create_dir(out.join("sub")).unwrap();
        for name in ["old", "rewritten", "sub/gone"] {
            fs::write(out.join(name), "before").unwrap();
        }
        let before = Marks::of(out).unwrap();
        keep(&before, out, &into).unwrap();
        assert!(!into.exists());
        fs::remove_file(out.join("rewritten")).unwrap();
        fs::write(out.join("rewritten"), "after").unwrap();
        fs::remove_file(out.join("sub/gone")).unwrap();
        fs::write(out.join("sub/new"), "after").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", out.join("link")).unwrap();
        keep(&before, out, &into).unwrap();
        let kept: Vec<PathBuf> = Marks::of(&into).unwrap().0.into_keys().collect();
        assert_eq!(kept, [Path::new("rewritten"), Path::new("sub/new")]);
        assert!(is_same(&into, out, Path::new("sub/new")).unwrap());
        fs::write(out.join("sub/new"), "other").unwrap();
        assert!(!is_same(&into, out, Path::new("sub/new")).unwrap());
        assert!(!is_same(&into, out, Path::new("link")).unwrap_or(false));
    }
}
