//! [`Node`]: the facts of this node that a claim is prepared with.

use crate::publish::injection::{HostDevices, InjectionOptions};
use crate::state::NodeState;

/// What a plan is made from, beside the claim.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// The DRA driver's name.
    pub driver: &'a str,
    /// The pool's name.
    pub pool: &'a str,
    /// The snapshot.
    pub state: &'a NodeState,
    /// How containers get their GPUs; with CDI.
    pub injection: &'a InjectionOptions,
    /// What the host has beside its GPUs.
    pub host: &'a HostDevices,
    /// Whether MIG devices are made for claims.
    pub makes_mig: bool,
}
