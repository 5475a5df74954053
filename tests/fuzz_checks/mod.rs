//! What must hold for bytes that strangers send: one function for each fuzz target, which panics where it does not.
//! Called by the targets in `fuzz/`, and by `tests/fuzz_regressions.rs` with the corpus and every input that once
//! failed. Knows linkwise from outside only; time and memory are bounded by who calls.

#![allow(clippy::expect_used, clippy::panic, reason = "a check ends with a panic; the fuzz crate has no such lints")]

mod bytes;
mod claim;
mod config;
mod machine;
mod nccl;
mod request;

pub use claim::{checkpoint, claim};
pub use config::config;
pub use machine::{nccl_xml, node_file};
pub use nccl::nccl_tests;
pub use request::request;

use linkwise_nvml::protocol::{FromAgent, Incoming, encode};

/// What comes over the socket from the NVML child: cut into the same messages however it arrives, and each message
/// is read back as it is written.
pub fn agent_protocol(bytes: &[u8]) {
    let (whole, error) = received(bytes, usize::MAX);
    // The first byte says into which pieces the rest falls; one piece or many, the same arrives.
    let piece = usize::from(bytes.first().copied().unwrap_or(0) % 16) + 1;
    assert_eq!(received(bytes, piece), (whole, error), "pieces of {piece} bytes change what arrives");
    let (whole, _) = received(bytes, usize::MAX);
    let lines: Vec<u8> = whole.iter().flat_map(|message| encode(message).expect("what was read can be sent")).collect();
    assert_eq!(received(&lines, usize::MAX), (whole, None), "what is sent is not what arrives");
}

/// The messages up to the first error, and that error.
fn received(bytes: &[u8], piece: usize) -> (Vec<FromAgent>, Option<String>) {
    let mut incoming = Incoming::default();
    let mut messages = Vec::new();
    for piece in bytes.chunks(piece) {
        incoming.buffer().extend_from_slice(piece);
        loop {
            match incoming.take() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => {
                    let error = error.to_string();
                    machine::is_one_line(&error);
                    assert!(error.len() < 512, "a message of {} bytes about a message", error.len());
                    return (messages, Some(error));
                }
            }
        }
    }
    (messages, None)
}
