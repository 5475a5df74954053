//! Whether the kubelet narrowed what we could choose from.
//!
//! Called by `service`, once a request. Pure. The kubelet does not report which devices are in use, but one that was
//! offered is free, and it stays so until we are asked to allocate it: the only way into a container. A kubelet without
//! a Topology Manager offers every free device each time. So one that is healthy and known to be free and yet missing
//! was held back, for certain; and so was the choice of those that have to be in the answer.

use std::collections::BTreeSet;

use crate::allocation::{AllocationRequest, DeviceId};

/// Which devices one session with the kubelet has shown to be free.
#[derive(Debug, Default)]
pub(super) struct Offers {
    free: BTreeSet<DeviceId>,
}

impl Offers {
    /// Records a request; returns whether it left out free devices.
    pub(super) fn narrowed(&mut self, request: &AllocationRequest, healthy: impl Fn(&DeviceId) -> bool) -> bool {
        // Forget unhealthy devices: the kubelet may not have seen them recover yet, so their absence proves nothing.
        self.free.retain(healthy);
        let offered: BTreeSet<DeviceId> = request.available.iter().cloned().collect();
        let held_back = self.free.difference(&offered).next().is_some();
        self.free.extend(offered);
        held_back || !request.must_include.is_empty()
    }

    /// Devices went into a container.
    pub(super) fn allocated(&mut self, devices: &[DeviceId]) {
        for device in devices {
            self.free.remove(device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(list: &str) -> Vec<DeviceId> {
        list.split_whitespace().map(|id| DeviceId::from(id.to_owned())).collect()
    }

    fn narrowed(offers: &mut Offers, available: &str, must_include: &str) -> bool {
        let request = AllocationRequest { available: ids(available), must_include: ids(must_include), size: 1 };
        offers.narrowed(&request, |_| true)
    }

    #[test]
    fn offer_of_all_free_devices_narrows_nothing() {
        let mut offers = Offers::default();
        assert!(!narrowed(&mut offers, "a b c d", ""));
        offers.allocated(&ids("a b"));
        assert!(!narrowed(&mut offers, "c d", ""));
        offers.allocated(&ids("c"));
        assert!(!narrowed(&mut offers, "d b", ""), "b came back");
    }

    #[test]
    fn missing_free_device_was_held_back() {
        let mut offers = Offers::default();
        assert!(!narrowed(&mut offers, "a b", ""), "c and d may be in use");
        offers.allocated(&ids("a"));
        assert!(narrowed(&mut offers, "c d", ""));
        offers.allocated(&ids("b"));
        assert!(!narrowed(&mut offers, "c d", ""), "b went without a question");
        assert!(narrowed(&mut offers, "d", ""));
    }

    #[test]
    fn required_device_counts_as_narrowing() {
        assert!(narrowed(&mut Offers::default(), "a b", "a"));
    }

    #[test]
    fn unhealthy_device_is_missed_only_once_offered_again() {
        let mut offers = Offers::default();
        narrowed(&mut offers, "a b", "");
        let b_only = AllocationRequest { available: ids("b"), ..AllocationRequest::default() };
        assert!(!offers.narrowed(&b_only, |id| id.as_str() != "a"));
        assert!(!narrowed(&mut offers, "b", ""));
    }
}
