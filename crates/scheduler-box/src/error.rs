//! Why claims are not allocated.

use std::fmt;

/// Why an attempt to allocate claims failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No node has what the claims ask for; the pod waits. A reason for each node.
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
        /// What CEL says.
        why: String,
    },
    /// There is no such class.
    #[error("claim {claim}, request {request}: there is no DeviceClass {class}")]
    NoClass {
        /// Namespace and name.
        claim: String,
        /// The request, or `request/alternative`.
        request: String,
        /// The class.
        class: String,
    },
    /// A claim has devices already.
    #[error("claim {0} is allocated already")]
    Allocated(String),
    /// The search was given up: the real scheduler's time would have ended.
    #[error("node {node}: given up after {steps} devices were looked at")]
    TooMuchWork {
        /// The node.
        node: String,
        /// The bound.
        steps: u64,
    },
    /// Something that this model does not have.
    #[error("{0} is not modelled")]
    NotModelled(String),
    /// An object is not as the API has it.
    #[error("{name}: {why}")]
    Malformed {
        /// Kind and name.
        name: String,
        /// What is wrong.
        why: String,
    },
}

/// Why one node has no devices for the claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The node.
    pub node: String,
    /// Namespace and name of the claim that could not be served.
    pub claim: String,
    /// Its first request that could not be served; `request/alternative` for an alternative.
    pub request: String,
    /// How many devices the request asks for.
    pub wanted: usize,
    /// How many devices its selectors choose.
    pub selected: usize,
    /// How many of these other claims have.
    pub used: usize,
    /// How many of these have taints that the request does not tolerate.
    pub tainted: usize,
    /// Constraints that bear on the request.
    pub constraints: Vec<String>,
    /// Pools that are not read: incomplete or invalid.
    pub unread_pools: Vec<String>,
    /// How many devices were looked at in vain, each time the search came by one.
    pub steps: u64,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, claim, request, wanted, selected, used, tainted, .. } = self;
        write!(f, "node {node}: claim {claim}, request {request}: needs {wanted} of {selected} selected devices")?;
        write!(f, " ({used} in use, {tainted} tainted)")?;
        if !self.constraints.is_empty() {
            write!(f, ", constrained by {}", self.constraints.join(", "))?;
        }
        if !self.unread_pools.is_empty() {
            write!(f, "; pools not read: {}", self.unread_pools.join(", "))?;
        }
        Ok(())
    }
}
