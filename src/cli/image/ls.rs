//! Owns `image ls`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use crate::image::catalog;
use crate::store::Store;
use crate::sys::error::Result;
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    #[derive(Serialize)]
    struct ImageRow {
        name: String,
        provider: &'static str,
        description: String,
        built: Option<Timestamp>,
        packages: Option<usize>,
        bytes: Option<u64>,
        digest: Option<String>,
        resolved: Option<String>,
        /// Environment variables of the image, for commands that get none from a profile.
        env: Option<BTreeMap<String, String>>,
    }
    let store = Store::open_existing(&cx.config.home)?;
    let mut rows = Vec::new();
    for listed in catalog::list(&cx.config.image_dirs)? {
        let recipe = catalog::find(&cx.config.image_dirs, &listed.name)?;
        let image = match &store {
            Some(store) => store.image_of(&recipe)?,
            None => None,
        };
        rows.push(ImageRow {
            name: listed.name,
            provider: recipe.provider(),
            description: recipe.description.clone(),
            built: image.as_ref().map(|image| image.built),
            packages: image.as_ref().map(|image| image.packages.len()),
            bytes: image.as_ref().map(|image| image.bytes),
            resolved: image.as_ref().and_then(|image| image.resolved.clone()),
            env: image.as_ref().and_then(|image| image.env.clone()),
            digest: image.map(|image| image.digest),
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
