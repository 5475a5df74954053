//! `linkwise run` as a real process: the kubelet in the box on one side, a libnvidia-ml of our own on the other,
//! over real sockets. Every wait is for a state: a list on the stream, a log line, an answer over HTTP; the limits are
//! there so that a failure ends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

mod callers;
mod config;
mod cut;
mod devices;
mod doctor;
mod driver;
mod drivers;
mod endpoints;
mod endurance;
mod handover;
mod health;
mod idle;
mod kubelet;
mod mps;
mod node;
mod oddities;
mod operator;
mod pod_resources;
mod rediscovery;
mod refusals;
#[path = "../cdi/root.rs"]
#[allow(dead_code, reason = "tests/cdi.rs uses all of it")]
mod root;
mod rpc;
#[path = "../cdi/schema.rs"]
mod schema;
mod shutdown;
mod sockets;
mod stops;
mod watchdog;
