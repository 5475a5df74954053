//! The picture for Graphviz, which places the parts itself: packages and NUMA nodes as clusters.

use super::kinds::{Kind, LineKind, breadth};
use super::{Block, Picture};

/// The picture in the DOT language.
pub fn dot(picture: &Picture) -> String {
    let mut writer = Writer::default();
    writer.graph(picture);
    writer.text
}

#[derive(Default)]
struct Writer {
    text: String,
    /// The number of names given: text from files stands in labels only.
    names: usize,
    depth: usize,
}

impl Writer {
    fn graph(&mut self, picture: &Picture) {
        self.line("graph linkwise {");
        self.depth += 1;
        let title = picture.title.as_slice();
        let label = quote(&[title, picture.models.as_slice(), picture.allocated.as_slice()].concat());
        self.line(&format!(
            "graph [label={label}, labelloc=t, fontname=\"sans-serif\", fontsize=16, ranksep=0.35, newrank=true, ordering=out];"
        ));
        self.line(
            "node [shape=box, style=filled, fontname=\"sans-serif\", fontsize=11, height=0.3, margin=\"0.1,0.05\"];",
        );
        let colour = LineKind::Pcie.colour();
        self.line(&format!("edge [color=\"{colour}\", fontname=\"sans-serif\", fontsize=10];"));
        for package in &picture.packages {
            self.block(package);
        }
        for link in &picture.links {
            let deep = if link.crosses { 6 } else { 3 };
            let (colour, pen, count) = (link.kind.colour(), breadth(link.count), link.count);
            // The count is a node of its own below the GPUs: links drawn from GPU to GPU would run along their row.
            let name = self.name("n");
            self.line(&format!("{name} [label=\"NV{count}\", shape=plain, style=\"\", fontcolor=\"{colour}\"];"));
            for end in [link.a, link.b] {
                self.line(&format!("gpu{end} -- {name} [color=\"{colour}\", penwidth={pen}, minlen={deep}];"));
            }
        }
        for plane in &picture.planes {
            let name = self.name("plane");
            self.node(&name, Kind::Plane, std::slice::from_ref(&plane.name), "");
            for port in &plane.ports {
                let (gpu, count, colour) = (port.gpu, port.count, port.kind.colour());
                let label = format!("label=\"NV{count}\", color=\"{colour}\", fontcolor=\"{colour}\"");
                self.line(&format!("gpu{gpu} -- {name} [{label}, penwidth={}];", breadth(count).min(6)));
            }
        }
        self.depth -= 1;
        self.line("}");
    }

    /// Writes a cluster, or a node with the nodes below it; returns its name.
    fn block(&mut self, block: &Block) -> String {
        let name = match block.gpu {
            Some(gpu) => format!("gpu{gpu}"),
            None if block.kind.is_frame() => self.name("cluster"),
            None => self.name("n"),
        };
        if !block.kind.is_frame() {
            self.node(&name, block.kind, &block.lines, &block.tooltip);
            for below in &block.below {
                let below = self.block(below);
                self.line(&format!("{name} -- {below};"));
            }
            return name;
        }
        self.line(&format!("subgraph {name} {{"));
        self.depth += 1;
        let (label, (fill, border)) = (quote(&block.lines), block.kind.colours());
        let style = if block.kind.is_dashed() { "filled,rounded,dashed" } else { "filled,rounded" };
        self.line(&format!(
            "graph [label={label}, style=\"{style}\", fillcolor=\"{fill}\", color=\"{border}\", fontsize=12];"
        ));
        if block.below.is_empty() {
            // Graphviz does not draw a cluster without a node.
            let name = self.name("n");
            self.line(&format!("{name} [style=invis, label=\"\"];"));
        }
        for below in &block.below {
            self.block(below);
        }
        self.depth -= 1;
        self.line("}");
        name
    }

    fn node(&mut self, name: &str, kind: Kind, lines: &[String], tooltip: &str) {
        let ((fill, border), label) = (kind.colours(), quote(lines));
        let tooltip = match tooltip {
            "" => String::new(),
            tooltip => format!(", tooltip={}", quote(&[tooltip.to_owned()])),
        };
        let style = if kind.is_dashed() { ", style=\"filled,dashed\"" } else { "" };
        self.line(&format!("{name} [label={label}, fillcolor=\"{fill}\", color=\"{border}\"{style}{tooltip}];"));
    }

    fn name(&mut self, what: &str) -> String {
        self.names += 1;
        format!("{what}{}", self.names)
    }

    fn line(&mut self, line: &str) {
        self.text += &format!("{}{line}\n", "  ".repeat(self.depth));
    }
}

/// Turns clean lines into a quoted string. Graphviz reads escapes and, in labels, XML entities; both are escaped.
pub(super) fn quote(lines: &[String]) -> String {
    let line = |line: &String| line.replace('&', "&amp;").replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", lines.iter().map(line).collect::<Vec<_>>().join("\\n"))
}
