//! kube-scheduler's allocator of DRA devices as a model: which devices of which node a pod's claims get.
//!
//! It is the structured allocator of Kubernetes 1.36 (`staging/src/k8s.io/dynamic-resource-allocation/structured`,
//! `internal/incubating`), written anew over the JSON of `resource.k8s.io/v1`: the first complete solution wins, depth
//! first over claims, requests and devices in the order in which they are published. Between nodes the score of
//! `firstAvailable` decides (`pkg/scheduler/framework/plugins/dynamicresources`).
//!
//! The demo and the tests run against it. It does no I/O, knows nothing of linkwise, and shares no code with it. What
//! it does not model it refuses by name: devices for several claims at once (`allowMultipleAllocations`), node
//! selectors of slices, derived attributes. A list attribute matches another in a constraint where both lists are the
//! same; the real allocator looks for a common value.

mod allocator;
mod api;
mod devices;
mod error;
mod extended;
mod quantity;
mod report;
mod selector;

use std::collections::BTreeSet;

use serde_json::Value;

pub use error::{Failure, Refusal};

use allocator::Attempt;
use api::{Claim, DeviceClass, Slice};
use devices::{DeviceName, NodeDevices};
use selector::Selectors;

/// The most devices that an attempt for one node looks at, each time it comes by one. The real scheduler stops after
/// 10 s (gate `DRASchedulerFilterTimeout`).
pub const MOST_STEPS: u64 = 2_000_000;

/// What the scheduler knows of the cluster.
#[derive(Clone, Debug)]
pub struct Cluster {
    slices: Vec<Slice>,
    classes: Vec<DeviceClass>,
    /// Devices that claims have.
    used: BTreeSet<DeviceName>,
    selectors: Selectors,
    /// See [`MOST_STEPS`].
    steps: u64,
}

/// Where claims were allocated.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The node.
    pub node: String,
    /// Of the alternatives that the claims got there: 8 minus its place, summed over the requests.
    pub score: i64,
    /// How many devices were looked at on this node, each time the search came by one.
    pub steps: u64,
    /// `status.allocation` of each claim, in their order.
    pub allocations: Vec<Value>,
}

impl Cluster {
    /// Reads ResourceSlices, DeviceClasses, and the claims that have devices already.
    ///
    /// # Errors
    ///
    /// One of them is not as the API has it.
    pub fn new(slices: &[Value], classes: &[Value], claims: &[Value]) -> Result<Self, Failure> {
        let mut cluster = Self {
            slices: slices.iter().map(api::read).collect::<Result<_, _>>()?,
            classes: classes.iter().map(api::read).collect::<Result<_, _>>()?,
            used: BTreeSet::new(),
            selectors: Selectors::new().map_err(Failure::NotModelled)?,
            steps: MOST_STEPS,
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

    /// Marks the devices of a `status.allocation` as used; those with `adminAccess` are not.
    ///
    /// # Errors
    ///
    /// It is not as the API has it.
    pub fn occupy(&mut self, allocation: &Value) -> Result<(), Failure> {
        self.used.extend(devices::of_allocation(allocation)?);
        Ok(())
    }

    /// Marks the devices of a `status.allocation` as free.
    ///
    /// # Errors
    ///
    /// It is not as the API has it.
    pub fn release(&mut self, allocation: &Value) -> Result<(), Failure> {
        for device in devices::of_allocation(allocation)? {
            self.used.remove(&device);
        }
        Ok(())
    }

    /// Allocates the claims of one pod on one node, all of them or none.
    ///
    /// # Errors
    ///
    /// [`Failure::Refused`] where the node has no such devices free; other failures abort the whole attempt.
    pub fn allocate(&self, node: &str, claims: &[Value]) -> Result<Placement, Failure> {
        let claims: Vec<Claim> = claims.iter().map(api::read).collect::<Result<_, _>>()?;
        self.place(node, &claims)
    }

    /// Allocates the claims of one pod on the node with the best score, of equal ones on the first by name.
    ///
    /// # Errors
    ///
    /// [`Failure::Refused`] where no node has such devices free, with each node's reason.
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
