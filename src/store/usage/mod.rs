//! Owns the disk usage of the store by place: which envs need it, and what is inside build trees.

pub(crate) mod places;
pub(crate) mod report;
pub(crate) mod service;
pub(crate) mod subdirectories;
