//! Owns the script that submits envs to Slurm: a job for the common steps, an array with a task per env, and a GPU job
//! for each env with GPU steps. Pure.

use std::collections::BTreeMap;

use clap::Args;
use clap::builder::NonEmptyStringValueParser as NonEmpty;

use super::jobs::Job;
use super::pipeline::{Pipeline, block_end, quote, words};

/// Message that the script prints before the ids of the jobs that hold the envs, and the envs.
pub(crate) const QUEUED: &str = "these envs are already in the queue, as job ";
/// Message that the script prints if squeue gives no answer.
pub(crate) const NO_QUEUE: &str = "squeue failed";
/// Maximum bytes of env names in a comment after the first name; Slurm accepts 1024 in total.
const LONGEST_COMMENT: usize = 900;
/// First lines of each job. A node that lacks the job's directory runs the job in /tmp, where any user of the node may
/// have put profiles: the job would trust them.
const BEGIN: &str = r#"#!/bin/sh
set -eu
if [ . -ef /tmp ] && ! [ "${SLURM_SUBMIT_DIR-}" -ef /tmp ]; then
    echo "$(uname -n) lacks the directory of this job" >&2
    exit 1
fi"#;
/// Finds `envs` in the queue. A job's comment names its env, an array's comment the envs of its tasks. Prints the id of
/// a whole array only if no other env of it is left, because the reader may cancel what it names.
const FIND: &str = r#"
BEGIN { count = split(envs, names, " "); for (i = 1; i <= count; i++) ours[names[i]] }
sub(/^rockenv:/, "", $3) {
    split($3, tasks, ",")
    env = tasks[$2 ~ /^[0-9]+$/ ? $2 + 1 : 1]
    if (!(env in ours)) { others[$1]; next }
    row[++rows] = $1 " " $2
    if (!found[env]++) all = all " " env
}
END {
    for (i = 1; i <= rows; i++) {
        split(row[i], id, " ")
        job = id[1] in others ? id[1] "_" id[2] : id[1]
        if (!known[job]++) jobs = jobs " " job
    }
    if (all) print substr(jobs, 2) ":" all
}
"#;

/// Settings for `sbatch` beyond the plan.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Site {
    /// Run steps with a GPU as separate jobs that request this resource, such as `gpu:1` or `gpu:{target}:1`
    #[arg(long, value_name = "GRES", value_parser = NonEmpty::new(), help_heading = "Slurm")]
    pub gres: Option<String>,
    /// Option for each `sbatch`, such as `--partition=build`; may be given again
    #[arg(
        long,
        value_name = "OPTION",
        value_parser = NonEmpty::new(),
        allow_hyphen_values = true,
        help_heading = "Slurm"
    )]
    pub sbatch: Vec<String>,
}

/// Writes the script. It prints a line with the name and id of each job, and cancels all submitted jobs if one is
/// refused.
pub(crate) fn script(pipeline: &Pipeline, site: &Site) -> String {
    // The order of the envs changes with the recorded times; a sorted list does not.
    let mut names = pipeline.envs();
    names.sort_unstable();
    let all = format!("envs-{}", names.first().copied().unwrap_or_default());
    let mut text = vec![
        "#!/bin/sh\n".to_owned(),
        pipeline.heading(),
        "set -eu\n".to_owned(),
        // A second submission would run jobs for the same envs.
        format!(
            "queue=$(squeue --me --noheader --array --format='%F %K %k') || {{ echo '{NO_QUEUE}' >&2; exit 1; }}
queued=$(echo \"$queue\" | awk -v envs={} '{FIND}')
[ -z \"$queued\" ] || {{ echo \"{QUEUED}$queued\" >&2; exit 1; }}
",
            quote(&names.join(" "))
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
    # Some sites' `sbatch` welcomes the user first.
    id=${id##*'
'}
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
        let lines = pipeline.build(common, &jobs);
        let options = options(pipeline, site, "%j", &[], &common.env);
        text.push(submit("common", &options, &lines));
        text.push("echo \"common $id\"\n".to_owned());
        after = " --dependency=\"afterok:$id\"";
    }
    let envs: Vec<_> = pipeline
        .jobs
        .iter()
        .filter(|job| job.needs.is_none())
        .collect();
    let mut tasks = BTreeMap::new();
    for (number, envs) in arrays(&envs).into_iter().enumerate() {
        let lines = pipeline.build_one_of(envs, "SLURM_ARRAY_TASK_ID", &jobs);
        let array = format!("--array=0-{}", envs.len() - 1);
        let names: Vec<&str> = envs.iter().map(|job| job.env.as_str()).collect();
        let options = options(pipeline, site, "%A_%a", &[array], &names.join(",")) + after;
        text.push(submit(&all, &options, &lines));
        text.push(format!("array{number}=$id\n"));
        for (task, job) in envs.iter().enumerate() {
            let task = format!("${{array{number}}}_{task}");
            text.push(format!("echo {}\" {task}\"\n", quote(&job.env)));
            tasks.insert(&job.name, task);
        }
    }
    for job in &pipeline.jobs {
        let Some(task) = job.needs.as_ref().and_then(|needs| tasks.get(needs)) else {
            continue;
        };
        let gres = site.gres.iter();
        let gres = gres.map(|gres| format!("--gres={}", gres.replace("{target}", job.target)));
        let options = options(pipeline, site, "%j", &gres.collect::<Vec<_>>(), &job.env);
        let options = format!("{options} --dependency=\"afterok:{task}\"");
        text.push(submit(&job.name, &options, &pipeline.build(job, &jobs)));
        text.push(format!("echo {}\" $id\"\n", quote(&job.name)));
    }
    text.push("trap - EXIT\n".to_owned());
    text.concat()
}

/// Splits the envs into arrays whose comments have room for the names, of at most 64 bytes each.
fn arrays<'a>(envs: &'a [&'a Job]) -> Vec<&'a [&'a Job]> {
    let mut length = 0;
    let fits = |_: &&Job, next: &&Job| {
        length += next.env.len() + 1;
        let fits = length <= LONGEST_COMMENT;
        if !fits {
            length = 0;
        }
        fits
    };
    envs.chunk_by(fits).collect()
}

fn options(pipeline: &Pipeline, site: &Site, id: &str, more: &[String], envs: &str) -> String {
    let size = pipeline.size;
    let mut options = vec![
        format!("--cpus-per-task={}", size.cpus),
        format!("--time={}", pipeline.calls.minutes),
        // A job that is requeued keeps the output of its first run.
        "--open-mode=append".to_owned(),
        format!("--output=rockenv-%x-{id}.log"),
    ];
    options.extend(
        size.memory
            .map(|bytes| format!("--mem={}M", bytes.div_ceil(1 << 20))),
    );
    let comment = [format!("--comment=rockenv:{envs}")];
    words(&[&options[..], more, &site.sbatch, &comment].concat())
}

/// Writes the submission of a job that runs these lines.
fn submit(name: &str, options: &str, lines: &[String]) -> String {
    let end = block_end(lines);
    format!(
        "submit {} {options} <<'{end}'\n{BEGIN}\n{}\n{end}\n",
        quote(name),
        lines.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::{Share, tests::pipeline};
    use super::*;

    #[test]
    fn each_job_waits_for_what_it_stands_on_and_asks_for_what_it_needs() {
        let site = Site {
            gres: Some("gpu:{target}:1".to_owned()),
            sbatch: vec!["--partition=a b".to_owned()],
        };
        let text = script(&pipeline(Share::Store, &[]), &site);
        let submitted: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("submit ")?.strip_suffix(" <<'END'"))
            .collect();
        let same = "--cpus-per-task=8 --time=90 --open-mode=append --output=rockenv-%x-";
        assert_eq!(
            submitted,
            [
                format!("common {same}%j.log --mem=3073M '--partition=a b' --comment=rockenv:a"),
                format!(
                    "envs-a {same}%A_%a.log --mem=3073M --array=0-1 '--partition=a b' --comment=rockenv:a,b --dependency=\"afterok:$id\""
                ),
                format!(
                    "a-gpu {same}%j.log --mem=3073M --gres=gpu:gfx1103:1 '--partition=a b' --comment=rockenv:a --dependency=\"afterok:${{array0}}_0\""
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
    fn a_node_without_the_directory_of_a_job_does_not_run_it() {
        for (submitted, directory, code) in [("/", "/tmp", 1), ("/tmp", "/tmp", 0), ("/", "/", 0)] {
            let mut job = std::process::Command::new("sh");
            job.args(["-c", BEGIN]).current_dir(directory);
            let ended = job.env("SLURM_SUBMIT_DIR", submitted).output().unwrap();
            assert_eq!(ended.status.code(), Some(code), "{submitted} {directory}");
        }
    }

    #[test]
    fn a_line_that_looks_like_the_end_is_not_it() {
        let text = submit("a", "", &["END".to_owned()]);
        assert!(text.ends_with("\nEND\nEND_\n"), "{text}");
    }
}
