//! Owns the meaning of steps: one action each, with the keys that belong to it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{Check, Volumes};
use crate::profile::file::{User, VolumeKind};
use crate::profile::merge::{ActionDraft, CopyDraft, StepDraft, WhenDraft};
use crate::profile::report::At;
use crate::profile::shape::shorten;
use crate::profile::text::Late;
use crate::profile::{
    Action, Choice, CopyItem, ExportItem, FROM_SOURCE, Fingerprints, Published, Step, When, input,
    value,
};
use crate::rocm::target::{self, Target};
use crate::sys::suggest;

/// Variants, and ways of `--from`, that a `when` can name.
pub(super) type Choices<'a> = (&'a BTreeMap<String, Choice>, &'a BTreeMap<String, Choice>);

const SHELL: [&str; 3] = ["/bin/sh", "-eu", "-c"];

impl Check<'_> {
    pub(super) fn needed_by(
        &mut self,
        names: &[At<String>],
        steps: &[StepDraft],
    ) -> BTreeSet<String> {
        for name in names {
            if !steps.iter().any(|step| step.name == *name) {
                let known = steps.iter().map(|step| step.name.as_str());
                self.unknown("step", name, known);
            }
        }
        names.iter().map(|name| name.value.clone()).collect()
    }

    pub(super) fn step(
        &mut self,
        draft: StepDraft,
        volumes: &Volumes,
        needed_by: &BTreeSet<String>,
        choices: Choices<'_>,
    ) -> Option<Step> {
        self.name("step", &draft.name);
        let gpu = draft.gpu.as_ref().is_some_and(|gpu| gpu.value)
            || needed_by.contains(&draft.name.value);
        let when = self.when(&draft.when, choices);
        let published = draft.published.map(|draft| Published {
            time: self.parsed(draft.time, value::duration),
            disk: self.parsed(draft.disk, value::size),
            source: draft.source.value,
        });
        let timeout = self.parsed(draft.timeout, value::duration);
        let memory = self.parsed(draft.memory, super::positive);
        let inputs = self.inputs(draft.inputs, volumes);
        let fingerprints = draft
            .fingerprints
            .and_then(|at| self.fingerprints(&at, volumes));
        let env = self.env(draft.env, Late::Keep);
        let Some(action) = draft.action else {
            let message = format!("step `{}` does nothing", shorten(&draft.name));
            let help = "one of `run`, `packages`, `copy`, `export`".to_owned();
            self.push(&draft.name.place, message, "this one", Some(help));
            return None;
        };
        if !matches!(action, ActionDraft::Run(_)) {
            let shell = draft.shell.as_ref().map(|at| ("shell", &at.place));
            let workdir = draft.workdir.as_ref().map(|at| ("workdir", &at.place));
            for (key, place) in shell.into_iter().chain(workdir) {
                self.push(
                    place,
                    format!("`{key}` is for a step with `run`"),
                    "here",
                    None,
                );
            }
        }
        if let Some(workdir) = &draft.workdir {
            self.expandable(workdir, value::inside);
        }
        let mut user = draft.user.as_ref().map_or(User::Builder, |user| user.value);
        if let ActionDraft::Packages(_) = action {
            if let Some(given) = draft.user.filter(|_| user == User::Builder) {
                self.push(
                    &given.place,
                    "packages are installed by root",
                    "leave it out",
                    None,
                );
            }
            user = User::Root;
        }
        let action = self.action(&draft.name, action, draft.shell, volumes);
        Some(Step {
            name: draft.name.value,
            action,
            user,
            workdir: draft.workdir,
            network: draft.network.is_none_or(|network| network.value),
            timeout,
            memory,
            inputs,
            fingerprints,
            stages: draft.stages.into_iter().map(|at| at.value).collect(),
            incremental: draft
                .incremental
                .is_some_and(|incremental| incremental.value),
            env,
            gpu,
            when,
            published,
        })
    }

    fn action(
        &mut self,
        step: &At<String>,
        draft: ActionDraft,
        shell: Option<At<Vec<At<String>>>>,
        volumes: &Volumes,
    ) -> Action {
        let empty = match &draft {
            ActionDraft::Run(script) => script.trim().is_empty(),
            ActionDraft::Packages(list) => list.is_empty(),
            ActionDraft::Copy(list) | ActionDraft::Export(list) => list.is_empty(),
        };
        if empty {
            let message = format!("step `{}` has nothing to do", shorten(step));
            self.push(&step.place, message, "its action is empty", None);
        }
        match draft {
            ActionDraft::Run(script) => {
                self.text(&script, Late::Keep);
                let shell = self.shell(shell);
                Action::Run { script, shell }
            }
            ActionDraft::Packages(packages) => {
                for package in &packages {
                    self.expandable(package, value::package);
                }
                Action::Packages(packages)
            }
            ActionDraft::Copy(items) => {
                Action::Copy(items.into_iter().map(|item| self.copy(item)).collect())
            }
            ActionDraft::Export(items) => Action::Export(
                items
                    .into_iter()
                    .map(|item| self.export(item, volumes))
                    .collect(),
            ),
        }
    }

    fn shell(&mut self, shell: Option<At<Vec<At<String>>>>) -> Vec<String> {
        let Some(shell) = shell else {
            return SHELL.map(str::to_owned).to_vec();
        };
        let place = shell.place;
        let words = shell.value;
        if !words
            .first()
            .is_some_and(|program| program.starts_with('/'))
        {
            let help = "such as [\"/bin/bash\", \"-euo\", \"pipefail\", \"-c\"]".to_owned();
            let message = "a shell starts with the absolute path of a program";
            self.push(&place, message, "here", Some(help));
        }
        for word in &words {
            self.fixed("shell", word, |_| Ok(()));
        }
        words.into_iter().map(|word| word.value).collect()
    }

    fn copy(&mut self, item: CopyDraft) -> CopyItem {
        self.fixed("from", &item.from, value::beside);
        self.expandable(&item.to, value::destination);
        let from = self.sources[item.from.place.source].origin.clone();
        CopyItem {
            beside: from,
            from: item.from,
            to: item.to,
        }
    }

    fn export(&mut self, item: CopyDraft, volumes: &Volumes) -> ExportItem {
        self.expandable(&item.from, value::inside);
        let outputs = || {
            volumes
                .iter()
                .filter(|((_, kind), _)| *kind == Some(VolumeKind::Output))
                .map(|((name, _), _)| name.as_str())
        };
        if !outputs().any(|name| name == item.to.value) {
            self.unknown("volume of kind `output` called", &item.to, outputs());
        }
        ExportItem {
            from: item.from,
            to: item.to.value,
        }
    }

    fn inputs(&mut self, names: Vec<At<String>>, volumes: &Volumes) -> Vec<String> {
        let mut inputs: Vec<String> = Vec::new();
        let sources = || {
            volumes
                .iter()
                .filter(|((_, kind), _)| *kind == Some(VolumeKind::Source))
                .map(|((name, _), _)| name.as_str())
        };
        for name in names {
            let (volume, path) = input(&name);
            if !sources().any(|source| source == volume) {
                self.unknown("volume of kind `source` called", &name, sources());
            } else if name.contains('/')
                && let Err(refused) = value::beside(path)
            {
                self.refused(&name.place, refused);
            }
            inputs.push(name.value);
        }
        // A set: their order is not content.
        inputs.sort_unstable();
        inputs.dedup();
        inputs
    }

    fn fingerprints(&mut self, at: &At<String>, volumes: &Volumes) -> Option<Fingerprints> {
        let found = volumes.iter().find_map(|(_, volume)| {
            let volume = volume.as_ref()?;
            let path = Path::new(&at.value).strip_prefix(&volume.target).ok()?;
            let is_build = volume.kind == VolumeKind::Build;
            is_build.then(|| (volume.name.clone(), path.to_owned()))
        });
        if let Err(refused) = value::inside(at) {
            self.refused(&at.place, refused);
            return None;
        }
        if found.is_none() {
            let message = format!("`{}` is in no volume of kind `build`", shorten(at));
            let help = "TheRock's build directory, such as \"/therock/build\"".to_owned();
            self.push(&at.place, message, "here", Some(help));
        }
        found.map(|(volume, path)| Fingerprints { volume, path })
    }

    pub(super) fn when(&mut self, when: &WhenDraft, (variants, from): Choices<'_>) -> When {
        for family in when.family.iter().flatten() {
            if target::family(family).is_none() {
                self.unknown_family(family);
            }
        }
        let mut targets = Vec::new();
        for name in when.target.iter().flatten() {
            match Target::parse(name) {
                Ok(target) => targets.push(target),
                Err(_) => self.unknown_target(name),
            }
        }
        When {
            family: when
                .family
                .as_ref()
                .map(|names| names.iter().map(|name| name.value.clone()).collect()),
            target: when.target.as_ref().map(|_| targets),
            engine: when.engine.clone(),
            variant: self.chosen("variant", when.variant.as_deref(), variants.keys()),
            from: {
                let source = FROM_SOURCE.to_owned();
                let known = from.keys().chain(std::iter::once(&source));
                self.chosen("way", when.from.as_deref(), known)
            },
        }
    }

    fn chosen<'n>(
        &mut self,
        what: &str,
        names: Option<&[At<String>]>,
        known: impl Iterator<Item = &'n String>,
    ) -> Option<Vec<String>> {
        let known: Vec<&str> = known.map(String::as_str).collect();
        for name in names.into_iter().flatten() {
            if !known.contains(&name.as_str()) {
                self.unknown(what, name, known.iter().copied());
            }
        }
        let chosen = |name: &At<String>| name.value.clone();
        names.map(|names| names.iter().map(chosen).collect())
    }

    fn unknown_family(&mut self, name: &At<String>) {
        let help = match suggest::closest(name, target::families()) {
            Some(close) => format!("did you mean `{close}`?"),
            None => "`rockenv target ls` shows them all".to_owned(),
        };
        self.push(
            &name.place,
            format!("unknown family `{}`", shorten(name)),
            "not in the table",
            Some(help),
        );
    }
}
