//! Owns the host directories that the steps of a profile can write to, shown and agreed to before its first `up`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::plan::resolve::{self, Access, VolumeSource};
use crate::sys::error::Result;
use crate::sys::trust::{self, Trusted};
use crate::up::context::Context;
use crate::up::select::Selection;

/// Host directories that the steps of a profile can write to, before anybody agreed to them.
#[derive(Debug, Serialize)]
pub(crate) struct HostWrites {
    #[serde(skip)]
    file: PathBuf,
    /// All of them.
    pub(crate) writes: BTreeSet<PathBuf>,
    /// Those neither beside the profile's file nor in the user's home, which `up` asks about.
    pub(crate) asks: Vec<PathBuf>,
}

impl HostWrites {
    /// Returns where the steps of a profile that was named by its file can write; `None` if that is trusted or was
    /// agreed to.
    pub(crate) fn new(cx: &Context, selection: &Selection) -> Result<Option<Self>> {
        let Some(file) = &selection.file else {
            return Ok(None);
        };
        let file = fs_err::canonicalize(file)?;
        let config = &cx.config;
        if trust::is_listed(&file, config.trusted_dirs.as_deref()) || config.current.covers(&file) {
            return Ok(None);
        }
        let writes = writable(selection)?;
        let known = Trusted::read(&config.user_dir, &file).unwrap_or_default();
        if writes.iter().all(|path| known.writes.contains(path)) {
            return Ok(None);
        }
        let home = fs_err::canonicalize(&config.host_home).unwrap_or_default();
        let inside = |path: &Path| {
            let beside = file.parent().is_some_and(|parent| path.starts_with(parent));
            beside || home.parent().is_some() && path.starts_with(&home)
        };
        let asks = writes
            .iter()
            .filter(|path| !inside(path))
            .cloned()
            .collect();
        Ok(Some(Self { file, writes, asks }))
    }

    /// Returns a sentence for `plan`.
    pub(crate) fn planned(&self) -> String {
        let writes = format!("steps can write to {}", shown(&self.writes));
        match self.asks.is_empty() {
            true => writes,
            false => format!(
                "{writes}; `up` asks before they write to {}",
                shown(&self.asks)
            ),
        }
    }
}

/// Shows where the steps of a profile that was named by its file can write. Asks about directories that are neither
/// beside the file nor in the user's home. An answer is remembered.
pub(crate) fn confirm(cx: &Context, selection: &Selection) -> Result<()> {
    let Some(HostWrites { file, writes, asks }) = HostWrites::new(cx, selection)? else {
        return Ok(());
    };
    cx.ui.note(&format!(
        "steps of `{}` can write to: {}",
        file.display(),
        shown(&writes)
    ));
    if !asks.is_empty() {
        let question = format!(
            "allow them to write to {}, outside its directory and your home?",
            shown(&asks)
        );
        if !cx.ui.confirm(&question)? {
            return Err(usage!("nothing changed"));
        }
    }
    let trusted = Trusted {
        path: file,
        digest: None,
        writes: writes.into_iter().collect(),
    };
    trusted.write(&cx.config.user_dir)
}

fn shown<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> String {
    let paths = paths.into_iter();
    let paths: Vec<String> = paths.map(|path| format!("`{}`", path.display())).collect();
    paths.join(", ")
}

/// Returns the host directories that steps can write to, with links resolved as far as the paths exist.
fn writable(selection: &Selection) -> Result<BTreeSet<PathBuf>> {
    let volumes = resolve::volumes(&selection.profile, &selection.inputs)?;
    let mut writes = BTreeSet::new();
    for volume in volumes {
        match (volume.access, volume.source) {
            (Access::Rw, VolumeSource::Path(path)) => {
                writes.insert(without_links(&path)?);
            }
            (Access::Rw, VolumeSource::Git(_) | VolumeSource::Store) | (Access::Ro, _) => {}
        }
    }
    Ok(writes)
}

fn without_links(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path)?;
    for there in path.ancestors() {
        if let Ok(real) = fs_err::canonicalize(there) {
            let rest = path.strip_prefix(there).unwrap_or(Path::new(""));
            return Ok(real.join(rest));
        }
    }
    Ok(path)
}
