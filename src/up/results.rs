//! Owns what an env hands over: the places and sizes of its results, and the commands to use them.

use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use crate::plan::resolve::Spec;
use crate::rocm::target::Target;
use crate::store::Store;
use crate::store::results::outputs;
use crate::sys::shell::quoted;
use crate::tree::measure::scan_one;
use crate::ui::{Ui, size, text};

/// How deep below an output volume to look for Python packages.
const DEPTH: usize = 3;

#[derive(Debug, Serialize)]
pub(crate) struct ResultsSummary {
    pub(crate) outputs: Vec<OutputDirectory>,
    /// Commands to use them, in order.
    pub(crate) next: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct OutputDirectory {
    pub(crate) volume: String,
    pub(crate) path: PathBuf,
    /// Disk usage, in bytes.
    pub(crate) bytes: u64,
}

impl ResultsSummary {
    /// Summarizes the env's output volumes that have content.
    pub(crate) fn of(store: &Store, spec: &Spec) -> Self {
        let mut found = Vec::new();
        for volume in outputs(spec) {
            let Ok(path) = store.output_dir(spec, volume) else {
                continue;
            };
            if fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some()) {
                // The scan does not follow a link.
                let real = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                found.push(OutputDirectory {
                    volume: volume.name.clone(),
                    bytes: scan_one(&real).total().allocated,
                    path,
                });
            }
        }
        let mut next = Vec::new();
        let mut packages = Packages::default();
        for output in &found {
            packages.scan(&output.path, DEPTH);
        }
        if let (false, Some(first)) = (packages.rocm.is_empty(), spec.targets.first()) {
            next.push(format!("export ROCM_SDK_TARGET_FAMILY={first}"));
        }
        next.extend(packages.install(&spec.targets));
        if !spec.runtime_env.is_empty() {
            next.push(format!("eval \"$(rockenv env {})\"", spec.name));
        }
        Self {
            outputs: found,
            next,
        }
    }

    /// Returns the lines that `up` and `status` end with.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.outputs.is_empty() {
            return Vec::new();
        }
        let results = self.outputs.iter().map(|output| {
            let path = output.path.display();
            format!("results: {path} ({})", size::bytes(output.bytes))
        });
        let next = self.next.iter().map(|command| format!("next: {command}"));
        results.chain(next).collect()
    }

    pub(crate) fn note(&self, ui: &Ui) {
        for line in self.lines() {
            ui.note(&line);
        }
    }
}

/// Python packages among results.
#[derive(Debug, Default, PartialEq, Eq)]
struct Packages {
    wheels: Vec<PathBuf>,
    /// Directories with TheRock's package `rocm`, which selects the wheels beside it.
    rocm: Vec<PathBuf>,
}

impl Packages {
    /// Looks into a directory. Links are not followed: steps made them.
    fn scan(&mut self, directory: &Path, depth: usize) {
        let Ok(entries) = fs::read_dir(directory) else {
            return;
        };
        let (mut has_wheels, mut has_rocm, mut below) = (false, false, Vec::new());
        for entry in entries.flatten() {
            let name = entry.file_name();
            // A step chose the name, and it becomes part of a command for users to copy.
            let Some(name) = name.to_str().filter(|name| text::escape(name) == *name) else {
                continue;
            };
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => below.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    has_wheels |= name.ends_with(".whl");
                    has_rocm |= name.starts_with("rocm-") && name.ends_with(".tar.gz");
                }
                _ => {}
            }
        }
        if has_rocm {
            self.rocm.push(directory.to_owned());
        } else if has_wheels {
            self.wheels.push(directory.to_owned());
        }
        below.sort();
        if depth > 0 {
            for directory in below {
                self.scan(&directory, depth - 1);
            }
        }
    }

    fn install(&self, targets: &[Target]) -> Option<String> {
        let shown = |path: &PathBuf| quoted(&path.to_string_lossy()).into_owned();
        let mut words = Vec::new();
        for directory in &self.rocm {
            words.push(format!("--find-links {}", shown(directory)));
        }
        if !self.rocm.is_empty() {
            // `device` is `ROCM_SDK_TARGET_FAMILY`. A package for one target has no extra of the target's own name.
            let others = targets.iter().skip(1);
            let others = others.map(|target| format!(",device-{target}"));
            words.push(format!(
                "'rocm[libraries,device{}]'",
                others.collect::<String>()
            ));
        }
        for directory in &self.wheels {
            words.push(format!("{}/*.whl", shown(directory)));
        }
        let before = match self.rocm.is_empty() {
            true => "pip install",
            false => "pip install --no-cache-dir --pre",
        };
        (!words.is_empty()).then(|| format!("{before} {}", words.join(" ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_installed_as_the_documentation_does() {
        let out = tempfile::tempdir().unwrap();
        let made = [
            "rocm/dist/rocm-7.1.tar.gz",
            "rocm/dist/a.whl",
            "torch/torch-2.whl",
        ];
        for path in made {
            let path = out.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let mut packages = Packages::default();
        packages.scan(out.path(), DEPTH);
        let targets = ["gfx1103", "gfx1201"].map(|name| Target::parse(name).unwrap());
        let command = packages.install(&targets).unwrap();
        assert_has!(command, "'rocm[libraries,device,device-gfx1201]'");
        let command = packages.install(&targets[..1]).unwrap();
        let command = command.replace(out.path().to_str().unwrap(), "$out");
        let page = include_str!("../../docs/how-to/use-the-wheels.md");
        assert_has!(page, &command);
        assert_eq!(Packages::default().install(&[]), None);
        for name in ["new\nline", "escape\x1b[2J", "\u{202e}turned"] {
            let path = out.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("b.whl"), "").unwrap();
        }
        let mut again = Packages::default();
        again.scan(out.path(), DEPTH);
        assert_eq!(again, packages);
        let plain = Packages {
            wheels: vec!["/a b".into()],
            ..Packages::default()
        };
        assert_eq!(plain.install(&[]).unwrap(), "pip install '/a b'/*.whl");
    }
}
