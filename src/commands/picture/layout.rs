//! Where everything in a picture goes: packages side by side, their PCI trees inside, NVLinks below. Integers only.

use std::collections::{BTreeMap, BTreeSet};

use super::links::{Routes, Strand, StrandKind, TRACK, ports};
use super::text::{Style, clean, fit, width, wrap};
use super::tree::{Block, LEVEL, Measure, place_row, row_width};
use super::{Picture, stack};
use crate::commands::outline::{Node, Package, node_cpus, node_name, package_name};

/// Around the picture.
const MARGIN: i64 = 24;
/// Around what is in a package or in a NUMA node, and between packages.
const PAD: i64 = 14;
/// The head of a NUMA node: its name and its CPUs.
const NODE_HEAD: i64 = 48;
/// The head of a package: its name.
const PACKAGE_HEAD: i64 = 34;
/// Between two rows of packages: a plane's bar, and counts on both sides.
const BETWEEN: i64 = 122;
/// The narrowest picture: that of a machine with one GPU still has a title.
const NARROWEST: i64 = 560;

/// A rectangle, in pixels from the top left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rect {
    pub x: i64,
    pub y: i64,
    pub width: i64,
    pub height: i64,
}

impl Rect {
    pub fn middle(self) -> i64 {
        self.x + self.width / 2
    }

    pub fn bottom(self) -> i64 {
        self.y + self.height
    }

    pub fn right(self) -> i64 {
        self.x + self.width
    }
}

/// One line of text; `x` is its middle or its left end, `y` its baseline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Text {
    pub text: String,
    pub style: Style,
    pub x: i64,
    pub y: i64,
    pub centred: bool,
}

impl Text {
    pub fn centred(text: &str, style: Style, x: i64, y: i64) -> Self {
        Self { text: text.to_owned(), style, x, y, centred: true }
    }

    pub fn left(text: &str, style: Style, x: i64, y: i64) -> Self {
        Self { text: text.to_owned(), style, x, y, centred: false }
    }
}

/// What a box is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Package,
    /// An unknown package, or the place of the GPUs that are not in the host's tree.
    Unknown,
    Node,
    Bridge,
    Switch,
    Port,
    Gpu,
    Allocated,
    /// A GPU that NVML does not list.
    Unlisted,
    Nic,
    Plane,
}

/// A box with its texts.
pub(super) struct Shape {
    pub rect: Rect,
    pub kind: Kind,
    pub texts: Vec<Text>,
    /// What a viewer shows when pointed at; may be empty.
    pub tooltip: String,
}

/// What a line of the legend shows beside its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sample {
    Box(Kind),
    Wire,
    Strand(StrandKind),
}

/// Everything with its place; drawn in this order: boxes around, wires, strands, boxes on top.
pub(super) struct Layout {
    pub width: i64,
    pub height: i64,
    pub frames: Vec<Shape>,
    pub wires: Vec<Vec<(i64, i64)>>,
    pub strands: Vec<Strand>,
    pub shapes: Vec<Shape>,
    pub texts: Vec<Text>,
    /// The sample's box, what is in it, what it means.
    pub legend: Vec<(Rect, Sample, Text)>,
}

/// What the parts draw on.
#[derive(Default)]
pub(super) struct Canvas {
    /// The top of the host bridges.
    pub bars: i64,
    /// The top of the row of GPUs, and its height.
    pub leaves: i64,
    pub leaf_height: i64,
    pub gpus: BTreeMap<usize, Rect>,
    pub frames: Vec<Shape>,
    pub shapes: Vec<Shape>,
    pub wires: Vec<Vec<(i64, i64)>>,
    pub strands: Vec<Strand>,
}

/// A package, measured.
pub(super) struct Home {
    name: String,
    kind: Kind,
    /// NUMA nodes without a PCI device, in one line.
    note: Option<String>,
    nodes: Vec<Room>,
    pub width: i64,
}

/// A NUMA node, measured.
struct Room {
    /// Name and CPUs; nothing around GPUs that are in no tree.
    head: Option<(String, String)>,
    blocks: Vec<Block>,
    width: i64,
}

impl Layout {
    pub fn new(picture: &Picture<'_>) -> Self {
        let homes = homes(picture);
        let (upper, lower) = homes.split_at(stack::split(picture, &homes));
        let inside = row(upper).max(row(lower)).max(NARROWEST);
        let (texts, top) = head(picture, inside);

        let blocks = || homes.iter().flat_map(|home| &home.nodes).flat_map(|room| &room.blocks);
        let note = if homes.iter().any(|home| home.note.is_some()) { 20 } else { 0 };
        let node_top = top + PACKAGE_HEAD + note;
        let bars = node_top + NODE_HEAD;
        let leaves = bars + blocks().map(|block| block.depth).max().unwrap_or(0) * LEVEL;
        let leaf_height = blocks().map(|block| block.leaf_height).max().unwrap_or(0);
        let node_bottom = leaves + leaf_height + PAD;
        let empty = || Canvas { bars, leaves, leaf_height, ..Default::default() };
        let (mut canvas, mut below) = (empty(), empty());

        let mut home_of = BTreeMap::new();
        let mut number = 0;
        for (homes, canvas) in [(upper, &mut canvas), (lower, &mut below)] {
            let mut x = MARGIN + (inside - row(homes)) / 2;
            for home in homes {
                let before: BTreeSet<usize> = canvas.gpus.keys().copied().collect();
                let rect = Rect { x, y: top, width: home.width, height: node_bottom + PAD - top };
                home.place(rect, node_top, node_bottom, canvas);
                home_of.extend(canvas.gpus.keys().filter(|gpu| !before.contains(gpu)).map(|gpu| (*gpu, number)));
                x += home.width + PAD;
                number += 1;
            }
        }

        let mut bottom = node_bottom + PAD;
        let row_height = bottom - top;
        let planes = picture.planes.len();
        if !lower.is_empty() {
            let lower_top = bottom + if planes > 0 { BETWEEN } else { PAD };
            stack::put_below(below, &mut canvas, top, lower_top, row_height, planes > 0);
        }
        let routes = Routes::new(picture, &canvas, &home_of);
        bottom += routes.inner * TRACK;
        for frame in canvas.frames.iter_mut().filter(|frame| frame.rect.y == top) {
            frame.rect.height = bottom - top;
        }
        let start = if homes.is_empty() { top } else { bottom };
        let start = if routes.crossing > 0 { start + 8 } else { start };
        let end = routes.draw(picture, &mut canvas, node_bottom + PAD / 2, start);
        let end = canvas.frames.iter().map(|frame| frame.rect.bottom()).fold(end, i64::max);
        let (legend, bottom) = legend(picture, &canvas.strands, !canvas.wires.is_empty(), inside, end + PAD * 2);
        Self {
            width: inside + 2 * MARGIN,
            height: bottom + MARGIN,
            frames: canvas.frames,
            wires: canvas.wires,
            strands: canvas.strands,
            shapes: canvas.shapes,
            texts,
            legend,
        }
    }
}

/// The width of packages side by side.
pub(super) fn row(homes: &[Home]) -> i64 {
    (homes.iter().map(|home| home.width + PAD).sum::<i64>() - PAD).max(0)
}

impl Home {
    fn frame(&self, rect: Rect) -> Shape {
        let mut texts = vec![Text::left(&self.name, Style::Heading, rect.x + PAD, rect.y + 22)];
        if let Some(note) = &self.note {
            let note = fit(note, Style::Plain, rect.width - 2 * PAD);
            texts.push(Text::left(&note, Style::Plain, rect.x + PAD, rect.y + 42));
        }
        Shape { rect, kind: self.kind, texts, tooltip: self.note.clone().unwrap_or_default() }
    }

    fn place(&self, around: Rect, top: i64, bottom: i64, canvas: &mut Canvas) {
        canvas.frames.push(self.frame(around));
        let mut x = around.x + PAD;
        for room in &self.nodes {
            let rect = Rect { x, y: top, width: room.width, height: bottom - top };
            if let Some((name, cpus)) = &room.head {
                let short = fit(cpus, Style::Mono, rect.width - 2 * PAD);
                let texts = vec![
                    Text::left(name, Style::Heading, x + PAD, top + 20),
                    Text::left(&short, Style::Mono, x + PAD, top + 37),
                ];
                let tooltip = if short == *cpus { String::new() } else { cpus.clone() };
                canvas.frames.push(Shape { rect, kind: Kind::Node, texts, tooltip });
            }
            place_row(&room.blocks, x + (room.width - row_width(&room.blocks)) / 2, canvas);
            x += room.width + PAD;
        }
    }
}

/// The title, what the GPUs are, and where the packages begin.
fn head(picture: &Picture<'_>, room: i64) -> (Vec<Text>, i64) {
    let mut texts = Vec::new();
    let mut y = MARGIN;
    let titles = wrap(&picture.title, Style::Title, room).into_iter().map(|line| (line, Style::Title));
    let models = picture.models();
    let models = models.iter().flat_map(|model| wrap(model, Style::Subtitle, room));
    for (line, style) in titles.chain(models.map(|line| (line, Style::Subtitle))) {
        texts.push(Text::left(&line, style, MARGIN, y + style.size()));
        y += style.line() + 2;
    }
    (texts, y + PAD)
}

fn homes(picture: &Picture<'_>) -> Vec<Home> {
    let measure = Measure { picture, ports: ports(picture) };
    let mut packages: Vec<&Package<'_>> = picture.outline.packages.iter().collect();
    packages.sort_by_key(|package| package.id.is_none());
    let mut homes: Vec<Home> = packages.into_iter().map(|package| home(package, &measure)).collect();
    if !picture.outline.unseen.is_empty() {
        let blocks: Vec<Block> = picture.outline.unseen.iter().map(|gpu| measure.gpu(*gpu, None)).collect();
        let room = Room { head: None, width: row_width(&blocks), blocks };
        let name = "not in the host's PCI tree".to_owned();
        homes.push(Home::new(name, Kind::Unknown, None, vec![room]));
    }
    homes
}

impl Home {
    fn new(name: String, kind: Kind, note: Option<String>, mut nodes: Vec<Room>) -> Self {
        let inside = nodes.iter().map(|room| room.width + PAD).sum::<i64>() - PAD;
        let note_width = note.as_ref().map_or(0, |note| width(note, Style::Plain).min(260));
        let least = width(&name, Style::Heading).max(note_width);
        if let Some(last) = nodes.last_mut() {
            last.width += (least - inside).max(0);
        }
        Self { name, kind, note, nodes, width: inside.max(least) + 2 * PAD }
    }
}

fn home(package: &Package<'_>, measure: &Measure<'_>) -> Home {
    let (with, empty) = package.by_devices();
    let room = |node: &Node<'_>| {
        let blocks = measure.node(node);
        let name = node_name(node.id);
        let cpus = clean(&node_cpus(node).unwrap_or_default());
        let least = width(&name, Style::Heading).max(width(&cpus, Style::Mono).min(120));
        Room { head: Some((name, cpus)), width: row_width(&blocks).max(least) + 2 * PAD, blocks }
    };
    let nodes = if empty.len() == 1 { "node" } else { "nodes" };
    let note = (!empty.is_empty()).then(|| format!("no PCI devices: NUMA {nodes} {}", super::ranges(&empty)));
    let kind = if package.id.is_some() { Kind::Package } else { Kind::Unknown };
    Home::new(package_name(package.id), kind, note, with.into_iter().map(room).collect())
}

/// What the colours and lines mean, in as many rows as it takes.
fn legend(
    picture: &Picture<'_>,
    strands: &[Strand],
    wires: bool,
    room: i64,
    top: i64,
) -> (Vec<(Rect, Sample, Text)>, i64) {
    let mut entries: Vec<(Sample, String)> = Vec::new();
    if let Some(line) = picture.allocated_line() {
        entries.push((Sample::Box(Kind::Allocated), line));
        entries.push((Sample::Box(Kind::Gpu), "free".to_owned()));
    }
    if wires {
        entries.push((Sample::Wire, "PCIe".to_owned()));
    }
    for (kind, what) in [
        (StrandKind::Near, "NVLinks: the more, the wider (NV2: two links)"),
        (StrandKind::Crossing, "NVLinks between packages"),
        (StrandKind::Allocated, "NVLinks of allocated GPUs"),
    ] {
        if strands.iter().any(|strand| strand.kind == kind) {
            entries.push((Sample::Strand(kind), what.to_owned()));
        }
    }
    let mut placed = Vec::new();
    let (mut x, mut y) = (MARGIN, top);
    for (sample, text) in entries {
        let mut lines = wrap(&text, Style::Plain, room - 40);
        let wide = 34 + lines.iter().map(|line| width(line, Style::Plain)).max().unwrap_or(0);
        if x > MARGIN && x + wide > MARGIN + room {
            (x, y) = (MARGIN, y + 22);
        }
        let line = if lines.len() > 1 { fit(&text, Style::Plain, room - 40) } else { lines.pop().unwrap_or_default() };
        let text = Text::left(&line, Style::Plain, x + 34, y + 11);
        placed.push((Rect { x, y, width: 26, height: 14 }, sample, text));
        x += wide + 24;
    }
    let bottom = if placed.is_empty() { top - PAD * 2 } else { y + 14 };
    (placed, bottom)
}
