//! Owns `export` of an env's outputs, with a manifest of the files and their inputs.
//!
//! `outputs` selects files or refuses them, `files` copies and compares them, and `manifest` makes the statement
//! (pure). The same env gives the same bytes: the manifest contains no time, no path and no machine name.

mod files;
mod manifest;
mod outputs;

pub(crate) use files::{ExportedEntry, digest, names, open, regular};
pub(crate) use outputs::{OutputsExport, check};
