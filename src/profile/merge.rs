//! Owns `extends`: how one file changes another. By key; volumes and steps by name, field by field.
//!
//! Values stay as written here, with their place; `check` gives them meaning when all files are in.

use std::collections::BTreeMap;

use serde_spanned::Spanned;

use super::file::{self, Access, Engine, File, User, VolumeKind};
use super::report::{At, Place, Problem};
use super::shape::shorten;
use crate::sys::suggest;

/// A profile as written, with what it extends merged in.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) description: Option<String>,
    pub(crate) image: Option<At<String>>,
    pub(crate) targets: Vec<At<String>>,
    pub(crate) hooks: Vec<At<String>>,
    pub(crate) env_from_host: Vec<At<String>>,
    pub(crate) params: BTreeMap<String, Entry>,
    pub(crate) variant: Option<At<String>>,
    pub(crate) variants: BTreeMap<String, ChoiceDraft>,
    pub(crate) from: BTreeMap<String, ChoiceDraft>,
    pub(crate) disk: Option<At<String>>,
    pub(crate) memory_per_job: Option<At<String>>,
    pub(crate) memory_per_link_job: Option<At<String>>,
    pub(crate) memory_per_tensile_job: Option<At<String>>,
    pub(crate) memory: Option<At<String>>,
    pub(crate) ninja: Option<At<bool>>,
    pub(crate) memory_max: Option<At<String>>,
    pub(crate) tasks_max: Option<At<i64>>,
    pub(crate) needed_by: Vec<At<String>>,
    pub(crate) accel: Option<At<bool>>,
    pub(crate) dma_heap: Option<At<bool>>,
    pub(crate) env: BTreeMap<String, Entry>,
    pub(crate) runtime_env: BTreeMap<String, Entry>,
    pub(crate) components: Vec<ComponentDraft>,
    pub(crate) runtime_notes: BTreeMap<String, Entry>,
    pub(crate) volumes: Vec<VolumeDraft>,
    pub(crate) steps: Vec<StepDraft>,
}

/// One `KEY = "value"`.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Place,
    pub(crate) value: At<String>,
}

/// Replaced as a whole by the one of the same name in an extending profile.
#[derive(Debug)]
pub(crate) struct ComponentDraft {
    pub(crate) name: At<String>,
    pub(crate) project: Option<String>,
    pub(crate) links: Vec<At<String>>,
    pub(crate) extra_targets: Vec<At<String>>,
    pub(crate) stub: bool,
    pub(crate) when: WhenDraft,
}

/// A variant, or a way of `--from`.
#[derive(Debug)]
pub(crate) struct ChoiceDraft {
    pub(crate) name: At<String>,
    pub(crate) description: Option<At<String>>,
    pub(crate) params: BTreeMap<String, Entry>,
    pub(crate) disk: Option<At<String>>,
    pub(crate) hooks: Vec<At<String>>,
}

#[derive(Debug)]
pub(crate) struct VolumeDraft {
    pub(crate) name: At<String>,
    pub(crate) kind: Option<At<VolumeKind>>,
    pub(crate) target: Option<At<String>>,
    pub(crate) path: Option<At<String>>,
    pub(crate) git: Option<At<String>>,
    pub(crate) rev: Option<At<String>>,
    pub(crate) depth: Option<At<i64>>,
    pub(crate) submodules: Option<At<bool>>,
    pub(crate) max: Option<At<String>>,
    pub(crate) locked: Option<At<bool>>,
    pub(crate) downloads: Option<At<String>>,
    pub(crate) needed_by: Option<Vec<At<String>>>,
    pub(crate) disk: Option<At<String>>,
    pub(crate) access: Option<At<Access>>,
}

#[derive(Debug)]
pub(crate) enum ActionDraft {
    Run(At<String>),
    Packages(Vec<At<String>>),
    Copy(Vec<CopyDraft>),
    Export(Vec<CopyDraft>),
}

#[derive(Debug)]
pub(crate) struct CopyDraft {
    pub(crate) from: At<String>,
    pub(crate) to: At<String>,
}

#[derive(Debug, Default)]
pub(crate) struct WhenDraft {
    pub(crate) family: Option<Vec<At<String>>>,
    pub(crate) target: Option<Vec<At<String>>>,
    pub(crate) engine: Option<Vec<Engine>>,
    pub(crate) variant: Option<Vec<At<String>>>,
    pub(crate) from: Option<Vec<At<String>>>,
}

#[derive(Debug)]
pub(crate) struct PublishedDraft {
    pub(crate) time: Option<At<String>>,
    pub(crate) disk: Option<At<String>>,
    pub(crate) source: At<String>,
}

#[derive(Debug)]
pub(crate) struct StepDraft {
    pub(crate) name: At<String>,
    pub(crate) action: Option<ActionDraft>,
    pub(crate) shell: Option<At<Vec<At<String>>>>,
    pub(crate) user: Option<At<User>>,
    pub(crate) workdir: Option<At<String>>,
    pub(crate) network: Option<At<bool>>,
    pub(crate) timeout: Option<At<String>>,
    pub(crate) memory: Option<At<String>>,
    pub(crate) inputs: Vec<At<String>>,
    pub(crate) fingerprints: Option<At<String>>,
    pub(crate) stages: Vec<At<String>>,
    pub(crate) incremental: Option<At<bool>>,
    pub(crate) env: BTreeMap<String, Entry>,
    pub(crate) gpu: Option<At<bool>>,
    pub(crate) when: WhenDraft,
    pub(crate) published: Option<PublishedDraft>,
}

/// Puts one file over what it extends.
pub(crate) struct Merge<'a> {
    source: usize,
    extending: bool,
    problems: &'a mut Vec<Problem>,
}

impl Draft {
    /// Applies file number `source`; `extending` says that `self` holds another profile already.
    pub(crate) fn apply(
        &mut self,
        source: usize,
        extending: bool,
        file: File,
        problems: &mut Vec<Problem>,
    ) {
        let mut merge = Merge {
            source,
            extending,
            problems,
        };
        merge.file(self, file);
    }
}

fn set<T>(slot: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *slot = value;
    }
}

impl Merge<'_> {
    fn at<T>(&self, value: Spanned<T>) -> At<T> {
        At::new(self.source, value)
    }

    fn opt<T>(&self, value: Option<Spanned<T>>) -> Option<At<T>> {
        value.map(|value| self.at(value))
    }

    fn list<T>(&self, values: Vec<Spanned<T>>) -> Vec<At<T>> {
        values.into_iter().map(|value| self.at(value)).collect()
    }

    fn entries(
        &self,
        into: &mut BTreeMap<String, Entry>,
        from: BTreeMap<Spanned<String>, Spanned<String>>,
    ) {
        for (key, value) in from {
            let key = self.at(key);
            let value = self.at(value);
            into.insert(
                key.value,
                Entry {
                    key: key.place,
                    value,
                },
            );
        }
    }

    fn file(&mut self, draft: &mut Draft, file: File) {
        let version = self.at(file.schema);
        if version.value != 1 {
            let message = format!(
                "this rockenv reads version 1 of the format, not {}",
                version.value
            );
            self.problems
                .push(Problem::new(&version.place, message, "unknown version"));
        }
        set(&mut draft.description, file.description);
        set(&mut draft.image, self.opt(file.image));
        if let Some(targets) = file.targets {
            draft.targets = self.list(targets);
        }
        if let Some(hooks) = file.hooks {
            draft.hooks = self.list(hooks);
        }
        if let Some(names) = file.env_from_host {
            draft.env_from_host = self.list(names);
        }
        if let Some(steps) = file.gpu.needed_by {
            draft.needed_by = self.list(steps);
        }
        set(&mut draft.accel, self.opt(file.gpu.accel));
        set(&mut draft.dma_heap, self.opt(file.gpu.dma_heap));
        self.entries(&mut draft.params, file.params);
        set(&mut draft.variant, self.opt(file.variant));
        self.choices(&mut draft.variants, file.variants);
        self.choices(&mut draft.from, file.from);
        self.entries(&mut draft.env, file.env);
        self.entries(&mut draft.runtime_env, file.runtime_env);
        self.entries(&mut draft.runtime_notes, file.runtime_notes);
        set(&mut draft.disk, self.opt(file.resources.disk));
        set(
            &mut draft.memory_per_job,
            self.opt(file.resources.memory_per_job),
        );
        set(
            &mut draft.memory_per_link_job,
            self.opt(file.resources.memory_per_link_job),
        );
        set(
            &mut draft.memory_per_tensile_job,
            self.opt(file.resources.memory_per_tensile_job),
        );
        set(&mut draft.memory, self.opt(file.resources.memory));
        set(&mut draft.ninja, self.opt(file.resources.ninja));
        set(&mut draft.memory_max, self.opt(file.resources.memory_max));
        set(&mut draft.tasks_max, self.opt(file.resources.tasks_max));
        let mut seen = BTreeMap::new();
        for component in file.component {
            let name = self.at(component.name.clone());
            if self.is_new("component", &name, &mut seen) {
                self.component(draft, name, component);
            }
        }
        let mut seen = BTreeMap::new();
        for volume in file.volume {
            let name = self.at(volume.name.clone());
            if self.is_new("volume", &name, &mut seen) {
                self.volume(draft, name, volume);
            }
        }
        let mut seen = BTreeMap::new();
        for step in file.step {
            let name = self.at(step.name.clone());
            if self.is_new("step", &name, &mut seen) {
                self.step(draft, name, step);
            }
        }
    }

    fn choices(
        &self,
        into: &mut BTreeMap<String, ChoiceDraft>,
        from: BTreeMap<Spanned<String>, file::Choice>,
    ) {
        for (name, file) in from {
            let name = self.at(name);
            let choice = into
                .entry(name.value.clone())
                .or_insert_with(|| ChoiceDraft {
                    name,
                    description: None,
                    params: BTreeMap::new(),
                    disk: None,
                    hooks: Vec::new(),
                });
            set(&mut choice.description, self.opt(file.description));
            self.entries(&mut choice.params, file.params);
            set(&mut choice.disk, self.opt(file.disk));
            if let Some(hooks) = file.hooks {
                choice.hooks = self.list(hooks);
            }
        }
    }

    fn is_new(&mut self, what: &str, name: &At<String>, seen: &mut BTreeMap<String, ()>) -> bool {
        if seen.insert(name.value.clone(), ()).is_none() {
            return true;
        }
        let message = format!("two {what}s are called `{}`", shorten(name));
        self.problems
            .push(Problem::new(&name.place, message, "the second one"));
        false
    }

    fn component(&mut self, draft: &mut Draft, name: At<String>, file: file::Component) {
        let index = draft
            .components
            .iter()
            .position(|component| component.name == name);
        if file.remove {
            match index {
                Some(index) => drop(draft.components.remove(index)),
                None => {
                    let message = format!("there is no component `{}` to remove", shorten(&name));
                    self.problems
                        .push(Problem::new(&name.place, message, "not there"));
                }
            }
            return;
        }
        let component = ComponentDraft {
            name,
            project: file.project,
            links: self.list(file.links),
            extra_targets: self.list(file.extra_targets),
            stub: file.stub,
            when: file.when.map(|when| self.when(when)).unwrap_or_default(),
        };
        match index {
            Some(index) => draft.components[index] = component,
            None => draft.components.push(component),
        }
    }

    fn volume(&self, draft: &mut Draft, name: At<String>, file: file::Volume) {
        let index = draft.volumes.iter().position(|volume| volume.name == name);
        let index = index.unwrap_or_else(|| {
            draft.volumes.push(VolumeDraft {
                name,
                kind: None,
                target: None,
                path: None,
                git: None,
                rev: None,
                depth: None,
                submodules: None,
                max: None,
                locked: None,
                downloads: None,
                needed_by: None,
                disk: None,
                access: None,
            });
            draft.volumes.len() - 1
        });
        let volume = &mut draft.volumes[index];
        // A source is one or the other: naming the other one replaces it, with what belongs to it.
        if file.path.is_some() && file.git.is_none() {
            (volume.git, volume.rev, volume.depth, volume.submodules) = (None, None, None, None);
        }
        if file.git.is_some() && file.path.is_none() {
            volume.path = None;
            volume.rev = None;
        }
        set(&mut volume.kind, self.opt(file.kind));
        set(&mut volume.target, self.opt(file.target));
        set(&mut volume.path, self.opt(file.path));
        set(&mut volume.git, self.opt(file.git));
        set(&mut volume.rev, self.opt(file.rev));
        set(&mut volume.depth, self.opt(file.depth));
        set(&mut volume.submodules, self.opt(file.submodules));
        set(&mut volume.max, self.opt(file.max));
        set(&mut volume.locked, self.opt(file.locked));
        set(&mut volume.downloads, self.opt(file.downloads));
        set(
            &mut volume.needed_by,
            file.needed_by.map(|steps| self.list(steps)),
        );
        set(&mut volume.disk, self.opt(file.disk));
        set(&mut volume.access, self.opt(file.access));
    }

    fn step(&mut self, draft: &mut Draft, name: At<String>, mut file: file::Step) {
        let old = draft.steps.iter().position(|step| step.name == name);
        if let Some(remove) = self.opt(file.remove.take()) {
            self.remove(draft, &name, &file, &remove);
            return;
        }
        let after = self.opt(file.after.take());
        let action = self.action(&mut file);
        let mut step = match old {
            Some(index) => draft.steps.remove(index),
            None => StepDraft {
                name,
                action: None,
                shell: None,
                user: None,
                workdir: None,
                network: None,
                timeout: None,
                memory: None,
                inputs: Vec::new(),
                fingerprints: None,
                stages: Vec::new(),
                incremental: None,
                env: BTreeMap::new(),
                gpu: None,
                when: WhenDraft::default(),
                published: None,
            },
        };
        if let Some(action) = action {
            // A shell belongs to a script; another kind of action has no use for the inherited one.
            if !matches!(action, ActionDraft::Run(_)) {
                step.shell = None;
            }
            step.action = Some(action);
        }
        set(
            &mut step.shell,
            self.opt(file.shell)
                .map(|shell| shell.map(|words| self.list(words))),
        );
        set(&mut step.user, self.opt(file.user));
        set(&mut step.workdir, self.opt(file.workdir));
        set(&mut step.network, self.opt(file.network));
        set(&mut step.timeout, self.opt(file.timeout));
        set(&mut step.memory, self.opt(file.memory));
        set(&mut step.incremental, self.opt(file.incremental));
        set(&mut step.gpu, self.opt(file.gpu));
        if let Some(inputs) = file.inputs {
            step.inputs = self.list(inputs);
        }
        set(&mut step.fingerprints, self.opt(file.fingerprints));
        if let Some(stages) = file.stages {
            step.stages = self.list(stages);
        }
        if let Some(when) = file.when {
            step.when = self.when(when);
        }
        if let Some(published) = file.published {
            step.published = Some(PublishedDraft {
                time: self.opt(published.time),
                disk: self.opt(published.disk),
                source: self.at(published.source),
            });
        }
        self.entries(&mut step.env, file.env);
        let index = match &after {
            Some(after) => self.place_after(draft, after, &step),
            None => old,
        };
        draft.steps.insert(index.unwrap_or(draft.steps.len()), step);
    }

    fn when(&self, when: file::When) -> WhenDraft {
        WhenDraft {
            family: when.family.map(|names| self.list(names)),
            target: when.target.map(|names| self.list(names)),
            engine: when.engine,
            variant: when.variant.map(|names| self.list(names)),
            from: when.from.map(|names| self.list(names)),
        }
    }

    fn place_after(
        &mut self,
        draft: &Draft,
        after: &At<String>,
        step: &StepDraft,
    ) -> Option<usize> {
        if let Some(index) = draft.steps.iter().position(|other| other.name == *after) {
            return Some(index + 1);
        }
        let known = draft.steps.iter().map(|step| step.name.as_str());
        let message = format!(
            "`{}` cannot come after `{}`",
            shorten(&step.name),
            shorten(after)
        );
        let problem = Problem::new(
            &after.place,
            message,
            "no step of this name before this one",
        );
        self.problems.push(match suggest::closest(after, known) {
            Some(close) => problem.help(format!("did you mean `{close}`?")),
            None => problem,
        });
        None
    }

    fn remove(
        &mut self,
        draft: &mut Draft,
        name: &At<String>,
        file: &file::Step,
        remove: &At<bool>,
    ) {
        if !remove.value {
            let message = "`remove = false` says nothing";
            self.problems
                .push(Problem::new(&remove.place, message, "leave it out"));
            return;
        }
        let alone = file.run.is_none()
            && file.packages.is_none()
            && file.copy.is_none()
            && file.export.is_none()
            && file.after.is_none();
        if !alone {
            let message = format!("step `{}` is removed and defined at once", shorten(name));
            self.problems
                .push(Problem::new(&remove.place, message, "removed here"));
            return;
        }
        if let Some(index) = draft.steps.iter().position(|step| step.name == *name) {
            draft.steps.remove(index);
            return;
        }
        let message = format!("there is no step `{}` to remove", shorten(name));
        let problem = Problem::new(&name.place, message, "not an inherited step");
        let close = suggest::closest(name, draft.steps.iter().map(|step| step.name.as_str()));
        self.problems.push(match close {
            _ if !self.extending => problem.help("only a profile with `extends` can remove steps"),
            Some(close) => problem.help(format!("did you mean `{close}`?")),
            None => problem,
        });
    }

    fn action(&mut self, file: &mut file::Step) -> Option<ActionDraft> {
        let mut found: Vec<(&str, Place, ActionDraft)> = Vec::new();
        if let Some(script) = self.opt(file.run.take()) {
            found.push(("run", script.place.clone(), ActionDraft::Run(script)));
        }
        if let Some(packages) = self.opt(file.packages.take()) {
            let list = self.list(packages.value);
            found.push(("packages", packages.place, ActionDraft::Packages(list)));
        }
        if let Some(items) = self.opt(file.copy.take()) {
            let copy = |item: file::Copy| CopyDraft {
                from: self.at(item.from),
                to: self.at(item.to),
            };
            let list = items.value.into_iter().map(copy).collect();
            found.push(("copy", items.place, ActionDraft::Copy(list)));
        }
        if let Some(items) = self.opt(file.export.take()) {
            let export = |item: file::Export| CopyDraft {
                from: self.at(item.from),
                to: self.at(item.to),
            };
            let list = items.value.into_iter().map(export).collect();
            found.push(("export", items.place, ActionDraft::Export(list)));
        }
        found.sort_by_key(|(_, place, _)| place.span.start);
        let mut found = found.into_iter();
        let (first, _, action) = found.next()?;
        for (second, place, _) in found {
            let message = format!("a step does one thing: `{first}` or `{second}`");
            let problem = Problem::new(&place, message, format!("after `{first}`"));
            self.problems
                .push(problem.help("make it two steps: each ends in a snapshot of its own"));
        }
        Some(action)
    }
}
