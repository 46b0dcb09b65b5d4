//! Owns the manifest for Kubernetes: a job for each env, and one for its steps with a GPU, which alone asks for one. Pure.
//!
//! Jobs of Kubernetes do not wait for each other: each begins with a container that waits for what it stands on.

use super::pipeline::{Pipeline, block, list, scalar};

/// The image that waits: Kubernetes' own.
const KUBECTL: &str = "registry.k8s.io/kubectl:v1.34.1";
/// Who may look at jobs, which is what waiting takes.
const WAITER: &str = "rockenv-wait";
/// Where the store is in a container.
const STORE: &str = "/var/lib/rockenv";

/// Where the jobs run.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The image that has rockenv in it.
    pub image: String,
    /// The claim on the volume that has the store; without, each job has its own.
    pub claim: Option<String>,
}

/// Writes the manifest.
pub fn manifest(pipeline: &Pipeline, cluster: &Cluster) -> String {
    let mut documents = Vec::new();
    let jobs = pipeline.jobs_option();
    let common = pipeline.common.as_ref();
    if let Some(common) = common {
        let lines = pipeline.build_common(common, &jobs);
        documents.push(job(pipeline, cluster, COMMON, false, None, &lines));
    }
    for one in &pipeline.jobs {
        let after = match &one.needs {
            Some(needs) => Some(name(needs)),
            None => common.map(|_| COMMON.to_owned()),
        };
        let lines = pipeline.build(one, &jobs);
        documents.push(job(
            pipeline,
            cluster,
            &name(&one.name),
            one.needs_gpu,
            after.as_deref(),
            &lines,
        ));
    }
    if documents.iter().any(|document| document.contains(KUBECTL)) {
        documents.insert(0, waiter());
    }
    pipeline.heading() + &documents.join("---\n")
}

/// The job that builds what is common.
const COMMON: &str = "rockenv.common";

/// Returns the name of an env's job: what Kubernetes calls so begins and ends with a letter or digit, and has no `_`. No env is called
/// as that of what is common, for it has no point before its own name.
fn name(env: &str) -> String {
    let name = format!("rockenv-{env}").replace('_', "-");
    let cut = name.char_indices().nth(63).map_or(name.len(), |(at, _)| at);
    name[..cut].trim_end_matches(['.', '-']).to_owned()
}

/// Writes what lets the pods look at jobs.
fn waiter() -> String {
    format!(
        "apiVersion: v1
kind: ServiceAccount
metadata:
  name: {WAITER}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {WAITER}
rules:
  - apiGroups: [\"batch\"]
    resources: [\"jobs\"]
    verbs: [\"get\", \"list\", \"watch\"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {WAITER}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {WAITER}
subjects:
  - kind: ServiceAccount
    name: {WAITER}
"
    )
}

/// Writes a job. It is tried once: a step that failed fails again, and `up` goes on where it stopped.
fn job(
    pipeline: &Pipeline,
    cluster: &Cluster,
    name: &str,
    gpu: bool,
    after: Option<&str>,
    lines: &[String],
) -> String {
    let seconds = u64::from(pipeline.calls.minutes) * 60;
    let waits = after.map_or_else(String::new, |after| {
        let wait = [
            "wait".to_owned(),
            "--for=condition=complete".to_owned(),
            format!("--timeout={seconds}s"),
            format!("job/{after}"),
        ];
        format!(
            "      serviceAccountName: {WAITER}
      initContainers:
        - name: wait
          image: {KUBECTL}
          args: {}
",
            list(&wait)
        )
    });
    let volume = match &cluster.claim {
        Some(claim) => format!("persistentVolumeClaim: {{claimName: {}}}", scalar(claim)),
        None => "emptyDir: {}".to_owned(),
    };
    // Its own time, and that of what it waits for.
    let deadline = seconds * if after.is_some() { 2 } else { 1 };
    let script: Vec<String> = ["set -eu".to_owned()]
        .into_iter()
        .chain(lines.iter().cloned())
        .collect();
    format!(
        "apiVersion: batch/v1
kind: Job
metadata:
  name: {}
  labels:
    app.kubernetes.io/name: rockenv
spec:
  backoffLimit: 0
  activeDeadlineSeconds: {deadline}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: rockenv
    spec:
      restartPolicy: Never
      automountServiceAccountToken: {}
{waits}      containers:
        - name: rockenv
          image: {}
          command: [\"/bin/sh\", \"-c\"]
          args:
            - {}          # Containers are made in it.
          securityContext:
            privileged: true
          resources:
{}          volumeMounts:
            - name: store
              mountPath: {STORE}
      volumes:
        - name: store
          {}
",
        scalar(name),
        after.is_some(),
        scalar(&cluster.image),
        block(14, &script),
        resources(pipeline, gpu),
        volume
    )
}

/// Writes what a job asks for. Memory is a limit too, so that a build that takes more fails rather than its neighbours.
fn resources(pipeline: &Pipeline, gpu: bool) -> String {
    let size = pipeline.size;
    let memory = size
        .memory
        .map(|bytes| format!("              memory: {bytes}\n"));
    let memory = memory.unwrap_or_default();
    let gpu = if gpu {
        "              amd.com/gpu: 1\n"
    } else {
        ""
    };
    let limits = match memory.is_empty() && gpu.is_empty() {
        true => String::new(),
        false => format!("            limits:\n{memory}{gpu}"),
    };
    format!(
        "            requests:\n              cpu: {}\n{memory}{limits}",
        size.cpus
    )
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::tests::pipeline;
    use super::*;

    #[test]
    fn only_steps_with_a_gpu_ask_for_one() {
        let cluster = Cluster {
            image: "registry.example.org/rockenv".to_owned(),
            claim: Some("store".to_owned()),
        };
        let text = manifest(&pipeline(true, &[]), &cluster);
        let jobs: Vec<&str> = text
            .split("---\n")
            .filter(|one| one.contains("kind: Job\n"))
            .collect();
        assert_eq!(jobs.len(), 4, "{text}");
        for (job, (gpu, after)) in jobs.iter().zip([
            (false, None),
            (false, Some("job/rockenv.common")),
            (true, Some("job/rockenv-a\"")),
            (false, Some("job/rockenv.common")),
        ]) {
            assert_eq!(job.contains("amd.com/gpu: 1"), gpu, "{job}");
            assert_eq!(job.contains("\"wait\""), after.is_some(), "{job}");
            assert!(after.is_none_or(|after| job.contains(after)), "{job}");
            assert!(job.contains("cpu: 8") && job.contains("memory: 3221225473"));
        }
    }

    #[test]
    fn names_are_such_as_kubernetes_takes() {
        assert_eq!(name("a_b.c"), "rockenv-a-b.c");
        assert_eq!(name(&"x".repeat(70)).len(), 63);
        assert_eq!(name(&format!("{}-y", "x".repeat(54))).len(), 62);
    }
}
