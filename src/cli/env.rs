//! Owns `env`: the variables for using the results of an env.

use clap::Args;
use serde::Serialize;

use crate::plan::ids::EnvName;
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct EnvArgs {
    /// The env [default: the only one]
    #[arg(value_name = "ENV")]
    name: Option<EnvName>,
}

#[derive(Serialize)]
struct Variable<'a> {
    name: &'a str,
    value: &'a str,
    note: Option<&'a str>,
}

/// Prints the variables, for `eval` in a shell or as JSON.
pub(crate) fn env(cx: &Context, args: &EnvArgs) -> Result<()> {
    let store = cx.existing_store()?;
    let name = store.named_or_only(args.name.as_ref())?;
    store.known(&name)?;
    let spec = store.spec(&name)?;
    let variables: Vec<Variable<'_>> = spec
        .runtime_env
        .iter()
        .map(|(name, value)| Variable {
            name,
            value,
            note: spec.runtime_notes.get(name).map(String::as_str),
        })
        .collect();
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/env/1",
            env: &name,
            profile: &spec.profile,
            variables: &variables,
        });
    }
    for variable in &variables {
        cx.ui.raw(exported(variable).as_bytes());
    }
    if variables.is_empty() {
        cx.ui.note(&format!(
            "profile `{}` sets no runtime variables",
            spec.profile
        ));
    }
    Ok(())
}

/// Returns a line for a POSIX shell, safe for any value or note.
fn exported(variable: &Variable<'_>) -> String {
    let note = variable.note.map_or_else(String::new, |note| {
        note.lines().map(|line| format!("# {line}\n")).collect()
    });
    let value = variable.value.replace('\'', r"'\''");
    format!("{note}export {}='{value}'\n", variable.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_same_value() {
        for value in ["", "gfx1103;gfx1201", "it's $HOME `id` \\", "two\nlines"] {
            let text = exported(&Variable {
                name: "V",
                value,
                note: Some("what for\n$(false)"),
            });
            let script = format!("set -eu\n{text}printf %s \"$V\"");
            let shell = std::process::Command::new("sh")
                .args(["-c", &script])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(shell.stdout).unwrap(), value, "{text}");
        }
    }
}
