//! Owns finding changed sources whose files may be older than the objects that were built before the change. ninja and
//! make would take these objects for new ones.

use crate::execute::{is_older, last_layer};
use crate::plan::ids::LayerId;
use crate::plan::record::Record;
use crate::plan::resolve::{self, Spec, VolumeSource};
use crate::store::{Store, source};
use crate::sys::error::Result;

/// Returns whether files of changed sources may be older than the objects in an env's build volumes: a source is
/// another clone or directory, or steps no longer see a hook's changes. `before` is the spec of the last `up`.
pub(super) fn has_older_sources(
    store: &Store,
    record: &Record,
    before: Option<&Spec>,
    spec: &Spec,
) -> Result<bool> {
    let Some(before) = before else {
        return Ok(false);
    };
    let from = |hook: &resolve::Hook| spec.steps.iter().position(|step| step.name == hook.from);
    let is_gone = |old: &resolve::Hook| {
        let mut hooks = spec.hooks.iter();
        let new = hooks.find(|hook| hook.name == old.name && hook.volume == old.volume);
        new.is_none_or(|new| from(old).is_some_and(|old| from(new) > Some(old)))
    };
    let old = store.origins_in_volumes(&spec.name, record, before)?;
    let [last, new] = [before, spec].map(|spec| source::origins(store, spec));
    let directories = source::directories(store, spec);
    for volume in &spec.volumes {
        let name = &volume.name;
        let is_other = match old.as_ref().and_then(|old| old.get(name)) {
            Some(old) => Some(old) != new.get(name),
            // Earlier versions recorded clones only, and the objects of a pulled layer may be of any revision.
            None => directories.contains_key(name) || last.get(name) != new.get(name),
        };
        if before.volume(name).is_some() && is_other {
            return Ok(true);
        }
        if has_other_views(store, record, [before, spec], name)? {
            return Ok(true);
        }
        let directory = match &volume.source {
            VolumeSource::Path(path) => Some(path),
            VolumeSource::Git(_) | VolumeSource::Store => directories.get(name),
        };
        let mut hooks = before.hooks.iter().filter(|hook| hook.volume == *name);
        // A hook that no step has seen changed nothing, and the source's own files may be newer than the last step.
        if let Some(directory) = directory
            && hooks.any(is_gone)
            && is_older(&store.env_dir(&spec.name), name, directory)?
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether hooks of a source change, and another env made the objects, whose view of the source gave other
/// times to the files that hooks changed. This env's view has its own times for them, which may be earlier, or none:
/// then the files get the present time, except those that no hook changes any more.
fn has_other_views(
    store: &Store,
    record: &Record,
    [before, spec]: [&Spec; 2],
    volume: &str,
) -> Result<bool> {
    let hooks = |of: &Spec| -> Vec<resolve::Hook> {
        let hooks = of.hooks.iter().filter(|hook| hook.volume == volume);
        hooks.cloned().collect()
    };
    let [old, new] = [before, spec].map(hooks);
    if old == new {
        return Ok(false);
    }
    let last = last_layer(&store.env_dir(&spec.name), volume)?;
    // A missing layer is reported where it is needed.
    let chain = |top: Option<&LayerId>| top.and_then(|top| store.chain(top).ok());
    // A fork has the views of its layers.
    let seen = chain(last.as_ref()).unwrap_or_default();
    let from = record.head.volumes_from().layer;
    let mut layers = chain(from.as_ref()).unwrap_or_default();
    layers.retain(|layer| {
        let is_seen = seen.iter().any(|seen| seen.id == layer.id);
        layer.env.as_ref() != Some(&record.id) && !is_seen
    });
    let see = |of: &Spec| {
        let is_made = |key| layers.iter().any(|layer| layer.key.as_ref() == Some(key));
        let mut steps = before.steps.iter().filter(|step| is_made(&step.key));
        steps.any(|step| of.hooks_at(step, volume).next().is_some())
    };
    let is_gone = old.iter().any(|hook| !new.contains(hook));
    Ok(is_gone && see(before) || last.is_some() && see(spec))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::{Duration, SystemTime};

    use fs_err as fs;
    use tempfile::TempDir;

    use super::*;
    use crate::plan::ids::{EnvId, StepKey};
    use crate::plan::layer::{History, Layer, VolumesFrom};
    use crate::profile;

    const HOUR: Duration = Duration::from_secs(3600);

    fn spec(source: &str, hooks: &str) -> Spec {
        let text = format!(
            "schema = 1\nimage = 'debian'\nhooks = [{hooks}]\n\
             [[volume]]\nname = 'src'\nkind = 'source'\ntarget = '/src'\n{source}\n\
             [[step]]\nname = 'one'\ninputs = ['src']\nrun = 'true'\n\
             [[step]]\nname = 'two'\nrun = 'true'\n"
        );
        let profile = profile::from_text("p", &text).unwrap();
        resolve::resolve(&profile, &resolve::tests_inputs()).unwrap()
    }

    fn at(directory: &Path) -> String {
        format!("path = '{}'", directory.display())
    }

    fn git(rev: &str) -> String {
        format!("git = 'https://example.org/a'\nrev = '{rev}'")
    }

    /// An env whose view of a source has a file that a hook changed.
    struct Scene {
        store: Store,
        source: TempDir,
        record: Record,
        _scratch: TempDir,
    }

    impl Scene {
        fn new() -> Self {
            let (scratch, store) = Store::scratch();
            let scene = Self {
                store,
                source: tempfile::tempdir().unwrap(),
                record: Record::sample("e", jiff::Timestamp::UNIX_EPOCH),
                _scratch: scratch,
            };
            fs::write(scene.file(), "").unwrap();
            fs::create_dir_all(scene.view()).unwrap();
            // A hook changed the file long ago, and a step has just seen the change.
            scene.view_is(r#""times": {"file": {"sha256": "", "seconds": 0, "nanoseconds": 0}}"#);
            scene
        }

        /// The env has build volumes with the objects of layer `l`.
        fn with_objects() -> Self {
            let mut scene = Self::new();
            scene.record.head.volumes = [("build".into(), "v".into())].into();
            let from = VolumesFrom::new(Some("l".into()), History::Clean);
            scene.record.head.volumes_from = Some(from);
            scene
        }

        fn file(&self) -> PathBuf {
            self.source.path().join("file")
        }

        fn path(&self) -> String {
            at(self.source.path())
        }

        fn view(&self) -> PathBuf {
            let env = self.store.env_dir(&spec(&self.path(), "").name);
            env.join("views/src")
        }

        fn view_is(&self, state: &str) {
            let stack = format!(r#"{{"base": "", "layers": [], {state}}}"#);
            fs::write(self.view().join("stack.json"), stack).unwrap();
        }

        fn file_is_of(&self, time: SystemTime) {
            let file = fs::File::open(self.file()).unwrap();
            file.set_modified(time).unwrap();
        }

        fn may_be_older(&self, before: &Spec, spec: &Spec) -> bool {
            has_older_sources(&self.store, &self.record, Some(before), spec).unwrap()
        }
    }

    #[test]
    fn other_directories_and_sources_without_their_hook_may_have_older_files() {
        let scene = Scene::new();
        let (one, two, path) = (&git("1"), &git("2"), &scene.path());
        let beside = tempfile::tempdir().unwrap();
        let link = beside.path().join("link");
        fs::os::unix::fs::symlink(scene.source.path(), &link).unwrap();
        let (link, another) = (&at(&link), &at(Path::new("/b")));
        let now = SystemTime::now();
        let [ago, ahead] = [now - HOUR, now + HOUR];
        for (time, before, after, may_be) in [
            (ago, (one, ""), (one, ""), false),
            (ago, (one, ""), (two, ""), true),
            (ago, (one, ""), (path, ""), true),
            (ago, (path, ""), (one, ""), true),
            (ago, (path, ""), (another, ""), true),
            (ago, (path, ""), (link, ""), false),
            (ago, (path, ""), (path, "'fix'"), false),
            (ago, (path, "'fix'"), (path, ""), true),
            (ahead, (path, "'fix'"), (path, ""), false),
        ] {
            scene.file_is_of(time);
            let [old, new] = [before, after].map(|(source, hooks)| spec(source, hooks));
            let found = scene.may_be_older(&old, &new);
            assert_eq!(found, may_be, "{time:?} {before:?} {after:?}");
        }
        scene.file_is_of(ago);
        let early = spec(path, "'fix'");
        let mut late = early.clone();
        late.hooks[0].from = "two".into();
        assert!(scene.may_be_older(&early, &late));
        assert!(!scene.may_be_older(&late, &early));
    }

    #[test]
    fn another_env_s_view_gave_other_times_to_the_files_of_hooks() {
        let scene = Scene::with_objects();
        scene.file_is_of(SystemTime::now() + HOUR);
        let [plain, fixed] = ["", "'fix'"].map(|hooks| spec(&scene.path(), hooks));
        let put = |id: &str, env: &EnvId, key: &StepKey| {
            scene.store.put_layer(&Layer {
                key: Some(key.clone()),
                env: Some(env.clone()),
                ..Layer::sample(id.into())
            });
        };
        let (own, other) = (&scene.record.id, &EnvId::from("other"));
        let of_another_env = |old: &Spec, new: &Spec| {
            put("l", other, &old.steps[0].key);
            let found = scene.may_be_older(old, new);
            put("l", own, &old.steps[0].key);
            assert!(!scene.may_be_older(old, new));
            found
        };
        assert!(of_another_env(&fixed, &plain));
        assert!(!of_another_env(&plain, &fixed) && !of_another_env(&fixed, &fixed));
        // Without times of its own, the view gives the present one to the files of all hooks.
        let mut more = fixed.clone();
        more.hooks.push(resolve::Hook {
            name: "more".into(),
            ..fixed.hooks[0].clone()
        });
        assert!(!of_another_env(&fixed, &more) && of_another_env(&more, &fixed));
        // The view has times, from before the objects; or those of the layer, as in a fork.
        put("k", own, &"below".into());
        for (last, may_be) in [("k", true), ("l", false)] {
            let written = format!(r#"{{"from": "{last}", "commands": 0}}"#);
            scene.view_is(&format!(r#""times": {{}}, "written": {written}"#));
            assert_eq!(of_another_env(&plain, &fixed), may_be, "{last}");
        }
    }

    #[test]
    fn after_a_rollback_the_objects_are_of_the_snapshot_s_sources() {
        let scene = Scene::with_objects();
        let (one, two, path) = (&git("1"), &git("2"), &scene.path());
        let last = spec(one, "");
        let write = |id: &str, key: Option<&StepKey>, built: Option<&String>| {
            scene.store.put_layer(&Layer {
                key: key.cloned(),
                parent: (id == "l").then(|| "below".into()),
                origins: built.map(|built| source::origins(&scene.store, &spec(built, ""))),
                ..Layer::sample(id.into())
            });
        };
        write("below", None, Some(two));
        let (key, other) = (&last.steps[0].key, &StepKey::from("other"));
        // A pulled snapshot does not tell, and the step below it may be of any revision.
        for (key, built, may_be) in [
            (other, Some(one), false),
            (other, Some(two), true),
            (key, None, false),
            (other, None, true),
        ] {
            write("l", Some(key), built);
            assert_eq!(scene.may_be_older(&last, &last), may_be, "{key} {built:?}");
        }
        // Earlier versions recorded clones only.
        for (built, last, now, may_be) in [
            (Some(two), path, two, false),
            (Some(two), path, one, true),
            (None, path, path, false),
            (None, path, &at(Path::new("/b")), true),
            (None, path, one, true),
            (None, one, one, true),
        ] {
            write("l", Some(other), built);
            let file = scene.store.layer_dir(&"l".into()).join("layer.json");
            let text = fs::read_to_string(&file).unwrap();
            let text = match built {
                Some(_) => text.replace("\"origins\"", "\"clones\""),
                None => text.replacen('{', "{\"clones\": {},", 1),
            };
            fs::write(&file, text).unwrap();
            let found = scene.may_be_older(&spec(last, ""), &spec(now, ""));
            assert_eq!(found, may_be, "{built:?} {last} {now}");
        }
        // A user's snapshot of an older version does not tell either, but has the objects of the step below it.
        write("l", None, None);
        for (key, may_be) in [(key, false), (other, true)] {
            write("below", Some(key), None);
            assert_eq!(scene.may_be_older(&last, &last), may_be, "{key}");
        }
    }
}
