//! Owns the interface for tests and `fuzz/`: the readers of untrusted files, each as a function of bytes. They call the
//! same functions as the commands.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path};
use std::sync::atomic::AtomicBool;

use fs_err as fs;
use sha2::{Digest as _, Sha256};

use crate::engine::hold::ContainerRecord;
use crate::image::{self, BuildContext, Logins, Recipe, TaskContext};
use crate::plan::gc::policy::{Policy, Table};
use crate::plan::{gc, lockfile};
use crate::profile::hook::{self, FileInSource};
use crate::store::check::{examine, repair};
use crate::store::config::Config;
use crate::store::inventory::InventoryOptions;
use crate::store::{Store, journal};
use crate::sys::catalog::Directory;
use crate::sys::error::Result;
use crate::{profile, share};

/// A reader of untrusted files. Its name in `READERS` is that of its fuzz target and of its directory in `fuzz/corpus`.
pub type Reader = fn(&[u8]) -> Result<()>;

pub const READERS: [(&str, Reader); 6] = [
    ("archive", archive),
    ("hook", hook),
    ("layout", layout),
    ("lock", lock),
    ("profile", profile),
    ("store", store),
];

/// Runs a reader on an input. The reader may refuse the input; a panic, an endless loop or excessive memory use is a
/// bug.
pub fn fuzz(reader: &str, input: &[u8]) {
    if let Some((_, read)) = READERS.iter().find(|(name, _)| *name == reader) {
        drop(read(input));
    }
}

/// Precedes each file name in an input with several files.
const FILE: &[u8] = b"\n=== ";

/// Splits an input into files: a line `=== NAME`, then the content. Text before the first such line is ignored.
fn files(input: &[u8]) -> Vec<(&str, &[u8])> {
    let starts = input.windows(FILE.len()).enumerate();
    let starts: Vec<usize> = starts
        .filter(|(_, window)| *window == FILE)
        .map(|(at, _)| at)
        .collect();
    let ends = starts.iter().skip(1).copied().chain([input.len()]);
    let parts = starts.iter().zip(ends);
    let parts = parts.map(|(start, end)| &input[start + FILE.len()..end]);
    parts
        .filter_map(|part| {
            let line = part.iter().position(|byte| *byte == b'\n')?;
            Some((std::str::from_utf8(&part[..line]).ok()?, &part[line + 1..]))
        })
        .collect()
}

/// Returns a file of the input; empty if the file is missing.
fn named<'a>(files: &[(&str, &'a [u8])], name: &str) -> &'a [u8] {
    let found = files.iter().find(|(known, _)| *known == name);
    found.map_or(&[], |(_, content)| content)
}

fn text(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|_| invalid!("not UTF-8"))
}

/// Writes a file below a directory. Skips names that lead elsewhere or collide with another file.
fn put(below: &Path, name: &str, content: &[u8]) {
    let name = Path::new(name);
    let inside = name
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    let path = below.join(name);
    if inside && let Some(directory) = path.parent() {
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory);
        drop(made.and_then(|()| fs::write(&path, content)));
    }
}

/// Reads an archive: extracts and digests it as a base image, reads its packages, and reads it as a file of snapshots.
fn archive(input: &[u8]) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let file = scratch.path().join("archive.tar");
    fs::write(&file, input)?;
    let recipe = format!(
        "schema = 1\nprovider = \"tarball\"\n[tarball]\npath = \"archive.tar\"\nsha256 = \"{}\"\n",
        hex::encode(Sha256::digest(input))
    );
    let snapshots = share::examine(&file);
    build(scratch.path(), &recipe).or(snapshots)
}

/// Reads an OCI layout, or the output of `docker save`: extracts it as a base image, and reads it as snapshots.
///
/// Every file other than `index.json`, `manifest.json` and `oci-layout` is a blob, named by its digest. In all files
/// `@NAME@` stands for the digest of an earlier file and `#NAME#` for its size, so mutated blobs are still found.
fn layout(input: &[u8]) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let directory = scratch.path().join("layout");
    let mut known: Vec<(String, String)> = Vec::new();
    for (name, content) in files(input) {
        let mut content = content.to_vec();
        for (mark, value) in &known {
            content = replaced(&content, mark.as_bytes(), value.as_bytes());
        }
        let digest = hex::encode(Sha256::digest(&content));
        let place = match name {
            "index.json" | "manifest.json" | "oci-layout" => name.to_owned(),
            _ => format!("blobs/sha256/{digest}"),
        };
        put(&directory, &place, &content);
        known.push((format!("@{name}@"), digest));
        known.push((format!("#{name}#"), content.len().to_string()));
    }
    if let Err(error) = fs::metadata(&directory) {
        return Err(error.into());
    }
    let snapshots = share::examine(&directory);
    let recipe = "schema = 1\nprovider = \"oci\"\n[oci]\npath = \"layout\"\n";
    build(scratch.path(), recipe).or(snapshots)
}

fn replaced(text: &[u8], mark: &[u8], value: &[u8]) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.windows(mark.len()).position(|window| window == mark) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(value);
        rest = &rest[at + mark.len()..];
    }
    out.extend_from_slice(rest);
    out
}

/// Builds a base image in a temporary directory.
fn build(scratch: &Path, recipe: &str) -> Result<()> {
    let recipe = Recipe::parse(recipe, "image.toml", scratch)?;
    let into = scratch.join("root");
    fs::create_dir(&into)?;
    let mut context = BuildContext {
        into: &into,
        blobs: &scratch.join("blobs"),
        source_date: None,
        task: TaskContext {
            mirrors: &BTreeMap::new(),
            logins: &Logins::default(),
            notice: image::oci::Notice::default(),
            env: &BTreeMap::new(),
            cancel: &AtomicBool::new(false),
            progress: &mut |_| {},
        },
    };
    image::build(&recipe, &mut context).map(drop)
}

/// Reads a profile, an image recipe or a configuration.
fn profile(input: &[u8]) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let file = scratch.path().join("p.toml");
    fs::write(&file, input)?;
    let profile = profile::load(&[], &file.to_string_lossy()).map(drop);
    let recipe = Recipe::parse(text(input)?, "image.toml", scratch.path());
    let recipe = recipe.map(|recipe| drop(recipe.digest()));
    let home = scratch.path().join("config");
    put(&home, "rockenv/config.toml", input);
    let home = home.to_string_lossy().into_owned();
    let environment = BTreeMap::from([("XDG_CONFIG_HOME".to_owned(), home)]);
    let (_, mut invalid) = Config::of(environment, None)?;
    let config = invalid.pop().map_or(Ok(()), Err);
    profile.or(recipe).or(config)
}

/// Loads a profile, reads the files that it copies, and returns advice.
pub fn check_profile(
    dirs: &[Directory],
    name_or_path: &str,
) -> Result<(profile::Profile, Vec<String>)> {
    let profile = profile::load(dirs, name_or_path)?;
    profile::copy_files(dirs, &profile)?;
    let advice = profile::advice(&profile);
    Ok((profile, advice))
}

/// Reads two lock files, of which the second may be missing.
fn lock(input: &[u8]) -> Result<()> {
    let files = files(input);
    let old = lockfile::parse(text(named(&files, "old"))?, "old")?;
    let again = lockfile::parse(&old.text()?, "again")?;
    assert_eq!(old, again, "what is written is what was read");
    let new = lockfile::parse(text(named(&files, "new"))?, "new")?;
    lockfile::describe(&lockfile::changes(&old, &new));
    Ok(())
}

/// Applies a hook with its patch to a source of one file.
fn hook(input: &[u8]) -> Result<()> {
    let files = files(input);
    let (patch, source) = (named(&files, "a.patch"), named(&files, "source"));
    for file in hook::parse_patch(patch, 1).into_iter().flatten() {
        drop((file.forward(source), file.backward(source)));
    }
    let scratch = tempfile::tempdir()?;
    for (name, content) in &files {
        put(&scratch.path().join("h"), name, content);
    }
    let hook = hook::load(&[Directory::from(scratch.path().to_owned())], "h")?;
    hook.digest()?;
    let found = |_: &Path| {
        Ok(FileInSource::File {
            bytes: source.to_vec(),
            executable: false,
        })
    };
    hook::apply(&hook, &found).map(drop)
}

/// Opens a store made of these files: reads, examines and collects it, cleans up after a killed command, and repairs
/// it.
fn store(input: &[u8]) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let root = scratch.path().join("store");
    put(&root, "format", br#"{"version":1,"method":"overlay"}"#);
    for name in ["envs", "images", "layers", "trash", "volumes", "blobs"] {
        fs::create_dir(root.join(name))?;
    }
    for (name, content) in files(input) {
        put(&root, name, content);
    }
    let Some(store) = Store::open_existing(&root)? else {
        return Ok(());
    };
    for layer in store.layers().into_iter().flatten() {
        drop((store.chain(&layer.id), store.shared_layer(&layer.id)));
    }
    drop((store.images(), store.leases(), store.past("p")));
    examine(&store.inventory()?);
    if let Ok(inventory) = store.gc_inventory(&InventoryOptions::default(), 1) {
        let limits = Policy::new(&Table::default(), None)?.limits(1 << 40);
        gc::plan(&inventory, &limits, Some(0));
    }
    for name in store.env_names()? {
        let (env, run) = (store.env_dir(&name), store.env_dir(&name).join("run"));
        drop((store.record(&name), store.spec(&name), journal::read(&env)));
        // The record names processes to kill, which could be any on this machine, so the cleanup must not see it.
        drop(ContainerRecord::read(&run));
        drop(fs::remove_file(ContainerRecord::path(&run)));
        drop(store.lock_env(&name, "up", std::time::Duration::ZERO));
    }
    repair(&store, &[]).map(drop)
}
