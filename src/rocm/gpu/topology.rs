//! Owns reading the compute driver's list of GPUs: `/sys/class/kfd/kfd/topology/nodes`.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use fs_err as fs;

use super::{Gpu, is_amd_gpu};
use crate::rocm::target;
use crate::sys::host::names_in;

/// Reads the directory `nodes`; `pci` has the devices of the bus. Skips unreadable nodes, and returns whether there are
/// any: the driver refuses to describe a GPU whose render node the device rules of a control group exclude.
pub(super) fn read(nodes: &Path, pci: &Path) -> (Vec<Gpu>, bool) {
    let mut hidden = false;
    let mut found: Vec<(u32, Gpu)> = children(nodes)
        .into_iter()
        .filter_map(|number| {
            let directory = nodes.join(number.to_string());
            let properties = fs::read_to_string(directory.join("properties"))
                .inspect_err(|error| hidden |= error.kind() != ErrorKind::NotFound)
                .ok()?;
            let banks = directory.join("mem_banks");
            let memory = children(&banks).into_iter().filter_map(|bank| {
                let path = banks.join(bank.to_string()).join("properties");
                own_memory(&fs::read_to_string(path).ok()?)
            });
            let mut gpu = parse(&properties, |address| is_amd_gpu(&pci.join(address)))?;
            gpu.memory = memory.sum();
            Some((number, gpu))
        })
        .collect();
    found.sort_by_key(|(number, _)| *number);
    let mut gpus: Vec<Gpu> = found.into_iter().map(|(_, gpu)| gpu).collect();
    let addresses: Vec<String> = gpus.iter().map(|gpu| gpu.pci.clone()).collect();
    for (index, gpu) in gpus.iter_mut().enumerate() {
        gpu.index = index;
        let parts = addresses.iter().filter(|pci| **pci == gpu.pci).count();
        gpu.partition = gpu.partition.filter(|_| parts > 1);
    }
    (gpus, hidden)
}

fn children(directory: &Path) -> Vec<u32> {
    let names = names_in(directory).into_iter();
    names.filter_map(|name| name.parse().ok()).collect()
}

/// Parses lines of a name and a number; `None` for a CPU, which is a node too. `is_gpu` tells whether a GPU has a PCI
/// address. The result has a partition number even if the device is not partitioned, and neither an index nor memory.
fn parse(properties: &str, is_gpu: impl Fn(&str) -> bool) -> Option<Gpu> {
    let values = values(properties);
    let value = |name: &str| values.get(name).copied().unwrap_or(0);
    let small = |name: &str| u32::try_from(value(name)).ok();
    let version = small("gfx_target_version").filter(|version| *version != 0)?;
    // The location packs bus, device and function like PCI. Linux adds the partition number to the function, which is 0
    // for such devices; some of AMD's drivers have it in the high bits.
    let location = small("location_id")?;
    let (bus, slot) = (location >> 8 & 0xff, location >> 3 & 0x1f);
    let address =
        |function: u32| format!("{:04x}:{bus:02x}:{slot:02x}.{function}", value("domain"));
    let (pci, partition) = match (location >> 28, location & 0x7) {
        (0, partition) if !is_gpu(&address(partition)) => (address(0), partition),
        (partition, function) => (address(function), partition),
    };
    Some(Gpu {
        index: 0,
        isa: target::isa_name(version),
        pci,
        partition: Some(partition),
        render: format!("renderD{}", small("drm_render_minor")?),
        memory: 0,
        compute_units: small("simd_count")? / small("simd_per_cu")?.max(1),
    })
}

/// Returns the size of a memory bank if the bank is the GPU's own: heap types 1 and 2, visible and invisible to the
/// CPU.
fn own_memory(properties: &str) -> Option<u64> {
    let values = values(properties);
    let is_own = matches!(values.get("heap_type"), Some(1 | 2));
    values.get("size_in_bytes").copied().filter(|_| is_own)
}

fn values(text: &str) -> BTreeMap<&str, u64> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name, value.trim().parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_are_a_gpus_or_a_processors() {
        let text = "simd_count 24\nsimd_per_cu 2\ngfx_target_version 110003\nlocation_id 25344\n\
                    domain 0\ndrm_render_minor 128\nunknown words here\nhive_id 18446744073709551615\n";
        let parse = |text: &str, is_gpu: bool| parse(text, |_| is_gpu);
        let gpu = parse(text, true).unwrap();
        assert_eq!((&*gpu.pci, gpu.partition), ("0000:63:00.0", Some(0)));
        assert_eq!((&*gpu.isa, gpu.compute_units), ("gfx1103", 12));
        assert_eq!(
            parse("cpu_cores_count 16\ngfx_target_version 0\n", true),
            None
        );
        for nonsense in ["", "gfx_target_version", "gfx_target_version -1", "\0\n "] {
            assert_eq!(parse(nonsense, true), None);
        }
        // Domains of virtual buses have more than four digits.
        let far = text.replace("domain 0", "domain 65536");
        assert_eq!(parse(&far, true).unwrap().pci, "10000:63:00.0");
        // A function that is no GPU of its own is a partition.
        let third = text.replace("location_id 25344", "location_id 25346");
        for (is_gpu, pci, partition) in [(true, "0000:63:00.2", 0), (false, "0000:63:00.0", 2)] {
            let gpu = parse(&third, is_gpu).unwrap();
            assert_eq!((&*gpu.pci, gpu.partition), (pci, Some(partition)));
        }
    }

    #[test]
    fn only_the_gpus_own_memory_counts() {
        assert_eq!(own_memory("heap_type 1\nsize_in_bytes 5\n"), Some(5));
        assert_eq!(own_memory("heap_type 0\nsize_in_bytes 5\n"), None);
        assert_eq!(own_memory("heap_type 4\nsize_in_bytes 5\n"), None);
    }
}
