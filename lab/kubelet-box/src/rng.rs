//! Random orders from a seed, because a kubelet sends lists in the order of a Go map, but two runs of a demo must be
//! the same. Used by `admission`, `selection`, `life` and `load` only.

/// The generator xorshift64*. It is good enough to shuffle, but for nothing else.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    /// Starts from any seed, and avoids the state zero, which the generator could not leave.
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(0x9e37_79b9_7f4a_7c15).max(1))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % (bound.max(1) as u64)).unwrap_or(0)
    }

    /// Returns the items in random order (Fisher and Yates).
    pub(super) fn shuffled<T: Clone>(&mut self, items: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut items: Vec<T> = items.into_iter().collect();
        for last in (1..items.len()).rev() {
            let other = self.below(last + 1);
            items.swap(last, other);
        }
        items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_depends_only_on_the_seed() {
        let order = |seed| Rng::new(seed).shuffled(0..8);
        assert_eq!(order(7), order(7));
        assert_ne!(order(7), order(8));
        assert_ne!(order(7), (0..8).collect::<Vec<_>>());
        let mut sorted = order(7);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..8).collect::<Vec<_>>());
    }
}
