//! What a container cannot reach, and what is mounted into it.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::Command;

use fs_err as fs;

use super::commands::ONE;
use crate::support::env::{TestStore, build_user, is_service};
use crate::support::loopfs::run;
use crate::support::template::write_recipe;

fn toml(text: std::fmt::Arguments<'_>) -> String {
    text.to_string()
}

/// X servers and D-Bus daemons listen on such sockets and accept clients by their uid.
#[test]
fn abstract_sockets_of_the_host_are_out_of_reach() {
    let store = TestStore::new();
    let name = format!("rockenv-{}", store.env());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let server = UnixListener::bind_addr(&address).unwrap();
    server.set_nonblocking(true).unwrap();
    let connect = r#"perl -e 'socket(S, 1, 1, 0); print connect(S, pack("S a*", 1, "\0$ARGV[0]")) ? "reached\n" : "$!\n"'"#;
    let listen = r#"perl -e 'socket(S, 1, 1, 0); bind(S, pack("S a*", 1, "\0inside")); listen(S, 1); mkdir("/tmp/listens"); sleep 60' & until test -e /tmp/listens; do sleep 0.1; done"#;
    store.profile(&format!(
        "[[step]]\nname = 'one'\nrun = '''{connect} {name}'''\n\
         [[step]]\nname = 'root'\nuser = 'root'\nrun = '''{connect} {name}'''\n\
         [[step]]\nname = 'inside'\nrun = '''{listen}; {connect} inside'''\n"
    ));
    store.up();
    // Root in a service's container may gain privileges, so these rules do not apply to it.
    let root = match is_service() {
        true => "reached\n",
        false => "Operation not permitted\n",
    };
    for (step, said) in [
        ("one", "Operation not permitted\n"),
        ("root", root),
        ("inside", "reached\n"),
    ] {
        let log = store.rockenv(&["logs", store.env(), step]).ok().text();
        assert_eq!(log, said, "{step}");
    }
    let connected = std::iter::from_fn(|| server.accept().ok()).count();
    assert_eq!(connected, usize::from(root == "reached\n"));
}

#[test]
fn without_network_there_is_none() {
    let store = TestStore::new();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let look = format!(
        "ls /sys/class/net; cat /proc/net/route | wc -l; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; (: </dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached"
    );
    store.profile(&format!(
        "[[step]]\nname = 'off'\nnetwork = false\nshell = ['/bin/bash', '-c']\nrun = '''{look} || echo not reached'''\n\
         [[step]]\nname = 'on'\nshell = ['/bin/bash', '-c']\nrun = '''{look}'''\n"
    ));
    store.up();
    let off = store.rockenv(&["logs", store.env(), "off"]).ok().text();
    assert!(
        off.starts_with("lo\n1\n1024\n") && off.ends_with("not reached\n"),
        "{off}"
    );
    let on = store.rockenv(&["logs", store.env(), "on"]).ok().text();
    assert!(on.ends_with("\nreached\n"), "{on}");
    store
        .rockenv(&["exec", store.env(), "--", "bash", "-c", &look])
        .ok();
}

#[test]
fn volumes_of_every_kind_are_mounted_as_said() {
    let store = TestStore::new();
    let work = store.work().to_owned();
    for name in ["src", "host", "rw", "out"] {
        fs::create_dir(work.join(name)).unwrap();
        fs::write(work.join(name).join("there"), name).unwrap();
    }
    let (outside, inside) = build_user();
    nix::unistd::chown(&work.join("rw"), Some(outside.into()), Some(outside.into())).unwrap();
    store.up_with(
        "volume = [
         { name = 'src', kind = 'source', path = '../src', target = '/v/src', access = 'ro' },
         { name = 'build', kind = 'build', target = '/v/build' },
         { name = 'cache', kind = 'cache', target = '/v/cache' },
         { name = 'out', kind = 'output', target = '/v/out' },
         { name = 'mine', kind = 'output', path = '../out', target = '/v/mine' },
         { name = 'new', kind = 'output', path = '../a/new', target = '/v/new' },
         { name = 'host', kind = 'host', path = '../host', target = '/v/host' },
         { name = 'rw', kind = 'host', path = '../rw', target = '/v/rw', access = 'rw' },
         { name = 'file', kind = 'host', path = '../host/there', target = '/v/file' },
         { name = 'inner', kind = 'cache', target = '/v/build/inner' }]
         [[step]]\nname = 'write'\nrun = 'for v in build cache out new rw build/inner; do echo w > /v/$v/w; done'\n",
    );
    let writes = "cd /v; for v in *; do if [ -d $v ]; then (echo x > $v/x) 2>/dev/null && echo $v rw || echo $v ro; fi; done";
    store
        .root_sh(writes)
        .ok()
        .prints("build rw\ncache rw\nhost ro\nmine rw\nnew rw\nout rw\nrw rw\nsrc ro");
    store
        .sh("cat /v/src/there /v/host/there /v/file /v/mine/there")
        .ok()
        .prints("srchosthostout");
    store
        .root_sh("echo x >> /v/file")
        .exits(2)
        .says(&["Read-only"]);
    // Root inside can neither make the mount writable nor uncover the files below it.
    store
        .root_sh("mount -o remount,rw,bind /v/host; umount /v/host; echo x > /v/host/y")
        .exits(2);
    assert_eq!(fs::read_dir(work.join("host")).unwrap().count(), 1);
    // No engine gives root inside a capability that is not in Docker's default set, and all allow `munlockall` and
    // `process_vm_readv`, which Docker refuses before release 23.
    let call = "($lock, $read) = (POSIX::uname())[4] eq q(x86_64) ? (152, 310) : (231, 270); \
                print syscall($lock), syscall($read, 0, 0, 0, 0, 0, 0)";
    let allowed = store
        .root_sh(&format!(
            "echo $((0x$(sed -n 's/^CapBnd:\\t//p' /proc/self/status) & ~0xa80425fb)); perl -MPOSIX -e '{call}'"
        ))
        .ok()
        .text();
    let wanted = if is_service() { "0\n0" } else { "0\n00" };
    assert!(allowed.starts_with(wanted), "{allowed}");
    // The test itself makes `out`, as the ordinary user if there is one.
    let own = if inside == 0 { outside } else { 0 };
    for (path, owner) in [
        (store.home().join("caches/cache"), outside),
        (store.out().join("w"), outside),
        (work.join("a/new"), outside),
        (work.join("out"), own),
        (work.join("rw/w"), outside),
    ] {
        assert_eq!(
            fs::metadata(&path).unwrap().uid(),
            owner,
            "{}",
            path.display()
        );
    }
    // A wrong path does not silently become an empty directory.
    store.profile(&format!(
        "volume = [{{ name = 'no', kind = 'host', path = '../nothing', target = '/v/no' }}]\n{ONE}"
    ));
    store
        .rockenv(&["up", store.env()])
        .exits(3)
        .says(&["volume `no`", "nothing", "mkdir -p"]);
    assert!(!work.join("nothing").exists());
}

/// Names that a tool below could misread as separators, escapes, quotes or options.
const ODD: [&str; 8] = [
    "a b",
    "a:b",
    "a,b",
    "a\"b",
    "a\\b",
    "a\nb",
    "größe 🦀",
    "+-~$x:\\:,",
];

#[test]
fn a_volume_below_the_home_leaves_the_home_to_the_user() {
    let store = TestStore::new();
    // The first container makes the mount point, as root.
    store.up_with(
        "volume = [{ name = 'below', kind = 'build', target = '/home/builder/deep/below' }]
         [[step]]\nname = 'root'\nuser = 'root'\nrun = 'true'
         [[step]]\nname = 'own'\nrun = 'touch ~/own ~/deep/below/own'\n",
    );
    store
        .sh("test $(stat -c %u ~) = $(id -u) && ls ~ ~/deep/below")
        .ok()
        .prints("/home/builder:\ndeep\nown\n\n/home/builder/deep/below:\nown");
}

#[test]
fn odd_characters_in_paths_are_no_matter() {
    let store = TestStore::new();
    let mut volumes = String::new();
    for (number, name) in ODD.iter().enumerate() {
        let directory = store.work().join("odd").join(name);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("name"), name).unwrap();
        let source = format!("{:?}", directory.to_str().unwrap());
        let output = format!(
            "{:?}",
            store.work().join("out").join(name).to_str().unwrap()
        );
        volumes += &toml(format_args!(
            "[[volume]]\nname = 'h{number}'\nkind = 'source'\npath = {source}\ntarget = '/v/h{number}'\n\
             [[volume]]\nname = 'o{number}'\nkind = 'output'\npath = {output}\ntarget = '/v/o{number}'\n"
        ));
    }
    store.up_with(&format!(
        "{volumes}[[step]]\nname = 'copy'\nrun = 'for n in 0 1 2 3 4 5 6 7; do cp /v/h$n/name /v/o$n/name; done'\n"
    ));
    for name in ODD {
        assert_eq!(
            fs::read_to_string(store.work().join("out").join(name).join("name")).unwrap(),
            name
        );
    }
}

#[test]
fn a_store_may_lie_in_an_odd_place() {
    let outer = TestStore::new();
    let parent = outer.work().join("a b:c,d\\e\"f");
    fs::create_dir(&parent).unwrap();
    let store = TestStore::at(&parent.join("lowerdir=x:y"));
    store.up_with("[[step]]\nname = 'one'\nrun = 'echo one > ~/one'\n[[step]]\nname = 'two'\nrun = 'cat ~/one'\n");
    store.sh("cat ~/one").ok().prints("one");
    store
        .rockenv(&["rollback", "--yes", store.env(), "one"])
        .ok();
    store.sh("cat ~/one").ok().prints("one");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

#[test]
fn a_link_in_the_image_leads_no_mount_outside() {
    let store = TestStore::new();
    let victim = store.work().join("victim");
    let tree = store.work().join("tree");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("sentinel"), "untouched").unwrap();
    fs::create_dir(store.work().join("src")).unwrap();
    fs::write(store.work().join("src/mine"), "mine").unwrap();
    run(Command::new("cp")
        .arg("-al")
        .args([&crate::support::rootfs(), &tree]));
    symlink(&victim, tree.join("link")).unwrap();
    symlink(
        format!("../../../../../../../../../../../..{}", victim.display()),
        tree.join("up"),
    )
    .unwrap();
    fs::write(tree.join("file"), "a file").unwrap();
    write_recipe(&store.work().join("images/links.toml"), &tree);
    let before = state(&victim);
    let profile = |targets: &[&str]| {
        let mut text = "schema = 1\nimage = 'links'\n".to_owned();
        for (number, target) in targets.iter().enumerate() {
            let kind = ["cache", "output", "build"][number % 3];
            text += &toml(format_args!(
                "[[volume]]\nname = 'v{number}'\nkind = '{kind}'\ntarget = '{target}'\n"
            ));
        }
        text.push_str(
            "[[volume]]\nname = 'src'\nkind = 'source'\npath = '../src'\ntarget = '/src'\n",
        );
        text.push_str("[[step]]\nname = 'one'\nrun = 'for d in $(ls -d /link /up /link/in); do echo x > $d/x || true; done'\n");
        fs::write(
            store
                .work()
                .join("profiles")
                .join(format!("{}.toml", store.env())),
            text,
        )
        .unwrap();
    };
    for targets in [
        &["/link"][..],
        &["/link/in"],
        &["/up", "/up/in"],
        &["/up/in", "/link/in/deeper"],
    ] {
        profile(targets);
        let ran = store.rockenv(&["up", store.env(), "--rerun", "one"]);
        assert!([0, 4].contains(&ran.code), "{targets:?}: {ran:?}");
        assert_eq!(state(&victim), before, "{targets:?}");
        store.rockenv(&[
            "exec",
            "--root",
            store.env(),
            "--",
            "sh",
            "-c",
            "echo y > /link/y; rm -rf /link /up",
        ]);
        assert_eq!(state(&victim), before, "{targets:?}");
    }
    // A directory cannot be mounted on a file, and the error names the file.
    profile(&["/file"]);
    let ran = store.rockenv(&["up", store.env(), "--rerun", "one"]);
    assert_ne!(ran.code, 0);
    ran.says(&["/file"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_eq!(state(&victim), before);
    assert_eq!(
        fs::read_to_string(store.work().join("src/mine")).unwrap(),
        "mine"
    );
}

fn state(directory: &Path) -> (Vec<String>, i64, i64, u64, String) {
    let names = fs::read_dir(directory).expect("a directory").map(|entry| {
        entry
            .expect("an entry")
            .file_name()
            .into_string()
            .expect("a name")
    });
    let found = fs::metadata(directory).unwrap();
    let text = fs::read_to_string(directory.join("sentinel")).unwrap();
    (
        names.collect(),
        found.mtime(),
        found.mtime_nsec(),
        found.nlink(),
        text,
    )
}
