//! Owns the script that submits envs to Slurm: a job for their common steps, an array with a task for each env, and a
//! job with a GPU for each env that has steps for one. Pure.

use super::pipeline::{Pipeline, block_end, quote, words};

/// What the script says before the number of the job that has the envs.
pub(crate) const QUEUED: &str = "these envs are already in the queue, as job ";

/// Settings for `sbatch` beyond the plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Site {
    /// The resource that jobs with a GPU request; `{target}` in it is the env's target.
    pub gres: Option<String>,
    /// Options of every `sbatch`: a partition, an account.
    pub options: Vec<String>,
}

/// Writes the script. It prints a line for each job, its name and its id, and if one is refused it cancels the
/// others.
pub(crate) fn script(pipeline: &Pipeline, site: &Site) -> String {
    // An env belongs to one matrix, so one name can identify all. Their order changes with the recorded times.
    let all = format!(
        "envs-{}",
        pipeline.envs().into_iter().min().unwrap_or_default()
    );
    let mut text = vec![
        "#!/bin/sh\n".to_owned(),
        pipeline.heading(),
        "set -eu\n".to_owned(),
        // Two submissions at once would meet in the same envs.
        format!(
            "queued=$(squeue --me --noheader --format=%A --name={})
[ -z \"$queued\" ] || {{ echo \"{QUEUED}${{queued%%[!0-9]*}}\" >&2; exit 1; }}
",
            quote(&all)
        ),
        "jobs=
trap '[ -z \"$jobs\" ] || scancel $jobs' EXIT
# A shell that a signal ends does not get there by itself.
trap 'exit 130' INT
trap 'exit 143' TERM HUP
submit() { # NAME OPTION...: a job that runs what comes in
    name=$1
    shift
    id=$(sbatch --parsable --kill-on-invalid-dep=yes --job-name=\"$name\" \"$@\")
    # Of a federation the cluster follows.
    id=${id%%;*}
    jobs=\"$jobs $id\"
}
"
        .to_owned(),
    ];
    let jobs = pipeline.jobs_option();
    let mut after = "";
    if let Some(common) = &pipeline.common {
        let lines = pipeline.build_common(common, &jobs);
        let options = options(pipeline, site, "%j", &[]);
        text.push(submit("common", &options, &lines));
        text.push("echo \"common $id\"\n".to_owned());
        after = " --dependency=\"afterok:$id\"";
    }
    let envs: Vec<_> = pipeline
        .jobs
        .iter()
        .filter(|job| job.needs.is_none())
        .collect();
    let lines = pipeline.build_one_of(&envs, "SLURM_ARRAY_TASK_ID", &jobs);
    let array = format!("--array=0-{}", envs.len().saturating_sub(1));
    let options_of_array = options(pipeline, site, "%A_%a", &[array]) + after;
    text.push(submit(&all, &options_of_array, &lines));
    text.push("array=$id\n".to_owned());
    for (task, job) in envs.iter().enumerate() {
        text.push(format!("echo {}\" ${{array}}_{task}\"\n", quote(&job.env)));
    }
    for job in pipeline.jobs.iter().filter(|job| job.needs.is_some()) {
        let Some(task) = envs
            .iter()
            .position(|env| job.needs.as_ref() == Some(&env.name))
        else {
            continue;
        };
        let gres = site.gres.iter();
        let gres = gres.map(|gres| format!("--gres={}", gres.replace("{target}", job.target)));
        let options = options(pipeline, site, "%j", &gres.collect::<Vec<_>>());
        let options = format!("{options} --dependency=\"afterok:${{array}}_{task}\"");
        text.push(submit(&job.name, &options, &pipeline.build(job, &jobs)));
        text.push(format!("echo {}\" $id\"\n", quote(&job.name)));
    }
    text.push("trap - EXIT\n".to_owned());
    text.concat()
}

/// Writes the options of a job.
fn options(pipeline: &Pipeline, site: &Site, id: &str, more: &[String]) -> String {
    let size = pipeline.size;
    let mut options = vec![
        format!("--cpus-per-task={}", size.cpus),
        format!("--time={}", pipeline.calls.minutes),
        format!("--output=rockenv-%x-{id}.log"),
    ];
    options.extend(
        size.memory
            .map(|bytes| format!("--mem={}M", bytes.div_ceil(1 << 20))),
    );
    words(&[&options[..], more, &site.options].concat())
}

/// Writes the submission of a job that runs these lines.
fn submit(name: &str, options: &str, lines: &[String]) -> String {
    let end = block_end(lines);
    format!(
        "submit {} {options} <<'{end}'\n#!/bin/sh\nset -eu\n{}\n{end}\n",
        quote(name),
        lines.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::tests::pipeline;
    use super::*;

    #[test]
    fn each_job_waits_for_what_it_stands_on_and_asks_for_what_it_needs() {
        let site = Site {
            gres: Some("gpu:{target}:1".to_owned()),
            options: vec!["--partition=a b".to_owned()],
        };
        let text = script(&pipeline(true, &[]), &site);
        let submitted: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("submit ")?.strip_suffix(" <<'END'"))
            .collect();
        let same = "--cpus-per-task=8 --time=90 --output=rockenv-%x-";
        assert_eq!(
            submitted,
            [
                format!("common {same}%j.log --mem=3073M '--partition=a b'"),
                format!(
                    "envs-a {same}%A_%a.log --mem=3073M --array=0-1 '--partition=a b' --dependency=\"afterok:$id\""
                ),
                format!(
                    "a-gpu {same}%j.log --mem=3073M --gres=gpu:gfx1103:1 '--partition=a b' --dependency=\"afterok:${{array}}_0\""
                ),
            ],
            "{text}"
        );
        assert_has!(
            text,
            "\n1) set -- b ;;\n*) echo \"no env has number $SLURM_ARRAY_TASK_ID\" >&2; exit 1 ;;\nesac\n"
        );
        assert_has!(text, "sudo -E rockenv -v up \"$@\" --jobs 8\n");
    }

    #[test]
    fn a_line_that_looks_like_the_end_is_not_it() {
        let text = submit("a", "", &["END".to_owned()]);
        assert!(text.ends_with("\nEND\nEND_\n"), "{text}");
    }
}
