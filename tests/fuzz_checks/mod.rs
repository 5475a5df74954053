//! The checks of the fuzz targets: one function for each target, which panics if linkwise mishandles the bytes. Called
//! by the targets in `fuzz/`, and by `tests/fuzz_regressions.rs` with the corpus and every past failure. The checks use
//! public items of linkwise only. `make fuzz` limits time and memory.

#![allow(clippy::expect_used, clippy::panic, reason = "a failed check panics; the fuzz crate has no such lints")]

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

/// Checks bytes from the agent's socket: they give the same messages in pieces of any size, and each message is read
/// back as it was written.
pub fn agent_protocol(bytes: &[u8]) {
    let (whole, error) = receive(bytes, usize::MAX);
    // The first byte also chooses the size of the pieces.
    let piece = usize::from(bytes.first().copied().unwrap_or(0) % 16) + 1;
    assert_eq!(receive(bytes, piece), (whole, error), "pieces of {piece} bytes change the messages");
    let (whole, _) = receive(bytes, usize::MAX);
    let lines: Vec<u8> =
        whole.iter().flat_map(|message| encode(message).expect("a read message can be sent")).collect();
    assert_eq!(receive(&lines, usize::MAX), (whole, None), "messages change between sending and reading");
}

/// Reads the messages up to the first error, and that error.
fn receive(bytes: &[u8], piece: usize) -> (Vec<FromAgent>, Option<String>) {
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
                    machine::assert_one_line(&error);
                    assert!(error.len() < 512, "an error of {} bytes", error.len());
                    return (messages, Some(error));
                }
            }
        }
    }
    (messages, None)
}
