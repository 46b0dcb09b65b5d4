//! The remaining time of a build, estimated from the files that ninja writes to a build volume. Needs root.

use serde_json::Value;

use crate::support::env::TestStore;

/// Imitates ninja: writes its commands, and a log in which one of them ends each second.
const STEP: &str = r#"
[[volume]]
name = "build"
kind = "build"
target = "/v/build"
[[step]]
name = "one"
run = '''
cd /v/build
for n in $(seq 12); do echo "build $n.o: CXX_COMPILER__a $n.cpp"; done > build.ninja
echo '# ninja log v7' > .ninja_log
for n in $(seq 9); do
    sleep 1
    printf '%d\t%d\t1\t%s.o\t%x\n' $((n * 1000 - 1000)) $((n * 1000)) $n $n >> .ninja_log
    echo "[$n/12] Building CXX object $n.o"
done
'''
"#;

#[test]
fn the_time_left_is_a_range_from_ninjas_files() {
    // A busy machine may delay a command by more than a second, but not in every attempt.
    assert!((0..20).any(|_| is_close()));
}

/// Runs the step in a new store, and returns whether each estimate was close to the time left.
fn is_close() -> bool {
    let store = TestStore::new();
    store.profile(STEP);
    let up = store.rockenv(&["up", store.env(), "--jobs", "1", "--progress", "json"]);
    let out = up.ok().text();
    let lines = out.lines();
    let events: Vec<Value> = lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let known: Vec<_> = events
        .iter()
        .filter(|event| event["event"] == "ninja" && event["range_ms"].is_array())
        .collect();
    assert!(!known.is_empty(), "{events:#?}");
    known.into_iter().all(|event| {
        let left = event["left_ms"].as_u64().unwrap();
        let (least, most) = (&event["range_ms"][0], &event["range_ms"][1]);
        assert!(
            least.as_u64() < Some(left) && Some(left) < most.as_u64(),
            "{event}"
        );
        // Each remaining command takes a second. The estimate is off at first, when the rate is not known yet.
        let done = event["done"].as_u64().unwrap();
        let truth = (12 - done) * 1000;
        let is_close = left.abs_diff(truth) < 2500;
        if !is_close {
            eprintln!("{truth} ms are left: {event}");
        }
        is_close
    })
}
