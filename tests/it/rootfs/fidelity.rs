//! What clones, snapshots and frozen layers must preserve, up to ninja finding no work.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::stat::{Mode, SFlag, UtimensatFlags, makedev, mknod, utimensat};
use nix::sys::time::TimeSpec;
use rockenv::testing::{
    Method, btrfs, clone_tree, copy_tree, create_tree, flatten, overlay, remove_tree,
};

use super::walk::{What, assert_same, walk};
use crate::support::loopfs::{Kind, LoopFs, Mount, bind, run};

const EXACT: What = What {
    blocks: true,
    link_counts: true,
};
/// A copied file may have other blocks. `assert_holes` checks its holes.
const COPIED: What = What {
    blocks: false,
    link_counts: true,
};

/// Fills a directory with everything that a copy easily loses.
fn fill(tree: &Path) {
    for directory in ["a/b/empty", "c", "sticky", "setgid", "acl"] {
        fs_err::create_dir_all(tree.join(directory)).unwrap();
    }
    fs_err::write(tree.join("a/file"), "content").unwrap();
    for link in ["a/same-directory", "a/b/deeper", "c/across", "z"] {
        fs_err::hard_link(tree.join("a/file"), tree.join(link)).unwrap();
    }
    fs_err::write(
        tree.join(OsStr::from_bytes(b"c/\xff not \\ utf-8\n")),
        vec![3; 70_000],
    )
    .unwrap();
    fs_err::write(tree.join("c/empty"), "").unwrap();
    fs_err::write(tree.join("c/program"), "#!/bin/sh\n").unwrap();
    fs_err::write(tree.join("c/capable"), "x").unwrap();
    sparse(&tree.join("sparse"));
    symlink("a/file", tree.join("link")).unwrap();
    symlink("/absolute/nowhere", tree.join("c/dangling")).unwrap();
    fs_err::hard_link(tree.join("c/dangling"), tree.join("dangling-too")).unwrap();
    let all = Mode::from_bits_truncate(0o640);
    mknod(&tree.join("fifo"), SFlag::S_IFIFO, all, 0).unwrap();
    mknod(&tree.join("socket"), SFlag::S_IFSOCK, all, 0).unwrap();
    mknod(&tree.join("c/char"), SFlag::S_IFCHR, all, makedev(1, 3)).unwrap();
    mknod(
        &tree.join("c/block"),
        SFlag::S_IFBLK,
        all,
        makedev(259, 70_000),
    )
    .unwrap();
    fs_err::hard_link(tree.join("fifo"), tree.join("c/fifo-too")).unwrap();
    let shell = r"
        chown -h 1234:70000 a/file c/empty a/b link fifo c/char socket c/dangling
        chown 1:2 c/program
        chmod 6755 c/program; chmod 1777 sticky; chmod 2775 setgid; chmod 000 c/empty a/b/empty
        chmod 0444 a/file
        setfattr -n user.note -v text a/file c a/b/empty
        setfattr -n trusted.secret -v 0x00ff00 a/file acl .
        setfattr -h -n trusted.onlink -v text link
        setfattr -n trusted.onfifo -v text fifo
        setcap cap_net_raw,cap_sys_admin+ep c/capable
        setfacl -m u:1234:rw,g:70000:r c/capable
        setfacl -d -m u:4321:rwx acl
        echo inherited > acl/below
        mkdir acl/below-too
    ";
    run(Command::new("sh").args(["-euc", shell]).current_dir(tree));
    // Sets times last, directories after their contents, each different to the nanosecond.
    let mut paths: Vec<PathBuf> = walk(tree, COPIED).into_keys().collect();
    paths.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
    for (n, path) in paths.iter().enumerate() {
        let time = TimeSpec::new(1_000_000_000 + 86_399 * n as i64, 123_456_789 + n as i64);
        let full = if path.as_os_str().is_empty() {
            tree.to_owned()
        } else {
            tree.join(path)
        };
        let flag = UtimensatFlags::NoFollowSymlink;
        utimensat(nix::fcntl::AT_FDCWD, &full, &time, &time, flag).unwrap();
    }
}

/// Writes a 10 GB file with three pieces of data: at the start, in the middle, just before the end.
fn sparse(path: &Path) {
    use std::os::unix::fs::FileExt as _;
    let file = fs_err::File::create(path).unwrap();
    file.set_len(10 << 30).unwrap();
    for offset in [0, 5 << 30, (10 << 30) - 70_000] {
        file.file().write_all_at(&[9; 65_536], offset).unwrap();
    }
}

/// Fails unless the tree has everything that is to be compared.
fn assert_complete(tree: &Path) {
    let lines = walk(tree, COPIED);
    let all = format!("{lines:?}");
    for part in [
        "user.note",
        "trusted.secret",
        "trusted.onlink",
        "trusted.onfifo",
        "security.capability",
        "system.posix_acl_access",
        "system.posix_acl_default",
        "5 links",
        "device 103",
        "10737418240 bytes",
    ] {
        assert!(all.contains(part), "{part} in {all}");
    }
}

fn assert_holes(tree: &Path) {
    let blocks = fs_err::metadata(tree.join("sparse")).unwrap().blocks();
    assert!((3 * 128..1024).contains(&blocks), "{blocks} blocks");
}

#[test]
fn clones_keep_everything() {
    for (kind, method, what) in [
        (Kind::Btrfs, Method::Btrfs, EXACT),
        (Kind::Btrfs, Method::Reflink, EXACT),
        (Kind::Xfs, Method::Reflink, COPIED),
        (Kind::Ext4, Method::Overlay, COPIED),
    ] {
        let about = format!("{method} on {kind:?}");
        let fs = LoopFs::sized(kind, 1 << 30);
        let (tree, clone) = (fs.join("tree"), fs.join("clone"));
        create_tree(method, &tree).unwrap();
        fill(&tree);
        assert_complete(&tree);
        // File systems allocate blocks when data is written out.
        run(Command::new("sync").arg("-f").arg(fs.path()));
        let before = walk(&tree, what);
        let copied = clone_tree(method, &tree, &clone).unwrap();
        run(Command::new("sync").arg("-f").arg(fs.path()));
        assert_same(&before, &walk(&clone, what), &about);
        assert_same(&before, &walk(&tree, what), &about);
        assert_holes(&clone);
        assert_eq!(copied > 0, method == Method::Overlay, "{about}");
        // Two subvolumes count as different if neither is a snapshot of the other.
        assert!(method != Method::Btrfs || !btrfs::differs(&clone, &tree).unwrap());
        // The clone is independent of its source, and the source of it.
        fs_err::write(clone.join("c/program"), "changed").unwrap();
        assert_same(&before, &walk(&tree, what), &about);
        remove_tree(&tree).unwrap();
        assert_eq!(
            fs_err::read_to_string(clone.join("a/file")).unwrap(),
            "content"
        );
        remove_tree(&clone).unwrap();
    }
}

#[test]
fn a_copy_to_another_file_system_keeps_everything() {
    let from = LoopFs::sized(Kind::Xfs, 512 << 20);
    let tree = from.join("tree");
    fs_err::create_dir(&tree).unwrap();
    fill(&tree);
    for kind in Kind::ALL {
        let to = LoopFs::sized(kind, 512 << 20);
        let copy = to.join("copy");
        let copied = copy_tree(&tree, &copy).unwrap();
        assert!((266_000..290_000).contains(&copied), "{copied}");
        assert_same(&walk(&tree, COPIED), &walk(&copy, COPIED), kind.name());
        assert_holes(&copy);
    }
}

#[test]
fn a_plain_directory_becomes_a_subvolume() {
    let fs = LoopFs::sized(Kind::Btrfs, 512 << 20);
    let (tree, clone) = (fs.join("tree"), fs.join("clone"));
    fs_err::create_dir(&tree).unwrap();
    fill(&tree);
    assert_eq!(clone_tree(Method::Btrfs, &tree, &clone).unwrap(), 0);
    assert!(btrfs::is_subvolume(&clone).unwrap());
    assert_same(&walk(&tree, COPIED), &walk(&clone, COPIED), "subvolume");
    // As systemd-tmpfiles does in a subvolume that is its root.
    let (nested, again) = (clone.join("a/machines"), fs.join("again"));
    btrfs::create(&nested).unwrap();
    fs_err::set_permissions(&nested, PermissionsExt::from_mode(0o700)).unwrap();
    fs_err::write(nested.join("file"), "content").unwrap();
    clone_tree(Method::Btrfs, &clone, &again).unwrap();
    assert_same(&walk(&clone, COPIED), &walk(&again, COPIED), "nested");
    assert!(!btrfs::is_subvolume(&again.join("a/machines")).unwrap());
    let last = fs.join("last");
    clone_tree(Method::Btrfs, &again, &last).unwrap();
    assert!(!btrfs::differs(&last, &again).unwrap());
}

#[test]
fn a_copy_takes_neither_the_defaults_of_its_place_nor_what_is_mounted_inside() {
    let fs = LoopFs::sized(Kind::Ext4, 256 << 20);
    let (tree, place, other) = (fs.join("tree"), fs.join("place"), fs.join("other"));
    for directory in [&tree, &place, &other] {
        fs_err::create_dir(directory).unwrap();
    }
    fs_err::create_dir(tree.join("mounted")).unwrap();
    fs_err::write(tree.join("file"), "").unwrap();
    fs_err::create_dir(tree.join("directory")).unwrap();
    fs_err::write(other.join("foreign"), "").unwrap();
    run(Command::new("setfacl")
        .args(["-d", "-m", "u:1:rwx,g:2:rwx"])
        .arg(&place));
    fs_err::set_permissions(&place, PermissionsExt::from_mode(0o2777)).unwrap();
    let copy = place.join("copy");
    copy_tree(&tree, &copy).unwrap();
    assert_same(&walk(&tree, EXACT), &walk(&copy, EXACT), "acl");
    let error = copy_tree(&tree, &copy).unwrap_err();
    assert!(error.message().contains("place/copy"), "{error}");
    let _mount = bind(&other, &tree.join("mounted"));
    let copy = place.join("copy-2");
    copy_tree(&tree, &copy).unwrap();
    assert_eq!(fs_err::read_dir(copy.join("mounted")).unwrap().count(), 0);
}

/// Does what an env on an overlay does: writes a layer, freezes it by renaming, starts again on top of it.
#[test]
fn a_frozen_layer_keeps_everything() {
    for kind in Kind::ALL {
        let fs = LoopFs::sized(kind, 1 << 30);
        let image = fs.join("image");
        fs_err::create_dir(&image).unwrap();
        fs_err::set_permissions(&image, PermissionsExt::from_mode(0o711)).unwrap();
        let mount = Stack::new(&fs, vec![image.clone()]).mount("one");
        assert_eq!(
            fs_err::metadata(fs.join("at")).unwrap().mode() & 0o7777,
            0o711
        );
        fs_err::create_dir(fs.join("at/tree")).unwrap();
        fill(&fs.join("at/tree"));
        let before = walk(&fs.join("at/tree"), COPIED);
        drop(mount);
        fs_err::rename(fs.join("one"), fs.join("frozen")).unwrap();
        let stack = Stack::new(&fs, vec![fs.join("frozen"), image]);
        let _mount = stack.mount("two");
        assert_same(&before, &walk(&fs.join("at/tree"), COPIED), kind.name());
        assert_holes(&fs.join("at/tree"));
    }
}

/// Lower directories, mounted at `at` of a file system with an upper directory of any name.
struct Stack<'a> {
    fs: &'a LoopFs,
    lowers: Vec<PathBuf>,
}

impl<'a> Stack<'a> {
    fn new(fs: &'a LoopFs, lowers: Vec<PathBuf>) -> Self {
        Self { fs, lowers }
    }

    fn mount(&self, upper: &str) -> Mount {
        let (diff, work) = (self.fs.join(upper), self.fs.join(format!("{upper}.work")));
        let upper = overlay::Upper {
            diff: &diff,
            work: &work,
        };
        overlay::create_upper(upper, &self.lowers[0]).unwrap();
        assert!(overlay::is_clean(&diff).unwrap());
        let at = self.fs.join("at");
        let _ = fs_err::create_dir(&at).is_ok();
        overlay::mount(&self.lowers, Some(upper), &at).unwrap();
        Mount(at)
    }
}

/// Writes a C project with rules that tempt ninja to rebuild: dependency files, restat, generated headers, hard-linked
/// copies of outputs.
fn project(at: &Path) {
    fs_err::create_dir_all(at.join("src")).unwrap();
    let mut ninja = String::from(concat!(
        "rule cc\n  command = gcc -MD -MF $out.d -Isrc -Igen -c $in -o $out\n  depfile = $out.d\n  deps = gcc\n",
        "rule cc-file\n  command = gcc -MD -MF $out.d -Isrc -Igen -c $in -o $out\n  depfile = $out.d\n",
        "rule ar\n  command = rm -f $out && ar rcs $out $in\n",
        "rule link\n  command = gcc -o $out $in\n",
        "rule install\n  command = mkdir -p dist && ln -f $in $out\n",
        "rule gen\n  command = mkdir -p gen && echo '#define N 20' > $out.new && (cmp -s $out.new $out || cp $out.new $out)\n  restat = 1\n",
        "build gen/config.h: gen src/config.in\n",
    ));
    fs_err::write(at.join("src/config.in"), "20\n").unwrap();
    fs_err::write(
        at.join("src/common.h"),
        "#include \"config.h\"\nint f(int);\n",
    )
    .unwrap();
    let mut objects = String::new();
    let mut main = String::from("#include <stdio.h>\n#include \"common.h\"\n");
    for n in 0..20 {
        let text = format!("#include \"common.h\"\nint f{n}(void) {{ return N + {n}; }}\n");
        fs_err::write(at.join(format!("src/f{n}.c")), text).unwrap();
        let rule = if n % 2 == 0 { "cc" } else { "cc-file" };
        writeln!(ninja, "build obj/f{n}.o: {rule} src/f{n}.c || gen/config.h").unwrap();
        write!(objects, " obj/f{n}.o").unwrap();
        writeln!(main, "int f{n}(void);").unwrap();
    }
    main += "int main(void) { printf(\"%d\\n\", f0() + f19()); return 0; }\n";
    fs_err::write(at.join("src/main.c"), main).unwrap();
    writeln!(ninja, "build libf.a: ar{objects}").unwrap();
    ninja +=
        "build obj/main.o: cc src/main.c || gen/config.h\nbuild program: link obj/main.o libf.a\n";
    ninja += "build dist/program: install program\nbuild dist/libf.a: install libf.a\n";
    fs_err::write(at.join("build.ninja"), ninja).unwrap();
}

fn ninja(at: &Path) -> String {
    run(Command::new("ninja").arg("-C").arg(at))
}

fn assert_no_work(at: &Path, about: &str) {
    let said = run(Command::new("ninja")
        .args(["-n", "-d", "explain", "-C"])
        .arg(at));
    assert!(said.contains("no work to do"), "{about}: {said}");
}

#[test]
fn ninja_finds_no_work_after_snapshot_and_rollback() {
    for (kind, method) in [
        (Kind::Btrfs, Method::Btrfs),
        (Kind::Xfs, Method::Reflink),
        (Kind::Ext4, Method::Reflink),
    ] {
        let about = format!("{method} on {kind:?}");
        let fs = LoopFs::sized(kind, 512 << 20);
        let (build, snapshot) = (fs.join("build"), fs.join("snapshot"));
        create_tree(method, &build)
            .or_else(|_| create_tree(Method::Reflink, &build))
            .unwrap();
        project(&build);
        assert!(ninja(&build).contains("dist/libf.a"));
        assert_no_work(&build, &about);
        clone_tree(method, &build, &snapshot).unwrap();
        assert_no_work(&snapshot, &about);
        // Damages the volume, then rolls back: the snapshot replaces the volume.
        fs_err::write(build.join("src/common.h"), "#error broken\n").unwrap();
        remove_tree(&build.join("obj")).unwrap();
        let aside = fs.join("aside");
        fs_err::rename(&build, &aside).unwrap();
        clone_tree(method, &snapshot, &build).unwrap();
        remove_tree(&aside).unwrap();
        assert_no_work(&build, &about);
        // Control: one changed file rebuilds one object, one archive, one program and two links.
        fs_err::write(build.join("src/f3.c"), "int f3(void) { return 3; }\n").unwrap();
        assert!(ninja(&build).contains("[5/5]"), "{about}");
    }
}

#[test]
fn ninja_finds_no_work_on_a_frozen_layer() {
    for kind in Kind::ALL {
        let fs = LoopFs::sized(kind, 512 << 20);
        let image = fs.join("image");
        fs_err::create_dir(&image).unwrap();
        let build = fs.join("at/build");
        let mount = Stack::new(&fs, vec![image.clone()]).mount("one");
        fs_err::create_dir(&build).unwrap();
        project(&build);
        ninja(&build);
        drop(mount);
        let mut stack = Stack::new(&fs, vec![fs.join("one"), image]);
        let mount = stack.mount("two");
        assert_no_work(&build, kind.name());
        fs_err::write(build.join("src/f3.c"), "int f3(void) { return 3; }\n").unwrap();
        ninja(&build);
        assert_no_work(&build, kind.name());
        drop(mount);
        // Rolls back: the stack leaves the layer out.
        remove_tree(&fs.join("two")).unwrap();
        let mount = stack.mount("three");
        assert_no_work(&build, kind.name());
        fs_err::remove_file(build.join("program")).unwrap();
        ninja(&build);
        drop(mount);
        // Merges two layers into one.
        let flat = fs.join("flat");
        let layers = [fs.join("one"), fs.join("three")];
        flatten(&stack.lowers[1..], &layers, &flat).unwrap();
        stack.lowers[0] = flat;
        let _mount = stack.mount("four");
        assert_no_work(&build, kind.name());
    }
}
