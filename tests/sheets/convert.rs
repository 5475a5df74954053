//! Converts a fact sheet to the observation that a scan of the machine would give.
//!
//! It invents only facts that an observation needs: UUIDs, missing addresses of GPUs, NVLink numbers, missing host
//! bridges, and, if the sheet has only a matrix, a PCI tree with the levels of the matrix.

use linkwise_core::topology::{
    ComputeCapability, CpuObservation, FabricObservation, GpuObservation, HostBridgeObservation, HostObservation,
    NicKind, NicObservation, NodeObservation, NumaNodeId, NumaNodeObservation, NvLinkObservation, NvLinkRemote,
    PackageId, PciAddress, PciKind, PciObservation, PcieLink,
};

use crate::sheets::sheet::{CpuLinks, Device, Gpu, Nic, Sheet};

pub fn observe(sheet: &Sheet) -> NodeObservation {
    let numa_nodes = sheet.numa.iter().filter_map(|node| {
        let (id, package) = (numa(Some(node.id))?, node.socket.map(PackageId));
        Some(NumaNodeObservation { id, package, cpus: node.cpus.clone().unwrap_or_default() })
    });
    let mut host_bridges = if sheet.pcie.is_empty() { tree_from_matrix(sheet) } else { tree(sheet) };
    let known = host_bridges.iter().flat_map(|bridge| names(&bridge.devices)).collect::<Vec<_>>();
    // A NIC without a recorded place gets a host bridge of its own.
    let mut others: Vec<&str> = sheet.nics.iter().filter_map(|nic| nic.name.as_deref()).collect();
    others.extend(sheet.topo_matrix.columns.split_whitespace().filter(|name| !name.starts_with("GPU")));
    others.retain(|name| !known.iter().any(|known| known == name) && !name.contains(':'));
    others.sort_unstable();
    others.dedup();
    for name in others {
        let at = sheet.nics.iter().find(|nic| nic.name.as_deref() == Some(name)).and_then(|nic| nic.numa);
        host_bridges.push(bridge(sheet, at, vec![nic_device(sheet, None, vec![name.to_owned()])]));
    }
    let host = HostObservation { cpu: cpu(sheet), numa_nodes: numa_nodes.collect(), host_bridges };
    NodeObservation {
        gpus: sheet.gpus.iter().map(|recorded| gpu(sheet, recorded)).collect(),
        host,
        ..NodeObservation::default()
    }
}

fn numa(id: Option<i64>) -> Option<NumaNodeId> {
    id.and_then(|id| u32::try_from(id).ok()).map(NumaNodeId)
}

fn address(text: &str) -> Option<PciAddress> {
    // Sheets write these texts for devices without an address and for placeholders of virtual switches.
    let unknown = text.starts_with("unknown-") || text.starts_with("ffff:");
    (!unknown).then(|| text.parse().unwrap_or_else(|error| panic!("{error}")))
}

/// The processor. To the base family 15, NCCL adds 16 times the extended family, an observation the extended family.
fn cpu(sheet: &Sheet) -> Option<CpuObservation> {
    let cpu = sheet.cpu.as_ref()?;
    let display = |family: u32| if family & 0xf == 0xf { 0xf + (family >> 4) } else { family };
    let (arch, vendor) = (cpu.arch.clone(), cpu.vendor.clone());
    Some(CpuObservation { arch, vendor, family: cpu.family.map(display), model: cpu.model })
}

fn gpu(sheet: &Sheet, gpu: &Gpu) -> GpuObservation {
    GpuObservation {
        model: gpu.model.clone(),
        compute_capability: gpu.model.as_deref().and_then(capability),
        numa: numa(gpu.numa),
        nvlinks: Some(nvlinks(sheet, gpu)),
        display: gpu.compute.map(|computes| !computes),
        fabric: sheet.fabric.as_ref().map(|fabric| FabricObservation {
            cluster: fabric.cluster_uuid.clone(),
            clique: u32::from_str_radix(fabric.clique_id.trim_start_matches("0x"), 16).unwrap(),
        }),
        ..GpuObservation::new(gpu.index.into(), format!("GPU-{:02}", gpu.index).parse().unwrap(), gpu_address(gpu))
    }
}

/// A GPU's recorded address, else one in a PCI domain that no machine has.
fn gpu_address(gpu: &Gpu) -> PciAddress {
    let recorded = gpu.bdf.as_deref().and_then(address);
    recorded.unwrap_or_else(|| PciAddress::new(0xf000, gpu.index, 0, 0).unwrap())
}

fn capability(model: &str) -> Option<ComputeCapability> {
    let table: [(&str, &[&str]); 7] = [
        ("6.0", &["P100"]),
        ("7.0", &["V100"]),
        ("7.5", &["T4"]),
        ("8.0", &["A100"]),
        ("8.6", &["A10G", "A6000", "RTX 3090"]),
        ("8.9", &["L20", "L40S", "RTX 4000 Ada", "RTX 4090"]),
        ("9.0", &["H100", "H800", "H20", "H200"]),
    ];
    let row = table.into_iter().find(|(_, models)| models.iter().any(|name| model.contains(name)));
    let capability = row.map(|(capability, _)| capability).or(model.contains("B200").then_some("10.0"))?;
    Some(capability.to_owned().try_into().unwrap())
}

fn nvlinks(sheet: &Sheet, gpu: &Gpu) -> Vec<NvLinkObservation> {
    let mut ends: Vec<(NvLinkRemote, u32)> = Vec::new();
    let nvlink = &sheet.nvlink;
    match nvlink.kind.as_str() {
        "none" => {}
        "direct" => {
            let row = &nvlink.matrix.as_ref().expect("direct NVLinks lack their matrix")[usize::from(gpu.index)];
            let others = sheet.gpus.iter().map(|other| NvLinkRemote::Gpu(gpu_address(other)));
            ends.extend(others.zip(row.iter().copied()));
        }
        "nvswitch" => match &gpu.nvlinks {
            Some(links) => ends.extend(links.iter().map(|to| (NvLinkRemote::Switch(address(&to.target)), to.count))),
            None => ends.push((NvLinkRemote::Switch(None), nvlink.nvswitch.as_ref().unwrap().links_per_gpu)),
        },
        other => panic!("NVLinks of kind {other}"),
    }
    let to_cpu = nvlink.cpu_links.as_ref().map(|links| match links {
        CpuLinks::Uniform(words) => words.split(' ').next().unwrap().parse().unwrap(),
        CpuLinks::ByGpu(words) => words[&format!("GPU{}", gpu.index)].rsplit('x').next().unwrap().parse().unwrap(),
    });
    ends.extend(to_cpu.map(|count| (NvLinkRemote::Cpu, count)));
    let mut first = 0;
    let groups = ends.into_iter().filter(|(_, count)| *count > 0).map(|(remote, count)| {
        let links = (first..first + count).collect();
        first += count;
        NvLinkObservation { links, remote, active: true }
    });
    groups.collect()
}

/// A host bridge, with its package if its NUMA node is -1.
fn bridge(sheet: &Sheet, at: Option<i64>, devices: Vec<PciObservation>) -> HostBridgeObservation {
    let node = sheet.numa.iter().find(|node| Some(node.id) == at && node.id < 0);
    let package = node.and_then(|node| node.socket).map(PackageId);
    HostBridgeObservation { numa: numa(at), package, root: None, devices }
}

/// The recorded tree. NCCL prints no host bridges, so each device at the top of its tree gets one.
fn tree(sheet: &Sheet) -> Vec<HostBridgeObservation> {
    let mut bridges = Vec::new();
    for root in &sheet.pcie {
        // hwloc shows host bridges, and a switch as its ports; NCCL shows a switch as one entry.
        let is_hwlocs = root.root.as_ref().is_some_and(|root| root.starts_with("host bridge"));
        let kind = if is_hwlocs { PciKind::RootPort } else { PciKind::Switch };
        let devices = root.children.iter().filter_map(|device| function(sheet, device, kind));
        if root.root.is_some() {
            bridges.push(bridge(sheet, root.numa, devices.collect()));
        } else {
            bridges.extend(devices.map(|device| bridge(sheet, root.numa, vec![device])));
        }
    }
    bridges
}

/// A function with its children; `None` if it is not a GPU or NIC, nor above one.
fn function(sheet: &Sheet, device: &Device, port: PciKind) -> Option<PciObservation> {
    let pci = device.bdf.as_deref().and_then(address);
    let kind = match device.kind.as_str() {
        "switch" => port,
        "gpu" => PciKind::Gpu,
        "nic" => {
            let named = if device.names.is_empty() { &device.os_devices } else { &device.names };
            let same = sheet.nics.iter().filter(|nic| nic.bdf == device.bdf);
            let listed = same.map(|nic| nic.name.clone().or(nic.bdf.clone()).unwrap());
            let names = if named.is_empty() { listed.collect() } else { named.clone() };
            return Some(PciObservation { link: link(device), ..nic_device(sheet, pci, names) });
        }
        _ => return None,
    };
    let below = match kind {
        PciKind::RootPort | PciKind::DownstreamPort => PciKind::UpstreamPort,
        PciKind::UpstreamPort => PciKind::DownstreamPort,
        other => other,
    };
    let devices: Vec<_> = device.children.iter().filter_map(|child| function(sheet, child, below)).collect();
    let is_kept = kind == PciKind::Gpu || !devices.is_empty();
    is_kept.then(|| PciObservation { kind, link: link(device), pci, ..switch(devices) })
}

fn link(device: &Device) -> Option<PcieLink> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "GT/s of a link: 2.5 to 64")]
    let mts = (device.link_gts? * 1000.0) as u32;
    Some(PcieLink { mts, width: device.link_width? })
}

fn nic_device(sheet: &Sheet, pci: Option<PciAddress>, names: Vec<String>) -> PciObservation {
    let rate = |name: &str| sheet.nics.iter().find(|nic: &&Nic| nic.name.as_deref() == Some(name))?.speed_mbps;
    let rdma = |name: &str| ["mlx5", "efa", "rdma"].iter().any(|start| name.starts_with(start));
    let interface = |name: String| {
        let kind = if rdma(&name) { NicKind::Rdma } else { NicKind::Ethernet };
        NicObservation { mbps: rate(&name), ..NicObservation::new(name, kind) }
    };
    let nics = names.into_iter().map(interface).collect();
    PciObservation { pci, kind: PciKind::Nic, class: None, link: None, numa: None, nics, devices: Vec::new() }
}

fn names(devices: &[PciObservation]) -> Vec<String> {
    let own = |device: &PciObservation| device.nics.iter().map(|nic| nic.name.clone()).collect::<Vec<_>>();
    devices.iter().flat_map(|device| [own(device), names(&device.devices)].concat()).collect()
}

/// A tree with the levels of a matrix: devices at PHB or closer share a host bridge, at PXB or closer a tree of
/// switches, at PIX a switch.
fn tree_from_matrix(sheet: &Sheet) -> Vec<HostBridgeObservation> {
    let all: Vec<&str> = sheet.topo_matrix.columns.split_whitespace().collect();
    let below_bridge = |names: &Vec<&str>| {
        let trees = groups(sheet, names, &["PIX", "PXB"]);
        let devices = trees.iter().map(|names| {
            let mut leaves = groups(sheet, names, &["PIX"]);
            let leaf = |names: &Vec<&str>| switch(names.iter().map(|name| gpu_or_nic(sheet, name)).collect());
            match (leaves.len(), names.len()) {
                (1, 1) => gpu_or_nic(sheet, names[0]),
                (1, _) => leaf(&leaves.remove(0)),
                _ => switch(leaves.iter().map(leaf).collect()),
            }
        });
        bridge(sheet, recorded_numa(sheet, names[0]), devices.collect())
    };
    groups(sheet, &all, &["PIX", "PXB", "PHB"]).iter().map(below_bridge).collect()
}

/// Groups names that the matrix connects by one of the symbols, directly or through others.
fn groups<'a>(sheet: &Sheet, names: &[&'a str], symbols: &[&str]) -> Vec<Vec<&'a str>> {
    let matrix = &sheet.topo_matrix;
    let near = |a: &str, b: &str| {
        [matrix.symbol(a, b), matrix.symbol(b, a)].into_iter().flatten().any(|symbol| symbols.contains(&symbol))
    };
    let mut groups: Vec<Vec<&str>> = Vec::new();
    for &name in names {
        let (mut joined, mut apart): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.iter().any(|other| near(name, other)));
        joined.push(vec![name]);
        apart.push(joined.concat());
        groups = apart;
    }
    groups
}

fn switch(devices: Vec<PciObservation>) -> PciObservation {
    PciObservation { pci: None, kind: PciKind::Switch, class: None, link: None, numa: None, nics: Vec::new(), devices }
}

/// A GPU or NIC by its name in the matrix.
fn gpu_or_nic(sheet: &Sheet, name: &str) -> PciObservation {
    match sheet.gpus.iter().find(|gpu| format!("GPU{}", gpu.index) == name) {
        Some(gpu) => PciObservation { pci: Some(gpu_address(gpu)), kind: PciKind::Gpu, ..switch(Vec::new()) },
        None => nic_device(sheet, None, vec![name.to_owned()]),
    }
}

fn recorded_numa(sheet: &Sheet, name: &str) -> Option<i64> {
    match sheet.gpus.iter().find(|gpu| format!("GPU{}", gpu.index) == name) {
        Some(gpu) => gpu.numa,
        None => sheet.nics.iter().find(|nic| nic.name.as_deref() == Some(name))?.numa,
    }
}
