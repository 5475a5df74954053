//! [`Reported`]: reports a fact when it begins, and not again while it lasts.
//!
//! Used where a log line would otherwise repeat at every poll. A bound limits the memory, because keys may come from
//! outside.

use alloc::collections::BTreeMap;

/// The facts that were reported and still last, each with its number of repetitions.
#[derive(Clone, Debug)]
pub struct Reported<K> {
    facts: BTreeMap<K, u64>,
    max_facts: usize,
}

impl<K: Ord> Reported<K> {
    /// The bound of [`Self::new`].
    const MAX_FACTS: usize = 1024;

    /// Creates an empty memory of up to 1024 facts.
    pub const fn new() -> Self {
        Self::with_bound(Self::MAX_FACTS)
    }

    /// Creates an empty memory of up to `max_facts` facts. A fact that begins while as many last is not reported.
    pub const fn with_bound(max_facts: usize) -> Self {
        Self { facts: BTreeMap::new(), max_facts }
    }

    /// Notes a fact. Returns true if it begins now, and has to be reported.
    pub fn begins(&mut self, key: K) -> bool {
        if let Some(repeated) = self.facts.get_mut(&key) {
            *repeated = repeated.saturating_add(1);
            return false;
        }
        self.facts.len() < self.max_facts && self.facts.insert(key, 0).is_none()
    }

    /// Forgets the facts for which `lasts` returns false; such a fact is reported when it begins again. Returns the
    /// number of unreported repetitions of the forgotten facts.
    pub fn retain(&mut self, mut lasts: impl FnMut(&K) -> bool) -> u64 {
        let mut unreported: u64 = 0;
        self.facts.retain(|key, repeated| {
            let stays = lasts(key);
            if !stays {
                unreported = unreported.saturating_add(*repeated);
            }
            stays
        });
        unreported
    }

    /// Forgets every fact. Returns the number of unreported repetitions.
    pub fn clear(&mut self) -> u64 {
        self.retain(|_| false)
    }

    /// Notes that exactly these facts are true now. Returns those that begin now, in order, and forgets the others.
    pub fn replace(&mut self, facts: impl IntoIterator<Item = K>) -> alloc::vec::Vec<K>
    where
        K: Clone,
    {
        let facts: alloc::collections::BTreeSet<K> = facts.into_iter().collect();
        self.retain(|key| facts.contains(key));
        facts.into_iter().filter(|key| self.begins(key.clone())).collect()
    }
}

impl<K: Ord> Default for Reported<K> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fact_begins_once_until_it_is_over() {
        let mut once = Reported::with_bound(2);
        assert!(once.begins("a") && !once.begins("a") && !once.begins("a"));
        assert!(once.begins("b"));
        assert!(!once.begins("c"), "beyond the bound");
        assert_eq!(once.retain(|key| *key != "a"), 2);
        assert!(once.begins("a") && !once.begins("b"));
        assert_eq!(once.clear(), 1);
        assert!(once.begins("b"));
    }

    #[test]
    fn replaced_facts_report_what_is_new() {
        let mut once = Reported::new();
        assert_eq!(once.replace(["b", "a"]), ["a", "b"]);
        assert_eq!(once.replace(["b", "c"]), ["c"]);
        assert_eq!(once.replace(["a"]), ["a"]);
    }
}
