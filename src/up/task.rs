//! Owns long work with progress: building images, and transferring snapshots.

use std::time::Instant;

use crate::image::oci::Notice;
use crate::image::{BuildProgress, Recipe};
use crate::plan::lockfile::LockedImage;
use crate::store::Store;
use crate::store::images::{Image, TaskContext};
use crate::sys::error::Result;
use crate::sys::signals::{Cancel, Signals};
use crate::ui::event::Event;
use crate::ui::{Format, Reporter};
use crate::up::context::Context;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Subject<'a> {
    Image(&'a str),
    /// A transfer of snapshots: its direction and its registry.
    Transfer(&'a str),
}

/// A command that does long work: its context, the signals that stop it, and its reporter.
pub(crate) struct Task<'a> {
    pub(crate) cx: &'a Context,
    pub(crate) signals: Signals,
    pub(crate) reporter: Reporter,
}

impl<'a> Task<'a> {
    /// Blocks the signals for the rest of this process.
    pub(crate) fn start(cx: &'a Context) -> Result<Self> {
        Ok(Self {
            cx,
            signals: Signals::take()?,
            reporter: cx.ui.reporter(Format::Human),
        })
    }

    pub(crate) fn build_image(
        &self,
        store: &Store,
        name: &str,
        recipe: &Recipe,
        refresh: bool,
    ) -> Result<Image> {
        let started = Instant::now();
        let image = self.with_progress(Subject::Image(name), |cx| {
            store.ensure_image(name, recipe, refresh, cx)
        })?;
        self.image_finished(name, started);
        Ok(image)
    }

    /// Returns the image that a lock file names, building it if it is missing. An image with another key is only
    /// described.
    pub(crate) fn locked_image(
        &self,
        store: &Store,
        recipe: &Recipe,
        wanted: &LockedImage,
    ) -> Result<Image> {
        let there = store.image(&wanted.key)?.is_some();
        let started = Instant::now();
        let name = &wanted.name;
        let image = self.with_progress(Subject::Image(name), |cx| {
            store.locked_image(name, recipe, &wanted.key, wanted.source_date, cx)
        })?;
        if !there {
            self.image_finished(name, started);
        }
        Ok(image)
    }

    fn image_finished(&self, name: &str, started: Instant) {
        self.reporter.emit(&Event::ImageFinished {
            image: name.to_owned(),
            wall_ms: millis(started),
        });
    }

    pub(crate) fn transfer_finished(&self, what: String, started: Instant) {
        self.reporter.emit(&Event::TransferFinished {
            what,
            wall_ms: millis(started),
        });
    }

    /// Runs work with its progress shown; a signal cancels it.
    pub(crate) fn with_progress<T>(
        &self,
        subject: Subject<'_>,
        work: impl FnOnce(&mut TaskContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let Self { cx, reporter, .. } = self;
        let cancel = Cancel::new(&self.signals);
        let notice = Notice::default();
        let mut progress = |progress: BuildProgress<'_>| {
            cancel.poll();
            if let Some(text) = notice.take() {
                reporter.warn(text);
            }
            let (message, done, total) = match progress {
                BuildProgress::Line(line) => (line.to_owned(), None, None),
                BuildProgress::Bytes { done, total } => (String::new(), Some(done), total),
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
        let mut cx = TaskContext {
            mirrors: &cx.config.mirrors,
            logins: &cx.config.logins,
            notice: notice.clone(),
            env: &cx.config.proxies,
            progress: &mut progress,
            cancel: cancel.flag(),
        };
        let result = cancel.watch(|| work(&mut cx));
        let (Subject::Image(name) | Subject::Transfer(name)) = subject;
        reporter.end_line(name);
        cancel.outcome(result)
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
