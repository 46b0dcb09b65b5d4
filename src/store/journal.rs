//! Owns an env's journal: what a command began, so that the next one can finish or undo it.
//!
//! Most of what a killed command leaves needs no journal: whatever the record does not name is garbage. The
//! journal holds what cannot be seen that way: a live tree that became a layer, and what is being removed.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::plan::checked;
use crate::plan::ids::LayerId;
use crate::plan::record::Snapshot;
use crate::sys::error::{Error, Result};

/// Something begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Entry {
    /// The live tree is about to become a layer of that snapshot.
    Freeze {
        /// The tree.
        #[serde(deserialize_with = "checked::names")]
        tree: String,
        /// The snapshot it becomes.
        snapshot: Snapshot,
    },
    /// What there is of a fork that has no record yet goes; earlier versions removed envs by it.
    Remove {
        /// The env's id, which names its volumes.
        #[serde(deserialize_with = "checked::names")]
        id: String,
        /// Layers it used, to be removed where nobody else does.
        layers: Vec<LayerId>,
    },
    /// A sub-project of TheRock is about to be given up.
    Expunge {
        /// The build volume's id.
        #[serde(deserialize_with = "checked::names")]
        volume: String,
        /// The sub-project's directory there.
        #[serde(deserialize_with = "checked::path_below")]
        project: PathBuf,
    },
    /// The record is about to forget snapshots.
    Forget {
        /// Their layers, to be removed where nobody needs them.
        layers: Vec<LayerId>,
    },
}

fn path(env: &Path) -> PathBuf {
    env.join("journal.jsonl")
}

/// Writes an entry and waits until it is on disk.
pub fn begin(env: &Path, entry: &Entry) -> Result<()> {
    let mut line = serde_json::to_string(entry)
        .map_err(|error| Error::unexpected("cannot encode journal").source(error))?;
    line.push('\n');
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path(env))?;
    file.write_all(line.as_bytes())?;
    file.sync_data()?;
    Ok(())
}

/// Reads the entries; a last line cut short was never acted upon and does not count.
pub fn read(env: &Path) -> Result<Vec<Entry>> {
    let text = match fs::read(path(env)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let text = String::from_utf8_lossy(&text);
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut entries = Vec::new();
    for line in whole.lines() {
        entries.push(serde_json::from_str(line).map_err(|error| {
            Error::unexpected(format!("`{}` is damaged", path(env).display()))
                .source(error)
                .help("rockenv fsck")
        })?);
    }
    Ok(entries)
}

/// Forgets the entries: what was begun is done and recorded.
pub fn clear(env: &Path) -> Result<()> {
    match fs::remove_file(path(env)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_line_does_not_count() {
        let env = tempfile::tempdir().unwrap();
        let entry = Entry::Remove {
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
