//! [`DraFacts`]: the facts from which the devices of a node are made. [`ServerVersion`]: the release of the API server,
//! which decides about the features that slices may use.

use crate::prelude::*;
use alloc::collections::BTreeSet;

use super::layout::GpuLayout;
use crate::allocation::GpuSet;
use crate::state::{DRA_DRIVER, Device, Door, DriverVersions, GpuSharing, Health, NodeState, UnhealthyReason};
use crate::topology::{Gpu, MigDevice, NodeTopology, device_names, hardware_of, names};

/// The facts from which the devices of a node are made.
#[derive(Clone, Debug)]
pub struct DraFacts<'a> {
    /// The GPUs and their links.
    pub topology: &'a NodeTopology,
    /// The driver's versions.
    pub versions: &'a DriverVersions,
    /// The order and the groups of the GPUs of [`offered_now`].
    pub layout: &'a GpuLayout,
    /// The GPUs and MIG devices that are offered through DRA, in any order.
    pub devices: Vec<DraDevice<'a>>,
    /// The names of the devices that claims hold.
    pub held: BTreeSet<String>,
    /// The GPUs in MIG mode that are offered through DRA, without their MIG devices.
    pub mig_gpus: Vec<DraDevice<'a>>,
    /// The names of the MIG devices that linkwise makes or made for claims.
    pub made: BTreeSet<String>,
    /// The settings.
    pub settings: DraSettings,
}

/// A GPU or MIG device that is offered through DRA.
#[derive(Clone, Debug)]
pub struct DraDevice<'a> {
    /// Its name; `None` if another device has this name already, and in [`DraFacts::mig_gpus`].
    pub name: Option<String>,
    /// The GPU.
    pub gpu: &'a Gpu,
    /// The GPU's place in the topology; `None` for one that is gone.
    pub place: Option<usize>,
    /// The MIG device; `None` for the whole GPU.
    pub mig: Option<&'a MigDevice>,
    /// Its sharing among claims, now and in the plan.
    pub sharing: GpuSharing,
    /// The reasons why it must not be allocated, those of its health first.
    pub reasons: Vec<UnhealthyReason>,
}

/// The settings of published devices, beside those of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraSettings {
    /// True if the API server keeps taints.
    pub taints_survive: bool,
    /// True if pods are evicted from a GPU that is lost (`NoExecute`).
    pub evict_from_lost: bool,
    /// True if the MIG devices that a GPU in MIG mode could have are published, and made when a claim gets them.
    pub dynamic_mig: bool,
}

impl Default for DraSettings {
    /// Taints are kept, and evict no pod. Only MIG devices that exist are published.
    fn default() -> Self {
        Self { taints_survive: true, evict_from_lost: false, dynamic_mig: false }
    }
}

/// The GPUs that a snapshot offers through DRA to one claim at a time, by their places. [`DraFacts::of_state`] takes
/// their layout.
pub fn offered_now(state: &NodeState) -> GpuSet {
    let devices = state.offers().through_dra().iter();
    let exclusive = devices.filter(|device| state.dra_sharing(&device.gpu.uuid).now.is_none());
    exclusive.filter_map(|device| state.topology().position(&device.gpu.uuid)).collect()
}

impl<'a> DraFacts<'a> {
    /// The facts of a snapshot. `layout` is that of [`offered_now`]. The devices that our DRA plugin has prepared count
    /// as held before the kubelet lists them.
    pub fn of_state(state: &'a NodeState, layout: &'a GpuLayout, settings: DraSettings) -> Self {
        let topology = state.topology();
        let names = device_names(topology);
        let place_of = |mig: &MigDevice| topology.mig_devices().iter().position(|there| there.uuid == mig.uuid);
        let devices = state.offers().through_dra().iter().filter_map(|device| {
            let place = topology.position(&device.gpu.uuid);
            let mig = device.mig.as_ref();
            // A claim has the GPU under another name. Under this name the scheduler would allocate it a second time.
            if mig.is_none() && state.ledger().is_in_set(topology, &device.gpu.uuid) {
                return None;
            }
            let name = match (place, mig) {
                (Some(place), None) => names.get(&(place, None)).cloned(),
                // A MIG device that is gone from its GPU is of no use to a claim.
                (Some(place), Some(mig)) => names.get(&(place, Some(place_of(mig)?))).cloned(),
                // Another GPU may have the minor number now, and with it this name.
                (None, _) => gone_name(device).filter(|name| hardware_of(topology, name).is_none()),
            };
            let concerns = |reason: &UnhealthyReason| reason.concerns(device.instance());
            let (gpu, reasons) = (&device.gpu, reasons(state, &device.gpu, Some(&device.health), concerns));
            let sharing = if mig.is_none() { state.dra_sharing(&gpu.uuid) } else { GpuSharing::default() };
            Some(DraDevice { name, gpu, place, mig, sharing, reasons })
        });
        let devices: Vec<DraDevice<'_>> = devices.collect();
        let listed = state.ledger().holdings().claims.iter().filter(|claimed| claimed.driver == DRA_DRIVER);
        let mut held: BTreeSet<String> = listed.map(|claimed| claimed.device.clone()).collect();
        held.extend(devices.iter().filter_map(|device| {
            let (name, mig) = (device.name.as_ref()?, device.mig.map(|mig| &mig.uuid));
            state.ledger().is_claimed(topology, name, &device.gpu.uuid, mig).then(|| name.clone())
        }));
        let gpus = topology.gpus().iter().enumerate().filter(|(_, gpu)| gpu.mig_enabled);
        let gpus = gpus.filter(|(_, gpu)| state.is_with_dra(&gpu.uuid));
        let mig_gpus = gpus.map(|(place, gpu)| {
            let (place, reasons) = (Some(place), mig_gpu_reasons(state, gpu));
            DraDevice { name: None, gpu, place, mig: None, sharing: GpuSharing::default(), reasons }
        });
        let mig_gpus = mig_gpus.collect();
        let made = state.ledger().made_mig().map(str::to_owned).collect();
        let versions = state.hardware().versions();
        Self { devices, topology, versions, layout, held, mig_gpus, made, settings }
    }
}

/// The reasons why no MIG device can be made on a GPU: those against the whole GPU.
fn mig_gpu_reasons(state: &NodeState, gpu: &Gpu) -> Vec<UnhealthyReason> {
    let is_of_instance = |reason: &UnhealthyReason| matches!(reason, UnhealthyReason::Xid { instance: Some(_), .. });
    let health = state.hardware().health(&gpu.uuid, None);
    let mut reasons = reasons(state, gpu, health.as_ref(), |reason| !is_of_instance(reason));
    if state.door(&gpu.uuid) != Some(Door::Dra) {
        reasons.push(UnhealthyReason::Withdrawn);
    }
    reasons
}

/// The name that a device had before its GPU was gone.
fn gone_name(device: &Device) -> Option<String> {
    let mig: Vec<MigDevice> = device.mig.iter().map(|mig| MigDevice { parent: 0, ..mig.clone() }).collect();
    let names = names(core::slice::from_ref(&device.gpu), &mig).into_iter();
    names.filter(|(_, (_, mig))| mig.is_some() == device.mig.is_some()).map(|(name, _)| name).next()
}

/// The reasons of a GPU, each once: those that count and that of `health`, if `concerns` selects them, then a cordon.
fn reasons(
    state: &NodeState,
    gpu: &Gpu,
    health: Option<&Health>,
    concerns: impl Fn(&UnhealthyReason) -> bool,
) -> Vec<UnhealthyReason> {
    let counting = state.hardware().counting_reasons(&gpu.uuid);
    let mut reasons: Vec<_> = counting.filter(|reason| concerns(reason)).cloned().collect();
    if let Some(reason) = health.and_then(Health::reason)
        && concerns(reason)
        && !reasons.iter().any(|known| known.is(reason))
    {
        reasons.push(reason.clone());
    }
    let cordon = state.hardware().cordon(&gpu.uuid).map(|(reason, _)| reason);
    reasons.extend(cordon.filter(|cordon| !reasons.iter().any(|known| known.is(cordon))).cloned());
    reasons
}

/// The release of an API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerVersion {
    /// The first number: 1.
    pub major: u32,
    /// The second number, such as 36.
    pub minor: u32,
    /// The third number, such as 2.
    pub patch: u32,
}

/// The first release whose API server keeps taints and counters (gates DRADeviceTaints and DRAPartitionableDevices, on
/// by default).
const TAINTS_AND_COUNTERS: ServerVersion = ServerVersion { major: 1, minor: 36, patch: 0 };

impl ServerVersion {
    /// Reads `gitVersion` of `/version`: `v1.36.2`, `v1.36.2-eks-1a2b`, `v1.37.0-rc.1`; `None` without three numbers.
    pub fn parse(text: &str) -> Option<Self> {
        let release = text.strip_prefix('v').unwrap_or(text).split(['-', '+']).next()?;
        let mut numbers = release.split('.').map(|number| number.parse().ok());
        let version = Self { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? };
        numbers.next().is_none().then_some(version)
    }

    /// Returns true if the API server of this release keeps taints and counters, and its scheduler uses counters.
    pub fn has_taints_and_counters(self) -> bool {
        self >= TAINTS_AND_COUNTERS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_without_vendor_suffix() {
        for (text, expected) in [
            ("v1.36.2", Some((1, 36, 2))),
            ("1.37.0", Some((1, 37, 0))),
            ("v1.36.2-eks-1a2b3c", Some((1, 36, 2))),
            ("v1.36.2+k3s1", Some((1, 36, 2))),
            ("v1.37.0-rc.1", Some((1, 37, 0))),
            ("v1.36", None),
            ("v1.36.2.1", None),
            ("v1.x.2", None),
            ("", None),
        ] {
            let numbers = ServerVersion::parse(text).map(|version| (version.major, version.minor, version.patch));
            assert_eq!(numbers, expected, "{text}");
        }
    }
}
