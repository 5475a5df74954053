//! MPS control daemons for claims: orders those that claims need, and waits for a claim's daemon before the claim
//! counts as prepared.
//!
//! The wait holds the claim's turn. The manager orders the daemons that the checkpoints in memory need. A checkpoint is
//! in memory from before its file is written until after the file is removed. So a killed process leaves nothing to
//! undo: the next one orders what the files have. Another process carries orders out (docs/mps.md).

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::timeout;

use super::ClaimManager;
use crate::dra::api::{MpsLink, MpsOrders, MpsServed};
use crate::dra::checkpoint::Checkpoint;
use linkwise_core::claims::{MpsOrder, PreparedDevice};
use linkwise_core::publish::MpsShm;
use linkwise_core::state::ResourceName;
use linkwise_system::or_never;
use linkwise_system::right::Right;

/// The cause of a claim that failed because its GPUs have no MPS control daemon, or are exclusive for another one.
#[derive(Debug, thiserror::Error)]
pub(super) enum MpsError {
    #[error(
        "the claim asks for MPS, which this node does not have for claims: {0}; install the overlay dra-mps, or set \
         the chart's dra.mps (docs/mps.md)"
    )]
    NotHere(String),
    #[error("the MPS control daemon of {gpus} is not ready: {why}; run `linkwise mps-control-daemon` on this node")]
    NotReady { gpus: String, why: String },
    #[error(
        "device {device} ({gpu}) is in the compute mode EXCLUSIVE_PROCESS for another MPS control daemon; run \
         `linkwise mps-control-daemon` on this node, which resets the mode when that daemon has ended"
    )]
    Exclusive { device: String, gpu: String },
}

impl MpsLink {
    /// Orders the daemons that these checkpoints need. `keeps_others` is true if nothing can be read in some
    /// checkpoint; daemons of earlier orders then keep running.
    pub(super) fn order<'a>(
        &self,
        checkpoints: impl Iterator<Item = &'a Checkpoint>,
        keeps_others: bool,
        right: &Right,
    ) {
        let mut daemons: BTreeMap<ResourceName, MpsOrder> = BTreeMap::new();
        let mut claims: BTreeMap<ResourceName, BTreeSet<String>> = BTreeMap::new();
        for checkpoint in checkpoints {
            let order = checkpoint.prepared.mps.as_ref().map(|mps| &mps.order);
            if let Some((name, order)) = order.and_then(|order| Some((order.name()?, order.clone()))) {
                claims.entry(name.clone()).or_default().insert(checkpoint.claim.uid.clone());
                daemons.insert(name, order);
            }
        }
        self.orders.send_if_modified(|before| {
            let is_same = |before: &MpsOrders| {
                (&before.daemons, &before.claims, before.keeps_others) == (&daemons, &claims, keeps_others)
            };
            if before.as_ref().is_some_and(is_same) {
                return false;
            }
            let now = before.get_or_insert_default();
            now.revision = now.revision.saturating_add(1);
            (now.daemons, now.claims) = (daemons, claims);
            now.keeps_others = keeps_others;
            now.right = Some(right.clone());
            true
        });
    }

    /// The daemons that serve without a shared memory of their own, as older releases ran them.
    pub(super) fn with_common_shm(&self) -> BTreeSet<ResourceName> {
        with_common_shm(&self.served.borrow())
    }

    /// Waits until [`Self::with_common_shm`] differs from `before`.
    pub(super) async fn await_common_shm_change(&self, before: &BTreeSet<ResourceName>) {
        or_never(self.served.clone().wait_for(|served| with_common_shm(served) != *before)).await;
    }

    /// Asks for a new look at the daemons that serve. Returns the revision with which the answer comes.
    fn look_again(&self) -> u64 {
        let mut revision = 0;
        self.orders.send_modify(|orders| {
            let orders = orders.get_or_insert_default();
            orders.revision = orders.revision.saturating_add(1);
            revision = orders.revision;
        });
        revision
    }
}

impl ClaimManager {
    /// As [`MpsLink::with_common_shm`]; none without a link.
    pub(super) fn with_common_shm(&self) -> BTreeSet<ResourceName> {
        self.settings.mps.as_ref().map(MpsLink::with_common_shm).unwrap_or_default()
    }

    /// Waits, at most for `mps_timeout`, until the control daemon of a claim serves, and no other control daemon has
    /// the claim's GPUs in the compute mode EXCLUSIVE_PROCESS.
    pub(super) async fn await_mps(&self, checkpoint: &Checkpoint) -> Result<(), MpsError> {
        let order = checkpoint.prepared.mps.as_ref().map(|mps| &mps.order);
        let Some(link) = &self.settings.mps else {
            let why = "linkwise has no MPS root";
            return order.map_or(Ok(()), |_| Err(MpsError::NotHere(why.to_owned())));
        };
        let revision = order.map_or(0, |_| link.look_again());
        let check = |served: &Option<MpsServed>| {
            if let Some(order) = order {
                let served = served.as_ref().filter(|served| served.revision >= revision);
                check_serving(served.ok_or_else(|| not_ready(order, "its order is being written"))?, order)?;
            }
            served.as_ref().map_or(Ok(()), |served| check_exclusive(served, checkpoint))
        };
        // Waiting helps if the claim's daemon is not ready, or another daemon has to end.
        let is_over = |served: &Option<MpsServed>| matches!(check(served), Ok(()) | Err(MpsError::NotHere(_)));
        let mut served = link.served.clone();
        // An error means that the node is ending, or that the time is over.
        let _ = timeout(self.settings.mps_timeout, served.wait_for(is_over)).await;
        check(&link.served.borrow())
    }
}

impl Drop for ClaimManager {
    /// Drops the orders, which have a clone of the right. The daemons keep running, and the next process orders them.
    fn drop(&mut self) {
        if let Some(mps) = &self.settings.mps {
            mps.orders.send_replace(None);
        }
    }
}

fn with_common_shm(served: &Option<MpsServed>) -> BTreeSet<ResourceName> {
    let daemons = served.iter().flat_map(|served| &served.daemons);
    daemons.filter(|(_, shm)| **shm == Ok(MpsShm::Common)).map(|(name, _)| name.clone()).collect()
}

/// Checks that the ordered control daemon serves.
fn check_serving(served: &MpsServed, order: &MpsOrder) -> Result<(), MpsError> {
    if let Some(trouble) = &served.trouble {
        return Err(MpsError::NotHere(trouble.clone()));
    }
    match order.name().and_then(|name| served.daemons.get(&name)) {
        Some(Ok(_)) => Ok(()),
        Some(Err(why)) => Err(not_ready(order, why)),
        None => Err(not_ready(order, "it is not ordered")),
    }
}

fn not_ready(order: &MpsOrder, why: &str) -> MpsError {
    let gpus: Vec<&str> = order.gpus.iter().map(|gpu| gpu.gpu.as_str()).collect();
    MpsError::NotReady { gpus: gpus.join(", "), why: why.to_owned() }
}

/// Checks that no GPU of a claim is exclusive for another control daemon than its own.
fn check_exclusive(served: &MpsServed, checkpoint: &Checkpoint) -> Result<(), MpsError> {
    let own = checkpoint.prepared.mps.as_ref().filter(|mps| mps.order.exclusive);
    let is_own =
        |device: &PreparedDevice| own.is_some_and(|mps| mps.order.gpus.iter().any(|gpu| gpu.gpu == device.gpu));
    let taken = checkpoint.prepared.devices.iter().find(|device| {
        let is_whole = device.mig.is_none() && device.made.is_none() && !device.admin;
        is_whole && !is_own(device) && served.exclusive.contains(&device.gpu)
    });
    match taken {
        Some(device) => Err(MpsError::Exclusive { device: device.device.clone(), gpu: device.gpu.to_string() }),
        None => Ok(()),
    }
}
