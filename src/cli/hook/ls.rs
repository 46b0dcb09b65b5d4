//! Owns `hook ls`.

use crate::profile::hook;
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let mut rows = Vec::new();
    for listed in hook::list(&cx.config.hook_dirs)? {
        let hook = hook::load(&cx.config.hook_dirs, &listed.name)?;
        let digest = hook.digest()?;
        rows.push(object! {
            name: hook.name,
            description: hook.description,
            why: hook.why.split_whitespace().collect::<Vec<_>>().join(" "),
            links: hook.links,
            volume: hook.work.volume,
            applies: hook.applies,
            digest: digest,
            built_in: hook.path.is_none(),
            path: hook.path,
        });
    }
    cx.list(&rows, ["hook", "changes", "description", "where"], |row| {
        let place = match &row.path {
            Some(path) => path.display().to_string(),
            None => "built in".to_owned(),
        };
        [&row.name, &row.volume, &row.description, &place].map(Clone::clone)
    })
}
