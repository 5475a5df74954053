//! What a process that stands by remembers, so that it can make the node's state anew when it becomes the owner; and
//! how the takeover reaches the node.
//!
//! The state of a standby is its own: what was told to the owner meanwhile (an operator who clears a GPU) is not in it.
//! So the owner's record comes first in the new state, as at any start, and what the standby has seen follows.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::state::{Event, HealthRecord};
use crate::topology::GpuUuid;

/// How long an error that the driver reports may take to get from one process to the record of another.
const RECENT: Duration = Duration::from_secs(10);
/// How many such errors are remembered.
const MOST: usize = 256;

/// What the takeover has the node do.
#[derive(Debug)]
pub(super) enum Duty {
    /// Make the state anew, of this record and of what was seen.
    Adopt(Option<Box<HealthRecord>>),
    /// Begin plugins, or end them.
    Plugins(bool),
    /// Have the plugins that run register again.
    Renew,
}

/// What became of the last [`Duty::Plugins`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Running {
    /// Whether plugins are to run.
    pub wanted: bool,
    /// How many run, those that are ending included.
    pub plugins: usize,
}

/// The last events of each kind, and the recent errors.
#[derive(Debug, Default)]
pub(super) struct Memory {
    last: BTreeMap<u8, Event>,
    quarantined: BTreeMap<GpuUuid, Event>,
    errors: VecDeque<(Instant, Event)>,
}

impl Memory {
    /// Remembers an event.
    pub fn remember(&mut self, event: &Event, now: Instant) {
        // In the order in which a start has them.
        let place = match event {
            Event::Identified(_) => 0,
            Event::Planned(_) => 1,
            Event::NumaHints(_) => 2,
            Event::Observed(_) => 3,
            Event::DriverAway { .. } | Event::DriverBack => 4,
            Event::MpsReady(_) => 5,
            Event::Polled(polls) if !polls.is_empty() => 6,
            Event::Quarantined { gpu, .. } => {
                self.quarantined.insert(gpu.clone(), event.clone());
                return;
            }
            Event::ReleasedFromQuarantine { gpu } => {
                self.quarantined.remove(gpu);
                return;
            }
            Event::Xid { .. } | Event::DoubleBitEcc { .. } => {
                self.errors.push_back((now, event.clone()));
                let surplus = self.errors.len().saturating_sub(MOST);
                self.errors.drain(..surplus);
                return;
            }
            // The kubelet is asked anew; claims are the owner's; the rest is in the record.
            Event::Polled(_)
            | Event::Allocated { .. }
            | Event::Holders(_)
            | Event::Prepared(_)
            | Event::Cleared { .. }
            | Event::Restored(_)
            | Event::Tick => return,
        };
        self.last.insert(place, event.clone());
    }

    /// What a state needs that begins now, after its record.
    pub fn replay(&self, now: Instant) -> Vec<Event> {
        let recent = self.errors.iter().filter(|(seen, _)| now.saturating_duration_since(*seen) <= RECENT);
        let errors = recent.map(|(_, event)| event);
        self.last.values().chain(self.quarantined.values()).chain(errors).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::NodeIdentity;

    fn xid(code: u64) -> Event {
        Event::Xid { gpu: "GPU-1".parse().unwrap(), code, instance: None }
    }

    #[test]
    fn replay_has_the_last_of_each_kind_in_order() {
        let (mut memory, start) = (Memory::default(), Instant::now());
        let quarantined = |gpu: &str| Event::Quarantined { gpu: gpu.parse().unwrap(), why: "hung".to_owned() };
        let events = [
            xid(48),
            Event::DriverAway { why: "gone".to_owned() },
            Event::Planned(Box::default()),
            Event::Identified(NodeIdentity::default()),
            quarantined("GPU-1"),
            quarantined("GPU-2"),
            Event::ReleasedFromQuarantine { gpu: "GPU-1".parse().unwrap() },
            Event::DriverBack,
            Event::Polled(BTreeMap::new()),
            Event::Holders(None),
        ];
        for event in &events {
            memory.remember(event, start);
        }
        let later = start + RECENT + Duration::from_secs(1);
        memory.remember(&xid(79), later);
        let wanted = [
            Event::Identified(NodeIdentity::default()),
            Event::Planned(Box::default()),
            Event::DriverBack,
            quarantined("GPU-2"),
            xid(79),
        ];
        assert_eq!(memory.replay(later), wanted);
        for code in 0..2 * MOST {
            memory.remember(&xid(u64::try_from(code).unwrap()), later);
        }
        assert_eq!(memory.errors.len(), MOST);
    }
}
