//! The machine as a picture: what `linkwise topology --format svg|dot` draws.
//!
//! [`Picture`] is what is to be seen, without a place for anything; `layout` gives it places, `svg` and `dot` write it.
//! All of it is a function of the machine: no clock, no randomness, the same text for the same machine.

mod dot;
mod layout;
mod links;
mod stack;
mod svg;
#[cfg(test)]
mod tests;
mod text;
mod tree;

use std::collections::{BTreeMap, BTreeSet};

use super::outline::{Device, Outline};
use crate::machines::Machine;
use crate::topology::{Gpu, NodeObservation, NodeTopology, NumaNodeId, NvLinkRemote, PciAddress};
use layout::Kind;
use links::StrandKind;
use text::clean;

pub(super) use dot::dot;
pub(super) use svg::svg;

/// What is to be seen of a machine.
pub(super) struct Picture<'a> {
    title: String,
    topology: &'a NodeTopology,
    outline: Outline<'a>,
    /// In the order of the topology's GPUs.
    gpus: Vec<Face>,
    /// NVLinks from GPU to GPU.
    links: Vec<Link>,
    /// The NVSwitch planes, by their number.
    planes: BTreeMap<u32, Plane>,
    /// The GPUs that are held, as places; `None` without --allocated.
    allocated: Option<BTreeSet<usize>>,
    /// Whether addresses are written without their domain, because all are in domain 0.
    short: bool,
}

/// The links of one GPU that do not lead to a GPU.
#[derive(Default)]
struct Face {
    /// Active links to NVSwitches.
    switch_links: u32,
    /// Active links to the processor.
    cpu_links: u32,
}

/// The NVLinks between two GPUs, by their places; `a` is the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    a: usize,
    b: usize,
    count: u32,
}

/// An NVSwitch plane.
#[derive(Default)]
struct Plane {
    gpus: Vec<usize>,
    /// The switches whose addresses are known.
    switches: BTreeSet<PciAddress>,
}

impl<'a> Picture<'a> {
    /// Puts together what is to be seen; `allocated` are places in the topology's GPUs.
    pub fn new(machine: &'a Machine, topology: &'a NodeTopology, allocated: Option<BTreeSet<usize>>) -> Self {
        let outline = Outline::new(&machine.observed, topology);
        let short = addresses(&outline).into_iter().chain(topology.gpus().iter().map(|gpu| gpu.pci));
        let mut picture = Self {
            title: clean(&machine.title),
            topology,
            short: short.into_iter().all(|pci| pci.domain() == 0),
            outline,
            gpus: Vec::new(),
            links: Vec::new(),
            planes: BTreeMap::new(),
            allocated,
        };
        picture.add_links(&machine.observed);
        picture
    }

    fn add_links(&mut self, observed: &NodeObservation) {
        for (place, gpu) in self.topology.gpus().iter().enumerate() {
            let mut face = Face::default();
            let mut numbers = BTreeSet::new();
            let seen = observed.gpus.iter().find(|seen| seen.uuid == gpu.uuid && seen.pci == gpu.pci);
            let plane = gpu.nvswitch_plane.map(|plane| self.planes.entry(plane).or_default());
            let mut switches = BTreeSet::new();
            for group in seen.and_then(|seen| seen.nvlinks.as_ref()).into_iter().flatten().filter(|group| group.active)
            {
                let links = group.links.iter().filter(|number| numbers.insert(**number)).count();
                let links = u32::try_from(links).unwrap_or(u32::MAX);
                match group.remote {
                    NvLinkRemote::Switch(pci) => {
                        face.switch_links = face.switch_links.saturating_add(links);
                        switches.extend(pci);
                    }
                    NvLinkRemote::Cpu => face.cpu_links = face.cpu_links.saturating_add(links),
                    NvLinkRemote::Gpu(_) | NvLinkRemote::Unknown => {}
                }
            }
            if let Some(plane) = plane {
                plane.gpus.push(place);
                plane.switches.extend(switches);
            }
            self.gpus.push(face);
        }
        let count = self.topology.gpus().len();
        for a in 0..count {
            for b in a + 1..count {
                // The topology counts the way over the plane too; here that is the plane's.
                let direct = self.topology.nvlink_count(a, b).saturating_sub(self.over_plane(a, b));
                if direct > 0 {
                    self.links.push(Link { a, b, count: direct });
                }
            }
        }
    }

    /// The links between two GPUs that go over a plane.
    fn over_plane(&self, a: usize, b: usize) -> u32 {
        let plane = |place: usize| self.gpu(place).and_then(|gpu| gpu.nvswitch_plane);
        if plane(a).is_none() || plane(a) != plane(b) {
            return 0;
        }
        self.switch_links(a).min(self.switch_links(b))
    }

    fn gpu(&self, place: usize) -> Option<&'a Gpu> {
        self.topology.gpus().get(place)
    }

    fn switch_links(&self, place: usize) -> u32 {
        self.gpus.get(place).map_or(0, |face| face.switch_links)
    }

    fn is_allocated(&self, place: usize) -> bool {
        self.allocated.as_ref().is_some_and(|allocated| allocated.contains(&place))
    }

    /// Whether a link joins two packages.
    fn crosses(&self, link: Link) -> bool {
        let package = |place: usize| self.gpu(place).and_then(|gpu| gpu.package);
        package(link.a) != package(link.b)
    }

    /// How a link is coloured.
    fn kind_of(&self, link: Link) -> StrandKind {
        match self.crosses(link) {
            _ if self.is_allocated(link.a) && self.is_allocated(link.b) => StrandKind::Allocated,
            true => StrandKind::Crossing,
            false => StrandKind::Near,
        }
    }

    /// How a GPU and its links to NVSwitches are coloured.
    fn kinds_of_gpu(&self, place: usize) -> (Kind, StrandKind) {
        match self.is_allocated(place) {
            true => (Kind::Allocated, StrandKind::Allocated),
            false => (Kind::Gpu, StrandKind::Near),
        }
    }

    /// An address as it is written here.
    fn address(&self, pci: PciAddress) -> String {
        let long = pci.to_string();
        if self.short { long.strip_prefix("0000:").map(str::to_owned).unwrap_or(long) } else { long }
    }

    /// The lines in a GPU's box. `numa` is the NUMA node it is drawn in.
    fn gpu_lines(&self, place: usize, numa: Option<NumaNodeId>) -> Vec<String> {
        let Some(gpu) = self.gpu(place) else { return Vec::new() };
        let mut lines = vec![format!("GPU {}", gpu.index), self.address(gpu.pci)];
        if gpu.numa != numa
            && let Some(numa) = gpu.numa
        {
            lines.push(format!("NUMA {numa}"));
        }
        match self.gpus.get(place).map_or(0, |face| face.cpu_links) {
            0 => {}
            links => lines.push(format!("NV{links} to CPU")),
        }
        if self.is_allocated(place) {
            lines.push("allocated".to_owned());
        }
        lines
    }

    /// The facts of a GPU, shown when a viewer points at it.
    fn gpu_tooltip(&self, place: usize) -> String {
        let Some(gpu) = self.gpu(place) else { return String::new() };
        let mut text = format!("GPU {}, {}, {}", gpu.index, gpu.pci, gpu.uuid);
        if let Some(model) = &gpu.model {
            text += &format!(", {}", clean(model));
        }
        if let Some(mib) = gpu.memory_mib {
            text += &format!(", {mib} MiB");
        }
        text
    }

    /// Which GPUs are of which model: one line, or one for each of several models.
    fn models(&self) -> Vec<String> {
        let mut models: BTreeMap<Option<&str>, Vec<u32>> = BTreeMap::new();
        for gpu in self.topology.gpus() {
            models.entry(gpu.model.as_deref()).or_default().push(gpu.index);
        }
        let several = models.len() > 1;
        let mut lines: Vec<(Vec<u32>, String)> = Vec::new();
        for (model, mut indices) in models {
            indices.sort_unstable();
            let name = model.map_or("model unknown".to_owned(), clean);
            let line = match several {
                true => format!("GPU {}: {name}", ranges(&indices)),
                false => format!("{} GPU{}: {name}", indices.len(), if indices.len() == 1 { "" } else { "s" }),
            };
            lines.push((indices, line));
        }
        if lines.is_empty() {
            return vec!["no GPUs".to_owned()];
        }
        lines.sort();
        lines.into_iter().map(|(_, line)| line).collect()
    }

    /// What a plane is called.
    fn plane_name(&self, number: u32, plane: &Plane) -> String {
        let which = if self.planes.len() > 1 { format!(" plane {number}") } else { String::new() };
        match plane.switches.len() {
            0 => format!("NVSwitch{which}"),
            1 => format!("NVSwitch{which} (1 switch)"),
            switches => format!("NVSwitch{which} ({switches} switches)"),
        }
    }

    /// The legend's line for what is held; `None` without --allocated.
    fn allocated_line(&self) -> Option<String> {
        let allocated = self.allocated.as_ref()?;
        let mut indices: Vec<u32> =
            allocated.iter().filter_map(|place| self.gpu(*place)).map(|gpu| gpu.index).collect();
        indices.sort_unstable();
        let all = self.topology.gpus().len();
        Some(match indices.len() {
            0 => format!("allocated: none of {all} GPUs"),
            held => format!("allocated: GPU {} ({held} of {all})", ranges(&indices)),
        })
    }
}

/// `0-3, 6`: sorted numbers, runs of three and more drawn together.
fn ranges(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let run = |&(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

/// The addresses of everything in the outline.
fn addresses(outline: &Outline<'_>) -> Vec<PciAddress> {
    let nodes = outline.packages.iter().flat_map(|package| &package.nodes);
    let mut open: Vec<&Device<'_>> = nodes.flat_map(|node| node.bridges.iter().flatten()).collect();
    let mut all = Vec::new();
    while let Some(device) = open.pop() {
        all.extend(device.pci);
        open.extend(&device.below);
    }
    all
}
