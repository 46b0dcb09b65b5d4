//! What several test programs need: `mod support;`. Each uses a part of it.

pub(crate) mod loopfs;
pub(crate) mod skip;
