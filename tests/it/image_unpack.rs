//! Extraction against the attack catalogue (cases 1 to 6) and against GNU tar.

mod compared;
mod dialects;
mod entries;
mod foreign;
mod headers;
mod limits;
mod random;

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use rockenv::testing::error::{Kind, Result};
use rockenv::testing::unpack::{UnpackOptions, UnpackReport, unpack};

use crate::image_oci::place::{fails, names};

/// A directory to extract into, beside one that must never change.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs_err::create_dir(dir.path().join("root")).unwrap();
        fs_err::create_dir(dir.path().join("outside")).unwrap();
        fs_err::write(dir.path().join("outside/file"), "untouched").unwrap();
        Self { dir }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn unpack(&self, archive: &[u8]) -> Result<UnpackReport> {
        self.unpack_with(archive, &UnpackOptions::default())
    }

    fn unpack_with(&self, archive: &[u8], options: &UnpackOptions) -> Result<UnpackReport> {
        let outcome = unpack(
            archive,
            &self.root(),
            options,
            &AtomicBool::new(false),
            &mut |_| {},
        );
        self.assert_untouched();
        outcome
    }

    fn assert_untouched(&self) {
        let names: Vec<_> = fs_err::read_dir(self.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 2, "{names:?}");
        let inside: Vec<_> = fs_err::read_dir(self.outside())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(inside, ["file"]);
        assert_eq!(
            fs_err::read_to_string(self.outside().join("file")).unwrap(),
            "untouched"
        );
        assert_eq!(
            fs_err::metadata(self.outside()).unwrap().mode() & 0o7777,
            0o755
        );
        assert_eq!(
            fs_err::metadata(self.outside().join("file"))
                .unwrap()
                .nlink(),
            1
        );
    }

    fn names(&self) -> Vec<String> {
        names(&self.root())
    }
}

#[track_caller]
fn refused(outcome: Result<UnpackReport>, part: &str) {
    fails(outcome, Kind::Invalid, part);
}

/// Expects that a new place refuses the archive.
#[track_caller]
fn is_refused(archive: Tar, part: &str) {
    refused(Place::new().unpack(&archive.end()), part);
}

/// Writes archives byte by byte, so that they can contain what no archiver writes.
#[derive(Clone, Default)]
struct Tar(Vec<u8>);

impl Tar {
    fn header(self, name: &[u8], kind: u8, size: u64, link: &[u8], mode: u32) -> Self {
        let mut block = [0_u8; 512];
        block[..name.len()].copy_from_slice(name);
        let mut field =
            |at: usize, text: String| block[at..at + text.len()].copy_from_slice(text.as_bytes());
        field(100, format!("{mode:07o}"));
        field(108, "0000000".into());
        field(116, "0000000".into());
        field(124, format!("{size:011o}"));
        field(136, "14000000000".into());
        field(257, "ustar".into());
        field(263, "00".into());
        field(329, "0000001".into());
        field(337, "0000003".into());
        block[156] = kind;
        block[157..157 + link.len()].copy_from_slice(link);
        self.seal(block)
    }

    fn seal(mut self, mut block: [u8; 512]) -> Self {
        block[148..156].copy_from_slice(b"        ");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&block);
        self
    }

    fn data(mut self, data: &[u8]) -> Self {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &[u8], data: &[u8]) -> Self {
        self.header(name, b'0', data.len() as u64, b"", 0o644)
            .data(data)
    }

    fn dir(self, name: &[u8]) -> Self {
        self.header(name, b'5', 0, b"", 0o755)
    }

    fn link(self, name: &[u8], target: &[u8]) -> Self {
        self.header(name, b'2', 0, target, 0o777)
    }

    fn hard(self, name: &[u8], target: &[u8]) -> Self {
        self.header(name, b'1', 0, target, 0o644)
    }

    fn pax(self, records: &[(&[u8], &[u8])]) -> Self {
        self.pax_kind(b'x', records)
    }

    fn pax_kind(self, kind: u8, records: &[(&[u8], &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            data.extend_from_slice(format!("{length} ").as_bytes());
            data.extend_from_slice(key);
            data.push(b'=');
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.header(b"pax", kind, data.len() as u64, b"", 0o644)
            .data(&data)
    }

    fn long_name(self, name: &[u8]) -> Self {
        let data = [name, b"\0"].concat();
        self.header(b"././@LongLink", b'L', data.len() as u64, b"", 0o644)
            .data(&data)
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend_from_slice(&[0; 1024]);
        self.0
    }
}

fn tar() -> Tar {
    Tar::default()
}
