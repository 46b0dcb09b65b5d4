//! Owns the advice of `rockenv profile check`: things that are valid but probably unintended.

use std::collections::BTreeSet;

use super::references::{TextPart, pieces};
use super::structure::shorten;
use super::{Action, BIN, Origin, Profile, VolumeKind, input};

/// Returns advice, one sentence each.
pub(crate) fn advice(profile: &Profile) -> Vec<String> {
    let mut advice = Vec::new();
    for (name, value) in &profile.env {
        if mentions(value, &["target", "targets", "target.override"]) {
            advice.push(format!(
                "[env] {name} depends on the target, so targets share no step: give it to the steps that need it"
            ));
        }
    }
    advice.extend(unused_params(profile).map(|name| {
        format!("parameter `{name}` is not used: check its name, or write `${{{name}}}` where its value belongs")
    }));
    for volume in &profile.volumes {
        let mut inputs = profile.steps.iter().flat_map(|step| &step.inputs);
        let used = inputs.any(|text| input(text).0 == volume.name);
        if volume.kind == VolumeKind::Source && !used {
            advice.push(format!(
                "no step has `inputs = [\"{}\"]`: a change in that source causes no step to run again",
                volume.name
            ));
        }
    }
    advice.extend(unlimited(profile));
    for step in &profile.steps {
        let exported = match &step.action {
            Action::Export(items) => items.as_slice(),
            Action::Run { .. } | Action::Packages(_) | Action::Copy(_) => &[],
        };
        let exported = exported.iter().map(|item| item.from.as_str());
        let paths = exported.chain(step.inputs.iter().map(String::as_str));
        let patterns = paths.filter(|path| path.contains(['*', '?']));
        advice.extend(patterns.map(|path| {
            let (step, path) = (&step.name, shorten(path));
            format!("step `{step}`: `{path}` names one file, because patterns are not expanded: name its directory instead")
        }));
    }
    let texts = profile.steps.iter().flat_map(|step| step.env.values());
    let scripts = profile.steps.iter().filter_map(|step| match &step.action {
        Action::Run { script, .. } => Some(script),
        Action::Packages(_) | Action::Copy(_) | Action::Export(_) => None,
    });
    let mut all = texts.chain(scripts).chain(profile.env.values());
    if profile.resources.memory_per_job.is_none() && all.any(|text| mentions(text, &["jobs"])) {
        advice.push("`${jobs}` is used, but [resources] has no `memory-per-job`: the number of jobs will be the number of cores".to_owned());
    }
    advice
}

/// Returns the parameters of an extending profile that nothing uses. An extended profile may define parameters for
/// others that extend it.
fn unused_params(profile: &Profile) -> impl Iterator<Item = &String> {
    let mut texts = profile.files().map(|(_, text)| text);
    let own = texts.next().unwrap_or_default().split("${").skip(1);
    let own = own.filter_map(|text| Some(text.split_once('}')?.0));
    let is_apart = |letter: char| !letter.is_ascii_alphanumeric() && !"._-".contains(letter);
    let extended = texts.flat_map(|text| text.split(is_apart));
    let extended = extended.map(|word| word.strip_prefix("params.").unwrap_or(word));
    let mut used: BTreeSet<&str> = extended.collect();
    let extends = !used.is_empty();
    used.extend(own.chain(profile.release_param.as_deref()));
    let params = profile.params.keys();
    params.filter(move |name| extends && !used.contains(name.as_str()))
}

fn mentions(text: &str, names: &[&str]) -> bool {
    let refers = |piece: &TextPart<'_>| matches!(piece, TextPart::Reference(name, _) if names.contains(name));
    pieces(text).iter().any(refers)
}

/// Returns advice about variables that take a build away from the machine's job slots.
fn unlimited(profile: &Profile) -> Vec<String> {
    let own = profile.env.iter().map(|entry| ("[env]".to_owned(), entry));
    let steps = profile.steps.iter().flat_map(|step| {
        let whose = format!("step `{}`:", step.name);
        step.env.iter().map(move |entry| (whose.clone(), entry))
    });
    let mut advice = Vec::new();
    for (whose, (name, value)) in own.chain(steps) {
        // A user cannot change a built-in profile.
        if !matches!(profile.sources.file(&value.place).origin, Origin::File(_)) {
            continue;
        }
        if name == "MAKEFLAGS" {
            advice.push(format!(
                "{whose} MAKEFLAGS replaces rockenv's, so make does not keep to the job slots: remove it"
            ));
        } else if name == "PATH" && !value.split(':').any(|directory| directory == BIN) {
            advice.push(format!(
                "{whose} PATH lacks {BIN}, so make and ninja do not keep to the job slots: begin it with {BIN}"
            ));
        }
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::super::load::from_text;
    use super::super::tests::cases;
    use super::*;

    const HEAD: &str = r#"
schema = 1
image = "debian"
params = { target-dir = "/t" }
volume = [
    { name = "out", kind = "output", target = "/out" },
    { name = "src", kind = "source", path = "/srv", target = "/src" },
]
"#;

    #[test]
    fn says_what_is_probably_not_meant() {
        for (body, want) in cases(
            r#"
            env = { GFX = "${target}" }; step = [{ name = "a", run = "make -j${jobs}" }] => [env] GFX | no step has `inputs | `${jobs}` is used
            env = { A = "${target-dir}" }; step = [{ name = "a", run = "make", inputs = ["src"] }] => none
            env = { A = "${target.override}" }; step = [{ name = "a", run = "make", inputs = ["src"] }] => [env] A depends
            env = { A = "${targets}" }; step = [{ name = "a", run = "make", inputs = ["src"] }] => [env] A depends
            env = { MAKEFLAGS = "-j99", PATH = "/usr/bin" }; step = [{ name = "a", run = "make", inputs = ["src"] }] => [env] MAKEFLAGS | [env] PATH
            step = [{ name = "a", run = "make", inputs = ["src"], env = { MAKEFLAGS = "" } }] => step `a`: MAKEFLAGS
            step = [{ name = "a", run = "make", inputs = ["src"], env = { PATH = "/run/rockenv/bin:/bin" } }] => none
            step = [{ name = "a", export = [{ from = "/x/*.whl", to = "out" }], inputs = ["src/*"] }] => step `a`: `/x/*.whl` | step `a`: `src/*`
            step = [{ name = "a", export = [{ from = "/x/dist", to = "out" }], inputs = ["src"] }] => none
            step = [{ name = "a", run = "make" }] => no step has `inputs = ["src"]`
            step = [{ name = "a", run = "make", inputs = ["src/sub"] }] => none
            "#,
        ) {
            let advice = advice(&from_text("p", &format!("{HEAD}{body}\n")).unwrap());
            let want: Vec<_> = want.split(" | ").filter(|one| *one != "none").collect();
            let mut pairs = advice.iter().zip(&want);
            let is_said = pairs.all(|(advice, start)| advice.starts_with(*start));
            assert!(advice.len() == want.len() && is_said, "{body}: {advice:#?}");
        }
    }
}
