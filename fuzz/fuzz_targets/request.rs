//! Any request on a built-in machine, or on one of 20 GPUs.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::request(bytes));
