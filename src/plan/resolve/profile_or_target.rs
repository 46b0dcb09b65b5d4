//! Owns interpreting `X` in `up X` as a file, a profile or a target, and naming the env.

use crate::plan::ids::EnvName;
use crate::profile::{is_path, shorten};
use crate::rocm::target::{self, Target};
use crate::sys::error::{Kind, Result};
use crate::sys::name::InvalidName;
use crate::sys::suggest;

/// The profile that `up gfx1103` uses.
pub(crate) const DEFAULT_PROFILE: &str = "therock";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Name or path for `profile::load`.
    pub profile: String,
    /// Targets that replace the profile's, in the order of the table.
    pub targets: Vec<Target>,
    /// Name of the env instead of the profile and its targets.
    pub stem: Option<String>,
}

/// Interprets `up ARGUMENT --target T...`; `profiles` are the names of existing profiles.
pub(crate) fn profile_or_target<'a>(
    argument: &str,
    targets: &[Target],
    profiles: impl IntoIterator<Item = &'a str>,
) -> Result<Request> {
    let profiles: Vec<&str> = profiles.into_iter().collect();
    let mut request = Request {
        profile: argument.to_owned(),
        targets: targets.to_vec(),
        stem: None,
    };
    request.targets.sort_unstable();
    request.targets.dedup();
    if is_path(argument) {
        return Ok(request);
    }
    // A product name stands for its target, and a profile may have the target's name.
    let named = Target::named(argument);
    let profile = match &named {
        Ok(target) if !profiles.contains(&argument) => target.name(),
        _ => argument,
    };
    if profiles.contains(&profile) {
        request.profile = profile.to_owned();
        check_targets(&mut request, targets)?;
        return Ok(request);
    }
    match named {
        Ok(target) if request.targets.iter().all(|other| *other == target) => Ok(Request {
            profile: DEFAULT_PROFILE.to_owned(),
            targets: vec![target],
            stem: Some(target.name().to_owned()),
        }),
        Ok(target) => {
            let others = flags(request.targets.iter().filter(|other| **other != target));
            let help = format!("rockenv up {DEFAULT_PROFILE} --target {target} {others}");
            Err(usage!("`{target}` is already a target, and so is {others}").help(help))
        }
        Err(error) if error.kind() == Kind::Usage || target::family(argument).is_some() => {
            Err(error)
        }
        Err(_) => {
            let shown = argument.escape_debug().take(80).collect::<String>();
            let targets = target::all().map(|target| target.name());
            let known = profiles.into_iter().chain(targets);
            let all = "`rockenv profile ls` and `rockenv target ls` show them all";
            let help = suggest::help(argument, known, all);
            Err(not_found!("no profile or target `{shown}`").help(help))
        }
    }
}

fn flags<'a>(targets: impl Iterator<Item = &'a Target>) -> String {
    let flags: Vec<_> = targets.map(|target| format!("--target {target}")).collect();
    flags.join(" ")
}

/// Refuses targets other than the one in the profile's name, and keeps that one out of the env's name.
fn check_targets(request: &mut Request, targets: &[Target]) -> Result<()> {
    let Ok(own) = Target::parse(&request.profile) else {
        return Ok(());
    };
    if request.targets.iter().any(|target| *target != own) {
        let flags = flags(targets.iter());
        let help = format!("rockenv up {DEFAULT_PROFILE} {flags}");
        return Err(usage!("profile `{own}` is for {own}, not for `{flags}`").help(help));
    }
    if !request.targets.is_empty() {
        request.stem = Some(request.profile.clone());
    }
    Ok(())
}

/// Returns the name of an env: the given one; or else `stem`, or the profile's name with all requested targets,
/// followed by other choices.
///
/// `up p --target A` and `up p --target A --target B` are different envs.
pub(crate) fn env_name(
    given: Option<&str>,
    stem: Option<&str>,
    profile: &str,
    targets: &[Target],
    choices: &[String],
) -> Result<EnvName> {
    let name = match given {
        Some(name) => name.to_owned(),
        None => {
            let mut name = stem.unwrap_or(profile).to_owned();
            let targets = targets.iter().filter(|_| stem.is_none());
            for part in targets.map(ToString::to_string).chain(choices.to_vec()) {
                name.push('-');
                name.push_str(&part);
            }
            name
        }
    };
    name.parse().map_err(|why: InvalidName| {
        let help = match given {
            Some(_) => why.to_string(),
            None => "choose one: --name NAME".to_owned(),
        };
        usage!("bad env name `{}`", shorten(&name)).help(help)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocm::target::parsed as targets;

    const PROFILES: [&str; 3] = ["hip-smoke", "therock", "gfx900"];

    /// Returns the profile, the targets and the start of the env's name, `-` for none.
    fn ask(argument: &str, flags: &[&str]) -> Result<String> {
        let Request {
            profile,
            targets,
            stem,
        } = profile_or_target(argument, &targets(flags), PROFILES)?;
        let stem = stem.as_deref().unwrap_or("-");
        Ok(format!("{profile} {targets:?} {stem}"))
    }

    #[test]
    fn arguments() {
        let many = ["gfx1103", "gfx90a", "gfx1103"];
        for (argument, flags, want) in [
            ("./p.toml", &[][..], "./p.toml [] -"),
            ("p.toml", &[], "p.toml [] -"),
            ("dir/p", &[], "dir/p [] -"),
            ("hip-smoke", &[], "hip-smoke [] -"),
            ("therock", &many, "therock [gfx90a, gfx1103] -"),
            ("gfx1103", &[], "therock [gfx1103] gfx1103"),
            // A profile of that name comes first.
            ("gfx900", &[], "gfx900 [] -"),
            ("gfx900", &["gfx900"], "gfx900 [gfx900] gfx900"),
            ("vega 64", &[], "gfx900 [] -"),
            ("gfx1103", &["gfx1103"], "therock [gfx1103] gfx1103"),
            ("780m", &[], "therock [gfx1103] gfx1103"),
            ("RX 7900 XTX", &[], "therock [gfx1100] gfx1100"),
        ] {
            assert_eq!(ask(argument, flags).unwrap(), want, "{argument}");
        }
    }

    #[test]
    fn wrong_arguments() {
        let all = "`rockenv profile ls` and `rockenv target ls` show them all";
        for (argument, help) in [
            ("hip-smok", "did you mean `hip-smoke`?"),
            ("gfx1113", "did you mean `gfx1103`?"),
            ("nonsense", all),
            ("a\0\u{1b}", all),
        ] {
            let error = ask(argument, &[]).unwrap_err();
            let found = (error.kind(), error.help_text());
            assert_eq!(found, (Kind::NotFound, Some(help)), "{argument:?}");
        }
        let error = ask("gfx110X-all", &[]).unwrap_err();
        assert_has!(error.help_text().unwrap(), "is a family");
        for own in ["gfx1103", "gfx900"] {
            let error = ask(own, &[own, "gfx1100"]).unwrap_err();
            let help = format!("rockenv up therock --target {own} --target gfx1100");
            let found = (error.kind(), error.help_text());
            assert_eq!(found, (Kind::Usage, Some(help.as_str())), "{own}");
        }
    }

    #[test]
    fn env_names() {
        let name = |given, stem, flags: &[&str], chosen: &[String]| {
            env_name(given, stem, "p", &targets(flags), chosen)
        };
        let chosen = ["full-torch".to_owned(), "from-rocm".to_owned()];
        let (one, two) = (&["gfx1103"][..], &["gfx1100", "gfx1103"]);
        for (given, stem, flags, chosen, want) in [
            (None, None, &[][..], &[][..], "p"),
            (None, None, one, &[], "p-gfx1103"),
            (None, None, two, &[], "p-gfx1100-gfx1103"),
            (Some("x"), None, one, &[], "x"),
            (None, None, one, &chosen, "p-gfx1103-full-torch-from-rocm"),
            (
                None,
                Some("gfx1103"),
                one,
                &chosen,
                "gfx1103-full-torch-from-rocm",
            ),
            (Some("x"), Some("gfx1103"), one, &chosen, "x"),
        ] {
            assert_eq!(name(given, stem, flags, chosen).unwrap(), want);
        }
        for bad in ["", "../x", "X", "a b", "a\0"] {
            let error = name(Some(bad), None, &[], &[]).unwrap_err();
            assert_eq!(error.kind(), Kind::Usage, "{bad:?}");
        }
        let all: Vec<_> = target::all().collect();
        let error = env_name(None, None, "p", &all, &[]).unwrap_err();
        assert_eq!(error.help_text(), Some("choose one: --name NAME"));
    }
}
