//! Owns `image ls`.

use crate::image::catalog;
use crate::store::Store;
use crate::sys::error::Result;
use crate::ui::table::Table;
use crate::ui::{object, size};
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let store = Store::open_existing(&cx.config.home)?;
    let mut rows = Vec::new();
    for listed in catalog::list(&cx.config.image_dirs)? {
        let recipe = catalog::find(&cx.config.image_dirs, &listed.name)?;
        let image = store.as_ref().map(|store| store.image_of(&recipe));
        let image = image.transpose()?.flatten();
        let of = image.as_ref();
        rows.push(object! {
            name: listed.name,
            provider: recipe.provider(),
            description: recipe.description,
            built: of.map(|image| image.built),
            packages: of.map(|image| image.packages.len()),
            bytes: of.map(|image| image.bytes),
            digest: of.map(|image| image.digest.clone()),
            resolved: of.and_then(|image| image.resolved.clone()),
            // For commands that get no variables from a profile.
            env: of.and_then(|image| image.env.clone()),
        });
    }
    if cx.json {
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["image", "provider", "built", "packages", "size", "digest"]);
    for row in rows {
        table.row([
            row.name,
            row.provider.to_owned(),
            row.built.map(size::ago).unwrap_or_default(),
            row.packages
                .map(|count| count.to_string())
                .unwrap_or_default(),
            row.bytes.map(size::bytes).unwrap_or_default(),
            row.digest
                .map(|digest| digest[..12].to_owned())
                .unwrap_or_default(),
        ]);
    }
    cx.ui.table(&table);
    Ok(())
}
