//! The kinds of boxes and lines in a picture, and the look of each.

use super::Holder;
use super::text::Style;

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
    /// A GPU of a page: its holder, and true if it is unhealthy.
    Marked(Holder, bool),
    /// A GPU that NVML does not list.
    Unlisted,
    Nic,
    Plane,
    /// The number of NVLinks in a line.
    Count(LineKind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineKind {
    /// A line between a bridge, switch or port and a device below it.
    Pcie,
    /// NVLinks of GPUs of one package, or of a GPU and a plane.
    Near,
    /// NVLinks of GPUs of two packages.
    Crossing,
    Allocated,
    /// NVLinks of the GPUs of a holder with this colour.
    Held(u8),
}

impl Kind {
    /// Returns true for a box that frames others.
    pub fn is_frame(self) -> bool {
        matches!(self, Self::Package | Self::Unknown | Self::Node)
    }

    /// Returns true for a box in the row of GPUs. A box that is neither leaf nor frame is a bar above its devices.
    pub fn is_leaf(self) -> bool {
        self.is_gpu() || self == Self::Nic
    }

    pub fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu | Self::Allocated | Self::Marked(..) | Self::Unlisted)
    }

    pub fn is_dashed(self) -> bool {
        matches!(self, Self::Unknown | Self::Unlisted)
    }

    /// Fill and border in a file; a page has its own colours.
    pub fn colours(self) -> (&'static str, &'static str) {
        match self {
            Self::Marked(Holder::Nobody, _) => Self::Gpu.colours(),
            Self::Marked(..) => Self::Allocated.colours(),
            Self::Package => ("#f5f5f2", "#4a4a4a"),
            Self::Unknown => ("#fafafa", "#8a8a8a"),
            Self::Node => ("#ffffff", "#9a9a9a"),
            Self::Bridge => ("#dedee2", "#6e6e73"),
            Self::Switch => ("#e4dcf3", "#67558f"),
            Self::Port => ("#efeff2", "#6e6e73"),
            Self::Gpu => ("#dff0d4", "#3b7d23"),
            Self::Allocated => ("#ffb454", "#8f3d00"),
            Self::Unlisted => ("#ffffff", "#8a8a8a"),
            Self::Nic => ("#d9e9f8", "#24639c"),
            Self::Plane => ("#cfe6bf", "#3b7d23"),
            Self::Count(line) => ("#ffffff", line.colour()),
        }
    }

    /// The class in a page's style sheet.
    pub fn class(self) -> String {
        match self {
            Self::Package => "package".to_owned(),
            Self::Unknown => "package unknown".to_owned(),
            Self::Node => "numa".to_owned(),
            Self::Bridge | Self::Port => "bridge".to_owned(),
            Self::Switch => "switch".to_owned(),
            Self::Gpu | Self::Allocated => "gpu free".to_owned(),
            Self::Unlisted => "gpu unlisted".to_owned(),
            Self::Nic => "nic".to_owned(),
            Self::Plane => "plane".to_owned(),
            Self::Count(line) => format!("count {}", line.class()),
            Self::Marked(holder, is_sick) => {
                let holder = match holder {
                    Holder::Nobody => "free".to_owned(),
                    Holder::One(colour) => format!("held c{colour}"),
                    Holder::Several => "held shared".to_owned(),
                };
                format!("gpu {holder}{}", if is_sick { " sick" } else { "" })
            }
        }
    }

    /// The style of a line of its text.
    pub fn style(self, line: usize) -> Style {
        match self {
            Self::Package | Self::Unknown | Self::Node if line == 0 => Style::Heading,
            kind if kind.is_gpu() && line == 0 => Style::Gpu,
            Self::Plane => Style::Heading,
            Self::Count(_) => Style::Count,
            Self::Package | Self::Unknown | Self::Bridge | Self::Switch | Self::Port => Style::Plain,
            // These lines are a page's text about a GPU; the address is set like all addresses.
            Self::Marked(..) if line > 1 => Style::Mark,
            Self::Node | Self::Gpu | Self::Allocated | Self::Marked(..) | Self::Unlisted | Self::Nic => Style::Mono,
        }
    }
}

impl LineKind {
    /// The class in a page's style sheet.
    pub fn class(self) -> String {
        match self {
            Self::Pcie => "pcie".to_owned(),
            Self::Near | Self::Allocated => "near".to_owned(),
            Self::Crossing => "crossing".to_owned(),
            Self::Held(colour) => format!("held c{colour}"),
        }
    }

    pub fn colour(self) -> &'static str {
        match self {
            Self::Pcie => "#6e6e73",
            Self::Near => "#3b7d23",
            Self::Crossing => "#0b6e8f",
            Self::Allocated | Self::Held(_) => "#b34700",
        }
    }
}

/// The width of a line for this number of links.
pub(super) fn breadth(links: u32) -> i64 {
    i64::from(links).saturating_mul(2).clamp(2, 10)
}
