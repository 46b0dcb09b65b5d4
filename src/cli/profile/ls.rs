//! Owns `profile ls`.

use crate::profile::{self, Origin};
use crate::sys::error::Result;
use crate::ui::object;
use crate::ui::table::Table;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let listed = profile::list(&cx.config.profile_dirs)?;
    if cx.json {
        let rows = listed.iter().map(|profile| {
            object! {
                name: &profile.name,
                description: &profile.description,
                origin: profile.origin.to_string(),
                built_in: matches!(profile.origin, Origin::Builtin(_)),
                problem: &profile.problem,
            }
        });
        return cx.ui.json(&rows.collect::<Vec<_>>());
    }
    let header = ["profile", "description", "where"];
    cx.ui.table(&Table::of(header, &listed, |profile| {
        let place = match &profile.origin {
            Origin::Builtin(_) => "built in".to_owned(),
            Origin::File(path) => path.display().to_string(),
        };
        let description = match &profile.problem {
            Some(problem) => format!("invalid: {}", problem.lines().next().unwrap_or_default()),
            None => profile.description.clone(),
        };
        [profile.name.clone(), description, place]
    }));
    Ok(())
}
