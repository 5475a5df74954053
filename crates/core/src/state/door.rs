//! [`Door`]: the API through which a GPU is offered.

use super::device::Timestamp;

/// How long a GPU that leaves DRA stays with it, without new claims: a scheduler that allocated it from a slice of before
/// binds its pod within this time (kube-scheduler assumes a pod bound for 30 s, and retries).
pub const DRA_GRACE: Timestamp = Timestamp::from_secs(60);

/// The API through which a GPU is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The device plugin.
    Plugin,
    /// The device plugin has withdrawn it; it goes to DRA when no pod holds it any more.
    ToDra,
    /// DRA.
    Dra,
    /// DRA still has it for claims that have it, and no new claim gets it. The device plugin gets it, or nobody where a
    /// filter leaves it out, when no claim holds it and [`DRA_GRACE`] has passed.
    FromDra {
        /// When that began.
        since: Timestamp,
    },
}

impl Door {
    /// Whether claims for the GPU are prepared.
    pub fn is_dra(self) -> bool {
        matches!(self, Self::Dra | Self::FromDra { .. })
    }

    /// A word for it, for metrics and messages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Plugin => "plugin",
            Self::ToDra => "to-dra",
            Self::Dra => "dra",
            Self::FromDra { .. } => "from-dra",
        }
    }
}
