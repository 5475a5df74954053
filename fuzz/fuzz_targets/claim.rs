//! A claim as the API server answers with it, or one made of numbers.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::claim(bytes));
