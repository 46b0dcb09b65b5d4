//! Owns the events that `up` reports while it runs. The same events feed the screen and `--progress json`, whose
//! readers rely on the names here: adding an event or an optional field keeps [`SCHEMA`], any other change raises it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sys::name::StepName;

/// Version of the event stream.
pub(crate) const SCHEMA: u32 = 2;

/// One event; bytes and milliseconds are integers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Event {
    /// The plan is made and work begins. Not sent if there is nothing to do, and sent again after a step whose result
    /// decides later keys.
    RunStarted {
        env: String,
        plan: Vec<Planned>,
        /// The engine, if rockenv chose it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chosen: Option<ChosenEngine>,
    },
    /// The base image is being built; `done` and `total` in bytes, if its provider reports them.
    Image {
        image: String,
        message: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        done: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total: Option<u64>,
    },
    /// The base image is ready.
    ImageFinished { image: String, wall_ms: u64 },
    /// Snapshots are transferred to or from a registry, or downloads of the build are fetched.
    Transfer {
        /// Direction and registry.
        what: String,
        /// Other work of the transfer.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        message: String,
        /// In bytes, as is `total`.
        done: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total: Option<u64>,
    },
    /// The transfer is complete. Not sent after a push.
    TransferFinished { what: String, wall_ms: u64 },
    /// A step begins to run; `index` counts from 1. `cached` is always false, because a step whose snapshot exists does
    /// not run.
    StepStarted {
        index: u32,
        total: u32,
        name: StepName,
        key: String,
        cached: bool,
    },
    /// A line of a step's output, cut and escaped for display; the log has the bytes.
    Output {
        index: u32,
        stream: Stream,
        line: String,
    },
    /// Ninja's count over the outer build and the nested ones that have begun.
    Ninja {
        index: u32,
        done: u64,
        total: u64,
        /// Milliseconds left: by the commands that have not ended, or else at the recent rate.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        left_ms: Option<u64>,
        /// The least and the most milliseconds left, where the commands are known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        range_ms: Option<(u64, u64)>,
    },
    /// What a step uses now.
    Load {
        index: u32,
        /// Job slots in use, if that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        jobs: Option<u32>,
        /// Memory without page cache, in bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        memory: Option<u64>,
    },
    /// A step ended, or is skipped.
    StepFinished {
        index: u32,
        total: u32,
        name: StepName,
        outcome: Outcome,
        cost: Cost,
    },
    /// Work that takes time but is not a step.
    Note { message: String },
    /// Something the user should know that stops nothing.
    Warning { message: String },
    /// The run ended: the last event. If it failed, the message is empty, and the error is on stderr.
    Finished {
        outcome: Outcome,
        message: String,
        /// The steps skipped for lack of a GPU, and the number of steps after `--until`, in words.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        lacking: String,
    },
}

/// The engine chosen for a new env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ChosenEngine {
    pub engine: String,
    /// Why it was chosen.
    pub reason: String,
}

/// A step of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Planned {
    pub index: u32,
    pub name: StepName,
    /// The step's key; empty if the step has none.
    pub key: String,
    /// Its snapshot exists.
    pub cached: bool,
    /// Why it runs, or need not run.
    pub reason: String,
    /// Expected duration in milliseconds, from earlier runs; 0 if the step is skipped or comes after `--until`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_ms: Option<u64>,
}

/// The origin of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// How a step or a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// It ran and succeeded.
    Done,
    /// It ran and failed.
    Failed,
    /// A signal of the user's stopped it.
    Interrupted,
    /// It did not run because its condition does not hold here.
    Skipped,
    /// It did not run because its snapshot exists; for a run: there was nothing to do.
    Hit,
}

/// The cost of a step, in milliseconds and bytes; values that could not be measured are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct Cost {
    pub wall_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u64>,
    /// Without page cache, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory_with_cache: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
    /// Growth of the env's tree and build volumes, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_delta: Option<i64>,
}

/// Events for tests.
#[cfg(test)]
pub(super) mod samples {
    use super::{Cost, Event, Outcome, Planned};

    pub(in crate::ui) fn planned(index: u32, cached: bool, expected_ms: Option<u64>) -> Planned {
        Planned {
            index,
            name: "compile".into(),
            key: "k".to_owned(),
            cached,
            reason: "never built".to_owned(),
            expected_ms,
        }
    }

    pub(in crate::ui) fn run(env: &str, plan: Vec<Planned>) -> Event {
        Event::RunStarted {
            env: env.to_owned(),
            plan,
            chosen: None,
        }
    }

    pub(in crate::ui) fn started(index: u32, total: u32) -> Event {
        Event::StepStarted {
            index,
            total,
            name: "compile".into(),
            key: "k".to_owned(),
            cached: false,
        }
    }

    pub(in crate::ui) fn ended(index: u32, total: u32, outcome: Outcome, cost: Cost) -> Event {
        Event::StepFinished {
            index,
            total,
            name: "compile".into(),
            outcome,
            cost,
        }
    }

    pub(in crate::ui) fn finished(outcome: Outcome, message: &str) -> Event {
        Event::Finished {
            outcome,
            message: message.to_owned(),
            lacking: String::new(),
        }
    }
}
