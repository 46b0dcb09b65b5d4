//! Owns `hook ls`.

use crate::profile::hook::{self, Hook};
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let mut rows = Vec::new();
    for listed in hook::list(&cx.config.hook_dirs)? {
        let loaded = hook::load(&cx.config.hook_dirs, &listed.name);
        let (hook, problem) = match loaded {
            Ok(hook) => (hook, None),
            Err(error) => {
                let (name, path) = (listed.name, listed.path);
                let hook = Hook {
                    name,
                    path,
                    ..Hook::default()
                };
                (hook, Some(error.chain().join(": ")))
            }
        };
        let digest = problem.is_none().then(|| hook.digest()).transpose()?;
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
            problem: problem,
        });
    }
    cx.list(&rows, ["hook", "changes", "description", "where"], |row| {
        let place = match &row.path {
            Some(path) => path.display().to_string(),
            None => "built in".to_owned(),
        };
        let description = match &row.problem {
            Some(problem) => format!("invalid: {}", problem.lines().next().unwrap_or_default()),
            None => row.description.clone(),
        };
        [row.name.clone(), row.volume.clone(), description, place]
    })
}
