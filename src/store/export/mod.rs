//! Owns what `export` hands out: the env's outputs with a manifest that says what they are and what they were made from.
//!
//! `manifest` makes the statement (pure), `files` copies and compares. The same env gives the same bytes: no time, no place and no
//! name of a machine is in it.

mod files;
mod manifest;

pub use files::{Item, Named, check, copy, list, names};
pub(crate) use files::{digest, give, open, owner, regular, write};
pub use manifest::{Env, Manifest, Subject, manifest, parse};
