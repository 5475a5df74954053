//! The PCI trees of a picture: how wide each part is, and where it goes.
//!
//! Host bridges and switches are bars above what hangs on them; GPUs and NICs stand in one row at the bottom, the NICs
//! of one switch in columns. First [`Block`]s are measured, then placed.

use super::layout::{Canvas, Kind, Rect, Shape, Text};
use super::text::{Style, clean, fit, width};
use super::{Picture, links};
use crate::commands::outline::{Device, Node, What, nic_name};
use crate::topology::{NicObservation, NumaNodeId, PciAddress};

/// Between two things that hang on the same bar.
const GAP: i64 = 10;
/// The height of a bar.
const BAR: i64 = 22;
/// From a bar to the next, or to the row of GPUs.
pub(super) const LEVEL: i64 = BAR + 16;
/// How high NICs are stacked.
const COLUMN: i64 = 84;
/// The widest box that a text may ask for.
const WIDEST: i64 = 170;
/// The most interfaces that are written into one NIC's box.
const MOST_NAMES: usize = 4;

/// A part of a PCI tree, measured.
pub(super) struct Block {
    pub width: i64,
    /// How many bars are above the row of GPUs here.
    pub depth: i64,
    /// The height that the row of GPUs must have for this.
    pub leaf_height: i64,
    tooltip: String,
    content: Content,
}

enum Content {
    /// A host bridge or a switch; the longest label that fits is shown.
    Bar { kind: Kind, labels: Vec<String>, below: Vec<Block> },
    /// A GPU, with its place where NVML lists it.
    Gpu { place: Option<usize>, kind: Kind, lines: Vec<String> },
    /// NICs, one above the other.
    Column(Vec<Cell>),
}

/// A NIC, or what else is no bar and no GPU.
pub(super) struct Cell {
    lines: Vec<String>,
    tooltip: String,
}

impl Cell {
    fn height(&self) -> i64 {
        lines_height(self.lines.len(), Style::Mono) + 8
    }

    fn width(&self) -> i64 {
        let widest = self.lines.iter().map(|line| width(line, Style::Mono)).max().unwrap_or(0);
        widest.min(WIDEST) + 12
    }
}

fn lines_height(lines: usize, style: Style) -> i64 {
    i64::try_from(lines).unwrap_or(i64::from(u16::MAX)).saturating_mul(style.line())
}

impl Block {
    /// Places it at `x`, `depth` bars below the top of its tree.
    pub fn place(&self, x: i64, depth: i64, canvas: &mut Canvas) {
        let shape = |rect, kind, texts| Shape { rect, kind, texts, tooltip: self.tooltip.clone() };
        match &self.content {
            Content::Bar { kind, labels, below } => {
                let rect = Rect { x, y: canvas.bars + depth * LEVEL, width: self.width, height: BAR };
                let label = labels.iter().find(|label| width(label, Style::Plain) <= self.width - 8);
                let text = label.map(|label| Text::centred(label, Style::Plain, rect.middle(), rect.y + 15));
                let mut at = x + (self.width - row_width(below)) / 2;
                for block in below {
                    let to = if block.depth > 0 { canvas.bars + (depth + 1) * LEVEL } else { canvas.leaves };
                    let foot = block.foot(at);
                    canvas.wires.push(vec![(foot, rect.bottom()), (foot, to)]);
                    block.place(at, depth + 1, canvas);
                    at += block.width + GAP;
                }
                canvas.shapes.push(shape(rect, *kind, text.into_iter().collect()));
            }
            Content::Gpu { place, kind, lines } => {
                let rect = Rect { x, y: canvas.leaves, width: self.width, height: canvas.leaf_height };
                canvas.gpus.extend(place.map(|place| (place, rect)));
                canvas.shapes.push(shape(rect, *kind, stacked(lines, rect, Style::Gpu)));
            }
            Content::Column(cells) => place_column(cells, x, self.width, canvas),
        }
    }

    /// Where the wire from above comes down: left of several NICs, else in the middle.
    fn foot(&self, x: i64) -> i64 {
        match &self.content {
            Content::Column(cells) if cells.len() > 1 => x + 2,
            _ => x + self.width / 2,
        }
    }
}

fn column_height(cells: &[Cell]) -> i64 {
    cells.iter().map(|cell| cell.height() + 6).sum::<i64>() - 6
}

/// NICs one above the other; several hang on a wire to their left.
fn place_column(cells: &[Cell], x: i64, width: i64, canvas: &mut Canvas) {
    let indent = if cells.len() > 1 { 10 } else { 0 };
    let mut y = canvas.leaves;
    for cell in cells {
        let rect = Rect { x: x + indent, y, width: width - indent, height: cell.height() };
        if indent > 0 {
            canvas.wires.push(vec![(x + 2, canvas.leaves), (x + 2, rect.y + rect.height / 2)]);
            canvas.wires.push(vec![(x + 2, rect.y + rect.height / 2), (rect.x, rect.y + rect.height / 2)]);
        }
        let texts = stacked(&cell.lines, rect, Style::Mono);
        canvas.shapes.push(Shape { rect, kind: Kind::Nic, texts, tooltip: cell.tooltip.clone() });
        y = rect.bottom() + 6;
    }
}

/// Lines in the middle of a box, the first in a style of its own.
fn stacked(lines: &[String], rect: Rect, first: Style) -> Vec<Text> {
    let style = |number: usize| if number == 0 { first } else { Style::Mono };
    let height: i64 = (0..lines.len()).map(|number| style(number).line()).sum();
    let mut y = rect.y + (rect.height - height) / 2;
    let mut texts = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let style = style(number);
        let line = fit(line, style, rect.width - 8);
        texts.push(Text::centred(&line, style, rect.middle(), y + style.size()));
        y += style.line();
    }
    texts
}

/// The width of blocks side by side.
pub(super) fn row_width(blocks: &[Block]) -> i64 {
    let gaps = GAP * i64::try_from(blocks.len().saturating_sub(1)).unwrap_or(0);
    blocks.iter().map(|block| block.width).sum::<i64>() + gaps
}

/// Places blocks side by side.
pub(super) fn place_row(blocks: &[Block], mut x: i64, canvas: &mut Canvas) {
    for block in blocks {
        block.place(x, 0, canvas);
        x += block.width + GAP;
    }
}

/// Measures the parts of a picture.
pub(super) struct Measure<'a> {
    pub picture: &'a Picture<'a>,
    /// NVLink ends at each GPU.
    pub ports: Vec<i64>,
}

impl Measure<'_> {
    /// The host bridges of a NUMA node.
    pub fn node(&self, node: &Node<'_>) -> Vec<Block> {
        let bridge = |devices: &Vec<Device<'_>>| {
            bar(Kind::Bridge, vec!["host bridge".to_owned()], String::new(), self.row(devices, node.id))
        };
        node.bridges.iter().map(bridge).collect()
    }

    /// A GPU, drawn in a NUMA node (or in none).
    pub fn gpu(&self, place: usize, numa: Option<NumaNodeId>) -> Block {
        let lines = self.picture.gpu_lines(place, numa);
        let ports = self.ports.get(place).copied().unwrap_or(0) * links::PORT;
        gpu(Some(place), self.picture.kinds_of_gpu(place).0, lines, self.picture.gpu_tooltip(place), ports)
    }

    /// Devices side by side, in their order; NICs that follow each other share columns.
    fn row(&self, devices: &[Device<'_>], numa: Option<NumaNodeId>) -> Vec<Block> {
        let mut row = Row::default();
        for device in devices {
            let address = device.pci.map(|pci| self.picture.address(pci));
            let named = |name: &str| {
                let long = address.as_ref().map(|address| format!("{name} {address}"));
                long.into_iter().chain([name.to_owned()]).collect::<Vec<_>>()
            };
            let tooltip = |name: &str| device.pci.map_or(name.to_owned(), |pci| format!("{name} {pci}"));
            let below = self.row(&device.below, numa);
            match device.what {
                What::Switch => {
                    let labels = named("PCIe switch").into_iter().chain(["switch".to_owned()]).collect();
                    row.block(bar(Kind::Switch, labels, tooltip("PCIe switch"), below));
                    continue;
                }
                What::Port => {
                    row.block(bar(Kind::Port, named("port"), tooltip("PCIe port"), below));
                    continue;
                }
                What::Gpu(place) => row.block(self.gpu(place, numa)),
                What::UnlistedGpu => {
                    let lines = vec!["GPU".to_owned(), address.unwrap_or_default(), "not in NVML".to_owned()];
                    row.block(gpu(None, Kind::Unlisted, lines, tooltip("a GPU that NVML does not list:"), 0));
                }
                What::Nic(nics) => row.cell(self.nic(nics, device.pci)),
                What::Deeper => {
                    row.cell(Cell { lines: vec!["…".to_owned()], tooltip: "deeper than is drawn".to_owned() });
                }
            }
            // Nothing hangs below a card, but a file may have it so.
            below.into_iter().for_each(|block| row.block(block));
        }
        row.flush();
        row.blocks
    }

    fn nic(&self, nics: &[NicObservation], pci: Option<PciAddress>) -> Cell {
        let mut lines: Vec<String> = nics.iter().take(MOST_NAMES).map(|nic| clean(&nic.name)).collect();
        match nics.len() {
            0 => lines.push("NIC".to_owned()),
            count if count > MOST_NAMES => lines.push(format!("+{}", count - MOST_NAMES)),
            _ => {}
        }
        let mut rates: Vec<u32> = nics.iter().filter_map(|nic| nic.mbps).collect();
        rates.sort_unstable();
        rates.dedup();
        match rates[..] {
            [] if nics.is_empty() => lines.extend(pci.map(|pci| self.picture.address(pci))),
            [] => {}
            [.., most] => lines.push(format!("{} Gb/s", most / 1000)),
        }
        let names: Vec<String> = nics.iter().map(nic_name).collect();
        let address = pci.map(|pci| format!(" {pci}")).unwrap_or_default();
        Cell { lines, tooltip: clean(&format!("NIC{address}: {}", names.join(", "))) }
    }
}

/// Blocks side by side while they are gathered.
#[derive(Default)]
struct Row {
    blocks: Vec<Block>,
    /// NICs of the column that is being filled.
    cells: Vec<Cell>,
}

impl Row {
    fn block(&mut self, block: Block) {
        self.flush();
        self.blocks.push(block);
    }

    fn cell(&mut self, cell: Cell) {
        if column_height(&self.cells) + 6 + cell.height() > COLUMN {
            self.flush();
        }
        self.cells.push(cell);
    }

    fn flush(&mut self) {
        let cells = std::mem::take(&mut self.cells);
        if let Some(widest) = cells.iter().map(Cell::width).max() {
            let indent = if cells.len() > 1 { 10 } else { 0 };
            let (width, leaf_height) = (widest + indent, column_height(&cells));
            self.blocks.push(Block {
                width,
                depth: 0,
                leaf_height,
                tooltip: String::new(),
                content: Content::Column(cells),
            });
        }
    }
}

fn gpu(place: Option<usize>, kind: Kind, lines: Vec<String>, tooltip: String, ports: i64) -> Block {
    let style = |number: usize| if number == 0 { Style::Gpu } else { Style::Mono };
    let widest = lines.iter().enumerate().map(|(number, line)| width(line, style(number))).max().unwrap_or(0);
    let leaf_height = lines_height(lines.len(), Style::Mono) + 18;
    Block {
        width: (widest + 14).max(ports).max(76),
        depth: 0,
        leaf_height,
        tooltip,
        content: Content::Gpu { place, kind, lines },
    }
}

fn bar(kind: Kind, labels: Vec<String>, tooltip: String, below: Vec<Block>) -> Block {
    let least = labels.last().map_or(0, |label| width(label, Style::Plain)) + 12;
    let depth = 1 + below.iter().map(|block| block.depth).max().unwrap_or(0);
    let leaf_height = below.iter().map(|block| block.leaf_height).max().unwrap_or(0);
    let width = row_width(&below).max(least);
    Block { width, depth, leaf_height, tooltip, content: Content::Bar { kind, labels, below } }
}
