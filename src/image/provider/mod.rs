//! Owns building base images with distributions' tools: one file per provider.

pub(crate) mod mmdebstrap;
pub(crate) mod pacstrap;

use super::BuildContext;
use crate::sys::process::Program;

/// Prepares a distribution's tool, with the time of the build in `SOURCE_DATE_EPOCH`. Otherwise programs of packages
/// write the present time into files, such as p11-kit into Java's certificates.
fn prepared(program: Program, source_date: i64, cx: &BuildContext<'_>) -> Program {
    let program = program
        .isolated()
        .env("SOURCE_DATE_EPOCH", source_date.to_string());
    let variables = cx.task.env.iter();
    variables.fold(program, |program, (name, value)| program.env(name, value))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::image::recipe::Source;
    use crate::image::{Logins, Recipe, TaskContext};

    /// Calls `with` with a recipe's source, in a build with these mirrors.
    pub(super) fn with_mirrors<T>(
        provider: &str,
        recipe: &str,
        mirrors: &[(&str, &str)],
        with: impl FnOnce(Source, &BuildContext<'_>) -> T,
    ) -> T {
        let text = format!("schema=1\nprovider=\"{provider}\"\n[{provider}]\n{recipe}");
        let recipe = Recipe::parse(&text, "x", Path::new("/")).unwrap();
        let mirrors = mirrors.iter().map(|(k, v)| ((*k).into(), (*v).into()));
        let cx = BuildContext {
            into: Path::new("/"),
            blobs: Path::new("/"),
            source_date: None,
            task: TaskContext {
                mirrors: &mirrors.collect(),
                logins: &Logins::default(),
                notice: crate::image::oci::Notice::default(),
                env: &BTreeMap::new(),
                cancel: &AtomicBool::new(false),
                progress: &mut |_| {},
            },
        };
        with(recipe.source, &cx)
    }

    #[test]
    fn the_programs_of_packages_are_told_the_time_of_the_build() {
        with_mirrors("pacstrap", "", &[], |_, cx| {
            let program = prepared(Program::at("/bin/true"), 5, cx);
            assert_has!(format!("{program:?}"), "(\"SOURCE_DATE_EPOCH\", \"5\")");
        });
    }
}
