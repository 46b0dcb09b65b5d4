//! Owns reading `build.ninja`: the commands of a build and their dependencies. Pure.

use std::collections::{HashMap, HashSet};

/// Maximum length of a path, in bytes: the kernel's.
const LONGEST: usize = 4096;
/// Maximum length of all paths together, in bytes.
const PATHS: usize = 64 << 20;
/// Maximum number of commands.
const EDGES: usize = 200_000;
/// Maximum number of paths.
const NAMES: usize = 1_000_000;
/// Maximum number of commands and dependencies visited to find the target that was built.
const LOOKS: usize = 50_000_000;
/// A resumed build may differ from ninja's count of commands by one in this many: a command that was killed or failed
/// has not run, and a command whose inputs changed runs again.
const NEAR: usize = 50;

/// Kind of a command, the best predictor of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum EdgeKind {
    C,
    Cxx,
    /// Code for a GPU.
    Device,
    Archive,
    Link,
    Other,
}

/// A command of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    /// Its first output, as written.
    pub output: String,
    /// `None` if it only groups other outputs.
    pub kind: Option<EdgeKind>,
    /// Positions of the commands that must end first.
    pub needs: Vec<usize>,
}

/// The commands of a build, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BuildGraph {
    pub edges: Vec<Edge>,
    defaults: Vec<usize>,
}

struct Statement<'a> {
    rule: &'a str,
    paths: Vec<String>,
    /// Number of outputs. The other paths are those that it waits for.
    outputs: usize,
}

impl BuildGraph {
    /// Parses a `build.ninja`. Skips unknown statements; `None` if the file is larger than any build.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let joined = text.replace("$\r\n", " ").replace("$\n", " ");
        let mut reader = Reader::default();
        let mut statements = Vec::new();
        let mut defaults = Vec::new();
        for line in joined.lines() {
            if let Some(rest) = line.strip_prefix("build ") {
                statements.extend(reader.statement(rest)?);
                if statements.len() > EDGES {
                    return None;
                }
            } else if let Some(rest) = line.strip_prefix("default ") {
                reader.paths(rest, &mut defaults)?;
            } else if let Some((name, value)) = line.split_once(" = ")
                && !line.starts_with(' ')
            {
                reader.variables.insert(name, value);
            }
        }
        let mut makers = HashMap::new();
        for (at, statement) in statements.iter().enumerate() {
            let outputs = statement.paths.iter().take(statement.outputs);
            makers.extend(outputs.map(|output| (output.as_str(), at)));
        }
        let find = |path: &String| makers.get(path.as_str()).copied();
        let edges = statements.iter().map(|statement| {
            let inputs = &statement.paths[statement.outputs..];
            let mut needs: Vec<usize> = inputs.iter().filter_map(find).collect();
            needs.sort_unstable();
            needs.dedup();
            Edge {
                output: statement.paths.first().cloned().unwrap_or_default(),
                kind: kind(statement.rule),
                needs,
            }
        });
        Some(Self {
            edges: edges.collect(),
            defaults: defaults.iter().filter_map(find).collect(),
        })
    }

    /// Returns, for every command, whether the build contains it. Tries the default targets, the targets among the
    /// words of `script`, and then any single target, until one needs `total` commands. A resumed build contains only
    /// commands that never ran. `None` if nothing fits.
    pub(crate) fn members(
        &self,
        total: Option<usize>,
        script: &str,
        ran: &[bool],
    ) -> Option<Vec<bool>> {
        let mut needed = vec![false; self.edges.len()];
        for edge in &self.edges {
            edge.needs.iter().for_each(|need| needed[*need] = true);
        }
        let tops = (0..self.edges.len()).filter(|at| !needed[*at]);
        let defaults = match self.defaults.is_empty() {
            true => tops.collect(),
            false => self.defaults.clone(),
        };
        let whole = self.closure(&defaults);
        let rest = |members: Vec<bool>| -> Vec<bool> {
            let members = members.into_iter().zip(ran);
            members.map(|(is, ran)| is && !ran).collect()
        };
        let Some(total) = total else {
            let left = rest(whole.clone());
            // If all commands have run, the build was complete, and this one runs commands again.
            let is_resumed = self.commands(&left) > 0;
            return Some(if is_resumed { left } else { whole });
        };
        if self.commands(&whole) == total {
            return Some(whole);
        }
        let words: HashSet<&str> = script.split_whitespace().collect();
        let named = self.edges.iter().enumerate();
        let named = named.filter(|(_, edge)| words.contains(edge.output.as_str()));
        let named = self.closure(&named.map(|(at, _)| at).collect::<Vec<_>>());
        if self.commands(&named) == total {
            return Some(named);
        }
        if ran.contains(&true) {
            // No search over all targets: among a thousand, one has that number of commands by chance.
            let fits = |rest: &Vec<bool>| self.commands(rest).abs_diff(total) * NEAR <= total;
            return [named, whole].map(rest).into_iter().find(fits);
        }
        // Targets without a command of their own, as in `ninja llvm-tblgen`.
        let mut names = (0..self.edges.len()).filter(|at| {
            let edge = &self.edges[*at];
            edge.kind.is_none() && !edge.output.contains('/')
        });
        let mut seen = vec![usize::MAX; self.edges.len()];
        let mut looks = LOOKS;
        let found = names.find_map(|name| {
            let has = self.has_commands(name, total, &mut seen, &mut looks);
            (has != Some(false)).then_some(has.map(|_| name))
        });
        Some(self.closure(&[found??]))
    }

    /// Returns whether a target needs exactly `total` commands; `None` if `looks` is used up. `seen` holds, for each
    /// command, the last target whose search visited it.
    fn has_commands(
        &self,
        name: usize,
        total: usize,
        seen: &mut [usize],
        looks: &mut usize,
    ) -> Option<bool> {
        let mut count = 0;
        let mut open = vec![name];
        while let Some(at) = open.pop() {
            if std::mem::replace(&mut seen[at], name) == name {
                continue;
            }
            let edge = &self.edges[at];
            count += usize::from(edge.kind.is_some());
            if count > total {
                return Some(false);
            }
            *looks = looks.checked_sub(1 + edge.needs.len())?;
            open.extend(&edge.needs);
        }
        Some(count == total)
    }

    fn commands(&self, members: &[bool]) -> usize {
        let members = self.edges.iter().zip(members);
        members
            .filter(|(edge, is)| **is && edge.kind.is_some())
            .count()
    }

    fn closure(&self, of: &[usize]) -> Vec<bool> {
        let mut members = vec![false; self.edges.len()];
        let mut open = of.to_vec();
        while let Some(at) = open.pop() {
            if !std::mem::replace(&mut members[at], true) {
                open.extend(&self.edges[at].needs);
            }
        }
        members
    }
}

/// Returns the kind of a rule, by the names that CMake, Meson and GN use.
fn kind(rule: &str) -> Option<EdgeKind> {
    // The target's name follows, and may contain any of these words.
    let rule = rule.split("__").next().unwrap_or_default();
    let rule = rule.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| rule.contains(word));
    Some(match rule.as_str() {
        "phony" => return None,
        _ if has(&["static_librar", "static_linker", "alink", "archive"]) => EdgeKind::Archive,
        _ if has(&["link"]) => EdgeKind::Link,
        _ if has(&["hip_compiler", "cuda", "hipcc", "nvcc"]) => EdgeKind::Device,
        _ if has(&["cxx", "cpp", "c++"]) => EdgeKind::Cxx,
        _ if has(&["c_compiler", "cc", "asm", "objc"]) => EdgeKind::C,
        _ => EdgeKind::Other,
    })
}

/// Reads the statements of one file.
#[derive(Default)]
struct Reader<'a> {
    variables: HashMap<&'a str, &'a str>,
    /// Number of paths so far, and their bytes.
    names: usize,
    bytes: usize,
}

impl<'a> Reader<'a> {
    /// Parses the rest of a `build` line: `out | implicit: rule in | implicit || before |@ validations`. `None` if the
    /// file exceeds a limit.
    fn statement(&mut self, text: &'a str) -> Option<Option<Statement<'a>>> {
        let mut from = 0;
        let colon = loop {
            let Some(at) = text[from..].find(':').map(|at| from + at) else {
                return Some(None);
            };
            // An odd number of `$` escapes the colon.
            let dollars = text[from..at]
                .bytes()
                .rev()
                .take_while(|byte| *byte == b'$');
            if dollars.count() % 2 == 0 {
                break at;
            }
            from = at + 1;
        };
        let rest = text[colon + 1..].trim_start();
        let (rule, inputs) = rest.split_once(' ').unwrap_or((rest, ""));
        let mut paths = Vec::new();
        self.paths(&text[..colon], &mut paths)?;
        let outputs = paths.len();
        let inputs = inputs.split("|@").next().unwrap_or_default();
        self.paths(inputs, &mut paths)?;
        Some(Some(Statement {
            rule: rule.trim_end(),
            outputs,
            paths,
        }))
    }

    /// Splits at spaces and group separators, and expands the file's variables.
    fn paths(&mut self, text: &str, all: &mut Vec<String>) -> Option<()> {
        let mut path = String::new();
        let mut rest = text.chars();
        while let Some(char) = rest.next() {
            match char {
                ' ' | '|' if path.is_empty() => {}
                ' ' => all.push(self.admit(std::mem::take(&mut path))?),
                '$' if rest.as_str().starts_with('{') => {
                    let (name, after) = rest.as_str()[1..].split_once('}').unwrap_or_default();
                    let value = self.variables.get(name).copied().unwrap_or_default();
                    if path.len() + value.len() > LONGEST {
                        return None;
                    }
                    path.push_str(value);
                    rest = after.chars();
                }
                '$' => path.extend(rest.next()),
                other => path.push(other),
            }
        }
        if !path.is_empty() {
            all.push(self.admit(path)?);
        }
        Some(())
    }

    fn admit(&mut self, path: String) -> Option<String> {
        self.names += 1;
        self.bytes += path.len();
        let fits = path.len() <= LONGEST && self.names <= NAMES && self.bytes <= PATHS;
        fits.then_some(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
ninja_required_version = 1.5
include CMakeFiles/rules.ninja
cmake_ninja_workdir = /build/
build edit_cache: phony CMakeFiles/edit_cache.util
build CMakeFiles/edit_cache.util: CUSTOM_COMMAND
  COMMAND = cmake
build gen.h | ${cmake_ninja_workdir}gen.h: CUSTOM_COMMAND gen.py
build a.o: CXX_COMPILER__a_Release /src/a$ b$:c.cpp d$ e.h | /build/gen.h || order
build d$ e.h: CUSTOM_COMMAND
  DEFINES = -Da = b
build b.o: HIP_COMPILER__a_Release /src/b.cu || order
build order: phony gen.h
build lib/a.a: CXX_STATIC_LIBRARY_LINKER__a_Release a.o $
  b.o
build bin/a: CXX_EXECUTABLE_LINKER__a_Release c.o | lib/a.a || lib/a.a
build c.o: C_COMPILER__linkage_Release c.c
build one: phony c.o
build all: phony bin/a
default all
";

    #[test]
    fn a_file_of_cmake_is_read() {
        let graph = BuildGraph::parse(FILE).unwrap();
        let edge = |output: &str| {
            let at = graph.edges.iter().position(|edge| edge.output == output);
            let edge = &graph.edges[at.unwrap()];
            let needs = edge.needs.iter().map(|at| graph.edges[*at].output.as_str());
            (edge.kind, needs.collect::<Vec<_>>().join(" "))
        };
        let found = |kind, needs: &str| (kind, needs.to_owned());
        assert_eq!(edge("gen.h"), found(Some(EdgeKind::Other), ""));
        let a = found(Some(EdgeKind::Cxx), "gen.h d e.h order");
        assert_eq!(edge("a.o"), a);
        assert_eq!(edge("b.o"), found(Some(EdgeKind::Device), "order"));
        assert_eq!(edge("order"), found(None, "gen.h"));
        assert_eq!(edge("lib/a.a"), found(Some(EdgeKind::Archive), "a.o b.o"));
        assert_eq!(edge("bin/a"), found(Some(EdgeKind::Link), "lib/a.a c.o"));
        assert_eq!(edge("c.o"), found(Some(EdgeKind::C), ""));
    }

    #[test]
    fn the_number_of_commands_tells_what_is_built() {
        let graph = BuildGraph::parse(FILE).unwrap();
        let members = |total: Option<usize>, ran: &[&str]| {
            let edges = graph.edges.iter();
            let ran: Vec<bool> = edges
                .map(|edge| ran.contains(&edge.output.as_str()))
                .collect();
            let members = graph.members(total, "ninja -j 2 one bin/b order", &ran)?;
            let named = graph.edges.iter().zip(members).filter(|(_, is)| *is);
            let named = named.map(|(edge, _)| edge.output.as_str());
            Some(named.collect::<Vec<_>>().join(" "))
        };
        let all = "gen.h a.o d e.h b.o order lib/a.a bin/a c.o all";
        assert_eq!(members(Some(7), &[]).unwrap(), all);
        assert_eq!(members(Some(2), &[]).unwrap(), "gen.h order c.o one");
        assert_eq!(members(Some(3), &[]), None);
        // The first target with one command is taken, not `one`.
        let first = "edit_cache CMakeFiles/edit_cache.util";
        assert_eq!(members(Some(1), &[]).unwrap(), first);
        // A resumed build, and a build that ninja counts in full although a command ran before.
        assert_eq!(members(Some(1), &["gen.h"]).unwrap(), "order c.o one");
        assert_eq!(members(Some(7), &["gen.h"]).unwrap(), all);
        let left = "b.o order lib/a.a bin/a all";
        let ran = ["gen.h", "a.o", "d e.h", "c.o"];
        assert_eq!(members(Some(3), &ran).unwrap(), left);
        assert_eq!(members(Some(4), &ran), None);
        // In a step with several builds, the number of commands is not known.
        assert_eq!(members(None, &[]).unwrap(), all);
        assert_eq!(members(None, &ran).unwrap(), left);
        let ran = ["gen.h", "a.o", "d e.h", "b.o", "lib/a.a", "bin/a", "c.o"];
        assert_eq!(members(None, &ran).unwrap(), all);
    }

    #[test]
    fn nothing_makes_it_panic() {
        for text in [
            "build",
            "build ",
            "build :",
            "build a$:b",
            "build ${: x",
            "build a: ",
            "build é$",
            "default $",
            "build |||: |@",
        ] {
            BuildGraph::parse(text).unwrap().members(Some(1), "a", &[]);
        }
        // A cycle, which ninja refuses.
        let graph = BuildGraph::parse("build a: cc b\nbuild b: cc a\ndefault a\n").unwrap();
        assert_eq!(graph.members(Some(2), "", &[]), Some(vec![true, true]));
    }

    #[test]
    fn a_file_larger_than_any_build_is_not_read() {
        let doubled = "a = 0123456789\n".to_owned() + &"build ${a}: cc\n".repeat(3);
        assert_eq!(BuildGraph::parse(&doubled).unwrap().edges.len(), 3);
        let long = format!("a = {}\n", "x".repeat(3000));
        let twice = format!("{long}build ${{a}}${{a}}: cc\n");
        assert_eq!(BuildGraph::parse(&twice), None);
        let all = format!("{long}build x: cc{}\n", " ${a}".repeat(PATHS / 3000 + 1));
        assert_eq!(BuildGraph::parse(&all), None);
        let many = "build x: cc\n".repeat(EDGES + 1);
        assert_eq!(BuildGraph::parse(&many), None);
        let names = format!("build x: cc{}\n", " a".repeat(NAMES));
        assert_eq!(BuildGraph::parse(&names), None);
    }

    #[test]
    fn names_are_not_looked_through_for_ever() {
        // Each name needs all names before it, and none needs three commands.
        let names = (1..EDGES - 3).map(|at| format!("build n{at}: phony n{}\n", at - 1));
        let text = "build x: cc\nbuild y: cc\nbuild n0: phony x y\n".to_owned();
        let graph = BuildGraph::parse(&(text + &names.collect::<String>())).unwrap();
        let begun = std::time::Instant::now();
        assert_eq!(graph.members(Some(3), "", &[]), None);
        assert!(begun.elapsed() < std::time::Duration::from_secs(20));
    }
}
