//! Every test that needs only the host, in one program so that it is linked once. Each module covers one subject:
//! `cargo test --test it -- up::` runs one. Tests that need a service or a virtual machine have programs of their own.

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
