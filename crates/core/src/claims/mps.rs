//! MPS for claims: the control daemon that a claim asks for by NVIDIA's `GpuConfig`, and the limits of its containers.
//!
//! A container reaches one control daemon, so a claim has one: for all its whole GPUs, or for the one GPU of which it
//! has a share. The daemon of whole GPUs enforces the claim's limits. The daemon of a shared GPU is the same for all
//! its claims, so that no claim restarts it for another: it enforces the most that each of them may have. Their own
//! limits, which are lower, are in their containers' environment.

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
    /// The memory limits by a GPU's UUID, or by its place among the GPUs of the configuration.
    pub mib_by_device: BTreeMap<String, u64>,
}

/// The reason why a claim cannot have MPS.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MpsRefusal {
    /// The GPU is older than Volta, and limits of clients need Volta.
    #[error("MPS for claims needs compute capability 7.0 (Volta), this GPU has {}.{}", .0.major, .0.minor)]
    TooOld(ComputeCapability),
    /// The claim has the GPU for an administrator, who shares it with nobody.
    #[error("a device with adminAccess is not shared by MPS")]
    Admin,
    /// The device would need another control daemon than the rest of the claim.
    #[error(
        "a container reaches one MPS control daemon, and this device would need another than {0}: a claim may have \
         whole GPUs by MPS, or a share of one GPU"
    )]
    OtherDaemon(String),
    /// The devices have different thread percentages, and a control daemon has one for all its GPUs.
    #[error(
        "mpsConfig.defaultActiveThreadPercentage is {0} for this device and {1} for another of the claim, which \
         has one MPS control daemon"
    )]
    OtherThreads(u32, u32),
    /// The limit is above the claim's part of the GPU.
    #[error("mpsConfig: {asked} {what} are more than {most}, which {}", if *is_share { "the claim's share has" } else { "the GPU has" })]
    TooMuch {
        /// MiB of memory, or percent of the threads.
        what: &'static str,
        /// The limit.
        asked: u64,
        /// The claim's part.
        most: u64,
        /// True if the claim has a share of the GPU.
        is_share: bool,
    },
    /// The limit names a device that the configuration is not for.
    #[error(
        "mpsConfig.defaultPerDevicePinnedMemoryLimit names {name}, neither the UUID of a GPU that the configuration is \
         for nor a number below {1}", name = quoted(.0)
    )]
    UnknownDevice(String, usize),
    /// The share is too small to have any thread.
    #[error("the claim has {0} of {1} shares, less than 1 percent of the threads")]
    TooSmall(u64, u32),
    /// Another claim has a control daemon with other limits on the GPU.
    #[error("the claim {} has an MPS control daemon with other limits on this GPU", .0.with_uid())]
    Disagrees(Box<ClaimName>),
    /// The GPU's UUID is malformed.
    #[error("its UUID cannot be part of the name of a folder")]
    NoName,
}

/// A device that is to be shared by MPS.
#[derive(Clone, Debug)]
pub(super) struct Asked<'a> {
    pub request: String,
    pub device: String,
    pub gpu: &'a Gpu,
    pub admin: bool,
    /// The claim's share of the GPU, if it does not have all of it.
    pub share: Option<(Share, GpuShares)>,
    /// The number of the claim's configuration, and its settings.
    pub config: (usize, &'a MpsConfig),
}

impl Asked<'_> {
    fn refused(&self, why: MpsRefusal) -> ClaimError {
        ClaimError::of_device(&self.device, &self.gpu.uuid, DeviceRefusal::Mps(why))
    }
}

/// Plans the MPS of a claim; `Err` is the refusal of its first device that cannot have MPS. `others` are the other
/// claims.
pub(super) fn plan<'a>(
    asked: &[Asked<'_>],
    others: impl Iterator<Item = (&'a ClaimName, &'a ClaimMps)>,
) -> Result<Option<ClaimMps>, ClaimError> {
    let Some(first) = asked.first() else { return Ok(None) };
    for one in asked {
        check(one, first).map_err(|why| one.refused(why))?;
    }
    let planned = match first.share {
        Some((_, sharing)) => shared(asked, first, sharing)?,
        None => whole(asked, first)?,
    };
    planned.order.name().ok_or_else(|| first.refused(MpsRefusal::NoName))?;
    for (name, other) in others.filter(|(_, other)| other.order.overlaps(&planned.order)) {
        if other.order != planned.order {
            return Err(first.refused(MpsRefusal::Disagrees(Box::new(name.clone()))));
        }
    }
    Ok(Some(planned))
}

/// Checks a device by itself and against the first one.
fn check(one: &Asked<'_>, first: &Asked<'_>) -> Result<(), MpsRefusal> {
    if let Some(old) = one.gpu.facts.compute_capability.filter(|capability| *capability < VOLTA) {
        return Err(MpsRefusal::TooOld(old));
    }
    if one.admin {
        return Err(MpsRefusal::Admin);
    }
    match (one.share, first.share) {
        (None, None) => Ok(()),
        (Some(_), Some(_)) if one.gpu.uuid == first.gpu.uuid => Ok(()),
        _ => Err(MpsRefusal::OtherDaemon(format!("{} ({})", first.device, first.gpu.uuid))),
    }
}

/// The daemon of a claim's whole GPUs.
fn whole(asked: &[Asked<'_>], first: &Asked<'_>) -> Result<ClaimMps, ClaimError> {
    let threads = |one: &Asked<'_>| one.config.1.thread_percentage.unwrap_or(100);
    let (mut gpus, mut clients) = (Vec::new(), BTreeMap::new());
    for one in asked {
        if threads(one) != threads(first) {
            return Err(one.refused(MpsRefusal::OtherThreads(threads(one), threads(first))));
        }
        let mib = memory(one, asked, one.gpu.facts.memory_mib, false)?;
        gpus.push(MpsOrderGpu { gpu: one.gpu.uuid.clone(), mib });
        clients.insert(one.request.clone(), ClientLimits::default());
    }
    Ok(ClaimMps { order: MpsOrder { gpus, thread_percentage: threads(first), exclusive: true }, clients })
}

/// The daemon of a GPU in shares.
fn shared(asked: &[Asked<'_>], first: &Asked<'_>, sharing: GpuShares) -> Result<ClaimMps, ClaimError> {
    let most = if sharing.one_each { 100 / sharing.shares.max(1) } else { 100 };
    let mut clients = BTreeMap::new();
    for one in asked {
        // A client gets the part of the GPU that its request has.
        let of_request = asked.iter().filter(|other| other.request == one.request).filter_map(|other| other.share);
        let (shares, bytes) = of_request.fold((0_u64, 0_u64), |(shares, bytes), (share, _)| {
            (shares.saturating_add(share.shares), bytes.saturating_add(share.memory))
        });
        let part = shares.saturating_mul(100) / u64::from(sharing.shares.max(1));
        let part = u32::try_from(part).unwrap_or(100).min(100);
        if part == 0 {
            return Err(one.refused(MpsRefusal::TooSmall(shares, sharing.shares)));
        }
        let threads = one.config.1.thread_percentage.unwrap_or(part);
        if threads > part {
            let (what, asked, most) = ("percent of the threads", threads.into(), part.into());
            return Err(one.refused(MpsRefusal::TooMuch { what, asked, most, is_share: true }));
        }
        let has = (bytes >= MIB).then_some(bytes / MIB);
        let mib = memory(one, asked, has.or(one.gpu.facts.memory_mib), has.is_some())?.or(has);
        let thread_percentage = (threads != most).then_some(threads);
        clients.insert(one.request.clone(), ClientLimits { thread_percentage, mib });
    }
    let gpus = Vec::from([MpsOrderGpu { gpu: first.gpu.uuid.clone(), mib: None }]);
    Ok(ClaimMps { order: MpsOrder { gpus, thread_percentage: most.max(1), exclusive: false }, clients })
}

/// The limit of a GPU's memory from its configuration, in MiB; `most` is the memory that there is.
fn memory(one: &Asked<'_>, asked: &[Asked<'_>], most: Option<u64>, is_share: bool) -> Result<Option<u64>, ClaimError> {
    let (number, config) = one.config;
    let of_config = asked.iter().filter(|other| other.config.0 == number);
    let mut of_config: Vec<&GpuUuid> = of_config.map(|other| &other.gpu.uuid).collect();
    // Only shares of one GPU name it more than once, and then all do.
    of_config.dedup();
    let place = |name: &str| {
        let by_uuid = of_config.iter().position(|gpu| gpu.as_str() == name);
        by_uuid.or_else(|| name.parse().ok().filter(|place: &usize| *place < of_config.len()))
    };
    let mut limit = config.mib;
    for (name, mib) in &config.mib_by_device {
        let unknown = || one.refused(MpsRefusal::UnknownDevice(name.clone(), of_config.len()));
        let named = place(name).ok_or_else(unknown)?;
        if of_config.get(named).is_some_and(|gpu| **gpu == one.gpu.uuid) {
            limit = Some(*mib);
        }
    }
    match limit.zip(most) {
        Some((asked, most)) if asked > most => {
            Err(one.refused(MpsRefusal::TooMuch { what: "MiB of memory", asked, most, is_share }))
        }
        _ => Ok(limit),
    }
}
