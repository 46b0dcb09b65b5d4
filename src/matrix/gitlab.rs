//! Owns the pipeline for GitLab. Pure.

use std::path::{Component, Path};

use super::jobs::take_option;
use super::pipeline::{Pipeline, block, list, scalar};
use crate::sys::error::Result;

/// Path of each job's metrics, in its checkout.
const METRICS: &str = "rockenv-metrics.jsonl";
/// Neither an env's name nor one with a meaning for GitLab.
const COMMON: &str = "what is common";

/// Writes the pipeline; `file` is its path in the repository.
pub(crate) fn pipeline(pipeline: &Pipeline, file: &str) -> Result<String> {
    let mut text = vec![pipeline.heading()];
    text.push("stages: [common, build, test, clean]\n".to_owned());
    if pipeline.cleans_last() {
        text.push(one_at_a_time(file));
    }
    let common = pipeline.common.as_ref();
    let metrics = match metrics(pipeline) {
        Some(path) if !is_in_checkout(&path) => {
            return Err(
                usage!("`--metrics {path}`: GitLab keeps only files of the checkout")
                    .help(format!("--metrics {METRICS}")),
            );
        }
        Some(_) => Vec::new(),
        None => vec!["--metrics".to_owned(), METRICS.to_owned()],
    };
    if let Some(common) = common {
        let script = pipeline.build_common(common, &metrics);
        text.push(job(
            pipeline,
            COMMON,
            "common",
            &common.runner,
            None,
            &script,
        ));
        if !pipeline.cleans_last() {
            text.push(after(
                &pipeline.clean([common.env.as_str()], &common.runner),
            ));
        }
    }
    for one in &pipeline.jobs {
        let needs = match &one.needs {
            Some(needs) => Some(format!("build {needs}")),
            None => common.map(|_| COMMON.to_owned()),
        };
        let stage = if one.needs.is_some() { "test" } else { "build" };
        let name = format!("{stage} {}", one.env);
        let script = pipeline.build(one, &metrics);
        let needs = needs.as_deref();
        text.push(job(pipeline, &name, stage, &one.runner, needs, &script));
        if !pipeline.cleans_last() {
            text.push(after(&pipeline.clean([one.env.as_str()], &one.runner)));
        }
    }
    if pipeline.cleans_last() {
        let runner = pipeline.jobs.first().map_or(&[][..], |job| &job.runner);
        let lines = pipeline.clean(pipeline.envs(), runner);
        text.push(format!(
            "{}:\n  stage: clean\n{}      when: always\n  timeout: {} minutes\n{}{}  script:\n    - {}",
            scalar("leave nothing"),
            inner(),
            pipeline.calls.minutes,
            tags(runner),
            variables(pipeline),
            block(6, &lines)
        ));
    }
    Ok(text.concat())
}

/// Writes the job that runs all others, as a child pipeline of the same file. Envs of one store have the same names
/// in each pipeline, so only one of these may be between its first job and its last. GitLab's resource group covers
/// one job, and this one lasts as long as all of them.
fn one_at_a_time(file: &str) -> String {
    format!(
        "\"one at a time\":
  stage: common
  resource_group: rockenv
  trigger:
    include:
      - local: {}
    strategy: depend
  rules:
    - if: $CI_PIPELINE_SOURCE == \"parent_pipeline\"
      when: never
    - if: $CI_COMMIT_BRANCH
    - if: $CI_COMMIT_TAG
",
        scalar(file)
    )
}

/// Writes that a job belongs only to the child pipeline.
fn inner() -> &'static str {
    "  rules:\n    - if: $CI_PIPELINE_SOURCE == \"parent_pipeline\"\n"
}

fn job(
    pipeline: &Pipeline,
    name: &str,
    stage: &str,
    runner: &[String],
    needs: Option<&str>,
    script: &[String],
) -> String {
    // `up` would append to the other job's metrics.
    let needs = needs.map(|job| format!("{{job: {}, artifacts: false}}", scalar(job)));
    let minutes = pipeline.calls.minutes;
    let (when, minutes) = match pipeline.cleans_last() {
        true => (inner(), minutes),
        // The script, then an hour for `after_script`, and a quarter for the rest of the job.
        false => ("  interruptible: true\n", minutes.saturating_add(75)),
    };
    format!(
        "{}:
  stage: {stage}
  needs: [{}]
{}{}{when}  timeout: {minutes} minutes
  artifacts:
    when: always
    paths: {}
  script:
    - {}",
        scalar(name),
        needs.unwrap_or_default(),
        tags(runner),
        variables(pipeline),
        list(&[metrics(pipeline).as_deref().unwrap_or(METRICS)]),
        block(6, script)
    )
}

/// Returns the path of the metrics, if the user names one.
fn metrics(pipeline: &Pipeline) -> Option<String> {
    take_option(&pipeline.calls.options, "--metrics").1
}

fn is_in_checkout(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    parts.all(|part| matches!(part, Component::CurDir | Component::Normal(_)))
}

/// Writes the lines that always run.
fn after(lines: &[String]) -> String {
    format!("  after_script:\n    - {}", block(6, lines))
}

/// Writes the secrets with other names in jobs; those of the same name are set by the project's settings. Otherwise
/// GitLab gives `after_script` 5 minutes, and none if the script takes all of the job's time.
fn variables(pipeline: &Pipeline) -> String {
    let secrets = pipeline.calls.secrets.iter();
    let lines = secrets
        .filter(|secret| secret.variable != secret.name)
        .map(|secret| format!("    {}: ${}\n", secret.variable, secret.name));
    let minutes = pipeline.calls.minutes;
    let times =
        format!("    RUNNER_SCRIPT_TIMEOUT: {minutes}m\n    RUNNER_AFTER_SCRIPT_TIMEOUT: 1h\n");
    let times = (!pipeline.cleans_last()).then_some(times);
    let lines: String = lines.chain(times).collect();
    match lines.is_empty() {
        true => lines,
        false => format!("  variables:\n{lines}"),
    }
}

fn tags(runner: &[String]) -> String {
    match runner {
        [] => String::new(),
        labels => format!("  tags: {}\n", list(labels)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::tests::pipeline as example;
    use super::*;

    #[test]
    fn each_job_waits_for_what_it_stands_on() {
        let text = pipeline(&example(true, &[]), "ci/rockenv.yml").unwrap();
        let needs: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("  needs: "))
            .collect();
        assert_eq!(
            needs,
            [
                "[]",
                "[{job: \"what is common\", artifacts: false}]",
                "[{job: \"build a\", artifacts: false}]",
                "[{job: \"what is common\", artifacts: false}]"
            ]
        );
        let last = format!(
            "\"leave nothing\":\n  stage: clean\n{}      when: always\n",
            inner()
        );
        assert_has!(text, &last);
        // One runs all others, and is not one of them.
        assert_eq!(text.matches(inner()).count(), 6, "{text}");
        let outer = format!("{}      when: never\n", inner());
        assert_eq!(text.matches(&outer).count(), 1, "{text}");
        assert_has!(text, "      - local: \"ci/rockenv.yml\"\n");
        assert_eq!(
            text.matches("  variables:\n    TOKEN: $REGISTRY_TOKEN\n")
                .count(),
            5
        );
        let alone = pipeline(&example(false, &[]), "ci/rockenv.yml").unwrap();
        assert_eq!(alone.matches("after_script").count(), 2, "{alone}");
        assert!(
            !alone.contains("trigger") && !alone.contains("rules"),
            "{alone}"
        );
        // What cleans up has time of its own, within the job's.
        let times = "    RUNNER_SCRIPT_TIMEOUT: 90m\n    RUNNER_AFTER_SCRIPT_TIMEOUT: 1h\n  \
                     interruptible: true\n  timeout: 165 minutes\n";
        assert_eq!(alone.matches(times).count(), 2, "{alone}");
        assert_eq!(text.matches("  timeout: 90 minutes\n").count(), 5, "{text}");
    }
}
