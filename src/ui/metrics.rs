//! Owns `up --metrics`: one row per step, to collect figures over many runs. Each row is appended with a single write
//! when its step ends, so several commands may share a file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fs_err as fs;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sys::account::{FilePlace, caller};
use crate::sys::atomic;
use crate::sys::error::{Kind, Result, ResultExt as _, encoded};
use crate::sys::name::StepName;
use crate::ui::event::{Cost, Outcome};

/// Version of the rows: a new field keeps it, any other change raises it.
pub(crate) const SCHEMA: u32 = 1;

/// One step of one `up`. A step that ran out of memory and was retried has two rows, and an interrupted step has none.
/// Bytes and milliseconds are integers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Row {
    /// Version of the rows.
    pub schema: u32,
    /// When the step ended, or was found to exist.
    pub time: Timestamp,
    pub env: String,
    pub profile: String,
    /// The env's targets, separated by commas.
    pub target: String,
    pub engine: String,
    pub step: StepName,
    /// The step's key; empty if the step has none.
    pub key: String,
    /// `hit`: its snapshot existed.
    pub outcome: Outcome,
    /// The jobs it could use at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jobs: Option<u32>,
    #[serde(flatten)]
    pub cost: Cost,
    /// ccache's hits meanwhile, in all envs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_hits: Option<u64>,
    /// ccache's misses meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_misses: Option<u64>,
    /// Slurm's job that it ran in: `JobIDRaw` of `sacct`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slurm_job: Option<String>,
}

/// The file that rows are appended to.
#[derive(Debug)]
pub(crate) struct Rows {
    path: PathBuf,
    file: fs::File,
    slurm_job: Option<String>,
    /// Steps that have a row. Each further plan of the same command reports these steps again.
    written: Mutex<BTreeSet<StepName>>,
}

impl Rows {
    /// Opens the file before the build starts. `slurm_job` is the Slurm job of this process.
    pub(crate) fn open(path: &Path, slurm_job: Option<&str>) -> Result<Self> {
        let help = "--metrics FILE, in an existing directory";
        let place = FilePlace::new(caller(), path).map_err(|error| error.help(help))?;
        Ok(Self {
            path: path.to_owned(),
            file: place.append().map_err(|error| match error.kind() {
                // The error has its own help.
                Kind::OutOfSpace => error,
                _ => error.help("--metrics ./metrics.jsonl"),
            })?,
            slurm_job: slurm_job.map(str::to_owned),
            written: Mutex::default(),
        })
    }

    /// Adds a row. A step that does not run gets one only if it has none yet.
    pub(crate) fn add(&self, mut row: Row) -> Result<()> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let did_not_run = matches!(row.outcome, Outcome::Hit | Outcome::Skipped);
        if !written.insert(row.step.clone()) && did_not_run {
            return Ok(());
        }
        row.slurm_job.clone_from(&self.slurm_job);
        let line = encoded(serde_json::to_vec(&row), "metrics")?;
        atomic::append_line(&self.file, &line)
            .context(|| format!("cannot write metrics to `{}`", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn row(step: &str, outcome: Outcome) -> Row {
        Row {
            schema: SCHEMA,
            time: Timestamp::UNIX_EPOCH,
            env: "gfx1103".to_owned(),
            profile: "therock".to_owned(),
            target: "gfx1103".to_owned(),
            engine: "nspawn".to_owned(),
            step: step.into(),
            key: "k".to_owned(),
            outcome,
            jobs: None,
            cost: Cost::default(),
            cache_hits: None,
            cache_misses: None,
            slurm_job: None,
        }
    }

    #[test]
    fn a_step_that_does_not_run_has_one_row_and_none_after_the_run_that_made_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rows");
        for _ in 0..2 {
            let rows = Rows::open(&path, Some("7")).unwrap();
            rows.add(row("a", Outcome::Hit)).unwrap();
            let ran = Row {
                jobs: Some(4),
                cost: Cost {
                    wall_ms: 3,
                    ..Cost::default()
                },
                ..row("b", Outcome::Failed)
            };
            rows.add(ran.clone()).unwrap();
            rows.add(ran.clone()).unwrap();
            rows.add(row("a", Outcome::Hit)).unwrap();
            rows.add(row("b", Outcome::Hit)).unwrap();
            rows.add(row("gpu", Outcome::Skipped)).unwrap();
            rows.add(row("gpu", Outcome::Skipped)).unwrap();
            // The disk is full in the middle of a row.
            (&rows.file).write_all(b"{\"schema\"").unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        let rows: Vec<Row> = text
            .lines()
            .filter(|line| *line != "{\"schema\"")
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let steps: Vec<&str> = rows.iter().map(|row| row.step.as_str()).collect();
        assert_eq!(steps, ["a", "b", "b", "gpu", "a", "b", "b", "gpu"]);
        assert_eq!((rows[1].cost.wall_ms, rows[1].jobs), (3, Some(4)));
        assert!(rows.iter().all(|row| row.slurm_job.as_deref() == Some("7")));
        let missing = directory.path().join("none/rows");
        let error = Rows::open(&missing, None).unwrap_err();
        assert!(error.help_text().is_some());
    }
}
