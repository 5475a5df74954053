//! linkwise's pure core, in layers: [`topology`] (the graph of a node), [`allocation`] (the best GPUs for a request),
//! [`state`] (the node's state machine), [`publish`] (labels, slices and injections made from a snapshot), [`claims`]
//! (the hardware that DRA claims are prepared with). Each layer uses only the layers before it. [`benchmark`] compares
//! measured bandwidth with the model, and uses the first two layers. [`backoff`], [`errors`], [`names`], [`reported`],
//! [`quantity`], [`quote`] and [`mod@words`] are small helpers, most of which the adapter crates use too.
//!
//! Everything here is a function of its arguments. The compiler enforces this, because without `std` there are no
//! files, sockets, threads, environment variables, clocks or hash maps to call. `clippy.toml` beside this crate's
//! manifest refuses floats and panics. Time is an argument ([`state::Timestamp`]).

#![no_std]
#![cfg_attr(test, allow(clippy::disallowed_macros, reason = "a test may panic"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod allocation;
pub mod backoff;
pub mod benchmark;
pub mod claims;
pub mod errors;
pub mod names;
mod prelude;
pub mod publish;
pub mod quantity;
pub mod quote;
pub mod reported;
pub mod state;
pub mod topology;
pub mod words;
