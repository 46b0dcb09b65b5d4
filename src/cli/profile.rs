//! Owns `profile`: lists, shows, checks and creates profiles.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::plan::resolve;
use crate::profile::{self, Origin};
use crate::store::Store;
use crate::sys::account::{Existing, FilePlace, caller, make_directories};
use crate::sys::error::{Error, Kind, Result};
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::check::{self, ProfileCheck};
use crate::up::context::Context;
use crate::up::request::UpRequest;
use crate::up::resolve::Gathered;
use crate::up::select::Selection;

#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// List profiles
    #[command(visible_alias = "list")]
    Ls,
    /// Show a profile's files, or the resolved spec
    Show(ShowArgs),
    /// Check profiles for mistakes
    Check(CheckArgs),
    /// Create a new profile
    New(NewArgs),
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Profile, target or profile file
    #[arg(value_name = "PROFILE|TARGET|FILE.toml")]
    what: String,
    /// Show the spec: nothing left to decide, a key for each step
    #[arg(short, long)]
    resolved: bool,
    /// Target to resolve for; may be given again
    #[arg(short, long, value_name = "GFX", requires = "resolved")]
    target: Vec<String>,
    /// Set a parameter of the profile
    #[arg(short, long, value_name = "NAME=VALUE", requires = "resolved")]
    param: Vec<String>,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Profiles or files [default: every profile there is]
    #[arg(value_name = "PROFILE|FILE.toml")]
    what: Vec<String>,
    /// Target to resolve for instead of the profile's own; may be given again
    #[arg(short, long, value_name = "GFX")]
    target: Vec<String>,
}

#[derive(Debug, Args)]
pub struct NewArgs {
    /// Its name
    name: String,
    /// Print it instead of writing `profiles/NAME.toml`
    #[arg(long)]
    print: bool,
}

pub(crate) fn profile(cx: &Context, command: ProfileCommand) -> Result<u8> {
    match command {
        ProfileCommand::Ls => ls(cx).map(|()| 0),
        ProfileCommand::Show(args) => show(cx, &args).map(|()| 0),
        ProfileCommand::Check(args) => check(cx, &args),
        ProfileCommand::New(args) => new(cx, &args).map(|()| 0),
    }
}

fn ls(cx: &Context) -> Result<()> {
    let listed = profile::list(&cx.config.profile_dirs)?;
    if cx.json {
        #[derive(Serialize)]
        struct ProfileRow<'a> {
            name: &'a str,
            description: &'a str,
            origin: String,
            built_in: bool,
            problem: Option<&'a str>,
        }
        let rows: Vec<_> = listed
            .iter()
            .map(|profile| ProfileRow {
                name: &profile.name,
                description: &profile.description,
                origin: profile.origin.to_string(),
                built_in: matches!(profile.origin, Origin::Builtin(_)),
                problem: profile.problem.as_deref(),
            })
            .collect();
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["profile", "description", "where"]);
    for profile in &listed {
        let place = match &profile.origin {
            Origin::Builtin(_) => "built in".to_owned(),
            Origin::File(path) => path.display().to_string(),
        };
        let description = match &profile.problem {
            Some(problem) => format!("invalid: {}", problem.lines().next().unwrap_or_default()),
            None => profile.description.clone(),
        };
        table.row([profile.name.clone(), description, place]);
    }
    cx.ui.table(&table);
    Ok(())
}

fn show(cx: &Context, args: &ShowArgs) -> Result<()> {
    if args.resolved {
        return show_resolved(cx, args);
    }
    let listed = profile::list(&cx.config.profile_dirs)?;
    let names = listed.iter().map(|profile| profile.name.as_str());
    let request = resolve::choose(&args.what, &[], None, names)?;
    let profile = profile::load(&cx.config.profile_dirs, &request.profile)?;
    if cx.json {
        #[derive(Serialize)]
        struct File<'a> {
            origin: String,
            text: &'a str,
        }
        #[derive(Serialize)]
        struct ProfileReport<'a> {
            schema: &'static str,
            name: &'a str,
            description: &'a str,
            files: Vec<File<'a>>,
        }
        return cx.ui.json(&ProfileReport {
            schema: "rockenv/profile/1",
            name: &profile.name,
            description: &profile.description,
            files: profile
                .files()
                .map(|(origin, text)| File {
                    origin: origin.to_string(),
                    text,
                })
                .collect(),
        });
    }
    let count = profile.files().count();
    for (index, (origin, text)) in profile.files().enumerate() {
        if count > 1 {
            let word = if index == 0 { "" } else { "which extends " };
            cx.ui.data(&format!("# {word}{origin}\n"));
        }
        cx.ui.data(text);
        if index + 1 < count {
            cx.ui.data("\n");
        }
    }
    Ok(())
}

fn show_resolved(cx: &Context, args: &ShowArgs) -> Result<()> {
    let selection = Selection::new(cx, &request(&args.what, &args.target, &args.param))?;
    let store = Store::open_existing(&cx.config.home)?;
    let (mut gathered, missing) = Gathered::predict(&selection, store.as_ref(), false)?;
    let spec = gathered.resolve(store.as_ref())?;
    if cx.json {
        cx.ui.json(&spec)?;
    } else {
        let text = toml::to_string_pretty(&spec)
            .map_err(|error| Error::unexpected("cannot write the spec as toml").source(error))?;
        cx.ui.data(&text);
    }
    selection.note_absent_engine(cx);
    for note in missing.notes.iter().chain(&missing.refused) {
        cx.ui.note(&format!("{note}: keys will differ when it is"));
    }
    Ok(())
}

fn request<'a>(what: &'a str, targets: &'a [String], params: &'a [String]) -> UpRequest<'a> {
    UpRequest {
        verb: "plan",
        what: Some(what),
        targets,
        name: None,
        variant: None,
        release: None,
        from: None,
        params,
        engine: None,
        jobs: None,
        gpu: "auto",
        inspects: true,
    }
}

/// The result of `profile check` for one profile.
#[derive(Debug, Serialize)]
struct CheckReport {
    profile: String,
    ok: bool,
    targets: Vec<String>,
    steps: usize,
    advice: Vec<String>,
    error: Option<String>,
    help: Option<String>,
}

fn check(cx: &Context, args: &CheckArgs) -> Result<u8> {
    let mut all = args.what.clone();
    if all.is_empty() {
        let listed = profile::list(&cx.config.profile_dirs)?;
        all.extend(listed.into_iter().map(|profile| profile.name));
    }
    let mut code = 0;
    let mut reports = Vec::new();
    for what in all {
        let ProfileCheck {
            spec,
            advice,
            errors,
        } = check::check(cx, &what, &args.target);
        for error in &errors {
            // The exit code of an invalid profile wins over that of a missing one.
            if code != Kind::Invalid.exit_code() {
                code = error.kind().exit_code();
            }
            if !cx.json {
                cx.ui.error(error);
            }
        }
        let ok = spec.is_some();
        let (targets, steps) = spec.map_or_else(Default::default, |spec| {
            let targets = spec.targets.iter().map(ToString::to_string).collect();
            (targets, spec.steps.len() + spec.skipped.len())
        });
        let causes: Vec<String> = errors.iter().flat_map(Error::chain).collect();
        let report = CheckReport {
            profile: what,
            ok,
            targets,
            steps,
            advice: if ok { advice } else { Vec::new() },
            error: (!ok).then(|| causes.join("\n")),
            help: errors.iter().find_map(Error::help_text).map(str::to_owned),
        };
        if ok && !cx.json {
            shown_ok(cx, &report);
        }
        reports.push(report);
    }
    if cx.json {
        cx.ui.json(&reports)?;
    }
    Ok(code)
}

fn shown_ok(cx: &Context, report: &CheckReport) {
    let targets = match report.targets.as_slice() {
        [] => String::new(),
        some => format!(", for {}", some.join(" ")),
    };
    let steps = size::count(report.steps, "step");
    cx.ui
        .data(&format!("{}: ok, {steps}{targets}\n", report.profile));
    for advice in &report.advice {
        cx.ui.data(&format!("  advice: {advice}\n"));
    }
}

/// Returns the schema of profiles that was installed with this program.
fn installed_schema() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let prefix = program.parent()?.parent()?;
    let schema = prefix.join("share/rockenv/schema/profile.json");
    schema.exists().then_some(schema)
}

fn new(cx: &Context, args: &NewArgs) -> Result<()> {
    let mut text = profile::template(&args.name)?;
    // Editors check and complete with it.
    if let Some(schema) = installed_schema() {
        text = format!("#:schema file://{}\n{text}", schema.display());
    }
    if args.print {
        cx.ui.data(&text);
        return Ok(());
    }
    let directory = Path::new("profiles");
    let path = directory.join(format!("{}.toml", args.name));
    make_directories(caller(), directory)?;
    let place = FilePlace::new(caller(), &path)?;
    if place.open()?.is_some() {
        return Err(place
            .exists("")
            .help(format!("rockenv profile check {}", path.display())));
    }
    place.put(text.as_bytes(), 0o644, None, Existing::Refuse)?;
    cx.ui.note(&format!(
        "wrote {}; next: rockenv profile check {}",
        path.display(),
        args.name
    ));
    Ok(())
}
