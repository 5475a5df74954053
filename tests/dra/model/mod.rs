//! The GPUs that claims get from linkwise's slices, by a model of kube-scheduler's allocator.
//!
//! The oracle for a set of GPUs is the brute force of `tests/oracle`, which shares no code with the core.

#![allow(clippy::cast_possible_truncation, reason = "a few GPUs are counted")]

mod alignment;
mod cluster;
mod exact;
mod mig;
mod order;
mod published;
mod several;
mod sharing;
mod tiers;
