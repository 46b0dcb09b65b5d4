//! Owns what is known of ROCm: GPU targets, what a checkout of TheRock says, and this machine's GPUs.

pub mod gpu;
pub mod target;
pub mod therock;
