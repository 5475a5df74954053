//! The health of one GPU: the reasons that stand against it, and what ends each. docs/health.md has the diagram.
//!
//! Pure, and alone: it knows no other GPU. `inventory` feeds it; what it keeps across our restarts is in `record`.
//!
//! Time counts only as far as polls cover it: from one poll to the next, at most [`COVERED`]. A clock that jumps, a
//! process that was stopped, a driver that answers late therefore neither heal early nor wedge.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use core::time::Duration;

use super::device::{Health, Timestamp};
use super::event::MigInstance;
use super::poll::{FabricHealth, HealthPoll, Reach, RecoveryAction};
use super::reason::{ReasonClass, UnhealthyReason};
use super::record::{Accepted, GpuRecord, KeptReason, LastSeen};

/// How long the evidence has to last: DESIGN section 5.
pub(super) const HOLD: Duration = Duration::from_secs(60);
/// The longest hold of a GPU that flaps, in first holds: the hour of DESIGN section 5.
const LONGEST_HOLD: u32 = 60;
/// Doublings that make the one out of the other.
const MOST_FLAPS: u32 = 6;
/// So long in health takes one doubling back.
const DECAY: Duration = Duration::from_secs(3600);
/// What one poll can cover: two of the intervals at which they come.
const COVERED: Duration = Duration::from_secs(20);
/// Reasons that stand at once. Only XIDs can be many; more of them are counted to the last one, for the whole GPU.
const MOST_REASONS: usize = 32;

/// One reason, and how far its evidence has come.
#[derive(Clone, Debug)]
struct Standing {
    reason: UnhealthyReason,
    since: Timestamp,
    /// Time covered by polls that show it ended; `None` until the first.
    steady: Option<Duration>,
    /// A poll came since it began. What came first may have been asked before, and proves nothing.
    aged: bool,
    /// What has to be done has been seen done since: a reset, or the GPU taken back in.
    remedied: bool,
    /// It ends with the next poll that does not show it anew.
    over: bool,
}

/// What a poll says of a reason that it does not show.
enum Proof {
    /// Nothing.
    Silence,
    /// It has ended, as long as that lasts.
    Passes,
    /// It has ended.
    Ends,
}

/// The health of one GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct GpuHealth {
    standing: Vec<Standing>,
    /// Whether a look of this process ever listed it: before, nobody has seen its health.
    listed: bool,
    polled: Option<Timestamp>,
    /// Doublings of the hold; `None` before it first failed.
    flaps: Option<u32>,
    /// Time in health since it last failed, as polls cover it.
    well: Duration,
    /// NVLinks that were active once.
    links: BTreeSet<u32>,
    /// The same, as of the last poll: down now.
    links_down: BTreeSet<u32>,
    accepted: Accepted,
    seen: LastSeen,
}

impl GpuHealth {
    /// What was kept of it.
    pub fn restored(kept: &GpuRecord) -> Self {
        let standing = kept.reasons.iter().take(MOST_REASONS).map(|kept| Standing {
            reason: kept.reason.clone(),
            since: Duration::from_secs(kept.since),
            steady: None,
            aged: true,
            remedied: kept.remedied,
            over: false,
        });
        Self {
            standing: standing.collect(),
            flaps: kept.flaps.map(|flaps| flaps.min(MOST_FLAPS)),
            links: kept.links.clone(),
            accepted: kept.accepted.clone(),
            seen: kept.seen.clone(),
            ..Self::default()
        }
    }

    /// What has to be kept of it; `None` where there is nothing.
    pub fn kept(&self) -> Option<GpuRecord> {
        let reasons =
            self.standing.iter().filter(|standing| standing.reason.class() == ReasonClass::Reset && !standing.over);
        let kept = GpuRecord {
            reasons: reasons
                .map(|standing| KeptReason {
                    reason: standing.reason.clone(),
                    since: standing.since.as_secs(),
                    remedied: standing.remedied,
                })
                .collect(),
            flaps: self.flaps,
            links: self.links.clone(),
            accepted: self.accepted.clone(),
            seen: self.seen.clone(),
        };
        (kept != GpuRecord::default()).then_some(kept)
    }

    /// What stands, in the order in which it began.
    pub fn standing(&self) -> impl Iterator<Item = (&UnhealthyReason, Timestamp)> {
        self.standing.iter().map(|standing| (&standing.reason, standing.since))
    }

    /// Whether a MIG device (or with `None` the whole GPU) may be given out. Of several reasons the first one that
    /// needs something done is named, else the first.
    pub fn verdict(&self, instance: Option<MigInstance>) -> Health {
        let concerns = || self.standing.iter().filter(|standing| standing.reason.concerns(instance));
        let needs = concerns().find(|standing| standing.reason.class() == ReasonClass::Reset);
        match needs.or_else(|| concerns().next()) {
            None => Health::Healthy,
            Some(Standing { reason, since, .. }) => Health::Unhealthy { reason: reason.clone(), since: *since },
        }
    }

    /// A look at the node lists it, with these NVLinks active. `off_bus` where the PCI bus does not list it: then NVML only has
    /// not noticed yet.
    pub fn observed(&mut self, links: impl Iterator<Item = u32>, off_bus: bool) {
        self.links.extend(links);
        if !self.listed {
            self.standing.retain(|standing| !standing.over);
        }
        self.listed = true;
        if !off_bus {
            if core::mem::take(&mut self.seen.off_bus) {
                self.remedy(|reason| reason.class() == ReasonClass::Reset);
            }
            self.remedy(|reason| matches!(reason, UnhealthyReason::OffBus));
        }
    }

    /// A look at the node does not list it; `off_bus` where the PCI bus does not either.
    pub fn missed(&mut self, off_bus: bool) {
        self.seen.off_bus |= off_bus;
    }

    /// Something happened to it. True where that is news.
    pub fn fail(&mut self, reason: UnhealthyReason, now: Timestamp) -> bool {
        if self.falls(&reason) {
            self.fall();
        }
        self.begin(reason, now, false)
    }

    /// Something happened to the whole node: no fault of this GPU.
    pub fn suffer(&mut self, reason: UnhealthyReason, now: Timestamp) -> bool {
        self.begin(reason, now, false)
    }

    /// NVML answers again: as at the start, the next poll decides.
    pub fn driver_back(&mut self) {
        for standing in &mut self.standing {
            standing.over |= matches!(standing.reason, UnhealthyReason::DriverAway { .. });
        }
    }

    /// It is looked at again, without harm.
    pub fn taken_back_in(&mut self) {
        self.remedy(|reason| matches!(reason, UnhealthyReason::LeftOut { .. }));
    }

    /// Another driver, or another boot: the next poll says what stands.
    pub fn renewed(&mut self) {
        for standing in &mut self.standing {
            standing.over |= !outlasts(&standing.reason);
        }
        if !self.listed {
            self.standing.retain(|standing| !standing.over);
        }
        (self.accepted, self.seen, self.flaps) = (Accepted::default(), LastSeen::default(), None);
        (self.links, self.links_down) = (BTreeSet::new(), BTreeSet::new());
    }

    /// An operator's word. What the driver says of it as of now is accepted; a GPU that is not there, or that nobody
    /// looks at, is not well by anybody's word.
    pub fn cleared(&mut self) {
        self.standing.retain(|standing| outlasts(&standing.reason));
        self.accepted = Accepted {
            action: self.seen.action,
            row_remap_failed: self.seen.row_remap_failed,
            uncorrectable_ecc: self.seen.uncorrectable_ecc,
        };
        let down = core::mem::take(&mut self.links_down);
        self.links.retain(|link| !down.contains(link));
        (self.flaps, self.well) = (None, Duration::ZERO);
    }

    /// What a round of calls said of it; `node_wide` where it said the same of every GPU. `first_hold` is how long the evidence
    /// has to last that a GPU which does not flap is well again.
    pub fn poll(&mut self, poll: &HealthPoll, node_wide: bool, first_hold: Duration, now: Timestamp) {
        let covered = self.polled.map_or(Duration::ZERO, |last| now.saturating_sub(last)).min(COVERED);
        self.polled = Some(now);
        if self.shows_reset(poll) {
            let done = |standing: &&mut Standing| standing.aged && standing.reason.class() == ReasonClass::Reset;
            self.standing.iter_mut().filter(done).for_each(|standing| standing.remedied = true);
        }
        self.learn(poll);
        let shown = self.shown(poll);
        let falls = !node_wide && shown.iter().any(|reason| self.falls(reason));
        let hold = self.hold(first_hold);
        self.standing.retain_mut(|standing| {
            if shown.iter().any(|reason| reason.is(&standing.reason)) {
                return true;
            }
            if standing.over {
                return false;
            }
            match standing.proof(poll) {
                Proof::Ends => return false,
                Proof::Silence => {}
                Proof::Passes => {
                    let steady = standing.steady.map_or(Duration::ZERO, |steady| steady.saturating_add(covered));
                    standing.steady = Some(steady);
                    if steady >= hold {
                        return false;
                    }
                }
            }
            standing.aged = true;
            true
        });
        for reason in shown {
            self.begin(reason, now, true);
        }
        if falls {
            self.fall();
        }
        if self.standing.is_empty() {
            self.well = self.well.saturating_add(covered);
        }
    }

    /// Whether a poll shows a link down that was active once.
    pub fn loses_links(&self, poll: &HealthPoll) -> bool {
        poll.nvlinks_down.iter().flatten().any(|link| self.links.contains(link))
    }

    /// Whether a reason is a fall: the first against a GPU in health, or one that shows again during its hold. What comes on
    /// top, as the driver's word does after an XID, belongs to the same fall.
    fn falls(&self, reason: &UnhealthyReason) -> bool {
        let blames = |reason: &UnhealthyReason| {
            !matches!(reason, UnhealthyReason::FabricJoining | UnhealthyReason::DriverAway { .. })
        };
        let broken = self.standing.iter().any(|standing| standing.reason.is(reason) && standing.steady.is_some());
        blames(reason) && (broken || !self.standing.iter().any(|standing| blames(&standing.reason)))
    }

    /// How long its evidence has to last.
    fn hold(&self, first: Duration) -> Duration {
        let doublings = 1 << self.flaps.unwrap_or(0).min(MOST_FLAPS);
        first.saturating_mul(LONGEST_HOLD.min(doublings))
    }

    fn fall(&mut self) {
        let hours = u32::try_from(self.well.as_secs() / DECAY.as_secs()).unwrap_or(u32::MAX);
        self.flaps = Some(match self.flaps {
            None => 0,
            Some(flaps) if hours == 0 => (flaps + 1).min(MOST_FLAPS),
            Some(flaps) => flaps.saturating_sub(hours),
        });
        self.well = Duration::ZERO;
    }

    /// Lets a reason stand, from its beginning. True where it did not stand, or its evidence had begun.
    fn begin(&mut self, reason: UnhealthyReason, now: Timestamp, aged: bool) -> bool {
        let full = self.standing.len() >= MOST_REASONS;
        let known = self.standing.iter().position(|standing| standing.reason.is(&reason));
        let Some(index) = known.or_else(|| full.then(|| self.standing.len() - 1)) else {
            self.standing.push(Standing { reason, since: now, steady: None, aged, remedied: false, over: false });
            return true;
        };
        let Some(standing) = self.standing.get_mut(index) else { return false };
        let news = standing.reason != reason || standing.steady.is_some() || standing.remedied || standing.over;
        match (&mut standing.reason, known) {
            // One too many: the last one stands for them all.
            (UnhealthyReason::Xid { instance, .. }, None) => *instance = None,
            (standing, _) => *standing = reason,
        }
        (standing.steady, standing.remedied, standing.over) = (None, false, false);
        standing.aged = aged;
        news
    }

    fn remedy(&mut self, which: impl Fn(&UnhealthyReason) -> bool) {
        self.standing
            .iter_mut()
            .filter(|standing| which(&standing.reason))
            .for_each(|standing| standing.remedied = true);
    }

    /// Whether something shows now that only a reset does.
    fn shows_reset(&self, poll: &HealthPoll) -> bool {
        let seen = &self.seen;
        let fewer = matches!((seen.uncorrectable_ecc, poll.uncorrectable_ecc), (Some(was), Some(is)) if is < was);
        let remapped = seen.remap_pending && poll.row_remapping.is_some_and(|rows| !rows.pending);
        let allowed = seen.reset_required && poll.reach == Reach::Answers;
        let back = seen.off_bus && poll.on_bus == Some(true);
        fewer || remapped || allowed || back
    }

    /// Takes note of the facts; what is unknown leaves what was known.
    fn learn(&mut self, poll: &HealthPoll) {
        let seen = &mut self.seen;
        seen.action = poll.recovery_action.or(seen.action);
        seen.remaps |= poll.row_remapping.is_some();
        if let Some(rows) = poll.row_remapping {
            (seen.remap_pending, seen.row_remap_failed) = (rows.pending, rows.failed);
        }
        seen.uncorrectable_ecc = poll.uncorrectable_ecc.or(seen.uncorrectable_ecc);
        match poll.reach {
            Reach::ResetRequired { .. } => seen.reset_required = true,
            Reach::Answers => seen.reset_required = false,
            Reach::Unknown | Reach::Lost { .. } | Reach::Failed { .. } => {}
        }
        if let Some(on_bus) = poll.on_bus {
            seen.off_bus = !on_bus;
        }
        if let Some(down) = &poll.nvlinks_down {
            self.links_down = down.iter().copied().filter(|link| self.links.contains(link)).collect();
        }
        // What was accepted is accepted as long as it stays as it was.
        if self.accepted.action.is_some() && self.accepted.action != seen.action {
            self.accepted.action = None;
        }
        self.accepted.row_remap_failed &= seen.row_remap_failed;
        if self.accepted.uncorrectable_ecc > seen.uncorrectable_ecc {
            self.accepted.uncorrectable_ecc = seen.uncorrectable_ecc;
        }
    }

    /// The reasons that a poll shows.
    fn shown(&self, poll: &HealthPoll) -> Vec<UnhealthyReason> {
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
            None | Some(RecoveryAction::None) => {}
            Some(action) if self.accepted.action == Some(action) => {}
            Some(action) => shown.push(UnhealthyReason::RecoveryAction { action }),
        }
        if poll.row_remapping.is_some_and(|rows| rows.failed) && !self.accepted.row_remap_failed {
            shown.push(UnhealthyReason::RowRemapFailed);
        }
        // A driver that has a word for it, and a GPU that can remap rows, need no count.
        let counts = self.seen.action.is_none() && !self.seen.remaps;
        if let Some(count) =
            poll.uncorrectable_ecc.filter(|count| *count > self.accepted.uncorrectable_ecc.unwrap_or(0))
            && counts
        {
            shown.push(UnhealthyReason::UncorrectableEcc { count });
        }
        if poll.nvlinks_down.is_some() && !self.links_down.is_empty() {
            shown.push(UnhealthyReason::LinksDown { links: self.links_down.iter().copied().collect() });
        }
        match poll.fabric {
            None | Some(FabricHealth::Joined) => {}
            Some(FabricHealth::Joining) => shown.push(UnhealthyReason::FabricJoining),
            Some(FabricHealth::Failed { status }) => shown.push(UnhealthyReason::FabricFailed { status }),
        }
        if poll.on_bus == Some(false) {
            shown.push(UnhealthyReason::OffBus);
        }
        shown
    }
}

impl Standing {
    /// What a poll that does not show the reason says of it.
    fn proof(&self, poll: &HealthPoll) -> Proof {
        let passes = |passes: bool| if passes { Proof::Passes } else { Proof::Silence };
        if !self.aged {
            return Proof::Silence;
        }
        // The driver's word beats the table; where it has none, a reset has to have been seen.
        let healed = match poll.recovery_action {
            Some(action) => action == RecoveryAction::None,
            None => self.remedied,
        };
        match self.reason {
            UnhealthyReason::Xid { .. } | UnhealthyReason::DoubleBitEcc => passes(healed),
            UnhealthyReason::Lost { .. } => passes(healed && poll.reach == Reach::Answers),
            UnhealthyReason::UncorrectableEcc { .. } => passes(poll.uncorrectable_ecc.is_some()),
            UnhealthyReason::ResetRequired { .. } | UnhealthyReason::CallFailed { .. } => {
                passes(poll.reach == Reach::Answers)
            }
            UnhealthyReason::RecoveryAction { .. } => passes(poll.recovery_action.is_some()),
            UnhealthyReason::RowRemapFailed => passes(poll.row_remapping.is_some()),
            UnhealthyReason::LinksDown { .. } => passes(poll.nvlinks_down.is_some()),
            UnhealthyReason::FabricJoining if poll.fabric.is_some() => Proof::Ends,
            UnhealthyReason::FabricFailed { .. } => passes(poll.fabric == Some(FabricHealth::Joined)),
            UnhealthyReason::LeftOut { .. } => {
                passes(self.remedied && matches!(poll.reach, Reach::Answers | Reach::Unknown))
            }
            UnhealthyReason::OffBus => passes(self.remedied || poll.on_bus == Some(true)),
            UnhealthyReason::FabricJoining
            | UnhealthyReason::DriverAway { .. }
            | UnhealthyReason::Gone
            | UnhealthyReason::HeldElsewhere { .. }
            | UnhealthyReason::Withdrawn
            | UnhealthyReason::MpsNotReady => Proof::Silence,
        }
    }
}

/// What neither a new driver nor an operator's word ends: nobody looks at the GPU.
fn outlasts(reason: &UnhealthyReason) -> bool {
    matches!(reason, UnhealthyReason::LeftOut { .. } | UnhealthyReason::DriverAway { .. } | UnhealthyReason::OffBus)
}
