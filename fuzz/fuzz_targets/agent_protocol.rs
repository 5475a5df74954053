//! Any bytes as messages of the agent.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| linkwise_fuzz::agent_protocol(bytes));
