//! DRA: the kubelet's other way to GPUs, beside the device plugin.
//!
//! `api` is what this module asks of the API server, carried out by `linkwise-cluster`.

mod api;

pub use api::{ApiSide, ClaimQuery, ClaimQueryError, Client, StoredPool};
