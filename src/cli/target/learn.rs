//! Owns `target learn` and `target forget`.

use fs_err as fs;

use super::check::CheckArgs;
use crate::rocm::target::{self, Learned};
use crate::rocm::therock::{self, Checkout};
use crate::store::Store;
use crate::sys::error::{Result, if_exists, named_path};
use crate::ui::{object, size};
use crate::up::context::Context;

pub(super) fn learn(cx: &Context, args: &CheckArgs) -> Result<()> {
    let source = fs::canonicalize(&args.source).map_err(|error| {
        named_path(&args.source)(error).help("git clone https://github.com/ROCm/TheRock")
    })?;
    let checkout = Checkout::read(&source)?;
    let drift = therock::drift(&checkout);
    let store = Store::open(&cx.config.home)?;
    Learned::of(&source, &checkout.targets).save(store.root())?;
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/target-learn/1",
            source: &source,
            targets: &checkout.targets,
            drift: &drift,
        });
    }
    for difference in &drift {
        cx.ui.data(&format!("{difference}\n"));
    }
    cx.ui.note(&format!(
        "the store at `{}` now uses the {} of `{}`; to undo: rockenv target forget",
        store.root().display(),
        size::count(checkout.targets.len(), "target"),
        source.display()
    ));
    Ok(())
}

pub(super) fn forget(cx: &Context) -> Result<()> {
    let store = Store::open_existing(&cx.config.home)?;
    let file = store.map(|store| target::learned_file(store.root()));
    let removed = file.map(|file| if_exists(fs::remove_file(file)));
    match removed.transpose()?.flatten() {
        Some(()) => cx.ui.note(&format!(
            "now uses the built-in targets of TheRock {}",
            &target::table_commit()[..12]
        )),
        None => cx.ui.note("no learned targets to forget"),
    }
    Ok(())
}
