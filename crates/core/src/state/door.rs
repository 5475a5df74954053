//! [`Door`]: the API through which a GPU is offered.

use super::device::Timestamp;

/// The time that a GPU which leaves DRA stays with it, without new claims. A scheduler that allocated the GPU from an
/// older slice binds its pod within this time: kube-scheduler assumes a pod bound for 30 s, and retries.
pub const DRA_GRACE: Timestamp = Timestamp::from_secs(60);

/// The API through which a GPU is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The device plugin.
    Plugin,
    /// The device plugin has withdrawn the GPU. It goes to DRA when no pod holds it any more.
    ToDra,
    /// DRA.
    Dra,
    /// DRA keeps the GPU for the claims that have it; no new claim gets it. When no claim holds it and [`DRA_GRACE`]
    /// has passed, the device plugin gets it, or nobody if a filter leaves it out.
    FromDra(Timestamp),
}

impl Door {
    /// Returns true if claims for the GPU are prepared.
    pub fn is_dra(self) -> bool {
        matches!(self, Self::Dra | Self::FromDra(..))
    }

    /// The word for metrics and messages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Plugin => "plugin",
            Self::ToDra => "to-dra",
            Self::Dra => "dra",
            Self::FromDra(..) => "from-dra",
        }
    }
}
