//! Any bytes as a file that `--node` reads, such as an NCCL topology dump.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::nccl_xml(bytes));
