//! The one writer of the state: events go in, snapshots come out.

use std::sync::Arc;

use anyhow::Result;
use tokio::sync::{mpsc, watch};

use linkwise_core::state::{Effect, Event, NodeState};
use linkwise_system::clock::{Clock, at};

/// The state, and the channel on which others follow it. The node's loop or [`keep_state`] owns both.
pub struct StateWriter {
    /// The state, published or about to be.
    pub current: NodeState,
    /// The clock by which the state has its times.
    pub clock: Clock,
    snapshots: watch::Sender<Arc<NodeState>>,
}

impl StateWriter {
    /// Starts with a state, and publishes it.
    pub fn new(state: NodeState) -> Self {
        Self { snapshots: watch::Sender::new(Arc::new(state.clone())), current: state, clock: Clock::start() }
    }

    /// Follows the published states.
    pub fn snapshot(&self) -> watch::Receiver<Arc<NodeState>> {
        self.snapshots.subscribe()
    }

    /// Waits for the next event, a tick at the state's own deadline included; `None` when no event can come any more.
    pub async fn next(&self, events: &mut mpsc::Receiver<Event>) -> Option<Event> {
        let deadline = self.current.next_deadline().map(|moment| self.clock.instant(moment));
        tokio::select! {
            event = events.recv() => event,
            () = at(deadline) => Some(Event::Tick),
        }
    }

    /// Applies an event, logs its warnings, and publishes the state if the event changed what readers see. Returns all
    /// effects; the caller carries out those on the node.
    pub fn apply(&mut self, event: Event) -> Vec<Effect> {
        let (state, effects) = std::mem::take(&mut self.current).apply(event, self.clock.now());
        self.current = state;
        for effect in &effects {
            match effect {
                Effect::Publish => self.publish(),
                Effect::Warn(warning) => tracing::warn!("{warning}"),
                Effect::PlanProblem(problem) => tracing::warn!("{problem}"),
                Effect::Shortfall(shortfall, true) => tracing::warn!(%shortfall, "the node lacks hardware"),
                Effect::Shortfall(shortfall, false) => {
                    tracing::info!(%shortfall, "the node no longer lacks this hardware")
                }
                _ => {}
            }
        }
        effects
    }

    /// Publishes the current state.
    pub fn publish(&self) {
        self.snapshots.send_replace(Arc::new(self.current.clone()));
    }
}

/// Keeps the state of a program that offers GPUs to no kubelet, as long as events come.
pub async fn keep_state(mut state: StateWriter, mut events: mpsc::Receiver<Event>) -> Result<()> {
    while let Some(event) = state.next(&mut events).await {
        state.apply(event);
    }
    Ok(())
}
