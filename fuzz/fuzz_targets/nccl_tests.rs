//! Any bytes as the output of nccl-tests, with NCCL's log around it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::nccl_tests(bytes));
