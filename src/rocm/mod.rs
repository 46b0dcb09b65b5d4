//! Owns ROCm: GPU targets, checkouts of TheRock, and this machine's GPUs.

pub(crate) mod gpu;
pub(crate) mod kernels;
pub(crate) mod target;
pub(crate) mod therock;
