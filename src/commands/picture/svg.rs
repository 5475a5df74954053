//! The picture as SVG: self-contained, without scripts, styles or fonts of its own.

use svg::Document;
use svg::node::element::{Element, Group, Path, Rectangle, Title};
use svg::node::{self, Node as _, Value};

use super::Picture;
use super::layout::{Kind, Layout, Rect, Sample, Shape, Text};
use super::links::{Strand, StrandKind};
use super::text::Style;

const SANS: &str = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif";
const MONO: &str = "DejaVu Sans Mono, Menlo, Consolas, Liberation Mono, monospace";
const INK: &str = "#1d1d1f";
const WIRE: &str = "#6e6e73";

/// The picture as an SVG document.
pub(in crate::commands) fn svg(picture: &Picture<'_>) -> String {
    let layout = Layout::new(picture);
    let mut document = Document::new()
        .set("width", layout.width)
        .set("height", layout.height)
        .set("viewBox", format!("0 0 {} {}", layout.width, layout.height))
        .set("role", "img")
        .set("font-family", SANS)
        .set("fill", INK)
        .add(Title::new(picture.title.clone()));
    let page = Rectangle::new().set("width", layout.width).set("height", layout.height).set("fill", "#ffffff");
    document = document.add(page);
    for text in &layout.texts {
        document = document.add(line(text));
    }
    for frame in &layout.frames {
        document = document.add(shape(frame));
    }
    for points in &layout.wires {
        document = document.add(stroke(points, 0).set("stroke", WIRE).set("stroke-width", 2));
    }
    // Under each strand a wider light one, so that it passes over what it crosses.
    for strand in &layout.strands {
        document = document
            .add(stroke(&strand.points, 9).set("stroke", "#ffffff").set("stroke-width", breadth(strand.count) + 4));
        let colour = strand_colour(strand.kind);
        document =
            document.add(stroke(&strand.points, 9).set("stroke", colour).set("stroke-width", breadth(strand.count)));
    }
    for frame in &layout.shapes {
        document = document.add(shape(frame));
    }
    for Strand { label: (text, around), kind, .. } in &layout.strands {
        let colour = strand_colour(*kind);
        let pill = rectangle(*around, 5).set("fill", "#ffffff").set("stroke", colour);
        let mut count = line(text);
        count.assign("fill", colour);
        document = document.add(pill).add(count);
    }
    for (rect, what, text) in &layout.legend {
        document = document.add(sample(*rect, *what)).add(line(text));
    }
    format!("{document}\n")
}

/// How wide so many links are drawn.
pub(super) fn breadth(links: u32) -> i64 {
    i64::from(links).saturating_mul(2).clamp(2, 10)
}

/// The colour of a strand.
pub(super) fn strand_colour(kind: StrandKind) -> &'static str {
    match kind {
        StrandKind::Near => "#3b7d23",
        StrandKind::Crossing => "#0b6e8f",
        StrandKind::Allocated => "#b34700",
    }
}

/// Fill and line of a box.
pub(super) fn colours(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Package => ("#f5f5f2", "#4a4a4a"),
        Kind::Unknown => ("#fafafa", "#8a8a8a"),
        Kind::Node => ("#ffffff", "#9a9a9a"),
        Kind::Bridge => ("#dedee2", "#6e6e73"),
        Kind::Switch => ("#e4dcf3", "#67558f"),
        Kind::Port => ("#efeff2", "#6e6e73"),
        Kind::Gpu => ("#dff0d4", "#3b7d23"),
        Kind::Allocated => ("#ffb454", "#8f3d00"),
        Kind::Unlisted => ("#ffffff", "#8a8a8a"),
        Kind::Nic => ("#d9e9f8", "#24639c"),
        Kind::Plane => ("#cfe6bf", "#3b7d23"),
    }
}

/// A box, its tooltip and its texts.
fn shape(shape: &Shape) -> Group {
    let (fill, border) = colours(shape.kind);
    let (radius, border_width) = match shape.kind {
        Kind::Package | Kind::Unknown => (10, 2),
        Kind::Node => (8, 1),
        Kind::Gpu | Kind::Allocated | Kind::Plane => (6, 2),
        _ => (4, 1),
    };
    let mut around = rectangle(shape.rect, radius).set("fill", fill).set("stroke", border);
    if border_width > 1 {
        around = around.set("stroke-width", border_width);
    }
    if matches!(shape.kind, Kind::Unknown | Kind::Unlisted) {
        around = around.set("stroke-dasharray", "6 4");
    }
    let mut group = Group::new();
    if !shape.tooltip.is_empty() {
        group = group.add(Title::new(shape.tooltip.clone()));
    }
    shape.texts.iter().fold(group.add(around), |group, text| group.add(line(text)))
}

fn rectangle(rect: Rect, radius: i64) -> Rectangle {
    let Rect { x, y, width, height } = rect;
    Rectangle::new().set("x", x).set("y", y).set("width", width).set("height", height).set("rx", radius)
}

/// A line of text. The crate's own text element breaks lines around its content, and so does not leave it as it was.
fn line(text: &Text) -> Element {
    let mut element = Element::new("text");
    element.append(node::Text::new(text.text.clone()));
    element.assign("x", text.x);
    element.assign("y", text.y);
    element.assign("font-size", text.style.size());
    if text.style.is_bold() {
        element.assign("font-weight", "bold");
    }
    if text.style == Style::Mono {
        element.assign("font-family", MONO);
    }
    if text.centred {
        element.assign("text-anchor", "middle");
    }
    element
}

/// A line through the points, its corners rounded.
fn stroke(points: &[(i64, i64)], radius: i64) -> Path {
    let mut data = String::new();
    for (number, &(x, y)) in points.iter().enumerate() {
        let before = number.checked_sub(1).and_then(|before| points.get(before));
        match (before, points.get(number + 1)) {
            (None, _) => data += &format!("M{x} {y}"),
            (Some(_), None) => data += &format!("L{x} {y}"),
            (Some(&before), Some(&after)) => {
                let (from, to) = (towards((x, y), before, radius), towards((x, y), after, radius));
                data += &format!("L{} {}Q{x} {y} {} {}", from.0, from.1, to.0, to.1);
            }
        }
    }
    Path::new().set("d", data).set("fill", "none")
}

/// The point so far from a corner towards its neighbour, at most half the way.
fn towards((x, y): (i64, i64), (to_x, to_y): (i64, i64), radius: i64) -> (i64, i64) {
    let step = |from: i64, to: i64| (to - from).signum() * radius.min((to - from).abs() / 2);
    (x + step(x, to_x), y + step(y, to_y))
}

fn sample(rect: Rect, sample: Sample) -> Element {
    let middle = rect.y + rect.height / 2;
    let along = [(rect.x, middle), (rect.right(), middle)];
    let element: (Value, i64) = match sample {
        Sample::Box(kind) => {
            let (fill, border) = colours(kind);
            return rectangle(rect, 4).set("fill", fill).set("stroke", border).set("stroke-width", 2).into();
        }
        Sample::Wire => (WIRE.into(), 2),
        Sample::Strand(kind) => (strand_colour(kind).into(), 4),
    };
    stroke(&along, 0).set("stroke", element.0).set("stroke-width", element.1).into()
}
