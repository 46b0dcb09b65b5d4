//! The tree operations on real file systems. Needs root.

mod fidelity;
mod flatten;
mod methods;
mod remove;
mod walk;
