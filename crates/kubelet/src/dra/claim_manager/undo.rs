//! Undoes a claim: its MIG devices, its CDI spec, its checkpoint, its entry.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::mig::MigError;
use super::{ClaimManager, Slot, Turn};
use crate::dra::Occurrence;
use crate::dra::checkpoint::is_uid;
use linkwise_core::claims::ClaimName;
use linkwise_core::errors::chain;
use linkwise_system::files;

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
    #[error("the claim's checkpoint cannot be read, and MIG devices may be made for it: {0}")]
    Unreadable(String),
}

impl ClaimManager {
    /// Unprepares a claim; the error is the text for the kubelet. A claim that is not prepared is no error. The API
    /// server is not asked: the claim may be deleted already.
    pub async fn unprepare(&self, asked: ClaimName) -> Result<(), String> {
        let (start, limit) = (Instant::now(), self.settings.prepare_timeout);
        let mut repeated = false;
        let work = async {
            if !is_uid(&asked.uid) {
                return Ok(());
            }
            let turn = self.turn(&asked.uid).await;
            let unreadable = self.read_again(&asked.uid, &turn).await;
            repeated = unreadable.is_none() && self.checkpoint(&asked.uid).is_none();
            if let Some(unreadable) = unreadable
                && !unreadable.is_torn
                && unreadable.parts.is_none()
                && self.settings.makes_mig
            {
                return Err(UnprepareError::Unreadable(unreadable.why));
            }
            self.undo(&asked.uid, &turn).await
        };
        let result = timeout(limit, work).await.unwrap_or(Err(UnprepareError::Late(limit)));
        self.tidy();
        let result = result.map_err(|error| chain(&error));
        let elapsed = start.elapsed();
        (self.observer)(Occurrence::Unprepared { claim: asked, result: result.clone(), repeated, elapsed });
        result
    }

    /// As [`Self::undo`], in the time that a call of the kubelet has: an order that the driver never answers holds up
    /// no other claim.
    pub(super) async fn undo_in_time(&self, uid: &str, turn: &Turn) -> Result<(), UnprepareError> {
        let limit = self.settings.prepare_timeout;
        timeout(limit, self.undo(uid, turn)).await.unwrap_or(Err(UnprepareError::Late(limit)))
    }

    /// Undoes all steps for a claim: the MIG devices that were made for it, its spec, its checkpoint, its entry. While
    /// DRA is off, a step that cannot be undone for some time is left out.
    pub(super) async fn undo(&self, uid: &str, turn: &Turn) -> Result<(), UnprepareError> {
        let is_off = self.is_off();
        let gives_up = {
            let (mut slots, now, limit) = (self.slots(), Instant::now(), self.settings.listed_within);
            let is_late = |slot: &mut Slot| {
                let since = slot.undoing.filter(|_| is_off);
                slot.undoing = is_off.then(|| since.unwrap_or(now));
                since.is_some_and(|since| now.saturating_duration_since(since) >= limit)
            };
            is_off & slots.get_mut(uid).is_none_or(is_late)
        };
        let destroyed = self.destroy_mig(uid).await.map_err(UnprepareError::from);
        self.or_left_behind(uid, destroyed, gives_up)?;
        let removed = self.remove_spec(uid, turn).await.map_err(|source| UnprepareError::Spec { source });
        self.or_left_behind(uid, removed, gives_up)?;
        let (store, named, held) = (Arc::clone(&self.store), uid.to_owned(), Arc::clone(turn));
        let removed = files::blocking(move || {
            let _held = held;
            store.remove(&named)
        });
        let removed = removed.await.map_err(|source| UnprepareError::Checkpoint { source });
        self.or_left_behind(uid, removed, gives_up)?;
        self.put(uid, None);
        Ok(())
    }

    /// Reports the part of a claim that is left behind, where this process gives up.
    fn or_left_behind(
        &self,
        uid: &str,
        result: Result<(), UnprepareError>,
        gives_up: bool,
    ) -> Result<(), UnprepareError> {
        match result {
            Err(error) if gives_up => {
                if let Some(checkpoint) = self.checkpoint(uid) {
                    let what = chain(&error);
                    (self.observer)(Occurrence::LeftBehind { claim: checkpoint.claim, what });
                }
                Ok(())
            }
            result => result,
        }
    }
}
