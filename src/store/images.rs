//! Owns built images: `images/<key>/{image.json,root/}`, and each recipe's current one, `images/refs/<recipe>.json`.
//!
//! A recipe is built once, and its image stays until a user refreshes it. The key covers what the recipe resolved to
//! (package versions, content digest), so a refreshed image with the same content is the same image.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::check::names;
use super::trash::is_rest;
use super::{Lock, Store};
pub(crate) use crate::image::TaskContext;
use crate::image::recipe::Pin;
use crate::image::{self, BuildContext, BuildProgress, Built, Recipe};
use crate::plan::ids::ImageKey;
pub use crate::plan::image::Image;
use crate::sys::atomic::{self, random_id};
use crate::sys::error::{Result, ResultExt as _, encoded, exists};
use crate::sys::signals::stop_if;
use crate::tree;

/// How long to wait for `gc`, which renames downloads.
const GC_WAIT: Duration = Duration::from_secs(60);

/// The current image of a recipe.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Reference {
    key: ImageKey,
}

/// An image that was rebuilt, and how the new one differs.
#[derive(Debug)]
pub struct VerifiedImage {
    pub image: Image,
    /// Environment variables with different values.
    pub variables: BTreeSet<String>,
    /// The first differing paths.
    pub differences: Vec<tree::digest::Difference>,
}

impl TaskContext<'_> {
    /// Takes a lock, however long another process holds it. Reports the holder meanwhile, and stops on request.
    pub(super) fn lock(&mut self, path: &Path, verb: &str) -> Result<Lock> {
        Lock::exclusive_waiting(path, verb, &mut |waits| {
            (self.progress)(BuildProgress::Line(waits));
            stop_if(self.cancel)
        })
    }
}

impl Image {
    pub fn computed_key(&self) -> Result<ImageKey> {
        let packages = encoded(serde_json::to_vec(&self.packages), "an image")?;
        // Images without variables keep the keys that older versions gave them.
        let env = self.env.as_ref().filter(|env| !env.is_empty());
        let env = encoded(env.map(serde_json::to_vec).transpose(), "an image")?;
        let mut hash = Sha256::new();
        let parts = [
            b"rockenv-image-1".as_slice(),
            self.recipe.as_bytes(),
            &packages,
            self.digest.as_bytes(),
        ];
        for part in parts
            .into_iter()
            .chain(self.resolved.as_deref().map(str::as_bytes))
            .chain(env.iter().flat_map(|env| [b"env".as_slice(), env]))
        {
            hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
            hash.update(part);
        }
        Ok(hex::encode(hash.finalize()).try_into()?)
    }
}

impl Store {
    pub(crate) fn image_dir(&self, key: &ImageKey) -> PathBuf {
        self.root.join("images").join(key)
    }

    pub fn image_root(&self, key: &ImageKey) -> PathBuf {
        self.image_dir(key).join("root")
    }

    /// Returns the path of an image's tree. If it is missing, the error has the command that helps.
    pub(super) fn known_image_root(&self, key: &ImageKey) -> Result<PathBuf> {
        let root = self.image_root(key);
        if root.try_exists()? {
            return Ok(root);
        }
        // `up` and `image build` would take an image with a description for a whole one.
        if let Ok(Some(image)) = self.image(key) {
            let name = image.name;
            return Err(not_found!("image `{name}` has no tree").help("rockenv fsck --repair"));
        }
        // An image that is built again may be another one, which only `up` moves an env to.
        let envs = self.envs().unwrap_or_default().into_iter();
        let mut records = envs.filter_map(|name| self.record(&name).ok().flatten());
        let (image, help) = match records.find(|record| record.image_key == *key) {
            Some(record) => (record.image.clone(), record.up_command()),
            None => (key.to_string(), "rockenv fsck".to_owned()),
        };
        Err(not_found!("image `{image}` is missing from the store").help(help))
    }

    pub fn image(&self, key: &ImageKey) -> Result<Option<Image>> {
        let path = self.image_dir(key).join("image.json");
        match atomic::read_json::<Image>(&path)? {
            Some(image) if image.key != *key => {
                Err(unexpected!("`{}` belongs to another image", path.display())
                    .help("rockenv fsck"))
            }
            found => Ok(found),
        }
    }

    /// Returns the current image of a recipe, if it was built.
    pub fn image_of(&self, recipe: &Recipe) -> Result<Option<Image>> {
        let current = self.current(&recipe.digest())?;
        current.map_or(Ok(None), |reference| self.image(&reference.key))
    }

    pub fn is_current(&self, image: &Image) -> Result<bool> {
        let reference = self.current(&image.recipe)?;
        Ok(reference.is_some_and(|reference| reference.key == image.key))
    }

    fn current(&self, recipe: &str) -> Result<Option<Reference>> {
        atomic::read_json(&self.reference(recipe, "json"))
    }

    /// Returns all images, newest first. Skips damaged ones, which `fsck` reports.
    pub fn images(&self) -> Result<Vec<Image>> {
        let keys = names(&self.root.join("images"))?.into_iter();
        let images = keys.filter_map(|key| self.image(&key.parse().ok()?).ok()?);
        let mut images: Vec<Image> = images.collect();
        images.sort_by_key(|image| std::cmp::Reverse(image.built));
        Ok(images)
    }

    /// Returns the lock that commands share while they use downloads, and that removing downloads takes exclusively.
    pub(super) fn blobs_lock(&self) -> PathBuf {
        self.root.join("blobs/lock")
    }

    /// Prevents the removal of downloads while the returned lock lives.
    pub fn keep_downloads(&self) -> Result<Lock> {
        Lock::shared(&self.blobs_lock(), "the downloads", GC_WAIT)
    }

    fn reference(&self, recipe: &str, extension: &str) -> PathBuf {
        self.root
            .join("images/refs")
            .join(format!("{recipe}.{extension}"))
    }

    /// Returns the image of a recipe. Builds it if it is missing, or if `refresh` is set.
    pub fn ensure_image(
        &self,
        name: &str,
        recipe: &Recipe,
        refresh: bool,
        cx: &mut TaskContext<'_>,
    ) -> Result<Image> {
        if !refresh && let Some(image) = self.image_of(recipe)? {
            return Ok(image);
        }
        let digest = recipe.digest();
        let _lock = self.lock_recipe(&digest, cx)?;
        let source_date = match self.image_of(recipe)? {
            // Another command built it while this one waited.
            Some(image) if !refresh => return Ok(image),
            old => old.map(|image| image.source_date),
        };
        let (work, image) = self.built_image(name, &digest, recipe, source_date, cx)?;
        self.publish_image(&work, &image)?;
        let key = image.key.clone();
        atomic::write_json(&self.reference(&digest, "json"), &Reference { key })?;
        Ok(image)
    }

    fn lock_recipe(&self, digest: &str, cx: &mut TaskContext<'_>) -> Result<Lock> {
        fs::create_dir_all(self.root.join("images/refs"))?;
        cx.lock(&self.reference(digest, "lock"), "image build")
    }

    /// Builds and describes an image; returns its directory and the description.
    fn built_image(
        &self,
        name: &str,
        digest: &str,
        recipe: &Recipe,
        source_date: Option<i64>,
        cx: &mut TaskContext<'_>,
    ) -> Result<(PathBuf, Image)> {
        let started = Instant::now();
        let work = self.image_work(digest)?;
        let built = self
            .build_image(&work, recipe, source_date, cx)
            .context(|| format!("cannot build image `{name}`"))?;
        let os = &built.os_release;
        let mut image = Image {
            // The other fields determine the key.
            key: digest.parse()?,
            name: name.to_owned(),
            recipe: digest.parse()?,
            resolved: built.resolved,
            env: built.env,
            digest: built.digest,
            built: Timestamp::now(),
            source_date: built.source_date,
            distribution: format!("{} {}", os.id, os.version_id).trim().to_owned(),
            packages: built.packages,
            bytes: built.bytes,
            took_ms: u64::try_from(started.elapsed().as_millis()).ok(),
        };
        image.key = image.computed_key()?;
        Ok((work, image))
    }

    pub(super) fn publish_image(&self, work: &Path, image: &Image) -> Result<()> {
        let place = self.image_dir(&image.key);
        atomic::write_json(&work.join("image.json"), image)?;
        // After an interrupted removal, the image's tree may be there, but incomplete.
        let is_whole = || -> Result<bool> { Ok(exists(&place.join("root"))? && !is_rest(&place)) };
        if is_whole()? {
            // The same content: only the description is new.
            fs::rename(work.join("image.json"), place.join("image.json"))?;
            return self.discard(work);
        }
        let directory = fs::File::open(work)?;
        nix::unistd::syncfs(directory.file())?;
        if !is_whole()? {
            self.discard(&place)?;
        }
        Ok(fs::rename(work, &place)?)
    }

    pub fn describe_image(&self, image: &Image) -> Result<()> {
        atomic::write_json(&self.image_dir(&image.key).join("image.json"), image)
    }

    /// Returns the image with the key `wanted`, built from the recipe if it is missing. A result with another key is
    /// described and discarded; the recipe's current image does not change.
    pub fn locked_image(
        &self,
        name: &str,
        recipe: &Recipe,
        wanted: &ImageKey,
        source_date: i64,
        cx: &mut TaskContext<'_>,
    ) -> Result<Image> {
        if let Some(image) = self.image(wanted)? {
            return Ok(image);
        }
        let digest = recipe.digest();
        let _lock = self.lock_recipe(&digest, cx)?;
        if let Some(image) = self.image(wanted)? {
            return Ok(image);
        }
        let (work, image) = self.built_image(name, &digest, recipe, Some(source_date), cx)?;
        if image.key != *wanted {
            self.discard(&work)?;
            return Ok(image);
        }
        self.publish_image(&work, &image)?;
        self.refer(&image)?;
        Ok(image)
    }

    /// Makes this the current image of its recipe, unless the recipe has one.
    pub(super) fn refer(&self, image: &Image) -> Result<()> {
        let reference = self.reference(&image.recipe, "json");
        if !reference.exists() {
            let key = image.key.clone();
            atomic::write_json(&reference, &Reference { key })?;
        }
        Ok(())
    }

    /// Builds a recipe again from the same inputs and compares.
    pub fn verify_image(
        &self,
        name: &str,
        recipe: &Recipe,
        cx: &mut TaskContext<'_>,
    ) -> Result<VerifiedImage> {
        let image = self.image_of(recipe)?.ok_or_else(|| {
            not_found!("image `{name}` is not built").help(format!("rockenv image build {name}"))
        })?;
        let digest = recipe.digest();
        let lock = cx.lock(&self.reference(&digest, "lock"), "image verify")?;
        let work = self.image_work(&digest)?;
        // A tag may have moved since.
        let recipe = recipe.pinned(Pin {
            snapshot: None,
            resolved: image.resolved.as_deref(),
        });
        let built = self
            .build_image(&work, &recipe, Some(image.source_date), cx)
            .context(|| format!("cannot build image `{name}` again"))?;
        let mut differences = Vec::new();
        if built.digest != image.digest {
            let (old, new) = (self.image_root(&image.key), work.join("root"));
            differences = tree::digest::compare(&old, &new, 20, cx.cancel)?;
        }
        self.discard(&work)?;
        drop(lock);
        let old = image.env.clone().unwrap_or_default();
        let new = built.env.unwrap_or_default();
        let names = old.keys().chain(new.keys());
        let differing = names.filter(|name| old.get(*name) != new.get(*name));
        Ok(VerifiedImage {
            variables: differing.cloned().collect(),
            image,
            differences,
        })
    }

    /// Creates the directory for an image build; removes the leftovers of a killed build under the same lock.
    fn image_work(&self, recipe: &str) -> Result<PathBuf> {
        self.fresh_directory(&format!("tmp-{}-", &recipe[..16]))
    }

    /// Creates a directory beside the images; removes those with the same prefix, which killed commands left.
    pub(super) fn fresh_directory(&self, prefix: &str) -> Result<PathBuf> {
        let images = self.root.join("images");
        self.discard_in(&images, |name| name.starts_with(prefix))?;
        let work = images.join(format!("{prefix}{}", random_id()?));
        fs::create_dir(&work)?;
        Ok(work)
    }

    fn build_image(
        &self,
        work: &Path,
        recipe: &Recipe,
        source_date: Option<i64>,
        cx: &mut TaskContext<'_>,
    ) -> Result<Built> {
        // `gc` must not remove downloads that this build reads.
        let _downloads = self.keep_downloads()?;
        let root = work.join("root");
        tree::create_tree(self.method, &root)?;
        let built = image::build(
            recipe,
            &mut BuildContext {
                into: &root,
                blobs: &self.root.join("blobs"),
                source_date,
                task: TaskContext {
                    mirrors: cx.mirrors,
                    logins: cx.logins,
                    notice: cx.notice.clone(),
                    env: cx.env,
                    progress: &mut *cx.progress,
                    cancel: cx.cancel,
                },
            },
        );
        if built.is_err() {
            // Report the build's error. The next build of this recipe removes leftovers.
            self.discard(work).ok();
        }
        built
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_removed_image_is_not_in_the_way_of_a_new_one() {
        let (_directory, store) = Store::scratch();
        let image = Image {
            key: "aa".into(),
            name: "base".into(),
            recipe: "4".repeat(64).parse().unwrap(),
            resolved: None,
            env: None,
            digest: "d".repeat(64),
            built: Timestamp::now(),
            source_date: 0,
            distribution: "debian 14".into(),
            packages: Vec::new(),
            bytes: 0,
            took_ms: None,
        };
        let place = store.image_dir(&image.key);
        fs::create_dir_all(place.join("gone/usr")).unwrap();
        fs::write(place.join("used"), "").unwrap();
        let work = store.root().join("images/tmp-new");
        fs::create_dir_all(work.join("root")).unwrap();
        store.publish_image(&work, &image).unwrap();
        assert_eq!(names(&place).unwrap(), ["image.json", "root"]);
        // A removal that was killed early leaves the tree and its mark, `gone.json`. A new image with this mark could
        // be taken for the rest of a removal.
        fs::rename(place.join("image.json"), place.join("gone.json")).unwrap();
        fs::create_dir_all(work.join("root")).unwrap();
        store.publish_image(&work, &image).unwrap();
        assert_eq!(names(&place).unwrap(), ["image.json", "root"]);
    }
}
