//! The picture as SVG: self-contained, without scripts, styles or fonts of its own.

use svg::Document;
use svg::node::element::{Element, Group, Path, Rectangle, Title};
use svg::node::{self, Node as _};

use super::Picture;
use super::kinds::{Kind, LineKind, breadth};
use super::layout::{Layout, Line, Rect, Shape, Text};
use super::text::Style;

const SANS: &str = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif";
const MONO: &str = "DejaVu Sans Mono, Menlo, Consolas, Liberation Mono, monospace";
const INK: &str = "#1d1d1f";

/// The picture as an SVG document.
pub(in crate::commands) fn svg(picture: &Picture) -> String {
    let layout = Layout::new(picture);
    let page = Rectangle::new().set("width", layout.width).set("height", layout.height).set("fill", "#ffffff");
    let mut document = Document::new()
        .set("width", layout.width)
        .set("height", layout.height)
        .set("viewBox", format!("0 0 {} {}", layout.width, layout.height))
        .set("role", "img")
        .set("font-family", SANS)
        .set("fill", INK)
        .add(Title::new(picture.title.clone()))
        .add(page);
    for frame in &layout.frames {
        document = document.add(shape(frame));
    }
    for line in &layout.lines {
        // Under NVLinks a wider light line, so that they pass over what they cross.
        if line.kind != LineKind::Pcie {
            document = document.add(stroke(line, "#ffffff", breadth(line.count) + 4));
        }
        document = document.add(stroke(line, line.kind.colour(), breadth(line.count)));
    }
    for above in &layout.shapes {
        document = document.add(shape(above));
    }
    for text in &layout.texts {
        document = document.add(line(text));
    }
    format!("{document}\n")
}

/// A box, its tooltip and its text.
fn shape(shape: &Shape) -> Group {
    let (fill, border) = shape.kind.colours();
    let (radius, border_width) = match shape.kind {
        Kind::Package | Kind::Unknown => (10, 2),
        Kind::Node => (8, 1),
        Kind::Gpu | Kind::Allocated | Kind::Plane => (6, 2),
        _ => (4, 1),
    };
    let Rect { x, y, width, height } = shape.rect;
    let mut around = Rectangle::new().set("x", x).set("y", y).set("width", width).set("height", height);
    around = around.set("rx", radius).set("fill", fill).set("stroke", border).set("stroke-width", border_width);
    if shape.kind.is_dashed() {
        around = around.set("stroke-dasharray", "6 4");
    }
    let mut group = Group::new();
    if !shape.tooltip.is_empty() {
        group = group.add(Title::new(shape.tooltip.clone()));
    }
    if let Kind::Count(line) = shape.kind {
        group = group.set("fill", line.colour());
    }
    shape.texts().iter().fold(group.add(around), |group, text| group.add(line(text)))
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

/// A line through its points, the corners rounded.
fn stroke(line: &Line, colour: &str, width: i64) -> Path {
    let mut data = String::new();
    let mut points = line.points.iter().copied().peekable();
    let mut before = None;
    while let Some((x, y)) = points.next() {
        data += &match (before, points.peek()) {
            (None, _) => format!("M{x} {y}"),
            (Some(_), None) => format!("L{x} {y}"),
            (Some(before), Some(after)) => {
                let (from, to) = (towards((x, y), before), towards((x, y), *after));
                format!("L{} {}Q{x} {y} {} {}", from.0, from.1, to.0, to.1)
            }
        };
        before = Some((x, y));
    }
    Path::new().set("d", data).set("fill", "none").set("stroke", colour).set("stroke-width", width)
}

/// The point at a rounded corner's end towards its neighbour, at most half the way.
fn towards((x, y): (i64, i64), (to_x, to_y): (i64, i64)) -> (i64, i64) {
    let step = |from: i64, to: i64| (to - from).signum() * 9.min((to - from).abs() / 2);
    (x + step(x, to_x), y + step(y, to_y))
}
