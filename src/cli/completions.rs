//! Owns shell completion: the script that a shell sources, and the candidates that it requests at each key press.
//!
//! `COMPLETE=bash rockenv -- WORDS` prints candidates. It only reads. Unreadable files yield no candidates: an error
//! message in the middle of a command line is useless.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Command, ValueEnum};
use clap_complete::CompleteEnv;
use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _,
};
use clap_complete::env::{Elvish, EnvCompleter, Powershell};

use crate::cli::help;
use crate::image::catalog;
use crate::plan::ids::EnvName;
use crate::plan::resolve::profile_or_target;
use crate::profile::{self, hook};
use crate::rocm::target;
use crate::store::Store;
use crate::store::config::Config;
use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell that will read it
    shell: Shell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    /// source <(rockenv completions bash)
    Bash,
    /// source <(rockenv completions zsh)
    Zsh,
    /// rockenv completions fish | source
    Fish,
    /// eval (rockenv completions elvish | slurp)
    Elvish,
    /// rockenv completions powershell | Out-String | Invoke-Expression
    Powershell,
}

pub(crate) fn completions(cx: &Context, args: &CompletionsArgs) -> Result<()> {
    cx.ui.raw(script(args.shell)?.as_bytes());
    Ok(())
}

/// What an argument refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Envs,
    Profiles,
    ProfilesAndTargets,
    Targets,
    Images,
    Hooks,
    Snapshots,
    Steps,
    ProfileSteps,
    Commands,
}

/// What an argument of these commands refers to.
const ARGUMENTS: &[(Names, &str, &str)] = &[
    (
        Names::Envs,
        "name",
        "down, status, shell, exec, env, logs, du, report",
    ),
    (Names::Envs, "names", "rm"),
    (
        Names::Envs,
        "env",
        "snapshot create, snapshot ls, snapshot diff, snapshot rm, rollback, fork, verify, push, export",
    ),
    (Names::Snapshots, "from", "snapshot diff"),
    (Names::Snapshots, "to", "snapshot diff"),
    (Names::Snapshots, "names", "snapshot rm"),
    (Names::Snapshots, "snapshot", "rollback"),
    (Names::Steps, "step", "logs"),
    (Names::Steps, "steps", "verify"),
    (Names::Steps, "until", "push, export"),
    (Names::ProfileSteps, "until", "up, plan"),
    (Names::ProfileSteps, "rerun", "up, plan"),
    (
        Names::ProfilesAndTargets,
        "what",
        "up, plan, profile show, profile check, lock",
    ),
    (Names::Profiles, "profile", MATRIX),
    (Names::Targets, "targets", MATRIX),
    (
        Names::Targets,
        "target",
        "up, plan, profile show, profile check, target show, lock",
    ),
    (Names::Images, "name", "image build, image verify"),
    (Names::Hooks, "hook", "hook check"),
    (Names::Commands, "command", "help, man"),
];
const MATRIX: &str =
    "matrix up, matrix json, matrix github, matrix gitlab, matrix slurm, matrix kubernetes";

/// Returns each argument with its command's path and what it refers to.
fn arguments() -> impl Iterator<Item = (Vec<&'static str>, &'static str, Names)> {
    ARGUMENTS.iter().flat_map(|(names, argument, commands)| {
        let paths = commands.split(", ");
        paths.map(move |path| (path.split(' ').collect(), *argument, *names))
    })
}

/// Prints candidates if a shell requests them; returns `None` for any other invocation.
pub(crate) fn answer() -> Option<ExitCode> {
    let directory = std::env::current_dir().ok();
    match CompleteEnv::with_factory(command).try_complete(std::env::args_os(), directory.as_deref())
    {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        // An unknown shell, or a shell that has exited.
        Err(_) => Some(ExitCode::FAILURE),
    }
}

/// Joins the words that bash splits at `=` and `:`, where a candidate replaces only the last part. bash inserts candidates
/// verbatim, and would run `$(...)` in them, unless they are file names.
const BASH: &str = r#"source <(COMPLETE=bash rockenv)
_rockenv() {
    local part joins= typed=$2 last=$2 words=()
    [[ ${COMP_WORDS[COMP_CWORD]} != [=:]* ]] || last=${COMP_WORDS[COMP_CWORD]} typed=
    for part in "${COMP_WORDS[@]:0:COMP_CWORD}" "$last"; do
        case $joins$part in
            [=:]*) words[${#words[@]} - 1]+=$part joins== ;;
            *) words+=("$part") ;;
        esac
        [[ $part == [=:]* ]] || joins=
    done
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
    _clap_complete_rockenv "$1" "${words[COMP_CWORD]}"
    last=${words[COMP_CWORD]%"$typed"}
    COMPREPLY=("${COMPREPLY[@]#"$last"}")
    local IFS=/
    case ${COMPREPLY[*]} in
        *[!A-Za-z0-9_./:=@%+,~-]*) compopt -o filenames; COMPREPLY=("${COMPREPLY[@]%/}") ;;
    esac
}
complete -o nospace -o bashdefault -o nosort -F _rockenv rockenv
"#;

fn script(shell: Shell) -> Result<String> {
    // The protocol changes between versions, so where possible the script asks rockenv for the code when the shell
    // starts.
    let completer: &dyn EnvCompleter = match shell {
        Shell::Bash => return Ok(BASH.to_owned()),
        Shell::Zsh => {
            // Also works as the file `_rockenv` in fpath, which zsh runs at the first completion.
            return Ok(concat!(
                "#compdef rockenv\n",
                "source <(COMPLETE=zsh rockenv)\n",
                "if [[ \"${funcstack[1]}\" == \"_rockenv\" ]]; then _clap_dynamic_completer_rockenv; fi\n"
            )
            .to_owned());
        }
        Shell::Fish => return Ok("COMPLETE=fish rockenv | source\n".to_owned()),
        Shell::Elvish => &Elvish,
        Shell::Powershell => &Powershell,
    };
    let mut text = Vec::new();
    completer.write_registration("COMPLETE", "rockenv", "rockenv", "rockenv", &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn command() -> Command {
    let mut command = without_aliases(help::command());
    for (path, argument, names) in arguments() {
        command = attach(command, &path, argument, names);
    }
    command
}

/// Hides command aliases, which would replace the commands in the list.
fn without_aliases(command: Command) -> Command {
    command.mut_subcommands(|one| {
        let hidden: Vec<&'static str> = ["enter", "list", "remove"]
            .into_iter()
            .filter(|known| one.get_visible_aliases().any(|alias| alias == *known))
            .collect();
        without_aliases(one.visible_alias(None).aliases(hidden))
    })
}

fn attach(command: Command, path: &[&str], argument: &str, names: Names) -> Command {
    match path.split_first() {
        Some((first, rest)) if command.find_subcommand(first).is_some() => {
            command.mut_subcommand(*first, |inner| attach(inner, rest, argument, names))
        }
        Some(_) => command,
        None if command
            .get_arguments()
            .any(|known| known.get_id() == argument) =>
        {
            // `mut_arg` would move the argument behind the others.
            command.mut_args(|known| match names {
                _ if known.get_id() != argument => known,
                Names::Profiles | Names::ProfilesAndTargets => {
                    known.add(ArgValueCompleter::new(move |typed: &OsStr| {
                        profile_or_file(names, typed)
                    }))
                }
                _ => known.add(ArgValueCandidates::new(move || candidates(names))),
            })
        }
        None => command,
    }
}

/// Returns the profiles that begin with `typed`, or files if `typed` is a path.
fn profile_or_file(names: Names, typed: &OsStr) -> Vec<CompletionCandidate> {
    let text = typed.to_string_lossy();
    if text.contains('/') {
        let files = PathCompleter::any();
        let files = files.filter(|path: &Path| path.extension().is_some_and(|end| end == "toml"));
        return files.complete(typed);
    }
    let mut found = candidates(names);
    found.retain(|one| one.get_value().to_string_lossy().starts_with(&*text));
    found
}

fn candidates(names: Names) -> Vec<CompletionCandidate> {
    let words = std::env::args_os().skip_while(|word| word != "--");
    let words = words.map(|word| word.to_string_lossy().into_owned());
    find(names, &words.collect::<Vec<_>>()).unwrap_or_default()
}

fn find(names: Names, words: &[String]) -> Result<Vec<CompletionCandidate>> {
    let (mut config, _) = Config::read()?;
    let mut after = words.iter().skip_while(|word| *word != "--home").skip(1);
    let mut joined = words.iter().filter_map(|word| word.strip_prefix("--home="));
    if let Some(home) = joined.next().or(after.next().map(String::as_str)) {
        config.home = std::path::absolute(home)?;
    }
    let found: Vec<String> = match names {
        Names::Commands => return Ok(commands(words)),
        Names::Targets => return Ok(targets()),
        Names::Profiles => return profiles(&config),
        Names::ProfilesAndTargets => {
            let mut found = profiles(&config)?;
            found.extend(targets());
            return Ok(found);
        }
        Names::ProfileSteps => profile_steps(&config, words)?,
        Names::Images => {
            let images = catalog::list(&config.image_dirs)?.into_iter();
            images.map(|image| image.name).collect()
        }
        Names::Hooks => {
            let hooks = hook::list(&config.hook_dirs)?.into_iter();
            hooks.map(|hook| hook.name).collect()
        }
        Names::Envs => envs(&config)?.1.into_iter().map(String::from).collect(),
        Names::Snapshots | Names::Steps => {
            let (store, envs) = envs(&config)?;
            let mut found = Vec::new();
            // The env precedes the word on the line.
            for env in envs
                .iter()
                .filter(|env| words.iter().any(|word| **env == **word))
            {
                let Some(record) = store.record(env)? else {
                    continue;
                };
                if names == Names::Snapshots {
                    found.extend(record.snapshots.into_iter().map(|one| one.name));
                } else {
                    found.extend(record.steps.into_iter().map(|one| one.name.into()));
                }
            }
            found
        }
    };
    Ok(found.into_iter().map(CompletionCandidate::new).collect())
}

/// Returns the subcommands of the command named by the preceding words.
fn commands(words: &[String]) -> Vec<CompletionCandidate> {
    let mut command = help::command();
    // Skips `--`, the program, and `help` or `man`.
    for word in words.iter().skip(3) {
        if let Some(inner) = command.find_subcommand(word) {
            command = inner.clone();
        }
    }
    let inner = command.get_subcommands();
    inner
        .map(|one| CompletionCandidate::new(one.get_name()).help(one.get_about().cloned()))
        .collect()
}

/// Returns the steps of the profile named earlier on the line.
fn profile_steps(config: &Config, words: &[String]) -> Result<Vec<String>> {
    let names = profile::names(&config.profile_dirs)?;
    let names = || names.iter().map(String::as_str);
    for word in words.iter().skip(3).filter(|word| !word.starts_with('-')) {
        if let Ok(request) = profile_or_target(word, &[], names()) {
            let found = profile::load(&config.profile_dirs, &request.profile)?;
            let steps = found.steps.into_iter();
            return Ok(steps.map(|step| String::from(step.name)).collect());
        }
    }
    Ok(Vec::new())
}

fn envs(config: &Config) -> Result<(Store, Vec<EnvName>)> {
    let store = Store::open_existing(&config.home)?.ok_or_else(|| not_found!("no store yet"))?;
    let envs = store.envs()?;
    Ok((store, envs))
}

fn profiles(config: &Config) -> Result<Vec<CompletionCandidate>> {
    Ok(profile::list(&config.profile_dirs)?
        .into_iter()
        .map(|profile| {
            CompletionCandidate::new(profile.name).help(Some(profile.description.into()))
        })
        .collect())
}

fn targets() -> Vec<CompletionCandidate> {
    target::all()
        .map(|target| {
            CompletionCandidate::new(target.name())
                .help(Some(target.info().declared.product.clone().into()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_that_is_named_here_exists_and_stays_in_its_place() {
        for (path, argument, _) in arguments() {
            let order = |command: Command| {
                let mut command = &command;
                for name in &path {
                    command = command.find_subcommand(name).unwrap();
                }
                let arguments = command.get_arguments().map(|one| one.get_id().to_string());
                arguments.collect::<Vec<_>>()
            };
            let known = order(help::command());
            assert!(
                known.iter().any(|one| one == argument),
                "{path:?} has no `{argument}`"
            );
            assert_eq!(order(super::command()), known, "{path:?}");
        }
        super::command().debug_assert();
    }

    #[test]
    fn every_second_name_is_hidden_and_still_understood() {
        fn check(shown: &Command, completed: &Command) {
            for one in shown.get_subcommands() {
                let inner = completed.find_subcommand(one.get_name()).unwrap();
                assert_eq!(inner.get_visible_aliases().count(), 0, "{}", one.get_name());
                for alias in one.get_visible_aliases() {
                    let found = completed.find_subcommand(alias).unwrap();
                    assert_eq!(found.get_name(), one.get_name());
                }
                check(one, inner);
            }
        }
        check(&help::command(), &super::command());
    }
}
