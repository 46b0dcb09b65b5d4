//! Code that several test programs share: `mod support;`. Each uses a part of it.

#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

pub(crate) mod background;
pub(crate) mod cache;
pub(crate) mod env;
pub(crate) mod git;
pub(crate) mod loopfs;
pub(crate) mod machine;
pub(crate) mod ordinary;
pub(crate) mod python;
pub(crate) mod random;
pub(crate) mod registry;
pub(crate) mod rootfs;
pub(crate) mod run;
pub(crate) mod server;
pub(crate) mod skip;
pub(crate) mod template;
pub(crate) mod terminal;
pub(crate) mod transcript;
pub(crate) mod wheels;

pub(crate) use rootfs::rootfs;
