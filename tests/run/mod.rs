//! `linkwise run` as a real process: the kubelet in the box on one side, a libnvidia-ml of our own on the other, over
//! real sockets. Nearly every wait is for a state: a list on the stream, a log line, an answer over HTTP. A time limit
//! only ends a wait that has failed.

mod callers;
mod chart;
mod clock;
mod config;
mod cut;
mod devices;
mod doctor;
mod documented;
mod driver;
mod facts;
mod full;
mod heals;
mod health;
mod held;
mod idle;
mod kubelet;
mod labels;
mod list_strategies;
mod live;
mod lock;
pub mod log;
mod memory;
mod mig;
mod mps;
pub mod node;
mod operator;
mod placements;
mod pod_resources;
mod rediscovery;
mod refusals;
mod reloads;
mod rpc;
mod shutdown;
mod sockets;
mod stops;
pub mod swap;
mod unavailable;
mod wait;
mod watchdog;
