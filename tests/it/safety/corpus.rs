//! The corpus of `fuzz/`: each input goes through its reader, without cargo-fuzz, within limits of time and memory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

use fs_err as fs;
use nix::sys::resource::{Resource, setrlimit};
use rockenv::testing::{READERS, Reader, fuzz};

/// Tells the child process, which is this program again, whose inputs to read.
const READER: &str = "ROCKENV_TEST_READER";
/// An input takes milliseconds, but the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(30);
/// Twice what the largest decompressor may ask for.
const MEMORY: u64 = 1 << 30;
/// The stack size of a program's first thread.
const STACK: usize = 8 << 20;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

#[test]
fn every_input_is_read_in_time_and_memory() {
    #[expect(
        clippy::disallowed_methods,
        reason = "a switch of the test, not of the program"
    )]
    if let Ok(name) = std::env::var(READER) {
        let reader = READERS.iter().find(|(reader, _)| *reader == name);
        return replay(reader.unwrap());
    }
    let mut known: Vec<_> = fs::read_dir(corpus())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    known.sort();
    assert_eq!(known, READERS.map(|(reader, _)| reader));
    let (_, module) = module_path!().split_once("::").unwrap();
    for (reader, _) in READERS {
        // Removes what a hanging input leaves behind.
        let scratch = tempfile::tempdir().unwrap();
        let replayed = Command::new(std::env::current_exe().unwrap())
            .args([
                format!("{module}::every_input_is_read_in_time_and_memory").as_str(),
                "--exact",
            ])
            .arg("--nocapture")
            .env(READER, reader)
            .env("TMPDIR", scratch.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&replayed.stderr);
        assert!(replayed.status.success(), "{reader}: {said}");
        assert!(said.lines().any(|line| line.contains(reader)), "{said}");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0, "{said}");
    }
}

/// Only `make fuzz` compiles `fuzz/`. This covers all that it needs of the program.
#[test]
fn every_reader_has_a_target() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/Cargo.toml");
    let manifest: toml::Table = fs::read_to_string(manifest).unwrap().parse().unwrap();
    let targets = manifest["bin"].as_array().unwrap().iter();
    let names: Vec<_> = targets.map(|bin| bin["name"].as_str().unwrap()).collect();
    assert_eq!(names, READERS.map(|(reader, _)| reader));
    let read: fn(&str, &[u8]) = fuzz;
    for name in names {
        read(name, b"");
    }
}

/// Gives a reader all its inputs, and prints each path first.
fn replay(&(name, read): &(&str, Reader)) {
    setrlimit(Resource::RLIMIT_AS, MEMORY, MEMORY).unwrap();
    let inputs = fs::read_dir(corpus().join(name)).unwrap();
    let mut inputs: Vec<_> = inputs.map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    let mut taken = 0;
    for path in inputs {
        eprintln!("{}", path.display());
        let input = fs::read(&path).unwrap();
        let (sender, ended) = channel();
        let thread = std::thread::Builder::new().stack_size(STACK);
        let read = move || sender.send(read(&input)).unwrap();
        drop(thread.spawn(read).unwrap());
        // A thread that panics drops the sender.
        match ended.recv_timeout(PATIENCE).unwrap() {
            Ok(()) => taken += 1,
            Err(error) => eprintln!("    {}", error.chain().join(": ")),
        }
    }
    assert!(taken > 0, "no input of {name} is read to its end");
}
