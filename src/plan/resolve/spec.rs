//! Owns turning a profile into a spec: applying targets, parameters and conditions, and computing keys.

mod expand;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::chain::chain;
use super::choices_in_effect::Chosen;
use super::hooks::hooks;
use super::inputs::Inputs;
use super::key::StepKey;
use super::{
    Action, CopyItem, Engine, ExportItem, Git, Origin, Resources, Skipped, Spec, Step, User,
    VERSION, Volume, VolumeKind, VolumeSource, component_targets, image_env,
};
use crate::profile::hook::not_for;
use crate::profile::references::Scope;
use crate::profile::value::{self, Refused};
use crate::profile::{self, Problem, Profile, When, copy_key, host_path, joined};
use crate::rocm::target::{self, Target};
use crate::sys::error::{Error, Result};
use crate::sys::span::At;

/// Returns the volumes of an env. Needed before `resolve`, to find the required fingerprints.
pub(crate) fn volumes(profile: &Profile, inputs: &Inputs) -> Result<Vec<Volume>> {
    let mut problems = Vec::new();
    let mut resolver = Resolver::new(profile, inputs, &mut problems)?;
    let volumes = resolver.volumes();
    let refused = resolver.refused();
    without(problems, profile, refused.map(|()| volumes))
}

/// Returns the result, unless there are problems with the profile.
fn without<T>(problems: Vec<Problem>, profile: &Profile, result: Result<T>) -> Result<T> {
    match problems.is_empty() {
        true => result,
        false => Err(profile.invalid(problems)),
    }
}

/// Decides everything. Pure: the same arguments give the same spec.
pub(crate) fn resolve(profile: &Profile, inputs: &Inputs) -> Result<Spec> {
    let mut problems = Vec::new();
    let spec = draft(profile, inputs, &mut problems);
    without(problems, profile, spec)
}

/// Resolves like `resolve`, but collects problems and leaves out the parts that have them.
pub(crate) fn draft(
    profile: &Profile,
    inputs: &Inputs,
    problems: &mut Vec<Problem>,
) -> Result<Spec> {
    let mut resolver = Resolver::new(profile, inputs, problems)?;
    let name = inputs.name_of_env(profile)?;
    let image = resolver.chosen.image()?;
    let volumes = resolver.volumes();
    let image_env = image_env::defaults(&inputs.image_env);
    let mut env = image_env.clone();
    env.extend(resolver.late_env(&profile.env));
    let runtime_env = profile
        .runtime_env
        .iter()
        .filter_map(|(name, value)| Some((name.clone(), resolver.text(value, |_| Ok(()))?)))
        .collect();
    let mut steps = Vec::new();
    let mut skipped = Vec::new();
    for step in &profile.steps {
        match resolver.excluded(step) {
            Some(reason) => skipped.push(Skipped {
                name: step.name.clone(),
                reason,
            }),
            None => steps.extend(resolver.step(step, &env, &volumes)?),
        }
    }
    resolver.fit();
    resolver.refused()?;
    if !resolver.is_short() {
        // Nobody uses the keys of a refused profile, and hashing so much text takes seconds.
        steps.clear();
    }
    let targets = resolver.scope.targets.clone();
    let resources = resolver.resources();
    let chosen = &resolver.chosen;
    let (variant, from) = (chosen.variant.map(str::to_owned), chosen.from.to_owned());
    let names = chosen.hooks();
    let (hooks, hooks_left_out) = hooks(profile, inputs, &targets, &steps, &names, problems)?;
    let known = inputs.fingerprints.iter();
    let known = known.filter_map(|(name, print)| Some((name.clone(), print.clone()?)));
    let base_key = StepKey::base(&inputs.image);
    let open = chain(&mut steps, &base_key, profile, inputs, &volumes, &hooks)?;
    Ok(Spec {
        version: VERSION,
        name,
        profile: profile.name.clone(),
        origin: profile.origin().clone(),
        variant,
        from,
        params: inputs.params.clone(),
        targets,
        image,
        engine: inputs.engine,
        base_key,
        env_from_host: profile.env_from_host.clone(),
        user: inputs.user.clone(),
        resources,
        gpu: profile.gpu,
        fingerprints: known.collect(),
        lock: None,
        image_env,
        env,
        runtime_env,
        runtime_notes: profile.runtime_notes.clone(),
        hooks,
        hooks_left_out,
        volumes,
        steps,
        skipped,
        open,
    })
}

struct Resolver<'a> {
    profile: &'a Profile,
    inputs: &'a Inputs,
    scope: Scope,
    chosen: Chosen<'a>,
    /// Bytes of all expanded texts so far, counted once for each step that uses them.
    length: usize,
    /// The first error that the command line causes.
    usage: Option<Error>,
    problems: &'a mut Vec<Problem>,
}

impl<'a> Resolver<'a> {
    fn new(
        profile: &'a Profile,
        inputs: &'a Inputs,
        problems: &'a mut Vec<Problem>,
    ) -> Result<Self> {
        let chosen = inputs.chosen(profile)?;
        let machine = inputs.machine_targets.iter();
        let machine = machine.map(|target| inputs.as_declared(*target));
        Ok(Self {
            profile,
            inputs,
            scope: Scope {
                targets: inputs.targets_of(profile),
                machine: machine.collect(),
                params: chosen.params.clone(),
            },
            chosen,
            length: 0,
            usage: None,
            problems,
        })
    }

    /// Returns the profile's resources with the overrides of the variant, then of the starting point.
    fn resources(&self) -> Resources {
        let mut resources = self.profile.resources.clone();
        for choice in self.chosen.parts() {
            resources.disk = choice.disk.or(resources.disk);
        }
        resources
    }

    fn volumes(&mut self) -> Vec<Volume> {
        let volumes = self.profile.volumes.iter();
        let mut volumes: Vec<_> = volumes.filter_map(|volume| self.volume(volume)).collect();
        // By components: a directory before mounts inside it, however the profile lists them.
        volumes.sort_by(|a, b| Path::new(&a.target).cmp(Path::new(&b.target)));
        volumes
    }

    fn volume(&mut self, volume: &profile::Volume) -> Option<Volume> {
        let source = match &volume.source {
            profile::VolumeSource::Store => VolumeSource::Store,
            profile::VolumeSource::Path(path) => VolumeSource::Path(self.host_path(path)?),
            profile::VolumeSource::Git {
                url,
                rev,
                depth,
                submodules,
            } => {
                let url = self.text(url, value::git_url);
                let rev = match rev {
                    Some(rev) => Some(self.text(rev, value::git_rev)?),
                    None => None,
                };
                VolumeSource::Git(Git {
                    url: url?,
                    rev,
                    depth: *depth,
                    submodules: *submodules,
                })
            }
        };
        // The total of a variant or a starting point says nothing about its parts.
        let whole = self.chosen.parts().any(|choice| choice.disk.is_some());
        Some(Volume {
            name: volume.name.clone(),
            kind: volume.kind,
            target: volume.target.clone(),
            access: volume.access,
            max: volume.max,
            locked: volume.locked,
            disk: volume
                .disk
                .filter(|_| !whole || matches!(source, VolumeSource::Path(_))),
            source,
        })
    }

    fn host_path(&mut self, path: &At<String>) -> Option<PathBuf> {
        let text = self.text(path, host_path)?;
        let beside = &self.profile.sources.file(&path.place).origin;
        let full = if text == "~" {
            self.inputs.host_home.clone()
        } else if let Some(rest) = text.strip_prefix("~/") {
            self.inputs.host_home.join(rest.trim_start_matches('/'))
        } else if text.starts_with('/') {
            PathBuf::from(text)
        } else if let Origin::File(file) = beside {
            let below = text.trim_start_matches("./").trim_start_matches('/');
            file.with_file_name("").join(below)
        } else {
            let message = "a built-in profile has no directory of its own";
            let problem = Problem::new(&path.place, message, "relative");
            self.problems
                .push(problem.help("an absolute path or `~/...`"));
            return None;
        };
        if full.is_absolute() && full.to_str().is_some() {
            return Some(full);
        }
        let message = format!("`{}` is not an absolute UTF-8 path", full.display());
        self.problems
            .push(Problem::new(&path.place, message, "here"));
        None
    }

    /// Refuses components that are built for fewer targets than the components that link them.
    fn fit(&mut self) {
        let profile = self.profile;
        let mut components = Vec::new();
        for component in &profile.components {
            if self.unmet(&component.when).is_none() {
                components.push((component, self.extra_targets(component)));
            }
        }
        let inputs = self.inputs;
        let excluded = |target: &str, project: &str| {
            let declared = match &inputs.checkout {
                Some(all) => all.iter().find(|one| one.name == target)?,
                None => &Target::parse(target).ok()?.info().declared,
            };
            let mut excluded = declared.excluded.iter();
            let found = excluded.find(|one| one.project == project)?;
            Some(found.issue.clone())
        };
        let targets = &self.scope.targets;
        for misfit in component_targets::incompatibilities(&components, targets, &excluded) {
            let component = misfit.component;
            let name = &component.name;
            let missing = target::joined(&misfit.missing, ", ");
            let message = match misfit.linked_by {
                Some(user) => {
                    format!("`{name}` is not built for {missing}, and `{user}`, which links it, is")
                }
                None => format!(
                    "`{name}` would be built for no target: TheRock excludes it for {missing}"
                ),
            };
            let issues = misfit.issues.iter();
            let issues: String = issues.map(|issue| format!("{issue}\n")).collect();
            let without = component.when.variant.iter().flat_map(|with| {
                let all = profile.variants.keys();
                all.filter(|variant| !with.iter().any(|name| name.value == **variant))
            });
            // Names only the profile's own variant if it is among them; the others build more, or differ otherwise.
            let own = without
                .clone()
                .find(|variant| Some(*variant) == profile.variant.as_ref());
            let without: String = without
                .filter(|variant| own.is_none_or(|own| own == *variant))
                .map(|variant| format!("build variant `{variant}`, which does not need it, "))
                .collect();
            let help = format!(
                "{issues}{without}leave it out (take it out of `links`, or `remove = true`, and build without it), let a stub stand in \
                 (`stub = true`), or build it for a throwaway target too (`extra-targets = [\"gfx1250\"]`)"
            );
            let problem = Problem::new(&name.place, message, "too few targets");
            self.problems.push(problem.help(help));
        }
    }

    /// Returns the targets that a component is built for besides the env's.
    fn extra_targets(&mut self, component: &profile::Component) -> Vec<Target> {
        let mut extra = Vec::new();
        for text in &component.extra {
            let text = self.text(text, |text| value::targets(text).map(drop));
            let targets = text.and_then(|text| value::targets(&text).ok());
            extra.extend(targets.into_iter().flatten());
        }
        extra
    }

    /// Returns why a step is not part of this env, if it is not.
    fn excluded(&self, step: &profile::Step) -> Option<String> {
        let gpu = || self.inputs.without_gpu.clone().filter(|_| step.gpu);
        self.unmet(&step.when).or_else(gpu)
    }

    /// Returns the condition that does not hold, if any.
    fn unmet(&self, when: &When) -> Option<String> {
        let (targets, chosen) = (&self.scope.targets, &self.chosen);
        let is_in = |family: &str| targets.iter().any(|target| target.is_in(family));
        if let Some(families) = misses(when.family.as_deref(), is_in) {
            return Some(not_for(families, targets));
        }
        let is_one = |name: &str| targets.iter().any(|target| target.name() == name);
        if let Some(wanted) = misses(when.target.as_deref(), is_one) {
            return Some(not_for(wanted, targets));
        }
        let engine = self.inputs.engine;
        if let Some(engines) = &when.engine
            && !engines.contains(&engine)
        {
            let engines: Vec<_> = engines.iter().map(Engine::name).collect();
            let engines = engines.join(", ");
            return Some(format!("only with {engines}, not with {engine}"));
        }
        let is_variant = |name: &str| Some(name) == chosen.variant;
        if let Some(variants) = misses(when.variant.as_deref(), is_variant) {
            let (variants, own) = (joined(variants), chosen.variant.unwrap_or("none"));
            return Some(format!("only in variant {variants}, not in {own}"));
        }
        let from = misses(when.from.as_deref(), |name| name == chosen.from)?;
        Some(format!(
            "only from {}, not from {}",
            joined(from),
            chosen.from
        ))
    }

    /// Returns the resolved step; `None` if it has a problem. Its key is the base key until all steps are known.
    fn step(
        &mut self,
        step: &profile::Step,
        env: &BTreeMap<String, String>,
        volumes: &[Volume],
    ) -> Result<Option<Step>> {
        // Each step gets a copy.
        self.length += env.values().map(String::len).sum::<usize>();
        if !self.is_short() {
            return Ok(None);
        }
        let mut merged = env.clone();
        merged.extend(self.late_env(&step.env));
        let workdir = match (&step.workdir, step.user) {
            (Some(workdir), _) => self.text(workdir, value::inside),
            (None, User::Builder) => Some(self.inputs.user.home.clone()),
            (None, User::Root) => Some("/".to_owned()),
        };
        let action = self.action(step, volumes)?;
        let (Some(action), Some(workdir)) = (action, workdir) else {
            return Ok(None);
        };
        // A package manager needs only caches. Without other volumes in its key, profiles share the step.
        let visible = |volume: &&Volume| match action {
            Action::Packages(_) => volume.kind == VolumeKind::Cache,
            Action::Run { .. } | Action::Copy(_) | Action::Export(_) => true,
        };
        let visible = volumes.iter().filter(visible);
        let visible = visible.map(|volume| volume.name.clone()).collect();
        Ok(Some(Step {
            name: step.name.clone(),
            key: StepKey::base(&self.inputs.image),
            parts: BTreeMap::new(),
            user: step.user,
            workdir,
            network: step.network,
            gpu: step.gpu,
            incremental: step.incremental,
            timeout: step.timeout,
            inputs: step.inputs.clone(),
            fingerprints: step.fingerprints.clone(),
            stages: step.stages.clone(),
            volumes: visible,
            env: merged,
            action,
        }))
    }

    fn action(&mut self, step: &profile::Step, volumes: &[Volume]) -> Result<Option<Action>> {
        Ok(match &step.action {
            profile::Action::Run { script, shell } => {
                self.late(script, 0).map(|script| Action::Run {
                    shell: shell.clone(),
                    script,
                })
            }
            profile::Action::Packages(packages) => {
                // Every package is checked first, so that each problem is reported.
                let packages = packages.iter();
                let packages: Vec<_> = packages
                    .map(|name| self.text(name, value::package))
                    .collect();
                let all = packages.into_iter().collect::<Option<_>>();
                all.map(Action::Packages)
            }
            profile::Action::Copy(items) => {
                let mut copies = Vec::new();
                for item in items {
                    let key = copy_key(&step.name, &item.from);
                    let digest = self.inputs.file_digests.get(&key);
                    let missing = || unexpected!("no digest of `{}`", item.from.value);
                    let digest = digest.ok_or_else(missing)?.clone();
                    if let Some(to) = self.text(&item.to, |to| copy_destination(to, volumes)) {
                        let from = item.from.value.clone();
                        copies.push(CopyItem { from, to, digest });
                    }
                }
                Some(Action::Copy(copies))
            }
            profile::Action::Export(items) => {
                let mut exports = Vec::new();
                for item in items {
                    let checked = |from: &str| export_source(from, &item.to, volumes);
                    if let Some(from) = self.text(&item.from, checked) {
                        let to = item.to.value.clone();
                        exports.push(ExportItem { from, to });
                    }
                }
                Some(Action::Export(exports))
            }
        })
    }
}

/// Returns the names of a condition if it has some, and none of them `holds`.
fn misses(names: Option<&[At<String>]>, holds: impl Fn(&str) -> bool) -> Option<&[At<String>]> {
    names.filter(|names| !names.iter().any(|name| holds(name)))
}

/// Refuses a path whose files end with their step: each container gets some directories empty.
fn lasting(path: &str, volumes: &[Volume]) -> std::result::Result<(), Refused> {
    let is_in = |directory: &&str| Path::new(path).starts_with(directory);
    // In images, `/var/run` and `/var/lock` are links into `/run`.
    let directories = ["/run", "/tmp", "/var/tmp", "/var/run", "/var/lock"];
    let empty = directories.into_iter().find(is_in);
    let mut volumes = volumes.iter().map(|volume| volume.target.as_str());
    match empty {
        Some(empty) if !volumes.any(|target| is_in(&target)) => Err(Refused::new(format!(
            "`{path}` is in no snapshot: every step gets an empty `{empty}`"
        ))
        .help("use a path outside `/run`, `/tmp` and `/var/tmp`")),
        Some(_) | None => Ok(()),
    }
}

/// Refuses an export of files that are gone by then, and of a volume into itself.
fn export_source(from: &str, to: &str, volumes: &[Volume]) -> std::result::Result<(), Refused> {
    value::exported(from)?;
    lasting(from, volumes)?;
    let into = volumes.iter().find(|volume| volume.name == to);
    let Some(target) = into.map(|volume| Path::new(&volume.target)) else {
        return Ok(());
    };
    let from = Path::new(from);
    match target.starts_with(from) || from.parent() == Some(target) {
        false => Ok(()),
        true => Err(Refused::new(format!(
            "`{}` cannot be exported to volume `{to}` at `{}`",
            from.display(),
            target.display()
        ))
        .help("files in an output volume are results already: export only files from elsewhere")),
    }
}

/// Refuses to copy over a user's files, because `copy` replaces existing ones.
fn copy_destination(to: &str, volumes: &[Volume]) -> std::result::Result<(), Refused> {
    value::destination(to)?;
    lasting(to, volumes)?;
    let theirs = volumes
        .iter()
        .find(|volume| volume.kind.is_users_own() && Path::new(to).starts_with(&volume.target));
    match theirs {
        None => Ok(()),
        Some(volume) => Err(Refused::new(format!(
            "`copy` cannot write into volume `{}`: its files do not belong to rockenv",
            volume.name
        ))
        .help("copy to another path, then use a `run` step to move it there")),
    }
}
