//! The `rockenv` program. All of its code is in the library.

use std::process::ExitCode;

// In an image of another distribution, a dynamic program may not start. rustdoc has other flags.
#[cfg(not(any(doc, target_feature = "crt-static")))]
compile_error!(
    "the program runs in any image, so it must be static: build it in its checkout, whose .cargo/config.toml has the \
     flags, and unset RUSTFLAGS, which replaces them"
);

fn main() -> ExitCode {
    rockenv::run()
}
