//! Any request on a built-in or a large machine.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::request(bytes));
