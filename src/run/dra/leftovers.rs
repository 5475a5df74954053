//! Reports the rest of DRA after it was switched off: GPUs that claims still have. The module decides nothing and does
//! not change the node's readiness.
//!
//! A task of every `linkwise run`: the health record of an earlier process may name GPUs of DRA.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::Result;
use tokio::sync::watch;

use linkwise_core::once::Once;
use linkwise_core::state::{DraGpus, NodeState};
use linkwise_node::observe;
use linkwise_node::readiness::{Part, Readiness};

/// Follows the leftovers. `unprepares` is true if the kubelet can reach this process to unprepare claims.
pub(in crate::run) async fn follow(
    mut snapshots: watch::Receiver<Arc<NodeState>>,
    readiness: Readiness,
    unprepares: bool,
) -> Result<()> {
    let mut said = Once::new();
    loop {
        let state = Arc::clone(&snapshots.borrow_and_update());
        if !state.topology().gpus().is_empty() {
            let is_off = state.offers().plan().dra == DraGpus::None;
            readiness.dra_is_off(is_off);
            let left = Some(&state).filter(|_| is_off).and_then(|state| Left::of(state));
            match &left {
                Some(left) => readiness.note(Part::DraLeftovers, left.phase(), left.words(unprepares)),
                None => readiness.remove(&Part::DraLeftovers),
            }
            let claims = left.into_iter().filter(|left| !left.claims.is_empty());
            for left in said.replace(claims) {
                let (gpus, claims) = (left.gpus, observe::some(&left.claims));
                if unprepares {
                    tracing::info!(
                        gpus,
                        claims,
                        "DRA is off: these claims keep their GPUs until their pods have ended"
                    );
                } else {
                    tracing::warn!(gpus, claims, "DRA is off: these claims keep their GPUs, and {NOT_UNPREPARED}");
                }
            }
        }
        if snapshots.changed().await.is_err() {
            // The node is ending.
            std::future::pending::<()>().await;
        }
    }
}

/// The fate of pods with claims if the kubelet cannot reach a DRA plugin.
const NOT_UNPREPARED: &str = "without DRA's folders the kubelet cannot unprepare them: their pods stay in Terminating \
                              until they are deleted with --force, or DRA is on again (dra.gpus: none is enough)";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Left {
    gpus: usize,
    claims: Vec<String>,
    /// Set if the kubelet has reported the holders.
    is_known: bool,
}

impl Left {
    fn of(state: &NodeState) -> Option<Self> {
        let leaving = state.leaving_dra();
        let is_known = state.ledger().is_known();
        let claims: BTreeSet<&String> = leaving.values().flatten().collect();
        let claims = claims.into_iter().cloned().collect();
        (!leaving.is_empty()).then_some(Self { gpus: leaving.len(), claims, is_known })
    }

    fn phase(&self) -> &'static str {
        match self {
            Self { is_known: false, .. } => "waiting for the kubelet's list of holders",
            Self { claims, .. } if claims.is_empty() => "waiting for claims that may be on their way",
            _ => "waiting for claims to end",
        }
    }

    fn words(&self, unprepares: bool) -> String {
        let gpus = self.gpus;
        let of = if self.claims.is_empty() { "none".to_owned() } else { observe::some(&self.claims) };
        let tail = if self.claims.is_empty() || unprepares { String::new() } else { format!("; {NOT_UNPREPARED}") };
        format!("GPUs: {gpus}, claims: {of}{tail}")
    }
}
