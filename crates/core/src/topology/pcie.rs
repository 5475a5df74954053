//! The host's PCI tree as a flat list: the place of a function, the distance and the bandwidth between two.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::address::{NumaNodeId, PackageId, PciAddress};
use super::bandwidth;
use super::level::{Rank, TopologyLevel};
use super::observation::{CpuObservation, DisplayClass, HostObservation, PciKind, PciObservation, PcieLink};
use super::warning::TopologyWarning;

/// The place of a device: its function in the tree if the host shows it, and its NUMA node and package if known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The index of its function in the tree.
    pub function: Option<usize>,
    pub numa: Option<NumaNodeId>,
    pub package: Option<PackageId>,
}

impl Place {
    /// Returns true if both are known to be in one package.
    pub fn shares_package(self, other: Self) -> bool {
        self.package.is_some() && self.package == other.package
    }
}

/// One function of the tree.
pub(super) struct Function<'a> {
    pub seen: &'a PciObservation,
    /// The index of the function above, which is less than its own.
    parent: Option<usize>,
    host_bridge: usize,
    /// The observed link, unless [`PciTree::fill_link`] set another.
    link: Option<PcieLink>,
    pub place: Place,
}

/// The PCI tree of a host. A function comes after those above it.
pub(super) struct PciTree<'a> {
    pub functions: Vec<Function<'a>>,
    by_address: BTreeMap<PciAddress, usize>,
    packages: BTreeMap<NumaNodeId, PackageId>,
    /// The observed NUMA nodes; true for a node with CPUs.
    pub has_cpus: BTreeMap<NumaNodeId, bool>,
    cpu: Option<&'a CpuObservation>,
    /// The names of the host bridges' root buses, if the host has them.
    roots: Vec<Option<&'a str>>,
}

impl<'a> PciTree<'a> {
    pub fn new(host: &'a HostObservation, warnings: &mut Vec<TopologyWarning>) -> Self {
        let mut has_cpus = BTreeMap::new();
        for node in &host.numa_nodes {
            *has_cpus.entry(node.id).or_default() |= !node.cpus.is_empty();
        }
        let mut tree = Self {
            functions: Vec::new(),
            by_address: BTreeMap::new(),
            packages: host.numa_nodes.iter().filter_map(|node| Some((node.id, node.package?))).collect(),
            has_cpus,
            cpu: host.cpu.as_ref(),
            roots: host.host_bridges.iter().map(|bridge| bridge.root.as_deref()).collect(),
        };
        for (host_bridge, bridge) in host.host_bridges.iter().enumerate() {
            let package = bridge.numa.and_then(|numa| tree.package_of(numa)).or(bridge.package);
            let around = Place { function: None, numa: bridge.numa, package };
            // A stack instead of recursion: a file may nest to any depth.
            let mut open: Vec<(&PciObservation, Option<usize>, Place)> =
                bridge.devices.iter().rev().map(|device| (device, None, around)).collect();
            while let Some((device, parent, around)) = open.pop() {
                let index = tree.functions.len();
                let package = device.numa.and_then(|numa| tree.package_of(numa)).or(around.package);
                let place = Place { function: Some(index), numa: device.numa.or(around.numa), package };
                tree.functions.push(Function { seen: device, parent, host_bridge, link: device.link, place });
                if let Some(pci) = device.pci
                    && *tree.by_address.entry(pci).or_insert(index) != index
                {
                    warnings.push(TopologyWarning::DuplicateFunction(pci));
                }
                open.extend(device.devices.iter().rev().map(|below| (below, place.function, place)));
            }
        }
        tree
    }

    /// The package of a NUMA node.
    pub fn package_of(&self, numa: NumaNodeId) -> Option<PackageId> {
        self.packages.get(&numa).copied()
    }

    /// The NUMA node with CPUs that a device is on. A device on a node without CPUs (a GPU's own memory) gets the only
    /// node with CPUs of its package.
    pub fn cpu_node(&self, place: Place) -> Option<NumaNodeId> {
        let numa = place.numa?;
        if *self.has_cpus.get(&numa)? {
            return Some(numa);
        }
        let package = place.package?;
        let with_cpus = self.has_cpus.iter().filter(|(_, has_cpus)| **has_cpus).map(|(numa, _)| *numa);
        let mut of_package = with_cpus.filter(|numa| self.package_of(*numa) == Some(package));
        of_package.next().filter(|_| of_package.next().is_none())
    }

    /// Returns true if both devices are known to be on one NUMA node. A node without CPUs counts as its
    /// [`Self::cpu_node`].
    pub fn share_node(&self, a: Place, b: Place) -> bool {
        let node_of = |place: Place| self.cpu_node(place).or(place.numa);
        a.numa.is_some() && (a.numa == b.numa || node_of(a) == node_of(b))
    }

    /// The place of the function at an address.
    pub fn find(&self, pci: PciAddress) -> Option<Place> {
        Some(self.functions.get(*self.by_address.get(&pci)?)?.place)
    }

    /// The PCI class of the GPU at a place.
    pub fn class(&self, place: Place) -> Option<DisplayClass> {
        self.functions.get(place.function?)?.seen.class
    }

    /// The kernel's name of the PCIe root above a place: the observed name, or else that of the root port's bus.
    pub fn root(&self, place: Place) -> Option<String> {
        let index = place.function?;
        let named = self.roots.get(self.functions.get(index)?.host_bridge).copied().flatten();
        named.map(ToOwned::to_owned).or_else(|| {
            let (_, topmost) = self.upwards(index).last()?;
            let port = topmost.seen.pci.filter(|_| topmost.seen.kind == PciKind::RootPort)?;
            Some(format!("pci{:04x}:{:02x}", port.domain(), port.bus()))
        })
    }

    /// The switches above a place, the nearest first; those of unknown address are left out.
    pub fn switches(&self, place: Place) -> Vec<PciAddress> {
        let above = place.function.into_iter().flat_map(|index| self.upwards(index).skip(1));
        let switches = above.filter(|(_, function)| is_switch(function.seen.kind));
        switches.filter_map(|(_, function)| function.seen.pci).collect()
    }

    /// Sets the link of a function unless the observed one gives a bandwidth ([`bandwidth::pcie`]).
    pub fn fill_link(&mut self, place: Place, link: Option<PcieLink>) {
        if let Some(function) = place.function.and_then(|index| self.functions.get_mut(index))
            && function.link.and_then(bandwidth::pcie).is_none()
        {
            function.link = link;
        }
    }

    /// The distance between two functions of the tree; `None` if one is not in the tree.
    pub fn level(&self, a: Place, b: Place) -> Option<TopologyLevel> {
        let (a_index, b_index) = (a.function?, b.function?);
        let (first, second) = (self.functions.get(a_index)?, self.functions.get(b_index)?);
        Some(if a_index == b_index {
            TopologyLevel::Internal
        } else if first.host_bridge != second.host_bridge {
            if self.share_node(a, b) { TopologyLevel::Node } else { TopologyLevel::System }
        } else if self.meeting_point(a_index, b_index).is_none() {
            TopologyLevel::HostBridge
        } else if self.switch_above(a_index) == self.switch_above(b_index) {
            TopologyLevel::Single
        } else {
            TopologyLevel::Multiple
        })
    }

    /// The bandwidth of the path between two functions, MB/s: that of its narrowest hop. The path's host bridge and its
    /// crossing of packages do not count. `None` if a function is not in the tree.
    pub fn path(&self, a: Place, b: Place) -> Option<u32> {
        let (a_index, b_index) = (a.function?, b.function?);
        let meeting = self.meeting_point(a_index, b_index);
        let narrowest = [a_index, b_index]
            .into_iter()
            .flat_map(|from| self.upwards(from).take_while(|(index, _)| Some(*index) != meeting))
            .filter_map(|(_, function)| self.hop(function))
            .min();
        Some(narrowest.unwrap_or(bandwidth::UNKNOWN_HOP))
    }

    /// The bandwidth between two devices of rank `rank`, MB/s: `hops`, the bandwidth of their path, reduced by the host
    /// bridge and limited by the crossing of packages, where the rank has them.
    pub fn pair_bandwidth(&self, hops: u32, rank: Rank) -> u32 {
        let bridged = if rank >= Rank::HOST_BRIDGE { bandwidth::through_host_bridge(hops, self.cpu) } else { hops };
        if rank == Rank::FARTHEST { bridged.min(bandwidth::crossing(self.cpu)) } else { bridged }
    }

    /// The functions on the way up to the host bridge, the given one first.
    fn upwards(&self, from: usize) -> impl Iterator<Item = (usize, &Function<'a>)> {
        let at = |index: usize| self.functions.get(index).map(|function| (index, function));
        core::iter::successors(at(from), move |(_, function)| function.parent.and_then(at))
    }

    /// The lowest function that is at or above both; `None` if only a host bridge joins them.
    fn meeting_point(&self, a: usize, b: usize) -> Option<usize> {
        let (mut low, mut high) = (a.min(b), a.max(b));
        while low != high {
            // A function comes after those above it, so the later of two functions is not above the other.
            let above = self.functions.get(high)?.parent?;
            (low, high) = (low.min(above), low.max(above));
        }
        Some(low)
    }

    /// The nearest switch above a function, or else the root port.
    fn switch_above(&self, index: usize) -> Option<usize> {
        let nearest = |is: fn(PciKind) -> bool| self.upwards(index).skip(1).find(|(_, above)| is(above.seen.kind));
        let above = nearest(is_switch).or_else(|| nearest(|kind| kind == PciKind::RootPort));
        above.map(|(index, _)| index)
    }

    /// The bandwidth of the link above a function, MB/s. `None` for a port that faces down, because its link counts as
    /// that of the device below. If both ends of a link are known, the lower value counts, as in NCCL.
    fn hop(&self, function: &Function<'_>) -> Option<u32> {
        let faces_down = |kind| matches!(kind, PciKind::RootPort | PciKind::DownstreamPort);
        if faces_down(function.seen.kind) {
            return None;
        }
        let above = function.parent.and_then(|parent| self.functions.get(parent));
        let port = above.filter(|port| faces_down(port.seen.kind));
        let ends = [Some(function), port].into_iter().flatten();
        // A real switch above GPUs has more than one lane; a virtual one may report one lane of any rate.
        let links = ends.filter_map(|end| end.link).filter(|link| !is_switch(function.seen.kind) || link.width > 1);
        let known = links.filter_map(bandwidth::pcie).min();
        Some(known.unwrap_or(bandwidth::UNKNOWN_HOP))
    }
}

fn is_switch(kind: PciKind) -> bool {
    matches!(kind, PciKind::UpstreamPort | PciKind::Switch)
}
