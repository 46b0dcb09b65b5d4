//! Owns the meaning of volumes: which keys go with which kind, and where they may be mounted.

use std::collections::BTreeMap;

use super::{Check, Volumes, positive};
use crate::profile::file::{Access, VolumeKind};
use crate::profile::merge::{StepDraft, VolumeDraft};
use crate::profile::shape::shorten;
use crate::profile::value::{self, Refused};
use crate::profile::{Downloads, Volume, VolumeSource};

impl Check<'_> {
    pub(super) fn volumes(&mut self, drafts: Vec<VolumeDraft>, steps: &[StepDraft]) -> Volumes {
        let is_source = |draft: &&VolumeDraft| {
            let kind = draft.kind.as_ref();
            kind.is_some_and(|kind| kind.value == VolumeKind::Source)
        };
        let sources = drafts.iter().filter(is_source);
        let sources: Vec<String> = sources.map(|draft| draft.name.value.clone()).collect();
        let mut targets: BTreeMap<String, String> = BTreeMap::new();
        let mut volumes = Volumes::new();
        for draft in drafts {
            let handle = (
                draft.name.clone(),
                draft.kind.as_ref().map(|kind| kind.value),
            );
            if let Some(target) = &draft.target
                && let Some(other) = targets.insert(target.value.clone(), draft.name.value.clone())
            {
                let message = format!(
                    "volumes `{}` and `{}` have one target",
                    shorten(&other),
                    shorten(&draft.name)
                );
                self.push(&target.place, message, "already taken", None);
            }
            let downloads = self.downloads(&draft, &sources, steps);
            let volume = self.volume(draft).map(|volume| Volume {
                downloads,
                ..volume
            });
            volumes.push((handle, volume));
        }
        volumes
    }

    fn downloads(
        &mut self,
        draft: &VolumeDraft,
        sources: &[String],
        steps: &[StepDraft],
    ) -> Option<Downloads> {
        if let Some(names) = &draft.needed_by {
            self.needed_by(names, steps);
            if let (None, Some(first)) = (&draft.downloads, names.first()) {
                let message = "`needed-by` of a volume is for one with `downloads`";
                self.push(&first.place, message, "here", None);
            }
        }
        let source = draft.downloads.as_ref()?;
        if !sources.contains(&source.value) {
            let sources = sources.iter().map(String::as_str);
            self.unknown("volume of kind `source` called", source, sources);
        }
        let names = draft.needed_by.as_ref();
        Some(Downloads {
            source: source.value.clone(),
            needed_by: names.map(|names| names.iter().map(|name| name.value.clone()).collect()),
        })
    }

    fn volume(&mut self, draft: VolumeDraft) -> Option<Volume> {
        let named = self.name("volume", &draft.name);
        let shown = shorten(&draft.name);
        let target = match &draft.target {
            Some(target) => self
                .fixed("target", target, value::destination)
                .then(|| target.value.clone()),
            None => {
                self.push(
                    &draft.name.place,
                    format!("volume `{shown}` has no `target`"),
                    "this one",
                    None,
                );
                None
            }
        };
        let Some(kind) = &draft.kind else {
            let help = "one of `source`, `build`, `cache`, `output`, `host`".to_owned();
            self.push(
                &draft.name.place,
                format!("volume `{shown}` has no `kind`"),
                "this one",
                Some(help),
            );
            return None;
        };
        let kind = kind.value;
        let max = self.parsed(draft.max.clone(), positive);
        let disk = self.parsed(draft.disk, positive);
        let caches_only = [
            ("max", draft.max.as_ref().map(|at| &at.place)),
            ("locked", draft.locked.as_ref().map(|at| &at.place)),
            ("downloads", draft.downloads.as_ref().map(|at| &at.place)),
        ];
        for (key, place) in caches_only {
            if let Some(place) = place.filter(|_| kind != VolumeKind::Cache) {
                self.push(
                    place,
                    format!("`{key}` is for a volume of kind `cache`"),
                    "here",
                    None,
                );
            }
        }
        let git_only = [
            ("rev", draft.rev.as_ref().map(|at| &at.place)),
            ("depth", draft.depth.as_ref().map(|at| &at.place)),
            ("submodules", draft.submodules.as_ref().map(|at| &at.place)),
        ];
        if draft.git.is_none() {
            for (key, place) in git_only {
                if let Some(place) = place {
                    self.push(
                        place,
                        format!("`{key}` is for a volume with `git`"),
                        "here",
                        None,
                    );
                }
            }
        }
        if let Some(path) = &draft.path {
            self.expandable(path, host_path);
        }
        if let Some(git) = &draft.git {
            self.expandable(git, value::git_url);
        }
        if let Some(rev) = &draft.rev {
            self.expandable(rev, value::git_rev);
        }
        let depth = self.positive("depth", draft.depth);
        let source = match (kind, draft.path, draft.git) {
            (VolumeKind::Source, None, Some(url)) => VolumeSource::Git {
                url,
                rev: draft.rev,
                depth,
                submodules: draft.submodules.is_some_and(|at| at.value),
            },
            (VolumeKind::Source | VolumeKind::Output | VolumeKind::Host, Some(path), None) => {
                VolumeSource::Path(path)
            }
            (VolumeKind::Build | VolumeKind::Cache | VolumeKind::Output, None, None) => {
                VolumeSource::Store
            }
            (VolumeKind::Source, Some(_), Some(git)) => {
                self.push(
                    &git.place,
                    "a source has a `path` or a `git`, not both",
                    "second one",
                    None,
                );
                return None;
            }
            (VolumeKind::Source, None, None) => {
                let message = format!("source `{shown}` has neither `path` nor `git`");
                self.push(&draft.name.place, message, "this one", None);
                return None;
            }
            (VolumeKind::Host, None, None) => {
                self.push(
                    &draft.name.place,
                    format!("host volume `{shown}` has no `path`"),
                    "this one",
                    None,
                );
                return None;
            }
            (_, _, Some(git)) => {
                self.push(
                    &git.place,
                    "`git` is for a volume of kind `source`",
                    "here",
                    None,
                );
                return None;
            }
            (_, Some(path), None) => {
                let help = "rockenv keeps this kind in its store; a directory of your own is `kind = \"host\"`".to_owned();
                let message = "`path` is for volumes of kind `source`, `output` and `host`";
                self.push(&path.place, message, "here", Some(help));
                return None;
            }
        };
        let default = match kind {
            VolumeKind::Host => Access::Ro,
            _ => Access::Rw,
        };
        named.then_some(Volume {
            name: draft.name.value,
            kind,
            target: target?,
            source,
            max,
            locked: draft.locked.is_some_and(|at| at.value),
            downloads: None,
            disk,
            access: draft.access.map_or(default, |at| at.value),
        })
    }
}

/// Checks a directory of the host.
pub(crate) fn host_path(text: &str) -> Result<(), Refused> {
    let refuse = |message: &str| {
        Err(Refused {
            message: format!("{message}: `{}`", shorten(text)),
            help: Some(
                "an absolute path, `~/...`, or one relative to the profile's file".to_owned(),
            ),
        })
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
