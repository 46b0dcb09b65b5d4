//! Owns interpreting a merged file: parses every value, follows every reference, and collects every mistake.

mod step;
mod volume;

use std::collections::{BTreeMap, BTreeSet};

pub(crate) use volume::host_path;

use super::diagnostics::{Problem, Sources, UnreadPart};
use super::file::{self, File, VolumeKind};
use super::references::{self, LateReferences, TextPart};
use super::structure::shorten;
use super::value::{self, Refused};
use super::{Choice, Component, FROM_SOURCE, OWN_VARIABLES, Profile, Volume, runtime_variable};
use crate::rocm::gpu::Extras;
use crate::rocm::target::Target;
use crate::sys::span::{At, Place};
use crate::sys::suggest;

/// Returns the profile without the parts that `problems` reports.
pub(crate) fn finish(
    name: String,
    sources: Sources,
    file: File,
    problems: &mut Vec<Problem>,
) -> Profile {
    let mut check = Check {
        sources: &sources,
        params: BTreeMap::new(),
        problems,
    };
    check.params(file.params);
    let choices = file.variants.values().chain(file.from.values());
    let chosen = choices.flat_map(|choice| choice.params.clone()).collect();
    let variants = check.choices("variant", file.variants);
    let from = check.choices("starting point", file.from);
    let releases = check.choices("release", file.releases);
    let choices = (&variants, &from);
    let needed_by = check.needed_by(file.gpu.needed_by.as_deref(), &file.step);
    let volumes = check.volumes(file.volume, &file.step);
    let set = file.step.iter().map(|step| &step.env);
    let set: Vec<&Entries> = set.chain([&file.env]).collect();
    let env_from_host = check.env_from_host(file.env_from_host.unwrap_or_default(), &set);
    check.exports(&file.step);
    let steps = file.step.into_iter();
    let steps = steps.filter_map(|step| check.step(step, &volumes, &needed_by, choices));
    let steps = steps.collect();
    for name in file.runtime_env.keys() {
        check.accepted(&name.place, runtime_variable::check(name));
    }
    let runtime_env = check.env(file.runtime_env, LateReferences::Refuse);
    let image = check.image(file.image);
    Profile {
        name,
        description: file.description.unwrap_or_default(),
        variant: check.variant(file.variant, &variants),
        release_param: check.release_param(file.release_param, chosen, &releases),
        targets: check.targets(file.targets.unwrap_or_default()),
        hooks: check.hooks(file.hooks),
        env_from_host,
        resources: file.resources.checked(&mut check),
        gpu: Extras {
            accel: file.gpu.accel.unwrap_or_default(),
            dma_heap: file.gpu.dma_heap.unwrap_or_default(),
        },
        components: check.components(file.component, choices),
        env: check.env(file.env, LateReferences::Keep),
        runtime_notes: check.runtime_notes(file.runtime_notes, &runtime_env),
        runtime_env,
        volumes: volumes.into_iter().filter_map(|(_, good)| good).collect(),
        steps,
        params: check.params,
        variants,
        releases,
        from,
        image,
        sources,
    }
}

type Entries = BTreeMap<At<String>, At<String>>;

/// Volumes by name; `None` for a volume that has errors of its own but can still be referred to.
type Volumes = Vec<((At<String>, Option<VolumeKind>), Option<Volume>)>;

pub(super) struct Check<'a> {
    sources: &'a Sources,
    params: BTreeMap<String, String>,
    problems: &'a mut Vec<Problem>,
}

fn positive(text: &str) -> Result<u64, Refused> {
    match value::size(text)? {
        0 => Err(Refused::new("a size of zero")),
        size => Ok(size),
    }
}

impl Check<'_> {
    fn push(&mut self, place: &Place, message: impl Into<String>, label: &str) {
        self.problems.push(Problem::new(place, message, label));
    }

    fn push_help(
        &mut self,
        place: &Place,
        message: impl Into<String>,
        label: &str,
        help: impl Into<String>,
    ) {
        let problem = Problem::new(place, message, label);
        self.problems.push(problem.help(help));
    }

    /// Reports a missing item, which may be in a part that could not be read.
    fn missing(&mut self, problem: Problem) {
        self.problems.push(problem.unless(UnreadPart::Part));
    }

    /// Refuses keys that are only for `what`.
    fn only_for<const N: usize>(&mut self, what: &str, keys: [(&str, Option<Place>); N]) {
        for (key, place) in keys {
            if let Some(place) = place {
                let message = format!("`{key}` is for {what}");
                self.missing(Problem::new(&place, message, "here"));
            }
        }
    }

    fn refused(&mut self, place: &Place, refused: Refused) {
        self.problems.push(Problem::refused(place, refused, "here"));
    }

    /// Returns the checked value at `place`, unless it was refused.
    fn accepted<T>(&mut self, place: &Place, checked: Result<T, Refused>) -> Option<T> {
        checked.map_err(|refused| self.refused(place, refused)).ok()
    }

    pub(super) fn parsed<T>(
        &mut self,
        text: Option<At<String>>,
        parse: impl Fn(&str) -> Result<T, Refused>,
    ) -> Option<T> {
        let text = text?;
        self.accepted(&text.place, parse(&text))
    }

    pub(super) fn size(&mut self, text: Option<At<String>>) -> Option<u64> {
        self.parsed(text, positive)
    }

    pub(super) fn positive<T: TryFrom<i64>>(
        &mut self,
        key: &str,
        number: Option<At<i64>>,
    ) -> Option<T> {
        let number = number?;
        let good = T::try_from(number.value).ok().filter(|_| number.value > 0);
        if good.is_none() {
            let message = format!("`{key}` is {number}");
            self.push(&number.place, message, "out of range");
        }
        good
    }

    /// Refuses a limit with which no container starts.
    pub(super) fn limit(
        &mut self,
        key: &str,
        number: Option<At<i64>>,
        (least, most): (i64, i64),
    ) -> Option<u64> {
        let number = number?;
        let good = self.positive(key, Some(number.clone()))?;
        let (why, help) = match number.value {
            value if value < least => (
                "too little to start a container",
                format!("write {least} or more"),
            ),
            value if value > most => ("more than Linux allows", format!("write {most} or less")),
            _ => return Some(good),
        };
        let refused = Refused::new(format!("`{key}` of {number} is {why}")).help(help);
        self.refused(&number.place, refused);
        None
    }

    fn name(&mut self, what: &str, name: &At<String>) -> bool {
        let checked = value::name(what, name);
        self.accepted(&name.place, checked).is_some()
    }

    fn text(&mut self, text: &At<String>, late: LateReferences) {
        for fault in references::check(text, &self.params, late) {
            self.problems.push(fault.problem(&text.place, self.sources));
        }
    }

    /// Checks the references of a value, and its meaning unless that depends on them.
    fn expandable(&mut self, text: &At<String>, meaning: impl Fn(&str) -> Result<(), Refused>) {
        self.text(text, LateReferences::Refuse);
        let literal = |part| match part {
            TextPart::Literal(part) => Some(part),
            TextPart::Reference(..) | TextPart::Unclosed(_) => None,
        };
        let parts = references::pieces(text).into_iter().map(literal);
        if let Some(whole) = parts.collect::<Option<String>>() {
            self.accepted(&text.place, meaning(&whole));
        }
    }

    /// Checks a value that must not contain references.
    fn fixed(
        &mut self,
        key: &str,
        text: &At<String>,
        meaning: impl Fn(&str) -> Result<(), Refused>,
    ) -> bool {
        if text.contains("${") {
            let message = format!("`{key}` must not contain references such as `${{...}}`");
            self.push(&text.place, message, "here");
            return false;
        }
        self.accepted(&text.place, meaning(text)).is_some()
    }

    fn params(&mut self, params: Entries) {
        for (name, value) in params {
            if !self.name("parameter", &name) {
                continue;
            }
            if references::FACTS.contains(&name.as_str()) || name.starts_with("target.") {
                let message = format!("`${{{name}}}` has a meaning of its own");
                self.push(&name.place, message, "not a name for a parameter");
                continue;
            }
            self.param_value(&value);
            self.params.insert(name.value, value.value);
        }
    }

    fn param_value(&mut self, value: &At<String>) {
        if value.contains("${") {
            let message = "a parameter's value is not expanded";
            let help = "put the reference where the parameter is used";
            self.push_help(&value.place, message, "here", help);
        }
    }

    fn choices(
        &mut self,
        what: &str,
        written: BTreeMap<At<String>, file::Choice>,
    ) -> BTreeMap<String, Choice> {
        let mut choices = BTreeMap::new();
        for (name, written) in written {
            self.name(what, &name);
            if what == "starting point" && name.value == FROM_SOURCE {
                let message = format!("`{FROM_SOURCE}` is built in: it builds everything");
                self.push(&name.place, message, "has nothing to change");
            }
            let mut params = BTreeMap::new();
            for (param, value) in written.params {
                if self.params.contains_key(&param.value) {
                    self.param_value(&value);
                    params.insert(param.value, value.value);
                } else {
                    self.unknown_param(&param);
                }
            }
            let choice = Choice {
                description: written.description.unwrap_or_default(),
                params,
                disk: self.parsed(written.disk, value::size),
                hooks: self.hooks(written.hooks),
            };
            choices.insert(name.value, choice);
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
                    let message = "there are variants, but no default one";
                    let problem = Problem::new(&(0..0), message, "in this file or one it extends");
                    self.missing(problem.help(format!("add `variant = \"{first}\"`")));
                }
                None
            }
        }
    }

    /// `chosen` are the parameters that variants and starting points set.
    fn release_param(
        &mut self,
        param: Option<At<String>>,
        chosen: Vec<(At<String>, At<String>)>,
        releases: &BTreeMap<String, Choice>,
    ) -> Option<String> {
        let Some(param) = param else {
            if let Some(first) = releases.keys().next() {
                let message = format!("nothing selects release `{first}`");
                let problem = Problem::new(&(0..0), message, "in this file or one it extends");
                let help = "add `release-param = \"NAME\"`, the name of a parameter";
                self.missing(problem.help(help));
            }
            return None;
        };
        match self.params.get(&param.value) {
            None => self.unknown_param(&param),
            Some(release) if !releases.contains_key(release) => {
                let message = format!("there is no release `{}`", shorten(release));
                let label = "the default of this parameter";
                self.missing(Problem::new(&param.place, message, label));
            }
            Some(_) => {}
        }
        for (name, release) in chosen {
            if name == param && !releases.contains_key(&release.value) {
                self.unknown("release", &release, releases.keys().map(String::as_str));
            }
        }
        Some(param.value)
    }

    /// Returns the image's name, which is empty if the profile has no image.
    fn image(&mut self, image: Option<At<String>>) -> At<String> {
        let Some(image) = image else {
            let problem = Problem::new(&(0..0), "no image", "in this file or one it extends");
            let help = "add `image = \"NAME\"`; `rockenv image ls` shows them";
            self.missing(problem.help(help));
            return At {
                value: String::new(),
                place: 0..0,
            };
        };
        let fact = |part| match part {
            TextPart::Reference(name, _) if references::FACTS.contains(&name) => Some(name),
            _ => None,
        };
        match references::pieces(&image).into_iter().find_map(fact) {
            None => self.expandable(&image, |text| value::name("image", text)),
            Some(fact) => {
                let message = format!("an image's name takes parameters only, not `${{{fact}}}`");
                let help = "use a parameter: `--param`, a variant or a release can set it";
                self.push_help(&image.place, message, "here", help);
            }
        }
        image
    }

    fn targets(&mut self, names: Vec<At<String>>) -> Vec<Target> {
        let mut targets = Vec::new();
        for name in names {
            match self.target(&name) {
                Some(target) if targets.contains(&target) => {
                    self.push(&name.place, format!("duplicate target `{target}`"), "again");
                }
                target => targets.extend(target),
            }
        }
        targets.sort_unstable();
        targets
    }

    fn target(&mut self, name: &At<String>) -> Option<Target> {
        let refused = |refused| Problem::refused(&name.place, refused, "not in the table");
        let target = value::target(name).map_err(refused);
        target.map_err(|problem| self.problems.push(problem)).ok()
    }

    fn components(
        &mut self,
        written: Vec<file::Component>,
        choices: step::Choices<'_>,
    ) -> Vec<Component> {
        let names = written.iter().map(|component| component.name.value.clone());
        let names: Vec<String> = names.collect();
        let mut components = Vec::new();
        for written in written {
            let checked = value::project("component", &written.name);
            if self.accepted(&written.name.place, checked).is_none() {
                continue;
            }
            for link in &written.links {
                if !names.contains(&link.value) {
                    let message = format!("there is no component `{}`", shorten(link));
                    let known = names.iter().map(String::as_str);
                    let help = "only a [[component]] can be linked";
                    let problem = Problem::new(&link.place, message, "not there");
                    self.missing(problem.suggest(link, known, Some(help)));
                }
            }
            for extra in &written.extra_targets {
                self.expandable(extra, |text| value::targets(text).map(drop));
            }
            components.push(Component {
                project: written
                    .project
                    .unwrap_or_else(|| written.name.value.clone()),
                links: values(written.links),
                extra: written.extra_targets,
                stub: written.stub,
                when: self.when(written.when, choices),
                name: written.name,
            });
        }
        components
    }

    fn hooks(&mut self, hooks: Option<Vec<At<String>>>) -> Vec<At<String>> {
        let mut names: Vec<At<String>> = Vec::new();
        for hook in hooks.into_iter().flatten() {
            if names.contains(&hook) {
                let message = format!("duplicate hook `{}`", shorten(&hook));
                self.push(&hook.place, message, "again");
            } else if self.name("hook", &hook) {
                names.push(hook);
            }
        }
        names
    }

    /// `set` are the variables that the profile sets. They are in keys, so the host's values must not replace them.
    fn env_from_host(&mut self, names: Vec<At<String>>, set: &[&Entries]) -> Vec<String> {
        let mut good = BTreeSet::new();
        for name in names {
            let label = "the host's value would replace that";
            if OWN_VARIABLES.contains(&name.as_str()) {
                let message = format!("rockenv sets `{name}` in every step");
                let help = format!("remove `{name}`; [env] sets another value");
                self.push_help(&name.place, message, label, help);
            } else if let Some((other, _)) =
                set.iter().find_map(|entries| entries.get_key_value(&name))
            {
                let (shown, whose) = (shorten(&name), self.sources.line(&other.place));
                let message = format!("`{shown}` is also set by the profile, in {whose}");
                let help = format!("remove `{shown}` here, or where it is set");
                self.push_help(&name.place, message, label, help);
            } else if self.accepted(&name.place, value::variable(&name)).is_some() {
                good.insert(name.value);
            }
        }
        good.into_iter().collect()
    }

    fn env(&mut self, entries: Entries, late: LateReferences) -> BTreeMap<String, At<String>> {
        let mut env = BTreeMap::new();
        for (name, value) in entries {
            self.accepted(&name.place, value::variable(&name));
            self.text(&value, late);
            env.insert(name.value, value);
        }
        env
    }

    fn runtime_notes(
        &mut self,
        notes: Entries,
        variables: &BTreeMap<String, At<String>>,
    ) -> BTreeMap<String, String> {
        let mut good = BTreeMap::new();
        for (name, note) in notes {
            if variables.contains_key(&name.value) {
                good.insert(name.value, note.value);
            } else {
                let known = variables.keys().map(String::as_str);
                self.unknown("runtime variable", &name, known);
            }
        }
        good
    }

    fn unknown_param(&mut self, name: &At<String>) {
        let known = self.params.keys().take(suggest::MOST_COMPARED);
        let known: Vec<String> = known.cloned().collect();
        self.unknown("parameter", name, known.iter().map(String::as_str));
    }

    /// Reports an unknown name with the known names, at most [`suggest::MOST_COMPARED`] of them.
    fn unknown<'n>(&mut self, what: &str, name: &At<String>, known: impl Iterator<Item = &'n str>) {
        let known: Vec<&str> = known.take(suggest::MOST_COMPARED).collect();
        let quoted = known.iter().map(|name| format!("`{}`", shorten(name)));
        let all = format!("choose one of: {}", quoted.collect::<Vec<_>>().join(", "));
        let all = (!known.is_empty()).then_some(all.as_str());
        let message = format!("there is no {what} `{}`", shorten(name));
        let problem = Problem::new(&name.place, message, "not found");
        self.missing(problem.suggest(name, known, all));
    }
}

fn place<T>(key: Option<&At<T>>) -> Option<Place> {
    key.map(|at| at.place.clone())
}

/// Returns the values without their places.
fn values(list: Vec<At<String>>) -> Vec<String> {
    list.into_iter().map(|at| at.value).collect()
}
