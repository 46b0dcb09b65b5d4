//! Random archives: nothing is written outside, and nothing panics.

use proptest::prelude::*;

use super::{Place, tar};

fn seed() -> Vec<u8> {
    tar()
        .dir(b"./")
        .dir(b"d")
        .file(b"d/file", b"some data")
        .link(b"d/link", b"../outside")
        .hard(b"d/hard", b"d/file")
        .pax(&[
            (b"path", b"d/pax"),
            (b"size", b"4"),
            (b"mtime", b"1.5"),
            (b"SCHILY.xattr.user.a", b"b"),
        ])
        .file(b"x", b"data")
        .long_name(b"d/a-long-name")
        .file(b"y", b"data")
        .header(b"fifo", b'6', 0, b"", 0o600)
        .end()
}

/// Returns mutated archives with correct checksums, so that they pass the first check.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let names: Vec<&[u8]> = vec![
        b"..",
        b"../outside",
        b"../outside/file",
        b"d/link",
        b"d/link/file",
        b"/",
        b".",
        b"d",
    ];
    let mutation = (
        0..14_usize,
        prop_oneof![Just(0_usize), Just(157), Just(156), Just(124), Just(345)],
        prop::sample::select(names),
        any::<u8>(),
    );
    (
        prop::collection::vec(mutation, 1..6),
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    )
        .prop_map(|(fields, bytes)| {
            let mut archive = seed();
            for (index, byte) in bytes {
                let at = index.index(archive.len());
                archive[at] = byte;
            }
            for (block, at, name, byte) in fields {
                let Some(block) = archive.chunks_exact_mut(512).nth(block) else {
                    continue;
                };
                match at {
                    156 => block[156] = b"0123456LKSxg"[usize::from(byte) % 12],
                    124 => block[124..135]
                        .copy_from_slice(format!("{:011o}", u32::from(byte) * 7).as_bytes()),
                    at => block[at..at + name.len()].copy_from_slice(name),
                }
            }
            for block in archive
                .chunks_exact_mut(512)
                .filter(|block| &block[257..262] == b"ustar")
            {
                block[148..156].copy_from_slice(b"        ");
                let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
                block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
            archive
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_archives_never_write_outside(archive in mutated()) {
        let place = Place::new();
        // Refused or not does not matter here; `unpack` checks what is outside.
        drop(place.unpack(&archive));
    }
}

proptest! {
    // The first checksum refuses nearly all noise.
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn noise_never_panics(archive in prop::collection::vec(any::<u8>(), 0..3000)) {
        drop(Place::new().unpack(&archive));
    }
}
