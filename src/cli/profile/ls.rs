//! Owns `profile ls`.

use crate::profile::{self, Origin};
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let listed = profile::list(&cx.config.profile_dirs)?;
    let rows = listed.into_iter().map(|profile| {
        object! {
            name: profile.name,
            description: profile.description,
            origin: profile.origin.to_string(),
            built_in: matches!(profile.origin, Origin::Builtin(_)),
            problem: profile.problem,
        }
    });
    let rows: Vec<_> = rows.collect();
    cx.list(&rows, ["profile", "description", "where"], |row| {
        let place = match row.built_in {
            true => "built in",
            false => row.origin.as_str(),
        };
        let description = match &row.problem {
            Some(problem) => format!("invalid: {}", problem.lines().next().unwrap_or_default()),
            None => row.description.clone(),
        };
        [row.name.clone(), description, place.to_owned()]
    })
}
