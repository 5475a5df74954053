//! The devices of one node, read from its slices and pools, in the order in which the allocator tries them.
//!
//! k8s@1.36: `structured/internal/incubating/pools_incubating.go`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use crate::allocator::{Amount, Consumed};
use crate::api::{AllocationResult, Device, Slice};
use crate::error::Failure;
use crate::quantity::Quantity;

/// The identity of a device in the cluster: driver, pool, name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceName {
    pub driver: String,
    pub pool: String,
    pub device: String,
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.driver, self.pool, self.device)
    }
}

/// A share of a device that several claims may have: the ID of the share, and the amounts that it consumes.
pub(crate) type Share = (String, Consumed);

/// The devices of a `status.allocation`. A device that several claims may have comes with the share of this claim.
pub(crate) fn of_allocation(allocation: &Value) -> Result<Vec<(DeviceName, Option<Share>)>, Failure> {
    let malformed =
        |error: serde_json::Error| Failure::Malformed { name: "status.allocation".to_owned(), why: error.to_string() };
    let results = allocation["devices"]["results"].as_array().cloned().unwrap_or_default();
    let mut devices = Vec::new();
    for result in results {
        let AllocationResult { driver, pool, device, share_id, consumed_capacity, .. } =
            AllocationResult::deserialize(result).map_err(malformed)?;
        let name = DeviceName { driver, pool, device };
        let amounts = consumed_capacity.into_iter().map(|(capacity, amount)| {
            let amount = Amount::of(&name.to_string(), &amount)?;
            Ok((capacity, amount))
        });
        let consumed = amounts.collect::<Result<Consumed, Failure>>()?;
        devices.push((name, share_id.map(|share| (share, consumed))));
    }
    Ok(devices)
}

/// A counter of a pool: the name of its counter set, and its own name.
pub(crate) type Counter<'a> = (&'a str, &'a str);

/// A device of a valid pool.
pub(crate) struct NodeDevice<'a> {
    pub name: DeviceName,
    pub device: &'a Device,
    /// The pool's index in [`NodeDevices::counters`].
    pub pool: usize,
}

/// All devices of a node.
#[derive(Default)]
pub(crate) struct NodeDevices<'a> {
    /// The devices, in the order in which they are tried.
    pub devices: Vec<NodeDevice<'a>>,
    /// The initial values of the counters, by pool.
    pub counters: Vec<BTreeMap<Counter<'a>, Quantity>>,
    /// The pools that are skipped, each with the reason.
    pub unread: Vec<String>,
}

impl<'a> NodeDevices<'a> {
    /// Groups the slices of a node by pool, and keeps those of the newest generation. Pools are ordered by driver and
    /// name, slices by the name of their object, devices as their slice lists them.
    pub fn gather(node: &str, slices: &'a [Slice]) -> Result<Self, Failure> {
        let mut pools: BTreeMap<(&str, &str), Vec<&Slice>> = BTreeMap::new();
        for slice in slices {
            let spec = &slice.spec;
            if spec.node_name == node {
                pools.entry((&spec.driver, &spec.pool.name)).or_default().push(slice);
            }
        }
        let mut gathered = Self::default();
        for ((driver, name), mut slices) in pools {
            let newest = slices.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or_default();
            slices.retain(|slice| slice.spec.pool.generation == newest);
            slices.sort_by(|one, other| one.metadata.name.cmp(&other.metadata.name));
            gathered.add(driver, name, &slices)?;
        }
        Ok(gathered)
    }

    fn add(&mut self, driver: &str, pool: &str, slices: &[&'a Slice]) -> Result<(), Failure> {
        let expected = slices.iter().map(|slice| slice.spec.pool.resource_slice_count).max().unwrap_or_default();
        let name = format!("{driver}/{pool}");
        if slices.len() != expected {
            self.unread.push(format!("{name} is incomplete: {} of {expected} slices", slices.len()));
            return Ok(());
        }
        let mut counters = BTreeMap::new();
        for set in slices.iter().flat_map(|slice| &slice.spec.shared_counters) {
            for (counter, amount) in &set.counters {
                counters.insert((set.name.as_str(), counter.as_str()), quantity(&name, &amount.value)?);
            }
        }
        let mut names = BTreeSet::new();
        for device in slices.iter().flat_map(|slice| &slice.spec.devices) {
            let consumed = device.consumes_counters.iter().flat_map(|consumption| {
                consumption.counters.keys().map(|counter| (consumption.counter_set.as_str(), counter.as_str()))
            });
            let unknown = consumed.into_iter().find(|counter| !counters.contains_key(counter));
            let is_duplicate = !names.insert(device.name.as_str());
            if let Some((set, counter)) = unknown {
                let why = format!("{name} is invalid: device {} consumes counter {set}/{counter}", device.name);
                self.unread.push(format!("{why}, which no slice has"));
                return Ok(());
            }
            if is_duplicate {
                self.unread.push(format!("{name} is invalid: two devices are named {}", device.name));
                return Ok(());
            }
            // Kubernetes up to 1.37 miscounts these devices.
            if device.allow_multiple_allocations && !device.consumes_counters.is_empty() {
                let why = "allowMultipleAllocations and consumesCounters are not modelled".to_owned();
                return Err(Failure::Malformed { name: format!("{name}/{}", device.name), why });
            }
        }
        let pool_index = self.counters.len();
        self.counters.push(counters);
        for slice in slices {
            self.devices.extend(slice.spec.devices.iter().map(|device| NodeDevice {
                name: DeviceName { driver: driver.to_owned(), pool: pool.to_owned(), device: device.name.clone() },
                device,
                pool: pool_index,
            }));
        }
        Ok(())
    }
}

/// The counters that a device consumes, with the amounts.
pub(crate) fn consumed<'a>(device: &NodeDevice<'a>) -> Result<Vec<(Counter<'a>, Quantity)>, Failure> {
    let mut all = Vec::new();
    for consumption in &device.device.consumes_counters {
        for (counter, amount) in &consumption.counters {
            let amount = quantity(&device.name.to_string(), &amount.value)?;
            all.push(((consumption.counter_set.as_str(), counter.as_str()), amount));
        }
    }
    Ok(all)
}

pub(crate) fn quantity(name: &str, text: &str) -> Result<Quantity, Failure> {
    let why = || Failure::Malformed { name: name.to_owned(), why: format!("'{text}' is not a quantity") };
    Quantity::parse(text).ok_or_else(why)
}
