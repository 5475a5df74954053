//! MPS for claims: the control daemon that a claim requests by NVIDIA's `GpuConfig`, and the limits of its containers.
//!
//! A container reaches one control daemon, so a claim has one: for all its whole GPUs, or for the one GPU of which it
//! has shares. The daemon of whole GPUs enforces the claim's limits. A shared GPU has one daemon for all its claims,
//! which enforces the largest limit that a claim may have, so that no new claim restarts it. The lower limits of each
//! claim are in the environment of the claim's containers.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use thiserror::Error;

use super::error::{ClaimError, DeviceRefusal};
use crate::quote::quoted;
use crate::state::{ClaimMps, ClaimName, ClientLimits, GpuShares, MpsOrder, MpsOrderGpu, Share, VOLTA};
use crate::topology::{ComputeCapability, Gpu, GpuUuid};

const MIB: u64 = 1 << 20;

/// `mpsConfig` of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MpsConfig {
    /// The thread percentage, 1 to 100.
    pub thread_percentage: Option<u32>,
    /// The memory limit of each GPU, in MiB, at least 1.
    pub mib: Option<u64>,
    /// The memory limits in MiB, by the GPU's UUID or by its place among the GPUs of the configuration.
    pub mib_by_device: BTreeMap<String, u64>,
}

/// The reason why a claim cannot have MPS.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MpsRefusal {
    /// The GPU is older than Volta, and limits of clients need Volta.
    #[error("MPS for claims needs compute capability 7.0 (Volta), this GPU has {}.{}", .0.major, .0.minor)]
    TooOld(ComputeCapability),
    /// The claim has the GPU with adminAccess, which claims for MPS cannot have.
    #[error("a device with adminAccess is not shared by MPS")]
    Admin,
    /// The device would need another control daemon than the claim's first device, which the text names.
    #[error(
        "a container reaches one MPS control daemon, and this device needs another one than {0}; request whole GPUs \
         only, or shares of one GPU only"
    )]
    OtherDaemon(String),
    /// The devices have different thread percentages, and a control daemon has one for all its GPUs.
    #[error(
        "mpsConfig.defaultActiveThreadPercentage is {0} for this device and {1} for another device of the claim; set \
         one value, because the claim has one MPS control daemon"
    )]
    OtherThreads(u32, u32),
    /// The limit is above the claim's part of the GPU.
    #[error("mpsConfig: {limit} {what} exceed the {max} of the {}", if *is_share { "claim's share" } else { "GPU" })]
    TooMuch {
        /// The unit: MiB of memory, or percent of the threads.
        what: &'static str,
        /// The limit in the configuration.
        limit: u64,
        /// The claim's part of the GPU.
        max: u64,
        /// True if the claim has a share of the GPU.
        is_share: bool,
    },
    /// The limit names a device that the configuration is not for.
    #[error(
        "mpsConfig.defaultPerDevicePinnedMemoryLimit names {name}, neither the UUID of a GPU that the configuration is \
         for nor a number below {1}", name = quoted(.0)
    )]
    UnknownDevice(String, usize),
    /// The share is less than 1 percent of the GPU, the smallest limit of threads.
    #[error("the claim has {0} of {1} shares, less than 1 percent of the threads")]
    TooSmall(u64, u32),
    /// Another claim has a control daemon with other limits on the GPU.
    #[error("the claim {} has an MPS control daemon with other limits on this GPU", .0.with_uid())]
    Disagrees(Box<ClaimName>),
    /// The GPU's UUID is malformed.
    #[error("cannot name the folder of the MPS control daemon: the GPU's UUID is malformed")]
    NoName,
}

/// An allocated device whose configuration requests MPS.
#[derive(Clone, Debug)]
pub(super) struct MpsDevice<'a> {
    pub request: String,
    pub name: String,
    pub gpu: &'a Gpu,
    pub admin: bool,
    /// The claim's share of the GPU, if it does not have all of it.
    pub share: Option<(Share, GpuShares)>,
    /// The number of the configuration among those of the claim.
    pub config_number: usize,
    pub config: &'a MpsConfig,
}

impl MpsDevice<'_> {
    fn refused(&self, why: MpsRefusal) -> ClaimError {
        ClaimError::of_device(&self.name, &self.gpu.uuid, DeviceRefusal::Mps(why))
    }

    /// The memory limit from its configuration, in MiB. `devices` are all such devices of the claim. `max` is the
    /// memory of the claim's share if `is_share`, otherwise of the GPU.
    fn memory(&self, devices: &[Self], max: Option<u64>, is_share: bool) -> Result<Option<u64>, ClaimError> {
        let of_config = devices.iter().filter(|other| other.config_number == self.config_number);
        let mut of_config: Vec<&GpuUuid> = of_config.map(|other| &other.gpu.uuid).collect();
        // A GPU is there more than once only if the devices are shares of one GPU.
        of_config.dedup();
        let place = |name: &str| {
            let by_uuid = of_config.iter().position(|gpu| gpu.as_str() == name);
            by_uuid.or_else(|| name.parse().ok().filter(|place: &usize| *place < of_config.len()))
        };
        let mut limit = self.config.mib;
        for (name, mib) in &self.config.mib_by_device {
            let unknown = || self.refused(MpsRefusal::UnknownDevice(name.clone(), of_config.len()));
            let named = place(name).ok_or_else(unknown)?;
            if of_config.get(named).is_some_and(|gpu| **gpu == self.gpu.uuid) {
                limit = Some(*mib);
            }
        }
        match limit.zip(max) {
            Some((limit, max)) if limit > max => {
                Err(self.refused(MpsRefusal::TooMuch { what: "MiB of memory", limit, max, is_share }))
            }
            _ => Ok(limit),
        }
    }
}

/// Plans the MPS of a claim's devices. `others` has the MPS of the other claims. `Err` refuses one device.
pub(super) fn plan<'a>(
    devices: &[MpsDevice<'_>],
    others: impl Iterator<Item = (&'a ClaimName, &'a ClaimMps)>,
) -> Result<Option<ClaimMps>, ClaimError> {
    let Some(first) = devices.first() else { return Ok(None) };
    for device in devices {
        check(device, first).map_err(|why| device.refused(why))?;
    }
    let planned = match first.share {
        Some((_, sharing)) => shared(devices, first, sharing)?,
        None => whole(devices, first)?,
    };
    planned.order.name().ok_or_else(|| first.refused(MpsRefusal::NoName))?;
    for (name, other) in others.filter(|(_, other)| other.order.overlaps(&planned.order)) {
        if other.order != planned.order {
            return Err(first.refused(MpsRefusal::Disagrees(Box::new(name.clone()))));
        }
    }
    Ok(Some(planned))
}

/// Checks a device alone, and that it can have the same daemon as the first one.
fn check(device: &MpsDevice<'_>, first: &MpsDevice<'_>) -> Result<(), MpsRefusal> {
    if let Some(old) = device.gpu.facts.compute_capability.filter(|capability| *capability < VOLTA) {
        return Err(MpsRefusal::TooOld(old));
    }
    if device.admin {
        return Err(MpsRefusal::Admin);
    }
    match (device.share, first.share) {
        (None, None) => Ok(()),
        (Some(_), Some(_)) if device.gpu.uuid == first.gpu.uuid => Ok(()),
        _ => Err(MpsRefusal::OtherDaemon(format!("{} ({})", first.name, first.gpu.uuid))),
    }
}

/// The daemon of a claim's whole GPUs.
fn whole(devices: &[MpsDevice<'_>], first: &MpsDevice<'_>) -> Result<ClaimMps, ClaimError> {
    let threads = |device: &MpsDevice<'_>| device.config.thread_percentage.unwrap_or(100);
    let (mut gpus, mut clients) = (Vec::new(), BTreeMap::new());
    for device in devices {
        if threads(device) != threads(first) {
            return Err(device.refused(MpsRefusal::OtherThreads(threads(device), threads(first))));
        }
        let mib = device.memory(devices, device.gpu.facts.memory_mib, false)?;
        gpus.push(MpsOrderGpu { gpu: device.gpu.uuid.clone(), mib });
        clients.insert(device.request.clone(), ClientLimits::default());
    }
    Ok(ClaimMps { order: MpsOrder { gpus, thread_percentage: threads(first), exclusive: true }, clients })
}

/// The daemon of a GPU in N shares, and the limits of the claim's clients.
///
/// The daemon's thread percentage is 100 / N if a claim may have one share only, otherwise 100. The part of a request
/// with k shares is 100 * k / N percent of the threads, and the memory of these k shares. Divisions round down.
fn shared(devices: &[MpsDevice<'_>], first: &MpsDevice<'_>, sharing: GpuShares) -> Result<ClaimMps, ClaimError> {
    let daemon_threads = if sharing.one_each { 100 / sharing.shares.max(1) } else { 100 };
    let mut clients = BTreeMap::new();
    for device in devices {
        let of_request = devices.iter().filter(|other| other.request == device.request).filter_map(|other| other.share);
        let (shares, bytes) = of_request.fold((0_u64, 0_u64), |(shares, bytes), (share, _)| {
            (shares.saturating_add(share.shares), bytes.saturating_add(share.memory))
        });
        let part = shares.saturating_mul(100) / u64::from(sharing.shares.max(1));
        let part = u32::try_from(part).unwrap_or(100).min(100);
        if part == 0 {
            return Err(device.refused(MpsRefusal::TooSmall(shares, sharing.shares)));
        }
        let threads = device.config.thread_percentage.unwrap_or(part);
        if threads > part {
            let (what, limit, max) = ("percent of the threads", threads.into(), part.into());
            return Err(device.refused(MpsRefusal::TooMuch { what, limit, max, is_share: true }));
        }
        let part_mib = (bytes >= MIB).then_some(bytes / MIB);
        let mib = device.memory(devices, part_mib.or(device.gpu.facts.memory_mib), part_mib.is_some())?.or(part_mib);
        let thread_percentage = (threads != daemon_threads).then_some(threads);
        clients.insert(device.request.clone(), ClientLimits { thread_percentage, mib });
    }
    let gpus = Vec::from([MpsOrderGpu { gpu: first.gpu.uuid.clone(), mib: None }]);
    Ok(ClaimMps { order: MpsOrder { gpus, thread_percentage: daemon_threads.max(1), exclusive: false }, clients })
}
