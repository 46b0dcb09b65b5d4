//! The cache `git-mirrors`: its repositories come from nowhere else, and nothing needs it afterwards.

use std::path::PathBuf;
use std::process::Command;

use fs_err as fs;

use super::Case;
use crate::support::loopfs::run;

/// The repository that only its mirror serves.
const AWAY: &str = "llvm-project";

pub(super) struct Mirrors {
    served: PathBuf,
    away: PathBuf,
}

impl Mirrors {
    /// Fills the cache with a mirror of one submodule, which upstream then stops serving, and with an outdated mirror
    /// of another.
    pub(super) fn fill(case: &Case) -> Self {
        let upstream = &case.upstream;
        let cache = case.store.home().join("caches/git-mirrors/ROCm");
        fs::create_dir_all(&cache).unwrap();
        let url = |name: &str| format!("git://127.0.0.1:{}/{name}", upstream.git.port());
        run(Command::new("git")
            .args(["clone", "--quiet", "--mirror", &url(AWAY)])
            .arg(cache.join(format!("{AWAY}.git"))));
        let old = "git init --quiet --bare .; git config remote.origin.url \"$1\"
            commit=$(git -c user.name=test -c user.email=test@example.org commit-tree -m old $(git mktree </dev/null))
            git update-ref HEAD $commit";
        let half = cache.join("half.git");
        fs::create_dir(&half).unwrap();
        run(Command::new("sh")
            .args(["-euc", old, "sh", &url("half")])
            .current_dir(half));
        let served = upstream.directory.join(AWAY);
        let away = upstream.directory.join("away");
        fs::rename(&served, &away).unwrap();
        Self { served, away }
    }

    /// Clears the cache. The host's git still reads the whole checkout, since its submodules have all objects of their
    /// own.
    pub(super) fn are_needed_no_more(self, case: &Case) {
        fs::rename(&self.away, &self.served).unwrap();
        let clear = ["--yes", "cache", "clear", "git-mirrors"];
        case.store.rockenv(&clear).ok();
        let sources = fs::read_dir(case.store.home().join("sources")).unwrap();
        let mut paths = sources.map(|entry| entry.unwrap().path());
        let checkout = paths
            .find(|path| path.join("compiler/amd-llvm/CMakeLists.txt").exists())
            .unwrap();
        run(Command::new("git")
            .args(["-c", "safe.directory=*", "submodule", "foreach", "--quiet"])
            .arg("git -c safe.directory='*' fsck --no-progress")
            .current_dir(checkout));
        let env = case.env("a");
        let up = ["up", "--name", &env, "gfx1103"];
        case.store.rockenv(&up).ok().says(&["nothing to do"]);
    }
}
