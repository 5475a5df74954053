//! The walk over hwloc's objects, on a small machine of our own and on a recorded one.

use super::*;
use std::fs;
use std::os::unix::fs::symlink;

use crate::topology::{NodeObservation, PcieLink};

/// Two packages; on the first a switch with two GPUs and a NIC, on the second a GPU on a root port.
const HOST: &str = include_str!("testdata/two-packages.xml");

fn load(xml: &str) -> Topology {
    let builder = Topology::builder().with_io_type_filter(TypeFilter::KeepAll).unwrap();
    builder.from_xml(xml).unwrap().build().unwrap()
}

fn pci(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// Every function of a tree with what is said of it, depth first.
fn functions(host: &HostObservation) -> Vec<(usize, &PciObservation)> {
    fn below<'a>(bridge: usize, devices: &'a [PciObservation], all: &mut Vec<(usize, &'a PciObservation)>) {
        for device in devices {
            all.push((bridge, device));
            below(bridge, &device.devices, all);
        }
    }
    let mut all = Vec::new();
    for (index, bridge) in host.host_bridges.iter().enumerate() {
        below(index, &bridge.devices, &mut all);
    }
    all
}

#[test]
fn ports_gpus_and_nics_come_with_their_places() {
    let host = walk(&load(HOST), &Sysfs::new(Path::new("/nonexistent")));
    let cpu = host.cpu.clone().unwrap();
    assert_eq!((cpu.arch.as_str(), cpu.vendor.as_deref(), cpu.model), ("x86_64", Some("GenuineIntel"), Some(85)));
    let nodes: Vec<_> = host.numa_nodes.iter().map(|node| (node.id.0, node.package, node.cpus.as_str())).collect();
    assert_eq!(nodes, [(0, Some(PackageId(0)), "0-1"), (1, Some(PackageId(1)), "2-3")]);
    let seen: Vec<_> =
        functions(&host).iter().map(|(bridge, seen)| (*bridge, seen.kind, seen.pci.unwrap().to_string())).collect();
    let expected = [
        (0, PciKind::RootPort, "0000:00:02.0"),
        (0, PciKind::UpstreamPort, "0000:01:00.0"),
        (0, PciKind::DownstreamPort, "0000:02:08.0"),
        (0, PciKind::Gpu, "0000:03:00.0"),
        (0, PciKind::DownstreamPort, "0000:02:10.0"),
        (0, PciKind::Gpu, "0000:04:00.0"),
        (0, PciKind::DownstreamPort, "0000:02:14.0"),
        (0, PciKind::Nic, "0000:05:00.0"),
        (1, PciKind::RootPort, "0000:80:02.0"),
        (1, PciKind::Gpu, "0000:81:00.0"),
    ];
    assert_eq!(seen, expected.map(|(bridge, kind, pci)| (bridge, kind, pci.to_owned())));
    let places: Vec<_> = host.host_bridges.iter().map(|bridge| (bridge.numa, bridge.package)).collect();
    assert_eq!(places, [(Some(NumaNodeId(0)), Some(PackageId(0))), (Some(NumaNodeId(1)), Some(PackageId(1)))]);
    let nics: Vec<_> = functions(&host).iter().flat_map(|(_, seen)| seen.nics.clone()).collect();
    let nic = |name: &str, kind| NicObservation { name: name.into(), kind, mbps: None };
    assert_eq!(nics, [nic("mlx5_0", NicKind::Rdma), nic("eth7", NicKind::Ethernet)]);
}

#[test]
fn sysfs_adds_what_links_can_do_and_what_nics_carry() {
    let sys = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = sys.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("bus/pci/devices/0000:03:00.0/max_link_speed", "16.0 GT/s PCIe\n");
    write("bus/pci/devices/0000:03:00.0/max_link_width", "16\n");
    write("bus/pci/devices/0000:03:00.0/numa_node", "0\n");
    write("bus/pci/devices/0000:03:00.0/vendor", "0x10de\n");
    write("bus/pci/devices/0000:03:00.0/class", "0x030200\n");
    write("bus/pci/devices/0000:04:00.0/numa_node", "-1\n");
    write("bus/pci/devices/0000:04:00.0/vendor", "0x10de\n");
    write("bus/pci/devices/0000:04:00.0/class", "0x068000\n");
    write("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n");
    write("class/net/eth7/speed", "-1\n");
    let host = walk(&load(HOST), &Sysfs::new(sys.path()));
    let find = |address: &str| {
        let all = functions(&host);
        all.iter().find(|(_, seen)| seen.pci == Some(pci(address))).map(|(_, seen)| (*seen).clone()).unwrap()
    };
    assert_eq!(find("0000:03:00.0").link, Some(PcieLink { mts: 16_000, width: 16 }));
    assert_eq!(find("0000:03:00.0").numa, Some(NumaNodeId(0)));
    assert_eq!((find("0000:04:00.0").link, find("0000:04:00.0").numa), (None, None));
    let rates: Vec<_> = find("0000:05:00.0").nics.iter().map(|nic| nic.mbps).collect();
    assert_eq!(rates, [Some(200_000), None]);
    let gpus = |sysfs: &Path| PciBus::default().gpus(sysfs);
    assert_eq!(gpus(sys.path()), Some([(pci("0000:03:00.0"), None)].into()), "a GPU, not a switch");
    assert_eq!(gpus(&sys.path().join("nowhere")), None);

    // A virtual function of the card is no card.
    symlink("../0000:05:00.0", sys.path().join("bus/pci/devices/0000:05:00.0-physfn")).unwrap();
    fs::create_dir_all(sys.path().join("bus/pci/devices/0000:05:00.0/physfn")).unwrap();
    let host = walk(&load(HOST), &Sysfs::new(sys.path()));
    assert!(functions(&host).iter().all(|(_, seen)| seen.kind != PciKind::Nic));
}

#[test]
fn this_host_is_read_without_a_failure() {
    let (host, failures) = observe(Path::new("/sys"));
    assert_eq!(failures, []);
    assert!(!host.numa_nodes.is_empty());
    let observed = NodeObservation { gpus: Vec::new(), host, failures, ..NodeObservation::default() };
    assert_eq!(crate::topology::NodeTopology::assemble(&observed).1, []);
}
