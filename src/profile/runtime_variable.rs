//! Owns which variables a profile may set in the shell of a user who evaluates `rockenv env`.

use super::structure::shorten;
use super::value::Refused;

/// A shell, the loader, an interpreter or git runs what these name, or runs another program because of them.
const RUN_PROGRAMS: &str = "BASHOPTS BASH_ENV BROWSER EDITOR ENV HOME IFS JAVA_TOOL_OPTIONS NODE_OPTIONS PAGER PATH \
    PERL5OPT PROMPT_COMMAND PS0 PS1 PS2 PS3 PS4 PYTHONHOME PYTHONSTARTUP RUBYOPT SHELLOPTS VISUAL";
/// And those that begin with one of these.
const BEGINNINGS: [&str; 3] = ["BASH_FUNC_", "GIT_", "LD_"];

/// Refuses a variable that makes the host run programs.
pub(crate) fn check(name: &str) -> Result<(), Refused> {
    let begins =
        BEGINNINGS.iter().any(|begin| name.starts_with(begin)) && name != "LD_LIBRARY_PATH";
    if begins
        || RUN_PROGRAMS
            .split_ascii_whitespace()
            .any(|known| known == name)
    {
        let message = format!("`{}` cannot be a runtime variable", shorten(name));
        return Err(Refused::new(message).help(
            "on the host it would run programs; set it in [env], for the steps, or in the command that needs it",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_runs_nothing_because_of_a_profile() {
        for good in ["HSA_OVERRIDE_GFX_VERSION", "LD_LIBRARY_PATH", "GITHUB"] {
            check(good).unwrap();
        }
        for bad in ["PATH", "LD_PRELOAD", "PROMPT_COMMAND", "PS4", "GIT_SSH"] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
