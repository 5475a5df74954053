//! [`GroupSizes`]: the numbers of GPUs for which a node publishes groups, and the names of the groups' attributes.

use crate::prelude::*;

use serde::Serialize;
use thiserror::Error;

/// The most sizes: more would leave too few attributes for each.
const MOST_SIZES: usize = 4;

/// A number of GPUs for which groups are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct GroupSize(usize);

impl GroupSize {
    /// The number of GPUs.
    pub fn gpus(self) -> usize {
        self.0
    }

    /// The most attributes of each tier. A claim lists an alternative for each, and one for any GPUs; it may have 8
    /// (`resource.k8s.io/v1`, `FirstAvailableDeviceRequestMaxSize`). A mesh has pairs by two kinds of link. For four
    /// GPUs the best tier is rare and the third is frequent.
    pub(super) fn tiers(self) -> [usize; 3] {
        if self.0 == 2 { [3, 2, 2] } else { [1, 2, 4] }
    }

    /// The attributes of all groups of this size that a node may have, the best first: `quad1a`, `quad2a`, `quad2b`,
    /// ...
    pub fn names(self) -> impl Iterator<Item = String> {
        let tiers = (0..).zip(self.tiers());
        tiers.flat_map(move |(tier, families)| (0..families).map(move |at| self.name(tier, at)))
    }

    /// The attribute of one family, from its tier (0 is the best) and its number in the tier: `pair1a`.
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
    /// The sizes 2, 4 and 8, which jobs ask for.
    fn default() -> Self {
        Self(Vec::from([GroupSize(2), GroupSize(4), GroupSize(8)]))
    }
}

/// The error in a list of sizes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GroupSizesError {
    /// A group of this size cannot be claimed, or is no group.
    #[error("a group of {0} GPUs: groups have {least} to {most} GPUs", least = GroupSizes::LEAST_GPUS, most = GroupSizes::MOST_GPUS)]
    Size(usize),
    /// More sizes than a device has attributes for.
    #[error("{0} sizes of groups: at most {MOST_SIZES}")]
    TooMany(usize),
}

impl GroupSizes {
    /// The fewest GPUs of a group.
    pub const LEAST_GPUS: usize = 2;

    /// The most GPUs of a group, which is the most that a claim takes (`resource.k8s.io/v1`,
    /// `AllocationResultsMaxSize`).
    pub const MOST_GPUS: usize = 32;

    /// Takes sizes in any order; repetitions do not matter. Without sizes no groups are published.
    ///
    /// # Errors
    ///
    /// A size is not one of 2 to 32, or there are more than four.
    pub fn new(sizes: impl IntoIterator<Item = usize>) -> Result<Self, GroupSizesError> {
        let mut all: Vec<GroupSize> = Vec::new();
        for gpus in sizes {
            if !(Self::LEAST_GPUS..=Self::MOST_GPUS).contains(&gpus) {
                return Err(GroupSizesError::Size(gpus));
            }
            all.push(GroupSize(gpus));
        }
        all.sort_unstable();
        all.dedup();
        if all.len() > MOST_SIZES {
            return Err(GroupSizesError::TooMany(all.len()));
        }
        Ok(Self(all))
    }

    /// The sizes, ascending.
    pub fn iter(&self) -> impl Iterator<Item = GroupSize> {
        self.0.iter().copied()
    }

    /// The smallest size that holds so many GPUs.
    pub fn holding(&self, gpus: usize) -> Option<GroupSize> {
        self.iter().find(|size| gpus <= size.gpus())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_has_room_for_all_names_of_a_size() {
        for size in GroupSizes::new([2, 3, 8, 32]).unwrap().iter() {
            let names: Vec<String> = size.names().collect();
            assert_eq!(names.len(), 7, "{names:?}");
            // An attribute's name is a C identifier of at most 32 characters.
            assert!(names.iter().all(|name| name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric())));
        }
        let first = |gpus| GroupSize(gpus).names().next().unwrap();
        assert_eq!([2, 4, 8, 6].map(first), ["pair1a", "quad1a", "octet1a", "set6x1a"]);
    }

    #[test]
    fn sizes_are_checked_and_sorted() {
        let sizes = |of: &[usize]| GroupSizes::new(of.iter().copied());
        let list = |of: &[usize]| -> Vec<usize> { sizes(of).unwrap().iter().map(GroupSize::gpus).collect() };
        assert_eq!(list(&[8, 2, 8]), [2, 8]);
        assert_eq!(list(&[]), [0; 0]);
        assert_eq!(sizes(&[2, 1]), Err(GroupSizesError::Size(1)));
        assert_eq!(sizes(&[33]), Err(GroupSizesError::Size(33)));
        assert_eq!(sizes(&[2, 3, 4, 5, 6]), Err(GroupSizesError::TooMany(5)));
        let held = |gpus| GroupSizes::default().holding(gpus).map(GroupSize::gpus);
        assert_eq!([1, 2, 3, 8, 9].map(held), [Some(2), Some(2), Some(4), Some(8), None]);
    }
}
