//! Hardware that pods hold under another name than the one it is offered under now: after another plan, or from a
//! plugin before us. Whoever is offered it too would share what was promised whole.
//!
//! Part of [`NodeState`]. It knows what the kubelet said of holders, and nothing where the kubelet said nothing.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::NodeState;
use super::device::{Device, ResourceName, Timestamp};
use super::reason::UnhealthyReason;
use crate::allocation::DeviceId;

/// A device of a resource.
type Key = (ResourceName, DeviceId);

/// What a pod holds, or may.
struct Held<'a> {
    key: &'a Key,
    /// The MIG device; without one, the whole GPU.
    mig: Option<&'a str>,
    is_slot: bool,
    since: Timestamp,
}

impl Held<'_> {
    /// Whether giving out the device would take from who holds this. Slots are shared by their nature.
    fn hinders(&self, key: &Key, device: &Device) -> bool {
        let apart = |mig: &str| device.mig.as_ref().is_some_and(|other| other.uuid.as_str() != mig);
        self.key != key && !(self.is_slot && device.slot.is_some()) && !self.mig.is_some_and(apart)
    }
}

impl NodeState {
    /// The devices that cannot be given out for what pods hold of their hardware under other names, and why.
    pub(super) fn held_elsewhere(&self) -> BTreeMap<Key, (UnhealthyReason, Timestamp)> {
        let Some(known_since) = self.holders_since else { return BTreeMap::new() };
        let mut held: BTreeMap<&str, Vec<Held<'_>>> = BTreeMap::new();
        let parents: BTreeMap<&str, &str> = self
            .topology()
            .mig_devices()
            .iter()
            .filter_map(|mig| Some((mig.uuid.as_str(), self.topology().gpus().get(mig.parent)?.uuid.as_str())))
            .collect();
        // What was withdrawn may have got a holder since the kubelet was asked last.
        let withdrawn = self.gone.iter().filter(|(_, gone)| gone.offered && gone.why == UnhealthyReason::Withdrawn);
        let withdrawn = withdrawn.map(|(key, gone)| (key, gone.since));
        for (key, since) in self.held.iter().map(|key| (key, known_since)).chain(withdrawn) {
            let id = key.1.as_str();
            let (uuid, is_slot) = id.split_once("::").map_or((id, false), |(uuid, _)| (uuid, true));
            let (gpu, mig) = parents.get(uuid).map_or((uuid, None), |parent| (*parent, Some(uuid)));
            held.entry(gpu).or_default().push(Held { key, mig, is_slot, since });
        }
        let devices = self.resources.iter().flat_map(|(resource, devices)| {
            devices.iter().map(move |(id, device)| ((resource.clone(), id.clone()), device))
        });
        let hindered = devices.filter_map(|(key, device)| {
            let held = held.get(device.gpu.uuid.as_str())?.iter().find(|held| held.hinders(&key, device))?;
            let reason =
                UnhealthyReason::HeldElsewhere { resource: held.key.0.to_string(), id: held.key.1.to_string() };
            Some((key, (reason, held.since)))
        });
        hindered.collect()
    }

    /// Whether an answer about who holds what would change something.
    pub fn awaits_holders(&self) -> bool {
        !self.gone.is_empty()
            || self.resources.values().flat_map(BTreeMap::values).any(|device| {
                matches!(&device.health, super::Health::Unhealthy { reason: UnhealthyReason::HeldElsewhere { .. }, .. })
            })
    }
}
