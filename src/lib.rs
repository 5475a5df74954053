//! linkwise: a topology-aware Kubernetes device plugin for NVIDIA GPUs.
//!
//! Layers, from the inside out (ARCHITECTURE.md has the picture, `tests/architecture.rs` holds it):
//! `topology`, `allocation` and `inventory` are pure; the adapters around them know the core and
//! never each other; `runtime`, `demo` and `commands` put them together.

pub mod kubelet_box;
pub mod proto;
pub mod topology;
