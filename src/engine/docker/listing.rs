//! Owns listing a tree at a service, from the service's archive of the tree.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;

use bollard::errors::Error as Refusal;
use bollard::models::ContainerCreateBody;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

use super::{LATE, Labels, Service};
use crate::sys::checksum;
use crate::sys::chunks::Chunks;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::thread;

/// Files that the service itself creates in every container.
pub(super) const MADE: [&str; 9] = [
    "/.dockerenv",
    "/dev",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/mtab",
    "/etc/resolv.conf",
    "/proc",
    "/run",
    "/sys",
];

/// Maximum number of buffered pieces of the archive.
const PIECES: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveEntry {
    /// Kind, as in the archive.
    pub kind: u8,
    pub mode: u32,
    pub owner: (u64, u64),
    /// Target of a link, or numbers of a device.
    pub points_to: Option<PathBuf>,
    /// Modification time in seconds; 0 for directories.
    pub modified: u64,
    /// SHA-256 of a file's content.
    pub content: Option<[u8; 32]>,
}

impl ArchiveEntry {
    /// Returns the differences from another entry as a phrase; `None` if the entries are equal.
    pub fn differs(&self, other: &Self, times: bool) -> Option<String> {
        let mut all = Vec::new();
        if self.kind != other.kind {
            all.push("type".to_owned());
        } else if self.points_to != other.points_to {
            let shown = |entry: &Self| {
                let target = entry.points_to.clone().unwrap_or_default();
                target.to_string_lossy().into_owned()
            };
            all.push(format!("links to `{}`, `{}`", shown(self), shown(other)));
        } else if self.content != other.content {
            all.push("content".to_owned());
        }
        if self.mode != other.mode {
            all.push(format!("mode {:04o}, {:04o}", self.mode, other.mode));
        }
        if self.owner != other.owner {
            let ((a, b), (c, d)) = (self.owner, other.owner);
            all.push(format!("owner {a}:{b}, {c}:{d}"));
        }
        if times && self.modified != other.modified {
            all.push(format!("mtime {}, {}", self.modified, other.modified));
        }
        (!all.is_empty()).then(|| all.join("; "))
    }
}

impl Service {
    /// Lists the tree of an existing container, by name.
    pub fn list_container(&self, name: &str) -> Result<BTreeMap<PathBuf, ArchiveEntry>> {
        let archive = self.client.export_container(name).boxed();
        self.reading("read a tree", archive, read)
    }

    /// Passes a service's data to a reader in its own thread; `what` completes "cannot ...".
    pub(super) fn reading<T: Send>(
        &self,
        what: &str,
        mut stream: BoxStream<'_, std::result::Result<Bytes, Refusal>>,
        read: impl FnOnce(Chunks) -> Result<T> + Send,
    ) -> Result<T> {
        let (sender, receiver) = sync_channel(PIECES);
        std::thread::scope(|scope| {
            let reading = thread::start_in(scope, move || read(Chunks::new(receiver)))?;
            let sent = self.ask(LATE, what, async {
                while let Some(piece) = stream.next().await {
                    // A reader that stopped has reported why.
                    if sender.send(Ok(piece?)).is_err() {
                        break;
                    }
                }
                drop(sender);
                Ok(())
            });
            let read = thread::joined(reading.join());
            sent?;
            read
        })
    }

    /// Lists the tree of an image, through a container `name` that never runs.
    pub fn list_image(
        &self,
        image: &str,
        name: &str,
        labels: &Labels,
    ) -> Result<BTreeMap<PathBuf, ArchiveEntry>> {
        self.remove_container(name)?;
        let body = ContainerCreateBody {
            cmd: Some(vec!["true".to_owned()]),
            ..ContainerCreateBody::default()
        };
        if self.create(name, image, labels, body)?.is_none() {
            return Err(self.lacks("make a container"));
        }
        let listed = self.list_container(name);
        self.remove_container(name)?;
        listed
    }
}

fn read(archive: impl Read) -> Result<BTreeMap<PathBuf, ArchiveEntry>> {
    let cannot = || "cannot read a tree".to_owned();
    let mut found = BTreeMap::new();
    let mut archive = tar::Archive::new(archive);
    for entry in archive.entries().context(cannot)? {
        let mut entry = entry.context(cannot)?;
        let header = entry.header().clone();
        let kind = header.entry_type();
        let major = header.device_major().ok().flatten();
        let device = (major, header.device_minor().ok().flatten());
        let points_to = match device {
            (Some(major), Some(minor)) if major != 0 || minor != 0 => {
                Some(format!("{major}:{minor}").into())
            }
            _ => entry
                .link_name()
                .context(cannot)?
                .map(|name| name.into_owned()),
        };
        let content = match kind.is_file() {
            true => Some(checksum::sha256(&mut entry).context(cannot)?.0),
            false => None,
        };
        let path = PathBuf::from("/").join(entry.path().context(cannot)?);
        if MADE.iter().any(|made| path.starts_with(made)) {
            continue;
        }
        let modified = match kind.is_dir() {
            true => 0,
            false => header.mtime().context(cannot)?,
        };
        found.insert(
            path.components().collect(),
            ArchiveEntry {
                kind: kind.as_byte(),
                mode: header.mode().context(cannot)? & 0o7777,
                owner: (header.uid().context(cannot)?, header.gid().context(cannot)?),
                points_to,
                modified,
                content,
            },
        );
    }
    Ok(found)
}
