//! Which hooks an env gets, and from which step on.

use super::*;
use crate::sys::span::At;

const HOOKED: &str = r#"
schema = 1
image = "debian"
targets = ["gfx1103"]
hooks = ["one", "two"]
volume = [{ name = "src", kind = "source", path = "/src", target = "/src" }]
step = [
  { name = "tools", run = "a" },
  { name = "configure", run = "b", inputs = ["src"] },
  { name = "extra", run = "c", when = { target = ["gfx900"] } },
  { name = "build", run = "d" },
]
"#;

fn hooked(one: HookFacts, two: HookFacts) -> crate::sys::error::Result<Spec> {
    let inputs = inputs!(hooks: [("one".to_owned(), one), ("two".to_owned(), two)].into());
    resolve(&profile(HOOKED), &inputs)
}

#[test]
fn a_hook_counts_from_the_first_step_that_sees_it() {
    let late = |digest: &str| HookFacts {
        from_step: Some("extra".into()),
        ..fix(digest)
    };
    let spec = hooked(fix("h1"), late("h2")).unwrap();
    let from: Vec<_> = spec.hooks.iter().map(|hook| hook.from.as_str()).collect();
    // The second hook's own step is skipped, so the next one is the first to see the change.
    assert_eq!(from, ["configure", "build"]);
    let at = |step: usize| {
        let names = spec
            .hooks_at(&spec.steps[step], "src")
            .map(|hook| hook.name.as_str());
        names.collect::<Vec<_>>()
    };
    assert_eq!(
        (at(0), at(1), at(2)),
        (vec![], vec!["one"], vec!["one", "two"])
    );
    assert_eq!(spec.hooks_at(&spec.steps[2], "other").count(), 0);

    // Listed the other way round, they are applied in the same order, because the keys are the same.
    let text = HOOKED.replace(r#"["one", "two"]"#, r#"["two", "one"]"#);
    let hooks = [("one", fix("h1")), ("two", late("h2"))];
    let hooks = hooks.map(|(name, facts)| (name.to_owned(), facts)).into();
    let swapped = resolve(&profile(&text), &inputs!(hooks)).unwrap();
    assert_eq!(swapped, spec);

    for (one, two, kept) in [("x", "h2", 1), ("h1", "x", 2)] {
        let other = hooked(fix(one), late(two)).unwrap();
        let mut pairs = spec.steps.iter().zip(&other.steps);
        let changed = pairs.position(|(old, new)| old.key != new.key);
        assert_eq!(changed, Some(kept), "{one} {two}");
    }
}

#[test]
fn hooks_are_left_out_or_refused() {
    let at = |name: &&str| At {
        value: (*name).to_owned(),
        place: 0..0,
    };
    let only = |targets: &[&str]| HookFacts {
        applies: Applies {
            targets: targets.iter().map(at).collect(),
            ..Applies::default()
        },
        ..fix("h")
    };
    let spec = hooked(only(&["igpu-all"]), only(&["gfx1201", "dcgpu-all"])).unwrap();
    assert_eq!(spec.hooks.len(), 1);
    assert_eq!(spec.hooks_left_out[0].name, "two");
    assert_eq!(
        spec.hooks_left_out[0].reason,
        "only for gfx1201, dcgpu-all, not for gfx1103"
    );

    let with = |change: fn(&mut HookFacts)| {
        let mut facts = fix("h");
        change(&mut facts);
        hooked(facts, fix("h")).unwrap_err().message().to_owned()
    };
    let error = with(|facts| "elsewhere".clone_into(&mut facts.volume));
    assert_has!(error, "changes `elsewhere`, which is not a `source` volume");
    let error = with(|facts| facts.from_step = Some("elsewhere".into()));
    assert_has!(error, "starts at unknown step `elsewhere`");
    let error = with(|facts| facts.applies.profiles = vec!["therock".to_owned()]);
    assert_has!(error, "is only for therock");
    let unread = HOOKED.replace(", inputs = [\"src\"]", "");
    let inputs =
        inputs!(hooks: [("one".to_owned(), fix("h")), ("two".to_owned(), fix("h"))].into());
    let error = resolve(&profile(&unread), &inputs).unwrap_err();
    assert_has!(error.message(), "would never be applied");
}
