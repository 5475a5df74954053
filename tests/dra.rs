//! What machines publish through DRA: each built-in one as golden slices, the API's limits by a checker of its own,
//! and what holds of the order and the groups on any machine.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "the helpers of a test may end it"
)]

mod dra {
    pub mod checker;
    pub mod claims;
    pub mod documented;
    pub mod golden;
    pub mod limits;
    pub mod mig;
    pub mod order;
    pub mod shares;
    pub mod state;
}
#[path = "random_node/mod.rs"]
mod random_node;
