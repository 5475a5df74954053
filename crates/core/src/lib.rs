//! linkwise's pure core: [`topology`] (the graph of a node), [`allocation`] (which GPUs are best) and [`state`] (the
//! node's state machine), [`publish`] (what others are given of a snapshot), [`claims`] (what a DRA claim is prepared
//! with). Each uses the ones before it, and none the
//! ones after. [`backoff`], [`errors`], [`names`], [`once`], [`quote`] and [`mod@words`] are small mechanisms that the adapters
//! share.
//!
//! Everything here is a function of its arguments. `no_std` leaves no name for files, sockets, threads, the
//! environment, clocks or hash maps, so that the compiler holds it; `clippy.toml` beside this crate's manifest refuses
//! floats and panics. Time is an argument ([`state::Timestamp`]).

#![no_std]
#![cfg_attr(test, allow(clippy::disallowed_macros, reason = "a test may panic"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod allocation;
pub mod backoff;
pub mod claims;
pub mod errors;
pub mod names;
pub mod once;
mod prelude;
pub mod publish;
pub mod quantity;
pub mod quote;
pub mod state;
pub mod topology;
pub mod words;
