//! The picture as SVG: a file without scripts, styles or fonts of its own, or an element of a page that has the styles.

use svg::Document;
use svg::node::element::{Element, Group, Path, Rectangle, Title};
use svg::node::{self, Node as _};

use super::layout::{Layout, Line, Rect, Shape, Text};
use super::style::{Kind, LineKind, Style, breadth, harmless};
use super::{Holder, Picture};

const SANS: &str = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif";
const MONO: &str = "DejaVu Sans Mono, Menlo, Consolas, Liberation Mono, monospace";
const INK: &str = "#1d1d1f";

/// The source of colours and fonts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Paint {
    /// The attributes of each element.
    Own,
    /// The style sheet of the page around it: each element has a class.
    Page,
}

/// The picture as an SVG document.
pub fn svg(picture: &Picture) -> String {
    let layout = Layout::new(picture);
    let page = Rectangle::new().set("width", layout.width).set("height", layout.height).set("fill", "#ffffff");
    let mut document = document(&layout).set("font-family", SANS).set("fill", INK);
    if let Some(title) = &picture.title {
        document = document.add(Title::new(title.clone()));
    }
    format!("{}\n", Paint::Own.fill(document.add(page), &layout))
}

/// The picture as an element of an HTML page; assistive technology sees one image with this name. A GPU's group has the
/// class `gpu`, the text and holder of its [`super::Mark`], and its place in the topology as `data-gpu`; a page styles
/// the classes of the module `style`.
pub fn element(picture: &Picture, name: &str) -> String {
    let layout = Layout::new(picture);
    let name: String = name.chars().map(harmless).collect();
    let document = document(&layout).set("class", "picture").set("aria-label", name);
    Paint::Page.fill(document, &layout).to_string()
}

fn document(layout: &Layout) -> Document {
    Document::new()
        .set("width", layout.width)
        .set("height", layout.height)
        .set("viewBox", format!("0 0 {} {}", layout.width, layout.height))
        .set("role", "img")
}

impl Paint {
    fn fill(self, mut document: Document, layout: &Layout) -> Document {
        for frame in &layout.frames {
            document = document.add(self.shape(frame));
        }
        for line in &layout.lines {
            // NVLinks have a wider light line under them, so that crossings can be told apart.
            if line.kind != LineKind::Pcie {
                let (path, width) = (path(line), breadth(line.count) + 4);
                document = document.add(match self {
                    Self::Own => path.set("stroke", "#ffffff").set("stroke-width", width),
                    Self::Page => path.set("class", "under").set("stroke-width", width),
                });
            }
            let path = path(line).set("stroke-width", breadth(line.count));
            document = document.add(match self {
                Self::Own => path.set("stroke", line.kind.colour()),
                Self::Page => path.set("class", format!("line {}", line.kind.class())),
            });
        }
        for above in &layout.shapes {
            document = document.add(self.shape(above));
        }
        layout.texts.iter().fold(document, |document, text| document.add(self.line(text)))
    }

    fn shape(self, shape: &Shape) -> Group {
        let (fill, border) = shape.kind.colours();
        let (radius, border_width) = match shape.kind {
            Kind::Package | Kind::Unknown => (10, 2),
            Kind::Node => (8, 1),
            Kind::Gpu | Kind::Marked(..) | Kind::Plane => (6, 2),
            _ => (4, 1),
        };
        let Rect { x, y, width, height } = shape.rect;
        let around = || Rectangle::new().set("x", x).set("y", y).set("width", width).set("height", height);
        let mut outline = around().set("rx", radius);
        if self == Self::Own {
            outline = outline.set("fill", fill).set("stroke", border);
        }
        outline = outline.set("stroke-width", border_width);
        if matches!(shape.kind, Kind::Unknown | Kind::Unlisted) {
            outline = outline.set("stroke-dasharray", "6 4");
        }
        let mut group = Group::new();
        if !shape.tooltip.is_empty() {
            group = group.add(Title::new(shape.tooltip.clone()));
        }
        match (self, shape.kind) {
            (Self::Page, kind) => {
                group = group.set("class", kind.class());
                if let Some(place) = shape.gpu {
                    group = group.set("data-gpu", place);
                }
            }
            (Self::Own, Kind::Count(line)) => group = group.set("fill", line.colour()),
            (Self::Own, _) => {}
        }
        group = group.add(outline);
        // The holder of a GPU is not shown by colour alone.
        if let (Self::Page, Kind::Marked(Holder::One(_) | Holder::Several, _)) = (self, shape.kind) {
            group = group.add(around().set("rx", radius).set("class", "pattern"));
        }
        shape.texts().iter().fold(group, |group, text| group.add(self.line(text)))
    }

    /// A line of text. The text element of the crate `svg` adds line breaks around its content, and so changes it.
    fn line(self, text: &Text) -> Element {
        let mut element = Element::new("text");
        element.append(node::Text::new(text.text.clone()));
        element.assign("x", text.x);
        element.assign("y", text.y);
        element.assign("font-size", text.style.size());
        if text.style.is_bold() {
            element.assign("font-weight", "bold");
        }
        match self {
            Self::Own if text.style == Style::Mono => element.assign("font-family", MONO),
            Self::Page if text.style == Style::Mono => element.assign("class", "mono"),
            Self::Own | Self::Page => {}
        }
        if text.is_centred {
            element.assign("text-anchor", "middle");
        }
        element
    }
}

/// A line through its points, the corners rounded.
fn path(line: &Line) -> Path {
    let mut data = String::new();
    let mut points = line.points.iter().copied().peekable();
    let mut before = None;
    while let Some((x, y)) = points.next() {
        data += &match (before, points.peek()) {
            (None, _) => format!("M{x} {y}"),
            (Some(_), None) => format!("L{x} {y}"),
            (Some(before), Some(after)) => {
                let ((from_x, from_y), (to_x, to_y)) = (towards((x, y), before), towards((x, y), *after));
                format!("L{from_x} {from_y}Q{x} {y} {to_x} {to_y}")
            }
        };
        before = Some((x, y));
    }
    Path::new().set("d", data).set("fill", "none")
}

/// The end of a rounded corner towards a neighbouring point, at most half of the way.
fn towards((x, y): (i64, i64), (to_x, to_y): (i64, i64)) -> (i64, i64) {
    let step = |from: i64, to: i64| (to - from).signum() * 9.min((to - from).abs() / 2);
    (x + step(x, to_x), y + step(y, to_y))
}
