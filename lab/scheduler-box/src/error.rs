//! The errors of an allocation.

use std::fmt;

/// The reason why an attempt to allocate claims failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No node has free devices that satisfy the claims, so that the pod waits. One reason for each node.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Refusal>),
    /// A selector cannot be evaluated, which ends the attempt on all nodes.
    #[error("claim {claim}, request {request}: selector `{expression}` of device {device}: {why}")]
    Selector {
        /// Namespace and name.
        claim: String,
        /// The request, or `request/alternative`.
        request: String,
        /// `driver/pool/device`.
        device: String,
        /// The expression in CEL.
        expression: String,
        /// CEL's message.
        why: String,
    },
    /// The DeviceClass of a request does not exist.
    #[error("claim {claim}, request {request}: there is no DeviceClass {class}")]
    NoClass {
        /// Namespace and name.
        claim: String,
        /// The request, or `request/alternative`.
        request: String,
        /// The class.
        class: String,
    },
    /// The search on a node reached its bound; the real scheduler would have timed out.
    #[error("node {0}: given up after {1} devices were looked at")]
    TooMuchWork(String, u64),
    /// An object does not follow the API, or uses a part of it that is not modelled.
    #[error("{name}: {why}")]
    Malformed {
        /// The object, or a part of it.
        name: String,
        /// The rule that it breaks, or the part that is not modelled.
        why: String,
    },
}

/// The reason why one node has no devices for the claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// The node.
    pub node: String,
    /// Namespace and name of the furthest claim that the search reached.
    pub claim: String,
    /// The furthest request that the search reached; `request/alternative` for its last alternative.
    pub request: String,
    /// The number of devices that the request asks for.
    pub wanted: usize,
    /// The number of devices that the selectors of the request and its class select.
    pub selected: usize,
    /// The number of selected devices that another claim has alone.
    pub used: usize,
    /// The number of selected devices that a taint keeps from claims.
    pub tainted: usize,
    /// The number of selected devices that lack the requested capacity, or have too little of it left.
    pub short: usize,
    /// The constraints that apply to the request.
    pub constraints: Vec<String>,
    /// The pools that are skipped, because they are incomplete or invalid.
    pub unread_pools: Vec<String>,
    /// The number of steps of the search; each examination of a device is a step.
    pub steps: u64,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, claim, request, wanted, selected, used, tainted, short, .. } = self;
        write!(f, "node {node}: claim {claim}, request {request}: needs {wanted} of {selected} selected devices")?;
        let without = if *short > 0 { format!(", {short} without the capacity") } else { String::new() };
        write!(f, " ({used} in use, {tainted} tainted{without})")?;
        if !self.constraints.is_empty() {
            write!(f, ", constrained by {}", self.constraints.join(", "))?;
        }
        if !self.unread_pools.is_empty() {
            write!(f, "; pools not read: {}", self.unread_pools.join(", "))?;
        }
        Ok(())
    }
}
