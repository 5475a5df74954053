//! [`XidLog`]: keeps a storm of XIDs that change nothing out of the log. The first of a kind is reported at once, the
//! others of its period as one number at the period's end.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use core::time::Duration;

use super::device::Timestamp;
use super::event::Effect;
use crate::topology::GpuUuid;

/// The time for which one report stands for all XIDs of its kind.
const PERIOD: Duration = Duration::from_secs(60);
/// The most kinds that are followed at once. Only the metrics count further ones.
const MOST_KINDS: usize = 1024;

/// The kinds that were reported, each with the number that waits to be.
#[derive(Clone, Debug, Default)]
pub(super) struct XidLog {
    kinds: BTreeMap<(GpuUuid, u64), Kind>,
}

#[derive(Clone, Debug)]
struct Kind {
    since: Timestamp,
    unreported: u64,
}

impl XidLog {
    /// Notes an XID that changes nothing.
    pub fn record(&mut self, gpu: GpuUuid, code: u64, now: Timestamp) -> Option<Effect> {
        let full = self.kinds.len() >= MOST_KINDS;
        match self.kinds.get_mut(&(gpu.clone(), code)) {
            Some(kind) => {
                kind.unreported = kind.unreported.saturating_add(1);
                None
            }
            None if full => None,
            None => {
                self.kinds.insert((gpu.clone(), code), Kind { since: now, unreported: 0 });
                Some(Effect::XidIgnored { gpu, code, times: 1 })
            }
        }
    }

    /// Reports the XIDs that waited through their period. A kind that did not come again is forgotten.
    pub fn report(&mut self, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.kinds.retain(|(gpu, code), kind| {
            // A clock that went back ends the period too.
            if now >= kind.since && now.saturating_sub(kind.since) < PERIOD {
                return true;
            }
            if kind.unreported == 0 {
                return false;
            }
            effects.push(Effect::XidIgnored { gpu: gpu.clone(), code: *code, times: kind.unreported });
            *kind = Kind { since: now, unreported: 0 };
            true
        });
        effects
    }

    /// The time at which there is something to report.
    pub fn deadline(&self) -> Option<Timestamp> {
        let waiting = self.kinds.values().filter(|kind| kind.unreported > 0);
        waiting.map(|kind| kind.since.saturating_add(PERIOD)).min()
    }
}
