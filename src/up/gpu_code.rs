//! Owns checking whether a distribution's libraries contain code for an env's targets.

use std::collections::{BTreeMap, BTreeSet};

use crate::image::{DPKG_STATUS, MAX_DATABASE, gpu_code};
use crate::plan::ids::{ImageKey, LayerId};
use crate::plan::resolve::Spec;
use crate::rocm::kernels::kernels;
use crate::rocm::target::{How, Target, runs};
use crate::store::Store;
use crate::sys::error::Result;

/// Multiarch directories are Debian's own.
const DEBIAN: &str = "/usr/lib/x86_64-linux-gnu/";

/// Returns a note for each target for which libraries in the tree of `layer`, or of the image, have no code. Returns
/// none for an unreadable tree, since steps may write anything there.
pub(crate) fn notes(
    store: &Store,
    spec: &Spec,
    layer: Option<&LayerId>,
    image_key: &ImageKey,
) -> Vec<String> {
    let libraries = libraries(store, layer, image_key).unwrap_or_default();
    let targets = spec.targets.iter();
    targets
        .filter_map(|target| note(&libraries, *target))
        .collect()
}

/// ISAs of code by library: a package, or else a directory.
type Libraries = BTreeMap<String, BTreeSet<String>>;

fn libraries(store: &Store, layer: Option<&LayerId>, image_key: &ImageKey) -> Result<Libraries> {
    let tree = store.look_into(layer, image_key)?;
    let status = tree.read(DPKG_STATUS, MAX_DATABASE).ok().flatten();
    let status = status.unwrap_or_default();
    Ok(combine(&String::from_utf8_lossy(&status), kernels(&tree)?))
}

/// Combines the packages that declare their ISAs with the directories that belong to no such package.
fn combine(status: &str, mut directories: Libraries) -> Libraries {
    let packages = gpu_code(status);
    directories.retain(|path, _| {
        let library = path.strip_prefix(DEBIAN).map(|name| format!("lib{name}"));
        library.is_none_or(|name| !packages.keys().any(|package| package.starts_with(&name)))
    });
    let owned = |isas: BTreeSet<&str>| isas.into_iter().map(str::to_owned).collect();
    let packages = packages.into_iter();
    directories.extend(packages.map(|(package, isas)| (package.to_owned(), owned(isas))));
    directories
}

fn note(libraries: &Libraries, target: Target) -> Option<String> {
    let runs = runs(target);
    let runs_on = |isas: &BTreeSet<String>, how: &dyn Fn(How) -> bool| {
        let mut others = runs.iter().filter(|other| how(other.how));
        others.find(|other| isas.contains(&other.code))
    };
    let lacking = libraries.iter().filter(|(library, isas)| {
        // Debian's runtime has the patches that `Extended` needs.
        let is_debian = !library.starts_with('/') || library.starts_with(DEBIAN);
        let runs = |how| match how {
            How::Generic => true,
            How::Extended => is_debian,
            How::Override => false,
        };
        !isas.contains(target.name()) && runs_on(isas, &runs).is_none()
    });
    let lacking: Vec<_> = lacking.collect();
    let names: Vec<&str> = lacking.iter().map(|(name, _)| name.as_str()).collect();
    // An override applies to the whole process, so it helps only if all libraries have its code.
    let help = runs
        .iter()
        .filter(|other| other.how == How::Override)
        .find(|other| lacking.iter().all(|(_, isas)| isas.contains(&other.code)))
        .map(|other| {
            let code = &other.code;
            format!(
                "; their code for {code} runs in a build with `--target {code}` and {}",
                other.note
            )
        });
    (!names.is_empty()).then(|| {
        format!(
            "libraries without code for {}: {}{}",
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

    fn directories(places: &[(&str, &[&str])]) -> Libraries {
        let isas = |isas: &[&str]| isas.iter().map(|isa| (*isa).to_owned()).collect();
        let places = places.iter();
        places
            .map(|(path, list)| ((*path).to_owned(), isas(list)))
            .collect()
    }

    fn noted(libraries: &Libraries, target: &str) -> Option<String> {
        note(libraries, Target::parse(target).unwrap())
    }

    #[test]
    fn packages_without_code_are_named_with_what_runs_instead() {
        let libraries = combine(STATUS, Libraries::new());
        let found = noted(&libraries, "gfx1103").unwrap();
        let start = "libraries without code for gfx1103: librocblas4; their code for gfx1100 runs in a build with \
                     `--target gfx1100` and HSA_OVERRIDE_GFX_VERSION=11.0.0: ";
        assert!(found.starts_with(start), "{found}");
        // Generic code runs on it, and Debian loads the code of its own family.
        assert_eq!(noted(&libraries, "gfx1031"), None);
        assert_eq!(noted(&libraries, "gfx906"), None);
        let both = "libraries without code for gfx1201: librocblas4, librocsolver0";
        assert_eq!(noted(&libraries, "gfx1201").as_deref(), Some(both));
    }

    #[test]
    fn directories_count_where_no_package_says_it() {
        let amd = "/opt/rocm-7.0.0/lib/rocblas";
        let debian = "/usr/lib/x86_64-linux-gnu/rocblas";
        let found = directories(&[(amd, &["gfx1030"]), (debian, &["gfx803"])]);
        let libraries = combine(STATUS, found);
        // Only Debian's runtime loads code for gfx1030 on its siblings, and Debian's package declares its own ISAs.
        let found = noted(&libraries, "gfx1031").unwrap();
        let start = format!("libraries without code for gfx1031: {amd}; their code for gfx1030 ");
        assert!(found.starts_with(&start), "{found}");
        assert_eq!(noted(&libraries, "gfx1030"), None);
        // No override helps if one library lacks its code.
        let other = "/opt/rocm/lib/hipblaslt";
        let both = directories(&[(amd, &["gfx1030"]), (other, &["gfx942"])]);
        let found = noted(&combine("", both), "gfx1031").unwrap();
        assert_has!(found, other);
        assert!(!found.contains("their code"), "{found}");
        let alone = combine("", directories(&[(debian, &["gfx1030"])]));
        assert_eq!(noted(&alone, "gfx1031"), None);
        let lacking = format!("libraries without code for gfx1201: {debian}");
        assert_eq!(noted(&alone, "gfx1201").unwrap(), lacking);
    }
}
