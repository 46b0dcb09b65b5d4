//! Several layer transfers at once: how many, how much memory, and what the error of one does to the others.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Two;
use super::proxy::{Fault, Proxy};
use crate::support::env::TestStore;
use crate::support::run::{Background, own_memory};

/// How many layers are sent at once.
const AT_ONCE: usize = 3;

/// Returns four steps that each write `size` incompressible bytes.
fn steps(size: &str) -> String {
    let step = |number| {
        format!(
            "[[step]]\nname = 's{number}'\nrun = 'head -c {size} /dev/urandom > $HOME/{number}'\n"
        )
    };
    (1..=4).map(step).collect()
}

/// Uploads that wait for each other.
#[derive(Default)]
struct Meeting {
    begun: AtomicUsize,
    together: Mutex<usize>,
}

impl Meeting {
    /// Returns the number of a layer's upload, once all expected uploads have begun or time is up.
    fn join(&self, head: &str) -> Option<usize> {
        // The first upload is the image.
        let number = head
            .starts_with("PATCH ")
            .then(|| self.begun.fetch_add(1, Ordering::Relaxed))?
            .checked_sub(1)?;
        if number < AT_ONCE {
            *self.together.lock().unwrap() += 1;
            let begun = Instant::now();
            while *self.together.lock().unwrap() < AT_ONCE {
                if begun.elapsed() > Duration::from_secs(30) {
                    *self.together.lock().unwrap() -= 1;
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Some(number)
    }
}

#[test]
fn layers_are_sent_at_once_in_little_memory() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(&steps("24M")).to_owned();
    two.one.rockenv(&["up", &name]).ok();
    let meeting = Arc::new(Meeting::default());
    let seen = Arc::clone(&meeting);
    let proxy = Proxy::start(&two.registry.host, move |head| {
        seen.join(head);
        Fault::None
    });
    let mut command = two.one.command(&["push", &name]);
    command.env("ROCKENV_REGISTRY", proxy.repository());
    let mut push = Background::start(command);
    let mut peak = 0;
    while push.runs() {
        peak = peak.max(own_memory(push.pid()));
        std::thread::sleep(Duration::from_millis(10));
    }
    push.wait().ok().says(&["4 snapshots at", "5 layers sent"]);
    assert_eq!(*meeting.together.lock().unwrap(), AT_ONCE);
    eprintln!("push took {} KiB of memory", peak >> 10);
    // The limit is less than three whole layers.
    assert!(
        (1 << 20..64 << 20).contains(&peak),
        "push took {peak} bytes of memory"
    );
    two.run(&two.other, &["up", &name, "--pull"])
        .ok()
        .says(&["4 done before"]);
    two.assert_same(&name);
}

#[test]
fn a_refused_layer_ends_the_others_and_the_next_push_finishes() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(&steps("8M")).to_owned();
    two.one.rockenv(&["up", &name]).ok();
    let meeting = Meeting::default();
    let refused = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&refused);
    let proxy = Proxy::start(&two.registry.host, move |head| match meeting.join(head) {
        None => Fault::None,
        // The second of three concurrent uploads fails, while the others hang.
        Some(1) => {
            *seen.lock().unwrap() = Some(Instant::now());
            Fault::Says(500, String::new(), String::new())
        }
        Some(_) => Fault::Hangs(1 << 20),
    });
    let mut command = two.one.command(&["push", &name]);
    command.env("ROCKENV_REGISTRY", proxy.repository());
    crate::support::run::finish("push".into(), command)
        .exits(4)
        .says(&["cannot push snapshot `s", "the registry answered 500"]);
    // The error does not wait for the hanging uploads to time out.
    let refused = refused.lock().unwrap().unwrap();
    assert!(refused.elapsed() < Duration::from_secs(60));
    let found = two.run(&two.other, &["up", &name, "--pull"]).ok();
    found.says(&["step 1/4 s1"]);
    insta::assert_snapshot!(two.shows("one: push ENV"), @"
    one$ rockenv push ENV
    push to REPOSITORY … SIZE
    ENV: 4 snapshots at REPOSITORY; 4 layers sent (SIZE), 1 already there, in TIME
    ");
}
