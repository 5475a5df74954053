//! Why a node offers nothing, for /readyz. Written by `driver`, read by `node`.

/// Why a node offers nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Idle {
    /// It may change by itself, or somebody has to act: the node is not ready.
    Waiting(String),
    /// This host has no GPU to serve: nothing is to be done, and the node is as ready as it will be.
    NoGpu(String),
}

impl Idle {
    /// Why, for people.
    pub fn reason(&self) -> &str {
        match self {
            Self::Waiting(reason) | Self::NoGpu(reason) => reason,
        }
    }
}
