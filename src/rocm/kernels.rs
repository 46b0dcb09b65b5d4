//! Owns finding the ISAs that a tree's libraries have kernels for, by file name.

use std::collections::{BTreeMap, BTreeSet};

use crate::sys::error::Result;
use crate::tree::merged::MergedDir;

/// Libraries that keep their kernels in files, in directories named after the library.
const LIBRARIES: [&str; 3] = ["hipblaslt", "hipsparselt", "rocblas"];
const PLACES: [&str; 3] = ["usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu"];
/// Debian adds a version, and some of AMD's libraries a target: `rocblas/4.4.1/library/...`.
const DEPTH: u32 = 3;

/// Returns the directories of libraries with kernels, as absolute paths, and the ISAs of these kernels.
pub(crate) fn kernels(root: &MergedDir) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut places = PLACES.map(str::to_owned).to_vec();
    for name in root.enter("opt")?.names()? {
        // The name is printed, so an image must not inject lines.
        if name.starts_with("rocm") && !name.contains(char::is_control) {
            places.push(format!("opt/{name}/lib"));
        }
    }
    let mut found = BTreeMap::new();
    for place in places {
        for library in LIBRARIES {
            let path = format!("{place}/{library}");
            let mut isas = BTreeSet::new();
            collect(&root.enter(&path)?, DEPTH, &mut isas)?;
            if !isas.is_empty() {
                found.insert(format!("/{path}"), isas);
            }
        }
    }
    Ok(found)
}

fn collect(directory: &MergedDir, depth: u32, isas: &mut BTreeSet<String>) -> Result<()> {
    for name in directory.names()? {
        match isa_of(&name) {
            Some(isa) => drop(isas.insert(isa.to_owned())),
            None if depth > 1 => collect(&directory.enter(&name)?, depth - 1, isas)?,
            None => {}
        }
    }
    Ok(())
}

/// Returns the ISA in the name of a kernel file, or of a list of kernels.
fn isa_of(name: &str) -> Option<&str> {
    let (stem, extension) = name.rsplit_once('.')?;
    let is_list = extension == "dat" && name.starts_with("TensileLibrary_");
    if !is_list && !matches!(extension, "co" | "hsaco") {
        return None;
    }
    let isa = &stem[stem.rfind("gfx")?..];
    let end = isa
        .find(['-', ':', '_'])
        .filter(|_| !isa.ends_with("-generic"));
    Some(&isa[..end.unwrap_or(isa.len())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use fs_err as fs;

    #[test]
    fn names_of_files_have_the_isa() {
        for (name, isa) in [
            ("Kernels.so-000-gfx1103.hsaco", Some("gfx1103")),
            ("Kernels.so-000-gfx90a-xnack+.hsaco", Some("gfx90a")),
            (
                "TensileLibrary_Type_HH_Contraction_l_Ailk_Bjlk_Cijk_Dijk_fallback_gfx1010.hsaco",
                Some("gfx1010"),
            ),
            ("TensileLibrary_lazy_gfx942.dat", Some("gfx942")),
            ("extop_gfx11-generic.co", Some("gfx11-generic")),
            ("hipblasltTransform.hsaco", None),
            ("TensileLibrary_Type_HH_fallback.dat", None),
            ("gfx1100.txt", None),
            ("notes_gfx1100.dat", None),
        ] {
            assert_eq!(isa_of(name), isa, "{name}");
        }
    }

    #[test]
    fn libraries_are_found_where_distributions_put_them() {
        let scratch = tempfile::tempdir().unwrap();
        for path in [
            "usr/lib/x86_64-linux-gnu/rocblas/4.4.1/library/Kernels.so-000-gfx1100.hsaco",
            "usr/lib/x86_64-linux-gnu/rocblas/4.4.1/library/TensileLibrary_lazy_gfx90a.dat",
            "opt/rocm-7.0.0/lib/hipblaslt/library/gfx942/extop_gfx942.co",
            "usr/lib64/rocblas/README",
            "srv/rocblas/library/extop_gfx803.co",
            "opt/rocm\n::error::x/lib/rocblas/extop_gfx803.co",
        ] {
            let path = scratch.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let found = kernels(&MergedDir::open(&[scratch.path()]).unwrap()).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|(path, isas)| (path.as_str(), Vec::from_iter(isas)))
            .collect();
        let shown = format!("{found:?}");
        assert_eq!(
            shown,
            "[(\"/opt/rocm-7.0.0/lib/hipblaslt\", [\"gfx942\"]), \
             (\"/usr/lib/x86_64-linux-gnu/rocblas\", [\"gfx1100\", \"gfx90a\"])]"
        );
    }
}
