//! Invented dumps of NCCL: their content is read, and an oddity becomes a warning with its line.

use super::*;
use linkwise_core::topology::{NicKind, NodeTopology, NvLinkRemote, PciKind, TopologyWarning};

/// A dump in NCCL's form: two NUMA nodes, a switch with two GPUs and a NIC's switch, and a GPU without a switch.
const DUMP: &str = include_str!("testdata/dump.xml");
/// A file in the form of cloud vendors: an invented switch, no gpu elements, PCI domains, EFA, InfiniBand and Ethernet.
const CLOUD: &str = include_str!("testdata/cloud.xml");

fn machine(text: &str) -> Machine {
    read(text).unwrap()
}

fn read(text: &str) -> Result<Machine, XmlError> {
    parse("x", xml::document(text)?.root_element())
}

/// The warnings about a text that starts on line 2, inside `<system version="1">`.
fn notes(inner: &str) -> Vec<String> {
    let machine = machine(&format!("<system version=\"1\">\n{inner}\n</system>"));
    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    assert_eq!(topology.gpus().len(), machine.observed.gpus.len());
    let lines: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    assert!(lines.iter().all(|line| !line.contains('\n') && line.len() < 400), "{lines:?}");
    lines
}

fn check(inner: &str, words: &[&str]) {
    let notes = notes(inner);
    assert!(notes.iter().any(|note| words.iter().all(|word| note.contains(word))), "{words:?} not in {notes:#?}");
}

fn symbols(topology: &NodeTopology) -> Vec<String> {
    let count = topology.gpus().len();
    (0..count).map(|a| (0..count).map(|b| topology.symbol(a, b)).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn dump_becomes_machine() {
    let machine = machine(DUMP);
    let notes: Vec<_> = machine.observed.failures.iter().map(|note| note.error.as_str()).collect();
    assert_eq!(notes, ["a NIC without a PCI function is virtual; left out"]);
    let host = &machine.observed.host;
    let cpu = host.cpu.clone().unwrap();
    assert_eq!((cpu.arch.as_str(), cpu.vendor.as_deref()), ("x86_64", Some("AuthenticAMD")));
    assert_eq!((cpu.family, cpu.model), (Some(25), Some(1)), "175 is 15 + 16 × 10 in CPUID's fields");
    let nodes: Vec<_> = host.numa_nodes.iter().map(|node| (node.id.0, node.package, node.cpus.as_str())).collect();
    assert_eq!(nodes, [(0, None, "0-15,32-47"), (1, None, "16-31,48-63")]);

    let gpus: Vec<_> = machine.observed.gpus.iter().map(|gpu| (gpu.index, gpu.pci.to_string())).collect();
    let expected = [(0, "0000:03:00.0"), (1, "0000:04:00.0"), (2, "0001:81:00.0")];
    assert_eq!(gpus, expected.map(|(index, pci)| (index, pci.to_owned())));
    let links = |gpu: usize| {
        let links = machine.observed.gpus[gpu].nvlinks.clone().unwrap();
        links.into_iter().map(|group| (group.links, group.remote)).collect::<Vec<_>>()
    };
    let pci = |text: &str| text.parse().unwrap();
    assert_eq!(links(0), [(vec![0, 1, 2, 3], NvLinkRemote::Gpu(pci("0000:04:00.0"))), (vec![4], NvLinkRemote::Cpu)]);
    assert_eq!(links(1), [(vec![0, 1, 2, 3], NvLinkRemote::Gpu(pci("0000:03:00.0")))]);
    let switches = [NvLinkRemote::Switch(Some(pci("0000:0a:00.0"))), NvLinkRemote::Switch(None)];
    assert_eq!(links(2), [(vec![0, 1], switches[0]), (vec![2], switches[1])]);
    let capability = |gpu: usize| machine.observed.gpus[gpu].compute_capability.map(String::from).unwrap();
    assert_eq!([capability(0), capability(1), capability(2)], ["8.0", "10.3", "9.0"]);

    assert_eq!(machine.observed.gpus.iter().map(|gpu| gpu.c2c).collect::<Vec<_>>(), [None, Some(true), None]);

    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    assert!(matches!(warnings.as_slice(), [TopologyWarning::Probe(_)]), "the virtual NIC alone: {warnings:?}");
    assert_eq!(symbols(&topology), ["X NV4 SYS", "NV4 X SYS", "SYS SYS X"]);
    assert_eq!(topology.rank(0, 1).symbol(), "PIX");
    assert_eq!(topology.pcie(0, 1), 24_000, "16 GT/s x16");
    let nics: Vec<_> = topology.nics().iter().map(|nic| (nic.names.join("+"), nic.kind, nic.mbps)).collect();
    let expected = [("mlx5_0+mlx5_1", NicKind::Rdma, Some(400_000))];
    assert_eq!(nics, expected.map(|(name, kind, mbps)| (name.to_owned(), kind, mbps)));
    let ranks = |nic: usize| topology.nics()[nic].level.iter().map(|rank| rank.symbol()).collect::<Vec<_>>();
    assert_eq!(ranks(0), ["PXB", "PXB", "SYS"], "the NIC is below another switch than the GPUs");
}

#[test]
fn cloud_file_is_read_by_pci_class() {
    let machine = machine(CLOUD);
    let notes: Vec<_> = machine.observed.failures.iter().map(|note| note.error.as_str()).collect();
    assert!(matches!(notes[..], [links] if links.contains("NVLinks are unknown")), "{notes:?}");
    let gpus: Vec<_> = machine.observed.gpus.iter().map(|gpu| (gpu.index, gpu.pci.to_string())).collect();
    let expected = ["0001:00:00.0", "0002:00:00.0", "0003:00:00.0"];
    assert_eq!(gpus, [0, 1, 2].map(|index| (index, expected[usize::try_from(index).unwrap()].to_owned())));
    assert!(machine.observed.gpus.iter().all(|gpu| gpu.nvlinks.is_none() && gpu.compute_capability.is_none()));
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    assert_eq!(symbols(&topology), ["X SYS SYS", "SYS X PIX", "SYS PIX X"]);
    let nics: Vec<_> = topology.nics().iter().map(|nic| (nic.names.join("+"), nic.kind)).collect();
    let expected =
        [("0000:10:1b.0", NicKind::Rdma), ("0101:00:00.0", NicKind::Rdma), ("0102:00:00.0", NicKind::Ethernet)];
    assert_eq!(nics, expected.map(|(name, kind)| (name.to_owned(), kind)));
    let ranks = |nic: usize| topology.nics()[nic].level.iter().map(|rank| rank.symbol()).collect::<Vec<_>>();
    assert_eq!(ranks(1), ["NODE", "SYS", "SYS"], "beside the first GPU on one CPU");
    assert!(machine.reconstructed.iter().any(|line| line.contains("PCI class")));
}

#[test]
fn dump_can_be_written_as_node_file() {
    for text in [DUMP, CLOUD, "<system/>"] {
        let machine = machine(text);
        assert_eq!(Machine::parse(&machine.to_yaml().unwrap()).unwrap(), machine);
    }
}

/// A GPU at an address, with these elements in it.
fn gpu(pci: &str, dev: u32, inner: &str) -> String {
    format!(
        "<cpu numaid='0'>\n<pci busid='{pci}' class='0x030200'>\n<gpu dev='{dev}' sm='80'>\n{inner}\n</gpu></pci></cpu>"
    )
}

#[test]
fn invalid_links_warn() {
    let one = |link: &str| gpu("0000:01:00.0", 0, link);
    check(&one("<nvlink target='0000:01:00.0' count='12' tclass='0x030200'/>"), &["lead to itself"]);
    check(&one("<nvlink target='0000:02:00.0' count='4' tclass='0x030200'/>"), &["no GPU of this node"]);
    check(&one("<nvlink target='0000:02:00.0' count='4'/>"), &["line 5", "0000:02:00.0, of class unknown"]);
    check(&one("<nvlink target='0000:02:00.0' count='4' tclass='0x010802'/>"), &["line 5", "0x010802"]);
    check(&one("<nvlink target='?' count='4' tclass='0x030200'/>"), &["line 5", "?"]);
    check(&one("<nvlink count='4' tclass='0x030200'/>"), &["line 5", "nowhere"]);
    for count in ["0", "65", "4294967295", "99999999999", "-1", "x", ""] {
        check(&one(&format!("<nvlink target='0000:02:00.0' count='{count}' tclass='0x068000'/>")), &["line 5", count]);
    }
    check(&one("<nvlink target='0000:02:00.0' tclass='0x068000'/>"), &["line 5", "none is not a number of links"]);
    let many = "<nvlink target='0000:02:00.0' count='60' tclass='0x068000'/>\n".repeat(1000);
    let links = machine(&format!("<system>{}</system>", one(&many))).observed.gpus[0].nvlinks.clone().unwrap();
    assert_eq!(links.iter().map(|group| group.links.len()).sum::<usize>(), 60);

    let sided = one("<nvlink target='0000:02:00.0' count='4' tclass='0x030200'/>") + &gpu("0000:02:00.0", 1, "");
    check(&sided, &["4 NVLink(s) seen from one end, 0 from the other"]);
    let untyped = one("<nvlink target='0000:02:00.0' count='4'/>")
        + &gpu("0000:02:00.0", 1, "<nvlink target='0000:01:00.0' count='4'/>");
    assert!(notes(&untyped).iter().all(|note| !note.contains("NVLink")), "a target that is a GPU needs no class");
}

#[test]
fn missing_and_unexpected_content_warns() {
    let cpu = |inner: &str| format!("<cpu numaid='0'>\n{inner}\n</cpu>");
    for (inner, words) in [
        (cpu("<pci class='0x030200'/>"), &["line 3", "pci", "without a busid"][..]),
        (cpu("<pci class='0x030200'/>"), &["GPU without a PCI address; left out"]),
        (cpu("<pci busid='zz' class='0x030200'/>"), &["line 3", "'zz' is not a PCI address"]),
        (cpu("<pci busid='0000:01:00.0'/>"), &["line 3", "pci 0000:01:00.0", "without a class"]),
        (cpu("<pci busid='0000:01:00.0' class='0x010802'/>"), &["class 0x010802 is neither"]),
        (
            cpu("<pci busid='0000:01:00.0' class='junk'><pci busid='0000:02:00.0' class='0x0302'/></pci>"),
            &["junk", "taken as a switch"],
        ),
        (cpu("<pci busid='0000:01:00.0' class='0x0302' link_speed='x' link_width='16'/>"), &["'x' is not a speed"]),
        (
            cpu("<pci busid='0000:01:00.0' class='0x0302' link_speed='8 GT/s' link_width='wide'/>"),
            &["'wide' is not a number"],
        ),
        (cpu("<pci busid='0000:01:00.0' class='0x0302'><gpu sm='80'/></pci>"), &["without a dev"]),
        (
            cpu("<pci busid='0000:01:00.0' class='0x0302'><gpu dev='0' sm='eighty'/></pci>"),
            &["sm 'eighty' is not a number"],
        ),
        (cpu("<pci busid='0000:01:00.0' class='0x0200'><nic><net speed='1'/></nic></pci>"), &["net", "without a name"]),
        (cpu("<gpu dev='0'/>"), &["line 3", "not expected below <cpu>"]),
        (cpu("<blob/>"), &["line 3", "blob", "not expected"]),
        ("<cpu/>".to_owned(), &["line 2", "without a numaid"]),
        ("<cpu numaid='two'/>".to_owned(), &["'two' is not a number"]),
        ("<cpu numaid='0' affinity='xyz'/>".to_owned(), &["'xyz' is not a CPU mask"]),
        ("<cpu numaid='0'/>\n<cpu numaid='0'/>".to_owned(), &["line 3", "NUMA node 0 twice"]),
        (
            "<cpu numaid='0' arch='x86_64'/>\n<cpu numaid='1' arch='arm64'/>".to_owned(),
            &["line 3", "the processor model differs"],
        ),
        ("<pci busid='0000:01:00.0'/>".to_owned(), &["line 2", "not expected below <system>"]),
        (gpu("0000:01:00.0", 0, "") + &gpu("0000:01:00.0", 1, ""), &["another GPU at this PCI address"]),
        (gpu("0000:01:00.0", 3, "") + &gpu("0000:02:00.0", 3, ""), &["another GPU has dev 3 too"]),
        (String::new(), &["line 1", "no GPU in the dump", "NCCL_TOPO_DUMP_FILE"]),
    ] {
        check(&inner, words);
    }
    check(&"<blob/>".repeat(200), &["line 2", "blob", "199 more like it"]);
    let many: String = (0..200).map(|n| format!("<cpu numaid='{n}' affinity='x{n}'/>")).collect();
    check(&many, &["151 more, of other kinds"]);
    assert!(notes(&many).len() < 60);
}

#[test]
fn other_hosts_of_multi_node_dump_are_dropped() {
    let host = |hash: &str| gpu("0000:01:00.0", 0, "").replace("numaid", &format!("host_hash='{hash}' numaid"));
    let two = host("0x1") + "\n" + &host("0x2");
    check(&two, &["line 7", "another host"]);
    assert_eq!(notes(&two).len(), 1);
}

#[test]
fn unknown_stays_unknown() {
    let text = "<system version='1'><cpu numaid='-1'>\
        <pci busid='0000:01:00.0' class='0x03' link_speed='' link_width='0'/>\
        <pci busid='0000:02:00.0' class='0x030000' vendor='0x1a03'/>\
        <pci busid='0000:03:00.0' class='0x060400'/><pci busid='0000:04:00.0' class='0x068000'/>\
        <pci busid='0000:05:00.0' class='0x030200' link_speed='2.5 GT/s PCIe' link_width='1'/>\
        <pci busid='0000:06:00.0' class='0x020000'><nic><net name='eth0' dev='0' speed='4294967295'/></nic></pci>\
        </cpu></system>";
    let machine = machine(text);
    assert_eq!(machine.observed.failures.len(), 1, "NVLinks only: {:?}", machine.observed.failures);
    assert_eq!(machine.observed.host.numa_nodes, []);
    assert_eq!(machine.observed.host.cpu, None);
    let kinds: Vec<_> =
        machine.observed.host.host_bridges.iter().map(|bridge| (bridge.numa, bridge.devices[0].kind)).collect();
    let expected = [(None, PciKind::Gpu), (None, PciKind::Gpu), (None, PciKind::Nic)];
    assert_eq!(kinds, expected, "VGA of another vendor and empty switches are dropped");
    assert_eq!(machine.observed.host.host_bridges[2].devices[0].nics[0].mbps, None);
    assert_eq!(machine.observed.gpus[0].pcie, None);
    let slow = machine.observed.gpus[1].pcie.unwrap();
    assert_eq!((slow.mts, slow.width), (2_500, 1), "a raw fact, which the topology treats as unknown");
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    assert_eq!(symbols(&topology), ["X SYS", "SYS X"]);
    assert_eq!(topology.pcie(0, 1), 10_000);
}
