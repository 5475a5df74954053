//! The choice among whole GPUs, compared with a brute force of its definition.

#![allow(clippy::cast_possible_truncation, reason = "a few GPUs are counted")]

use crate::oracle;
use crate::random_node;

use std::collections::BTreeSet;
use std::sync::Arc;

use linkwise_core::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, ChosenGpu, DeviceId, FallbackReason,
    PreferredAllocation, preferred_allocation,
};
use linkwise_core::topology::{NodeObservation, NodeTopology};
use linkwise_host::machines;
use oracle::{Oracle, Set, places, subsets};
use proptest::collection::vec;
use proptest::prelude::*;

pub fn tables(observed: &NodeObservation) -> AllocationTables {
    AllocationTables::new(Arc::new(NodeTopology::assemble(observed).0))
}

pub fn built_in(name: &str) -> AllocationTables {
    tables(&machines::load(name).unwrap().observed)
}

fn ids(tables: &AllocationTables, set: Set) -> Vec<DeviceId> {
    places(set).map(|gpu| DeviceId::from(&tables.topology().gpus()[gpu].uuid)).collect()
}

fn ask(
    tables: &AllocationTables,
    available: Vec<DeviceId>,
    must_include: Vec<DeviceId>,
    size: usize,
) -> (PreferredAllocation, AllocationReport) {
    let request = AllocationRequest { available, must_include, size };
    preferred_allocation(tables, &request, AllocationPolicy::BestEffort)
}

/// Asks the implementation and the brute force the same question; the whole answers must be equal.
fn compare(tables: &AllocationTables, oracle: &Oracle<'_>, available: Set, must_include: Set, size: u32) {
    let question = format!("{size} of {available:b} with {must_include:b}");
    let (answer, report) = ask(tables, ids(tables, available), ids(tables, must_include), size as usize);
    let chosen = |gpus: &[ChosenGpu]| {
        gpus.iter().map(|gpu| tables.topology().position(&gpu.uuid).unwrap()).fold(0, |set: Set, gpu| set | 1 << gpu)
    };
    assert_eq!(report.size, size as usize, "{question}");
    assert_eq!(report.candidates, (available | must_include).count_ones() as usize, "{question}");
    let Some(expected) = oracle.choose(available, must_include, size) else {
        assert_eq!(report.fallback, Some(FallbackReason::Size), "{question}");
        assert_eq!((report.values, report.runner_up), (None, None), "{question}");
        assert_eq!(answer.devices, sorted(tables, available, must_include, size), "{question}");
        return;
    };
    if size == 0 {
        // A request for no GPU gets no GPU; the report may call that a choice or a fallback.
        assert!(answer.devices.is_empty(), "{question}");
        return;
    }
    assert_eq!(answer.devices, ids(tables, expected.chosen), "{question}: {report}, expected {expected:?}");
    assert_eq!(report.values, Some(expected.values), "{question}");
    let runner_up = report.runner_up.map(|second| (chosen(&second.devices), second.values, second.lost_at));
    assert_eq!(runner_up, expected.runner_up, "{question}");
    assert_eq!(chosen(&report.devices), expected.chosen, "{question}");
    assert_eq!((report.compared, report.exact, report.fallback), (expected.compared, true, None), "{question}");
}

/// The answer without a choice: the ids that must be included, then the available ones, each sorted.
fn sorted(tables: &AllocationTables, available: Set, must_include: Set, size: u32) -> Vec<DeviceId> {
    let [mut first, mut then] = [must_include, available & !must_include].map(|set| ids(tables, set));
    first.sort();
    then.sort();
    first.into_iter().chain(then).take(size as usize).collect()
}

/// Compares the answers to requests of each size for each set of available GPUs, without `must_include`.
fn compare_all(tables: &AllocationTables) {
    let oracle = Oracle::new(tables.topology());
    let count = tables.topology().gpus().len() as u32;
    for available in subsets((1 << count) - 1) {
        for size in 0..=available.count_ones() {
            compare(tables, &oracle, available, 0, size);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Compares the set, its values, the runner-up and the number of compared sets, for any request to any machine.
    #[test]
    fn random_machines_match_brute_force(
        observed in prop_oneof![4 => random_node::node(8).boxed(), 1 => random_node::odd_node(8).boxed()],
        requests in vec((any::<u8>(), any::<u8>(), any::<u8>(), 0..9_u32), 1..24),
    ) {
        let tables = tables(&observed);
        let oracle = Oracle::new(tables.topology());
        let machine = (1 << tables.topology().gpus().len()) - 1;
        for (available, must, also, size) in requests {
            // Only odd sizes have GPUs that must be included. Some of these are not available.
            let must = Set::from(must & also) & machine & if size % 2 == 0 { 0 } else { 0x5a };
            compare(&tables, &oracle, Set::from(available) & machine, must, size);
            compare(&tables, &oracle, Set::from(available | also) & machine, 0, size);
        }
    }

    /// Makes requests of each size for each set of available GPUs, because random requests may miss some.
    #[test]
    fn small_machines_match_brute_force_for_all_free_sets(observed in random_node::node(4)) {
        compare_all(&tables(&observed));
    }

    /// The order of the lists, repetitions in them, and NVML's order of GPUs do not change the answer.
    #[test]
    fn answer_ignores_order_and_repetition(
        observed in random_node::node(8),
        available in vec(0..8_usize, 0..16),
        must in vec(0..8_usize, 0..3),
        size in 0..9_usize,
        shift in 0..8_usize,
    ) {
        let plain = tables(&observed);
        let gpus = plain.topology().gpus();
        let named = |list: &[usize]| -> Vec<DeviceId> {
            list.iter().filter_map(|at| gpus.get(*at)).map(|gpu| DeviceId::from(&gpu.uuid)).collect()
        };
        let (available, must) = (named(&available), named(&must));
        let answer = ask(&plain, available.clone(), must.clone(), size);

        let once = BTreeSet::from_iter(available.clone()).into_iter().collect();
        let must_once = BTreeSet::from_iter(must.clone()).into_iter().rev().collect();
        prop_assert_eq!(&ask(&plain, once, must_once, size), &answer);

        let mut rotated = observed.clone();
        rotated.gpus.rotate_left(shift % observed.gpus.len());
        let rotated = tables(&rotated);
        let backwards = available.iter().rev().cloned().collect();
        prop_assert_eq!(ask(&rotated, backwards, must, size), answer);
    }

    /// Unknown ids and impossible sizes are answered in sorted order, without a panic.
    #[test]
    fn unmeetable_request_is_answered_in_sorted_order(
        observed in random_node::node(8),
        available in vec(0..12_usize, 0..10),
        must in vec(0..12_usize, 0..4),
        size in prop_oneof![0..10_usize, Just(usize::MAX), Just(1 << 33)],
    ) {
        let tables = tables(&observed);
        let gpus = tables.topology().gpus();
        let named = |list: &[usize]| -> Vec<DeviceId> {
            let strange = |at: usize| ["", "GPU-", "GPU-04x", "\u{e9}\n"][at % 4].to_owned().into();
            list.iter().map(|at| gpus.get(*at).map_or_else(|| strange(*at), |gpu| DeviceId::from(&gpu.uuid))).collect()
        };
        let known = available.iter().chain(&must).all(|at| *at < gpus.len());
        let (available, must) = (named(&available), named(&must));
        let (answer, report) = ask(&tables, available.clone(), must.clone(), size);

        let all: BTreeSet<DeviceId> = available.into_iter().chain(must.clone()).collect();
        let first: BTreeSet<DeviceId> = must.into_iter().collect();
        let fits = first.len() <= size && size <= all.len();
        if known && fits {
            prop_assert_eq!(answer.devices.len(), size);
            prop_assert!(first.iter().all(|id| answer.devices.contains(id)));
            return Ok(());
        }
        let expected: Vec<DeviceId> = first.iter().chain(all.difference(&first)).take(size).cloned().collect();
        prop_assert_eq!(answer.devices, expected);
        let reason = if known { FallbackReason::Size } else { FallbackReason::UnknownDevice };
        prop_assert_eq!(report.fallback, Some(reason));
        prop_assert_eq!((report.values, report.runner_up), (None, None));
    }
}

#[test]
fn built_in_machines_match_brute_force() {
    let all = machines::built_in().map(|machine| built_in(machine.name));
    for tables in all.filter(|tables| tables.topology().gpus().len() <= 8) {
        compare_all(&tables);
    }
}

/// The indices of the chosen GPUs.
fn choice(machine: &str, available: &[usize], size: usize) -> Vec<u32> {
    let tables = built_in(machine);
    let gpus = tables.topology().gpus();
    let id = |index: &usize| gpus.iter().find(|gpu| gpu.index as usize == *index).unwrap();
    let available = available.iter().map(|index| DeviceId::from(&id(index).uuid)).collect();
    let (_, report) = ask(&tables, available, Vec::new(), size);
    report.devices.iter().map(|gpu| gpu.index).collect()
}

#[test]
fn known_machines_get_expected_choices() {
    for (case, machine, available, chosen) in [
        ("four of six GPUs on one side of the cube", "dgx1-v100", &[0, 1, 2, 3, 4, 5][..], &[0, 1, 2, 3][..]),
        ("two NVLinks across the sockets before one below a switch", "dgx1-v100", &[0, 1, 4], &[0, 4]),
        ("the pair that leaves four GPUs together", "dgx-h100", &[0, 1, 2, 3, 4, 5], &[4, 5]),
    ] {
        assert_eq!(choice(machine, available, chosen.len()), chosen, "{case}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, failure_persistence: None, ..ProptestConfig::default() })]

    /// Machines of 12 to 16 GPUs have a random graph of NVLinks over any host.
    #[test]
    fn machines_of_12_to_16_gpus_match_brute_force(
        observed in random_node::node_between(12, 16), seed in 1..u64::MAX,
    ) {
        sample(&tables(&observed), &mut Numbers(seed));
    }
}

/// Samples the requests to machines of more than eight GPUs, because all requests would take too long.
#[test]
fn large_machines_match_brute_force_on_samples() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let all = machines::built_in().map(|machine| built_in(machine.name));
    for tables in all.filter(|tables| tables.topology().gpus().len() > 8) {
        assert_eq!(tables.topology().gpus().len(), 16);
        sample(&tables, &mut numbers);
    }
}

/// Compares some answers on a machine of many GPUs: the values of given sets, and choices of a third of the free GPUs.
fn sample(tables: &AllocationTables, numbers: &mut Numbers) {
    let oracle = Oracle::new(tables.topology());
    let sets = 1 << tables.topology().gpus().len();
    for _ in 0..12 {
        let available = numbers.next(sets) | numbers.next(sets);
        let forced = available & numbers.next(sets);
        compare(tables, &oracle, available, forced, forced.count_ones());
    }
    for _ in 0..2 {
        let available = numbers.next(sets);
        compare(tables, &oracle, available, 0, available.count_ones() / 3);
    }
}

/// A generator (xorshift) of the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % u64::from(below)) as u32
    }
}
