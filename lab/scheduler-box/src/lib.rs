//! A model of kube-scheduler's allocator of DRA devices: chooses the node and the devices for a pod's claims.
//!
//! The model reimplements the structured allocator of Kubernetes 1.36
//! (`staging/src/k8s.io/dynamic-resource-allocation/structured`, `internal/incubating`) over the JSON objects of
//! `resource.k8s.io/v1`. It searches depth first over claims, requests and devices, takes the devices in the order in
//! which slices publish them, and stops at the first complete solution. It chooses the node by the score of the
//! `firstAvailable` alternatives (`pkg/scheduler/framework/plugins/dynamicresources`).
//!
//! The demo, the simulations and the tests run against it. The model does no I/O and shares no code with linkwise. It
//! covers the parts of the API that linkwise publishes or requests, and refuses other parts by name: devices with both
//! counters and `allowMultipleAllocations`, slices of several nodes, list attributes, and in a claim
//! `allocationMode: All`, `adminAccess`, tolerations, `distinctAttribute` and configuration.

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

/// The most steps of an attempt on one node; each examination of a device is a step. The real scheduler stops after
/// 10 s instead (gate `DRASchedulerFilterTimeout`).
pub const MAX_STEPS: u64 = 2_000_000;

/// The scheduler's view of the cluster.
#[derive(Clone, Debug)]
pub struct Cluster {
    slices: Vec<Slice>,
    classes: Vec<DeviceClass>,
    /// The devices that a claim has for itself.
    used: BTreeSet<DeviceName>,
    /// The shares of devices that several claims may have, by the share's ID.
    shares: BTreeMap<DeviceName, BTreeMap<String, Consumed>>,
    selectors: Selectors,
    /// The bound of an attempt; see [`MAX_STEPS`].
    steps: u64,
}

/// The result of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The node.
    pub node: String,
    /// The sum of the scores of the alternatives that the claims got: 8 for the first, 1 less for each later one.
    pub score: i64,
    /// The number of steps of the search on this node.
    pub steps: u64,
    /// The `status.allocation` of each claim, in the order of the claims.
    pub allocations: Vec<Value>,
}

impl Cluster {
    /// Reads ResourceSlices, DeviceClasses, and claims, of which some may be allocated already.
    ///
    /// # Errors
    ///
    /// [`Failure::Malformed`].
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

    /// The same cluster with another bound than [`MAX_STEPS`].
    #[must_use]
    pub fn with_most_steps(self, steps: u64) -> Self {
        Self { steps, ..self }
    }

    /// Marks the devices of a `status.allocation` as used.
    ///
    /// # Errors
    ///
    /// [`Failure::Malformed`].
    pub fn occupy(&mut self, allocation: &Value) -> Result<(), Failure> {
        for (device, share) in devices::of_allocation(allocation)? {
            match share {
                None => drop(self.used.insert(device)),
                Some((id, consumed)) => drop(self.shares.entry(device).or_default().insert(id, consumed)),
            }
        }
        Ok(())
    }

    /// Marks the devices of a `status.allocation` as free. Fails as [`Self::occupy`] does.
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
    /// [`Failure::Refused`] if the node lacks free devices that satisfy the claims. Any other failure
    /// also ends [`Self::schedule`].
    pub fn allocate(&self, node: &str, claims: &[Value]) -> Result<Placement, Failure> {
        let claims: Vec<Claim> = claims.iter().map(api::read).collect::<Result<_, _>>()?;
        self.place(node, &claims)
    }

    /// Allocates the claims of one pod on the node with the best score; among equal scores, on the first node by name.
    ///
    /// # Errors
    ///
    /// [`Failure::Refused`] with the reason of each node, if no node has free devices that satisfy the claims.
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
                // As in the real scheduler, an error on one node ends the attempt on all nodes.
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
