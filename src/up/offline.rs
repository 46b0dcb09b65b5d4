//! Owns the check of `up --offline` before it begins: it reports every missing item, not only the first.

use crate::plan::resolve::{self, VolumeKind, VolumeSource};
use crate::store::Store;
use crate::store::source::{Git, Repository};
use crate::sys::address::without_login;
use crate::sys::error::Result;
use crate::up::context::Context;
use crate::up::select::Selection;
use crate::up::{base_image, locked};

pub(crate) fn check(cx: &Context, store: &Store, selection: &Selection) -> Result<()> {
    refuse(&missing(cx, store, selection)?)
}

/// Refuses to build without these items, if there are any.
pub(crate) fn refuse(missing: &[String]) -> Result<()> {
    match missing {
        [] => Ok(()),
        _ => Err(unavailable!(
            "`--offline` is set, but these are missing: {}",
            missing.join("; ")
        )
        .help("run once without --offline")),
    }
}

fn missing(cx: &Context, store: &Store, selection: &Selection) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    if base_image::there(store, selection)?.is_none() {
        missing.push(format!("image `{}`", selection.image));
    }
    let git = Git::new(&selection.inputs.user);
    for volume in resolve::volumes(&selection.profile, &selection.inputs)? {
        let VolumeSource::Git(source) = &volume.source else {
            continue;
        };
        if volume.kind != VolumeKind::Source {
            continue;
        }
        let repository = Repository::new(&volume.name, source);
        let commit = selection.commit(&volume.name);
        let directory = repository.directory_at(store, &git, commit)?;
        if !directory.join(".git").exists() {
            let rev = commit.or(source.rev.as_deref());
            let at = rev.map_or_else(String::new, |rev| format!(" at {rev}"));
            let (name, url) = (&volume.name, without_login(&source.url));
            missing.push(format!("source `{name}` from `{url}`{at}"));
        }
    }
    for (name, file) in locked::fetched(cx, selection)? {
        let blob = store.root().join("blobs/sha256").join(&file.sha256);
        if let Some(url) = file.url
            && !blob.is_file()
        {
            missing.push(format!("`{name}` from `{}`", without_login(&url)));
        }
    }
    let locked = selection.locked.iter();
    for (cache, files) in locked.flat_map(|locked| &locked.lock.files) {
        let found = store.cache_files(cache)?;
        let lacking = files.iter().filter(|(path, file)| {
            let blob = store.root().join("blobs/sha256").join(file.sha256());
            match file.url() {
                None => !found.contains_key(*path),
                Some(_) => found.get(*path) != Some(file.sha256()) && !blob.is_file(),
            }
        });
        missing.extend(lacking.map(|(path, file)| {
            let from = file
                .url()
                .map(|url| format!(" from `{}`", without_login(url)));
            format!(
                "file `{path}` of cache `{cache}`{}",
                from.unwrap_or_default()
            )
        }));
    }
    Ok(missing)
}
