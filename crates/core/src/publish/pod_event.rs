//! [`PodEvent`]: what a pod is told in an event of the Kubernetes API.
//!
//! Pure: which pods deserve one, and its words. Whether and when it is written is decided by who has an API server.

use crate::prelude::*;

/// An event about a pod. Names are as the kubelet gave them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEvent {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// What it is about, for programs.
    pub reason: &'static str,
    /// What is so and what to do, for people: at most [`PodEvent::NOTE`] bytes.
    pub note: String,
}

impl PodEvent {
    /// The longest note that `events.k8s.io/v1` takes, in bytes (`NoteLengthLimit`).
    pub const NOTE: usize = 1024;

    /// The reason of an event about GPUs whose links are far from the best that the machine has for so many.
    pub const SLOW_GPUS: &'static str = "SlowGPUPlacement";
}
