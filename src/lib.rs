//! linkwise: a topology-aware Kubernetes device plugin for NVIDIA GPUs.
//!
//! Layers, from the inside out (ARCHITECTURE.md has the picture, `tests/architecture.rs` holds it):
//! `topology`, `allocation` and `inventory` are pure; the adapters around them know the core and
//! never each other; `runtime`, `demo` and `commands` put them together.

pub mod admin;
pub mod allocation;
pub mod cdi;
pub mod commands;
pub mod config;
pub mod demo;
pub mod hwloc;
pub mod inventory;
pub mod kubelet;
pub mod kubelet_box;
pub mod machines;
pub mod metrics;
pub mod mps;
pub mod nvml;
pub mod proto;
pub mod runtime;
pub mod topology;
