//! The choice on machines of more than 16 GPUs: compared with the brute force if it claims to be exact, and checked
//! for the properties of every answer.

use std::sync::Arc;

use linkwise_core::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, ChosenGpu, DeviceId, GpuSet,
    preferred_allocation,
};
use linkwise_core::topology::{NodeObservation, NodeTopology};
use proptest::prelude::*;

use crate::oracle::{Oracle, Set};
use crate::{large_node, random_node};

fn tables(observed: &NodeObservation) -> AllocationTables {
    AllocationTables::new(Arc::new(NodeTopology::assemble(observed).0))
}

/// Checks the properties of every answer, and returns the report.
fn ask(tables: &AllocationTables, available: GpuSet, must: GpuSet, size: usize) -> AllocationReport {
    let gpus = tables.topology().gpus();
    let ids = |set: GpuSet| -> Vec<DeviceId> { set.places().map(|at| DeviceId::from(&gpus[at].uuid)).collect() };
    let request = AllocationRequest { available: ids(available), must_include: ids(must), size };
    let (answer, report) = preferred_allocation(tables, &request, AllocationPolicy::BestEffort);
    let turned = AllocationRequest {
        available: request.available.iter().rev().chain(&request.available).cloned().collect(),
        must_include: request.must_include.iter().rev().cloned().collect(),
        size,
    };
    let again = preferred_allocation(tables, &turned, AllocationPolicy::BestEffort);
    assert_eq!(again, (answer.clone(), report.clone()), "the order or a repeated id changed the answer");
    let possible = (must.len().max(1)..=must.union(available).len()).contains(&size);
    assert_eq!(report.fallback.is_none(), possible, "{report}");
    if possible {
        let taken = chosen(tables, &report.devices);
        assert_eq!(ids(taken), answer.devices, "not in the order of PCI addresses");
        assert_eq!(taken.len(), size, "{report}");
        assert!(must.without(taken).is_empty() && taken.without(must.union(available)).is_empty(), "{report}");
        assert_eq!(report.remains, available.without(taken), "{report}");
        if let Some(second) = &report.runner_up {
            assert_eq!(chosen(tables, &second.devices).len(), size, "{report}");
            assert_ne!(second.devices, report.devices);
        }
    }
    report
}

fn chosen(tables: &AllocationTables, gpus: &[ChosenGpu]) -> GpuSet {
    gpus.iter().map(|gpu| tables.topology().position(&gpu.uuid).unwrap()).collect()
}

/// Compares an answer with the brute force's if it claims to be exact, and returns that claim.
fn compare(tables: &AllocationTables, oracle: &Oracle<'_>, available: GpuSet, must: GpuSet, size: usize) -> bool {
    let report = ask(tables, available, must, size);
    if !report.exact {
        return false;
    }
    let [available, must] = [available, must].map(|set| set.0 as Set);
    let expected = oracle.choose(available, must, size as u32).unwrap();
    let question = format!("{size} of {available:b} with {must:b}: {report}, expected {expected:?}");
    assert_eq!(chosen(tables, &report.devices).0, u64::from(expected.chosen), "{question}");
    assert_eq!(report.values, Some(expected.values), "{question}");
    let second =
        report.runner_up.map(|second| (chosen(tables, &second.devices).0 as Set, second.values, second.lost_at));
    assert_eq!(second, expected.runner_up, "{question}");
    true
}

/// Picks `count` GPUs out of `gpus`, by a random number.
fn pick(gpus: usize, count: usize, mut number: u64) -> GpuSet {
    let mut set = GpuSet::default();
    while set.len() < count.min(gpus) {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        set = set.union(GpuSet::of((number >> 11) as usize % gpus));
    }
    set
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// If few GPUs are free, the answers are exact on any machine.
    #[test]
    fn random_machines_match_brute_force(
        observed in random_node::node_between(17, 20),
        requests in proptest::collection::vec((1..u64::MAX, 2..9_usize, 2..4_usize, any::<bool>()), 1..8),
    ) {
        let tables = tables(&observed);
        let oracle = Oracle::new(tables.topology());
        let gpus = tables.topology().gpus().len();
        for (number, count, size, forced) in requests {
            let available = pick(gpus, count, number);
            let must = if forced { pick(gpus, 1, number.rotate_left(9) | 1) } else { GpuSet::default() };
            if available.union(must).len() >= size {
                prop_assert!(compare(&tables, &oracle, available, must, size));
            }
        }
    }

    /// The machine is a tree, for which the answers are exact even if more GPUs are free.
    #[test]
    fn twenty_gpus_match_brute_force(
        requests in proptest::collection::vec((1..u64::MAX, 2..10_usize, 1..6_usize, 0..2_usize), 8),
    ) {
        let tables = tables(&large_node::twenty());
        let oracle = Oracle::new(tables.topology());
        for (number, count, size, forced) in requests {
            let available = pick(20, count, number);
            let must = pick(20, forced, number.rotate_left(9) | 1);
            // Fewer than eight stay free, because the brute force would take minutes for the machine's best eight.
            if available.union(must).len() >= size && size > forced && available.len() + forced < size + 8 {
                prop_assert!(compare(&tables, &oracle, available, must, size));
            }
        }
    }

    /// Every request to 20, 32 and 64 GPUs has an answer, which is the same for any order of the lists.
    #[test]
    fn every_request_has_an_answer(
        number in 1..u64::MAX, count in 0..65_usize, forced in 0..4_usize, size in 0..66_usize,
    ) {
        for (_, observed) in large_node::all() {
            let tables = tables(&observed);
            let gpus = tables.topology().gpus().len();
            let size = if size > gpus { size } else { size.max(1) };
            ask(&tables, pick(gpus, count, number), pick(gpus, forced, number.rotate_left(9) | 1), size);
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn requests_of_many_sizes_have_an_answer(observed in random_node::node_between(17, 20), number in 1..u64::MAX) {
        let tables = tables(&observed);
        let gpus = tables.topology().gpus().len();
        for size in [1, 2, 5, 8, 13, gpus] {
            ask(&tables, pick(gpus, 14, number), GpuSet::default(), size);
            ask(&tables, (0..gpus).collect(), pick(gpus, 2, number), size);
        }
    }
}

/// At least eight GPUs stay free, so the brute force also has to find the machine's best eight.
#[test]
fn seventeen_gpus_match_brute_force() {
    let mut observed = large_node::twenty();
    observed.gpus.truncate(17);
    let tables = tables(&observed);
    let oracle = Oracle::new(tables.topology());
    for (number, size) in [(0x2545_f491_4f6c_dd1d, 1), (0x9e37_79b9_7f4a_7c15, 2), (0x1234_5678_9abc_def1, 3)] {
        assert!(compare(&tables, &oracle, pick(17, 11, number), GpuSet::default(), size));
    }
}

fn choice(tables: &AllocationTables, available: impl IntoIterator<Item = usize>, size: usize) -> (Vec<u32>, bool) {
    let report = ask(tables, available.into_iter().collect(), GpuSet::default(), size);
    (report.devices.iter().map(|gpu| gpu.index).collect(), report.exact)
}

#[test]
fn single_gpu_breaks_no_group_and_eight_fill_one() {
    // All switches are whole but switch 1 of the first package, of which one GPU is used.
    let twenty = tables(&large_node::twenty());
    assert_eq!(choice(&twenty, (0..20).filter(|gpu| *gpu != 5), 1), (vec![4], true));
    // Any whole switch has four GPUs. A switch of the second package leaves the most pairs within a package.
    assert_eq!(choice(&twenty, 2..20, 4), (vec![12, 13, 14, 15], true));
    // Eight GPUs of the first package leave one switch of it and the second package. The eight of the second package
    // leave the first whole, with more pairs in it.
    assert_eq!(choice(&twenty, 0..20, 8), ((12..20).collect(), true));
    // A single GPU comes from a broken pair, and eight fill a package.
    let thirty_two = tables(&large_node::thirty_two());
    assert_eq!(choice(&thirty_two, (0..32).filter(|gpu| *gpu != 21), 1), (vec![20], true));
    assert_eq!(choice(&thirty_two, 4..32, 8), ((8..16).collect(), true));
    // A single GPU comes from a broken plane, and eight fill a plane.
    let sixty_four = tables(&large_node::sixty_four());
    assert_eq!(choice(&sixty_four, (0..64).filter(|gpu| *gpu != 17), 1), (vec![16], true));
    assert_eq!(choice(&sixty_four, 3..64, 8), ((8..16).collect(), true));
    assert_eq!(choice(&sixty_four, 0..64, 64).0.len(), 64);
    // Sixteen fill two planes of one package, although there are too many sets of sixteen to compare them all.
    let (sixteen, _) = choice(&sixty_four, 0..64, 16);
    assert!(sixteen == (0..16).collect::<Vec<_>>(), "{sixteen:?}");
}
