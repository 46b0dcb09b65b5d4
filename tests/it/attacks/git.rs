//! A checkout that a step or a stranger changed names programs in every way that git supports: none of them runs on the
//! host.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fs_err as fs;

use crate::support::git;
use crate::support::loopfs::{Kind, LoopFs, run};
use crate::support::ordinary::MadeUp;
use crate::support::rootfs;
use crate::support::template::write_recipe;

/// The script with which a step changes the checkout at `$1`, whose path on the host is `$2`. Each program would leave
/// a mark in `$3`.
const PLANT: &str = r#"
for git in $1/.git $1/.git/modules/sub; do
    cat >> $git/config <<END
[core]
    fsmonitor = touch $3/fsmonitor;
    sshCommand = touch $3/ssh;
    hooksPath = $2/.git/evil
    gitProxy = $2/.git/evil/any
    pager = touch $3/pager;
    editor = touch $3/editor;
    askPass = $2/.git/evil/any
    alternateRefsCommand = touch $3/alternates;
    attributesFile = $2/.git/evil/attributes
[pager]
    status = touch $3/pager;
[filter "x"]
    clean = touch $3/clean; cat
    smudge = touch $3/smudge; cat
    required = true
[filter "p"]
    process = touch $3/process;
[diff]
    external = touch $3/external;
    submodule = diff
[diff "x"]
    command = touch $3/command;
    textconv = touch $3/textconv; cat
[merge "x"]
    driver = touch $3/merge;
[alias]
    status = !touch $3/alias;
    rev-parse = !touch $3/alias;
[credential]
    helper = !touch $3/credential;
[include]
    path = $2/.git/evil/included
[uploadpack]
    packObjectsHook = touch $3/pack;
[submodule "sub"]
    update = !touch $3/update;
[submodule]
    recurse = true
[status]
    submoduleSummary = true
[url "ext::sh -c touch% $3/instead% "]
    insteadOf = https://
[remote "origin"]
    url = ext::sh -c touch% $3/ext%
    uploadpack = touch $3/uploadpack;
    promisor = true
    partialCloneFilter = blob:none
[gpg]
    program = $2/.git/evil/any
[log]
    showSignature = true
[trailer "x"]
    command = touch $3/trailer;
END
    mkdir -p $git/evil $git/info $git/hooks
    printf '[filter "y"]\n\tclean = touch %s/included; cat\n' $3 > $git/evil/included
    echo '* diff=x merge=x' > $git/evil/attributes
    printf 'a filter=x\nb filter=y\nc filter=p\n' > $git/info/attributes
    printf '#!/bin/sh\ntouch %s/hook\n' $3 > $git/evil/any
    chmod 755 $git/evil/any
    for name in fsmonitor-watchman post-checkout post-index-change pre-auto-gc reference-transaction query-watchman; do
        cp $git/evil/any $git/evil/$name
        cp $git/evil/any $git/hooks/$name
    done
done
# git asks filters what a file whose times are new has in it.
for file in a b c; do
    cp $1/$file $1/.new
    mv $1/.new $1/$file
    cp $1/sub/$file $1/sub/.new
    mv $1/sub/.new $1/sub/$file
done
echo more >> $1/d
cp $1/.git/info/attributes $1/.gitattributes
"#;

struct Place {
    user: MadeUp,
    checkout: PathBuf,
    marks: PathBuf,
    _disk: LoopFs,
}

impl Place {
    /// Makes a user with a checkout that has a submodule, and a profile whose first step runs `PLANT` on it and whose
    /// second step builds it.
    fn new() -> Self {
        let disk = LoopFs::new(Kind::Ext4);
        let above = disk.path().parent().expect("a directory");
        fs::set_permissions(above, std::fs::Permissions::from_mode(0o755)).expect("a mode");
        let (inner, checkout) = (disk.join("inner"), disk.join("home/src"));
        let marks = disk.join("marks");
        fs::create_dir(&marks).expect("a directory");
        fs::set_permissions(&marks, std::fs::Permissions::from_mode(0o777)).expect("a mode");
        let user = MadeUp::at(disk.join("home"));
        for directory in [&inner, &checkout] {
            git::repository(directory, "a", "one\n");
            for name in ["b", "c", "d"] {
                fs::write(directory.join(name), name).expect("a file");
            }
            git::git(directory, &["add", "."]);
            git::git(directory, &["commit", "--quiet", "-m", "more"]);
        }
        let inner = inner.display().to_string();
        git::git(
            &checkout,
            &["submodule", "--quiet", "add", "--", &inner, "sub"],
        );
        git::git(&checkout, &["commit", "--quiet", "-m", "sub"]);
        let place = Self {
            user,
            checkout,
            marks,
            _disk: disk,
        };
        place.profile();
        let owner = format!("{0}:{0}", MadeUp::UID);
        run(Command::new("chown")
            .args(["-R", &owner])
            .arg(&place.user.home));
        place
    }

    fn profile(&self) {
        let configuration = self.user.home.join(".config/rockenv");
        fs::create_dir_all(configuration.join("images")).expect("a directory");
        fs::create_dir_all(configuration.join("profiles")).expect("a directory");
        write_recipe(&configuration.join("images/base.toml"), &rootfs());
        let profile = format!(
            "schema = 1\nimage = \"base\"\n\
             [[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{0}\"\n\
             [[volume]]\nname = \"out\"\nkind = \"output\"\ntarget = \"/v/out\"\n\
             [[step]]\nname = \"plant\"\nrun = '''set -- /v/src {0} {1}\n{PLANT}'''\n\
             [[step]]\nname = \"build\"\ninputs = [\"src\"]\nrun = \"echo built > /v/out/result\"\n",
            self.checkout.display(),
            self.marks.display()
        );
        fs::write(configuration.join("profiles/victim.toml"), profile).expect("a profile");
        // Sets the user's home, so that rockenv by sudo finds this configuration.
        let users = fs::read_to_string("/etc/passwd").expect("users");
        let (id, home) = (MadeUp::UID, self.user.home.display());
        let line = format!("rockenv-made-up:x:{id}:{id}::");
        let users = users.replace(&format!("{line}/:"), &format!("{line}{home}:"));
        fs::write("/etc/passwd", users).expect("users");
    }

    /// Runs commands that read the checkout, each as root by sudo and as the user.
    fn look(&self) -> Vec<(String, Output)> {
        let source = self.checkout.display().to_string();
        let home = self.user.home.join("store").display().to_string();
        let mut looked = Vec::new();
        for arguments in [
            &["plan", "victim"][..],
            &["up", "victim"],
            &["lock", "victim"],
            &["status", "victim"],
            &["hook", "check", "--source", &source],
            &["hook", "check", "--source", &source, "HEAD~1..HEAD"],
            &["profile", "check", "victim"],
            &["report", "victim"],
        ] {
            for mut command in [
                self.user.sudo(self.user.program(), arguments),
                self.user.command(self.user.program(), arguments),
            ] {
                let output = command.env("ROCKENV_HOME", &home).output();
                looked.push((arguments.join(" "), output.expect("rockenv")));
            }
        }
        looked
    }

    #[track_caller]
    fn unmarked(&self) {
        let marks = fs::read_dir(&self.marks).expect("a directory");
        let mut marks: Vec<_> = marks
            .map(|mark| mark.expect("a mark").file_name())
            .collect();
        marks.sort();
        assert!(marks.is_empty(), "ran on the host: {marks:?}");
    }
}

fn plant(checkout: &Path, marks: &Path) {
    run(Command::new("sh")
        .args(["-euc", PLANT, "sh"])
        .args([checkout, checkout, marks]));
}

#[test]
fn nothing_that_a_step_names_in_a_checkout_runs_on_the_host() {
    let place = Place::new();
    let user = &place.user;
    let trace = user.home.join("trace");
    let configuration = format!("[trace2]\n\tnormalTarget = {}\n", trace.display());
    fs::write(user.home.join(".gitconfig"), configuration).expect("the caller's configuration");
    // git can read what rockenv prepares for it, and the caller gets the results.
    let script = "umask 077; mkdir tmp; export TMPDIR=\"$PWD/tmp\"; exec \"$0\" up victim";
    let program = user.program();
    let program = program.to_str().expect("a path");
    let up = user.sudo("sh", &["-c", script, program]).output();
    let up = up.expect("rockenv");
    place.unmarked();
    assert!(
        up.status.success(),
        "{}",
        String::from_utf8_lossy(&up.stderr)
    );
    let result = user.store().join("outputs/victim/out/result");
    let result = result.to_str().expect("a path");
    assert_eq!(run(&mut user.command("cat", &[result])), "built\n");
    assert!(
        trace.exists(),
        "git did not read the caller's configuration"
    );
    let planted = fs::read_to_string(place.checkout.join(".git/config")).expect("git's own");
    assert!(planted.contains("textconv"), "the step planted nothing");
    let looked = place.look();
    place.unmarked();
    // Every second command runs by sudo. The step changed the checkout, so `lock` refuses it.
    for (arguments, output) in looked.iter().step_by(2) {
        let expected: &[i32] = match arguments.as_str() {
            "lock victim" => &[8],
            text if text.starts_with("hook") => &[0, 3],
            _ => &[0],
        };
        let said = String::from_utf8_lossy(&output.stderr);
        let code = output.status.code().expect("an end");
        assert!(
            expected.contains(&code),
            "sudo rockenv {arguments}: {code}\n{said}"
        );
    }
}

/// git fetches no missing objects, whatever the repository's configuration names as their source.
#[test]
fn a_checkout_with_missing_objects_fetches_nothing() {
    let place = Place::new();
    plant(&place.checkout, &place.marks);
    let own = place.checkout.join(".git");
    let text = fs::read_to_string(own.join("config")).expect("git's own");
    let text = format!("{text}[extensions]\n\tpartialClone = origin\n");
    fs::write(
        own.join("config"),
        text.replace("repositoryformatversion = 0", "repositoryformatversion = 1"),
    )
    .expect("git's own");
    // The blob is in the index, and its object is missing.
    let blob = git::git(
        &place.checkout,
        &[
            "-c",
            "core.fsmonitor=false",
            "hash-object",
            "--no-filters",
            "d",
        ],
    );
    drop(fs::remove_file(
        own.join("objects").join(&blob[..2]).join(&blob[2..]),
    ));
    let line = format!("100644,{blob},d");
    git::git(
        &place.checkout,
        &[
            "-c",
            "core.fsmonitor=false",
            "-c",
            "core.hooksPath=/dev/null",
            "update-index",
            "--cacheinfo",
            &line,
        ],
    );
    for mark in fs::read_dir(&place.marks).expect("a directory") {
        fs::remove_file(mark.expect("a mark").path()).expect("no mark");
    }
    place.look();
    place.unmarked();
}

/// Only root may read the index of the user's checkout: git as root would succeed.
#[test]
fn git_is_never_root_in_the_checkout_of_somebody_else() {
    let place = Place::new();
    let index = place.checkout.join(".git/index");
    chown(&index, Some(0), Some(0)).expect("a new owner");
    fs::set_permissions(&index, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    let mut command = Command::new(env!("CARGO_BIN_EXE_rockenv"));
    command
        .args(["lock", "victim"])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("XDG_CONFIG_HOME", place.user.home.join(".config"))
        .env("ROCKENV_HOME", place.user.home.join("roots"))
        .current_dir(&place.marks);
    let output = command.output().expect("rockenv");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("Permission denied"), "{said}");
    chown(&index, Some(MadeUp::UID), None).expect("its owner");
    let output = command.output().expect("rockenv");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
