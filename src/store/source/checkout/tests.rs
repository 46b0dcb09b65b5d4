//! Tests of checkouts that other processes write to.

use super::super::tests::{me, repository, run, set_modified};
use super::*;
use crate::engine::BuildUser;

/// Fails unless git reports the same for a [`Checkout`] as for the repository itself.
#[track_caller]
fn same(git: &Git<'_>, path: &Path, changed: bool) {
    let status = ["status", "--porcelain=v2", "-z", "--untracked-files=all"];
    let own = git.run(path, &status).unwrap();
    let checkout = git.open(path).unwrap();
    assert_eq!(checkout.text(&status).unwrap(), own);
    assert_eq!(!own.is_empty(), changed, "{own}");
    let head = git.run(path, &["rev-parse", "HEAD"]).unwrap();
    let head = format!("git:{}", head.trim());
    // Files outside a sparse checkout are differences too.
    let lacks = path.join(".git/info/sparse-checkout").exists();
    assert_eq!(git.fingerprint(path).unwrap() != head, changed || lacks);
    let place = checkout.place.path.clone();
    let mode = fs::metadata(place.join(LFS)).unwrap().mode();
    assert_eq!(mode & 0o077, 0, "others can read git's files");
    drop(checkout);
    assert!(!place.exists());
}

#[test]
fn what_files_mean_is_as_the_repository_says() {
    let git = Git::new(me());
    type Case = (&'static str, &'static [&'static [&'static str]], fn(&Path));
    let cases: [Case; 5] = [
        ("nothing", &[], |_| {}),
        (
            "line ends",
            &[
                &["config", "core.autocrlf", "true"],
                &["rm", "--quiet", "a"],
                &["reset", "--quiet", "--hard"],
            ],
            |path| fs::write(path.join("a"), "one\r\n").unwrap(),
        ),
        (
            "a sparse checkout",
            &[&["sparse-checkout", "set", "--sparse-index", "sub"]],
            |path| assert!(!path.join("other/b").exists()),
        ),
        (
            "a split index",
            &[&["update-index", "--split-index"]],
            |_| {},
        ),
        (
            "ignored files",
            &[&["config", "core.excludesFile", "../sub/ignored"]],
            |path| {
                fs::write(path.join(".git/info/exclude"), "c\n").unwrap();
                fs::write(path.join("c"), "").unwrap();
            },
        ),
    ];
    for (what, commands, after) in cases {
        let directory = repository();
        let path = directory.path();
        fs::write(path.join("a"), "one\n").unwrap();
        for (name, text) in [("sub/s", "s"), ("other/b", "b")] {
            fs::create_dir(path.join(name).parent().unwrap()).unwrap();
            fs::write(path.join(name), text).unwrap();
        }
        git.run(path, &["add", "."]).unwrap();
        run(path, &["commit", "--quiet", "-m", "more"]);
        for command in commands {
            git.run(path, command).unwrap();
        }
        after(path);
        println!("{what}");
        same(&git, path, false);
        fs::write(path.join("sub/s"), "changed").unwrap();
        same(&git, path, true);
    }
}

/// The user's own configuration applies where the repository's has no value.
#[test]
fn permissions_count_and_a_stash_does_not_whatever_the_user_configured() {
    let (directory, git) = (repository(), Git::new(me()));
    let name = "core.fileMode";
    for value in ["true", "false"] {
        let config = ["config", name, value];
        git.run(directory.path(), &config).unwrap();
        let checkout = git.open(directory.path()).unwrap();
        let config = ["config", "--local", name];
        assert_eq!(checkout.text(&config).unwrap(), "true\n");
    }
    // The stash is no difference, even for a user who has it shown.
    fs::write(directory.path().join("a"), "two").unwrap();
    run(directory.path(), &["stash", "--quiet"]);
    let checkout = git.open(directory.path()).unwrap();
    let config = checkout.place.path.join("config");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text + "[status]\n\tshowStash = true\n").unwrap();
    let status = ["status", "--porcelain=v2", "-z"];
    assert_eq!(checkout.text(&status).unwrap(), "");
}

#[test]
fn other_work_trees_and_formats_are_read() {
    let (directory, git) = (repository(), Git::new(me()));
    let elsewhere = tempfile::tempdir().unwrap();
    let tree = elsewhere.path().join("tree");
    let add = ["worktree", "add", "--quiet", "-b", "more"];
    let add = [&add[..], &[tree.to_str().unwrap()]].concat();
    git.run(directory.path(), &add).unwrap();
    same(&git, &tree, false);
    fs::write(tree.join("a"), "two").unwrap();
    same(&git, &tree, true);
    same(&git, directory.path(), false);
    git.run(directory.path(), &["pack-refs", "--all"]).unwrap();
    same(&git, directory.path(), false);

    let other = tempfile::tempdir().unwrap();
    let init = ["init", "--quiet", "--object-format=sha256"];
    git.run(other.path(), &init).unwrap();
    let commit = |name| ["commit", "--quiet", "--allow-empty", "-m", name];
    run(other.path(), &commit("first"));
    same(&git, other.path(), false);
    let head = git.open(other.path()).unwrap().head().unwrap();
    assert_eq!(head.len(), 64);

    // git knows this format since 2.45.
    let tables = tempfile::tempdir().unwrap();
    let init = [
        "init",
        "--quiet",
        "--initial-branch=main",
        "--ref-format=reftable",
    ];
    if git.run(tables.path(), &init).is_err() {
        return;
    }
    run(tables.path(), &commit("first"));
    let tree = elsewhere.path().join("more");
    let add = ["worktree", "add", "--quiet", "-b", "more"];
    let add = [&add[..], &[tree.to_str().unwrap()]].concat();
    git.run(tables.path(), &add).unwrap();
    run(&tree, &commit("second"));
    let [first, second] = [tables.path(), tree.as_path()].map(|path| {
        let checkout = git.open(path).unwrap();
        let head = git.run(path, &["rev-parse", "HEAD"]).unwrap();
        assert_eq!(checkout.head().unwrap(), head.trim());
        let known = ["rev-parse", "main^{commit}", "more^{commit}"];
        checkout.text(&known).unwrap()
    });
    assert_eq!(first, second);
}

#[test]
fn what_no_git_wrote_is_refused_without_waiting() {
    let (directory, git) = (repository(), Git::new(me()));
    let own = directory.path().join(".git");
    for name in [
        "config",
        "HEAD",
        "index",
        "packed-refs",
        "refs/heads/more",
        "objects/info/alternates",
    ] {
        let path = own.join(name);
        let kept = fs::read(&path).ok();
        drop(fs::remove_file(&path));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = git.open(directory.path()).unwrap_err();
        assert_has!(error.chain().join(" "), "not a regular file");
        fs::remove_file(&path).unwrap();
        if let Some(kept) = kept {
            fs::write(&path, kept).unwrap();
        }
    }
    // Files that the configuration names.
    let (config, pipe) = (own.join("config"), directory.path().join("pipe"));
    let kept = fs::read_to_string(&config).unwrap();
    fs::write(own.join("more"), "[include]\n\tpath = ../pipe\n").unwrap();
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // git expands the place where it is installed, as it expands `~user`.
    let expanded = format!("%(prefix)/../../../../..{}", pipe.display());
    for (section, key, path) in [
        ("include", "path", "../pipe"),
        ("include", "path", "more"),
        ("include", "path", expanded.as_str()),
        ("core", "excludesFile", "pipe"),
        ("core", "excludesFile", expanded.as_str()),
        ("core", "attributesFile", "pipe"),
    ] {
        let text = format!("{kept}[{section}]\n\t{key} = {path}\n");
        fs::write(&config, text).unwrap();
        let error = git.open(directory.path()).unwrap_err();
        assert_has!(error.chain().join(" "), "pipe` is not a regular file");
    }
    // A condition that does not apply includes no file, so that need not be readable.
    let unread = "[includeIf \"gitdir:/none\"]\n\tpath = ../pipe\n";
    fs::write(&config, format!("{kept}{unread}")).unwrap();
    git.open(directory.path()).unwrap();
    fs::write(&config, kept).unwrap();
    fs::remove_file(&pipe).unwrap();
    for name in [
        ".git/info/exclude",
        ".git/info/attributes",
        ".gitignore",
        ".gitmodules",
        "d/.gitattributes",
    ] {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        drop(fs::remove_file(&path));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = git.fingerprint(directory.path()).unwrap_err();
        assert_eq!(error.kind().exit_code(), 3);
        assert_has!(
            error.chain().join(" "),
            &format!("{name}` is not a regular file")
        );
        fs::remove_file(&path).unwrap();
    }
    // git skips ignored directories and other repositories.
    let clean = git.fingerprint(directory.path()).unwrap();
    fs::write(own.join("info/exclude"), "/d\n").unwrap();
    fs::create_dir_all(directory.path().join("d/e")).unwrap();
    for name in ["d/.gitignore", "d/e/.gitattributes"] {
        let path = directory.path().join(name);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(git.fingerprint(directory.path()).unwrap(), clean);
    }
    fs::write(own.join("HEAD"), "ref: refs/heads/a\nmore").unwrap();
    let error = git.open(directory.path()).unwrap_err();
    assert_eq!(error.kind().exit_code(), 3);
    fs::remove_dir_all(&own).unwrap();
    for text in ["root:x:0:0", "gitdir: ../moved/.git/worktrees/root:x"] {
        fs::write(&own, text).unwrap();
        let error = git.open(directory.path()).unwrap_err();
        assert_eq!(error.kind().exit_code(), 3);
        let error = error.chain().join(" ");
        assert!(error.contains("does not name a git directory") && !error.contains("root:x"));
    }
}

#[test]
fn fifos_in_other_directories_of_objects_are_refused_without_waiting() {
    let (directory, git) = (repository(), Git::new(me()));
    let own = directory.path().join(".git");
    let (borrowed, alternates) = (own.join("borrowed"), own.join("objects/info/alternates"));
    for name in ["own/pack", "others/pack", "linked"] {
        fs::create_dir_all(borrowed.join(name)).unwrap();
    }
    let others = borrowed.join("others");
    let named = format!(
        "# of a test\n../borrowed/own\n{}\n/none\n",
        others.display()
    );
    fs::write(&alternates, named).unwrap();
    symlink("../linked", borrowed.join("own/link")).unwrap();
    symlink(".", others.join("again")).unwrap();
    same(&git, directory.path(), false);
    for name in ["own/pack/pipe", "others/pack/pipe", "linked/pipe"] {
        let path = borrowed.join(name);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = git.open(directory.path()).unwrap_err();
        assert_has!(error.chain().join(" "), "pipe` is not a regular file");
        fs::remove_file(&path).unwrap();
    }
    fs::write(&alternates, "\"../borrowed/own\"\n").unwrap();
    let error = git.open(directory.path()).unwrap_err();
    assert_has!(error.chain().join(" "), "has a quoted path");
}

#[test]
fn no_link_leads_to_what_only_root_may_read() {
    let (directory, git) = (repository(), Git::new(me()));
    let own = directory.path().join(".git");
    let secret = directory.path().join("secret");
    fs::write(&secret, "ref: refs/heads/secret").unwrap();
    fs::remove_file(own.join("HEAD")).unwrap();
    for name in ["commondir", "HEAD"] {
        symlink(&secret, own.join(name)).unwrap();
        let error = git.open(directory.path()).unwrap_err().chain().join(" ");
        assert_has!(error, "not a regular file");
        assert!(!error.contains("refs/heads/secret"), "{error}");
        fs::remove_file(own.join(name)).unwrap();
    }
    // A directory is given to git's user only if it is new.
    let link = own.join(LFS);
    symlink(directory.path(), &link).unwrap();
    assert!(make_for(&link, Rights::Own).is_err());
}

#[test]
fn git_is_told_to_look_at_all_of_a_file() {
    let (directory, git) = (repository(), Git::new(me()));
    let path = directory.path();
    for setting in ["core.trustCtime", "core.symlinks"] {
        git.run(path, &["config", setting, "false"]).unwrap();
    }
    git.run(path, &["config", "core.checkStat", "minimal"])
        .unwrap();
    let old = std::time::UNIX_EPOCH + Duration::from_secs(1_577_836_800);
    set_modified(&path.join("a"), old);
    git.run(path, &["status"]).unwrap();
    same(&git, path, false);
    fs::write(path.join("n"), "six").unwrap();
    set_modified(&path.join("n"), old);
    fs::rename(path.join("n"), path.join("a")).unwrap();
    let changed = git.fingerprint(path).unwrap();
    assert!(changed.contains('+'), "{changed}");
}

#[test]
fn replaced_objects_are_not_the_commits() {
    let (directory, git) = (repository(), Git::new(me()));
    let path = directory.path();
    let run = |words: &[&str]| git.run(path, words).unwrap().trim().to_owned();
    let old = run(&["rev-parse", "HEAD:a"]);
    fs::write(path.join("a"), "six").unwrap();
    let new = run(&["hash-object", "-w", "a"]);
    run(&["replace", &old, &new]);
    run(&["reset", "--quiet", "--hard"]);
    // git rereads files that are as old as the index, so the index must be newer.
    let later = std::time::SystemTime::now() + Duration::from_secs(2);
    set_modified(&path.join(".git/index"), later);
    let changed = git.fingerprint(path).unwrap();
    assert!(changed.contains('+'), "{changed}");
}

#[test]
fn values_survive_quoting() {
    let (directory, git) = (repository(), Git::new(me()));
    let value = "a\"b\\c\td\ne # f ; g ";
    git.run(directory.path(), &["config", "core.excludesFile", value])
        .unwrap();
    let checkout = git.open(directory.path()).unwrap();
    let read = checkout.text(&["config", "--null", "core.excludesFile"]);
    assert_eq!(read.unwrap(), format!("{value}\0"));
}

#[test]
fn a_build_user_who_is_not_the_caller_gets_no_variables_of_the_caller() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (directory, user) = (tempfile::tempdir().unwrap(), BuildUser::new(1234, 1234));
    let found = rights(&Git::new(&user), directory.path()).unwrap();
    assert_eq!(found, Rights::Owner(1234, 1234));
}
