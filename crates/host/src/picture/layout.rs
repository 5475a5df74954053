//! The places of all parts of a picture: packages side by side, their PCI trees inside, NVLinks below. Integers only.
//!
//! Host bridges and switches are bars above their devices; GPUs and NICs stand in one row at the bottom. A wide machine
//! may have two rows of packages; with NVSwitches, the lower is upside down, so that the GPUs of both rows face them.
//!
//! An NVLink goes down from a GPU, along a track, up to the other GPU. Links inside a package stay inside of it, those
//! between packages run below; NVSwitch planes are bars below the upper row and its links.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::style::{Kind, LineKind, Style, fit, width, wrap};
use super::{Block, Link, Picture};

const MARGIN: i64 = 24;
/// The space around the content of a package or of a NUMA node.
const PAD: i64 = 14;
/// The space between packages, and between two devices below the same bar.
const GAP: i64 = 12;
const BAR_HEIGHT: i64 = 22;
/// The distance from a bar to the next, or to the row of GPUs.
const LEVEL_HEIGHT: i64 = BAR_HEIGHT + 16;
/// The space between two rows of packages that face a plane: its bar, and counts on both sides.
const ROW_GAP: i64 = 122;
/// The widest text for which a GPU or NIC grows; in a file, a GPU's first line always fits.
const MAX_CARD_TEXT: i64 = 170;
/// The widest text for which a package or NUMA node grows; its first line always fits.
const MAX_FRAME_TEXT: i64 = 260;
/// The least width of the packages: the title of a machine with one GPU needs room too.
const MIN_WIDTH: i64 = 560;
/// The width of a GPU in a page, unless its links need more; its holder does not change it.
const MARKED_WIDTH: i64 = 112;

/// The least width for one end of a link at a GPU.
const MIN_PORT_WIDTH: i64 = 15;
/// The distance from one track to the next: a count's height and some space.
const TRACK_HEIGHT: i64 = 20;
const PLANE_HEIGHT: i64 = 34;
/// The distance from a plane up to the next part: room for the counts.
const PLANE_GAP: i64 = 44;

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
    pub is_centred: bool,
}

pub(super) struct Shape {
    pub rect: Rect,
    pub kind: Kind,
    pub lines: Vec<String>,
    /// The text that a viewer shows when the pointer is on the shape; may be empty.
    pub tooltip: String,
    /// True in a row that is upside down, where the text of a frame is at its bottom.
    pub is_flipped: bool,
    /// The index of a GPU in `NodeTopology::gpus`.
    pub gpu: Option<usize>,
}

impl Shape {
    /// The lines at their places: at the head of a frame, or in the middle of any other box.
    pub fn texts(&self) -> Vec<Text> {
        let Rect { x, y, width, height } = self.rect;
        let is_centred = !self.kind.is_frame();
        let (pad, x) = if is_centred { (4, self.rect.middle()) } else { (PAD, x + PAD) };
        let tall = height_of(self.kind, &self.lines);
        let mut y = match is_centred {
            true => y + (height - tall) / 2,
            false if self.is_flipped => self.rect.bottom() - head(&self.lines) + 7,
            false => y + 7,
        };
        let mut texts = Vec::new();
        for (number, line) in self.lines.iter().enumerate() {
            let style = self.kind.style(number);
            let text = fit(line, style, width - 2 * pad);
            texts.push(Text { text, style, x, y: y + style.size(), is_centred });
            y += style.line();
        }
        texts
    }
}

/// The height of lines of text in a box.
fn height_of(kind: Kind, lines: &[String]) -> i64 {
    (0..lines.len()).map(|line| kind.style(line).line()).sum()
}

/// The height of the head of a package or NUMA node: its name, and possibly another line.
fn head(lines: &[String]) -> i64 {
    if lines.len() > 1 { 48 } else { 33 }
}

pub(super) struct Line {
    pub points: Vec<(i64, i64)>,
    pub kind: LineKind,
    /// The number of NVLinks in the line.
    pub count: u32,
}

/// All parts with their places; drawn in this order, the text of boxes with the box.
#[derive(Default)]
pub(super) struct Layout {
    pub width: i64,
    pub height: i64,
    /// Packages and NUMA nodes.
    pub frames: Vec<Shape>,
    pub lines: Vec<Line>,
    pub shapes: Vec<Shape>,
    pub texts: Vec<Text>,
    /// The boxes of GPUs, by the indices of the GPUs.
    pub gpus: BTreeMap<usize, Rect>,
}

impl Block {
    fn width(&self) -> i64 {
        let line = |(number, line): (usize, &String)| width(line, self.kind.style(number));
        let mut lines = self.lines.iter().enumerate().map(line);
        let first = lines.next().unwrap_or(0);
        let widest = |limit: i64| lines.max().unwrap_or(0).min(limit).max(first);
        match self.kind {
            kind if kind.is_frame() => row_width(&self.below).max(widest(MAX_FRAME_TEXT)) + 2 * PAD,
            Kind::Nic => widest(MAX_CARD_TEXT).min(MAX_CARD_TEXT) + 12,
            Kind::Marked(..) => MARKED_WIDTH.max(self.ports * MIN_PORT_WIDTH),
            kind if kind.is_leaf() => (widest(MAX_CARD_TEXT) + 14).max(76).max(self.ports * MIN_PORT_WIDTH),
            _ => row_width(&self.below).max(first + 12),
        }
    }

    /// The distance from the top down to the row of GPUs.
    fn depth(&self) -> i64 {
        let below = self.below.iter().map(Self::depth).max().unwrap_or(0);
        match self.kind {
            kind if kind.is_frame() => head(&self.lines) + below,
            kind if kind.is_leaf() => 0,
            _ => LEVEL_HEIGHT + below,
        }
    }

    /// The height that the row of GPUs must have.
    fn leaf_height(&self) -> i64 {
        let below = self.below.iter().map(Self::leaf_height).max().unwrap_or(0);
        if self.kind.is_leaf() { height_of(self.kind, &self.lines) + 12 } else { below }
    }
}

fn row_width(blocks: &[Block]) -> i64 {
    (blocks.iter().map(|block| block.width() + GAP).sum::<i64>() - GAP).max(0)
}

/// The packages of the upper and the lower row; all are in the upper one if the picture is narrow enough.
///
/// A machine with direct links has one row, because the tracks are below it. So has a machine with several planes,
/// because the bar of one would be in the way of another's links from below.
fn rows(picture: &Picture) -> [&[Block]; 2] {
    let all = picture.packages.as_slice();
    if row_width(all) <= picture.max_row_width || !picture.links.is_empty() || picture.planes.len() > 1 {
        return [all, &[]];
    }
    let splits = (1..=all.len()).rev().filter_map(|upper| all.split_at_checked(upper));
    let widest = |(upper, lower): &(&[Block], &[Block])| row_width(upper).max(row_width(lower));
    splits.min_by_key(widest).map_or([all, &[]], |(upper, lower)| [upper, lower])
}

/// The position of a row of packages after its layout.
struct Row {
    /// The top of the GPUs, and their height.
    leaves: i64,
    leaf_height: i64,
    /// The distance by which the row moves down. A flipped row is upside down: its y becomes `shift - y`.
    shift: i64,
    is_flipped: bool,
}

impl Row {
    fn y(&self, y: i64) -> i64 {
        if self.is_flipped { self.shift - y } else { self.shift + y }
    }

    fn rect(&self, rect: Rect) -> Rect {
        Rect { y: self.y(if self.is_flipped { rect.bottom() } else { rect.y }), ..rect }
    }
}

impl Layout {
    pub fn new(picture: &Picture) -> Self {
        let rows = rows(picture);
        let inside = rows.into_iter().map(row_width).fold(MIN_WIDTH, i64::max);
        let mut layout = Self { width: inside + 2 * MARGIN, ..Self::default() };
        let top = layout.title(picture, inside);
        let all = &picture.packages;
        let leaves = top + all.iter().map(Block::depth).max().unwrap_or(0);
        let leaf_height = all.iter().map(Block::leaf_height).max().unwrap_or(0);
        let mut bottom = if all.is_empty() { top } else { leaves + leaf_height + 2 * PAD };
        let planes = picture.planes.len();
        for (number, packages) in rows.into_iter().enumerate() {
            let (shift, is_flipped) = match (number, planes) {
                (0, _) => (0, false),
                (_, 0) => (bottom + PAD - top, false),
                _ => (2 * bottom + ROW_GAP, true),
            };
            let row = Row { leaves, leaf_height, shift, is_flipped };
            let mut x = MARGIN + (inside - row_width(packages)) / 2;
            for package in packages {
                layout.place(&row, package, x, top, bottom);
                x += package.width() + GAP;
            }
        }
        let routes = Routes::new(picture, &layout.gpus);
        let room = routes.inner * TRACK_HEIGHT;
        layout.frames.iter_mut().filter(|frame| frame.kind != Kind::Node).for_each(|frame| frame.rect.height += room);
        bottom += room;
        let inner = leaves + leaf_height + PAD + PAD / 2;
        let end = routes.draw(picture, &mut layout, leaves + leaf_height, inner, bottom);
        let end = layout.frames.iter().map(|frame| frame.rect.bottom()).fold(end, i64::max);
        layout.height = layout.legend(inside, end + PAD * 2) + MARGIN;
        layout
    }

    /// Places a block and the blocks below it; a frame ends at `bottom`.
    fn place(&mut self, row: &Row, block: &Block, x: i64, y: i64, bottom: i64) {
        let (is_frame, is_leaf) = (block.kind.is_frame(), block.kind.is_leaf());
        let (y, height, start) = match block.kind {
            _ if is_frame => (y, bottom - y, y + head(&block.lines)),
            Kind::Nic => (row.leaves, block.leaf_height(), y),
            _ if is_leaf => (row.leaves, row.leaf_height, y),
            _ => (y, BAR_HEIGHT, y + LEVEL_HEIGHT),
        };
        let rect = Rect { x, y, width: block.width(), height };
        let lines = match block.lines.join(" ") {
            _ if is_frame || is_leaf => block.lines.clone(),
            // A bar shows all lines if they fit, otherwise the first.
            whole if width(&whole, Style::Plain) <= rect.width - 8 => vec![whole],
            _ => block.lines.iter().take(1).cloned().collect(),
        };
        let tooltip = if is_frame { block.lines.get(1).cloned().unwrap_or_default() } else { block.tooltip.clone() };
        let is_flipped = row.is_flipped;
        let shape = Shape { rect: row.rect(rect), kind: block.kind, lines, tooltip, is_flipped, gpu: block.gpu };
        self.gpus.extend(block.gpu.map(|gpu| (gpu, shape.rect)));
        if is_frame {
            self.frames.push(shape)
        } else {
            self.shapes.push(shape)
        }
        let mut at = x + (rect.width - row_width(&block.below)) / 2;
        for child in &block.below {
            let wide = child.width();
            if !is_frame {
                let (foot, to) = (at + wide / 2, if child.kind.is_leaf() { row.leaves } else { start });
                let points = vec![(foot, row.y(rect.bottom())), (foot, row.y(to))];
                self.lines.push(Line { points, kind: LineKind::Pcie, count: 1 });
            }
            self.place(row, child, at, start, bottom - PAD);
            at += wide + GAP;
        }
    }

    /// Places the title and the models of the GPUs; returns the top of the packages.
    fn title(&mut self, picture: &Picture, room: i64) -> i64 {
        let Some(title) = &picture.title else { return MARGIN };
        let mut y = MARGIN;
        for (number, line) in std::iter::once(title).chain(&picture.models).enumerate() {
            let style = if number == 0 { Style::Title } else { Style::Subtitle };
            for text in wrap(line, style, room) {
                self.texts.push(Text { text, style, x: MARGIN, y: y + style.size(), is_centred: false });
                y += style.line() + 2;
            }
        }
        y + PAD
    }

    /// Places the legend of lines, in as many rows as it needs; returns its bottom.
    fn legend(&mut self, room: i64, top: i64) -> i64 {
        let mut lines = vec![
            (LineKind::Pcie, "PCIe"),
            (LineKind::Near, "NVLinks: the more, the wider (NV2: two links)"),
            (LineKind::Crossing, "NVLinks between packages"),
        ];
        lines.retain(|(kind, _)| self.lines.iter().any(|line| line.kind == *kind));
        let (mut x, mut y, mut bottom) = (MARGIN, top, top - PAD * 2);
        for (kind, text) in lines {
            let (style, wide) = (Style::Plain, 34 + width(text, Style::Plain));
            if x > MARGIN && x + wide > MARGIN + room {
                (x, y) = (MARGIN, y + 22);
            }
            let (points, count) = (vec![(x, y + 7), (x + 26, y + 7)], if kind == LineKind::Pcie { 1 } else { 2 });
            self.lines.push(Line { points, kind, count });
            self.texts.push(Text { text: text.to_owned(), style, x: x + 34, y: y + 11, is_centred: false });
            (x, bottom) = (x + wide + 24, y + 14);
        }
        bottom
    }

    /// Adds a line of NVLinks and the box with their count. `middle` returns the middle of that box; its argument is
    /// half of the box's width and some space.
    fn add_links(&mut self, line: Line, middle: impl FnOnce(i64) -> (i64, i64)) {
        let (text, kind) = (format!("NV{}", line.count), line.kind);
        let wide = width(&text, Style::Count) + 8;
        let (x, y) = middle(wide / 2 + 3);
        self.lines.push(line);
        self.add_shape(Rect { x: x - wide / 2, y: y - 8, width: wide, height: 16 }, Kind::Count(kind), &text);
    }

    fn add_shape(&mut self, rect: Rect, kind: Kind, text: &str) {
        let lines = text.lines().map(str::to_owned).collect();
        self.shapes.push(Shape { rect, kind, lines, tooltip: String::new(), is_flipped: false, gpu: None });
    }
}

/// A link with its track, and the x of its ends.
struct Route<'a> {
    link: &'a Link,
    left: i64,
    right: i64,
    track: i64,
}

/// The routes of a picture whose GPUs have their places.
struct Routes<'a> {
    routes: Vec<Route<'a>>,
    /// The x at which the links of a GPU to its plane come down, by the GPU's index.
    ports: BTreeMap<usize, i64>,
    /// The number of tracks inside the packages, and of tracks below the packages.
    inner: i64,
    crossing: i64,
}

impl<'a> Routes<'a> {
    /// Gives each link its ends and its track.
    fn new(picture: &'a Picture, gpus: &BTreeMap<usize, Rect>) -> Self {
        let x = |gpu: usize| gpus.get(&gpu).map_or(0, |rect| rect.x);
        // The ends at each GPU from left to right: links to the left, the farthest last; the plane; links to the right,
        // the farthest first. So two links from the same GPU to the same side never cross.
        let mut ends: BTreeMap<usize, Vec<(i64, Option<usize>)>> = BTreeMap::new();
        for (number, link) in picture.links.iter().enumerate() {
            let distance = (i64::from(link.crosses) << 32) + (x(link.a) - x(link.b)).abs();
            for (here, there) in [(link.a, link.b), (link.b, link.a)] {
                let key = if x(there) < x(here) { distance - (1 << 40) } else { (1 << 40) - distance };
                ends.entry(here).or_default().push((key, Some(number)));
            }
        }
        for port in picture.planes.iter().flat_map(|plane| &plane.ports) {
            ends.entry(port.gpu).or_default().push((0, None));
        }
        let mut at: BTreeMap<(usize, Option<usize>), i64> = BTreeMap::new();
        for (gpu, mut ends) in ends {
            ends.sort_unstable();
            let Some(rect) = gpus.get(&gpu) else { continue };
            let gaps = (1..).zip(&ends).last().map_or(1, |(count, _)| count + 1);
            for ((_, link), number) in ends.into_iter().zip(1..) {
                at.insert((gpu, link), rect.x + rect.width * number / gaps);
            }
        }
        let route = |(number, link): (usize, &'a Link)| {
            let (a, b) = (at.get(&(link.a, Some(number)))?, at.get(&(link.b, Some(number)))?);
            Some(Route { link, left: *a.min(b), right: *a.max(b), track: 0 })
        };
        let mut routes: Vec<Route<'_>> = picture.links.iter().enumerate().filter_map(route).collect();
        let inner = give_tracks(&mut routes, false);
        let crossing = give_tracks(&mut routes, true);
        let ports = at.into_iter().filter(|((_, link), _)| link.is_none()).map(|((gpu, _), x)| (gpu, x)).collect();
        Self { routes, ports, inner, crossing }
    }

    /// Draws all planes and routes; routes begin at `from`, the bottom of the GPUs. Tracks inside packages are at
    /// `inner` and further down, the others at `below` and further down. Returns the bottom of the drawing.
    fn draw(&self, picture: &Picture, layout: &mut Layout, from: i64, inner: i64, below: i64) -> i64 {
        let below = if self.crossing > 0 { below + 8 } else { below };
        let track = |route: &Route<'_>| {
            let top = if route.link.crosses { below } else { inner };
            top + route.track * TRACK_HEIGHT + TRACK_HEIGHT / 2
        };
        // The lines that come down, with their depths: a count keeps clear of them.
        let mut drops: Vec<(i64, i64)> = self.ports.values().map(|x| (*x, i64::MAX)).collect();
        drops.extend(self.routes.iter().flat_map(|route| [(route.left, track(route)), (route.right, track(route))]));
        let mut order: Vec<&Route<'_>> = self.routes.iter().collect();
        // The deepest come first: where lines cross, the shallower is on top.
        order.sort_by_key(|route| (Reverse(track(route)), route.left));
        for route in order {
            let y = track(route);
            let points = vec![(route.left, from), (route.left, y), (route.right, y), (route.right, from)];
            let line = Line { points, kind: route.link.kind, count: route.link.count };
            layout.add_links(line, |half| (count_x(route, y, half, &drops), y));
        }
        let mut bottom = below + self.crossing * TRACK_HEIGHT;
        for plane in &picture.planes {
            let place = |gpu: usize| Some((*self.ports.get(&gpu)?, *layout.gpus.get(&gpu)?));
            let ports: Vec<_> = plane.ports.iter().filter_map(|port| Some((port, place(port.gpu)?))).collect();
            let left = ports.iter().map(|(_, (_, gpu))| gpu.x).min();
            let right = ports.iter().map(|(_, (_, gpu))| gpu.right()).max();
            let Some((left, right)) = left.zip(right) else { continue };
            let wide = (right - left).max(width(&plane.name, Style::Heading) + 16);
            let rect = Rect { x: (left + right - wide) / 2, y: bottom + PLANE_GAP, width: wide, height: PLANE_HEIGHT };
            for (port, (x, gpu)) in ports {
                let (from, to, at) = match gpu.y > rect.y {
                    true => (gpu.y, rect.bottom(), rect.bottom() + 20),
                    false => (gpu.bottom(), rect.y, rect.y - 20),
                };
                let line = Line { points: vec![(x, from), (x, to)], kind: port.kind, count: port.count };
                layout.add_links(line, |_| (x, at));
            }
            layout.add_shape(rect, Kind::Plane, &plane.name);
            bottom = rect.bottom();
        }
        bottom
    }
}

/// The x of a link's count on its track: nearest to the middle where no line comes down through it, else the middle.
fn count_x(route: &Route<'_>, y: i64, half: i64, drops: &[(i64, i64)]) -> i64 {
    let middle = (route.left + route.right) / 2;
    let free = |x: i64| {
        (route.left + half..=route.right - half).contains(&x)
            && !drops.iter().any(|(drop, depth)| *depth > y && (drop - x).abs() < half)
    };
    let candidates = (0..(route.right - route.left) / 2).flat_map(|away| [middle - away, middle + away]);
    candidates.into_iter().find(|x| free(*x)).unwrap_or(middle)
}

/// Gives tracks to the links with this `crosses`: the shortest links get the nearest tracks, and links on one track
/// keep apart. Returns the number of tracks.
fn give_tracks(routes: &mut [Route<'_>], crosses: bool) -> i64 {
    let mut chosen: Vec<&mut Route<'_>> = routes.iter_mut().filter(|route| route.link.crosses == crosses).collect();
    chosen.sort_by_key(|route| (route.right - route.left, route.left, route.link.a, route.link.b));
    let mut tracks: Vec<Vec<(i64, i64)>> = Vec::new();
    for route in chosen {
        // A route takes at least the width of its count.
        let half = ((route.right - route.left) / 2).max(24) + 4;
        let middle = (route.left + route.right) / 2;
        let (left, right) = (middle - half, middle + half);
        let fits = |track: &Vec<(i64, i64)>| track.iter().all(|(from, to)| right <= *from || *to <= left);
        let number = tracks.iter().position(fits).unwrap_or(tracks.len());
        match tracks.get_mut(number) {
            Some(track) => track.push((left, right)),
            None => tracks.push(vec![(left, right)]),
        }
        route.track = i64::try_from(number).unwrap_or(i64::from(u16::MAX));
    }
    i64::try_from(tracks.len()).unwrap_or(i64::from(u16::MAX))
}
