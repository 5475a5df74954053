//! Shares: the parts of a GPU that several claims have at once. The scheduler counts shares; these checks are a second
//! line of defence.

use crate::prelude::*;

use thiserror::Error;

use super::claim::AllocatedDevice;
use crate::quantity;
use crate::quote::quoted;
use crate::state::{ClaimName, GpuShares, Share};
use crate::words::list;

/// The reason why a claim cannot have a share of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ShareError {
    /// The allocation has a share ID, but the GPU goes to one claim at a time.
    #[error("the allocation has the share ID {}, but this node gives the GPU to one claim at a time", quoted(.0))]
    NotShared(String),
    /// The allocation lacks the amount of a capacity.
    #[error("the allocation of a share lacks the capacity {0}")]
    Unknown(&'static str),
    /// The amount is not a quantity, or is zero.
    #[error("the allocation takes {amount} of the capacity {0}, which is not a positive quantity", amount = quoted(.1))]
    NoAmount(&'static str, String),
    /// Too little is left.
    #[error("{amount} of {whole} {capacity} are allocated to the claim, but {held} are held by {}", names(.holders))]
    Exceeds {
        /// The capacity, and its unit.
        capacity: &'static str,
        /// The amount that the claim takes.
        amount: u64,
        /// The amount that the GPU has.
        whole: u64,
        /// The amount that other claims, and other devices of this claim, have.
        held: u64,
        /// The other claims; empty if only the claim itself holds shares.
        holders: Vec<ClaimName>,
    },
    /// The amount is above what the GPU has, or what a claim may take.
    #[error("{amount} {capacity} are allocated to the claim, which may have {max}")]
    TooMuch {
        /// The capacity, and its unit.
        capacity: &'static str,
        /// The amount that the claim takes.
        amount: u64,
        /// The most that the claim may take.
        max: u64,
    },
}

fn names(holders: &[ClaimName]) -> String {
    match holders {
        [] => "the claim itself".to_owned(),
        holders => list(holders.iter().map(|holder| format!("the claim {}", holder.with_uid()))),
    }
}

/// Reads the share of an allocated device; `None` if the claim has all of it. `sharing` is the GPU's published sharing.
/// If the GPU is published in shares and the allocation has no share ID, the claim has the whole GPU, because the API
/// server dropped the fields of shared devices.
pub(super) fn of(
    result: &AllocatedDevice,
    sharing: Option<GpuShares>,
    memory_mib: Option<u64>,
) -> Result<Option<Share>, ShareError> {
    let Some(share) = &result.share_id else { return Ok(None) };
    if sharing.is_none() {
        return Err(ShareError::NotShared(share.clone()));
    }
    let amount = |capacity: &'static str| {
        let amount = result.consumed_capacity.get(capacity).ok_or(ShareError::Unknown(capacity))?;
        let number = quantity::parse(amount).filter(|amount| *amount > 0);
        number.ok_or_else(|| ShareError::NoAmount(capacity, amount.clone()))
    };
    let has_memory = memory_mib.is_some() && result.consumed_capacity.contains_key("memory");
    Ok(Some(Share { shares: amount("shares")?, memory: if has_memory { amount("memory")? } else { 0 } }))
}

/// Checks that a share fits on the GPU together with `others`, each with its claim; `None` is the claim itself.
pub(super) fn fits<'a>(
    share: Share,
    sharing: GpuShares,
    memory_mib: Option<u64>,
    others: impl Iterator<Item = (Option<&'a ClaimName>, Share)> + Clone,
) -> Result<(), ShareError> {
    const MIB: u64 = 1 << 20;
    let max = if sharing.one_each { 1 } else { u64::from(sharing.shares) };
    if share.shares > max {
        return Err(ShareError::TooMuch { capacity: "shares", amount: share.shares, max });
    }
    let check = |capacity: &'static str, whole: u64, of: fn(Share) -> u64| {
        let held = others.clone().fold(0, |sum: u64, (_, other)| sum.saturating_add(of(other)));
        let amount = of(share);
        match amount.saturating_add(held) {
            sum if sum <= whole => Ok(()),
            _ if amount > whole => Err(ShareError::TooMuch { capacity, amount, max: whole }),
            _ => {
                let mut holders: Vec<ClaimName> = others.clone().filter_map(|(name, _)| name.cloned()).collect();
                holders.dedup();
                Err(ShareError::Exceeds { capacity, amount, whole, held, holders })
            }
        }
    };
    check("shares", sharing.shares.into(), |share| share.shares)?;
    match memory_mib {
        Some(memory) => check("bytes of memory", memory.saturating_mul(MIB), |share| share.memory),
        None => Ok(()),
    }
}
