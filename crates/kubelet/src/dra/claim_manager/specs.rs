//! The CDI specs of prepared claims: made from the present state, written, and renewed when it changes.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::timeout;

use super::super::checkpoint::Checkpoint;
use super::super::claim_specs;
use super::{ClaimManager, PrepareError, Turn};
use linkwise_core::claims::{ClaimError, containers};
use linkwise_system::files;

impl ClaimManager {
    /// Writes the CDI specs of all prepared claims anew, as far as they are not as the node is now: containers that
    /// restart get them.
    pub(in crate::dra) async fn renew_specs(&self) {
        let boot = self.settings.boot.as_deref();
        let prepared = self.checkpoints().into_iter().filter(|checkpoint| checkpoint.is_completed_in(boot));
        let renewals = prepared.map(|checkpoint| async move {
            let uid = &checkpoint.claim.uid;
            let turn = self.turn(uid).await;
            if let Some(checkpoint) = self.checkpoint(uid).filter(|now| now.is_completed_in(boot)) {
                self.renew_spec(&checkpoint, &turn).await;
            }
        });
        join_all(renewals).await;
        self.tidy();
    }

    /// The text of a claim's CDI spec by the present state. Fails with the missing names if the last scan of the host is
    /// older than that, and with `None` before the first one.
    fn spec(&self, checkpoint: &Checkpoint) -> Result<Result<String, Option<Vec<String>>>, ClaimError> {
        let (state, host) = (self.snapshot.borrow().clone(), self.settings.host_devices.borrow().clone());
        let common_shm = self.with_common_shm();
        let requests = containers(&checkpoint.prepared, self.node(&state, &host, &common_shm))?;
        let Some(devices) = self.settings.cdi.borrow().clone() else { return Ok(Err(None)) };
        Ok(claim_specs::text(&checkpoint.claim.uid, &requests, &devices).map_err(Some))
    }

    /// The text of a claim's CDI spec. Waits until a scan of the host has found the claim's devices as they are: that
    /// follows a change of the snapshot, such as a MIG device just made.
    pub(super) async fn await_spec(&self, checkpoint: &Checkpoint) -> Result<String, PrepareError> {
        let (mut cdi, mut last) = (self.settings.cdi.clone(), None);
        let found = async {
            loop {
                cdi.mark_unchanged();
                match self.spec(checkpoint)? {
                    Ok(text) => return Ok(text),
                    Err(missing) => last = missing,
                }
                if cdi.changed().await.is_err() {
                    // The node is ending.
                    std::future::pending::<()>().await;
                }
            }
        };
        let found: Result<Result<String, ClaimError>, _> = timeout(self.settings.specs_timeout, found).await;
        match found {
            Ok(text) => Ok(text?),
            Err(_) => Err(PrepareError::NoDevices(last.map_or("any device".to_owned(), |names| names.join(", ")))),
        }
    }

    /// Returns true if a prepared claim still has its devices, and its containers get them.
    pub(super) async fn is_intact(&self, checkpoint: &Checkpoint, turn: &Turn) -> bool {
        if checkpoint.has_mig() {
            self.await_mig().await;
        }
        match self.await_spec(checkpoint).await {
            Ok(text) => self.write_spec(&checkpoint.claim.uid, text, turn).await.is_ok(),
            Err(PrepareError::Claim(_)) => self.keeps_spec(checkpoint).await,
            Err(_) => false,
        }
    }

    /// Writes the spec of a prepared claim by the present state, if it changed. If a device of the claim is gone, so is
    /// its spec, where it could be another claim's by now.
    pub(super) async fn renew_spec(&self, checkpoint: &Checkpoint, turn: &Turn) {
        let uid = &checkpoint.claim.uid;
        match self.spec(checkpoint) {
            // Where it cannot be written now, the next sweep does it.
            Ok(Ok(text)) => drop(self.write_spec(uid, text, turn).await),
            // A scan follows.
            Ok(Err(_)) => {}
            Err(_) if !self.keeps_spec(checkpoint).await => drop(self.remove_spec(uid, turn).await),
            Err(_) => {}
        }
    }

    /// Returns true if the spec of a claim whose devices are not all in the snapshot stays as it is, for containers that
    /// restart: a GPU keeps its nodes while the driver runs. The nodes of a MIG device go to the next one, once it is
    /// known to be gone.
    async fn keeps_spec(&self, checkpoint: &Checkpoint) -> bool {
        let (folder, uid) = (self.settings.cdi_folder.clone(), checkpoint.claim.uid.clone());
        let sees_gpus = !self.snapshot.borrow().topology().gpus().is_empty();
        if sees_gpus && self.knows_mig() && checkpoint.has_mig() {
            return false;
        }
        files::blocking(move || Ok(claim_specs::exists(&folder, &uid))).await.unwrap_or_default()
    }

    async fn write_spec(&self, uid: &str, text: String, turn: &Turn) -> std::io::Result<()> {
        let (folder, uid, held) = (self.settings.cdi_folder.clone(), uid.to_owned(), Arc::clone(turn));
        let written = files::blocking(move || {
            let _held = held;
            claim_specs::write(&folder, &uid, &text)
        });
        written.await
    }

    pub(super) async fn remove_spec(&self, uid: &str, turn: &Turn) -> std::io::Result<()> {
        let (folder, uid, held) = (self.settings.cdi_folder.clone(), uid.to_owned(), Arc::clone(turn));
        let removed = files::blocking(move || {
            let _held = held;
            claim_specs::remove(&folder, &uid)
        });
        removed.await
    }
}
