//! The kinds of boxes and lines in a picture, and how each looks.

use super::text::Style;

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
    /// How many NVLinks a line stands for.
    Count(LineKind),
}

/// What a line joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineKind {
    /// A bridge, switch or port and what hangs on it.
    Pcie,
    /// NVLinks of GPUs of one package, or of a GPU and a plane.
    Near,
    /// NVLinks of GPUs of two packages.
    Crossing,
    /// NVLinks of allocated GPUs.
    Allocated,
}

impl Kind {
    /// Whether it is around what it holds.
    pub fn is_frame(self) -> bool {
        matches!(self, Self::Package | Self::Unknown | Self::Node)
    }

    /// Whether it stands in the row of GPUs; what is neither leaf nor frame is a bar above what hangs on it.
    pub fn is_leaf(self) -> bool {
        matches!(self, Self::Gpu | Self::Allocated | Self::Unlisted | Self::Nic)
    }

    pub fn is_dashed(self) -> bool {
        matches!(self, Self::Unknown | Self::Unlisted)
    }

    /// Fill and border.
    pub fn colours(self) -> (&'static str, &'static str) {
        match self {
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

    /// How a line of its text is set.
    pub fn style(self, line: usize) -> Style {
        match self {
            Self::Package | Self::Unknown | Self::Node if line == 0 => Style::Heading,
            Self::Gpu | Self::Allocated | Self::Unlisted if line == 0 => Style::Gpu,
            Self::Plane => Style::Heading,
            Self::Count(_) => Style::Count,
            Self::Package | Self::Unknown | Self::Bridge | Self::Switch | Self::Port => Style::Plain,
            Self::Node | Self::Gpu | Self::Allocated | Self::Unlisted | Self::Nic => Style::Mono,
        }
    }
}

impl LineKind {
    pub fn colour(self) -> &'static str {
        match self {
            Self::Pcie => "#6e6e73",
            Self::Near => "#3b7d23",
            Self::Crossing => "#0b6e8f",
            Self::Allocated => "#b34700",
        }
    }
}

/// How wide so many links are drawn.
pub(super) fn breadth(links: u32) -> i64 {
    i64::from(links).saturating_mul(2).clamp(2, 10)
}
