//! Owns `schema`: JSON schemas of the files and streams that rockenv reads and writes.

use clap::{Args, ValueEnum};

use crate::plan::record::Record;
use crate::store::config;
use crate::sys::error::Result;
use crate::ui::event::{Event, SCHEMA};
use crate::ui::metrics;
use crate::up::context::Context;
use crate::{image, profile};

/// Prefix of schema ids. An id only names a schema; nothing is fetched from it.
const SCHEMA_ID: &str = "urn:rockenv:schema:";

#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// Schema to print
    #[arg(default_value = "profile")]
    what: Subject,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Subject {
    /// `profiles/*.toml`
    Profile,
    /// `images/*.toml`
    Image,
    /// `hooks/*/hook.toml`
    Hook,
    /// `rockenv.toml` and `config.toml`
    Config,
    /// A line of `up --progress json`
    Events,
    /// A line of `up --metrics`
    Metrics,
    /// What the store remembers of an env
    Record,
}

pub(crate) fn schema(cx: &Context, args: &SchemaArgs) -> Result<()> {
    let mut schema = match args.what {
        Subject::Profile => profile::schema(),
        Subject::Hook => crate::profile::hook::schema(),
        Subject::Image => image::recipe::schema().to_value(),
        Subject::Config => schemars::schema_for!(config::File).to_value(),
        Subject::Record => schemars::schema_for!(Record).to_value(),
        Subject::Metrics => schemars::schema_for!(metrics::Row).to_value(),
        Subject::Events => events(),
    };
    if let Some(top) = schema.as_object_mut() {
        let name = args.what.to_possible_value();
        let name = name
            .as_ref()
            .map_or("", clap::builder::PossibleValue::get_name);
        top.insert("$id".to_owned(), format!("{SCHEMA_ID}{name}").into());
    }
    cx.ui.json(&schema)
}

/// Returns the schema of one line: an event with the version and time at the start of every line.
fn events() -> serde_json::Value {
    let mut schema = schemars::schema_for!(Event);
    schema.insert(
        "properties".to_owned(),
        serde_json::json!({
            "schema": { "description": "Version of the stream.", "const": SCHEMA },
            "time": { "description": "When it happened.", "type": "string", "format": "date-time" },
        }),
    );
    schema.insert("required".to_owned(), serde_json::json!(["schema", "time"]));
    schema.to_value()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    /// Collects the names of properties, also of definitions.
    fn collect(schema: &Value, keys: &mut BTreeSet<String>) {
        for group in ["properties", "$defs"] {
            let Some(members) = schema.get(group).and_then(Value::as_object) else {
                continue;
            };
            if group == "properties" {
                keys.extend(members.keys().cloned());
            }
            for member in members.values() {
                collect(member, keys);
            }
        }
    }

    #[test]
    fn the_reference_names_every_key() {
        for (schema, page) in [
            (
                profile::schema(),
                include_str!("../../docs/reference/profile.md"),
            ),
            (
                image::recipe::schema().to_value(),
                include_str!("../../docs/reference/image.md"),
            ),
            (
                profile::hook::schema(),
                include_str!("../../docs/reference/hook.md"),
            ),
            (
                schemars::schema_for!(config::File).to_value(),
                concat!(
                    include_str!("../../docs/reference/configuration.md"),
                    include_str!("../../docs/reference/store.md"),
                ),
            ),
        ] {
            let mut keys = BTreeSet::new();
            collect(&schema, &mut keys);
            assert!(keys.len() > 10, "{keys:?}");
            for key in keys {
                let forms = [
                    format!("`{key}`"),
                    format!("`[{key}]`"),
                    format!("`[[{key}]]`"),
                    format!("\n{key} = "),
                    format!("\n[gc.{key}."),
                ];
                assert!(forms.iter().any(|form| page.contains(form)), "{key}");
            }
        }
    }
}
