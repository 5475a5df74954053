//! Any request on any small machine: the answer is a set of the size asked for that holds what it must, or what
//! the documented fallback gives. Called by the target `request`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

use linkwise_core::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, DeviceId, Explanation,
    PreferredAllocation, preferred_allocation,
};
use linkwise_core::topology::{
    ComputeCapability, FabricObservation, GpuObservation, HostBridgeObservation, HostObservation, NicKind,
    NicObservation, NodeObservation, NodeTopology, NumaNodeId, NumaNodeObservation, NvLinkObservation, NvLinkRemote,
    PackageId, PciAddress, PciKind, PciObservation, PcieLink, TopologyLevel,
};
use linkwise_host::machines;

use super::bytes::Bytes;
use super::slots::slots;

/// The most GPUs of a machine made of bytes: its tables are computed for every input.
const MOST_GPUS: usize = 8;

/// The built-in machines of up to so many GPUs, whose tables are computed once.
static BUILT_IN: LazyLock<Vec<AllocationTables>> = LazyLock::new(|| {
    let machines = machines::built_in().filter_map(|machine| machines::load(machine.name).ok());
    let small = machines.filter(|machine| machine.observed.gpus.len() <= MOST_GPUS);
    small.map(|machine| tables(&machine.observed)).collect()
});

/// A machine of 20 GPUs: more than have a row for each set.
static LARGE: LazyLock<AllocationTables> = LazyLock::new(|| tables(&node(&mut Bytes(&[1; 4096]), 20)));

fn tables(observed: &NodeObservation) -> AllocationTables {
    AllocationTables::new(Arc::new(NodeTopology::assemble(observed).0))
}

/// A request on a machine, both made of the bytes.
pub fn request(bytes: &[u8]) {
    let bytes = &mut Bytes(bytes);
    let asked = ask(bytes);
    let own;
    let tables = match bytes.below(32) {
        31 => &*LARGE,
        number => match BUILT_IN.get(number) {
            Some(tables) => tables,
            None => {
                let gpus = bytes.below(MOST_GPUS + 1);
                own = tables(&node(bytes, gpus));
                &own
            }
        },
    };
    let request = asked.on(tables.topology());
    let (answer, report) = preferred_allocation(tables, &request, AllocationPolicy::BestEffort);
    holds(tables, &request, &answer, &report);
    let mut turned = request.clone();
    turned.available.reverse();
    turned.must_include.reverse();
    turned.available.extend(request.available.iter().cloned());
    let again = preferred_allocation(tables, &turned, AllocationPolicy::BestEffort);
    assert_eq!(again, (answer, report), "the order of the request's lists changes the answer");
    slots(bytes, tables, [&asked.available, &asked.must_include], asked.size);
}

/// What an answer must be, worked out anew.
pub fn holds(
    tables: &AllocationTables,
    request: &AllocationRequest,
    answer: &PreferredAllocation,
    report: &AllocationReport,
) {
    let places: BTreeMap<DeviceId, usize> =
        tables.topology().gpus().iter().enumerate().map(|(place, gpu)| (DeviceId::from(&gpu.uuid), place)).collect();
    let must: BTreeSet<&DeviceId> = request.must_include.iter().collect();
    let offered: BTreeSet<&DeviceId> = request.available.iter().chain(&request.must_include).collect();
    let chosen: BTreeSet<&DeviceId> = answer.devices.iter().collect();
    assert_eq!(chosen.len(), answer.devices.len(), "a device twice");
    assert!(chosen.is_subset(&offered), "a device that was not offered");
    let known = offered.iter().all(|id| places.contains_key(*id));
    let possible = known && request.size >= must.len().max(1) && request.size <= offered.len();
    match report.fallback {
        None => {
            assert!(possible, "an answer to what cannot be met");
            assert_eq!(answer.devices.len(), request.size, "another size");
            assert!(must.is_subset(&chosen), "without what must be in it");
            assert!(answer.devices.is_sorted_by_key(|id| places.get(id)), "not in the order of the addresses");
            assert!(report.values.is_some(), "no values");
        }
        Some(reason) => {
            let few = places.len() <= AllocationTables::EXACT_GPUS;
            assert!(!(possible && few), "a fallback ({reason:?}) where there is an answer");
            let others = offered.difference(&must);
            let expected: Vec<&DeviceId> = must.iter().chain(others).take(request.size).copied().collect();
            assert_eq!(answer.devices.iter().collect::<Vec<_>>(), expected, "not the documented fallback ({reason:?})");
            assert!(!report.exact && report.values.is_none(), "a fallback with values");
        }
    }
    let explanation = Explanation::new(tables, report);
    assert!(!explanation.to_string().is_empty() && !report.to_string().contains('\n'), "no report, or many lines");
    serde_json::to_string(&explanation).expect("a report in JSON");
}

/// A request before the machine is known: numbers for devices.
struct Ask {
    available: Vec<usize>,
    must_include: Vec<usize>,
    size: usize,
}

fn ask(bytes: &mut Bytes<'_>) -> Ask {
    let size = match bytes.byte() {
        size @ 0..=0xef => usize::from(size % 10),
        0xff => usize::MAX,
        size => usize::from(size),
    };
    let (available, must_include) = (bytes.below(24), bytes.below(6));
    let mut some = |count| (0..count).map(|_| bytes.below(256)).collect();
    Ask { available: some(available), must_include: some(must_include), size }
}

impl Ask {
    /// Most numbers name a GPU of the machine, the high ones nobody.
    fn on(&self, topology: &NodeTopology) -> AllocationRequest {
        let gpus = topology.gpus();
        let id = |&number: &usize| match gpus.get(number % gpus.len().max(1)) {
            Some(gpu) if number < 0xfc => DeviceId::from(&gpu.uuid),
            _ => DeviceId::from(["", "GPU-gone", "\u{0}\u{fffd}", "GPU-00"][number % 4].to_owned()),
        };
        AllocationRequest {
            available: self.available.iter().map(id).collect(),
            must_include: self.must_include.iter().map(id).collect(),
            size: self.size,
        }
    }
}

/// A node: whatever the bytes say of links, addresses, NUMA nodes, switches, NICs.
fn node(bytes: &mut Bytes<'_>, gpus: usize) -> NodeObservation {
    let numa_nodes = (0..bytes.below(4)).map(|_| NumaNodeObservation {
        id: NumaNodeId(u32::from(bytes.byte() % 4)),
        package: bytes.maybe(|bytes| PackageId(u32::from(bytes.byte() % 3))),
        cpus: if bytes.below(2) == 0 { String::new() } else { "0-3".to_owned() },
    });
    let numa_nodes = numa_nodes.collect();
    let mut host_bridges: Vec<HostBridgeObservation> = Vec::new();
    for _ in 0..bytes.below(4) {
        host_bridges.push(HostBridgeObservation {
            numa: bytes.maybe(|bytes| NumaNodeId(u32::from(bytes.byte() % 4))),
            package: None,
            root: None,
            devices: (0..bytes.below(4)).map(|_| device(bytes, 4)).collect(),
        });
    }
    let gpus = (0..gpus).map(|number| gpu(bytes, number, gpus)).collect();
    NodeObservation {
        gpus,
        host: HostObservation { cpu: None, numa_nodes, host_bridges },
        ..NodeObservation::default()
    }
}

/// One of a few addresses, so that they meet.
fn address(bytes: &mut Bytes<'_>) -> PciAddress {
    PciAddress::new(0, bytes.byte() % 16, 0, 0).expect("a PCI address")
}

fn link(bytes: &mut Bytes<'_>) -> PcieLink {
    match bytes.below(6) {
        5 => PcieLink { mts: bytes.any(), width: bytes.any() },
        generation => PcieLink { mts: [2_500, 8_000, 16_000, 32_000, 64_000][generation], width: 16 },
    }
}

fn device(bytes: &mut Bytes<'_>, depth: usize) -> PciObservation {
    let kinds = [
        PciKind::RootPort,
        PciKind::UpstreamPort,
        PciKind::DownstreamPort,
        PciKind::Switch,
        PciKind::Gpu,
        PciKind::Nic,
    ];
    let nic = |bytes: &mut Bytes<'_>| {
        let (name, is_rdma) = (format!("nic{}", bytes.byte() % 4), bytes.below(2) == 0);
        let kind = if is_rdma { NicKind::Rdma } else { NicKind::Ethernet };
        NicObservation { mbps: bytes.maybe(Bytes::any), ..NicObservation::new(name, kind) }
    };
    PciObservation {
        pci: bytes.maybe(address),
        kind: kinds[bytes.below(6)],
        class: None,
        link: bytes.maybe(link),
        numa: bytes.maybe(|bytes| NumaNodeId(u32::from(bytes.byte() % 4))),
        nics: (0..bytes.below(3)).map(|_| nic(bytes)).collect(),
        devices: (0..bytes.below(4).min(depth)).map(|_| device(bytes, depth - 1)).collect(),
    }
}

fn gpu(bytes: &mut Bytes<'_>, number: usize, gpus: usize) -> GpuObservation {
    let levels = [
        TopologyLevel::Internal,
        TopologyLevel::Single,
        TopologyLevel::Multiple,
        TopologyLevel::HostBridge,
        TopologyLevel::Node,
        TopologyLevel::System,
    ];
    let remote = |bytes: &mut Bytes<'_>| match bytes.below(6) {
        0 => NvLinkRemote::Switch(None),
        1 => NvLinkRemote::Cpu,
        2 => NvLinkRemote::Unknown,
        _ => NvLinkRemote::Gpu(address(bytes)),
    };
    let group = |bytes: &mut Bytes<'_>| NvLinkObservation {
        links: (0..bytes.below(6)).map(|_| u32::from(bytes.byte() % 20)).collect(),
        remote: remote(bytes),
        active: bytes.below(8) > 0,
    };
    let bare = GpuObservation::new(
        u32::try_from(number).expect("few GPUs"),
        // Names may meet too: then one GPU is left out.
        format!("GPU-{:02}", if bytes.below(16) == 15 { 0 } else { number }).parse().expect("a UUID"),
        address(bytes),
    );
    GpuObservation {
        compute_capability: bytes.maybe(|bytes| ComputeCapability { major: u32::from(bytes.byte() % 12), minor: 0 }),
        numa: bytes.maybe(|bytes| NumaNodeId(u32::from(bytes.byte() % 4))),
        pcie: bytes.maybe(link),
        nvlinks: bytes.maybe(|bytes| (0..bytes.below(5)).map(|_| group(bytes)).collect()),
        fabric: bytes.maybe(|bytes| FabricObservation { cluster: "0".to_owned(), clique: u32::from(bytes.byte() % 3) }),
        common_ancestors: (0..bytes.below(4))
            .map(|_| (u32::try_from(bytes.below(gpus)).expect("few GPUs"), levels[bytes.below(6)]))
            .collect(),
        ..bare
    }
}
