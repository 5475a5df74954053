//! Reads the matrix that `nvidia-smi topo -m` prints as a machine, because people often have this text and no node
//! file.
//!
//! The text has levels, numbers of NVLinks, the NICs' levels, NUMA nodes and their CPUs. Models and rates are unknown.
//! The PCI tree is made so that it gives the levels of the text, and addresses are made from the GPUs' indices. Reads
//! the text of drivers from 2017 on (SOC for SYS), with colours, with tabs that became blanks, and with rows that a
//! mail or an issue has wrapped. Called by `load`.

use std::collections::{BTreeMap, BTreeSet};

use super::{Machine, VERSION, unnamed_gpu};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{
    GpuObservation, HostBridgeObservation, HostObservation, NicKind, NicObservation, NodeObservation, NumaNodeId,
    NumaNodeObservation, NvLinkObservation, NvLinkRemote, PciAddress, PciKind, PciObservation, ProbeFailure,
    TopologyLevel, is_cpu_list,
};

/// The PCI domain of the made-up addresses: no machine has it.
const DOMAIN: u32 = 0xf000;

/// The most NVLinks of a GPU (`NVML_NVLINK_MAX_LINKS` of NVML 12). If a row adds up to more, the links lead to
/// NVSwitches, and a GPU reaches all others over the same links.
const MAX_LINKS: u32 = 18;

/// The most GPUs and NICs of a matrix, and the longest name.
const MAX_NAMES: usize = 256;
const MAX_NAME: usize = 64;

/// The longest line in bytes, and the most words of a line: as many as a row with `MAX_NAMES` names can have. A longer
/// line is skipped, and further words are dropped.
const MAX_LINE: usize = 1 << 16;
const MAX_WORDS: usize = MAX_NAMES + 16;

/// The fault of a text of several machines.
const SECOND_MATRIX: &str = "a second matrix: give the matrix of one machine";

/// The fault of a matrix, and the number of its line, from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {0}: {1}")]
pub struct TopoError(usize, String);

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Own,
    NvLinks(u32),
    Level(TopologyLevel),
}

impl Cell {
    fn of(word: &str) -> Option<Self> {
        let level = match word {
            "X" => return Some(Self::Own),
            "PIX" => TopologyLevel::Single,
            "PXB" => TopologyLevel::Multiple,
            "PHB" => TopologyLevel::HostBridge,
            "NODE" => TopologyLevel::Node,
            "SYS" | "SOC" => TopologyLevel::System,
            _ => return word.strip_prefix("NV")?.parse().ok().map(Self::NvLinks),
        };
        Some(Self::Level(level))
    }
}

/// A GPU or a NIC of the matrix.
#[derive(Debug, Default)]
struct Device {
    name: String,
    /// NVML's index of a GPU.
    gpu: Option<u32>,
    /// The cells of its row, by the place of the other device.
    cells: BTreeMap<usize, Cell>,
    cpus: Option<String>,
    numa: Option<NumaNodeId>,
}

/// Returns true if a text has the head of a matrix.
pub(super) fn is_matrix(text: &str) -> bool {
    let begins_no_node_file = |line: &&str| !line.starts_with("version:");
    text.lines().take(1000).take_while(begins_no_node_file).any(|line| is_head(&words(line)))
}

/// Returns true for the head of a matrix: its first word is a GPU, and no cell follows.
fn is_head(words: &[String]) -> bool {
    let is_next = |word: &String| gpu_index(word).is_some() || word == "CPU" || Cell::of(word).is_none();
    matches!(words, [first, second, ..] if gpu_index(first).is_some() && is_next(second) && !second.ends_with(':'))
        || matches!(words, [only] if only == "GPU0")
}

fn gpu_index(word: &str) -> Option<u32> {
    let digits = word.strip_prefix("GPU").filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    digits.parse().ok()
}

/// The words of a line, without the colours of a terminal.
fn words(line: &str) -> Vec<String> {
    let line = if line.len() > MAX_LINE { "" } else { line };
    let mut text = String::with_capacity(line.len());
    let mut rest = line.chars();
    while let Some(char) = rest.next() {
        if char == '\u{1b}' {
            // An escape sequence ends with its first letter.
            rest.by_ref().find(char::is_ascii_alphabetic);
        } else {
            text.push(if char.is_control() { ' ' } else { char });
        }
    }
    text.split_whitespace().take(MAX_WORDS).map(str::to_owned).collect()
}

/// Reads a matrix; `name` becomes the machine's name.
pub(super) fn parse(name: &str, text: &str) -> Result<Machine, TopoError> {
    let mut lines = (1..).zip(text.lines().map(words)).filter(|(_, words)| !words.is_empty()).peekable();
    let mut head = Vec::new();
    let mut at = 0;
    while let Some((number, words)) = lines.next_if(|(_, words)| head.is_empty() || !is_row(words, &head)) {
        if !head.is_empty() || is_head(&words) {
            (at, head) = (number, [head, words].concat());
        }
        if head.len() > MAX_NAMES {
            return Err(TopoError(number, format!("no row of {} follows the head of the matrix", excerpt(&head[0]))));
        }
    }
    let end = head.windows(2).position(|pair| ["CPU", "NUMA"].contains(&pair[0].as_str()) && pair[1] == "Affinity");
    let names = &head[..end.unwrap_or(head.len())];
    let mut devices: Vec<Device> = names.iter().map(|name| Device::of(name)).collect();
    let distinct: BTreeSet<&String> = names.iter().collect();
    if distinct.len() < names.len() || names.iter().any(|name| name.len() > MAX_NAME) {
        return Err(TopoError(at, "the head of the matrix has a name twice, or one that is too long".to_owned()));
    }
    let mut seen = BTreeSet::new();
    while let Some((number, mut row)) = lines.next_if(|(_, words)| !is_legend(words)) {
        if is_head(&row) && row.get(1).is_some_and(|word| gpu_index(word).is_some()) {
            return Err(TopoError(number, SECOND_MATRIX.to_owned()));
        }
        let Some(place) = names.iter().position(|name| *name == row[0]) else {
            return Err(TopoError(number, format!("the matrix has no column {}", excerpt(&row[0]))));
        };
        // A wrapped row goes on in lines that begin with no name.
        while let Some((_, more)) = lines.next_if(|(_, words)| !is_legend(words) && !names.contains(&words[0])) {
            row.extend(more);
        }
        if !seen.insert(place) {
            return Err(TopoError(number, format!("a second row of {}: give the matrix of one machine", names[place])));
        }
        devices[place].read(number, names, &row[1..])?;
    }
    if seen.is_empty() {
        return Err(TopoError(at, "no row follows the head of the matrix".to_owned()));
    }
    for (number, words) in lines {
        if is_head(&words) {
            return Err(TopoError(number, SECOND_MATRIX.to_owned()));
        }
        // `NIC0: mlx5_0`, from drivers of 2022 on.
        if let [name, stands_for] = words.as_slice()
            && let Some(device) = devices.iter_mut().find(|device| name.strip_suffix(':') == Some(&device.name))
        {
            device.name = stands_for.chars().take(MAX_NAME).collect();
        }
    }
    if devices.iter().all(|device| device.gpu.is_none()) {
        return Err(TopoError(at, "the matrix has no GPU".to_owned()));
    }
    Ok(machine(name, devices))
}

/// Returns true for a row: it begins with a name of the head, and a cell follows.
fn is_row(words: &[String], head: &[String]) -> bool {
    matches!(words, [name, cell, ..] if head.contains(name) && Cell::of(cell).is_some())
}

fn is_legend(words: &[String]) -> bool {
    words.first().is_some_and(|word| word == "Legend:") || words.get(1).is_some_and(|word| word == "Legend:")
}

impl Device {
    fn of(name: &str) -> Self {
        Self { name: name.to_owned(), gpu: gpu_index(name), ..Self::default() }
    }

    /// Reads a row: a cell for each name, then the CPUs and the NUMA node.
    fn read(&mut self, line: usize, names: &[String], row: &[String]) -> Result<(), TopoError> {
        for (place, name) in names.iter().enumerate() {
            let wrong = |what: &str| {
                let expected = "X, NV#, PIX, PXB, PHB, NODE, SYS or SOC";
                TopoError(line, format!("{} to {name}: {what} (expected {expected})", self.name))
            };
            let word = row.get(place).ok_or_else(|| wrong("no cell"))?;
            let cell = Cell::of(word).ok_or_else(|| wrong(&format!("{} is not a level", excerpt(word))))?;
            if (cell == Cell::Own) != (*name == self.name) {
                return Err(wrong(&format!("{} is out of place", excerpt(word))));
            }
            self.cells.insert(place, cell);
        }
        let mut rest = row.iter().skip(names.len());
        self.cpus = rest.next().filter(|cpus| is_cpu_list(cpus)).cloned();
        // Several nodes, or N/A, count as unknown.
        self.numa = rest.next().and_then(|numa| numa.parse().ok()).map(NumaNodeId);
        Ok(())
    }

    /// The made-up address of a GPU.
    fn address(&self) -> Option<PciAddress> {
        let index = self.gpu?;
        PciAddress::new(DOMAIN, u8::try_from(index / 32 % 256).ok()?, u8::try_from(index % 32).ok()?, 0)
    }
}

/// The cell of two devices, from either row. If the rows differ, the farther level or the lesser number of NVLinks
/// counts, and a level instead of NVLinks.
fn cell_of(devices: &[Device], a: usize, b: usize) -> Option<Cell> {
    let cell = |from: usize, to: usize| devices.get(from)?.cells.get(&to).copied();
    match (cell(a, b), cell(b, a)) {
        (Some(Cell::Level(one)), Some(Cell::Level(other))) => Some(Cell::Level(one.max(other))),
        (Some(Cell::NvLinks(one)), Some(Cell::NvLinks(other))) => Some(Cell::NvLinks(one.min(other))),
        (Some(level @ Cell::Level(_)), Some(_)) | (Some(_), Some(level @ Cell::Level(_))) => Some(level),
        (one, other) => one.or(other),
    }
}

fn machine(name: &str, devices: Vec<Device>) -> Machine {
    let places: Vec<usize> = (0..devices.len()).collect();
    let is_asymmetric = |a: usize, b: usize| {
        let cells = (devices[a].cells.get(&b), devices[b].cells.get(&a));
        matches!(cells, (Some(one), Some(other)) if one != other)
    };
    let odd: Vec<ProbeFailure> = places
        .iter()
        .flat_map(|a| places.iter().filter(move |b| a < *b).map(move |b| (*a, *b)))
        .filter(|(a, b)| is_asymmetric(*a, *b))
        .map(|(a, b)| ProbeFailure {
            subject: format!("{} and {}", devices[a].name, devices[b].name),
            call: "nvidia-smi topo -m".to_owned(),
            error: "the two rows differ; the farther level, or the lesser number of NVLinks, counts".to_owned(),
        })
        .collect();
    let numa_nodes: BTreeMap<NumaNodeId, String> =
        devices.iter().filter_map(|device| Some((device.numa?, device.cpus.clone().unwrap_or_default()))).collect();
    let numa_nodes = numa_nodes.into_iter().map(|(id, cpus)| NumaNodeObservation { id, package: None, cpus });
    let host_bridges = groups(&devices, &places, TopologyLevel::HostBridge);
    let host_bridges = host_bridges.iter().map(|below| bridge(&devices, below));
    let host = HostObservation { cpu: None, numa_nodes: numa_nodes.collect(), host_bridges: host_bridges.collect() };
    let has_switches = places
        .iter()
        .any(|from| links(&devices, *from).iter().map(|(_, count)| *count).fold(0, u32::saturating_add) > MAX_LINKS);
    let gpus = devices.iter().enumerate().filter_map(|(place, device)| {
        Some(gpu(&devices, (place, device.address()?), &links(&devices, place), has_switches))
    });
    let gpus: Vec<GpuObservation> = gpus.collect();
    let mut reconstructed = vec![
        "PCI addresses and UUIDs are made from the GPUs' indices: the text has none".to_owned(),
        "models and the rates of links and NICs are unknown: the text has none".to_owned(),
        "the PCI tree is made so that it gives the levels of the text".to_owned(),
    ];
    if has_switches {
        reconstructed.push(format!("NVLinks lead to NVSwitches, because no GPU has more than {MAX_LINKS} NVLinks"));
    }
    Machine {
        version: VERSION,
        name: name.to_owned(),
        title: format!("{name}: {} GPUs by nvidia-smi topo -m", gpus.len()),
        source: vec!["nvidia-smi topo -m".to_owned()],
        reconstructed,
        observed: NodeObservation { gpus, host, failures: odd, ..NodeObservation::default() },
    }
}

/// The numbers of NVLinks of a GPU, each with the other device.
fn links(devices: &[Device], from: usize) -> Vec<(usize, u32)> {
    let links = (0..devices.len()).filter_map(|to| match cell_of(devices, from, to)? {
        Cell::NvLinks(count) => Some((to, count)),
        Cell::Own | Cell::Level(_) => None,
    });
    links.collect()
}

/// A GPU with its NVLinks, and with its level to each other GPU for which the text has a level.
fn gpu(
    devices: &[Device],
    (place, address): (usize, PciAddress),
    links: &[(usize, u32)],
    has_switches: bool,
) -> GpuObservation {
    let device = &devices[place];
    let mut next = 0;
    let mut links_to = |remote: NvLinkRemote, count: u32| {
        let numbers = next..next + count;
        next += count;
        NvLinkObservation { links: numbers.collect(), remote, active: true }
    };
    let max = links.iter().map(|(_, count)| *count).max().unwrap_or(0).min(MAX_LINKS);
    let nvlinks = match has_switches {
        true if max == 0 => Vec::new(),
        true => vec![links_to(NvLinkRemote::Switch(None), max)],
        false => links
            .iter()
            .filter_map(|(to, count)| Some(links_to(NvLinkRemote::Gpu(devices[*to].address()?), *count)))
            .collect(),
    };
    let levels = devices.iter().enumerate().filter_map(|(other, to)| match cell_of(devices, place, other)? {
        Cell::Level(level) => Some((to.gpu?, level)),
        Cell::Own | Cell::NvLinks(_) => None,
    });
    let common_ancestors = levels.collect();
    let index = device.gpu.unwrap_or_default();
    GpuObservation { numa: device.numa, nvlinks: Some(nvlinks), common_ancestors, ..unnamed_gpu(index, address) }
}

/// Groups the devices: two are in one group if their level is `farthest` or nearer, directly or through others.
fn groups(devices: &[Device], places: &[usize], farthest: TopologyLevel) -> Vec<Vec<usize>> {
    let is_near = |a: usize, b: usize| matches!(cell_of(devices, a, b), Some(Cell::Level(level)) if level <= farthest);
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for &place in places {
        let (joined, apart): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.iter().any(|other| is_near(place, *other)));
        groups = apart;
        groups.push(joined.into_iter().flatten().chain([place]).collect());
    }
    groups
}

/// A host bridge with the devices below it. Devices at level PXB or nearer share a tree of switches, those at level PIX
/// a switch.
fn bridge(devices: &[Device], below: &[usize]) -> HostBridgeObservation {
    let own = below.iter().find_map(|place| devices[*place].numa);
    // A NIC's row has no NUMA node; a NIC at level NODE from a GPU is on the GPU's NUMA node.
    let neighbours = || {
        below.iter().find_map(|place| {
            let is_near = |other: &usize| cell_of(devices, *place, *other) == Some(Cell::Level(TopologyLevel::Node));
            (0..devices.len()).filter(is_near).find_map(|other| devices[other].numa)
        })
    };
    let numa = own.or_else(neighbours);
    let trees = groups(devices, below, TopologyLevel::Multiple);
    let tree = |places: &Vec<usize>| {
        let leaves = groups(devices, places, TopologyLevel::Single);
        let leaf = |places: &Vec<usize>| switch(places.iter().map(|place| function(&devices[*place])).collect());
        match (leaves.as_slice(), places.as_slice()) {
            (_, [only]) => function(&devices[*only]),
            ([only], _) => leaf(only),
            (several, _) => switch(several.iter().map(leaf).collect()),
        }
    };
    HostBridgeObservation { numa, package: None, root: None, devices: trees.iter().map(tree).collect() }
}

fn switch(devices: Vec<PciObservation>) -> PciObservation {
    PciObservation { pci: None, kind: PciKind::Switch, class: None, link: None, numa: None, nics: Vec::new(), devices }
}

fn function(device: &Device) -> PciObservation {
    let pci = device.address();
    if pci.is_some() {
        return PciObservation { pci, kind: PciKind::Gpu, ..switch(Vec::new()) };
    }
    // All NICs that nvidia-smi lists are RDMA devices.
    let nics = vec![NicObservation::new(device.name.clone(), NicKind::Rdma)];
    PciObservation { kind: PciKind::Nic, nics, ..switch(Vec::new()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::topology::NodeTopology;

    /// The symbols between GPUs, row by row, and those of the NICs.
    fn matrix(text: &str) -> (String, String) {
        let machine = parse("x", text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let (topology, _) = NodeTopology::assemble(&machine.observed);
        let all = 0..topology.gpus().len();
        let row = |a: usize| all.clone().map(|b| topology.symbol(a, b)).collect::<Vec<_>>().join(" ");
        let nic = |gpu: usize| topology.nics().iter().map(|nic| nic.level[gpu].symbol()).collect::<Vec<_>>().join(" ");
        (all.clone().map(row).collect::<Vec<_>>().join("\n"), all.map(nic).collect::<Vec<_>>().join("\n"))
    }

    /// A matrix of today, with the colours of a terminal, a prompt and the NICs' names.
    const TODAY: &str = "$ nvidia-smi topo -m\n\
        \t\u{1b}[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m\n\
        GPU0\t X \tNV12\tSYS\tPXB\t0-15,32-47\t0\t\tN/A\n\
        GPU1\tNV12\t X \tSYS\tSYS\t16-31\t1\t\tN/A\n\
        GPU2\tSYS\tSYS\t X \tNODE\tN/A\tN/A\t\tN/A\n\
        NIC0\tPXB\tSYS\tNODE\t X \n\n\
        Legend:\n\n  X    = Self\n  SYS  = Connection ...\n\nNIC Legend:\n\n  NIC0: mlx5_0\n";

    #[test]
    fn level_counts_where_the_other_row_has_nvlinks() {
        for (one, other) in [("NV2", "SYS"), ("SYS", "NV2")] {
            let text = format!("\tGPU0\tGPU1\nGPU0\tX\t{one}\nGPU1\t{other}\tX\n");
            let gpus = parse("x", &text).unwrap().observed.gpus;
            assert!(gpus.iter().all(|gpu| gpu.nvlinks.as_ref().is_none_or(Vec::is_empty)), "{text}");
            assert_eq!(matrix(&text).0, "X SYS\nSYS X", "{text}");
        }
    }

    #[test]
    fn matrix_of_today_is_read() {
        let machine = parse("x", TODAY).unwrap();
        let gpus = &machine.observed.gpus;
        assert_eq!(
            gpus.iter().map(|gpu| gpu.numa).collect::<Vec<_>>(),
            [Some(NumaNodeId(0)), Some(NumaNodeId(1)), None]
        );
        let nodes = &machine.observed.host.numa_nodes;
        assert_eq!(nodes.iter().map(|node| node.cpus.as_str()).collect::<Vec<_>>(), ["0-15,32-47", "16-31"]);
        let (topology, _) = NodeTopology::assemble(&machine.observed);
        assert_eq!(topology.nics()[0].names, ["mlx5_0"]);
        assert!(gpus.iter().all(|gpu| gpu.model.is_none() && gpu.pcie.is_none() && gpu.compute_capability.is_none()));
        assert_eq!(matrix(TODAY).0, "X NV12 SYS\nNV12 X SYS\nSYS SYS X");
    }

    #[test]
    fn old_wrapped_and_partial_matrices_are_read() {
        // 2017: SOC for SYS, no NUMA node. GPU2 is missing.
        let old = "        GPU0    GPU1    GPU3    mlx5_0  CPU Affinity\n\
                   GPU0     X      PIX     SOC     PHB     0-9,20-29\n\
                   GPU1    PIX      X      SOC     PHB     0-9,20-29\n\
                   GPU3    SOC     SOC      X      SOC     10-19,30-39\n\
                   mlx5_0  PHB     PHB     SOC      X\n";
        assert_eq!(matrix(old), ("X PIX SYS\nPIX X SYS\nSYS SYS X".to_owned(), "PHB\nPHB\nSYS".to_owned()));
        let wrapped = "GPU0 GPU1 GPU2\nCPU Affinity NUMA\nAffinity\nGPU0 X NV4\nNV4 0-3 0\nGPU1 NV4 X NV4\n0-3 0\n\
                       GPU2 NV4\nNV4 X\n0-3 0";
        assert_eq!(matrix(wrapped).0, "X NV4 NV4\nNV4 X NV4\nNV4 NV4 X");
        // Only the row of GPU1 has the level.
        let partial = "GPU0 GPU1 CPU Affinity\nGPU1 PXB X 0-3\n";
        assert_eq!(matrix(partial).0, "X PXB\nPXB X");
        assert_eq!(matrix("GPU0 CPU Affinity\nGPU0 X N/A\n").0, "X");
        let switches = "GPU0 GPU1 GPU2\nGPU0 X NV18 NV18\nGPU1 NV18 X NV18\nGPU2 NV18 NV18 X\n";
        assert_eq!(matrix(switches).0, "X NV18 NV18\nNV18 X NV18\nNV18 NV18 X");
        let absurd = switches.replace("NV18", "NV4294967295");
        assert_eq!(matrix(&absurd).0, "X NV18 NV18\nNV18 X NV18\nNV18 NV18 X");
    }

    #[test]
    fn large_matrix_is_read() {
        let head: String = (0..64).map(|gpu| format!("GPU{gpu} ")).collect();
        let row = |gpu: usize| (0..64).map(|to| if to == gpu { "X " } else { "NV18 " }).collect::<String>();
        let rows: String = (0..64).map(|gpu| format!("GPU{gpu} {}\n", row(gpu))).collect();
        let machine = parse("x", &format!("{head}\n{rows}")).unwrap();
        let (topology, warnings) = NodeTopology::assemble(&machine.observed);
        assert_eq!((topology.gpus().len(), topology.nvlink_count(0, 63)), (64, 18), "{warnings:?}");
    }

    #[test]
    fn broken_matrices_and_other_texts_are_refused() {
        let error = |text: &str| parse("x", text).unwrap_err().to_string();
        for (text, words) in [
            ("GPU0 GPU1\nGPU0 X PIX\nGPU1 NEAR X\n", "line 3: GPU1 to GPU0: NEAR is not a level"),
            ("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX\n", "line 3: GPU1 to GPU1: no cell"),
            ("GPU0 GPU1\nGPU0 PIX X\n", "line 2: GPU0 to GPU0: PIX is out of place"),
            ("GPU0 GPU1\nGPU0 X PIX\nGPU0 X PIX\n", "line 3: a second row of GPU0"),
            ("GPU0 GPU0\nGPU0 X X\n", "line 1: the head of the matrix has a name twice"),
            ("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X\nLegend:\nGPU0 GPU1\nGPU0 X SYS\n", "line 5: a second matrix"),
            ("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X\nGPU0 GPU1\n", "line 4: "),
            ("GPU0 GPU1\n", "no row follows"),
        ] {
            assert!(error(text).contains(words), "{text}: {}", error(text));
        }
        let endless = format!("GPU0 GPU1\n{}", "more words\n".repeat(1000));
        assert!(error(&endless).contains("no row of GPU0 follows"), "{}", error(&endless));
        for text in [
            "version: 1\n",
            "00:00.0 Host bridge: Intel\n01:00.0 3D controller: NVIDIA GPU0\n",
            "GPU0: NVIDIA H100\n",
            "version: 1\nsource: |\n  GPU0 GPU1\n",
        ] {
            assert!(!is_matrix(text), "{text}");
        }
    }
}
