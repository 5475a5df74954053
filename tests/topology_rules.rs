//! The graph of random machines, compared with a second implementation of its rules that walks the observed tree; and
//! most warnings, with their texts.

#![allow(clippy::cast_possible_truncation, reason = "a few GPUs are counted")]

use crate::random_node;

use std::collections::BTreeSet;

use linkwise_core::topology::{
    CpuObservation, FabricObservation, GpuObservation, HostBridgeObservation, HostObservation, MigObservation, Nic,
    NodeObservation, NodeTopology, NumaNodeId, NumaNodeObservation, NvLinkObservation, NvLinkRemote, P2pRefusal,
    PackageId, PciAddress, PciKind, PciObservation, PcieLink, ProbeFailure, TopologyLevel, TopologyWarning,
};
use linkwise_host::machines;
use proptest::prelude::*;

/// The way from a host bridge down to a PCI function, which comes last.
#[derive(Clone)]
struct Way<'a> {
    number: usize,
    bridge: &'a HostBridgeObservation,
    functions: Vec<&'a PciObservation>,
}

impl<'a> Way<'a> {
    /// Finds the way to the first function that fits, in the order of the host bridges.
    fn to(host: &'a HostObservation, fits: &dyn Fn(&PciObservation) -> bool) -> Option<Self> {
        fn down<'a>(
            list: &'a [PciObservation],
            above: &[&'a PciObservation],
            fits: &dyn Fn(&PciObservation) -> bool,
        ) -> Option<Vec<&'a PciObservation>> {
            list.iter().find_map(|function| {
                let way = [above, &[function]].concat();
                if fits(function) { Some(way) } else { down(&function.devices, &way, fits) }
            })
        }
        let mut bridges = host.host_bridges.iter().enumerate();
        bridges.find_map(|(number, bridge)| {
            down(&bridge.devices, &[], fits).map(|functions| Self { number, bridge, functions })
        })
    }

    fn to_address(host: &'a HostObservation, pci: PciAddress) -> Option<Self> {
        Self::to(host, &|function| function.pci == Some(pci))
    }

    /// The nearest NUMA node the kernel names on the way up.
    fn numa(&self) -> Option<NumaNodeId> {
        self.functions.iter().rev().find_map(|function| function.numa).or(self.bridge.numa)
    }

    /// The package of the nearest NUMA node with a package on the way up, else that of the host bridge.
    fn package(&self, host: &HostObservation) -> Option<PackageId> {
        let own = self.functions.iter().rev().filter_map(|function| function.numa);
        let all = own.chain(self.bridge.numa);
        all.filter_map(|numa| package_of(host, numa)).next().or(self.bridge.package)
    }

    /// The number of functions that two ways have in common, from the host bridge down.
    fn common(&self, other: &Self) -> usize {
        if self.number != other.number {
            return 0;
        }
        let pairs = self.functions.iter().zip(&other.functions);
        pairs.take_while(|(a, b)| std::ptr::eq::<PciObservation>(**a, **b)).count()
    }
}

fn package_of(host: &HostObservation, numa: NumaNodeId) -> Option<PackageId> {
    host.numa_nodes.iter().rev().find(|node| node.id == numa && node.package.is_some())?.package
}

/// The rank of two functions of the tree: 0 through one switch at most, 1 through several, 2 through
/// the host bridge, 3 inside a NUMA node, 4 inside a package, 5 beyond.
fn rank_in_tree(host: &HostObservation, a: &Way<'_>, b: &Way<'_>) -> u8 {
    let common = a.common(b);
    if a.number != b.number {
        return rank_apart(host, (a.numa(), a.package(host)), (b.numa(), b.package(host)));
    }
    if common == 0 {
        return 2;
    }
    // The switches on the way: those below the meeting point and above either function.
    let switch = |function: &&&PciObservation| matches!(function.kind, PciKind::Switch | PciKind::UpstreamPort);
    let above = |way: &Way<'_>| way.functions[common..].iter().rev().skip(1).filter(switch).count();
    // The functions meet in a switch or, below a downstream port, on one board.
    let meeting = a.functions[common - 1..common].iter();
    let meeting = meeting.filter(|function| switch(function) || function.kind == PciKind::DownstreamPort);
    if above(a) + above(b) + meeting.count() <= 1 { 0 } else { 1 }
}

type Location = (Option<NumaNodeId>, Option<PackageId>);

/// The rank of two locations that no tree connects: 3 on or beside one NUMA node, 4 in one package, 5 beyond.
fn rank_apart(host: &HostObservation, a: Location, b: Location) -> u8 {
    let ((a_numa, a_package), (b_numa, b_package)) = (a, b);
    let node = |(numa, package): Location| numa.map(|numa| beside(host, numa, package).unwrap_or(numa));
    if a_numa.is_some() && (a_numa == b_numa || node(a) == node(b)) {
        return 3;
    }
    if a_package.is_some() && a_package == b_package { 4 } else { 5 }
}

/// The NUMA node itself if it has CPUs, else the only node with CPUs in the package.
fn beside(host: &HostObservation, numa: NumaNodeId, package: Option<PackageId>) -> Option<NumaNodeId> {
    let with_cpus: BTreeSet<NumaNodeId> =
        host.numa_nodes.iter().filter(|node| !node.cpus.is_empty()).map(|node| node.id).collect();
    if with_cpus.contains(&numa) {
        return Some(numa);
    }
    host.numa_nodes.iter().find(|node| node.id == numa)?;
    let inside: Vec<_> =
        with_cpus.into_iter().filter(|node| package.is_some() && package_of(host, *node) == package).collect();
    match inside[..] {
        [only] => Some(only),
        _ => None,
    }
}

/// MB/s of a link of Gen1 to Gen6: Gen3 x16 has 12000. `None` if the link is unknown or virtual (Gen1 x1).
fn carries(link: Option<PcieLink>) -> Option<u32> {
    let link = link?;
    if link.mts == 0 || link.width == 0 || (link.mts == 2_500 && link.width == 1) {
        return None;
    }
    let sixteen_lanes = match link.mts {
        2_500 => 3_000,
        5_000 => 6_000,
        8_000 => 12_000,
        16_000 => 24_000,
        32_000 => 48_000,
        64_000 => 96_000,
        other => panic!("the random machines have no links of {other} MT/s"),
    };
    Some(sixteen_lanes * link.width / 16)
}

/// The bandwidth of the PCIe path between two GPUs, MB/s.
fn pcie(node: &NodeObservation, a: &GpuObservation, b: &GpuObservation, rank: u8) -> u32 {
    let ways = [a, b].map(|gpu| Way::to_address(&node.host, gpu.pci));
    let mut hops = Vec::new();
    if let [Some(from), Some(to)] = &ways {
        let common = from.common(to);
        for (way, gpu) in [(from, a), (to, b)] {
            for at in common..way.functions.len() {
                let function = way.functions[at];
                if matches!(function.kind, PciKind::RootPort | PciKind::DownstreamPort) {
                    continue;
                }
                // A switch whose link has one lane is virtual, so its link does not count.
                let is_switch = matches!(function.kind, PciKind::Switch | PciKind::UpstreamPort);
                let carries = |link: Option<PcieLink>| carries(link.filter(|link| !is_switch || link.width > 1));
                let of_gpu = gpu.pcie.filter(|_| function.kind == PciKind::Gpu);
                let below = carries(function.link).or(carries(of_gpu));
                let port = (at > 0).then(|| way.functions[at - 1]);
                let port = port.filter(|port| matches!(port.kind, PciKind::RootPort | PciKind::DownstreamPort));
                let above = port.and_then(|port| carries(port.link));
                hops.push(match (below, above) {
                    (Some(below), Some(above)) => below.min(above),
                    (Some(known), None) | (None, Some(known)) => known,
                    (None, None) => 12_000,
                });
            }
        }
    } else {
        // If the path is not in the host's tree, NVML reports the links at its two ends.
        hops.extend([a, b].map(|gpu| carries(gpu.pcie).unwrap_or(12_000)));
    }
    let narrowest = hops.into_iter().min().unwrap_or(12_000);
    let cpu = node.host.cpu.as_ref();
    let intel = cpu.is_some_and(|cpu| cpu.vendor.as_deref() == Some("GenuineIntel"));
    let through = if rank >= 2 && intel { narrowest * 5 / 6 } else { narrowest };
    if rank == 5 { through.min(crossing(cpu)) } else { through }
}

/// The most MB/s that a path between packages carries, by the processors of the random machines.
fn crossing(cpu: Option<&CpuObservation>) -> u32 {
    let Some(cpu) = cpu else { return 10_000 };
    match (cpu.arch.as_str(), cpu.vendor.as_deref(), cpu.model) {
        ("ppc64le", ..) => 32_000,
        ("aarch64", ..) => 6_000,
        (_, Some("AuthenticAMD"), _) => 16_000,
        (_, Some("GenuineIntel"), Some(79)) => 6_000,
        (_, Some("GenuineIntel"), Some(85 | 106)) => 10_000,
        (_, Some("GenuineIntel"), Some(143)) => 22_000,
        (_, Some("GenuineIntel"), Some(207)) => 40_000,
        _ => 10_000,
    }
}

/// MB/s of one NVLink of a GPU.
fn per_link(gpu: &GpuObservation) -> u32 {
    match gpu.compute_capability.map(|capability| (capability.major, capability.minor)) {
        Some((6, 0)) => 18_000,
        Some((8, 6 | 9)) => 12_000,
        Some((9, 0)) => 20_600,
        Some((10, 0)) => 40_100,
        _ => 20_000,
    }
}

/// The number of a GPU's links that are up and lead to an end that fits; `None` if NVML did not answer.
fn links_to(gpu: &GpuObservation, fits: impl Fn(NvLinkRemote) -> bool) -> Option<u32> {
    let groups = gpu.nvlinks.as_ref()?.iter().filter(|group| group.active && fits(group.remote));
    Some(groups.map(|group| group.links.len() as u32).sum())
}

fn switch_links(gpu: &GpuObservation) -> u32 {
    links_to(gpu, |remote| matches!(remote, NvLinkRemote::Switch(_))).unwrap_or(0)
}

/// Returns true if two GPUs have NVLinks to one plane, that is in one clique. If neither reports a clique, they
/// share a plane. If only one does, the machine must have no other clique.
fn share_plane(node: &NodeObservation, a: &GpuObservation, b: &GpuObservation) -> bool {
    let switched = node.gpus.iter().filter(|gpu| switch_links(gpu) > 0);
    let cliques: BTreeSet<&FabricObservation> = switched.filter_map(|gpu| gpu.fabric.as_ref()).collect();
    let same = match (&a.fabric, &b.fabric) {
        (Some(a), Some(b)) => a == b,
        (None, None) => true,
        _ => cliques.len() == 1,
    };
    switch_links(a) > 0 && switch_links(b) > 0 && same
}

/// The number of NVLinks between two GPUs, and their MB/s.
fn nvlink(node: &NodeObservation, a: &GpuObservation, b: &GpuObservation) -> (u32, u32) {
    let to = |from: &GpuObservation, to: &GpuObservation| links_to(from, |remote| remote == NvLinkRemote::Gpu(to.pci));
    let direct = match (to(a, b), to(b, a)) {
        (Some(a_to_b), Some(b_to_a)) => a_to_b.min(b_to_a),
        (Some(known), None) | (None, Some(known)) => known,
        (None, None) => 0,
    };
    let (mut count, mut carried) = (direct, direct * per_link(a).min(per_link(b)));
    if share_plane(node, a, b) {
        count += switch_links(a).min(switch_links(b));
        carried += (switch_links(a) * per_link(a)).min(switch_links(b) * per_link(b));
    }
    (count, carried)
}

/// The rank of two GPUs: by the host's tree, else by NVML's common ancestor, else by their packages.
fn rank(node: &NodeObservation, a: &GpuObservation, b: &GpuObservation) -> u8 {
    if let (Some(from), Some(to)) = (Way::to_address(&node.host, a.pci), Way::to_address(&node.host, b.pci)) {
        return rank_in_tree(&node.host, &from, &to);
    }
    // NVML should report one ancestor for both GPUs. Otherwise the report of the GPU with the smaller address counts.
    let (first, second) = if a.pci < b.pci { (a, b) } else { (b, a) };
    let ancestor = first.common_ancestors.get(&second.index).or_else(|| second.common_ancestors.get(&first.index));
    match ancestor {
        Some(TopologyLevel::Internal | TopologyLevel::Single) => 0,
        Some(TopologyLevel::Multiple) => 1,
        Some(TopologyLevel::HostBridge) => 2,
        Some(TopologyLevel::Node) => 3,
        Some(TopologyLevel::System) | None => {
            let (a, b) = (near(node, a).1, near(node, b).1);
            if a.is_some() && a == b { 4 } else { 5 }
        }
    }
}

/// The NUMA node and the package of a GPU: the kernel's if the host's tree has the GPU, else NVML's.
fn near(node: &NodeObservation, gpu: &GpuObservation) -> Location {
    match Way::to_address(&node.host, gpu.pci) {
        Some(way) => (way.numa(), way.package(&node.host)),
        None => (gpu.numa, gpu.numa.and_then(|numa| package_of(&node.host, numa))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_machines_follow_the_rules(node in random_node::node(8)) {
        let (topology, _) = NodeTopology::assemble(&node);
        let mut gpus: Vec<&GpuObservation> = node.gpus.iter().collect();
        gpus.sort_by_key(|gpu| gpu.pci);
        prop_assert_eq!(topology.gpus().len(), gpus.len(), "a GPU was dropped");
        for (place, gpu) in gpus.iter().enumerate() {
            let ours = &topology.gpus()[place];
            prop_assert_eq!((ours.pci, &ours.uuid, ours.index), (gpu.pci, &gpu.uuid, gpu.index));
            let (numa, package) = near(&node, gpu);
            prop_assert_eq!((ours.numa, ours.package), (numa, package), "{}", gpu.pci);
            prop_assert_eq!(ours.cpu_node, numa.and_then(|numa| beside(&node.host, numa, package)));
            let links = switch_links(gpu);
            prop_assert_eq!((ours.nvswitch_plane.is_some(), ours.nvswitch_port), (links > 0, links * per_link(gpu)));
            prop_assert_eq!(topology.symbol(place, place), "X");
        }
        for (a, first) in gpus.iter().enumerate() {
            for (b, second) in gpus.iter().enumerate().filter(|(b, _)| a != *b) {
                let pair = format!("{} and {}", first.pci, second.pci);
                let rank = rank(&node, first, second);
                prop_assert_eq!(topology.rank(a, b).number(), rank, "{}", &pair);
                let (count, nvlink) = nvlink(&node, first, second);
                prop_assert_eq!((topology.nvlink_count(a, b), topology.nvlink(a, b)), (count, nvlink), "{}", &pair);
                let pcie = pcie(&node, first, second, rank);
                prop_assert_eq!(topology.pcie(a, b), pcie, "{}, rank {}", &pair, rank);
                prop_assert_eq!(topology.bandwidth(a, b), if nvlink > 0 { nvlink } else { pcie });
                let planes = [a, b].map(|place| topology.gpus()[place].nvswitch_plane);
                prop_assert_eq!(planes[0].is_some() && planes[0] == planes[1], share_plane(&node, first, second));
                let symbol = match (count, rank) {
                    (0, rank) => ["PIX", "PXB", "PHB", "NODE", "SYS", "SYS"][usize::from(rank)].to_owned(),
                    (links, _) => format!("NV{links}"),
                };
                prop_assert_eq!(topology.symbol(a, b), symbol);
            }
        }
    }

    /// A card is a PCI function with its interfaces. Its levels follow the same rules as those of GPUs.
    #[test]
    fn random_nics_follow_the_rules(node in random_node::node(4)) {
        fn cards<'a>(list: &'a [PciObservation], found: &mut Vec<&'a PciObservation>) {
            for function in list {
                found.extend((!function.nics.is_empty()).then_some(function));
                cards(&function.devices, found);
            }
        }
        let (topology, _) = NodeTopology::assemble(&node);
        let mut expected = Vec::new();
        for bridge in &node.host.host_bridges {
            cards(&bridge.devices, &mut expected);
        }
        prop_assert_eq!(topology.nics().len(), expected.len());
        for card in expected {
            let nic = topology.nics().iter().find(|nic| nic.pci == card.pci).unwrap();
            let kind = card.nics.iter().map(|nic| nic.kind).min().unwrap();
            let rates: Vec<u32> = card.nics.iter().filter(|nic| nic.kind == kind).filter_map(|nic| nic.mbps).collect();
            prop_assert_eq!((nic.kind, nic.names.len()), (kind, card.nics.len()));
            prop_assert_eq!(nic.mbps, (!rates.is_empty()).then(|| rates.iter().sum()));
            let way = Way::to(&node.host, &|function| std::ptr::eq(function, card)).unwrap();
            prop_assert_eq!(nic.numa, way.numa());
            for (place, gpu) in topology.gpus().iter().enumerate() {
                let rank = match Way::to_address(&node.host, gpu.pci) {
                    Some(to) => rank_in_tree(&node.host, &way, &to),
                    None => rank_apart(&node.host, (gpu.numa, gpu.package), (way.numa(), way.package(&node.host))),
                };
                prop_assert_eq!(nic.level[place].number(), rank, "{:?} and {}", nic.pci, gpu.pci);
            }
            let own = topology.nics().iter().position(|other| other == nic).unwrap();
            for gpu in 0..topology.gpus().len() {
                let least = topology.nics().iter().map(|nic| nic.level[gpu]).min();
                let is_near = |nic: &Nic| nic.level[gpu].number() <= 2 && Some(nic.level[gpu]) == least;
                let faster = |other: &&Nic| is_near(other) && other.mbps > nic.mbps;
                let near = is_near(nic) && (nic.mbps.is_none() || !topology.nics().iter().any(|other| faster(&other)));
                prop_assert_eq!(topology.nearest_nics(gpu).contains(&own), near);
            }
        }
    }

    /// Contradictory observations also make a symmetric graph, and warnings of one line.
    #[test]
    fn odd_machines_make_a_graph(node in random_node::odd_node(12)) {
        check_graph(&node)?;
    }
}

fn check_graph(node: &NodeObservation) -> Result<(), TestCaseError> {
    let (topology, warnings) = NodeTopology::assemble(node);
    let count = topology.gpus().len();
    let uuids: BTreeSet<_> = node.gpus.iter().map(|gpu| &gpu.uuid).collect();
    prop_assert_eq!(count, uuids.len().min(NodeTopology::MAX_GPUS));
    prop_assert!(topology.gpus().is_sorted_by_key(|gpu| (gpu.pci, &gpu.uuid)));
    for warning in &warnings {
        prop_assert_eq!(warning.to_string().lines().count(), 1, "{:?}", warning);
    }
    for a in 0..=count {
        for b in 0..=count {
            let cells = |a, b| {
                let nvlink = (topology.nvlink_count(a, b), topology.nvlink(a, b));
                (topology.rank(a, b), nvlink, topology.pcie(a, b), topology.bandwidth(a, b))
            };
            prop_assert_eq!(cells(a, b), cells(b, a));
            let apart = a != b && a < count && b < count;
            prop_assert_eq!(topology.bandwidth(a, b) > 0, apart, "a pair without a path, or a path without a pair");
            prop_assert_eq!(topology.nvlink_count(a, b) > 0, topology.nvlink(a, b) > 0);
        }
    }
    let mut turned = node.clone();
    turned.gpus.reverse();
    let indices: BTreeSet<u32> = node.gpus.iter().map(|gpu| gpu.index).collect();
    let are_distinct = uuids.len() == node.gpus.len() && indices.len() == node.gpus.len();
    if are_distinct && node.gpus.len() <= NodeTopology::MAX_GPUS {
        prop_assert_eq!(NodeTopology::assemble(&turned), (topology, warnings), "NVML's order changed the graph");
    }
    Ok(())
}

#[test]
fn empty_observation_makes_empty_graph() {
    let (topology, warnings) = NodeTopology::assemble(&NodeObservation::default());
    assert!(topology.gpus().is_empty() && topology.nics().is_empty() && warnings.is_empty());
    assert_eq!((topology.rank(0, 1).number(), topology.bandwidth(0, 1)), (0, 0));
}

fn dgx1() -> NodeObservation {
    machines::load("dgx1-v100").unwrap().observed
}

fn h100() -> NodeObservation {
    machines::load("dgx-h100").unwrap().observed
}

fn assembled(node: &NodeObservation) -> (NodeTopology, Vec<String>) {
    let (topology, warnings) = NodeTopology::assemble(node);
    (topology, warnings.iter().map(TopologyWarning::to_string).collect())
}

fn warnings(node: &NodeObservation) -> Vec<String> {
    assembled(node).1
}

fn links(gpu: &mut GpuObservation) -> &mut Vec<NvLinkObservation> {
    gpu.nvlinks.as_mut().unwrap()
}

#[test]
fn built_in_machines_assemble_without_warnings() {
    for machine in machines::built_in() {
        let node = machines::load(machine.name).unwrap().observed;
        assert_eq!(warnings(&node), [""; 0], "{}", machine.name);
        check_graph(&node).unwrap();
    }
}

#[test]
fn each_oddity_of_a_dgx1_has_its_warning() {
    type Change = fn(&mut NodeObservation);
    let cases: [(Change, &str); 3] = [
        (
            |node| {
                let [subject, call, error] = ["GPU 3", "nvmlDeviceGetUUID", "GPU is lost"].map(str::to_owned);
                node.failures.push(ProbeFailure { subject, call, error });
            },
            "GPU 3: nvmlDeviceGetUUID: GPU is lost",
        ),
        (
            |node| {
                let levels = [(1, TopologyLevel::Internal), (2, TopologyLevel::HostBridge)];
                node.gpus[0].common_ancestors.extend(levels);
            },
            "GPUs 0000:06:00.0 and 0000:0a:00.0: the host's PCI tree says NODE, NVML says PHB; the tree is believed",
        ),
        (
            |node| node.gpus[5].compute_capability = None,
            "GPU 0000:86:00.0: its compute capability is unknown, each of its NVLinks is taken as 20000 MB/s",
        ),
    ];
    for (spoil, warning) in cases {
        let mut node = dgx1();
        spoil(&mut node);
        assert_eq!(warnings(&node), [warning]);
    }
}

#[test]
fn second_gpu_with_same_uuid_is_dropped() {
    let mut node = h100();
    node.gpus[7].uuid = node.gpus[2].uuid.clone();
    let (topology, found) = assembled(&node);
    assert_eq!(topology.gpus().len(), 7);
    let uuid = "GPU-00000002-0000-4000-8000-000000000002";
    let warning = format!("GPU 0000:df:00.0: left out, because its UUID {uuid} is also that of GPU 0000:52:00.0");
    assert_eq!(found, [warning]);
}

#[test]
fn gpus_at_one_address_are_kept_without_links() {
    let mut node = dgx1();
    for gpu in &mut node.gpus {
        links(gpu).clear();
    }
    node.gpus[1].pci = node.gpus[0].pci;
    let to_both = NvLinkRemote::Gpu(node.gpus[0].pci);
    links(&mut node.gpus[2]).push(NvLinkObservation { links: vec![0], remote: to_both, active: true });
    let (topology, _) = NodeTopology::assemble(&node);
    assert_eq!(topology.gpus().len(), 8);
    assert!((0..8).all(|a| (0..8).all(|b| topology.nvlink(a, b) == 0)));
    assert_eq!(topology.rank(0, 1).number(), 0);
    let both = "GPUs GPU-00000001-0000-4000-8000-000000000000 and GPU-00000001-0000-4000-8000-000000000001";
    let claim = "both claim PCI address 0000:06:00.0; both are kept, links to it count for neither";
    assert_eq!(warnings(&node), [format!("{both} {claim}")]);
}

#[test]
fn gpus_beyond_maximum_are_dropped() {
    let mut node = NodeObservation::default();
    let template = dgx1().gpus.remove(0);
    for number in 0..70_u8 {
        let mut gpu = template.clone();
        gpu.index = number.into();
        gpu.uuid = format!("GPU-{number}").parse().unwrap();
        gpu.pci = PciAddress::new(0, number, 0, 0).unwrap();
        gpu.nvlinks = None;
        node.gpus.push(gpu);
    }
    let found = warnings(&node);
    assert_eq!(found[0], "70 GPUs were seen, but a node can have at most 64; the rest is left out");
    check_graph(&node).unwrap();
}

#[test]
fn gpu_missing_from_host_tree_warns() {
    let mut node = dgx1();
    node.host.host_bridges[3].devices[0].devices.truncate(2);
    for gpu in 0..7 {
        node.gpus[7].common_ancestors.insert(gpu, TopologyLevel::System);
    }
    assert_eq!(warnings(&node), ["GPU 0000:8a:00.0: not in the host's PCI tree; its levels come from NVML"]);

    node.gpus[7].common_ancestors.remove(&6);
    let found = warnings(&node);
    let unknown = "neither the host's PCI tree nor NVML says how far apart they are; taken as SYS";
    assert_eq!(found[1..], [format!("GPUs 0000:89:00.0 and 0000:8a:00.0: {unknown}")]);
}

#[test]
fn refused_p2p_warns_only_where_nccl_would_use_it() {
    let mut node = dgx1();
    // NVLinks join GPUs 0 and 3, but not GPUs 0 and 5, which are on two processors.
    node.gpus[0].p2p_refused = [(3, P2pRefusal::Setting), (5, P2pRefusal::Chipset)].into();
    let found = warnings(&node);
    let [found] = &found[..] else { panic!("{found:?}") };
    assert!(found.starts_with("GPUs 0000:06:00.0 and 0000:"), "{found}");
    let words =
        "no P2P, a setting of the driver disables it: NCCL ends with an error there, although NVLink joins them";
    assert!(found.ends_with(words), "{found}");
    // Without NVLinks only pairs below one switch would use P2P. All pairs are refused, as by a driver without P2P.
    node.gpus.iter_mut().for_each(|gpu| gpu.nvlinks = Some(Vec::new()));
    node.gpus[0].p2p_refused.clear();
    for gpu in 0..8 {
        node.gpus[gpu].p2p_refused = (gpu as u32 + 1..8).map(|other| (other, P2pRefusal::NotSupported)).collect();
    }
    let found = warnings(&node);
    let [found] = &found[..] else { panic!("{found:?}") };
    assert!(found.ends_with(": no P2P, it is not supported: NCCL goes through the host's memory"), "{found}");
    assert_eq!(found.matches(" and 0000:").count(), 4, "not one pair for each switch: {found}");
    // The graph does not depend on the refusals.
    let without = |node: &NodeObservation| {
        let mut node = node.clone();
        node.gpus.iter_mut().for_each(|gpu| gpu.p2p_refused.clear());
        node
    };
    assert_eq!(NodeTopology::assemble(&node).0, NodeTopology::assemble(&without(&node)).0);
    // A GPU in MIG mode has no P2P.
    let mig = MigObservation { enabled: true, devices: Vec::new(), profiles: Vec::new() };
    node.gpus.iter_mut().for_each(|gpu| gpu.mig = Some(mig.clone()));
    assert_eq!(warnings(&node), [""; 0]);
}

#[test]
fn numa_disagreement_names_both_values() {
    let mut node = dgx1();
    node.gpus[0].numa = Some(NumaNodeId(1));
    assert_eq!(warnings(&node), ["GPU 0000:06:00.0: the kernel says NUMA node 0, NVML says 1; the kernel is believed"]);
    node.host.host_bridges[0].numa = None;
    let expected = [
        "GPU 0000:06:00.0: the kernel says NUMA node -1, NVML says 1; the kernel is believed",
        "GPU 0000:07:00.0: the kernel says NUMA node -1, NVML says 0; the kernel is believed",
    ];
    assert_eq!(warnings(&node), expected);
    assert_eq!(assembled(&node).0.gpus()[0].numa, None, "-1 became a node");
}

#[test]
fn nvlinks_to_no_other_gpu_are_not_counted() {
    let mut node = dgx1();
    let last = |gpu: &mut GpuObservation, remote, active| {
        links(gpu).push(NvLinkObservation { links: vec![6, 7], remote, active });
    };
    let gone = NvLinkRemote::Gpu("0000:ff:00.0".parse().unwrap());
    let own = NvLinkRemote::Gpu(node.gpus[1].pci);
    last(&mut node.gpus[0], gone, true);
    last(&mut node.gpus[1], own, true);
    last(&mut node.gpus[2], NvLinkRemote::Unknown, true);
    last(&mut node.gpus[3], NvLinkRemote::Unknown, false);
    last(&mut node.gpus[4], NvLinkRemote::Cpu, true);
    let expected = [
        "GPU 0000:06:00.0: 2 NVLink(s) lead to 0000:ff:00.0, where no GPU of this node is; not counted",
        "GPU 0000:07:00.0: 2 NVLink(s) lead to itself; not counted",
        "GPU 0000:0a:00.0: the other end of 2 NVLink(s) is unknown; not counted",
    ];
    assert_eq!(warnings(&node), expected);
    assert_eq!(NodeTopology::assemble(&node).0, NodeTopology::assemble(&dgx1()).0);
}

#[test]
fn one_sided_nvlinks_warn_with_both_counts() {
    let mut node = dgx1();
    links(&mut node.gpus[0])[2].links.pop();
    let expected = [
        "GPUs 0000:06:00.0 and 0000:0b:00.0: 1 NVLink(s) seen from one end, 2 from the other; 1 counted",
        "GPU 0000:06:00.0 is the odd one of 8 GPUs of its model: 5 of its NVLinks are up, 6 on every other GPU; \
         sets without it have full bandwidth",
    ];
    assert_eq!(warnings(&node), expected);
    let (topology, _) = NodeTopology::assemble(&node);
    assert_eq!((topology.nvlink(0, 3), topology.nvlink(3, 0)), (20_000, 20_000));
    // If NVML does not answer for one end, the other end counts.
    node.gpus[0].nvlinks = None;
    let (topology, found) = NodeTopology::assemble(&node);
    assert_eq!((topology.nvlink(0, 3), topology.symbol(0, 3)), (40_000, "NV2".to_owned()));
    assert!(matches!(found.as_slice(), [TopologyWarning::NvLinksUnknown(_)]), "{found:?}");
    // A link that is down does not count.
    links(&mut node.gpus[3])[0].active = false;
    assert_eq!(NodeTopology::assemble(&node).0.nvlink(0, 3), 0);
}

#[test]
fn gpu_without_fabric_warns() {
    let mut node = h100();
    let own = FabricObservation { cluster: "00000000-0000-0000-0000-000000000000".to_owned(), clique: 0 };
    for gpu in &mut node.gpus {
        gpu.fabric = Some(own.clone());
    }
    node.gpus[3].fabric = None;
    let taken = "behind an NVSwitch but reports no fabric; taken to be in the fabric that the other GPUs report";
    assert_eq!(warnings(&node), [format!("GPU {}: {taken}", node.gpus[3].pci)]);
    assert!(assembled(&node).0.gpus().iter().all(|gpu| gpu.nvswitch_plane == Some(0)));
}

#[test]
fn pci_function_listed_twice_warns() {
    let mut node = dgx1();
    let again = node.host.host_bridges[0].devices[0].devices[1].clone();
    node.host.host_bridges[2].devices.push(again);
    assert_eq!(warnings(&node), ["the host's PCI tree lists 0000:06:00.0 twice; the first place is used"]);
    assert_eq!(NodeTopology::assemble(&node).0, NodeTopology::assemble(&dgx1()).0);
}

/// SYS has two ranks, inside and across packages. The package also decides the bandwidth of the path.
#[test]
fn sys_rank_depends_on_package() {
    let mut node = dgx1();
    let rank = |node: &NodeObservation| {
        let (topology, _) = NodeTopology::assemble(node);
        (topology.rank(0, 7).number(), topology.pcie(0, 7))
    };
    // Intel Broadwell: Gen3 x16 less a sixth, and 6000 MB/s between packages.
    assert_eq!(rank(&node), (5, 6_000));
    node.host.numa_nodes[1].package = Some(PackageId(0));
    assert_eq!(rank(&node), (4, 10_000));
    for unknown in &mut node.host.numa_nodes {
        *unknown = NumaNodeObservation { package: None, ..unknown.clone() };
    }
    assert_eq!(rank(&node), (5, 6_000));
}
