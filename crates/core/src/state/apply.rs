//! [`NodeState::apply`]: makes the next state from an event.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;

use super::free_at_admission;
use super::health::GpuHealth;
use super::{Effect, Event, NodeState, Offers, ResourceName, Timestamp, UnhealthyReason};
use crate::allocation::DeviceId;

impl NodeState {
    /// Makes the next state from an event, and the effects that the node's loop has to carry out.
    ///
    /// `now` may come from any clock. A clock that jumps makes `since` and the ends of waits wrong; the clock of the
    /// node's loop does not jump.
    pub fn apply(mut self, event: Event, now: Timestamp) -> (Self, Vec<Effect>) {
        let mut effects = Vec::new();
        // For `settle`.
        let (mut remake, mut publish) = (false, false);
        let is_new_list = matches!(&event, Event::Holders(Some(holdings)) if !holdings.is_early);
        let hardware = Arc::make_mut(&mut self.hardware);
        match event {
            Event::Observed(observed) => {
                effects.extend(hardware.scanned(&observed, now));
                self.opening.scanned(!observed.gpus.is_empty(), now);
                remake = true;
            }
            Event::Planned(plan) => {
                Arc::make_mut(&mut self.offers).set_plan(*plan, hardware);
                remake = true;
            }
            Event::MpsReady(ready) => {
                Arc::make_mut(&mut self.offers).mps.ready = ready;
                remake = true;
            }
            Event::Holders(holdings) => {
                let changed = Arc::make_mut(&mut self.ledger).update(holdings, now);
                let offers = Arc::make_mut(&mut self.offers);
                publish = offers.drop_unheld(&self.ledger) | self.opening.holders_known() | changed;
                if changed {
                    effects.extend(offers.follow_ledger(hardware, &self.ledger, now));
                }
            }
            Event::Allocated { resource, devices, offered } => {
                effects.extend(self.allocated(resource, devices, &offered));
                return (self, effects);
            }
            Event::Prepared(claims) => {
                let at_prepare = free_at_admission::at_prepare((hardware, &self.ledger, &self.offers), &claims);
                let ledger = Arc::make_mut(&mut self.ledger);
                if ledger.admissions.prepare(at_prepare) {
                    effects.push(Effect::Keep);
                }
                publish = ledger.prepare(claims) | self.opening.claims_known();
            }
            Event::ClaimsHandedOver => publish = Arc::make_mut(&mut self.ledger).hand_over_claims(),
            Event::NumaHints(hints) => {
                Arc::make_mut(&mut self.offers).set_numa_hints(hints, hardware);
                publish = true;
            }
            Event::Polled(polls) => {
                effects.extend(hardware.polled(&polls, now));
                publish = !polls.is_empty() && self.opening.polled();
            }
            Event::Xid { gpu, code, instance } => effects.extend(hardware.xid(gpu, code, instance, now)),
            Event::DoubleBitEcc(gpu) => hardware.double_bit_ecc(&gpu, now),
            Event::Quarantined(gpu, why) => {
                hardware.change(&gpu, |health| health.fail(UnhealthyReason::Quarantined { why }, now));
            }
            Event::ReleasedFromQuarantine(gpu) => hardware.change(&gpu, GpuHealth::released),
            Event::DriverAway(why) => hardware.driver_away(&why, now),
            Event::DriverBack => hardware.driver_back(),
            Event::Cordoned(gpu, cordon) => hardware.change(&gpu, |health| health.cordon(cordon, now)),
            Event::Cleared(gpu) => hardware.change(&gpu, GpuHealth::cleared),
            Event::HardwareAccepted(shortfalls) => {
                effects.extend(hardware.accepted(&shortfalls));
                publish = true;
            }
            Event::Identified(identity) => hardware.identified(&identity),
            Event::Restored(record) => {
                effects.extend(hardware.restored(&record));
                let admissions = &mut Arc::make_mut(&mut self.ledger).admissions;
                admissions.restore(&record.admissions, &record.claim_admissions);
                if !record.dra.is_empty() {
                    Arc::make_mut(&mut self.offers).doors.restore(&record.dra, &record.dra_shares);
                }
            }
            Event::Tick => {}
        }
        effects.extend(self.settle(remake, publish, is_new_list, now));
        (self, effects)
    }

    /// Notes an admission, with the best bandwidth that was free. Until a list contains the admission, it changes no
    /// device's health, so [`Self::settle`] is not needed.
    fn allocated(&mut self, resource: ResourceName, devices: BTreeSet<DeviceId>, offered: &[DeviceId]) -> Vec<Effect> {
        let node = (&*self.hardware, &*self.ledger, &*self.offers);
        let free_then = free_at_admission::at_allocate(node, &resource, &devices, offered);
        Arc::make_mut(&mut self.ledger).admissions.give(resource, devices, free_then);
        let is_published = self.note_held() && self.opening.is_open();
        free_then.map(|_| Effect::Keep).into_iter().chain(is_published.then_some(Effect::Publish)).collect()
    }

    /// Carries out what follows from any event: makes the resources again (`remake`), hands GPUs to the other door, and
    /// publishes the state if `publish` is true or if readers may see a change.
    fn settle(&mut self, mut remake: bool, mut publish: bool, is_new_list: bool, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        let hardware = Arc::make_mut(&mut self.hardware);
        if remake {
            effects.extend(Arc::make_mut(&mut self.offers).make(hardware, &self.ledger, now));
        }
        if let Some(door_effects) = self.offers.update_doors(hardware, &self.ledger, is_new_list, now) {
            remake = true;
            effects.extend(door_effects);
            effects.extend(Arc::make_mut(&mut self.offers).make(hardware, &self.ledger, now));
            effects.push(Effect::Keep);
        }
        publish |= remake | self.opening.tick(now);
        let (changed, conflicts) = Offers::refresh_health(&mut self.offers, hardware, &self.ledger);
        effects.extend(hardware.report(self.offers.listed()));
        effects.extend(conflicts);
        let (uncounted_changed, uncounted) = hardware.report_uncounted();
        effects.extend(uncounted);
        let keep = hardware.keep();
        publish |= changed | uncounted_changed | self.note_held();
        if publish && self.opening.is_open() {
            effects.push(Effect::Publish);
        }
        effects.extend(keep);
        effects
    }

    /// Follows which GPUs are held, after any event. Returns true if that changed.
    fn note_held(&mut self) -> bool {
        let held = self.ledger.held(self.hardware.topology(), |resource, id| self.offers.gpu_of(resource, id));
        let changed = held != *self.held;
        if changed {
            self.held = Arc::new(held);
        }
        changed
    }
}
