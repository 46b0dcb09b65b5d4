//! A remote storage of ccache that several machines share, each of them a store: the second machine fetches what the
//! first one compiled. Uses real servers on loopback. Needs root.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::env::TestStore;
use crate::support::server::Server;
use fs_err as fs;

const PASSWORD: &str = "hunter22";
/// By default, ccache gives up on a storage after a tenth of a second, which a busy machine may need.
const PATIENT: &str = "|connect-timeout=30000|operation-timeout=30000";

/// Compiles one file, and leaves ccache's counters in the home directory.
const PROFILE: &str = "
env-from-host = ['CCACHE_REMOTE_STORAGE']
[env]
CCACHE_DIR = '/c'
CCACHE_COMPILERCHECK = 'content'
[[volume]]
name = 'c'
kind = 'cache'
target = '/c'
[[step]]
name = 'compile'
run = '''
echo 'int f(int a) { return a + 1; }' > a.c
ccache gcc -c a.c -o a.o
ccache --print-stats > stats
echo \"the storage is $CCACHE_REMOTE_STORAGE\"
'''
";

fn redis(port: u16, place: &Path) -> Command {
    let mut command = quiet("redis-server");
    command
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--requirepass", PASSWORD, "--port", &port.to_string()])
        .arg("--dir")
        .arg(place);
    command
}

fn nginx(port: u16, place: &Path) -> Command {
    let at = place.display();
    let text = format!(
        "daemon off; master_process off; user root; pid {at}/pid; error_log {at}/error;
         events {{}}
         http {{
             access_log off; client_body_temp_path {at}/body; proxy_temp_path {at}/proxy;
             fastcgi_temp_path {at}/fastcgi; uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;
             server {{
                 listen 127.0.0.1:{port}; root {at}/files;
                 location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
             }}
         }}"
    );
    fs::create_dir_all(place.join("files")).unwrap();
    fs::write(place.join("conf"), text).unwrap();
    let mut command = quiet("/usr/sbin/nginx");
    command.arg("-e").arg(place.join("error"));
    command.arg("-c").arg(place.join("conf"));
    command
}

fn quiet(program: &str) -> Command {
    let mut command = Command::new(program);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn machine() -> TestStore {
    let store = TestStore::with_builder();
    fs::write(
        store
            .work()
            .join("profiles")
            .join(format!("{}.toml", store.env())),
        format!("schema = 1\nimage = \"builder\"\n{PROFILE}"),
    )
    .unwrap();
    store
}

fn know(store: &TestStore, storage: &str) {
    let text = format!("ccache-remote = '{storage}'\n");
    store.configure(&text);
}

/// Returns the value of one of ccache's counters.
fn counted(store: &TestStore, what: &str) -> u32 {
    let stats = store.sh("cat stats").ok().text();
    let line = stats.lines().find_map(|line| line.strip_prefix(what));
    line.and_then(|rest| rest.trim().parse().ok())
        .unwrap_or_else(|| panic!("{what}: {stats}"))
}

/// Builds on two machines with `up`, and expects that the second one compiles nothing.
fn shared(machines: &[TestStore; 2], storage: &str, up: &[&str]) {
    for (machine, [hits, misses]) in machines.iter().zip([[0, 1], [1, 0]]) {
        know(machine, storage);
        machine.rockenv(&[&["up", machine.env()], up].concat()).ok();
        assert_eq!(counted(machine, "remote_storage_hit\t"), hits);
        assert_eq!(counted(machine, "cache_miss\t"), misses);
    }
}

#[test]
fn redis_and_http_are_shared_by_machines_and_a_password_by_nobody() {
    let place = tempfile::tempdir().unwrap();
    let redis = Server::start(|port| redis(port, place.path()));
    let port = redis.port;
    let storage = format!("redis://{PASSWORD}@127.0.0.1:{port}{PATIENT}");
    let machines = [machine(), machine()];
    shared(&machines, &storage, &[]);
    let first = &machines[0];
    let logged = first.rockenv(&["logs", first.env()]).ok().text();
    let hidden = format!("the storage is redis://***@127.0.0.1:{port}");
    assert!(logged.contains(&hidden), "{logged}");
    for place in ["envs", "layers", "caches", "locks"] {
        let found = Command::new("grep")
            .args(["-rl", PASSWORD])
            .arg(first.home().join(place))
            .output()
            .unwrap();
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        assert_eq!(found, "", "the password is in the store");
    }
    // Another storage or password rebuilds nothing.
    know(first, "redis://127.0.0.1:1");
    first.up().says(&["nothing to do"]);
    // Without the storage a step still succeeds, because it is only a cache.
    let rerun = ["--rerun", "compile"];
    first
        .rockenv(&[&["up", first.env()][..], &rerun].concat())
        .ok();
    for machine in &machines {
        machine.rockenv(&["--yes", "cache", "clear", "c"]).ok();
    }
    let nginx = Server::start(|port| nginx(port, place.path()));
    let storage = format!("http://127.0.0.1:{}/ccache{PATIENT}", nginx.port);
    shared(&machines, &storage, &rerun);
    // A command by hand uses it too.
    first
        .sh("printf %s \"$CCACHE_REMOTE_STORAGE\"")
        .ok()
        .prints(&storage);
    assert!(place.path().join("files/ccache").is_dir());
}
