//! Owns the disk usage of the store, by place: who needs it, and what is inside build trees.

pub mod inside;
pub(crate) mod places;
pub mod report;
pub mod service;
