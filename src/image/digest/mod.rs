//!

pub(crate) mod content;
