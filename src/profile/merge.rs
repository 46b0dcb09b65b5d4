//! Owns `extends`: how one file changes another, by key; components, volumes and steps by name.
//!
//! It merges parsed TOML before values get types, so that only keys with their own rule are named here. Each value
//! keeps its place; `check` interprets it when all files are merged.

use serde_spanned::Spanned;
use toml::de::{DeArray, DeTable, DeValue, Error};

use super::diagnostics::{Problem, SourceFile, Sources, UnreadPart};
use super::structure::{self, shorten};
use crate::sys::span::At;

/// Actions of a step; a new one replaces the inherited one.
const ACTIONS: [&str; 4] = ["run", "packages", "copy", "export"];

/// Keys of a volume and the kinds that they are for. Another kind drops the inherited keys that are not for it.
const KEYS_OF_KINDS: [(&str, &[&str]); 10] = [
    ("path", &["source", "output", "host"]),
    ("git", &["source"]),
    ("rev", &["source"]),
    ("depth", &["source"]),
    ("submodules", &["source"]),
    ("max", &["cache"]),
    ("locked", &["cache"]),
    ("downloads", &["cache"]),
    ("needed-by", &["cache"]),
    ("disk", &["source", "build", "cache", "output"]),
];

/// Keys of a step and the actions that they are for. Another action drops the inherited keys that are not for it.
const KEYS_OF_ACTIONS: [(&str, &[&str]); 4] = [
    ("shell", &["run"]),
    ("workdir", &["run"]),
    ("env", &["run", "packages"]),
    ("user", &["run", "copy", "export"]),
];

/// Parses a file. Places are offsets in the concatenation of all files.
pub(crate) fn parse(source: &SourceFile) -> (Spanned<DeTable<'_>>, Vec<Error>) {
    let (table, errors) = DeTable::parse_recoverable(&source.text);
    let shifted = match errors.is_empty() {
        true => Spanned::new(table.span(), shift(table.into_inner(), source.start)),
        false => table,
    };
    (shifted, errors)
}

fn shift(table: DeTable<'_>, by: usize) -> DeTable<'_> {
    let entries = table.into_iter().map(|(key, value)| {
        let place = key.span().start + by..key.span().end + by;
        let key = Spanned::new(place, key.into_inner());
        (key, shift_value(value, by))
    });
    entries.collect()
}

fn shift_value(value: Spanned<DeValue<'_>>, by: usize) -> Spanned<DeValue<'_>> {
    let place = value.span().start + by..value.span().end + by;
    let value = match value.into_inner() {
        DeValue::Table(table) => DeValue::Table(shift(table, by)),
        DeValue::Array(items) => {
            let items = items.into_iter().map(|item| shift_value(item, by));
            DeValue::Array(items.collect())
        }
        leaf => leaf,
    };
    Spanned::new(place, value)
}

/// Returns the merged content of the files as far as their structure is valid. Problems with the other parts go to
/// `unread`.
pub(crate) fn merge<'t>(
    sources: &'t Sources,
    unread: &mut Vec<(UnreadPart, Problem)>,
    problems: &mut Vec<Problem>,
) -> Spanned<DeTable<'t>> {
    let mut merge = Merge {
        extending: false,
        problems,
        table: DeTable::new(),
        components: Vec::new(),
        volumes: Vec::new(),
        steps: Vec::new(),
    };
    // The most distant ancestor is the base that the others change.
    for source in sources.iter().rev() {
        let (mut table, errors) = parse(source);
        if errors.is_empty() {
            let structure = structure::check(source.start, &mut table).into_iter();
            unread.extend(structure.map(|problem| (UnreadPart::Part, problem)));
            merge.file(table.into_inner());
        }
        let not_toml = |error| (UnreadPart::File, Problem::not_toml(error, source.start));
        unread.extend(errors.iter().map(not_toml));
        merge.extending = true;
    }
    let mut table = merge.table;
    for (key, items) in [
        ("component", merge.components),
        ("volume", merge.volumes),
        ("step", merge.steps),
    ] {
        let items = items
            .into_iter()
            .map(|item| Spanned::new(item.name.place, DeValue::Table(item.table)));
        let items = DeValue::Array(items.collect());
        table.insert(Spanned::new(0..0, key.into()), Spanned::new(0..0, items));
    }
    Spanned::new(0..0, table)
}

struct Merge<'p, 't> {
    /// Whether this file extends another.
    extending: bool,
    problems: &'p mut Vec<Problem>,
    table: DeTable<'t>,
    components: Vec<Item<'t>>,
    volumes: Vec<Item<'t>>,
    steps: Vec<Item<'t>>,
}

/// A table of `[[component]]`, `[[volume]]` or `[[step]]`.
struct Item<'t> {
    name: At<String>,
    table: DeTable<'t>,
}

impl<'t> Item<'t> {
    fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    fn is_removed(&self) -> bool {
        let remove = self.table.get("remove").map(Spanned::get_ref);
        remove.and_then(DeValue::as_bool) == Some(true)
    }

    fn remove(&mut self, keys: &[&str]) {
        for key in keys {
            self.table.remove(*key);
        }
    }

    /// Removes the keys that are not for this kind or action.
    fn remove_others(&mut self, keys: &[(&str, &[&str])], of: &str) {
        let others = keys.iter().filter(|(_, all)| !all.contains(&of));
        others.for_each(|(key, _)| self.remove(&[*key]));
    }

    /// Overrides keys with the keys of an item of the same name.
    fn extend(&mut self, mut over: Self) {
        over.remove(&["name"]);
        extend(&mut self.table, over.table);
    }
}

/// Overrides `under` with the keys of `over`: tables key by key, other values as a whole.
fn extend<'t>(under: &mut DeTable<'t>, over: DeTable<'t>) {
    for (key, value) in over {
        let place = value.span();
        let inherited = under.get_mut(&**key.get_ref()).map(Spanned::get_mut);
        match (inherited, value.into_inner()) {
            (Some(DeValue::Table(inherited)), DeValue::Table(table)) => extend(inherited, table),
            (_, value) => {
                // Remove the key too, because the new key has its own place.
                under.remove(&**key.get_ref());
                under.insert(key, Spanned::new(place, value));
            }
        }
    }
}

/// Takes the names of removed items off a list.
fn take_off(table: &mut DeTable<'_>, list: &str, items: &[Item<'_>]) {
    let Some(DeValue::Array(names)) = table.get_mut(list).map(Spanned::get_mut) else {
        return;
    };
    let is_removed = |name: &str| {
        let mut removed = items.iter().filter(|item| item.is_removed());
        removed.any(|item| item.name.value == name)
    };
    let all = std::mem::replace(names, DeArray::new()).into_iter();
    let left = all.filter(|name| !name.get_ref().as_str().is_some_and(is_removed));
    *names = left.collect();
}

fn text(value: &Spanned<DeValue<'_>>) -> Option<At<String>> {
    let place = value.span();
    let value = value.get_ref().as_str()?.to_owned();
    Some(At { value, place })
}

pub(crate) fn text_at(table: &DeTable<'_>, key: &str) -> Option<At<String>> {
    text(table.get(key)?)
}

fn position(items: &[Item<'_>], name: &At<String>) -> Option<usize> {
    items.iter().position(|item| item.name == *name)
}

impl<'t> Merge<'_, 't> {
    fn file(&mut self, mut file: DeTable<'t>) {
        if let Some(schema) = file.get("schema")
            && let DeValue::Integer(version) = schema.get_ref()
            && i64::from_str_radix(version.as_str(), version.radix()) != Ok(1)
        {
            let message =
                format!("this version of rockenv supports format version 1, not {version}");
            self.problems
                .push(Problem::new(&schema.span(), message, "unknown version"));
        }
        let components = self.items(&mut file, "component");
        let steps = self.items(&mut file, "step");
        self.take_off_lists(&components, &steps);
        for component in components {
            self.component(component);
        }
        for volume in self.items(&mut file, "volume") {
            self.volume(volume);
        }
        for step in steps {
            self.step(step);
        }
        extend(&mut self.table, file);
    }

    /// Takes an array of named tables out of a file.
    fn items(&mut self, file: &mut DeTable<'t>, key: &str) -> Vec<Item<'t>> {
        let mut items = Vec::new();
        let Some(DeValue::Array(array)) = file.remove(key).map(Spanned::into_inner) else {
            return items;
        };
        for table in array {
            let DeValue::Table(table) = table.into_inner() else {
                continue;
            };
            let Some(name) = text_at(&table, "name") else {
                continue;
            };
            match position(&items, &name) {
                None => items.push(Item { name, table }),
                Some(_) => {
                    let message = format!("two {key}s are named `{}`", shorten(&name));
                    let problem = Problem::new(&name.place, message, "the second one");
                    self.problems.push(problem);
                }
            }
        }
        items
    }

    /// Takes items that a file removes off the lists that it inherits. The file's own lists must not name them.
    fn take_off_lists(&mut self, components: &[Item<'t>], steps: &[Item<'t>]) {
        for component in &mut self.components {
            take_off(&mut component.table, "links", components);
        }
        for volume in &mut self.volumes {
            take_off(&mut volume.table, "needed-by", steps);
        }
        if let Some(DeValue::Table(gpu)) = self.table.get_mut("gpu").map(Spanned::get_mut) {
            take_off(gpu, "needed-by", steps);
        }
    }

    /// Adds, removes or replaces a component, which is replaced as a whole.
    fn component(&mut self, component: Item<'t>) {
        let inherited = position(&self.components, &component.name);
        match (inherited, component.is_removed()) {
            (Some(index), true) => drop(self.components.remove(index)),
            (Some(index), false) => self.components[index] = component,
            (None, true) => {
                let name = &component.name;
                let message = format!("there is no component `{}` to remove", shorten(name));
                let problem = Problem::new(&name.place, message, "not there");
                self.problems.push(problem.unless(UnreadPart::Part));
            }
            (None, false) => self.components.push(component),
        }
    }

    fn volume(&mut self, volume: Item<'t>) {
        let Some(index) = position(&self.volumes, &volume.name) else {
            self.volumes.push(volume);
            return;
        };
        let inherited = &mut self.volumes[index];
        // A source has either `path` or `git`: naming the other one replaces it together with its keys.
        match (volume.has("path"), volume.has("git")) {
            (true, false) => inherited.remove(&["git", "rev", "depth", "submodules"]),
            (false, true) => inherited.remove(&["path"]),
            _ => {}
        }
        let kind = |volume: &Item<'_>| text_at(&volume.table, "kind").map(|kind| kind.value);
        if let (Some(new), Some(old)) = (kind(&volume), kind(inherited))
            && new != old
        {
            inherited.remove_others(&KEYS_OF_KINDS, &new);
        }
        inherited.extend(volume);
    }

    fn step(&mut self, mut step: Item<'t>) {
        let inherited = position(&self.steps, &step.name);
        if let Some(remove) = step.table.remove("remove") {
            self.remove(inherited, &step, &remove);
            return;
        }
        let after = step.table.remove("after").as_ref().and_then(text);
        let action = self.one_action(&mut step);
        let step = match inherited {
            Some(index) => {
                let mut inherited = self.steps.remove(index);
                if let Some(action) = action {
                    inherited.remove(&ACTIONS);
                    inherited.remove_others(&KEYS_OF_ACTIONS, action);
                }
                for whole in ["when", "published"] {
                    if step.has(whole) {
                        inherited.remove(&[whole]);
                    }
                }
                inherited.extend(step);
                inherited
            }
            None => step,
        };
        let index = match &after {
            Some(after) => self.index_after(after, &step.name),
            None => inherited,
        };
        self.steps.insert(index.unwrap_or(self.steps.len()), step);
    }

    fn index_after(&mut self, after: &At<String>, step: &str) -> Option<usize> {
        let index = position(&self.steps, after);
        if index.is_none() {
            let known = self.steps.iter().map(|step| step.name.as_str());
            let message = format!("`{}` cannot come after `{}`", shorten(step), shorten(after));
            let label = "no step of this name before this one";
            let problem = Problem::new(&after.place, message, label).suggest(after, known, None);
            self.problems.push(problem.unless(UnreadPart::Part));
        }
        index.map(|index| index + 1)
    }

    fn remove(&mut self, inherited: Option<usize>, step: &Item<'_>, remove: &Spanned<DeValue<'_>>) {
        let name = &step.name;
        let is_defined = step.has("after") || ACTIONS.iter().any(|action| step.has(action));
        let problem = if remove.get_ref().as_bool() != Some(true) {
            let message = "`remove = false` has no effect";
            Problem::new(&remove.span(), message, "remove it")
        } else if is_defined {
            let message = format!("step `{}` is both removed and defined", shorten(name));
            Problem::new(&remove.span(), message, "removed here")
        } else if let Some(index) = inherited {
            self.steps.remove(index);
            return;
        } else {
            let message = format!("there is no step `{}` to remove", shorten(name));
            let problem = Problem::new(&name.place, message, "not an inherited step")
                .unless(UnreadPart::Part);
            match self.extending {
                false => problem.help("only a profile with `extends` can remove steps"),
                true => {
                    let known = self.steps.iter().map(|step| step.name.as_str());
                    problem.suggest(name, known, None)
                }
            }
        };
        self.problems.push(problem);
    }

    /// Returns the key of a step's action, and removes all other actions.
    fn one_action(&mut self, step: &mut Item<'t>) -> Option<&'static str> {
        let mut found: Vec<_> = ACTIONS
            .into_iter()
            .filter_map(|action| Some((step.table.get(action)?.span(), action)))
            .collect();
        found.sort_by_key(|(place, _)| place.start);
        let (_, first) = found.first().cloned()?;
        for (place, second) in &found[1..] {
            step.remove(&[second]);
            let message = format!("a step has one action: `{first}` or `{second}`");
            let problem = Problem::new(place, message, format!("after `{first}`"));
            self.problems
                .push(problem.help("split it into two steps: each ends in its own snapshot"));
        }
        Some(first)
    }
}
