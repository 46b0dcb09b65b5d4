//! Owns interpreting volumes: which keys belong to which kind, and where they may be mounted.

use std::collections::BTreeMap;

use super::{Check, Volumes, place, values};
use crate::profile::diagnostics::Problem;
use crate::profile::file::{self, VolumeKind};
use crate::profile::structure::shorten;
use crate::profile::value::{self, Refused};
use crate::profile::{Downloads, Volume, VolumeSource};

impl Check<'_> {
    pub(super) fn volumes(&mut self, written: Vec<file::Volume>, steps: &[file::Step]) -> Volumes {
        let kind = |volume: &file::Volume| volume.kind.as_ref().map(|kind| kind.value);
        let sources = written.iter();
        let sources = sources.filter(|volume| kind(volume) == Some(VolumeKind::Source));
        let sources: Vec<String> = sources.map(|volume| volume.name.value.clone()).collect();
        let mut targets: BTreeMap<String, String> = BTreeMap::new();
        let mut volumes = Volumes::new();
        for volume in written {
            let name = &volume.name;
            let handle = (name.clone(), kind(&volume));
            if let Some(target) = &volume.target
                && let Some(other) = targets.insert(target.value.clone(), name.value.clone())
            {
                let (other, own) = (shorten(&other), shorten(name));
                let message = format!("volumes `{other}` and `{own}` have the same target");
                self.push(&target.place, message, "already taken");
            }
            volumes.push((handle, self.volume(volume, &sources, steps)));
        }
        volumes
    }

    fn downloads(
        &mut self,
        volume: &mut file::Volume,
        sources: &[String],
        steps: &[file::Step],
    ) -> Option<Downloads> {
        let (source, needed_by) = (volume.downloads.take(), volume.needed_by.take());
        // An extending profile removes inherited downloads with an empty name.
        if source.as_ref().is_some_and(|source| source.is_empty()) {
            return None;
        }
        self.needed_by(needed_by.as_deref(), steps);
        let first = needed_by.iter().flatten().next();
        if let (None, Some(first)) = (&source, first) {
            let message = "`needed-by` is for a volume with `downloads`";
            self.missing(Problem::new(&first.place, message, "here"));
        }
        let source = source?;
        if !sources.contains(&source.value) {
            let sources = sources.iter().map(String::as_str);
            self.unknown("volume of kind `source` called", &source, sources);
        }
        Some(Downloads {
            source: source.value,
            needed_by: needed_by.map(values),
        })
    }

    fn volume(
        &mut self,
        mut volume: file::Volume,
        sources: &[String],
        steps: &[file::Step],
    ) -> Option<Volume> {
        self.refuse_keys_of_other_kinds(&volume);
        let downloads = self.downloads(&mut volume, sources, steps);
        let named = self.name("volume", &volume.name);
        let shown = shorten(&volume.name);
        let target = match &volume.target {
            Some(target) => self
                .fixed("target", target, value::mount_point)
                .then(|| target.value.clone()),
            None => {
                let message = format!("volume `{shown}` has no `target`");
                self.missing(Problem::new(&volume.name.place, message, "this one"));
                None
            }
        };
        let Some(kind) = volume.kind.as_ref().map(|kind| kind.value) else {
            let message = format!("volume `{shown}` has no `kind`");
            let problem = Problem::new(&volume.name.place, message, "this one");
            let help = "one of `source`, `build`, `cache`, `output`, `host`";
            self.missing(problem.help(help));
            return None;
        };
        self.refuse_disk_of_host(kind, &volume);
        let max = self.size(volume.max.take());
        let disk = self.size(volume.disk.take());
        let source = self.volume_source(kind, &mut volume)?;
        named.then_some(Volume {
            name: volume.name.value,
            kind,
            target: target?,
            source,
            max,
            locked: volume.locked.is_some_and(|at| at.value),
            downloads,
            disk,
            access: volume.access.map_or(kind.default_access(), |at| at.value),
        })
    }

    fn refuse_keys_of_other_kinds(&mut self, volume: &file::Volume) {
        let Some(kind) = &volume.kind else { return };
        if kind.value != VolumeKind::Cache {
            let caches_only = [
                ("max", place(volume.max.as_ref())),
                ("locked", place(volume.locked.as_ref())),
                ("downloads", place(volume.downloads.as_ref())),
            ];
            self.only_for("a volume of kind `cache`", caches_only);
        }
        if volume.git.is_none() {
            let git_only = [
                ("rev", place(volume.rev.as_ref())),
                ("depth", place(volume.depth.as_ref())),
                ("submodules", place(volume.submodules.as_ref())),
            ];
            self.only_for("a volume with `git`", git_only);
        }
    }

    /// Refuses `disk` for a directory that rockenv does not fill. A `disk` from an extended file is for that file's
    /// `git`.
    fn refuse_disk_of_host(&mut self, kind: VolumeKind, volume: &file::Volume) {
        let (VolumeKind::Source | VolumeKind::Host, Some(disk), Some(path)) =
            (kind, &volume.disk, &volume.path)
        else {
            return;
        };
        if self.sources.file(&disk.place).start == self.sources.file(&path.place).start {
            let message = "`disk` has no effect on a `source` or `host` volume with `path`";
            let help = "`disk` in [resources] is what `up` requires in the store";
            self.push_help(&disk.place, message, "remove it", help);
        }
    }

    /// Returns where the files of a volume are.
    fn volume_source(
        &mut self,
        kind: VolumeKind,
        volume: &mut file::Volume,
    ) -> Option<VolumeSource> {
        if let Some(path) = &volume.path {
            self.expandable(path, host_path);
        }
        if let Some(git) = &volume.git {
            self.expandable(git, value::git_url);
        }
        if let Some(rev) = &volume.rev {
            self.expandable(rev, value::git_rev);
        }
        let depth = self.positive("depth", volume.depth.take());
        let shown = shorten(&volume.name);
        match (kind, volume.path.take(), volume.git.take()) {
            (VolumeKind::Source, None, Some(url)) => Some(VolumeSource::Git {
                url,
                rev: volume.rev.take(),
                depth,
                submodules: volume.submodules.as_ref().is_some_and(|at| at.value),
            }),
            (VolumeKind::Source | VolumeKind::Output | VolumeKind::Host, Some(path), None) => {
                Some(VolumeSource::Path(path))
            }
            (VolumeKind::Build | VolumeKind::Cache | VolumeKind::Output, None, None) => {
                Some(VolumeSource::Store)
            }
            (VolumeKind::Source, Some(_), Some(git)) => {
                let message = "a source has either `path` or `git`, not both";
                self.push(&git.place, message, "second one");
                None
            }
            (VolumeKind::Source, None, None) => {
                let message = format!("source `{shown}` has neither `path` nor `git`");
                self.missing(Problem::new(&volume.name.place, message, "this one"));
                None
            }
            (VolumeKind::Host, None, None) => {
                let message = format!("host volume `{shown}` has no `path`");
                self.missing(Problem::new(&volume.name.place, message, "this one"));
                None
            }
            (
                VolumeKind::Build | VolumeKind::Cache | VolumeKind::Output | VolumeKind::Host,
                _,
                Some(git),
            ) => {
                self.push(&git.place, "`git` is for a volume of kind `source`", "here");
                None
            }
            (VolumeKind::Build | VolumeKind::Cache, Some(path), None) => {
                let help = "rockenv keeps this kind in its store; a directory of your own is `kind = \"host\"`";
                let message = "`path` is for volumes of kind `source`, `output` and `host`";
                self.push_help(&path.place, message, "here", help);
                None
            }
        }
    }
}

pub(crate) fn host_path(text: &str) -> Result<(), Refused> {
    let refuse = |message: &str| {
        let help = "an absolute path, `~/...`, or one relative to the profile's file";
        Err(Refused::new(format!("{message}: `{}`", shorten(text))).help(help))
    };
    match text {
        "" => refuse("an empty path"),
        _ if text.len() > 4095 => refuse("a path longer than 4095 bytes"),
        _ if text.starts_with('~') && text != "~" && !text.starts_with("~/") => {
            refuse("another user's home")
        }
        _ => Ok(()),
    }
}
