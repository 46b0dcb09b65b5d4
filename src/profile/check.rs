//! Owns the meaning of a merged draft: every value parsed, every reference followed, every mistake collected.

use std::collections::{BTreeMap, BTreeSet};

use super::file::{Access, User, VolumeKind};
use super::merge::{ActionDraft, CopyDraft, Draft, Entry, StepDraft, VolumeDraft};
use super::report::{At, Place, Problem, Sources};
use super::shape::shorten;
use super::text::{self, Late, Piece};
use super::value::{self, Refused};
use super::{Action, CopyItem, ExportItem, Profile, Resources, Step, Volume, VolumeSource, When};
use crate::suggest;
use crate::target::{self, Target};

/// Returns the profile, or nothing where a missing part left no way to make one; `problems` says which.
pub(crate) fn finish(
    name: String,
    sources: Sources,
    draft: Draft,
    problems: &mut Vec<Problem>,
) -> Option<Profile> {
    let mut check = Check {
        sources: &sources,
        params: BTreeMap::new(),
        problems,
    };
    check.params(draft.params);
    let image = check.image(draft.image);
    let targets = check.targets(draft.targets);
    let hooks = check.hooks(draft.hooks);
    let env_from_host = check.env_from_host(draft.env_from_host);
    let resources = Resources {
        disk: check.parsed(draft.disk, value::size),
        memory_per_job: check.parsed(draft.memory_per_job, positive),
        memory_max: check.parsed(draft.memory_max, value::memory_max),
        tasks_max: check.positive("tasks-max", draft.tasks_max),
    };
    let env = check.env(draft.env, Late::Keep);
    let runtime_env = check.env(draft.runtime_env, Late::Refuse);
    let volumes = check.volumes(draft.volumes);
    let needed_by = check.needed_by(&draft.needed_by, &draft.steps);
    let steps = draft
        .steps
        .into_iter()
        .filter_map(|step| check.step(step, &volumes, &needed_by))
        .collect();
    let params = check.params;
    Some(Profile {
        name,
        description: draft.description.unwrap_or_default(),
        image: image?,
        targets,
        hooks,
        env_from_host,
        params,
        resources,
        env,
        runtime_env,
        volumes: volumes
            .into_iter()
            .filter_map(|(_, volume)| volume)
            .collect(),
        steps,
        sources,
    })
}

const SHELL: [&str; 3] = ["/bin/sh", "-eu", "-c"];

/// Volumes by name; nothing for one that has errors of its own and can still be referred to.
type Volumes = Vec<((At<String>, Option<VolumeKind>), Option<Volume>)>;

struct Check<'a> {
    sources: &'a Sources,
    params: BTreeMap<String, String>,
    problems: &'a mut Vec<Problem>,
}

fn positive(text: &str) -> Result<u64, Refused> {
    match value::size(text)? {
        0 => Err(Refused {
            message: "a size of nothing".to_owned(),
            help: None,
        }),
        size => Ok(size),
    }
}

impl Check<'_> {
    fn push(
        &mut self,
        place: &Place,
        message: impl Into<String>,
        label: &str,
        help: Option<String>,
    ) {
        let problem = Problem::new(place, message, label);
        self.problems.push(match help {
            Some(help) => problem.help(help),
            None => problem,
        });
    }

    fn refused(&mut self, place: &Place, refused: Refused) {
        self.push(place, refused.message, "here", refused.help);
    }

    fn parsed<T>(
        &mut self,
        text: Option<At<String>>,
        parse: impl Fn(&str) -> Result<T, Refused>,
    ) -> Option<T> {
        let text = text?;
        match parse(&text) {
            Ok(parsed) => Some(parsed),
            Err(refused) => {
                self.refused(&text.place, refused);
                None
            }
        }
    }

    fn positive<T: TryFrom<i64>>(&mut self, key: &str, number: Option<At<i64>>) -> Option<T> {
        let number = number?;
        match T::try_from(number.value) {
            Ok(good) if number.value > 0 => Some(good),
            _ => {
                self.push(
                    &number.place,
                    format!("`{key}` is {}", number.value),
                    "out of range",
                    None,
                );
                None
            }
        }
    }

    fn name(&mut self, what: &str, name: &At<String>) -> bool {
        match value::name(what, name) {
            Ok(()) => true,
            Err(refused) => {
                self.refused(&name.place, refused);
                false
            }
        }
    }

    fn text(&mut self, text: &At<String>, late: Late) {
        for fault in text::check(text, self.params.keys().map(String::as_str), late) {
            self.problems.push(fault.problem(&text.place, self.sources));
        }
    }

    /// Checks the references of a value, and its meaning if that does not wait for theirs.
    fn expandable(&mut self, text: &At<String>, meaning: impl Fn(&str) -> Result<(), Refused>) {
        self.text(text, Late::Refuse);
        let mut literal = String::new();
        for piece in text::pieces(text) {
            match piece {
                Piece::Literal(part) => literal.push_str(part),
                Piece::Reference(..) | Piece::Unclosed(_) => return,
            }
        }
        if let Err(refused) = meaning(&literal) {
            self.refused(&text.place, refused);
        }
    }

    /// Checks a value in which references mean nothing.
    fn fixed(
        &mut self,
        key: &str,
        text: &At<String>,
        meaning: impl Fn(&str) -> Result<(), Refused>,
    ) -> bool {
        if text.contains("${") {
            let message = format!("`{key}` is fixed: `${{...}}` means nothing in it");
            self.push(&text.place, message, "here", None);
            return false;
        }
        match meaning(text) {
            Ok(()) => true,
            Err(refused) => {
                self.refused(&text.place, refused);
                false
            }
        }
    }

    fn params(&mut self, params: BTreeMap<String, Entry>) {
        for (name, entry) in params {
            if let Err(refused) = value::name("parameter", &name) {
                self.refused(&entry.key, refused);
                continue;
            }
            if text::FACTS.contains(&name.as_str()) || name.starts_with("target.") {
                let message = format!("`${{{name}}}` has a meaning of its own");
                self.push(&entry.key, message, "not a name for a parameter", None);
                continue;
            }
            if entry.value.contains("${") {
                let help = "put the reference where the parameter is used".to_owned();
                let message = "a parameter's value is not expanded";
                self.push(&entry.value.place, message, "here", Some(help));
            }
            self.params.insert(name, entry.value.value);
        }
    }

    fn image(&mut self, image: Option<At<String>>) -> Option<At<String>> {
        match image {
            Some(image) => {
                self.name("image", &image);
                Some(image)
            }
            None => {
                let help = "add `image = \"NAME\"`; `rockenv image ls` shows them".to_owned();
                let top = Place {
                    source: 0,
                    span: 0..0,
                };
                self.push(
                    &top,
                    "no image",
                    "in this file or one it extends",
                    Some(help),
                );
                None
            }
        }
    }

    fn targets(&mut self, names: Vec<At<String>>) -> Vec<Target> {
        let mut targets = Vec::new();
        for name in names {
            match Target::parse(&name) {
                Ok(target) if targets.contains(&target) => {
                    self.push(
                        &name.place,
                        format!("target `{target}` is there twice"),
                        "again",
                        None,
                    );
                }
                Ok(target) => targets.push(target),
                Err(_) => self.unknown_target(&name),
            }
        }
        targets.sort_unstable();
        targets
    }

    fn unknown_target(&mut self, name: &At<String>) {
        let message = format!("unknown target `{}`", shorten(name));
        self.push(
            &name.place,
            message,
            "not in the table",
            Some(Target::advice(name)),
        );
    }

    fn hooks(&mut self, hooks: Vec<At<String>>) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for hook in hooks {
            if names.contains(&hook.value) {
                self.push(
                    &hook.place,
                    format!("hook `{}` is there twice", shorten(&hook)),
                    "again",
                    None,
                );
            } else if self.name("hook", &hook) {
                names.push(hook.value);
            }
        }
        names
    }

    fn env_from_host(&mut self, names: Vec<At<String>>) -> Vec<String> {
        let mut good = BTreeSet::new();
        for name in names {
            match value::variable(&name) {
                Ok(()) => {
                    good.insert(name.value);
                }
                Err(refused) => self.refused(&name.place, refused),
            }
        }
        good.into_iter().collect()
    }

    fn env(
        &mut self,
        entries: BTreeMap<String, Entry>,
        late: Late,
    ) -> BTreeMap<String, At<String>> {
        let mut env = BTreeMap::new();
        for (name, entry) in entries {
            if let Err(refused) = value::variable(&name) {
                self.refused(&entry.key, refused);
            }
            self.text(&entry.value, late);
            env.insert(name, entry.value);
        }
        env
    }

    fn volumes(&mut self, drafts: Vec<VolumeDraft>) -> Volumes {
        let mut targets: BTreeMap<String, String> = BTreeMap::new();
        let mut volumes = Volumes::new();
        for draft in drafts {
            let handle = (
                draft.name.clone(),
                draft.kind.as_ref().map(|kind| kind.value),
            );
            if let Some(target) = &draft.target {
                if let Some(other) = targets.insert(target.value.clone(), draft.name.value.clone())
                {
                    let message = format!(
                        "volumes `{}` and `{}` have one target",
                        shorten(&other),
                        shorten(&draft.name)
                    );
                    self.push(&target.place, message, "already taken", None);
                }
            }
            let volume = self.volume(draft);
            volumes.push((handle, volume));
        }
        volumes
    }

    fn volume(&mut self, draft: VolumeDraft) -> Option<Volume> {
        let named = self.name("volume", &draft.name);
        let shown = shorten(&draft.name);
        let target = match &draft.target {
            Some(target) => self
                .fixed("target", target, value::destination)
                .then(|| target.value.clone()),
            None => {
                self.push(
                    &draft.name.place,
                    format!("volume `{shown}` has no `target`"),
                    "this one",
                    None,
                );
                None
            }
        };
        let Some(kind) = &draft.kind else {
            let help = "one of `source`, `build`, `cache`, `output`, `host`".to_owned();
            self.push(
                &draft.name.place,
                format!("volume `{shown}` has no `kind`"),
                "this one",
                Some(help),
            );
            return None;
        };
        let kind = kind.value;
        let max = self.parsed(draft.max.clone(), positive);
        if let Some(max) = draft.max.filter(|_| kind != VolumeKind::Cache) {
            self.push(
                &max.place,
                "`max` is for a volume of kind `cache`",
                "here",
                None,
            );
        }
        let git_only = [
            ("rev", draft.rev.as_ref().map(|at| &at.place)),
            ("depth", draft.depth.as_ref().map(|at| &at.place)),
            ("submodules", draft.submodules.as_ref().map(|at| &at.place)),
        ];
        if draft.git.is_none() {
            for (key, place) in git_only {
                if let Some(place) = place {
                    self.push(
                        place,
                        format!("`{key}` is for a volume with `git`"),
                        "here",
                        None,
                    );
                }
            }
        }
        if let Some(path) = &draft.path {
            self.expandable(path, host_path);
        }
        if let Some(git) = &draft.git {
            self.expandable(git, value::git_url);
        }
        if let Some(rev) = &draft.rev {
            self.expandable(rev, value::git_rev);
        }
        let depth = self.positive("depth", draft.depth);
        let source = match (kind, draft.path, draft.git) {
            (VolumeKind::Source, None, Some(url)) => VolumeSource::Git {
                url,
                rev: draft.rev,
                depth,
                submodules: draft.submodules.is_some_and(|at| at.value),
            },
            (VolumeKind::Source | VolumeKind::Output | VolumeKind::Host, Some(path), None) => {
                VolumeSource::Path(path)
            }
            (VolumeKind::Build | VolumeKind::Cache | VolumeKind::Output, None, None) => {
                VolumeSource::Store
            }
            (VolumeKind::Source, Some(_), Some(git)) => {
                self.push(
                    &git.place,
                    "a source has a `path` or a `git`, not both",
                    "second one",
                    None,
                );
                return None;
            }
            (VolumeKind::Source, None, None) => {
                let message = format!("source `{shown}` has neither `path` nor `git`");
                self.push(&draft.name.place, message, "this one", None);
                return None;
            }
            (VolumeKind::Host, None, None) => {
                self.push(
                    &draft.name.place,
                    format!("host volume `{shown}` has no `path`"),
                    "this one",
                    None,
                );
                return None;
            }
            (_, _, Some(git)) => {
                self.push(
                    &git.place,
                    "`git` is for a volume of kind `source`",
                    "here",
                    None,
                );
                return None;
            }
            (_, Some(path), None) => {
                let help = "rockenv keeps this kind in its store; a directory of your own is `kind = \"host\"`".to_owned();
                let message = "`path` is for volumes of kind `source`, `output` and `host`";
                self.push(&path.place, message, "here", Some(help));
                return None;
            }
        };
        let default = match kind {
            VolumeKind::Host => Access::Ro,
            _ => Access::Rw,
        };
        named.then_some(Volume {
            name: draft.name.value,
            kind,
            target: target?,
            source,
            max,
            access: draft.access.map_or(default, |at| at.value),
        })
    }

    fn needed_by(&mut self, names: &[At<String>], steps: &[StepDraft]) -> BTreeSet<String> {
        for name in names {
            if !steps.iter().any(|step| step.name == *name) {
                let known = steps.iter().map(|step| step.name.as_str());
                self.unknown("step", name, known);
            }
        }
        names.iter().map(|name| name.value.clone()).collect()
    }

    fn unknown<'n>(&mut self, what: &str, name: &At<String>, known: impl Iterator<Item = &'n str>) {
        let known: Vec<&str> = known.collect();
        let help = match suggest::closest(name, known.iter().copied()) {
            Some(close) => Some(format!("did you mean `{close}`?")),
            None if known.is_empty() => None,
            None => Some(format!(
                "there is {}",
                known
                    .iter()
                    .map(|name| format!("`{}`", shorten(name)))
                    .collect::<Vec<_>>()
                    .join(", ")
            )),
        };
        self.push(
            &name.place,
            format!("there is no {what} `{}`", shorten(name)),
            "not found",
            help,
        );
    }

    fn step(
        &mut self,
        draft: StepDraft,
        volumes: &Volumes,
        needed_by: &BTreeSet<String>,
    ) -> Option<Step> {
        self.name("step", &draft.name);
        let gpu = draft.gpu.as_ref().is_some_and(|gpu| gpu.value)
            || needed_by.contains(&draft.name.value);
        let when = self.when(&draft)?;
        let timeout = self.parsed(draft.timeout, value::duration);
        let inputs = self.inputs(draft.inputs, volumes);
        let env = self.env(draft.env, Late::Keep);
        let Some(action) = draft.action else {
            let message = format!("step `{}` does nothing", shorten(&draft.name));
            let help = "one of `run`, `packages`, `copy`, `export`".to_owned();
            self.push(&draft.name.place, message, "this one", Some(help));
            return None;
        };
        if !matches!(action, ActionDraft::Run(_)) {
            let shell = draft.shell.as_ref().map(|at| ("shell", &at.place));
            let workdir = draft.workdir.as_ref().map(|at| ("workdir", &at.place));
            for (key, place) in shell.into_iter().chain(workdir) {
                self.push(
                    place,
                    format!("`{key}` is for a step with `run`"),
                    "here",
                    None,
                );
            }
        }
        if let Some(workdir) = &draft.workdir {
            self.expandable(workdir, value::inside);
        }
        let mut user = draft.user.as_ref().map_or(User::Builder, |user| user.value);
        if let ActionDraft::Packages(_) = action {
            if let Some(given) = draft.user.filter(|_| user == User::Builder) {
                self.push(
                    &given.place,
                    "packages are installed by root",
                    "leave it out",
                    None,
                );
            }
            user = User::Root;
        }
        let action = self.action(&draft.name, action, draft.shell, volumes);
        Some(Step {
            name: draft.name.value,
            action,
            user,
            workdir: draft.workdir,
            network: draft.network.is_none_or(|network| network.value),
            timeout,
            inputs,
            incremental: draft
                .incremental
                .is_some_and(|incremental| incremental.value),
            env,
            gpu,
            when,
        })
    }

    fn action(
        &mut self,
        step: &At<String>,
        draft: ActionDraft,
        shell: Option<At<Vec<At<String>>>>,
        volumes: &Volumes,
    ) -> Action {
        let empty = match &draft {
            ActionDraft::Run(script) => script.trim().is_empty(),
            ActionDraft::Packages(list) => list.is_empty(),
            ActionDraft::Copy(list) | ActionDraft::Export(list) => list.is_empty(),
        };
        if empty {
            let message = format!("step `{}` has nothing to do", shorten(step));
            self.push(&step.place, message, "its action is empty", None);
        }
        match draft {
            ActionDraft::Run(script) => {
                self.text(&script, Late::Keep);
                let shell = self.shell(shell);
                Action::Run { script, shell }
            }
            ActionDraft::Packages(packages) => {
                for package in &packages {
                    self.expandable(package, value::package);
                }
                Action::Packages(packages)
            }
            ActionDraft::Copy(items) => {
                Action::Copy(items.into_iter().map(|item| self.copy(item)).collect())
            }
            ActionDraft::Export(items) => Action::Export(
                items
                    .into_iter()
                    .map(|item| self.export(item, volumes))
                    .collect(),
            ),
        }
    }

    fn shell(&mut self, shell: Option<At<Vec<At<String>>>>) -> Vec<String> {
        let Some(shell) = shell else {
            return SHELL.map(str::to_owned).to_vec();
        };
        let place = shell.place;
        let words = shell.value;
        if !words
            .first()
            .is_some_and(|program| program.starts_with('/'))
        {
            let help = "such as [\"/bin/bash\", \"-euo\", \"pipefail\", \"-c\"]".to_owned();
            let message = "a shell starts with the absolute path of a program";
            self.push(&place, message, "here", Some(help));
        }
        for word in &words {
            self.fixed("shell", word, |_| Ok(()));
        }
        words.into_iter().map(|word| word.value).collect()
    }

    fn copy(&mut self, item: CopyDraft) -> CopyItem {
        self.fixed("from", &item.from, value::beside);
        self.expandable(&item.to, value::destination);
        let from = self.sources[item.from.place.source].origin.clone();
        CopyItem {
            beside: from,
            from: item.from,
            to: item.to,
        }
    }

    fn export(&mut self, item: CopyDraft, volumes: &Volumes) -> ExportItem {
        self.expandable(&item.from, value::inside);
        let outputs = || {
            volumes
                .iter()
                .filter(|((_, kind), _)| *kind == Some(VolumeKind::Output))
                .map(|((name, _), _)| name.as_str())
        };
        if !outputs().any(|name| name == item.to.value) {
            self.unknown("volume of kind `output` called", &item.to, outputs());
        }
        ExportItem {
            from: item.from,
            to: item.to.value,
        }
    }

    fn inputs(&mut self, names: Vec<At<String>>, volumes: &Volumes) -> Vec<String> {
        let mut inputs: Vec<String> = Vec::new();
        let sources = || {
            volumes
                .iter()
                .filter(|((_, kind), _)| *kind == Some(VolumeKind::Source))
                .map(|((name, _), _)| name.as_str())
        };
        for name in names {
            if !sources().any(|source| source == name.value) {
                self.unknown("volume of kind `source` called", &name, sources());
            }
            inputs.push(name.value);
        }
        // A set: their order is not content.
        inputs.sort_unstable();
        inputs.dedup();
        inputs
    }

    fn when(&mut self, draft: &StepDraft) -> Option<When> {
        let when = &draft.when;
        for family in when.family.iter().flatten() {
            if target::family(family).is_none() {
                self.unknown_family(family);
            }
        }
        let mut targets = Vec::new();
        for name in when.target.iter().flatten() {
            match Target::parse(name) {
                Ok(target) => targets.push(target),
                Err(_) => self.unknown_target(name),
            }
        }
        Some(When {
            family: when
                .family
                .as_ref()
                .map(|names| names.iter().map(|name| name.value.clone()).collect()),
            target: when.target.as_ref().map(|_| targets),
            engine: when.engine.clone(),
        })
    }

    fn unknown_family(&mut self, name: &At<String>) {
        let help = match suggest::closest(name, target::families()) {
            Some(close) => format!("did you mean `{close}`?"),
            None => "`rockenv target ls` shows them all".to_owned(),
        };
        self.push(
            &name.place,
            format!("unknown family `{}`", shorten(name)),
            "not in the table",
            Some(help),
        );
    }
}

/// Checks a directory of the host.
pub(crate) fn host_path(text: &str) -> Result<(), Refused> {
    let refuse = |message: &str| {
        Err(Refused {
            message: format!("{message}: `{}`", shorten(text)),
            help: Some(
                "an absolute path, `~/...`, or one relative to the profile's file".to_owned(),
            ),
        })
    };
    match text {
        "" => refuse("an empty path"),
        _ if text.len() > 4095 => refuse("a path longer than 4095 bytes"),
        _ if text.starts_with('~') && text != "~" && !text.starts_with("~/") => {
            refuse("another user's home")
        }
        _ => Ok(()),
    }
}
