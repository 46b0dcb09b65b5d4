//! Owns guarding disk space while a step runs: a warning when it gets short, and a pause before it runs out, so that
//! hours of work do not end in a full disk.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::engine::hold::ContainerRecord;
use crate::plan::gc;
use crate::plan::gc::policy::{Policy, Table};
use crate::store::Store;
use crate::store::config::Config;
use crate::store::inventory::InventoryOptions;
use crate::sys::error::Result;
use crate::sys::host::{Space, lacks_inodes, space};
use crate::tree::FileSystem;
use crate::ui::size;

/// How often free space is checked.
const PERIOD: Duration = Duration::from_millis(250);
/// The same when space is short.
const SOON: Duration = Duration::from_millis(50);

/// Below this many free bytes, a failure is attributed to the full disk; at most a fiftieth of a file system.
const FULL: u64 = 32 << 20;

/// The messages of programs for a full disk, and for a full quota, such as that of a ZFS dataset. The file system
/// reports what is left of such a quota as its free space.
const FULL_TEXTS: [&str; 2] = ["No space left on device", "Disk quota exceeded"];

/// Thresholds in free bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Marks {
    /// Below this the step is paused.
    floor: u64,
    /// At or above this it resumes.
    resume: u64,
    /// Below this the user is warned.
    warn: u64,
    /// Below this the step counts as having filled the file system, if it took space there.
    full: u64,
}

impl Marks {
    /// Returns the thresholds for a file system of `total` bytes: as configured, but at most a fiftieth of it.
    fn new(floor: u64, total: u64) -> Self {
        let floor = floor.min(total / 50);
        Self {
            floor,
            resume: floor * 2,
            warn: floor * 5,
            full: FULL.min(total / 50),
        }
    }
}

/// A file system that the step may write to.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    marks: Marks,
    before: u64,
    now: u64,
    lowest: u64,
    warned: bool,
}

impl Place {
    /// Returns the free bytes; `None` if the place is gone or does not answer. A user may remove and recreate a
    /// directory while a step runs, which must neither end nor block hours of work.
    fn measure(&mut self) -> Option<u64> {
        self.now = space(&self.path).ok()?.free;
        self.lowest = self.lowest.min(self.now);
        Some(self.now)
    }

    /// Returns the peak of bytes used above the level at the start, written by any process.
    fn taken(&self) -> u64 {
        self.before - self.lowest
    }
}

/// A file system that a step filled.
#[derive(Debug)]
pub(crate) struct FullDisk {
    pub(crate) path: PathBuf,
    /// The peak of bytes used above the level at the start.
    pub(crate) taken: u64,
    /// Whether this is the store's file system, where `gc` frees space.
    pub(crate) is_store: bool,
}

/// The disk space of one step.
#[derive(Debug)]
pub(crate) struct DiskGuard {
    step: String,
    run: PathBuf,
    places: Vec<Place>,
    paused: bool,
    seen: Option<Instant>,
    /// Receives advice for the user.
    advice: Option<Receiver<String>>,
}

impl DiskGuard {
    /// Watches the file systems of `paths`, the store's first, for a step whose container has its state in `run`.
    pub(crate) fn new<'a>(
        step: &str,
        run: &Path,
        paths: impl Iterator<Item = &'a Path>,
        floor: u64,
    ) -> Result<Self> {
        let mut known = BTreeSet::new();
        let mut places = Vec::new();
        for path in paths {
            if known.insert(FileSystem::of(path)?) {
                let Space { free, total, .. } = space(path)?;
                places.push(Place {
                    path: path.to_owned(),
                    marks: Marks::new(floor, total),
                    before: free,
                    now: free,
                    lowest: free,
                    warned: false,
                });
            }
        }
        Ok(Self {
            step: step.to_owned(),
            run: run.to_owned(),
            places,
            paused: false,
            seen: None,
            advice: None,
        })
    }

    /// Pauses or resumes the step if a check is due. Returns whether the step is paused. `advice` starts to look for
    /// something that the user can do about too little space.
    pub(crate) fn check(
        &mut self,
        advice: &dyn Fn() -> Receiver<String>,
        warn: &mut dyn FnMut(String),
    ) -> bool {
        if self.seen.is_some_and(|seen| seen.elapsed() < self.period()) {
            return self.paused;
        }
        self.seen = Some(Instant::now());
        let (mut short, mut news) = (None, Vec::new());
        let mut resumes = true;
        for place in &mut self.places {
            let Some(free) = place.measure() else {
                continue;
            };
            let marks = place.marks;
            if free < marks.floor {
                short = Some((place.path.clone(), free, marks));
            }
            resumes &= free >= marks.resume;
            if free < marks.warn && !place.warned {
                place.warned = true;
                let left = size::bytes(free);
                news.push(format!("`{}` has {left} left", place.path.display()));
            } else if free > marks.warn * 2 {
                place.warned = false;
            }
        }
        match short {
            Some((path, free, marks)) if !self.paused && self.freeze(true) => {
                self.paused = true;
                news.push(format!(
                    "step `{}` is paused: `{}` has {} left; it resumes once {} are free",
                    self.step,
                    path.display(),
                    size::bytes(free),
                    size::bytes(marks.resume)
                ));
            }
            None if self.paused && resumes => {
                self.release();
                warn(format!("step `{}` resumes", self.step));
            }
            _ => {}
        }
        // `gc` frees nothing on other file systems.
        let store = self.places.first();
        let is_short = store.is_some_and(|store| store.now < store.marks.warn);
        if !news.is_empty() && is_short && self.advice.is_none() {
            self.advice = Some(advice());
        }
        news.into_iter().for_each(&mut *warn);
        if let Some(text) = self.advice.as_ref().and_then(|text| text.try_recv().ok()) {
            self.advice = None;
            warn(text);
        }
        self.paused
    }

    /// Returns how long to wait until the next check.
    pub(crate) fn period(&self) -> Duration {
        let mut places = self.places.iter();
        let short = places.any(|place| place.lowest < place.marks.warn * 2);
        if short { SOON } else { PERIOD }
    }

    /// Resumes a paused step regardless of free space, for example to end it.
    pub(crate) fn release(&mut self) {
        if std::mem::take(&mut self.paused) {
            self.freeze(false);
        }
    }

    /// Returns the peak of bytes used on the store's file system above the level at the start.
    pub(crate) fn taken(&self) -> u64 {
        self.places.first().map_or(0, Place::taken)
    }

    /// Returns the bytes in use on the store's file system at the last check above the level at the start.
    pub(crate) fn grown(&self) -> i64 {
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let store = self.places.first();
        store.map_or(0, |store| bytes(store.before) - bytes(store.now))
    }

    /// Returns the file system that the step filled, judged by the lowest free space or by the step's last lines: the
    /// space may be free again before the next check.
    pub(crate) fn filled<'a>(&self, mut tail: impl Iterator<Item = &'a str>) -> Option<FullDisk> {
        let says = tail.any(|line| FULL_TEXTS.iter().any(|text| line.contains(text)));
        let full = |place: &Place| {
            let Marks { warn, full, .. } = place.marks;
            match says {
                true => place.lowest < warn.max(full) || lacks_inodes(&place.path),
                false => place.lowest < full.min(place.before),
            }
        };
        let at = self.places.iter().position(full)?;
        let place = &self.places[at];
        Some(FullDisk {
            path: place.path.clone(),
            taken: place.taken(),
            is_store: at == 0,
        })
    }

    /// Checks the free space, without acting on it.
    pub(crate) fn measure(&mut self) {
        for place in &mut self.places {
            place.measure();
        }
    }

    fn freeze(&self, frozen: bool) -> bool {
        ContainerRecord::read(&self.run).is_some_and(|state| state.cgroup.freeze(frozen))
    }
}

impl Drop for DiskGuard {
    fn drop(&mut self) {
        self.release();
    }
}

/// Starts to estimate what `gc` could free in a store. That may take longer than the step needs to fill the disk.
pub(crate) fn advice(store: &Store, config: &Config) -> Receiver<String> {
    let (sender, advice) = channel();
    let (store, table) = (store.clone(), config.gc.clone());
    // The step may end first.
    let work = move || drop(sender.send(estimate(&store, &table)));
    // The step goes on without advice if its processes leave no room for a thread.
    drop(std::thread::Builder::new().spawn(work));
    advice
}

/// Returns what `gc` could free in a store.
fn estimate(store: &Store, table: &Table) -> String {
    let found = || -> Result<gc::Plan> {
        let policy = Policy::new(table, None)?;
        let limits = policy.limits(space(store.root())?.total);
        let options = InventoryOptions {
            caches: true,
            cache_max: policy.cache_max,
            ..InventoryOptions::default()
        };
        Ok(gc::plan(
            &store.gc_inventory(&options, limits.keep_last)?,
            &limits,
            None,
        ))
    };
    // An unreadable store must not end a step.
    match found() {
        Ok(plan) if plan.estimate + plan.spare > 0 => format!(
            "`rockenv gc` could free {}, and with `--free` {} more",
            size::bytes(plan.estimate),
            size::bytes(plan.spare)
        ),
        _ => "`rockenv gc` cannot free anything; `rockenv du` shows rockenv's disk use".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn marks_fit_the_file_system() {
        let gib = 1 << 30;
        let large = Marks::new(gib, 1000 * gib);
        assert_eq!((large.floor, large.resume), (gib, 2 * gib));
        assert_eq!(large.warn, 5 * gib);
        assert_eq!(Marks::new(gib, 5 * gib).floor, gib / 10);
        let off = Marks::new(0, gib);
        assert_eq!((off.floor, off.warn), (0, 0));
        assert_eq!(large.full, FULL);
        assert_eq!(Marks::new(gib, 30 << 20).full, (30 << 20) / 50);
    }

    #[test]
    fn a_place_that_is_gone_is_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mut guard = DiskGuard::new("s", path, std::iter::once(path), 0).unwrap();
        let before = guard.places[0].now;
        directory.close().unwrap();
        let none = || channel::<String>().1;
        assert!(!guard.check(&none, &mut |_| {}));
        assert_eq!(guard.places[0].now, before);
        // The place was full, and its removal made space.
        (guard.paused, guard.seen) = (true, None);
        guard.places[0].marks.resume = u64::MAX;
        assert!(!guard.check(&none, &mut |_| {}));
    }

    #[test]
    fn a_warning_does_not_wait_for_advice() {
        let path = Path::new("/");
        let mut guard = DiskGuard::new("s", path, std::iter::once(path), 0).unwrap();
        guard.places[0].marks.warn = u64::MAX / 2;
        let (sender, receiver) = channel();
        let advice = Cell::new(Some(receiver));
        let mut said = Vec::new();
        for text in ["", "free some"] {
            if !text.is_empty() {
                sender.send(text.to_owned()).unwrap();
            }
            guard.seen = None;
            guard.check(&|| advice.take().unwrap(), &mut |text| said.push(text));
            assert_has!(said[0], "`/` has ");
        }
        assert_eq!(said[1..], ["free some"]);
    }

    #[test]
    fn a_file_system_is_filled_by_what_was_taken_from_it() {
        let filled = |total: u64, before: u64, lowest: u64, line: &str| {
            let path = Path::new("/");
            let mut guard = DiskGuard::new("s", path, std::iter::once(path), 0).unwrap();
            let place = &mut guard.places[0];
            (place.before, place.lowest) = (before, lowest);
            place.marks = Marks::new(0, total);
            guard.filled([line].into_iter()).is_some()
        };
        let (mib, full) = (1 << 20, "x: No space left on device");
        assert!(!filled(30 * mib, 30 * mib, 29 * mib, ""));
        assert!(filled(30 * mib, 30 * mib, 0, ""));
        assert!(filled(1 << 40, 40 * mib, 31 * mib, ""));
        assert!(!filled(1 << 40, 31 * mib, 31 * mib, ""));
        assert!(filled(1 << 40, 31 * mib, 31 * mib, full));
        let quota = "x: Disk quota exceeded";
        assert!(filled(1 << 40, 31 * mib, 31 * mib, quota));
    }

    #[test]
    fn another_disk_does_not_count_towards_the_space_of_a_step() {
        let path = Path::new("/");
        let place = |before, lowest| Place {
            path: path.to_owned(),
            marks: Marks::new(0, 1 << 40),
            before,
            now: lowest,
            lowest,
            warned: false,
        };
        let mut guard = DiskGuard::new("s", path, std::iter::once(path), 0).unwrap();
        guard.places = vec![place(50 << 30, 49 << 30), place(9 << 30, 0)];
        assert_eq!((guard.taken(), guard.grown()), (1 << 30, 1 << 30));
        let full = guard.filled(std::iter::empty()).unwrap();
        assert_eq!((full.taken, full.is_store), (9 << 30, false));
        // `gc` frees nothing on a file system that is not the store's.
        guard.places[1].marks.warn = u64::MAX / 2;
        let mut said = Vec::new();
        guard.check(&|| panic!("no advice"), &mut |text| said.push(text));
        assert_eq!(said.len(), 1, "{said:?}");
    }
}
