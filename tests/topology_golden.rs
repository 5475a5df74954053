//! The levels of the built-in machines, compared with nvidia-smi's, recorded or derived from vendors' topology files.
//!
//! `tests/golden/topology/<name>.txt` is not written from our output; comment lines name its sources and the
//! differences. A section `PCIe` has the levels without NVLinks.

use std::fs;
use std::path::Path;

use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;

/// The fields of each line that is not a comment.
fn facts(text: &str) -> Vec<Vec<String>> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

/// The matrix of GPUs and NICs: the GPUs in NVML's order, the NICs in that of the record.
fn matrix(topology: &NodeTopology, columns: &[String]) -> Vec<Vec<String>> {
    let gpus = order(topology);
    let mut nics: Vec<_> = topology.nics().iter().collect();
    nics.sort_by_key(|nic| columns.iter().position(|column| *column == nic.names.join("+")));
    let mut lines = vec![gpus.iter().map(|&gpu| name(topology, gpu)).collect::<Vec<_>>()];
    lines[0].extend(nics.iter().map(|nic| nic.names.join("+")));
    for &gpu in &gpus {
        let levels = gpus.iter().map(|&other| topology.symbol(gpu, other));
        let near = nics.iter().map(|nic| nic.level[gpu].symbol().to_owned());
        lines.push([name(topology, gpu)].into_iter().chain(levels).chain(near).collect());
    }
    lines
}

/// The matrix of GPUs without their NVLinks.
fn pcie(topology: &NodeTopology) -> Vec<Vec<String>> {
    let gpus = order(topology);
    let mut lines = vec![vec!["PCIe".to_owned()], gpus.iter().map(|&gpu| name(topology, gpu)).collect()];
    for &gpu in &gpus {
        let symbol = |other| if other == gpu { "X" } else { topology.rank(gpu, other).symbol() };
        let levels = gpus.iter().map(|&other| symbol(other).to_owned());
        lines.push([name(topology, gpu)].into_iter().chain(levels).collect());
    }
    lines
}

fn order(topology: &NodeTopology) -> Vec<usize> {
    let mut gpus: Vec<usize> = (0..topology.gpus().len()).collect();
    gpus.sort_by_key(|&gpu| topology.gpus()[gpu].index);
    gpus
}

fn name(topology: &NodeTopology, gpu: usize) -> String {
    format!("GPU{}", topology.gpus()[gpu].index)
}

#[test]
fn built_in_machines_have_recorded_levels() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/topology");
    let mut machines = Vec::new();
    for machine in machines::built_in() {
        let recorded = fs::read_to_string(folder.join(format!("{}.txt", machine.name)))
            .unwrap_or_else(|error| panic!("{} has no recorded matrix: {error}", machine.name));
        let recorded = facts(&recorded);
        let (topology, _) = NodeTopology::assemble(&machines::load(machine.name).unwrap().observed);
        let mut ours = matrix(&topology, &recorded[0]);
        if recorded.contains(&vec!["PCIe".to_owned()]) {
            ours.extend(pcie(&topology));
        }
        for (ours, recorded) in ours.iter().zip(&recorded) {
            assert_eq!(ours, recorded, "{}, ours first", machine.name);
        }
        assert_eq!(ours.len(), recorded.len(), "{}", machine.name);
        machines.push(format!("{}.txt", machine.name));
    }
    for file in fs::read_dir(folder).unwrap() {
        let file = file.unwrap().file_name().into_string().unwrap();
        assert!(machines.contains(&file), "{file} belongs to no built-in machine");
    }
}
