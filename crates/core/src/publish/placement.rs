//! [`Placements`]: the holders of GPUs, the quality of their sets, and the sets that requests would get now.
//!
//! The costly part of [`NodeView`](super::view::NodeView), and the source of [`PodEvent`](super::PodEvent). Pure; it
//! decides nothing. A set's quality is `collective / best`, where `best` is the best collective of that many GPUs on
//! this machine. Both are given in MB/s, and the reader divides. One GPU has no links to compare, and so no collective.

use crate::prelude::*;
use alloc::borrow::Cow;
use alloc::collections::{BTreeMap, BTreeSet};
use core::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::allocation::{AllocationTables, GpuSet};
use crate::state::{ContainerName, Door, FreeThen, NodeState, gpu_behind, gpu_of};
use crate::topology::{GpuUuid, NumaNodeId};

/// The placements on a node, and the ones that are possible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placements {
    /// The allocations, one for each container and resource, in the order of their names.
    pub allocations: Vec<Allocation>,
    /// The outlook for 1, 2, 4, 8 ... GPUs, as many as the machine has.
    pub outlook: Vec<Outlook>,
    /// The number of GPUs that requests can have whole now, by NUMA node (`None` if unknown), 0 included. Empty if the
    /// holders are unknown.
    pub free: BTreeMap<Option<NumaNodeId>, usize>,
}

/// The GPUs of one container, of one resource or one DRA driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Allocation {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container in it.
    pub container: String,
    /// The resource, or the DRA driver.
    pub resource: String,
    /// The API through which the container got them: `plugin` or `dra`.
    pub door: Cow<'static, str>,
    /// The GPUs that it has whole, as slots or as MIG devices, in the order of their PCI addresses.
    pub gpus: Vec<GpuUuid>,
    /// The UUIDs of the GPUs that it holds through the device plugin and that are gone from this machine.
    pub gone: BTreeSet<String>,
    /// The ring bandwidth of these GPUs by NCCL's model, MB/s. `None` for fewer than two GPUs, with a MIG device among
    /// them, and if the container holds something that this node does not know.
    pub collective: Option<u64>,
    /// The bus bandwidth of an all-reduce with NVLink SHARP by the same model, MB/s; `None` without NVLink SHARP, and
    /// without a collective.
    pub nvls: Option<u64>,
    /// The best collective of that many GPUs on this machine, MB/s; `None` without a collective.
    pub best: Option<u64>,
    /// The best collective of that many GPUs among those that were free at the admission, MB/s; `None` if unknown, and
    /// without a collective.
    pub best_at_admission: Option<u64>,
    /// The reasons why the collective is below the machine's best; empty if it is not, or if they are unknown.
    pub why: Vec<Shortfall>,
}

impl Allocation {
    /// The names of the container.
    pub fn holder(&self) -> ContainerName {
        let (namespace, pod, container) = (self.namespace.clone(), self.pod.clone(), self.container.clone());
        ContainerName { namespace, pod, container }
    }

    /// The UUIDs of all its GPUs; those that are gone from this machine are last.
    pub fn all_gpus(&self) -> impl Iterator<Item = &str> {
        self.gpus.iter().map(GpuUuid::as_str).chain(self.gone.iter().map(String::as_str))
    }
}

/// The reason why a container has less than the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shortfall {
    /// The kubelet left fewer GPUs to choose from than were free (`docs/topology-manager.md`).
    Narrowed,
    /// The scheduler allocated these GPUs to a claim while better ones were free.
    Scheduler,
    /// Other pods had the better GPUs, or those were offered as another resource or through the other door.
    Fragmented,
    /// Unhealthy GPUs were among the better ones.
    Sick,
    /// A reason that only another version knows.
    #[serde(other)]
    Unknown,
}

/// The set that a request for a number of GPUs would get now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Outlook {
    /// The number of GPUs.
    pub size: usize,
    /// The collective of the best set, MB/s; `None` for one GPU, and if no such request can be met.
    pub collective: Option<u64>,
    /// The bus bandwidth of the best set with NVLink SHARP, MB/s; `None` without NVLink SHARP.
    pub nvls: Option<u64>,
    /// The best collective of that many GPUs on this machine, MB/s; `None` for one GPU.
    pub best: Option<u64>,
    /// The GPUs of the best set, in the order of their PCI addresses; empty if no such request can be met.
    pub gpus: Vec<GpuUuid>,
}

impl Placements {
    /// Computes the placements of a snapshot. It costs a choice for each size of the outlook, and a comparison of all
    /// sets of each size in outlook and allocations.
    pub fn of(state: &NodeState) -> Self {
        let mut reader = Reader { state, tables: state.tables(), best: BTreeMap::new() };
        let free = state.free_gpus();
        Self {
            allocations: reader.allocations(),
            outlook: reader.outlook(free.as_deref().unwrap_or_default()),
            free: free.map(|free| reader.by_numa_node(&free)).unwrap_or_default(),
        }
    }

    /// The fragmentation as numerator and denominator, MB/s: the largest `best / collective` of an [`Outlook`]. (1, 1)
    /// if no size has a larger quotient than 1, also if fewer than two GPUs are free. `None` if the holders are
    /// unknown, or there is no GPU.
    pub fn fragmentation(&self) -> Option<(u64, u64)> {
        if self.free.is_empty() {
            return None;
        }
        let sizes = self.outlook.iter().filter_map(|outlook| outlook.best.zip(outlook.collective));
        Some(sizes.filter(|(best, now)| best > now).max_by(compare).unwrap_or((1, 1)))
    }
}

/// Compares two fractions, each as numerator and denominator.
pub(super) fn compare(one: &(u64, u64), other: &(u64, u64)) -> Ordering {
    let product = |numerator: u64, denominator: u64| u128::from(numerator) * u128::from(denominator);
    product(one.0, other.1).cmp(&product(other.0, one.1))
}

/// The reasons why a collective is below the machine's best: one for each rise in the sequence `collective`,
/// `then.free`, `then.healthy`, `best`.
fn shortfalls(door: Door, collective: u64, best: u64, then: FreeThen) -> Vec<Shortfall> {
    let chosen = if door == Door::Dra { Shortfall::Scheduler } else { Shortfall::Narrowed };
    let steps = [
        (collective < then.free, chosen),
        (then.free < then.healthy, Shortfall::Fragmented),
        (then.healthy < best, Shortfall::Sick),
    ];
    steps.into_iter().filter_map(|(applies, why)| applies.then_some(why)).collect()
}

struct Reader<'a> {
    state: &'a NodeState,
    tables: &'a AllocationTables,
    /// The best collective of the machine by size, for the sizes needed so far.
    best: BTreeMap<usize, Option<u64>>,
}

/// The devices of one resource or DRA driver that a container has.
struct Held {
    /// The place of each device's GPU, and true if the device is the whole GPU or a slot of it. `None` for a device
    /// whose GPU this machine does not have.
    hardware: Vec<Option<(usize, bool)>>,
    /// The UUIDs of the GPUs that are gone from this machine.
    gone: BTreeSet<String>,
    /// The best collectives at the admission.
    then: Option<FreeThen>,
}

impl Reader<'_> {
    fn allocations(&mut self) -> Vec<Allocation> {
        let mut allocations = Vec::new();
        let (topology, ledger) = (self.state.topology(), self.state.ledger());
        let offered = self.state.offers().resources();
        for (holder, holdings) in ledger.by_container() {
            for (resource, ids) in &holdings.devices {
                let unknown = ids.iter().filter(|id| offered.contains_key(resource) && gpu_of(topology, id).is_none());
                let held = Held {
                    hardware: ids.iter().map(|id| gpu_of(topology, id)).collect(),
                    gone: unknown.filter_map(|id| gpu_behind(topology, id)).collect(),
                    then: ledger.free_at_allocate(resource, ids),
                };
                allocations.extend(self.allocation(holder, resource.as_str(), Door::Plugin, held));
            }
            let drivers: BTreeSet<&str> = holdings.claims.iter().map(|claimed| claimed.driver.as_str()).collect();
            for driver in drivers {
                let devices = || holdings.claims.iter().filter(|claimed| claimed.driver == driver);
                let hardware = devices().flat_map(|device| ledger.gpus_of_claimed(topology, device));
                let claims: BTreeSet<&str> = devices().map(|device| device.claim.as_str()).collect();
                // Several claims are prepared one by one, so no single admission covers them.
                let one = devices().next().filter(|_| claims.len() == 1);
                let held = Held {
                    hardware: hardware.map(Some).collect(),
                    gone: BTreeSet::new(),
                    then: one.and_then(|device| ledger.free_at_prepare(device)),
                };
                allocations.extend(self.allocation(holder, driver, Door::Dra, held));
            }
        }
        allocations
    }

    /// Describes the GPUs of one holder; `None` if it has no GPU of this node.
    fn allocation(&mut self, holder: &ContainerName, resource: &str, door: Door, held: Held) -> Option<Allocation> {
        let places: GpuSet = held.hardware.iter().flatten().map(|(place, _)| *place).collect();
        if places.is_empty() && held.gone.is_empty() {
            return None;
        }
        let is_whole = held.hardware.iter().all(|known| known.is_some_and(|(_, is_whole)| is_whole));
        let collective = if is_whole { self.tables.collective(places) } else { None };
        let best = collective.and_then(|_| self.best(places.len()));
        let then = held.then.filter(|_| collective.is_some());
        let why = collective.zip(best).zip(then);
        let ContainerName { namespace, pod, container } = holder.clone();
        Some(Allocation {
            namespace,
            pod,
            container,
            resource: resource.to_owned(),
            door: door.label().into(),
            gpus: self.uuids(places),
            gone: held.gone,
            collective,
            nvls: collective.and_then(|_| self.state.topology().nvls(places.places())),
            best,
            best_at_admission: then.map(|then| then.free),
            why: why.map(|((collective, best), then)| shortfalls(door, collective, best, then)).unwrap_or_default(),
        })
    }

    fn outlook(&mut self, free: &[GpuSet]) -> Vec<Outlook> {
        let gpus = self.state.topology().gpus().len();
        let sizes = core::iter::successors(Some(1_usize), |size| size.checked_mul(2)).take_while(|size| *size <= gpus);
        let at_size = |size| {
            let sets = free.iter().map(|free| self.tables.best_of(*free, size)).filter(|set| !set.is_empty());
            // Of equally good sets the first by PCI addresses is taken.
            let set = sets
                .max_by(|a, b| self.tables.collective(*a).cmp(&self.tables.collective(*b)).then_with(|| a.by_list(*b)));
            let set = set.unwrap_or_default();
            let (collective, best) = (self.tables.collective(set), self.best(size));
            let nvls = self.state.topology().nvls(set.places());
            Outlook { size, collective, nvls, best, gpus: self.uuids(set) }
        };
        sizes.map(at_size).collect()
    }

    /// The best collective of any set of `size` GPUs on the machine.
    fn best(&mut self, size: usize) -> Option<u64> {
        *self.best.entry(size).or_insert_with(|| {
            let all = (0..self.state.topology().gpus().len()).collect();
            self.tables.best_collective(all, size)
        })
    }

    fn by_numa_node(&self, free: &[GpuSet]) -> BTreeMap<Option<NumaNodeId>, usize> {
        let free = free.iter().fold(GpuSet::default(), |all, free| all.union(*free));
        let mut nodes = BTreeMap::new();
        for (place, gpu) in self.state.topology().gpus().iter().enumerate() {
            *nodes.entry(gpu.numa).or_default() += usize::from(free.contains(place));
        }
        nodes
    }

    fn uuids(&self, set: GpuSet) -> Vec<GpuUuid> {
        set.places().filter_map(|place| Some(self.state.topology().gpus().get(place)?.uuid.clone())).collect()
    }
}
