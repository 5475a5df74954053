//! The facts that libhwloc reads of an invented machine and of recorded ones, from XML. Only these tests have libhwloc
//! read XML: with its own parser, or with libxml2's if that plugin is installed.

use super::*;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::{collections::BTreeSet, env, fs};

use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::types::{OSDeviceType, ObjectType};
use linkwise_core::topology::{NicKind, NicObservation, NodeObservation, NumaNodeId, PackageId, PciAddress, PcieLink};

/// Two packages: the first has a switch with two GPUs and a NIC, the second a GPU on a root port.
const HOST: &str = include_str!("../machines/hwloc_xml/testdata/v2.xml");
/// The variable by which libhwloc chooses its parser, once in a process: 0 is its own.
const PARSER: &str = "HWLOC_LIBXML";

fn load(xml: &str) -> Topology {
    parse(xml).unwrap()
}

fn parse(xml: &str) -> Option<Topology> {
    let builder = Topology::builder().with_flags(BuildFlags::INCLUDE_DISALLOWED).ok()?;
    builder.with_io_type_filter(TypeFilter::KeepAll).ok()?.from_xml(xml).ok()?.build().ok()
}

/// The host of a topology with the facts of a sysfs.
fn observed(topology: &Topology, sysfs: &Path) -> HostObservation {
    Sysfs(sysfs.to_owned()).completed(read(topology).unwrap())
}

fn pci(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// Every PCI function of a host with the index of its host bridge, depth first.
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
fn ports_gpus_and_nics_have_their_places() {
    let host = observed(&load(HOST), Path::new("/nonexistent"));
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
    let guid = |guid: &str| guid.parse().unwrap();
    let rdma = NicObservation {
        system_guid: Some(guid("b8ce:f603:00a1:b2c4")),
        port_guids: vec![guid("b8ce:f603:00a1:b2c5")],
        ..NicObservation::new("mlx5_0".to_owned(), NicKind::Rdma)
    };
    assert_eq!(nics, [rdma], "eth7 is IP over this InfiniBand");
}

#[test]
fn sysfs_adds_facts_and_drops_virtual_functions() {
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
    // This speed is implausible, so it counts as unknown.
    write("bus/pci/devices/0000:04:00.0/max_link_speed", "256.0 GT/s PCIe\n");
    write("bus/pci/devices/0000:04:00.0/max_link_width", "16\n");
    write("bus/pci/devices/0000:04:00.0/numa_node", "-1\n");
    write("bus/pci/devices/0000:04:00.0/vendor", "0x10de\n");
    write("bus/pci/devices/0000:04:00.0/class", "0x068000\n");
    write("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
    write("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n");
    write("class/infiniband/mlx5_0/ports/2/state", "1: DOWN\n");
    write("class/infiniband/mlx5_0/ports/2/rate", "10 Gb/sec (4X SDR)\n");
    write("class/net/eth7/speed", "-1\n");
    let host = observed(&load(HOST), sys.path());
    let find = |address: &str| {
        let all = functions(&host);
        all.iter().find(|(_, seen)| seen.pci == Some(pci(address))).map(|(_, seen)| (*seen).clone()).unwrap()
    };
    assert_eq!(find("0000:03:00.0").link, Some(PcieLink { mts: 16_000, width: 16 }));
    assert_eq!(find("0000:03:00.0").numa, Some(NumaNodeId(0)));
    assert_eq!((find("0000:04:00.0").link, find("0000:04:00.0").numa), (None, None));
    let rates: Vec<_> = find("0000:05:00.0").nics.iter().map(|nic| nic.mbps).collect();
    assert_eq!(rates, [Some(200_000)]);
    let gpus = |sysfs: &Path| PciBus::default().gpus(sysfs);
    assert_eq!(gpus(sys.path()), Some([(pci("0000:03:00.0"), None)].into()), "a GPU, not a switch");
    assert_eq!(gpus(&sys.path().join("nowhere")), None);

    // A NIC that is a virtual function does not count.
    symlink("../0000:05:00.0", sys.path().join("bus/pci/devices/0000:05:00.0-physfn")).unwrap();
    fs::create_dir_all(sys.path().join("bus/pci/devices/0000:05:00.0/physfn")).unwrap();
    let host = observed(&load(HOST), sys.path());
    assert!(functions(&host).iter().all(|(_, seen)| seen.kind != PciKind::Nic));
}

#[test]
fn live_host_is_read_without_failure() {
    let (host, failures) = observe(Path::new("/sys"));
    assert_eq!(failures, []);
    assert!(!host.numa_nodes.is_empty());
    let observed = NodeObservation { gpus: Vec::new(), host, failures, ..NodeObservation::default() };
    assert_eq!(linkwise_core::topology::NodeTopology::assemble(&observed).1, []);
}

/// Each file of version 1 or 2 gives the same host before and after libhwloc has read and written it, with the NUMA
/// nodes, NICs and GPUs that libhwloc reports.
#[test]
fn xml_reader_agrees_with_libhwloc() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let invented = ["v1.xml", "v2.xml"].map(|name| manifest.join("src/machines/hwloc_xml/testdata").join(name));
    let recorded = manifest.join("../../../shared/topologies/raw");
    let files: Vec<PathBuf> = match fs::read_dir(&recorded) {
        Ok(entries) => entries.map(|entry| entry.unwrap().path()).collect(),
        Err(_) => {
            eprintln!("skipped: no recorded files in {}", recorded.display());
            Vec::new()
        }
    };
    let is_hwloc = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("hwloc-") && name.ends_with(".xml")
    };
    let mut compared = 0;
    for path in files.into_iter().filter(is_hwloc).chain(invented) {
        // libhwloc's own parser refuses comments.
        let text = fs::read_to_string(&path).unwrap();
        let text: String =
            text.lines().filter(|line| !line.starts_with("<!--")).map(|line| line.to_owned() + "\n").collect();
        if text.contains("<topology version=\"3.0\">") {
            continue;
        }
        let topology = load(&text);
        let is_version_1 = text.contains("<topology>");
        let machine = machines::of_bytes(path.to_str().unwrap(), text.into_bytes()).unwrap();
        let (mut read, host) = (machine.observed.host, observed(&topology, Path::new("/nonexistent")));
        if is_version_1 {
            // libhwloc loses the package of a NUMA node with offline CPUs.
            let lost = |host: &HostObservation| host.numa_nodes.iter().all(|node| node.package.is_none());
            if lost(&host) {
                read.numa_nodes.iter_mut().for_each(|node| node.package = None);
                read.host_bridges.iter_mut().for_each(|bridge| bridge.package = None);
            }
        }
        assert!(read == host, "{}: {read:?}, by libhwloc {host:?}", path.display());
        let known: BTreeSet<_> =
            topology.objects_with_type(ObjectType::NUMANode).map(|node| node.os_index().unwrap()).collect();
        let nodes: BTreeSet<_> = host.numa_nodes.iter().map(|node| usize::try_from(node.id.0).unwrap()).collect();
        let nics = functions(&host).into_iter().flat_map(|(_, seen)| &seen.nics);
        for nic in nics {
            let of_nic = |object: &&TopologyObject| object.name().is_some_and(|name| name.to_str() == Ok(&nic.name));
            let found = topology.objects_with_type(ObjectType::OSDevice).find(of_nic).and_then(|it| it.attributes());
            let Some(ObjectAttributes::OSDevice(device)) = found else { panic!("{}: {nic:?}", path.display()) };
            let is_rdma = device.device_type() == OSDeviceType::OpenFabrics;
            assert_eq!(is_rdma, nic.kind == NicKind::Rdma, "{}: {nic:?}", path.display());
        }
        assert_eq!(nodes, known, "{}", path.display());
        let mut gpus: Vec<PciAddress> = topology
            .pci_devices()
            .filter_map(|object| match object.attributes() {
                Some(ObjectAttributes::PCIDevice(pci)) if pci.vendor_id() == 0x10de && pci.class_id() >> 8 == 0x03 => {
                    PciAddress::new(u32::from(pci.domain()), pci.bus_id(), pci.bus_device(), pci.function())
                }
                _ => None,
            })
            .collect();
        gpus.sort_unstable();
        let mut read: Vec<PciAddress> = machine.observed.gpus.iter().map(|gpu| gpu.pci).collect();
        read.sort_unstable();
        assert_eq!(read, gpus, "{}", path.display());
        compared += 1;
    }
    assert!(compared >= 2);
}

/// Runs this module's tests again under each parser.
#[test]
fn tests_pass_under_each_xml_parser() {
    for choice in ["0", "1"] {
        let mut tests = Command::new(env::current_exe().unwrap());
        let output = tests
            .args(["hwloc::tests::", "--skip", "each_xml_parser", "--nocapture"])
            .env(PARSER, choice)
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{PARSER}={choice}:\n{printed}");
        printed
            .lines()
            .filter(|line| line.contains("skipped:"))
            .for_each(|line| eprintln!("{PARSER}={choice}: {line}"));
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "libhwloc reads this variable")]
fn environment_chooses_xml_parser() {
    let libxml2 =
        parse(&HOST.replacen("<topology", "<!-- a comment, which only libxml2 takes -->\n<topology", 1)).is_some();
    match env::var(PARSER).as_deref() {
        Ok("0") => assert!(!libxml2, "not libhwloc's own parser"),
        Ok("1") if !libxml2 => eprintln!("skipped: libxml2's plugin (package libhwloc-plugins) is not installed"),
        _ => {}
    }
}
