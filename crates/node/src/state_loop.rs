//! The state of a program that offers GPUs to no kubelet: applies events and publishes snapshots, and nothing else.

use std::sync::Arc;

use anyhow::Result;
use tokio::sync::{mpsc, watch};

use linkwise_core::state::{Effect, Event, NodeState};
use linkwise_system::clock::Clock;

/// Applies events and publishes the state, as long as events come.
pub async fn keep_state(mut events: mpsc::Receiver<Event>, snapshots: watch::Sender<Arc<NodeState>>) -> Result<()> {
    let (mut state, clock) = (NodeState::default(), Clock::start());
    while let Some(event) = events.recv().await {
        let (next, effects) = state.apply(event, clock.now());
        state = next;
        for effect in effects {
            match effect {
                Effect::Publish => drop(snapshots.send_replace(Arc::new(state.clone()))),
                Effect::Warn(warning) => tracing::warn!("{warning}"),
                Effect::PlanProblem(problem) => tracing::warn!("{problem}"),
                _ => {}
            }
        }
    }
    Ok(())
}
