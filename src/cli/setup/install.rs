//! Owns running the distribution's package manager.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::sync::atomic::AtomicBool;

use super::{Manager, Tool, packages};
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::process::{Event, Output, Program};
use crate::ui::Ui;

/// Installs the packages for `tools`. `-v` shows the output. Optional packages may be missing from the archive.
pub(crate) fn install(
    ui: &Ui,
    manager: Manager,
    tools: &[&Tool],
    proxies: &BTreeMap<String, String>,
) -> Result<()> {
    let run = Run {
        ui,
        manager,
        proxies,
    };
    let (optional, needed): (Vec<&Tool>, Vec<&Tool>) =
        tools.iter().copied().partition(|tool| tool.optional);
    let wanted = packages(&needed, manager);
    // The network or the disk, which is no fault of rockenv.
    let failed = |error: Error| {
        let help = match manager {
            Manager::Pacman => "pacman -Syu, then rockenv setup".to_owned(),
            _ => manager.command(&packages(tools, manager)).join(" "),
        };
        error.of_kind(Kind::Unavailable).help(help)
    };
    if manager == Manager::Apt {
        return run.apt(wanted, &optional).map_err(failed);
    }
    if !wanted.is_empty() {
        run.go(&manager.command(&wanted)).map_err(failed)?;
    }
    for tool in optional {
        let package = tool.package(manager);
        if package.is_none_or(|package| run.go(&manager.command(&[package])).is_err()) {
            run.warn_unavailable(tool);
        }
    }
    Ok(())
}

/// Returns whether the package lists are less than an hour old. Refreshing them for a package that is in no archive
/// would only take time.
fn lists_are_fresh() -> bool {
    let lists = std::path::Path::new("/var/lib/apt/lists");
    let entries = fs_err::read_dir(lists).map_or(0, Iterator::count);
    let age = fs_err::metadata(lists)
        .and_then(|lists| lists.modified())
        .ok()
        .and_then(|time| time.elapsed().ok());
    // A directory with little more than `lock` and `partial` contains no lists.
    entries > 4 && age.is_some_and(|age| age < std::time::Duration::from_secs(3600))
}

struct Run<'a> {
    ui: &'a Ui,
    manager: Manager,
    proxies: &'a BTreeMap<String, String>,
}

impl Run<'_> {
    fn go(&self, argv: &[String]) -> Result<()> {
        let Some((name, arguments)) = argv.split_first() else {
            return Ok(());
        };
        let mut program = Program::find(name, "installing packages")?
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive");
        for (name, value) in self.proxies {
            program = program.env(name, value);
        }
        self.ui.detail(&argv.join(" "));
        let show = |stdout: Output| {
            for line in BufReader::new(stdout).split(b'\n') {
                let line = line.context(|| "cannot read from the package manager".to_owned())?;
                self.ui.detail(&String::from_utf8_lossy(&line));
            }
            Ok(())
        };
        // Never interrupted: killing a package manager leaves the host broken.
        program.stream(
            &AtomicBool::new(false),
            &mut |event| {
                if let Event::Line(line) = event {
                    self.ui.detail(line);
                }
            },
            show,
        )
    }

    fn apt(&self, mut wanted: Vec<&'static str>, optional: &[&Tool]) -> Result<()> {
        let mut all = packages(optional, self.manager);
        all.extend(&wanted);
        let mut fresh = false;
        if !self.apt_knows(&all) && !lists_are_fresh() {
            self.refresh()?;
            fresh = true;
        }
        for tool in optional {
            match tool.package(self.manager) {
                Some(package) if self.apt_knows(&[package]) => wanted.push(package),
                _ => self.warn_unavailable(tool),
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let mut argv = self.manager.command(&wanted);
        argv.insert(1, "-oDPkg::Lock::Timeout=120".to_owned());
        argv.insert(1, "-oDpkg::Use-Pty=0".to_owned());
        match self.go(&argv) {
            // Outdated lists name versions that the archive no longer has.
            Err(_) if !fresh => {
                self.refresh()?;
                self.go(&argv)
            }
            other => other,
        }
    }

    fn refresh(&self) -> Result<()> {
        self.ui.note("refreshing the package lists");
        let argv = ["apt-get", "-oDPkg::Lock::Timeout=120", "update"].map(str::to_owned);
        self.go(&argv)
            .context(|| "cannot refresh the package lists".to_owned())
    }

    fn apt_knows(&self, packages: &[&str]) -> bool {
        let argv = ["apt-get", "install", "--simulate", "--quiet"];
        let argv: Vec<String> = argv
            .iter()
            .chain(packages)
            .map(|word| (*word).to_owned())
            .collect();
        self.go(&argv).is_ok()
    }

    fn warn_unavailable(&self, tool: &Tool) {
        self.ui.warn(&format!(
            "cannot install {}, needed to {}: this distribution has no package of it",
            tool.name, tool.why
        ));
    }
}
