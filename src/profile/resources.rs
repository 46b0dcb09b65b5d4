//! Owns `[resources]`: its keys as written, their meaning, and refused values.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::check::Check;
use super::value::{self, Amount};
use crate::sys::span::At;

/// The least processes and threads with which a container starts, and the largest limit of `pids.max`.
const TASKS: (i64, i64) = (16, 4 << 20);

/// Requirements on the machine, and limits of the env.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(rename = "Resources")]
pub(crate) struct Written {
    /// Free disk space that `up` requires before it starts, such as "230G".
    disk: Option<At<String>>,
    /// Memory of one compile job; the number of jobs is the smaller of cores and memory divided by this.
    memory_per_job: Option<At<String>>,
    /// Memory of one link; determines `${link-jobs}`.
    memory_per_link_job: Option<At<String>>,
    /// Memory of one process of TensileLite; determines `${tensile-jobs}`.
    memory_per_tensile_job: Option<At<String>>,
    /// Memory that the machine must have; `up` refuses one with less.
    memory: Option<At<String>>,
    /// Puts rockenv's ninja first on the path, which respects the machine's job slots even when nested.
    ninja: Option<bool>,
    /// Memory limit of the env: a size, or a share of the machine's memory such as "90%".
    memory_max: Option<At<String>>,
    /// Limit of processes and threads in the env.
    #[schemars(range(min = 16, max = 4194304))]
    tasks_max: Option<At<i64>>,
}

/// Requirements and limits, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Free disk space that `up` requires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_per_job: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_per_link_job: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_per_tensile_job: Option<u64>,
    /// Memory that the machine must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Whether rockenv's ninja is first on the path.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ninja: bool,
    /// Memory limit of the env.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<Amount>,
    /// Limit of processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tasks_max: Option<u64>,
}

impl Written {
    pub(super) fn checked(self, check: &mut Check<'_>) -> Resources {
        Resources {
            disk: check.parsed(self.disk, value::size),
            memory_per_job: check.size(self.memory_per_job),
            memory_per_link_job: check.size(self.memory_per_link_job),
            memory_per_tensile_job: check.size(self.memory_per_tensile_job),
            memory: check.size(self.memory),
            ninja: self.ninja.unwrap_or_default(),
            memory_max: check.parsed(self.memory_max, value::memory_max),
            tasks_max: check.limit("tasks-max", self.tasks_max, TASKS),
        }
    }
}
