//! Owns long work with progress: building images, and transferring snapshots.

use std::time::Instant;

use crate::image::{Progress, Recipe};
use crate::plan::lockfile::LockedImage;
use crate::store::Store;
use crate::store::images::{Image, Means};
use crate::sys::error::Result;
use crate::sys::signals::{Cancel, Signals};
use crate::ui::Reporter;
use crate::ui::event::Event;
use crate::up::context::Context;

/// Builds an image, shows progress, and stops when the user asks.
pub(crate) fn build_image(
    cx: &Context,
    store: &Store,
    name: &str,
    recipe: &Recipe,
    refresh: bool,
    signals: &Signals,
    reporter: &Reporter,
) -> Result<Image> {
    let started = Instant::now();
    let image = with_progress(cx, Subject::Image(name), signals, reporter, |means| {
        store.ensure_image(name, recipe, refresh, means)
    })?;
    let wall_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    reporter.emit(&Event::ImageFinished {
        image: name.to_owned(),
        wall_ms,
    });
    Ok(image)
}

/// Returns the image that a lock file names, building it if it is missing. An image with another key is only
/// described.
pub(crate) fn locked_image(
    cx: &Context,
    store: &Store,
    recipe: &Recipe,
    wanted: &LockedImage,
    signals: &Signals,
    reporter: &Reporter,
) -> Result<Image> {
    let there = store.image(&wanted.key)?.is_some();
    let started = Instant::now();
    let name = &wanted.name;
    let image = with_progress(cx, Subject::Image(name), signals, reporter, |means| {
        store.locked_image(name, recipe, &wanted.key, wanted.source_date, means)
    })?;
    if !there {
        reporter.emit(&Event::ImageFinished {
            image: name.clone(),
            wall_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
    }
    Ok(image)
}

/// The subject of the work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Subject<'a> {
    Image(&'a str),
    /// A transfer of snapshots: its direction and its registry.
    Transfer(&'a str),
}

/// Runs work with its progress shown; a signal cancels it.
pub(crate) fn with_progress<T>(
    cx: &Context,
    subject: Subject<'_>,
    signals: &Signals,
    reporter: &Reporter,
    work: impl FnOnce(&mut Means<'_>) -> Result<T>,
) -> Result<T> {
    let cancel = Cancel::new(signals);
    let mut progress = |progress: Progress<'_>| {
        cancel.look();
        let (message, done, total) = match progress {
            Progress::Line(line) => (line.to_owned(), None, None),
            Progress::Bytes { done, total } => (String::new(), Some(done), total),
        };
        reporter.emit(&match subject {
            Subject::Image(name) => Event::Image {
                image: name.to_owned(),
                message,
                done,
                total,
            },
            Subject::Transfer(what) => Event::Transfer {
                what: what.to_owned(),
                message,
                done: done.unwrap_or(0),
                total,
            },
        });
    };
    let mut means = Means {
        mirrors: &cx.config.mirrors,
        logins: &cx.config.logins,
        env: &cx.config.proxies,
        progress: &mut progress,
        cancel: cancel.flag(),
    };
    let result = work(&mut means);
    cancel.outcome(result)
}
