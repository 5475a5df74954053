//! Keeps a storm of XIDs that change nothing out of the log: the first of a kind is told at once, the rest of its period
//! as one number at the period's end.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use core::time::Duration;

use super::device::Timestamp;
use super::event::Effect;
use crate::topology::GpuUuid;

/// How long one telling stands for all of its kind.
const PERIOD: Duration = Duration::from_secs(60);
/// Kinds that are followed at once; more are counted by the metrics only.
const MOST_KINDS: usize = 1024;

/// What was told, and what waits to be.
#[derive(Clone, Debug, Default)]
pub(super) struct Quiet {
    kinds: BTreeMap<(GpuUuid, u64), Kind>,
}

#[derive(Clone, Debug)]
struct Kind {
    since: Timestamp,
    untold: u64,
}

impl Quiet {
    /// An XID that changes nothing came.
    pub fn heard(&mut self, gpu: GpuUuid, code: u64, now: Timestamp) -> Option<Effect> {
        let full = self.kinds.len() >= MOST_KINDS;
        match self.kinds.get_mut(&(gpu.clone(), code)) {
            Some(kind) => {
                kind.untold = kind.untold.saturating_add(1);
                None
            }
            None if full => None,
            None => {
                self.kinds.insert((gpu.clone(), code), Kind { since: now, untold: 0 });
                Some(Effect::XidIgnored { gpu, code, times: 1 })
            }
        }
    }

    /// Tells what waited through its period; a kind that was silent is forgotten.
    pub fn tell(&mut self, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.kinds.retain(|(gpu, code), kind| {
            // A clock that went back ends the period: nothing waits for ever.
            if now >= kind.since && now.saturating_sub(kind.since) < PERIOD {
                return true;
            }
            if kind.untold == 0 {
                return false;
            }
            effects.push(Effect::XidIgnored { gpu: gpu.clone(), code: *code, times: kind.untold });
            *kind = Kind { since: now, untold: 0 };
            true
        });
        effects
    }

    /// When there is something to tell.
    pub fn deadline(&self) -> Option<Timestamp> {
        let waiting = self.kinds.values().filter(|kind| kind.untold > 0);
        waiting.map(|kind| kind.since.saturating_add(PERIOD)).min()
    }
}
