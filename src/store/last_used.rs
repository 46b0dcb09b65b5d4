//! Owns the time of last use of envs and images: the modification time of the file `used` in their directories.
//! Commands that work with an env or image set it, even if they change nothing; cleanup does not.

use std::path::Path;
use std::time::SystemTime;

use fs_err as fs;
use jiff::Timestamp;

use super::images::Image;
use super::{LockedEnv, Record, Store};
use crate::plan::ids::{EnvName, ImageKey, LayerId};

const FILE: &str = "used";

/// Sets the time. A failure, for example on a full disk, must not stop the command.
fn touch(directory: &Path) {
    let path = directory.join(FILE);
    let file = fs::OpenOptions::new().create(true).append(true).open(path);
    drop(file.and_then(|file| file.file().set_modified(SystemTime::now())));
}

fn modified_at(path: &Path) -> Option<Timestamp> {
    let data = fs::symlink_metadata(path).ok()?;
    Timestamp::try_from(data.modified().ok()?).ok()
}

impl Store {
    /// Returns when an env was last used.
    pub fn last_use(&self, name: &EnvName, record: &Record) -> Timestamp {
        let modified_at = modified_at(&self.env_dir(name).join(FILE));
        modified_at.map_or(record.used, |modified_at| modified_at.max(record.used))
    }

    /// Returns when an env on an image was last used, or the image was built.
    pub fn last_use_of_image(&self, image: &Image) -> Timestamp {
        let modified_at = modified_at(&self.image_dir(&image.key).join(FILE));
        modified_at.map_or(image.built, |modified_at| modified_at.max(image.built))
    }

    /// Returns when a layer that was pulled or imported was written.
    pub(super) fn arrival_of(&self, layer: &LayerId) -> Option<Timestamp> {
        modified_at(&self.layer_dir(layer).join("layer.json"))
    }

    /// Records that an env is used, by a command that holds its lock or shares its container.
    pub fn use_env(&self, name: &EnvName, record: &Record) {
        touch(&self.env_dir(name));
        self.use_image(&record.image_key);
    }

    pub fn use_image(&self, key: &ImageKey) {
        let directory = self.image_dir(key);
        if directory.exists() {
            touch(&directory);
        }
    }
}

impl LockedEnv<'_> {
    pub fn touch(&self) {
        if let Some(record) = self.record() {
            self.store.use_env(self.name(), record);
        }
    }
}
