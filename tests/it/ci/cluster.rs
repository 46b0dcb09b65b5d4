//! A stand-in for a cluster: what a real kubectl is answered about jobs, who may do what, and what becomes of jobs. There are no
//! nodes and no containers: what a job's pod does is up to the test.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use fs_err as fs;
use serde_json::{Value, json};

use crate::support::run::{Background, Ran, wait_for};

const PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);

/// Returns the text at a path of names.
pub(super) fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value
        .pointer(path)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// Prepares what a container runs, in its shell: Kubernetes takes `$$` for `$` in it, and replaces `$(NAME)` where there is such a variable.
pub(super) fn command(container: &Value) -> Command {
    let mut shell = Command::new(text(container, "/command/0"));
    let mut script = String::new();
    let mut rest = text(container, "/args/0");
    while let Some((before, after)) = rest.split_once('$') {
        script.push_str(before);
        script.push('$');
        let variables = container["env"].as_array().into_iter().flatten();
        for variable in variables {
            let reference = format!("({})", text(variable, "/name"));
            assert!(!after.starts_with(&reference), "{script}{after}");
        }
        rest = after.strip_prefix('$').unwrap_or(after);
    }
    script.push_str(rest);
    shell
        .args([text(container, "/command/1"), &script])
        .env_clear();
    shell
}

/// How a pod ended, as its job's condition says it: none is `Complete`.
pub(super) type Failure = Option<&'static str>;

/// Jobs, and who answers for them.
pub(super) struct Cluster {
    state: Arc<Mutex<State>>,
    directory: PathBuf,
    /// What the conductor is.
    conductor: Value,
    /// The jobs whose pods ran, in that order.
    pub(super) ran: Vec<String>,
}

struct State {
    jobs: BTreeMap<String, Value>,
    rules: Vec<Value>,
    /// How many requests are still answered by an error.
    trouble: u32,
}

impl Cluster {
    /// Takes a manifest, as `kubectl create` would.
    pub(super) fn create(directory: &Path, documents: &[Value]) -> Self {
        let mut jobs = BTreeMap::new();
        let mut rules = Vec::new();
        let mut conductor = Value::Null;
        for document in documents {
            match text(document, "/kind") {
                "Job" => {
                    let mut job = document.clone();
                    let suspended = job["spec"]["suspend"] == true;
                    job["spec"]["suspend"] = json!(suspended);
                    job["status"] = json!({});
                    if suspended {
                        job["status"]["conditions"] = json!([{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]);
                    }
                    if job["spec"]["template"]["spec"]["serviceAccountName"].is_string() {
                        conductor = job.clone();
                    }
                    jobs.insert(text(&job, "/metadata/name").to_owned(), job);
                }
                "Role" => rules = document["rules"].as_array().unwrap().clone(),
                _ => {}
            }
        }
        let trouble = 0;
        let state = State {
            jobs,
            rules,
            trouble,
        };
        let state = Arc::new(Mutex::new(state));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap();
        let answers = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(&stream, &answers);
            }
        });
        let directory = directory.join(format!("cluster-{}", host.port()));
        fs::create_dir(&directory).unwrap();
        let configuration = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{host}")}}],
            "contexts": [{"name": "test", "context": {"cluster": "test"}}],
        });
        fs::write(directory.join("config"), configuration.to_string()).unwrap();
        Self {
            state,
            directory,
            conductor,
            ran: Vec::new(),
        }
    }

    /// Starts the conductor's script, in the shell and with the variables that its container has.
    pub(super) fn start(&self) -> Background {
        let container = &self.conductor["spec"]["template"]["spec"]["containers"][0];
        let mut shell = command(container);
        for variable in container["env"].as_array().unwrap() {
            shell.env(text(variable, "/name"), text(variable, "/value"));
        }
        shell
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("KUBECONFIG", self.directory.join("config"))
            .env("HOME", &self.directory)
            .env("PAUSE", "0.1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Background::start(shell)
    }

    /// Runs the conductor to its end, and what it starts.
    pub(super) fn conduct(&mut self, pod: &mut dyn FnMut(&str, &Value) -> Failure) -> Ran {
        let mut conductor = self.start();
        wait_for(PATIENCE, "the conductor is not done", || {
            while self.run_one(pod).is_some() {}
            match conductor.runs() {
                true => Err(format!("{:?} ran", self.ran)),
                false => Ok(()),
            }
        });
        conductor.wait()
    }

    /// Does what Kubernetes does with a job that is not suspended and has not ended; `pod` runs its pod. Returns its name.
    pub(super) fn run_one(
        &mut self,
        pod: &mut dyn FnMut(&str, &Value) -> Failure,
    ) -> Option<String> {
        let (name, job) = {
            let state = self.state.lock().unwrap();
            let own = text(&self.conductor, "/metadata/name");
            let mut jobs = state.jobs.iter();
            let (name, job) = jobs.find(|(name, job)| {
                *name != own && job["spec"]["suspend"] == false && !ended(job)
            })?;
            (name.clone(), job.clone())
        };
        self.ran.push(name.clone());
        let end = |kind: &str, reason| json!({"type": kind, "status": "True", "reason": reason});
        let conditions = match pod(&name, &job) {
            None => [
                end("SuccessCriteriaMet", "CompletionsReached"),
                end("Complete", "CompletionsReached"),
            ],
            Some(reason) => [end("FailureTarget", reason), end("Failed", reason)],
        };
        let mut state = self.state.lock().unwrap();
        if let Some(job) = state.jobs.get_mut(&name) {
            let all = &mut job["status"]["conditions"];
            if all.is_null() {
                *all = json!([]);
            }
            all.as_array_mut().unwrap().extend(conditions);
        }
        Some(name)
    }

    /// Deletes a job.
    pub(super) fn delete(&self, name: &str) {
        self.state.lock().unwrap().jobs.remove(name).unwrap();
    }

    /// From now on so many requests fail.
    pub(super) fn trouble(&self, requests: u32) {
        self.state.lock().unwrap().trouble = requests;
    }

    /// Returns what is at a path of a job, such as what was changed in its `spec`.
    pub(super) fn at(&self, job: &str, path: &str) -> Value {
        let state = self.state.lock().unwrap();
        state.jobs[job].pointer(path).cloned().unwrap_or_default()
    }
}

fn ended(job: &Value) -> bool {
    let conditions = job["status"]["conditions"].as_array();
    conditions.is_some_and(|all| {
        all.iter()
            .any(|one| one["type"] == "Complete" || one["type"] == "Failed")
    })
}

/// Answers one request; kubectl asks what there is before it asks for jobs.
fn answer(stream: &TcpStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).unwrap_or(0) == 0 {
            return;
        }
    }
    let length = head
        .lines()
        .filter_map(|line| line.split_once(": "))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(0, |(_, length)| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let mut words = head.split(' ');
    let (method, url) = (words.next().unwrap(), words.next().unwrap());
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    let (status, body) = match path {
        "/version" => (
            200,
            json!({"major": "1", "minor": "34", "gitVersion": "v1.34.1"}),
        ),
        "/api" => (200, json!({"kind": "APIVersions", "versions": ["v1"]})),
        "/api/v1" => (200, resources("v1", &json!([]))),
        "/apis" => {
            let version = json!({"groupVersion": "batch/v1", "version": "v1"});
            let group =
                json!({"name": "batch", "versions": [version], "preferredVersion": version});
            let list = json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]});
            (200, list)
        }
        "/apis/batch/v1" => {
            let verbs = ["get", "list", "patch", "delete", "create", "watch"];
            let jobs = json!([{
                "name": "jobs", "singularName": "job", "namespaced": true, "kind": "Job", "verbs": verbs
            }]);
            (200, resources("batch/v1", &jobs))
        }
        _ => {
            let jobs = "/apis/batch/v1/namespaces/default/jobs";
            match path.strip_prefix(jobs) {
                Some("") => request(state, method, None, query, &body),
                Some(name) => request(state, method, name.strip_prefix('/'), query, &body),
                None => failure(404, path),
            }
        }
    };
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status} Answer\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = stream;
    drop(stream.write_all(format!("{head}{body}").as_bytes()));
}

fn resources(version: &str, resources: &Value) -> Value {
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources})
}

fn failure(code: u16, message: &str) -> (u16, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message
    });
    (code, status)
}

/// Answers what is asked of jobs, or of one.
fn request(
    state: &Mutex<State>,
    method: &str,
    name: Option<&str>,
    query: &str,
    body: &[u8],
) -> (u16, Value) {
    let mut state = state.lock().unwrap();
    if state.trouble > 0 {
        state.trouble -= 1;
        return failure(500, "the cluster has other things to do");
    }
    let verb = match (method, name) {
        ("GET", None) => "list",
        ("GET", Some(_)) => "get",
        ("PATCH", Some(_)) => "patch",
        _ => return failure(405, method),
    };
    if !state.rules.iter().any(|rule| allows(rule, verb, name)) {
        return failure(403, &format!("{verb} of jobs {name:?} is forbidden"));
    }
    let Some(name) = name else {
        let wanted = query
            .split('&')
            .find_map(|part| part.strip_prefix("labelSelector="))
            .unwrap()
            .replace("%2F", "/")
            .replace("%3D", "=");
        let (label, value) = wanted.split_once('=').unwrap();
        let found = state.jobs.values();
        let found: Vec<&Value> = found
            .filter(|job| job["metadata"]["labels"][label] == value)
            .collect();
        let list =
            json!({"kind": "JobList", "apiVersion": "batch/v1", "metadata": {}, "items": found});
        return (200, list);
    };
    let Some(job) = state.jobs.get_mut(name) else {
        return failure(404, name);
    };
    if verb == "patch" {
        let patch: Value = serde_json::from_slice(body).unwrap();
        for (field, value) in patch["spec"].as_object().unwrap() {
            // Little else may be changed in a job.
            assert!(
                matches!(field.as_str(), "suspend" | "backoffLimit"),
                "{patch}"
            );
            job["spec"][field] = value.clone();
        }
        assert_eq!(patch.as_object().unwrap().len(), 1, "{patch}");
        for condition in job["status"]["conditions"]
            .as_array_mut()
            .into_iter()
            .flatten()
        {
            if condition["type"] == "Suspended" {
                condition["status"] = json!("False");
                condition["reason"] = json!("JobResumed");
            }
        }
    }
    (200, job.clone())
}

/// Returns whether a rule of a role allows that.
fn allows(rule: &Value, verb: &str, name: Option<&str>) -> bool {
    let has = |list: &str, wanted: &str| {
        let list = rule[list].as_array();
        list.is_some_and(|list| list.iter().any(|one| one == wanted))
    };
    has("apiGroups", "batch")
        && has("resources", "jobs")
        && has("verbs", verb)
        && (rule["resourceNames"].is_null() || name.is_some_and(|name| has("resourceNames", name)))
}
