//! Pseudo-random numbers. The same seed gives the same numbers on every machine.

use linkwise_core::allocation::GpuSet;

/// Pseudo-random numbers from a seed (`SplitMix64`, Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub struct Draws(u64);

impl Draws {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below `bound`, or 0 for a bound of 0. The chances of two numbers differ by at most 2^-64.
    pub fn below(&mut self, bound: u64) -> u64 {
        u64::try_from((u128::from(self.next()) * u128::from(bound)) >> 64).unwrap_or(0)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn subset(&mut self, free: GpuSet, size: usize) -> GpuSet {
        let mut keyed: Vec<(u64, usize)> = free.places().map(|place| (self.next(), place)).collect();
        keyed.sort_unstable();
        keyed.into_iter().take(size).map(|(_, place)| place).collect()
    }
}
