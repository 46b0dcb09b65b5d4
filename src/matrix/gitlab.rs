//! Owns the pipeline for GitLab. Pure.

use std::path::{Component, Path};

use super::jobs::{Job, take_option};
use super::pipeline::{Pipeline, block, list, scalar, section};
use crate::sys::error::Result;

/// Path of each job's metrics, relative to its checkout.
const METRICS: &str = "rockenv-metrics.jsonl";
/// Name of the common job: not a valid env name, and not a GitLab keyword.
const COMMON: &str = "what is common";
/// The rule that restricts a job to the child pipeline.
const INNER: &str = "  rules:\n    - if: $CI_PIPELINE_SOURCE == \"parent_pipeline\"\n";

/// Writes the pipeline. `file` is the pipeline's path in the repository.
pub(crate) fn pipeline(pipeline: &Pipeline, file: &str) -> Result<String> {
    let mut text = vec![pipeline.heading()];
    text.push("stages: [common, build, test, clean]\n".to_owned());
    if pipeline.cleans_last() {
        text.push(one_at_a_time(file));
    }
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
    let jobs = pipeline.common.iter().chain(&pipeline.jobs);
    text.extend(jobs.map(|one| job(pipeline, one, &metrics)));
    if pipeline.cleans_last() {
        let runner = pipeline.jobs.first().map_or(&[][..], |job| &job.runner);
        let lines = pipeline.clean(pipeline.envs(), runner);
        text.push(format!(
            "{}:\n  stage: clean\n{}      when: always\n  timeout: {} minutes\n{}{}  script:\n    - {}",
            scalar("leave nothing"),
            INNER,
            pipeline.calls.minutes,
            tags(runner),
            variables(pipeline),
            block(6, &lines)
        ));
    }
    Ok(text.concat())
}

/// Writes the job that runs all others, as a child pipeline of the same file. With a shared store, all pipelines use
/// the same env names, so only one pipeline at a time may run. A GitLab resource group covers a single job, and this
/// job lasts as long as the child pipeline.
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

/// Writes a job. `more` are further options for `up`.
fn job(pipeline: &Pipeline, job: &Job, more: &[String]) -> String {
    let (stage, name) = match (&job.until, &job.needs) {
        (Some(_), _) => ("common", COMMON.to_owned()),
        (None, Some(_)) => ("test", format!("test {}", job.env)),
        (None, None) => ("build", format!("build {}", job.env)),
    };
    let common = pipeline.follows_common(job).then(|| COMMON.to_owned());
    let needs = job.needs.as_ref().map(|needs| format!("build {needs}"));
    // With the other job's artifacts, `up` would append to that job's metrics.
    let needs = needs.or(common);
    let needs = needs.map(|needs| format!("{{job: {}, artifacts: false}}", scalar(&needs)));
    let minutes = pipeline.calls.minutes;
    let (when, minutes, after) = match pipeline.cleans_last() {
        true => (INNER, minutes, String::new()),
        false => {
            // These run whatever the job's outcome.
            let lines = block(6, &pipeline.clean([job.env.as_str()], &job.runner));
            let after = format!("  after_script:\n    - {lines}");
            // The script's limit, plus an hour for `after_script` and 15 minutes for the rest of the job.
            ("  interruptible: true\n", minutes.saturating_add(75), after)
        }
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
    - {}{after}",
        scalar(&name),
        needs.unwrap_or_default(),
        tags(&job.runner),
        variables(pipeline),
        list(&[metrics(pipeline).as_deref().unwrap_or(METRICS)]),
        block(6, &pipeline.build(job, more))
    )
}

/// Returns the path of the metrics, if the user gives one.
fn metrics(pipeline: &Pipeline) -> Option<String> {
    take_option(&pipeline.calls.options, "--metrics").1
}

fn is_in_checkout(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    parts.all(|part| matches!(part, Component::CurDir | Component::Normal(_)))
}

/// Writes a job's variables. Secrets whose variable has the secret's own name come from the project's settings. Without
/// explicit timeouts GitLab gives `after_script` 5 minutes, or no time at all if the script uses up the job's limit.
/// GitLab ignores that `after_script` fails unless told not to.
fn variables(pipeline: &Pipeline) -> String {
    let secrets = pipeline.calls.secrets.iter();
    let lines = secrets
        .filter(|secret| secret.variable != secret.name)
        .map(|secret| format!("    {}: ${}\n", secret.variable, secret.name));
    let minutes = pipeline.calls.minutes;
    let after = format!(
        "    RUNNER_SCRIPT_TIMEOUT: {minutes}m
    RUNNER_AFTER_SCRIPT_TIMEOUT: 1h
    AFTER_SCRIPT_IGNORE_ERRORS: \"false\"
"
    );
    let after = (!pipeline.cleans_last()).then_some(after);
    section("  variables", lines.chain(after).collect())
}

fn tags(runner: &[String]) -> String {
    match runner {
        [] => String::new(),
        labels => format!("  tags: {}\n", list(labels)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::{Share, tests::pipeline as example};
    use super::*;

    #[test]
    fn one_outer_job_runs_the_others_and_cleaning_has_its_own_time() {
        let text = pipeline(&example(Share::Store, &[]), "ci/rockenv.yml").unwrap();
        let last = format!("\"leave nothing\":\n  stage: clean\n{INNER}      when: always\n");
        assert_has!(text, &last);
        // The outer job runs all others and is not part of the child pipeline.
        assert_eq!(text.matches(INNER).count(), 6, "{text}");
        let outer = format!("{INNER}      when: never\n");
        assert_eq!(text.matches(&outer).count(), 1, "{text}");
        assert_has!(text, "      - local: \"ci/rockenv.yml\"\n");
        assert_has!(text, "\"what is common\":\n  stage: common\n  needs: []\n");
        let common = "  stage: build\n  needs: [{job: \"what is common\", artifacts: false}]\n";
        assert_eq!(text.matches(common).count(), 2, "{text}");
        let built = "\"test a\":\n  stage: test\n  needs: [{job: \"build a\", artifacts: false}]\n";
        assert_has!(text, built);
        assert_eq!(
            text.matches("  variables:\n    TOKEN: $REGISTRY_TOKEN\n")
                .count(),
            5
        );
        let alone = pipeline(&example(Share::Nothing, &[]), "ci/rockenv.yml").unwrap();
        assert_eq!(alone.matches("after_script").count(), 2, "{alone}");
        assert!(
            !alone.contains("trigger") && !alone.contains("rules"),
            "{alone}"
        );
        // GitLab spells the status `canceled`, and has another one for the script's time limit.
        let ended = "case ${CI_JOB_STATUS-} in cancel*|timedout) force=--force ;;";
        assert_eq!(alone.matches(ended).count(), 2, "{alone}");
        // Cleanup has its own share of the job's time limit, and its failure is the job's.
        let times = "    RUNNER_SCRIPT_TIMEOUT: 90m\n    RUNNER_AFTER_SCRIPT_TIMEOUT: 1h\n    \
                     AFTER_SCRIPT_IGNORE_ERRORS: \"false\"\n  interruptible: true\n  timeout: 165 minutes\n";
        assert_eq!(alone.matches(times).count(), 2, "{alone}");
        assert_eq!(text.matches("  timeout: 90 minutes\n").count(), 5, "{text}");
    }
}
