//! Checkpoints that cannot be read: a disk that fails, a later version's file, a file torn by a crash of the machine.
//!
//! Such a file stays until the kubelet unprepares its claim, or the claim is over by the cluster and the kubelet's list.
//! It holds the GPUs, MIG devices and MPS control daemons that can be read in it. Where nothing can be read, the
//! kubelet's list says which devices its claim has.

use std::sync::Arc;

use super::super::Occurrence;
use super::super::checkpoint::{Checkpoint, Unreadable};
use super::{ClaimManager, PrepareError, Slot, Turn};
use linkwise_core::claims::ClaimName;
use linkwise_core::errors::chain;
use linkwise_core::state::ClaimedDevice;
use linkwise_system::files;

impl ClaimManager {
    /// Reads the checkpoint of a claim again if it could not be read; returns it if it still cannot be.
    pub(super) async fn read_again(&self, uid: &str, turn: &Turn) -> Option<Unreadable> {
        self.slots().get(uid)?.unreadable.as_ref()?;
        let (store, named, held) = (Arc::clone(&self.store), uid.to_owned(), Arc::clone(turn));
        let read = files::blocking(move || {
            let _held = held;
            Ok(store.read(&named))
        });
        match read.await {
            Ok(Ok(checkpoint)) => {
                self.put(uid, Some(checkpoint));
                None
            }
            Ok(Err(unreadable)) => Some(*unreadable),
            Err(error) => Some(Unreadable { why: error.to_string(), is_torn: false, parts: None }),
        }
    }

    /// Reads unreadable checkpoints again. Undoes those of claims that are over: the cluster and the kubelet have no such
    /// claim, or, where the claim's name cannot be read, the kubelet has listed no claim but those with checkpoints for
    /// as long as its lists may be late.
    pub(super) async fn sweep_unreadable(&self) {
        let unreadable = |slot: &Slot| slot.unreadable.is_some();
        let uids: Vec<String> =
            self.slots().iter().filter(|(_, slot)| unreadable(slot)).map(|(uid, _)| uid.clone()).collect();
        for uid in uids {
            let is_over = match self.known(&uid) {
                Some(parts) => self.is_gone(&parts).await,
                None => self.is_long_unlisted(&uid, self.is_known() && self.unaccounted().next().is_none()),
            };
            let turn = self.turn(&uid).await;
            if self.read_again(&uid, &turn).await.is_some() && is_over {
                let claim = self
                    .known(&uid)
                    .map_or_else(|| ClaimName { uid: uid.clone(), ..ClaimName::default() }, |known| known.claim);
                let result = self.undo_in_time(&uid, &turn).await.map_err(|error| chain(&error));
                (self.observer)(Occurrence::Swept { claim, result });
            }
        }
    }

    /// The devices of this driver's claims in the kubelet's lists whose claim has no checkpoint that can be read.
    fn unaccounted(&self) -> impl Iterator<Item = ClaimedDevice> {
        let known: Vec<String> =
            self.slots().values().filter_map(Slot::known).map(|checkpoint| checkpoint.claim.to_string()).collect();
        let state = self.snapshot.borrow().clone();
        let listed: Vec<ClaimedDevice> = state.ledger().claimed_lately().cloned().collect();
        let driver = self.settings.driver.clone();
        listed.into_iter().filter(move |held| held.driver == driver && !known.contains(&held.claim))
    }

    fn is_known(&self) -> bool {
        self.snapshot.borrow().ledger().is_known()
    }

    /// The reason why a device of a claim may be another claim's of which nothing can be read: the kubelet lists it, or
    /// cannot be asked.
    pub(super) fn doubt(&self, checkpoint: &Checkpoint) -> Option<PrepareError> {
        let (uid, why) = {
            let slots = self.slots();
            let (uid, slot) = slots.iter().find(|(_, slot)| slot.is_blind())?;
            (uid.clone(), slot.unreadable.as_ref()?.why.clone())
        };
        let devices = &checkpoint.prepared.devices;
        if !self.is_known() {
            let (device, held) = (devices.first()?.device.clone(), "the kubelet cannot be asked".to_owned());
            return Some(PrepareError::Doubtful { device, uid, why, held });
        }
        let has = |held: &ClaimedDevice| devices.iter().any(|device| !device.admin && device.device == held.device);
        let listed = self.unaccounted().find(has)?;
        let held = format!("the kubelet lists it with the claim {}", listed.claim);
        Some(PrepareError::Doubtful { device: listed.device, uid, why, held })
    }
}
