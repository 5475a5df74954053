//! One invented machine in the form of each version of hwloc's XML, and faulty files.

use super::*;
use crate::machines::of_bytes;
use linkwise_core::topology::{NodeTopology, TopologyWarning};

/// Two packages: the first has a switch with two GPUs and a NIC, the second a GPU on a root port.
const V1: &str = include_str!("testdata/v1.xml");
const V2: &str = include_str!("testdata/v2.xml");
const V3: &str = include_str!("testdata/v3.xml");

fn machine(text: &str) -> Machine {
    read(text).unwrap()
}

fn read(text: &str) -> Result<Machine, XmlError> {
    parse("x", xml::document(text)?.root_element())
}

fn warnings(text: &str) -> Vec<String> {
    NodeTopology::assemble(&machine(text).observed).1.iter().map(ToString::to_string).collect()
}

/// A machine with one package, two NUMA nodes and a host bridge with these objects below it.
fn with_devices(devices: &str) -> String {
    let nodes =
        "<object type='NUMANode' os_index='0' cpuset='0x1'/><object type='NUMANode' os_index='1' cpuset='0x2'/>";
    let bridge = format!("<object type='Bridge' bridge_type='0-1'>\n{devices}</object>");
    format!(
        "<topology version='3.0'><object type='Machine'><object type='Package' os_index='0' nodeset='0x3'>{nodes}\n\
         {bridge}</object></object></topology>"
    )
}

#[test]
fn host_and_gpus_are_read() {
    let Machine { observed: NodeObservation { gpus, host, failures, .. }, .. } = machine(V2);
    assert_eq!(failures, []);
    let cpu = host.cpu.clone().unwrap();
    assert_eq!((cpu.arch.as_str(), cpu.vendor.as_deref()), ("x86_64", Some("GenuineIntel")));
    assert_eq!((cpu.family, cpu.model), (Some(6), Some(85)));
    let seen: Vec<_> = gpus.iter().map(|gpu| (gpu.index, gpu.pci.to_string(), gpu.uuid.to_string())).collect();
    let expected = [(0, "0000:04:00.0"), (1, "0000:03:00.0"), (2, "0000:81:00.0")];
    let uuid = |index: u32| format!("GPU-{index}0000000-0000-4000-8000-000000000000");
    assert_eq!(seen, expected.map(|(index, pci)| (index, pci.to_owned(), uuid(index))), "in NVML's order");
    assert!(gpus.iter().all(|gpu| gpu.model.as_deref() == Some("Tesla V100-SXM3-32GB")));
    let (topology, warnings) =
        NodeTopology::assemble(&NodeObservation { gpus, host, failures, ..NodeObservation::default() });
    // hwloc records no NVLinks, and the third GPU is odd because only it has no NIC near it.
    assert!(
        matches!(warnings.as_slice(), [TopologyWarning::NvLinksUnknown(all), TopologyWarning::OddGpu { pci, .. }]
            if all.len() == 3 && pci.to_string() == "0000:81:00.0"),
        "{warnings:?}"
    );
    assert_eq!([topology.symbol(0, 1), topology.symbol(0, 2)], ["PIX", "SYS"]);
}

#[test]
fn each_version_of_a_machine_reads_the_same() {
    for (version, text) in [(1, V1), (3, V3)] {
        assert_eq!(machine(text).observed, machine(V2).observed, "version {version}");
    }
}

#[test]
fn single_numa_node_places_no_host_bridge() {
    let node = |index: u32| format!("<object type='NUMANode' os_index='{index}' cpuset='0x{index}' nodeset='0x1'/>");
    let device = "<object type='Bridge' bridge_type='0-1'><object type='PCIDev' pci_busid='0000:03:00.0' \
                  pci_type='0302 [10de:1db4]'/></object>";
    let host = |nodes: &str| {
        machine(&format!(
            "<topology><object type='Machine' nodeset='0x1' cpuset='0x0000000f,,0x0'>{nodes}{device}</object>\
             </topology>"
        ))
        .observed
        .host
    };
    assert_eq!(host(&node(1)).host_bridges[0].numa, None);
    assert_eq!(host(&(node(1) + &node(2))).host_bridges[0].numa, Some(NumaNodeId(0)));
    let none = host("");
    assert_eq!((none.host_bridges[0].numa, none.numa_nodes.len()), (None, 1), "version 1 without NUMA nodes");
    assert_eq!((none.numa_nodes[0].id, none.numa_nodes[0].cpus.as_str()), (NumaNodeId(0), "64-67"));
}

#[test]
fn odd_objects_become_warnings_with_their_line() {
    let gpu = |busid: &str| format!("<object type='PCIDev' {busid} pci_type='0302 [10de:1db4]'/>");
    let at = gpu("pci_busid='0000:03:00.0'");
    let node = "<object type='NUMANode'/>";
    let deep = "<object type='Bridge' bridge_type='1-1' pci_busid='0000:01:00.0'>".repeat(MAX_BRIDGES + 1);
    let deep = deep + &at + &"</object>".repeat(MAX_BRIDGES + 1);
    for (text, words) in [
        (with_devices(&gpu("")), "line 3: object: a GPU without a PCI address; left out"),
        (with_devices(&gpu("pci_busid='x'")), "a GPU without a PCI address; left out"),
        (with_devices(&at.repeat(2)), "another GPU at this PCI address; the first is kept"),
        (with_devices(&deep), "bridges nest deeper than 24; left out"),
        (V3.replace("<object type=\"Core\"", &format!("{node}<object type=\"Core\"")), "without a number; left out"),
    ] {
        let warnings = warnings(&text);
        assert!(warnings.iter().any(|warning| warning.contains(words)), "{words}: {warnings:#?}");
    }
}

#[test]
fn unreadable_files_are_refused_in_one_line() {
    let later = V3.replacen("version=\"3.0\"", "version=\"4.1\"", 1);
    let nested = format!(
        "<topology version='3.0'>{}",
        "<object type='Machine'>".repeat(1 << 10) + &"</object>".repeat(1 << 10) + "</topology>"
    );
    for (text, words) in [
        (later.as_str(), "line 4: hwloc XML version '4.1' is not known (this build reads versions 1 to 3)"),
        ("<topology version=\"words\"/>", "'words'"),
        ("<topology version=\"2.0\"/>", "no Machine object"),
        ("<topology version=\"2.0\"><object/></topology>", "no Machine object"),
        ("<topology>\n<object type=\"Machine\">", "line 2: the text ends before its elements are closed"),
        (nested.as_str(), "elements nest deeper than 128"),
    ] {
        let message = of_bytes("dumps/field.xml", text.as_bytes().to_vec()).unwrap_err().to_string();
        let kind = if words.contains("text ends") { "XML file" } else { "hwloc XML" };
        assert!(message.starts_with(&format!("{kind} 'dumps/field.xml': line ")), "{message}");
        assert!(message.contains(words) && !message.contains('\n'), "{words}: {message}");
    }
    for cut in (0..V3.len() - 20).step_by(97).filter_map(|cut| V3.get(..cut)) {
        assert!(!read(cut).unwrap_err().to_string().contains('\n'));
    }
}
