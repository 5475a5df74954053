//! Invented machines of more than 16 GPUs on packages and PCIe switches; some have NVSwitch planes or NVLink meshes.

use linkwise_core::topology::{
    ComputeCapability, CpuObservation, FabricObservation, GpuObservation, HostBridgeObservation, HostObservation,
    NodeObservation, NumaNodeId, NumaNodeObservation, NvLinkObservation, NvLinkRemote, PackageId, PciAddress, PciKind,
    PciObservation, PcieLink,
};

/// The machines of the tests and benchmarks: a name, and the observation of the machine.
pub fn all() -> Vec<(&'static str, NodeObservation)> {
    vec![
        ("20 on 5 switches", twenty()),
        ("32 on 4 packages", thirty_two()),
        ("64 on 8 planes", sixty_four()),
        ("24 in 3 cube meshes", twenty_four()),
        ("32 in a hypercube", hypercube(&[[2; 4]; 4].map(|switches| switches.to_vec()))),
        ("64 in a hypercube", hypercube(&[vec![2; 16], vec![2; 16]])),
    ]
}

/// Five PCIe switches of four GPUs: three on one package, two on the other.
pub fn twenty() -> NodeObservation {
    machine(&[vec![4, 4, 4], vec![4, 4]], None)
}

/// Four packages of eight GPUs, two to a PCIe switch; no NVLink.
pub fn thirty_two() -> NodeObservation {
    machine(&[[2; 4]; 4].map(|switches| switches.to_vec()), None)
}

/// Eight NVSwitch planes of eight GPUs, two GPUs to a PCIe switch, four planes to a package.
pub fn sixty_four() -> NodeObservation {
    machine(&[vec![2; 16], vec![2; 16]], Some(8))
}

/// Three hybrid cube meshes like that of a DGX-1 with V100s, on two packages each: six links for each GPU.
fn twenty_four() -> NodeObservation {
    /// NVLinks between the GPUs of one mesh, by `nvidia-smi topo -m` of a DGX-1 with V100s.
    const LINKS: [[u32; 8]; 8] = [
        [0, 1, 1, 2, 2, 0, 0, 0],
        [1, 0, 2, 1, 0, 2, 0, 0],
        [1, 2, 0, 2, 0, 0, 1, 0],
        [2, 1, 2, 0, 0, 0, 0, 1],
        [2, 0, 0, 0, 0, 1, 1, 2],
        [0, 2, 0, 0, 1, 0, 2, 1],
        [0, 0, 1, 0, 1, 2, 0, 2],
        [0, 0, 0, 1, 2, 1, 2, 0],
    ];
    let mut observed = machine(&[[2; 2]; 6].map(|switches| switches.to_vec()), None);
    join(&mut observed, |one, two| if one / 8 == two / 8 { LINKS[one % 8][two % 8] } else { 0 });
    observed
}

/// A hypercube: one NVLink between GPUs whose numbers differ in one bit.
fn hypercube(packages: &[Vec<usize>]) -> NodeObservation {
    let mut observed = machine(packages, None);
    join(&mut observed, |one, two| u32::from((one ^ two).is_power_of_two()));
    observed
}

/// Makes the GPUs Volta, and joins each pair by `links` NVLinks.
fn join(observed: &mut NodeObservation, links: impl Fn(usize, usize) -> u32) {
    let addresses: Vec<PciAddress> = observed.gpus.iter().map(|gpu| gpu.pci).collect();
    for (index, gpu) in observed.gpus.iter_mut().enumerate() {
        let mut next = 0;
        let remotes = addresses.iter().enumerate().filter_map(|(other, pci)| {
            let first = next;
            next += links(index, other);
            (next > first).then(|| NvLinkObservation {
                links: (first..next).collect(),
                remote: NvLinkRemote::Gpu(*pci),
                active: true,
            })
        });
        gpu.nvlinks = Some(remotes.collect());
        gpu.compute_capability = Some(ComputeCapability { major: 7, minor: 0 });
    }
}

/// A machine of packages, each a list of the numbers of GPUs at its PCIe switches; each switch has a host bridge. With
/// `plane_size`, each GPU has 18 links to the NVSwitches of a plane of that many GPUs.
fn machine(packages: &[Vec<usize>], plane_size: Option<usize>) -> NodeObservation {
    let link = Some(PcieLink { mts: 32_000, width: 16 });
    let function =
        |pci, kind, devices| PciObservation { pci, kind, class: None, link, numa: None, nics: Vec::new(), devices };
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
                let clique = plane_size.map(|size| u32::try_from(index / size).expect("few planes"));
                let links =
                    NvLinkObservation { links: (0..18).collect(), remote: NvLinkRemote::Switch(None), active: true };
                gpus.push(GpuObservation {
                    compute_capability: Some(ComputeCapability { major: 9, minor: 0 }),
                    numa: Some(numa),
                    pcie: link,
                    nvlinks: Some(clique.map(|_| links).into_iter().collect()),
                    fabric: clique.map(|clique| FabricObservation { cluster: "0".to_owned(), clique }),
                    ..GpuObservation::new(
                        u32::try_from(index).expect("few GPUs"),
                        format!("GPU-{index:02}").parse().expect("a UUID"),
                        pci,
                    )
                });
            }
            let devices = vec![function(None, PciKind::Switch, below)];
            host.host_bridges.push(HostBridgeObservation {
                numa: Some(numa),
                package: Some(PackageId(package)),
                root: None,
                devices,
            });
        }
    }
    NodeObservation { gpus, host, ..NodeObservation::default() }
}
