//! Owns `setup`: installs what the host needs, and creates a btrfs store in a file.

use std::collections::BTreeMap;

use clap::Args;

use crate::cli::setup::store_image::StoreImage;
use crate::cli::setup::timer::{self, Timer};
use crate::cli::setup::{DEFAULT, Feature, Manager, Tool, install, missing, packages};
use crate::plan::gc::policy::Preset;
use crate::profile::value;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::{self, Host};
use crate::sys::signals::Signals;
use crate::ui::object;
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Show what would be done, and do nothing
    #[arg(short = 'n', long, short_alias = 'd')]
    dry_run: bool,
    /// What to install for; may be given again [default: nspawn, images, sources]
    #[arg(long = "for", value_name = "FEATURE")]
    features: Vec<Feature>,
    /// Make a btrfs store of at most this size in a file beside the store's directory, and mount it there
    #[arg(long, value_name = "SIZE")]
    store_image: Option<String>,
    /// Install a systemd timer that runs `gc` every day, with this policy or the one of `/etc/rockenv/config.toml`
    #[arg(long, value_name = "PRESET", num_args = 0..=1, require_equals = true)]
    timer: Option<Option<Preset>>,
}

/// Installs missing packages, and creates the store image and the timer if requested.
pub(crate) fn setup(cx: &Context, args: &SetupArgs) -> Result<()> {
    let mut features = args.features.clone();
    if features.is_empty() {
        features.extend(DEFAULT);
    }
    let image = match &args.store_image {
        Some(text) => {
            features.push(Feature::Btrfs);
            let size = value::size(text).map_err(|refused| {
                usage!("{}", refused.message).help("rockenv setup --store-image 300G")
            })?;
            Some(StoreImage::plan(&cx.config.home, size)?)
        }
        None => None,
    };
    let timer = match args.timer {
        Some(preset) => {
            let program = Host::probe()?.program;
            timer::check_program(&program, host::has_selinux())?;
            Some(Timer::plan(&program, &cx.config.home, preset)?)
        }
        None => None,
    };
    // `--timer` alone assumes a working machine.
    let mut tools = if timer.is_some() && args.features.is_empty() && image.is_none() {
        Vec::new()
    } else {
        missing(&features, Tool::is_there)
    };
    if args.dry_run {
        return show(cx, &tools, image.as_ref(), timer.as_ref());
    }
    for tool in drop_without_package(&mut tools) {
        cx.ui.warn(&format!(
            "this distribution has no package of {}, needed to {}",
            tool.name, tool.why
        ));
    }
    if tools.is_empty() && image.is_none() && timer.is_none() {
        cx.ui.note("nothing to install");
        return Ok(());
    }
    // Asks a single question, so that the user cannot accept the packages and then refuse the image.
    if !tools.is_empty() {
        announce(cx, &tools);
    }
    let announce_steps = |title: &str, steps: Vec<String>| {
        cx.ui.note(title);
        for step in steps {
            cx.ui.note(&format!("  {step}"));
        }
    };
    if let Some(image) = &image {
        announce_steps("a btrfs store in a file:", image.steps());
        for warning in &image.warnings {
            cx.ui.warn(warning);
        }
    }
    if let Some(timer) = &timer {
        announce_steps("a timer that runs `gc`:", timer.steps());
    }
    let what = match (tools.is_empty(), &image) {
        (false, _) => "installing packages",
        (true, Some(_)) => "mounting a store",
        (true, None) => "installing a timer",
    };
    need_root(cx, what)?;
    if !cx.ui.confirm("go ahead?")? {
        let again = cx.config.sudo_command.trim_start_matches("sudo ");
        return Err(usage!("nothing changed").help(format!("{again} --yes")));
    }
    let signals = Signals::take()?;
    if !tools.is_empty() {
        get(cx, &tools, &signals)?;
    }
    if let Some(image) = image {
        image.make(&cx.ui, &signals)?;
        cx.ui.note(&format!(
            "the store at {} is now on btrfs, and mounted at every boot",
            image.at.display()
        ));
        cx.ui.note(&image.undo_text());
    }
    if let Some(timer) = timer {
        if timer.install(Host::probe()?.systemd)? {
            cx.ui
                .note("`gc` now runs every day; to undo: systemctl disable --now rockenv-gc.timer");
        } else {
            cx.ui
                .warn("units written, but systemd is not running here, so nothing starts them");
        }
    }
    Ok(())
}

/// Installs what an env needs, for `up --setup`. The flag itself is the consent.
pub(crate) fn install_missing(cx: &Context) -> Result<()> {
    let mut tools = missing(&DEFAULT, Tool::is_there);
    drop_without_package(&mut tools);
    if tools.is_empty() {
        return Ok(());
    }
    announce(cx, &tools);
    need_root(cx, "installing packages")?;
    get(cx, &tools, &Signals::take()?)
}

/// Removes the tools without a package in this distribution, and returns them.
fn drop_without_package(tools: &mut Vec<&'static Tool>) -> Vec<&'static Tool> {
    let Some(manager) = Manager::detect() else {
        return Vec::new();
    };
    let (kept, dropped) = std::mem::take(tools)
        .into_iter()
        .partition(|tool| tool.package(manager).is_some());
    *tools = kept;
    dropped
}

fn need_root(cx: &Context, what: &str) -> Result<()> {
    if crate::sys::userns::is_root() {
        return Ok(());
    }
    Err(unavailable!("{what} needs root").help(&cx.config.sudo_command))
}

fn announce(cx: &Context, tools: &[&Tool]) {
    cx.ui.note("missing on this host:");
    cx.ui.note(table(tools).render().trim_end());
}

fn table(tools: &[&Tool]) -> Table {
    let manager = Manager::detect();
    Table::of(["what", "package", "needed to"], tools, |tool| {
        let package = manager.and_then(|manager| tool.package(manager));
        [tool.name, package.unwrap_or("-"), tool.why].map(str::to_owned)
    })
}

/// Installs tools and checks that they are there afterwards.
fn get(cx: &Context, tools: &[&Tool], signals: &Signals) -> Result<()> {
    let Some(manager) = Manager::detect() else {
        return Err(still_missing(
            tools,
            "no supported package manager found (apt-get, pacman, dnf, rpm-ostree, zypper)",
        ));
    };
    cx.ui
        .note(&format!("installing with {}", manager.program()));
    install::install(&cx.ui, manager, tools, &cx.config.proxies)?;
    if let Some(number) = signals.pending()? {
        return Err(Error::new(Kind::Signal(number), "interrupted"));
    }
    cx.ui.note(check_there(manager, tools)?);
    Ok(())
}

/// Returns the message after the installation; fails if a needed tool is missing.
fn check_there(manager: Manager, tools: &[&Tool]) -> Result<&'static str> {
    const REBOOT: &str = "the packages are there after a reboot";
    let mut left = tools.to_vec();
    left.retain(|tool| !tool.is_there());
    let is_later = manager == Manager::RpmOstree && !left.is_empty();
    left.retain(|tool| !tool.optional);
    match (left.is_empty(), is_later) {
        (true, true) => Ok(REBOOT),
        (true, false) => Ok("everything that has a package is installed now"),
        (false, true) => Err(unavailable!("{REBOOT}").help("systemctl reboot")),
        (false, false) => Err(still_missing(&left, "their packages do not contain them")),
    }
}

fn still_missing(tools: &[&Tool], why: &str) -> Error {
    let names: Vec<&str> = tools.iter().map(|tool| tool.name).collect();
    unavailable!("still missing: {}", names.join(", "))
        .source(why.to_owned())
        .help("install them by hand, then: rockenv doctor")
}

fn show(
    cx: &Context,
    tools: &[&Tool],
    image: Option<&StoreImage>,
    timer: Option<&Timer>,
) -> Result<()> {
    let manager = Manager::detect();
    let packages = manager.map_or_else(Vec::new, |manager| packages(tools, manager));
    let command = manager
        .filter(|_| !packages.is_empty())
        .map(|manager| manager.command(&packages).join(" "));
    for warning in image.iter().flat_map(|image| &image.warnings) {
        cx.ui.warn(warning);
    }
    if cx.json {
        let missing = tools.iter().map(|tool| {
            object! {
                name: tool.name,
                package: manager.and_then(|manager| tool.package(manager)),
                why: tool.why,
                optional: tool.optional,
            }
        });
        let units = timer.iter().flat_map(|timer| &timer.files);
        return cx.ui.json(&object! {
            schema: "rockenv/setup/1",
            manager: manager,
            missing: missing.collect::<Vec<_>>(),
            command: command,
            store_image: image.map(StoreImage::steps).unwrap_or_default(),
            units: units.map(|(path, text)| (path, text)).collect::<BTreeMap<_, _>>(),
        });
    }
    if !tools.is_empty() {
        cx.ui.table(&table(tools));
    } else if image.is_none() && timer.is_none() {
        cx.ui.note("nothing is missing");
    }
    if let Some(command) = command {
        cx.ui.data(&format!("would run: {command}\n"));
    }
    let mut steps = image.map(StoreImage::steps).unwrap_or_default();
    steps.extend(timer.map(Timer::steps).unwrap_or_default());
    for step in steps {
        cx.ui.data(&format!("would {step}\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_needed_package_waits_for_a_reboot() {
        let check = |optional| {
            let tool = Tool {
                name: "no-such-tool",
                files: Vec::new(),
                features: Vec::new(),
                why: "test",
                optional,
                packages: "-",
            };
            check_there(Manager::RpmOstree, &[&tool])
        };
        // It is not installed yet.
        let message = "the packages are there after a reboot";
        assert_eq!(check(true).unwrap(), message);
        let error = check(false).unwrap_err();
        assert_eq!(error.message(), message);
        assert_eq!(error.help_text(), Some("systemctl reboot"));
    }
}
