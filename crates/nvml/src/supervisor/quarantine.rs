//! Decides which GPUs the agents must not touch, and when a new agent may see more of a GPU. Pure; moments are
//! arguments.
//!
//! Called by `machine`. A GPU is blamed when an NVML call about it hangs or crashes an agent. After two strikes within
//! an hour the next agents skip the GPU. It counts as quarantined only once an agent that skipped it has seen other
//! GPUs: if agents end all the same, or if there is no other GPU to compare with, the driver is at fault, not a GPU.
//! Trials follow, more and more rarely, until an agent that does not skip the GPU works.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::protocol::{CalledGpu, Place};
use linkwise_core::backoff::Backoff;
use linkwise_core::topology::GpuUuid;

/// The number of ended agents after which a GPU is skipped.
const STRIKES: u32 = 2;
/// The longest time between two strikes that count together.
const WINDOW: Duration = Duration::from_secs(3600);
/// The longest pause before a trial, as a multiple of the first.
const MAX_DELAY: u32 = 60;

/// The GPUs that ended agents, and the trials of those that are skipped.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    backoff: Backoff,
    gpus: BTreeMap<Place, Blamed>,
}

#[derive(Debug)]
struct Blamed {
    /// The UUID, if NVML named it before the GPU ended an agent.
    uuid: Option<GpuUuid>,
    strikes: u32,
    last: Duration,
    /// The reason for the last agent's end that this GPU caused.
    why: String,
    backoff: Backoff,
    skipped: Option<Skipped>,
}

#[derive(Debug)]
struct Skipped {
    try_at: Duration,
    pause: Duration,
    /// Set once an agent has worked without the GPU.
    is_quarantined: bool,
}

/// The conclusions from an agent that has scanned GPUs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// The GPUs that are newly quarantined, with the reasons.
    pub quarantined: Vec<(Place, String)>,
    /// The GPUs that are no longer quarantined.
    pub released: Vec<Place>,
}

impl Quarantine {
    /// Starts without blamed GPUs. A GPU's first trial comes after `first_trial`; pauses double, up to 60 times it.
    pub fn new(first_trial: Duration) -> Self {
        let backoff = Backoff::new(first_trial, first_trial.saturating_mul(MAX_DELAY));
        Self { backoff, gpus: BTreeMap::new() }
    }

    /// Records that a call about a GPU ended an agent.
    pub fn blame(&mut self, gpu: &CalledGpu, why: String, now: Duration) {
        let backoff = self.backoff;
        let fresh = || Blamed { uuid: None, strikes: 0, last: now, why: String::new(), backoff, skipped: None };
        let blamed = self.gpus.entry(gpu.place).or_insert_with(fresh);
        if now.saturating_sub(blamed.last) > WINDOW && blamed.skipped.is_none() {
            *blamed = fresh();
        }
        if gpu.uuid.is_some() {
            blamed.uuid.clone_from(&gpu.uuid);
        }
        blamed.strikes += 1;
        (blamed.last, blamed.why) = (now, why);
        if blamed.strikes >= STRIKES {
            let pause = blamed.backoff.failed();
            let is_quarantined = blamed.skipped.as_ref().is_some_and(|skipped| skipped.is_quarantined);
            blamed.skipped = Some(Skipped { try_at: now + pause, pause, is_quarantined });
        }
    }

    /// The UUID of the GPU at a place, if it is known.
    pub fn uuid(&self, place: Place) -> Option<&GpuUuid> {
        self.gpus.get(&place)?.uuid.as_ref()
    }

    /// The next trial: its moment, and its GPU.
    pub fn next_trial(&self) -> Option<(Duration, Place)> {
        let quarantined = |(place, blamed): (&Place, &Blamed)| {
            blamed.skipped.as_ref().filter(|skipped| skipped.is_quarantined).map(|skipped| (skipped.try_at, *place))
        };
        self.gpus.iter().filter_map(quarantined).min()
    }

    /// Returns the GPUs that an agent which starts now must skip, and the GPU that it tries. A trial that proves
    /// nothing is repeated after the same pause.
    pub fn start(&mut self, now: Duration) -> (Vec<Place>, Option<Place>) {
        let trial = self.next_trial().filter(|(at, _)| *at <= now).map(|(_, place)| place);
        if let Some(Blamed { skipped: Some(skipped), .. }) = trial.and_then(|place| self.gpus.get_mut(&place)) {
            skipped.try_at = now + skipped.pause;
        }
        let skipped = self.gpus.iter().filter(|(_, blamed)| blamed.skipped.is_some()).map(|(place, _)| *place);
        (skipped.filter(|place| Some(*place) != trial).collect(), trial)
    }

    /// Records that an agent which skipped these GPUs saw `others` other GPUs, of `count`. Returns `None` if it
    /// skipped GPUs and saw no other: then no GPU is blamed any more, and the agent is useless. An agent that cannot
    /// count the GPUs proves nothing.
    pub fn agent_scanned(&mut self, skipped: &[Place], others: usize, count: Option<u32>) -> Option<Verdict> {
        let mut verdict = Verdict::default();
        let Some(count) = count else { return Some(verdict) };
        // If NVML counts another number of GPUs, an index names another GPU, which was not skipped.
        let was_skipped = |place: &Place| place.of == count && skipped.contains(place);
        if others == 0 && self.gpus.keys().any(was_skipped) {
            self.gpus.clear();
            return None;
        }
        for (place, blamed) in &mut self.gpus {
            match &mut blamed.skipped {
                Some(skipped) if was_skipped(place) && !skipped.is_quarantined => {
                    skipped.is_quarantined = true;
                    verdict.quarantined.push((*place, blamed.why.clone()));
                }
                Some(skipped) if !was_skipped(place) => {
                    if skipped.is_quarantined {
                        verdict.released.push(*place);
                    }
                    // The next strike within the window is enough.
                    blamed.skipped = None;
                }
                _ => {}
            }
        }
        self.gpus.retain(|place, _| place.of == count);
        Some(verdict)
    }
}

/// Decides when a new agent replaces the running one because it may see more. The library may answer GPU_IS_LOST for a
/// GPU until the process ends, even after a reset of the GPU; a process keeps the count of GPUs with which it started;
/// and events arrive only for GPUs that were registered then. New agents follow more and more rarely while they see no
/// more.
#[derive(Debug, Default)]
pub(super) struct Renewal {
    backoff: Backoff,
    /// The moment of a change of the host that requires a new agent at once, and the reason.
    changed: Option<(Duration, String)>,
    /// The moment of the next new agent for GPUs that the running one does not reach or gets no events of, and the
    /// reason.
    next: Option<(Duration, String)>,
    /// The number of GPUs whose events did not arrive at the agent's last poll; before its first poll the largest
    /// number, so that no first poll counts as worse.
    unheard: u32,
}

impl Renewal {
    /// Starts with every GPU in reach. The first new agent follows after `first`; pauses double, up to 60 times it.
    pub fn new(first: Duration) -> Self {
        let backoff = Backoff::new(first, first.saturating_mul(MAX_DELAY));
        Self { backoff, unheard: u32::MAX, ..Self::default() }
    }

    /// Asks for a new agent at once.
    pub fn at_once(&mut self, why: String, now: Duration) {
        self.changed = Some((now, why));
    }

    /// Records a poll: one of the GPUs out of reach, if there is any, and the number of GPUs whose events do not
    /// arrive. If this number grew while the agent ran, the next agent starts at once.
    pub fn polled(&mut self, lost: Option<String>, unheard: u32, now: Duration) {
        let is_worse = unheard > std::mem::replace(&mut self.unheard, unheard);
        let lost = lost.map(|gpu| format!("GPU {gpu} is out of reach, and a new agent may reach it"));
        let unheard = (unheard > 0).then(|| format!("the events of {unheard} GPU(s) do not arrive"));
        match (lost.or(unheard), self.next.take()) {
            (Some(why), _) if is_worse => self.next = Some((now, why)),
            (Some(why), None) => self.next = Some((now + self.backoff.failed(), why)),
            (Some(why), Some((at, _))) => self.next = Some((at, why)),
            (None, _) => self.backoff.reset(),
        }
    }

    /// The next new agent: its moment, and the reason.
    pub fn next(&self) -> Option<(Duration, String)> {
        self.changed.clone().or_else(|| self.next.clone())
    }

    /// Records that an agent starts now.
    pub fn started(&mut self, now: Duration) {
        (self.changed, self.unheard) = (None, u32::MAX);
        if let Some((at, _)) = &mut self.next {
            *at = now + self.backoff.failed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const START: Duration = Duration::from_secs(1000);

    fn place(index: u32) -> Place {
        Place { index, of: 8 }
    }

    fn gpu(index: u32) -> CalledGpu {
        CalledGpu { place: place(index), uuid: None }
    }

    /// The GPUs that an agent must not touch before any trial.
    fn skipped(quarantine: &mut Quarantine) -> Vec<Place> {
        quarantine.start(Duration::ZERO).0
    }

    fn blame_twice(quarantine: &mut Quarantine, index: u32, now: Duration) -> Vec<Place> {
        quarantine.blame(&gpu(index), "first".into(), now);
        assert!(!skipped(quarantine).contains(&place(index)), "skipped after one strike");
        quarantine.blame(&gpu(index), "second".into(), now);
        skipped(quarantine)
    }

    #[test]
    fn gpu_is_quarantined_after_two_strikes_until_a_trial() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let skip = blame_twice(&mut quarantine, 3, now);
        assert_eq!((skip.as_slice(), quarantine.next_trial()), (&[place(3)][..], None));
        let verdict = quarantine.agent_scanned(&skip, 7, Some(8)).unwrap();
        assert_eq!(verdict, Verdict { quarantined: vec![(place(3), "second".into())], released: vec![] });
        assert_eq!(quarantine.next_trial(), Some((now + MINUTE, place(3))));
        // The quarantine is reported once.
        assert_eq!(quarantine.agent_scanned(&skip, 7, Some(8)).unwrap().quarantined, []);
        // The GPU ends a trial: the pause doubles, up to an hour.
        let mut pauses = Vec::new();
        for _ in 0..7 {
            let at = quarantine.next_trial().unwrap().0;
            assert_eq!(quarantine.start(at), (vec![], Some(place(3))));
            quarantine.blame(&gpu(3), "again".into(), now);
            pauses.push(quarantine.next_trial().unwrap().0.saturating_sub(now).as_secs() / 60);
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60]);
        // A trial that proves nothing is repeated after the same pause; an agent that cannot count GPUs proves nothing.
        let later = now + MINUTE * 90;
        assert_eq!(quarantine.start(later).1, Some(place(3)));
        assert_eq!(quarantine.next_trial(), Some((later + MINUTE * 60, place(3))));
        assert_eq!(
            (quarantine.agent_scanned(&[], 0, None), skipped(&mut quarantine)),
            (Some(Verdict::default()), vec![place(3)])
        );
        // The GPU ends an agent much later: it is still skipped.
        quarantine.blame(&gpu(3), "at last".into(), later + WINDOW * 2);
        assert_eq!(skipped(&mut quarantine), [place(3)]);
        // The GPU passes a trial.
        let verdict = quarantine.agent_scanned(&[], 8, Some(8)).unwrap();
        assert_eq!((verdict.released, skipped(&mut quarantine)), (vec![place(3)], vec![]));
        // After that, one more strike is enough.
        quarantine.blame(&gpu(3), "once more".into(), later + WINDOW * 3);
        assert_eq!(skipped(&mut quarantine), [place(3)]);
    }

    #[test]
    fn gpu_keeps_the_uuid_that_nvml_gave_once() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let named = CalledGpu { uuid: Some("GPU-a".parse().unwrap()), ..gpu(3) };
        quarantine.blame(&gpu(3), String::new(), now);
        assert_eq!(quarantine.uuid(place(3)), None);
        quarantine.blame(&named, String::new(), now);
        quarantine.blame(&gpu(3), String::new(), now);
        assert_eq!((quarantine.uuid(place(3)), quarantine.uuid(place(4))), (named.uuid.as_ref(), None));
    }

    #[test]
    fn strikes_further_apart_than_the_window_are_forgotten() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        quarantine.blame(&gpu(1), String::new(), now);
        quarantine.blame(&gpu(1), String::new(), now + WINDOW + MINUTE);
        assert_eq!(skipped(&mut quarantine), []);
        quarantine.blame(&gpu(1), String::new(), now + WINDOW + MINUTE * 2);
        assert_eq!(skipped(&mut quarantine), [place(1)]);
    }

    #[test]
    fn no_gpu_is_blamed_if_an_agent_sees_no_other() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let skip = blame_twice(&mut quarantine, 0, now);
        let both = blame_twice(&mut quarantine, 1, now);
        assert_eq!((skip.len(), both.len()), (1, 2));
        assert_eq!(quarantine.agent_scanned(&both, 0, Some(8)), None);
        assert_eq!((skipped(&mut quarantine), quarantine.next_trial()), (vec![], None));
    }

    #[test]
    fn agents_for_unheard_gpus_start_ever_more_rarely() {
        let (mut renewal, mut now) = (Renewal::new(MINUTE), START);
        let next = |renewal: &Renewal, now| renewal.next().map(|(at, _)| at.saturating_sub(now).as_secs() / 60);
        // A GPU whose registration failed at the start.
        renewal.polled(None, 1, now);
        assert_eq!(next(&renewal, now), Some(1));
        // Another GPU's events stop while the agent runs.
        renewal.polled(None, 2, now);
        assert_eq!(next(&renewal, now), Some(0));
        for pause in [2, 4, 8, 16, 32, 60, 60] {
            renewal.started(now);
            renewal.polled(None, 2, now);
            assert_eq!(next(&renewal, now), Some(pause));
            now += MINUTE * 60;
        }
        // The next agent does not start sooner because a GPU is lost too, or because events arrive again.
        renewal.started(now);
        renewal.polled(Some("GPU-a".to_owned()), 1, now);
        renewal.polled(Some("GPU-a".to_owned()), 1, now);
        assert_eq!(next(&renewal, now), Some(60));
        renewal.polled(None, 0, now);
        assert_eq!(next(&renewal, now), None);
        renewal.polled(Some("GPU-a".to_owned()), 0, now);
        assert_eq!(next(&renewal, now), Some(1));
    }

    #[test]
    fn strikes_end_with_another_number_of_gpus() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let skip = blame_twice(&mut quarantine, 3, now);
        quarantine.agent_scanned(&skip, 7, Some(8)).unwrap();
        let verdict = quarantine.agent_scanned(&skip, 7, Some(7)).unwrap();
        assert_eq!((verdict.released, skipped(&mut quarantine)), (vec![place(3)], vec![]));
        // The strikes of an index do not count against the next GPU with that index.
        quarantine.agent_scanned(&[], 8, Some(8)).unwrap();
        quarantine.blame(&gpu(3), String::new(), now);
        assert_eq!(skipped(&mut quarantine), []);
    }
}
