//! Jobs generated from a seed, used without a trace.

use crate::simulate::{Draws, Job};

/// Sizes in GPUs, each with the number of jobs in 10 that have it.
const SIZES: [(usize, u64); 4] = [(1, 5), (2, 2), (4, 2), (8, 1)];

/// Durations in seconds, equally frequent.
const DURATIONS: [u64; 4] = [300, 900, 3600, 14_400];

/// Generates `count` jobs that keep `load` per mille of `gpus` busy on average, in the order of their arrivals. Every
/// second has the same chance of an arrival, as in a Poisson process. No job takes more than `most` GPUs.
pub(super) fn generate(count: u32, gpus: u64, most: usize, load: u32, draws: &mut Draws) -> Vec<Job> {
    let sizes: Vec<(usize, u64)> = SIZES.into_iter().filter(|(size, _)| *size <= most).collect();
    let weights: u64 = sizes.iter().map(|(_, weight)| weight).sum();
    let work: u128 = sizes.iter().map(|(size, weight)| *size as u128 * u128::from(*weight)).sum();
    let seconds = u128::from(DURATIONS.iter().sum::<u64>());
    let busy = u128::from(weights) * DURATIONS.len() as u128 * u128::from(gpus) * u128::from(load);
    let span = (u128::from(count) * work * seconds * 1000).checked_div(busy).unwrap_or(0);
    let span = u64::try_from(span).unwrap_or(u64::MAX);
    let mut jobs: Vec<Job> = (0..count)
        .map(|_| {
            let mut drawn = draws.below(weights);
            let size = sizes.iter().find(|(_, weight)| {
                let found = drawn < *weight;
                drawn = drawn.saturating_sub(*weight);
                found
            });
            let duration = usize::try_from(draws.below(DURATIONS.len() as u64)).unwrap_or(0);
            Job {
                size: size.map_or(1, |(size, _)| *size),
                pods: 1,
                duration: DURATIONS.get(duration).copied().unwrap_or(0),
                arrival: draws.below(span.saturating_add(1)),
            }
        })
        .collect();
    jobs.sort_by_key(|job| job.arrival);
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_jobs_have_requested_load_and_sizes() {
        let jobs = generate(20_000, 800, 8, 500, &mut Draws::new(3));
        for (size, percent) in [(1, 50), (2, 20), (4, 20), (8, 10)] {
            let found = jobs.iter().filter(|job| job.size == size).count() * 100 / jobs.len();
            assert!((percent - 2..=percent + 2).contains(&found), "{found} % of {size}");
        }
        let work: u64 = jobs.iter().map(|job| job.size as u64 * job.duration).sum();
        let span = jobs.last().unwrap().arrival;
        let load = work * 1000 / (span * 800);
        assert!((480..=520).contains(&load), "{load}");
        assert!(jobs.is_sorted_by_key(|job| job.arrival));
        assert_eq!(jobs, generate(20_000, 800, 8, 500, &mut Draws::new(3)));
        assert_ne!(jobs, generate(20_000, 800, 8, 500, &mut Draws::new(4)));
        assert!(generate(500, 8, 4, 500, &mut Draws::new(1)).iter().all(|job| job.size <= 4));
    }
}
