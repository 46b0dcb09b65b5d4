//! Owns the work of jobs for several envs, independent of the CI system: the common steps if the other jobs can use
//! them, then each env, then its GPU steps, and the shell lines for each. Pure; `github` and the other modules render
//! it.

use std::str::FromStr;

use super::jobs::{Job, hosted, take_option};
use crate::sys::error::Result;
use crate::sys::host::is_variable_name;

/// How jobs invoke rockenv.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    /// The command line that wrote the pipeline.
    pub written_by: String,
    /// The rockenv command, including a prefix such as `sudo`.
    pub rockenv: String,
    /// The rockenv command on GitHub's own machines, if it differs.
    pub on_hosted: Option<String>,
    /// First line of each of a job's shells, which sets up rockenv and its store.
    pub setup: Option<String>,
    /// The jobs' secrets in the CI system.
    pub secrets: Vec<Secret>,
    /// Options of every `up`.
    pub options: Vec<String>,
    /// Time limit of a job, in minutes.
    pub minutes: u32,
}

impl Calls {
    /// Returns the rockenv command for the machine with these labels.
    fn rockenv(&self, runner: &[String]) -> &str {
        let on_hosted = self.on_hosted.as_deref();
        let on_hosted = on_hosted.filter(|_| hosted(runner).is_some());
        on_hosted.unwrap_or(&self.rockenv)
    }
}

/// A CI secret for the jobs: `TOKEN=REGISTRY_TOKEN`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Secret {
    /// Environment variable that holds the secret in jobs.
    pub variable: String,
    /// Name of the secret in the CI system.
    pub name: String,
}

impl FromStr for Secret {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        text.split_once('=')
            .filter(|(variable, name)| is_variable_name(variable) && is_variable_name(name))
            .map(|(variable, name)| Self {
                variable: variable.to_owned(),
                name: name.to_owned(),
            })
            .ok_or_else(|| {
                "a secret is written `TOKEN=REGISTRY_TOKEN`: the variable, and the system's name of the secret, \
                 of letters, digits and `_`"
                    .to_owned()
            })
    }
}

/// A job's requirements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub cpus: u32,
    /// Memory in bytes, if the profile declares it.
    pub memory: Option<u64>,
    /// Disk in bytes, if the profile declares it.
    pub disk: Option<u64>,
}

/// How jobs exchange results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// Jobs exchange nothing.
    Nothing,
    /// All machines use one store.
    Store,
    /// Jobs push to and pull from this repository of a registry.
    Registry(String),
}

#[derive(Clone, Debug)]
pub(crate) struct Pipeline {
    pub calls: Calls,
    pub size: Size,
    /// The job for the common steps, which comes first; absent if the jobs share nothing.
    pub common: Option<Job>,
    /// One job per env, followed by the job for its GPU steps, if any.
    pub jobs: Vec<Job>,
    pub share: Share,
}

impl Pipeline {
    /// Creates the pipeline. If jobs share nothing, one job's results are useless to another, so each env becomes a
    /// single job, on a GPU machine if it has GPU steps.
    pub(crate) fn new(
        mut calls: Calls,
        size: Size,
        common: Option<Job>,
        jobs: Vec<Job>,
        share: Share,
    ) -> Result<Self> {
        // A YAML block takes its indentation from its first line.
        calls.setup = calls.setup.map(|line| line.trim().to_owned());
        calls.rockenv = calls.rockenv.trim().to_owned();
        let own = [&calls.rockenv, &calls.written_by];
        let words = calls.setup.iter().chain(own);
        let words = words.chain(jobs.iter().flat_map(|job| &job.up));
        let registry = match &share {
            Share::Registry(registry) => Some(registry),
            _ => None,
        };
        for word in words.chain(&calls.options).chain(registry) {
            // GitLab reads YAML 1.1, in which Unicode's separators also end a line.
            let ends_line = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
            if word.chars().any(ends_line) {
                return Err(
                    usage!("`{}` cannot be written into a script", word.escape_debug())
                        .help("use one line of plain text"),
                );
            }
        }
        for (position, one) in calls.secrets.iter().enumerate() {
            let before = &calls.secrets[..position];
            if before.iter().any(|other| other.variable == one.variable) {
                return Err(usage!("two secrets would set variable `{}`", one.variable)
                    .help(format!("--secret {}={}", one.variable, one.name)));
            }
        }
        let common = common.filter(|_| match &share {
            Share::Nothing => false,
            Share::Store => true,
            // Without a push, no other job gets the steps.
            Share::Registry(_) => !calls.options.iter().any(|option| option == "--push=false"),
        });
        let is_ephemeral = calls.options.iter().any(|option| option == "--ephemeral");
        if let (true, Some(common)) = (is_ephemeral, &common) {
            let env = &common.env;
            let error = usage!("`--ephemeral` removes env `{env}` before other jobs use its steps");
            return Err(error.help("leave out `--ephemeral`; `rockenv rm` removes the envs"));
        }
        Ok(Self {
            calls,
            size,
            common,
            jobs: match share {
                Share::Nothing => whole(jobs),
                _ => jobs,
            },
            share,
        })
    }

    /// Returns whether a separate last job removes the envs. Other jobs need them in the shared store until then.
    pub(crate) fn cleans_last(&self) -> bool {
        self.share == Share::Store
    }

    /// Returns the lines before an `up`.
    fn before(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.calls.setup.iter().cloned().collect();
        // A job cannot answer the trust prompt, and its checkout is what it must build.
        lines.push("export ROCKENV_TRUSTED_DIRS=\"$PWD\"".to_owned());
        if let Share::Registry(registry) = &self.share {
            lines.push(format!("export ROCKENV_REGISTRY={}", quote(registry)));
        }
        lines
    }

    /// Returns the envs, without duplicates.
    pub(crate) fn envs(&self) -> Vec<&str> {
        let mut envs: Vec<&str> = self.jobs.iter().map(|job| job.env.as_str()).collect();
        envs.dedup();
        envs
    }

    /// Returns whether a job must wait for the common steps, and for no other job.
    pub(super) fn follows_common(&self, job: &Job) -> bool {
        self.common.is_some() && job.until.is_none() && job.needs.is_none()
    }

    /// Returns the lines of a job. `more` are further options for `up`.
    pub(crate) fn build(&self, job: &Job, more: &[String]) -> Vec<String> {
        let mut options = [more, &self.calls.options].concat();
        if let Some(until) = &job.until {
            // `--rerun` steps run in each env anyway.
            (options, _) = take_option(&options, "--rerun");
            // The last `--until` wins.
            options.extend(["--until".to_owned(), until.clone()]);
        }
        let rockenv = self.calls.rockenv(&job.runner);
        let mut lines = self.before();
        lines.push(self.up(rockenv, &words(&job.up), &options));
        if let (Some(_), Share::Registry(_)) = (&job.until, &self.share) {
            // `up` only warns about a refused push, but other jobs must get the common steps.
            lines.push(format!("{rockenv} push {}", quote(&job.env)));
        }
        lines
    }

    /// Returns the lines of a script that runs the job whose index is in `variable`.
    pub(super) fn build_one_of(
        &self,
        jobs: &[&Job],
        variable: &str,
        more: &[String],
    ) -> Vec<String> {
        let mut lines = vec![format!("case ${variable} in")];
        for (number, job) in jobs.iter().enumerate() {
            lines.push(format!("{number}) set -- {} ;;", words(&job.up)));
        }
        lines.push(format!(
            "*) echo \"no env has number ${variable}\" >&2; exit 1 ;;"
        ));
        lines.push("esac".to_owned());
        lines.extend(self.before());
        let options = [more, &self.calls.options].concat();
        lines.push(self.up(&self.calls.rockenv, "\"$@\"", &options));
        lines
    }

    /// Returns the `up` command line. `arguments` are already quoted.
    fn up(&self, rockenv: &str, arguments: &str, options: &[String]) -> String {
        let mut all = Vec::new();
        if let Share::Registry(_) = self.share {
            // The user's own `--pull` and `--push` take precedence.
            let is_given = |name: &str| {
                let mut options = options.iter();
                options.any(|option| option.split('=').next() == Some(name))
            };
            let shared = ["--pull", "--push"].into_iter();
            let shared = shared.filter(|name| !is_given(name));
            all.extend(shared.map(str::to_owned));
        }
        all.extend_from_slice(options);
        let line = format!("{rockenv} -v up {arguments} {}", words(&all));
        line.trim_end().to_owned()
    }

    /// Returns the option that limits `up` to the requested processors on a larger machine.
    pub(super) fn jobs_option(&self) -> Vec<String> {
        let given = |option: &String| option.starts_with("--jobs") || option.starts_with("-j");
        match self.calls.options.iter().any(given) {
            true => Vec::new(),
            false => vec!["--jobs".to_owned(), self.size.cpus.to_string()],
        }
    }

    /// Returns the lines that remove these envs, for a separate shell. The lines run after every outcome of the job, so
    /// env and store may not exist. A runner without root cannot end the `sudo` of a job that is cancelled or out of
    /// time: the job's `up` still runs, and these lines end it. After other outcomes, a busy env belongs to another
    /// pipeline.
    pub(crate) fn clean<'a>(
        &self,
        envs: impl IntoIterator<Item = &'a str>,
        runner: &[String],
    ) -> Vec<String> {
        let rockenv = self.calls.rockenv(runner);
        let envs = envs.into_iter().map(quote).collect::<Vec<_>>().join(" ");
        let lines = [
            "failed=0".to_owned(),
            "case ${CI_JOB_STATUS-} in cancel*|timedout) force=--force ;; *) force= ;; esac"
                .to_owned(),
            format!("for env in {envs}; do # 7: there is none"),
            format!("  {rockenv} --yes rm $force \"$env\" || [ $? = 7 ] || failed=1"),
            "done".to_owned(),
            format!("{rockenv} --yes gc || [ $? = 7 ] || failed=1"),
            "exit $failed".to_owned(),
        ];
        self.calls.setup.iter().cloned().chain(lines).collect()
    }

    /// Returns the first lines of the file, as comments.
    pub(crate) fn heading(&self) -> String {
        format!(
            "# Written by `{}`; generate it again instead of editing it.\n",
            self.calls.written_by
        )
    }
}

/// Merges each env's two jobs into one.
pub(crate) fn whole(jobs: Vec<Job>) -> Vec<Job> {
    let mut whole: Vec<Job> = Vec::new();
    for job in jobs {
        match whole.last_mut() {
            Some(last) if job.needs.as_ref() == Some(&last.name) => {
                *last = Job {
                    name: last.name.clone(),
                    needs: None,
                    ..job
                };
            }
            _ => whole.push(job),
        }
    }
    whole
}

pub(crate) fn words<S: AsRef<str>>(words: &[S]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote(word.as_ref())).collect();
    quoted.join(" ")
}

pub(crate) fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@:,=%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Writes any text as YAML: JSON strings are valid YAML.
pub(super) fn scalar(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Writes a list as YAML in flow style.
pub(super) fn list<S: AsRef<str>>(texts: &[S]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| scalar(text.as_ref())).collect();
    format!("[{}]", texts.join(", "))
}

/// Writes lines as a YAML block with this indentation, after the key.
pub(super) fn block<S: AsRef<str>>(indent: usize, lines: &[S]) -> String {
    let lines = lines
        .iter()
        .map(|line| format!("{}{}\n", " ".repeat(indent), line.as_ref()));
    format!("|\n{}", lines.collect::<String>())
}

/// Writes lines below a key; nothing without lines.
pub(super) fn section(key: &str, lines: String) -> String {
    match lines.is_empty() {
        true => lines,
        false => format!("{key}:\n{lines}"),
    }
}

/// Returns a here-document end marker that differs from all of these lines.
pub(super) fn block_end(lines: &[String]) -> String {
    let mut end = "END".to_owned();
    while lines
        .iter()
        .any(|line| line.lines().any(|line| line == end))
    {
        end.push('_');
    }
    end
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn job(name: &str, needs: Option<&str>) -> Job {
        Job {
            name: name.to_owned(),
            env: name.trim_end_matches("-gpu").to_owned(),
            target: "gfx1103",
            up: vec![name.to_owned()],
            runner: vec!["big".to_owned()],
            needs_gpu: needs.is_some(),
            needs: needs.map(str::to_owned),
            until: None,
        }
    }

    /// Two envs with common steps, one of them with GPU steps.
    pub(crate) fn pipeline(share: Share, options: &[&str]) -> Pipeline {
        let calls = Calls {
            written_by: "rockenv matrix".to_owned(),
            rockenv: "sudo -E rockenv".to_owned(),
            on_hosted: None,
            setup: Some("./install rockenv".to_owned()),
            secrets: vec!["TOKEN=REGISTRY_TOKEN".parse().unwrap()],
            options: options.iter().map(|&option| option.to_owned()).collect(),
            minutes: 90,
        };
        let size = Size {
            cpus: 8,
            memory: Some((3 << 30) + 1),
            disk: Some(20 << 30),
        };
        let common = Job {
            name: "common steps".to_owned(),
            until: Some("compiler".to_owned()),
            ..job("a", None)
        };
        let jobs = vec![job("a", None), job("a-gpu", Some("a")), job("b", None)];
        Pipeline::new(calls, size, Some(common), jobs, share).unwrap()
    }

    fn without_jobs(calls: Calls) -> Result<Pipeline> {
        Pipeline::new(calls, Size::default(), None, Vec::new(), Share::Store)
    }

    #[test]
    fn by_a_registry_each_job_finds_what_others_built() {
        let registry = Share::Registry("registry.example.org/a b".to_owned());
        let sharing = pipeline(registry, &["--offline"]);
        let common = sharing.common.clone().unwrap();
        let lines = sharing.build(&common, &[]);
        assert_eq!(
            lines,
            [
                "./install rockenv",
                "export ROCKENV_TRUSTED_DIRS=\"$PWD\"",
                "export ROCKENV_REGISTRY='registry.example.org/a b'",
                "sudo -E rockenv -v up a --pull --push --offline --until compiler",
                "sudo -E rockenv push a",
            ]
        );
        // Options that the user gives are not repeated.
        let registry = Share::Registry("registry.example.org/r".to_owned());
        let given = pipeline(registry, &["--push", "--pull=false"]);
        let up = given.build(&given.jobs[0], &[]).pop().unwrap();
        assert_eq!(up, "sudo -E rockenv -v up a --push --pull=false");
        // Jobs that may only pull build no common steps for others.
        let registry = Share::Registry("registry.example.org/r".to_owned());
        let pulling = pipeline(registry, &["--push=false"]);
        assert_eq!(pulling.common, None);
        let up = pulling.build(&pulling.jobs[0], &[]).pop().unwrap();
        assert_eq!(up, "sudo -E rockenv -v up a --pull --push=false");
        // Without a shared store, jobs clean up after themselves.
        assert!(!sharing.cleans_last() && sharing.jobs.len() == 3);
        assert_eq!(sharing.envs(), ["a", "b"]);
    }

    #[test]
    fn the_env_with_the_common_steps_stays_for_the_other_jobs() {
        let by = |share: Share| {
            let mut of = pipeline(Share::Store, &[]);
            of.calls.options.push("--ephemeral".to_owned());
            Pipeline::new(of.calls, of.size, of.common, of.jobs, share)
        };
        by(Share::Nothing).unwrap();
        for share in [Share::Store, Share::Registry("r.example.org/r".to_owned())] {
            let error = by(share).unwrap_err();
            assert_has!(error.message(), "`--ephemeral` removes env `a`");
        }
    }

    #[test]
    fn words_are_what_a_shell_reads() {
        assert_eq!(quote("gfx1103"), "gfx1103");
        assert_eq!(quote(""), "''");
        assert_eq!(quote("it's $HOME; `x`"), "'it'\\''s $HOME; `x`'");
        assert_eq!(words(&["a", "b c"]), "a 'b c'");
        let error = |options: &[&str]| {
            let mut calls = pipeline(Share::Store, &[]).calls;
            calls.options = options.iter().map(|&one| one.to_owned()).collect();
            without_jobs(calls).err()
        };
        assert!(error(&["a\nb"]).is_some() && error(&["a b"]).is_none());
        let said = error(&["a\u{2028}b"]).unwrap();
        assert_has!(
            said.message(),
            "`a\\u{2028}b` cannot be written into a script"
        );
        let calls = Calls {
            setup: Some("  echo hi ".to_owned()),
            rockenv: " rockenv".to_owned(),
            ..pipeline(Share::Store, &[]).calls
        };
        let lines = without_jobs(calls).unwrap().clean(["a"], &[]);
        assert!(block(2, &lines).starts_with("|\n  echo hi\n  failed=0\n"));
    }

    #[test]
    fn secrets_have_names_that_nothing_has_to_quote() {
        let secret: Secret = "_T1=NAME".parse().unwrap();
        assert_eq!(
            (secret.variable.as_str(), secret.name.as_str()),
            ("_T1", "NAME")
        );
        for bad in "TOKEN|=A|A=|A=B=C|1A=B|A=1B|A-B=C|A=${{ x }}|A=é".split('|') {
            assert!(bad.parse::<Secret>().is_err(), "{bad}");
        }
        let mut calls = pipeline(Share::Store, &[]).calls;
        calls.secrets.push("TOKEN=OTHER".parse().unwrap());
        assert_has!(without_jobs(calls).unwrap_err().message(), "`TOKEN`");
    }

    #[test]
    fn yaml_holds_any_text() {
        assert_eq!(scalar("a: \"b\" #\\"), r##""a: \"b\" #\\""##);
        assert_eq!(list(&["on", "1"]), r#"["on", "1"]"#);
        assert_eq!(block(2, &["a", "  b"]), "|\n  a\n    b\n");
    }
}
