//! The node's side of a takeover: the work that a standby leaves to the serving linkwise, and the duties of the
//! takeover.

use tokio::sync::watch;
use tokio::time::Instant;

use super::Node;
use crate::duty::{Duty, Memory};
use crate::readiness::Part;
use linkwise_core::state::{Event, HealthRecord};
use linkwise_core::topology::NodeObservation;
use linkwise_system::right::Right;

/// The phase of a linkwise beside another one.
const STANDING_BY: &str = "standing by: another linkwise serves this node";

impl Node {
    /// Makes this a standby, because another process serves this node: no plugin registers and no file is written,
    /// until a [`Duty`] asks for it.
    pub fn stand_by(&mut self) {
        self.remember();
        self.files.send_replace(None);
        self.running.send_modify(|running| running.wanted = false);
        self.metrics.placements().stand_by(true);
        self.readiness.add(Part::Owner, STANDING_BY);
    }

    /// Keeps what is observed from now on, so that the state can be made anew when this process becomes the owner.
    pub fn remember(&mut self) {
        self.memory = Some(Memory::default());
    }

    /// Follows whether this process writes the node's files. Each write keeps the right until it has ended.
    pub fn files(&self) -> watch::Receiver<Option<Right>> {
        self.files.subscribe()
    }

    pub(super) fn perform(&mut self, duty: Duty) {
        match duty {
            Duty::Adopt(record, seen) => self.adopt(record, seen),
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

    /// Makes the state anew, as a start would, without repeating work that takes time.
    fn adopt(&mut self, record: Option<Box<HealthRecord>>, passed: Option<Box<NodeObservation>>) {
        let inherits = passed.is_some();
        let seen = self.memory.as_ref().map(|memory| memory.replay(passed, Instant::now())).unwrap_or_default();
        let events: Vec<Event> = record.map(Event::Restored).into_iter().chain(seen).collect();
        if inherits {
            // Claims go on from this snapshot, as where this process has seen the GPUs while it stood by.
            self.state.current = self.fresh.clone().awaiting_a_scan_alone();
            for event in events.clone() {
                drop(self.state.apply(event));
            }
        }
        let fresh = self.fresh.clone().with_tables_of(&self.state.current);
        self.state.current = if inherits { fresh.awaiting_no_poll() } else { fresh };
        self.published = false;
        for event in events {
            self.apply(event);
        }
        // The first list waits for the holders: the kubelet is asked at once.
        self.begun_anew.notify_one();
    }
}
