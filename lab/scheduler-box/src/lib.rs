//! A model of kube-scheduler's allocator of DRA devices: chooses the node and the devices for a pod's claims.
//!
//! The model is the structured allocator of Kubernetes 1.36
//! (`staging/src/k8s.io/dynamic-resource-allocation/structured`, `internal/incubating`), written anew over the JSON of
//! `resource.k8s.io/v1`. The first complete solution wins, depth first over claims, requests and devices in the order
//! in which they are published. Between nodes the score of `firstAvailable` decides
//! (`pkg/scheduler/framework/plugins/dynamicresources`).
//!
//! The demo and the tests run against it. The model does no I/O, knows nothing of linkwise, and shares no code with it.
//! It has what linkwise publishes and asks for. The rest it refuses by name: devices with both counters and
//! `allowMultipleAllocations`, slices of several nodes, list attributes, and in a claim `allocationMode: All`,
//! `adminAccess`, tolerations, `distinctAttribute` and configuration.

mod allocator;
mod api;
mod devices;
mod error;
mod extended;
mod quantity;
mod report;
mod selector;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

pub use error::{Failure, Refusal};
pub use quantity::Quantity;

use allocator::{Attempt, Consumed};
use api::{Claim, DeviceClass, Slice};
use devices::{DeviceName, NodeDevices};
use selector::Selectors;

/// The most devices that an attempt for one node examines; a device counts each time. The real scheduler stops after 10
/// s (gate `DRASchedulerFilterTimeout`).
pub const MAX_STEPS: u64 = 2_000_000;

/// The scheduler's knowledge of the cluster.
#[derive(Clone, Debug)]
pub struct Cluster {
    slices: Vec<Slice>,
    classes: Vec<DeviceClass>,
    /// Devices that each belong to one claim alone.
    used: BTreeSet<DeviceName>,
    /// The shares that claims have of devices that several claims may have, by the share's ID.
    shares: BTreeMap<DeviceName, BTreeMap<String, Consumed>>,
    selectors: Selectors,
    /// See [`MAX_STEPS`].
    steps: u64,
}

/// The result of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The node.
    pub node: String,
    /// The score of the alternatives that the claims got there: 8 minus the index of each, summed over the requests.
    pub score: i64,
    /// The number of devices examined on this node; a device counts each time.
    pub steps: u64,
    /// `status.allocation` of each claim, in their order.
    pub allocations: Vec<Value>,
}

impl Cluster {
    /// Reads ResourceSlices, DeviceClasses, and the claims that have devices already.
    ///
    /// # Errors
    ///
    /// One of them does not follow the API.
    pub fn new(slices: &[Value], classes: &[Value], claims: &[Value]) -> Result<Self, Failure> {
        let mut cluster = Self {
            slices: slices.iter().map(api::read).collect::<Result<_, _>>()?,
            classes: classes.iter().map(api::read).collect::<Result<_, _>>()?,
            used: BTreeSet::new(),
            shares: BTreeMap::new(),
            selectors: Selectors::new(),
            steps: MAX_STEPS,
        };
        for claim in claims {
            let allocation = &claim["status"]["allocation"];
            if !allocation.is_null() {
                cluster.occupy(allocation)?;
            }
        }
        Ok(cluster)
    }

    /// The same, with another bound on the work of an attempt.
    #[must_use]
    pub fn with_most_steps(self, steps: u64) -> Self {
        Self { steps, ..self }
    }

    /// Marks the devices of a `status.allocation` as used, except those with `adminAccess`.
    ///
    /// # Errors
    ///
    /// The allocation does not follow the API.
    pub fn occupy(&mut self, allocation: &Value) -> Result<(), Failure> {
        for (device, share) in devices::of_allocation(allocation)? {
            match share {
                None => drop(self.used.insert(device)),
                Some((id, consumed)) => drop(self.shares.entry(device).or_default().insert(id, consumed)),
            }
        }
        Ok(())
    }

    /// Marks the devices of a `status.allocation` as free.
    ///
    /// # Errors
    ///
    /// The allocation does not follow the API.
    pub fn release(&mut self, allocation: &Value) -> Result<(), Failure> {
        for (device, share) in devices::of_allocation(allocation)? {
            match (share, self.shares.get_mut(&device)) {
                (None, _) => drop(self.used.remove(&device)),
                (Some((id, _)), Some(shares)) => drop(shares.remove(&id)),
                (Some(_), None) => {}
            }
        }
        Ok(())
    }

    /// Allocates the claims of one pod on one node, all of them or none.
    ///
    /// # Errors
    ///
    /// [`Failure::Refused`] if the node has no such devices free; other failures abort the whole attempt.
    pub fn allocate(&self, node: &str, claims: &[Value]) -> Result<Placement, Failure> {
        let claims: Vec<Claim> = claims.iter().map(api::read).collect::<Result<_, _>>()?;
        self.place(node, &claims)
    }

    /// Allocates the claims of one pod on the node with the best score; of equal scores, on the first node by name.
    ///
    /// # Errors
    ///
    /// [`Failure::Refused`] if no node has such devices free, with each node's reason.
    pub fn schedule(&self, nodes: &[&str], claims: &[Value]) -> Result<Placement, Failure> {
        let claims: Vec<Claim> = claims.iter().map(api::read).collect::<Result<_, _>>()?;
        let (mut best, mut refusals): (Option<Placement>, Vec<Refusal>) = (None, Vec::new());
        let nodes: BTreeSet<&str> = nodes.iter().copied().collect();
        for node in nodes {
            match self.place(node, &claims) {
                Ok(placement) if best.as_ref().is_none_or(|best| placement.score > best.score) => {
                    best = Some(placement);
                }
                Ok(_) => {}
                Err(Failure::Refused(mut why)) => refusals.append(&mut why),
                // As in the real scheduler: an error on one node ends the attempt on all.
                Err(other) => return Err(other),
            }
        }
        best.ok_or(Failure::Refused(refusals))
    }

    fn place(&self, node: &str, claims: &[Claim]) -> Result<Placement, Failure> {
        let devices = NodeDevices::gather(node, &self.slices)?;
        Attempt::new(self, node, &devices, claims)?.run()
    }
}
