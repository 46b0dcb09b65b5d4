//! Every fuzz target: its name says which reader of the library gets the input.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rockenv::testing::fuzz(env!("CARGO_BIN_NAME"), input));
