//! Owns each engine's abilities on this machine: the rows of the table in `docs/reference/engines.md` that depend on
//! the machine, or that help to choose an engine.

use serde::Serialize;

use super::{CheckState, Facts, gpu};
use crate::plan::resolve::Engine;
use crate::tree::Method;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Ability {
    /// The ability as worded in the documentation's table.
    pub what: &'static str,
    pub nspawn: String,
    pub docker: String,
    pub podman: String,
}

/// Returns what each engine can do. An unusable engine can do nothing.
pub(crate) fn abilities(facts: &Facts) -> Vec<Ability> {
    let ability = |what, can: &dyn Fn(Engine) -> String| {
        let [nspawn, docker, podman] = Engine::ALL.map(can);
        Ability {
            what,
            nspawn,
            docker,
            podman,
        }
    };
    let row = |what, can: &dyn Fn(Engine) -> String| {
        ability(what, &|engine| match facts.usable(engine) {
            true => can(engine),
            false => "-".to_owned(),
        })
    };
    let method = facts.store.method;
    vec![
        ability("usable here", &|engine| yes(facts.usable(engine))),
        row(
            "snapshot of the root file system",
            &|engine| match (engine, method) {
                (Engine::Nspawn, Some(method)) => format!("a layer, {method}"),
                (Engine::Nspawn, None) => "a layer".to_owned(),
                (Engine::Docker | Engine::Podman, _) => "an image".to_owned(),
            },
        ),
        row("snapshot of build volumes", &|_| match method {
            Some(method @ (Method::Btrfs | Method::Reflink)) => method.to_string(),
            Some(Method::Overlay) => "no: an overlay store".to_owned(),
            None => "no store".to_owned(),
        }),
        row("`memory-max`, `tasks-max`, OOM named", &|engine| {
            match engine {
                // A user service gets only the controllers that systemd delegates, which requires cgroup v2.
                Engine::Podman if !facts.root && facts.cgroup.v2.is_none() => "no".to_owned(),
                Engine::Nspawn | Engine::Docker | Engine::Podman => {
                    yes(facts.cgroup.has("memory") && facts.cgroup.has("pids"))
                }
            }
        }),
        row("bytes read and written by a step", &|engine| {
            yes(match engine {
                Engine::Nspawn => true,
                Engine::Docker | Engine::Podman => false,
            })
        }),
        row("one GPU's nodes, proven inside", &|_| {
            let opens = |node| gpu::node_check(facts, node).state == CheckState::Ok;
            match facts.gpu.machine.lack() {
                Some(_) => "no GPU".to_owned(),
                // Each GPU's and the compute driver's, unless one is no device.
                None => yes(facts.gpu.nodes.len() > facts.gpu.machine.gpus.len()
                    && facts.gpu.nodes.iter().all(opens)),
            }
        }),
        row("commas, quotation marks in mounted paths", &|engine| {
            yes(match engine {
                Engine::Nspawn | Engine::Docker => true,
                Engine::Podman => false,
            })
        }),
        row(
            "`push`, `pull`, `up --pull`, `export --snapshots`, `import`: sharing",
            &|_| yes(true),
        ),
        row("rootless", &|_| yes(!facts.root)),
    ]
}

fn yes(can: bool) -> String {
    if can { "yes" } else { "no" }.to_owned()
}

impl Facts {
    fn usable(&self, engine: Engine) -> bool {
        match engine {
            Engine::Nspawn => self.root && self.nspawn.is_some_and(|is| is >= super::NSPAWN),
            // Access to Docker's socket is equivalent to root, so rockenv insists on running as root.
            Engine::Docker => self.root && self.answers(engine),
            Engine::Podman => self.answers(engine),
        }
    }

    fn answers(&self, engine: Engine) -> bool {
        let mut services = self.services.iter();
        services.any(|found| found.engine == engine && found.is_supported())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::ServiceFacts;
    use crate::cli::doctor::tests::debian;

    fn cells(facts: &Facts, what: &str) -> [String; 3] {
        let rows = abilities(facts);
        let row = rows.into_iter().find(|row| row.what.starts_with(what));
        let row = row.expect("the row");
        [row.nspawn, row.docker, row.podman]
    }

    #[test]
    fn what_is_not_there_can_do_nothing() {
        let mut facts = debian();
        facts.services = vec![ServiceFacts::sample(Engine::Docker)];
        assert_eq!(cells(&facts, "usable"), ["yes", "yes", "no"]);
        assert_eq!(cells(&facts, "snapshot of build"), ["btrfs", "btrfs", "-"]);
        facts.nspawn = Some(248);
        facts.store.method = Some(Method::Overlay);
        assert_eq!(cells(&facts, "usable"), ["no", "yes", "no"]);
        let no = "no: an overlay store";
        assert_eq!(cells(&facts, "snapshot of build"), ["-", no, "-"]);
        assert_eq!(cells(&facts, "one GPU's"), ["-", "no GPU", "-"]);
        facts.gpu = gpu::tests::card();
        assert_eq!(cells(&facts, "one GPU's"), ["-", "yes", "-"]);
        // The nodes that are there are not enough.
        drop(facts.gpu.nodes.remove(0));
        assert_eq!(cells(&facts, "one GPU's"), ["-", "no", "-"]);
        facts.gpu.machine.gpus.clear();
        assert_eq!(cells(&facts, "one GPU's"), ["-", "no GPU", "-"]);
        facts.services[0].version = Some("19.03.5".to_owned());
        assert_eq!(cells(&facts, "usable"), ["no", "no", "no"]);
    }

    #[test]
    fn an_ordinary_user_has_their_own_podman_only() {
        let mut facts = debian();
        facts.root = false;
        facts.services = Engine::SERVICES.map(ServiceFacts::sample).to_vec();
        assert_eq!(cells(&facts, "usable"), ["no", "no", "yes"]);
        assert_eq!(cells(&facts, "rootless"), ["-", "-", "yes"]);
        assert_eq!(cells(&facts, "`memory-max`")[2], "yes");
        facts.cgroup.v1 = facts.cgroup.v2.take().expect("controllers");
        assert_eq!(cells(&facts, "`memory-max`")[2], "no");
    }

    #[test]
    fn the_documentation_has_the_same_rows() {
        let page = include_str!("../../../docs/reference/engines.md");
        for row in abilities(&debian()).iter().skip(1) {
            let line = |line: &str| {
                let cell = line.split('|').nth(1).unwrap_or_default();
                // This cell contains a link; compare only its text.
                let text = cell.replace("[sharing](../how-to/sharing.md)", "sharing");
                text.trim() == row.what
            };
            assert!(
                page.lines().any(line),
                "docs/reference/engines.md: {}",
                row.what
            );
        }
    }
}
