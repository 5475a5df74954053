//! The node's side of a takeover: the work that a standby leaves to the serving linkwise, the memory from which it makes
//! the node's state anew when it becomes the owner, and the orders by which the takeover reaches the node.
//!
//! The state of a standby is its own: the owner's orders meanwhile (an operator who clears a GPU) are not in it. So the
//! owner's record comes first in the new state, as at any start, and the standby's own observations follow.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Node;
use crate::readiness::Part;
use linkwise_core::state::{Event, HealthRecord, Opening};
use linkwise_core::topology::{GpuUuid, NodeObservation};
use linkwise_kubelet::dra::Handover;
use linkwise_system::right::Right;

/// The phase of a linkwise beside another one.
const STANDING_BY: &str = "standing by: another linkwise serves this node";
/// The longest time that an error reported by the driver takes to get from one process to the record of another.
const RECENT: Duration = Duration::from_secs(10);
/// The place of a scan among the events of a start: after the plan, before what is said of its GPUs.
const OBSERVED: u8 = 3;
/// The most such errors that are remembered.
const MAX_ERRORS: usize = 256;

/// An order of the takeover to the node.
#[derive(Debug)]
pub enum Order {
    /// Make the state anew, from this record and from the remembered events. A process that has seen no GPU offers
    /// those that the owner saw last.
    Adopt(Option<Box<HealthRecord>>, Option<Box<NodeObservation>>),
    /// Start plugins, or end them.
    Plugins(bool),
    /// Make the running plugins register again.
    Renew,
}

/// The progress of the last [`Order::Plugins`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// Set if plugins are to run.
    pub wanted: bool,
    /// The number of running plugins, those that are ending included.
    pub plugins: usize,
}

/// The last events of each kind, and the recent errors.
#[derive(Debug, Default)]
pub struct Memory {
    last: BTreeMap<u8, Event>,
    quarantined: BTreeMap<GpuUuid, Event>,
    errors: VecDeque<(Instant, Event)>,
}

impl Memory {
    /// Remembers an event.
    pub fn remember(&mut self, event: &Event, now: Instant) {
        // The places are in the order in which a start has these events.
        let place = match event {
            Event::Identified(_) => 0,
            Event::Planned(_) => 1,
            Event::NumaHints(_) => 2,
            Event::Observed(_) => OBSERVED,
            Event::DriverAway(..) | Event::DriverBack => 4,
            Event::MpsReady(_) => 5,
            Event::Polled(polls) if !polls.is_empty() => 6,
            Event::Quarantined(gpu, _) => {
                self.quarantined.insert(gpu.clone(), event.clone());
                return;
            }
            Event::ReleasedFromQuarantine(gpu) => {
                self.quarantined.remove(gpu);
                return;
            }
            Event::Xid { .. } | Event::DoubleBitEcc(..) => {
                self.errors.push_back((now, event.clone()));
                let surplus = self.errors.len().saturating_sub(MAX_ERRORS);
                self.errors.drain(..surplus);
                return;
            }
            // The kubelet is asked anew; claims are the owner's; the rest is in the record.
            Event::Polled(_)
            | Event::Allocated { .. }
            | Event::Holders(_)
            | Event::Prepared(_)
            | Event::ClaimsHandedOver
            | Event::Cleared(..)
            | Event::Cordoned(..)
            | Event::HardwareAccepted(_)
            | Event::Restored(_)
            | Event::Tick => return,
        };
        self.last.insert(place, event.clone());
    }

    /// The events that a new state needs after its record. If this process has seen no GPU, the scan that the owner
    /// passed on is among them.
    pub fn replay(&self, passed: Option<Box<NodeObservation>>, now: Instant) -> Vec<Event> {
        let recent = self.errors.iter().filter(|(seen, _)| now.saturating_duration_since(*seen) <= RECENT);
        let errors = recent.map(|(_, event)| event);
        let mut last = self.last.clone();
        let has_seen = matches!(last.get(&OBSERVED), Some(Event::Observed(own)) if !own.gpus.is_empty());
        if let Some(passed) = passed.filter(|_| !has_seen) {
            last.insert(OBSERVED, Event::Observed(passed));
        }
        last.into_values().chain(self.quarantined.values().chain(errors).cloned()).collect()
    }
}

impl Node {
    /// Makes this a standby, because another process serves this node: no plugin registers and no file is written,
    /// until an order asks for it.
    pub fn stand_by(&mut self) {
        self.remember();
        // The claims are the other's, and come with the takeover.
        self.state.current = std::mem::take(&mut self.state.current).awaiting(|first| first.claims = false);
        self.files.send_replace(None);
        self.claims.send_replace(None);
        self.offers_dra.send_replace(false);
        self.running.send_modify(|running| running.wanted = false);
        self.views.stand_by(true);
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

    /// Follows the duties of this process's DRA plugin.
    pub fn handover(&self) -> Handover {
        Handover { offers: self.offers_dra.subscribe(), claims: self.claims.subscribe() }
    }

    pub(super) fn perform(&mut self, order: Order) {
        match order {
            Order::Adopt(record, seen) => self.adopt(record, seen),
            Order::Plugins(wanted) => {
                self.running.send_modify(|running| running.wanted = wanted);
                self.views.stand_by(!wanted);
                if !wanted {
                    self.readiness.add(Part::Owner, STANDING_BY);
                }
                self.match_plugins();
            }
            Order::Renew => self.renew.send_modify(|times| *times = times.wrapping_add(1)),
        }
    }

    /// Makes the state anew, as a start would, without repeating work that takes time.
    fn adopt(&mut self, record: Option<Box<HealthRecord>>, passed: Option<Box<NodeObservation>>) {
        let inherits = passed.is_some();
        let seen = self.memory.as_ref().map(|memory| memory.replay(passed, Instant::now())).unwrap_or_default();
        let ledger = self.state.current.ledger();
        // The book of claims stays, where this process has it.
        let claims = ledger.has_all_claims().then(|| Event::Prepared(ledger.claims_with("", None)));
        let events: Vec<Event> = record.map(Event::Restored).into_iter().chain(seen).chain(claims).collect();
        if inherits {
            // Claims go on from this snapshot, as where this process has seen the GPUs while it stood by.
            let alone = |first: &mut Opening| (first.poll, first.holders, first.claims) = (false, false, false);
            self.state.current = self.fresh.clone().awaiting(alone);
            for event in events.clone() {
                drop(self.state.apply(event));
            }
        }
        let fresh = self.fresh.clone().with_tables_of(&self.state.current);
        self.state.current = if inherits { fresh.awaiting(|first| first.poll = false) } else { fresh };
        self.published = false;
        for event in events {
            self.apply(event);
        }
        // The first list waits for the holders: the kubelet is asked at once.
        self.begun_anew.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::state::NodeIdentity;

    fn xid(code: u64) -> Event {
        Event::Xid { gpu: "GPU-1".parse().unwrap(), code, instance: None }
    }

    #[test]
    fn replay_has_the_last_of_each_kind_in_order() {
        let (mut memory, start) = (Memory::default(), Instant::now());
        let quarantined = |gpu: &str| Event::Quarantined(gpu.parse().unwrap(), "hung".to_owned());
        let events = [
            xid(48),
            Event::DriverAway("gone".to_owned()),
            Event::Planned(Box::default()),
            Event::Identified(NodeIdentity::default()),
            quarantined("GPU-1"),
            quarantined("GPU-2"),
            Event::ReleasedFromQuarantine("GPU-1".parse().unwrap()),
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
        assert_eq!(memory.replay(None, later), wanted);
        // The scan that an owner passed on comes after the plan, and before what is said of its GPUs.
        let passed = Event::Observed(Box::default());
        assert_eq!(memory.replay(Some(Box::default()), later)[2..4], [passed, Event::DriverBack]);
        for code in 0..2 * MAX_ERRORS {
            memory.remember(&xid(u64::try_from(code).unwrap()), later);
        }
        assert_eq!(memory.errors.len(), MAX_ERRORS);
    }
}
