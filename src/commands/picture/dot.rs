//! The picture for Graphviz, which finds the places itself: packages and NUMA nodes as clusters.

use super::layout::Kind;
use super::svg::{breadth, colours, strand_colour};
use super::text::clean;
use super::{Picture, ranges};
use crate::commands::outline::{Device, Node, What, nic_name, node_cpus, node_name, package_name};
use crate::topology::NumaNodeId;

/// The picture in the DOT language.
pub(in crate::commands) fn dot(picture: &Picture<'_>) -> String {
    let mut writer = Writer { picture, text: String::new(), nodes: 0, clusters: 0, depth: 0 };
    writer.graph();
    writer.text
}

struct Writer<'a> {
    picture: &'a Picture<'a>,
    text: String,
    /// Numbers for the names of nodes and clusters: text from files stands in labels only.
    nodes: usize,
    clusters: usize,
    depth: usize,
}

impl Writer<'_> {
    fn graph(&mut self) {
        let picture = self.picture;
        self.open("graph linkwise");
        let mut label = vec![picture.title.clone()];
        label.extend(picture.models());
        label.extend(picture.allocated_line());
        let label = quote(&label);
        self.line(&format!(
            "graph [label={label}, labelloc=t, fontname=\"sans-serif\", fontsize=16, ranksep=0.35, newrank=true, ordering=out];"
        ));
        self.line(
            "node [shape=box, style=filled, fontname=\"sans-serif\", fontsize=11, height=0.3, margin=\"0.1,0.05\"];",
        );
        self.line("edge [color=\"#6e6e73\", fontname=\"sans-serif\", fontsize=10];");
        for package in &picture.outline.packages {
            let kind = if package.id.is_some() { Kind::Package } else { Kind::Unknown };
            let (with, empty) = package.by_devices();
            let mut label = vec![package_name(package.id)];
            if !empty.is_empty() {
                label.push(format!("no PCI devices: NUMA {}", ranges(&empty)));
            }
            self.cluster(kind, &label);
            if with.is_empty() {
                // Graphviz draws no cluster without a node.
                let name = self.name();
                self.line(&format!("{name} [style=invis, label=\"\"];"));
            }
            for node in with {
                self.node(node);
            }
            self.close();
        }
        if !picture.outline.unseen.is_empty() {
            self.cluster(Kind::Unknown, &["not in the host's PCI tree".to_owned()]);
            for place in &picture.outline.unseen {
                self.gpu(*place, None);
            }
            self.close();
        }
        self.links();
        self.close();
    }

    fn node(&mut self, node: &Node<'_>) {
        let label: Vec<String> = [node_name(node.id)].into_iter().chain(node_cpus(node)).collect();
        self.cluster(Kind::Node, &label);
        for bridge in &node.bridges {
            let name = self.name();
            self.shape(&name, Kind::Bridge, &["host bridge".to_owned()], "");
            self.devices(&name, bridge, node.id);
        }
        self.close();
    }

    fn devices(&mut self, above: &str, devices: &[Device<'_>], numa: Option<NumaNodeId>) {
        for device in devices {
            let address = device.pci.map(|pci| self.picture.address(pci));
            let with_address = |what: &str| [what.to_owned()].into_iter().chain(address.clone()).collect::<Vec<_>>();
            let name = match device.what {
                What::Gpu(place) => self.gpu(place, numa),
                What::Switch => self.named(Kind::Switch, &with_address("PCIe switch")),
                What::Port => self.named(Kind::Port, &with_address("port")),
                What::UnlistedGpu => self.named(Kind::Unlisted, &with_address("GPU that NVML does not list")),
                What::Deeper => self.named(Kind::Port, &["…".to_owned()]),
                What::Nic([]) => self.named(Kind::Nic, &with_address("NIC")),
                What::Nic(nics) => self.named(Kind::Nic, &nics.iter().map(nic_name).collect::<Vec<_>>()),
            };
            self.line(&format!("{above} -- {name};"));
            self.devices(&name, &device.below, numa);
        }
    }

    fn links(&mut self) {
        let picture = self.picture;
        for link in &picture.links {
            let deep = if picture.crosses(*link) { 6 } else { 3 };
            let colour = strand_colour(picture.kind_of(*link));
            // The count is a node of its own below the GPUs: links drawn from GPU to GPU would run along their row.
            let name = self.name();
            let count = link.count;
            self.line(&format!("{name} [label=\"NV{count}\", shape=plain, style=\"\", fontcolor=\"{colour}\"];"));
            let pen = breadth(count);
            for end in [link.a, link.b] {
                self.line(&format!("gpu{end} -- {name} [color=\"{colour}\", penwidth={pen}, minlen={deep}];"));
            }
        }
        for (number, plane) in &picture.planes {
            let name = format!("plane{number}");
            self.shape(&name, Kind::Plane, &[picture.plane_name(*number, plane)], "");
            for place in &plane.gpus {
                let (count, colour) = (picture.switch_links(*place), strand_colour(picture.kinds_of_gpu(*place).1));
                let label = format!("label=\"NV{count}\", color=\"{colour}\", fontcolor=\"{colour}\"");
                self.line(&format!("gpu{place} -- {name} [{label}, penwidth={}];", breadth(count).min(6)));
            }
        }
    }

    fn gpu(&mut self, place: usize, numa: Option<NumaNodeId>) -> String {
        let name = format!("gpu{place}");
        let (kind, _) = self.picture.kinds_of_gpu(place);
        let tooltip = self.picture.gpu_tooltip(place);
        self.shape(&name, kind, &self.picture.gpu_lines(place, numa), &tooltip);
        name
    }

    fn named(&mut self, kind: Kind, lines: &[String]) -> String {
        let name = self.name();
        self.shape(&name, kind, lines, "");
        name
    }

    fn shape(&mut self, name: &str, kind: Kind, lines: &[String], tooltip: &str) {
        let (fill, border) = colours(kind);
        let tooltip = match tooltip {
            "" => String::new(),
            tooltip => format!(", tooltip={}", quote(&[tooltip.to_owned()])),
        };
        let style = if kind == Kind::Unlisted { ", style=\"filled,dashed\"" } else { "" };
        let label = quote(lines);
        self.line(&format!("{name} [label={label}, fillcolor=\"{fill}\", color=\"{border}\"{style}{tooltip}];"));
    }

    fn cluster(&mut self, kind: Kind, label: &[String]) {
        let (fill, border) = colours(kind);
        self.open(&format!("subgraph cluster{}", self.clusters));
        self.clusters += 1;
        let style = if kind == Kind::Unknown { "filled,rounded,dashed" } else { "filled,rounded" };
        let label = quote(label);
        self.line(&format!(
            "graph [label={label}, style=\"{style}\", fillcolor=\"{fill}\", color=\"{border}\", fontsize=12];"
        ));
    }

    fn name(&mut self) -> String {
        self.nodes += 1;
        format!("n{}", self.nodes)
    }

    fn open(&mut self, head: &str) {
        self.line(&format!("{head} {{"));
        self.depth += 1;
    }

    fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        self.line("}");
    }

    fn line(&mut self, line: &str) {
        self.text += &format!("{}{line}\n", "  ".repeat(self.depth));
    }
}

/// Lines as a quoted string. Graphviz reads escapes and, in labels, XML entities; both are escaped.
pub(super) fn quote(lines: &[String]) -> String {
    let line = |line: &String| clean(line).replace('&', "&amp;").replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", lines.iter().map(line).collect::<Vec<_>>().join("\\n"))
}
