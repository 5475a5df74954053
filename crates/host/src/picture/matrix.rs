//! The matrix of a machine, as `nvidia-smi topo -m` prints it.

use linkwise_core::topology::{HostObservation, NodeTopology};

/// The legend of the symbols; nvidia-smi does not have the last line.
const LEGEND: &str = "
  NV#   # NVLinks (behind an NVSwitch: of the narrower port)
  PIX   one PCIe switch            PXB   several PCIe switches     PHB   one PCI host bridge
  NODE  one NUMA node              SYS   between NUMA nodes
";

/// GPUs and NICs against GPUs, with the CPUs, the NUMA node and, where there are rails, the rail of each GPU.
pub fn matrix(topology: &NodeTopology, host: &HostObservation) -> String {
    let gpus = topology.gpus();
    if gpus.is_empty() {
        return "no GPUs\n".to_owned();
    }
    let mut rows = Vec::new();
    let mut head = vec![String::new()];
    head.extend(gpus.iter().map(|gpu| format!("GPU{}", gpu.index)));
    head.extend((0..topology.nics().len()).map(|nic| format!("NIC{nic}")));
    let has_rails = !topology.rails().is_empty();
    head.extend(["CPUs", "NUMA", "Rail"].iter().take(if has_rails { 3 } else { 2 }).map(ToString::to_string));
    rows.push(head);
    for (a, gpu) in gpus.iter().enumerate() {
        let mut row = vec![format!("GPU{}", gpu.index)];
        row.extend((0..gpus.len()).map(|b| topology.symbol(a, b)));
        row.extend(topology.nics().iter().map(|nic| nic.level.get(a).map_or("", |rank| rank.symbol()).to_owned()));
        let cpus = host.numa_nodes.iter().find(|node| Some(node.id) == gpu.numa).map(|node| node.cpus.clone());
        row.push(cpus.filter(|cpus| !cpus.is_empty()).unwrap_or_else(|| "-".to_owned()));
        row.push(gpu.numa.map_or("-".to_owned(), |numa| numa.to_string()));
        row.extend(has_rails.then(|| gpu.rail.map_or("-".to_owned(), |rail| rail.to_string())));
        rows.push(row);
    }
    let mut text = table(&rows);
    for (number, nic) in topology.nics().iter().enumerate() {
        text += &format!("\n  NIC{number}: {}", nic.names.join(", "));
    }
    if !topology.nics().is_empty() {
        text.push('\n');
    }
    text + LEGEND
}

/// Pads columns to their widest cell, with two blanks between them.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
