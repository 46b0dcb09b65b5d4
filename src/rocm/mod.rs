//! Owns ROCm: GPU targets, checkouts of TheRock, and this machine's GPUs.

pub mod gpu;
pub mod target;
pub mod therock;
