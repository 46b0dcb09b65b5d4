//! Owns the workflow for GitHub Actions. Pure.

use super::jobs::{Job, hosted};
use super::pipeline::{Pipeline, Share, block, list, scalar, section};

/// Checks out the profile's repository. Pinned by commit, because a tag can move.
const CHECKOUT: &str = "actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1";

/// Id of the job for the common steps. No other job can have it.
const COMMON: &str = "common";

/// The action that installs rockenv on machines that lack it.
#[derive(Clone, Debug)]
pub(crate) struct Action {
    /// `OWNER/REPOSITORY@COMMIT`.
    pub uses: String,
    /// SHA-256 digest of the rockenv program.
    pub sha256: String,
    /// Also install on self-hosted machines, not only on GitHub's own.
    pub everywhere: bool,
}

pub(crate) fn workflow(pipeline: &Pipeline, action: Option<&Action>) -> String {
    let mut text = vec![pipeline.heading()];
    // With a shared store, all runs of the workflow use the same env names and must not overlap. The workflow has no
    // name, so `github.workflow` is its path, and other workflow files do not cancel it.
    let (which, cancel) = match pipeline.cleans_last() {
        true => ("", "false"),
        false => ("-${{ github.ref }}", "true"),
    };
    // The job's GitHub token also logs in to ghcr.io.
    let packages = match &pipeline.share {
        Share::Registry(registry) if registry.starts_with("ghcr.io/") => "  packages: write\n",
        _ => "",
    };
    text.push(format!(
        "on:
  push:
  workflow_dispatch:
permissions:
  contents: read
{packages}concurrency:
  group: rockenv-${{{{ github.workflow }}}}{which}
  cancel-in-progress: {cancel}
defaults:
  run:
    shell: bash
jobs:
"
    ));
    for one in pipeline.common.iter().chain(&pipeline.jobs) {
        text.push(job(pipeline, action, one));
        if !pipeline.cleans_last() {
            // The job's own status is `cancelled` even if the build never began.
            let status = "steps.build.outcome";
            let lines = pipeline.clean([one.env.as_str()], &one.runner);
            text.push(always(&lines, status));
        }
    }
    if pipeline.cleans_last() {
        let mut needs: Vec<String> = pipeline.jobs.iter().map(|job| id(&job.name)).collect();
        needs.extend(pipeline.common.as_ref().map(|_| COMMON.to_owned()));
        let runner = pipeline.jobs.first().map_or(&[][..], |job| &job.runner);
        text.push(format!(
            "  clean:
    name: leave nothing
    if: always()
    needs: {}
    runs-on: {}
    timeout-minutes: {}
{}    steps:
{}",
            list(&needs),
            literal(&list(runner)),
            pipeline.calls.minutes,
            environment(pipeline),
            install(action, runner)
        ));
        let status = "contains(needs.*.result, 'cancelled') && 'cancelled' || 'success'";
        text.push(always(&pipeline.clean(pipeline.envs(), runner), status));
    }
    text.concat()
}

/// Writes a job and its main step.
fn job(pipeline: &Pipeline, action: Option<&Action>, job: &Job) -> String {
    let (id_of_job, name) = match &job.until {
        Some(until) => (COMMON.to_owned(), format!("{}, up to {until}", job.name)),
        None => (id(&job.name), job.name.clone()),
    };
    let common = pipeline.follows_common(job).then(|| COMMON.to_owned());
    let needs = job.needs.as_deref().map(id).or(common);
    let needs = needs.map_or_else(String::new, |needs| format!("    needs: {needs}\n"));
    let lines = pipeline.build(job, &[]);
    let run: Vec<String> = lines.iter().map(|line| literal(line)).collect();
    format!(
        "  {id_of_job}:
    name: {}
{needs}    runs-on: {}
    timeout-minutes: {}
{}    steps:
      - uses: {CHECKOUT}
        with:
          persist-credentials: false
{}      - id: build
        name: build
        run: {}",
        literal(&scalar(&name)),
        literal(&list(&job.runner)),
        pipeline.calls.minutes,
        environment(pipeline),
        install(action, &job.runner),
        block(10, &run)
    )
}

/// Writes the step that installs the program that wrote the file, if the machine with these labels needs it.
fn install(action: Option<&Action>, runner: &[String]) -> String {
    let action = action.filter(|action| action.everywhere || hosted(runner).is_some());
    let step = action.map(|action| {
        format!(
            "      - uses: {}
        with:
          version: {}
          sha256: {}
",
            literal(&scalar(&action.uses)),
            scalar(env!("CARGO_PKG_VERSION")),
            scalar(&action.sha256)
        )
    });
    step.unwrap_or_default()
}

/// Writes a job's secrets.
fn environment(pipeline: &Pipeline) -> String {
    let secrets = pipeline.calls.secrets.iter();
    let lines = secrets.map(|secret| {
        format!(
            "      {}: ${{{{ secrets.{} }}}}\n",
            secret.variable, secret.name
        )
    });
    section("    env", lines.collect())
}

/// Writes the cleanup step, which runs after every outcome of the job. `status` is an expression for the build's
/// outcome, because GitHub, unlike GitLab, sets no variable with it.
fn always(lines: &[String], status: &str) -> String {
    let lines: Vec<String> = lines.iter().map(|line| literal(line)).collect();
    format!(
        "      - name: leave nothing
        if: always()
        env:
          CI_JOB_STATUS: ${{{{ {status} }}}}
        run: {}",
        block(10, &lines)
    )
}

/// Escapes text so that GitHub does not evaluate expressions in it.
fn literal(text: &str) -> String {
    text.replace("${{", "${{ '${{' }}")
}

/// Returns a valid job id that is unique for each name.
fn id(name: &str) -> String {
    format!("env-{}", name.replace('_', "__").replace('.', "_-"))
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::tests::pipeline;
    use super::*;

    #[test]
    fn each_env_has_an_id_each_job_the_secret_and_cleaning_comes_last() {
        let ids = ["a.b", "a_b", "a-b", "a_.b", "a._b"].map(id);
        assert_eq!(
            ids,
            [
                "env-a_-b",
                "env-a__b",
                "env-a-b",
                "env-a___-b",
                "env-a_-__b"
            ]
        );
        let own = pipeline(Share::Nothing, &[]);
        let text = workflow(&own, None);
        let status = "        env:\n          CI_JOB_STATUS: ${{ steps.build.outcome }}\n";
        assert_eq!(text.matches(status).count(), 2, "{text}");
        assert_eq!(text.matches("      - id: build\n").count(), 2, "{text}");
        let secret = "    env:\n      TOKEN: ${{ secrets.REGISTRY_TOKEN }}\n    steps:\n";
        let text = workflow(&pipeline(Share::Store, &[]), None);
        assert_eq!(text.matches(secret).count(), 5, "{text}");
        assert_has!(
            text,
            "  common:\n    name: \"common steps, up to compiler\"\n    runs-on:"
        );
        assert_eq!(text.matches("    needs: common\n").count(), 2, "{text}");
        assert_has!(text, "    name: \"a-gpu\"\n    needs: env-a\n");
        // Cleaning waits for the job with a GPU too.
        assert_has!(
            text,
            "needs: [\"env-a\", \"env-a-gpu\", \"env-b\", \"common\"]"
        );
    }

    #[test]
    fn labels_are_text_and_only_a_registry_of_github_needs_rights() {
        // Labels are literal text in every kind of job.
        let mut labelled = pipeline(Share::Store, &[]);
        for job in &mut labelled.jobs {
            job.runner = vec!["${{ x }}".to_owned()];
        }
        let text = workflow(&labelled, None);
        let label = "    runs-on: [\"${{ '${{' }} x }}\"]\n";
        assert_eq!(text.matches(label).count(), 4, "{text}");
        // Only jobs that use GitHub's registry get write access to it.
        let may = "permissions:\n  contents: read\n";
        let pushed = Share::Registry("registry.example.org/r".to_owned());
        let text = workflow(&pipeline(pushed, &[]), None);
        assert_has!(text, &format!("{may}concurrency:"));
        let own = Share::Registry("ghcr.io/o/r".to_owned());
        let text = workflow(&pipeline(own, &[]), None);
        assert_has!(text, &format!("{may}  packages: write\nconcurrency:"));
    }
}
