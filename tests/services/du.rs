//! Disk usage of a service's images and containers.

use crate::support::env::TestStore;
use crate::{assert_nothing_left, service};

#[test]
fn du_counts_what_the_service_has() {
    let store = TestStore::new();
    store.up_with(
        "[[step]]\nname = 'large'\nrun = 'head -c 3000000 /dev/urandom > ~/large'
         [[step]]\nname = 'small'\nrun = 'echo > ~/small'\n",
    );
    store.sh("head -c 2000000 /dev/urandom > ~/live").ok();
    let held = |class: &str, name: &str| {
        let report = store.rockenv(&["du", "--json"]).ok().json();
        let held = report["at_services"].as_array().unwrap().iter();
        let mut held = held.filter(|held| held["class"] == class && held["name"] == name);
        let found = held
            .next()
            .unwrap_or_else(|| panic!("no {class} {name}: {report}"));
        assert!(held.next().is_none(), "{report}");
        let bytes = |field: &str| found[field].as_u64().unwrap();
        (
            bytes("own"),
            bytes("total"),
            found["envs"].as_array().unwrap().len(),
        )
    };
    let around = |bytes: u64, wanted: u64| (wanted..wanted + 500_000).contains(&bytes);
    let (image, total, _) = held("image", "base");
    assert!(image > 10_000_000 && image == total, "{image} of {total}");
    let (own, total, envs) = held("snapshots", "large");
    assert!(
        around(own, 3_000_000) && around(total, image + own),
        "{own} of {total}"
    );
    assert_eq!(envs, 1);
    let (own, _, _) = held("snapshots", "small");
    assert!(around(own, 0), "{own}");
    let (own, total, _) = held("live", "");
    assert!(
        around(own, 2_000_000) && total > 10_000_000,
        "{own} of {total}"
    );
    let engine = service().flavour;
    let text = store.rockenv(&["du"]).ok().text();
    assert!(text.contains(&format!("  snapshots at {engine}")), "{text}");
    assert!(text.contains(&format!("total at {engine}")), "{text}");
    let words = ["report", store.env(), "--json"];
    let report: serde_json::Value = store.rockenv(&words).ok().json();
    let spaces = report["space"].as_array().unwrap().iter();
    let large = format!("snapshot large at {engine}");
    let mut large = spaces.filter(|space| space["name"] == large.as_str());
    let bytes = large.next().expect("the snapshot")["bytes"]
        .as_u64()
        .unwrap();
    assert!(around(bytes, 3_000_000), "{report}");
    assert!(
        report["frees"].as_u64().unwrap() >= 5_000_000,
        "snapshot and live tree: {report}"
    );
    let fork = format!("{}-f", store.env());
    store.rockenv(&["fork", store.env(), &fork]).ok();
    assert_eq!(held("snapshots", "large").2, 2);
    let text = store.rockenv(&["du", &fork]).ok().text();
    let line = format!("snapshot large at {engine}");
    assert!(
        text.contains(&line) && text.contains("also needed by"),
        "{text}"
    );
    store.rockenv(&["rm", "--yes", store.env(), &fork]).ok();
    assert_eq!(held("image", "base").2, 0);
    assert_nothing_left(&store);
}
