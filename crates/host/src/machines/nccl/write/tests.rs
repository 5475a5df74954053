//! The reader of dumps reads a written file back to the same graph. The reader's own tests use dumps that NCCL wrote.

use super::*;
use crate::machines::{Machine, XmlError, built_in, load, nccl, xml};
use linkwise_core::topology::{Nic, ProbeFailure};

fn read(text: &str) -> Machine {
    let read = || -> Result<Machine, XmlError> { nccl::parse("written", xml::document(text)?.root_element()) };
    read().unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn graph(observed: &NodeObservation) -> NodeTopology {
    NodeTopology::assemble(observed).0
}

/// The part of a pair's rank that a dump can express: it has no host bridges and no packages, and a GPU on no NUMA node
/// may be anywhere.
fn expressed(rank: Rank, nodes: [Option<NumaNodeId>; 2]) -> &'static str {
    match rank {
        _ if rank < Rank::HOST_BRIDGE => rank.symbol(),
        _ if nodes == [None, None] => "far",
        Rank::HOST_BRIDGE => "NODE",
        _ => rank.symbol(),
    }
}

fn expressed_for_gpus(graph: &NodeTopology, a: usize, b: usize) -> &'static str {
    expressed(graph.rank(a, b), [a, b].map(|gpu| graph.gpus()[gpu].numa))
}

/// Compares the parts that a topology file can express.
fn same(name: &str, ours: &NodeTopology, theirs: &NodeTopology) {
    let addresses = |graph: &NodeTopology| graph.gpus().iter().map(|gpu| gpu.pci).collect::<Vec<_>>();
    assert_eq!(addresses(ours), addresses(theirs), "{name}");
    for (a, (our, their)) in ours.gpus().iter().zip(theirs.gpus()).enumerate() {
        assert_eq!(numa(our), their.numa, "{name}: GPU {a}");
        assert_eq!(our.nvswitch_port, their.nvswitch_port, "{name}: GPU {a}");
        assert_eq!(our.nvswitch_plane, their.nvswitch_plane, "{name}: GPU {a}");
        for b in 0..a {
            let pair = format!("{name}: GPUs {b} and {a}");
            assert_eq!(ours.nvlink_count(a, b), theirs.nvlink_count(a, b), "{pair}");
            assert_eq!(ours.nvlink(a, b), theirs.nvlink(a, b), "{pair}");
            assert_eq!(expressed_for_gpus(ours, a, b), expressed_for_gpus(theirs, a, b), "{pair}");
            // Within a package a path has no upper limit; without packages it has one.
            if ours.rank(a, b).number() != 4 && expressed_for_gpus(ours, a, b) != "far" {
                assert_eq!(ours.pcie(a, b), theirs.pcie(a, b), "{pair}");
            }
        }
    }
    let nics = |graph: &NodeTopology| {
        let level = |nic: &Nic| {
            let ranks = nic.level.iter().zip(graph.gpus());
            ranks.map(|(rank, gpu)| expressed(*rank, [nic.numa, gpu.numa])).collect::<Vec<_>>()
        };
        graph.nics().iter().filter_map(|nic| Some((nic.pci?, (nic.kind, level(nic))))).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(nics(ours), nics(theirs), "{name}");
}

/// Checks that the reader only had to number the GPUs: a file for NCCL has no `dev`.
fn only_unnumbered(machine: &Machine) {
    let odd = |failure: &&ProbeFailure| !failure.error.starts_with("without a dev");
    assert_eq!(machine.observed.failures.iter().find(odd), None);
}

#[test]
fn built_in_machines_read_back_to_same_graph() {
    for name in built_in().map(|machine| machine.name) {
        let observed = load(name).unwrap().observed;
        let text = topology_file(&observed);
        let again = read(&text);
        only_unnumbered(&again);
        same(name, &graph(&observed), &graph(&again.observed));
        assert_eq!(
            again.observed.host.cpu,
            observed.host.cpu.filter(|cpu| cpu.vendor.is_some()).or(again.observed.host.cpu.clone()),
            "{name}"
        );
        assert_eq!(topology_file(&again.observed), text, "{name}: written again");
        assert!(!text.contains("dev="), "{name}: indices are a container's own");
    }
}

#[test]
fn hidden_gpus_are_placed_by_nvml_levels() {
    for name in built_in().map(|machine| machine.name) {
        let mut observed = load(name).unwrap().observed;
        let whole = graph(&observed);
        // The host has no PCI tree, as in a VM; levels and NUMA nodes come from NVML.
        observed.host.host_bridges.clear();
        let places: BTreeMap<PciAddress, usize> =
            whole.gpus().iter().enumerate().map(|(place, gpu)| (gpu.pci, place)).collect();
        let levels = [
            TopologyLevel::Single,
            TopologyLevel::Multiple,
            TopologyLevel::HostBridge,
            TopologyLevel::Node,
            TopologyLevel::System,
            TopologyLevel::System,
        ];
        let all: Vec<(u32, usize)> = observed.gpus.iter().map(|gpu| (gpu.index, places[&gpu.pci])).collect();
        for gpu in &mut observed.gpus {
            let own = places[&gpu.pci];
            gpu.numa = numa(&whole.gpus()[own]);
            let others = all.iter().filter(|(_, place)| *place != own);
            let level = |place: usize| levels[usize::from(whole.rank(own, place).number())];
            gpu.common_ancestors = others.map(|(index, place)| (*index, level(*place))).collect();
        }
        let text = topology_file(&observed);
        let again = graph(&read(&text).observed);
        let symbols = |graph: &NodeTopology| {
            let pairs = (0..graph.gpus().len()).flat_map(|a| (0..a).map(move |b| (a, b)));
            pairs.map(|(a, b)| expressed_for_gpus(graph, a, b)).collect::<Vec<_>>()
        };
        assert_eq!(symbols(&again), symbols(&whole), "{name}\n{text}");
    }
}

#[test]
fn unknown_facts_are_left_to_nccl() {
    let gpu = "{index: 0, uuid: GPU-a, pci: '0000:01:00.0', compute_capability: '9.0'";
    let written = |rest: &str| topology_file(&serde_saphyr::from_str(&format!("gpus: [{gpu}{rest}}}]\n")).unwrap());
    let text = |gpu: &str| format!("<system version=\"1\">\n  <cpu numaid=\"-1\">\n{gpu}  </cpu>\n</system>\n");
    let pci = "    <pci busid=\"0000:01:00.0\" class=\"0x030200\"";
    assert_eq!(written(""), text(&format!("{pci}/>\n")), "its links are unknown: no gpu, or it would have none");
    let links = ", nvlinks: [{links: [0], remote: unknown}, {links: [1], remote: {switch: null}, active: false}]";
    assert_eq!(written(links), text(&format!("{pci}>\n      <gpu sm=\"90\"/>\n    </pci>\n")));
    assert_eq!(topology_file(&NodeObservation::default()), "<system version=\"1\">\n</system>\n");
}

#[test]
fn values_beyond_nccl_limits_are_omitted() {
    let host = "numa_nodes: [{id: 0, cpus: 0-1023}], cpu: {arch: x86_64, vendor: 'a\"&<b', family: 23}";
    let bridge = "host_bridges: [{numa: 0, devices: [{pci: '0000:02:00.0', kind: nic}]}]";
    let observed = serde_saphyr::from_str(&format!("gpus: []\nhost: {{{host}, {bridge}}}\n")).unwrap();
    let text = topology_file(&observed);
    assert!(text.contains("<cpu numaid=\"0\" arch=\"x86_64\">"), "{text}");
}

#[test]
fn lists_become_masks() {
    for (list, expected) in [
        ("0-15,32-47", Some("0000ffff,0000ffff")),
        ("63-64", Some("00000001,80000000,00000000")),
        ("5", Some("00000020")),
        ("", None),
        ("3-1", None),
        ("0-4294967295", None),
        ("x", None),
    ] {
        assert_eq!(mask(list).as_deref(), expected, "{list}");
    }
}
