//! The node's side of a takeover: what a standby leaves to the linkwise that serves, and what the takeover has it do.

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::Node;
use crate::kubelet::HeldCalls;
use crate::runtime::duty::{Duty, Memory, Running};
use crate::runtime::readiness::Part;
use crate::state::{Event, HealthRecord};

/// The phase of a linkwise beside another one.
const STANDING_BY: &str = "standing by: another linkwise serves this node";

impl Node {
    /// Another process serves this node: nothing is registered and no file written, until a [`Duty`] asks for it.
    pub(in crate::runtime) fn stand_by(&mut self) {
        self.memory = Some(Memory::default());
        self.files.send_replace(false);
        self.running.send_modify(|running| running.wanted = false);
        self.metrics.placements().stand_by(true);
        self.readiness.add(Part::Owner, STANDING_BY);
    }

    /// The kubelet's calls, which can be held.
    pub(in crate::runtime) fn calls(&self) -> HeldCalls {
        self.kubelet.calls.clone()
    }

    /// Where duties go.
    pub(in crate::runtime) fn duties(&self) -> mpsc::Sender<Duty> {
        self.duties.0.clone()
    }

    /// Whether this process writes the node's files.
    pub(in crate::runtime) fn files(&self) -> watch::Receiver<bool> {
        self.files.subscribe()
    }

    /// Decides that.
    pub(in crate::runtime) fn files_switch(&self) -> watch::Sender<bool> {
        self.files.clone()
    }

    /// Follows whether plugins run.
    pub(in crate::runtime) fn running(&self) -> watch::Receiver<Running> {
        self.running.subscribe()
    }

    /// Follows the health record; `None` before it first changed.
    pub(in crate::runtime) fn records(&self) -> watch::Receiver<Option<HealthRecord>> {
        self.records.subscribe()
    }

    /// Does what the takeover says.
    pub(super) fn perform(&mut self, duty: Duty) {
        match duty {
            Duty::Adopt(record) => self.adopt(record),
            Duty::Plugins(wanted) => {
                self.running.send_modify(|running| running.wanted = wanted);
                self.metrics.placements().stand_by(!wanted);
                if !wanted {
                    self.readiness.add(Part::Owner, STANDING_BY);
                }
                self.match_plugins();
            }
            Duty::Renew => self.renew.send_modify(|times| *times = times.wrapping_add(1)),
        }
    }

    /// Makes the state anew, as a start would, without building again what takes time.
    fn adopt(&mut self, record: Option<Box<HealthRecord>>) {
        self.state = self.fresh.clone().with_tables_of(&self.state);
        self.published = false;
        let seen = self.memory.as_ref().map(|memory| memory.replay(Instant::now())).unwrap_or_default();
        for event in record.map(Event::Restored).into_iter().chain(seen) {
            self.apply(event);
        }
        // The first list waits for the holders: the kubelet is asked at once.
        self.begun_anew.notify_one();
    }
}
