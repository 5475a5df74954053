//! The MIG devices that a GPU in MIG mode could have: each profile at each of its places, by name.
//!
//! A name is that of the MIG device that has the whole GPU instance (`device_names`), so it stays the same when the
//! instance is made and destroyed.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use core::cmp::Reverse;

use super::device_names::{device_name, slot_name};
use super::mig::{MigDevice, MigProfile, MigProfileObservation, MigSlot};
use super::node::NodeTopology;

/// The most memory slices of a GPU.
const MOST_SLICES: u32 = 8;

/// The most slots that are taken of one GPU. An H200 has some 40; NVML could report any number.
const MOST_SLOTS: usize = 128;

/// The longest name, a DNS label.
const MOST_NAME: usize = 63;

/// A MIG device that exists or could exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PossibleMig<'a> {
    /// Its name in DRA.
    pub name: String,
    /// The place of its GPU in the graph.
    pub gpu: usize,
    /// The profile's observed facts.
    pub kind: &'a MigProfileObservation,
    /// The profile's name.
    pub profile: MigProfile,
    /// The GPU instance.
    pub slot: MigSlot,
}

impl PossibleMig<'_> {
    /// Returns true if a MIG device is in this GPU instance.
    pub fn is(&self, device: &MigDevice) -> bool {
        let slot = device.profile_id.zip(device.placement);
        device.parent == self.gpu && slot == Some((self.slot.profile_id, self.slot.placement))
    }

    /// Returns true if a MIG device blocks this GPU instance: they have a memory slice in common, or its slices are
    /// unknown.
    pub fn is_blocked_by(&self, device: &MigDevice) -> bool {
        device.parent == self.gpu && device.placement.is_none_or(|there| there.overlaps(self.slot.placement))
    }
}

/// The MIG devices that the GPUs in MIG mode could have: GPU by GPU, the last places first, the smaller ones first. A
/// scheduler that takes the first that fits leaves the first slices free, which are the only places for a profile of
/// half the GPU or more.
pub fn possible_mig(topology: &NodeTopology) -> Vec<PossibleMig<'_>> {
    let mut found = Vec::new();
    for (place, gpu) in topology.gpus().iter().enumerate().filter(|(_, gpu)| gpu.mig_enabled) {
        let Some(of) = device_name(topology, place, None) else { continue };
        let mut names = BTreeSet::new();
        let mut own = Vec::new();
        for kind in gpu.mig_profiles.iter() {
            let profile = kind.profile(gpu.facts.memory_mib);
            for placement in &kind.placements {
                let slot = MigSlot { profile_id: kind.id, placement: *placement };
                let name = slot_name(&of, profile, slot);
                let ends = placement.start.saturating_add(placement.size);
                let is_sane = placement.size > 0 && ends <= MOST_SLICES && name.len() <= MOST_NAME;
                if is_sane && own.len() < MOST_SLOTS && names.insert(name.clone()) {
                    own.push(PossibleMig { name, gpu: place, kind, profile, slot });
                }
            }
        }
        own.sort_by_key(|possible: &PossibleMig<'_>| {
            let placement = possible.slot.placement;
            (Reverse(placement.start), placement.size, possible.kind.number)
        });
        found.extend(own);
    }
    found
}
