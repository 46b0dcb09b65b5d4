//! Owns the files for Kubernetes: a JobSet, or a Workflow for Argo. Both run the same containers in up to three phases:
//! the common steps, one pod per env, and one pod with a GPU per env that has GPU steps. Pure.
//!
//! An env is an index of its phase's job, not a job of its own: a JobSet stops all its jobs when one of them fails, and
//! Kueue accepts only a few jobs per JobSet.

use clap::builder::NonEmptyStringValueParser as NonEmpty;
use clap::{Args, ValueEnum};
use sha2::{Digest as _, Sha256};

use super::jobs::Job;
use super::pipeline::{Pipeline, block, scalar, section};

/// Path of the store in a container.
const STORE: &str = "/var/lib/rockenv";
/// Name of the Secret object for jobs.
const SECRETS: &str = "rockenv";
/// Path of the registry logins in a container.
const LOGIN: &str = "/run/rockenv-login";
/// Maximum length of the object's name. Pods append a job name and numbers, and pod names have at most 63 characters.
const NAME_LIMIT: usize = 45;
/// Variable with the env's number. Kubernetes sets it in the pods of an indexed job.
const INDEX: &str = "JOB_COMPLETION_INDEX";
/// Argo's condition for trying a pod again. A pod that the kubelet evicts, preempts, or ends before its node shuts down
/// has failed for Argo, as after a failed step: only the kubelet's message tells them apart.
const LOST: &str = "lastRetry.status == 'Error' || \
    lastRetry.message matches 'node was low on|node had condition|node shutdown|admit critical pod'";
/// How often a lost pod is tried again. A build that needs more than its node has is evicted each time.
const RETRIES: u32 = 2;
/// Time that a finished object is kept, in seconds: a week.
const KEPT: u32 = 7 * 24 * 60 * 60;

/// What starts the jobs in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Orchestrator {
    /// The JobSet controller of Kubernetes SIGs
    Jobset,
    /// Argo Workflows
    Argo,
}

/// Where the jobs run.
#[derive(Clone, Debug, Args)]
pub(crate) struct Cluster {
    /// Container image that contains rockenv
    #[arg(long, value_name = "IMAGE", value_parser = NonEmpty::new(), help_heading = "Kubernetes")]
    pub image: String,
    /// PersistentVolumeClaim of the volume with the store; with `--registry` each job may have a store of its own
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present = "registry",
        value_parser = NonEmpty::new(),
        help_heading = "Kubernetes"
    )]
    pub claim: Option<String>,
    /// Secret with logins to registries, as `kubectl create secret docker-registry` makes it: for the image and for
    /// `--registry`
    #[arg(long, value_name = "NAME", value_parser = NonEmpty::new(), help_heading = "Kubernetes")]
    pub registry_secret: Option<String>,
    /// Controller that starts the jobs in order
    #[arg(long, value_name = "NAME", value_enum, default_value_t = Orchestrator::Jobset, help_heading = "Kubernetes")]
    pub orchestrator: Orchestrator,
    /// Kueue queue that admits the jobs
    #[arg(long, value_name = "NAME", value_parser = NonEmpty::new(), help_heading = "Kubernetes")]
    pub queue: Option<String>,
}

/// Pods that run the same script, one for each env.
struct Phase<'a> {
    name: &'static str,
    envs: Vec<&'a str>,
    /// The phase that must complete first.
    after: Option<&'static str>,
    gpu: bool,
    lines: Vec<String>,
}

pub(crate) fn manifest(pipeline: &Pipeline, cluster: &Cluster) -> String {
    let phases = phases(pipeline);
    let (api, kind, spec) = match cluster.orchestrator {
        Orchestrator::Jobset => (
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            jobset(pipeline, cluster, &phases),
        ),
        Orchestrator::Argo => (
            "argoproj.io/v1alpha1",
            "Workflow",
            workflow(pipeline, cluster, &phases),
        ),
    };
    // An env belongs to one matrix, so the first env's name can identify the whole matrix.
    let first = pipeline.envs().first().copied().unwrap_or_default();
    format!(
        "{}apiVersion: {api}
kind: {kind}
metadata:
  name: {}
  labels:
    app.kubernetes.io/name: rockenv
{}spec:
{}",
        pipeline.heading(),
        scalar(&name(&format!("rockenv-{first}"))),
        indent(4, &queue(cluster)),
        indent(2, &spec),
    )
}

/// Returns the phases, in their order.
fn phases(pipeline: &Pipeline) -> Vec<Phase<'_>> {
    let more = pipeline.jobs_option();
    let common = pipeline.common.as_ref().map(|common| Phase {
        name: "common",
        envs: vec![&common.env],
        after: None,
        gpu: false,
        lines: pipeline.build(common, &more),
    });
    let after = common.as_ref().map(|common| common.name);
    let phase = |name, after, gpu| {
        let jobs = pipeline.jobs.iter();
        let jobs: Vec<&Job> = jobs.filter(|job| job.needs.is_some() == gpu).collect();
        Phase {
            name,
            envs: jobs.iter().map(|job| job.env.as_str()).collect(),
            after,
            gpu,
            lines: pipeline.build_one_of(&jobs, INDEX, &more),
        }
    };
    let each = [
        phase("build", after, false),
        phase("test", Some("build"), true),
    ];
    let phases = common.into_iter().chain(each);
    phases.filter(|phase| !phase.envs.is_empty()).collect()
}

/// Writes the spec of a JobSet. A failed env is not retried, because `up` would fail in the same step, and does not
/// stop the other envs of its phase. A pod that is lost with its node is tried again and resumes.
fn jobset(pipeline: &Pipeline, cluster: &Cluster, phases: &[Phase<'_>]) -> String {
    let jobs = phases.iter().map(|phase| {
        let after = phase.after.map_or_else(String::new, |after| {
            format!("  dependsOn:\n    - name: {after}\n      status: Complete\n")
        });
        format!(
            "- name: {name}
{after}  template:
    spec:
      completionMode: Indexed
      completions: {pods}
      parallelism: {pods}
      backoffLimitPerIndex: {RETRIES}
      podFailurePolicy:
        rules:
          - action: Count
            onPodConditions:
              - type: DisruptionTarget
                status: \"True\"
          - action: FailIndex
            onExitCodes:
              operator: NotIn
              values: [0]
      template:
        spec:
          restartPolicy: Never
          automountServiceAccountToken: false
          activeDeadlineSeconds: {seconds}
          containers:
            - name: rockenv
{container}{placement}",
            name = phase.name,
            pods = phase.envs.len(),
            seconds = seconds(pipeline),
            container = indent(14, &container(pipeline, cluster, phase)),
            placement = indent(10, &placement(cluster)),
        )
    });
    format!(
        "network:
  enableDNSHostnames: false
ttlSecondsAfterFinished: {KEPT}
replicatedJobs:
{}",
        indent(2, &jobs.collect::<String>())
    )
}

/// Writes the spec of an Argo Workflow. A lost pod is retried and resumes; a failed step is not retried.
fn workflow(pipeline: &Pipeline, cluster: &Cluster, phases: &[Phase<'_>]) -> String {
    let task = |phase: &str, env: &str| match phase {
        "common" => phase.to_owned(),
        _ => name(&format!("{phase}-{env}")),
    };
    let tasks = phases.iter().flat_map(|phase| {
        phase.envs.iter().enumerate().map(move |(index, env)| {
            let after = phase.after.map_or_else(String::new, |after| {
                format!("  depends: {}\n", scalar(&task(after, env)))
            });
            format!(
                "- name: {}
  template: {}
{after}  arguments:
    parameters:
      - name: index
        value: \"{index}\"
",
                scalar(&task(phase.name, env)),
                phase.name
            )
        })
    });
    let templates = phases.iter().map(|phase| {
        let labels = match &cluster.queue {
            Some(_) => format!("  metadata:\n    labels:\n{}", indent(6, &queue(cluster))),
            None => String::new(),
        };
        format!(
            "- name: {}
{labels}  inputs:
    parameters:
      - name: index
  activeDeadlineSeconds: {}
  retryStrategy:
    limit: \"{RETRIES}\"
    retryPolicy: Always
    expression: {}
  container:
{}",
            phase.name,
            seconds(pipeline),
            scalar(LOST),
            indent(4, &container(pipeline, cluster, phase)),
        )
    });
    format!(
        "entrypoint: envs
ttlStrategy:
  secondsAfterCompletion: {KEPT}
{}templates:
  - name: envs
    dag:
      failFast: false
      tasks:
{}{}",
        placement(cluster),
        indent(8, &tasks.collect::<String>()),
        indent(2, &templates.collect::<String>()),
    )
}

fn indent(by: usize, text: &str) -> String {
    let lines = text.lines();
    let lines = lines.map(|line| format!("{:by$}{line}\n", ""));
    lines.collect()
}

/// Returns a pod's time limit in seconds, counted from its assignment to a node.
fn seconds(pipeline: &Pipeline) -> u64 {
    u64::from(pipeline.calls.minutes) * 60
}

/// Writes the label that submits an object to Kueue.
fn queue(cluster: &Cluster) -> String {
    let queue = cluster.queue.iter();
    let label = |queue: &String| format!("kueue.x-k8s.io/queue-name: {}\n", scalar(queue));
    queue.map(label).collect()
}

/// Returns a valid DNS label for a name. An altered name ends with a digest, so names stay distinct.
fn name(wanted: &str) -> String {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if wanted.len() <= NAME_LIMIT && wanted.chars().all(plain) && !wanted.ends_with('-') {
        return wanted.to_owned();
    }
    let digest = hex::encode(Sha256::digest(wanted))[..8].to_owned();
    let readable: String = wanted
        .to_ascii_lowercase()
        .chars()
        .map(|c| if plain(c) { c } else { '-' })
        .take(NAME_LIMIT - 1 - digest.len())
        .collect();
    format!("{}-{digest}", readable.trim_end_matches('-'))
}

/// Writes a phase's container without its `name`.
fn container(pipeline: &Pipeline, cluster: &Cluster, phase: &Phase<'_>) -> String {
    let mut script = argument(&[&["set -eu".to_owned()], &phase.lines[..]].concat());
    let mut variables = String::new();
    if cluster.orchestrator == Orchestrator::Argo {
        variables += &variable(INDEX, "{{inputs.parameters.index}}");
        // Argo substitutes `{{...}}` and cannot escape the braces, so Kubernetes inserts one brace as `$(BRACE)`.
        if script.contains("{{") {
            script = script.replace("{{", "{$(BRACE)");
            variables += &variable("BRACE", "{");
        }
    }
    if cluster.registry_secret.is_some() {
        variables += &variable("REGISTRY_AUTH_FILE", &format!("{LOGIN}/auth.json"));
    }
    let secrets = pipeline.calls.secrets.iter();
    variables.extend(secrets.map(|secret| {
        format!(
            "  - name: {}
    valueFrom:
      secretKeyRef:
        name: {SECRETS}
        key: {}
",
            scalar(&secret.variable),
            scalar(&secret.name)
        )
    }));
    let variables = section("env", variables);
    let login = match cluster.registry_secret {
        Some(_) => format!("  - name: login\n    mountPath: {LOGIN}\n    readOnly: true\n"),
        None => String::new(),
    };
    format!(
        "image: {}
command: [\"/bin/sh\", \"-c\"]
args:
  - {script}{variables}# Containers are made in it.
securityContext:
  privileged: true
{}volumeMounts:
  - name: store
    mountPath: {STORE}
{login}",
        scalar(&cluster.image),
        resources(pipeline, cluster, phase.gpu),
    )
}

fn variable(name: &str, value: &str) -> String {
    format!("  - name: {name}\n    value: {}\n", scalar(value))
}

/// Writes a script as a container argument. Kubernetes expands `$(NAME)` in it and turns `$$` into `$`.
fn argument(lines: &[String]) -> String {
    let escaped = lines.iter().map(|line| {
        let next = line.chars().skip(1).map(Some).chain([None]);
        let each = line.chars().zip(next);
        each.flat_map(|(c, next)| {
            let twice = c == '$' && matches!(next, Some('$' | '('));
            twice.then_some('$').into_iter().chain([c])
        })
        .collect::<String>()
    });
    block(4, &escaped.collect::<Vec<_>>())
}

/// Writes the processor that a pod's node must have, and the pod's volumes: the store and the registry logins.
fn placement(cluster: &Cluster) -> String {
    let store = match &cluster.claim {
        Some(claim) => format!("persistentVolumeClaim: {{claimName: {}}}", scalar(claim)),
        None => "emptyDir: {}".to_owned(),
    };
    let login = cluster.registry_secret.as_deref().map(scalar);
    let pull = login
        .iter()
        .map(|secret| format!("imagePullSecrets:\n  - name: {secret}\n"));
    let login = login.iter().map(|secret| {
        format!(
            "  - name: login
    secret:
      secretName: {secret}
      defaultMode: 256 # 0400
      items:
        - key: .dockerconfigjson
          path: auth.json
"
        )
    });
    format!(
        "nodeSelector:
  kubernetes.io/arch: amd64
{}volumes:
  - name: store
    {store}
{}",
        pull.collect::<String>(),
        login.collect::<String>()
    )
}

/// Writes a pod's resources. Memory is a limit as well, so a build that exceeds it fails instead of its neighbours. A
/// store without a claim is on the node's disk.
fn resources(pipeline: &Pipeline, cluster: &Cluster, gpu: bool) -> String {
    let size = pipeline.size;
    let line = |name: &str, value: Option<u64>| {
        value.map_or_else(String::new, |value| format!("    {name}: \"{value}\"\n"))
    };
    let (cpu, memory) = (
        line("cpu", Some(size.cpus.into())),
        line("memory", size.memory),
    );
    let disk = size.disk.filter(|_| cluster.claim.is_none());
    let disk = line("ephemeral-storage", disk);
    let limits = line("amd.com/gpu", gpu.then_some(1)) + &memory;
    let limits = section("  limits", limits);
    format!("resources:\n  requests:\n{cpu}{memory}{disk}{limits}")
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::{Share, tests::pipeline};
    use super::*;

    fn cluster(orchestrator: Orchestrator) -> Cluster {
        Cluster {
            orchestrator,
            image: "registry.example.org/rockenv".to_owned(),
            claim: None,
            registry_secret: None,
            queue: None,
        }
    }

    #[test]
    fn scripts_are_neither_for_kubernetes_nor_for_argo_to_expand() {
        let of = |line: &str| {
            argument(&[line.to_owned()])
                .trim_start_matches(['|', '\n', ' '])
                .to_owned()
        };
        assert_eq!(of("echo $HOME $(id) ${x} $"), "echo $HOME $$(id) ${x} $\n");
        assert_eq!(of("$$ $$(x)"), "$$$ $$$$(x)\n");
        let odd = pipeline(Share::Store, &["--param", "x={{{workflow.name}}"]);
        let text = manifest(&odd, &cluster(Orchestrator::Argo));
        assert_has!(text, "'x={$(BRACE){workflow.name}}'");
        assert_eq!(text.matches("- name: BRACE\n").count(), 3, "{text}");
        let text = manifest(&odd, &cluster(Orchestrator::Jobset));
        assert_has!(text, "'x={{{workflow.name}}'");
    }

    #[test]
    fn what_a_job_needs_of_a_node_is_requested() {
        let claimed = Cluster {
            claim: Some("store".to_owned()),
            ..cluster(Orchestrator::Jobset)
        };
        let all = pipeline(Share::Store, &[]);
        let disk = "    ephemeral-storage: \"21474836480\"\n";
        let requests = "resources:\n  requests:\n    cpu: \"8\"\n    memory: \"3221225473\"\n";
        let limits = "    memory: \"3221225473\"\n";
        let of = |cluster, gpu| resources(&all, cluster, gpu);
        assert_eq!(
            of(&claimed, false),
            format!("{requests}  limits:\n{limits}")
        );
        assert_eq!(
            of(&cluster(Orchestrator::Argo), true),
            format!("{requests}{disk}  limits:\n    amd.com/gpu: \"1\"\n{limits}")
        );
    }

    #[test]
    fn names_are_such_as_kubernetes_takes_and_none_is_there_twice() {
        assert_eq!(name("rockenv-mylib-gfx1103"), "rockenv-mylib-gfx1103");
        let long = "x".repeat(56);
        let envs = [
            "a_b", "a-b", "a.b", "a..b", "a.-b", "a-.b", "a-", "A-", &long,
        ];
        let long_ones = ["gfx1100", "gfx1103"].map(|target| format!("{long}-{target}"));
        let envs = envs.into_iter().chain(long_ones.iter().map(String::as_str));
        let names = envs.map(|env| name(&format!("rockenv-{env}")));
        let names: std::collections::BTreeSet<String> = names.collect();
        assert_eq!(names.len(), 11, "{names:?}");
        for taken in names {
            assert!(
                taken.len() <= NAME_LIMIT && name(&taken) == taken,
                "{taken}"
            );
        }
    }
}
