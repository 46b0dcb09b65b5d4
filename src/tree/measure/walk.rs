//! Owns the walk: reads directories, examines every entry once, and never leaves the mount it started on.
//!
//! Each entry costs one `statx` by name below an open directory, with the mask that the sums need; directories also
//! cost an open and their listing. An entry is examined before it is opened, so the walk triggers no automount and
//! queries no foreign file system.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, CString, OsStr};
use std::mem::MaybeUninit;
use std::num::NonZero;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, Statx, StatxFlags, openat, statx};
use rustix::io::Errno;

use super::extents::{Extents, Queried, QueryMethod, Spaces, Subvolume};
use super::links::{Link, Links};
use super::{DiskUsage, MeasureOptions, Root, Usage, errno};
use crate::sys::beneath;
use crate::tree::work_queue::Queue;

/// Buffer size of a listing call: one to two thousand entries.
const LISTING: usize = 64 * 1024;

/// How many directories stay open for their queued children. Beyond that, children are opened from further up, so that
/// no tree can exhaust the process's descriptors.
const OPEN_MAX: usize = 400;

/// Maximum length of a path to a child opened from further up; the kernel's limit is 4096.
const BELOW_MAX: usize = 3000;

/// Inode number of the top directory of every btrfs subvolume; elsewhere an ordinary number.
const SUBVOLUME_TOP: u64 = 256;

const WANTED: StatxFlags = StatxFlags::TYPE
    .union(StatxFlags::NLINK)
    .union(StatxFlags::INO)
    .union(StatxFlags::SIZE)
    .union(StatxFlags::BLOCKS)
    .union(StatxFlags::CTIME)
    .union(StatxFlags::MNT_ID);

const LIST_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// Where an entry is mounted. The mount id distinguishes bind mounts, and is the same across btrfs subvolumes. Kernels
/// before 5.8 do not report it, and the device number stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mount {
    Id(u64),
    Device(u64),
}

/// A descriptor that counts towards [`OPEN_MAX`].
#[derive(Debug)]
struct Open<'a> {
    fd: OwnedFd,
    count: &'a AtomicUsize,
}

impl<'a> Open<'a> {
    fn new(fd: OwnedFd, count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self { fd, count }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Dir<'a> {
    open: Arc<Open<'a>>,
    /// Path from `open` to the directory; empty unless descriptors ran short.
    below: Vec<u8>,
    path: PathBuf,
    root: u32,
    mount: Mount,
    /// The extents of all files in its subvolume, if they were read.
    subvolume: Option<Arc<Subvolume>>,
}

#[derive(Debug)]
enum Task<'a> {
    Root(u32),
    /// A child directory, itself already counted, and whether it may be the top of a subvolume.
    List(Arc<Dir<'a>>, CString, bool),
    /// Null-terminated names of entries to examine: a part of a large directory.
    Stat(Arc<Dir<'a>>, Vec<u8>),
}

/// A subvolume that may contain several roots: read once, and dropped after the last of them.
#[derive(Debug, Default)]
struct Whole(Mutex<Reading>);

#[derive(Debug, Default)]
struct Reading {
    /// Roots in the subvolume that are not walked yet.
    roots: usize,
    /// The extents, once read; the inner `None` means that reading failed.
    read: Option<Option<Arc<Subvolume>>>,
}

impl Whole {
    fn take(&self, read: impl FnOnce() -> Option<Arc<Subvolume>>) -> Option<Arc<Subvolume>> {
        let mut reading = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let subvolume = reading.read.get_or_insert_with(read).clone();
        reading.roots = reading.roots.saturating_sub(1);
        if reading.roots == 0 {
            reading.read = None;
        }
        subvolume
    }
}

struct Shared<'a> {
    roots: &'a [Root],
    /// Maps a root's position to its class's.
    class_of: Vec<usize>,
    /// How to query the files of each root for sharing.
    methods: Vec<Option<QueryMethod>>,
    /// Subvolumes whose top is a root, by device.
    wholes: HashMap<u64, Whole>,
    /// Device and inode of roots that another root can reach.
    known: HashMap<(u64, u64), u32>,
    /// Whether some root is a file: then files are looked up in `known` too.
    file_roots: bool,
    open: &'a AtomicUsize,
    open_max: usize,
    queue: Queue<Task<'a>>,
}

struct Worker<'s, 'a> {
    shared: &'s Shared<'a>,
    stack: Vec<Task<'a>>,
    listing: Box<[MaybeUninit<u8>]>,
    sums: Vec<DiskUsage>,
    links: Links,
    extents: Extents,
    found: Usage,
}

/// Measures the trees. Unreadable entries are reported in the result and do not cause a failure.
pub fn scan(roots: &[Root], options: &MeasureOptions) -> Usage {
    let mut classes: Vec<u32> = roots.iter().map(|root| root.class).collect();
    classes.sort_unstable();
    classes.dedup();
    let class_of = roots
        .iter()
        .map(|root| classes.partition_point(|class| *class < root.class))
        .collect();

    let mut usage = Usage::default();
    let mut known = HashMap::new();
    let mut file_roots = false;
    let mut tasks = Vec::new();
    let mut spaces = Spaces::default();
    let mut methods = vec![None; roots.len()];
    let mut devices = Vec::new();
    let mut wholes: HashMap<u64, Whole> = HashMap::new();
    for (at, root) in (0..).zip(roots) {
        match stat_path(&root.path) {
            Err(error) => usage.problem(|| root.path.clone(), error.into()),
            // The pass over all hard links handles a file's other names.
            Ok(stat) if !is_dir(&stat) && stat.stx_nlink > 1 => tasks.push(Task::Root(at)),
            Ok(stat) => {
                file_roots |= !is_dir(&stat);
                if let Entry::Vacant(slot) = known.entry(key(&stat)) {
                    slot.insert(at);
                    tasks.push(Task::Root(at));
                    if options.extents
                        && is_dir(&stat)
                        && let Ok(fd) = openat(CWD, &root.path, LIST_FLAGS, Mode::empty())
                    {
                        methods[at as usize] = spaces.query_method(fd.as_fd(), device(&stat));
                        devices.push(device(&stat));
                        if stat.stx_ino == SUBVOLUME_TOP {
                            wholes.entry(device(&stat)).or_default();
                        }
                    }
                }
            }
        }
    }

    for device in devices {
        if let Some(Whole(reading)) = wholes.get_mut(&device) {
            let reading = reading.get_mut().unwrap_or_else(PoisonError::into_inner);
            reading.roots += 1;
        }
    }

    let threads = options.threads.map_or_else(default_threads, NonZero::get);
    let open = AtomicUsize::new(0);
    let open_max = getrlimit(Resource::RLIMIT_NOFILE)
        .map_or(OPEN_MAX, |(soft, _)| OPEN_MAX.min((soft / 2) as usize));
    let shared = Shared {
        roots,
        class_of,
        methods,
        wholes,
        known,
        file_roots,
        open: &open,
        open_max,
        queue: Queue::new(),
    };
    shared.queue.push(tasks);
    let mut sums = vec![DiskUsage::default(); classes.len()];
    let mut links = Links::new();
    let mut extents = Extents::new();
    let start = || Worker::new(&shared, classes.len());
    let gather = |worker: Worker<'_, '_>| {
        for (sums, part) in sums.iter_mut().zip(&worker.sums) {
            *sums += *part;
        }
        links.append(worker.links);
        usage.unshared += worker.extents.squeezed;
        extents.append(worker.extents);
        usage.add(worker.found);
    };
    shared
        .queue
        .run_on(threads, start, |task, worker| worker.run(task), gather);
    let owner_of: Vec<u32> = roots.iter().map(|root| root.owner).collect();
    links.add_to_classes(&shared.class_of, &owner_of, &mut sums);
    extents.add_to_classes(&shared.class_of, &owner_of, &mut sums);
    usage.classes = classes.into_iter().zip(sums).collect();
    usage
}

/// Twice the processors: with a warm cache the surplus costs nothing measurable, and with a cold one it gives the disk
/// more requests to choose from.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| (cores.get() * 2).min(32))
}

impl<'s, 'a> Worker<'s, 'a> {
    fn new(shared: &'s Shared<'a>, classes: usize) -> Self {
        Self {
            shared,
            stack: Vec::new(),
            listing: Box::new_uninit_slice(LISTING),
            sums: vec![DiskUsage::default(); classes],
            links: Links::new(),
            extents: Extents::new(),
            found: Usage::default(),
        }
    }

    /// Works on a task and its subtasks. Uses only the thread's own stack unless another thread is idle, so the usual
    /// case takes no lock, and the walk is depth first, which keeps few directories waiting.
    fn run(&mut self, task: Task<'a>) {
        let mut listing = std::mem::take(&mut self.listing);
        self.stack.push(task);
        while let Some(task) = self.stack.pop() {
            match task {
                Task::Root(root) => self.root(root, &mut listing),
                Task::List(parent, name, top) => self.child(&parent, &name, top, &mut listing),
                Task::Stat(dir, names) => self.batch(&dir, &names),
            }
            self.share();
        }
        self.listing = listing;
    }

    /// Gives the older half of the stack, which is the larger part of the tree, to idle workers.
    fn share(&mut self) {
        if self.stack.len() > 1 && self.shared.queue.has_idle_thread() {
            let half = self.stack.len() / 2;
            self.shared.queue.push(self.stack.drain(..half));
        }
    }

    fn root(&mut self, root: u32, listing: &mut [MaybeUninit<u8>]) {
        let path = &self.shared.roots[root as usize].path;
        let stat = match stat_path(path) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => {
                self.found.vanished += 1;
                return;
            }
            Err(error) => return self.found.problem(|| path.clone(), error.into()),
        };
        self.count(root, &stat, stat.stx_blocks * 512);
        if !is_dir(&stat) {
            return;
        }
        match openat(CWD, path, LIST_FLAGS, Mode::empty()) {
            Ok(fd) => {
                let open = Arc::new(Open::new(fd, self.shared.open));
                let dir = Arc::new(Dir {
                    open: Arc::clone(&open),
                    below: Vec::new(),
                    path: path.clone(),
                    root,
                    mount: mount(&stat),
                    subvolume: self
                        .shared
                        .wholes
                        .get(&device(&stat))
                        .and_then(|whole| whole.take(|| self.subvolume(root, open.fd.as_fd()))),
                });
                self.list(&dir, open.fd.as_fd(), listing);
            }
            Err(error) => self.found.problem(|| path.clone(), error.into()),
        }
    }

    fn child(&mut self, parent: &Dir<'a>, name: &CStr, top: bool, listing: &mut [MaybeUninit<u8>]) {
        let mut below = parent.below.clone();
        let opened = if below.is_empty() {
            openat(&parent.open.fd, name, LIST_FLAGS, Mode::empty())
        } else {
            below.push(b'/');
            below.extend_from_slice(name.to_bytes());
            beneath::open_dir(&parent.open.fd, &below[..]).map_err(errno)
        };
        let path = || parent.path.join(OsStr::from_bytes(name.to_bytes()));
        let fd = match opened {
            Ok(fd) => fd,
            // The entry was removed or replaced after it was listed.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                self.found.vanished += 1;
                return;
            }
            Err(Errno::XDEV) => {
                self.found.mounts_skipped += 1;
                return;
            }
            Err(error) => return self.found.problem(path, error.into()),
        };
        let open = Arc::new(Open::new(fd, self.shared.open));
        let short = self.shared.open.load(Ordering::Relaxed) > self.shared.open_max;
        if short && below.is_empty() {
            below.extend_from_slice(name.to_bytes());
        }
        let reach = short && below.len() < BELOW_MAX;
        let dir = Arc::new(Dir {
            open: Arc::clone(if reach { &parent.open } else { &open }),
            below: if reach { below } else { Vec::new() },
            path: path(),
            root: parent.root,
            mount: parent.mount,
            subvolume: if top {
                self.subvolume(parent.root, open.fd.as_fd())
            } else {
                parent.subvolume.clone()
            },
        });
        self.list(&dir, open.fd.as_fd(), listing);
    }

    fn list(&mut self, dir: &Arc<Dir<'a>>, fd: BorrowedFd<'_>, listing: &mut [MaybeUninit<u8>]) {
        let mut entries = RawDir::new(fd, listing);
        let mut names = Vec::new();
        let mut first = true;
        let mut handing = false;
        loop {
            if entries.is_buffer_empty() {
                self.hand(dir, &mut names);
                // Idle workers get one listing call's worth of a large directory at a time: otherwise a single thread
                // would have to process a million files.
                handing = !first && dir.below.is_empty() && self.shared.queue.has_idle_thread();
                first = false;
            }
            match entries.next() {
                None => break,
                Some(Ok(entry)) => {
                    let name = entry.file_name();
                    if name == c"." || name == c".." {
                        continue;
                    }
                    if handing {
                        names.extend_from_slice(name.to_bytes_with_nul());
                    } else {
                        self.entry(dir, fd, name);
                    }
                }
                Some(Err(Errno::NOENT)) => break,
                Some(Err(error)) => {
                    self.found.problem(|| dir.path.clone(), error.into());
                    break;
                }
            }
        }
        self.hand(dir, &mut names);
    }

    fn hand(&self, dir: &Arc<Dir<'a>>, names: &mut Vec<u8>) {
        if !names.is_empty() {
            let names = std::mem::take(names);
            self.shared.queue.push([Task::Stat(Arc::clone(dir), names)]);
        }
    }

    fn batch(&mut self, dir: &Arc<Dir<'a>>, mut names: &[u8]) {
        while let Ok(name) = CStr::from_bytes_until_nul(names) {
            self.entry(dir, dir.open.fd.as_fd(), name);
            names = &names[name.count_bytes() + 1..];
        }
    }

    fn entry(&mut self, dir: &Arc<Dir<'a>>, fd: BorrowedFd<'_>, name: &CStr) {
        let stat = match stat_at(fd, name) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => {
                self.found.vanished += 1;
                return;
            }
            Err(error) => {
                let path = || dir.path.join(OsStr::from_bytes(name.to_bytes()));
                return self.found.problem(path, error.into());
            }
        };
        let is_dir = is_dir(&stat);
        // A file's device alone proves nothing: overlayfs shows the devices of its layers.
        let elsewhere = match mount(&stat) {
            Mount::Device(_) if !is_dir => false,
            mount => mount != dir.mount,
        };
        if elsewhere {
            self.found.mounts_skipped += 1;
            return;
        }
        if (is_dir && self.shared.known.len() > 1)
            || (self.shared.file_roots && stat.stx_nlink == 1)
        {
            // A root of its own counts for itself.
            if self.shared.known.contains_key(&key(&stat)) {
                return;
            }
        }
        let allocated = self.own_bytes(dir, fd, name, &stat);
        self.count(dir.root, &stat, allocated);
        if is_dir {
            let (name, is_top) = (name.to_owned(), stat.stx_ino == SUBVOLUME_TOP);
            self.stack.push(Task::List(Arc::clone(dir), name, is_top));
        }
    }

    fn subvolume(&self, root: u32, fd: BorrowedFd<'_>) -> Option<Arc<Subvolume>> {
        Extents::load(self.shared.methods[root as usize], fd).map(Arc::new)
    }

    /// Returns the disk space of an entry, without the extents that the pass at the end assigns.
    fn own_bytes(&mut self, dir: &Dir<'a>, fd: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> u64 {
        let all = stat.stx_blocks * 512;
        let Some(method) = self.shared.methods[dir.root as usize] else {
            return all;
        };
        if all == 0 || !method.place(kind(stat)) {
            return all;
        }
        let subvolume = dir.subvolume.as_deref();
        let file = Queried {
            directory: fd,
            name,
            stat,
            root: dir.root,
        };
        match self.extents.query(method, file, subvolume) {
            Ok(own) => own,
            Err(Errno::NOENT) => all,
            Err(_) => {
                self.found.unshared += 1;
                all
            }
        }
    }

    fn count(&mut self, root: u32, stat: &Statx, allocated: u64) {
        let changed = stat.stx_ctime;
        let changed = changed.tv_sec * 1_000_000_000 + i64::from(changed.tv_nsec);
        self.found.newest_change = self.found.newest_change.max(changed);
        let kind = kind(stat);
        let apparent = match kind {
            FileType::RegularFile | FileType::Symlink => stat.stx_size,
            _ => 0,
        };
        if stat.stx_nlink > 1 && kind != FileType::Directory {
            let (device, inode) = key(stat);
            self.links.push(Link {
                device,
                inode,
                root,
                seen: 1,
                names: stat.stx_nlink,
                apparent,
                allocated,
            });
            return;
        }
        let sums = &mut self.sums[self.shared.class_of[root as usize]];
        sums.entries += 1;
        sums.apparent += apparent;
        sums.allocated += allocated;
        sums.exclusive += allocated;
    }
}

fn stat_at(fd: BorrowedFd<'_>, name: &CStr) -> Result<Statx, Errno> {
    // A network file system's cached values are good enough for a sum.
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    statx(fd, name, flags, WANTED)
}

fn stat_path(path: &Path) -> Result<Statx, Errno> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    stat_at(CWD, &path)
}

fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn is_dir(stat: &Statx) -> bool {
    kind(stat) == FileType::Directory
}

fn key(stat: &Statx) -> (u64, u64) {
    (device(stat), stat.stx_ino)
}

fn device(stat: &Statx) -> u64 {
    u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor)
}

fn mount(stat: &Statx) -> Mount {
    if stat.stx_mask & StatxFlags::MNT_ID.bits() != 0 {
        Mount::Id(stat.stx_mnt_id)
    } else {
        Mount::Device(device(stat))
    }
}
