//! The reasons why claims are not allocated.

use std::fmt;

/// The reason why an attempt to allocate claims failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No node has the devices that the claims request; the pod waits. One reason for each node.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Refusal>),
    /// A selector cannot be evaluated: the attempt ends, on all nodes.
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
    /// The class does not exist.
    #[error("claim {claim}, request {request}: there is no DeviceClass {class}")]
    NoClass {
        /// Namespace and name.
        claim: String,
        /// The request, or `request/alternative`.
        request: String,
        /// The class.
        class: String,
    },
    /// The search was stopped: the real scheduler would have run out of time.
    #[error("node {0}: given up after {1} devices were looked at")]
    TooMuchWork(String, u64),
    /// An object does not follow the API, or uses something that this model does not have.
    #[error("{name}: {why}")]
    Malformed {
        /// Kind and name.
        name: String,
        /// The fault.
        why: String,
    },
}

/// The reason why one node has no devices for the claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The node.
    pub node: String,
    /// Namespace and name of the claim that could not be served.
    pub claim: String,
    /// Its first request that could not be served; `request/alternative` for an alternative.
    pub request: String,
    /// The number of devices that the request asks for.
    pub wanted: usize,
    /// The number of devices that its selectors choose.
    pub selected: usize,
    /// The number of chosen devices that other claims have.
    pub used: usize,
    /// The number of chosen devices that have taints which the request does not tolerate.
    pub tainted: usize,
    /// The number of chosen devices that lack the requested capacity, or have too little of it left.
    pub short: usize,
    /// The constraints that apply to the request.
    pub constraints: Vec<String>,
    /// Pools that are not read: incomplete or invalid.
    pub unread_pools: Vec<String>,
    /// The number of devices examined in vain; a device counts again each time that the search examines it.
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
