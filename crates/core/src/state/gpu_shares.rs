//! [`GpuShares`]: the way in which several claims share a GPU of DRA.

use core::fmt;

use serde::{Deserialize, Serialize};

/// How several claims share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GpuShares {
    /// How many shares there are, 2 at least.
    pub shares: u32,
    /// Whether a claim may have no more than one.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub one_each: bool,
}

impl fmt::Display for GpuShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in {} shares{}", self.shares, if self.one_each { ", one for a claim" } else { "" })
    }
}

/// How a GPU of DRA is shared; `None`: one claim has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuSharing {
    /// As it is.
    pub now: Option<GpuShares>,
    /// As the plan has it. Where that is another, the GPU takes no new claim.
    pub next: Option<GpuShares>,
}
