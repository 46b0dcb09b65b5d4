//! Owns `matrix up` and its table of envs.

use std::time::Duration;

use clap::Args;

use super::Which;
use crate::cli::job_summary;
use crate::matrix::cells;
use crate::sys::error::Result;
use crate::ui::table::Table;
use crate::ui::{object, size};
use crate::up::context::Context;
use crate::up::matrix::{self, CommonSteps, EnvResult, MatrixRequest};

const TITLES: [&str; 6] = ["target", "env", "outcome", ">time", ">disk", "why"];

#[derive(Debug, Args)]
pub struct MatrixUpArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    request: MatrixRequest,
}

/// Brings all envs up; returns the exit code.
pub(super) fn up(cx: &Context, args: &MatrixUpArgs) -> Result<u8> {
    let cells = cells(&args.which.profile, &args.which.targets)?;
    let result = matrix::up(cx, &cells, &args.request)?;
    let exit_code = result.exit_code();
    let lines = lines(&result.common, &result.envs);
    job_summary::of_matrix(cx, &TITLES, &lines);
    if cx.json {
        cx.ui.json(&object! {
            schema: "rockenv/matrix/1",
            common: result.common,
            envs: result.envs,
        })?;
    } else {
        let mut table = Table::new(TITLES);
        for line in lines {
            table.row(line);
        }
        cx.ui.table(&table);
    }
    result.removed.map(|()| exit_code)
}

fn lines(common: &[CommonSteps], envs: &[EnvResult]) -> Vec<Vec<String>> {
    let time = |ms| size::duration(Duration::from_millis(ms));
    let all = envs.len();
    let common = common.iter().map(|common| {
        let (whose, why) = match common.envs.len() {
            count if count == all => ("all".to_owned(), "their common steps".to_owned()),
            count => (
                format!("{count} of {all}"),
                format!("the common steps of {}", common.envs.join(", ")),
            ),
        };
        vec![
            whose,
            common.env.clone(),
            "done".to_owned(),
            time(common.wall_ms),
            size::delta(common.disk_delta),
            why,
        ]
    });
    let envs = envs.iter().map(|env| {
        vec![
            env.target.clone(),
            env.env
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            env.outcome.text().to_owned(),
            time(env.wall_ms),
            size::delta(env.disk_delta),
            env.why.clone().unwrap_or_default(),
        ]
    });
    common.chain(envs).collect()
}
