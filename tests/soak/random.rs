//! Random choices from a seed, by SplitMix64 (Steele, Lea, Flood 2014).

use std::ops::Range;
use std::time::Duration;

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn within(&mut self, range: Range<u32>) -> u32 {
        let width = u64::from(range.end - range.start);
        range.start + u32::try_from(self.next() % width).unwrap()
    }

    pub fn one_in(&mut self, times: u32) -> bool {
        self.within(0..times) == 0
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.within(0..u32::try_from(choices.len()).unwrap())).unwrap()]
    }

    pub fn milliseconds(&mut self, range: Range<u32>) -> Duration {
        Duration::from_millis(self.within(range).into())
    }
}
