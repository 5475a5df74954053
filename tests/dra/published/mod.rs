//! What machines publish through DRA: each built-in one as golden slices, the API's limits by a checker of its own,
//! and what the commands say of claims.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "the helpers of a test may end it"
)]

pub mod checker;
mod claims;
mod dcgm;
mod documented;
pub mod exact;
mod fleet;
pub mod golden;
pub mod limits;
mod mig;
mod shares;
mod state;
