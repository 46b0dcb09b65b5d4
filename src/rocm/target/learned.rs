//! Owns the targets that a store learned from a checkout of TheRock. Its rows take precedence over the built-in ones.
//!
//! A newer TheRock supports GPUs that this program does not know. The user imports its table explicitly (`target
//! learn`), so that a name has the same meaning before and after a source is fetched.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::{GpuKind, Table, TargetInfo};
use crate::rocm::therock::Declared;
use crate::sys::atomic;
use crate::sys::error::{Result, ResultExt as _};

const SCHEMA: &str = "rockenv/targets/1";

/// This process's learned table. It must be set before the first target is looked up.
static LEARNED: OnceLock<Learned> = OnceLock::new();

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Learned {
    schema: String,
    pub source: PathBuf,
    pub time: jiff::Timestamp,
    targets: Vec<Declared>,
}

impl Learned {
    pub(crate) fn of(source: &Path, targets: &[Declared]) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            source: source.to_owned(),
            time: jiff::Timestamp::now(),
            targets: targets.to_vec(),
        }
    }

    /// Reads the learned table of the store at `home`; `None` if the store has not learned any.
    pub(crate) fn read(home: &Path) -> Result<Option<Self>> {
        let path = file(home);
        let wrong = || format!("cannot read `{}`", path.display());
        let found: Option<Self> = atomic::read_json(&path).context(wrong)?;
        if let Some(learned) = &found
            && learned.schema != SCHEMA
        {
            return Err(unexpected!(
                "`{}` has schema {}, but this rockenv supports {SCHEMA}",
                path.display(),
                learned.schema
            )
            .help("rockenv target forget"));
        }
        Ok(found)
    }

    pub(crate) fn save(&self, home: &Path) -> Result<()> {
        atomic::write_json(&file(home), self)
    }

    pub(crate) fn install(self) {
        // A second table is ignored, because a name must not change its meaning within a process.
        drop(LEARNED.set(self));
    }

    pub(crate) fn installed() -> Option<&'static Self> {
        LEARNED.get()
    }

    /// Replaces or adds rows of the built-in table.
    pub(super) fn join(&self, table: &mut Table) {
        for declared in &self.targets {
            let mut rows = table.targets.iter();
            let known = rows.position(|row| row.declared.name == declared.name);
            let row = row(known.map(|at| &table.targets[at]), declared);
            match known {
                Some(at) => table.targets[at] = row,
                None => table.targets.push(row),
            }
        }
    }
}

pub(crate) fn file(home: &Path) -> PathBuf {
    home.join("targets.json")
}

/// Returns a target's row as a checkout declares it. Facts that only releases declare are kept from `known`.
pub(super) fn row(known: Option<&TargetInfo>, declared: &Declared) -> TargetInfo {
    let is_in = |family: &str| declared.families.iter().any(|name| name == family);
    let kind = match known {
        Some(known) => known.kind,
        None if is_in("dcgpu-all") => GpuKind::Dcgpu,
        None if is_in("igpu-all") => GpuKind::Igpu,
        None => GpuKind::Dgpu,
    };
    TargetInfo {
        declared: declared.clone(),
        kind,
        release_products: known.and_then(|known| known.release_products.clone()),
        support: known.and_then(|known| known.support.clone()),
    }
}

pub(super) fn name_only(name: String) -> TargetInfo {
    let declared = Declared {
        product: name.clone(),
        families: vec![name.clone()],
        excluded: Vec::new(),
        name,
    };
    row(None, &declared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocm::target::compiled_in;
    use crate::rocm::therock::Excluded;

    fn declared(name: &str, families: &[&str], excluded: &[&str]) -> Declared {
        Declared {
            name: name.to_owned(),
            product: "A product".to_owned(),
            families: families.iter().map(|name| (*name).to_owned()).collect(),
            excluded: excluded
                .iter()
                .map(|project| Excluded {
                    project: (*project).to_owned(),
                    issue: None,
                })
                .collect(),
        }
    }

    #[test]
    fn rows_of_a_checkout_stand_in_front() {
        let mut table = compiled_in();
        let count = table.targets.len();
        let learned = Learned::of(
            Path::new("/src"),
            &[
                declared("gfx1103", &["gfx1103", "igpu-all", "gfx1-new"], &[]),
                declared("gfx1310", &["gfx1310", "dcgpu-all"], &["rccl"]),
            ],
        );
        learned.join(&mut table);
        assert_eq!(table.targets.len(), count + 1);
        let mut rows = table.targets.iter();
        let laptop = rows.find(|row| row.declared.name == "gfx1103").unwrap();
        assert_eq!(laptop.declared, learned.targets[0]);
        assert!(laptop.rccl_buildable());
        // A checkout does not declare these facts.
        assert!(laptop.release_products.is_some());
        let new = table.targets.last().unwrap();
        assert_eq!(new.declared, learned.targets[1]);
        assert_eq!((new.kind, new.rccl_buildable()), (GpuKind::Dcgpu, false));
    }

    #[test]
    fn what_is_compiled_in_joined_with_itself_is_the_same() {
        let table = compiled_in();
        let rows = table.targets.iter().map(|row| row.declared.clone());
        let rows: Vec<Declared> = rows.collect();
        let mut joined = compiled_in();
        Learned::of(Path::new("/src"), &rows).join(&mut joined);
        for (one, other) in joined.targets.iter().zip(&table.targets) {
            assert_eq!(format!("{one:?}"), format!("{other:?}"));
        }
    }

    #[test]
    fn it_is_kept_by_the_store() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(Learned::read(home.path()).unwrap(), None);
        let learned = Learned::of(Path::new("/src"), &[declared("gfx1310", &["gfx1310"], &[])]);
        learned.save(home.path()).unwrap();
        assert_eq!(Learned::read(home.path()).unwrap(), Some(learned));
        fs_err::write(file(home.path()), "{").unwrap();
        assert!(Learned::read(home.path()).is_err());
    }
}
