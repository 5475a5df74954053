//! [`Narrowing`]: detects that the kubelet offered fewer devices than are free.
//!
//! Called by `service` for GetPreferredAllocation and Allocate. Pure. The kubelet does not say which devices are in
//! use, but a device that it once offered stays free until Allocate names the device: the only way into a container. A
//! kubelet without a Topology Manager offers every free device. So the kubelet held back a healthy device that is known
//! to be free and is missing in a request. Devices that the answer must include also narrow it: the kubelet chose them.

use std::collections::BTreeSet;

use linkwise_core::allocation::{AllocationRequest, DeviceId};

/// The devices that one session with the kubelet has shown to be free.
#[derive(Debug, Default)]
pub(super) struct Narrowing {
    free: BTreeSet<DeviceId>,
    /// The devices that the last GetPreferredAllocation offered, until the kubelet allocates.
    offered: Vec<DeviceId>,
}

impl Narrowing {
    /// Takes a request into account; returns true if the kubelet narrowed it.
    pub(super) fn requested(&mut self, request: &AllocationRequest, healthy: impl Fn(&DeviceId) -> bool) -> bool {
        // Forget unhealthy devices: the kubelet may not have seen them recover yet, so their absence proves nothing.
        self.free.retain(healthy);
        let offered: BTreeSet<DeviceId> = request.available.iter().cloned().collect();
        let held_back = self.free.difference(&offered).next().is_some();
        self.free.extend(offered);
        held_back || !request.must_include.is_empty()
    }

    /// Remembers the devices that an answered GetPreferredAllocation offered.
    pub(super) fn answered(&mut self, available: Vec<DeviceId>) {
        self.offered = available;
    }

    /// Takes an allocation into account. Returns the devices that the last GetPreferredAllocation offered; none if it
    /// did not offer the allocated ones.
    pub(super) fn allocated(&mut self, devices: &[DeviceId]) -> Vec<DeviceId> {
        for device in devices {
            self.free.remove(device);
        }
        let offered = std::mem::take(&mut self.offered);
        if devices.iter().all(|device| offered.contains(device)) { offered } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(list: &str) -> Vec<DeviceId> {
        list.split_whitespace().map(|id| DeviceId::from(id.to_owned())).collect()
    }

    fn narrowed(narrowing: &mut Narrowing, available: &str, must_include: &str) -> bool {
        let request = AllocationRequest { available: ids(available), must_include: ids(must_include), size: 1 };
        narrowing.requested(&request, |_| true)
    }

    #[test]
    fn all_free_devices_offered_is_no_narrowing() {
        let mut narrowing = Narrowing::default();
        assert!(!narrowed(&mut narrowing, "a b c d", ""));
        narrowing.allocated(&ids("a b"));
        assert!(!narrowed(&mut narrowing, "c d", ""));
        narrowing.allocated(&ids("c"));
        assert!(!narrowed(&mut narrowing, "d b", ""), "b came back");
    }

    #[test]
    fn missing_free_device_is_narrowing() {
        let mut narrowing = Narrowing::default();
        assert!(!narrowed(&mut narrowing, "a b", ""), "c and d may be in use");
        narrowing.allocated(&ids("a"));
        assert!(narrowed(&mut narrowing, "c d", ""));
        narrowing.allocated(&ids("b"));
        assert!(!narrowed(&mut narrowing, "c d", ""), "b was allocated without a request");
        assert!(narrowed(&mut narrowing, "d", ""));
        assert!(narrowed(&mut Narrowing::default(), "a b", "a"), "the kubelet chose a");
    }

    #[test]
    fn request_belongs_to_next_allocation_of_its_devices() {
        let mut narrowing = Narrowing::default();
        narrowing.answered(ids("a b c"));
        assert_eq!(narrowing.allocated(&ids("a b")), ids("a b c"));
        assert_eq!(narrowing.allocated(&ids("c")), [], "the kubelet did not ask");
        narrowing.answered(ids("a b"));
        assert_eq!(narrowing.allocated(&ids("d")), [], "another pod's request");
    }

    #[test]
    fn unhealthy_device_is_not_missed_until_offered_again() {
        let mut narrowing = Narrowing::default();
        narrowed(&mut narrowing, "a b", "");
        let b_only = AllocationRequest { available: ids("b"), ..AllocationRequest::default() };
        assert!(!narrowing.requested(&b_only, |id| id.as_str() != "a"));
        assert!(!narrowed(&mut narrowing, "b", ""));
    }
}
