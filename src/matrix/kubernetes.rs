//! Owns the manifest for Kubernetes: a job for each env, and one for its steps with a GPU, which alone requests one.
//! Pure.
//!
//! Kubernetes jobs do not wait for each other, and a waiting pod keeps everything that it requested, even a GPU. So a
//! job that depends on another one is suspended, without a pod, and `conductor.sh` starts it: the script of a small
//! job of its own.

use sha2::{Digest as _, Sha256};

use super::pipeline::{Pipeline, block, list, scalar};

/// Default image of the conductor: Kubernetes' own has no shell.
pub(crate) const KUBECTL: &str = "docker.io/alpine/kubectl:1.34.1";
/// The conductor's script.
const CONDUCTOR: &str = include_str!("conductor.sh");
/// Path of the store in a container.
const STORE: &str = "/var/lib/rockenv";
/// The object with the secrets for jobs.
const SECRETS: &str = "rockenv";
/// Path of the logins to registries in a container.
const LOGIN: &str = "/run/rockenv-login";
/// Maximum length of a name: that of a job is a label too.
const NAME_LIMIT: usize = 63;

/// Where the jobs run.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    /// An image that contains rockenv.
    pub image: String,
    /// The claim on the volume with the store; default: each job has its own.
    pub claim: Option<String>,
    /// The secret with logins to registries.
    pub login: Option<String>,
    /// An image that contains kubectl and a shell.
    pub kubectl: String,
}

/// A job that builds, or runs steps with a GPU.
struct Work {
    name: String,
    gpu: bool,
    /// The job that it depends on.
    after: Option<String>,
    lines: Vec<String>,
}

pub(crate) fn manifest(pipeline: &Pipeline, cluster: &Cluster) -> String {
    // An env belongs to one matrix, so the first one's name can identify all.
    let first = pipeline.envs().first().copied().unwrap_or_default();
    // No env's job has this name, because their names have no dot there.
    let common = name(&format!("rockenv.common-{first}"));
    let conductor = name(&format!("rockenv.conductor-{first}"));
    let matrix = env_job(first);
    let works = works(pipeline, &common);
    let mut documents: Vec<String> = works
        .iter()
        .map(|work| job(pipeline, cluster, &matrix, work))
        .collect();
    // Last, because the conductor treats a missing job like a deleted one.
    documents.push(account(&matrix, &conductor, &works));
    documents.push(conduct(cluster, &matrix, &conductor, &works));
    format!(
        "{}# What starts, is done or fails: kubectl logs -f job/{conductor}\n{}",
        pipeline.heading(),
        documents.join("---\n")
    )
}

/// Returns the jobs, dependencies first.
fn works(pipeline: &Pipeline, common: &str) -> Vec<Work> {
    let jobs = pipeline.jobs_option();
    let built = pipeline.common.as_ref().map(|steps| Work {
        name: common.to_owned(),
        gpu: false,
        after: None,
        lines: pipeline.build_common(steps, &jobs),
    });
    let after_common = built.as_ref().map(|_| common.to_owned());
    let each = pipeline.jobs.iter().map(|job| Work {
        name: env_job(&job.name),
        gpu: job.needs_gpu,
        after: match &job.needs {
            Some(needs) => Some(env_job(needs)),
            None => after_common.clone(),
        },
        lines: pipeline.build(job, &jobs),
    });
    built.into_iter().chain(each).collect()
}

/// Returns the name of an env's job.
fn env_job(env: &str) -> String {
    name(&format!("rockenv-{env}"))
}

/// Returns a valid Kubernetes name: without `_`, each part between dots beginning and ending with a letter or digit.
/// A changed name ends with a digest, so that names stay distinct.
fn name(wanted: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let good = |part: &str| {
        let bytes = part.as_bytes();
        bytes.first().is_some_and(|&byte| plain(byte))
            && bytes.last().is_some_and(|&byte| plain(byte))
            && bytes.iter().all(|&byte| plain(byte) || byte == b'-')
    };
    if wanted.len() <= NAME_LIMIT && wanted.split('.').all(good) {
        return wanted.to_owned();
    }
    let digest = hex::encode(Sha256::digest(wanted))[..8].to_owned();
    let readable: String = wanted
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(NAME_LIMIT - 1 - digest.len())
        .collect();
    format!("{}-{digest}", readable.trim_end_matches('-'))
}

/// Writes an object's labels, with this indentation: its kind and its matrix.
fn labels(indent: usize, matrix: &str, component: &str) -> String {
    let labels = [
        ("name", "rockenv"),
        ("instance", matrix),
        ("component", component),
    ];
    let indent = " ".repeat(indent);
    let labels = labels
        .map(|(label, value)| format!("{indent}  app.kubernetes.io/{label}: {}\n", scalar(value)));
    format!("{indent}labels:\n{}", labels.concat())
}

/// Writes the account with which the conductor reads jobs, and changes those of its matrix.
fn account(matrix: &str, conductor: &str, works: &[Work]) -> String {
    let metadata = format!(
        "metadata:\n  name: {}\n{}",
        scalar(conductor),
        labels(2, matrix, "conductor")
    );
    let mut jobs: Vec<&str> = works
        .iter()
        .filter(|work| work.after.is_some())
        .map(|work| work.name.as_str())
        .collect();
    jobs.push(conductor);
    format!(
        "apiVersion: v1
kind: ServiceAccount
{metadata}---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
{metadata}rules:
  - apiGroups: [\"batch\"]
    resources: [\"jobs\"]
    verbs: [\"list\"]
  - apiGroups: [\"batch\"]
    resources: [\"jobs\"]
    resourceNames: {jobs}
    verbs: [\"get\", \"patch\"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
{metadata}roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {conductor}
subjects:
  - kind: ServiceAccount
    name: {conductor}
",
        jobs = list(&jobs),
        conductor = scalar(conductor),
    )
}

/// Writes the job that starts the others. It may be retried, because its node may go away.
fn conduct(cluster: &Cluster, matrix: &str, conductor: &str, works: &[Work]) -> String {
    let jobs: Vec<String> = works
        .iter()
        .map(|work| format!("{}:{}", work.name, work.after.as_deref().unwrap_or("")))
        .collect();
    let variables = [
        ("SELF", conductor),
        ("SELECTOR", &format!("app.kubernetes.io/instance={matrix}")),
        ("JOBS", &jobs.join(" ")),
        ("PAUSE", "10"),
        // Where kubectl may write.
        ("HOME", "/tmp"),
    ];
    let variables = variables.map(|(variable, value)| {
        format!(
            "            - name: {variable}\n              value: {}\n",
            scalar(value)
        )
    });
    let script: Vec<&str> = CONDUCTOR.lines().collect();
    format!(
        "apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
{labels}spec:
  backoffLimit: 10
  template:
    metadata:
{pod_labels}    spec:
      restartPolicy: Never
      serviceAccountName: {name}
      containers:
        - name: conductor
          image: {image}
          command: [\"/bin/sh\", \"-c\"]
          args:
            - {script}          env:
{variables}          resources:
            requests:
              cpu: 10m
              memory: 64Mi
            limits:
              memory: 256Mi
          securityContext:
            runAsNonRoot: true
            runAsUser: 65532
            allowPrivilegeEscalation: false
            capabilities: {{drop: [\"ALL\"]}}
            seccompProfile: {{type: RuntimeDefault}}
",
        name = scalar(conductor),
        labels = labels(2, matrix, "conductor"),
        pod_labels = labels(6, matrix, "conductor"),
        image = scalar(&cluster.kubectl),
        script = argument(&script),
        variables = variables.concat(),
    )
}

/// Writes a job. It is tried once: a failed step would fail again, and `up` resumes where it stopped. Its time begins
/// when it is started.
fn job(pipeline: &Pipeline, cluster: &Cluster, matrix: &str, work: &Work) -> String {
    let suspend = match work.after {
        Some(_) => "  suspend: true\n",
        None => "",
    };
    let component = if work.gpu { "test" } else { "build" };
    let volume = match &cluster.claim {
        Some(claim) => format!("persistentVolumeClaim: {{claimName: {}}}", scalar(claim)),
        None => "emptyDir: {}".to_owned(),
    };
    let login = cluster.login.as_deref().map(Login::new).unwrap_or_default();
    let script: Vec<&str> = ["set -eu"]
        .into_iter()
        .chain(work.lines.iter().map(String::as_str))
        .collect();
    format!(
        "apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
{labels}spec:
{suspend}  backoffLimit: 0
  activeDeadlineSeconds: {seconds}
  template:
    metadata:
{pod_labels}    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
{pull}      containers:
        - name: rockenv
          image: {image}
          command: [\"/bin/sh\", \"-c\"]
          args:
            - {script}{variables}          # Containers are made in it.
          securityContext:
            privileged: true
          resources:
{resources}          volumeMounts:
            - name: store
              mountPath: {STORE}
{mount}      volumes:
        - name: store
          {volume}
{login_volume}",
        name = scalar(&work.name),
        labels = labels(2, matrix, component),
        seconds = u64::from(pipeline.calls.minutes) * 60,
        pod_labels = labels(6, matrix, component),
        pull = login.pull,
        image = scalar(&cluster.image),
        script = argument(&script),
        variables = variables(pipeline, cluster),
        resources = resources(pipeline, work.gpu),
        mount = login.mount,
        login_volume = login.volume,
    )
}

/// Writes the lines of a script as an argument of a container, in which Kubernetes replaces `$(NAME)` and takes `$$`
/// for `$`.
fn argument(lines: &[&str]) -> String {
    let escaped = lines.iter().map(|line| {
        let next = line.chars().skip(1).map(Some).chain([None]);
        let each = line.chars().zip(next);
        each.flat_map(|(c, next)| {
            let twice = c == '$' && matches!(next, Some('$' | '('));
            twice.then_some('$').into_iter().chain([c])
        })
        .collect::<String>()
    });
    block(14, &escaped.collect::<Vec<_>>())
}

/// Writes a container's variables: the place of logins, and the jobs' secrets.
fn variables(pipeline: &Pipeline, cluster: &Cluster) -> String {
    let login = cluster.login.iter().map(|_| {
        format!("            - name: REGISTRY_AUTH_FILE\n              value: {LOGIN}/auth.json\n")
    });
    let secrets = pipeline.calls.secrets.iter().map(|secret| {
        format!(
            "            - name: {}
              valueFrom:
                secretKeyRef:
                  name: {SECRETS}
                  key: {}
",
            scalar(&secret.variable),
            scalar(&secret.name)
        )
    });
    let variables: String = login.chain(secrets).collect();
    match variables.is_empty() {
        true => variables,
        false => format!("          env:\n{variables}"),
    }
}

/// The parts of a job that give it logins to registries: for its own image, and as a file in the container.
#[derive(Default)]
struct Login {
    pull: String,
    mount: String,
    volume: String,
}

impl Login {
    fn new(secret: &str) -> Self {
        let secret = scalar(secret);
        Self {
            pull: format!("      imagePullSecrets:\n        - name: {secret}\n"),
            mount: format!(
                "            - name: login
              mountPath: {LOGIN}
              readOnly: true
"
            ),
            volume: format!(
                "        - name: login
          secret:
            secretName: {secret}
            defaultMode: 256 # 0400
            items:
              - key: .dockerconfigjson
                path: auth.json
"
            ),
        }
    }
}

/// Writes the resource requests of a job. Memory is a limit too, so that a build that exceeds it fails rather than
/// its neighbours.
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

    fn cluster() -> Cluster {
        Cluster {
            image: "registry.example.org/rockenv".to_owned(),
            claim: Some("store".to_owned()),
            login: None,
            kubectl: KUBECTL.to_owned(),
        }
    }

    fn jobs(manifest: &str) -> Vec<&str> {
        let documents = manifest.split("---\n");
        documents
            .filter(|one| one.contains("kind: Job\n"))
            .collect()
    }

    #[test]
    fn what_stands_on_another_one_has_no_pod_until_it_is_started() {
        let text = manifest(&pipeline(true, &[]), &cluster());
        let jobs = jobs(&text);
        assert_eq!(jobs.len(), 5, "{text}");
        for (job, (name, gpu, suspended)) in jobs.iter().zip([
            ("rockenv.common-a", false, false),
            ("rockenv-a", false, true),
            ("rockenv-a-gpu", true, true),
            ("rockenv-b", false, true),
        ]) {
            assert!(job.contains(&format!("  name: \"{name}\"\n")), "{job}");
            assert_eq!(job.contains("amd.com/gpu: 1"), gpu, "{job}");
            assert_eq!(job.contains("  suspend: true\n"), suspended, "{job}");
            assert!(job.contains("cpu: 8") && job.contains("memory: 3221225473"));
            assert!(job.contains("activeDeadlineSeconds: 5400"), "its own time");
        }
        let stands_on = "rockenv.common-a: rockenv-a:rockenv.common-a rockenv-a-gpu:rockenv-a rockenv-b:rockenv.common-a";
        assert!(
            jobs[4].contains(&format!("value: \"{stands_on}\"")),
            "{text}"
        );
        assert!(text.ends_with(jobs[4]), "it comes last");
    }

    #[test]
    fn logins_are_for_the_image_and_for_rockenv() {
        let with = Cluster {
            login: Some("logins".to_owned()),
            ..cluster()
        };
        let text = manifest(&pipeline(true, &[]), &with);
        let jobs = jobs(&text);
        let (conductor, works) = jobs.split_last().unwrap();
        assert!(
            !conductor.contains("logins") && !conductor.contains("secretKeyRef"),
            "{conductor}"
        );
        for job in works {
            assert!(job.contains("secretName: \"logins\""), "{job}");
            assert!(job.contains("imagePullSecrets:\n        - name: \"logins\""));
            assert!(job.contains("value: /run/rockenv-login/auth.json"));
            let secret = "secretKeyRef:\n                  name: rockenv\n                  key: \"REGISTRY_TOKEN\"\n";
            assert!(
                job.contains(&format!(
                    "- name: \"TOKEN\"\n              valueFrom:\n                {secret}"
                )),
                "{job}"
            );
        }
    }

    #[test]
    fn scripts_are_not_for_kubernetes_to_expand() {
        let of = |line: &str| {
            argument(&[line])
                .trim_start_matches(['|', '\n', ' '])
                .to_owned()
        };
        assert_eq!(of("echo $HOME $(id) ${x} $"), "echo $HOME $$(id) ${x} $\n");
        assert_eq!(of("$$ $$(x)"), "$$$ $$$$(x)\n");
    }

    #[test]
    fn names_are_such_as_kubernetes_takes_and_none_is_there_twice() {
        assert_eq!(env_job("mylib-1.2-gfx1103"), "rockenv-mylib-1.2-gfx1103");
        let long = "x".repeat(56);
        let envs = ["a_b", "a-b", "a..b", "a.-b", "a-.b", "a-", &long];
        let long_ones = ["gfx1100", "gfx1103"].map(|target| format!("{long}-{target}"));
        let envs = envs.into_iter().chain(long_ones.iter().map(String::as_str));
        let names: std::collections::BTreeSet<String> = envs.map(env_job).collect();
        assert_eq!(names.len(), 9, "{names:?}");
        for taken in names {
            assert!(
                taken.len() <= NAME_LIMIT && name(&taken) == taken,
                "{taken}"
            );
        }
    }
}
