//! Owns the choices in effect among a profile's variants and starting points.

use std::collections::BTreeMap;

use crate::profile::references::{Scope, TextPart, pieces};
use crate::profile::{Choice, FROM_SOURCE, Problem, Profile, shorten, value};
use crate::sys::address::hide_secrets;
use crate::sys::error::{Error, Result};
use crate::sys::span::At;
use crate::sys::suggest;

/// The variant, release and starting point in effect: requested, or the defaults.
#[derive(Debug)]
pub(crate) struct Chosen<'a> {
    pub variant: Option<&'a str>,
    pub release: Option<&'a str>,
    pub from: &'a str,
    /// All parameters with their values.
    pub(crate) params: BTreeMap<String, String>,
    /// The requested parameters.
    asked: BTreeMap<String, String>,
    profile: &'a Profile,
}

impl<'a> Chosen<'a> {
    /// Looks up the requested choices, or else the profile's defaults. `params` replace the profile's parameters.
    pub(crate) fn new(
        profile: &'a Profile,
        variant: Option<&'a str>,
        from: Option<&'a str>,
        params: &BTreeMap<String, String>,
    ) -> Result<Self> {
        if let Some(name) = variant {
            choice(profile, "variant", &profile.variants, name)?;
        }
        let from = from.unwrap_or(FROM_SOURCE);
        if from != FROM_SOURCE {
            choice(profile, STARTING_POINT, &profile.from, from)?;
        }
        let mut chosen = Self {
            variant: variant.or(profile.variant.as_deref()),
            release: None,
            from,
            params: profile.params.clone(),
            asked: params.clone(),
            profile,
        };
        let parts: Vec<&Choice> = chosen.parts().collect();
        for part in parts {
            chosen.params.extend(part.params.clone());
        }
        for (name, value) in params {
            if chosen.params.insert(name.clone(), value.clone()).is_none() {
                return Err(unknown_param(profile, name));
            }
            if value.contains('\0') {
                return Err(usage!("the value of `{name}` contains a NUL byte"));
            }
        }
        chosen.select_release()?;
        Ok(chosen)
    }

    /// Fills in empty parameters from the release that a parameter names.
    fn select_release(&mut self) -> Result<()> {
        let profile = self.profile;
        let param = profile.release_param.as_ref();
        let Some(name) = param.and_then(|param| self.params.get(param)) else {
            return Ok(());
        };
        let (known, release) = choice(profile, "release", &profile.releases, name)?;
        self.release = Some(known);
        for (name, value) in &release.params {
            if let Some(empty) = self.params.get_mut(name).filter(|value| value.is_empty()) {
                empty.clone_from(value);
            }
        }
        Ok(())
    }

    /// Returns the requested choices that are not the profile's defaults, as parts of the env's name.
    pub(crate) fn in_name(&self) -> Vec<String> {
        let Profile {
            variant,
            release_param,
            params,
            ..
        } = self.profile;
        let variant = self.variant.filter(|own| Some(*own) != variant.as_deref());
        let release = release_param.as_ref().and_then(|param| {
            let asked = self.asked.get(param);
            asked.filter(|asked| params.get(param) != Some(asked))
        });
        let from = (self.from != FROM_SOURCE).then(|| format!("from-{}", self.from));
        let parts = [variant.map(str::to_owned), release.cloned(), from];
        parts.into_iter().flatten().collect()
    }

    /// Returns the settings of the release, the variant and the starting point; later ones win.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &'a Choice> + use<'a> {
        let profile = self.profile;
        let release = self.release.and_then(|name| profile.releases.get(name));
        let variant = self.variant.and_then(|name| profile.variants.get(name));
        let from = profile.from.get(self.from);
        release.into_iter().chain(variant).chain(from)
    }

    /// Returns the first parameter in a text that the command line or a lock file sets, with its value.
    pub(super) fn asked_in(&self, text: &str) -> Option<String> {
        let value = |piece| match piece {
            TextPart::Reference(name, _) => Some((name, self.asked.get(name)?)),
            TextPart::Literal(_) | TextPart::Unclosed(_) => None,
        };
        let (name, value) = pieces(text).into_iter().find_map(value)?;
        Some(format!("{name}={}", shorten(&hide_secrets(value))))
    }

    pub(crate) fn image(&self) -> Result<String> {
        let scope = Scope {
            params: self.params.clone(),
            ..Scope::default()
        };
        let Profile { image, sources, .. } = self.profile;
        let refuse = |problem: Problem| match self.asked_in(image) {
            Some(param) => usage!(
                "parameter `{param}` is not valid in profile `{}`: {}",
                self.profile.name,
                problem.message
            ),
            None => self.profile.invalid(vec![problem]),
        };
        let name = scope
            .expand(image)
            .map_err(|fault| refuse(fault.problem(&image.place, sources)))?;
        value::name("image", &name)
            .map_err(|refused| refuse(Problem::refused(&image.place, refused, "here")))?;
        Ok(name)
    }

    /// Returns the names of the hooks in effect, in order, without duplicates.
    pub(crate) fn hooks(&self) -> Vec<At<String>> {
        let mut names = self.profile.hooks.clone();
        for name in self.parts().flat_map(|choice| &choice.hooks) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }
}

/// The name of `--from` choices in [`choice`].
const STARTING_POINT: &str = "starting point";

fn choice<'a>(
    profile: &Profile,
    what: &str,
    choices: &'a BTreeMap<String, Choice>,
    name: &str,
) -> Result<(&'a String, &'a Choice)> {
    if let Some(choice) = choices.get_key_value(name) {
        return Ok(choice);
    }
    let shown: String = name.escape_debug().take(80).collect();
    let own = &profile.name;
    let message = match what {
        STARTING_POINT => format!("`--from {shown}` is not available in profile `{own}`"),
        _ => format!("profile `{own}` has no {what} `{shown}`"),
    };
    let source = (what == STARTING_POINT).then_some(FROM_SOURCE);
    let names = by_version(choices.keys().map(String::as_str));
    let names: Vec<&str> = source.into_iter().chain(names).collect();
    let all = match names.is_empty() {
        true => format!("leave out --{what}"),
        false => format!("choose {}", names.join(" or ")),
    };
    Err(usage!("{message}").help(suggest::help(name, names, &all)))
}

pub(crate) fn by_version<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names: Vec<&str> = names.collect();
    names.sort_by_cached_key(|name| version(name));
    names
}

/// Returns the numbers of a version. Other parts sort last.
pub(crate) fn version(text: &str) -> Vec<u64> {
    let parts = text.split('.');
    parts.map(|part| part.parse().unwrap_or(u64::MAX)).collect()
}

fn unknown_param(profile: &Profile, name: &str) -> Error {
    let shown: String = name.escape_debug().take(80).collect();
    let names: Vec<_> = profile.params.keys().map(String::as_str).collect();
    let all = match names.is_empty() {
        true => "it has none: leave out --param".to_owned(),
        false => format!("its parameters: {}", names.join(", ")),
    };
    usage!("profile `{}` has no parameter `{shown}`", profile.name)
        .help(suggest::help(name, names, &all))
}
