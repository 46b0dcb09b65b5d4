//! Owns the structural check of a file: unknown keys, missing keys and wrong types, all of them at once.
//!
//! It walks the parsed TOML beside the JSON schema of `file`, because serde stops at its first error. It removes faulty
//! parts, so that the rest deserializes and can be checked further.

use std::sync::LazyLock;

use serde_json::Value as Json;
use serde_spanned::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::diagnostics::Problem;
use super::file;
use crate::sys::span::Place;
use crate::sys::suggest;

static SCHEMA: LazyLock<Json> = LazyLock::new(file::schema);

/// Returns the structural mistakes of the profile whose places begin at `start`, and removes them from its table.
pub(super) fn check(start: usize, table: &mut Spanned<DeTable<'_>>) -> Vec<Problem> {
    check_as("the profile", &SCHEMA, start, table)
}

/// Checks a file with another schema in the same way.
pub(crate) fn check_as(
    name: &str,
    schema: &Json,
    start: usize,
    table: &mut Spanned<DeTable<'_>>,
) -> Vec<Problem> {
    let mut walk = Walk {
        root: schema,
        start,
        problems: Vec::new(),
    };
    let place = table.span();
    walk.table(name, table.get_mut(), &place, schema);
    walk.problems
}

struct Walk<'s> {
    root: &'s Json,
    start: usize,
    problems: Vec<Problem>,
}

impl<'s> Walk<'s> {
    fn report(&mut self, place: &Place, message: String, label: &str, help: Option<String>) {
        let problem = Problem::new(place, message, label);
        self.problems.push(Problem { help, ..problem });
    }

    /// Returns whether the value can stay.
    fn value(&mut self, name: &str, value: &mut Spanned<DeValue<'_>>, schema: &'s Json) -> bool {
        let schema = self.resolve(schema);
        let wanted = types(schema);
        let found = kind(value.get_ref());
        if !wanted.is_empty() && !wanted.contains(&found) {
            let (message, help) = self.wrong_type(name, value.get_ref(), schema, &wanted);
            let label = format!("this is {}", article(found));
            self.report(&value.span(), message, &label, help);
            return false;
        }
        let place = value.span();
        match value.get_mut() {
            DeValue::String(text) => self.string(name, text, &place, schema),
            DeValue::Array(items) => {
                if let Some(schema) = schema.get("items") {
                    let name = format!("{name} entry");
                    let all = std::mem::replace(items, DeArray::new()).into_iter();
                    let good = all.filter_map(|mut item| {
                        self.value(&name, &mut item, schema).then_some(item)
                    });
                    *items = good.collect();
                }
                true
            }
            DeValue::Table(table) => self.table(name, table, &place, schema),
            _ => true,
        }
    }

    fn string(&mut self, name: &str, text: &str, place: &Place, schema: &Json) -> bool {
        // No value of a profile may contain a NUL: it ends up in paths, arguments and variables.
        if text.contains('\0') {
            let message = format!("`{name}` contains a NUL byte");
            self.report(place, message, "has a NUL", None);
            return false;
        }
        let Some(known) = constants(schema).filter(|known| !known.contains(&text)) else {
            return true;
        };
        let all = format!("one of {}", list(&known));
        let help = suggest::help(text, known.iter().copied(), &all);
        let message = format!("`{name}` cannot be `{}`", shorten(text));
        self.report(place, message, "unknown value", Some(help));
        false
    }

    fn table(
        &mut self,
        name: &str,
        table: &mut DeTable<'_>,
        place: &Place,
        schema: &'s Json,
    ) -> bool {
        let properties = schema.get("properties").and_then(Json::as_object);
        let others = schema
            .get("additionalProperties")
            .filter(|others| others.is_object());
        let required = schema.get("required").and_then(Json::as_array);
        let required = required.into_iter().flatten().filter_map(Json::as_str);
        let absent: Vec<&str> = required.filter(|key| !table.contains_key(*key)).collect();
        let mut wrong = Vec::new();
        for (key, value) in table.iter_mut() {
            let text: &str = key.get_ref();
            let known = properties.and_then(|properties| properties.get(text));
            let is_good = match (known, others) {
                (Some(schema), _) => self.value(text, value, schema),
                (None, Some(schema)) => {
                    let is_good = self.value(text, value, schema);
                    if !is_good && types(self.resolve(schema)) == ["string"] {
                        // The key stays, because it defines a name, such as that of a parameter.
                        *value.get_mut() = DeValue::String("".into());
                    }
                    true
                }
                (None, None) => {
                    self.unknown_key(name, text, &key.span(), properties);
                    false
                }
            };
            if !is_good {
                wrong.push(text.to_owned());
            }
        }
        for key in wrong {
            table.remove(key.as_str());
        }
        for key in &absent {
            // If the format's version is missing, there is no table to point at.
            let (place, help) = match *key {
                "schema" => {
                    let help = "add `schema = 1` at the top".to_owned();
                    (self.start..self.start, Some(help))
                }
                _ => (place.clone(), None),
            };
            let message = format!("missing key `{key}` in {name}");
            self.report(&place, message, "here", help);
        }
        absent.is_empty()
    }

    fn unknown_key(
        &mut self,
        table: &str,
        key: &str,
        place: &Place,
        properties: Option<&serde_json::Map<String, Json>>,
    ) {
        let known = properties.into_iter().flat_map(serde_json::Map::keys);
        let known: Vec<&str> = known.map(String::as_str).collect();
        let help = match advice(table, key, &known) {
            Some(advice) => advice,
            None => format!("{table} has the keys {}", list(&known)),
        };
        let message = format!("unknown key `{}`", shorten(key));
        self.report(place, message, "unknown", Some(help));
    }

    fn wrong_type(
        &self,
        name: &str,
        value: &DeValue<'_>,
        schema: &'s Json,
        wanted: &[&str],
    ) -> (String, Option<String>) {
        let must = wanted.first().copied().unwrap_or("value");
        let message = format!("`{name}` must be {}", article(must));
        let tables = schema
            .get("items")
            .is_some_and(|items| types(self.resolve(items)).contains(&"table"));
        let help = match (value, must) {
            (DeValue::Table(_), "array") if tables => {
                let place = format!("/properties/{name}");
                Some(match self.root.pointer(&place).is_some() {
                    true => format!("write `[[{name}]]`"),
                    false => format!("write `{name} = [{{ ... }}]`"),
                })
            }
            (DeValue::Integer(number), "string") => Some(quoted(name, number.as_str())),
            (DeValue::Float(number), "string") => Some(quoted(name, number.as_str())),
            (DeValue::Boolean(state), "string") => Some(format!("write `\"{state}\"`")),
            (DeValue::String(text), "array") if !tables => {
                Some(format!("write `[\"{}\"]`", shorten(text)))
            }
            (DeValue::String(text), "boolean") if matches!(&**text, "true" | "false") => {
                Some(format!("write `{text}` without quotes"))
            }
            _ => None,
        };
        (message, help)
    }

    /// Follows a reference to the definition it names.
    fn resolve(&self, schema: &'s Json) -> &'s Json {
        if let Some(reference) = schema.get("$ref").and_then(Json::as_str) {
            let found = self.root.pointer(reference.trim_start_matches('#'));
            return found.unwrap_or(&Json::Null);
        }
        // An optional struct or enum is "that or null".
        let any = schema.get("anyOf").and_then(Json::as_array);
        match any.and_then(|any| any.iter().find(|one| one.get("$ref").is_some())) {
            Some(one) => self.resolve(one),
            None => schema,
        }
    }
}

/// Suggests the intended key: by spelling, or by other tools' names for it.
fn advice(table: &str, key: &str, known: &[&str]) -> Option<String> {
    let synonym = match (table, key) {
        ("the profile", "volumes" | "mount" | "mounts") => "volume",
        ("the profile", "steps") => "step",
        ("the profile", "target" | "gpu-target" | "gfx") => "targets",
        ("the profile", "base" | "from") => "image",
        ("the profile", "inherits" | "include") => "extends",
        ("the profile", "environment") => "env",
        ("step entry", "script" | "command" | "cmd" | "shell-script") => "run",
        ("step entry", "install" | "apt" | "pacman" | "package") => "packages",
        ("step entry", "cwd" | "dir" | "directory") => "workdir",
        ("volume entry", "url") => "git",
        ("volume entry", "source" | "src" | "from") => "path",
        ("volume entry", "to" | "dest" | "destination") => "target",
        ("volume entry", "commit" | "tag" | "branch") => "rev",
        ("volume entry", "size") => "max",
        ("the profile", key) => match elsewhere(key) {
            Some(table) => return Some(format!("it belongs in {table}")),
            None => suggest::closest(&key.replace('_', "-"), known.iter().copied())?,
        },
        _ => suggest::closest(&key.replace('_', "-"), known.iter().copied())?,
    };
    Some(format!("did you mean `{synonym}`?"))
}

/// Returns the table in which a key would be right.
fn elsewhere(key: &str) -> Option<&'static str> {
    let tables = [
        ("Resources", "[resources]"),
        ("Gpu", "[gpu]"),
        ("Step", "a [[step]]"),
        ("Volume", "a [[volume]]"),
        ("Component", "a [[component]]"),
    ];
    let mut tables = tables.into_iter();
    let found = tables.find(|(definition, _)| {
        let place = format!("/$defs/{definition}/properties/{key}");
        SCHEMA.pointer(&place).is_some()
    });
    Some(found?.1)
}

/// Returns what to write instead of a number; a size needs a unit too.
fn quoted(name: &str, number: &str) -> String {
    let sizes = ["disk", "disk-floor", "log-max", "max", "memory", "min-free"];
    let mut groups = ["memory-", "keep-at-"].into_iter();
    let is_size = sizes.contains(&name) || groups.any(|group| name.starts_with(group));
    let unit = if is_size { "G" } else { "" };
    format!("write `\"{number}{unit}\"`")
}

/// Returns the types that a schema allows, in TOML's terms.
fn types(schema: &Json) -> Vec<&'static str> {
    let named: Vec<&str> = match schema.get("type") {
        Some(Json::String(one)) => vec![one],
        Some(Json::Array(some)) => some.iter().filter_map(Json::as_str).collect(),
        _ if constants(schema).is_some() => vec!["string"],
        _ => {
            let any = schema.get("anyOf").and_then(Json::as_array);
            return any.into_iter().flatten().flat_map(types).collect();
        }
    };
    let toml = |name: &str| match name {
        "object" => Some("table"),
        "array" => Some("array"),
        "string" => Some("string"),
        "integer" => Some("integer"),
        "boolean" => Some("boolean"),
        _ => None,
    };
    named.into_iter().filter_map(toml).collect()
}

fn constants(schema: &Json) -> Option<Vec<&str>> {
    if let Some(values) = schema.get("enum").and_then(Json::as_array) {
        return Some(values.iter().filter_map(Json::as_str).collect());
    }
    let variants = schema.get("oneOf")?.as_array()?;
    variants
        .iter()
        .map(|variant| variant.get("const").and_then(Json::as_str))
        .collect()
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "string",
        DeValue::Integer(_) => "integer",
        DeValue::Float(_) => "float",
        DeValue::Boolean(_) => "boolean",
        DeValue::Datetime(_) => "date",
        DeValue::Array(_) => "array",
        DeValue::Table(_) => "table",
    }
}

fn article(kind: &str) -> String {
    match kind {
        "integer" => "a whole number".to_owned(),
        "float" => "a number".to_owned(),
        "array" => "an array".to_owned(),
        other => format!("a {other}"),
    }
}

fn list(names: &[&str]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

/// Quotes user input so that it neither fills the screen nor controls the terminal.
pub(crate) fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        short.push('…');
    }
    short
}
