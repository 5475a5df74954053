//! Random machines for the property tests: a PCI tree with most of the GPUs in it, NVLinks that mostly make sense, and
//! some oddities.

use linkwise_core::topology::{
    ComputeCapability, CpuObservation, FabricObservation, GpuObservation, GpuUuid, Guid, HostBridgeObservation,
    HostObservation, NicKind, NicObservation, NodeObservation, NumaNodeId, NumaNodeObservation, NvLinkObservation,
    NvLinkRemote, PackageId, PciAddress, PciKind, PciObservation, PcieLink, TopologyLevel,
};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;

/// A machine of up to `max` GPUs with distinct addresses and UUIDs, in a tree that PCI allows: a port has one switch
/// below it, or the functions of one board.
pub fn node(max: usize) -> impl Strategy<Value = NodeObservation> {
    node_between(1, max)
}

/// A machine as of [`node`], with at least `min` GPUs.
pub fn node_between(min: usize, max: usize) -> impl Strategy<Value = NodeObservation> {
    let parts = (vec(gpu(), min..=max), host(), nvlinks(max), shuffled(max), shuffled(max));
    parts.prop_map(|(gpus, host, links, addresses, uuids)| build(gpus, host, &links, &addresses, &uuids))
}

/// A machine of up to `max` GPUs that may have clashes: two GPUs with one address, UUID or index, or a repeated tree.
pub fn odd_node(max: usize) -> impl Strategy<Value = NodeObservation> {
    let clashes = vec((0..max, 0..max, 0..4_u8), 0..6);
    let parts = (vec(gpu(), 0..=max), host(), nvlinks(max), shuffled(max), shuffled(max), clashes);
    parts.prop_map(|(gpus, host, links, addresses, uuids, clashes)| {
        let mut node = build(gpus, host, &links, &addresses, &uuids);
        for (a, b, kind) in clashes {
            let (Some(from), true) = (node.gpus.get(b).cloned(), a < node.gpus.len()) else { continue };
            match kind {
                0 => node.gpus[a].pci = from.pci,
                1 => node.gpus[a].uuid = from.uuid,
                2 => node.gpus[a].index = from.index,
                _ => node.host.host_bridges = [node.host.host_bridges.clone(), node.host.host_bridges].concat(),
            }
            node.host.host_bridges.truncate(6);
        }
        node
    })
}

/// The address of the GPU with this number. Bus ids repeat in another PCI domain.
pub fn address(number: usize) -> PciAddress {
    let number = u8::try_from(number).expect("few GPUs");
    PciAddress::new(u32::from(number % 2), number / 2, 0, 0).expect("a small number")
}

/// The numbers below `max`, shuffled.
fn shuffled(max: usize) -> impl Strategy<Value = Vec<usize>> {
    Just((0..max).collect::<Vec<_>>()).prop_shuffle()
}

/// The random facts of a GPU.
#[derive(Clone, Debug)]
struct GpuParts {
    slot: Option<usize>,
    capability: Option<(u32, u32)>,
    numa: Option<u32>,
    pcie: Option<PcieLink>,
    link: Option<PcieLink>,
    own_numa: Option<u32>,
    ancestors: Vec<(usize, TopologyLevel)>,
}

fn gpu() -> impl Strategy<Value = GpuParts> {
    let known = select(vec![(6, 0), (7, 0), (8, 0), (8, 6), (8, 9), (9, 0), (9, 0), (9, 0), (10, 0)]);
    let ancestor = (0..8_usize, select(vec![0, 10, 20, 30, 40, 50]))
        .prop_map(|(gpu, level)| (gpu, TopologyLevel::from_nvml(level).expect("NVML's number")));
    let parts = (
        weighted(0.85, 0..64_usize),
        weighted(0.9, known),
        weighted(0.5, 0..4_u32),
        weighted(0.7, link()),
        weighted(0.7, link()),
        weighted(0.1, 0..4_u32),
        vec(ancestor, 0..4),
    );
    parts.prop_map(|(slot, capability, numa, pcie, link, own_numa, ancestors)| GpuParts {
        slot,
        capability,
        numa,
        pcie,
        link,
        own_numa,
        ancestors,
    })
}

/// A PCIe link: Gen1 to Gen6, the 2.5 GT/s x1 of a virtual switch, or zeros.
fn link() -> impl Strategy<Value = PcieLink> {
    let rates = select(vec![2_500, 5_000, 8_000, 16_000, 16_000, 32_000, 32_000, 64_000]);
    let real = (rates, select(vec![1, 4, 8, 16, 16, 16])).prop_map(|(mts, width)| PcieLink { mts, width });
    prop_oneof![8 => real, 1 => Just(PcieLink { mts: 2_500, width: 1 }), 1 => Just(PcieLink { mts: 0, width: 0 })]
}

fn host() -> impl Strategy<Value = HostObservation> {
    let bridge =
        (weighted(0.8, 0..4_u32), weighted(0.3, 0..2_u32), vec(device(), 0..4)).prop_map(|(numa, package, devices)| {
            let (numa, package) = (numa.map(NumaNodeId), package.map(PackageId));
            HostBridgeObservation { numa, package, root: None, devices }
        });
    let packages = vec(weighted(0.8, 0..2_u32), 0..4).prop_map(|packages| {
        let nodes = packages.into_iter().zip(0..);
        let node = |(package, id): (Option<u32>, u32)| NumaNodeObservation {
            id: NumaNodeId(id),
            package: package.map(PackageId),
            cpus: if id == 2 { String::new() } else { format!("{id}") },
        };
        nodes.map(node).collect()
    });
    let parts = (weighted(0.8, cpu()), packages, vec(bridge, 0..4));
    parts.prop_map(|(cpu, numa_nodes, host_bridges)| HostObservation { cpu, numa_nodes, host_bridges })
}

/// A processor from the table of bandwidths between packages, or an unknown one.
fn cpu() -> impl Strategy<Value = CpuObservation> {
    let intel = [79, 85, 106, 143, 207].map(|model| ("x86_64", "GenuineIntel", 6, model));
    let amd = ("x86_64", "AuthenticAMD", 25, 1);
    let others = [amd, ("ppc64le", "IBM", 0, 0), ("aarch64", "ARM", 8, 0), ("riscv64", "Somebody", 1, 1)];
    let processors = [&intel[..], &others].concat();
    select(processors).prop_map(|(arch, vendor, family, model)| CpuObservation {
        arch: arch.to_owned(),
        vendor: Some(vendor.to_owned()),
        family: Some(family),
        model: Some(model),
    })
}

/// A tree of up to three levels of switches, with or without their ports and a root port, and with NICs.
fn device() -> impl Strategy<Value = PciObservation> {
    let device = |kind, link, numa: Option<u32>, nics, devices| {
        let numa = numa.map(NumaNodeId);
        PciObservation { pci: None, kind, class: None, link, numa, nics, devices }
    };
    let rdma = prop_oneof![Just(NicKind::Rdma), Just(NicKind::Ethernet)];
    let guid = |part| weighted(part, (1..5_u64).prop_map(|number| Guid::new(number).expect("not 0")));
    let rate = weighted(0.7, select(vec![0, 10_000, 25_000, 200_000, 400_000]));
    let nic = (0..12_u8, rdma, rate, guid(0.3), guid(0.3)).prop_map(|(number, kind, mbps, system_guid, port)| {
        let named = NicObservation::new(format!("nic{number}"), kind);
        NicObservation { mbps, system_guid, port_guids: port.into_iter().collect(), ..named }
    });
    let card = (weighted(0.7, link()), weighted(0.1, 0..4_u32), vec(nic, 0..3))
        .prop_map(move |(link, numa, nics)| device(PciKind::Nic, link, numa, nics, Vec::new()));
    let whole = (weighted(0.7, link()), weighted(0.1, 0..4_u32))
        .prop_map(move |(link, numa)| device(PciKind::Switch, link, numa, Vec::new(), Vec::new()));
    let empty_port =
        weighted(0.7, link()).prop_map(move |link| device(PciKind::RootPort, link, None, Vec::new(), Vec::new()));
    let leaf = prop_oneof![3 => card, 2 => whole, 1 => empty_port].boxed();
    leaf.prop_recursive(3, 12, 3, move |below| {
        let below = below.prop_filter("a root port is at the root", |below| below.kind != PciKind::RootPort);
        let whole = (weighted(0.7, link()), vec(below.clone(), 0..3))
            .prop_map(move |(link, devices)| device(PciKind::Switch, link, None, Vec::new(), devices));
        let port = (weighted(0.7, link()), proptest::option::of(below)).prop_map(move |(link, below)| {
            device(PciKind::DownstreamPort, link, None, Vec::new(), below.into_iter().collect())
        });
        let ports = (weighted(0.7, link()), vec(port, 0..3))
            .prop_map(move |(link, ports)| device(PciKind::UpstreamPort, link, None, Vec::new(), ports));
        let switch = prop_oneof![whole, ports].boxed();
        let root = (weighted(0.7, link()), switch.clone())
            .prop_map(move |(link, below)| device(PciKind::RootPort, link, None, Vec::new(), vec![below]));
        prop_oneof![3 => switch, 1 => root]
    })
}

/// The random NVLinks of a machine.
#[derive(Clone, Debug)]
struct Links {
    /// The number of links of each pair, and the number that the other end reports, if it differs.
    pairs: Vec<(u8, Option<u8>)>,
    /// The number of each GPU's links to an NVSwitch, and its clique.
    ports: Vec<(u8, Option<u32>)>,
    /// True for a GPU whose NVLinks NVML cannot read.
    silent: Vec<bool>,
    /// GPUs, and the kind of their oddity.
    odd: Vec<(usize, u8)>,
}

fn nvlinks(max: usize) -> impl Strategy<Value = Links> {
    let count = prop_oneof![4 => Just(0_u8), 3 => Just(1_u8), 2 => Just(2_u8), 1 => Just(4_u8)];
    let pair = (count, weighted(0.05, 0..4_u8));
    let some = vec(pair, max * max).boxed();
    let none = Just(vec![(0, None); max * max]).boxed();
    let port = |widths: Vec<u8>| (select(widths), weighted(0.8, prop_oneof![4 => Just(1_u32), 1 => Just(2_u32)]));
    let all = vec(port(vec![18, 18, 18, 18, 12]), max).boxed();
    let few = vec(port(vec![0, 6, 12]), max).boxed();
    let no_switch = Just(vec![(0, None); max]).boxed();
    let silent = prop_oneof![3 => Just(vec![false; max]).boxed(), 1 => vec(proptest::bool::weighted(0.2), max).boxed()];
    let odd = prop_oneof![2 => Just(Vec::new()).boxed(), 1 => vec((0..max, 0..6_u8), 1..4).boxed()];
    let kind = prop_oneof![
        2 => (none.clone(), no_switch.clone()),
        4 => (some.clone(), no_switch),
        2 => (none, all.clone()),
        2 => (some.clone(), few),
        1 => (some, all),
    ];
    (kind, silent, odd).prop_map(|((pairs, ports), silent, odd)| Links { pairs, ports, silent, odd })
}

fn build(
    gpus: Vec<GpuParts>,
    mut host: HostObservation,
    links: &Links,
    addresses: &[usize],
    uuids: &[usize],
) -> NodeObservation {
    let max = addresses.len();
    let mut number = 0;
    for bridge in &mut host.host_bridges {
        number_devices(&mut bridge.devices, &mut number);
    }
    let count = gpus.len();
    let mut observed = Vec::new();
    for (at, gpu) in gpus.into_iter().enumerate() {
        let pci = address(addresses[at]);
        if let Some(slot) = gpu.slot {
            let numa = gpu.own_numa.map(NumaNodeId);
            let (nics, devices) = (Vec::new(), Vec::new());
            let function =
                PciObservation { pci: Some(pci), kind: PciKind::Gpu, class: None, link: gpu.link, numa, nics, devices };
            let mut paths = Vec::new();
            for (at, bridge) in host.host_bridges.iter().enumerate() {
                find_slots(&bridge.devices, true, &mut vec![at], &mut paths);
            }
            if let Some(path) = paths.get(slot % paths.len().max(1)) {
                list_at(&mut host.host_bridges, path).push(function);
            }
        }
        let uuid: GpuUuid = format!("GPU-{:02}", uuids[at]).parse().expect("a UUID");
        let ancestors = gpu.ancestors.into_iter();
        let ancestors = ancestors.map(|(gpu, level)| (u32::try_from(gpu).expect("few GPUs"), level));
        let clique = links.ports[at].1;
        observed.push(GpuObservation {
            compute_capability: gpu.capability.map(|(major, minor)| ComputeCapability { major, minor }),
            numa: gpu.numa.map(NumaNodeId),
            pcie: gpu.pcie,
            nvlinks: (!links.silent[at]).then(|| reported_links(at, count, max, links, addresses)),
            fabric: clique.map(|clique| FabricObservation { cluster: "0".to_owned(), clique }),
            common_ancestors: ancestors.collect(),
            ..GpuObservation::new(u32::try_from(at).expect("few GPUs"), uuid, pci)
        });
    }
    NodeObservation { gpus: observed, host, ..NodeObservation::default() }
}

/// The NVLinks that one GPU reports.
fn reported_links(at: usize, count: usize, max: usize, links: &Links, addresses: &[usize]) -> Vec<NvLinkObservation> {
    let mut next = 0;
    let mut group = |links: u8, remote, active| {
        next += u32::from(links);
        NvLinkObservation { links: (next - u32::from(links)..next).collect(), remote, active }
    };
    let mut groups = Vec::new();
    for other in (0..count).filter(|other| *other != at) {
        let (number, at_other_end) = links.pairs[at.min(other) * max + at.max(other)];
        let reported = if at < other { number } else { at_other_end.unwrap_or(number) };
        if reported > 0 {
            groups.push(group(reported, NvLinkRemote::Gpu(address(addresses[other])), true));
        }
    }
    if links.ports[at].0 > 0 {
        groups.push(group(links.ports[at].0, NvLinkRemote::Switch(None), true));
    }
    for (_, kind) in links.odd.iter().filter(|(gpu, _)| *gpu == at) {
        let neighbour = address(addresses[(at + 1) % count]);
        groups.push(match kind {
            0 => group(2, NvLinkRemote::Gpu(address(200)), true),
            1 => group(1, NvLinkRemote::Gpu(address(addresses[at])), true),
            2 => group(3, NvLinkRemote::Gpu(neighbour), false),
            3 => group(1, NvLinkRemote::Unknown, true),
            4 => group(2, NvLinkRemote::Cpu, true),
            _ => group(4, NvLinkRemote::Switch(PciAddress::new(9, 9, 9, 0)), false),
        });
    }
    groups
}

/// Gives each function an address in PCI domain 7, where no GPU is.
fn number_devices(devices: &mut [PciObservation], number: &mut u8) {
    for device in devices {
        device.pci = PciAddress::new(7, *number, 0, 0);
        *number = number.wrapping_add(1);
        number_devices(&mut device.devices, number);
    }
}

/// Finds the paths of lists to which a GPU can be added: at the root, below a switch, below a port without a switch.
fn find_slots(devices: &[PciObservation], open: bool, path: &mut Vec<usize>, found: &mut Vec<Vec<usize>>) {
    let switch = |device: &PciObservation| matches!(device.kind, PciKind::Switch | PciKind::UpstreamPort);
    if open {
        found.push(path.clone());
    }
    for (at, device) in devices.iter().enumerate() {
        let open = match device.kind {
            PciKind::Switch => true,
            PciKind::RootPort | PciKind::DownstreamPort => !device.devices.iter().any(switch),
            PciKind::UpstreamPort | PciKind::Gpu | PciKind::Nic => false,
        };
        path.push(at);
        find_slots(&device.devices, open, path, found);
        path.pop();
    }
}

/// The list at the end of a path.
fn list_at<'a>(bridges: &'a mut [HostBridgeObservation], path: &[usize]) -> &'a mut Vec<PciObservation> {
    let mut list = &mut bridges[path[0]].devices;
    for &at in &path[1..] {
        list = &mut list[at].devices;
    }
    list
}
