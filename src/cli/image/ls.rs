//! Owns `image ls`.

use crate::image::catalog;
use crate::store::Store;
use crate::sys::error::Result;
use crate::ui::{object, size};
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let store = Store::open_existing(&cx.config.home)?;
    let mut rows = Vec::new();
    for listed in catalog::list(&cx.config.image_dirs)? {
        let found = catalog::find(&cx.config.image_dirs, &listed.name).and_then(|recipe| {
            let image = store.as_ref().map(|store| store.image_of(&recipe));
            Ok((recipe, image.transpose()?.flatten()))
        });
        let (recipe, image) = match found {
            Ok(found) => found,
            Err(error) => {
                let why = error.chain().join(": ");
                let help = error.help_text().map(|help| format!("\nhelp: {help}"));
                let help = help.unwrap_or_default();
                cx.ui.warn(&format!(
                    "image `{}` is not listed: {why}{help}",
                    listed.name
                ));
                continue;
            }
        };
        let of = image.as_ref();
        rows.push(object! {
            name: listed.name,
            provider: recipe.source.provider(),
            description: recipe.description,
            built: of.map(|image| image.built),
            packages: of.map(|image| image.packages.len()),
            bytes: of.map(|image| image.bytes),
            digest: of.map(|image| image.digest.clone()),
            resolved: of.and_then(|image| image.resolved.clone()),
            // Environment variables for commands that get none from a profile.
            env: of.and_then(|image| image.env.clone()),
        });
    }
    let header = ["image", "provider", "built", "packages", "size", "digest"];
    cx.list(&rows, header, |row| {
        let digest = row.digest.as_ref();
        [
            row.name.clone(),
            row.provider.to_owned(),
            row.built.map(size::ago).unwrap_or_default(),
            row.packages
                .as_ref()
                .map_or_else(String::new, usize::to_string),
            row.bytes.map(size::bytes).unwrap_or_default(),
            digest.map_or_else(String::new, |digest| digest[..12].to_owned()),
        ]
    })?;
    if !cx.json {
        cx.note_roots_store(store.is_some());
    }
    Ok(())
}
