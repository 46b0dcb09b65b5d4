//! Owns the pipeline for GitLab. Pure.

use super::pipeline::{Pipeline, block, list, scalar};

/// Where each job's metrics are, in its checkout.
const METRICS: &str = "rockenv-metrics.jsonl";
/// No env is called so, and nothing that means something to GitLab.
const COMMON: &str = "what is common";

/// Writes the pipeline.
pub fn pipeline(pipeline: &Pipeline) -> String {
    let mut text = vec![pipeline.heading()];
    text.push("stages: [common, build, test, clean]\n".to_owned());
    let common = pipeline.common.as_ref();
    let metrics = ["--metrics".to_owned(), METRICS.to_owned()];
    if let Some(common) = common {
        let script = pipeline.build_common(common, &metrics);
        text.push(job(
            pipeline,
            COMMON,
            "common",
            &common.runner,
            &[],
            &script,
        ));
        if !pipeline.cleans_last() {
            text.push(after(&pipeline.clean([common.env.as_str()])));
        }
    }
    for one in &pipeline.jobs {
        let needs: Vec<String> = match &one.needs {
            Some(needs) => vec![format!("build {needs}")],
            None => common.map(|_| COMMON.to_owned()).into_iter().collect(),
        };
        let stage = if one.needs.is_some() { "test" } else { "build" };
        let name = format!("{stage} {}", one.env);
        let script = pipeline.build(one, &metrics);
        text.push(job(pipeline, &name, stage, &one.runner, &needs, &script));
        if !pipeline.cleans_last() {
            text.push(after(&pipeline.clean([one.env.as_str()])));
        }
    }
    if pipeline.cleans_last() {
        let lines = pipeline.clean(pipeline.envs());
        let runner = pipeline.jobs.first().map_or(&[][..], |job| &job.runner);
        text.push(format!(
            "{}:\n  stage: clean\n  when: always\n{}{}  script:\n    - {}",
            scalar("leave nothing"),
            tags(runner),
            variables(pipeline),
            block(6, &lines)
        ));
    }
    text.concat()
}

/// Writes a job.
fn job(
    pipeline: &Pipeline,
    name: &str,
    stage: &str,
    runner: &[String],
    needs: &[String],
    script: &[String],
) -> String {
    // Envs of one store are called the same in each pipeline.
    let alone = match pipeline.cleans_last() {
        true => format!("  resource_group: {}\n", scalar(&format!("rockenv-{name}"))),
        false => "  interruptible: true\n".to_owned(),
    };
    format!(
        "{}:
  stage: {stage}
  needs: {}
{}{}{alone}  timeout: {} minutes
  artifacts:
    when: always
    paths: [{METRICS}]
  script:
    - {}",
        scalar(name),
        list(needs),
        tags(runner),
        variables(pipeline),
        pipeline.calls.minutes,
        block(6, script)
    )
}

/// Writes what is run in any case.
fn after(lines: &[String]) -> String {
    format!("  after_script:\n    - {}", block(6, lines))
}

/// Writes the secrets that are called otherwise in jobs; those that the project's settings have by the same name are there anyway.
fn variables(pipeline: &Pipeline) -> String {
    let secrets = pipeline.calls.secrets.iter();
    let lines = secrets
        .filter(|secret| secret.variable != secret.name)
        .map(|secret| format!("    {}: ${}\n", secret.variable, secret.name));
    let lines: String = lines.collect();
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
        let text = pipeline(&example(true, &[]));
        let needs: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("  needs: "))
            .collect();
        assert_eq!(
            needs,
            [
                "[]",
                "[\"what is common\"]",
                "[\"build a\"]",
                "[\"what is common\"]"
            ]
        );
        assert!(text.contains("\"leave nothing\":\n  stage: clean\n  when: always\n"));
        assert_eq!(
            text.matches("  variables:\n    TOKEN: $REGISTRY_TOKEN\n")
                .count(),
            5
        );
        let alone = pipeline(&example(false, &[]));
        assert_eq!(alone.matches("after_script").count(), 2, "{alone}");
    }
}
