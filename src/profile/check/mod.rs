//! Owns the meaning of a merged draft: every value parsed, every reference followed, every mistake collected.

mod step;
mod volume;

use std::collections::{BTreeMap, BTreeSet};

pub(crate) use volume::host_path;

use super::file::VolumeKind;
use super::merge::{ChoiceDraft, ComponentDraft, Draft, Entry};
use super::report::{At, Place, Problem, Sources};
use super::shape::shorten;
use super::text::{self, Late, Piece};
use super::value::{self, Refused};
use super::{Choice, Component, FROM_SOURCE, Profile, Resources, Volume};
use crate::rocm::gpu::Extras;
use crate::rocm::target::Target;
use crate::sys::suggest;

/// Returns the profile, or nothing where a missing part left no way to make one; `problems` says which.
pub(crate) fn finish(
    name: String,
    sources: Sources,
    draft: Draft,
    problems: &mut Vec<Problem>,
) -> Option<Profile> {
    let mut check = Check {
        sources: &sources,
        params: BTreeMap::new(),
        problems,
    };
    check.params(draft.params);
    let variants = check.choices("variant", draft.variants);
    let from = check.choices("way", draft.from);
    let variant = check.variant(draft.variant, &variants);
    let image = check.image(draft.image);
    let targets = check.targets(draft.targets);
    let hooks = check.hooks(draft.hooks);
    let env_from_host = check.env_from_host(draft.env_from_host);
    let is_on = |key: Option<At<bool>>| key.is_some_and(|on| on.value);
    let resources = Resources {
        disk: check.parsed(draft.disk, value::size),
        memory_per_job: check.parsed(draft.memory_per_job, positive),
        memory_per_link_job: check.parsed(draft.memory_per_link_job, positive),
        memory_per_tensile_job: check.parsed(draft.memory_per_tensile_job, positive),
        memory: check.parsed(draft.memory, positive),
        ninja: is_on(draft.ninja),
        memory_max: check.parsed(draft.memory_max, value::memory_max),
        tasks_max: check.positive("tasks-max", draft.tasks_max),
    };
    let gpu = Extras {
        accel: is_on(draft.accel),
        dma_heap: is_on(draft.dma_heap),
    };
    let env = check.env(draft.env, Late::Keep);
    let runtime_env = check.env(draft.runtime_env, Late::Refuse);
    let components = check.components(draft.components, (&variants, &from));
    let runtime_notes = check.runtime_notes(draft.runtime_notes, &runtime_env);
    let volumes = check.volumes(draft.volumes, &draft.steps);
    let needed_by = check.needed_by(&draft.needed_by, &draft.steps);
    let steps = draft
        .steps
        .into_iter()
        .filter_map(|step| check.step(step, &volumes, &needed_by, (&variants, &from)))
        .collect();
    let params = check.params;
    Some(Profile {
        name,
        description: draft.description.unwrap_or_default(),
        image: image?,
        targets,
        hooks,
        env_from_host,
        params,
        variant,
        variants,
        from,
        resources,
        gpu,
        components,
        env,
        runtime_env,
        runtime_notes,
        volumes: volumes
            .into_iter()
            .filter_map(|(_, volume)| volume)
            .collect(),
        steps,
        sources,
    })
}

/// Volumes by name; nothing for one that has errors of its own and can still be referred to.
type Volumes = Vec<((At<String>, Option<VolumeKind>), Option<Volume>)>;

struct Check<'a> {
    sources: &'a Sources,
    params: BTreeMap<String, String>,
    problems: &'a mut Vec<Problem>,
}

fn positive(text: &str) -> Result<u64, Refused> {
    match value::size(text)? {
        0 => Err(Refused {
            message: "a size of nothing".to_owned(),
            help: None,
        }),
        size => Ok(size),
    }
}

impl Check<'_> {
    fn push(
        &mut self,
        place: &Place,
        message: impl Into<String>,
        label: &str,
        help: Option<String>,
    ) {
        let problem = Problem::new(place, message, label);
        self.problems.push(match help {
            Some(help) => problem.help(help),
            None => problem,
        });
    }

    fn refused(&mut self, place: &Place, refused: Refused) {
        self.push(place, refused.message, "here", refused.help);
    }

    fn parsed<T>(
        &mut self,
        text: Option<At<String>>,
        parse: impl Fn(&str) -> Result<T, Refused>,
    ) -> Option<T> {
        let text = text?;
        match parse(&text) {
            Ok(parsed) => Some(parsed),
            Err(refused) => {
                self.refused(&text.place, refused);
                None
            }
        }
    }

    fn positive<T: TryFrom<i64>>(&mut self, key: &str, number: Option<At<i64>>) -> Option<T> {
        let number = number?;
        match T::try_from(number.value) {
            Ok(good) if number.value > 0 => Some(good),
            _ => {
                self.push(
                    &number.place,
                    format!("`{key}` is {}", number.value),
                    "out of range",
                    None,
                );
                None
            }
        }
    }

    fn name(&mut self, what: &str, name: &At<String>) -> bool {
        match value::name(what, name) {
            Ok(()) => true,
            Err(refused) => {
                self.refused(&name.place, refused);
                false
            }
        }
    }

    fn text(&mut self, text: &At<String>, late: Late) {
        for fault in text::check(text, self.params.keys().map(String::as_str), late) {
            self.problems.push(fault.problem(&text.place, self.sources));
        }
    }

    /// Checks the references of a value, and its meaning if that does not wait for theirs.
    fn expandable(&mut self, text: &At<String>, meaning: impl Fn(&str) -> Result<(), Refused>) {
        self.text(text, Late::Refuse);
        let mut literal = String::new();
        for piece in text::pieces(text) {
            match piece {
                Piece::Literal(part) => literal.push_str(part),
                Piece::Reference(..) | Piece::Unclosed(_) => return,
            }
        }
        if let Err(refused) = meaning(&literal) {
            self.refused(&text.place, refused);
        }
    }

    /// Checks a value in which references mean nothing.
    fn fixed(
        &mut self,
        key: &str,
        text: &At<String>,
        meaning: impl Fn(&str) -> Result<(), Refused>,
    ) -> bool {
        if text.contains("${") {
            let message = format!("`{key}` is fixed: `${{...}}` means nothing in it");
            self.push(&text.place, message, "here", None);
            return false;
        }
        match meaning(text) {
            Ok(()) => true,
            Err(refused) => {
                self.refused(&text.place, refused);
                false
            }
        }
    }

    fn params(&mut self, params: BTreeMap<String, Entry>) {
        for (name, entry) in params {
            if let Err(refused) = value::name("parameter", &name) {
                self.refused(&entry.key, refused);
                continue;
            }
            if text::FACTS.contains(&name.as_str()) || name.starts_with("target.") {
                let message = format!("`${{{name}}}` has a meaning of its own");
                self.push(&entry.key, message, "not a name for a parameter", None);
                continue;
            }
            if entry.value.contains("${") {
                let help = "put the reference where the parameter is used".to_owned();
                let message = "a parameter's value is not expanded";
                self.push(&entry.value.place, message, "here", Some(help));
            }
            self.params.insert(name, entry.value.value);
        }
    }

    fn choices(
        &mut self,
        what: &str,
        drafts: BTreeMap<String, ChoiceDraft>,
    ) -> BTreeMap<String, Choice> {
        let mut choices = BTreeMap::new();
        for (name, draft) in drafts {
            self.name(what, &draft.name);
            if what == "way" && name == FROM_SOURCE {
                let message = format!("`{FROM_SOURCE}` is built in: it builds everything");
                self.push(&draft.name.place, message, "has nothing to change", None);
            }
            let mut params = BTreeMap::new();
            for (param, entry) in draft.params {
                if !self.params.contains_key(&param) {
                    let at = At {
                        value: param,
                        place: entry.key,
                    };
                    let known: Vec<String> = self.params.keys().cloned().collect();
                    self.unknown("parameter", &at, known.iter().map(String::as_str));
                    continue;
                }
                params.insert(param, entry.value.value);
            }
            let choice = Choice {
                description: draft.description.map(|at| at.value).unwrap_or_default(),
                params,
                disk: self.parsed(draft.disk, value::size),
                hooks: self.hooks(draft.hooks),
            };
            choices.insert(name, choice);
        }
        choices
    }

    fn variant(
        &mut self,
        variant: Option<At<String>>,
        variants: &BTreeMap<String, Choice>,
    ) -> Option<String> {
        match variant {
            Some(variant) if variants.contains_key(&variant.value) => Some(variant.value),
            Some(variant) => {
                self.unknown("variant", &variant, variants.keys().map(String::as_str));
                None
            }
            None => {
                if let Some(first) = variants.keys().next() {
                    let top = Place {
                        source: 0,
                        span: 0..0,
                    };
                    let help = format!("add `variant = \"{first}\"`");
                    let message = "there are variants, and none that is built unless asked";
                    self.push(&top, message, "in this file or one it extends", Some(help));
                }
                None
            }
        }
    }

    fn image(&mut self, image: Option<At<String>>) -> Option<At<String>> {
        match image {
            Some(image) => {
                self.name("image", &image);
                Some(image)
            }
            None => {
                let help = "add `image = \"NAME\"`; `rockenv image ls` shows them".to_owned();
                let top = Place {
                    source: 0,
                    span: 0..0,
                };
                self.push(
                    &top,
                    "no image",
                    "in this file or one it extends",
                    Some(help),
                );
                None
            }
        }
    }

    fn targets(&mut self, names: Vec<At<String>>) -> Vec<Target> {
        let mut targets = Vec::new();
        for name in names {
            match Target::parse(&name) {
                Ok(target) if targets.contains(&target) => {
                    self.push(
                        &name.place,
                        format!("target `{target}` is there twice"),
                        "again",
                        None,
                    );
                }
                Ok(target) => targets.push(target),
                Err(_) => self.unknown_target(&name),
            }
        }
        targets.sort_unstable();
        targets
    }

    fn unknown_target(&mut self, name: &At<String>) {
        let message = format!("unknown target `{}`", shorten(name));
        self.push(
            &name.place,
            message,
            "not in the table",
            Some(Target::advice(name)),
        );
    }

    fn components(
        &mut self,
        drafts: Vec<ComponentDraft>,
        choices: step::Choices<'_>,
    ) -> Vec<Component> {
        let names: Vec<String> = drafts
            .iter()
            .map(|draft| draft.name.value.clone())
            .collect();
        let mut components = Vec::new();
        for draft in drafts {
            if let Err(refused) = value::project("component", &draft.name) {
                self.refused(&draft.name.place, refused);
                continue;
            }
            for link in &draft.links {
                if !names.contains(&link.value) {
                    let help = match suggest::closest(link, names.iter().map(String::as_str)) {
                        Some(close) => format!("did you mean `{close}`?"),
                        None => "only what is a [[component]] itself can be linked".to_owned(),
                    };
                    let message = format!("there is no component `{}`", shorten(link));
                    self.push(&link.place, message, "not there", Some(help));
                }
            }
            for extra in &draft.extra_targets {
                self.expandable(extra, |text| value::targets(text).map(drop));
            }
            components.push(Component {
                project: draft.project.unwrap_or_else(|| draft.name.value.clone()),
                links: draft.links.into_iter().map(|link| link.value).collect(),
                extra: draft.extra_targets,
                stub: draft.stub,
                when: self.when(&draft.when, choices),
                name: draft.name,
            });
        }
        components
    }

    fn hooks(&mut self, hooks: Vec<At<String>>) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for hook in hooks {
            if names.contains(&hook.value) {
                self.push(
                    &hook.place,
                    format!("hook `{}` is there twice", shorten(&hook)),
                    "again",
                    None,
                );
            } else if self.name("hook", &hook) {
                names.push(hook.value);
            }
        }
        names
    }

    fn env_from_host(&mut self, names: Vec<At<String>>) -> Vec<String> {
        let mut good = BTreeSet::new();
        for name in names {
            match value::variable(&name) {
                Ok(()) => {
                    good.insert(name.value);
                }
                Err(refused) => self.refused(&name.place, refused),
            }
        }
        good.into_iter().collect()
    }

    fn env(
        &mut self,
        entries: BTreeMap<String, Entry>,
        late: Late,
    ) -> BTreeMap<String, At<String>> {
        let mut env = BTreeMap::new();
        for (name, entry) in entries {
            if let Err(refused) = value::variable(&name) {
                self.refused(&entry.key, refused);
            }
            self.text(&entry.value, late);
            env.insert(name, entry.value);
        }
        env
    }

    fn runtime_notes(
        &mut self,
        notes: BTreeMap<String, Entry>,
        variables: &BTreeMap<String, At<String>>,
    ) -> BTreeMap<String, String> {
        let mut good = BTreeMap::new();
        for (value, entry) in notes {
            let place = entry.key;
            let name = At { value, place };
            if variables.contains_key(&name.value) {
                good.insert(name.value, entry.value.value);
            } else {
                let known = variables.keys().map(String::as_str);
                self.unknown("runtime variable", &name, known);
            }
        }
        good
    }

    fn unknown<'n>(&mut self, what: &str, name: &At<String>, known: impl Iterator<Item = &'n str>) {
        let known: Vec<&str> = known.collect();
        let help = match suggest::closest(name, known.iter().copied()) {
            Some(close) => Some(format!("did you mean `{close}`?")),
            None if known.is_empty() => None,
            None => Some(format!(
                "there is {}",
                known
                    .iter()
                    .map(|name| format!("`{}`", shorten(name)))
                    .collect::<Vec<_>>()
                    .join(", ")
            )),
        };
        self.push(
            &name.place,
            format!("there is no {what} `{}`", shorten(name)),
            "not found",
            help,
        );
    }
}
