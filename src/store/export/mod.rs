//! Owns `export` of an env's outputs, with a manifest of the files and their inputs.
//!
//! `manifest` makes the statement (pure), `files` copies and compares. The same env gives the same bytes: the
//! manifest contains no time, no path and no machine name.

mod files;
mod manifest;

pub(crate) use files::{Item, Named, check, copy, list, names};
pub(crate) use files::{digest, give, open, owner, regular, write};
pub(crate) use manifest::{Env, Manifest, manifest, parse};
