//! Sharing snapshots through a real registry or through files: two stores as two machines. Needs root and
//! `docker-registry`.

mod at_once;
mod ends;
mod faults;
mod files;
mod foreign;
mod full_registry;
mod histories;
mod liar;
mod limits;
mod meanwhile;
mod proxy;
mod prune;
mod refused;
mod results;
mod signed;
mod token;
mod trees;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::registry::{LOGIN, Registry, http};
use crate::support::run::Ran;
use crate::support::transcript::{measured, transcript};
use fs_err as fs;
use rockenv::testing::Store;
use rockenv::testing::digest::digest;
use rockenv::testing::{Method, overlay};
use sha2::{Digest as _, Sha256};

/// Everything that a tree can contain: hard links, holes, attributes, capabilities, times, deletions, replaced
/// directories. The image has no tools for attributes.
const STEPS: &str = r#"
[[volume]]
name = "build"
kind = "build"
target = "/v/build"
[[step]]
name = "one"
user = "root"
run = '''
mkdir -p /opt/a/b /opt/gone /opt/again/old && cd /opt
echo one > a/one; ln a/one a/b/two; echo gone > gone/file; echo old > again/old/file; echo kept > kept
truncate -s 8M sparse; echo end >> sparse
cp /bin/true capable; ln -s nowhere link; mkfifo fifo
chown 1234:1234 a/b/two; touch -d '1969-12-31 23:59:58.25' kept
echo changed > a/same; touch -d @1700000000 a/same
name=$(printf '%0200d' 0); mkdir -p $name/$name; echo deep > $name/$name/file
perl -e '
    sub set { my ($f, $n, $v) = @_; syscall(188, $f, $n, $v, length $v, 0) == 0 or die "$f $n: $!" }
    my $acl = pack "V(vvV)5", 2, 1,6,-1, 2,4,1234, 4,4,-1, 16,4,-1, 32,4,-1;
    set "capable", "security.capability", pack "V5", 0x02000001, 1 << 13, 0, 0, 0;
    set "a/one", "user.note", "text"; set "a/one", "system.posix_acl_access", $acl;
    set "a/b", "system.posix_acl_default", $acl'
if [ -d /v/build ]; then echo one > /v/build/one; ln /v/build/one /v/build/same; fi
'''
[[step]]
name = "two"
user = "root"
run = '''
cd /opt; rm -r gone again; mkdir again; echo new > again/new; rm a/b/two; echo more >> kept
perl -e 'my ($f, $n) = ("a/b", "system.posix_acl_default"); syscall(197, $f, $n) == 0 or die $!'
echo two > a/b/three; ln a/b/three a/four; chmod 700 a; rm link; mkdir link; touch link/inside
echo unequal > a/same; truncate -s 8 a/same; touch -d @1700000000 a/same
if [ -d /v/build ]; then cd /v/build; echo two > two; ln two link; rm same; truncate -s 1M hole; fi
'''
[[step]]
name = "three"
run = "echo three > $HOME/three; touch -d @1700000000.123456789 $HOME/three"
"#;

/// Returns the same without build volumes, which an overlay store does not freeze.
fn without_volume() -> &'static str {
    &STEPS[STEPS.find("[[step]]").unwrap()..]
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Reads a path of the repository that is pushed to.
fn get(host: &str, path: &str) -> Vec<u8> {
    let path = format!("/v2/team/rocm/{path}");
    let found = http(host, "GET", &path, &format!("accept: {MANIFEST}\r\n"), b"");
    assert_eq!(found.status, 200, "{}", found.head);
    found.body
}

/// Tags a document in the repository that is pushed to.
fn put(host: &str, tag: &str, media_type: &str, document: &[u8]) {
    let path = format!("/v2/team/rocm/manifests/{tag}");
    let head = format!("content-type: {media_type}\r\n");
    let put = http(host, "PUT", &path, &head, document);
    assert_eq!(put.status, 201, "{}", put.head);
}

/// Two machines of one user: the same image, the same profile, one registry.
struct Two {
    registry: Registry,
    one: TestStore,
    other: TestStore,
}

impl Drop for Two {
    fn drop(&mut self) {
        // This store's envs carry the first store's name, so the first store's guard would find a container that waits
        // in one.
        if !std::thread::panicking() {
            self.other.assert_clean();
        }
    }
}

impl Two {
    fn new(one: TestStore, other: TestStore) -> Self {
        let registry = Registry::start(false);
        Self {
            registry,
            one,
            other,
        }
    }

    fn repository(&self) -> String {
        format!("{}/team/rocm", self.registry.host)
    }

    fn run(&self, store: &TestStore, words: &[&str]) -> Ran {
        self.with(store, words, &self.repository())
    }

    /// Runs commands, one per line after its machine, and returns what each prints.
    fn shows(&self, commands: &str) -> String {
        let repository = self.repository();
        let mut all = String::new();
        for line in commands.trim().lines() {
            let (machine, words) = line.trim().split_once(": ").unwrap();
            let store = match machine {
                "one" => &self.one,
                _ => &self.other,
            };
            let [home, work] = [store.home(), store.work()].map(|path| path.display().to_string());
            let masks = [
                (home.as_str(), "STORE"),
                (&work, "WORK"),
                (self.one.env(), "ENV"),
                (&repository, "REPOSITORY"),
            ];
            let said = transcript(words, &masks, |words| {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                self.run(store, &words)
            });
            // A transfer that takes longer than half a minute repeats its message.
            let said = measured(said);
            let mut lines: Vec<&str> = said.lines().collect();
            lines.dedup_by(|next, line| next == line && line.ends_with("… SIZE"));
            let said = lines.join("\n");
            all.extend([machine, "$ rockenv ", words, "\n", &said, "\n\n"]);
        }
        all
    }

    fn with(&self, store: &TestStore, words: &[&str], repository: &str) -> Ran {
        let mut command = store.command(words);
        command.env("ROCKENV_REGISTRY", repository);
        crate::support::run::finish(words.join(" "), command)
    }

    /// Gives both machines the profile, and returns its name.
    fn profile(&self, body: &str) -> &str {
        let name = self.one.env();
        for store in [&self.one, &self.other] {
            store.profile_named(name, body);
        }
        name
    }

    /// Builds on the first machine and pushes from there.
    fn pushed(&self, body: &str) -> &str {
        let name = self.profile(body);
        self.one.rockenv(&["up", name]).ok();
        self.run(&self.one, &["push", name]).ok();
        name
    }

    fn manifest(&self, reference: &str) -> Vec<u8> {
        get(&self.registry.host, &format!("manifests/{reference}"))
    }

    fn put_manifest(&self, tag: &str, manifest: &[u8]) {
        put(&self.registry.host, tag, MANIFEST, manifest);
    }

    fn uploads(&self) -> usize {
        self.registry.answered("POST").len()
    }

    fn assert_same(&self, name: &str) {
        assert_same(&self.one, &self.other, name);
    }
}

/// Compares every step's tree and volumes in two stores. An overlay store has only the last step's volumes.
fn assert_same(one: &TestStore, other: &TestStore, name: &str) {
    let states = [one, other].map(|store| trees(store.home(), name));
    let [one, other] = &states;
    assert_eq!(one.len(), other.len());
    for ((step, tree, volumes), (_, other_tree, other_volumes)) in one.iter().zip(other) {
        assert_eq!(tree, other_tree, "tree after step `{step}`");
        for (volume, other) in volumes.iter().zip(other_volumes) {
            let differ = volume.is_some() && other.is_some() && volume != other;
            assert!(!differ, "volume after step `{step}`");
        }
    }
    let last = |states: &[State]| states.last().unwrap().2.clone();
    assert_eq!(last(one), last(other));
}

/// A step, and the digests of its tree and its build volumes.
type State = (String, String, Vec<Option<String>>);

/// Returns all attributes in a tree as `getfattr` shows them, except those of the underlying file system.
fn attributes(tree: &Path) -> String {
    let all = "cd \"$1\" && find . -print0 | sort -z | \
               xargs -0r getfattr -hd -e hex -m '^(user\\.|security\\.cap|system\\.posix_acl)' --";
    let out = std::process::Command::new("sh")
        .args(["-euc", all, "sh"])
        .arg(tree)
        .output();
    let out = out.unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let shown = String::from_utf8(out.stdout).unwrap();
    // overlayfs writes these to a tree that is mounted with `userxattr`.
    shown
        .lines()
        .filter(|line| !line.starts_with("user.overlay."))
        .collect::<Vec<_>>()
        .join("\n")
}

fn trees(home: &Path, name: &str) -> Vec<State> {
    let store = Store::open_existing(home).unwrap().unwrap();
    let record = store.record(&name.parse().unwrap()).unwrap().unwrap();
    let cancel = AtomicBool::new(false);
    // Digests and layers read attributes with the same code, so `getfattr` checks both.
    let of = |path: &Path| digest(path, &cancel).unwrap().digest + &attributes(path);
    let mut chain = store.chain(record.head.layer.as_ref().unwrap()).unwrap();
    chain.reverse();
    let mut states = Vec::new();
    for layer in chain {
        let directory = store.layer_dir(&layer.id);
        let tree = match store.method() {
            Method::Overlay => {
                let lowers = store.lowers(Some(&layer.id), &layer.image_key).unwrap();
                let at = tempfile::tempdir().unwrap();
                let look = || {
                    overlay::mount(&lowers, None, at.path()).unwrap();
                    of(at.path())
                };
                overlay::in_throw_away_namespace(look).unwrap()
            }
            _ => of(&directory.join("root")),
        };
        let volumes = layer.volumes.keys().map(|volume| {
            let path = directory.join("volumes").join(volume);
            path.exists().then(|| of(&path))
        });
        states.push((layer.title.clone(), tree, volumes.collect()));
    }
    states
}

#[test]
fn push_sends_what_is_missing_and_pull_brings_it() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(without_volume());
    two.one.rockenv(&["up", name]).ok();
    insta::assert_snapshot!(two.shows("
        one: push ENV --until two
        one: push ENV
    "), @"
    one$ rockenv push ENV --until two
    push to REPOSITORY … SIZE
    ENV: 2 snapshots at REPOSITORY; 3 layers sent (SIZE), 0 already there, in TIME

    one$ rockenv push ENV
    push to REPOSITORY … SIZE
    ENV: 3 snapshots at REPOSITORY; 1 layer sent (SIZE), 3 already there, in TIME
    ");
    let sent = two.uploads();
    // Another tag for the last snapshot sends only the tag.
    insta::assert_snapshot!(two.shows("
        one: push ENV
        one: push ENV REPOSITORY:nightly
    "), @"
    one$ rockenv push ENV
    push to REPOSITORY … SIZE
    ENV: 3 snapshots at REPOSITORY; 0 layers sent (SIZE), 4 already there, in TIME

    one$ rockenv push ENV REPOSITORY:nightly
    push to REPOSITORY … SIZE
    ENV: 3 snapshots at REPOSITORY, the last one as `nightly`; 0 layers sent (SIZE), 4 already there, in TIME
    ");
    assert_eq!(two.uploads(), sent, "{:#?}", two.registry.answered("POST"));
    insta::assert_snapshot!(two.shows("other: pull REPOSITORY:nightly"), @"
    other$ rockenv pull REPOSITORY:nightly
    pull from REPOSITORY … SIZE
    pulled one, two, three from REPOSITORY (SIZE)
    ");
    // The downloaded archives are in the trash now.
    two.other.settle();
    // `gc` keeps the snapshots for a future env.
    insta::assert_snapshot!(two.shows("
        other: gc --yes
        other: up ENV
        other: pull ENV
        other: fsck
    "), @"
    other$ rockenv gc --yes
    nothing to remove; SIZE free now
    kept for 90 days after they arrived, unless space is short: 3 pulled or imported snapshots (SIZE) that no env needs yet

    other$ rockenv up ENV
    ENV: 3 steps, 3 done before; engine nspawn (root, and systemd-nspawn is installed)
    ENV: done; to enter it: rockenv shell ENV

    other$ rockenv pull ENV
    pull from REPOSITORY … SIZE
    the store already has all of it

    other$ rockenv fsck
    STORE: no problems
    ");
    two.assert_same(name);
    // Pulled snapshots can be pushed on, with the same content.
    insta::assert_snapshot!(two.shows("
        other: push ENV
        other: push ENV REPOSITORY/again
    "), @"
    other$ rockenv push ENV
    push to REPOSITORY … SIZE
    ENV: 3 snapshots at REPOSITORY; 0 layers sent (SIZE), 4 already there, in TIME

    other$ rockenv push ENV REPOSITORY/again
    push to REPOSITORY/again … SIZE
    ENV: 3 snapshots at REPOSITORY/again; 4 layers sent (SIZE), 0 already there, in TIME
    ");
}

#[test]
fn every_method_takes_what_every_other_gives() {
    let disks = [Kind::Btrfs, Kind::Xfs, Kind::Btrfs].map(LoopFs::with_base);
    let [btrfs, xfs, fresh] = &disks;
    // Stores that freeze build volumes push them too.
    for (one, other) in [
        (TestStore::on(btrfs), TestStore::new()),
        (TestStore::on(xfs), TestStore::on(fresh)),
    ] {
        let two = Two::new(one, other);
        let name = two.pushed(STEPS);
        two.run(&two.other, &["up", name, "--pull"]).ok().says(&[
            "pulled",
            "three",
            "3 done before",
        ]);
        two.assert_same(name);
        let inside = "cat /v/build/two; stat -c %h /v/build/link; getent passwd 1234 >/dev/null; cat $HOME/three";
        two.other.sh_in(name, inside).ok().prints("two\n2\nthree");
        two.other.rockenv(&["fsck"]).ok();
    }
}

#[test]
fn an_overlay_store_gives_to_a_btrfs_store() {
    let disk = LoopFs::new(Kind::Btrfs);
    let two = Two::new(TestStore::new(), TestStore::on(&disk));
    // What a step writes may compress to next to nothing.
    let plain = "echo one > a/one; yes | head -c 80M > plain;";
    let name = two.pushed(&without_volume().replace("echo one > a/one;", plain));
    // The second machine has nothing, so it pulls the image as well.
    let up = two.run(&two.other, &["up", name, "--pull"]).ok();
    up.says(&["pulled the image and one, two, three from", "3 done before"]);
    two.assert_same(name);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["nothing to do"]);
}

#[test]
fn the_longest_prefix_is_pulled_and_the_rest_built() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(without_volume());
    let changed = without_volume().replace("echo three >", "echo other >");
    two.other.profile_named(name, &changed);
    let plan = two.run(&two.other, &["plan", name, "--pull"]).ok();
    let from = format!("pulled from {}", two.repository());
    assert_eq!(plan.text().matches(&from).count(), 2, "{}", plan.text());
    let up = two.run(&two.other, &["up", name, "--pull", "--push"]).ok();
    up.says(&["pulled one, two from", "2 done before", "1 layer sent"]);
    // `up` does not ask the registry for keys that the store has.
    let asked = two.registry.answered("HEAD").len();
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["nothing to do"]);
    assert_eq!(two.registry.answered("HEAD").len(), asked);
}

#[test]
fn without_a_registry_up_builds() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile("[[step]]\nname = 'one'\nrun = 'true'\n");
    let nobody = "127.0.0.1:9/team/rocm";
    let up = two.with(&two.one, &["up", name, "--pull"], nobody).ok();
    up.says(&[
        "warning:",
        "cannot reach registry `127.0.0.1:9`",
        "step 1/1 one",
    ]);
    let push = two.with(&two.one, &["push", name], nobody);
    push.exits(4).says(&["cannot reach registry"]);
    insta::assert_snapshot!(two.one.shows("push ENV"), @r#"
    error: no registry is configured
    help: registry = "registry.example.org/rockenv" in config.toml, or ROCKENV_REGISTRY
    exit code 2
    "#);
    // `--offline` overrides `push` in the configuration.
    two.one.configure("push = true");
    let again = ["up", name, "--rerun", "one", "--offline"];
    let up = two.with(&two.one, &again, nobody).ok();
    assert!(!up.err.contains("registry"), "{}", up.err);
    let up = two.with(&two.one, &again[..4], nobody).ok();
    let up = up.says(&["warning: cannot push to", "cannot reach registry"]);
    // The push after the step and the one at the end fail for the same reason.
    assert_eq!(up.err.matches("cannot push to").count(), 1, "{}", up.err);
    insta::assert_snapshot!(two.shows("
        one: push absent
        one: pull absent
        one: pull REPOSITORY:none
    "), @"
    one$ rockenv push absent
    error: no env `absent`
    help: rockenv ls
    exit code 7

    one$ rockenv pull absent
    error: no env `absent`
    help: rockenv up PROFILE --pull, or rockenv pull REPOSITORY:TAG
    exit code 7

    one$ rockenv pull REPOSITORY:none
    pull from REPOSITORY … SIZE
    error: there is no snapshot `none` at `REPOSITORY`
    help: rockenv push ENV REPOSITORY:none, on the machine that built it
    exit code 7
    ");
}

#[test]
fn who_may_not_is_told_how_to_log_in() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile("[[step]]\nname = 'one'\nrun = 'true'\n");
    two.one.rockenv(&["up", name]).ok();
    let closed = Registry::start(true);
    let repository = format!("{}/team/rocm", closed.host);
    let push = two.with(&two.one, &["push", name], &repository);
    insta::assert_snapshot!(two.one.shown(&push), @"
    push to 127.0.0.1:PORT/team/rocm … 0 B
    error: cannot push to `127.0.0.1:PORT/team/rocm`
      caused by: cannot push image `base`
      caused by: authentication required to push to `127.0.0.1:PORT/team/rocm` at registry `127.0.0.1:PORT`
    help: podman login 127.0.0.1:PORT, or docker login 127.0.0.1:PORT
    exit code 4
    ");
    let up = two
        .with(&two.other, &["up", name, "--pull"], &repository)
        .ok();
    up.says(&["warning:", "authentication required", "step 1/1 one"]);
    let logins = two.one.work().join("auth.json");
    fs::write(
        &logins,
        format!(r#"{{"auths":{{"{}":{{"auth":"{LOGIN}"}}}}}}"#, closed.host),
    )
    .unwrap();
    let mut command = two.one.command(&["push", name, &repository]);
    command.env("REGISTRY_AUTH_FILE", &logins);
    crate::support::run::finish("push".into(), command)
        .ok()
        .says(&["1 snapshot at"]);
}

#[test]
fn what_was_tampered_with_is_refused() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed("[[step]]\nname = 'one'\nrun = 'echo one > $HOME/one'\n[[step]]\nname = 'two'\nrun = 'true'\n");
    let store = Store::open_existing(two.one.home()).unwrap().unwrap();
    let record = store.record(&name.parse().unwrap()).unwrap().unwrap();
    let tags = two
        .registry
        .data()
        .join("docker/registry/v2/repositories/team/rocm/_manifests/tags");
    let link = |key: &str| tags.join(key).join("current/link");
    let keys: Vec<&str> = record
        .steps
        .iter()
        .filter_map(|step| step.key.as_deref())
        .collect();
    // A tag that points to another step's snapshot.
    let right = fs::read(link(keys[1])).unwrap();
    fs::copy(link(keys[0]), link(keys[1])).unwrap();
    let up = two.run(&two.other, &["up", name, "--pull"]);
    up.exits(8).says(&["has unexpected content", keys[0]]);
    fs::write(link(keys[1]), right).unwrap();
    // A layer with other bytes.
    let shared = store
        .shared_layer(&keys[0].parse().unwrap())
        .unwrap()
        .unwrap()
        .tree
        .unwrap();
    let (blob, good) = two.registry.spoil(&shared.sha256);
    insta::assert_snapshot!(two.shows("other: up ENV --pull"), @"
    other$ rockenv up ENV --pull
    pull from REPOSITORY … SIZE
    error: cannot pull `ID` from `REPOSITORY`
      caused by: `REPOSITORY@sha256:ID` sent an invalid response
      caused by: `STORE/blobs/sha256/.ID.partial` has SHA-256 ID, not ID
    help: remove it from the registry, then push it again
    exit code 8
    ");
    let other = Store::open_existing(two.other.home()).unwrap().unwrap();
    assert!(other.layers().unwrap().is_empty());
    fs::write(&blob, good).unwrap();
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["2 done before"]);
    two.other.rockenv(&["fsck"]).ok();
}

#[test]
fn a_pull_that_was_killed_leaves_nothing_and_the_next_one_converges() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed("[[step]]\nname = 'one'\nrun = 'head -c 30M /dev/urandom > $HOME/one'\n");
    let other = Store::open_existing(two.other.home()).unwrap().unwrap();
    let tag = other_key(&two.one, name);
    let reference = format!("{}:{tag}", two.repository());
    // Kills `pull` at several moments.
    let mut killed = 0;
    for wait in [20, 60, 120, 180, 260] {
        let mut running = two.other.command(&["pull", &reference]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(wait));
        killed += usize::from(running.try_wait().unwrap().is_none());
        running.kill().unwrap();
        running.wait().unwrap();
        for layer in other.layers().unwrap() {
            assert!(other.layer_dir(&layer.id).join("diff").is_dir());
        }
    }
    assert!(killed > 0);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["1 done before"]);
    two.assert_same(name);
    // A pull that was killed when it had all of it left a directory that no later pull needed to replace.
    two.other.rockenv(&["gc", "--yes"]).ok();
    let left = fs::read_dir(two.other.home().join("images")).unwrap();
    let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(left.filter(|name| name.starts_with("tmp-")).count(), 0);
}

fn other_key(store: &TestStore, name: &str) -> String {
    store.keys(name).pop().unwrap().1
}

#[test]
fn a_volume_that_was_not_frozen_is_not_pushed() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(STEPS);
    two.one.rockenv(&["up", name]).ok();
    insta::assert_snapshot!(two.shows("one: push ENV"), @"
    one$ rockenv push ENV
    error: no snapshot of env `ENV` can be shared: its build volume `build` is not part of it, because this is an overlay store
    help: rockenv setup --store-image SIZE makes a store that freezes them
    exit code 2
    ");
}
