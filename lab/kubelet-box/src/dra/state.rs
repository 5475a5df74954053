//! The visible state of the DRA manager, as plain values. Nothing here changes the manager.

use std::collections::{BTreeMap, BTreeSet};

/// The DRA manager at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraState {
    /// Set while the kubelet runs.
    pub running: bool,
    /// Every driver that was ever registered.
    pub drivers: BTreeMap<String, DriverState>,
    /// The claims of the kubelet's cache, by UID.
    pub claims: BTreeMap<String, ClaimState>,
    /// The failed registrations, in order: the path of the socket, and the error.
    pub refused: Vec<(String, String)>,
}

/// One driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverState {
    /// The paths of the driver's registered endpoints, in the order of their registrations.
    pub endpoints: Vec<String>,
    /// Registrations that succeeded.
    pub registrations: u64,
    /// Endpoints that have an open connection.
    pub connected: usize,
    /// Open health streams.
    pub health_streams: usize,
    /// The number of health lists received.
    pub health_lists: u64,
    /// The last list, by pool and device.
    pub health: BTreeMap<(String, String), DeviceHealth>,
    /// The number of times that the driver's slices were deleted because it was away for too long.
    pub wiped: u64,
}

impl DriverState {
    /// Resets all that ends with the kubelet: connections and streams.
    pub(super) fn ended(&mut self) {
        (self.connected, self.health_streams) = (0, 0);
        self.endpoints.clear();
    }
}

/// The health of a device as its driver sent it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHealth {
    /// 0 unknown, 1 healthy, 2 unhealthy.
    pub health: i32,
    /// The driver's reason.
    pub message: String,
}

/// One claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimState {
    /// `namespace/name`.
    pub name: String,
    /// The pods that use it.
    pub pods: BTreeSet<String>,
    /// Set if all drivers have prepared all claims of a pod with this claim since the kubelet started.
    pub prepared: bool,
    /// The number of attempts to prepare the claim.
    pub calls: u64,
    /// The CDI devices in the answers of its drivers.
    pub cdi: Vec<String>,
    /// The pool and device of each id in the `allocatedResourcesStatus` of its pods. The id is a device's first CDI
    /// name. Of devices with the same id only the first is listed (`pkg/kubelet/cm/dra/manager.go`,
    /// `UpdateAllocatedResourcesStatus`, of 1.36).
    pub resource_ids: BTreeMap<String, (String, String)>,
}
