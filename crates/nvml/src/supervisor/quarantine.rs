//! Decides which GPUs the agents must not touch. Pure; moments are arguments.
//!
//! Called by `machine`. A GPU is blamed when an NVML call about it hangs or crashes an agent. After two strikes within
//! an hour the next agents skip the GPU. It counts as quarantined only once an agent that skipped it has seen other
//! GPUs: if agents end all the same, or if there is no other GPU to compare with, the driver is at fault and no GPU is.
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
const LONGEST: u32 = 60;

#[derive(Debug)]
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
    /// The latest end of an agent by this GPU.
    why: String,
    backoff: Backoff,
    skipped: Option<Skipped>,
}

#[derive(Debug)]
struct Skipped {
    try_at: Duration,
    pause: Duration,
    /// Set once an agent has worked without the GPU.
    quarantined: bool,
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
    /// Starts without blamed GPUs. The first trial of a GPU comes after `first_trial`; each next pause is twice as
    /// long.
    pub fn new(first_trial: Duration) -> Self {
        let backoff = Backoff::new(first_trial, first_trial.saturating_mul(LONGEST));
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
            let quarantined = blamed.skipped.as_ref().is_some_and(|skipped| skipped.quarantined);
            blamed.skipped = Some(Skipped { try_at: now + pause, pause, quarantined });
        }
    }

    /// The GPUs that an agent must not touch, without the one that it is to try.
    pub fn skip(&self, trial: Option<Place>) -> Vec<Place> {
        let skipped = self.gpus.iter().filter(|(_, blamed)| blamed.skipped.is_some());
        skipped.map(|(place, _)| *place).filter(|place| Some(*place) != trial).collect()
    }

    /// The UUID of the GPU at a place, if NVML named it before the GPU ended an agent.
    pub fn name(&self, place: Place) -> Option<&GpuUuid> {
        self.gpus.get(&place)?.uuid.as_ref()
    }

    /// The next trial: its moment, and its GPU.
    pub fn next_trial(&self) -> Option<(Duration, Place)> {
        let quarantined = |(place, blamed): (&Place, &Blamed)| {
            blamed.skipped.as_ref().filter(|skipped| skipped.quarantined).map(|skipped| (skipped.try_at, *place))
        };
        self.gpus.iter().filter_map(quarantined).min()
    }

    /// Puts a trial off that failed, possibly by no fault of the GPU: the next one follows after the same pause, which
    /// is returned.
    pub fn put_off(&mut self, place: Place, now: Duration) -> Duration {
        let Some(Blamed { skipped: Some(skipped), .. }) = self.gpus.get_mut(&place) else { return Duration::ZERO };
        skipped.try_at = now + skipped.pause;
        skipped.pause
    }

    /// Records that an agent which skipped these GPUs saw `others`, of `count` GPUs. Returns `None` if it saw no GPU:
    /// then no GPU is blamed any more, and the agent is useless. An agent that cannot count the GPUs proves nothing.
    pub fn agent_lives(&mut self, skipped: &[Place], others: usize, count: Option<u32>) -> Option<Verdict> {
        let mut verdict = Verdict::default();
        let Some(count) = count else { return Some(verdict) };
        // An index among another number of GPUs does not name one of these GPUs, and was not skipped.
        let was_skipped = |place: &Place| place.of == count && skipped.contains(place);
        if others == 0 && self.gpus.keys().any(was_skipped) {
            self.gpus.clear();
            return None;
        }
        for (place, blamed) in &mut self.gpus {
            match &mut blamed.skipped {
                Some(skipped) if was_skipped(place) && !skipped.quarantined => {
                    skipped.quarantined = true;
                    verdict.quarantined.push((*place, blamed.why.clone()));
                }
                Some(skipped) if !was_skipped(place) => {
                    if skipped.quarantined {
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

    fn out(quarantine: &mut Quarantine, index: u32, now: Duration) -> Vec<Place> {
        quarantine.blame(&gpu(index), "first".into(), now);
        assert!(!quarantine.skip(None).contains(&place(index)), "once is an accident");
        quarantine.blame(&gpu(index), "second".into(), now);
        quarantine.skip(None)
    }

    #[test]
    fn gpu_is_quarantined_after_two_strikes_until_a_trial() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let skip = out(&mut quarantine, 3, now);
        assert_eq!((skip.as_slice(), quarantine.next_trial()), (&[place(3)][..], None));
        let verdict = quarantine.agent_lives(&skip, 7, Some(8)).unwrap();
        assert_eq!(verdict, Verdict { quarantined: vec![(place(3), "second".into())], released: vec![] });
        assert_eq!(quarantine.next_trial(), Some((now + MINUTE, place(3))));
        // The quarantine is reported once.
        assert_eq!(quarantine.agent_lives(&skip, 7, Some(8)).unwrap().quarantined, []);
        // The GPU ends a trial: the pause doubles, up to an hour.
        let mut pauses = Vec::new();
        for _ in 0..7 {
            assert_eq!(quarantine.skip(Some(place(3))), []);
            quarantine.blame(&gpu(3), "again".into(), now);
            pauses.push(quarantine.next_trial().unwrap().0.saturating_sub(now).as_secs() / 60);
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60]);
        // A trial that proves nothing is repeated after the same pause, and an agent that sees no GPU proves nothing.
        let later = now + MINUTE * 90;
        assert_eq!(quarantine.put_off(place(3), later), MINUTE * 60);
        assert_eq!(quarantine.next_trial(), Some((later + MINUTE * 60, place(3))));
        assert_eq!(
            (quarantine.agent_lives(&[], 0, None), quarantine.skip(None)),
            (Some(Verdict::default()), vec![place(3)])
        );
        // However late it ends an agent again, the GPU is still skipped.
        quarantine.blame(&gpu(3), "at last".into(), later + WINDOW * 2);
        assert_eq!(quarantine.skip(None), [place(3)]);
        // The GPU passes a trial.
        let verdict = quarantine.agent_lives(&[], 8, Some(8)).unwrap();
        assert_eq!((verdict.released, quarantine.skip(None)), (vec![place(3)], vec![]));
        // After that, one more strike is enough.
        quarantine.blame(&gpu(3), "once more".into(), later + WINDOW * 3);
        assert_eq!(quarantine.skip(None), [place(3)]);
    }

    #[test]
    fn gpu_keeps_the_name_that_nvml_gave_once() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let named = CalledGpu { uuid: Some("GPU-a".parse().unwrap()), ..gpu(3) };
        quarantine.blame(&gpu(3), String::new(), now);
        assert_eq!(quarantine.name(place(3)), None);
        quarantine.blame(&named, String::new(), now);
        quarantine.blame(&gpu(3), String::new(), now);
        assert_eq!((quarantine.name(place(3)), quarantine.name(place(4))), (named.uuid.as_ref(), None));
    }

    #[test]
    fn strikes_further_apart_than_the_window_are_forgotten() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        quarantine.blame(&gpu(1), String::new(), now);
        quarantine.blame(&gpu(1), String::new(), now + WINDOW + MINUTE);
        assert_eq!(quarantine.skip(None), []);
        quarantine.blame(&gpu(1), String::new(), now + WINDOW + MINUTE * 2);
        assert_eq!(quarantine.skip(None), [place(1)]);
    }

    #[test]
    fn no_gpu_is_blamed_where_no_agent_lives() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let skip = out(&mut quarantine, 0, now);
        let both = out(&mut quarantine, 1, now);
        assert_eq!((skip.len(), both.len()), (1, 2));
        assert_eq!(quarantine.agent_lives(&both, 0, Some(8)), None);
        assert_eq!((quarantine.skip(None), quarantine.next_trial()), (vec![], None));
    }

    #[test]
    fn strikes_end_with_another_number_of_gpus() {
        let (mut quarantine, now) = (Quarantine::new(MINUTE), START);
        let skip = out(&mut quarantine, 3, now);
        quarantine.agent_lives(&skip, 7, Some(8)).unwrap();
        let verdict = quarantine.agent_lives(&skip, 7, Some(7)).unwrap();
        assert_eq!((verdict.released, quarantine.skip(None)), (vec![place(3)], vec![]));
        // The strikes of an index do not count against the next GPU with that index.
        quarantine.agent_lives(&[], 8, Some(8)).unwrap();
        quarantine.blame(&gpu(3), String::new(), now);
        assert_eq!(quarantine.skip(None), []);
    }
}
