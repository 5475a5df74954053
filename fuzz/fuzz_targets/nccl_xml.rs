//! Any bytes as a file that `--node` reads: NCCL topology dumps first of all.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::nccl_xml(bytes));
