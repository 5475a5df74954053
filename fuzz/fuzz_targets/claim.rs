//! Any bytes as a claim from the API server, or as numbers of which a claim is made.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::claim(bytes));
