//! The machine for people: as text by `linkwise topology`, as a picture by its `--format svg` and on the node's page.
//!
//! `outline` makes a nested list of the machine, which `text` prints. A [`Picture`] is made from that list: nested
//! boxes and links, which have no places yet. `layout` gives them places, `svg` prints them. All of this is a function
//! of the machine and of a page's marks.

mod layout;
mod outline;
mod style;
mod svg;
#[cfg(test)]
mod tests;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::topology::{Gpu, NodeObservation, NodeTopology, NumaNodeId, NvLinkRemote, PciAddress};
use linkwise_core::words::ranges;
use outline::{Part, PartKind, outline};
use style::{Kind, LineKind, clean};

pub use style::harmless;
pub use svg::{element, svg};
pub use text::{machine_tree, matrix};

/// The most interfaces that are named in one box.
const MAX_NAMES: usize = 4;

/// The widest row of packages in pixels, unless they have to be in one row: a common screen shows it legibly.
const MAX_ROW_WIDTH: i64 = 2000;
/// The widest row in a page that has other content beside the picture.
const MAX_ROW_WIDTH_IN_PAGE: i64 = 1280;

/// The number of colours for holders; with more holders, some share a colour.
pub const COLOURS: u8 = 8;

/// The holder of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holder {
    /// No known holder.
    #[default]
    Nobody,
    /// One holder with this colour, below [`COLOURS`].
    One(u8),
    /// Several holders, or one whose pod is unknown.
    Several,
}

/// The facts about a GPU that the picture of a page shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The holder.
    pub holder: Holder,
    /// True if the GPU is unhealthy.
    pub is_sick: bool,
    /// The lines below its address; long ones are cut.
    pub lines: Vec<String>,
}

/// The visible parts of a machine.
pub struct Picture {
    /// The title of the machine; `None` in a page, which shows the title itself.
    title: Option<String>,
    /// The widest row of packages, unless they have to be in one row.
    max_row_width: i64,
    /// The models with their GPUs.
    models: Vec<String>,
    /// Packages with their content; parts without a known package are last.
    packages: Vec<Block>,
    /// NVLinks from GPU to GPU.
    links: Vec<Link>,
    /// The NVSwitch planes.
    planes: Vec<Plane>,
}

/// A box with its text, and the boxes in it or below it.
struct Block {
    kind: Kind,
    lines: Vec<String>,
    /// The text that a viewer shows when the pointer is on the box.
    tooltip: String,
    /// The index in `NodeTopology::gpus` of a GPU that NVML lists.
    gpu: Option<usize>,
    /// The number of NVLink lines that end here.
    ports: i64,
    below: Vec<Self>,
}

/// The NVLinks between two GPUs, by their indices in `NodeTopology::gpus`; `a` is the smaller.
struct Link {
    a: usize,
    b: usize,
    count: u32,
    kind: LineKind,
    /// True if the GPUs are in different packages.
    crosses: bool,
}

/// An NVSwitch plane.
struct Plane {
    name: String,
    /// The GPUs on it, with their links.
    ports: Vec<Port>,
}

/// A GPU on a plane, and its links to the plane.
struct Port {
    gpu: usize,
    count: u32,
    kind: LineKind,
}

/// The active links of one GPU that do not lead to a GPU.
#[derive(Default)]
struct NonGpuLinks {
    to_switches: u32,
    to_cpu: u32,
    /// The switches whose addresses are known.
    switches: BTreeSet<PciAddress>,
}

impl Picture {
    /// Makes the picture of a machine with its title.
    pub fn new(title: &str, observed: &NodeObservation, topology: &NodeTopology) -> Self {
        let (title, models) = (Some(clean(title)), models(topology.gpus()));
        Self { title, models, ..Self::build(observed, topology, |_| None) }
    }

    /// Makes the picture for a page: without a title, in the page's own colours, and with `marks` by the GPU's index in
    /// the topology. A GPU without a mark is shown as free.
    pub fn of_node(observed: &NodeObservation, topology: &NodeTopology, marks: &BTreeMap<usize, Mark>) -> Self {
        let unmarked = Mark::default();
        let mark = |place| Some(marks.get(&place).unwrap_or(&unmarked));
        Self { max_row_width: MAX_ROW_WIDTH_IN_PAGE, ..Self::build(observed, topology, mark) }
    }

    fn build<'a>(
        observed: &NodeObservation,
        topology: &NodeTopology,
        mark: impl Fn(usize) -> Option<&'a Mark>,
    ) -> Self {
        let parts = outline(observed, topology);
        let non_gpu_links = topology.gpus().iter().map(|gpu| NonGpuLinks::new(gpu, observed)).collect();
        let marks = (0..topology.gpus().len()).map(mark).collect();
        let builder = Builder { topology, non_gpu_links, marks };
        let mut packages = builder.blocks(&parts, None);
        packages.sort_by_key(|package| package.kind == Kind::Unknown);
        let (links, planes) = (builder.links(&packages), builder.planes());
        Self { title: None, max_row_width: MAX_ROW_WIDTH, models: Vec::new(), packages, links, planes }
    }
}

impl Block {
    fn holds(&self, gpu: usize) -> bool {
        self.gpu == Some(gpu) || self.below.iter().any(|block| block.holds(gpu))
    }
}

impl NonGpuLinks {
    fn new(gpu: &Gpu, observed: &NodeObservation) -> Self {
        let mut links_of_gpu = Self::default();
        let mut numbers = BTreeSet::new();
        let seen = observed.gpus.iter().find(|seen| seen.uuid == gpu.uuid && seen.pci == gpu.pci);
        let groups = seen.and_then(|seen| seen.nvlinks.as_ref()).into_iter().flatten();
        for group in groups.filter(|group| group.active) {
            let links = group.links.iter().filter(|number| numbers.insert(**number)).count();
            let links = u32::try_from(links).unwrap_or(u32::MAX);
            match group.remote {
                NvLinkRemote::Switch(pci) => {
                    links_of_gpu.to_switches = links_of_gpu.to_switches.saturating_add(links);
                    links_of_gpu.switches.extend(pci);
                }
                NvLinkRemote::Cpu => links_of_gpu.to_cpu = links_of_gpu.to_cpu.saturating_add(links),
                NvLinkRemote::Gpu(_) | NvLinkRemote::Unknown => {}
            }
        }
        links_of_gpu
    }
}

/// Builds the parts of a picture.
struct Builder<'a> {
    topology: &'a NodeTopology,
    /// The links that do not lead to GPUs, in the order of the topology's GPUs.
    non_gpu_links: Vec<NonGpuLinks>,
    /// The marks of GPUs in a page, in the same order.
    marks: Vec<Option<&'a Mark>>,
}

impl Builder<'_> {
    /// Boxes side by side, in a NUMA node or in none; NICs that follow each other share one box.
    fn blocks(&self, parts: &[Part<'_>], numa: Option<NumaNodeId>) -> Vec<Block> {
        let is_nic = |part: &Part<'_>| matches!(part.kind, PartKind::Nic(_));
        let mut blocks = Vec::new();
        for group in parts.chunk_by(|a, b| is_nic(a) && is_nic(b)) {
            let mut block = match group {
                [part] if !is_nic(part) => self.block(part, numa),
                nics => self.nics(nics, numa),
            };
            // No real device is below a card, but a file may have one there.
            let siblings = if block.kind.is_leaf() { std::mem::take(&mut block.below) } else { Vec::new() };
            blocks.push(block);
            blocks.extend(siblings);
        }
        blocks
    }

    fn block(&self, part: &Part<'_>, numa: Option<NumaNodeId>) -> Block {
        let numa = if let PartKind::Node(id, _) = part.kind { id } else { numa };
        let mut below = self.blocks(&part.below, numa);
        let name = match part.kind {
            PartKind::Switch => "switch".to_owned(),
            PartKind::Port => "port".to_owned(),
            PartKind::UnlistedGpu => "GPU".to_owned(),
            _ => part.label(),
        };
        let address: Vec<String> = part.pci.map(address).into_iter().collect();
        let (kind, more) = match part.kind {
            PartKind::Package(id) => {
                // NUMA nodes without a PCI device share one line.
                let has_devices = |node: &&Part<'_>| !node.below.is_empty();
                let number = |node: &Part<'_>| if let PartKind::Node(id, _) = node.kind { Some(id?.0) } else { None };
                let empty: Vec<u32> = part.below.iter().filter(|node| !has_devices(node)).filter_map(number).collect();
                below.retain(|node| !node.below.is_empty());
                let kind = if id.is_some() { Kind::Package } else { Kind::Unknown };
                let nodes = if empty.len() == 1 { "node" } else { "nodes" };
                let note = (!empty.is_empty()).then(|| format!("no PCI devices: NUMA {nodes} {}", ranges(&empty)));
                (kind, note.into_iter().collect())
            }
            PartKind::Unseen => (Kind::Unknown, Vec::new()),
            PartKind::Node(..) => (Kind::Node, part.cpus().iter().map(|cpus| clean(cpus)).collect()),
            PartKind::Bridge => (Kind::Bridge, Vec::new()),
            PartKind::Switch => (Kind::Switch, address),
            PartKind::Port | PartKind::Deeper => (Kind::Port, address),
            PartKind::Nic(_) => (Kind::Nic, address),
            PartKind::UnlistedGpu => (Kind::Unlisted, [address, vec!["not in NVML".to_owned()]].concat()),
            PartKind::Gpu(place) => return self.gpu(place, numa, below),
        };
        let lines = [name].into_iter().chain(more).collect();
        Block { kind, lines, tooltip: clean(&part.label()), gpu: None, ports: 0, below }
    }

    fn gpu(&self, place: usize, numa: Option<NumaNodeId>, below: Vec<Block>) -> Block {
        let mut lines = Vec::new();
        let mut tooltip = String::new();
        if let Some(gpu) = self.topology.gpus().get(place) {
            lines.extend([format!("GPU {}", gpu.index), address(gpu.pci)]);
            lines.extend(gpu.numa.filter(|_| gpu.numa != numa).map(|numa| format!("NUMA {numa}")));
            let model = gpu.model.as_deref().map(|model| format!(", {}", clean(model)));
            let memory = gpu.facts.memory_mib.map(|mib| format!(", {mib} MiB"));
            tooltip = format!("GPU {}, {}, {}", gpu.index, gpu.pci, gpu.uuid);
            let rail = gpu.rail.map(|rail| format!(", rail {rail}"));
            tooltip.extend([model, memory, rail].into_iter().flatten());
        }
        let to_cpu = self.non_gpu_links.get(place).map_or(0, |links_of_gpu| links_of_gpu.to_cpu);
        lines.extend((to_cpu > 0).then(|| format!("NV{to_cpu} to CPU")));
        let mark = self.mark(place);
        lines.extend(mark.into_iter().flat_map(|mark| &mark.lines).map(|line| clean(line)));
        let kind = mark.map_or(Kind::Gpu, |mark| Kind::Marked(mark.holder, mark.is_sick));
        let all = 0..self.topology.gpus().len();
        let links: i64 = all.map(|other| i64::from(self.direct_links(place.min(other), place.max(other)) > 0)).sum();
        let ports = links + i64::from(self.plane(place).is_some());
        Block { kind, lines, tooltip, gpu: Some(place), ports, below }
    }

    /// One box for NICs: their interfaces and the fastest rate.
    fn nics(&self, parts: &[Part<'_>], numa: Option<NumaNodeId>) -> Block {
        let mut names = Vec::new();
        let mut fastest = None;
        for part in parts {
            let PartKind::Nic(nics) = part.kind else { continue };
            names.extend(nics.iter().map(|nic| clean(&nic.name)));
            fastest = nics.iter().map(|nic| nic.mbps).fold(fastest, Option::max);
            if nics.is_empty() {
                names.push(part.pci.map_or("NIC".to_owned(), |pci| format!("NIC {}", address(pci))));
            }
        }
        let more = names.len().saturating_sub(MAX_NAMES);
        names.truncate(MAX_NAMES);
        names.extend((more > 0).then(|| format!("+{more}")));
        names.extend(fastest.map(|mbps| format!("{} Gb/s", mbps / 1000)));
        let tooltip = parts.iter().map(|part| clean(&part.label())).collect::<Vec<_>>().join("; ");
        let below = parts.iter().flat_map(|nic| self.blocks(&nic.below, numa)).collect();
        Block { kind: Kind::Nic, lines: names, tooltip, gpu: None, ports: 0, below }
    }

    /// The NVLinks between GPUs; a link crosses if its GPUs are not in the same one of these packages.
    fn links(&self, packages: &[Block]) -> Vec<Link> {
        let home = |gpu| packages.iter().position(|package| package.holds(gpu));
        let all = 0..self.topology.gpus().len();
        let pairs = all.clone().flat_map(|a| all.clone().map(move |b| (a, b)));
        let link = |(a, b)| {
            let crosses = home(a) != home(b);
            let kind = match (self.holder_line(a), self.holder_line(b)) {
                (Some(of_a), Some(of_b)) if of_a == of_b => of_a,
                _ if crosses => LineKind::Crossing,
                _ => LineKind::Near,
            };
            Link { a, b, count: self.direct_links(a, b), kind, crosses }
        };
        pairs.map(link).filter(|link| link.count > 0).collect()
    }

    /// The number of NVLinks from GPU `a` directly to GPU `b`; 0 unless `a` is smaller. The topology also counts the
    /// links over a plane, for which the picture has other lines.
    fn direct_links(&self, a: usize, b: usize) -> u32 {
        let links = |place: usize| self.non_gpu_links.get(place).map_or(0, |links_of_gpu| links_of_gpu.to_switches);
        let is_same_plane = self.plane(a).is_some() && self.plane(a) == self.plane(b);
        let over_plane = if is_same_plane { links(a).min(links(b)) } else { 0 };
        if a < b { self.topology.nvlink_count(a, b).saturating_sub(over_plane) } else { 0 }
    }

    /// The plane that a GPU is on.
    fn plane(&self, gpu: usize) -> Option<u32> {
        self.topology.gpus().get(gpu)?.nvswitch_plane
    }

    fn planes(&self) -> Vec<Plane> {
        let mut planes: BTreeMap<u32, (Vec<Port>, BTreeSet<PciAddress>)> = BTreeMap::new();
        for (gpu, links_of_gpu) in self.non_gpu_links.iter().enumerate() {
            let Some(number) = self.plane(gpu) else { continue };
            let (ports, switches) = planes.entry(number).or_default();
            let kind = self.holder_line(gpu).unwrap_or(LineKind::Near);
            ports.push(Port { gpu, count: links_of_gpu.to_switches, kind });
            switches.extend(&links_of_gpu.switches);
        }
        let several = planes.len() > 1;
        let plane = |(number, (ports, switches)): (u32, (Vec<Port>, BTreeSet<PciAddress>))| {
            let which = if several { format!(" plane {number}") } else { String::new() };
            let switches = match switches.len() {
                0 => String::new(),
                1 => " (1 switch)".to_owned(),
                switches => format!(" ({switches} switches)"),
            };
            Plane { name: format!("NVSwitch{which}{switches}"), ports }
        };
        planes.into_iter().map(plane).collect()
    }

    fn mark(&self, place: usize) -> Option<&Mark> {
        *self.marks.get(place)?
    }

    /// The kind of the links of a GPU, if it has one holder.
    fn holder_line(&self, place: usize) -> Option<LineKind> {
        if let Holder::One(colour) = self.mark(place)?.holder { Some(LineKind::Held(colour)) } else { None }
    }
}

/// The models with their GPUs, a line for each.
fn models(gpus: &[Gpu]) -> Vec<String> {
    let mut models: BTreeMap<Option<&str>, Vec<u32>> = BTreeMap::new();
    for gpu in gpus {
        models.entry(gpu.model.as_deref()).or_default().push(gpu.index);
    }
    models.values_mut().for_each(|indices| indices.sort_unstable());
    let mut models: Vec<(Vec<u32>, Option<&str>)> = models.into_iter().map(|(model, gpus)| (gpus, model)).collect();
    models.sort();
    let name = |model: Option<&str>| model.map_or("model unknown".to_owned(), clean);
    let lines = models.into_iter().map(|(gpus, model)| format!("GPU {}: {}", ranges(&gpus), name(model)));
    if gpus.is_empty() { vec!["no GPUs".to_owned()] } else { lines.collect() }
}

/// A PCI address, without the domain if that is 0.
pub fn address(pci: PciAddress) -> String {
    let long = pci.to_string();
    long.strip_prefix("0000:").map(str::to_owned).unwrap_or(long)
}
