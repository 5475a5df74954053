//! The health of one GPU: its standing reasons, and the evidence that ends each. docs/health.md has a table of them.
//!
//! One pure state machine for each GPU; `hardware` feeds it. `record` has the part that is kept across our restarts.
//!
//! Hold times count only the time between two polls, and at most [`MAX_COVERED`] of it. So neither a clock that
//! jumps, nor a process that was suspended, nor a driver that answers late can heal a GPU early or keep it unhealthy
//! for ever.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;

use super::{
    Accepted, Cordon, FabricHealth, GpuRecord, Health, HealthPoll, KeptReason, Reach, RecoveryAction, Timestamp,
    UnhealthyReason, XidPolicy,
};
use crate::topology::GpuUuid;

/// The default of the first hold time, which evidence has to last before a reason ends.
pub(super) const HOLD_TIME: Duration = Duration::from_secs(60);
/// The longest hold time of a GPU that flaps, as a multiple of the first hold time: 60 × 60 s = 1 h.
const MAX_HOLD_FACTOR: u32 = 60;
/// The number of doublings from the first hold time to the longest.
const MAX_FLAPS: u32 = 6;
/// The healthy time that takes one doubling back.
const DECAY_INTERVAL: Duration = Duration::from_secs(3600);
/// The longest time that one poll covers: two poll intervals.
const MAX_COVERED: Duration = Duration::from_secs(20);
/// The XID of a GPU that has fallen off the bus (NVIDIA's XID catalog).
const FALLEN_OFF_THE_BUS: u64 = 79;
/// The most reasons that stand at once. Only XIDs can be this many; further ones merge into the last, which then
/// concerns the whole GPU.
const MAX_REASONS: usize = 32;

/// One reason, and the evidence that it has ended.
#[derive(Clone, Debug)]
struct StandingReason {
    reason: UnhealthyReason,
    since: Timestamp,
    /// The time covered by polls that show it ended; `None` until the first.
    steady: Option<Duration>,
    /// True if a poll has come since the reason began. This first poll is not evidence, because it may have been sent
    /// before the reason began.
    seen_poll_since: bool,
    /// True if the remedy has been observed since: a reset, the GPU's return to the bus or release from quarantine.
    remedied: bool,
    /// True if the reason ends with the next poll that does not show it again.
    is_over: bool,
}

/// The health of one GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct GpuHealth {
    reasons: Vec<StandingReason>,
    /// True once a scan of this process has listed the GPU. Until then its health is the record's.
    is_listed: bool,
    /// The time of the last poll.
    polled: Option<Timestamp>,
    /// The healthy time since it last failed, as covered by polls.
    well: Duration,
    /// The NVLinks of the record that were down at the last poll, without those whose far end is unreachable.
    links_down: BTreeSet<u32>,
    /// The reasons that the last poll was the first to show, and that wait for a second look.
    doubted: Vec<UnhealthyReason>,
    /// The part that is kept, without its reasons: [`Self::kept`] takes these from `reasons`.
    record: GpuRecord,
}

impl GpuHealth {
    /// Makes the health that the record of our last process describes.
    pub fn restored(kept: &GpuRecord) -> Self {
        let standing = kept.reasons.iter().take(MAX_REASONS).map(|kept| StandingReason {
            remedied: kept.remedied,
            ..StandingReason::new(kept.reason.clone(), Duration::from_secs(kept.since), true)
        });
        Self {
            reasons: standing.collect(),
            record: GpuRecord {
                reasons: Vec::new(),
                flaps: kept.flaps.map(|flaps| flaps.min(MAX_FLAPS)),
                ..kept.clone()
            },
            ..Self::default()
        }
    }

    /// The record for our next process; `None` if there is nothing to keep.
    pub fn kept(&self) -> Option<GpuRecord> {
        let reasons = self.reasons.iter().filter(|standing| standing.reason.needs_action() && !standing.is_over);
        let reasons = reasons.map(|standing| KeptReason {
            reason: standing.reason.clone(),
            since: standing.since.as_secs(),
            remedied: standing.remedied,
        });
        let kept = GpuRecord { reasons: reasons.collect(), ..self.record.clone() };
        (kept != GpuRecord::default()).then_some(kept)
    }

    /// The standing reasons, in the order in which they began.
    pub fn reasons(&self) -> impl Iterator<Item = (&UnhealthyReason, Timestamp)> {
        self.reasons.iter().map(|standing| (&standing.reason, standing.since))
    }

    /// The health, judged by the reasons that count under `xids` and for which `concerned` returns true. Names the
    /// first reason whose remedy is a reset; if there is none, the first reason.
    pub fn verdict(&self, xids: &XidPolicy, concerned: impl Fn(&UnhealthyReason) -> bool) -> Health {
        let counts = |reason: &UnhealthyReason| xids.counts(reason) && concerned(reason);
        let counting = || self.reasons.iter().filter(|standing| counts(&standing.reason));
        let needs_action = counting().find(|standing| standing.reason.needs_action());
        match needs_action.or_else(|| counting().next()) {
            None => Health::Healthy,
            Some(StandingReason { reason, since, .. }) => Health::Unhealthy { reason: reason.clone(), since: *since },
        }
    }

    /// Returns true if a standing reason shows that other GPUs cannot reach the GPU: it is lost, off the bus, or in
    /// quarantine, or the driver refuses it until a reset.
    pub fn is_unreachable(&self) -> bool {
        self.reasons.iter().any(|standing| match standing.reason {
            UnhealthyReason::Lost { .. }
            | UnhealthyReason::OffBus
            | UnhealthyReason::ResetRequired { .. }
            | UnhealthyReason::Quarantined { .. } => true,
            UnhealthyReason::Xid { code, .. } => code == FALLEN_OFF_THE_BUS,
            _ => false,
        })
    }

    /// Returns true while the quarantine is a standing reason: until a hold time after the GPU's release.
    pub fn is_quarantined(&self) -> bool {
        self.reasons.iter().any(|standing| matches!(standing.reason, UnhealthyReason::Quarantined { .. }))
    }

    /// Notes that a scan lists the GPU, with these active NVLinks and the GPUs at their far ends. With `off_bus`, the
    /// PCI bus does not list it, which NVML has not noticed yet.
    pub fn scanned(&mut self, links: impl Iterator<Item = (u32, Option<GpuUuid>)>, off_bus: bool) {
        for (link, far_end) in links {
            self.record.links.insert(link);
            // The far end is kept when a later scan does not show it.
            self.record.far_ends.extend(far_end.map(|gpu| (link, gpu)));
        }
        if !self.is_listed {
            self.reasons.retain(|standing| !standing.is_over);
        }
        self.is_listed = true;
        if !off_bus {
            if core::mem::take(&mut self.record.seen.off_bus) {
                self.remedy(|standing| standing.reason.needs_action());
            }
            self.remedy(|standing| standing.reason == UnhealthyReason::OffBus);
        }
    }

    /// Notes that a scan does not list the GPU; with `off_bus` the PCI bus does not list it either.
    pub fn missed(&mut self, off_bus: bool) {
        self.record.seen.off_bus |= off_bus;
    }

    /// Returns true if the driver reports recovery actions, `none` included.
    pub fn has_recovery_action(&self) -> bool {
        self.record.seen.action.is_some()
    }

    /// Begins a reason, and counts it as a failure of this GPU if [`Self::is_new_failure`].
    pub fn fail(&mut self, reason: UnhealthyReason, now: Timestamp) {
        if self.is_new_failure(&reason) {
            self.count_failure();
        }
        self.begin(reason, now, false);
    }

    /// Notes that NVML answers again. [`UnhealthyReason::DriverAway`] ends with the next poll.
    pub fn driver_back(&mut self) {
        for standing in &mut self.reasons {
            standing.is_over |= matches!(standing.reason, UnhealthyReason::DriverAway { .. });
        }
    }

    /// Notes its release from quarantine: an agent scanned it and survived.
    pub fn released(&mut self) {
        self.remedy(|standing| matches!(standing.reason, UnhealthyReason::Quarantined { .. }));
    }

    /// Notes that the driver was loaded again or the node booted. The next poll shows which reasons still stand.
    pub fn renewed(&mut self) {
        for standing in &mut self.reasons {
            standing.is_over |= !outlasts(&standing.reason);
        }
        if !self.is_listed {
            self.reasons.retain(|standing| !standing.is_over);
        }
        self.record = GpuRecord { cordon: self.record.cordon.take(), ..GpuRecord::default() };
        self.links_down = BTreeSet::new();
    }

    /// Begins or ends a cordon on an operator's order. A cordon does not affect the GPU's health.
    pub fn cordon(&mut self, cordon: Option<Cordon>, now: Timestamp) {
        self.record.cordon = cordon.map(|cordon| KeptReason {
            reason: UnhealthyReason::Cordoned(cordon),
            since: now.as_secs(),
            remedied: false,
        });
    }

    /// The cordon, and its beginning.
    pub fn cordoned(&self) -> Option<(&UnhealthyReason, Timestamp)> {
        self.record.cordon.as_ref().map(|kept| (&kept.reason, Duration::from_secs(kept.since)))
    }

    /// Clears the reasons on an operator's order, and accepts the driver's present report. A GPU that is off the bus,
    /// in quarantine or without NVML stays unhealthy.
    pub fn cleared(&mut self) {
        // Two polls have proved these reasons: if the next poll shows one again, it needs no second look.
        let proved = self.reasons.iter().map(|standing| &standing.reason);
        self.doubted.extend(proved.filter(|reason| reason.needs_second_look()).cloned());
        self.reasons.retain(|standing| outlasts(&standing.reason));
        let seen = &self.record.seen;
        self.record.accepted = Accepted {
            action: seen.action,
            row_remap_failed: seen.row_remap_failed,
            uncorrectable_ecc: seen.uncorrectable_ecc,
            fabric: seen.fabric,
        };
        for link in core::mem::take(&mut self.links_down) {
            self.record.links.remove(&link);
            self.record.far_ends.remove(&link);
        }
        (self.record.flaps, self.well) = (None, Duration::ZERO);
    }

    /// Applies the result of one poll. With `is_node_wide`, every GPU shows the same trouble. A link that ends at an
    /// `unreachable` GPU is not a fault of this GPU. `first_hold` is the hold time of a GPU that does not flap.
    pub fn poll(
        &mut self,
        poll: &HealthPoll,
        unreachable: &BTreeSet<GpuUuid>,
        is_node_wide: bool,
        first_hold: Duration,
        now: Timestamp,
    ) {
        let covered = self.polled.map_or(Duration::ZERO, |last| now.saturating_sub(last)).min(MAX_COVERED);
        // At the start and after a reload, a doubted reason takes the GPU out of service until the second look.
        let is_decisive = self.polled.is_none() || self.reasons.iter().any(|standing| standing.is_over);
        self.polled = Some(now);
        if self.shows_reset(poll) {
            self.remedy(|standing| standing.seen_poll_since && standing.reason.needs_action());
        }
        self.learn(poll, unreachable);
        let shown = self.proven_reasons(poll);
        let has_failed = !is_node_wide && shown.iter().any(|reason| self.is_new_failure(reason));
        let hold = self.hold(first_hold);
        self.reasons.retain_mut(|standing| {
            if shown.iter().chain(&self.doubted).any(|reason| reason.is(&standing.reason)) {
                return true;
            }
            if standing.is_over {
                return false;
            }
            if self.links_down.is_empty() && standing.ends_at_unreachable(&self.record.far_ends, unreachable) {
                return false;
            }
            let passes = standing.seen_poll_since && standing.passes(poll);
            standing.seen_poll_since = true;
            if !passes {
                return true;
            }
            let steady = standing.steady.map_or(Duration::ZERO, |steady| steady.saturating_add(covered));
            standing.steady = Some(steady);
            steady < hold && !matches!(standing.reason, UnhealthyReason::FabricJoining)
        });
        for reason in shown {
            self.begin(reason, now, true);
        }
        if is_decisive {
            let new = |reason: &&UnhealthyReason| !self.reasons.iter().any(|standing| standing.reason.is(reason));
            let doubted: Vec<UnhealthyReason> = self.doubted.iter().filter(new).cloned().collect();
            let until_next = |reason| StandingReason { is_over: true, ..StandingReason::new(reason, now, true) };
            self.reasons.extend(doubted.into_iter().map(until_next));
        }
        if has_failed {
            self.count_failure();
        }
        if self.reasons.is_empty() {
            self.well = self.well.saturating_add(covered);
        }
    }

    /// Returns true if a poll shows that a link which was active once is down.
    pub fn loses_links(&self, poll: &HealthPoll) -> bool {
        poll.nvlinks_down.iter().flatten().any(|link| self.record.links.contains(link))
    }

    /// Returns true if a reason counts as a new failure for the flap count: the GPU was healthy before, or the reason
    /// shows again during its hold time. A reason that follows another, as a recovery action follows an XID, belongs to
    /// the same failure. Trouble of the whole node is not a failure of the GPU.
    fn is_new_failure(&self, reason: &UnhealthyReason) -> bool {
        let blames = |reason: &UnhealthyReason| {
            !matches!(reason, UnhealthyReason::FabricJoining | UnhealthyReason::DriverAway { .. })
        };
        let breaks_hold = self.reasons.iter().any(|standing| standing.reason.is(reason) && standing.steady.is_some());
        let current = || self.reasons.iter().filter(|standing| !standing.is_over);
        blames(reason) && (breaks_hold || !current().any(|standing| blames(&standing.reason)))
    }

    /// The hold time of this GPU now: `first` × 2^flaps, at most `first` × [`MAX_HOLD_FACTOR`].
    fn hold(&self, first: Duration) -> Duration {
        let doublings = 1 << self.record.flaps.unwrap_or(0).min(MAX_FLAPS);
        first.saturating_mul(MAX_HOLD_FACTOR.min(doublings))
    }

    /// Counts a failure. Each full [`DECAY_INTERVAL`] of preceding health takes one doubling back.
    fn count_failure(&mut self) {
        let hours = u32::try_from(self.well.as_secs() / DECAY_INTERVAL.as_secs()).unwrap_or(u32::MAX);
        self.record.flaps = Some(match self.record.flaps {
            None => 0,
            Some(flaps) if hours == 0 => (flaps + 1).min(MAX_FLAPS),
            Some(flaps) => flaps.saturating_sub(hours),
        });
        self.well = Duration::ZERO;
    }

    /// Adds a reason. If it stands already, it keeps its beginning, and the evidence that it has ended is discarded.
    fn begin(&mut self, reason: UnhealthyReason, now: Timestamp, seen_poll_since: bool) {
        let full = self.reasons.len() >= MAX_REASONS;
        let known = self.reasons.iter().position(|standing| standing.reason.is(&reason));
        let Some(index) = known.or_else(|| full.then(|| self.reasons.len() - 1)) else {
            self.reasons.push(StandingReason::new(reason, now, seen_poll_since));
            return;
        };
        let Some(standing) = self.reasons.get_mut(index) else { return };
        let reason = match (&standing.reason, known) {
            // The list is full: the last reason stands for all further ones.
            (UnhealthyReason::Xid { code, .. }, None) => UnhealthyReason::Xid { code: *code, instance: None },
            _ => reason,
        };
        *standing = StandingReason::new(reason, standing.since, seen_poll_since);
    }

    /// Notes that the remedy of these reasons was observed.
    fn remedy(&mut self, which: impl Fn(&StandingReason) -> bool) {
        self.reasons.iter_mut().for_each(|standing| standing.remedied |= which(standing));
    }

    /// Returns true if the poll shows something that only a reset causes.
    fn shows_reset(&self, poll: &HealthPoll) -> bool {
        let seen = &self.record.seen;
        let fewer = matches!((seen.uncorrectable_ecc, poll.uncorrectable_ecc), (Some(was), Some(is)) if is < was);
        let remapped = seen.remap_pending && poll.row_remapping.is_some_and(|rows| !rows.pending);
        // While a GPU stays attached, the driver ends neither state (PDB_PROP_GPU_IS_LOST in open-gpu-kernel-modules).
        let answers = (seen.reset_required || seen.lost) && poll.reach == Reach::Answers;
        let back = seen.off_bus && poll.on_bus == Some(true);
        fewer || remapped || answers || back
    }

    /// Applies the facts of a poll. An unknown fact leaves the last known value.
    fn learn(&mut self, poll: &HealthPoll, unreachable: &BTreeSet<GpuUuid>) {
        let GpuRecord { seen, accepted, links, far_ends, .. } = &mut self.record;
        seen.action = poll.recovery_action.or(seen.action);
        seen.remaps |= poll.row_remapping.is_some();
        if let Some(rows) = poll.row_remapping {
            (seen.remap_pending, seen.row_remap_failed) = (rows.pending, rows.failed);
        }
        seen.uncorrectable_ecc = poll.uncorrectable_ecc.or(seen.uncorrectable_ecc);
        seen.fabric = poll.fabric.or(seen.fabric);
        match poll.reach {
            Reach::ResetRequired { .. } => seen.reset_required = true,
            Reach::Lost { .. } => seen.lost = true,
            Reach::Answers => (seen.reset_required, seen.lost) = (false, false),
            Reach::Unknown | Reach::Failed { .. } => {}
        }
        if let Some(on_bus) = poll.on_bus {
            seen.off_bus = !on_bus;
        }
        if let Some(down) = &poll.nvlinks_down {
            let own_fault = |link: &&u32| {
                links.contains(link) && far_ends.get(link).is_none_or(|far_end| !unreachable.contains(far_end))
            };
            self.links_down = down.iter().filter(own_fault).copied().collect();
        }
        // A value that an operator accepted stays accepted until it changes.
        accepted.action = accepted.action.filter(|action| seen.action == Some(*action));
        accepted.fabric = accepted.fabric.filter(|fabric| seen.fabric == Some(*fabric));
        accepted.row_remap_failed &= seen.row_remap_failed;
        accepted.uncorrectable_ecc = accepted.uncorrectable_ecc.min(seen.uncorrectable_ecc);
    }

    /// The reasons that a poll shows, without those that still need a second look, because one bad answer is not a
    /// failure. The latter wait in `doubted` for the next poll; until then their hold time neither passes nor restarts.
    fn proven_reasons(&mut self, poll: &HealthPoll) -> Vec<UnhealthyReason> {
        let before = core::mem::take(&mut self.doubted);
        let is_proven = |reason: &UnhealthyReason| {
            let stands = |other: &StandingReason| other.reason.is(reason) && other.steady.is_none() && !other.is_over;
            !reason.needs_second_look()
                || before.iter().any(|doubt| doubt.is(reason))
                || self.reasons.iter().any(stands)
        };
        let (shown, doubted) = self.shown_reasons(poll).into_iter().partition(is_proven);
        self.doubted = doubted;
        shown
    }

    /// The reasons that a poll shows.
    fn shown_reasons(&self, poll: &HealthPoll) -> Vec<UnhealthyReason> {
        let (seen, accepted) = (&self.record.seen, &self.record.accepted);
        let mut shown = Vec::new();
        match &poll.reach {
            Reach::Unknown | Reach::Answers => {}
            Reach::Lost { call } => shown.push(UnhealthyReason::Lost { call: call.clone() }),
            Reach::ResetRequired { call } => shown.push(UnhealthyReason::ResetRequired { call: call.clone() }),
            Reach::Failed { call, error } => {
                shown.push(UnhealthyReason::CallFailed { call: call.clone(), error: error.clone() });
            }
        }
        match poll.recovery_action {
            // An action that this version does not know is reported, and the operator judges it.
            None | Some(RecoveryAction::None | RecoveryAction::Other(_)) => {}
            Some(action) if accepted.action == Some(action) => {}
            Some(action) => shown.push(UnhealthyReason::RecoveryAction { action }),
        }
        if poll.row_remapping.is_some_and(|rows| rows.failed) && !accepted.row_remap_failed {
            shown.push(UnhealthyReason::RowRemapFailed);
        }
        // A driver with recovery actions or row remapping says more by these than by the count.
        let count_matters = seen.action.is_none() && !seen.remaps;
        if let Some(count) = poll.uncorrectable_ecc.filter(|count| *count > accepted.uncorrectable_ecc.unwrap_or(0))
            && count_matters
        {
            shown.push(UnhealthyReason::UncorrectableEcc { count });
        }
        if poll.nvlinks_down.is_some() && !self.links_down.is_empty() {
            shown.push(UnhealthyReason::LinksDown { links: self.links_down.iter().copied().collect() });
        }
        match poll.fabric {
            None | Some(FabricHealth::Joined | FabricHealth::Unused) => {}
            Some(fabric) if accepted.fabric == Some(fabric) => {}
            Some(FabricHealth::Joining) => shown.push(UnhealthyReason::FabricJoining),
            Some(FabricHealth::Failed { status }) => shown.push(UnhealthyReason::FabricFailed { status }),
        }
        if poll.on_bus == Some(false) {
            shown.push(UnhealthyReason::OffBus);
        }
        shown
    }
}

impl StandingReason {
    fn new(reason: UnhealthyReason, since: Timestamp, seen_poll_since: bool) -> Self {
        Self { reason, since, steady: None, seen_poll_since, remedied: false, is_over: false }
    }

    /// Returns true if the reason is NVLinks that are down and all end at unreachable GPUs.
    fn ends_at_unreachable(&self, far_ends: &BTreeMap<u32, GpuUuid>, unreachable: &BTreeSet<GpuUuid>) -> bool {
        let UnhealthyReason::LinksDown { links } = &self.reason else { return false };
        links.iter().all(|link| far_ends.get(link).is_some_and(|far_end| unreachable.contains(far_end)))
    }

    /// Returns true if a poll that does not show the reason is evidence that it has ended. The reason ends when
    /// evidence has lasted for the hold time; [`UnhealthyReason::FabricJoining`] ends at once.
    fn passes(&self, poll: &HealthPoll) -> bool {
        // A recovery action that the driver reports decides. Without one, a reset must have been observed.
        let healed = match poll.recovery_action {
            Some(action) => action == RecoveryAction::None,
            None => self.remedied,
        };
        match self.reason {
            UnhealthyReason::Xid { .. } | UnhealthyReason::DoubleBitEcc => healed,
            UnhealthyReason::Lost { .. } => healed && poll.reach == Reach::Answers,
            UnhealthyReason::UncorrectableEcc { .. } => poll.uncorrectable_ecc.is_some(),
            UnhealthyReason::ResetRequired { .. } | UnhealthyReason::CallFailed { .. } => poll.reach == Reach::Answers,
            UnhealthyReason::RecoveryAction { .. } => {
                poll.recovery_action.is_some_and(|action| !matches!(action, RecoveryAction::Other(_)))
            }
            UnhealthyReason::RowRemapFailed => poll.row_remapping.is_some(),
            UnhealthyReason::LinksDown { .. } => poll.nvlinks_down.is_some(),
            UnhealthyReason::FabricJoining => poll.fabric.is_some(),
            UnhealthyReason::FabricFailed { .. } => {
                matches!(poll.fabric, Some(FabricHealth::Joined | FabricHealth::Unused))
            }
            UnhealthyReason::Quarantined { .. } => {
                self.remedied && matches!(poll.reach, Reach::Answers | Reach::Unknown)
            }
            UnhealthyReason::OffBus => self.remedied || poll.on_bus == Some(true),
            UnhealthyReason::DriverAway { .. }
            | UnhealthyReason::Gone
            | UnhealthyReason::HeldElsewhere { .. }
            | UnhealthyReason::Claimed { .. }
            | UnhealthyReason::HoldersUnknown
            | UnhealthyReason::Withdrawn
            | UnhealthyReason::MpsNotReady
            | UnhealthyReason::Cordoned(_) => false,
        }
    }
}

/// Returns true if neither a load of the driver nor an operator ends the reason, because the GPU cannot be polled.
fn outlasts(reason: &UnhealthyReason) -> bool {
    matches!(reason, UnhealthyReason::Quarantined { .. } | UnhealthyReason::DriverAway { .. } | UnhealthyReason::OffBus)
}
