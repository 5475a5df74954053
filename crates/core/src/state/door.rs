//! [`Door`]: the API through which a GPU is offered.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use core::fmt;

use super::device::Timestamp;
use super::holdings::ResourceDevice;
use crate::quote::quoted;

/// The time for which no slice offers a GPU before it leaves DRA, or is shared otherwise: kube-scheduler may choose a
/// device, then wait 600 s for volumes, and only then write the allocation (`BindTimeoutSeconds`,
/// pkg/scheduler/apis/config/v1/defaults.go). The rest is for its cache of slices and its retries.
pub const DRA_GRACE: Timestamp = Timestamp::from_secs(660);

/// The same in a process that prepares no new claims: a claim on its way gets no GPU here in any case.
pub const DRA_OFF_GRACE: Timestamp = Timestamp::from_secs(60);

/// The API through which a GPU is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The device plugin.
    Plugin,
    /// The device plugin has withdrawn the GPU. It goes to DRA when no pod holds it any more.
    ToDra,
    /// DRA.
    Dra,
    /// DRA keeps the GPU for the claims that have it; no new claim gets it. When no claim holds it, none has it
    /// allocated and none is on its way ([`DraWait`]), the device plugin gets it, or nobody if a filter leaves it out.
    FromDra(Timestamp),
}

/// The reason why a GPU that is to go to DRA, to leave it or to be shared otherwise there has not changed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraWait {
    /// The API server still has slices that offer it to claims.
    Slices,
    /// A claim may be on its way to it until this time at most.
    Claims(Timestamp),
    /// The kubelet cannot be asked who holds it.
    Holders,
    /// The API server is being asked which claims have it.
    ApiServer,
    /// These claims have it, as `namespace/name`.
    Held(BTreeSet<String>),
    /// A pod has it through the device plugin, as this device.
    Pod(ResourceDevice),
    /// Only the kubelet's checkpoint lists a pod with this device: one with an init container, or one that has ended.
    /// The kubelet writes the file with an allocation or a device list, and five minutes after a device plugin ended
    /// (`endpointStopGracePeriod`, pkg/kubelet/cm/devicemanager/types.go).
    Checkpoint(ResourceDevice),
}

impl DraWait {
    /// The end of the wait at the latest, if that is known.
    pub fn until(&self) -> Option<Timestamp> {
        if let Self::Claims(until) = self { Some(*until) } else { None }
    }
}

impl fmt::Display for DraWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slices => f.write_str("the API server to store slices without it"),
            Self::Claims(_) => f.write_str("claims that may be on their way to it"),
            Self::Holders => f.write_str("the kubelet's list of holders"),
            Self::ApiServer => f.write_str("the API server's list of claims"),
            Self::Held(claims) => {
                f.write_str("the end of ")?;
                let mut first = true;
                claims.iter().try_for_each(|claim| {
                    let comma = if core::mem::take(&mut first) { "" } else { ", " };
                    write!(f, "{comma}{claim}")
                })
            }
            Self::Pod((resource, id)) => write!(f, "the end of the pod with {resource} {}", quoted(id.as_str())),
            Self::Checkpoint((resource, id)) => {
                let id = quoted(id.as_str());
                write!(f, "the kubelet to take {resource} {id} out of its checkpoint: no pod that it lists has it")
            }
        }
    }
}

impl Door {
    /// Returns true if claims for the GPU are prepared.
    pub fn is_dra(self) -> bool {
        matches!(self, Self::Dra | Self::FromDra(..))
    }

    /// The word for metrics and messages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Plugin => "plugin",
            Self::ToDra => "to-dra",
            Self::Dra => "dra",
            Self::FromDra(..) => "from-dra",
        }
    }
}
