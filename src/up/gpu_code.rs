//! Owns whether libraries that a distribution has built contain code for an env's targets.

use std::collections::BTreeSet;

use crate::image::{DPKG_STATUS, MAX_DATABASE, gpu_code};
use crate::plan::ids::LayerId;
use crate::plan::resolve::Spec;
use crate::rocm::target::{How, Target, runs};
use crate::store::Store;

/// Returns a note for each target for which packages in the tree of `layer` have no code; none if that cannot be read,
/// since steps may write anything there.
pub(crate) fn notes(store: &Store, spec: &Spec, layer: &LayerId) -> Vec<String> {
    let status = store.read_in_layer(layer, DPKG_STATUS, MAX_DATABASE);
    let status = status.ok().flatten().unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let targets = spec.targets.iter();
    targets
        .filter_map(|target| note(&status, *target))
        .collect()
}

fn note(status: &str, target: Target) -> Option<String> {
    let runs = runs(target);
    let runs_on = |isas: &BTreeSet<&str>, how: fn(How) -> bool| {
        let mut others = runs.iter().filter(|other| how(other.how));
        others.find(|other| isas.contains(other.code.as_str()))
    };
    let mut lacking = gpu_code(status);
    // The distribution whose packages say this has the patches that `Extended` needs.
    lacking.retain(|_, isas| {
        !isas.contains(target.name()) && runs_on(isas, |how| how != How::Override).is_none()
    });
    let names: Vec<&str> = lacking.keys().copied().collect();
    let help = lacking
        .values()
        .find_map(|isas| runs_on(isas, |how| how == How::Override))
        .map(|other| format!("; code for {} runs with {}", other.code, other.note));
    (!names.is_empty()).then(|| {
        format!(
            "installed packages without code for {}: {}{}",
            target.name(),
            names.join(", "),
            help.unwrap_or_default()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "\
Package: librocblas4
Status: install ok installed
X-Rocm-Gpu-Architecture: gfx803 gfx906 gfx90a gfx1010 gfx1030 gfx1100

Package: librocsolver0
Status: install ok installed
X-Rocm-Gpu-Architecture: gfx9-generic gfx10-3-generic gfx11-generic
";

    #[test]
    fn packages_without_code_are_named_with_what_runs_instead() {
        let note = |target: &str| note(STATUS, Target::parse(target).unwrap());
        let found = note("gfx1103").unwrap();
        let start = "installed packages without code for gfx1103: librocblas4; code for gfx1100 runs with \
                     HSA_OVERRIDE_GFX_VERSION=11.0.0: ";
        assert!(found.starts_with(start), "{found}");
        // Generic code runs on it, and Debian loads the code of its own family.
        assert_eq!(note("gfx1031"), None);
        assert_eq!(note("gfx906"), None);
        let both = "installed packages without code for gfx1201: librocblas4, librocsolver0";
        assert_eq!(note("gfx1201").as_deref(), Some(both));
    }
}
