//! [`Node`]: the facts of this node that a claim is prepared with.

use alloc::collections::BTreeSet;

use crate::publish::injection::{HostDevices, InjectionOptions};
use crate::state::{NodeState, ResourceName};

/// The facts that a plan is made from, apart from the claim.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// The pool's name.
    pub pool: &'a str,
    /// The snapshot.
    pub state: &'a NodeState,
    /// The options by which containers get their GPUs; with CDI.
    pub injection: &'a InjectionOptions,
    /// The host's devices other than GPUs.
    pub host: &'a HostDevices,
    /// True if MIG devices are made for claims.
    pub makes_mig: bool,
    /// The MPS control daemons that serve and have no shared memory of their own: an older release started them.
    pub common_shm: &'a BTreeSet<ResourceName>,
}
