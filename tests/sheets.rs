//! Every machine of the collection of fact sheets can be expressed as a node file that yields the sheet's matrix.
//!
//! The sheets are not part of this repository: the tests read them from `../shared/topologies`, and without its folder
//! `raw` they are ignored. Each sheet is converted to observations and assembled, and the levels of its GPUs and NICs
//! are compared with its matrix, cell by cell. [`DIFFERENCES`] lists the cells that differ, with the reason.

mod convert;
pub mod sheet;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use linkwise_core::allocation::{
    AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, preferred_allocation,
};
use linkwise_core::topology::{Nic, NodeObservation, NodeTopology};
use linkwise_host::machines::{Machine, of_bytes};
use sheet::Sheet;

/// A number of cells of one matrix of one sheet in which our symbol differs.
struct Difference {
    sheet: &'static str,
    part: Part,
    theirs: &'static str,
    ours: &'static str,
    cells: usize,
    reason: &'static str,
}

/// A matrix of a sheet, or the part of it that has GPUs or NICs as columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// GPUs and GPUs, NVLinks included.
    Gpus,
    /// GPUs and NICs.
    Nics,
    /// GPUs and GPUs by PCIe alone.
    Pcie,
}

/// The known differences, and why ours is right. A symbol of the PCIe part is followed by its rank.
const DIFFERENCES: [Difference; 4] = [
    Difference {
        sheet: "azure-nd40rs-v2-v100",
        part: Part::Gpus,
        theirs: "NODE",
        ours: "SYS",
        cells: 24,
        reason: "the sheet has two sources: its matrix is the guest's, where every GPU is on NUMA node 0; its two NUMA \
                 nodes are the vendor's (the built-in machine is the guest's)",
    },
    Difference {
        sheet: "rtx4090-8x-all-sys",
        part: Part::Gpus,
        theirs: "SYS",
        ours: "NODE",
        cells: 24,
        reason: "nvidia-smi printed SYS between GPUs to which it gave one NUMA node, which is NODE here",
    },
    Difference {
        sheet: "rtx4090-8x-all-sys",
        part: Part::Nics,
        theirs: "SYS",
        ours: "NODE",
        cells: 6,
        reason: "nvidia-smi printed SYS within one NUMA node, as between the GPUs",
    },
    Difference {
        sheet: "workstation-2x-a6000-nvlink-numa-minus1",
        part: Part::Pcie,
        theirs: "NODE/3",
        ours: "SYS/4",
        cells: 2,
        reason: "by the sheet's rule two GPUs on NUMA node -1 are on one node; here two unknown nodes are not equal, \
                 so the socket decides",
    },
];

/// The sheets, by name.
fn sheets() -> Vec<(String, Sheet)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/topologies");
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    paths.sort();
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let sheet = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, sheet)
    };
    paths.iter().map(read).collect()
}

/// The symbols of the cells of a sheet's matrices, each with ours.
fn cells(sheet: &Sheet, topology: &NodeTopology) -> Vec<(Part, String, String)> {
    let gpus: Vec<(String, usize)> =
        topology.gpus().iter().enumerate().map(|(place, gpu)| (format!("GPU{}", gpu.index), place)).collect();
    let mut cells = Vec::new();
    let matrix = &sheet.topo_matrix;
    let pcie_only = matrix.kind.contains("PCIe only");
    for (row, gpu) in &gpus {
        for column in matrix.columns.split_whitespace() {
            let theirs = matrix.symbol(row, column).unwrap_or_else(|| panic!("no cell {row} {column}")).to_owned();
            if let Some((_, other)) = gpus.iter().find(|(name, _)| name == column) {
                let rank = if gpu == other { "X" } else { topology.rank(*gpu, *other).symbol() };
                let ours = if pcie_only { rank.to_owned() } else { topology.symbol(*gpu, *other) };
                cells.push((Part::Gpus, theirs, ours));
            } else {
                let here = |nic: &&Nic| {
                    nic.names.iter().any(|name| name == column) || nic.pci.is_some_and(|pci| pci.to_string() == column)
                };
                let nic = topology.nics().iter().find(here).unwrap_or_else(|| panic!("no NIC {column}"));
                cells.push((Part::Nics, theirs, nic.level[*gpu].symbol().to_owned()));
            }
        }
    }
    for (row, symbols) in sheet.gpu_pcie_matrix.iter().flatten() {
        let place = |name: &str| gpus.iter().find(|(known, _)| known == name).unwrap().1;
        for (column, symbol) in symbols.split_whitespace().enumerate() {
            let (a, b) = (place(row), place(&format!("GPU{column}")));
            let rank = topology.rank(a, b);
            let ours = if a == b { "X".to_owned() } else { format!("{}/{}", rank.symbol(), rank.number()) };
            cells.push((Part::Pcie, ranked(sheet, symbol, row, column), ours));
        }
    }
    cells
}

/// A symbol with its rank; that of SYS is 4 if both GPUs are in one socket, by the sheet.
fn ranked(sheet: &Sheet, symbol: &str, row: &str, column: usize) -> String {
    let socket = |name: &str| {
        let gpu = sheet.gpus.iter().find(|gpu| format!("GPU{}", gpu.index) == name)?;
        sheet.numa.iter().find(|node| Some(node.id) == gpu.numa)?.socket
    };
    let (a, b) = (socket(row), socket(&format!("GPU{column}")));
    let rank = match symbol {
        "X" => return symbol.to_owned(),
        "PIX" => 0,
        "PXB" => 1,
        "PHB" => 2,
        "NODE" => 3,
        "SYS" if a.is_some() && a == b => 4,
        "SYS" => 5,
        other => panic!("'{other}' is not a level"),
    };
    format!("{symbol}/{rank}")
}

/// The matrix of a sheet as `nvidia-smi topo -m` prints it.
fn printed(sheet: &Sheet) -> String {
    let names: Vec<&str> = sheet.topo_matrix.columns.split_whitespace().collect();
    let mut text = format!("\t{}\tCPU Affinity\tNUMA Affinity\n", names.join("\t"));
    for row in &names {
        let symbol = |row: &str, column: &str| sheet.topo_matrix.symbol(row, column);
        let other = |column: &str| symbol(row, column).or(symbol(column, row)).unwrap_or("SYS");
        let cell = |column: &&str| if row == column { " X " } else { other(column) };
        let cells = names.iter().map(cell).collect::<Vec<_>>().join("\t");
        let gpu = sheet.gpus.iter().find(|gpu| format!("GPU{}", gpu.index) == **row);
        let node = gpu.and_then(|gpu| sheet.numa.iter().find(|node| Some(node.id) == gpu.numa && node.id >= 0));
        let cpus = node.and_then(|node| node.cpus.clone()).unwrap_or_else(|| "N/A".to_owned());
        let numa = node.map_or_else(|| "N/A".to_owned(), |node| node.id.to_string());
        text += &format!("{row}\t{cells}\t{cpus}\t{numa}\n");
    }
    text
}

/// The sets that requests of each size get, by NVML's indices.
fn choices(topology: &NodeTopology) -> Vec<Vec<u32>> {
    let tables = AllocationTables::new(topology.clone().into());
    let all: Vec<DeviceId> = topology.gpus().iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect();
    let choose = |size| {
        let request = AllocationRequest { available: all.clone(), must_include: Vec::new(), size };
        let (chosen, _) = preferred_allocation(&tables, &request, AllocationPolicy::BestEffort);
        let index = |id: &DeviceId| topology.gpus().iter().find(|gpu| DeviceId::from(&gpu.uuid) == *id).unwrap().index;
        let mut indices: Vec<u32> = chosen.devices.iter().map(index).collect();
        indices.sort_unstable();
        indices
    };
    (1..=all.len()).map(choose).collect()
}

/// A machine without any facts.
fn empty() -> Machine {
    let (name, title, source, reconstructed) = Default::default();
    let version = linkwise_host::machines::VERSION;
    Machine { version, name, title, source, reconstructed, observed: NodeObservation::default() }
}

#[test]
#[cfg_attr(not(has_recorded), ignore = "no fact sheets in ../shared/topologies")]
fn each_fact_sheet_yields_its_matrix() {
    let sheets = sheets();
    let mut found: BTreeMap<(String, Part, String, String), usize> = BTreeMap::new();
    for (name, sheet) in &sheets {
        let observed = convert::observe(sheet);
        let machine = Machine { name: name.clone(), observed, ..empty() };
        assert_eq!(Machine::parse(&machine.to_yaml().unwrap()).unwrap(), machine, "{name}: as a node file");
        let (topology, warnings) = NodeTopology::assemble(&machine.observed);
        assert_eq!(warnings, [], "{name}");
        assert_eq!(topology.gpus().len(), sheet.gpus.len(), "{name}");
        for (part, theirs, ours) in cells(sheet, &topology) {
            if theirs != ours {
                *found.entry((name.clone(), part, theirs, ours)).or_default() += 1;
            }
        }
    }
    let listed = DIFFERENCES.iter().map(|known| {
        let key = (known.sheet.to_owned(), known.part, known.theirs.to_owned(), known.ours.to_owned());
        assert!(!known.reason.is_empty());
        (key, known.cells)
    });
    let listed: BTreeMap<_, _> = listed.collect();
    assert_eq!(found, listed, "differences found and listed: (sheet, part, its symbol, ours), number of cells");
}

/// The printed text has levels and links, but not the sheet's link rates, which change no choice.
#[test]
#[cfg_attr(not(has_recorded), ignore = "no fact sheets in ../shared/topologies")]
fn printed_matrix_keeps_levels_and_choices() {
    for (name, sheet) in &sheets() {
        let machine =
            of_bytes("printed", printed(sheet).into_bytes()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (ours, _) = NodeTopology::assemble(&machine.observed);
        for part in [Part::Gpus, Part::Nics] {
            let cells = cells(sheet, &ours).into_iter().filter(|(of, theirs, ours)| *of == part && theirs != ours);
            let listed = DIFFERENCES.iter().filter(|known| known.sheet == *name && known.part == part);
            let (found, listed) = (cells.count(), listed.map(|known| known.cells).sum::<usize>());
            assert_eq!(found, listed, "{name}: {part:?}");
        }
        assert_eq!(choices(&ours), choices(&NodeTopology::assemble(&convert::observe(sheet)).0), "{name}");
    }
}
