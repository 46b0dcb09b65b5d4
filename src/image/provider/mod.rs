//! Owns building base images with distributions' tools: one file per provider.

pub(crate) mod mmdebstrap;
pub(crate) mod pacstrap;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::atomic::AtomicBool;

    use crate::image::recipe::Source;
    use crate::image::{BuildContext, Logins, Recipe, TaskContext};

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
}
