//! The rules of the scheduler's allocator, a test each.
//!
//! The expected results follow from the API's types (`staging/src/k8s.io/api/resource/v1/types.go`) and the allocator
//! (`staging/src/k8s.io/dynamic-resource-allocation/structured/internal/incubating`) of Kubernetes 1.36.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may panic")]

mod choice;
mod pools;
mod selectors;
mod sharing;
mod support;
