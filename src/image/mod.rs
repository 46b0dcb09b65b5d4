//! Owns images: recipes for base root file systems, and building them.

mod archive;
mod compression;
pub mod digest;
mod pax;
pub mod recipe;
mod tree;
pub mod unpack;
mod xattr;

pub use recipe::Recipe;

/// Returns bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            for nibble in [byte >> 4, byte & 15] {
                text.push(char::from_digit(nibble.into(), 16).unwrap_or('0'));
            }
            text
        })
}
