//! Every test that needs nothing beside the host: one program, so that it is linked once. A module is a subject;
//! `cargo test --test it -- up::` runs one. What needs a service or a virtual machine has a program of its own.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, and shows what it ran"
)]

mod archive;
mod attacks;
mod build_time;
mod ccache;
mod certificates;
mod ci;
mod cli;
mod cli_fsck;
mod cli_gpu;
mod downloads;
mod du;
mod engine;
mod export;
mod gc;
mod habits;
mod hooks;
mod image;
mod image_oci;
mod image_unpack;
mod jobs;
mod llama_cpp;
mod llvm;
mod lock;
mod matrix;
mod model;
mod on;
mod output;
mod packages;
mod reading;
mod readme;
mod releases;
mod report;
mod rocm_libs;
mod rootfs;
mod safety;
mod share;
mod targets;
mod therock;
mod up;
mod usage;

#[path = "../support/mod.rs"]
mod support;
