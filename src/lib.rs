//! linkwise: a topology-aware Kubernetes device plugin for NVIDIA GPUs.
//!
//! Layers, from the inside out (ARCHITECTURE.md has the picture, `tests/architecture.rs` holds it):
//! `topology`, `allocation` and `snapshot` are pure; the adapters around them know the core and
//! never each other; `runtime`, `demo` and `commands` put them together.

pub mod admin;
pub mod cdi;
pub mod commands;
pub mod config;
pub mod demo;
pub mod files;
pub mod hwloc;
pub mod inotify;
pub mod kubelet;
pub mod labels;
pub mod machines;
pub mod metrics;
pub mod mps;
pub mod nvml;
pub mod runtime;
pub mod uds;

pub use linkwise_core::{allocation, backoff, errors, names, once, publish, quote, state, topology, words};
