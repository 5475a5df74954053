//! Recorded files (hwloc's and NCCL's) of machines in the field, compared with the fact sheets of those machines.
//!
//! The folder `shared/topologies` beside this repository has fact sheets of most machines, and in `raw` the recorded
//! files, which we may not copy. Without `raw` these tests are ignored; our own dumps test the same readers in
//! `crates/host`. Each XML file has a row in [`TABLE`], with the reason for each difference.

use std::path::{Path, PathBuf};

use linkwise_core::topology::{NodeTopology, PciAddress, TopologyWarning};
use linkwise_host::machines;

use crate::sheets::sheet::{Gpu, Sheet};

/// The expectation that a recorded file is compared with.
enum Expect {
    /// The sheet's matrix, NVLinks included.
    Matrix(&'static str),
    /// The sheet's matrix of PCIe alone, and the reason why the file has no valid NVLinks.
    Pcie(&'static str, &'static str),
    /// The PCIe matrix of a similar machine's sheet, whose addresses differ, and the reason.
    Sibling(&'static str, &'static str),
    /// The matrix of PCIe, written by hand because there is no sheet.
    Rows(&'static [&'static str]),
    /// No GPU is found; a part of the warning.
    NoGpu(&'static str),
    /// The file is refused; a part of the message.
    Refused(&'static str),
}
use Expect::{Matrix, NoGpu, Pcie, Refused, Rows, Sibling};

const NO_NVLINKS: &str = "made by hand for NCCL to complete: it has no gpu elements, hence no NVLinks";
const HWLOC: &str = "hwloc does not record NVLinks";

const TABLE: &[(&str, Expect)] = &[
    ("hwloc-24em64t-2n6c2t-pci.xml", Rows(&["X SYS SYS", "SYS X PHB", "SYS PHB X"])),
    ("hwloc-llnl-coral-ea-hwloc1.xml", Sibling("ibm-s822lc-minsky-4x-p100", "one of the same model, other domains")),
    ("hwloc-llnl-coral-lassen-hwloc1.xml", Pcie("llnl-lassen-ac922-4x-v100", HWLOC)),
    ("hwloc-llnl-cts1-pascal.xml", Matrix("llnl-pascal-2x-p100-pcie")),
    ("hwloc-llnl-g4dnmetal.xml", Matrix("aws-g4dn.metal-8x-t4")),
    ("hwloc-nvidia-dgx-gb10.xml", Rows(&[])),
    ("hwloc-nvidiaDGX2.xml", Pcie("dgx2h-16x-v100", HWLOC)),
    ("hwloc-power8gpudistances.xml", Pcie("ibm-s822lc-minsky-4x-p100", HWLOC)),
    ("nccl-8x-rtx3090-two-switches.xml", Matrix("pcie-8x-rtx3090-two-switches")),
    ("nccl-aws-g5.48xlarge.xml", NoGpu("without a class, a gpu or a nic; left out (8 more like it)")),
    ("nccl-aws-p4d.24xlarge.xml", Pcie("aws-p4d.24xlarge", NO_NVLINKS)),
    ("nccl-aws-p4de.24xlarge.xml", Pcie("aws-p4de.24xlarge", NO_NVLINKS)),
    ("nccl-aws-p5.48xlarge.xml", NoGpu("without a class, a gpu or a nic; left out (31 more like it)")),
    ("nccl-azure-ncv4-graph.xml", Refused("NCCL graph dump")),
    (
        "nccl-azure-ncv4-topo.xml",
        Pcie("azure-nc96ads-a100-v4", "its NVLinks lead from each GPU to itself, the vendor's bug"),
    ),
    ("nccl-azure-ndv2-topo.xml", Pcie("azure-nd40rs-v2-v100", NO_NVLINKS)),
    ("nccl-azure-ndv4-topo.xml", Pcie("azure-nd96asr-v4-a100", NO_NVLINKS)),
    ("nccl-azure-ndv5-topo.xml", Pcie("azure-nd96isr-h100-v5", NO_NVLINKS)),
    ("nccl-oci-bm-gpu-b4-8.xml", Pcie("oci-bm.gpu.a100-b4.8", NO_NVLINKS)),
    ("nccl-oci-bm-gpu-h100-8.xml", Matrix("oci-bm.gpu.h100.8")),
    ("nccl-oci-bm-gpu4-8.xml", Sibling("oci-bm.gpu.a100-b4.8", "the same shape a generation of CPUs earlier")),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/topologies")
}

fn sheet(folder: &Path, name: &str) -> Sheet {
    let text = std::fs::read_to_string(folder.join(format!("{name}.yaml"))).unwrap();
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn words(row: &str) -> Vec<String> {
    row.split_whitespace().map(str::to_owned).collect()
}

/// The sheet's rows of GPUs against GPUs, in the order of its columns.
fn of_sheet(sheet: &Sheet, nvlinks: bool) -> Vec<Vec<String>> {
    let rows = if nvlinks { Some(&sheet.topo_matrix.rows) } else { sheet.gpu_pcie_matrix.as_ref() };
    let count = sheet.gpus.len();
    let row = |gpu: &Gpu| match rows {
        Some(rows) => words(&rows[&format!("GPU{}", gpu.index)])[..count].to_vec(),
        None => panic!("the sheet has no gpu_pcie_matrix"),
    };
    sheet.gpus.iter().map(row).collect()
}

/// Our rows of GPUs against GPUs, in NVML's order.
fn ours(topology: &NodeTopology) -> Vec<Vec<String>> {
    let gpus = by_index(topology);
    gpus.iter().map(|&a| gpus.iter().map(|&b| topology.symbol(a, b)).collect()).collect()
}

fn by_index(topology: &NodeTopology) -> Vec<usize> {
    let mut gpus: Vec<usize> = (0..topology.gpus().len()).collect();
    gpus.sort_by_key(|&gpu| topology.gpus()[gpu].index);
    gpus
}

/// Compares the levels between GPUs and those NICs that both the sheet's matrix and the topology have; returns the
/// number of these NICs.
fn compare_nics(raw: &str, topology: &NodeTopology, sheet: &Sheet) -> usize {
    let columns = words(&sheet.topo_matrix.columns);
    let mut compared = 0;
    for nic in &sheet.nics {
        let column = columns.iter().find(|name| [&nic.name, &nic.bdf].contains(&&Some((*name).clone())));
        let seen = topology.nics().iter().find(|seen| {
            let pci = seen.pci.map(|pci| pci.to_string());
            pci.is_some() && pci == nic.bdf
        });
        let (Some(column), Some(seen)) = (column, seen) else { continue };
        compared += 1;
        for gpu in by_index(topology) {
            let name = format!("GPU{}", topology.gpus()[gpu].index);
            let expected = sheet.topo_matrix.symbol(&name, column);
            assert_eq!(Some(seen.level[gpu].symbol()), expected, "{raw}: {name} and {column}");
        }
    }
    compared
}

#[test]
#[cfg_attr(not(has_recorded), ignore = "no recorded files in ../shared/topologies/raw")]
fn recorded_files_match_fact_sheets() {
    let folder = folder();
    let mut nics = 0;
    for (raw, expect) in TABLE {
        let machine = machines::load(folder.join("raw").join(raw).to_str().unwrap());
        if let Refused(words) = expect {
            let message = machine.unwrap_err().to_string();
            assert!(message.contains(words) && message.contains(raw) && !message.contains('\n'), "{raw}: {message}");
            continue;
        }
        let machine = machine.unwrap_or_else(|error| panic!("{error}"));
        let (topology, warnings) = NodeTopology::assemble(&machine.observed);
        // hwloc records no NVLinks, so each of its files yields this warning.
        let warnings = warnings.iter().filter(|warning| !matches!(warning, TopologyWarning::NvLinksUnknown(_)));
        let warnings: Vec<String> = warnings.map(ToString::to_string).collect();
        let assert_addresses = |sheet: &Sheet| {
            for (gpu, known) in by_index(&topology).into_iter().zip(&sheet.gpus) {
                let address: PciAddress = known.bdf.as_ref().unwrap().parse().unwrap();
                assert_eq!(topology.gpus()[gpu].pci, address, "{raw}");
            }
        };
        match expect {
            Matrix(name) => {
                let sheet = sheet(&folder, name);
                assert_addresses(&sheet);
                assert_eq!(ours(&topology), of_sheet(&sheet, true), "{raw}");
                nics += compare_nics(raw, &topology, &sheet);
                assert_eq!(warnings, [""; 0], "{raw}");
            }
            Pcie(name, why) => {
                let sheet = sheet(&folder, name);
                assert_addresses(&sheet);
                assert_eq!(ours(&topology), of_sheet(&sheet, false), "{raw}: {why}");
                nics += compare_nics(raw, &topology, &sheet);
            }
            Sibling(name, why) => {
                assert_eq!(ours(&topology), of_sheet(&sheet(&folder, name), false), "{raw}: {why}");
            }
            Rows(rows) => {
                let rows: Vec<Vec<String>> = rows.iter().map(|row| words(row)).collect();
                assert_eq!(ours(&topology), rows, "{raw}");
                assert_eq!(warnings, [""; 0], "{raw}");
            }
            NoGpu(words) => {
                assert!(topology.gpus().is_empty(), "{raw}");
                for words in [words, "NCCL_TOPO_DUMP_FILE"] {
                    assert!(warnings.iter().any(|warning| warning.contains(words)), "{raw}: {warnings:#?}");
                }
            }
            Refused(_) => {}
        }
    }
    assert!(nics > 50, "{nics} NICs compared");
}

#[test]
#[cfg_attr(not(has_recorded), ignore = "no recorded files in ../shared/topologies/raw")]
fn each_recorded_xml_file_has_a_row() {
    let folder = folder();
    for file in std::fs::read_dir(folder.join("raw")).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".xml") {
            assert!(TABLE.iter().any(|(raw, _)| *raw == name), "{name} has no row");
        }
    }
}
