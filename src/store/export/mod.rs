//! Owns `export` of an env's outputs, with a manifest of the files and their inputs.
//!
//! `outputs` chooses and refuses, `files` copies and compares, `manifest` makes the statement (pure). The same env gives
//! the same bytes: the manifest contains no time, no path and no machine name.

mod files;
mod manifest;
mod outputs;

pub(crate) use files::{ExportedEntry, digest, names, open, owner, regular, set_owner};
pub(crate) use outputs::{OutputsExport, check};
