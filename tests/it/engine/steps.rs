//! Steps that fail, print a lot, or are watched.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use fs_err as fs;

use super::logs::{OUT, release};
use crate::support::env::TestStore;
use crate::support::ordinary::Ordinary;
use crate::support::run::{children, finish, own_memory, peak_memory, wait_until};

#[test]
fn a_failed_step_says_what_to_do_and_goes_on_there() {
    let store = TestStore::new();
    let steps = |middle: &str| {
        format!(
            "volume = [{{ name = 'out', kind = 'output', target = '/out' }}, {{ name = 'build', kind = 'build', target = '/build' }}]
             [[step]]\nname = 'first'\nrun = 'echo first >> /out/ran'
             [[step]]\nname = 'middle'\nrun = '''{middle}'''
             [[step]]\nname = 'last'\nrun = 'echo last >> /out/ran; cat ~/made'\n"
        )
    };
    store.profile(&steps("echo middle >> /out/ran; echo built >> /build/b; echo half > ~/half\nfor i in $(seq 50); do echo line $i; done\necho why it failed >&2\ntest -e /out/allowed; echo made > ~/made"));
    let ran = store.rockenv(&["up", store.env()]).exits(5);
    let env = store.env();
    ran.says(&[
        "line 50",
        "why it failed",
        "step `middle` failed with exit code 1",
        &format!("rockenv shell --failed {env}"),
        &format!("rockenv up {env}"),
    ]);
    let line = store.rockenv(&["up", store.env()]).exits(5).err;
    let log = line
        .lines()
        .find_map(|line| line.trim().strip_prefix("log: "))
        .expect("the log's path")
        .to_owned();
    let text = fs::read_to_string(&log).unwrap();
    assert!(
        text.contains(" | line 1\n") && text.contains(" ! why it failed\n"),
        "{text}"
    );

    // `shell --failed` shows what the failed step left, and other commands do not.
    let mut shell = store.command(&["shell", "--failed", env]);
    shell.stdin(
        fs::File::open(write(&store, "cat ~/half; ls ~; exit 4\n"))
            .unwrap()
            .into_parts()
            .0,
    );
    let shell = crate::support::run::finish("shell".into(), shell).exits(4);
    assert!(shell.text().contains("half\nhalf"), "{shell:?}");
    store.sh("ls ~; cat /build/b").ok().prints("built\nbuilt");

    fs::write(
        store.home().join("outputs").join(env).join("out/allowed"),
        "",
    )
    .unwrap();
    store.up();
    let ran = fs::read_to_string(store.home().join("outputs").join(env).join("out/ran")).unwrap();
    assert_eq!(ran, "first\nmiddle\nmiddle\nmiddle\nlast\n");
    assert!(store.up().err.contains("nothing to do"));
    store.rockenv(&["shell", "--failed", env]).exits(7);

    store.profile("[[step]]\nname = 'where'\nworkdir = '/no/where'\nrun = 'true'\n");
    store
        .rockenv(&["up", env])
        .exits(5)
        .says(&["cannot start in directory `/no/where`"]);
    store.profile("[[step]]\nname = 'what'\nshell = ['/no/shell']\nrun = 'true'\n");
    store
        .rockenv(&["up", env])
        .exits(5)
        .says(&["cannot run `/no/shell`"]);
}

fn write(store: &TestStore, text: &str) -> std::path::PathBuf {
    let path = store.work().join("script");
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_gigabyte_of_output_is_kept_in_little_memory() {
    let store = TestStore::new();
    // Lines of 250 KiB with every byte but the newline, and one of 64 MiB without any. A debug build, which is slow,
    // gets a tenth of it.
    let (rounds, errors) = if cfg!(debug_assertions) {
        (1, 1)
    } else {
        (60, 4)
    };
    store.profile(&format!(
        "[[step]]\nname = 'loud'\nrun = '''
         head -c 250K /dev/urandom | tr '\\n' '.' > ~/line; printf 'end\\n' >> ~/line
         for i in $(seq 64); do cat ~/line; done > ~/many
         for i in $(seq {rounds}); do cat ~/many; done
         printf '\\377\\376 bytes\\n' >&2
         head -c 64M /dev/zero | tr '\\0' x
         for i in $(seq {errors}); do cat ~/many >&2; done
         sha256sum ~/line > ~/sum'''\n",
    ));
    let mut up = store.command(&["up", store.env()]);
    up.env("ROCKENV_LOG_MAX", "4G");
    let mut up = crate::support::run::Background::start(up);
    let (mut own, mut peak) = (0, 0);
    while up.runs() {
        for pid in children(up.pid()).into_iter().chain([up.pid()]) {
            own = own.max(own_memory(pid));
            peak = peak.max(peak_memory(pid));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    up.wait().ok();
    assert!(
        (1..=8 << 20).contains(&own),
        "a process of rockenv's took {own} bytes"
    );
    assert!(
        cfg!(debug_assertions) || peak <= 20 << 20,
        "a process of rockenv's took {peak} bytes"
    );
    let line = store
        .rockenv(&["exec", store.env(), "--", "cat", "line"])
        .ok()
        .out;
    let logs = store.env_dir().join("logs");
    let run = fs::read_dir(logs).unwrap().next().unwrap().unwrap().path();
    let mut log =
        BufReader::with_capacity(1 << 20, fs::File::open(run.join("01-loud.log")).unwrap());
    let (mut text, mut whole, mut long, mut odd) = (Vec::new(), 0, 0u64, 0);
    let mut pieces: [Vec<u8>; 2] = [Vec::new(), Vec::new()];
    while log.read_until(b'\n', &mut text).unwrap() > 0 {
        let rest = text[27..].strip_suffix(b"\n").unwrap();
        let slot = usize::from(text[25] == b'!');
        if rest == b"\xff\xfe bytes" {
            odd += 1;
        } else if rest.iter().all(|byte| *byte == b'x') {
            long += rest.len() as u64;
        } else {
            pieces[slot].extend_from_slice(rest);
            if rest.ends_with(b"end") {
                assert!(pieces[slot] == line[..line.len() - 1], "a line changed");
                pieces[slot].clear();
                whole += 1;
            }
        }
        text.clear();
    }
    assert_eq!((whole, long, odd), (64 * (rounds + errors), 64 << 20, 1));
}

#[test]
fn logs_follow_a_step_as_it_runs() {
    let store = TestStore::new();
    store.profile(
        "volume = [{ name = 'out', kind = 'output', target = '/out' }]
         [[step]]\nname = 'slow'\nrun = 'echo begun; until test -e /out/go; do sleep 0.05; done; echo done'
         [[step]]\nname = 'next'\nrun = 'echo second'\n",
    );
    let up = store.start(&["up", store.env()]);
    let logs = store.env_dir().join("logs");
    wait_until("there is a log", || {
        logs.exists() && fs::read_dir(&logs).unwrap().next().is_some()
    });
    let file = store.work().join("followed");
    let mut follow = store.command(&["logs", "-f", store.env()]);
    follow.stdout(fs::File::create(&file).unwrap().into_parts().0);
    let follow = crate::support::run::Background::start(follow);
    let shows = |text: &str| fs::read_to_string(&file).unwrap().contains(text);
    wait_until("the first line", || shows("begun\n"));
    assert!(!shows("done"));
    // A full disk has no room for samples.
    let run = fs::read_dir(&logs).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(run.join("01-slow.samples")).unwrap();
    let status = store.rockenv(&["status", store.env()]).ok().text();
    assert!(status.contains("now      step slow\n"), "{status}");
    let rows = status.lines().map(|line| line.split_whitespace());
    let mut rows = rows.map(Iterator::collect::<Vec<&str>>);
    assert!(
        rows.any(|row| row.starts_with(&["slow", "running"])),
        "{status}"
    );
    fs::write(store.out().join("go"), "").unwrap();
    up.wait().ok();
    follow.wait().ok();
    assert_eq!(fs::read_to_string(&file).unwrap(), "begun\ndone\nsecond\n");
    store
        .rockenv(&["logs", store.env(), "slow"])
        .ok()
        .prints("begun\ndone");
    let times = store
        .rockenv(&["logs", "--times", store.env(), "next"])
        .ok()
        .text();
    assert!(
        times.ends_with("Z | second\n") && times.len() == 34,
        "{times}"
    );
}

#[test]
fn a_log_is_bounded_and_harmless_to_show() {
    let store = TestStore::new();
    store.profile(
        "[[step]]\nname = 'loud'\nrun = '''
         printf 'first \\033]0;title\\007\\n'
         seq -f '%.0f of many lines that nobody reads' 100000
         echo last'''\n",
    );
    let mut up = store.command(&["up", store.env()]);
    up.env("ROCKENV_LOG_MAX", "1M");
    crate::support::run::Background::start(up).wait().ok();
    let shown = store.rockenv(&["logs", store.env()]).ok().text();
    let gap = shown.lines().position(|line| line.contains("omitted here"));
    let gap = gap.expect("a line in place of the middle");
    assert!(
        shown.starts_with("first \\x1b]0;title\\x07\n1 of many"),
        "{}",
        &shown[..80]
    );
    assert!(shown.ends_with("100000 of many lines that nobody reads\nlast\n"));
    assert!(gap > 5000 && shown.len() < 1 << 20, "{gap}");
    let raw = store.rockenv(&["logs", "--raw", store.env()]).ok().out;
    assert!(raw.starts_with(b"first \x1b]0;title\x07\n"));
}

#[test]
fn a_failed_step_is_named_even_if_the_one_before_it_cannot_be_marked_as_synced() {
    let store = TestStore::new();
    store.profile(&format!(
        "{OUT}[[step]]\nname = 'one'\nrun = 'until test -e /out/go; do sleep 0.05; done'
         [[step]]\nname = 'two'\nrun = 'sleep 1; exit 3'\n"
    ));
    let up = store.start(&["up", store.env()]);
    let out = store.out();
    wait_until("the first step has its output volume", || out.exists());
    // The mark is a file of this name beside the tree.
    for tree in fs::read_dir(store.env_dir().join("trees")).unwrap() {
        fs::create_dir(tree.unwrap().path().join("durable")).unwrap();
    }
    release(&store);
    up.wait()
        .exits(5)
        .says(&["cannot mark layer", "step `two` failed with exit code 3"]);
}

#[test]
fn a_step_with_a_malformed_report_has_failed() {
    let store = TestStore::new();
    store.profile(
        "[[step]]\nname = 'tools'\nrun = 'echo nonsense > /run/rockenv/pins/installed; echo made > ~/made'\n",
    );
    store.rockenv(&["up", store.env()]).exits(5).says(&[
        "the report of step `tools`, `/run/rockenv/pins/installed`, has a line `nonsense`",
        "each line must be `NAME VERSION sha256:DIGEST`",
        "rockenv shell --failed",
    ]);
    store
        .rockenv(&["status", store.env()])
        .ok()
        .says(&["the failed tree of `tools` is kept"]);
    store.rockenv(&["fsck"]).ok();
}

#[test]
fn a_script_that_is_no_argument_is_refused_by_the_check() {
    let store = TestStore::new();
    let line = "echo 0123456789\n";
    let steps = |count: usize| {
        let script = line.repeat(count);
        format!("[[step]]\nname = 'long'\nrun = \"\"\"\n{script}\"\"\"\n")
    };
    store.profile(&steps((128 << 10) / line.len()));
    store
        .rockenv(&["profile", "check", store.env()])
        .exits(3)
        .says(&["the expanded text is longer than 128 KiB", ".toml:5"]);
    store.profile(&steps((128 << 10) / line.len() - 1));
    store.rockenv(&["profile", "check", store.env()]).ok();
    store.up();
}

#[test]
fn the_tool_of_a_cache_runs_in_a_container_of_its_env() {
    let store = TestStore::new();
    let fill = "mkdir -p /var/cache/apt/archives/partial
                head -c 3000000 /dev/urandom > /var/cache/apt/archives/x_1_amd64.deb";
    store.up_with(&format!(
        "[[volume]]\nname = 'apt'\nkind = 'cache'\ntarget = '/var/cache/apt'\nmax = '1M'\n
         [[step]]\nname = 'fill'\nuser = 'root'\nrun = '''{fill}'''\n"
    ));
    let gc = store.rockenv(&["--yes", "gc", "--json"]).ok();
    let done: serde_json::Value = gc.json();
    assert_eq!(done["removed"][0]["name"], "cache apt", "{gc:?}");
    let archives = store.home().join("caches/apt/archives");
    assert!(!archives.join("x_1_amd64.deb").exists());
}

#[test]
fn without_root_the_build_user_is_a_number_inside() {
    if Ordinary::get().is_none() {
        return;
    }
    let store = TestStore::new();
    store.up_with(
        "[[volume]]\nname = 'cache'\nkind = 'cache'\ntarget = '/cache'\n[[step]]\nname = 'one'\nrun = 'true'\n",
    );
    let as_other = |verb: &str| {
        let mut command = store.command(&[verb, store.env()]);
        command.env("ROCKENV_BUILD_USER", "1000:1000");
        finish(verb.to_owned(), command).ok()
    };
    as_other("up").says(&[
        "cache `cache` belongs to user 0: steps that run as user 1000 cannot write to it",
        "podman unshare chown -R 1000:1000 ",
    ]);
    let plan = as_other("plan");
    assert!(!plan.err.contains("cannot write"), "{plan:?}");
}
