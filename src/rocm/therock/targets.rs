//! Owns TheRock's table of targets: calls of `therock_add_amdgpu_target`.

use serde::{Deserialize, Serialize};

use super::cmake::{self, Argument, Command};
use super::error_at;
use crate::sys::error::{Error, Result};

const DECLARES: &str = "therock_add_amdgpu_target";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declared {
    pub name: String,
    pub product: String,
    /// Families, starting with the family of its own name.
    pub families: Vec<String>,
    pub excluded: Vec<Excluded>,
}

/// A project that is not built for a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Excluded {
    pub project: String,
    /// The address in the comment after the project's name.
    pub issue: Option<String>,
}

#[derive(Debug)]
pub(super) struct TargetTable {
    pub(super) targets: Vec<Declared>,
    /// Arguments that have no effect, each with its position.
    pub(super) ignored: Vec<String>,
}

/// Parses the table. Refuses anything that would require evaluating CMake.
pub(super) fn parse(file: &str, text: &str) -> Result<TargetTable> {
    let wrong = |argument: &Argument, message: &str| -> Error {
        error_at(file, text, argument.span.clone(), message)
    };
    let mut targets: Vec<Declared> = Vec::new();
    let mut ignored = Vec::new();
    let mut blocks: Vec<String> = Vec::new();
    for command in cmake::parse(file, text)? {
        let at = |message: &str| error_at(file, text, command.span.clone(), message);
        match command.name.as_str() {
            open @ ("function" | "macro" | "if" | "foreach" | "while" | "block") => {
                blocks.push(open.to_owned());
            }
            close if close.starts_with("end") => {
                let expected = blocks.pop().map(|open| format!("end{open}"));
                if expected.as_deref() != Some(close) {
                    return Err(at("this ends a block that was not begun"));
                }
            }
            DECLARES => {
                if let Some(block) = blocks.last() {
                    return Err(at(&format!(
                        "a target declared inside `{block}`, which is not evaluated"
                    )));
                }
                let (declared, stray) = declared(&command, &wrong, &at)?;
                ignored.extend(stray.into_iter().map(|argument| {
                    let text = &argument.text;
                    let message = format!("CMake ignores `{text}`, which has no keyword before it");
                    wrong(argument, &message).message().to_owned()
                }));
                if targets.iter().any(|known| known.name == declared.name) {
                    return Err(at(&format!("`{}` is already declared", declared.name)));
                }
                targets.push(declared);
            }
            _ => {}
        }
    }
    match targets.is_empty() {
        true => Err(invalid!("{file} declares no targets")),
        false => Ok(TargetTable { targets, ignored }),
    }
}

/// Returns a target, and the arguments that CMake assigns to no keyword.
fn declared<'a>(
    command: &'a Command,
    wrong: &dyn Fn(&Argument, &str) -> Error,
    at: &dyn Fn(&str) -> Error,
) -> Result<(Declared, Vec<&'a Argument>)> {
    if let Some(open) = command.arguments.iter().find(|argument| argument.variable) {
        return Err(wrong(open, "a variable, which is not evaluated"));
    }
    let [name, product, rest @ ..] = command.arguments.as_slice() else {
        return Err(at("a target has a name and a product"));
    };
    if !is_target(&name.text) {
        return Err(wrong(name, "not the name of a target, such as `gfx1103`"));
    }
    let mut declared = Declared {
        name: name.text.clone(),
        product: product.text.clone(),
        families: vec![name.text.clone()],
        excluded: Vec::new(),
    };
    let (mut keyword, mut stray) = (None, Vec::new());
    for argument in rest {
        let is_keyword = !argument.quoted
            && argument
                .text
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        match (argument.text.as_str(), keyword) {
            ("FAMILY" | "EXCLUDE_TARGET_PROJECTS", _) if is_keyword => {
                keyword = Some(argument.text.as_str());
            }
            (_, _) if is_keyword => return Err(wrong(argument, "unknown keyword")),
            (text, Some("FAMILY")) => {
                if declared.families.iter().any(|family| family == text) {
                    return Err(wrong(argument, "duplicate family"));
                }
                declared.families.push(text.to_owned());
            }
            (text, Some(_)) => {
                if declared.excluded.iter().any(|one| one.project == text) {
                    return Err(wrong(argument, "duplicate project"));
                }
                let comment = argument.comment.iter();
                let words = comment.flat_map(|text| text.split_whitespace());
                let mut addresses = words.filter(|word| word.starts_with("https://"));
                declared.excluded.push(Excluded {
                    project: text.to_owned(),
                    issue: addresses.next().map(str::to_owned),
                });
            }
            (_, None) => stray.push(argument),
        }
    }
    Ok((declared, stray))
}

/// Returns whether a text looks like the name of an ISA. Families look the same, except for an `X`.
fn is_target(text: &str) -> bool {
    text.strip_prefix("gfx").is_some_and(|digits| {
        (3..=5).contains(&digits.len())
            && digits
                .bytes()
                .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r#"
function(therock_add_amdgpu_target gfx_target product_name)
  if("${gfx_target}" IN_LIST _targets)
    message(FATAL_ERROR "AMDGPU target ${gfx_target} already defined")
  endif()
endfunction()

therock_add_amdgpu_target(gfx90a "MI210/250 CDNA" FAMILY dcgpu-all gfx90a-dcgpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://example.org/1
    rccl # see https://example.org/2 (open)
    rccl-tests
)
therock_add_amdgpu_target(gfx942 "MI300" FAMILY gfx94X-all)
include(therock_custom_amdgpu_targets OPTIONAL)
"#;

    #[test]
    fn the_table_is_read() {
        let targets = parse("t.cmake", TABLE).unwrap().targets;
        assert_eq!(targets.len(), 2);
        assert_eq!(targets[0].families, ["gfx90a", "dcgpu-all", "gfx90a-dcgpu"]);
        let excluded = targets[0].excluded.iter();
        let excluded = excluded.map(|one| (one.project.as_str(), one.issue.as_deref()));
        assert_eq!(
            excluded.collect::<Vec<_>>(),
            [
                ("hipSPARSELt", Some("https://example.org/1")),
                ("rccl", Some("https://example.org/2")),
                ("rccl-tests", None)
            ]
        );
        assert!(targets[1].excluded.is_empty());
    }

    #[test]
    fn an_argument_before_the_first_keyword_has_no_effect() {
        let text = "therock_add_amdgpu_target(gfx1035 \"x\" igpu-all FAMILY gfx103X-all)\n";
        let table = parse("t.cmake", text).unwrap();
        assert_eq!(table.targets[0].families, ["gfx1035", "gfx103X-all"]);
        assert_eq!(
            table.ignored,
            ["t.cmake:1:39: CMake ignores `igpu-all`, which has no keyword before it"]
        );
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for (text, words) in [
            ("CALL(gfx942 again)", "`gfx942` is already declared"),
            ("CALL(gfx1 x OTHER y)", "not the name of a target"),
            ("CALL(gfx950 x OTHER y)", "16:36: unknown keyword"),
            ("CALL(gfx950)", "a name and a product"),
            ("CALL(${T} x)", "a variable, which is not evaluated"),
            ("if(X)\nCALL(gfx950 x)\nendif()", "declared inside `if`"),
            ("endif()", "ends a block"),
            ("CALL(gfx950 x FAMILY a a)", "duplicate"),
        ] {
            let text = format!("{TABLE}{}", text.replace("CALL", DECLARES));
            let error = parse("t.cmake", &text).unwrap_err();
            assert_has!(error.message(), words);
        }
        let error = parse("t.cmake", "set(A b)").unwrap_err();
        assert_has!(error.message(), "declares no targets");
    }
}
