//! [`GroupSizes`]: for which numbers of GPUs a node publishes groups, and what the groups' attributes are called.

use crate::prelude::*;

use serde::Serialize;

/// A number of GPUs for which groups are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct GroupSize(usize);

impl GroupSize {
    /// How many GPUs.
    pub fn gpus(self) -> usize {
        self.0
    }

    /// The most groups' attributes of each tier. A claim lists an alternative for each and one for any GPUs, and takes 8
    /// (`resource.k8s.io/v1`, `FirstAvailableDeviceRequestMaxSize`). A mesh has pairs by two kinds of link; what is best
    /// for four is rare, and what comes third frequent.
    pub(super) fn tiers(self) -> [usize; 3] {
        if self.0 == 2 { [3, 2, 2] } else { [1, 2, 4] }
    }

    /// The attributes of all groups of this size that a node may have, the best first: `quad1a`, `quad2a`, `quad2b`, ...
    pub fn names(self) -> impl Iterator<Item = String> {
        let tiers = (0..).zip(self.tiers());
        tiers.flat_map(move |(tier, families)| (0..families).map(move |at| self.name(tier, at)))
    }

    /// The attribute of one family: of its tier (0 is the best) and of its place in it, `pair1a`.
    pub(super) fn name(self, tier: usize, at: usize) -> String {
        let letter = ('a'..='z').nth(at).unwrap_or('z');
        match self.0 {
            2 => format!("pair{}{letter}", tier + 1),
            4 => format!("quad{}{letter}", tier + 1),
            8 => format!("octet{}{letter}", tier + 1),
            gpus => format!("set{gpus}x{}{letter}", tier + 1),
        }
    }
}

/// The sizes of a node, ascending.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupSizes(Vec<GroupSize>);

impl Default for GroupSizes {
    /// 2, 4 and 8: what jobs ask for.
    fn default() -> Self {
        Self(Vec::from([GroupSize(2), GroupSize(4), GroupSize(8)]))
    }
}

impl GroupSizes {
    /// Other sizes than a node has, ascending.
    #[cfg(test)]
    pub(super) fn of(sizes: &[usize]) -> Self {
        Self(sizes.iter().copied().map(GroupSize).collect())
    }

    /// The sizes, ascending.
    pub fn iter(&self) -> impl Iterator<Item = GroupSize> {
        self.0.iter().copied()
    }

    /// The smallest size that so many GPUs fit in.
    pub fn holding(&self, gpus: usize) -> Option<GroupSize> {
        self.iter().find(|size| gpus <= size.gpus())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_has_room_for_all_names_of_a_size() {
        for size in GroupSizes::of(&[2, 3, 8, 32]).iter() {
            let names: Vec<String> = size.names().collect();
            assert_eq!(names.len(), 7, "{names:?}");
            // An attribute's name is a C identifier of at most 32 characters.
            assert!(names.iter().all(|name| name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric())));
        }
        let first = |gpus| GroupSize(gpus).names().next().unwrap();
        assert_eq!([2, 4, 8, 6].map(first), ["pair1a", "quad1a", "octet1a", "set6x1a"]);
    }

    #[test]
    fn smallest_size_that_fits_holds_gpus() {
        let held = |gpus| GroupSizes::default().holding(gpus).map(GroupSize::gpus);
        assert_eq!([1, 2, 3, 8, 9].map(held), [Some(2), Some(2), Some(4), Some(8), None]);
    }
}
