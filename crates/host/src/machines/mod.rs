//! Machines as files: the built-in ones, node files (`linkwise snapshot` writes one), NCCL topology dumps, hwloc XML,
//! the matrix of `nvidia-smi topo -m`.
//!
//! Owns the format of node files, version 1: raw facts under `observed`, their sources under `source`, facts that were
//! filled in under `reconstructed`. Recognises a file by its content. Called by the program's commands and settings,
//! and by `hwloc` for this host; derives nothing, and calls neither NVML nor libhwloc nor the kubelet.

mod hwloc_xml;
mod load;
mod nccl;
mod topo;
mod xml;

use std::io;

use serde::{Deserialize, Serialize};

use linkwise_core::quote::excerpt;
use linkwise_core::topology::{ComputeCapability, GpuObservation, GpuUuid, MAX_CPUS, NodeObservation, PciAddress};
pub(crate) use load::of_hwloc;
pub use load::{MachineFileError, VERSION, load, of_bytes};
pub use topo::TopoError;
pub use xml::XmlError;

/// The largest file of a machine that is read, in bytes.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// Names with the texts of their files.
macro_rules! built_in {
    ($($name:literal),+ $(,)?) => { [$(($name, include_str!(concat!($name, ".yaml")))),+] };
}

/// The built-in machines: name and text.
const BUILT_IN: [(&str, &str); 15] = built_in![
    "dgx1-v100",
    "dgx2-v100",
    "dgx-a100",
    "dgx-h100",
    "hgx-h200",
    "hgx-b200",
    "gb200-nvl72-node",
    "nvlink-bridge-pairs",
    "pcie-8x-pix-pairs",
    "workstation-a6000",
    "power9-v100",
    "azure-ndv2-v100",
    "azure-ndv4-a100",
    "aws-p4d",
    "aws-p5",
];

/// One machine: the observed facts, their sources, and the facts that were filled in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The version of the format of node files.
    pub version: u32,
    /// A short name, such as `dgx-h100`; for a snapshot the node's name.
    pub name: String,
    /// A description for people, one line.
    #[serde(default)]
    pub title: String,
    /// The sources of the facts, a line each.
    #[serde(default)]
    pub source: Vec<String>,
    /// The facts that the sources lack and that were filled in, a line each.
    #[serde(default)]
    pub reconstructed: Vec<String>,
    /// The raw facts.
    pub observed: NodeObservation,
}

/// Parts of the names of GPU models, with the compute capability (developer.nvidia.com/cuda-gpus). The first part that
/// a name contains counts.
const MODELS: [(&str, &str); 22] = [
    ("P100", "6.0"),
    ("V100", "7.0"),
    ("T4", "7.5"),
    ("A100", "8.0"),
    ("A800", "8.0"),
    ("A30", "8.0"),
    ("A10", "8.6"),
    ("A40", "8.6"),
    ("A6000", "8.6"),
    ("RTX 30", "8.6"),
    ("L40", "8.9"),
    ("L20", "8.9"),
    ("L4", "8.9"),
    ("Ada", "8.9"),
    ("RTX 40", "8.9"),
    ("B300", "10.3"),
    ("B200", "10.0"),
    ("H100", "9.0"),
    ("H200", "9.0"),
    ("H20", "9.0"),
    ("H800", "9.0"),
    ("RTX PRO 6000", "12.0"),
];

/// The error for a model whose compute capability is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model '{0}' is not known (known: {known})", known = MODELS.map(|(model, _)| model).join(", "))]
pub struct UnknownModel(String);

impl Machine {
    /// Gives this model, and its compute capability if unknown, to the GPUs without a model.
    pub fn set_model(&mut self, model: &str) -> Result<(), UnknownModel> {
        let known = MODELS.iter().find(|(part, _)| model.contains(part));
        let capability = known.and_then(|(_, capability)| ComputeCapability::try_from((*capability).to_owned()).ok());
        let capability = capability.ok_or_else(|| UnknownModel(excerpt(model)))?;
        for gpu in self.observed.gpus.iter_mut().filter(|gpu| gpu.model.is_none()) {
            gpu.model = Some(model.to_owned());
            gpu.compute_capability.get_or_insert(capability);
        }
        Ok(())
    }
}

/// A built-in machine, as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltIn {
    /// The name that [`load`] takes.
    pub name: &'static str,
    /// A description for people, one line.
    pub title: String,
}

/// The reason why a machine could not be loaded: the file (or the built-in machine's name), and the fault. Each message
/// is one line and complete (it has no `source`).
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum MachineError {
    #[error("no machine is called '{0}' and there is no such file (built-in machines: {names})",
        names = BUILT_IN.map(|(name, _)| name).join(", "))]
    Unknown(String),
    #[error("cannot read node file '{0}': {1}")]
    Read(String, io::Error),
    #[error("node file '{0}' is larger than {max} MiB", max = MAX_FILE_BYTES >> 20)]
    TooLarge(String),
    /// The file is not text: the file, and its first byte that is not UTF-8, counted from 0.
    #[error("node file '{0}' is not UTF-8 text (byte {1})")]
    NotText(String, usize),
    #[error("'{0}' is neither a node file (it has no version), nor XML, nor the text of nvidia-smi topo -m")]
    NoMachine(String),
    #[error("node file '{0}': {1}")]
    Content(String, MachineFileError),
    /// The matrix of `nvidia-smi topo -m` is broken.
    #[error("nvidia-smi topo -m '{0}': {1}")]
    Topo(String, TopoError),
    /// The XML is broken, or is not the kind of dump that its root names: the kind, the file, the fault and its place.
    #[error("{0} '{1}': {2}")]
    Xml(&'static str, String, XmlError),
    /// The file is NCCL's graph of a topology, not the topology.
    #[error("'{0}' is an NCCL graph dump, not a topology; give the file that NCCL_TOPO_DUMP_FILE writes")]
    NcclGraph(String),
    #[error("'{0}' is XML with the root <{1}>, neither <system> (an NCCL topology dump) nor <topology> (hwloc)")]
    UnknownXml(String, String),
}

/// The names of the built-in machines.
pub fn built_in_names() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|(name, _)| *name)
}

/// The built-in machines, in the order of the list.
pub fn built_in() -> impl Iterator<Item = BuiltIn> {
    BUILT_IN.iter().map(|&(name, text)| BuiltIn {
        name,
        title: Machine::parse(text).map(|machine| machine.title).unwrap_or_default(),
    })
}

/// A GPU with a made-up UUID.
fn unnamed_gpu(index: u32, pci: PciAddress) -> GpuObservation {
    GpuObservation::new(index, GpuUuid::made_up(pci), pci)
}

/// The kernel's list (`0-15,32-47`) of a mask: hexadecimal parts of 32 bits, the highest first, as the kernel
/// (`0000ffff,0000ffff`) or hwloc (`0x0000ffff,,0x0`) writes them. `None` if the text is not a mask, or has more CPUs
/// than any machine.
fn cpu_list(mask: &str) -> Option<String> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for (word, first) in mask.rsplit(',').zip((0..).step_by(32)) {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        let bits =
            if word.is_empty() { 0 } else { u32::from_str_radix(digits, 16).ok().filter(|_| first < MAX_CPUS)? };
        for cpu in (0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| first + bit) {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
    }
    let text = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    Some(ranges.iter().map(text).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use linkwise_core::topology::{NvLinkRemote, PciAddress, PciKind, PciObservation};

    /// Every built-in machine.
    fn all() -> Vec<Machine> {
        built_in().map(|machine| load(machine.name).unwrap()).collect()
    }

    #[test]
    fn built_in_machines_load_under_their_names() {
        for (listed, machine) in built_in().zip(all()) {
            assert_eq!(machine.name, listed.name);
            assert_eq!(machine.title, listed.title);
            assert!(!machine.title.is_empty() && !machine.source.is_empty() && !machine.reconstructed.is_empty());
            assert!(machine.observed.gpus.len() >= 2, "{}", machine.name);
        }
    }

    #[test]
    fn built_in_gpus_are_unique_in_tree() {
        fn walk(devices: &[PciObservation], gpus: &mut Vec<PciAddress>, all: &mut Vec<PciAddress>) {
            for device in devices {
                all.extend(device.pci);
                if device.kind == PciKind::Gpu {
                    gpus.extend(device.pci);
                }
                walk(&device.devices, gpus, all);
            }
        }
        let mut uuids = Vec::new();
        for machine in all() {
            let (mut gpus, mut addresses) = (Vec::new(), Vec::new());
            for bridge in &machine.observed.host.host_bridges {
                walk(&bridge.devices, &mut gpus, &mut addresses);
            }
            gpus.sort_unstable();
            assert_eq!(gpus, machine.observed.gpus.iter().map(|gpu| gpu.pci).collect::<Vec<_>>(), "{}", machine.name);
            addresses.sort_unstable();
            assert!(addresses.is_sorted_by(|a, b| a < b), "{}: an address twice", machine.name);
            uuids.extend(machine.observed.gpus.into_iter().map(|gpu| gpu.uuid));
        }
        uuids.sort_unstable();
        assert!(uuids.is_sorted_by(|a, b| a < b), "a UUID twice");
    }

    #[test]
    fn built_in_nvlinks_are_symmetric() {
        for machine in all() {
            let mut between = BTreeMap::new();
            for gpu in &machine.observed.gpus {
                let links = gpu.nvlinks.as_deref().unwrap();
                let mut numbers: Vec<u32> = links.iter().flat_map(|group| group.links.clone()).collect();
                numbers.sort_unstable();
                assert_eq!(numbers, (0..u32::try_from(numbers.len()).unwrap()).collect::<Vec<_>>());
                for group in links {
                    if let NvLinkRemote::Gpu(remote) = group.remote {
                        *between.entry((gpu.pci, remote)).or_insert(0) += group.links.len();
                    }
                }
            }
            for ((from, to), count) in &between {
                assert_eq!(between.get(&(*to, *from)), Some(count), "{}: {from} to {to}", machine.name);
            }
        }
    }

    #[test]
    fn written_machine_reads_back_equal() {
        for mut machine in all() {
            let text = machine.to_yaml().unwrap();
            assert_eq!(Machine::parse(&text).unwrap(), machine, "{text}");
            machine.title = format!("{}: # '\"\\ \u{e9}\n- 1 {}", machine.title, "long ".repeat(60));
            machine.name = "0x10".to_owned();
            machine.source = vec![String::new(), "null".to_owned(), " lead".to_owned()];
            machine.observed.gpus.clear();
            let text = machine.to_yaml().unwrap();
            assert_eq!(Machine::parse(&text).unwrap(), machine, "{text}");
        }
    }

    #[test]
    fn masks_become_lists() {
        for (mask, expected) in [
            ("", Some("")),
            ("00000000", Some("")),
            ("0x0", Some("")),
            ("0000ffff,0000ffff", Some("0-15,32-47")),
            ("0x0000ffff,0x0000ffff", Some("0-15,32-47")),
            ("0x00000303,0x03030000,,0x0", Some("80-81,88-89,96-97,104-105")),
            ("00000001,80000000,ffffffff", Some("0-31,63-64")),
            ("fff0000", Some("16-27")),
            ("5", Some("0,2")),
            ("0xf...f", None),
            ("x", None),
            ("1ffffffff", None),
            ("-1", None),
        ] {
            assert_eq!(cpu_list(mask).as_deref(), expected, "{mask}");
        }
        assert_eq!(cpu_list(&"1,".repeat(1 << 20)), None);
    }

    #[test]
    fn huge_file_is_refused_in_one_line() {
        let huge = tempfile::NamedTempFile::new().unwrap();
        huge.as_file().set_len(MAX_FILE_BYTES + 1).unwrap();
        let message = load(huge.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(message.contains("larger than 64 MiB") && !message.contains('\n'), "{message}");
    }
}
