//! [`GroupSize`]: a number of GPUs for which a node publishes groups, and the names of the groups' attributes.

use crate::prelude::*;

/// A number of GPUs for which groups are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSize(usize);

impl GroupSize {
    /// The sizes that jobs ask for, ascending.
    pub const ALL: [Self; 3] = [Self(2), Self(4), Self(8)];

    /// The smallest size that holds so many GPUs.
    pub fn holding(gpus: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|size| gpus <= size.0)
    }

    /// The number of GPUs.
    pub fn gpus(self) -> usize {
        self.0
    }

    /// The most attributes of each tier. A claim that lists all has an alternative for each, and one for any GPUs; it may have 8
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

    /// The attributes that a claim for any machine lists. Each alternative costs the scheduler as much as the whole of a
    /// claim without any, wherever too few GPUs of its groups are free (docs/scale.md): these are the best tiers, without
    /// those that no built-in machine has or that gain little in a cluster.
    pub fn usual_names(self) -> impl Iterator<Item = String> {
        let tiers: [usize; 2] = if self.0 == 2 { [2, 1] } else { [1, 1] };
        (0..).zip(tiers).flat_map(move |(tier, families)| (0..families).map(move |at| self.name(tier, at)))
    }

    /// The attribute of one family, from its tier (0 is the best) and its number in the tier: `pair1a`.
    pub(super) fn name(self, tier: usize, at: usize) -> String {
        let letter = ('a'..='z').nth(at).unwrap_or('z');
        let set = match self.0 {
            2 => "pair",
            4 => "quad",
            _ => "octet",
        };
        format!("{set}{}{letter}", tier + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_has_room_for_all_names_of_a_size() {
        for size in GroupSize::ALL {
            let names: Vec<String> = size.names().collect();
            assert_eq!(names.len(), 7, "{names:?}");
            // An attribute's name is a C identifier of at most 32 characters.
            assert!(names.iter().all(|name| name.len() <= 32 && name.bytes().all(|byte| byte.is_ascii_alphanumeric())));
        }
        assert_eq!(GroupSize::ALL.map(|size| size.names().next().unwrap()), ["pair1a", "quad1a", "octet1a"]);
        let usual = GroupSize::ALL.map(|size| size.usual_names().collect::<Vec<_>>().join(" "));
        assert_eq!(usual, ["pair1a pair1b pair2a", "quad1a quad2a", "octet1a octet2a"]);
        assert!(
            GroupSize::ALL.iter().all(|size| size.usual_names().all(|name| size.names().any(|other| other == name)))
        );
    }

    #[test]
    fn smallest_size_that_fits_holds_gpus() {
        let held = |gpus| GroupSize::holding(gpus).map(GroupSize::gpus);
        assert_eq!([1, 2, 3, 8, 9].map(held), [Some(2), Some(2), Some(4), Some(8), None]);
    }
}
