//! [`GpuShares`]: the way in which several claims share a GPU of DRA.

use core::fmt;

use serde::{Deserialize, Serialize};

/// The shares of a GPU that several claims may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GpuShares {
    /// The number of shares, at least 2.
    pub shares: u32,
    /// True if a claim may have no more than one.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub one_each: bool,
}

impl fmt::Display for GpuShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in {} shares{}", self.shares, if self.one_each { ", one for a claim" } else { "" })
    }
}

/// The sharing of a GPU of DRA; `None` means that one claim has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuSharing {
    /// The sharing in effect.
    pub now: Option<GpuShares>,
    /// The sharing in the plan. While it differs from `now`, the GPU takes no new claim.
    pub next: Option<GpuShares>,
}
