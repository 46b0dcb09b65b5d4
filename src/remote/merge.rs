//! Owns the decision what becomes of files when they are sent again: what was sent before, what is here now and what is there
//! now. Pure but for looking.
//!
//! A file there that is not what was sent was changed there. It is never replaced and never removed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::tree::{Seen, State};
use crate::sys::error::Result;

/// What was sent, by path: more than one state where a sender was killed before it knew which of them arrived.
pub(super) type Sent = BTreeMap<PathBuf, Vec<State>>;

/// The files to send, by path.
pub(super) type Here = BTreeMap<PathBuf, State>;

/// What there is on the other side.
pub(super) trait There {
    /// What is at a path.
    fn look(&self, path: &Path) -> Result<Seen>;
    /// All that is no directory below a directory.
    fn leaves(&self, path: &Path) -> Result<Vec<PathBuf>>;
}

/// What is to be done, in this order; nothing where there are conflicts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Merge {
    /// Sent before, gone here.
    gone: Vec<PathBuf>,
    /// Sent before, gone here, and there as it was sent.
    pub(super) remove: Vec<PathBuf>,
    /// Changed on both sides, or in the way of what is to be sent.
    pub(super) conflicts: BTreeSet<PathBuf>,
    /// New or changed here; absent there, or there as it was sent.
    pub(super) send: Vec<PathBuf>,
    /// Changed there and not here.
    pub(super) kept: Vec<PathBuf>,
    /// Changed there and gone here: it belongs to the other side from now on.
    pub(super) left: Vec<PathBuf>,
}

/// Decides. `sent_now`: whether a path was looked for here, so that it is gone where it is not among the files; `aside`:
/// conflicts will be given another name, so that all that is here can be sent.
pub(super) fn merge(
    sent: &Sent,
    here: &Here,
    sent_now: &dyn Fn(&Path) -> bool,
    there: &dyn There,
    aside: bool,
) -> Result<Merge> {
    let mut merge = Merge::default();
    let nothing = Vec::new();
    let sent_of = |path: &Path| sent.get(path).unwrap_or(&nothing);
    let is_gone = |path: &&PathBuf| !here.contains_key(*path) && sent_now(path);
    for path in sent.keys().filter(is_gone) {
        merge.gone.push(path.clone());
        match there.look(path)? {
            Seen::Is(state) if sent_of(path).contains(&state) => merge.remove.push(path.clone()),
            Seen::Absent => {}
            Seen::Is(_) | Seen::Directory | Seen::Other => merge.left.push(path.clone()),
        }
    }
    for (path, state) in here {
        if let Some(file) = in_the_way(path, there)?
            && !merge.remove.contains(&file)
        {
            merge.left.retain(|left| *left != file);
            merge.conflicts.insert(file);
            if aside {
                merge.send.push(path.clone());
            }
            continue;
        }
        let was_sent = sent_of(path);
        let is_clear = match there.look(path)? {
            Seen::Is(found) if found == *state => continue,
            Seen::Is(found) => was_sent.contains(&found),
            Seen::Absent => true,
            Seen::Directory => {
                let leaves = there.leaves(path)?;
                let all_go = leaves.iter().all(|leaf| merge.remove.contains(leaf));
                all_go && !(leaves.is_empty() && was_sent.contains(state))
            }
            Seen::Other => false,
        };
        if is_clear {
            merge.send.push(path.clone());
        } else if was_sent.contains(state) {
            merge.kept.push(path.clone());
        } else {
            merge.conflicts.insert(path.clone());
            if aside {
                merge.send.push(path.clone());
            }
        }
    }
    Ok(merge)
}

/// Returns what is no directory, and is where one of a path's directories has to be.
fn in_the_way(path: &Path, there: &dyn There) -> Result<Option<PathBuf>> {
    let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
    above.pop();
    for directory in above.into_iter().rev() {
        match there.look(directory)? {
            Seen::Directory => {}
            Seen::Absent => return Ok(None),
            Seen::Is(_) | Seen::Other => return Ok(Some(directory.to_owned())),
        }
    }
    Ok(None)
}

impl Merge {
    /// Returns whether nothing is to be done.
    pub(super) fn changes_nothing(&self) -> bool {
        self.conflicts.is_empty() && self.remove.is_empty() && self.send.is_empty()
    }

    /// Returns what has been sent while this is being done: the old, the new, or a part of both.
    pub(super) fn meanwhile(&self, sent: &Sent, here: &Here) -> Sent {
        let mut both = sent.clone();
        for path in &self.send {
            let states = both.entry(path.clone()).or_default();
            if !states.contains(&here[path]) {
                states.push(here[path].clone());
            }
        }
        both
    }

    /// Returns what has been sent when all of it is done.
    pub(super) fn afterwards(&self, sent: &Sent, here: &Here) -> Sent {
        let mut afterwards = sent.clone();
        afterwards.retain(|path, _| !self.gone.contains(path));
        // What is kept was sent in the state it had then, and is compared with that the next time too.
        for (path, state) in here.iter().filter(|(path, _)| !self.kept.contains(path)) {
            afterwards.insert(path.clone(), vec![state.clone()]);
        }
        afterwards
    }
}
