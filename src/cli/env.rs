//! Owns `env`: the variables for using the results of an env.

use clap::Args;

use crate::plan::ids::EnvName;
use crate::profile::runtime_variable;
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct EnvArgs {
    /// The env [default: the only one]
    #[arg(value_name = "ENV")]
    name: Option<EnvName>,
}

/// Prints the variables, for `eval` in a shell or as JSON.
pub(crate) fn env(cx: &Context, args: &EnvArgs) -> Result<()> {
    let store = cx.existing_store()?;
    let name = store.named_or_only(args.name.as_ref())?;
    let up = store.known(&name)?.up_command();
    let spec = store.spec(&name)?;
    // Another version may have accepted more names.
    let mut names = spec.runtime_env.keys();
    if let Some(refused) = names.find_map(|name| runtime_variable::check(name).err()) {
        let profile = &spec.profile;
        return Err(invalid!("{}", refused.message).help(format!(
            "remove it from [runtime-env] of profile `{profile}`, then run: {up}"
        )));
    }
    let variables = spec.runtime_env.iter().map(|(name, value)| {
        object! { name: name, value: value, note: spec.runtime_notes.get(name) }
    });
    let variables: Vec<_> = variables.collect();
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/env/1",
            env: &name,
            profile: &spec.profile,
            variables: &variables,
        });
    }
    for one in &variables {
        let line = exported(one.name, one.value, one.note.map(String::as_str));
        cx.ui.raw(line.as_bytes());
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
fn exported(name: &str, value: &str, note: Option<&str>) -> String {
    let note = note.iter().flat_map(|note| note.lines());
    let note: String = note.map(|line| format!("# {line}\n")).collect();
    let value = value.replace('\'', r"'\''");
    format!("{note}export {name}='{value}'\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_same_value() {
        for value in ["", "gfx1103;gfx1201", "it's $HOME `id` \\", "two\nlines"] {
            let text = exported("V", value, Some("what for\n$(false)"));
            let script = format!("set -eu\n{text}printf %s \"$V\"");
            let shell = std::process::Command::new("sh")
                .args(["-c", &script])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(shell.stdout).unwrap(), value, "{text}");
        }
    }
}
