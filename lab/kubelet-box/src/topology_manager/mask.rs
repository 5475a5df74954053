//! Sets of NUMA nodes as a kubelet has them: 64 bits, for nodes 0 to 63.
//! [`super::TopologyManager::check`] refuses other nodes.

use std::collections::BTreeSet;
use std::fmt;

/// A set of NUMA nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NumaMask(u64);

impl NumaMask {
    /// The most nodes that a mask can have.
    pub const BITS: i64 = 64;

    /// The mask of these nodes. Nodes that no mask can hold are left out, because a kubelet reads them as not set.
    pub fn new(nodes: impl IntoIterator<Item = i64>) -> Self {
        let bit = |node: i64| u32::try_from(node).ok().and_then(|node| 1u64.checked_shl(node)).unwrap_or(0);
        Self(nodes.into_iter().fold(0, |mask, node| mask | bit(node)))
    }

    /// The nodes, in order.
    pub fn nodes(self) -> BTreeSet<i64> {
        (0..Self::BITS).filter(|&node| self.meets(Self::new([node]))).collect()
    }

    /// The number of nodes in the mask.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns true if the two masks have a node in common.
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The nodes that are in both masks.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns true if the mask has fewer nodes than the other, or as many but lower ones.
    pub fn is_narrower_than(self, other: Self) -> bool {
        (self.count(), self.0) < (other.count(), other.0)
    }

    /// Every mask with some of these nodes and no other, the smallest masks first: 2^n - 1 masks of n nodes. n is
    /// at most eight here.
    pub(super) fn within(self) -> Vec<Self> {
        let mut masks = Vec::new();
        let mut part = self.0;
        while part != 0 {
            masks.push(Self(part));
            part = (part - 1) & self.0;
        }
        masks.sort_unstable_by_key(|mask| (mask.count(), mask.0));
        masks
    }
}

impl fmt::Display for NumaMask {
    /// `{0,1}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<String> = self.nodes().iter().map(ToString::to_string).collect();
        write!(f, "{{{}}}", nodes.join(","))
    }
}
