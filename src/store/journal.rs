//! Owns an env's journal: operations that a command began, so that the next one can finish or undo them.
//!
//! Most leftovers of a killed command need no journal: anything that the record does not name is garbage. The journal
//! covers the rest: a live tree that became a layer, and removals in progress.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::env::remove;
use crate::plan::ids::{EnvId, LayerId, PathBelow, TreeId, VolumeId};
use crate::plan::record::Snapshot;
use crate::sys::error::{Result, damaged, encoded, if_exists};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum JournalEntry {
    /// A live tree, or that of a failed step, is about to become the layer of a snapshot.
    Freeze { tree: TreeId, snapshot: Snapshot },
    /// Discard a fork that has no record yet.
    Remove {
        /// The env's id, which names its volumes.
        id: EnvId,
        /// Layers that it used, to be removed if nothing else needs them.
        layers: Vec<LayerId>,
    },
    /// A sub-project of TheRock is about to be discarded.
    Expunge {
        volume: VolumeId,
        /// The sub-project's directory in the volume.
        project: PathBelow,
    },
    /// The record is about to forget snapshots.
    Forget {
        /// Their layers, to be removed if nothing needs them.
        layers: Vec<LayerId>,
    },
}

fn path(env: &Path) -> PathBuf {
    env.join("journal.jsonl")
}

/// Writes an entry and waits until it is on disk.
pub(crate) fn begin(env: &Path, entry: &JournalEntry) -> Result<()> {
    let mut line = encoded(serde_json::to_string(entry), "journal")?;
    line.push('\n');
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path(env))?;
    file.write_all(line.as_bytes())?;
    file.sync_data()?;
    Ok(())
}

/// Reads the entries. A truncated last line was never acted upon, so it is ignored.
pub(crate) fn read(env: &Path) -> Result<Vec<JournalEntry>> {
    let path = path(env);
    let Some(text) = if_exists(fs::read(&path))? else {
        return Ok(Vec::new());
    };
    let text = String::from_utf8_lossy(&text);
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let entries = whole.lines().map(serde_json::from_str);
    entries.map(|entry| entry.map_err(damaged(&path))).collect()
}

/// Clears the journal: the operations are done and recorded.
pub(crate) fn clear(env: &Path) -> Result<()> {
    remove(&path(env))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_line_does_not_count() {
        let env = tempfile::tempdir().unwrap();
        let entry = JournalEntry::Remove {
            id: "a".into(),
            layers: vec!["l".into()],
        };
        begin(env.path(), &entry).unwrap();
        fs::OpenOptions::new()
            .append(true)
            .open(path(env.path()))
            .unwrap()
            .write_all(b"{\"remo")
            .unwrap();
        assert_eq!(read(env.path()).unwrap(), [entry]);
        clear(env.path()).unwrap();
        assert!(read(env.path()).unwrap().is_empty());
    }
}
