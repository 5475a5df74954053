//! The answer to `GET /state`, as far as `top` shows it. What a linkwise of another version leaves out is unknown.

use std::collections::BTreeMap;

use serde::Deserialize;

/// A whole answer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct State {
    pub version: String,
    pub driver_released: bool,
    pub idle: Option<String>,
    pub resources: BTreeMap<String, Resource>,
    pub parts: BTreeMap<String, Part>,
    pub gpus: Vec<Gpu>,
    /// `None` where it is unknown which pods have GPUs.
    pub allocations: Option<Vec<Allocation>>,
    pub outlook: Option<Vec<Outlook>>,
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Resource {
    pub phase: String,
    pub trouble: Option<String>,
    pub healthy: u64,
    pub unhealthy: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Part {
    pub phase: String,
    pub ready: bool,
    pub trouble: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Gpu {
    pub uuid: String,
    pub index: u32,
    pub model: Option<String>,
    pub door: Option<String>,
    pub healthy: bool,
    /// `held`, `free`, `mig`, `unhealthy` or `unknown`; empty is unknown too.
    pub availability: String,
    pub reasons: Vec<Reason>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Reason {
    pub reason: String,
    /// In seconds since 1970.
    pub since: u64,
    pub ends_with: String,
}

/// What a container, or a claim, holds.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Allocation {
    pub namespace: String,
    pub pod: String,
    pub container: String,
    pub resource: String,
    /// UUIDs.
    pub gpus: Vec<String>,
    /// In MB/s, as are the next two.
    pub collective: Option<u64>,
    pub best: Option<u64>,
    pub best_at_admission: Option<u64>,
    pub why: Vec<String>,
}

/// What a request of so many GPUs would get now.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Outlook {
    pub size: u64,
    /// In MB/s, as is the next.
    pub collective: Option<u64>,
    pub best: Option<u64>,
    /// UUIDs; none where so many are not free.
    pub gpus: Vec<String>,
}
