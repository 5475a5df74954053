//! Any bytes as the checkpoint of a claim.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::checkpoint(bytes));
