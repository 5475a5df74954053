//! Undoes a claim: destroys its MIG devices, and removes its CDI spec, its checkpoint and its entry in the ledger.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::mig::MigError;
use super::{ClaimManager, Turn};
use crate::dra::checkpoint::{Checkpoint, is_uid};
use linkwise_core::claims::ClaimName;
use linkwise_core::errors::chain;
use linkwise_system::{files, lock};

/// The cause of a claim that was not unprepared.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnprepareError {
    #[error(transparent)]
    Mig(#[from] MigError),
    #[error("cannot remove the CDI spec of the claim")]
    Spec { source: std::io::Error },
    #[error("cannot remove the checkpoint of the claim")]
    Checkpoint { source: std::io::Error },
    #[error("the claim was not unprepared within {0:?}")]
    Late(Duration),
    #[error("cannot read the checkpoint of the claim, which may have MIG devices: {0}")]
    Unreadable(String),
}

impl ClaimManager {
    /// Unprepares a claim; the error is the text for the kubelet. A claim that is not prepared is not an error. The
    /// API server is not asked, because the claim may be deleted already.
    pub async fn unprepare(&self, name: ClaimName) -> Result<(), String> {
        let (start, limit) = (Instant::now(), self.settings.prepare_timeout);
        let mut repeated = false;
        let work = async {
            if !is_uid(&name.uid) {
                return Ok(());
            }
            let turn = self.turn(&name.uid).await;
            let unreadable = self.read_again(&name.uid, &turn).await;
            repeated = unreadable.is_none() && self.checkpoint(&name.uid).is_none();
            if let Some(unreadable) = unreadable
                && !unreadable.is_torn
                && unreadable.parts.is_none()
                && self.settings.makes_mig
            {
                return Err(UnprepareError::Unreadable(unreadable.why));
            }
            self.undo(&name.uid, &turn).await
        };
        let result = timeout(limit, work).await.unwrap_or(Err(UnprepareError::Late(limit)));
        self.tidy();
        let result = result.map_err(|error| chain(&error));
        let (elapsed, uid) = (start.elapsed(), &name.uid);
        self.metrics.unprepared(result.is_ok(), elapsed);
        match &result {
            // The kubelet repeats the call while another driver of the pod fails.
            Ok(()) if repeated => {
                tracing::debug!(claim = %name, uid, ?elapsed, "claim unprepared: it was not prepared here");
            }
            Ok(()) => tracing::info!(claim = %name, uid, ?elapsed, "claim unprepared"),
            Err(error) => tracing::warn!(claim = %name, uid, error, "cannot unprepare claim"),
        }
        result
    }

    /// As [`Self::undo`], within the time that a call of the kubelet has, so that an order that the driver never
    /// answers holds up no other claim.
    pub(super) async fn undo_in_time(&self, uid: &str, turn: &Turn) -> Result<(), UnprepareError> {
        let limit = self.settings.prepare_timeout;
        timeout(limit, self.undo(uid, turn)).await.unwrap_or(Err(UnprepareError::Late(limit)))
    }

    /// Undoes all steps for a claim: the MIG devices that were made for it, its spec, its checkpoint, its entry. While
    /// DRA is off, a step that fails is skipped if the first attempt is long past.
    pub(super) async fn undo(&self, uid: &str, turn: &Turn) -> Result<(), UnprepareError> {
        let gives_up = self.gives_up(uid);
        let done = |result: Result<(), UnprepareError>| match result {
            Err(error) if gives_up => {
                if let Some(Checkpoint { claim, .. }) = self.checkpoint(uid) {
                    let what = chain(&error);
                    tracing::warn!(%claim, uid, what, "DRA is off: cleanup of a finished claim is incomplete");
                }
                Ok(())
            }
            result => result,
        };
        done(self.destroy_mig(uid).await.map_err(UnprepareError::from))?;
        done(self.remove_spec(uid, turn).await.map_err(|source| UnprepareError::Spec { source }))?;
        let (store, owned) = (Arc::clone(&self.store), uid.to_owned());
        let removed = files::blocking_with(Arc::clone(turn), move || store.remove(&owned)).await;
        done(removed.map_err(|source| UnprepareError::Checkpoint { source }))?;
        self.put(uid, None).await;
        Ok(())
    }

    /// Notes an attempt to undo a claim. Returns true if DRA is off, and the first attempt was long enough ago.
    fn gives_up(&self, uid: &str) -> bool {
        let mut slots = lock(&self.slots);
        let first = slots.get_mut(uid).map(|slot| *slot.undoing.get_or_insert_with(Instant::now));
        self.is_off() && first.is_none_or(|first| first.elapsed() >= self.settings.listed_within)
    }
}
