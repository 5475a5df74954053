//! Machines of more than 16 GPUs, made up: packages, switches, GPUs, and NVSwitch planes where there are any.

use linkwise::topology::{
    ComputeCapability, CpuObservation, FabricObservation, GpuObservation, HostBridgeObservation, HostObservation,
    NodeObservation, NumaNodeId, NumaNodeObservation, NvLinkObservation, NvLinkRemote, PackageId, PciAddress, PciKind,
    PciObservation, PcieLink,
};

/// The machines the tests and the benchmark speak of: a name, and what would be seen of it.
pub fn all() -> Vec<(&'static str, NodeObservation)> {
    vec![("20 on 5 switches", twenty()), ("32 on 4 packages", thirty_two()), ("64 on 8 planes", sixty_four())]
}

/// Five switches of four GPUs: three on one package, two on the other.
pub fn twenty() -> NodeObservation {
    machine(&[vec![4, 4, 4], vec![4, 4]], None)
}

/// Four packages of eight GPUs, two to a switch; no NVLink.
pub fn thirty_two() -> NodeObservation {
    machine(&[[2; 4]; 4].map(|switches| switches.to_vec()), None)
}

/// Eight NVSwitch planes of eight GPUs, two to a switch, four planes to a package.
pub fn sixty_four() -> NodeObservation {
    machine(&[vec![2; 16], vec![2; 16]], Some(8))
}

/// For each package its switches, each with so many GPUs; a host bridge to a switch. With planes: 18 links of each
/// GPU to the NVSwitches of the plane of its so many neighbours.
fn machine(packages: &[Vec<usize>], plane: Option<usize>) -> NodeObservation {
    let link = Some(PcieLink { mts: 32_000, width: 16 });
    let function = |pci, kind, devices| PciObservation { pci, kind, link, numa: None, nics: Vec::new(), devices };
    let mut gpus = Vec::new();
    let mut host = HostObservation {
        cpu: Some(CpuObservation {
            arch: "x86_64".to_owned(),
            vendor: Some("GenuineIntel".to_owned()),
            family: Some(6),
            model: Some(143),
        }),
        ..HostObservation::default()
    };
    for (package, switches) in (0..).zip(packages) {
        let numa = NumaNodeId(package);
        host.numa_nodes.push(NumaNodeObservation {
            id: numa,
            package: Some(PackageId(package)),
            cpus: package.to_string(),
        });
        for count in switches {
            let mut below = Vec::new();
            for _ in 0..*count {
                let index = gpus.len();
                let pci = PciAddress::new(1, u8::try_from(index).expect("few GPUs"), 0, 0).expect("an address");
                below.push(function(Some(pci), PciKind::Gpu, Vec::new()));
                let clique = plane.map(|plane| u32::try_from(index / plane).expect("few planes"));
                let links =
                    NvLinkObservation { links: (0..18).collect(), remote: NvLinkRemote::Switch(None), active: true };
                gpus.push(GpuObservation {
                    index: u32::try_from(index).expect("few GPUs"),
                    uuid: format!("GPU-{index:02}").parse().expect("a UUID"),
                    pci,
                    model: None,
                    minor: None,
                    compute_capability: Some(ComputeCapability { major: 9, minor: 0 }),
                    memory_mib: None,
                    numa: Some(numa),
                    pcie: link,
                    nvlinks: Some(clique.map(|_| links).into_iter().collect()),
                    c2c: None,
                    display: None,
                    mig: None,
                    fabric: clique.map(|clique| FabricObservation { cluster: "0".to_owned(), clique }),
                    common_ancestors: std::collections::BTreeMap::new(),
                });
            }
            let devices = vec![function(None, PciKind::Switch, below)];
            host.host_bridges.push(HostBridgeObservation {
                numa: Some(numa),
                package: Some(PackageId(package)),
                devices,
            });
        }
    }
    NodeObservation { gpus, host, failures: Vec::new() }
}
