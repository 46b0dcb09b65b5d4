//! Owns the choices in effect among a profile's variants and starting points.

use std::collections::BTreeMap;

use crate::profile::{Choice, FROM_SOURCE, Profile};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::suggest;

/// Returns the requested choices that are not the profile's defaults, as parts of the env's name.
pub fn choices(profile: &Profile, variant: Option<&str>, from: Option<&str>) -> Vec<String> {
    let variant = variant.filter(|variant| Some(*variant) != profile.variant.as_deref());
    let from = from.filter(|from| *from != FROM_SOURCE);
    let from = from.map(|from| format!("from-{from}"));
    variant.map(str::to_owned).into_iter().chain(from).collect()
}

/// The requested, or default, variant and starting point.
#[derive(Debug)]
pub struct Chosen<'a> {
    /// The variant, if there are any.
    pub variant: Option<&'a str>,
    /// The starting point.
    pub from: &'a str,
    profile: &'a Profile,
}

impl<'a> Chosen<'a> {
    /// Looks them up; without a request, the profile's default.
    pub fn new(
        profile: &'a Profile,
        variant: Option<&'a str>,
        from: Option<&'a str>,
    ) -> Result<Self> {
        if let Some(name) = variant {
            choice(profile, "variant", &profile.variants, name)?;
        }
        let from = from.unwrap_or(FROM_SOURCE);
        if from != FROM_SOURCE {
            choice(profile, "way", &profile.from, from)?;
        }
        Ok(Self {
            variant: variant.or(profile.variant.as_deref()),
            from,
            profile,
        })
    }

    /// Returns what they change; later parts win.
    pub fn parts(&self) -> impl Iterator<Item = &'a Choice> {
        let variant = self
            .variant
            .and_then(|name| self.profile.variants.get(name));
        variant.into_iter().chain(self.profile.from.get(self.from))
    }

    /// Returns the names of the hooks in effect, in order, without duplicates.
    pub fn hooks(&self) -> Vec<String> {
        let mut names = self.profile.hooks.clone();
        for name in self.parts().flat_map(|choice| &choice.hooks) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }
}

fn choice<'a>(
    profile: &Profile,
    what: &str,
    choices: &'a BTreeMap<String, Choice>,
    name: &str,
) -> Result<&'a Choice> {
    if let Some(choice) = choices.get(name) {
        return Ok(choice);
    }
    let shown: String = name.escape_debug().take(80).collect();
    let message = match what {
        "way" => format!(
            "`--from {shown}` is not available in profile `{}`",
            profile.name
        ),
        _ => format!("profile `{}` has no {what} `{shown}`", profile.name),
    };
    let error = Error::new(Kind::Usage, message);
    let names: Vec<&str> = choices.keys().map(String::as_str).collect();
    Err(
        match (suggest::closest(name, names.iter().copied()), what) {
            (Some(close), _) => error.help(format!("did you mean `{close}`?")),
            (None, "way") if names.is_empty() => error.help(format!("choose {FROM_SOURCE}")),
            (None, "way") => error.help(format!("choose {FROM_SOURCE} or {}", names.join(" or "))),
            (None, _) if names.is_empty() => error,
            (None, _) => error.help(format!("choose {}", names.join(" or "))),
        },
    )
}

pub(super) fn unknown_param(profile: &Profile, name: &str) -> Error {
    let shown: String = name.escape_debug().take(80).collect();
    let error = Error::new(
        Kind::Usage,
        format!("profile `{}` has no parameter `{shown}`", profile.name),
    );
    match suggest::closest(name, profile.params.keys().map(String::as_str)) {
        Some(close) => error.help(format!("did you mean `{close}`?")),
        None if profile.params.is_empty() => error,
        None => {
            let names: Vec<_> = profile.params.keys().map(String::as_str).collect();
            error.help(format!("its parameters: {}", names.join(", ")))
        }
    }
}
