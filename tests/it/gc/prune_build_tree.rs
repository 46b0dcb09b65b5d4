//! Sub-projects of TheRock: `gc` removes the same files as TheRock's `+expunge`, but only if an artifact holds the
//! result.

use std::path::PathBuf;

use fs_err as fs;

use super::{MIB, json, killed_at, names};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};

/// A tree in TheRock's layout: `rocBLAS` and `rocSPARSE` are in an artifact, `half` is in none.
const TREE: &str = r#"
set -e
cd /build
echo 'CMAKE_PROJECT_NAME:STATIC=THEROCK' > CMakeCache.txt
for p in math-libs/rocBLAS math-libs/rocSPARSE base/half; do
    mkdir -p $p/build $p/stage/lib $p/dist/lib $p/stamp
    head -c 6M /dev/urandom > $p/build/object.o
    printf '# ninja log v5\n0\t90000\t1\tobject.o\tff\n' > $p/build/.ninja_log
    head -c 4M /dev/urandom > $p/stage/lib/lib.so
    ln $p/stage/lib/lib.so $p/dist/lib/lib.so
    touch $p/stamp/stage.stamp
done
for p in math-libs/rocBLAS math-libs/rocSPARSE; do
    for a in artifacts-unsplit/blas_lib_generic artifacts/blas_lib_generic; do mkdir -p $a/$p/stage/lib; done
    ln $p/stage/lib/lib.so artifacts-unsplit/blas_lib_generic/$p/stage/lib/lib.so
    cp $p/stage/lib/lib.so artifacts/blas_lib_generic/$p/stage/lib/lib.so
    echo $p/stage >> artifacts/blas_lib_generic/artifact_manifest.txt
done
"#;

fn built(store: &TestStore, last: &str) {
    let mine = store.work().join("mine");
    fs::create_dir_all(mine.join("stamp")).unwrap();
    fs::create_dir_all(mine.join("build")).unwrap();
    fs::write(mine.join("stamp/stage.stamp"), "").unwrap();
    fs::write(mine.join("build/thesis"), "years of work").unwrap();
    store.profile(&format!(
        "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/build'\n\
         [[step]]\nname = 'build'\nrun = '''{TREE}{}'''\n[[step]]\nname = 'last'\nrun = '{last}'\n",
        // Links lead out of the tree, and the artifact's manifest lists more than the tree has.
        format_args!(
            "mkdir -p artifacts/blas_lib_generic/link/stage artifacts/blas_lib_generic/math-libs/hip/stage\n\
             ln -s {} link\nmkdir math-libs/hip\nln -s {}/build math-libs/hip/build\nmkdir math-libs/hip/stamp\n\
             touch math-libs/hip/stamp/stage.stamp\n\
             printf 'link/stage\\n../x/stage\\n/etc/stage\\nmath-libs/hip/stage\\n' >> artifacts/blas_lib_generic/artifact_manifest.txt",
            mine.display(),
            mine.display()
        )
    ));
}

fn projects(store: &TestStore, arguments: &[&str]) -> Vec<String> {
    let mut words = vec!["--free", "1T", "--preset", "ci", "--dry-run"];
    words.extend(arguments);
    let mut found = names(&json(store, &words), "items");
    found.retain(|name| name.starts_with("sub-project"));
    found
}

#[test]
fn what_an_artifact_holds_may_be_given_up() {
    let store = TestStore::new();
    built(&store, "true");
    store.up();
    assert!(projects(&store, &[]).is_empty(), "nobody asked for it");
    let own = |path: &str| format!("sub-project {}/build/math-libs/{path}", store.env());
    let all = ["hip", "rocBLAS", "rocSPARSE"].map(own);
    assert_eq!(projects(&store, &["--expunge"]), all);

    // The stage does not count, because an artifact has the same files.
    let report = json(
        &store,
        &["--expunge", "--free", "1T", "--preset", "ci", "--dry-run"],
    );
    let mut items = report["items"].as_array().unwrap().iter();
    let item = items.find(|item| item["name"] == *own("rocBLAS")).unwrap();
    let bytes = item["bytes"].as_u64().unwrap();
    assert!((6 * MIB..7 * MIB).contains(&bytes), "{report:#}");
    assert_eq!(item["rebuild_ms"], 90_000);
    let asked = ["--yes", "gc", "--expunge", "--free", "1T", "--preset", "ci"];
    store.rockenv(&asked).exits(10);

    let volume = fs::read_dir(store.home().join("volumes")).unwrap();
    let top = volume.flatten().next().unwrap().path();
    for project in ["math-libs/rocBLAS", "math-libs/rocSPARSE"] {
        assert_eq!(
            fs::read_dir(top.join(project)).unwrap().count(),
            0,
            "{project}"
        );
        for artifact in ["artifacts", "artifacts-unsplit"] {
            let kept = top.join(artifact).join("blas_lib_generic").join(project);
            let length = fs::metadata(kept.join("stage/lib/lib.so")).unwrap().len();
            assert_eq!(length, 4 * MIB);
        }
    }
    assert!(top.join("base/half/build/object.o").exists());
    // `gc` does not follow links, so their targets stay.
    assert!(top.join("link").is_symlink());
    for file in ["build/thesis", "stamp/stage.stamp"] {
        assert!(store.work().join("mine").join(file).exists(), "{file}");
    }
    let thesis = fs::read_to_string(store.work().join("mine/build/thesis")).unwrap();
    assert_eq!(thesis, "years of work");
    assert!(projects(&store, &["--expunge"]).is_empty());
    // `up` accepts the env as it is.
    store.up();
}

#[test]
fn killed_between_two_parts_of_one_the_next_command_finishes() {
    let store = TestStore::new();
    built(&store, "true");
    store.up();
    let volume = fs::read_dir(store.home().join("volumes")).unwrap();
    let top = volume.flatten().next().unwrap().path();
    let projects = ["rocBLAS", "rocSPARSE"].map(|name| top.join("math-libs").join(name));
    let parts = |project: &PathBuf| fs::read_dir(project).unwrap().count();
    for nth in 2..6 {
        store.sh(&format!("rm -rf /build/*\n{TREE}")).ok();
        // Only parts of sub-projects are moved with `renameat`.
        let words = ["--yes", "gc", "--expunge", "--free", "1T", "--preset", "ci"];
        assert!(killed_at(&store, &words, "renameat", nth), "{nth}");
        let cut: Vec<&PathBuf> = projects
            .iter()
            .filter(|project| !project.join("stamp").exists())
            .collect();
        // The stamps go first. Their absence is the only sign that a removal has begun.
        assert!(matches!(cut[..], [one] if parts(one) > 0), "{nth}: {cut:?}");
        // Even a `gc` without `--expunge` finishes the removal.
        store.rockenv(&["--yes", "gc"]).ok();
        let mut left = projects.iter().map(parts).collect::<Vec<_>>();
        left.sort_unstable();
        assert_eq!(left, [0, 4], "{nth}");
        assert!(top.join("base/half/build/object.o").exists());
        assert!(!store.env_dir().join("journal.jsonl").exists());
    }
    store.rockenv(&["fsck"]).ok();
}

#[test]
fn an_unfinished_env_and_another_ones_tree_keep_everything() {
    let store = TestStore::new();
    built(&store, "false");
    store.rockenv(&["up", store.env()]).exits(5);
    assert!(projects(&store, &["--expunge"]).is_empty());
    built(&store, "echo no project > /build/CMakeCache.txt");
    store.up();
    assert!(projects(&store, &["--expunge"]).is_empty());
}

#[test]
fn where_a_snapshot_holds_them_too_nothing_would_be_freed() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    built(&store, "true");
    store.up();
    assert!(projects(&store, &["--expunge"]).is_empty());
}
