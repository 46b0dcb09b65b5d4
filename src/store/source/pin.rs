//! Owns the facts about sources for a lock file: the commit of a branch or tag, submodules, and a checkout of one
//! commit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Git, Repository};
use crate::store::Store;
use crate::sys::address::without_login;
use crate::sys::error::{Result, ResultExt as _};

impl Repository {
    /// Returns the directory for a checkout of `commit`, or without one of the profile's revision.
    pub(crate) fn directory_at(
        &self,
        store: &Store,
        git: &Git<'_>,
        commit: Option<&str>,
    ) -> Result<PathBuf> {
        Ok(self.at(store, git, commit)?.directory(store))
    }

    /// Returns a checkout of `commit`, or without one of the profile's revision, and clones the repository if
    /// necessary. Never moves an existing checkout.
    pub(crate) fn prepare_at(
        &self,
        store: &Store,
        git: &Git<'_>,
        commit: Option<&str>,
        offline: bool,
        progress: &mut dyn FnMut(&str),
    ) -> Result<PathBuf> {
        let repository = self.at(store, git, commit)?;
        let directory = repository.directory(store);
        match commit.is_some() && directory.join(".git").exists() {
            true => Ok(directory),
            false => repository.prepare(store, git, offline, progress),
        }
    }

    /// Returns the same repository with `commit` as its revision, so that no env moves another env's checkout, unless
    /// the checkout of the profile's revision is at that commit.
    fn at(&self, store: &Store, git: &Git<'_>, commit: Option<&str>) -> Result<Self> {
        let mut found = self.clone();
        if let Some(commit) = commit {
            let named = |rev: &str| rev.len() >= 7 && commit.starts_with(rev);
            let named = self.origin.rev.as_deref().is_some_and(named);
            if !named && git.head(&self.directory(store))?.as_deref() != Some(commit) {
                found.origin.rev = Some(commit.to_owned());
            }
        }
        Ok(found)
    }
}

impl Git<'_> {
    /// Returns the checked-out commit; `None` if there is no checkout.
    pub(crate) fn head(&self, directory: &Path) -> Result<Option<String>> {
        if !directory.join(".git").exists() {
            return Ok(None);
        }
        self.open(directory)?.head().map(Some)
    }

    /// Asks a repository for the commit of a branch or tag, or of its default branch; `None` if it has no such
    /// name.
    pub(crate) fn newest(&self, url: &str, rev: Option<&str>) -> Result<Option<String>> {
        let name = rev.unwrap_or("HEAD");
        let target = format!("{name}^{{}}");
        let ask = ["ls-remote", "--quiet", "--", url, name, &target];
        let listed = self
            .run(Path::new("/"), &ask)
            .map_err(Self::help(url))
            .context(|| format!("cannot ask `{}` for `{name}`", without_login(url)))?;
        let found: BTreeMap<&str, &str> = listed
            .lines()
            .filter_map(|line| line.split_once('\t'))
            .map(|(commit, name)| (name, commit))
            .collect();
        // In the order in which git looks names up. For an annotated tag, the commit is what it points to.
        let candidates = [
            name.to_owned(),
            format!("refs/tags/{name}^{{}}"),
            format!("refs/tags/{name}"),
            format!("refs/heads/{name}"),
        ];
        let commit = candidates.iter().find_map(|name| found.get(name.as_str()));
        Ok(commit.map(|commit| (*commit).to_owned()))
    }

    /// Returns the commits of submodules that the checked-out commit names, by path; with `inside`, also those that
    /// checked-out submodules name.
    pub(crate) fn submodules(
        &self,
        directory: &Path,
        inside: bool,
    ) -> Result<BTreeMap<String, String>> {
        let checkout = self.open(directory)?;
        let listed = checkout.bytes(&["ls-tree", "-r", "-z", "HEAD"])?;
        let mut found = BTreeMap::new();
        for entry in listed.split(|byte| *byte == 0) {
            let Some(entry) = entry.strip_prefix(b"160000 commit ") else {
                continue;
            };
            let entry = std::str::from_utf8(entry).map_err(|_| {
                let place = directory.display();
                invalid!("a submodule in `{place}` has a name that is not UTF-8")
            })?;
            let Some((commit, path)) = entry.split_once('\t') else {
                continue;
            };
            let below = directory.join(path);
            if inside && below.join(".git").exists() {
                for (name, commit) in self.submodules(&below, true)? {
                    found.insert(format!("{path}/{name}"), commit);
                }
            }
            found.insert(path.to_owned(), commit.to_owned());
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::super::tests::{add_submodule, me, repository, run, source};
    use super::*;

    #[test]
    fn names_are_asked_for_and_a_commit_has_a_checkout_of_its_own() {
        let (origin, git) = (repository(), Git::new(me()));
        let run = |arguments: &[&str]| run(origin.path(), arguments);
        run(&["branch", "-M", "main"]);
        run(&["config", "uploadpack.allowAnySHA1InWant", "true"]);
        let first = git.head(origin.path()).unwrap().unwrap();
        run(&["tag", "-a", "-m", "one", "one"]);
        run(&["commit", "--quiet", "--allow-empty", "-m", "second"]);
        let second = git.head(origin.path()).unwrap().unwrap();
        let url = format!("file://{}", origin.path().display());
        let newest = |rev| git.newest(&url, rev).unwrap();
        assert_eq!(newest(None), Some(second.clone()));
        assert_eq!(newest(Some("main")), Some(second.clone()));
        assert_eq!(newest(Some("one")), Some(first.clone()));
        assert_eq!(newest(Some("two")), None);

        let (_home, store) = Store::scratch();
        let source = source(origin.path(), Some("main"));
        let at = |commit: Option<&str>, offline| {
            let prepared = source.prepare_at(&store, &git, commit, offline, &mut |_| {});
            prepared.unwrap()
        };
        let branch = at(None, false);
        assert_eq!(at(Some(&second), false), branch);
        let old = at(Some(&first), false);
        assert_ne!(old, branch);
        assert_eq!(git.head(&old).unwrap(), Some(first.clone()));
        // Neither checkout moves to the other's commit, not even offline.
        assert_eq!(at(Some(&first), true), old);
        assert_eq!(git.head(&branch).unwrap(), Some(second));
    }

    #[test]
    fn submodules_are_listed_with_those_inside() {
        let (outer, middle, inner) = (repository(), repository(), repository());
        let git = Git::new(me());
        let add = |to: &Path, from: &Path, name: &str| {
            add_submodule(to, from, name);
            run(to, &["commit", "--quiet", "-m", "submodule"]);
        };
        add(middle.path(), inner.path(), "in ner");
        add(outer.path(), middle.path(), "middle");
        let head = |path: &Path| git.head(path).unwrap().unwrap();
        let top = BTreeMap::from([("middle".to_owned(), head(middle.path()))]);
        // `in ner` is not checked out, but the commit of `middle` names it.
        assert_eq!(git.submodules(outer.path(), false).unwrap(), top);
        let mut all = top.clone();
        all.insert("middle/in ner".to_owned(), head(inner.path()));
        assert_eq!(git.submodules(outer.path(), true).unwrap(), all);
        let update = ["submodule", "--quiet", "update", "--init", "--recursive"];
        run(outer.path(), &update);
        assert_eq!(git.submodules(outer.path(), true).unwrap(), all);
        assert_eq!(git.submodules(outer.path(), false).unwrap(), top);
        fs::write(outer.path().join("middle/a"), "changed").unwrap();
        assert_eq!(git.submodules(outer.path(), true).unwrap(), all);
    }
}
