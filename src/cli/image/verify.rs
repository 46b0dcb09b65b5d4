//! Owns `image verify`.

use clap::Args;

use crate::cli::code_of;
use crate::image::catalog;
use crate::store::images::VerifiedImage;
use crate::sys::error::{Kind, Result};
use crate::ui::event::Outcome;
use crate::ui::{object, size, text};
use crate::up::context::Context;
use crate::up::task::{Subject, Task};

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The image
    name: String,
}

pub(super) fn verify(cx: &Context, args: &VerifyArgs) -> Result<u8> {
    let store = cx.store_to_change("building an image")?;
    let recipe = catalog::find(&cx.config.image_dirs, &args.name)?;
    let task = Task::start(cx)?;
    let verified = task.with_progress(Subject::Image(&args.name), |cx| {
        store.verify_image(&args.name, &recipe, cx)
    });
    let tidied = cx.tidy(&store);
    let VerifiedImage {
        image,
        variables,
        differences,
    } = verified?;
    tidied?;
    let same = variables.is_empty() && differences.is_empty();
    let (outcome, message) = if same {
        (
            Outcome::Done,
            format!("{}: reproduced, digest {}", args.name, image.digest),
        )
    } else {
        (
            Outcome::Failed,
            format!(
                "{}: differs from the image built {}",
                args.name,
                size::ago(image.built)
            ),
        )
    };
    task.reporter.finish(outcome, message);
    let code = code_of(same, Kind::Drift);
    if cx.json {
        let differences = differences
            .iter()
            .map(|one| object! { path: text::os(&one.path), what: &one.what });
        cx.ui.json(&object! {
            schema: "rockenv/image-verify/1",
            image: &args.name,
            same: same,
            digest: &image.digest,
            variables: &variables,
            differences: differences.collect::<Vec<_>>(),
        })?;
        return Ok(code);
    }
    for name in &variables {
        cx.ui.data(&format!("variable `{name}`: value differs\n"));
    }
    for difference in &differences {
        cx.ui.data(&format!(
            "{}: {}\n",
            text::os(&difference.path),
            difference.what
        ));
    }
    Ok(code)
}
