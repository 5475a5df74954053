//! What can be seen of the DRA manager from outside. Plain values; nothing here changes it.

use std::collections::{BTreeMap, BTreeSet};

/// The DRA manager at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraState {
    /// Whether the kubelet runs.
    pub running: bool,
    /// Every driver that was ever registered.
    pub drivers: BTreeMap<String, DriverState>,
    /// The claims of the kubelet's cache, by UID.
    pub claims: BTreeMap<String, ClaimState>,
    /// Why registrations failed, in order: the path of the socket, and the error.
    pub refused: Vec<(String, String)>,
}

/// One driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverState {
    /// The paths of its registered endpoints, in the order in which they registered.
    pub endpoints: Vec<String>,
    /// Registrations that succeeded.
    pub registrations: u64,
    /// Endpoints that have an open connection.
    pub connected: usize,
    /// Open health streams.
    pub health_streams: usize,
    /// Lists of health that came.
    pub health_lists: u64,
    /// The last list, by pool and device.
    pub health: BTreeMap<(String, String), DeviceHealth>,
    /// How often its slices were deleted because it was away for too long.
    pub wiped: u64,
}

impl DriverState {
    /// The kubelet has ended: nothing is open any more.
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
    /// Why.
    pub message: String,
}

/// One claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimState {
    /// `namespace/name`.
    pub name: String,
    /// The pods that use it.
    pub pods: BTreeSet<String>,
    /// Whether all its drivers prepared it in this life of the kubelet.
    pub prepared: bool,
    /// How often Prepare was called for it.
    pub calls: u64,
    /// The CDI devices that its drivers answered with.
    pub cdi: Vec<String>,
}
