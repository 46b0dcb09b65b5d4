//! Owns `profile show`.

use clap::Args;

use crate::plan::resolve;
use crate::profile;
use crate::store::Store;
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;
use crate::up::request::{SelectArgs, UpRequest};
use crate::up::resolve::Gathered;
use crate::up::select::Selection;

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Profile, target or profile file
    #[arg(value_name = "PROFILE|TARGET|FILE.toml")]
    what: String,
    /// Show the resolved spec, with a key for each step
    #[arg(short, long)]
    resolved: bool,
    /// Target to resolve for; may be given again
    #[arg(short, long, value_name = "GFX", requires = "resolved")]
    target: Vec<String>,
    /// Set a parameter of the profile
    #[arg(short, long, value_name = "NAME=VALUE", requires = "resolved")]
    param: Vec<String>,
}

pub(super) fn show(cx: &Context, args: &ShowArgs) -> Result<()> {
    if args.resolved {
        return show_resolved(cx, args);
    }
    let names = profile::names(&cx.config.profile_dirs)?;
    let names = names.iter().map(String::as_str);
    let request = resolve::profile_or_target(&args.what, &[], names)?;
    let profile = profile::load(&cx.config.profile_dirs, &request.profile)?;
    if cx.json {
        let files = profile.files();
        let files = files.map(|(origin, text)| object! { origin: origin.to_string(), text: text });
        return cx.ui.json(&object! {
            schema: "rockenv/profile/1",
            name: &profile.name,
            description: &profile.description,
            files: files.collect::<Vec<_>>(),
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
    let select = SelectArgs {
        what: Some(args.what.clone()),
        target: args.target.clone(),
        param: args.param.clone(),
        ..SelectArgs::default()
    };
    let request = UpRequest {
        gpu: "auto",
        ..select.request("plan")
    };
    let selection = Selection::new(cx, &request)?;
    let store = Store::open_existing(&cx.config.home)?;
    let (mut gathered, missing) = Gathered::predict(&selection, store.as_ref(), false)?;
    let spec = gathered.resolve(store.as_ref())?;
    if cx.json {
        cx.ui.json(&spec)?;
    } else {
        let text = toml::to_string_pretty(&spec)
            .map_err(|error| unexpected!("cannot write the spec as toml").source(error))?;
        cx.ui.data(&text);
    }
    selection.note_absent_engine(cx);
    for note in missing.notes.iter().chain(&missing.refused) {
        cx.ui.note(&format!("{note}: keys will differ when it is"));
    }
    Ok(())
}
