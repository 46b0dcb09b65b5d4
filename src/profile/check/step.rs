//! Owns interpreting steps: one action each, with its own keys.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Check, Volumes, place, values};
use crate::profile::diagnostics::Problem;
use crate::profile::file::{self, User, VolumeKind};
use crate::profile::references::LateReferences;
use crate::profile::structure::shorten;
use crate::profile::{
    Access, Action, Choice, ExportItem, FROM_SOURCE, Fingerprints, Published, SHELL, Step, When,
    input, value,
};
use crate::rocm::target;
use crate::sys::name::StepName;
use crate::sys::span::{At, Place};

/// Variants and starting points that a `when` can name.
pub(super) type Choices<'a> = (&'a BTreeMap<String, Choice>, &'a BTreeMap<String, Choice>);

impl Check<'_> {
    pub(super) fn needed_by(
        &mut self,
        names: Option<&[At<String>]>,
        steps: &[file::Step],
    ) -> BTreeMap<String, Place> {
        let names = names.unwrap_or_default();
        for name in names {
            if !steps.iter().any(|step| step.name == *name) {
                let known = steps.iter().map(|step| step.name.as_str());
                self.unknown("step", name, known);
            }
        }
        let place = |name: &At<String>| (name.value.clone(), name.place.clone());
        names.iter().map(place).collect()
    }

    /// Returns whether a step gets the GPU. If two files disagree, the extending file decides.
    fn gpu(
        &mut self,
        step: &At<String>,
        written: Option<At<bool>>,
        needed_by: Option<&Place>,
    ) -> bool {
        let (Some(refused), Some(needed)) = (written.as_ref().filter(|at| !at.value), needed_by)
        else {
            return written.is_some_and(|at| at.value) || needed_by.is_some();
        };
        let file = |place: &Place| self.sources.file(place).start;
        let (own, other) = (file(&refused.place), file(needed));
        if own == other {
            let whose = self.sources.line(&refused.place);
            let message = format!(
                "step `{}` is in `needed-by`, but has `gpu = false` in {whose}",
                shorten(step)
            );
            self.push_help(needed, message, "gets the GPU", "remove one of them");
        }
        // An extending file comes before the extended one.
        other < own
    }

    pub(super) fn step(
        &mut self,
        written: file::Step,
        volumes: &Volumes,
        needed_by: &BTreeMap<String, Place>,
        choices: Choices<'_>,
    ) -> Option<Step> {
        let name = written.name;
        let checked = self.accepted(&name.place, value::step_name(&name));
        let gpu = self.gpu(&name, written.gpu, needed_by.get(&name.value));
        let when = self.when(written.when, choices);
        let published = written.published.map(|published| Published {
            time: self.parsed(published.time, value::duration),
            disk: self.parsed(published.disk, value::size),
            limit: published.limit,
            source: published.source,
        });
        let timeout = self.parsed(written.timeout, value::duration);
        let memory = self.size(written.memory);
        let inputs = self.inputs(written.inputs, volumes);
        let fingerprints = written
            .fingerprints
            .and_then(|at| self.fingerprints(&at, volumes));
        let variable = written.env.keys().next().map(|name| name.place.clone());
        let env = self.env(written.env, LateReferences::Keep);
        let only_for_run = [
            ("shell", place(written.shell.as_ref())),
            ("workdir", place(written.workdir.as_ref())),
        ];
        // `merge` left at most one action.
        let action = if let Some(script) = written.run {
            self.action(&name, script.trim().is_empty());
            self.text(&script, LateReferences::Keep);
            let shell = self.shell(written.shell);
            Action::Run { script, shell }
        } else if let Some(packages) = written.packages {
            self.action(&name, packages.is_empty());
            for package in &packages {
                self.expandable(package, value::package);
            }
            Action::Packages(packages)
        } else if let Some(items) = written.copy {
            self.action(&name, items.is_empty());
            for item in &items {
                self.fixed("from", &item.from, value::beside);
                self.expandable(&item.to, value::destination);
            }
            Action::Copy(items)
        } else if let Some(items) = written.export {
            self.action(&name, items.is_empty());
            for item in &items {
                self.export(item, volumes);
            }
            Action::Export(items)
        } else {
            let message = format!("step `{}` does nothing", shorten(&name));
            let problem = Problem::new(&name.place, message, "this one");
            self.missing(problem.help("one of `run`, `packages`, `copy`, `export`"));
            return None;
        };
        if !matches!(action, Action::Run { .. }) {
            self.only_for("a step with `run`", only_for_run);
        }
        if matches!(action, Action::Copy(_) | Action::Export(_)) {
            self.only_for("a step with `run` or `packages`", [("env", variable)]);
        }
        if let Some(workdir) = &written.workdir {
            self.expandable(workdir, value::inside);
        }
        let user = match (&action, written.user) {
            (Action::Packages(_), user) => {
                if let Some(given) = user.filter(|user| user.value == User::Builder) {
                    self.push(&given.place, "packages are installed by root", "remove it");
                }
                User::Root
            }
            (_, user) => user.map_or(User::Builder, |user| user.value),
        };
        Some(Step {
            name: checked.unwrap_or_else(StepName::of_draft),
            action,
            user,
            workdir: written.workdir,
            network: written.network.unwrap_or(true),
            timeout,
            memory,
            inputs,
            fingerprints,
            stages: written.stages.unwrap_or_default(),
            incremental: written.incremental.unwrap_or_default(),
            env,
            gpu,
            when,
            published,
        })
    }

    fn action(&mut self, step: &At<String>, is_empty: bool) {
        if is_empty {
            let message = format!("step `{}` has nothing to do", shorten(step));
            self.missing(Problem::new(&step.place, message, "its action is empty"));
        }
    }

    fn shell(&mut self, shell: Option<At<Vec<At<String>>>>) -> Vec<String> {
        let Some(shell) = shell else {
            return SHELL.map(str::to_owned).to_vec();
        };
        let program = shell.value.first();
        if !program.is_some_and(|program| program.starts_with('/')) {
            let message = "a shell starts with the absolute path of a program";
            let help = "such as [\"/bin/bash\", \"-euo\", \"pipefail\", \"-c\"]";
            self.push_help(&shell.place, message, "here", help);
        }
        for word in &shell.value {
            self.fixed("shell", word, |_| Ok(()));
        }
        values(shell.value)
    }

    /// Refuses exported items that would replace one another, as far as their names are known.
    pub(super) fn exports(&mut self, steps: &[file::Step]) {
        let mut taken: BTreeMap<_, Vec<(&ExportItem, _)>> = BTreeMap::new();
        for step in steps {
            let when = step.when.as_ref();
            for item in step.export.iter().flatten() {
                // Equal references in names have equal values.
                let name = Path::new(&item.from.value).file_name();
                let Some(name) = name.and_then(|name| name.to_str()) else {
                    continue;
                };
                let others = taken.entry((item.to.as_str(), name)).or_default();
                // Steps with different conditions may exclude each other. The same file may be exported again.
                let meets =
                    |other: Option<&When>| other.is_none() || when.is_none() || other == when;
                let clash = others
                    .iter()
                    .find(|(other, condition)| other.from != item.from && meets(*condition));
                if let Some((other, _)) = clash {
                    let (name, volume) = (shorten(name), shorten(&item.to));
                    let message = format!("two exports are named `{name}` in volume `{volume}`");
                    let first = self.sources.line(&other.from.place);
                    let help = format!(
                        "the first one is in {first}: rename one of them, or export it to another volume"
                    );
                    self.push_help(&item.from.place, message, "replaces the first one", help);
                }
                others.push((item, when));
            }
        }
    }

    fn export(&mut self, item: &ExportItem, volumes: &Volumes) {
        self.expandable(&item.from, value::exported);
        if !named(volumes, VolumeKind::Output).any(|name| name == item.to.value) {
            let outputs = named(volumes, VolumeKind::Output);
            self.unknown("volume of kind `output` called", &item.to, outputs);
        }
        let mut known = volumes.iter().filter_map(|(_, volume)| volume.as_ref());
        if known.any(|volume| volume.name == item.to.value && volume.access == Access::Ro) {
            let volume = shorten(&item.to);
            let message = format!("volume `{volume}` has `access = \"ro\"`");
            let help = format!("`access = \"rw\"` for volume `{volume}`, or another volume");
            self.push_help(
                &item.to.place,
                message,
                "nothing can be exported to it",
                help,
            );
        }
    }

    fn inputs(&mut self, names: Option<Vec<At<String>>>, volumes: &Volumes) -> Vec<String> {
        let mut inputs: Vec<String> = Vec::new();
        let sources = || named(volumes, VolumeKind::Source);
        for name in names.into_iter().flatten() {
            let (volume, path) = input(&name);
            if !sources().any(|source| source == volume) {
                self.unknown("volume of kind `source` called", &name, sources());
            } else if name.contains('/') {
                let below = |_: &str| value::below(path, "the source", "requirements.txt");
                self.fixed("inputs", &name, below);
            }
            inputs.push(name.value);
        }
        // A set: their order is not content.
        inputs.sort_unstable();
        inputs.dedup();
        inputs
    }

    fn fingerprints(&mut self, at: &At<String>, volumes: &Volumes) -> Option<Fingerprints> {
        let around = volumes.iter().filter_map(|(_, volume)| {
            let volume = volume.as_ref()?;
            let path = Path::new(&at.value).strip_prefix(&volume.target).ok()?;
            Some((volume, path))
        });
        // The step sees the innermost volume at that path.
        let found = around.max_by_key(|(volume, _)| volume.target.len());
        let found = found.filter(|(volume, _)| volume.kind == VolumeKind::Build);
        if !self.fixed("fingerprints", at, value::inside) {
            return None;
        }
        if found.is_none() {
            let message = format!("`{}` is in no volume of kind `build`", shorten(at));
            let problem = Problem::new(&at.place, message, "here");
            self.missing(problem.help("TheRock's build directory, such as \"/therock/build\""));
        }
        found.map(|(volume, path)| Fingerprints {
            volume: volume.name.clone(),
            path: path.to_owned(),
        })
    }

    pub(super) fn when(&mut self, when: Option<When>, (variants, from): Choices<'_>) -> When {
        let when = when.unwrap_or_default();
        for family in when.family.iter().flatten() {
            if target::family(family).is_none() {
                let message = format!("unknown family `{}`", shorten(family));
                let problem = Problem::new(&family.place, message, "not in the table");
                let help = Some("`rockenv target ls` shows them all");
                self.problems
                    .push(problem.suggest(family, target::families(), help));
            }
        }
        for name in when.target.iter().flatten() {
            self.target(name);
        }
        self.chosen("variant", when.variant.as_deref(), variants.keys());
        let source = FROM_SOURCE.to_owned();
        let points = from.keys().chain(std::iter::once(&source));
        self.chosen("starting point", when.from.as_deref(), points);
        when
    }

    fn chosen<'n>(
        &mut self,
        what: &str,
        names: Option<&[At<String>]>,
        known: impl Iterator<Item = &'n String>,
    ) {
        let known: Vec<&str> = known.map(String::as_str).collect();
        for name in names.into_iter().flatten() {
            if !known.contains(&name.as_str()) {
                self.unknown(what, name, known.iter().copied());
            }
        }
    }
}

fn named(volumes: &Volumes, kind: VolumeKind) -> impl Iterator<Item = &str> {
    let of_kind = volumes
        .iter()
        .filter(move |((_, own), _)| *own == Some(kind));
    of_kind.map(|((name, _), _)| name.as_str())
}
