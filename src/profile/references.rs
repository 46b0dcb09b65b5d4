//! Owns `${name}`: finding the references in a text, checking their names, and inserting values.
//!
//! `${memory}`, `${jobs}` and similar references are known only when a step starts, and must not change its key. Where
//! they are allowed, the result keeps them in *late form*, in which everything else that looks like a reference is
//! escaped. `finish` turns late form into the final text.

use std::collections::BTreeMap;
use std::ops::Range;

use super::diagnostics::{Problem, Sources, UnreadPart};
use super::structure::shorten;
use crate::rocm::target::{self, Target};
use crate::sys::name::is_short_name;
use crate::sys::span::Place;
use crate::sys::suggest;

/// Names of facts, which a parameter cannot have.
pub(crate) const FACTS: [&str; 8] = [
    "target",
    "targets",
    "target.override",
    "machine.targets",
    "jobs",
    "link-jobs",
    "tensile-jobs",
    "memory",
];

/// The facts that are known only when a step starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub jobs: u32,
    pub link_jobs: u32,
    /// Processes of TensileLite at once.
    pub tensile_jobs: u32,
    /// The env's memory, in bytes.
    pub memory: u64,
}

/// Linux's limit for one argument or variable, with its terminating zero.
pub(crate) const LONGEST: usize = 128 << 10;

/// Maximum number of digits of a fact that is known late.
const LATE_DIGITS: usize = 20;

/// Maximum number of faults that are reported for a text.
const MOST_FAULTS: usize = 16;

fn is_late(name: &str) -> bool {
    matches!(name, "jobs" | "link-jobs" | "tensile-jobs" | "memory")
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TextPart<'a> {
    Literal(&'a str),
    /// `${name}`, and where it is.
    Reference(&'a str, Range<usize>),
    /// `${` without a closing brace.
    Unclosed(Range<usize>),
}

/// Splits a text at its references. `$${` is a literal `${`.
pub(crate) fn pieces(text: &str) -> Vec<TextPart<'_>> {
    let mut found = Vec::new();
    let mut start = 0;
    let mut at = 0;
    while let Some(offset) = text[at..].find("${") {
        let here = at + offset;
        if here > start && text.as_bytes()[here - 1] == b'$' {
            found.push(TextPart::Literal(&text[start..here - 1]));
            // The escaped `${` begins the next literal.
            start = here;
            at = here + 2;
            continue;
        }
        if here > start {
            found.push(TextPart::Literal(&text[start..here]));
        }
        let Some(length) = text[here..].find('}') else {
            found.push(TextPart::Unclosed(here..text.len()));
            return found;
        };
        let end = here + length + 1;
        found.push(TextPart::Reference(&text[here + 2..end - 1], here..end));
        start = end;
        at = end;
    }
    if start < text.len() {
        found.push(TextPart::Literal(&text[start..]));
    }
    found
}

/// Whether a text may contain `${jobs}` and `${memory}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LateReferences {
    Keep,
    Refuse,
}

#[derive(Debug)]
pub(crate) struct Fault {
    /// The reference as written, with `${`.
    reference: String,
    /// Its position among the references in the text, from 0.
    index: usize,
    pub(crate) message: String,
    help: Option<String>,
}

impl Fault {
    fn new(name: &str, message: String, help: impl Into<String>) -> Self {
        Self {
            reference: format!("${{{name}}}"),
            index: 0,
            message,
            help: Some(help.into()),
        }
    }

    fn too_long(piece: &TextPart<'_>) -> Self {
        let message = "the expanded text is longer than 128 KiB".to_owned();
        let help = "no argument or variable can be; `copy` a file in a step before, and read that";
        match piece {
            TextPart::Reference(name, _) => Self::new(name, message, help),
            // No reference begins like this, so the problem points at the whole text.
            TextPart::Literal(_) | TextPart::Unclosed(_) => Self::new("}", message, help),
        }
    }

    /// Points at the reference in the file, not only at the value that contains it.
    pub(crate) fn problem(self, place: &Place, sources: &Sources) -> Problem {
        let file = sources.file(place);
        let raw = file.text.get(file.bytes(place)).unwrap_or_default();
        // The raw TOML has the same references in the same order, unless they are spelled with escapes.
        let mut ranges = pieces(raw).into_iter().filter_map(|piece| match piece {
            TextPart::Reference(_, range) | TextPart::Unclosed(range) => Some(range),
            TextPart::Literal(_) => None,
        });
        // Every range begins with `${`, the reference of an unclosed one.
        let is_it = |range: &Range<usize>| raw[range.clone()].starts_with(&self.reference);
        let reference = ranges.nth(self.index).filter(is_it);
        let exact = reference.map(|range| place.start + range.start..place.start + range.end);
        let problem = Problem::new(exact.as_ref().unwrap_or(place), self.message, "here");
        Problem {
            help: self.help,
            ..problem.unless(UnreadPart::File)
        }
    }
}

/// Checks that every reference in `text` has a known name, without needing values. Returns the first faults.
pub(crate) fn check(
    text: &str,
    params: &BTreeMap<String, String>,
    late: LateReferences,
) -> Vec<Fault> {
    let pieces = pieces(text).into_iter();
    let references = pieces.filter(|piece| !matches!(piece, TextPart::Literal(_)));
    let faults = references.enumerate().filter_map(|(index, piece)| {
        let fault = check_piece(&piece, params, late)?;
        Some(Fault { index, ..fault })
    });
    faults.take(MOST_FAULTS).collect()
}

fn check_piece(
    piece: &TextPart<'_>,
    params: &BTreeMap<String, String>,
    late: LateReferences,
) -> Option<Fault> {
    match piece {
        TextPart::Literal(_) => None,
        TextPart::Reference(name, _) => check_name(name, params, late),
        TextPart::Unclosed(_) => Some(Fault {
            reference: "${".to_owned(),
            index: 0,
            message: "`${` without `}`".to_owned(),
            help: Some("write `$${` for the characters themselves".to_owned()),
        }),
    }
}

fn check_name(
    name: &str,
    params: &BTreeMap<String, String>,
    late: LateReferences,
) -> Option<Fault> {
    let shown = shorten(name);
    if is_late(name) {
        return match late {
            LateReferences::Keep => None,
            LateReferences::Refuse => Some(Fault::new(
                name,
                format!("unknown reference `${{{shown}}}`"),
                "only scripts and variables of steps can use `${jobs}`, `${link-jobs}`, `${tensile-jobs}` and `${memory}`",
            )),
        };
    }
    if FACTS.contains(&name) || params.contains_key(name) {
        return None;
    }
    let literal = format!("write `$${{{shown}}}` for a shell's own");
    let known = FACTS.into_iter().chain(params.keys().map(String::as_str));
    let help = match suggest::closest(name, known) {
        Some(close) => format!("did you mean `${{{close}}}`? {literal}"),
        None if is_short_name(name) => format!("{literal}, or add `{shown}` to [params]"),
        None => literal,
    };
    Some(Fault::new(name, format!("unknown `${{{shown}}}`"), help))
}

/// The values of references.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scope {
    pub(crate) targets: Vec<Target>,
    /// Targets of the other envs with which this machine shares steps.
    pub(crate) machine: Vec<Target>,
    pub(crate) params: BTreeMap<String, String>,
}

impl Scope {
    /// Returns the final text; `${jobs}` and `${memory}` are faults.
    pub(crate) fn expand(&self, text: &str) -> Result<String, Fault> {
        let late = self.late_form(text, 0, LateReferences::Refuse)?;
        Ok(finish(&late, &Facts::default()))
    }

    /// Returns the text in late form. `beside` is the number of other bytes in its argument or variable.
    pub(crate) fn expand_for_runtime(&self, text: &str, beside: usize) -> Result<String, Fault> {
        self.late_form(text, beside, LateReferences::Keep)
    }

    fn late_form(&self, text: &str, beside: usize, late: LateReferences) -> Result<String, Fault> {
        let mut result = String::with_capacity(text.len());
        let mut literal = String::new();
        let (mut length, mut index) = (beside, 0);
        for piece in pieces(text) {
            let here = |fault| Fault { index, ..fault };
            if let Some(fault) = check_piece(&piece, &self.params, late) {
                return Err(here(fault));
            }
            match piece {
                TextPart::Literal(text) => {
                    literal.push_str(text);
                    length += text.len();
                }
                TextPart::Reference(name, _) if is_late(name) => {
                    let body = literal.trim_end_matches('$');
                    let dollars = DOLLAR.repeat(literal.len() - body.len());
                    result.extend([&*escape(body), &dollars, "${", name, "}"]);
                    literal.clear();
                    length += LATE_DIGITS;
                }
                TextPart::Reference(name, _) => {
                    let value = self.value(name).map_err(here)?;
                    literal.push_str(&value);
                    length += value.len();
                }
                TextPart::Unclosed(_) => {}
            }
            if length >= LONGEST {
                return Err(here(Fault::too_long(&piece)));
            }
            index += usize::from(!matches!(piece, TextPart::Literal(_)));
        }
        Ok(result + &escape(&literal))
    }

    fn value(&self, name: &str) -> Result<String, Fault> {
        if let Some(value) = self.params.get(name) {
            return Ok(value.clone());
        }
        match (self.targets.as_slice(), name) {
            (own, "machine.targets") if !(own.is_empty() && self.machine.is_empty()) => {
                let mut all = [own, &self.machine].concat();
                all.sort_unstable();
                all.dedup();
                Ok(target::joined(&all, ";"))
            }
            ([], _) => {
                let message = format!("`${{{name}}}` needs a target, but there is none");
                let help = "name one: `--target gfx1103`, or `targets` in the profile";
                Err(Fault::new(name, message, help))
            }
            (own, "targets") => Ok(target::joined(own, ";")),
            ([one], "target.override") => Ok(one.override_version()),
            ([one], _) => Ok(one.name().to_owned()),
            (own, _) => {
                let all = target::joined(own, ", ");
                let message = format!("`${{{name}}}` stands for one target, but there are {all}");
                let help = "`${targets}` is all of them, separated by `;`";
                Err(Fault::new(name, message, help))
            }
        }
    }
}

/// Stands for a `$` that would escape the next reference.
const DOLLAR: &str = "${$}";

/// Returns the late form of a text without references, for `finish` to restore.
pub(crate) fn escape(literal: &str) -> String {
    literal.replace("${", "$${")
}

/// Returns the final text of late form: inserts the jobs and the memory in bytes, and undoes the escapes.
pub(crate) fn finish(late: &str, facts: &Facts) -> String {
    let mut result = String::with_capacity(late.len());
    for piece in pieces(late) {
        match piece {
            TextPart::Literal(text) => result.push_str(text),
            TextPart::Reference(name, range) => match name {
                "jobs" => result.push_str(&facts.jobs.to_string()),
                "link-jobs" => result.push_str(&facts.link_jobs.to_string()),
                "tensile-jobs" => result.push_str(&facts.tensile_jobs.to_string()),
                "memory" => result.push_str(&facts.memory.to_string()),
                "$" => result.push('$'),
                // Not late form; a text that was never expanded is best left unchanged.
                _ => result.push_str(&late[range]),
            },
            TextPart::Unclosed(range) => result.push_str(&late[range]),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn facts(jobs: u32, memory: u64) -> Facts {
        Facts {
            jobs,
            link_jobs: 3,
            tensile_jobs: 2,
            memory,
        }
    }

    fn scope(targets: &[&str]) -> Scope {
        Scope {
            targets: targets
                .iter()
                .map(|name| Target::parse(name).unwrap())
                .collect(),
            machine: vec![Target::parse("gfx1201").unwrap()],
            params: [("suite", "forky"), ("odd", "a${jobs}$"), ("dollar", "$")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        }
    }

    #[test]
    fn facts_and_params() {
        let one = scope(&["gfx90a"]);
        for (text, want) in [
            ("", ""),
            ("a ${target} b", "a gfx90a b"),
            ("${targets}${suite}", "gfx90aforky"),
            ("${target.override}", "9.0.10"),
            ("${machine.targets}", "gfx90a;gfx1201"),
            ("$${target}", "${target}"),
            ("$$${target}", "$${target}"),
            ("$target $$ ${suite}$", "$target $$ forky$"),
            // Values are not expanded again.
            ("${odd}", "a${jobs}$"),
            ("${dollar}{target}", "${target}"),
        ] {
            assert_eq!(one.expand(text).unwrap(), want, "{text}");
            assert_eq!(
                finish(&one.expand_for_runtime(text, 0).unwrap(), &facts(1, 2)),
                want,
                "{text}"
            );
        }
        assert_eq!(
            scope(&["gfx1100", "gfx1103"]).expand("${targets}").unwrap(),
            "gfx1100;gfx1103"
        );
        let machine = scope(&[]).expand("${machine.targets}").unwrap();
        assert_eq!(machine, "gfx1201");
        let fault = Scope::default().expand("${machine.targets}").unwrap_err();
        assert!(fault.message.contains("needs a target"));
    }

    #[test]
    fn faults() {
        let fault = |targets: &[&str], text: &str| {
            let fault = scope(targets).expand(text).unwrap_err();
            format!("{} / {}", fault.message, fault.help.unwrap_or_default())
        };
        let several = fault(&["gfx1100", "gfx1103"], "${target}");
        assert_has!(several, "`${targets}` is all of them");
        for (text, words) in [
            ("${target}", "`${target}` needs a target"),
            ("${targets}", "`${targets}` needs a target"),
            (
                "${tragets}",
                "did you mean `${targets}`? write `$${tragets}`",
            ),
            ("${HOME:-/x}", "write `$${HOME:-/x}`"),
            ("a ${b", "without"),
            ("${jobs}", "unknown reference"),
        ] {
            assert_has!(fault(&[], text), words);
        }
    }

    #[test]
    fn late_values() {
        let text = scope(&["gfx1103"])
            .expand_for_runtime("-j${jobs} -m${memory} $${x} ${dollar}${jobs} ${target}", 0)
            .unwrap();
        assert_eq!(text, "-j${jobs} -m${memory} $${x} ${$}${jobs} gfx1103");
        assert_eq!(finish(&text, &facts(8, 1024)), "-j8 -m1024 ${x} $8 gfx1103");
        let links = Scope::default().expand_for_runtime("${link-jobs} ${tensile-jobs}", 0);
        assert_eq!(finish(&links.unwrap(), &facts(8, 0)), "3 2");
    }

    #[test]
    fn no_text_grows_beyond_an_argument() {
        let mut scope = scope(&["gfx1103"]);
        scope.params.insert("big".into(), "x".repeat(70 << 10));
        let index = |text: &str| {
            let fault = scope.expand_for_runtime(text, 0).unwrap_err();
            assert_has!(fault.message, "longer than 128 KiB");
            fault.index
        };
        assert_eq!(index("${suite} ${big} ${big} ${odd}"), 2);
        assert_eq!(index(&"${big}".repeat(8000)), 1);
        assert!(scope.expand("${big}${big}").is_err());
        // A late number counts as more bytes than its reference has.
        let late = "${jobs}".repeat(18_000);
        let big = scope.expand_for_runtime("${big}", 0).unwrap();
        assert_eq!(big.len(), 70 << 10);
        assert!(index(&late) > 6000);
    }

    #[test]
    fn only_the_first_faults_of_a_text_are_reported() {
        let faults = check(&"${q}".repeat(6000), &BTreeMap::new(), LateReferences::Keep);
        assert!((16..100).contains(&faults.len()));
    }

    proptest! {
        #[test]
        fn late_form_loses_nothing(parts in prop::collection::vec("[${}a]{0,5}|jobs", 0..8)) {
            // Each part is a parameter's value, so it is literal whatever it looks like.
            let mut scope = Scope::default();
            let mut text = String::new();
            let mut want = String::new();
            for (index, part) in parts.iter().enumerate() {
                if part == "jobs" {
                    text.push_str("${jobs}");
                    want.push('7');
                } else {
                    text.extend(["${p", &index.to_string(), "}"]);
                    want.push_str(part);
                    scope.params.insert(format!("p{index}"), part.clone());
                }
            }
            prop_assert_eq!(finish(&scope.expand_for_runtime(&text, 0).unwrap(), &facts(7, 0)), want);
        }

        #[test]
        fn escaping_by_hand_works(text in "[${}a]{0,12}") {
            let escaped = text.replace("${", "$${");
            prop_assert_eq!(Scope::default().expand(&escaped).unwrap(), text);
        }
    }
}
