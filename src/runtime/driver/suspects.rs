//! Which GPU ends the children that look at it: counted, left out, tried again. A pure state machine.
//!
//! Called by `driver`. A GPU is laid to when a call about it hung or crashed; twice within an hour, and the next child does not
//! touch it. It counts as left out only once a child without it has lived and seen other GPUs: where children die all the
//! same, or no other GPU is there to compare with, it is the driver's trouble and no GPU's. Moments are arguments.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::nvml::protocol::Place;

/// How many children it takes.
const STRIKES: u32 = 2;
/// Strikes further apart than this have nothing to do with each other.
const WINDOW: Duration = Duration::from_secs(3600);
/// The longest pause before a trial, as a multiple of the first.
const LONGEST: u32 = 60;

/// What is held against GPUs.
#[derive(Debug)]
pub struct Suspects {
    first_pause: Duration,
    known: BTreeMap<Place, Suspect>,
}

#[derive(Debug)]
struct Suspect {
    strikes: u32,
    last: Instant,
    /// What happened last.
    why: String,
    /// Before the next trial; zero for one that was never left out.
    pause: Duration,
    out: Option<Out>,
}

#[derive(Debug)]
struct Out {
    try_at: Instant,
    /// Whether a child has lived without it, so that others know of it.
    told: bool,
}

/// What a child that lives shows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// These are left out from now on, and why.
    pub left_out: Vec<(Place, String)>,
    /// These are no longer.
    pub taken_back_in: Vec<Place>,
}

impl Suspects {
    /// Nobody is suspected; a GPU that is left out is tried again after `first_pause`, then after twice that.
    pub fn new(first_pause: Duration) -> Self {
        Self { first_pause, known: BTreeMap::new() }
    }

    /// A call about a GPU ended a child.
    pub fn blame(&mut self, place: Place, why: String, now: Instant) {
        let fresh = || Suspect { strikes: 0, last: now, why: String::new(), pause: Duration::ZERO, out: None };
        let suspect = self.known.entry(place).or_insert_with(fresh);
        if now.saturating_duration_since(suspect.last) > WINDOW && suspect.out.is_none() {
            *suspect = fresh();
        }
        suspect.strikes += 1;
        (suspect.last, suspect.why) = (now, why);
        if suspect.strikes >= STRIKES {
            let longest = self.first_pause * LONGEST;
            suspect.pause = (suspect.pause * 2).clamp(self.first_pause, longest);
            let told = suspect.out.as_ref().is_some_and(|out| out.told);
            suspect.out = Some(Out { try_at: now + suspect.pause, told });
        }
    }

    /// The GPUs that a child is not to touch, but for the one it is to try.
    pub fn skip(&self, trial: Option<Place>) -> Vec<Place> {
        let out = self.known.iter().filter(|(_, suspect)| suspect.out.is_some());
        out.map(|(place, _)| *place).filter(|place| Some(*place) != trial).collect()
    }

    /// The GPU that is tried next, and when.
    pub fn next_trial(&self) -> Option<(Instant, Place)> {
        let told = |(place, suspect): (&Place, &Suspect)| {
            suspect.out.as_ref().filter(|out| out.told).map(|out| (out.try_at, *place))
        };
        self.known.iter().filter_map(told).min()
    }

    /// A trial came to nothing, maybe by nobody's doing: the next one is after the same pause, which is given.
    pub fn put_off(&mut self, place: Place, now: Instant) -> Duration {
        let Some(Suspect { pause, out: Some(out), .. }) = self.known.get_mut(&place) else { return Duration::ZERO };
        out.try_at = now + *pause;
        *pause
    }

    /// A child lives that skipped these and saw `others`, of `count` GPUs. `None` where it saw no GPU besides: then nobody is
    /// suspected any more, and the child is no good. One that cannot count the GPUs sees nothing, and is no witness.
    pub fn lives(&mut self, skipped: &[Place], others: usize, count: Option<u32>) -> Option<Verdict> {
        let mut verdict = Verdict::default();
        let Some(count) = count else { return Some(verdict) };
        // An index of another number of GPUs names nobody, and was not skipped.
        let skipped = |place: &Place| place.of == count && skipped.contains(place);
        if others == 0 && self.known.keys().any(skipped) {
            self.known.clear();
            return None;
        }
        for (place, suspect) in &mut self.known {
            match &mut suspect.out {
                Some(out) if skipped(place) && !out.told => {
                    out.told = true;
                    verdict.left_out.push((*place, suspect.why.clone()));
                }
                Some(out) if !skipped(place) => {
                    if out.told {
                        verdict.taken_back_in.push(*place);
                    }
                    // Its next strike within the window is enough.
                    suspect.out = None;
                }
                _ => {}
            }
        }
        self.known.retain(|place, _| place.of == count);
        Some(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn place(index: u32) -> Place {
        Place { index, of: 8 }
    }

    fn out(suspects: &mut Suspects, index: u32, now: Instant) -> Vec<Place> {
        suspects.blame(place(index), "first".into(), now);
        assert!(!suspects.skip(None).contains(&place(index)), "once is an accident");
        suspects.blame(place(index), "second".into(), now);
        suspects.skip(None)
    }

    #[test]
    fn two_strikes_and_a_child_that_lives_without_it_leave_a_gpu_out() {
        let (mut suspects, now) = (Suspects::new(MINUTE), Instant::now());
        let skip = out(&mut suspects, 3, now);
        assert_eq!((skip.as_slice(), suspects.next_trial()), (&[place(3)][..], None));
        let verdict = suspects.lives(&skip, 7, Some(8)).unwrap();
        assert_eq!(verdict, Verdict { left_out: vec![(place(3), "second".into())], taken_back_in: vec![] });
        assert_eq!(suspects.next_trial(), Some((now + MINUTE, place(3))));
        // Told once.
        assert_eq!(suspects.lives(&skip, 7, Some(8)).unwrap().left_out, []);
        // A trial that it ends: the pause doubles, up to an hour.
        let mut pauses = Vec::new();
        for _ in 0..7 {
            assert_eq!(suspects.skip(Some(place(3))), []);
            suspects.blame(place(3), "again".into(), now);
            pauses.push((suspects.next_trial().unwrap().0 - now).as_secs() / 60);
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60]);
        // One that says nothing of it comes after the same pause, and one that sees no GPU is no witness.
        let later = now + MINUTE * 90;
        assert_eq!(suspects.put_off(place(3), later), MINUTE * 60);
        assert_eq!(suspects.next_trial(), Some((later + MINUTE * 60, place(3))));
        assert_eq!((suspects.lives(&[], 0, None), suspects.skip(None)), (Some(Verdict::default()), vec![place(3)]));
        // However late it ends a child again, it stays left out.
        suspects.blame(place(3), "at last".into(), later + WINDOW * 2);
        assert_eq!(suspects.skip(None), [place(3)]);
        // A trial that it survives.
        let verdict = suspects.lives(&[], 8, Some(8)).unwrap();
        assert_eq!((verdict.taken_back_in, suspects.skip(None)), (vec![place(3)], vec![]));
        // Then once more is enough.
        suspects.blame(place(3), "once more".into(), later + WINDOW * 3);
        assert_eq!(suspects.skip(None), [place(3)]);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let (mut suspects, now) = (Suspects::new(MINUTE), Instant::now());
        suspects.blame(place(1), String::new(), now);
        suspects.blame(place(1), String::new(), now + WINDOW + MINUTE);
        assert_eq!(suspects.skip(None), []);
        suspects.blame(place(1), String::new(), now + WINDOW + MINUTE * 2);
        assert_eq!(suspects.skip(None), [place(1)]);
    }

    #[test]
    fn where_nothing_lives_no_gpu_is_to_blame() {
        let (mut suspects, now) = (Suspects::new(MINUTE), Instant::now());
        let skip = out(&mut suspects, 0, now);
        let both = out(&mut suspects, 1, now);
        assert_eq!((skip.len(), both.len()), (1, 2));
        assert_eq!(suspects.lives(&both, 0, Some(8)), None);
        assert_eq!((suspects.skip(None), suspects.next_trial()), (vec![], None));
    }

    #[test]
    fn another_number_of_gpus_makes_an_index_mean_nothing() {
        let (mut suspects, now) = (Suspects::new(MINUTE), Instant::now());
        let skip = out(&mut suspects, 3, now);
        suspects.lives(&skip, 7, Some(8)).unwrap();
        let verdict = suspects.lives(&skip, 7, Some(7)).unwrap();
        assert_eq!((verdict.taken_back_in, suspects.skip(None)), (vec![place(3)], vec![]));
        // What was held against the index is not held against whoever has it next.
        suspects.lives(&[], 8, Some(8)).unwrap();
        suspects.blame(place(3), String::new(), now);
        assert_eq!(suspects.skip(None), []);
    }
}
