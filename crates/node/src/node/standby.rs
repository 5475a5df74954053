//! The node's side of a takeover: the duties that a standby leaves to the owner, the log of events from which it makes
//! the node's state again when it becomes the owner, and the orders that the takeover gives to the node.
//!
//! A standby has a state of its own, without the orders that operators give the owner meanwhile, such as clearing a
//! GPU. So the new state begins with the owner's health record, as at any start, and the standby's own observations
//! follow.

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

/// The phase of a standby.
const STANDING_BY: &str = "standing by: another linkwise serves this node";
/// The age up to which an error of a GPU is replayed. The owner's record has the older ones.
const MAX_ERROR_AGE: Duration = Duration::from_secs(10);
/// The place of a scan among the events of a start: after the plan, before the events about its GPUs.
const SCAN_PLACE: u8 = 3;
/// The most errors of GPUs that the log keeps.
const MAX_ERRORS: usize = 256;

/// An order of the takeover to the node.
#[derive(Debug)]
pub enum Order {
    /// Make the state again, from the owner's record and from the logged events. A process that has seen no GPU offers
    /// the GPUs of the owner's last scan.
    Adopt { record: Option<Box<HealthRecord>>, owner_scan: Option<Box<NodeObservation>> },
    /// Start plugins, or end them.
    Plugins(bool),
    /// Make the running plugins register again.
    Renew,
}

/// The plugins' state, by which the takeover sees that an [`Order::Plugins`] is carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PluginStatus {
    /// True if plugins have to run.
    pub is_wanted: bool,
    /// The number of running plugins, those that are ending included.
    pub running: usize,
}

/// The events that are replayed when this process becomes the owner: the last one of each kind, the quarantines,
/// and the recent errors.
#[derive(Debug, Default)]
pub struct ReplayLog {
    /// The last event of each kind, by its place among the events of a start.
    last: BTreeMap<u8, Event>,
    quarantined: BTreeMap<GpuUuid, Event>,
    errors: VecDeque<(Instant, Event)>,
}

impl ReplayLog {
    /// Keeps an event, if it has to be replayed.
    pub fn record(&mut self, event: &Event, now: Instant) {
        // The places are in the order in which a start has these events.
        let place = match event {
            Event::Identified(_) => 0,
            Event::Planned(_) => 1,
            Event::NumaHints(_) => 2,
            Event::Observed(_) => SCAN_PLACE,
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
            // The kubelet is asked again for holders, the checkpoints have the claims, the record has operators'
            // orders.
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

    /// The events that a new state needs after its record. If this process has seen no GPU, the owner's scan is among
    /// them.
    pub fn replay(&self, owner_scan: Option<Box<NodeObservation>>, now: Instant) -> Vec<Event> {
        let recent = self.errors.iter().filter(|(seen, _)| now.saturating_duration_since(*seen) <= MAX_ERROR_AGE);
        let errors = recent.map(|(_, event)| event);
        let mut last = self.last.clone();
        let has_seen = matches!(last.get(&SCAN_PLACE), Some(Event::Observed(own)) if !own.gpus.is_empty());
        if let Some(scan) = owner_scan.filter(|_| !has_seen) {
            last.insert(SCAN_PLACE, Event::Observed(scan));
        }
        last.into_values().chain(self.quarantined.values().chain(errors).cloned()).collect()
    }
}

impl Node {
    /// Makes this a standby, because another process serves this node: no plugin registers and no file is written until
    /// the takeover orders it.
    pub fn stand_by(&mut self) {
        self.log_events();
        // The owner has the claims. A takeover reads their checkpoints.
        self.state.current = std::mem::take(&mut self.state.current).awaiting(|first| first.claims = false);
        self.files.send_replace(None);
        self.claims.send_replace(None);
        self.offers_dra.send_replace(false);
        self.plugin_status.send_modify(|status| status.is_wanted = false);
        self.views.stand_by(true);
        self.readiness.add(Part::Owner, STANDING_BY);
    }

    /// Logs events from now on, so that the state can be made again when this process becomes the owner.
    pub fn log_events(&mut self) {
        self.replay_log = Some(ReplayLog::default());
    }

    /// Follows the right to write the node's files, `None` while this process must not. Each write keeps a clone of the
    /// right until it has ended.
    pub fn files(&self) -> watch::Receiver<Option<Right>> {
        self.files.subscribe()
    }

    /// Follows the duties of this process's DRA plugin.
    pub fn handover(&self) -> Handover {
        Handover { offers: self.offers_dra.subscribe(), claims: self.claims.subscribe() }
    }

    pub(super) fn perform(&mut self, order: Order) {
        match order {
            Order::Adopt { record, owner_scan } => self.adopt(record, owner_scan),
            Order::Plugins(are_wanted) => {
                self.plugin_status.send_modify(|status| status.is_wanted = are_wanted);
                self.views.stand_by(!are_wanted);
                if !are_wanted {
                    self.readiness.add(Part::Owner, STANDING_BY);
                }
                self.match_plugins();
            }
            Order::Renew => self.renew.send_modify(|times| *times = times.wrapping_add(1)),
        }
    }

    /// Makes the state again as a start would, but keeps the tables of the topology, which take long to compute.
    fn adopt(&mut self, record: Option<Box<HealthRecord>>, owner_scan: Option<Box<NodeObservation>>) {
        let inherits = owner_scan.is_some();
        let replayed = self.replay_log.as_ref().map(|log| log.replay(owner_scan, Instant::now())).unwrap_or_default();
        let ledger = self.state.current.ledger();
        // The ledger's claims stay if this process has all of them.
        let claims = ledger.has_all_claims().then(|| Event::Prepared(ledger.claims_with("", None)));
        let events: Vec<Event> = record.map(Event::Restored).into_iter().chain(replayed).chain(claims).collect();
        if inherits {
            // Publish the owner's GPUs at once: waiting calls for claims go on from this snapshot. A standby that sees
            // GPUs itself has published such a snapshot before.
            let await_scan = |first: &mut Opening| (first.poll, first.holders, first.claims) = (false, false, false);
            self.state.current = self.initial_state.clone().awaiting(await_scan);
            for event in events.clone() {
                drop(self.state.apply(event));
            }
        }
        let fresh = self.initial_state.clone().with_tables_of(&self.state.current);
        self.state.current = if inherits { fresh.awaiting(|first| first.poll = false) } else { fresh };
        self.is_published = false;
        for event in events {
            self.apply(event);
        }
        // The first list waits for the holders.
        self.ask_now.notify_one();
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
        let (mut log, start) = (ReplayLog::default(), Instant::now());
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
            log.record(event, start);
        }
        let later = start + MAX_ERROR_AGE + Duration::from_secs(1);
        log.record(&xid(79), later);
        let wanted = [
            Event::Identified(NodeIdentity::default()),
            Event::Planned(Box::default()),
            Event::DriverBack,
            quarantined("GPU-2"),
            xid(79),
        ];
        assert_eq!(log.replay(None, later), wanted);
        // The owner's scan comes after the plan, and before the events about its GPUs.
        let scan = Event::Observed(Box::default());
        assert_eq!(log.replay(Some(Box::default()), later)[2..4], [scan, Event::DriverBack]);
        for code in 0..2 * MAX_ERRORS {
            log.record(&xid(u64::try_from(code).unwrap()), later);
        }
        assert_eq!(log.errors.len(), MAX_ERRORS);
    }
}
