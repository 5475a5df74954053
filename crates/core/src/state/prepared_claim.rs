//! [`PreparedClaim`]: a DRA claim that has hardware of this node, as the ledger keeps it.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::topology::GpuUuid;

/// A claim as the kubelet names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID: another claim of the same name has another.
    pub uid: String,
}

impl fmt::Display for ClaimName {
    /// Writes `namespace/name`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A claim that our DRA plugin has prepared or is about to. The ledger has it before the kubelet lists it, and as long
/// as its checkpoint exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedClaim {
    /// The claim.
    pub claim: ClaimName,
    /// The GPUs that it has as a whole or in part.
    pub gpus: BTreeSet<GpuUuid>,
    /// The names of its devices on these GPUs.
    pub devices: BTreeSet<String>,
    /// The names of those that are MIG devices made for it.
    pub made: BTreeSet<String>,
}
